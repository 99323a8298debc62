"""Pictures of an insight run: patches for its report and atlas, and the album, a PDF page per slide."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.durable import write_atomically
from xmil.core.errors import XmilError, refuse_damage
from xmil.core.explanation import Explanation
from xmil.core.text import parse_json
from xmil.heatmaps import (
    Look,
    Scale,
    View,
    caption,
    check_fit,
    cut_patch,
    ends,
    extremes,
    letter_figure,
    number,
    opened,
    picture_box,
    place_on,
    subtitle,
    title,
    verdict_on,
)
from xmil.insights.shortcuts import Association
from xmil.slides import open_slide
from xmil.storage import Run, read_explanations

if TYPE_CHECKING:
    from xmil.insights.run import Analysis

EDGE, ACROSS, GAP = 96, 5, 4  # pixels of a patch, patches in a row of a sheet, pixels between them
STRONGEST = 3  # patches of a suspect slide
PAGE = (8.27, 11.69)  # A4, inches
LONGEST, TOP = 700, 8  # pixels of a map; patches of each end
LETTERS = 110  # a line
LEFT, WIDE, LINE = 0.06, 0.42, 0.0145  # of the page: its margin, a map, a line of facts
DIM = "0.35"
LIMIT = "For research use only: not a medical device."
WORDS = {"density_per_mm2": "supporting patches per mm\u00b2", "models": "models compared"}


def suspect_patches(run: Analysis, shortcuts: Sequence[Association]) -> list[tuple[str, bytes]]:
    """Cut the strongest patches of the slides that the first shortcut names."""
    slides = next((a.slides for a in shortcuts if a.is_shortcut), ())
    sizes = {slide: np.abs(run.explanation(slide).scores) for slide in slides}
    return cut_patches(
        run, [(s, int(i)) for s in slides for i in np.argsort(-sizes[s], kind="stable")[:STRONGEST]]
    )


def cut_patches(run: Analysis, patches: Sequence[tuple[str, int]]) -> list[tuple[str, bytes]]:
    """Cut patches from their slides as JPEGs; skip slides that are missing or unreadable."""
    from PIL import Image

    pictures: dict[tuple[str, int], bytes] = {}
    for slide in dict.fromkeys(slide for slide, _ in patches if slide in run.pictures):
        try:
            with open_slide(run.pictures[slide]) as opened:
                boxes = place_on(read_explanations(run.explained.file(slide))[0], opened).boxes()
                for row in [row for name, row in patches if name == slide]:
                    stream = io.BytesIO()
                    pixels = cut_patch(opened, boxes[row], EDGE)
                    Image.fromarray(pixels).save(stream, format="JPEG", quality=85)
                    pictures[slide, row] = stream.getvalue()
        except XmilError:
            continue  # reported in the slide's row
    return [(patch[0], pictures[patch]) for patch in patches if patch in pictures]


def write_sheet(run: Analysis, concept: int, pictures: Sequence[bytes]) -> None:
    """Write a page of the atlas: the patches of a concept, strongest first."""
    from PIL import Image

    if not pictures:
        return
    step, rows = EDGE + GAP, -(-len(pictures) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * step + GAP, rows * step + GAP), "white")
    for i, data in enumerate(pictures):
        corner = (GAP + i % ACROSS * step, GAP + i // ACROSS * step)
        sheet.paste(Image.open(io.BytesIO(data)), corner)
    path = run.out / "atlas" / f"concept_{concept}.jpg"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda part: sheet.save(part, format="JPEG", quality=90))


def write_album(run: Analysis, slides: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """Write the album page by page, so that memory does not grow with the cohort; whole or not at all."""
    from matplotlib.backends.backend_pdf import PdfPages

    rows, source = run.explained.rows, run.explained.path

    def write(part: str) -> None:
        with PdfPages(part, metadata={"Title": f"Explanations of {source.name}"}) as pages:
            for i, (slide, result) in enumerate(zip(slides, results, strict=True), start=1):
                page = _draw_page(run, slide, result, rows.get(slide, {}))
                page.text(0.94, 0.03, f"{i} of {len(slides)}", fontsize=7, color=DIM, ha="right")
                pages.savefig(letter_figure(page), dpi=150)

    write_atomically(run.out / "album.pdf", write)


def _draw_page(run: Analysis, slide: str, result: Mapping[str, Any], row: Mapping[str, str]) -> Any:
    """Draw a slide's page: label, prediction, thumbnail, map, strongest patches, biomarkers, certificate."""
    from matplotlib.figure import Figure

    e = run.explanation(slide)
    words = caption(slide, row, [e], task=run.explained.task, class_names=run.explained.class_names)
    label = run.columns.label.get(slide)
    if words.label is None and label is not None:  # the run's own label takes precedence
        words = replace(words, label=str(label))
    figure = Figure(figsize=PAGE, facecolor="white")
    figure.text(LEFT, 0.965, slide, fontsize=14, weight="bold")
    figure.text(LEFT, 0.947, words.facts() or "no prediction is stored", fontsize=9)
    figure.text(LEFT, 0.931, f"{title(e)} {subtitle(e)}; explained output {number(e.output)}", fontsize=9)
    name, certificate = _certificate_of(run.evaluated, slide)
    tested = read_explanations(run.explained.file(slide))[0].target  # `xmil explain` tests the first one
    verdict = verdict_on(e, run.explained.verdict, tested=tested, certificate=certificate)
    figure.text(LEFT, 0.915, verdict, fontsize=9)
    try:
        _draw_maps(figure, run.pictures.get(slide), e)
    except XmilError as error:
        figure.text(LEFT, 0.9, fill(f"No picture: {error}", LETTERS), fontsize=8, va="top")
    numbers = {**result.get("biomarkers", {}), **result.get("stability", {})}
    facts = [(WORDS.get(name, name.replace("_", " ")), number(v)) for name, v in numbers.items() if v == v]
    half = -(-len(facts) // 2)  # in two columns
    for i, (name, value) in enumerate(facts):
        left, top = LEFT + 0.46 * (i // half), 0.268 - LINE * (i % half)
        figure.text(left, top, name, fontsize=8, va="top", color=DIM)
        figure.text(left + 0.34, top, value, fontsize=8, va="top", ha="right")
    below = 0.258 - LINE * half
    figure.text(LEFT, below, _certificate_text(name, certificate, e), fontsize=8, va="top")
    figure.text(LEFT, 0.03, LIMIT, fontsize=7, color=DIM)
    return figure


def _draw_maps(figure: Any, path: Path | None, e: Explanation) -> None:
    """Draw the slide, its map, and the patches with the highest and lowest scores."""
    with opened(path) as slide:
        placed = e if slide is None else place_on(e, slide)
        boxes = placed.boxes()
        if slide is not None:
            check_fit(boxes, slide, placed.slide_size)
        view = View.of(boxes, picture_box(boxes, slide), slide=slide, longest=LONGEST)
        scale = Look().scale(placed.scores, signed=placed.signed)
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
    """Draw the meaning of the map's colours below it."""
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


def _certificate_of(evaluated: Run | None, slide: str) -> tuple[str, dict[str, Any]]:
    """Read the slide's certificate of `xmil evaluate`, with the name of its file; empty without one."""
    path = None if evaluated is None else evaluated.find("certificate", slide)
    if path is None:
        return "", {}
    with refuse_damage(f"{path}: not a certificate", way="evaluate the slide again"):
        return path.name, dict(parse_json(path.read_text(encoding="utf-8")))


def _certificate_text(name: str, certificate: Mapping[str, Any], e: Explanation) -> str:
    """Write what the certificate says of this map; else the audit, and how to get a certificate."""
    if name:
        with refuse_damage(f"{name}: not a certificate", way="evaluate the slide again"):
            own = [
                method["sentence"]
                for method in certificate.get("methods", ())
                if (method.get("method"), method.get("target")) == (e.method, str(e.target))
            ]
        sentence = own[0] if own else f"{title(e)} {subtitle(e)} was not tested."
        return fill(f"Certificate ({name}): {sentence}", LETTERS)
    audit = ""
    if e.audit is not None:
        shares = {key: value for key, value in e.audit.as_dict().items() if value}
        audit = "Audit: " + ", ".join(f"{key} {number(value)}" for key, value in shares.items()) + ". "
    return fill(f"{audit}No certificate: run xmil evaluate and give its folder as `evaluated=`.", LETTERS)
