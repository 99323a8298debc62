"""The budget of the tree: files, lines and statements of each room, in budget.csv. It only goes down.

`python -m tests.budget` compares; `--write` makes today's figures the budget, if the tree as a whole has not
grown. A number that must go up is raised by hand in budget.csv, with the reason beside it.
"""

from __future__ import annotations

import ast
import csv
import sys
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "xmil"
TABLE = Path(__file__).with_name("budget.csv")
DOOR = "xmil"  # the files beside the rooms


@dataclass(frozen=True)
class Figures:
    """The size of a room."""

    files: int = 0
    lines: int = 0
    statements: int = 0

    def __add__(self, other: Figures) -> Figures:
        return Figures(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def above(self, budget: Figures, *, share: float = 0.0, files: int = 0) -> list[str]:
        """Where these figures exceed a budget by more than a share of it, and so many files."""
        lines = []
        for name, size, most in zip(NAMES, astuple(self), astuple(budget), strict=True):
            if size > most * (1 + share) + (files if name == "files" else 0):
                lines.append(f"{size} {name} instead of {most}")
        return lines


NAMES = [field.name for field in fields(Figures)]


def measure() -> dict[str, Figures]:
    """Each room as it is."""
    rooms: dict[str, Figures] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        inside = path.relative_to(SOURCE).parts
        room = inside[0] if len(inside) > 1 else DOOR
        text = path.read_text(encoding="utf-8")
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
        rooms[room] = rooms.get(room, Figures()) + Figures(1, text.count("\n"), statements)
    return rooms


def read() -> tuple[dict[str, Figures], dict[str, str]]:
    """The budget of each room, and why it was raised, where it was."""
    with TABLE.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    sizes = {row["room"]: Figures(*(int(row[name]) for name in NAMES)) for row in rows}
    return sizes, {row["room"]: row["reason"] for row in rows}


def total(rooms: Mapping[str, Figures]) -> Figures:
    """All rooms together."""
    return sum(rooms.values(), Figures())


def write(rooms: Mapping[str, Figures], reasons: Mapping[str, str]) -> None:
    """The table, a line for each room."""
    with TABLE.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["room", *NAMES, "reason"])
        writer.writerows(
            [room, *astuple(size), reasons.get(room, "")] for room, size in sorted(rooms.items())
        )


def main(arguments: list[str]) -> int:
    """Print the rooms that differ from their budget; with --write, make today's figures the budget."""
    rooms = measure()
    budget, reasons = read()
    for room in sorted(rooms.keys() | budget.keys()):
        now, most = rooms.get(room, Figures()), budget.get(room, Figures())
        if now != most:
            print(f"{room}: {astuple(now)} of {astuple(most)} files, lines, statements")
    over = total(rooms).above(total(budget))
    print(f"all rooms: {astuple(total(rooms))} of {astuple(total(budget))}")
    if over:
        print(f"The tree is above its budget ({'; '.join(over)}): raise a number by hand, with the reason.")
    elif "--write" in arguments:
        write(rooms, reasons)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
