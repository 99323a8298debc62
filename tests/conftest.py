"""Shared fixtures: real data where it is at hand, a seed for every test, and how thorough this run is."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

os.environ.setdefault("XMIL_SYNC", "0")  # results of tests need not outlive a power loss
torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so shells start a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of tests are interrupted, too

DATA = Path(os.environ.get("XMIL_DATA", Path(__file__).parents[2] / "shared" / "data"))

hypothesis.settings.register_profile("same", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-full` ask for every input, every kill and random examples."""
    parser.addoption(
        "--full", action="store_true", help="full counts of fuzzed inputs and kills, random examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try the same examples in each run, other ones with --full (`--hypothesis-seed` repeats them)."""
    config.addinivalue_line("markers", "full: run with --full only, where a quicker test covers the like")
    config.addinivalue_line("markers", "early: run first, since it waits or shares what is costly to make")
    hypothesis.settings.load_profile("random" if config.getoption("--full") else "same")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `full` unless it is asked for, and put first what is marked `early`.

    Processes take one file after another: long ones should not come last, and what waits for a browser should
    run beside what computes.
    """
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether full counts are asked for; otherwise a few of each kind are tried."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; tests that need it skip where it is absent."""
    if not DATA.is_dir():
        pytest.skip(f"no data folder at {DATA}; set XMIL_DATA")
    return DATA


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
