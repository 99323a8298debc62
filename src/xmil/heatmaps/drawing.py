"""Pictures of explanations: `xmil.heatmap`, HTML in notebooks, and all files of one slide of a run.

Files are drawn once, and again if the explanations change.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Patches
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, InputError, WriteError, XmilError, check_names
from xmil.core.explanation import PARTS, Explanation
from xmil.core.interactions import Interactions
from xmil.core.ledger import Entry
from xmil.core.services import register_service
from xmil.core.task import Target
from xmil.core.text import counted
from xmil.core.verdict import RunVerdict
from xmil.heatmaps.canvas import TISSUES, Canvas, View, check_fit, opened, picture_box, place_on, same_places
from xmil.heatmaps.exports import EXPORTS, Exported, write_pairs
from xmil.heatmaps.pages import Html, image, join, table, tag
from xmil.heatmaps.panel import Heading, Lines, PanelColumn, Picture, Ruler, draw_panel, draw_sheet
from xmil.heatmaps.style import BLUE, RED, Scale, spelt_out
from xmil.heatmaps.words import (
    ALL,
    PREDICTED,
    Caption,
    beyond_scale,
    caption,
    ends,
    figure_notes,
    is_predicted,
    number,
    subtitle,
    title,
    verdict_on,
    without_repeats,
)
from xmil.slides.slide import FRAMES, Box, Slide, export_frame
from xmil.storage import Run, file_fault, make_folder, read_explanations, read_header, read_json

if TYPE_CHECKING:
    from PIL.Image import Image

Kind = Literal["overlay", "side", "panel", "patches", "map"]
KINDS: tuple[str, ...] = get_args(Kind)
NEED_SLIDE = ("side", "patches")
ENLARGE = 4.0  # the most pixels of a zoomed region per level-0 pixel
DRAWN = 30  # strongest sure pairs; more lines would hide the slide
THINNEST, THICKEST = 0.05, 0.22  # lines between pairs, in text sizes
LEGEND = "; lines: red say more together, blue less"
RANKED_SIZE = (5.0, 3.0)  # inches
ROWS = 10  # of a run in a notebook
SMALL = 640  # pixels of the longer edge in a notebook's cell
EACH = ("overlay", "side", "patches", "map")  # pictures with one file for each explanation
PAIRS = "pairs"


@dataclass(frozen=True)
class Look:
    """How to draw scores; see `heatmap`."""

    clip: str = "whiskers"
    percentile: float = 99.0
    alpha: float = 0.5
    tissue: str = "grey"
    size: int = 1200
    region: Box | None = None
    top: int = 8
    across: int = 5
    colours: Mapping[bool, str | None] = field(default_factory=dict)  # signed -> name of a colour map
    pairs: int = DRAWN  # lines between patches that act together, at most

    def scale(self, scores: npt.ArrayLike, *, signed: bool) -> Scale:
        """Make the scale of these scores."""
        colours = self.colours.get(signed)
        return Scale.of(scores, signed=signed, clip=self.clip, percentile=self.percentile, colours=colours)


def heatmap(
    explanation: Explanation | Sequence[Explanation],
    slide: Slide | str | PathLike[str] | None = None,
    *,
    picture: Kind | None = None,
    clip: str = "whiskers",
    percentile: float = 99.0,
    alpha: float = 0.5,
    tissue: str = "grey",
    size: int = 1200,
    region: Box | None = None,
    top: int = 8,
    scale: Scale | None = None,
    mpp: float | None = None,
    patch_size: int | None = None,
    label: str | None = None,
    prediction: str | None = None,
    task: str = "classification",
    pairs: Interactions | Sequence[Interactions] | None = None,
    verdict: str | None = None,
) -> Picture | Image:
    """Draw an explanation, or several in a panel, over the slide (a path or an open one) or on their own.

    `picture`: `overlay` (default), `side` (slide and overlay), `panel` (default for several), `patches`
    (highest and lowest, cut from the slide), each a matplotlib figure; `map` is a transparent Pillow image of
    only the colours, to lay over the slide's scanned area at the same size. `clip`: `whiskers`, `percentile`
    or `none`. `tissue` under the colours: `grey` or `colour`. `region` (x, y, width, height in level-0
    pixels) zooms in. `size`: pixels of a picture's longer edge. `scale` replaces the scores' own. `pairs`,
    from `xmil.interactions` (a list for several targets), adds lines between patches. `verdict` is a line
    below the title, such as `run.verdict.of("lrp").brief`. Patches with an uncertain sign are hatched.

    >>> import numpy as np
    >>> from xmil import Explanation, Target
    >>> e = Explanation(np.array([1.0, -1.0]), np.zeros(2), 0.0, "lrp", Target(1), True,
    ...     coords=np.array([[0, 0], [256, 0]]), patch_size=256)
    >>> heatmap(e, picture="map").size
    (768, 512)
    """
    if isinstance(explanation, str | PathLike):
        raise InputError(
            f"{explanation}: heatmap draws an Explanation, as of xmil.open_run(...).explanation(...). A run "
            "is drawn by xmil.draw_slides."
        )
    several = [explanation] if isinstance(explanation, Explanation) else without_repeats(list(explanation))
    if not several:
        raise InputError("There is no explanation to draw.")
    kind = picture or ("overlay" if isinstance(explanation, Explanation) else "panel")
    caption = Caption(several[0].bag or "", label, prediction, task)
    look = Look(
        clip=clip, percentile=percentile, alpha=alpha, tissue=tissue, size=size, region=region, top=top
    )
    with opened(slide, mpp) as source:
        scene = Scene.of(several, source, look=look, caption=caption, mpp=mpp, patch_size=patch_size)
        scene = scene.with_pairs([pairs] if isinstance(pairs, Interactions) else pairs or ())
        if scene.note is not None:
            warnings.warn(scene.note, stacklevel=2)
        if verdict is not None:
            scene = replace(scene, verdicts={e.column: verdict for e in several})
        if scale is not None:
            scene = replace(scene, scales={e.column: scale for e in several})
        return draw(kind, scene)


@dataclass(frozen=True, eq=False)
class Scene:
    """The input of a picture of one slide: placed explanations, the open slide, scales and texts."""

    explanations: tuple[Explanation, ...]
    slide: Slide | None
    look: Look
    caption: Caption
    scales: Mapping[str, Scale]
    views: tuple[View, ...]
    note: str | None = None  # a doubt about the slide
    pairs: Mapping[Target, Interactions] = field(default_factory=dict)
    verdicts: Mapping[str, str] = field(default_factory=dict)  # what tests say of each map

    @classmethod
    def of(
        cls,
        explanations: Sequence[Explanation],
        slide: Slide | None,
        *,
        look: Look,
        caption: Caption,
        scales: Mapping[str, Scale] | None = None,
        mpp: float | None = None,
        patch_size: int | None = None,
        with_views: bool = True,
    ) -> Scene:
        """Place the explanations and read the slide; exports need no pictures: `with_views=False`.

        An explanation without a scale gets its own.
        """
        placed = tuple(place_on(e, slide, mpp=mpp, patch_size=patch_size) for e in explanations)
        boxes = same_places(placed)
        note = None if slide is None else check_fit(boxes, slide, placed[0].slide_size)
        views: tuple[View, ...] = ()
        if with_views:
            area = picture_box(boxes, slide)
            views = (View.of(boxes, area, slide=slide, longest=look.size),)
            if look.region is not None:
                zoomed, longest = check_region(look.region, area), max(views[0].canvas.size)
                views += (View.of(boxes, zoomed, slide=slide, longest=longest, enlarge=ENLARGE),)
        own = {
            e.column: (scales or {}).get(e.column) or look.scale(e.scores, signed=e.signed) for e in placed
        }
        named = replace(caption, name=caption.name or ("" if slide is None else slide.name))
        return cls(placed, slide, look, named, own, views, note)

    def with_pairs(self, several: Sequence[Interactions]) -> Scene:
        """Add interactions, each for the explanations of its target; refuse one for another target or bag."""
        first, placed, targets = self.explanations[0], {}, {e.target for e in self.explanations}
        for pairs in several:
            if pairs.target not in targets:
                raise InputError(
                    f"The interactions are for {pairs.target}, the explanations for "
                    f"{', '.join(sorted(map(str, targets)))}."
                )
            placed[pairs.target] = pairs
            if first.coords is None or pairs.names is not None:
                continue
            if len(pairs) and int(pairs.pairs.max()) >= len(first.scores):
                raise InputError(
                    f"The interactions are of patches up to {int(pairs.pairs.max())}, but the explanation "
                    f"has {len(first.scores)}; they are of another bag."
                )
            corners = first.coords[pairs.pairs].reshape(len(pairs), 4)
            placed[pairs.target] = replace(pairs, corners=corners, patch_size=first.patch_size)
        return replace(self, pairs=placed)

    @property
    def mpp(self) -> float | None:
        """Microns per level-0 pixel, from the slide or the explanations."""
        return (None if self.slide is None else self.slide.mpp) or self.explanations[0].mpp


def draw(kind: str, scene: Scene) -> Picture | Image:
    """Draw one kind of picture of a scene; all but panels show its first explanation."""
    check_names("picture", [kind], KINDS)
    first, look, slide = scene.explanations[0], scene.look, scene.slide
    if kind == "map":
        from PIL import Image

        return Image.fromarray(np.ascontiguousarray(scene.views[-1].heat(first, scene.scales[first.column])))
    if kind in NEED_SLIDE and slide is None:
        raise InputError(f"The picture {kind!r} needs the slide; give it, or draw 'overlay' or 'panel'.")
    scene = scene if kind == "panel" else replace(scene, explanations=(first,))
    heading = Heading(scene.caption.name, scene.caption.facts(), tuple(figure_notes(scene.explanations)))
    if kind == "patches" and slide is not None:
        scale, task = scene.scales[first.column], scene.caption.task
        verdict = scene.verdicts.get(first.column, "")
        return draw_sheet(first, slide, scale, heading=heading, top=look.top, task=task, verdict=verdict)
    columns = [_column(scene, e) for e in scene.explanations]
    if kind != "overlay" and slide is not None:
        images = tuple(view.background for view in scene.views if view.background is not None)
        columns.insert(0, PanelColumn("Slide", "", images))
    microns = [None if scene.mpp is None else scene.mpp * view.canvas.downsample[0] for view in scene.views]
    rulers = [Ruler.fit(v.canvas.size[0], length) for v, length in zip(scene.views, microns, strict=True)]
    mark = None
    if len(scene.views) > 1:  # the region in pixels of the picture of the slide
        (x, y, width, height), canvas = scene.views[1].canvas.box, scene.views[0].canvas
        across, down = canvas.downsample
        corner = (x - canvas.box[0]) / across, (y - canvas.box[1]) / down
        mark = (*corner, width / across, height / down)
    return draw_panel(columns, heading=heading, rulers=rulers, mark=mark, across=look.across)


def check_region(region: Sequence[float], area: Box) -> Box:
    """Refuse a region that does not touch the picture's box."""
    try:
        x, y, width, height = (float(value) for value in region)
        if not isfinite(x + y + width + height):
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"A region is x, y, width, height in level-0 pixels. Got {region!r} instead."
        ) from None
    across = min(x + width, area[0] + area[2]) - max(x, area[0])
    down = min(y + height, area[1] + area[3]) - max(y, area[1])
    if min(width, height, across, down) <= 0:
        here, there = (",".join(f"{value:g}" for value in box) for box in (region, area))
        raise InputError(f"The region {here} has no part of the slide's area {there} (x,y,width,height).")
    return x, y, width, height


