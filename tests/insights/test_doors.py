"""The function `xmil.insight` and the room `xmil.insights`, whichever comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

FUNCTION = "import xmil; assert callable(xmil.insight)"
ROOM = "import xmil.insights.run; from xmil.insights import find_strategies"


@pytest.mark.parametrize("lines", [(FUNCTION, ROOM, FUNCTION), (ROOM, FUNCTION)])
def test_function_and_room_live_side_by_side(lines: tuple[str, ...]) -> None:
    check = "import xmil, xmil.insights as room; assert xmil.insight is room.run.insight"
    subprocess.run([sys.executable, "-c", "\n".join([*lines, check])], check=True)
