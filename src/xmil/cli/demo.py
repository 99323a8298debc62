"""`xmil demo`: from slides of digits, or of tissue, to evidence, through the public commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.core.interpreter import python_command, python_environment
from xmil.core.request import Request, option

if TYPE_CHECKING:
    from xmil.demo.pipeline import Demo, Timing
    from xmil.demo.tissue import TissueDemo

Say = Callable[[str], None]


class DemoRequest(Request):
    """Run the whole way on drawn slides."""

    out: Path = option(
        "Folder for everything; an interrupted run continues where it stopped.", Path("demo-out")
    )
    quick: bool = option("Few slides and little training: rough numbers, in less time.", False)
    tissue: bool = option("Drawn tissue with tumour, lymphocytes and pen marks; no digits.", False)
    images: Path | None = option(
        "With --tissue: a folder of your H&E pictures and nuclei.csv (image, cell, x, y).", None
    )
    seed: int = option("Seed of bags and models.", 0)


@with_examples("demo", "demo --tissue --out tissue-demo")
@command(DemoRequest)
def demo(request: DemoRequest, screen: Screen) -> int:
    """Run the whole way on drawn slides: tile, embed, train, predict, explain, evaluate, heatmaps, report."""
    import torch

    from xmil.core.errors import InputError
    from xmil.demo import encoders  # noqa: F401  # registers them where the package is not installed

    if request.images is not None and not request.tissue:
        raise InputError("--images needs --tissue.")
    torch.set_num_threads(1)  # models are too small for several threads
    say = partial(print, end="", flush=True, file=sys.stderr if screen.as_json else sys.stdout)
    begin = time.perf_counter()
    outcome = _tissue(request, say) if request.tissue else _digits(request, say)
    say(f"{outcome['verdict']}\nDone in {time.perf_counter() - begin:.0f} s. Report: {outcome['report']}\n")
    say(f"Viewer: {outcome['viewer']}\n")
    say("It opens http://127.0.0.1:8787/ (or the next free port) in your browser.\n")
    if screen.as_json:
        print(json.dumps(outcome, indent=2))
    return 0


def _digits(request: DemoRequest, say: Say) -> dict[str, Any]:
    """Run the demonstration on digits; return its results."""
    from xmil.core.explanation import card_of
    from xmil.demo.pipeline import Demo
    from xmil.demo.results_page import read_results, verdict, viewer_command, write_report

    demo = Demo(request.out, quick=request.quick, seed=request.seed)
    timings = _run_stages(demo, say)
    report = write_report(demo, timings)
    results = read_results(demo)
    for r in results:
        scores = ", ".join(f"{card_of(m).title} {r.auprc2[m]:.2f}" for m in ("attention", "lrp"))
        say(f"{r.task:<15} {r.model:<9} test AUROC {r.auroc:.2f}   AUPRC-2: {scores}\n")
    pairs = [{"task": r.task, "model": r.model, "test_auroc": r.auroc, "auprc2": r.auprc2} for r in results]
    return {
        "verdict": verdict(results),
        "pairs": pairs,
        "report": str(report),
        "viewer": viewer_command(demo),
        "seconds": {timing.title: timing.seconds for timing in timings},
    }


def _tissue(request: DemoRequest, say: Say) -> dict[str, Any]:
    """Run the demonstration on tissue; return its results."""
    from xmil.demo.tissue import (
        TissueDemo,
        read_sections,
        tissue_verdict,
        tissue_viewer,
        write_tissue_report,
    )

    demo = TissueDemo(request.out, images=request.images, quick=request.quick, seed=request.seed)
    timings = _run_stages(demo, say)
    report = write_tissue_report(demo, timings)
    sections = read_sections(demo)
    rows = [
        {"section": s.name, "holds": s.tumour, "probability": s.probability, "patches": len(s.marked),
         "patches_held": int(s.marked.sum()), "held_among_top_10": s.count_top("lrp")}
        for s in sections
    ]  # fmt: skip
    return {
        "verdict": tissue_verdict(sections),
        "sections": rows,
        "report": str(report),
        "viewer": tissue_viewer(demo),
        "seconds": {timing.title: timing.seconds for timing in timings},
    }


def _run_stages(demo: Demo | TissueDemo, say: Say) -> list[Timing]:
    from xmil.demo.pipeline import run_stages

    log = demo.out / "log.txt"
    timings = run_stages(demo, lambda commands, side: _run(commands, side, log), say)
    say("report ...\n")
    return timings


def _run(commands: Sequence[list[str]], side_by_side: bool, log: Path) -> list[int]:
    """Run commands in this process in turn, or in processes, one per core at a time."""
    from concurrent.futures import ThreadPoolExecutor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    at_once = min(len(commands), cores)
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
    """Run a command in a process; log its output at the end, so that two commands do not mix."""
    env = python_environment(OMP_NUM_THREADS="1")  # models are too small for several threads
    command = python_command("-m", "xmil.cli", *words)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)  # noqa: S603  # our own program
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n$ xmil {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.returncode
