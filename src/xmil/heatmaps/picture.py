"""`xmil.heatmap`: explanations as a picture, over the slide if it is at hand; and as HTML in notebooks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError, InputError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.interactions import Interactions
from xmil.core.task import Target
from xmil.core.text import counted
from xmil.heatmaps.canvas import Box, Canvas, View, check_fit, opened, picture_box, place_on, same_places
from xmil.heatmaps.pages import Html, image, join, table, tag
from xmil.heatmaps.panel import Heading, Lines, PanelColumn, Picture, Ruler, draw_panel, draw_sheet
from xmil.heatmaps.scale import BLUE, RED, Scale
from xmil.heatmaps.words import Caption, beyond_scale, ends, number, subtitle, title, without_repeats

if TYPE_CHECKING:
    from PIL.Image import Image

    from xmil.slides.slide import Slide
    from xmil.storage import Run

Kind = Literal["overlay", "side", "panel", "patches", "map"]
KINDS: tuple[str, ...] = get_args(Kind)
NEED_SLIDE = ("side", "patches")
ENLARGE = 4.0  # pixels of a zoomed region for one of level 0, at most
DRAWN = 30  # the strongest sure pairs: more lines hide the slide
THINNEST, THICKEST = 0.05, 0.22  # lines between pairs, in text sizes
LEGEND = "; lines: red say more together, blue less"
RANKED_SIZE = (5.0, 3.0)  # inches
ROWS = 10  # of a run in a notebook
SMALL = 640  # pixels of the longer edge in a notebook's cell


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
        about = {"clip": self.clip, "percentile": self.percentile, "colours": self.colours.get(signed)}
        return Scale.of(scores, signed=signed, **about)  # type: ignore[arg-type]


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
) -> Picture | Image:
    """Draw an explanation, or several in a panel, over the slide (a path or an open one) or on their own.

    `picture`: `overlay` (default), `side` (slide and overlay), `panel` (default for several), `patches`
    (highest and lowest, cut from the slide), each a matplotlib figure; `map` is a transparent Pillow image of
    the colours alone, to be laid over the slide's scanned area at the same size. `clip`: `whiskers`,
    `percentile` or `none`. `tissue` under the colours: `grey` or `colour`. `region` (x, y, width, height in
    level-0 pixels) zooms in. `size`: pixels of a picture's longer edge. `scale` replaces the scores' own.
    `pairs`, from `xmil.interactions` (a list for several targets), are lines between patches. Patches whose
    sign is not sure are hatched.

    >>> import numpy as np
    >>> from xmil import Explanation, Target
    >>> e = Explanation(np.array([1.0, -1.0]), np.zeros(2), 0.0, "lrp", Target(1), True,
    ...     coords=np.array([[0, 0], [256, 0]]), patch_size=256)
    >>> heatmap(e, picture="map").size
    (768, 512)
    """
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
        if scale is not None:
            scene = replace(scene, scales={e.column: scale for e in several})
        return draw(kind, scene)


@dataclass(frozen=True, eq=False)
class Scene:
    """All that a picture of one slide needs: placed explanations, the open slide, scales and words."""

    explanations: tuple[Explanation, ...]
    slide: Slide | None
    look: Look
    caption: Caption
    scales: Mapping[str, Scale]
    views: tuple[View, ...]
    note: str | None = None  # what is doubtful about the slide
    pairs: Mapping[Target, Interactions] = field(default_factory=dict)

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
        """Place the explanations and look at the slide; exports need no picture: `with_views=False`.

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
                names = ", ".join(sorted(map(str, targets)))
                raise InputError(f"The interactions are for {pairs.target}, the explanations for {names}.")
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

    def only(self, explanation: Explanation) -> Scene:
        """The same scene with one of its explanations."""
        return replace(self, explanations=(explanation,))

    @property
    def heading(self) -> Heading:
        """The slide's name, label and prediction, and the explanations' warnings."""
        lines = dict.fromkeys(text for e in self.explanations for text in e.warnings)
        return Heading(self.caption.name, self.caption.facts(), tuple(lines))

    @property
    def mpp(self) -> float | None:
        """Microns per level-0 pixel, from the slide or the explanations."""
        return (None if self.slide is None else self.slide.mpp) or self.explanations[0].mpp


