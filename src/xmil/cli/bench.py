"""`xmil bench`: the open benchmark of explanations."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, progress_bars
from xmil.core.errors import InputError
from xmil.runs.requests import BenchRequest

PAPER = "paper"  # the suite of the paper's Table 1
SHOWN = 12  # changes that --compare prints


@with_examples(
    "bench --suite evidence --methods method.py:explain --out results",
    "bench --suite paper --quick",
)
@command(BenchRequest)
def bench(request: BenchRequest, screen: Screen) -> int:
    """Score explanation methods and models, ours and yours, on tasks whose answers are known.

    Writes results.json, bags.parquet and a page, index.html; without --suite, the page alone from the results
    in --out. `--suite paper` writes the paper's Table 1 as text, CSV, Markdown and LaTeX. The speed
    measurements are `make bench`.
    """
    from xmil.network import find_device
    from xmil.storage import RUN

    if request.compare is not None:
        return _compare(*request.compare, as_json=screen.as_json)
    request = request.replace(device=find_device(request.device))
    if PAPER in request.suite:
        return _paper(request, screen)
    if request.export is not None:
        return _export(request, request.export, as_json=screen.as_json)
    out = request.out
    if not request.suite and not (out / RUN).is_file():
        raise InputError("--suite is missing; name evidence, tissue, confounder, faithfulness, all or paper.")
    done = _measure(request, as_json=screen.as_json) if request.suite else True
    _report(out, request.methods, done=done, as_json=screen.as_json)
    if not done and not screen.as_json:
        print(f"Time is up; run the command again with the same --out to continue. So far: {out}.")
    return 0


def _paper(request: BenchRequest, screen: Screen) -> int:
    """Measure and print the paper's Table 1."""
    from xmil.bench.paper import measure_table1

    if len(request.suite) > 1:
        raise InputError("--suite paper has tables of its own; run the other suites in a further call.")
    with ExitStack() as stack:
        progress = progress_bars()
        bar = progress.add_task("", total=None)

        def say(text: str, done: int, total: int) -> None:
            if not progress.live.is_started:  # the request has been checked
                stack.enter_context(progress)
            progress.update(bar, description=text, completed=done, total=total or None)

        table = measure_table1(request, say)
    if screen.as_json:
        print(json.dumps(table.report, indent=2))
        return 0
    print(table.text)
    for sentence in table.notes:
        print(sentence)
    return 0


def _measure(request: BenchRequest, *, as_json: bool) -> bool:
    from rich.console import Console

    from xmil.bench import measure

    console = Console(stderr=True)
    with console.status("starting") as status:
        done, left_out = measure(request, request.out, lambda text, *_: status.update(text))
    for reason in left_out:
        print(f"Left out, {reason}", file=sys.stderr if as_json else None)
    return done


def _export(request: BenchRequest, folder: Path, *, as_json: bool) -> int:
    from xmil.bench import export

    last = ""

    def say(text: str, *_: int) -> None:
        nonlocal last
        if text != last:
            print(text, file=sys.stderr if as_json else None)
        last = text

    paths = export(request, request.out, folder, say)
    if as_json:
        print(json.dumps({"out": str(folder), "sets": len(paths)}))
        return 0
    print(f"Wrote {len(paths)} sets of bags to {folder}, each with its model's weights.")
    return 0


def _report(out: Path, entered: Sequence[str] = (), *, done: bool, as_json: bool) -> None:
    from xmil.bench import PAGE, read_settings, write_report
    from xmil.storage import claim_folder

    with claim_folder(out, "bench"):
        summary = write_report(out, read_settings(out))
    if as_json:
        print(json.dumps({**summary, "finished": done, "page": str(out / PAGE)}, indent=2, default=str))
        return
    for suite in summary["suites"]:
        print(f"\n{suite['title']}")
        for column in suite["columns"]:
            lead = column["verdicts"][0]["sentence"] if column["verdicts"] else column["status"]
            print(f"  {column['problem']}, {column['model']}: {lead}")
            for line in _entered_scores(column, entered):
                print(f"    {line}")
        failed = [check for check in suite["controls"] if not check["passed"]]
        passed = len(suite["controls"]) - len(failed)
        print(f"  The suite's self-checks: {passed} of {len(suite['controls'])} hold.")
        for check in failed:
            print(f"    fails: {check['what']} ({check['detail']})")
    print(f"\nWritten to {out / PAGE}.")


def _entered_scores(column: dict[str, Any], entered: Sequence[str]) -> list[str]:
    """Write a line for each entered method: its score by the leading measure, and its rank."""
    measure = column["verdicts"][0]["measure"] if column["verdicts"] else None
    parts = [name.rpartition(":") for name in entered]  # mine.py:score has the row mine:score
    own = {f"{Path(file).stem}:{function}" if file else Path(function).stem for file, _, function in parts}
    names = {*entered, *own}
    lines = []
    for row in column["rows"]:
        cell = row["cells"].get(measure) if row["method"] in names else None
        if cell is not None and cell["estimate"] is not None:
            rank = f", rank {cell['place']} of {len(column['rows'])}" if cell["place"] else ""
            lines.append(f"{row['method']}: {measure} {cell['estimate']:.3f}{rank}")
    return lines


def _compare(first: Path, second: Path, *, as_json: bool) -> int:
    from xmil.bench import compare_runs
    from xmil.evaluate.statistics import SMALLEST

    changes = compare_runs(first, second)
    if as_json:
        print(json.dumps([asdict(change) for change in changes], indent=2, default=str))
        return 0
    sure = [c for c in changes if c.sure]
    unpaired = [c for c in changes if c.difference is None]
    criterion = f"95 % paired interval without zero, {SMALLEST:g} or more"
    print(f"{len(changes)} figures in both runs; {len(sure)} differ ({criterion}).")
    for c in sorted(sure, key=lambda c: -abs(c.difference.estimate if c.difference else 0.0))[:SHOWN]:
        where = f"{c.suite}, {c.problem}, {c.model}, {c.method}, {c.measure}"
        print(f"  {where}: {c.first:.3f} to {c.second:.3f}, {c.difference}")
    if len(sure) > SHOWN:
        print(f"  and {len(sure) - SHOWN} more.")
    for reason in dict.fromkeys(f"{c.suite}, {c.problem}, {c.model}: {c.reason}" for c in unpaired):
        print(f"  Not paired: {reason}.")
    return 0
