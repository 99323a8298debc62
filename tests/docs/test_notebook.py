"""A notebook runs as users run one: tables, pictures, HTML; an error of ours takes a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

import xmil

ROOT = Path(__file__).parents[2]
CELLS = (
    "import xmil\ne = xmil.explain('model.safetensors', 'slide.h5')\ne",
    "e.top(3)",
    "e.plot()",
    "xmil.read_bag('nowhere.h5')",
    "1 / 0",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("notebook")
    model = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    xmil.save_model(model, folder / "model.safetensors")
    xy = np.array([[x * 256, y * 256] for y in range(4) for x in range(5)])
    features = np.random.default_rng(0).normal(size=(20, 8))
    xmil.write_bag(xmil.Bag(features, xy, patch_size=256, mpp=0.5, slide_id="slide"), folder / "slide.h5")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), str(ROOT / "src")
    try:
        client = NotebookClient(
            book, timeout=600, allow_errors=True, resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if before is None else {"PYTHONPATH": before}
    return [cell.outputs for cell in book.cells]


def test_an_explanation_shows_map_and_account(outputs: list[Any]) -> None:
    (shown,) = outputs[0]
    html = shown.data["text/html"]
    assert "data:image/png;base64," in html
    assert "<th>Patches</th>" in html


def test_tables_and_pictures(outputs: list[Any]) -> None:
    assert "score" in outputs[1][0].data["text/html"]
    assert any("image/png" in output.get("data", {}) for output in outputs[2])


def test_errors_of_ours_take_a_line(outputs: list[Any]) -> None:
    (failed,) = outputs[3]
    assert failed.ename == "FileError"
    assert failed.traceback == ["FileError: nowhere.h5: no such file."]
    (own,) = outputs[4]
    assert len(own.traceback) > 1, json.dumps(own.traceback)  # errors of others keep theirs
