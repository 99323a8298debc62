"""Waiting for something to be so, on an idle machine and on a busy one."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], *, seconds: float = 120.0) -> None:
    """Look until it is so; the limit only ends a test that would never end."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
