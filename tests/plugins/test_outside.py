"""A package from outside adds one of each kind without an edit in the tree; CONTRIBUTING lists them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plugins.installing import GROUPS, install

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.early
GRADES = ["low", "middle", "high"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with the package installed has seen."""
    folder = tmp_path_factory.mktemp("outside")
    environment = install(tmp_path_factory.mktemp("site") / "packages")
    walked = subprocess.run(
        [sys.executable, "-m", "tests.plugins.walk", str(folder)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert walked.returncode == 0, walked.stderr
    return dict(json.loads((folder / "found.json").read_text()))


def chances(logits: list[float]) -> list[float]:
    """The grades' probabilities by hand: stop at each step, or go beyond it."""
    left, found = 1.0, []
    for z in logits:
        beyond = 1 / (1 + np.exp(-z))
        found.append(left * (1 - beyond))
        left *= beyond
    return [*found, left]


def test_every_command_takes_them(found: dict[str, Any]) -> None:
    assert set(found["done"].values()) == {0}
    assert found["printed"] == "12 slides\n"


def test_the_task_fills_the_tables(found: dict[str, Any]) -> None:
    for rows in (found["slides"], found["predictions"], found["trained"]):
        for row in rows:
            p = [float(row[f"p:{name}"]) for name in GRADES]
            assert sum(p) == pytest.approx(1, abs=1e-5)
            assert row["predicted"] == GRADES[int(np.argmax(p))]
            assert row["correct"] == str(row["label"] == row["predicted"])
    first = found["predictions"][0]
    logits = [float(first["logit:middle"]), float(first["logit:high"])]  # a step up to each
    assert chances(logits) == pytest.approx([float(first[f"p:{name}"]) for name in GRADES], rel=1e-5)
    assert 0 <= found["metrics"]["auroc"]["estimate"] <= 1


def test_the_task_and_the_method_are_explained(found: dict[str, Any]) -> None:
    assert found["columns"] == sorted(f"{method}:{g}" for method in ("lengths", "lrp") for g in GRADES)
    audit = found["audit"]
    assert audit["output"] == pytest.approx(sum(found["logits"]), abs=1e-5)  # both steps lead to "high"
    assert sum(v for k, v in audit.items() if k != "output") == pytest.approx(audit["output"], abs=1e-5)
    assert abs(audit["other"]) < 1e-5  # the outside rule keeps the account


def test_the_viewer_shows_the_task(found: dict[str, Any]) -> None:
    view = found["view"]
    assert view["classes"] == GRADES
    assert view["probabilities"] == pytest.approx(chances(found["logits"]), rel=1e-4)
    ends = {column["name"]: column["ends"] for column in view["columns"]}
    assert ends["lrp:high"] == ["against high", "for high"]
    assert ends["lengths:high"] == ["low", "high"]
    assert found["whatif"]["labels"] == GRADES
    assert found["whatif"]["sentence"].startswith("The prediction ")


def test_the_heatmap_draws_the_task(found: dict[str, Any]) -> None:
    assert found["drawn"] == sorted(f"s{i}.png" for i in range(12))
    assert set(found["best"]) == {*(f"lrp:{g}" for g in GRADES), "lengths:all classes"}
    assert all(box[2] - box[0] == 64 for box in found["best"].values())


def test_reader_encoder_model_and_method(found: dict[str, Any]) -> None:
    assert found["bag"] == ["extra", 6, 64]
    assert np.allclose(found["encoded"], 0.2)
    models, methods = found["listed"]
    assert "sincpool" in models
    assert "lengths" in methods


def listed() -> dict[str, tuple[str, str, str]]:
    """The list of CONTRIBUTING: for each kind its file, its entry-point groups, the tests that find it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*\*(\w[\w ]*)\*\* \|(.*)\|(.*)\|(.*)\|$", text, flags=re.MULTILINE)
    return {kind: (file, group, tests) for kind, file, group, tests in rows}


@pytest.mark.parametrize("kind", GROUPS)
def test_contributing_lists_the_kind(kind: str) -> None:
    file, groups, tests = listed()[kind]
    assert set(re.findall(r"xmil\.\w+", groups)) == set(GROUPS[kind])
    for place in re.findall(r"`([\w/]+/)`", file):
        assert (ROOT / "src" / "xmil" / place).is_dir(), place
    for test in re.findall(r"`(tests/[\w/.]+)`", tests):
        assert (ROOT / test).exists(), test
    assert re.search(r"`tests/", tests)


def test_nothing_else_is_listed() -> None:
    assert set(listed()) == set(GROUPS)
