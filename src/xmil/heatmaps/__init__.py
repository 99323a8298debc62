"""Drawing and exporting saved explanations; never imports torch.

Names are imported on first use, because matplotlib takes a second and most of them do not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xmil.heatmaps.canvas import (
        HATCH,
        Canvas,
        Cells,
        View,
        blend,
        check_fit,
        opened,
        picture_box,
        place_on,
    )
    from xmil.heatmaps.drawing import (
        NEED_SLIDE,
        DrawingJob,
        Look,
        Order,
        cohort_scales,
        draw_slide,
        heatmap,
        pair_lines,
        plot,
        with_targets,
    )
    from xmil.heatmaps.exports import (
        EXPORTS,
        Export,
        Exported,
        read_asap,
        write_geojson,
        write_pairs,
    )
    from xmil.heatmaps.inside import (
        draw_between,
        draw_inside,
        half_level,
        lay_over,
        write_inside_geojson,
        write_inside_tiff,
    )
    from xmil.heatmaps.pages import Html, bullets, figure, image, join, page, small, table, tag
    from xmil.heatmaps.panel import Picture, cut_patch, extremes
    from xmil.heatmaps.pyramids import Pyramid, write_colours, write_scores
    from xmil.heatmaps.style import (
        BEYOND,
        BLUE,
        LIGHT_BLUE,
        LIGHT_RED,
        RED,
        SIGNED,
        STEPS,
        Scale,
        clip_limits,
        drawable,
        families,
        letter_figure,
        method_colour,
        new_figure,
        spelt_out,
        write_figure,
    )
    from xmil.heatmaps.words import (
        Caption,
        beyond_scale,
        caption,
        ends,
        number,
        subtitle,
        title,
        verdict_on,
        why_one_colour,
        without_repeats,
    )

_NAMES = {
    "canvas": "HATCH Canvas Cells View blend check_fit opened picture_box place_on",
    "drawing": "DrawingJob Look NEED_SLIDE Order cohort_scales heatmap "
    "draw_slide pair_lines plot with_targets",
    "exports": "EXPORTS Export Exported read_asap write_geojson write_pairs",
    "inside": "draw_between draw_inside half_level lay_over write_inside_geojson write_inside_tiff",
    "pages": "Html bullets figure image join page small table tag",
    "panel": "Picture cut_patch extremes",
    "pyramids": "Pyramid write_colours write_scores",
    "style": "BEYOND BLUE LIGHT_BLUE LIGHT_RED RED SIGNED STEPS Scale clip_limits drawable families "
    "letter_figure method_colour new_figure spelt_out write_figure",
    "words": "Caption beyond_scale caption ends number subtitle title verdict_on "
    "why_one_colour without_repeats",
}
_HOME = {name: f"xmil.heatmaps.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BEYOND",
    "BLUE",
    "EXPORTS",
    "HATCH",
    "LIGHT_BLUE",
    "LIGHT_RED",
    "NEED_SLIDE",
    "RED",
    "SIGNED",
    "STEPS",
    "Canvas",
    "Caption",
    "Cells",
    "DrawingJob",
    "Export",
    "Exported",
    "Html",
    "Look",
    "Order",
    "Picture",
    "Pyramid",
    "Scale",
    "View",
    "beyond_scale",
    "blend",
    "bullets",
    "caption",
    "check_fit",
    "clip_limits",
    "cohort_scales",
    "cut_patch",
    "draw_between",
    "draw_inside",
    "draw_slide",
    "drawable",
    "ends",
    "extremes",
    "families",
    "figure",
    "half_level",
    "heatmap",
    "image",
    "join",
    "lay_over",
    "letter_figure",
    "method_colour",
    "new_figure",
    "number",
    "opened",
    "page",
    "pair_lines",
    "picture_box",
    "place_on",
    "plot",
    "read_asap",
    "small",
    "spelt_out",
    "subtitle",
    "table",
    "tag",
    "title",
    "verdict_on",
    "why_one_colour",
    "with_targets",
    "without_repeats",
    "write_colours",
    "write_figure",
    "write_geojson",
    "write_inside_geojson",
    "write_inside_tiff",
    "write_pairs",
    "write_scores",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'xmil.heatmaps' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOME[name]), name)
    return value
