"""Texts: untrusted JSON, TOML and XML, numbers, names of slides, lists, plain tables."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

from xmil.core.budget import check_regular
from xmil.core.errors import FileError, InputError, unreadable
from xmil.core.quoting import csv_cell

LONGEST_TOML = 1 << 18  # bytes of a settings file; those written by hand have a few thousand
DEEPEST_TOML = 8  # parts of a key and brackets around a value; settings need three
NAMED_SLIDES = 3  # in a line about several
SLIDE_SUFFIXES: tuple[str, ...] = (
    *(".svs", ".ndpi", ".mrxs", ".scn", ".tif", ".tiff", ".bif", ".vms", ".vmu", ".svslide", ".dcm"),
    *(".qptiff", ".png", ".jpg", ".jpeg", ".ome.tif", ".ome.tiff", ".czi", ".isyntax"),
)


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; raise ValueError if anything is wrong with it.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings: the keys are dotted names.

    >>> flatten({"seed": 0, "optim": {"lr": 0.1}})
    {'seed': 0, 'optim.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def is_utf8(name: str) -> bool:
    """Whether a name is valid UTF-8; file names may contain any bytes.

    >>> is_utf8("Ärzte"), is_utf8(b"s\\xff".decode(errors="surrogateescape"))
    (True, False)
    """
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text; raise ValueError if anything is wrong with it, or if it is long or nested deeply.

    The parser stores every beginning of a dotted key: without a limit, 100 kB of dots take 10 GB.

    >>> parse_toml("train.lr = 1e-3")
    {'train': {'lr': 0.001}}
    """
    if len(text) > LONGEST_TOML:
        raise ValueError(f"it is longer than {LONGEST_TOML >> 10} KiB")
    brackets, parts = 0, 1
    for symbol in _TOML_SYMBOL.findall(text):
        if symbol == ".":
            parts += 1
        elif symbol in _TOML_BETWEEN_KEYS:
            parts = 1
            brackets += (symbol in "[{") - (symbol in "]}")
        if brackets > DEEPEST_TOML or parts > DEEPEST_TOML:
            raise ValueError(f"its keys or brackets are nested more than {DEEPEST_TOML} deep")
    return tomllib.loads(text)


_TOML_SYMBOL = re.compile(
    r"""
    \"{3} (?: [^"\\] | \\. | "(?!"") )*+ "{3,5}    # texts of several lines
    | '{3} (?: [^'] | '(?!'') )*+ '{3,5}
    | " (?: [^"\\\n] | \\. )*+ "                   # texts of one line
    | ' [^'\n]*+ '
    | \# [^\n]*+
    | [][{}.=,\n]
    """,
    re.VERBOSE | re.DOTALL,
)
_TOML_BETWEEN_KEYS = frozenset("[]{}=,\n")


def read_toml(path: str | PathLike[str], *, way: str) -> dict[str, Any]:
    """Read a settings file; the error for an invalid one names the way out."""
    try:
        check_regular(path)
        with open(path, "rb") as stream:
            content = stream.read(LONGEST_TOML + 1)
        if len(content) > LONGEST_TOML:
            raise ValueError(f"it is longer than {LONGEST_TOML >> 10} KiB")
        return parse_toml(content.decode())
    except OSError as error:
        raise FileError(unreadable(path, error)) from None
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"{path}: not a valid TOML file ({error}); {way}.") from None


def parse_toml_value(text: str) -> Any:
    """Parse a TOML value; anything else is text, so that quotes are optional.

    >>> [parse_toml_value(text) for text in ("1e-3", "adam", "[1, 2]", "true")]
    [0.001, 'adam', [1, 2], True]
    """
    try:
        return parse_toml(f"x = {text}")["x"]
    except ValueError:
        return text


def parse_xml(text: str | bytes) -> ElementTree.Element:
    """Parse an XML text in UTF-8 and return its root; raise ValueError if anything is wrong with it.

    A document type is refused, because its entities could expand without limit. So are other encodings, which
    could hide one.

    >>> parse_xml(b"<a><b/></a>").tag
    'a'
    """
    plain = text if isinstance(text, str) else text.decode("utf-8-sig")
    if "\0" in plain:  # UTF-16, which the parser would detect
        raise ValueError("it is not in UTF-8")
    if "<!DOCTYPE" in plain or "<!ENTITY" in plain:
        raise ValueError("it has a document type")
    try:
        return ElementTree.fromstring(plain)  # noqa: S314 - no document type, so no entities
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from None


