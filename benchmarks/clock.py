"""One clock for calls that are compared."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter


def seconds(*calls: Callable[[], object], repeats: int) -> list[float]:
    """Median seconds of each call; the calls take turns, so that drift hits them alike."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, times in zip(calls, taken, strict=True):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
    return [median(times) for times in taken]
