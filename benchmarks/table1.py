"""Table 1 by the referee on a machine that has torch and little else, a process for each column.

    python benchmarks/table1.py --data FEATURES --device cuda --out DIR

fills DIR with `units/` and `models/` as `xmil bench --suite evidence` does, from a folder of its own for each
column, DIR.columns; a second call goes on where the first one stopped. Afterwards, on a machine with the
package's dependencies, `xmil bench --out DIR` writes the page and its `results.json`, and
`python -m benchmarks.table1 --out DIR --record FILE` the table of it for the page of results.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from xmil.bench import PAPER_MODELS, PAPER_TASKS, measure, settings_of
from xmil.core.durable import write_bytes
from xmil.runs.requests import BenchRequest
from xmil.storage import make_folder, open_folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS))
    parser.add_argument("--models", default=",".join(PAPER_MODELS))
    parser.add_argument("--alone", action="store_true", help="all in this process")
    parser.add_argument("--record", metavar="FILE", help="write the table of --out's results.json, no more")
    options = parser.parse_args()
    if options.data is None and options.record is None:
        parser.error("--data names the features of the digits")
    return options


def in_processes(options: argparse.Namespace) -> None:
    """One process for each column: kernels of small models leave most of a GPU idle.

    A folder takes one writer, so that every column has its own, and the folder of all collects them.
    """
    parts = options.out.with_name(f"{options.out.name}.columns")
    running = {}
    for model, task in product(options.models.split(","), options.tasks.split(",")):
        own = [
            *sys.argv,
            "--alone",
            "--models",
            model,
            "--tasks",
            task,
            "--out",
            str(parts / f"{model}-{task}"),
        ]
        running[model, task] = subprocess.Popen([sys.executable, *own])  # noqa: S603
    failed = [column for column, process in running.items() if process.wait()]
    with open_folder(options.out, "bench", settings_of(request_of(options)), compared=False):
        for file in sorted([*parts.glob("*/units/*.npz"), *parts.glob("*/models/*.safetensors")]):
            make_folder(options.out / file.parent.name)
            write_bytes(options.out / file.parent.name / file.name, file.read_bytes())
    if failed:
        sys.exit(f"These columns failed: {failed}")


def request_of(options: argparse.Namespace) -> BenchRequest:
    return BenchRequest.build(
        suite="evidence",
        model=options.models,
        task=options.tasks,
        quick=options.quick,
        repetitions=options.repetitions,
        data=options.data,
        device=options.device,
        minutes=options.minutes,
        out=options.out,
    )


COMMAND = "benchmarks/table1.sh FEATURES OUT bench\nxmil bench --out BENCH"
TITLES = {"four_bags": "4-Bags", "pos_neg_count": "Pos-Neg", "adjacent_pairs": "Adjacent"}
MODELS = {"attnmil": "AttnMIL", "transmil": "TransMIL", "addmil": "AddMIL"}
NONE = "\N{EN DASH}"
LEFT_OUT = ("oracle", "constant", "lrp_flipped")


def record(summary: dict[str, Any], path: str, *, note: str = "", date: str | None = None) -> None:
    """Write AUPRC-2 by method and column, the paper's figures in italics, for the page of results."""
    from benchmarks.record import write_results
    from xmil.core.explanation import CARDS

    by_name = {(c["problem"], c["model"]): c for c in summary["suites"][0]["columns"]}
    columns = [by_name[task, model] for task in TITLES for model in MODELS]
    cells = [{row["method"]: row["cells"]["auprc2"] for row in column["rows"]} for column in columns]
    aurocs = [list(column["auroc"].values()) for column in columns]
    rows = [["test AUROC", *(f"{sum(each) / len(each):.3f}" for each in aurocs)]]
    methods = {method for each in cells for method in each if method not in LEFT_OUT}
    for base in (name for name in CARDS if name in methods):
        group = [base, *sorted(m for m in methods if m.startswith(f"{base}:"))]
        rows += [[method, *(_cell(each, method, methods) for each in cells)] for method in group]
        papers = [next((each[m]["paper"] for m in group if m in each), None) for each in cells]
        if any(papers):
            rows.append(["*the paper*", *(f"*{paper:.2f}*" if paper else NONE for paper in papers)])
    place = (summary.get("measured") or [summary])[0]
    write_results(
        path,
        title="Table 1: digits with known evidence",
        question="AUPRC-2: how well do scores rank the patches that speak for a class and against it?",
        columns=["", *(f"{task} {model}" for task in TITLES.values() for model in MODELS.values())],
        rows=rows,
        note=note,
        command=COMMAND,
        machine=f"{place.get('device') or place['system']}, torch {place['versions']['torch']}",
        date=date,
    )


def _cell(cells: dict[str, dict[str, Any]], method: str, methods: set[str]) -> str:
    """The mean of a method in a column; the best is bold."""
    if method not in cells:
        return NONE
    best = max(cells[m]["estimate"] for m in methods if m in cells)
    text = f"{cells[method]['estimate']:.3f}"
    return f"**{text}**" if cells[method]["estimate"] == best else text


def main() -> None:
    options = arguments()
    if options.record:
        record(json.loads((options.out / "results.json").read_text(encoding="utf-8")), options.record)
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    if not options.alone:
        in_processes(options)
        print(f"The whole table: {time.perf_counter() - started:.0f} s on {options.device}.")
        return
    done, _ = measure(request_of(options), options.out)
    name = f"{options.models}, {options.tasks}"
    print(f"{name}: {time.perf_counter() - started:.0f} s{'' if done else ', not done yet'}", flush=True)


if __name__ == "__main__":
    main()
