"""A cohort: one row per slide, with its case, labels and other columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.budget import check_objects, read_parquet
from xmil.core.durable import write_atomically, write_text
from xmil.core.errors import FileError, InputError, StrPath, check_names, unknown_name
from xmil.core.text import counted, csv_text
from xmil.data.containers import sniff
from xmil.data.containers.container import readable
from xmil.data.containers.stores import read_csv

SLIDE, CASE, SPLIT, PATH = "slide_id", "case_id", "split", "path"
EMPTY = ("", "nan", "na", "n/a", "#n/a", "null")  # what tables write for an unknown value
# Other tools' names of these columns, in letters and digits alone (STAMP, Slideflow, QuPath, the paper).
_ALIASES = {
    SLIDE: (
        "slideid",
        "slide",
        "slidename",
        "filename",
        "file",
        "wsi",
        "wsiid",
        "image",
        "imageid",
        "imagename",
    ),
    CASE: ("caseid", "case", "patient", "patientid", "subject", "subjectid", "submitterid"),
    SPLIT: ("split", "subset"),
}


@dataclass(frozen=True, eq=False)
class Cohort:
    """Slides by row. Cells are text as written; `labels` and `numbers` convert them.

    >>> cohort = Cohort({"slide_id": ("a", "b"), "case_id": ("1", "1"), "label": ("HPV+", "HPV-")})
    >>> cohort.classes("label"), cohort.labels("label").tolist()
    (['HPV+', 'HPV-'], [0, 1])
    """

    columns: Mapping[str, Cells]
    path: Path | None = None
    inferred: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # our name of a column: its name in the file

    def __post_init__(self) -> None:
        slides = self.column(SLIDE)
        if any(name is None for name in slides):
            raise InputError(f"{self._name}: row {slides.index(None) + 2} has no slide_id; fill it in.")
        if len(set(slides)) != len(slides):
            repeated = sorted(str(name) for name, count in Counter(slides).items() if count > 1)
            raise InputError(
                f"{self._name}: needs one row per slide. Found several for {', '.join(repeated[:5])}."
            )

    def __len__(self) -> int:
        return len(self.columns[SLIDE])

    def __repr__(self) -> str:
        others = ", ".join(name for name in self.columns if name not in (SLIDE, CASE)) or "none"
        size = f"{counted(len(self), 'slide')} of {counted(len(set(self.cases)), 'case')}"
        return f"Cohort({size}, columns {others})"

    @property
    def slides(self) -> list[str]:
        """Slide names, in the table's order."""
        return [str(name) for name in self.columns[SLIDE]]

    @property
    def taken(self) -> str:
        """The columns that were renamed to our names, in words; empty if there are none."""
        return ", ".join(_taken(self.names))

    @property
    def cases(self) -> list[str]:
        """The case of each slide; a slide without one is its own case."""
        cases = map(read_cell, self.columns.get(CASE, self.columns[SLIDE]))
        return [slide if case is None else case for case, slide in zip(cases, self.slides, strict=True)]

    @property
    def without_case(self) -> list[str]:
        """The slides whose case is unknown: all in a table that names no case."""
        cases = self.columns.get(CASE, (None,) * len(self))
        return [slide for slide, case in zip(self.slides, cases, strict=True) if read_cell(case) is None]

    def column(self, name: str) -> Cells:
        """The cells of one column; None where empty."""
        if name not in self.columns:
            error = unknown_name("column", name, self.columns)
            raise FileError(f"{self._name}: {error}") if self.path else error
        return self.columns[name]

    def classes(self, name: str) -> list[str]:
        """The labels of a column: whole numbers in order, names in alphabetical order.

        Whole numbers from 0 keep their value as class index, so the list includes absent classes.
        """
        texts = {cell for cell in self.column(name) if cell is not None}
        numbers = [n for cell in texts if (n := _as_integer(cell)) is not None]
        if not texts or len(numbers) < len(texts):
            return sorted(texts)
        if min(numbers) >= 0 and max(numbers) < 1000:
            return [str(index) for index in range(max(numbers) + 1)]
        return [str(number) for number in sorted(set(numbers))]

    def labels(self, name: str) -> IntArray:
        """Class indices (n,), -1 for empty cells."""
        index = {text: i for i, text in enumerate(self.classes(name))}
        cells = [  # 01 and 1.0 are class 1, if all cells are numbers
            cell if cell is None or cell in index else str(_as_integer(cell)) for cell in self.column(name)
        ]
        return np.array([-1 if cell is None else index[cell] for cell in cells], dtype=np.int64)

    def numbers(self, name: str) -> npt.NDArray[np.float64]:
        """A column as numbers (n,), NaN for empty cells."""
        numbers = np.full(len(self), np.nan)
        for row, cell in enumerate(self.column(name)):
            try:
                numbers[row] = np.nan if cell is None else float(cell)
            except ValueError:
                raise InputError(
                    f"{self._name}: column {name!r} must hold numbers. Got {cell!r} instead."
                ) from None
        return numbers

    def survival(self, time: str, event: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """Times (n,) and whether the event was observed (n,); times must not be negative, events 0 or 1."""
        times, events = self.numbers(time), self.numbers(event)
        complete = ~np.isnan(times) & ~np.isnan(events)
        if np.any(times[complete] < 0) or not np.all(np.isin(events[complete], (0, 1))):
            raise InputError(f"{self._name}: {time!r} must not be negative and {event!r} must be 0 or 1.")
        return times, np.nan_to_num(events).astype(bool)

    def take(self, rows: Iterable[int]) -> Cohort:
        """Select rows."""
        index = list(rows)
        return replace(
            self, columns={key: tuple(cells[i] for i in index) for key, cells in self.columns.items()}
        )

    def subset(self, *names: str, column: str = SPLIT) -> Cohort:
        """Select the slides of the named splits; refuse a column that puts a case in two splits."""
        cells, selected = self.column(column), {str(name) for name in names}
        check_names("split", selected, {cell for cell in cells if cell is not None})
        self.check_split(column)
        return self.take(i for i, cell in enumerate(cells) if cell in selected)

    def check_split(self, column: str = SPLIT) -> None:
        """Refuse a column that puts a case in two splits."""
        if leaks := self.leaking_cases(column):
            raise InputError(
                f"{self._name}: {len(leaks)} cases lie in two splits of {column!r} ({', '.join(leaks[:5])}); "
                "split again by case with `xmil split`."
            )

    def leaking_cases(self, column: str = SPLIT) -> list[str]:
        """Cases with slides in more than one split."""
        pairs = {pair for pair in zip(self.cases, self.column(column), strict=True) if pair[1] is not None}
        return sorted(case for case, n in Counter(case for case, _ in pairs).items() if n > 1)

    def with_column(self, name: str, values: Sequence[object]) -> Cohort:
        """Add or replace a column."""
        if len(values) != len(self):
            raise InputError(f"The column {name!r} must have {len(self)} rows. Got {len(values)} instead.")
        cells = tuple(None if value is None else str(value) for value in values)
        return replace(self, columns={**self.columns, name: cells})

    def save(self, path: StrPath) -> None:
        """Write the table atomically as CSV, or as Parquet if the name ends in .parquet."""
        _write_table(self.columns, Path(path), {SLIDE, CASE, SPLIT, PATH})

    def save_column(self, name: str, path: StrPath) -> None:
        """Write the cohort's original table with one column added or replaced."""
        own = read_table(self.path) if self.path is not None and self.path.is_file() else dict(self.columns)
        table = {**own, self.names.get(name, name): self.column(name)}
        _write_table(table, Path(path), {SLIDE, CASE, SPLIT, PATH, *self.names.values()})

    @property
    def _name(self) -> str:
        return str(self.path) if self.path else "The cohort"


def read_cohort(
    path: StrPath, *, metadata: StrPath | Sequence[StrPath] | None = None, slide_column: str | None = None
) -> Cohort:
    """Read a cohort table, or the paper's metadata folder; `metadata` completes the paper's split files.

    `slide_column` names the column of slides if its name is not recognised; `inferred` lists the columns that
    were recognised under other names.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "cohort.csv").write_text("slide_id,case_id,label\\ns1,c1,1\\ns2,c1,0\\n")
    ...     read_cohort(f"{folder}/cohort.csv")
    Cohort(2 slides of 1 case, columns label)
    """
    source = Path(path)
    if source.is_dir() and is_metadata(source):
        return cohort_of(read_metadata([source]), source, slide_column)
    table = read_table(source)
    if metadata is not None:
        table = _renamed(table)[0]
        if CASE not in table:
            raise FileError(f"{source}: a split file needs a column 'case_id'. Found: {', '.join(table)}.")
        folders = [metadata] if isinstance(metadata, str | PathLike) else metadata
        table = _join(read_metadata([Path(folder) for folder in folders]), table, keep_all=False)
        if not any(table.values()):
            raise InputError(
                f"{source}: the metadata has none of its cases; check that both belong to one dataset."
            )
    return cohort_of(table, source, slide_column)


def cohort_of(table: Table, path: Path, slide_column: str | None = None) -> Cohort:
    """Make a cohort from a table, with our names for its columns."""
    if slide_column is not None and slide_column not in table:
        raise FileError(f"{path}: {unknown_name('column', slide_column, table)}")
    columns, names = _renamed(table, slide_column)
    if SLIDE not in columns:
        by_case = CASE in columns and SPLIT in columns
        paper = " A split by case, as in the paper, also needs `metadata=`." if by_case else ""
        raise FileError(
            f"{path}: no column has a known name for slides ('slide_id', 'filename', 'image', ...). Found: "
            f"{', '.join(table)}. Name it with `slide_column=`.{paper}"
        )
    note = () if CASE in columns else ("no case_id: each slide is a case of its own",)
    return Cohort(columns, path, (*_taken(names), *note), names)


def _taken(names: Mapping[str, str]) -> list[str]:
    return [f"{name} from the column {alias!r}" for name, alias in names.items()]


def _renamed(table: Table, slide_column: str | None = None) -> tuple[Table, dict[str, str]]:
    """Rename the columns of slides, cases and splits to ours; return the table and the old names.

    Case and punctuation of names do not matter. A column of slides under another name may hold paths.
    """
    columns, names = dict(table), dict[str, str]()
    plain = {name: "".join(letter for letter in name.lower() if letter.isalnum()) for name in table}
    for name, aliases in _ALIASES.items():
        matches = [key for alias in aliases for key in columns if plain.get(key) == alias]
        alias = (slide_column if name == SLIDE else None) or next(iter(matches), None)
        if alias is None or alias == name or (name in columns and alias != slide_column):
            continue
        cells = columns.pop(alias)
        if name == SLIDE:
            cells = tuple(cell and PureWindowsPath(cell).name for cell in cells)  # with either kind of slash
        columns = {name: cells, **{key: cells for key, cells in columns.items() if key != name}}
        names[name] = alias
    return columns, names


def _as_integer(cell: str) -> int | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return int(number) if abs(number) < 2**53 and number.is_integer() else None


def read_cell(cell: str | None) -> str | None:
    """A cell, None where it says that nothing is known.

    >>> read_cell(" NaN "), read_cell("north")
    (None, 'north')
    """
    return None if cell is None or cell.strip().lower() in EMPTY else cell


Cells = tuple[str | None, ...]
Table = dict[str, Cells]


def read_table(path: Path) -> Table:
    """Read the columns of a CSV or Parquet table."""
    kind = sniff(path)
    if kind == "csv":
        return {name: tuple(cells) for name, cells in read_csv(path).items()}
    if kind != "parquet":
        raise FileError(f"{path}: not a table; a cohort is a CSV or Parquet file.")
    with readable(path, "Parquet file"):
        table = read_parquet(path)
        check_objects(table, path)
        names = [name for name in table.column_names if not name.startswith("__index")]
        return {name: tuple(_text(value) for value in table[name].to_pylist()) for name in names}


def _write_table(table: Mapping[str, Cells], path: Path, texts: Collection[str]) -> None:
    """Write a table as CSV or Parquet; in Parquet, columns outside `texts` get a type."""
    if path.suffix.lower() != ".parquet":
        return write_text(path, csv_text(list(table), zip(*table.values(), strict=True)))

    def write(temporary: str) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        cells = {key: list(cells) if key in texts else typed(cells) for key, cells in table.items()}
        pq.write_table(pa.table(cells), temporary)

    return write_atomically(path, write)


def typed(cells: Cells) -> list[Any]:
    """Convert cells to whole numbers or floats if all of them are, else leave them as text."""
    for kind in (int, float):
        try:
            return [None if cell is None else kind(cell) for cell in cells]
        except ValueError:
            continue
    return list(cells)


def _text(value: Any) -> str | None:
    if value is None or value != value or value == "":  # NaN is not itself
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


_CASES, _SLIDES = "case_metadata.csv", "slide_metadata.csv"


def is_metadata(folder: Path) -> bool:
    """Whether a folder holds the paper's metadata."""
    return (folder / _SLIDES).is_file()


def read_metadata(folders: list[Path]) -> Table:
    """Read slides with the columns of their cases from several folders; `source_id` numbers the folders."""
    parts = []
    for number, folder in enumerate(folders):
        if not is_metadata(folder):
            raise FileError(f"{folder}: has no {_SLIDES}; name the folder with the paper's metadata.")
        slides = read_table(folder / _SLIDES)
        if missing := [name for name in (CASE, SLIDE) if name not in slides]:
            raise FileError(f"{folder / _SLIDES}: needs a column {missing[0]!r}. Found: {', '.join(slides)}.")
        cases = read_table(folder / _CASES) if (folder / _CASES).is_file() else {}
        joined = _join(slides, cases, keep_all=True) if CASE in cases else slides
        parts.append({**joined, "source_id": (str(number),) * len(joined[CASE])})
    names = dict.fromkeys(name for part in parts for name in part)
    return {
        name: tuple(cell for part in parts for cell in part.get(name, (None,) * len(part[CASE])))
        for name in names
    }


def _join(left: Table, right: Table, *, keep_all: bool) -> Table:
    """Rows of `left` with the columns of `right` for their case; `right` wins if both have a column."""
    row_of = {case: i for i, case in reversed(list(enumerate(right[CASE])))}
    rows = [i for i, case in enumerate(left[CASE]) if keep_all or case in row_of]
    joined = {name: tuple(cells[i] for i in rows) for name, cells in left.items() if name}
    for name, cells in right.items():
        if name and name != CASE:
            matches = [row_of.get(left[CASE][i]) for i in rows]
            joined[name] = tuple(None if row is None else cells[row] for row in matches)
    return joined
