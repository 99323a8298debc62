"""What readers add to a run: annotations, in a file per slide and reader, and names that all readers share.

annotations/SLIDE/READER.geojson    a reader's annotations of a slide
annotations/names.json              readers' names of concepts, and the classes they added
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any
from unicodedata import category, is_normalized, normalize

from xmil.core.durable import write_text
from xmil.core.errors import FileError, InputError, WriteError, XmilError
from xmil.core.ledger import lock, opened
from xmil.core.text import is_plain
from xmil.storage import read_json, sweep_folder
from xmil.viewer.cache import Files

FOLDER, NAMES = "annotations", "names.json"
READER = r"[\p{L}\p{M}\p{N}_-]{1,40}"  # `is_reader` as a pattern for JavaScript and OpenAPI
MOST = 100_000  # annotations of one reader on one slide
DEEPEST = 64  # nested brackets; GeoJSON needs a dozen


class ConflictError(XmilError):
    """Another window or reader has changed the annotations; `stored` is the current version."""

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__("The annotations have changed elsewhere since they were read.")
        self.stored = stored


def is_reader(name: str) -> bool:
    """Whether a name is valid for a reader: letters of any script, digits, - and _; never a path.

    >>> [is_reader(name) for name in ("anna", "Zoë-2", "\u9ec4\u6653\u660e", "a b", "../x", "")]
    [True, True, True, False, False, False]
    """
    letters = all(category(letter)[0] in "LMN" or letter in "-_" for letter in name)
    return 1 <= len(name) <= 40 and letters and is_normalized("NFC", name)


def _text_of(document: dict[str, Any]) -> str:
    """Convert a document to the stored text; refuse one that could not be read back."""
    try:
        level: list[Any] = [document]
        for _ in range(DEEPEST):
            level = [inner for node in level for inner in (node.values() if isinstance(node, dict) else node)]
            level = [inner for inner in level if isinstance(inner, dict | list)]
        if level:
            raise ValueError(f"they are nested more than {DEEPEST} levels deep")
        json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    except ValueError as error:  # nan, half a character of UTF-16
        raise InputError(f"The annotations cannot be stored ({error}).") from None
    return json.dumps(document) + "\n"


class AnnotationFiles:
    """The annotations of a run's folder; read-only if the folder is."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lock = Lock()
        if self._folder.is_dir() and not self._folder.is_symlink():
            for partial in self._folder.glob("*/.*.part"):  # of servers that were killed
                with suppress(XmilError), alone(partial.parent):
                    pass

    def read(self, slide: str, reader: str) -> dict[str, Any]:
        """Read a reader's annotations of a slide, with their revision, and list the other readers."""
        path = self._path(slide, reader)
        stored = read_json(path) if path.is_file() and not path.is_symlink() else {}
        head = stored["xmil"] if isinstance(stored.get("xmil"), dict) else {}
        names = (normalize("NFC", file.stem) for file in path.parent.glob("*.geojson"))
        readers = sorted(name for name in names if is_reader(name))
        place = self._folder if self._folder.is_dir() else self._folder.parent
        return {
            "revision": head["revision"] if isinstance(head.get("revision"), int) else 0,
            "features": stored.get("features") if isinstance(stored.get("features"), list) else [],
            "origin": head.get("origin"),
            "readers": readers,
            "writable": os.access(place, os.W_OK),
        }

    def write(self, slide: str, reader: str, body: Any) -> dict[str, Any]:
        """Store a reader's annotations if their revision is the current one; return the new one."""
        path = self._path(slide, reader)
        body = body if isinstance(body, dict) else {}
        document, base = body.get("document"), body.get("revision")
        if not isinstance(document, dict) or not isinstance(document.get("features"), list):
            raise InputError('The body must be {"revision": 0, "document": {"features": [...]}}.')
        if isinstance(base, bool) or not isinstance(base, int) or base < 0:
            raise InputError("The revision must be a number from 0 up.")
        if len(document["features"]) > MOST:
            raise InputError(f"A reader can have {MOST:,} annotations on a slide; export them in parts.")
        head = document.get("xmil")
        about = {"slide": slide, "reader": reader, "revision": base + 1}
        document = {**document, "xmil": {**(head if isinstance(head, dict) else {}), **about}}
        text = _text_of(document)
        with self._lock, alone(path.parent):
            stored = self.read(slide, reader)
            if base != stored["revision"]:
                raise ConflictError(stored)
            write_text(path, text)
        return {"revision": base + 1}

    def _path(self, slide: str, reader: str) -> Path:
        if not is_reader(reader):
            raise InputError("A reader's name must be 1 to 40 letters, digits, '-' or '_'.")
        folder = self._folder / slide
        if not is_plain(slide) or self._folder.is_symlink() or folder.is_symlink():
            raise InputError("This slide's annotations cannot be stored: its name or folder leads elsewhere.")
        return folder / f"{reader}.geojson"


