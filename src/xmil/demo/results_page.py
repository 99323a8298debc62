"""The report: one HTML file with its pictures inside, and only what was measured in this run."""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.errors import FileError
from xmil.core.explanation import Explanation
from xmil.core.method_cards import card_of
from xmil.core.storage import read_explanations, write_text
from xmil.demo.digit_slides import QUESTIONS, DigitSlide, evidence
from xmil.demo.panels import SlidePanel, draw_panels, method_title
from xmil.demo.pipeline import MEASURED, METHODS, Demo, Timing
from xmil.evaluate.evidence import auprc2

TASK_TITLES = {"pos_neg": "Pos-Neg", "adjacent_pairs": "Adjacent Pairs"}
MODEL_TITLES = {"attnmil": "AttnMIL", "transmil": "TransMIL"}
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
td.best { font-weight: 700; }
figure { margin: 1.5rem 0; }
img { max-width: 100%; background: white; }
figcaption, .small { font-size: .9rem; opacity: .85; }
pre { overflow-x: auto; padding: .7rem; background: #8882; font-size: .82rem; }
"""


def write_report(demo: Demo, timings: Sequence[Timing]) -> Path:
    """Draw every picture, write the page, and give its path."""
    (demo.out / "pictures").mkdir(exist_ok=True)
    results = read_results(demo)
    parts = [
        _opening(demo, results),
        _quality_table(results),
        *(_panels(demo, result) for result in results),
        _readme_picture(demo, results),
        _flip_section(demo, results),
        certificate_section(demo),
        _ending(demo, timings),
    ]
    path = demo.out / "report.html"
    write_text(path, page("\n".join(parts)))
    return path


def verdict(results: Sequence[PairResult]) -> str:
    """Whether LRP ranks the evidence better than attention, in how many of the pairs, in this run."""
    better = [r for r in results if r.auprc2["lrp"] > r.auprc2["attention"]]
    if len(better) == len(results):
        return f"LRP ranks the evidence better than attention in all {len(results)} pairs of task and model."
    names = ", ".join(_name(r) for r in results if r not in better)
    count = f"{len(better)} of {len(results)} pairs"
    return f"LRP ranks the evidence better than attention in {count}; not in {names}."


def _name(result: PairResult) -> str:
    return f"{TASK_TITLES[result.task]} {MODEL_TITLES[result.model]}"


def page(body: str, *, title: str = "xmil demo") -> str:
    """A page that stands alone."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def _opening(demo: Demo, results: Sequence[PairResult]) -> str:
    n, train, test = (len(demo.bags[split]) for split in ("slide", "train", "test"))
    questions = "".join(f"<li><b>{TASK_TITLES[task]}</b>: {escape(q)}</li>" for task, q in QUESTIONS.items())
    kept = " (--quick: few slides and little training, so that numbers are rough)" if demo.quick else ""
    return f"""<h1>Which tiles spoke for the answer?</h1>
<p>Each tile of these slides is a real handwritten digit: anyone can see whether the evidence is right.
Two models learned two questions from labels of whole slides alone:</p><ul>{questions}</ul>
<p><b>{escape(verdict(results))}</b> Measured here on {n} slides{kept}.</p>
<p class="small">The models were trained on {train} further bags of other digits, which were embedded by the
same encoder without being drawn as slides; the AUROC is that of {test} such bags of unseen digits. No digit
of a slide was seen in training. Seed {demo.seed},
xmil {__version__}, {escape(platform.platform())}. For research use only.</p>"""


def _quality_table(results: Sequence[PairResult]) -> str:
    head = "".join(f"<th>{escape(_name(r))}</th>" for r in results)
    rows = [_row("test AUROC", [f"{r.auroc:.2f}" for r in results], set())]
    best = {i: max(METHODS, key=lambda m, r=r: r.auprc2[m]) for i, r in enumerate(results)}  # type: ignore[misc]
    for method in METHODS:
        cells = [f"{r.auprc2[method]:.2f}" for r in results]
        rows.append(_row(card_of(method).title, cells, {i for i, name in best.items() if name == method}))
    return f"""<h2>Against the truth: AUPRC-2</h2>
<table><tr><th></th>{head}</tr>{"".join(rows)}</table>
<p class="small">AUPRC-2 is the mean of two average precisions: do the highest scores find the tiles that
speak for a class, and the lowest those that speak against it? 1 is perfect. Mean over the slides and both
classes; the best of each column is bold.</p>"""


def _row(name: str, cells: Sequence[str], best: set[int]) -> str:
    marked = "".join(
        f"<td class='best'>{cell}</td>" if i in best else f"<td>{cell}</td>" for i, cell in enumerate(cells)
    )
    return f"<tr><td>{escape(name)}</td>{marked}</tr>"


def _panels(demo: Demo, result: PairResult) -> str:
    slide = demo.shown(result.task)
    truth = evidence(slide, result.task)
    panels = [SlidePanel("the slide"), SlidePanel("true evidence", truth.astype(np.float64))]
    for method in METHODS:
        e = result.shown[method]
        panels.append(SlidePanel(method_title(method, result.shown_auprc2[method]), e.scores, e.signed))
    path = demo.out / "pictures" / f"{result.task}-{result.model}.png"
    title = f"{_name(result)}: {QUESTIONS[result.task]}"
    draw_panels(slide, truth, panels, path, title=title)
    caption = (
        f"Slide {slide.name}, scores for “yes”; beside each method its AUPRC-2 on this slide, both classes."
    )
    return f"<h2>{escape(_name(result))}</h2>{figure(path, caption)}"


def _readme_picture(demo: Demo, results: Sequence[PairResult]) -> str:
    """Attention against LRP on one slide; the README shows this picture."""
    result = next(r for r in results if (r.task, r.model) == ("pos_neg", "attnmil"))
    slide = demo.shown(result.task)
    truth = evidence(slide, result.task)
    panels = [SlidePanel("the slide"), SlidePanel("true evidence", truth.astype(np.float64))]
    for method in ("attention", "lrp"):
        e = result.shown[method]
        title = f"{card_of(method).title}: AUPRC-2 {result.shown_auprc2[method]:.2f}"
        panels.append(SlidePanel(title, e.scores, e.signed))
    path = demo.out / "pictures" / "attention-against-lrp.png"
    draw_panels(slide, truth, panels, path, title=f"AttnMIL: {QUESTIONS[result.task]}", columns=4)
    return ""


def _flip_section(demo: Demo, results: Sequence[PairResult]) -> str:
    path = demo.out / "pictures" / "flip-curves.png"
    draw_curves(results, path)
    caption = (
        "Tiles leave in the order of their scores, highest first. The lower the curve, the better the order; "
        "in brackets its mean (AUPC). Mean over the slides that are classified correctly, explained for "
        "the predicted class."
    )
    return f"<h2>Against the model: flip curves</h2>{figure(path, caption)}"


def draw_curves(results: Sequence[PairResult], path: Path) -> None:
    """One panel of mean curves for each task and model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(results), 4.6), dpi=130)
    figure.set_layout_engine("constrained")
    for axis, result in zip(
        figure.subplots(1, len(results), sharey=True, squeeze=False)[0], results, strict=True
    ):
        for method, curve in result.curves.items():
            label = f"{card_of(method).title} ({curve.mean():.2f})"
            width, colour = (2.4 if method == "lrp" else 1.3), card_of(method).colour
            axis.plot(np.linspace(0, 100, len(curve)), curve, label=label, linewidth=width, color=colour)
        axis.set_title(_name(result), fontsize=10)
        axis.set_xlabel("tiles dropped (%)", fontsize=9)
        axis.set_ylim(0, 1.02)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    figure.axes[0].set_ylabel("probability of the class", fontsize=9)
    figure.savefig(path)


def certificate_section(demo: Demo) -> str:
    """The certificate of the shown slide: its picture above the sentence that is its title."""
    picture, sentence = certificate(demo, "pos_neg", "transmil")
    name = demo.shown("pos_neg").name
    return f"<h2>The certificate of {escape(name)} (Pos-Neg, TransMIL)</h2>" + figure(picture, sentence)


def _ending(demo: Demo, timings: Sequence[Timing]) -> str:
    rows = "".join(f"<tr><td>{escape(t.title)}</td><td>{t.seconds:.1f} s</td></tr>" for t in timings)
    commands = "\n".join(escape(line) for t in timings for line in t.commands)
    total = sum(t.seconds for t in timings)
    return f"""<h2>How this was made</h2>
<table>{rows}<tr><td>all</td><td>{total:.0f} s</td></tr></table>
<p class="small">Steps whose files were already there were not repeated.</p>
<pre>{commands}</pre>
<h2>Look for yourself</h2><pre>{escape(viewer_command(demo))}</pre>
<p>Heatmaps and GeoJSON for QuPath are in <code>{escape(str(demo.out / "heatmap"))}</code>, the true
evidence as GeoJSON in <code>{escape(str(demo.out / "truth"))}</code>.</p>"""


def viewer_command(demo: Demo) -> str:
    """The command that opens the viewer on one model: its evidence, and how faithful it is."""
    runs = " ".join(str(demo.folder(kind, "pos_neg", "transmil")) for kind in ("explain", "evaluate"))
    model = demo.checkpoint("pos_neg", "transmil")
    return (
        f"{program()} view {runs} --slides {demo.out / 'slides'} --model {model} "
        f"--features {demo.out / 'features'}"
    )


def program() -> str:
    """`xmil`, or where it is when the shell does not find it."""
    beside = Path(sys.executable).parent / "xmil"
    if shutil.which("xmil") or not beside.is_file():
        return "xmil"
    return os.path.relpath(beside)


def figure(path: Path, caption: str) -> str:
    """A picture with its caption, inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f"<img alt='{escape(caption, quote=True)}' src='data:image/png;base64,{data}'>"
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairResult:
    """One task and model: test AUROC, AUPRC-2 by method, mean flip curves, and one slide's explanations.

    The AUROC is that of the test bags; AUPRC-2 is the mean over the slides and both classes, as in the paper.
    """

    task: str
    model: str
    auroc: float
    accuracy: float
    auprc2: dict[str, float]
    curves: dict[str, Floats]
    shown: dict[str, Explanation]
    shown_auprc2: dict[str, float]

    @property
    def aupc(self) -> dict[str, float]:
        """Mean of each curve; lower is more faithful."""
        return {method: float(curve.mean()) for method, curve in self.curves.items()}


def read_results(demo: Demo) -> list[PairResult]:
    """Every task and model."""
    return [_read_pair(demo, task, model, demo.shown(task)) for task, model in demo.pairs]


def certificate(demo: Demo, task: str, model: str) -> tuple[Path, str]:
    """The picture of the shown slide's certificate, and the sentence that is its title."""
    stem = demo.folder("evaluate", task, model) / "certificates" / demo.shown(task).name
    paper = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    return stem.with_suffix(".png"), str(paper["headline"]["sentence"])


def _read_pair(demo: Demo, task: str, model: str, shown: DigitSlide) -> PairResult:
    folder = demo.folder("explain", task, model) / "slides"
    found = {slide.name: read_explanations(folder / f"{slide.name}.parquet") for slide in demo.bags["slide"]}
    quality, here = (
        {method: float(np.nanmean(_qualities(slides, found, task, method))) for method in METHODS}
        for slides in (demo.bags["slide"], [shown])
    )
    metrics = json.loads((demo.checkpoint(task, model).parent / "metrics.json").read_text(encoding="utf-8"))
    for_yes = {e.method: e for e in found[shown.name] if e.target.cls == 1}
    test: dict[str, Any] = metrics["test"]
    curves = _curves(demo.folder("evaluate", task, model) / "results.parquet")
    return PairResult(task, model, test["auc"], test["accuracy"], quality, curves, for_yes, here)


def _qualities(
    slides: Sequence[DigitSlide], found: dict[str, list[Explanation]], task: str, method: str
) -> list[float]:
    values = []
    for slide in slides:
        truth = evidence(slide, task)
        for e in found[slide.name]:
            if e.method == method:
                _check_places(e, slide)
                values.append(auprc2(truth if e.target.cls == 1 else -truth, e.scores))
    return values


def _check_places(e: Explanation, slide: DigitSlide) -> None:
    if e.coords is None or not np.array_equal(e.coords, slide.coords):
        raise FileError(f"{slide.name}: its tiles are not where the digits were drawn; remove the folder.")


def _curves(path: Path) -> dict[str, Floats]:
    """The mean curve of each method, most relevant first, over the slides that are classified correctly."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(path, partitioning=None).to_pylist() if row["correct"]]
    return {
        method: np.mean([row["morf"] for row in rows if row["method"] == method], axis=0)
        for method in MEASURED
        if any(row["method"] == method for row in rows)
    }
