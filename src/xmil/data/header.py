"""What a reader returns: a stored bag whose features stay on disk; helpers to find files beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import EllipsisType
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag, IntArray, Patches, Placed, Places, StoredBag, merged, select_extras
from xmil.core.durable import is_inside
from xmil.core.errors import FileError, InputError, bad_parameter, refuse_damage
from xmil.core.text import parse_json
from xmil.data.containers import Contents, Rows
from xmil.data.containers.container import Empty


@dataclass(frozen=True)
class Ask:
    """The user's values, which override the file: the slide's mpp and the patch edge in level-0 pixels."""

    mpp: float | None = None
    patch_size: int | None = None

    def __post_init__(self) -> None:
        if self.mpp is not None and not (isinstance(self.mpp, Real) and 0 < self.mpp < np.inf):
            raise bad_parameter("mpp", "read_bag", "a float in the range (0, inf)", self.mpp)
        if self.patch_size is not None and not (
            isinstance(self.patch_size, Integral) and self.patch_size > 0
        ):
            raise bad_parameter("patch_size", "read_bag", "an int in the range [1, inf)", self.patch_size)


@dataclass(frozen=True, init=False)
class Header(Placed):
    """A stored bag whose features are still on disk: `read` reads all of them or some rows.

    `features` is None for files with coordinates only. `keep` lists the stored rows that belong to the bag,
    if not all do (augmented copies). `coords`, `patch_size` and the like go into `patches`.
    """

    path: Path
    format: str
    features: Rows | None
    patches: Patches
    slide_id: str | None
    encoder: str | None
    version: str | None
    inferred: tuple[str, ...]
    columns: Mapping[str, npt.NDArray[Any]]
    extra: dict[str, Any]
    keep: IntArray | None
    extras: Mapping[str, Any]

    def __init__(
        self,
        path: Path,
        format: str,  # noqa: A002 - as of a bag
        features: Rows | None,
        coords: IntArray | EllipsisType | None = ...,
        *,
        patches: Patches | None = None,
        slide_id: str | None = None,
        encoder: str | None = None,
        version: str | None = None,
        inferred: tuple[str, ...] = (),
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        extra: dict[str, Any] | None = None,
        keep: IntArray | None = None,
        extras: Mapping[str, Any] | None = None,
        **places: Unpack[Places],
    ) -> None:
        self.__dict__.update(  # the class is frozen
            path=path,
            format=format,
            features=features,
            slide_id=slide_id,
            patches=merged(patches, coords, places),
            encoder=encoder,
            version=version,
            inferred=inferred,
            columns=columns or {},
            extra=extra or {},
            keep=keep,
            extras=extras or {},
        )

    def __len__(self) -> int:
        if self.keep is not None:
            return len(self.keep)
        if self.features is not None:
            return self.features.shape[0]
        return 0 if self.coords is None else len(self.coords)

    @property
    def dim(self) -> int:
        """Width of the feature vectors; 0 if the file has only coordinates."""
        return 0 if self.features is None else self.features.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the features once read."""
        return len(self) * self.dim * 4

    def read(self, rows: npt.ArrayLike | None = None) -> Bag:
        """Read the bag, or some of its rows in the order of `rows`."""
        index = None if rows is None else _as_index(rows, len(self))
        if self.features is None:
            return self._bag(Bag, np.zeros((len(self) if index is None else len(index), 0)), index)
        stored = index if self.keep is None else self.keep if index is None else self.keep[index]
        return self._bag(Bag, self.features.read(stored), index)

    def read_stored(self, empty: Empty = np.empty) -> Bag:
        """Read the bag with features in their stored type, in memory that `empty` allocates."""
        if self.features is None or self.features.read_stored is None or self.keep is not None:
            return self.read()
        return self._bag(StoredBag, self.features.read_stored(empty), None)

    def _bag(self, kind: type[Bag], features: npt.NDArray[Any], index: IntArray | None) -> Bag:
        return kind(
            features,
            patches=self.patches if index is None else self.patches.take(index),
            columns={name: v if index is None else v[index] for name, v in self.columns.items()},
            extras=self.extras if index is None else select_extras(self.extras, index),
            source=str(self.path),
            extra=dict(self.extra),
            slide_id=self.slide_id,
            encoder=self.encoder,
            format=self.format,
            version=self.version,
            inferred=self.inferred,
        )


