"""`xmil.heatmap`: explanations as a picture, over the slide where it is at hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import isfinite
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, get_args

from xmil.core.bag import IntArray
from xmil.core.errors import InputError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.interactions import Interactions
from xmil.core.target import Target
from xmil.heatmaps.canvas import Box, View, as_image, check_fit, place_on, same_places, whole_box
from xmil.heatmaps.pairs import DRAWN, LEGEND, pair_lines, placed
from xmil.heatmaps.panel import Heading, Lines, PanelColumn, Picture, Ruler, draw_panel
from xmil.heatmaps.scale import Scale
from xmil.heatmaps.sheets import draw_sheet
from xmil.heatmaps.words import Caption, beyond_scale, ends, subtitle, title, without_repeats

if TYPE_CHECKING:
    from PIL.Image import Image

    from xmil.slides.slide import Slide

Kind = Literal["overlay", "side", "panel", "patches", "map"]
KINDS: tuple[str, ...] = get_args(Kind)
ENLARGE = 4.0  # pixels of a zoomed region for one of level 0, at most


@dataclass(frozen=True)
class Look:
    """How scores are drawn; see `heatmap`."""

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

    def scale(self, explanation: Explanation) -> Scale:
        """The scale of one explanation's own scores."""
        return Scale.of(
            explanation.scores,
            signed=explanation.signed,
            clip=self.clip,
            percentile=self.percentile,
            colours=self.colours.get(explanation.signed),
        )


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
    with _opened(slide, mpp) as opened:
        scene = Scene.of(several, opened, look=look, caption=caption, mpp=mpp, patch_size=patch_size)
        scene = scene.joined([pairs] if isinstance(pairs, Interactions) else pairs or ())
        if scene.note is not None:
            warnings.warn(scene.note, stacklevel=2)
        scales = None if scale is None else {e.column: scale for e in several}
        return draw(kind, replace(scene, scales={**scene.scales, **(scales or {})}))


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
        seen: bool = True,
    ) -> Scene:
        """Place the explanations and look at the slide, unless `seen` is false: exports need no picture.

        Scales that are not given are each explanation's own.
        """
        placed = tuple(place_on(e, slide, mpp=mpp, patch_size=patch_size) for e in explanations)
        boxes = same_places(placed)
        note = None if slide is None else check_fit(boxes, slide, placed[0].slide_size)
        views = _views(boxes, slide, look) if seen else ()
        own = {e.column: (scales or {}).get(e.column) or look.scale(e) for e in placed}
        named = replace(caption, name=caption.name or ("" if slide is None else slide.name))
        return cls(placed, slide, look, named, own, views, note)

    def joined(self, several: Sequence[Interactions]) -> Scene:
        """The scene with interactions, each for the explanations of its target; one for none is refused."""
        known = {e.target for e in self.explanations}
        for pairs in several:
            if pairs.target not in known:
                shown = ", ".join(sorted({str(e.target) for e in self.explanations}))
                raise InputError(f"The interactions are for {pairs.target}, the explanations for {shown}.")
        first = self.explanations[0]
        return replace(self, pairs={pairs.target: placed(pairs, first) for pairs in several})

    @property
    def heading(self) -> Heading:
        """The slide's name, label and prediction, and what the explanations warn of."""
        told = dict.fromkeys(text for e in self.explanations for text in e.warnings)
        return Heading(self.caption.name, self.caption.facts(), tuple(told))

    @property
    def mpp(self) -> float | None:
        """Microns per level-0 pixel, from the slide or the explanations."""
        return (None if self.slide is None else self.slide.mpp) or self.explanations[0].mpp


def draw(kind: str, scene: Scene) -> Picture | Image:
    """One kind of picture of a scene; all but panels show its first explanation."""
    if kind not in KINDS:
        raise unknown_name("picture", kind, KINDS)
    first = scene.explanations[0]
    if kind == "map":
        return as_image(scene.views[-1].heat(first, scene.scales[first.column]))
    if kind == "patches":
        return _sheet(only(scene, first))
    if kind in ("side", "patches") and scene.slide is None:
        raise InputError(f"The picture {kind!r} needs the slide; give it, or draw 'overlay' or 'panel'.")
    scene = scene if kind == "panel" else only(scene, first)
    columns = [_column(scene, e) for e in scene.explanations]
    if kind != "overlay" and scene.slide is not None:
        columns.insert(0, _slide_column(scene))
    rulers = [_ruler(view, scene.mpp) for view in scene.views]
    mark = _mark(scene) if len(scene.views) > 1 else None
    return draw_panel(columns, heading=scene.heading, rulers=rulers, mark=mark, across=scene.look.across)


