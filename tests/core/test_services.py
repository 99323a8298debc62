"""What nouns do through higher rooms, in a fresh process that has imported nothing but a noun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import xmil
from xmil.core.services import service

MAKE = """
import sys
import numpy as np
from xmil.core.explanation import Explanation
from xmil.core.inside import Inside, InsideAudit
from xmil.core.interactions import Interactions
from xmil.core.task import Target

numbers = np.array([0.5, -1.0], np.float32)
e = Explanation(numbers, np.zeros(2, np.float32), 0.0, "lrp", Target(1), True)
pairs = Interactions(np.array([[0, 1]]), numbers[:1], numbers[:1], numbers[:1], Target(1), 0.0)
audit = InsideAudit(numbers[:1], numbers[:1], numbers[:1], numbers[:1])
boxes = np.array([[0, 0, 8, 8]])
inside = Inside(np.ones((1, 2, 2), np.float32), boxes, np.array([0]), audit, "tokens", "1", "e")
assert not {"xmil.storage", "xmil.heatmaps"} & set(sys.modules)
"""


SAVE = """
e.save("e.parquet")
pairs.save("p.parquet")
inside.save("i.npz")
assert Explanation.load("e.parquet").scores.tolist() == [0.5, -1.0]
assert Interactions.load("p.parquet").pairs.tolist() == [[0, 1]]
assert Inside.load("i.npz").maps.shape == (1, 2, 2)
assert "xmil.heatmaps" not in sys.modules
"""
DRAW = """
assert e.plot().axes
assert "LRP" in e._repr_html_()
assert inside.plot().axes
"""


@pytest.mark.parametrize("action", [SAVE, DRAW], ids=["save", "draw"])
def test_a_noun_alone_saves_loads_and_draws_without_torch(action: str, tmp_path: Path) -> None:
    code = f"{MAKE}\n{action}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_every_service_is_registered_by_the_room_that_the_front_names() -> None:
    for module, names in xmil._SERVICES.items():
        for name in names.split():
            assert service(name).__module__ == f"xmil.{module}"
