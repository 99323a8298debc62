"""The patch edge from the coordinates alone, where nothing better is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Gaps = npt.NDArray[np.int64]


def smallest_gap(coords: npt.NDArray[Any]) -> int | None:
    """The step of the patch grid: the smallest positive gap between patches of one row or column.

    CLAM lays a grid into each tissue contour, with an offset of its own. Gaps are therefore taken along
    shared rows and columns only, and where the smallest does not divide the others (two grids that touch one
    line), the commonest wins.

    >>> smallest_gap(np.array([[0, 0], [512, 0], [1536, 0], [300, 77], [812, 77]]))
    512
    """
    if len(coords) < 2 or not np.all(np.abs(coords) < 2**40):  # damage, which placing will name
        return None
    gaps = np.concatenate([_line_gaps(coords, along) for along in (0, 1)])
    if not gaps.size:
        gaps = np.concatenate([_positive(np.diff(np.unique(coords[:, axis]))) for axis in (0, 1)])
    if not gaps.size:
        return None
    values, counts = np.unique(gaps, return_counts=True)
    divides = np.average(values % values[0] == 0, weights=counts)
    return int(values[0] if divides >= 0.5 else values[np.argmax(counts)])


def _line_gaps(coords: npt.NDArray[Any], along: int) -> Gaps:
    """Gaps between neighbours that share the other coordinate."""
    across = 1 - along
    order = np.lexsort((coords[:, along], coords[:, across]))
    line, place = coords[order, across], coords[order, along]
    same = line[1:] == line[:-1]
    return _positive(np.diff(place)[same])


def _positive(gaps: npt.NDArray[Any]) -> Gaps:
    whole: Gaps = np.rint(gaps).astype(np.int64)
    return whole[whole > 0]
