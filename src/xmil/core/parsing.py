"""Texts that others wrote: JSON whose nesting may be too deep, numbers that may be too long."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError for whatever is wrong with it.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def parse_xml(text: str | bytes) -> ElementTree.Element:
    """The root of an XML text in UTF-8; ValueError for whatever is wrong with it.

    A document type is refused: its entities could blow the text up. So are other encodings, in which one
    could hide.

    >>> parse_xml(b"<a><b/></a>").tag
    'a'
    """
    plain = text if isinstance(text, str) else text.decode("utf-8-sig")
    if "\0" in plain:  # UTF-16, which the parser would know by itself
        raise ValueError("it is not in UTF-8")
    if "<!DOCTYPE" in plain or "<!ENTITY" in plain:
        raise ValueError("it has a document type")
    try:
        return ElementTree.fromstring(plain)  # noqa: S314 - no document type, so no entities
    except ElementTree.ParseError as error:
        raise ValueError(str(error)) from None


def small_number(text: str) -> int | None:
    """The number that a short text of digits stands for, else None.

    >>> small_number("12"), small_number("-1"), small_number("9" * 5000), small_number("²")
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
