"""Open, read and write bags: of one file, or of a case with several slides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import Bag, FloatArray, Patches, shared_value
from xmil.core.durable import create_hdf5, write_atomically
from xmil.core.errors import FileError, InputError, StrPath, XmilError, check_names
from xmil.data.cohort import PATH, Cohort
from xmil.data.containers import Rows, open_contents
from xmil.data.containers.container import Index
from xmil.data.header import Ask, Header, write_extra
from xmil.data.readers import find_reader
from xmil.data.readers.trident import OURS, STATED


def read_bag(
    path: StrPath,
    format: str = "auto",  # noqa: A002 - the word users know
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
    rows: npt.ArrayLike | None = None,
) -> Bag:
    """Read the features of one slide, in any known layout, with level-0 boxes if the file allows.

    `mpp` (of the slide) and `patch_size` (level-0 pixels) supply what a file does not store; `rows` reads
    only some instances, in that order. `bag.inferred` lists what was inferred rather than read.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/s1.npy", np.zeros((5, 8), "float16"))
    ...     read_bag(f"{folder}/s1.npy", rows=[4, 0])
    Bag('s1', 2 patches x 8 features)
    """
    return open_bag(path, format, mpp=mpp, patch_size=patch_size).read(rows)


def open_bag(
    path: StrPath,
    format: str = "auto",  # noqa: A002 - the word users know
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
) -> Header:
    """Open a stored bag; `read` then reads its features on demand."""
    ask = Ask(mpp, patch_size)  # checked before opening anything
    contents = open_contents(Path(path))
    try:
        return find_reader(contents, format).read(contents, ask)
    except XmilError:
        raise
    except (
        ArithmeticError,
        LookupError,
        TypeError,
        ValueError,
        OSError,
        MemoryError,
        RecursionError,
    ) as error:
        # a damaged file can raise almost any error in a reader
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise FileError(
            f"{path}: damaged or in another layout ({reason}); copy or extract it again, or name its "
            "layout with `format=`."
        ) from error


def write_bag(bag: Bag, path: StrPath) -> None:
    """Write a bag atomically in TRIDENT's layout, with mpp added.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bag = Bag(np.zeros((2, 4)), coords=[[0, 0], [256, 0]], patch_size=256, mpp=0.5)
    ...     write_bag(bag, f"{folder}/s.h5")
    ...     read_bag(f"{folder}/s.h5").boxes().tolist()
    [[0, 0, 256, 256], [256, 0, 512, 256]]
    """
    write_atomically(path, lambda temporary: _write(bag, temporary, Path(path)))


def _write(bag: Bag, temporary: str, path: Path) -> None:
    shared = {"name": bag.slide_id or path.stem, "savetodir": path.parent.name}
    with create_hdf5(temporary) as (file, _):
        stored = {
            key: getattr(bag, key) for key in ("slide_id", "mpp", "inferred", "unit", "raw_edge", "extra")
        }
        if bag.patches.edge_guess is not None:
            stored["edge_guess"] = bag.patches.edge_guess
        file.attrs[OURS] = json.dumps({"version": __version__, "from": bag.format, **stored}, default=str)
        _set(file.create_dataset("features", data=bag.features), {**shared, "encoder": bag.encoder})
        if bag.coords is not None:
            attrs = {
                **shared,
                **{key: bag.extra.get(key) for key in STATED},
                "overlap": bag.extra.get("overlap") or 0,
                "patch_size": bag.extra.get("patch_size", bag.patch_size),
                "patch_size_level0": bag.patch_size,
                "mpp": bag.mpp,
            }
            _set(file.create_dataset("coords", data=bag.coords), attrs)
        if bag.raw_coords is not None:
            file.create_dataset("raw_coords", data=bag.raw_coords)
        for key, values in bag.columns.items():
            file.create_dataset(f"columns/{key.replace('/', '_')}", data=np.asarray(values))
        for key, values in bag.extras.items():
            write_extra(file, key, values)


def _set(dataset: Any, attrs: dict[str, Any]) -> None:
    for key, value in attrs.items():
        dataset.attrs[key] = "None" if value is None else value


BY = ("slide", "case")
MPP, PATCH_SIZE, FORMAT = "mpp", "patch_size", "format"  # columns of a cohort that complete files


@dataclass(frozen=True)
class Case:
    """One bag: its name, its slides with their feature files, and its label, if known.

    `case_id` is the patient's, None without a cohort; with one bag per slide, `name` is the slide's. `rows`
    are the rows of the cohort. `files` completes the file of each slide, from the cohort's columns `mpp`,
    `patch_size` and `format`; empty without such columns.
    """

    name: str
    slides: tuple[str, ...]
    paths: tuple[Path, ...]
    label: Any = None
    case_id: str | None = None
    rows: tuple[int, ...] = ()
    files: tuple[Mapping[str, Any], ...] = ()

    def reading(self, i: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `read_bag` for slide i: the cohort's override the shared ones."""
        return {**options, **(self.files[i] if self.files else {})}


