"""Results as committed files: benchmarks/results/SUBJECT.json, which docs/results_page.py makes a page of.

A benchmark with one table takes `--record FILE` and calls `write_results`. Text in columns, rows and notes is
Markdown, and links in it start in docs/.
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path


def write_results(
    path: str | Path,
    *,
    title: str,
    question: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    note: str = "",
    command: str | None = None,
    machine: str | None = None,
    date: str | None = None,
) -> None:
    """Write one table with what is needed to make it again; today, here and this command by default."""
    short = [row for row in rows if len(row) != len(columns)]
    if short:
        raise ValueError(f"Every row must have {len(columns)} cells. Got {short[0]} instead.")
    results = {
        "title": title,
        "question": question,
        "date": date or datetime.date.today().isoformat(),
        "machine": machine or machine_name(),
        "command": command or command_line(),
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "note": note,
    }
    Path(path).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def command_line() -> str:
    """This process as a command, without the option to record it."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name if spec else f"benchmarks.{Path(sys.argv[0]).stem}"
    words, record = [], False
    for word in sys.argv[1:]:
        if not record and not word.startswith("--record"):
            words.append(word)
        record = word == "--record"
    return " ".join(["python -m", module.removesuffix(".__main__"), *words])


def machine_name(device: str = "cpu") -> str:
    """The processor or GPU, and torch's version."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    threads = "" if device == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}"
