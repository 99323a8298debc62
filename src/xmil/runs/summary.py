"""A cohort at a glance, from the files of a run: shared scales, the strongest patches, slides that stand out.

summary/scales.csv and scales.json   quantiles and whiskers of each explanation's scores over the cohort
summary/top.csv, bottom.csv          the patches with the highest and lowest scores
summary/slides.csv                   the same statistics for each slide
summary/outliers.csv                 slides far from the others
summary/made_of.json                 which files it was made from: while they stay, so does the summary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.durable import add_file, remove_file, sync_folder
from xmil.core.explanation import Explanation
from xmil.core.text import parse_json
from xmil.runs.workers.pool import Outcome, Workers, process
from xmil.storage import (
    MADE_OF,
    SUMMARY,
    check_inside,
    make_folder,
    read_explanations,
    read_rows,
    write_json,
    write_table,
)

LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
REACH = 1.5  # interquartile ranges from the quartiles to the end of a whisker
PATCHES = 100  # in each list of patches
A_SLIDE = 10  # of them from one slide at most, so that no slide fills the list
FAR = 5.0  # robust standard deviations from the median, for a slide to stand out
MANY = 5_000  # files, from which on it pays to start workers
FEW = 8  # slides below this number do not say what is usual
MEASURES = ("mean", "iqr", "peak", "n")
BY_FACTOR = ("iqr", "peak", "n")  # spread over orders of magnitude: told apart by their logarithms
_STATISTICS = ("n", "mean", "std", "min", "max", "peak", "iqr", "positive")
_PATCH_HEADER = ("explanation", "rank", "slide_id", "index", "x0", "y0", "edge", "score")
_FAR_HEADER = ("slide_id", "explanation", "measure", "value", "median", "robust_z")
Patch = tuple[str, int, int | None, int | None, int | None, float]  # slide, index, x0, y0, edge, score


@dataclass
class Quantiles:
    """Points with weights: each stands for as many scores as its weight says.

    >>> both = Quantiles.of(np.arange(5.0))
    >>> both.add(Quantiles.of(np.arange(5.0, 10.0)))
    >>> both.at([0.0, 0.5, 1.0]).tolist()
    [0.0, 4.5, 9.0]
    """

    points: list[npt.NDArray[np.float32]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of each point of an array
    held: int = field(init=False)  # points: counting them anew for each slide would take the square of slides

    def __post_init__(self) -> None:
        self.held = sum(map(len, self.points))

    @classmethod
    def of(cls, ordered: npt.NDArray[Any]) -> Quantiles:
        """All scores of a slide, given in order, or as many quantiles of them as are kept."""
        n = len(ordered)
        if n <= POINTS:
            return cls([ordered.astype(np.float32)], [1.0])
        points = np.interp(_middles(POINTS) * n - 0.5, np.arange(n), ordered)
        return cls([points.astype(np.float32)], [n / POINTS])

    def add(self, other: Quantiles) -> None:
        """Take in another slide's points."""
        self.points += other.points
        self.weights += other.weights
        self.held += other.held
        if self.held > MOST:
            total = sum(len(p) * w for p, w in zip(self.points, self.weights, strict=True))
            points = self.at(_middles(KEPT).tolist())
            self.points, self.weights, self.held = [points.astype(np.float32)], [total / KEPT], KEPT

    def at(self, levels: Sequence[float]) -> Floats:
        """The scores below which the given shares of all scores lie, linear between points."""
        points = np.concatenate(self.points).astype(np.float64)
        weights = np.repeat(self.weights, [len(p) for p in self.points])
        order = np.argsort(points, kind="stable")
        points, weights = points[order], weights[order]
        before = np.cumsum(weights) - 0.5 * weights
        span = before[-1] - before[0]
        places = (before - before[0]) / span if span > 0 else np.zeros_like(before)
        return np.asarray(np.interp(np.asarray(levels), places, points), dtype=np.float64)


@dataclass
class SlideSummary:
    """What a slide adds to the cohort's summary, for one explanation."""

    slide: str
    column: str
    signed: bool
    statistics: dict[str, float]
    quantiles: Quantiles
    top: list[Patch]
    bottom: list[Patch]