def group_cases(cohort: Cohort, by: str = "slide", *, labels: Sequence[Any] | None = None) -> list[Case]:
    """Group a cohort, whose column `path` names the feature files, into cases, in the table's order.

    `labels` has one entry per row, None if unknown; the slides of a case must agree.

    >>> table = {"slide_id": ("a", "b", "c"), "case_id": ("1", "1", "2"), "path": ("a.h5", "b.h5", "c.h5")}
    >>> [(case.name, case.slides) for case in group_cases(Cohort(table), by="case")]
    [('1', ('a', 'b')), ('2', ('c',))]
    """
    check_names("grouping", [by], BY)
    slides, cases, paths = cohort.slides, cohort.cases, cohort.column(PATH)
    files = _completed_files(cohort)
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(slides if by == "slide" else cases):
        groups.setdefault(name, []).append(row)
    return [
        Case(
            name,
            tuple(slides[row] for row in rows),
            tuple(Path(str(paths[row])) for row in rows),
            None if labels is None else _agreed_label(name, [labels[row] for row in rows]),
            cases[rows[0]] if len(cohort.without_case) < len(cohort) else None,
            tuple(rows),
            tuple(files[row] for row in rows) if any(files[row] for row in rows) else (),
        )
        for name, rows in groups.items()
    ]


def _completed_files(cohort: Cohort) -> list[dict[str, Any]]:
    """What the cohort says of each slide's file: µm per level-0 pixel, the patch edge, the layout."""
    files: list[dict[str, Any]] = [{} for _ in range(len(cohort))]
    for name, what in ((MPP, "µm per level-0 pixel"), (PATCH_SIZE, "the patch edge in level-0 pixels")):
        if name not in cohort.columns:
            continue
        values = cohort.numbers(name)
        if np.any(values <= 0) or np.isinf(values).any():
            raise InputError(f"The column {name!r} of the cohort must hold positive numbers: {what}.")
        for file, value in zip(files, values, strict=True):
            if not np.isnan(value):
                file[name] = float(value) if name == MPP else int(value)
    if FORMAT in cohort.columns:
        for file, cell in zip(files, cohort.column(FORMAT), strict=True):
            if cell:
                file[FORMAT] = cell
    return files


def _agreed_label(name: str, labels: Sequence[Any]) -> Any:
    distinct = list(dict.fromkeys(label for label in labels if label is not None))
    if len(distinct) > 1:
        raise InputError(
            f"The slides of case {name!r} have several labels ({distinct}), but a case has one. Correct "
            "the table, or use one bag per slide with `by='slide'`."
        )
    return distinct[0] if distinct else None


