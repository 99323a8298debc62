"""`xmil demo`: from digit slides to evidence, through the public commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for everything; an interrupted run continues where it stopped.")
    ] = Path("demo-out"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Few slides and little training: rough numbers, in less time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of bags and models.")] = 0,
) -> int:
    """Draw slides of digits, tile, embed, train, predict, explain, evaluate and draw them; write a report."""
    import time

    import torch

    from xmil.demo.pipeline import Demo, run_stages
    from xmil.demo.results_page import read_results, verdict, viewer_command, write_report

    torch.set_num_threads(1)  # small models: threads would wait for each other more than they work
    begin = time.perf_counter()
    made = Demo(out, quick=quick, seed=seed)
    made.prepare()
    from xmil.demo import stain_fields  # noqa: F401  # registers `digits` where the package is not installed

    log = out / "log.txt"
    timings = run_stages(made, lambda commands, side: _run(commands, side, log), _say)
    print("report ...", flush=True)
    report = write_report(made, timings)
    results = read_results(made)
    for r in results:
        scores = ", ".join(f"{method} {r.auprc2[method]:.2f}" for method in ("attention", "lrp"))
        print(f"{r.task:<15} {r.model:<9} test AUROC {r.auroc:.2f}   AUPRC-2: {scores}")
    print(verdict(results))
    print(f"Done in {time.perf_counter() - begin:.0f} s. Report: {report}")
    print(f"Viewer: {viewer_command(made)}")
    print("It opens http://127.0.0.1:8787/ (or the next free port) in your browser.")
    return 0


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _run(commands: Sequence[list[str]], side_by_side: bool, log: Path) -> list[int]:
    """One after another here, or in processes of their own, as many at once as there are cores."""
    from concurrent.futures import ThreadPoolExecutor

    at_once = min(len(commands), _cores())
    if not side_by_side or at_once < 2:
        return [_run_here(words, log) for words in commands]
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        return list(pool.map(lambda words: _run_apart(words, log), commands))


def _run_here(words: list[str], log: Path) -> int:
    from xmil.cli._app import run

    with log.open("a", encoding="utf-8") as stream, redirect_stdout(stream), redirect_stderr(stream):
        print(f"\n$ xmil {' '.join(words)}", flush=True)
        return run(words)


def _run_apart(words: list[str], log: Path) -> int:
    """What it prints goes to the log once it is done, so that two commands do not mix."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # small models: threads would wait more than they work
    command = [sys.executable, "-m", "xmil.cli", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  # our own program
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n$ xmil {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.returncode


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