def _column(scene: Scene, explanation: Explanation) -> PanelColumn:
    scale, look, task = scene.scales[explanation.column], scene.look, scene.caption.task
    images = tuple(
        view.overlay(explanation, scale, alpha=look.alpha, tissue=look.tissue) for view in scene.views
    )
    pairs = scene.pairs.get(explanation.target)
    lines: tuple[Lines, ...] = ()
    if pairs is not None:
        lines = tuple(pair_lines(pairs, view.canvas, most=look.pairs) for view in scene.views)
    words = subtitle(explanation, task) + LEGEND * any(len(each.segments) for each in lines)
    note = beyond_scale(scale.share_beyond(explanation.scores), scale.times_beyond(explanation.scores))
    return PanelColumn(
        title(explanation),
        words,
        images,
        scale,
        ends(explanation, task),
        lines,
        note,
        scene.verdicts.get(explanation.column, ""),
    )


def pair_lines(pairs: Interactions, canvas: Canvas, *, most: int = DRAWN) -> Lines:
    """Draw the strongest pairs beyond three standard errors as lines: red if they add more together."""
    strongest = np.flatnonzero(pairs.sure)[:most]
    values = pairs.values[strongest]
    corner, step = np.tile(canvas.box[:2], 2), np.tile(canvas.downsample, 2)
    share = np.abs(values) / max(float(np.abs(pairs.values).max(initial=0.0)), 1e-30)
    return Lines(
        segments=(pairs.lines()[strongest] - corner) / step,
        colours=[RED if value > 0 else BLUE for value in values],
        widths=THINNEST + (THICKEST - THINNEST) * share,
    )


