"""The report: one HTML file with embedded pictures, only with measurements of this run."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.bench import colours
from xmil.core.durable import write_text
from xmil.core.errors import FileError
from xmil.core.explanation import Explanation, card_of
from xmil.demo.digit_slides import QUESTIONS, TILE, DigitSlide, Rows, draw_slide, evidence
from xmil.demo.pipeline import MEASURED, METHODS, Demo, Timing, command
from xmil.evaluate import auprc2
from xmil.heatmaps import (
    Html,
    bullets,
    figure,
    join,
    method_colour,
    new_figure,
    page,
    small,
    table,
    tag,
    write_figure,
)
from xmil.storage import Run, read_explanations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASK_TITLES = {"pos_neg": "Pos-Neg", "adjacent_pairs": "Adjacent Pairs"}
MODEL_TITLES = {"attnmil": "AttnMIL", "transmil": "TransMIL"}


def write_report(demo: Demo, timings: Sequence[Timing]) -> Path:
    """Draw every picture, write the page, and return its path."""
    (demo.out / "pictures").mkdir(exist_ok=True)
    results = read_results(demo)
    path = demo.out / "report.html"
    parts = [
        _opening(demo, results),
        _quality_table(results),
        *(_panels(demo, result) for result in results),
        _flip_section(demo, results),
        certificate_section(demo),
        how_it_was_made(timings, "Steps whose files were already there were not repeated."),
        look_yourself(viewer_command(demo)),
        tag(
            "p",
            "Heatmaps and GeoJSON for QuPath are in ",
            tag("code", demo.out / "heatmap"),
            ", the true evidence as GeoJSON in ",
            tag("code", demo.out / "truth"),
            ".",
        ),
    ]
    write_text(path, page("xmil demo", *parts))
    return path


def verdict(results: Sequence[PairResult]) -> str:
    """Count the pairs in which LRP ranks the evidence better than attention, in one sentence."""
    better = [r for r in results if r.auprc2["lrp"] > r.auprc2["attention"]]
    count, exceptions = f"all {len(results)} pairs of task and model", ""
    if len(better) < len(results):
        names = ", ".join(_name(r) for r in results if r not in better)
        count, exceptions = f"{len(better)} of {len(results)} pairs", f"; not in {names}"
    leaders = Counter(max(r.auprc2, key=lambda name: r.auprc2[name]) for r in results)
    ahead = ", ".join(f"{card_of(name).title} in {n}" for name, n in leaders.most_common() if name != "lrp")
    first = f" Another method is ahead of LRP: {ahead}." if ahead else ""
    return f"LRP ranks the evidence better than attention in {count}{exceptions}.{first}"


def _name(result: PairResult) -> str:
    return f"{TASK_TITLES[result.task]} {MODEL_TITLES[result.model]}"


def _opening(demo: Demo, results: Sequence[PairResult]) -> Html:
    n, train, test = (len(demo.bags[split]) for split in ("slide", "train", "test"))
    rough = " (a quick run: few slides and little training, so that numbers are rough)" if demo.quick else ""
    return join([
        tag("h1", "Which tiles spoke for the answer?"),
        tag(
            "p",
            "Each tile of these slides is a real handwritten digit: anyone can see whether the evidence is "
            "right. Two models learned two questions from labels of whole slides alone:",
        ),
        bullets(join([tag("b", TASK_TITLES[task]), f": {q}"]) for task, q in QUESTIONS.items()),
        tag("p", tag("b", verdict(results)), f" Measured here on {n} slides{rough}."),
        small(
            f"The models were trained on {train} further bags of other digits, which were embedded by the "
            f"same encoder without being drawn as slides; the AUROC is that of {test} such bags of unseen "
            f"digits. No digit of a slide was seen in training. Seed {demo.seed}, xmil {__version__}, "
            f"{platform.platform()}. For research use only.",
        ),
    ])  # fmt: skip


def _quality_table(results: Sequence[PairResult]) -> Html:
    best = [max(METHODS, key=r.auprc2.__getitem__) for r in results]
    rows: list[list[object]] = [["test AUROC", *(f"{r.auroc:.2f}" for r in results)]]
    for method in METHODS:
        cells = zip((f"{r.auprc2[method]:.2f}" for r in results), best, strict=True)
        rows.append([card_of(method).title, *(tag("b", c) if b == method else c for c, b in cells)])
    words = (
        "AUPRC-2 is the mean of two average precisions: do the highest scores find the tiles that speak for "
        "a class, and the lowest those that speak against it? 1 is perfect. Mean over the slides and both "
        "classes; the best of each column is bold."
    )
    return join([
        tag("h2", "Against the truth: AUPRC-2"),
        table(rows, head=["", *map(_name, results)]),
        small(words),
    ])  # fmt: skip


def _panels(demo: Demo, result: PairResult) -> Html:
    path = demo.out / "pictures" / f"{result.task}-{result.model}.png"
    draw_panels(demo, result, path)
    caption = (
        f"Slide {demo.shown(result.task).name}, scores for “yes”; beside each method its AUPRC-2 on this "
        "slide, both classes."
    )
    return join([tag("h2", _name(result)), figure(path, caption)])


def _flip_section(demo: Demo, results: Sequence[PairResult]) -> Html:
    path, size = demo.out / "pictures" / "flip-curves.png", (3.4 * len(results), 4.6)
    sheet, axes = new_figure(size, 1, len(results), dpi=130, sharey=True)
    for axis, result in zip(axes, results, strict=True):
        for method, curve in result.curves.items():
            label = f"{card_of(method).title} ({curve.mean():.2f})"
            width, colour = (2.4 if method == "lrp" else 1.3), method_colour(method)
            axis.plot(np.linspace(0, 100, len(curve)), curve, label=label, linewidth=width, color=colour)
        axis.set_title(_name(result), fontsize=10)
        axis.set_xlabel("tiles dropped (%)", fontsize=9)
        axis.set_ylim(0, 1.02)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    axes[0].set_ylabel("probability of the class", fontsize=9)
    write_figure(sheet, path)
    caption = (
        "Tiles leave in the order of their scores, highest first. The lower the curve, the better the order; "
        "in brackets its mean (AUPC). Mean over the slides that are classified correctly, explained for "
        "the predicted class."
    )
    return join([tag("h2", "Against the model: flip curves"), figure(path, caption)])


def certificate_section(demo: Demo) -> Html:
    """The certificate of the shown slide: its picture and its headline."""
    shown = demo.shown("pos_neg").name
    stem = demo.folder("evaluate", "pos_neg", "transmil") / "certificates" / shown
    certificate = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    title = f"The certificate of {shown} (Pos-Neg, TransMIL)"
    return join([tag("h2", title), figure(stem.with_suffix(".png"), certificate["headline"]["sentence"])])


def how_it_was_made(timings: Sequence[Timing], note: str = "") -> Html:
    """The steps with their times and commands."""
    rows = [[t.title, f"{t.seconds:.1f} s"] for t in timings]
    rows.append(["all", f"{sum(t.seconds for t in timings):.0f} s"])
    words = small(note) if note else ""
    commands = "\n".join(line for t in timings for line in t.commands)
    return join([tag("h2", "How this was made"), table(rows), words, tag("pre", commands)])


def look_yourself(line: str) -> Html:
    """How to open the viewer."""
    return join([tag("h2", "Look for yourself"), tag("pre", line)])


def viewer_command(demo: Demo) -> str:
    """The command that opens the viewer on the runs of one model."""
    runs = [demo.folder(kind, "pos_neg", "transmil") for kind in ("explain", "evaluate")]
    model, features = demo.checkpoint("pos_neg", "transmil"), demo.out / "features"
    return view_line(*runs, slides=demo.out / "slides", model=model, features=features)


def view_line(*runs: Path, **options: Path) -> str:
    """The command line of `xmil view`, with the program's path if the shell does not find it."""
    installed = Path(sys.executable).parent / "xmil"
    program = "xmil" if shutil.which("xmil") or not installed.is_file() else os.path.relpath(installed)
    return " ".join([program, *command("view", *runs, **options)])


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairResult:
    """One task and model: test AUROC, AUPRC-2 by method, mean flip curves, and one slide's explanations.

    The AUROC is that of the test bags; AUPRC-2 is the mean over the slides and both classes, as in the paper.
    """

    task: str
    model: str
    auroc: float
    auprc2: dict[str, float]
    curves: dict[str, Floats]
    shown: dict[str, Explanation]
    shown_auprc2: dict[str, float]


