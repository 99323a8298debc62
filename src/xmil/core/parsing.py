"""Texts that others wrote: JSON whose nesting may be too deep, numbers that may be too long."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError for whatever is wrong with it.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def small_number(text: str) -> int | None:
    """The number that a short text of digits stands for, else None.

    >>> small_number("12"), small_number("-1"), small_number("9" * 5000), small_number("²")
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
