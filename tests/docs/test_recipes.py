"""Recipes for tools that are not installed with the package run where those tools are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.docs.made_up import names, write_files
from tests.docs.pages import ROOT, blocks

RECIPES = {"mlflow": "engineer.md", "quantus": "researcher.md"}


class PixelFlipping:
    """As Quantus 0.6 calls what it is given: everything by name."""

    def __init__(self, *, features_in_step: int, perturb_baseline: float, disable_warnings: bool) -> None:
        self.step, self.baseline = features_in_step, perturb_baseline

    def __call__(self, model: Any, x: Any, y: Any, *, explain_func: Any, channel_first: bool) -> None:
        assert x.shape[-1] % self.step == 0
        scores = explain_func(model=model, inputs=x, targets=y)
        assert (scores.shape, bool(np.isfinite(scores).all())) == (x.shape, True)
        assert model(torch.from_numpy(x)).shape == (len(x), 2)


@pytest.mark.parametrize("tool", RECIPES)
def test_the_recipe_runs(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(tool)
    run_recipe(tool, tmp_path, monkeypatch)


def test_the_recipe_for_quantus_fits_its_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quantus", SimpleNamespace(PixelFlipping=PixelFlipping))
    run_recipe("quantus", tmp_path, monkeypatch)


def run_recipe(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [recipe] = [
        block
        for block in blocks(ROOT / "docs" / "readers" / RECIPES[tool])
        if block.not_run == f"needs {tool}"
    ]
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path, "")
    space = names(tmp_path)
    space["run"] = space["xmil"].explain_slides("model.safetensors", "features/", out="run")
    exec(compile(recipe.code, recipe.page, "exec"), space)  # noqa: S102  # our own page
