"""TOML out: the standard library reads it and does not write it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(content: Mapping[str, Any]) -> str:
    """Settings as TOML: plain values first, then one table for each mapping.

    >>> print(dumps({"task": "cox", "optim": {"lr": 0.001, "name": "sgd"}}))
    task = "cox"
    <BLANKLINE>
    [optim]
    lr = 0.001
    name = "sgd"
    <BLANKLINE>
    """
    top = [f"{_key(k)} = {_value(v)}" for k, v in content.items() if not isinstance(v, Mapping)]
    parts = ["\n".join(top)] if top else []
    for name, table in content.items():
        if isinstance(table, Mapping):
            lines = [f"[{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items())]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def parse_value(text: str) -> Any:
    """A value as TOML reads it; what is no TOML value is text, so that quotes can be left out.

    >>> parse_value("1e-3"), parse_value("adam"), parse_value("[1, 2]"), parse_value("true")
    (0.001, 'adam', [1, 2], True)
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)