def read_results(demo: Demo) -> list[PairResult]:
    """Read the results of every task and model."""
    results = []
    for task, model in demo.pairs:
        run, shown = Run(demo.folder("explain", task, model)), demo.shown(task).name
        explanations = {slide.name: read_explanations(run.file(slide.name)) for slide in demo.bags["slide"]}
        qualities = {s.name: _qualities(s, explanations[s.name], task) for s in demo.bags["slide"]}
        quality, shown_quality = (
            {m: float(np.nanmean([v for name in names for v in qualities[name][m]])) for m in METHODS}
            for names in (list(qualities), [shown])
        )
        metrics = demo.checkpoint(task, model).parent / "metrics.json"
        auroc = json.loads(metrics.read_text(encoding="utf-8"))["test"]["auc"]
        for_yes = {e.method: e for e in explanations[shown] if e.target.cls == 1}
        curves = _curves(demo.folder("evaluate", task, model) / "results.parquet")
        results.append(PairResult(task, model, auroc, quality, curves, for_yes, shown_quality))
    return results


def _qualities(slide: DigitSlide, explanations: list[Explanation], task: str) -> dict[str, list[float]]:
    """AUPRC-2 of each method for both classes."""
    truth, values = evidence(slide, task), defaultdict(list)
    for e in explanations:
        if e.coords is None or not np.array_equal(e.coords, slide.coords):
            raise FileError(
                f"{slide.name}: its tiles do not match the drawn digits; remove the folder and repeat."
            )
        values[e.method].append(auprc2(truth if e.target.cls == 1 else -truth, e.scores))
    return values


