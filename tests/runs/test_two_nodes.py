"""Two nodes are as good as one process, and one of them may die on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_two_nodes_equal_one_process_and_a_dead_node_costs_no_slide(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.runs.two_nodes", str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert (tmp_path / "found.json").exists(), done.stdout[-1000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert 2 <= found.pop("written when the node died") < 16  # it died on the way
    assert found == {
        "nodes at work": 2,
        "the node is dead": True,
        "failed": {"one": 0, "two": 0, "killed": 0},
        "equal": {"two": True, "killed": True},
    }