def read_case(case: Case, **options: Any) -> tuple[Bag, list[slice]]:
    """Read the slides of a case as one bag, with the rows of each slide; `options` go to `read_bag`."""
    pairs = zip(case.slides, case.paths, strict=True)
    bags = [named(read_bag(path, **case.reading(i, options)), slide) for i, (slide, path) in enumerate(pairs)]
    return join_bags(bags, name=case.name)


def join_bags(bags: Sequence[Bag], *, name: str) -> tuple[Bag, list[slice]]:
    """Concatenate bags into one, and return the rows of each.

    >>> bag, rows = join_bags([Bag(np.zeros((2, 4))), Bag(np.ones((3, 4)))], name="case 1")
    >>> bag, rows
    (Bag('case 1', 5 patches x 4 features), [slice(0, 2, None), slice(2, 5, None)])
    """
    if len(bags) == 1:
        return named(bags[0], name), [slice(0, len(bags[0]))]
    for bag in bags:
        if not len(bag):
            raise InputError(
                f"Case {name!r}: {bag.called} has no patches; extract its features again, or remove the "
                "slide from the cohort."
            )
        if not np.isfinite(bag.features.sum(dtype=np.float64)):
            rows = np.flatnonzero(~np.isfinite(bag.features).all(axis=1))
            raise InputError(
                f"Case {name!r}: features of {bag.called} are not finite (NaN or inf) in {len(rows)} of "
                f"{len(bag)} rows, first in row {rows[0]}; extract them again, drop those rows, or remove "
                "the slide from the cohort."
            )
        if bag.dim != bags[0].dim:
            raise InputError(
                f"Case {name!r}: {bag.called} has features of width {bag.dim} and {bags[0].called} of "
                f"width {bags[0].dim}; the slides of a case need one encoder."
            )
    joined = Bag(
        np.concatenate([bag.features for bag in bags]),
        patches=Patches.joined([bag.patches for bag in bags]),
        slide_id=name,
        inferred=tuple(dict.fromkeys(line for bag in bags for line in bag.inferred)),
        encoder=shared_value(bags, "encoder"),
        format=shared_value(bags, "format"),
        version=shared_value(bags, "version"),
    )
    sizes = [len(bag) for bag in bags]
    return joined, [slice(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def named(bag: Bag, name: str) -> Bag:
    """The bag under another name."""
    if bag.slide_id == name:
        return bag
    other = copy(bag)  # a copy, so that stored features stay in their type
    object.__setattr__(other, "slide_id", name)
    return other


def _read_joined(parts: Sequence[Header], index: Index | None) -> FloatArray:
    """Read the concatenated instances of stored bags, or those of an ascending index."""
    ends = np.cumsum([len(part) for part in parts])
    index = np.arange(ends[-1]) if index is None else index
    chunks = np.split(index, np.searchsorted(index, ends[:-1]))
    return np.concatenate(
        [
            part.read(own - (end - len(part))).features
            for part, own, end in zip(parts, chunks, ends, strict=True)
            if len(own)
        ]
    )


class JoinedHeader(Header):
    """The stored bags of one case as one, without coordinates; all need the same width."""

    def __init__(self, parts: Sequence[Header]) -> None:
        widths = {header.dim: header.path for header in parts if len(header)}
        if len(widths) > 1:
            (first_width, first), (width, path), *_ = widths.items()
            raise InputError(
                f"{path}: has width {width} but {first} has {first_width}; the slides of a case need one "
                "encoder."
            )
        shape = (sum(map(len, parts)), next(iter(widths), parts[0].dim))
        shared = set.intersection(*(set(part.columns) for part in parts))
        super().__init__(
            parts[0].path,
            parts[0].format,
            Rows(shape, np.dtype(np.float32), partial(_read_joined, parts)),
            slide_id="+".join(str(part.slide_id) for part in parts),
            encoder=parts[0].encoder,
            columns={name: np.concatenate([part.columns[name] for part in parts]) for name in sorted(shared)},
        )
