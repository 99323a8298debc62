"""One Ray for the folder: starting it costs seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package")
def ray_session() -> Iterator[None]:
    """A local Ray of two CPUs."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
