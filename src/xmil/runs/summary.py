"""Summarise a run over its cohort: shared scales, the strongest patches, outlier slides.

summary/scales.csv and scales.json   quantiles and whiskers of each explanation's scores over the cohort
summary/top.csv, bottom.csv          the patches with the highest and lowest scores
summary/slides.csv                   the same statistics for each slide
summary/outliers.csv                 slides far from the others

run.json has a digest of the slides' files: if they change, the summary is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.explanation import Explanation
from xmil.core.ledger import describe
from xmil.core.text import counted, shorten
from xmil.execute import Outcome, Workers, process
from xmil.storage import (
    Ledger,
    file_fault,
    make_folder,
    read_explanations,
    read_ledger,
    read_rows,
    write_json,
    write_table,
)

TABLES = ("scales.csv", "scales.json", "top.csv", "bottom.csv", "slides.csv", "outliers.csv")
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
REACH = 1.5  # interquartile ranges from the quartiles to the end of a whisker
PATCHES = 100  # in each list of patches
A_SLIDE = 10  # most patches from one slide, so that no slide fills the list
FAR = 5.0  # robust standard deviations from the median to an outlier
MANY = 5_000  # files that justify starting workers
FEW = 8  # slides below which nothing is an outlier
MEASURES = ("mean", "iqr", "peak", "n")
BY_FACTOR = ("iqr", "peak", "n")  # compared as logarithms, as they span orders of magnitude
_STATISTICS = ("n", "mean", "std", "min", "max", "peak", "iqr", "positive")
_PATCH_HEADER = ("explanation", "rank", "slide_id", "index", "x0", "y0", "edge", "score")
_FAR_HEADER = ("slide_id", "explanation", "measure", "value", "median", "robust_z")
Patch = tuple[str, int, int | None, int | None, int | None, float]  # slide, index, x0, y0, edge, score


@dataclass
class Quantiles:
    """Points with weights: each stands for that many scores.

    >>> both = Quantiles.of(np.arange(5.0))
    >>> both.add(Quantiles.of(np.arange(5.0, 10.0)))
    >>> both.at([0.0, 0.5, 1.0]).tolist()
    [0.0, 4.5, 9.0]
    """

    points: list[npt.NDArray[np.float32]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)  # of each point of an array
    n_points: int = field(init=False)  # counting them for each slide would take quadratic time

    def __post_init__(self) -> None:
        self.n_points = sum(map(len, self.points))

    @classmethod
    def of(cls, ordered: npt.NDArray[Any]) -> Quantiles:
        """Make from a slide's sorted scores: all of them, or evenly spaced quantiles of many."""
        n = len(ordered)
        if n <= POINTS:
            return cls([ordered.astype(np.float32)], [1.0])
        points = np.interp(_middles(POINTS) * n - 0.5, np.arange(n), ordered)
        return cls([points.astype(np.float32)], [n / POINTS])

    def add(self, other: Quantiles) -> None:
        """Add another slide's points."""
        self.points += other.points
        self.weights += other.weights
        self.n_points += other.n_points
        if self.n_points > MOST:
            total = sum(len(p) * w for p, w in zip(self.points, self.weights, strict=True))
            points = self.at(_middles(THINNED).tolist())
            self.points, self.weights, self.n_points = [points.astype(np.float32)], [total / THINNED], THINNED

    def at(self, levels: Sequence[float]) -> Floats:
        """Return quantiles, interpolated linearly between points."""
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
    """A slide's part of the cohort's summary, for one explanation."""

    slide: str
    column: str
    signed: bool
    statistics: dict[str, float]
    quantiles: Quantiles
    top: list[Patch]
    bottom: list[Patch]


@dataclass
class _Column:
    """One method and target over the cohort."""

    name: str
    signed: bool
    quantiles: Quantiles = field(default_factory=Quantiles)
    slides: dict[str, dict[str, float]] = field(default_factory=dict)
    top: list[Patch] = field(default_factory=list)
    bottom: list[Patch] = field(default_factory=list)

    def add(self, part: SlideSummary) -> None:
        self.quantiles.add(part.quantiles)
        self.slides[part.slide] = part.statistics
        self.top = _first_of(self.top, part.top, lambda p: (-p[-1], p[:2]))
        self.bottom = _first_of(self.bottom, part.bottom, lambda p: (p[-1], p[:2]))

    def scale(self) -> dict[str, Any]:
        slides, n = list(self.slides.values()), sum(s["n"] for s in self.slides.values())
        mean = sum(s["n"] * s["mean"] for s in slides) / n
        square = sum(s["n"] * (s["std"] ** 2 + s["mean"] ** 2) for s in slides) / n
        levels = dict(zip(LEVELS, self.quantiles.at(LEVELS), strict=True))
        low, high = min(s["min"] for s in slides), max(s["max"] for s in slides)
        reach = REACH * (levels[0.75] - levels[0.25])
        return {
            "explanation": self.name,
            "signed": self.signed,
            "slides": len(slides),
            "patches": int(n),
            "mean": mean,
            "std": max(0.0, square - mean**2) ** 0.5,
            "min": low,
            **{f"q{100 * level:02.0f}": value for level, value in levels.items()},
            "max": high,
            "whisker_low": max(low, levels[0.25] - reach),
            "whisker_high": min(high, levels[0.75] + reach),
            "positive": sum(s["n"] * s["positive"] for s in slides) / n,
        }