def place(
    header: Header,
    xy: npt.ArrayLike | None,
    unit: str = "px",
    *,
    ask: Ask,
    edge: float | None = None,
    guess: str | None = None,
    notes: Sequence[str] = (),
) -> Header:
    """Place a header's patches at stored coordinates; `inferred` gets `notes` and the user's overrides.

    `guess` says what the edge was guessed from, if the file does not state it.
    """
    inferred = (*header.inferred, *notes)
    mpp = ask.mpp if ask.mpp is not None else header.mpp
    if xy is None:
        return replace(header, patches=Patches(mpp=mpp, patch_size=ask.patch_size), inferred=inferred)
    n = len(header)
    corners = np.asarray(xy)
    if header.features is not None and corners.shape != (n, 2):
        raise FileError(
            f"{header.path}: has {n} feature rows but coordinates of shape {corners.shape}; they must match."
        )
    try:
        patches = Patches.stored(corners, unit, edge=edge, mpp=mpp, patch_size=ask.patch_size)
    except InputError as error:
        raise FileError(f"{header.path}: {error}") from None
    if edge and ask.patch_size is None:
        patches = replace(patches, edge_guess=guess)
    if unit == "px" and edge and ask.patch_size not in (None, round(edge)):
        inferred = (*inferred, f"patch edge {ask.patch_size} from `patch_size=`; the file has {edge:g}")
    return replace(header, patches=patches, inferred=(*inferred, *patches.notes))


def positive(value: Any) -> float | None:
    """A stored number above zero, or None for anything else."""
    try:
        number = float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        return None
    return number if 0 < number < np.inf else None


def one_edge(edges: npt.NDArray[Any], path: Path) -> float | None:
    """The edge that all patches have, by those of their boxes; None without boxes."""
    different = np.unique(edges)
    if len(different) > 1 or not (different > 0).all():
        raise FileError(f"{path}: its boxes must be squares of one size. Got edges {different[:6].tolist()}.")
    return float(different[0]) if len(different) else None


