"""Cases: the slides that make one bag, whether one slide or all slides of a patient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import InputError, unknown_name
from xmil.core.patches import Patches
from xmil.data.bags import read_bag
from xmil.data.cohort import CASE, PATH, Cohort
from xmil.data.header import Header

BY = ("slide", "case")
MPP = "mpp"  # the column of a cohort with µm per level-0 pixel
_SHARED = ("encoder", "format", "version")


@dataclass(frozen=True)
class Case:
    """What is one bag: its name, its slides with their feature files, and its label, where it is known.

    `case_id` is the patient's, None where no cohort names it; by slide, `name` is the slide's. `rows` are the
    rows of the cohort. `mpp` is that of each slide where the cohort has such a column, None in empty cells.
    """

    name: str
    slides: tuple[str, ...]
    paths: tuple[Path, ...]
    label: Any = None
    case_id: str | None = None
    rows: tuple[int, ...] = ()
    mpp: tuple[float | None, ...] = ()

    def reading(self, place: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """What `read_bag` is told of a slide: the cohort's mpp comes before the one given for all."""
        own = self.mpp[place] if self.mpp else None
        return dict(options) if own is None else {**options, "mpp": own}


def group_cases(cohort: Cohort, by: str = "slide", *, labels: Sequence[Any] | None = None) -> list[Case]:
    """The cases of a cohort whose column `path` names the feature files, in the table's order.

    `labels` has one for each row, None where it is not known. By case, its slides must agree on it.

    >>> table = {"slide_id": ("a", "b", "c"), "case_id": ("1", "1", "2"), "path": ("a.h5", "b.h5", "c.h5")}
    >>> [(case.name, case.slides) for case in group_cases(Cohort(table), by="case")]
    [('1', ('a', 'b')), ('2', ('c',))]
    """
    if by not in BY:
        raise unknown_name("grouping", by, BY)
    slides, cases, paths = cohort.slides, cohort.cases, cohort.column(PATH)
    mpp = _slide_mpp(cohort)
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(slides if by == "slide" else cases):
        groups.setdefault(name, []).append(row)
    return [
        Case(
            name,
            tuple(slides[row] for row in rows),
            tuple(Path(str(paths[row])) for row in rows),
            None if labels is None else _agreed_label(name, [labels[row] for row in rows]),
            cases[rows[0]] if CASE in cohort.columns else None,
            tuple(rows),
            tuple(mpp[row] for row in rows) if any(mpp[row] is not None for row in rows) else (),
        )
        for name, rows in groups.items()
    ]


def _slide_mpp(cohort: Cohort) -> list[float | None]:
    """Microns per pixel of each slide, from the column `mpp`."""
    if MPP not in cohort.columns:
        return [None] * len(cohort)
    values = cohort.numbers(MPP)
    if np.any(values <= 0) or np.isinf(values).any():
        raise InputError(
            f"The column {MPP!r} of the cohort must hold positive numbers: µm per level-0 pixel."
        )
    return [None if np.isnan(value) else float(value) for value in values]


def _agreed_label(name: str, labels: Sequence[Any]) -> Any:
    distinct = list(dict.fromkeys(label for label in labels if label is not None))
    if len(distinct) > 1:
        raise InputError(f"The slides of case {name!r} have several labels ({distinct}); a case has one.")
    return distinct[0] if distinct else None


def read_case(case: Case, **options: Any) -> tuple[Bag, list[slice]]:
    """The slides of a case as one bag, and the rows of each slide in it; `options` are `read_bag`'s."""
    pairs = zip(case.slides, case.paths, strict=True)
    bags = [named(read_bag(path, **case.reading(i, options)), slide) for i, (slide, path) in enumerate(pairs)]
    return join_bags(bags, name=case.name)


