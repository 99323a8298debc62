"""The libraries that decode slides, all behind the interface of `Slide`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from xmil.core.errors import XmilError, one_line

SMALLEST, COARSEST = 0.02, 20.0  # microns per pixel of a microscope; other values are meant for printers


class UnreadableSlideError(Exception):
    """A backend cannot read a file, for the reason given; `open_slide` tries the next one."""


@contextmanager
def decoding(library: str) -> Iterator[None]:
    """Name the library in its errors; damaged and foreign files raise almost any type."""
    try:
        yield
    except (UnreadableSlideError, XmilError):
        raise
    except Exception as error:
        raise UnreadableSlideError(f"{library}: {one_line(error)}") from None


def plausible(mpp: float | None) -> float | None:
    """An mpp that a microscope can have, else None: 72 dots per inch is a printer's resolution.

    >>> plausible(0.25), plausible(352.8), plausible(float("nan"))
    (0.25, None, None)
    """
    return mpp if mpp is not None and SMALLEST <= mpp <= COARSEST else None


def resolution_mpp(per_unit: float, unit: str) -> float | None:
    """Microns per pixel from TIFF's resolution tags: pixels per inch or centimetre.

    >>> resolution_mpp(20_000, "centimeter"), resolution_mpp(72, "inch"), resolution_mpp(50_800, "inch")
    (0.5, None, 0.5)
    """
    microns = {"inch": 25_400.0, "centimeter": 10_000.0}.get(unit.lower())
    return None if microns is None or not per_unit > 0 else plausible(microns / per_unit)


def square_mpp(x: float | None, y: float | None, source: str) -> tuple[float | None, str | None]:
    """One mpp from that of both axes, and its source; if they differ much, None and the reason.

    >>> square_mpp(0.5, 0.5, "tags"), square_mpp(0.5, 0.25, "tags"), square_mpp(None, None, "tags")
    ((0.5, 'tags'), (None, '0.5 µm wide and 0.25 µm high, not square'), (None, None))
    """
    x, y = plausible(x), plausible(y)
    if x is None or y is None:
        return x or y, source if x or y else None
    if abs(x - y) <= 0.05 * max(x, y):
        return (x + y) / 2, source
    return None, f"{x:.4g} µm wide and {y:.4g} µm high, not square"
