"""The album of an insight run: a PDF with a page for each slide, drawn one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.errors import InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.lettering import letter_figure
from xmil.core.storage import write_atomically
from xmil.heatmaps.canvas import View, check_fit, place_on, whole_box
from xmil.heatmaps.picture import Look
from xmil.heatmaps.saved_run import SavedRun, open_saved
from xmil.heatmaps.scale import Scale
from xmil.heatmaps.sheets import cut_patch, extremes
from xmil.heatmaps.words import ends, number, subtitle, title
from xmil.runs.insight_slide import chosen_explanation

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun

PAGE = (8.27, 11.69)  # A4, inches
LONGEST = 700  # pixels of a map
TOP, EDGE = 8, 96  # patches of each end, and their pixels
LETTERS = 110  # a line
LEFT, WIDE, LINE = 0.06, 0.42, 0.0145  # of the page: its margin, a map, a line of facts
DIM = "0.35"
LIMIT = "For research use only: not a medical device."
WORDS = {"density_per_mm2": "supporting patches per mm\u00b2", "models": "models compared"}


def write_album(run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """One page after another, so that memory does not grow with the cohort; whole or not at all."""
    from matplotlib.backends.backend_pdf import PdfPages

    saved = open_saved(run.run.path)

    def write(part: str) -> None:
        with PdfPages(part, metadata={"Title": f"Explanations of {run.run.path.name}"}) as pages:
            for i, (slide, result) in enumerate(zip(slides, results, strict=True), start=1):
                page = album_page(run, slide, result, saved=saved)
                page.text(0.94, 0.03, f"{i} of {len(slides)}", fontsize=7, color=DIM, ha="right")
                pages.savefig(letter_figure(page), dpi=150)

    write_atomically(run.out / "album.pdf", write)


def album_page(run: InsightRun, slide: str, result: Mapping[str, Any], *, saved: SavedRun) -> Any:
    """A slide's page: label and prediction, thumbnail, map, strongest patches, biomarkers, certificate."""
    from matplotlib.figure import Figure

    e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
    figure = Figure(figsize=PAGE, facecolor="white")
    figure.text(LEFT, 0.965, slide, fontsize=14, weight="bold")
    figure.text(LEFT, 0.947, _decision(run, slide, e, saved), fontsize=9)
    figure.text(LEFT, 0.931, f"{title(e)} {subtitle(e)}; explained output {number(e.output)}", fontsize=9)
    try:
        _pictures(figure, run.pictures.get(slide), e)
    except XmilError as error:
        figure.text(LEFT, 0.9, fill(f"No picture: {error}", LETTERS), fontsize=8, va="top")
    below = _facts(figure, result)
    figure.text(LEFT, below, certificate_text(run.evaluated, slide, e), fontsize=8, va="top")
    figure.text(LEFT, 0.03, LIMIT, fontsize=7, color=DIM)
    return figure


def _decision(run: InsightRun, slide: str, e: Explanation, saved: SavedRun) -> str:
    """Label and prediction; the label is the run's own, else that of the cohort given here."""
    held = saved.caption(slide, [e])
    given = run.columns.label.get(slide)
    if held.label is None and given is not None:
        held = replace(held, label=str(given))
    return held.facts() or "no prediction is stored"


def _pictures(figure: Any, path: Path | None, e: Explanation) -> None:
    from xmil.slides import open_slide

    look = Look(size=LONGEST)
    with nullcontext() if path is None else open_slide(path) as slide:
        placed = e if slide is None else place_on(e, slide)
        boxes = placed.boxes()
        if slide is not None:
            check_fit(boxes, slide, placed.slide_size)
        view = View.of(boxes, whole_box(boxes, slide), slide=slide, longest=LONGEST)
        scale = look.scale(placed)
        if view.background is not None:
            _image(figure, (LEFT, 0.55, WIDE, 0.35), view.background, "slide")
        drawn = view.overlay(placed, scale, alpha=0.55)
        _image(figure, (0.52, 0.55, WIDE, 0.35), drawn, "map")
        high = WIDE * PAGE[0] / PAGE[1] * drawn.shape[0] / drawn.shape[1]
        _colour_bar(figure, scale, e, top=0.9 - min(0.35, high))
        if slide is None:
            return
        for row, (rows, what) in enumerate(zip(extremes(placed, TOP), ("highest", "lowest"), strict=True)):
            low = 0.42 - 0.115 * row
            figure.text(LEFT, low + 0.092, f"{what} scores", fontsize=8)
            for k, i in enumerate(rows):
                place = (LEFT + 0.111 * k, low, 0.105, 0.105 * PAGE[0] / PAGE[1])
                _image(figure, place, cut_patch(slide, boxes[i], EDGE), number(float(placed.scores[i])))


def _colour_bar(figure: Any, scale: Scale, e: Explanation, *, top: float) -> None:
    """What the map's colours mean, under it."""
    axis = figure.add_axes((0.62, top - 0.014, 0.22, 0.007))
    axis.imshow(scale.paint(np.linspace(scale.low, scale.high, 256))[None], aspect="auto")
    axis.set_axis_off()
    low, high = ends(e)
    below, above = (
        " and " + word if cut else "" for word, cut in zip(("below", "above"), scale.cut, strict=True)
    )
    figure.text(0.52, top - 0.026, f"{low} ({number(scale.low)}{below})", fontsize=6, ha="left")
    figure.text(0.94, top - 0.026, f"{high} ({number(scale.high)}{above})", fontsize=6, ha="right")


def _image(figure: Any, place: tuple[float, float, float, float], pixels: Any, words: str) -> None:
    axis = figure.add_axes(place)
    axis.imshow(pixels)
    axis.set_axis_off()
    axis.set_anchor("N")
    axis.set_title(words, fontsize=6, pad=2)


def _facts(figure: Any, result: Mapping[str, Any]) -> float:
    """Biomarkers and stability in two columns; gives the height below them."""
    held = {**result.get("biomarkers", {}), **result.get("stability", {})}
    known = [(WORDS.get(name, name.replace("_", " ")), number(v)) for name, v in held.items() if v == v]
    half = -(-len(known) // 2)
    for i, (name, value) in enumerate(known):
        left, top = LEFT + 0.46 * (i // half), 0.268 - LINE * (i % half)
        figure.text(left, top, name, fontsize=8, va="top", color=DIM)
        figure.text(left + 0.34, top, value, fontsize=8, va="top", ha="right")
    return 0.258 - LINE * half


def certificate_text(evaluated: Path | None, slide: str, e: Explanation) -> str:
    """What `xmil evaluate` certified of the slide; else the account, and how to get a certificate."""
    path = None if evaluated is None else evaluated / "certificates" / f"{slide}.json"
    if path is not None and path.is_file():
        held = read_certificate(path)
        own = [m for m in held.get("methods", ()) if m.get("method") == e.method] or [
            held.get("headline", {})
        ]
        return fill(f"Certificate ({path.name}): {own[0].get('sentence', '')}", LETTERS)
    account = ""
    if e.audit is not None:
        shares = {key: value for key, value in e.audit.as_dict().items() if value}
        account = "Account: " + ", ".join(f"{key} {number(value)}" for key, value in shares.items()) + ". "
    return fill(f"{account}No certificate: run xmil evaluate and give its folder with --evaluated.", LETTERS)


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate's file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a certificate ({error}); evaluate the slide again.") from None
    if not isinstance(held, dict):
        raise InputError(f"{path}: not a certificate; evaluate the slide again.")
    return held