@dataclass
class _Column:
    """An explanation over the cohort."""

    name: str
    signed: bool
    quantiles: Quantiles = field(default_factory=Quantiles)
    slides: dict[str, dict[str, float]] = field(default_factory=dict)
    top: list[Patch] = field(default_factory=list)
    bottom: list[Patch] = field(default_factory=list)

    def add(self, one: SlideSummary) -> None:
        self.quantiles.add(one.quantiles)
        self.slides[one.slide] = one.statistics
        self.top = _first_of(self.top, one.top, lambda p: (-p[-1], p[:2]))
        self.bottom = _first_of(self.bottom, one.bottom, lambda p: (p[-1], p[:2]))

    def scale(self) -> dict[str, Any]:
        each, n = list(self.slides.values()), sum(s["n"] for s in self.slides.values())
        mean = sum(s["n"] * s["mean"] for s in each) / n
        square = sum(s["n"] * (s["std"] ** 2 + s["mean"] ** 2) for s in each) / n
        levels = dict(zip(LEVELS, self.quantiles.at(LEVELS), strict=True))
        low, high = min(s["min"] for s in each), max(s["max"] for s in each)
        reach = REACH * (levels[0.75] - levels[0.25])
        return {
            "explanation": self.name,
            "signed": self.signed,
            "slides": len(each),
            "patches": int(n),
            "mean": mean,
            "std": max(0.0, square - mean**2) ** 0.5,
            "min": low,
            **{f"q{100 * level:02.0f}": value for level, value in levels.items()},
            "max": high,
            "whisker_low": max(low, levels[0.25] - reach),
            "whisker_high": min(high, levels[0.75] + reach),
            "positive": sum(s["n"] * s["positive"] for s in each) / n,
        }


