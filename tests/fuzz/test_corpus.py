"""What fuzzing found stays found: the kept inputs, and some fresh ones, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import judged
from tests.fuzz.entries import ENTRIES

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
NAMES = {name.replace(" ", "_"): name for name in ENTRIES}
KEPT = sorted(CORPUS.glob("*/*"))


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_not_damaged_is_read(name: str, tmp_path: Path) -> None:
    """Otherwise fuzzing would only knock at a closed door."""
    if ENTRIES[name].lacks:
        pytest.skip(f"needs {', '.join(ENTRIES[name].lacks)}")
    assert judged(name, ENTRIES[name].make(tmp_path)) == ("read", "")


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_kept_inputs(path: Path) -> None:
    """Each input lies under the name of its entry point, as the one file or folder of a folder."""
    name = NAMES[path.parent.name]
    if ENTRIES[name].lacks:
        pytest.skip(f"needs {', '.join(ENTRIES[name].lacks)}")
    (held,) = path.iterdir()
    assert judged(name, held)[1] == ""


def test_code_that_an_input_runs_would_be_seen() -> None:
    """In a process of its own: the watch stays as long as its process."""
    lines = [
        "import pickle",
        "from tests.fuzz.hostile import CALLS, Watch, called",
        "watch, spoilt = Watch(), pickle.dumps(called(*CALLS[0]))",
        "assert watch.taken() == []",
        "pickle.loads(spoilt)",
        "assert watch.taken() == ['os.system']",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, env=_paths(), check=True)


def _paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def test_every_entry_point_withstands_fresh_inputs(full: bool) -> None:
    inputs = 4000 if full else 120
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", str(inputs)]
    env = {**_paths(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--processes", "2"], cwd=ROOT, env=env, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["inputs"] >= inputs
    assert found["distinct"] > 0.9 * found["inputs"]