def draw(kind: str, scene: Scene) -> Picture | Image:
    """Draw one kind of picture of a scene; all but panels show its first explanation."""
    if kind not in KINDS:
        raise unknown_name("picture", kind, KINDS)
    first, look, slide = scene.explanations[0], scene.look, scene.slide
    if kind == "map":
        from PIL import Image

        return Image.fromarray(np.ascontiguousarray(scene.views[-1].heat(first, scene.scales[first.column])))
    if kind in NEED_SLIDE and slide is None:
        raise InputError(f"The picture {kind!r} needs the slide; give it, or draw 'overlay' or 'panel'.")
    scene = scene if kind == "panel" else scene.only(first)
    if kind == "patches" and slide is not None:
        scale, task = scene.scales[first.column], scene.caption.task
        return draw_sheet(first, slide, scale, heading=scene.heading, top=look.top, task=task)
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
    return draw_panel(columns, heading=scene.heading, rulers=rulers, mark=mark, across=look.across)


def check_region(region: Sequence[float], area: Box) -> Box:
    """Refuse a region that does not touch the picture's box."""
    try:
        x, y, width, height = (float(value) for value in region)
        if not isfinite(x + y + width + height):
            raise ValueError
    except (TypeError, ValueError):
        message = f"A region is x, y, width, height in level-0 pixels. Got {region!r} instead."
        raise InputError(message) from None
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
    note = beyond_scale(scale.share_beyond(explanation.scores))
    return PanelColumn(title(explanation), words, images, scale, ends(explanation, task), lines, note)


def pair_lines(pairs: Interactions, canvas: Canvas, *, most: int = DRAWN) -> Lines:
    """Draw the strongest pairs beyond three standard errors as lines: red where they say more together."""
    strongest = np.flatnonzero(pairs.sure)[:most]
    values = pairs.values[strongest]
    corner, step = np.tile(canvas.box[:2], 2), np.tile(canvas.downsample, 2)
    share = np.abs(values) / max(float(np.abs(pairs.values).max(initial=0.0)), 1e-30)
    return Lines(
        segments=(pairs.lines()[strongest] - corner) / step,
        colours=[RED if value > 0 else BLUE for value in values],
        widths=THINNEST + (THICKEST - THINNEST) * share,
    )


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


def explanation_html(explanation: Explanation) -> str:
    """Show the explanation as HTML in a notebook: its words, its picture, its account, its warnings."""
    picture = plot(explanation, **({"size": SMALL} if _has_places(explanation) else {}))
    png = io.BytesIO()
    picture.savefig(png, format="png", dpi=100)
    where = f" of {explanation.bag}" if explanation.bag else ""
    counts = f"{where}: {len(explanation)} patches, output {number(explanation.output)}"
    account = tag("p", "This method does not account for the output.")
    if explanation.audit is not None:
        every = explanation.audit.as_dict()
        shares = {key: value for key, value in every.items() if value or key in ("output", "other")}
        head = [key.replace("_", " ") for key in shares]
        account = table([[number(value) for value in shares.values()]], head=head)
    return tag(
        "div",
        tag("p", tag("b", title(explanation)), f" {subtitle(explanation)}{counts}"),
        *(tag("p", f"\u26a0 {line}") for line in explanation.warnings),
        image(png.getvalue(), title(explanation)),
        account,
    )


def run_html(run: Run) -> str:
    """Show a run as HTML in a notebook: its kind, counts, warnings, failures and first rows."""
    counts = f": {counted(len(run), 'slide')}, {len(run.failed)} failed"
    lines: list[object] = [join([tag("b", run.kind), " in ", tag("code", run.path), counts])]
    lines += [f"warning: {text}" for text in run.warnings]
    lines += [f"{name}: {why}" for name, why in list(run.failed.items())[:ROWS]]
    try:
        rows = Html(run.table().head(ROWS).to_html(index=False))
    except FileError:  # the run has not got that far
        rows = Html()
    return join([*(tag("p", line) for line in lines), rows])


def _has_places(e: Explanation) -> bool:
    return e.coords is not None and e.patch_size is not None
