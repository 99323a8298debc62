"""Shared fixtures: the real data where it is at hand, and a seed for every test."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # the tensors are tiny: threads would only wait for each other

DATA = Path(os.environ.get("XMIL_DATA", Path(__file__).parents[2] / "shared" / "data"))


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