def join_bags(bags: Sequence[Bag], *, name: str) -> tuple[Bag, list[slice]]:
    """Bags one after another as one bag, and the rows of each.

    >>> bag, rows = join_bags([Bag(np.zeros((2, 4))), Bag(np.ones((3, 4)))], name="case 1")
    >>> bag, rows
    (Bag('case 1', 5 instances x 4 features), [slice(0, 2, None), slice(2, 5, None)])
    """
    if len(bags) == 1:
        return named(bags[0], name), [slice(0, len(bags[0]))]
    for bag in bags:
        _check_part(bag, name)
        if bag.dim != bags[0].dim:
            raise InputError(
                f"Case {name!r}: {_file(bag)} has features of width {bag.dim} and {_file(bags[0])} of "
                f"width {bags[0].dim}; the slides of a case need one encoder."
            )
    shared = {key: _agreed(bags, key) for key in _SHARED}
    joined = Bag(
        np.concatenate([bag.features for bag in bags]),
        patches=Patches.joined([bag.patches for bag in bags]),
        slide_id=name,
        inferred=tuple(dict.fromkeys(line for bag in bags for line in bag.inferred)),
        **shared,
    )
    return joined, list(_rows(bags))


def named(bag: Bag, name: str) -> Bag:
    """The bag under a slide's name in the cohort."""
    if bag.slide_id == name:
        return bag
    other = copy(bag)  # features that are still as stored stay so
    object.__setattr__(other, "slide_id", name)
    return other


def _check_part(bag: Bag, case: str) -> None:
    """Refuse a slide that would be lost in its case: one without instances, or with numbers that are none."""
    if not len(bag):
        raise InputError(
            f"Case {case!r}: {_file(bag)} has no instances; extract its features again, or take the slide "
            "out of the cohort."
        )
    if np.isfinite(bag.features.sum(dtype=np.float64)):
        return
    rows = np.flatnonzero(~np.isfinite(bag.features).all(axis=1))
    raise InputError(
        f"Case {case!r}: features of {_file(bag)} are not finite (NaN or inf) in {len(rows)} of {len(bag)} "
        f"rows, the first is row {rows[0]}; extract them again, drop those rows, or take the slide out of "
        "the cohort."
    )


def _file(bag: Bag) -> str:
    return bag.source or str(bag.slide_id)


def _agreed(bags: Sequence[Bag], key: str) -> Any:
    values = {getattr(bag, key) for bag in bags}
    return values.pop() if len(values) == 1 else None


def _rows(bags: Sequence[Bag]) -> Iterator[slice]:
    start = 0
    for bag in bags:
        yield slice(start, start + len(bag))
        start += len(bag)


@dataclass(frozen=True)
class JoinedHeader:
    """Stored bags one after the other; `read` brings all of their instances or some rows."""

    parts: tuple[Header, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def path(self) -> Path:
        """The file of the first slide."""
        return self.parts[0].path

    @property
    def slide_id(self) -> str:
        """The slides' names, joined."""
        return "+".join(str(part.slide_id) for part in self.parts)

    @property
    def encoder(self) -> str | None:
        """The encoder of the first slide."""
        return self.parts[0].encoder

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return next((part.dim for part in self.parts if len(part)), self.parts[0].dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the features once read."""
        return sum(part.nbytes for part in self.parts)

    @property
    def columns(self) -> Mapping[str, npt.NDArray[Any]]:
        """The columns that every slide has, one after the other."""
        shared = set.intersection(*(set(part.columns) for part in self.parts))
        return {name: np.concatenate([part.columns[name] for part in self.parts]) for name in sorted(shared)}

    def read(self, rows: npt.ArrayLike | None = None) -> Bag:
        """The features of the case, or of the given ascending rows."""
        index = np.arange(len(self)) if rows is None else np.asarray(rows)
        ends = np.cumsum([len(part) for part in self.parts])
        chunks = np.split(index, np.searchsorted(index, ends[:-1]))
        starts = ends - [len(part) for part in self.parts]
        read = [
            part.read(own - start).features
            for part, own, start in zip(self.parts, chunks, starts, strict=True)
            if len(own)
        ]
        source = str(self.path) if len(self.parts) == 1 else None
        return Bag(np.concatenate(read), slide_id=self.slide_id, encoder=self.encoder, source=source)


def join_headers(headers: Sequence[Header]) -> JoinedHeader:
    """The bags of one case as one; they must be of one width."""
    widths = {header.dim: header.path for header in headers if len(header)}
    if len(widths) > 1:
        (one, first), (two, second), *_ = widths.items()
        raise InputError(
            f"{second}: has width {two} but {first} has {one}; features of a case come from one encoder."
        )
    return JoinedHeader(tuple(headers))
