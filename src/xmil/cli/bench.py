"""`xmil bench`: the open benchmark of explanations."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _command
from xmil.core.errors import InputError
from xmil.core.text import listed

if TYPE_CHECKING:
    from xmil.bench import Request

SHOWN = 12  # changes that --compare prints


@_command.with_examples(
    "bench --suite evidence --quick",
    "bench --suite evidence --methods method.py:explain --out results",
)
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(help="evidence, tissue, confounder, faithfulness, or all; may be repeated."),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Rows: file.py:function, a Parquet file of scores, or a name such as lrp:paper."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model: file.py:builder, or a name; without any, the protocol's."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer bags and AttnMIL alone: minutes on a CPU.")
    ] = False,
    only: Annotated[
        bool,
        typer.Option(
            "--only", help="Measure only the given methods and the controls, none of the package's own."
        ),
    ] = False,
    task: Annotated[list[str] | None, typer.Option(help="Run only these tasks of the suites.")] = None,
    repetitions: Annotated[int | None, typer.Option(help="Models (or folds) per task.")] = None,
    seed: Annotated[int, typer.Option(help="Base seed of bags and models.")] = 0,
    data: Annotated[
        str, typer.Option(help="Digits: 'digits', 'onehot', an .npz file, or a folder of .npz or IDX files.")
    ] = "digits",
    tissue: Annotated[
        str,
        typer.Option(help="Class-labelled tissue images or a CAMELYON16 folder, instead of colon nuclei."),
    ] = "",
    patient: Annotated[
        str,
        typer.Option(
            help="How to tell the patient of an image: a regular expression for its file name, or 'folder'."
        ),
    ] = "",
    classes: Annotated[
        str, typer.Option(help="The tissue class to detect, and the one that is evidence against it: A,B.")
    ] = "",
    encoder: Annotated[
        str,
        typer.Option(help="Encoder of the tissue images, 'statistics' (of colours), or features (.npz)."),
    ] = "statistics",
    device: _command.Device = "cpu",
    minutes: Annotated[
        float | None, typer.Option(help="Start nothing new after this many minutes; the next call continues.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results; an interrupted run continues where it stopped.")
    ] = Path("bench-out"),
    export: Annotated[
        Path | None,
        typer.Option(help="Write bags and trained models to this folder, to be scored elsewhere."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Compare two folders of results, row by row, on the same bags."),
    ] = None,
    as_json: _command.Json = False,
) -> int:
    """Score explanation methods and models, ours and yours, on tasks whose answers are known.

    Writes results.json, bags.parquet and a page, index.html; without --suite, the page alone from the results
    in --out. The speed measurements are `make bench`.
    """
    if compare is not None:
        return _compare(*compare, as_json=as_json)
    from xmil.bench import Request
    from xmil.network import find_device
    from xmil.storage import RUN

    positive, _, against = classes.partition(",")
    cached = encoder if encoder.endswith(".npz") else ""
    request = Request(
        suites=tuple(suite or ()),
        methods=tuple(name for text in methods or () for name in listed(text)),
        models=tuple(model or ()),
        only=only,
        quick=quick,
        tasks=tuple(task or ()),
        repetitions=repetitions,
        seed=seed,
        data=data,
        device=find_device(device),
        minutes=minutes,
        tissue=tuple(
            {
                "source": tissue,
                "patient": patient,
                "positive": positive.strip(),
                "against": against.strip(),
                "encoder": "statistics" if cached else encoder,
                "features": cached,
            }.items()
        ),
    )
    if export is not None:
        return _export(request, out, export, as_json=as_json)
    if not suite and not (out / RUN).is_file():
        raise InputError("--suite is missing; name evidence, tissue, confounder, faithfulness or all.")
    done = _measure(request, out, as_json=as_json) if suite else True
    _report(out, request.methods, done=done, as_json=as_json)
    if not done and not as_json:
        print(f"Time is up; run the command again with the same --out to continue. So far: {out}.")
    return 0


def _measure(request: Request, out: Path, *, as_json: bool) -> bool:
    from rich.console import Console

    from xmil.bench import measure

    console = Console(stderr=True)
    with console.status("starting") as status:
        done, left_out = measure(request, out, lambda text, *_: status.update(text))
    for reason in left_out:
        print(f"Left out, {reason}", file=sys.stderr if as_json else None)
    return done


def _export(request: Request, out: Path, folder: Path, *, as_json: bool) -> int:
    from xmil.bench import export

    last = ""

    def say(text: str, *_: int) -> None:
        nonlocal last
        if text != last:
            print(text, file=sys.stderr if as_json else None)
        last = text

    paths = export(request, out, folder, say)
    if as_json:
        print(json.dumps({"out": str(folder), "sets": len(paths)}))
        return 0
    print(f"Wrote {len(paths)} sets of bags to {folder}, each with its model's weights.")
    return 0


def _report(out: Path, entered: Sequence[str] = (), *, done: bool, as_json: bool) -> None:
    from xmil.bench import PAGE, Folder, read_settings, write_report
    from xmil.storage import RunFolder

    with RunFolder(out, "bench", mixed=True).claim():
        summary = write_report(Folder(out), read_settings(out))
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