@dataclass(frozen=True)
class Summarised:
    """The outlier slides, what the tables were made of, and a warning about files that cannot be read."""

    outliers: Sequence[str]
    made_of: Mapping[str, Any]
    warning: str | None = None


def summarise_run(
    out: Path,
    files: Sequence[Path],
    *,
    workers: Workers | None = None,
    ready: Mapping[Path, list[SlideSummary]] | None = None,
    made_of: object = None,
) -> Summarised:
    """Write `summary/` from the files of the slides.

    Cohort quantiles come from a sketch of each slide, exact to a thousandth of a slide's patches. Files in
    `ready` are not read again; tables made of the same files, as `made_of` says, are not written again.
    """
    folder, ready = out / "summary", ready or {}
    ledger = read_ledger(out) or Ledger()
    current = {"version": __version__, "slides": len(files), "files": _digest_of(out, files, ledger)}
    tables = {f"summary/{name}": ledger.files.get(f"summary/{name}") for name in TABLES}
    if made_of == current and all(e and not file_fault(out / name, e) for name, e in tables.items()):
        return Summarised(sorted(read_rows(folder / "outliers.csv")), current)
    rest = [path for path in files if path not in ready]
    read = process(rest, _make_reader, workers if len(rest) > MANY else None)
    columns, unread = dict[str, _Column](), dict[str, str]()
    for path, summaries, error in _in_order(files, ready, read):
        if error is not None:
            unread[path.stem] = error
        for summary in summaries:
            columns.setdefault(summary.column, _Column(summary.column, summary.signed)).add(summary)
    make_folder(folder)
    outliers = _write(folder, [columns[name] for name in sorted(columns)])
    if not unread:
        return Summarised(outliers, current)
    warning = (  # only their headers could be read
        f"{counted(len(unread), 'slide')} left out of summary/, because the file in slides/ cannot be "
        f"read: {shorten(sorted(unread), 5)}. Remove it and run the same command: the slide is explained "
        "again."
    )
    return Summarised(outliers, {}, warning)


def _in_order(
    files: Sequence[Path],
    ready: Mapping[Path, list[SlideSummary]],
    outcomes: Iterator[Outcome[Path, list[SlideSummary]]],
) -> Iterator[tuple[Path, list[SlideSummary], str | None]]:
    """Yield the summaries of each file, or why it cannot be read; in their order if some are ready."""
    if not ready:  # in order of completion, so that a million summaries never wait in memory
        yield from ((outcome.item, outcome.result or [], outcome.error) for outcome in outcomes)
        return
    read = {outcome.item: outcome for outcome in outcomes}
    for path in files:
        if path in ready:
            yield path, ready[path], None
        else:
            yield path, read[path].result or [], read[path].error


def _digest_of(out: Path, files: Sequence[Path], ledger: Ledger) -> str:
    """Hash the names and digests of the slides' files, as the ledger has them."""
    digest = sha256()
    for path in files:
        entry = ledger.files.get(path.relative_to(out).as_posix(), {})
        with suppress(OSError):
            digest.update(f"{path.name}|{entry.get('sha256') or describe(path)['sha256']}|".encode())
    return digest.hexdigest()


def summarise_slide(e: Explanation) -> SlideSummary:
    """Summarise one explanation."""
    order = np.argsort(e.scores, kind="stable")
    scores = e.scores[order].astype(np.float64)
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
    bottom, top = [[_patch(e, int(i)) for i in ranks[:A_SLIDE]] for ranks in (order, order[::-1])]
    return SlideSummary(str(e.bag), e.column, e.signed, statistics, quantiles, top, bottom)


def outliers(column: str, slides: dict[str, dict[str, float]]) -> list[list[Any]]:
    """Make rows of the slides far from the median, in units of the median absolute deviation."""
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
    """Return the median, and robust z-scores from the median absolute deviation."""
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return middle, (values - middle) / spread if spread > 0 else np.zeros_like(values)


def _make_reader() -> Callable[[Path], list[SlideSummary]]:
    return lambda path: [summarise_slide(e) for e in read_explanations(path) if len(e)]


def _first_of(first: list[Patch], more: list[Patch], key: Callable[[Patch], Any]) -> list[Patch]:
    """Merge the first patches of both lists; in a large cohort most slides add none."""
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
    rows_of_slides = [
        [slide, column.name, *(_short(statistics[key]) for key in _STATISTICS)]
        for column in columns
        for slide, statistics in sorted(column.slides.items())
    ]
    write_table(folder / "slides.csv", ("slide_id", "explanation", *_STATISTICS), rows_of_slides)
    far = [row for column in columns for row in outliers(column.name, dict(sorted(column.slides.items())))]
    write_table(folder / "outliers.csv", _FAR_HEADER, far)
    return sorted({str(row[0]) for row in far})


def _short(value: Any) -> Any:
    """Round a number to six digits; convert whole numbers to int."""
    if not isinstance(value, float):
        return value
    return int(value) if value.is_integer() else float(f"{value:.6g}")


POINTS = 1_000  # of one slide
MOST = 2_000_000  # in memory
THINNED = 200_000  # after thinning out
Floats = npt.NDArray[np.float64]


def _middles(n: int) -> Floats:
    return np.asarray((np.arange(n) + 0.5) / n, dtype=np.float64)