@register_service
def plot(explanation: Explanation, slide: Any = None, **look: Any) -> Any:
    """Draw the heatmap if the patches have places; else the scores by rank, as a matplotlib figure."""
    if slide is not None or _has_places(explanation):
        return heatmap(explanation, slide, **look)
    if look:
        raise InputError(
            f"Explanation {explanation.column} has no coordinates, so {', '.join(look)} cannot be used; "
            "call plot() without them to see the scores by rank."
        )
    figure = Picture(figsize=RANKED_SIZE, layout="constrained")
    axis = figure.subplots()
    scores = np.sort(explanation.scores)[::-1]
    rank = np.arange(1, len(scores) + 1)
    axis.fill_between(rank, scores, where=(scores > 0).tolist(), color=RED, step="mid", linewidth=0)
    axis.fill_between(rank, scores, where=(scores < 0).tolist(), color=BLUE, step="mid", linewidth=0)
    axis.plot(rank, scores, color="black", linewidth=0.6, drawstyle="steps-mid")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set(xlabel="patches, highest score first", ylabel="score")
    axis.set_title(f"{title(explanation)} {subtitle(explanation)}", fontsize=9)
    return figure


@register_service
def explanation_html(explanation: Explanation) -> str:
    """Show the explanation as HTML in a notebook: its title, its picture, its audit, its warnings."""
    picture = plot(explanation, **({"size": SMALL} if _has_places(explanation) else {}))
    png = io.BytesIO()
    picture.savefig(png, format="png", dpi=100)
    where = f" of {explanation.bag}" if explanation.bag else ""
    counts = f"{where}: {len(explanation)} patches, output {number(explanation.output)}"
    account = tag("p", "Scores of this method do not add up to the output.")
    if explanation.audit is not None:
        every = explanation.audit.as_dict()
        shares = {key: value for key, value in every.items() if value or key in ("output", "other")}
        head = [PARTS.get(key, "Output") for key in shares]
        account = table([[number(value) for value in shares.values()]], head=head)
    doubts = filter(None, [*explanation.warnings, explanation.patches.edge_note])
    return tag(
        "div",
        tag("p", tag("b", title(explanation)), f" {subtitle(explanation)}{counts}"),
        *(tag("p", f"\u26a0 {line}") for line in doubts),
        image(png.getvalue(), title(explanation)),
        account,
    )


