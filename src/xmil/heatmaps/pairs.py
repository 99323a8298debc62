"""Interactions on a slide: lines between patches that act together, in pictures and for QuPath."""

from __future__ import annotations

import json
from dataclasses import replace
from os import PathLike
from uuid import NAMESPACE_URL, uuid5

import numpy as np

from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.core.interactions import Interactions
from xmil.core.storage import write_text
from xmil.heatmaps.canvas import Canvas
from xmil.heatmaps.exports import AGAINST, SUPPORTS
from xmil.heatmaps.panel import BLUE, RED, Lines
from xmil.slides.frames import KEY, frame_header

DRAWN = 30  # the strongest sure pairs: more lines hide the slide
THINNEST, THICKEST = 0.05, 0.22  # in text sizes
TOGETHER, INSTEAD = "say more together", "say less together"
LEGEND = "; lines: red say more together, blue less"


def placed(pairs: Interactions, explanation: Explanation) -> Interactions:
    """The pairs at the places of an explanation's patches; both are of one bag."""
    if explanation.coords is None or pairs.names is not None:
        return pairs
    if len(pairs) and int(pairs.pairs.max()) >= len(explanation.scores):
        raise InputError(
            f"The interactions are of patches up to {int(pairs.pairs.max())}, but the explanation has "
            f"{len(explanation.scores)}; they are of another bag."
        )
    corners = explanation.coords[pairs.pairs].reshape(len(pairs), 4)
    return replace(pairs, corners=corners, patch_size=explanation.patch_size)


def pair_lines(pairs: Interactions, canvas: Canvas, *, most: int = DRAWN) -> Lines:
    """The strongest pairs beyond three standard errors, as lines on a canvas: red where more together."""
    chosen = np.flatnonzero(pairs.sure)[:most]
    values = pairs.values[chosen]
    corner, step = np.tile(canvas.box[:2], 2), np.tile(canvas.downsample, 2)
    share = np.abs(values) / max(float(np.abs(pairs.values).max(initial=0.0)), 1e-30)
    return Lines(
        segments=(pairs.lines()[chosen] - corner) / step,
        colours=[RED if value > 0 else BLUE for value in values],
        widths=THINNEST + (THICKEST - THINNEST) * share,
    )


def write_pairs(path: str | PathLike[str], pairs: Interactions, *, origin: tuple[int, int] = (0, 0)) -> None:
    """Write the pairs as lines that QuPath reads: annotations with value, standard error and the pair alone.

    Coordinates count from `origin`, which the file names.
    """
    name = pairs.bag or ""
    space = uuid5(NAMESPACE_URL, f"xmil:{name}:pairs:{pairs.target}")
    segments = (pairs.lines() - np.tile(origin, 2)).tolist()
    features = []
    for i, (x0, y0, x1, y1) in enumerate(segments):
        value = float(pairs.values[i])
        words, colour = (TOGETHER, SUPPORTS) if value > 0 else (INSTEAD, AGAINST)
        numbers = {"value": value, "stderr": float(pairs.stderr[i]), "alone": float(pairs.alone[i])}
        feature = {
            "type": "Feature",
            "id": str(uuid5(space, str(i))),
            "geometry": {"type": "LineString", "coordinates": [[x0, y0], [x1, y1]]},
            "properties": {
                "objectType": "annotation",
                "name": f"{pairs.pairs[i, 0]} and {pairs.pairs[i, 1]}",
                "classification": {"name": words, "color": list(colour)},
                "measurements": numbers,
            },
        }
        features.append(json.dumps(feature, ensure_ascii=False))
    head = f'{{"type":"FeatureCollection","{KEY}":{json.dumps(frame_header(name, origin))},"features":['
    write_text(path, head + "\n" + ",\n".join(features) + "\n]}\n")