def read_json(beside: Path | None) -> dict[str, Any]:
    """Read the JSON object in a file beside a bag; empty if there is no file."""
    if beside is None:
        return {}
    with refuse_damage(f"{beside}: not readable JSON", way="write the bags again"):
        loaded = parse_json(beside.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


GAP = "the smallest gap between patches"
PIXELS = ("patch_size", "patch_px", "patch_size_px", "tile_size", "tile_px", "tile_size_px")
PATCH_MPP = ("patch_mpp", "tile_mpp", "target_mpp", "patch_spacing_um_px")
SLIDE_MPP = ("slide_mpp", "level0_mpp", "mpp_level0")
CLOSE = 0.02  # relative difference of two edges that are the same, as mpp is rounded


def place_by_gap(
    header: Header, coords: npt.NDArray[Any], contents: Contents, *, ask: Ask, notes: Sequence[str] = ()
) -> Header:
    """Place patches whose edge no file states by the step of their grid, which is a guess.

    Patches that overlap, or lie apart, have another edge. The guess is refused if pixels and mpp in the file
    contradict it.
    """
    edge = smallest_gap(coords) if ask.patch_size is None else None
    if edge is None:
        return place(header, coords, ask=ask, notes=notes)
    guess = None if _is_stated(edge, contents, ask) else GAP
    note = f"patch edge {edge} from the smallest coordinate gap (no overlap assumed); `patch_size=` sets it"
    return place(header, coords, edge=edge, guess=guess, ask=ask, notes=[*notes, note])


def _is_stated(edge: int, contents: Contents, ask: Ask) -> bool:
    """Whether an edge follows from the patch size in pixels and the mpp that a file states; refuse another.

    An mpp without further name may be that of the patches or of the slide.
    """
    pixels, mpp = (_stated(contents, names) for names in (PIXELS, ("mpp",)))
    patch_mpp = _stated(contents, PATCH_MPP) or mpp
    slide_mpp = ask.mpp or _stated(contents, SLIDE_MPP) or mpp
    if pixels is None or patch_mpp is None or slide_mpp is None:
        return False
    stated = pixels * patch_mpp / slide_mpp
    if abs(edge - stated) > CLOSE * stated:
        raise FileError(
            f"{contents.path}: patches of {pixels:g} px at {patch_mpp:g} µm/px have an edge of {stated:.0f} "
            f"px on a slide with {slide_mpp:g} µm/px, but these lie {edge} px apart; pass `patch_size=` "
            "(level-0 pixels)."
        )
    return True


def _stated(contents: Contents, names: Sequence[str]) -> float | None:
    """Find a number under one of several names, among attributes or as an array of one number."""
    owners = [contents.attrs, *(info.attrs for info in contents.arrays.values())]
    for name in names:
        values = [owner[name] for owner in owners if name in owner]
        if name in contents and contents.arrays[name].shape in ((), (1,)):
            with suppress(FileError):  # not a number
                values.append(contents.read(name))
        number = next(filter(None, map(positive, values)), None)
        if number is not None:
            return number
    return None


def _as_index(rows: npt.ArrayLike, n: int) -> IntArray:
    index = np.asarray(rows)
    if index.dtype == bool and index.shape == (n,):
        return np.flatnonzero(index).astype(np.int64)
    if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
        raise bad_parameter("rows", "read", "a list of row numbers, or one bool for each row", rows)
    if index.size and not (-n <= index.min() and index.max() < n):
        raise InputError(
            f"Row numbers must be in the range [-{n}, {n}). Got {int(index.min())} to {int(index.max())}."
        )
    return np.where(index < 0, index + n, index).astype(np.int64)


def smallest_gap(coords: npt.NDArray[Any]) -> int | None:
    """The step of the patch grid: the smallest positive gap between patches of one row or column.

    CLAM lays one grid per tissue contour, each with its own offset. So only gaps within a row or column
    count, and if the smallest does not divide the others (two grids that share a line), the commonest wins.

    >>> smallest_gap(np.array([[0, 0], [512, 0], [1536, 0], [300, 77], [812, 77]]))
    512
    """
    if len(coords) < 2 or not np.all(np.abs(coords) < 2**40):  # damage, which `place` reports
        return None
    on_lines, anywhere = [], []
    for along, across in ((0, 1), (1, 0)):
        order = np.lexsort((coords[:, along], coords[:, across]))
        line, position = coords[order, across], coords[order, along]
        on_lines.append(np.diff(position)[line[1:] == line[:-1]])  # between neighbours of one row or column
        anywhere.append(np.diff(np.unique(position)))
    for candidates in (on_lines, anywhere):
        gaps = np.rint(np.concatenate(candidates)).astype(np.int64)
        gaps = gaps[gaps > 0]
        if gaps.size:
            break
    else:
        return None
    values, counts = np.unique(gaps, return_counts=True)
    divides = np.average(values % values[0] == 0, weights=counts)
    return int(values[0] if divides >= 0.5 else values[np.argmax(counts)])


FEATURE_SUFFIXES = (".h5", ".hdf5", ".pt", ".pth", ".npy", ".npz", ".zarr")


def slide_name(path: Path) -> str:
    """The slide of a feature file: its name without the feature suffix, including inner dots.

    >>> slide_name(Path("TCGA-CR-7395.01A.h5")), slide_name(Path("s1_patches.h5"))
    ('TCGA-CR-7395.01A', 's1')
    """
    name = path.name
    suffix = next((suffix for suffix in FEATURE_SUFFIXES if name.lower().endswith(suffix)), "")
    name = name[: len(name) - len(suffix)]
    return name.removesuffix("_patches") or name


def find_beside(path: Path, candidates: Sequence[str], *, levels: int) -> Path | None:
    """Find the first existing candidate in the folder of `path` or up to `levels` folders above."""
    folders = list(path.absolute().parents)[: levels + 1]
    paths = ((folder / candidate, folder) for folder in folders for candidate in candidates)
    return next((path for path, folder in paths if path.exists() and is_inside(path, folder)), None)


def index_beside(path: Path) -> Path | None:
    """Slideflow's index of tile centres for a `.pt`."""
    name = slide_name(path)
    return find_beside(path, [f"{name}.index.npz", f"{name}.index.npy"], levels=0)


def patch_table(path: Path) -> Path | None:
    """The paper's patch metadata for a slide's features."""
    table = f"{slide_name(path)}/metadata/df.csv"
    return find_beside(path, [f"patches/{table}", table], levels=2)


FOLDER = "extras"
SPARSE = ("data", "indices", "indptr")
GRAPHS = ("adjacency", "adj", "edge_index")  # common names of a matrix between instances


def write_extra(file: Any, name: str, values: Any) -> None:
    """Write an array, or a sparse matrix as its three arrays, to an open HDF5 file."""
    plain = name.replace("/", "_")
    if not hasattr(values, "tocsr"):
        file.create_dataset(f"{FOLDER}/{plain}", data=np.asarray(values))
        return
    matrix = values.tocsr()
    for part in SPARSE:
        file.create_dataset(f"{FOLDER}.{part}/{plain}", data=getattr(matrix, part))


def stored_extras(contents: Contents, n: int) -> dict[str, Any]:
    """Read the extras that `write_extra` wrote, for a bag of n instances."""
    from scipy.sparse import csr_array

    extras = {}
    folders = {f"{FOLDER}.{part}" for part in SPARSE}
    paths = [path.partition("/") for path in contents.arrays if "/" in path]
    for folder, _, name in paths:
        if folder == FOLDER:
            extras[name] = contents.read(f"{FOLDER}/{name}")
    for name in sorted({name for folder, _, name in paths if folder in folders}):
        missing = [part for part in SPARSE if f"{FOLDER}.{part}/{name}" not in contents]
        if missing:
            raise FileError(
                f"{contents.path}: the extra {name!r} lacks {', '.join(missing)}; write the bag again."
            )
        data, indices, indptr = (contents.read(f"{FOLDER}.{part}/{name}") for part in SPARSE)
        if len(indptr) != n + 1 or len(data) != len(indices) or not _within(indices, n):
            raise FileError(f"{contents.path}: the extra {name!r} is damaged; write the bag again.")
        extras[name] = csr_array((data, indices, indptr), shape=(n, n))
    return extras


def named_graphs(contents: Contents, n: int) -> dict[str, Any]:
    """Read a matrix between instances under a common name: dense, or from an `edge_index` (2, e)."""
    name = next((name for name in GRAPHS if name in contents), None)
    if name is None:
        return {}
    values = contents.read(name)
    if name != "edge_index":
        return {"adjacency": values}
    from scipy.sparse import csr_array

    if values.ndim != 2 or len(values) != 2 or values.dtype.kind not in "iu" or not _within(values, n):
        raise FileError(
            f"{contents.path}: 'edge_index' must hold pairs (2, e) of rows below {n}. Got shape "
            f"{values.shape} instead."
        )
    return {"adjacency": csr_array((np.ones(values.shape[1], np.float32), tuple(values)), shape=(n, n))}


def _within(rows: Any, n: int) -> bool:
    return not rows.size or bool(rows.min() >= 0 and rows.max() < n)