@register_service
def run_html(run: Run) -> str:
    """Show a run as HTML in a notebook: its kind, counts, warnings, failures and first rows."""
    counts = f": {counted(len(run), 'slide')}, {len(run.failed)} failed"
    lines: list[object] = [join([tag("b", run.kind), " in ", tag("code", run.path), counts])]
    lines += [run.verdict.sentence] if run.verdict is not None else []
    lines += [f"warning: {text}" for text in run.warnings]
    lines += [f"{name}: {why}" for name, why in list(run.failed.items())[:ROWS]]
    try:
        rows = Html(run.table().head(ROWS).to_html(index=False))
    except FileError:  # the run has no table yet
        rows = Html()
    return join([*(tag("p", line) for line in lines), rows])


def _has_places(e: Explanation) -> bool:
    return e.coords is not None and e.patch_size is not None


# All files of one slide.


@dataclass(frozen=True)
class Order:
    """What to draw and how; empty `methods` and `targets` mean all."""

    pictures: tuple[str, ...] = ("panel", "overlay", "patches")
    formats: tuple[str, ...] = ("png",)
    exports: tuple[str, ...] = ("geojson",)
    methods: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    look: Look = field(default_factory=Look)
    scales: Mapping[str, Scale] = field(default_factory=dict)  # by method; empty: each slide has its own
    mpp: float | None = None
    patch_size: int | None = None
    frame: str = "bounds"
    downsample: int | None = None
    task: str = "classification"
    class_names: tuple[str, ...] | None = None
    verdict: RunVerdict | None = None  # on the maps of the run, for captions

    def __post_init__(self) -> None:
        for kind, names, choices in (
            ("picture", self.pictures, KINDS),
            ("export", self.exports, EXPORTS),
            ("tissue", (self.look.tissue,), TISSUES),
            ("frame", (self.frame,), FRAMES),
        ):
            check_names(kind, names, choices)
        if not self.pictures and not self.exports:
            raise InputError("There is nothing to draw; name pictures or exports.")

    def style(self) -> dict[str, Any]:
        """Return the settings that decide the look of a file."""
        names = ("look", "scales", "mpp", "patch_size", "frame", "downsample")
        style = {name: value for name, value in asdict(self).items() if name in names}
        style |= style.pop("look")
        if self.look.pairs == DRAWN:  # equal to the style of versions without lines
            del style["pairs"]
        return style

    @property
    def kinds(self) -> list[str]:
        """The kinds of files to write for each slide."""
        return [f"{kind}.{suffix}" for kind in self.pictures for suffix in self.formats] + [*self.exports]

    def select(self, explanations: Sequence[Explanation]) -> list[Explanation]:
        """Select the explanations of `methods`, in their order, and of `targets`."""
        check_names("method", self.methods, {e.method for e in explanations})
        shown = [e for e in explanations if self.shows(e.target, e.logits)]
        shown = without_repeats([e for e in shown if not self.methods or e.method in self.methods])
        return sorted(shown, key=lambda e: self.methods.index(e.method)) if self.methods else shown

    def shows(self, target: Target, logits: npt.ArrayLike) -> bool:
        """Whether a target is among `targets`."""
        if not self.targets or ALL in self.targets or str(target) in self.targets:
            return True
        return PREDICTED in self.targets and is_predicted(target, logits, self.task)