def _curves(path: Path) -> dict[str, Floats]:
    """The mean curve of each method, most relevant first, over correctly classified slides."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(path, partitioning=None).to_pylist() if row["correct"]]
    return {
        method: np.mean([row["morf"] for row in rows if row["method"] == method], axis=0)
        for method in MEASURED
        if any(row["method"] == method for row in rows)
    }


ACROSS = 6  # pictures in a row
SCALE = 4  # pixels of the slide to one of the picture
STRENGTH = 0.72  # of the colour over the slide
MARKS = {1: "+", -1: "\N{MINUS SIGN}"}
LEGEND = (
    "red: evidence for the class, blue: against it; scores without a sign: violet (low) to yellow (high). "
    f"Marks: {MARKS[1]} truly speaks for it, {MARKS[-1]} truly against it"
)


def draw_panels(demo: Demo, result: PairResult, path: Path) -> None:
    """Draw the shown slide, its true evidence and methods' scores, with a thin margin of glass."""
    slide = demo.shown(result.task)
    truth = evidence(slide, result.task)
    painted = {"the slide": None, "true evidence": colours(truth, signed=True, depth=1.0)}
    for method in METHODS:
        e, words = result.shown[method], f"{card_of(method).title}  {result.shown_auprc2[method]:.2f}"
        painted[words] = colours(e.scores, signed=e.signed, depth=1.0)
    rows = -(-len(painted) // ACROSS)
    sheet, grid = new_figure((2.35 * ACROSS, 2.25 * rows + 0.75), rows, ACROSS, dpi=130)
    low = slide.coords.min(axis=0) - TILE // 8
    high = slide.coords.max(axis=0) + TILE + TILE // 8
    pixels = draw_slide(slide)[low[1] : high[1], low[0] : high[0]]
    image = pixels[::SCALE, ::SCALE].astype(np.float64) / 255
    for axis in grid.flat:
        axis.axis("off")
    for axis, (words, tints) in zip(grid.flat, painted.items(), strict=False):
        axis.set_title(words, fontsize=9.5)
        _draw(axis, image.copy(), slide.coords - low, tints, truth)
    sheet.suptitle(f"{_name(result)}: {QUESTIONS[result.task]}", fontsize=12, fontweight="bold")
    sheet.supxlabel(LEGEND, fontsize=9)
    write_figure(sheet, path)


def _draw(axis: Axes, image: Floats, corners: Rows, tints: Floats | None, truth: Rows) -> None:
    """Draw the coloured tiles, each with a mark of its true evidence."""
    if tints is not None:
        for (x, y), tint in zip(corners // SCALE, tints, strict=True):
            area = image[y : y + TILE // SCALE, x : x + TILE // SCALE]
            darkness = 1 - area.mean(axis=-1, keepdims=True)  # ink stays ink
            area[:] = (1 - STRENGTH) * area + STRENGTH * tint * np.clip(1.35 - 1.1 * darkness, 0, 1)
    axis.imshow(np.clip(image, 0, 1))
    box = {"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": "black", "linewidth": 0.5}
    for (x, y), sign in zip(corners / SCALE + 0.17 * TILE / SCALE, truth, strict=True):
        if sign:
            mark = MARKS[int(sign)]
            axis.text(x, y, mark, ha="center", va="center", fontsize=6, fontweight="bold", bbox=box)