MOST_NAMES, LONGEST = 1000, 60  # names of a kind, and characters of a name


class RunNames:
    """Readers' names of a run's concepts, and the classes they added; the last change wins.

    Names of concepts belong to one dictionary of `xmil insight`; a new dictionary has no names yet.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / FOLDER / NAMES
        self._dictionary = run / "insight" / "dictionary.npz"
        self._digests = Files(lambda path: sha256(path.read_bytes()).hexdigest()[:16], limit=1)

    def read(self) -> dict[str, dict[str, Any]]:
        """Read the names; none if the file cannot be read."""
        try:
            stored = self._stored()
        except XmilError:
            stored = {"classes": {}, "concepts": {}}
        return {"classes": stored["classes"], "concepts": stored["concepts"].get(self._digest(), {})}

    def write(self, body: Any) -> dict[str, dict[str, Any]]:
        """Add names, or remove a concept's with an empty one; return all names."""
        body = body if isinstance(body, dict) else {}
        classes, concepts = (body.get(kind, {}) for kind in ("classes", "concepts"))
        if not isinstance(classes, dict) or not isinstance(concepts, dict) or not (classes or concepts):
            raise InputError(
                'The body must be {"classes": {"Mitosis": [95, 120, 0]}} or {"concepts": {"3": "Gland"}}.'
            )
        classes = {_name(name): _colour(colour) for name, colour in classes.items()}
        concepts = {_number(number): _name(name, empty=True) for number, name in concepts.items()}
        if self._path.parent.is_symlink():
            raise InputError("Names cannot be stored: the run's folder of annotations leads elsewhere.")
        with alone(self._path.parent):
            stored = self._stored()
            names = {**stored["concepts"].get(self._digest(), {}), **concepts}
            stored["classes"] |= classes
            stored["concepts"][self._digest()] = {number: name for number, name in names.items() if name}
            if max(len(stored["classes"]), len(names)) > MOST_NAMES:
                raise InputError(f"A run can have {MOST_NAMES:,} names of a kind.")
            write_text(self._path, json.dumps(stored) + "\n")
        return self.read()

    def _stored(self) -> dict[str, dict[str, Any]]:
        exists = self._path.is_file() and not self._path.is_symlink()
        stored = read_json(self._path) if exists else {}
        kinds = {kind: stored.get(kind, {}) for kind in ("classes", "concepts")}
        lists = [
            *kinds.values(),
            *(kinds["concepts"].values() if isinstance(kinds["concepts"], dict) else ()),
        ]
        if not all(isinstance(names, dict) for names in lists):
            raise FileError(f"{FOLDER}/{NAMES}: damaged; move it away and enter the names again.")
        return kinds

    def _digest(self) -> str:
        try:
            return self._digests.get(self._dictionary)
        except FileError:
            return ""


def _name(name: Any, *, empty: bool = False) -> str:
    text = name.strip() if isinstance(name, str) else "\n"
    if len(text) > LONGEST or not text.isprintable() or not (text or empty):
        raise InputError(f"A name must be 1 to {LONGEST} characters.")
    return text


def _number(number: str) -> str:
    if not number.isascii() or not number.isdigit() or len(number) > 6:
        raise InputError(f"There is no concept {number!r}; concepts have numbers.")
    return str(int(number))


def _colour(colour: Any) -> list[int]:
    if (
        not isinstance(colour, list)
        or len(colour) != 3
        or not all(type(c) is int and 0 <= c < 256 for c in colour)
    ):
        raise InputError("The colour of a class must be three numbers from 0 to 255.")
    return colour


@contextmanager
def alone(folder: Path, what: str = "Annotations cannot be stored in the run's folder") -> Iterator[None]:
    """Make the folder, lock out other servers, and remove partial files of killed ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with opened(folder / ".lock", os.O_RDWR | os.O_CREAT) as handle:
            lock(handle)
            sweep_folder(folder, below=True)
            yield
    except OSError as error:
        raise WriteError(f"{what} ({error.strerror}).") from None