@dataclass(frozen=True)
class DrawingJob:
    """One slide to draw: its explanations, and its file if there is one.

    `drawn` are the files of the slide that an earlier call wrote, if its inputs are still the same; `note` is
    what that call said of the slide.
    """

    slide_id: str
    explanations: Path
    slide: Path | None = None
    fault: str = ""  # why the slide cannot be used
    drawn: Mapping[str, Entry] = field(default_factory=dict)
    note: str | None = None
    pairs: tuple[Path, ...] = ()  # its interactions, if the run has any
    row: Mapping[str, str] = field(default_factory=dict)  # of the run's table
    certificate: Path | None = None  # of `xmil evaluate`


@dataclass(frozen=True)
class Drawn:
    """What drawing one slide did: files written, files up to date, a warning about the slide.

    `beyond` is the largest share of patches beyond the colour scale of an explanation, 0 if no colours are
    drawn. `edge` is the patch edge if it is a guess.
    """

    written: int = 0
    kept: int = 0
    note: str | None = None
    beyond: float = 0.0
    edge: Patches | None = None


def cohort_scales(run: Run, order: Order) -> dict[str, Scale]:
    """Make one scale for each method, over all slides and targets; skip unreadable files."""
    scores: dict[str, list[npt.NDArray[Any]]] = {}
    signed: dict[str, bool] = {}
    for path in run.files.values():
        try:
            explanations = order.select(read_explanations(path))
        except XmilError:  # reported when the slide is drawn
            continue
        for e in explanations:
            scores.setdefault(e.method, []).append(e.scores.astype(np.float32))
            signed.setdefault(e.method, e.signed)
    return {
        method: order.look.scale(np.concatenate(several), signed=signed[method])
        for method, several in scores.items()
    }


