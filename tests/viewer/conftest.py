"""One small run for all tests that only look."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the viewer is not installed")
pytest.importorskip("tifffile", reason="the slide readers are not installed")

from tests.viewer.browser import chromium, served
from tests.viewer.make_run import Made, make_run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that look at the page mostly wait for it."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.early)


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


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One browser for all pages; each test opens a context of its own."""
    with chromium() as found:
        yield found


@pytest.fixture(scope="package")
def address(made: Made) -> Iterator[str]:
    """One server for all pages that look at both runs."""
    from xmil.viewer.collection import Collection

    with served(Collection(made.runs, slides=made.slides, features=[made.features]), made.models) as found:
        yield found


@pytest.fixture
def url(browser: Any, address: str, made: Made) -> str:
    """The server's address, without what other tests drew: it would lie over what this one looks at."""
    for run in made.runs:
        shutil.rmtree(run / "annotations", ignore_errors=True)
    return address


@pytest.fixture
def fresh(tmp_path: Path) -> Made:
    """A run of one's own, to change."""
    return make_run(tmp_path, slides=2, columns=6, rows=4, edge=64, models=("attnmil",), certificates=False)
