"""Annotations on disk: `annotations/<slide>/<reader>.geojson` in the run's folder, one file per reader.

Files are GeoJSON as QuPath reads it, in level-0 pixels from the origin that they name. Each carries a
revision: a reader that writes over a revision it has not seen is told of the conflict and nothing is lost.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from threading import Lock
from typing import Any

from xmil.core.errors import InputError, WriteError, XmilError
from xmil.core.names import is_plain
from xmil.core.storage import write_text
from xmil.viewer.kept import read_json

FOLDER = "annotations"
READER = re.compile(r"[A-Za-z0-9_-]{1,40}")
MOST = 100_000  # annotations of one reader on one slide


class ConflictError(XmilError):
    """Another window or reader has written since; `held` is what is there now."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__("The annotations were changed elsewhere since they were read.")
        self.held = held


class AnnotationFiles:
    """The annotations of a run's folder; read-only where the folder is."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lock = Lock()

    @property
    def writable(self) -> bool:
        """Whether annotations can be kept here."""
        place = self._folder if self._folder.is_dir() else self._folder.parent
        return os.access(place, os.W_OK) and not self._folder.is_symlink()

    def read(self, slide: str, reader: str) -> dict[str, Any]:
        """What a reader has drawn on a slide, with its revision, and who else has."""
        path = self._path(slide, reader)
        held = read_json(path) if path.is_file() and not path.is_symlink() else {}
        head = held.get("xmil")
        revision = head.get("revision") if isinstance(head, dict) else None
        return {
            "revision": revision if isinstance(revision, int) else 0,
            "features": held.get("features") if isinstance(held.get("features"), list) else [],
            "origin": head.get("origin") if isinstance(head, dict) else None,
            "readers": self._readers(slide),
            "writable": self.writable,
        }

    def write(self, slide: str, reader: str, given: Any) -> dict[str, Any]:
        """Keep a reader's annotations, if they were drawn over what is there; gives the new revision."""
        path = self._path(slide, reader)
        document, seen = _checked(given)
        with self._lock:
            held = self.read(slide, reader)
            if seen != held["revision"]:
                raise ConflictError(held)
            about = {"slide": slide, "reader": reader, "revision": seen + 1}
            head = document.get("xmil")
            document = {**document, "xmil": {**(head if isinstance(head, dict) else {}), **about}}
            self._make(path.parent)
            write_text(path, json.dumps(document) + "\n")
        return {"revision": seen + 1}

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"Annotations cannot be kept in the run's folder ({error.strerror}).") from None

    def _readers(self, slide: str) -> list[str]:
        folder = self._folder / slide
        if not folder.is_dir() or folder.is_symlink():
            return []
        return sorted(path.stem for path in folder.glob("*.geojson") if READER.fullmatch(path.stem))

    def _path(self, slide: str, reader: str) -> Path:
        if not READER.fullmatch(reader):
            raise InputError("A reader's name has 1 to 40 letters, digits, '-' or '_'.")
        folder = self._folder / slide
        if not is_plain(slide) or self._folder.is_symlink() or folder.is_symlink():
            raise InputError("Annotations of this slide cannot be kept: its name or folder leads elsewhere.")
        return folder / f"{reader}.geojson"


def _checked(given: Any) -> tuple[dict[str, Any], int]:
    """The GeoJSON document and the revision that it was drawn over."""
    document = given.get("document") if isinstance(given, dict) else None
    seen = given.get("revision") if isinstance(given, dict) else None
    if not isinstance(document, dict) or not isinstance(document.get("features"), list):
        raise InputError('The body must be {"revision": 0, "document": {"features": [...]}}.')
    if isinstance(seen, bool) or not isinstance(seen, int) or seen < 0:
        raise InputError("The revision must be a number from 0 up.")
    if len(document["features"]) > MOST:
        raise InputError(f"A reader can keep {MOST:,} annotations on a slide; export them in parts.")
    return document, seen
