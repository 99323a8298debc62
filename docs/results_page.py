"""Write the page of results anew from benchmarks/results/*.json: `python docs/results_page.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
PAGE = Path(__file__).with_name("results.md")
ORDER = (
    "table1",
    "published",
    "rules",
    "quick",
    "tissue",
    "foreign-models",
    "demo",
    "speed",
    "scale",
    "reliability",
)
KEYS = ("title", "question", "date", "machine", "command", "columns", "rows", "note")
INTRO = """# Results

Every table here is a committed file, `benchmarks/results/SUBJECT.json`, with its command, machine and day.
The [studies](studies/better-rule.md) ask one question each and tell more.
[Enter the open benchmark](howto/benchmark.md) explains its tasks and measures.
"""


def results_files() -> list[Path]:
    """The files of results, in the order of the page; those it does not name come last."""
    names = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
    first = [name for name in ORDER if name in names]
    return [names[name] for name in (*first, *(name for name in names if name not in ORDER))]


def results_page() -> str:
    """All results as one Markdown page."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in results_files()]
    return "\n".join([INTRO, *map(section, parts)])


def section(results: dict[str, Any]) -> str:
    """One table under its question, with command, machine and date."""
    columns = results["columns"]
    table = [columns, ["---"] * len(columns), *results["rows"]]
    lines = [
        f"## {results['title']}",
        "",
        results["question"],
        "",
        *(f"| {' | '.join(row)} |" for row in table),
        "",
        f"Measured on {results['date']}. Machine: {results['machine']}.",
        "",
        "```sh",
        results["command"],
        "```",
        "",
    ]
    return "\n".join([*lines, results["note"], ""] if results["note"] else lines)


if __name__ == "__main__":
    PAGE.write_text(results_page(), encoding="utf-8")
