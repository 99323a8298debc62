"""Recipes for tools that are not installed with the package run where those tools are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.made_up import names, write_files
from tests.docs.pages import ROOT, blocks

RECIPES = {"mlflow": "engineer.md", "quantus": "researcher.md"}


@pytest.mark.parametrize("tool", RECIPES)
def test_the_recipe_runs(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(tool)
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