def with_targets(run: Run, order: Order) -> Run:
    """Keep the slides that have one of the methods and targets; refuse names that no slide has."""
    if not order.targets and not order.methods:
        return run
    files = run.files
    columns_of = {name: _columns(path) for name, path in files.items()}
    methods = {method for columns in columns_of.values() for method, _, _ in columns}
    targets = {str(target) for columns in columns_of.values() for _, target, _ in columns}
    if methods:
        check_names("method", order.methods, methods)
        check_names("target", order.targets, targets | {PREDICTED, ALL})
    slides = {
        name: files[name]
        for name, columns in columns_of.items()
        if not columns or any(order.shows(target, logits) for _, target, logits in columns)
    }
    if not slides:
        raise InputError(f"{run.path}: no slide has an explanation of {', '.join(order.targets)}.")
    return Run(run.path, files=slides)


def _columns(path: Path) -> list[tuple[str, Target, Sequence[float]]]:
    """List methods, targets and logits of a file; empty if it is unreadable, which drawing it reports."""
    try:
        columns = read_header(path)["columns"].values()
        return [(about["method"], Target(**about["target"]), about["logits"]) for about in columns]
    except (XmilError, KeyError, TypeError):
        return []


def draw_slide(job: DrawingJob, *, order: Order, out: Path, slides: Path | None = None) -> Drawn:
    """Draw the files of a slide that are missing or changed; `slides` is the folder that must have it."""
    if job.fault:
        raise InputError(job.fault)
    if slides is not None and job.slide is None:
        raise InputError(
            f"{slides}: no slide named {job.slide_id!r} in this folder; put it there, or draw without "
            "`slides=`."
        )
    if job.explanations.is_symlink():
        raise InputError(f"{job.explanations}: a link; a run's folder is read without following links.")
    stored = read_explanations(job.explanations)
    explanations = order.select(stored)
    if not explanations:
        raise InputError(f"{job.explanations}: holds no explanation of {', '.join(order.targets)}.")
    verdicts = _verdicts(job, explanations, order, tested=stored[0].target)  # `xmil explain` tests the first
    targets = {e.target for e in explanations}
    every = [Interactions.load(path) for path in job.pairs] if order.look.pairs else []
    pairs = [each for each in every if each.target in targets]
    files = list(_files(job, explanations, pairs, order, out))
    due = [file for file in files if not _is_drawn(file.path, out, job.drawn)]
    beyond = 0.0
    if {*order.pictures, *order.exports} & {*KINDS, "colours"}:
        shares = [
            (order.scales.get(e.method) or order.look.scale(e.scores, signed=e.signed)).share_beyond(e.scores)
            for e in explanations
            if len(e)
        ]
        beyond = max(shares, default=0.0)
    if not due:
        edge = explanations[0].patches.guessed_edge if order.patch_size is None else None
        return Drawn(kept=len(files), beyond=beyond, edge=edge)
    with_views = any(file.kind in KINDS for file in due)
    with opened(job.slide, order.mpp) as slide:
        scene = Scene.of(
            [replace(e, bag=e.bag or job.slide_id) for e in explanations],
            slide,
            look=order.look,
            caption=caption(
                job.slide_id, job.row, explanations, task=order.task, class_names=order.class_names
            ),
            scales={e.column: order.scales[e.method] for e in explanations if e.method in order.scales},
            mpp=order.mpp,
            patch_size=order.patch_size,
            with_views=with_views,
        ).with_pairs(pairs)
        scene = replace(scene, verdicts=verdicts)
        faults: dict[str, XmilError] = {}
        for file in due:
            make_folder(file.path.parent)
            try:
                _write(file, scene, order)
            except WriteError:
                raise
            except XmilError as error:  # still write the other formats
                faults.setdefault(str(error), error)
    if faults:
        raise next(iter(faults.values()))
    names = [scene.caption.name, *(str(e.target) for e in scene.explanations)]
    note = scene.note or (spelt_out("".join(names)) if with_views else None)
    edge = scene.explanations[0].patches.guessed_edge
    return Drawn(len(due), len(files) - len(due), note, beyond, edge)


