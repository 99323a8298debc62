"""An export: the box of each explanation's highest patch."""

from __future__ import annotations

import json
from pathlib import Path

from xmil.core.durable import write_text
from xmil.heatmaps import EXPORTS, Export, Exported


def write(path: Path, given: Exported) -> None:
    """The boxes by column."""
    boxes = {e.column: e.boxes()[int(e.scores.argmax())].tolist() for e in given.explanations}
    write_text(path, json.dumps(boxes))


EXPORTS.add("best_box", Export(write, "best.json"))