def small_number(text: str) -> int | None:
    """Convert a short text of digits to a number, else None.

    >>> small_number("12"), small_number("-1"), small_number("9" * 5000), small_number("²")
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def name_class(cell: str | None, names: Sequence[str]) -> str | None:
    """Name a class if a table only has its number; None for an empty cell.

    >>> name_class("1", ("neg", "pos")), name_class("pos", ("neg", "pos")), name_class("", ("neg", "pos"))
    ('pos', 'pos', None)
    """
    at = None if not cell or cell in names else small_number(cell)
    return names[at] if at is not None and at < len(names) else cell or None


def read_truth(cell: object) -> bool | None:
    """Read a cell that is true or false; None for anything else.

    >>> read_truth("True"), read_truth("0"), read_truth(None)
    (True, False, None)
    """
    return {"true": True, "1": True, "false": False, "0": False}.get(str(cell).strip().lower())


def bare_name(slide_id: str) -> str:
    """Remove the image suffix from a slide's name; refuse names that could leave a folder.

    >>> bare_name("a.b.svs"), bare_name("a.b")
    ('a.b', 'a.b')
    """
    if not is_plain(slide_id):
        raise InputError(f"The slide name {slide_id!r} must not hold a path or '..'; give the bare name.")
    suffixes = (suffix for suffix in SLIDE_SUFFIXES if slide_id.lower().endswith(suffix))
    return slide_id[: len(slide_id) - max(map(len, suffixes), default=0)]


def is_plain(name: str) -> bool:
    """Whether a name stays in its folder: no separators, no `..`, no zero byte."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}


def counted(n: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "slide"), counted(0, "slide"), counted(1200, "patch")
    ('1 slide', '0 slides', '1,200 patches')
    """
    ending = "" if n == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{n:,} {noun}{ending}"


def listed(names: str | Iterable[str] | None) -> list[str]:
    """Split a text at commas, or a list, into different parts; "none" is an empty list.

    >>> listed("lrp, ig,lrp"), listed(("lrp", "ig")), listed("none"), listed(None)
    (['lrp', 'ig'], ['lrp', 'ig'], [], [])
    """
    if names == "none":
        return []
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def shorten(names: Sequence[str], most: int, *, comma: str = ",") -> str:
    r"""Write the first of many names, and how many more there are, in one line.

    >>> shorten(["a", "b", "c"], 2), shorten(["a"], 2), shorten(["a, b", "c"], 1, comma=";")
    ('a, b and 1 more', 'a', 'a, b; and 1 more')
    >>> shorten(["a\nb"], 2)
    'a\\nb'
    """
    shown = [name if name.isprintable() else repr(name)[1:-1] for name in names[:most]]
    more = f"{comma.strip(',')} and {len(names) - most} more" if len(names) > most else ""
    return f"{f'{comma} '.join(shown)}{more}"


def text_table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    r"""Write rows of cells as lines of text, with columns two spaces apart.

    >>> text_table([["method", "AUPC"], ["lrp", "0.2"]])
    'method  AUPC\nlrp     0.2'
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in rows
    )


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Write rows of cells as a Markdown table.

    >>> markdown_table(["method", "AUPC"], [["lrp", "0.2"]])
    '| method | AUPC |\n|---|---|\n| lrp | 0.2 |'
    """
    quoted = [[" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in quoted]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def csv_text(head: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    r"""Write rows of cells as CSV; None is an empty cell, and names that look like formulas are quoted.

    >>> csv_text(["method", "AUPC"], [["lrp", 0.2]])
    'method,AUPC\nlrp,0.2\n'
    """
    lines: list[str] = []
    stream = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n"))
    writer = csv.writer(stream, lineterminator="\r\n")  # it puts cells with one of these in double quotes
    writer.writerows(map(csv_cell, row) for row in (head, *rows))
    return "".join(lines)


def merge_notes(notes: Mapping[str, str]) -> list[str]:
    """Merge identical notes into one line each, with the slides they are on.

    >>> merge_notes({"a": "a.svs: blank", "b": "b.svs: blank", "c": "mpp given"})
    ['a, b: a.svs: blank', 'c: mpp given']
    """
    by_note: dict[str, list[str]] = {}
    for name, note in notes.items():
        pattern = rf"(?<!\w){re.escape(name)}(?!\w)"  # not inside a longer word
        by_note.setdefault(re.sub(pattern, "\0", note), []).append(name)
    return [f"{shorten(names, NAMED_SLIDES)}: {notes[names[0]]}" for names in by_note.values()]