def only(scene: Scene, explanation: Explanation) -> Scene:
    """The same scene with one of its explanations."""
    return replace(scene, explanations=(explanation,))


def checked_region(region: Sequence[float], whole: Box) -> Box:
    """A region that touches the picture's box, or an error with the box."""
    try:
        x, y, width, height = (float(value) for value in region)
        if not isfinite(x + y + width + height):
            raise ValueError
    except (TypeError, ValueError):
        message = f"A region is x, y, width, height in level-0 pixels. Got {region!r} instead."
        raise InputError(message) from None
    across = min(x + width, whole[0] + whole[2]) - max(x, whole[0])
    down = min(y + height, whole[1] + whole[3]) - max(y, whole[1])
    if min(width, height, across, down) <= 0:
        asked, known = (",".join(f"{value:g}" for value in box) for box in (region, whole))
        raise InputError(f"The region {asked} has no part of the slide's area {known} (x,y,width,height).")
    return x, y, width, height


def _views(boxes: IntArray, slide: Slide | None, look: Look) -> tuple[View, ...]:
    """The whole slide, then the zoomed region."""
    whole = whole_box(boxes, slide)
    first = View.of(boxes, whole, slide=slide, longest=look.size)
    if look.region is None:
        return (first,)
    area = checked_region(look.region, whole)
    return first, View.of(boxes, area, slide=slide, longest=max(first.canvas.size), enlarge=ENLARGE)


def _sheet(scene: Scene) -> Picture:
    if scene.slide is None:
        raise InputError("The picture 'patches' needs the slide; give it, or draw 'overlay' or 'panel'.")
    first, look = scene.explanations[0], scene.look
    return draw_sheet(
        first,
        scene.slide,
        scene.scales[first.column],
        heading=scene.heading,
        top=look.top,
        task=scene.caption.task,
    )


def _column(scene: Scene, explanation: Explanation) -> PanelColumn:
    scale, look = scene.scales[explanation.column], scene.look
    images = tuple(
        view.overlay(explanation, scale, alpha=look.alpha, tissue=look.tissue) for view in scene.views
    )
    task = scene.caption.task
    pairs = scene.pairs.get(explanation.target)
    lines: tuple[Lines, ...] = ()
    if pairs is not None:
        lines = tuple(pair_lines(pairs, view.canvas, most=look.pairs) for view in scene.views)
    drawn = any(len(each.segments) for each in lines)
    words = subtitle(explanation, task) + LEGEND * drawn
    note = beyond_scale(scale.share_beyond(explanation.scores))
    return PanelColumn(title(explanation), words, images, scale, ends(explanation, task), lines, note)


def _slide_column(scene: Scene) -> PanelColumn:
    images = tuple(view.background for view in scene.views if view.background is not None)
    return PanelColumn("Slide", "", images)


def _ruler(view: View, mpp: float | None) -> Ruler | None:
    width = view.canvas.size[0]
    return Ruler.fit(width, None if mpp is None else mpp * view.canvas.downsample[0])


def _mark(scene: Scene) -> tuple[float, float, float, float]:
    """The region in pixels of the whole picture."""
    (x, y, width, height), whole = scene.views[1].canvas.box, scene.views[0].canvas
    across, down = whole.downsample
    return (x - whole.box[0]) / across, (y - whole.box[1]) / down, width / across, height / down


@contextmanager
def _opened(slide: Slide | str | PathLike[str] | None, mpp: float | None) -> Iterator[Slide | None]:
    """A slide opened here is closed here; one that was handed in stays open."""
    from xmil.slides.open import open_slide

    held: Any = open_slide(slide, mpp) if isinstance(slide, str | PathLike) else nullcontext(slide)
    with held as opened:
        yield opened
