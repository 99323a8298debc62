"""Reports as text: one block for each path; the failures of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xmil.runs.listener import grouped

FAILURES = 20  # on the screen; failures.csv has them all
_PARAMETER = re.compile(r"The '(mpp|patch_size|format|class_names|contexts|keep)' parameter of \w+")
_KEYWORD = re.compile(r"\b(mpp|patch_size|format|class_names|slide_mpp)=(?='|[ ,;.)]|$)")
_SHOWN = 200  # rows of a folder's table
_COLUMNS = ("file", "format", "instances", "width", "size", "stored as", "encoder", "patch edge", "mpp")


def as_text(report: dict[str, Any]) -> str:
    """A report in lines: what it is, its facts, what was inferred, what is missing, what is wrong."""
    if "error" in report:
        return f"xmil: error: {' '.join(report['error'].split())}"
    lines = [f"{report['path']}: {report['what']}"]
    if report["rows"]:
        lines += _table(list(report["rows"]))
    lines += [f"  {name:<16} {_value(value)}" for name, value in report["facts"].items() if value is not None]
    for title in ("inferred", "missing", "problems"):
        lines += [f"  {title.rstrip('s'):<16} {as_options(sentence)}" for sentence in report[title]]
    return "\n".join(lines)


def print_failures(failed: Mapping[str, str]) -> None:
    """A line for each reason, with the slides that failed for it."""
    lines = grouped(failed) if failed else []
    for line in lines[:FAILURES]:
        names, _, reason = line.partition(": ")
        print(f"{names}: failed: {as_options(reason)}")
    if len(lines) > FAILURES:
        print(f"... and {len(lines) - FAILURES} more reasons; failures.csv has them all.")


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = [name for name in _COLUMNS if any(name in row for row in rows)]
    cells = [[_cell(row.get(name)) for name in names] for row in rows[:_SHOWN] if "error" not in row]
    widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [names, *cells]
    ]
    lines += [f"  {row['file']}: {row['error']}" for row in rows[:_SHOWN] if "error" in row]
    return lines + ([f"  ... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else [])


def as_options(sentence: str) -> str:
    """Python's parameters by their names on the command line.

    >>> as_options("The 'patch_size' parameter of read_bag must be positive; pass format= to force one.")
    '--patch-size must be positive; pass --format to force one.'
    """
    sentence = sentence.replace(" permutations=", " --param shapley.permutations=")
    named = _PARAMETER.sub(lambda found: f"--{found[1].replace('_', '-')}", sentence)
    return _KEYWORD.sub(lambda found: f"--{found[1].replace('_', '-')}", named)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " x ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(
            " x ".join(map(_value, item)) if isinstance(item, list) else _value(item) for item in value
        )
    return str(value)