def _is_drawn(path: Path, out: Path, drawn: Mapping[str, Entry]) -> bool:
    """Whether a file is as an earlier call wrote it."""
    entry = drawn.get(path.relative_to(out).as_posix())
    return entry is not None and not file_fault(path, entry)


def _verdicts(
    job: DrawingJob, explanations: Sequence[Explanation], order: Order, *, tested: Target
) -> dict[str, str]:
    """Say what tests say of each map; a damaged certificate says nothing."""
    certificate: Mapping[str, Any] | None = None
    with suppress(FileError):
        certificate = None if job.certificate is None else read_json(job.certificate)
    return {
        e.column: verdict_on(e, order.verdict, tested=tested, certificate=certificate) for e in explanations
    }


@dataclass(frozen=True)
class File:
    """One file to write: its kind, and which explanation it shows, None for all."""

    kind: str
    path: Path
    column: str | None = None
    target: Target | None = None  # of interactions


def _files(
    job: DrawingJob,
    explanations: Sequence[Explanation],
    pairs: Sequence[Interactions],
    order: Order,
    out: Path,
) -> Iterator[File]:
    """List every file of a slide: `<kind>/<slide>[.<method>.<target>].<suffix>`, and lines for QuPath."""
    kinds = [
        (kind, suffix, kind in EACH)
        for kind in order.pictures
        if job.slide is not None or kind not in NEED_SLIDE
        for suffix in (("png",) if kind == "map" else order.formats)
    ]
    kinds += [(kind, EXPORTS[kind].suffix, EXPORTS[kind].each) for kind in order.exports]
    for kind, suffix, is_each in kinds:
        for e in explanations if is_each else (None,):
            about = "" if e is None else f".{_safe(e.method)}.{_safe(str(e.target))}"
            path = out / kind / f"{job.slide_id}{about}.{suffix}"
            yield File(kind, path, None if e is None else e.column)
    for each in pairs if {"geojson", "qupath"} & set(order.exports) else ():
        name = f"{job.slide_id}.{_safe(str(each.target))}.geojson"
        yield File(PAIRS, out / PAIRS / name, target=each.target)


def _write(file: File, scene: Scene, order: Order) -> None:
    shown = tuple(e for e in scene.explanations if file.column in (None, e.column))
    if file.kind in KINDS:
        picture = draw(file.kind, replace(scene, explanations=shown))
        if isinstance(picture, Picture):
            picture.write(file.path)
        else:
            write_atomically(file.path, lambda part: picture.save(part, format="PNG"))
        return
    frame = export_frame(shown[0].boxes(), scene.slide, frame=order.frame)
    if file.target is not None:
        write_pairs(file.path, scene.pairs[file.target], origin=frame[:2])
    else:
        task, scales = scene.caption.task, scene.scales
        request = Exported(shown, frame, task, scales, mpp=scene.mpp, downsample=order.downsample)
        EXPORTS[file.kind].write(file.path, request)


def _safe(name: str) -> str:
    """Replace spaces and characters that file systems refuse in a name.

    >>> _safe("HPV+/-: yes")
    'HPV+_-__yes'
    """
    return re.sub(r'[<>:"/\\|?*\s\x00-\x1f]', "_", name)
