"""Exports by name; packages add theirs through the entry-point group `xmil.exports`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from xmil.core.explanation import Explanation
from xmil.core.registry import Registry
from xmil.heatmaps.scale import Scale


@dataclass(frozen=True)
class Exported:
    """What an export writes: placed explanations of one slide, and how the pictures show them.

    `frame` is the region as x, y, width, height in level-0 pixels; `scales` are by the explanations' columns.
    """

    explanations: tuple[Explanation, ...]
    frame: tuple[int, int, int, int]
    task: str
    scales: Mapping[str, Scale]
    mpp: float | None = None
    downsample: int | None = None


@dataclass(frozen=True)
class Export:
    """A kind of file: `write` fills a path; `each` makes one per explanation in place of one per slide."""

    write: Callable[[Path, Exported], None]
    suffix: str
    each: bool = False


EXPORTS: Registry[Export] = Registry("export", group="xmil.exports")
