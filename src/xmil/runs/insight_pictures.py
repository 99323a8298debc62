"""Pictures of an insight run: patches that stand for a concept, and those of slides that a shortcut names."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from xmil.core.errors import XmilError
from xmil.core.storage import read_explanations, write_atomically
from xmil.findings.shortcuts import Association
from xmil.runs.insight_slide import chosen_explanation

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun

EDGE, ACROSS, GAP = 96, 5, 4  # pixels of a patch, patches in a row of a sheet, pixels between them
STRONGEST = 3  # patches of an accused slide


def accused_patches(run: InsightRun, shortcuts: Sequence[Association]) -> list[tuple[str, bytes]]:
    """The strongest patches of the slides that the first shortcut names."""
    named = [a for a in shortcuts if a.found][:1]
    wanted = []
    for slide in named[0].slides if named else ():
        e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
        wanted += [(slide, int(row)) for row in np.argsort(-np.abs(e.scores), kind="stable")[:STRONGEST]]
    return patch_pictures(run, wanted)


def patch_pictures(run: InsightRun, patches: Sequence[tuple[str, int]]) -> list[tuple[str, bytes]]:
    """Slides and JPEGs of patches, where their slides are at hand and can be read."""
    from PIL import Image

    from xmil.heatmaps.canvas import place_on
    from xmil.heatmaps.sheets import cut_patch
    from xmil.slides import open_slide

    made: dict[tuple[str, int], bytes] = {}
    for slide in dict.fromkeys(slide for slide, _ in patches if slide in run.pictures):
        try:
            with open_slide(run.pictures[slide]) as opened:
                boxes = place_on(read_explanations(run.run.file(slide))[0], opened).boxes()
                for row in [row for name, row in patches if name == slide]:
                    held = io.BytesIO()
                    pixels = cut_patch(opened, boxes[row], EDGE)
                    Image.fromarray(pixels).save(held, format="JPEG", quality=85)
                    made[slide, row] = held.getvalue()
        except XmilError:
            continue  # the slide's own row says what is wrong with it
    return [(patch[0], made[patch]) for patch in patches if patch in made]


def write_sheet(run: InsightRun, concept: int, pictures: Sequence[bytes]) -> None:
    """A page of the atlas: the patches of a concept, strongest first."""
    from PIL import Image

    if not pictures:
        return
    step, rows = EDGE + GAP, -(-len(pictures) // ACROSS)
    sheet = Image.new("RGB", (ACROSS * step + GAP, rows * step + GAP), "white")
    for i, data in enumerate(pictures):
        place = (GAP + i % ACROSS * step, GAP + i // ACROSS * step)
        sheet.paste(Image.open(io.BytesIO(data)), place)
    path = run.out / "atlas" / f"concept_{concept}.jpg"
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, lambda part: sheet.save(part, format="JPEG", quality=90))