def summarise_run(
    out: Path,
    files: Sequence[Path],
    *,
    workers: Workers | None = None,
    ready: Mapping[Path, list[SlideSummary]] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Write `summary/` from the files of the slides.

    Gives the slides that stand out in some explanation, and those whose file cannot be read, with the reason.
    Quantiles over the cohort come from a sketch of each slide: exact to a thousandth of a slide's patches.
    Files in `ready` are not read again; a summary of the same files is left as it is.
    """
    folder = out / "summary"
    many, ready = len(files) > MANY, ready or {}
    mark = {} if many else _made_of(files)
    if mark and (far := _standing(folder, mark)) is not None:
        return far, {}
    if many:  # those of a run are not all held at once, but read as they come
        outcomes = process(files, _make_reader, workers)
    else:
        rest = [path for path in files if path not in ready]
        read = {outcome.item: outcome for outcome in process(rest, _make_reader)}
        outcomes = (Outcome(path, ready[path]) if path in ready else read[path] for path in files)
    columns, unread = dict[str, _Column](), dict[str, str]()
    for outcome in outcomes:
        if outcome.error is not None:
            unread[outcome.item.stem] = outcome.error
        for one in outcome.result or ():
            columns.setdefault(one.column, _Column(one.column, one.signed)).add(one)
    make_folder(folder)
    with suppress(OSError):  # a kill before the end must not leave the old mark beside new tables
        remove_file(folder / MADE_OF)
        sync_folder(folder)
    far = _write(folder, [columns[name] for name in sorted(columns)])
    if mark and not unread:
        write_json(folder / MADE_OF, mark)
    return far, dict(sorted(unread.items()))


def _made_of(files: Sequence[Path]) -> dict[str, Any]:
    """The slides' files in one word, by every byte: one that is damaged since is found out."""
    digest = sha256()
    for path in files:
        digest.update(f"{path.name}|".encode())
        with suppress(OSError):
            add_file(digest, path)
    return {"version": __version__, "slides": len(files), "files": digest.hexdigest()}


def _standing(folder: Path, mark: Mapping[str, Any]) -> list[str] | None:
    """The slides that stand out by a whole summary of the same files; None where it must be made."""
    if not all((folder / name).is_file() for name in SUMMARY):
        return None
    try:
        check_inside(folder / MADE_OF)
        stored = parse_json((folder / MADE_OF).read_text(encoding="utf-8"))
        return sorted(read_rows(folder / "outliers.csv")) if stored == mark else None
    except (OSError, ValueError):
        return None


def summarise_slide(e: Explanation) -> SlideSummary:
    """What one explanation adds."""
    order = np.argsort(e.scores, kind="stable")
    scores = e.scores[order].astype(np.float64)  # in order: quantiles are places in it
    quantiles = Quantiles.of(scores)
    low, high = quantiles.at([0.25, 0.75])
    statistics = {
        "n": float(len(scores)),
        "mean": float(scores.mean()),
        "std": float(scores.std()),
        "min": float(scores[0]),
        "max": float(scores[-1]),
        "peak": float(max(-scores[0], scores[-1])),
        "iqr": float(high - low),
        "positive": float((scores > 0).mean()),
    }
    bottom, top = [[_patch(e, int(i)) for i in some[:A_SLIDE]] for some in (order, order[::-1])]
    return SlideSummary(str(e.bag), e.column, e.signed, statistics, quantiles, top, bottom)


def outliers(column: str, slides: dict[str, dict[str, float]]) -> list[list[Any]]:
    """Rows of the slides that lie far from the median of the others, by the median absolute deviation."""
    rows = []
    for measure in MEASURES if len(slides) >= FEW else ():
        values = np.array([s[measure] for s in slides.values()])
        by_factor = measure in BY_FACTOR and bool((values > 0).all())
        middle, z = robust_z(np.log(values) if by_factor else values)
        middle = float(np.exp(middle)) if by_factor else middle
        for slide, value, far in zip(slides, values, z, strict=True):
            if abs(far) > FAR:
                rows.append([slide, column, measure, _short(value), _short(middle), round(float(far), 2)])
    return sorted(rows, key=lambda row: -abs(row[-1]))


def robust_z(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
    """The median, and how many standard deviations each value lies from it, as the middle half tells them."""
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return middle, (values - middle) / spread if spread > 0 else np.zeros_like(values)


def _make_reader() -> Callable[[Path], list[SlideSummary]]:
    return lambda path: [summarise_slide(e) for e in read_explanations(path) if len(e)]


def _first_of(first: list[Patch], more: list[Patch], key: Callable[[Patch], Any]) -> list[Patch]:
    """The first patches of both lists; of a long cohort most slides have none among them."""
    if len(first) == PATCHES:
        last = key(first[-1])
        more = [patch for patch in more if key(patch) < last]
    return sorted([*first, *more], key=key)[:PATCHES] if more else first


def _patch(e: Explanation, i: int) -> Patch:
    x0, y0 = (None, None) if e.coords is None else (int(e.coords[i, 0]), int(e.coords[i, 1]))
    return str(e.bag), i, x0, y0, e.patch_size, float(e.scores[i])


def _write(folder: Path, columns: list[_Column]) -> list[str]:
    scales = [column.scale() for column in columns]
    names = list(scales[0]) if scales else ["explanation"]
    write_table(folder / "scales.csv", names, ([_short(scale[key]) for key in names] for scale in scales))
    write_json(folder / "scales.json", {str(scale["explanation"]): scale for scale in scales})
    for which in ("top", "bottom"):
        rows = [
            [column.name, rank + 1, *patch[:-1], _short(patch[-1])]
            for column in columns
            for rank, patch in enumerate(getattr(column, which))
        ]
        write_table(folder / f"{which}.csv", _PATCH_HEADER, rows)
    each = [
        [slide, column.name, *(_short(statistics[key]) for key in _STATISTICS)]
        for column in columns
        for slide, statistics in sorted(column.slides.items())
    ]
    write_table(folder / "slides.csv", ("slide_id", "explanation", *_STATISTICS), each)
    far = [row for column in columns for row in outliers(column.name, dict(sorted(column.slides.items())))]
    write_table(folder / "outliers.csv", _FAR_HEADER, far)
    return sorted({str(row[0]) for row in far})


def _short(value: Any) -> Any:
    """Six digits of a number; whole numbers as such."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.6g}")


POINTS = 1_000  # of one slide
MOST = 2_000_000  # kept at a time
KEPT = 200_000  # after thinning out
Floats = npt.NDArray[np.float64]


def _middles(n: int) -> Floats:
    return np.asarray((np.arange(n) + 0.5) / n, dtype=np.float64)
