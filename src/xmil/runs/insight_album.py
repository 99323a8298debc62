"""The album of an insight run: a PDF with a page for each slide, drawn one after another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from xmil.core.errors import InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.lettering import letter_figure
from xmil.core.storage import write_atomically
from xmil.heatmaps.canvas import View, check_fit, place_on, whole_box
from xmil.heatmaps.picture import Look
from xmil.heatmaps.sheets import cut_patch, extremes
from xmil.heatmaps.words import number, subtitle, title
from xmil.runs.insight_slide import chosen_explanation

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun

PAGE = (8.27, 11.69)  # A4, inches
LONGEST, TOP, EDGE, WIDE = (
    700,
    8,
    96,
    96,
)  # pixels of a map, patches of each end, their pixels, letters a line
LINE = 0.0118  # of the page, a line of facts
LIMIT = "For research use only: not a medical device."


def write_album(run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """One page after another, so that memory does not grow with the cohort; whole or not at all."""
    from matplotlib.backends.backend_pdf import PdfPages

    def write(part: str) -> None:
        with PdfPages(part, metadata={"Title": f"Explanations of {run.run.path.name}"}) as pages:
            for slide, result in zip(slides, results, strict=True):
                pages.savefig(letter_figure(album_page(run, slide, result)), dpi=150)

    write_atomically(run.out / "album.pdf", write)


def album_page(run: InsightRun, slide: str, result: Mapping[str, Any]) -> Any:
    """A slide's page: thumbnail, map, strongest patches, biomarkers and certificate."""
    from matplotlib.figure import Figure

    e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
    figure = Figure(figsize=PAGE, facecolor="white")
    figure.text(0.06, 0.965, slide, fontsize=14, weight="bold")
    figure.text(0.06, 0.945, f"{title(e)} {subtitle(e)}; output {number(e.output)}", fontsize=9)
    try:
        _pictures(figure, run.pictures.get(slide), e)
    except XmilError as error:
        figure.text(0.06, 0.9, fill(f"No picture: {error}", WIDE), fontsize=8, va="top")
    facts = _facts(result)
    figure.text(0.06, 0.285, facts, fontsize=8, va="top", family="monospace")
    below = 0.27 - LINE * (facts.count("\n") + 1)
    figure.text(0.06, below, certificate_text(run.evaluated, slide, e), fontsize=8.5, va="top", wrap=True)
    figure.text(0.06, 0.03, LIMIT, fontsize=7, color="0.35")
    return figure


def _pictures(figure: Any, path: Path | None, e: Explanation) -> None:
    from xmil.slides import open_slide

    look = Look(size=LONGEST)
    with nullcontext() if path is None else open_slide(path) as slide:
        placed = e if slide is None else place_on(e, slide)
        boxes = placed.boxes()
        if slide is not None:
            check_fit(boxes, slide, placed.slide_size)
        view = View.of(boxes, whole_box(boxes, slide), slide=slide, longest=LONGEST)
        if view.background is not None:
            _image(figure, (0.06, 0.55, 0.42, 0.375), view.background, "slide")
        _image(figure, (0.52, 0.55, 0.42, 0.375), view.overlay(placed, look.scale(placed), alpha=0.55), "map")
        if slide is None:
            return
        for row, (rows, what) in enumerate(zip(extremes(placed, TOP), ("highest", "lowest"), strict=True)):
            low = 0.425 - 0.115 * row
            figure.text(0.06, low + 0.1, f"{what} scores", fontsize=8)
            for k, i in enumerate(rows):
                place = (0.06 + 0.111 * k, low, 0.105, 0.095)
                _image(figure, place, cut_patch(slide, boxes[i], EDGE), number(float(placed.scores[i])))


def _image(figure: Any, place: tuple[float, float, float, float], pixels: Any, words: str) -> None:
    axis = figure.add_axes(place)
    axis.imshow(pixels)
    axis.set_axis_off()
    axis.set_title(words, fontsize=6, pad=2)


def _facts(result: Mapping[str, Any]) -> str:
    held = {**result.get("biomarkers", {}), **result.get("stability", {})}
    known = [
        f"{name.replace('_', ' '):<26}{number(value):>10}" for name, value in held.items() if value == value
    ]
    half = -(-len(known) // 2)
    pairs = zip(known[:half], [*known[half:], ""], strict=False)
    return "\n".join(f"{left}    {right}" for left, right in pairs)


def certificate_text(evaluated: Path | None, slide: str, e: Explanation) -> str:
    """What `xmil evaluate` certified of the slide; else the account, and how to get a certificate."""
    path = None if evaluated is None else evaluated / "certificates" / f"{slide}.json"
    if path is not None and path.is_file():
        held = read_certificate(path)
        own = [m for m in held.get("methods", ()) if m.get("method") == e.method] or [
            held.get("headline", {})
        ]
        return fill(f"Certificate ({path.name}): {own[0].get('sentence', '')}", WIDE)
    account = ""
    if e.audit is not None:
        shares = {key: value for key, value in e.audit.as_dict().items() if value}
        account = "Account: " + ", ".join(f"{key} {number(value)}" for key, value in shares.items()) + ". "
    return fill(f"{account}No certificate: run xmil evaluate and give its folder with --evaluated.", WIDE)


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate's file."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a certificate ({error}); evaluate the slide again.") from None
    if not isinstance(held, dict):
        raise InputError(f"{path}: not a certificate; evaluate the slide again.")
    return held
