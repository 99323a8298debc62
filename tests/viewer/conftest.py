"""One small run for all tests that only look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the viewer is not installed")
pytest.importorskip("tifffile", reason="the slide readers are not installed")

from tests.viewer.make_run import Made, make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three slides of 12 x 8 patches, two models."""
    return make_run(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="session")
def app(made: Made) -> Any:
    """The application over both runs, with models and features."""
    from xmil.viewer.app import create_app
    from xmil.viewer.collection import Collection

    shown = Collection(made.runs, slides=made.slides, features=[made.features])
    return create_app(shown, models=made.models)


@pytest.fixture
def fresh(tmp_path: Path) -> Made:
    """A run of one's own, to change."""
    return make_run(tmp_path, slides=2, columns=6, rows=4, edge=64, models=("attnmil",), certificates=False)
