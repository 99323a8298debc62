"""A bag: the instances of one slide, and their patches, with level-0 boxes if these are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from types import EllipsisType
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter
from xmil.core.text import counted, small_number

FloatArray = npt.NDArray[np.float32]
LEVEL0 = ("level0_width", "level0_height")  # of the slide, in `extra`
_LARGEST = 2**63  # limit of int64
IntArray = npt.NDArray[np.int64]
Unit = Literal["px", "um", "px-centre", "px-read", "unknown"]

CONVENTIONS: dict[str, str] = {
    "px": "top-left corners in level-0 pixels",
    "um": "top-left corners in microns",
    "px-centre": "tile centres in level-0 pixels, tile edge in microns",
    "px-read": "boxes in pixels of an unstored reading resolution",
    "unknown": "coordinates of an unknown unit",
}
_WAY_OUT: dict[str, str] = {
    "px": "the patch edge is unknown; pass `patch_size=` (level-0 pixels)",
    "um": "coordinates are in microns; pass the slide's `mpp=`",
    "px-centre": "coordinates are tile centres; pass the slide's `mpp=` or `patch_size=` (level-0 pixels)",
    "px-read": "the reading resolution is not stored; pass `patch_size=` (the patch edge in level-0 pixels)",
    "unknown": "the unit of the stored coordinates is unknown; write the bag again with level-0 coordinates",
}
_FAR = 2.0**40  # no slide has more pixels on an edge; larger values mean a damaged file


@dataclass(frozen=True, eq=False)
class Patches:
    """The patches of one slide: level-0 corners (n, 2) and edge, microns per pixel, level 0's size.

    Coordinates in another unit (microns, tile centres) stay in `raw_coords` with their `unit` and edge;
    `coords` is None until the slide's mpp is known. `notes` lists inferred values; `edge_guess` says what an
    edge was guessed from that no file states.

    >>> stored = Patches.stored([[256, 0]], "um", edge=256)
    >>> stored.coords is None, stored.placed(mpp=0.5).boxes().tolist()
    (True, [[512, 0, 1024, 512]])
    """

    coords: IntArray | None = None
    patch_size: int | None = None
    mpp: float | None = None
    raw_coords: npt.NDArray[np.float64] | None = None
    unit: str | None = None
    raw_edge: float | None = None
    slide_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()
    edge_guess: str | None = None

    @classmethod
    def stored(
        cls,
        xy: npt.ArrayLike,
        unit: str,
        *,
        edge: float | None = None,
        mpp: float | None = None,
        patch_size: int | None = None,
    ) -> Patches:
        """Make patches from coordinates in a unit; `edge` is in microns, or in the unit's own pixels.

        >>> Patches.stored([[256, 256]], "px-centre", edge=128, mpp=0.25).coords.tolist()
        [[0, 0]]
        """
        try:
            raw = np.asarray(xy, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError("Coordinates must be numbers.") from None
        if raw.ndim != 2 or raw.shape[1] != 2:
            raise InputError(f"Coordinates must have shape (patches, 2). Got {raw.shape} instead.")
        if not np.all(np.abs(raw) < _FAR):  # also false for NaN
            raise InputError(
                "Coordinates must be finite and within 2^40. The file is damaged or of another layout."
            )
        notes: list[str] = []
        if unit == "um" and mpp is None and edge and patch_size:
            mpp = edge / patch_size
            tile = f"the tile of {edge:g} µm and the given patch edge of {patch_size} px"
            notes.append(f"mpp {mpp:g} from {tile}")
        size, level0 = patch_size, None
        scale = 1.0 if unit == "px" else mpp if unit in ("um", "px-centre") else None
        if size is None and edge is not None and scale:
            size = round(edge / scale)
        if unit == "px":
            return cls(np.rint(raw).astype(np.int64), size, mpp)
        if unit == "um" and mpp:
            level0 = raw / mpp
        elif unit == "px-centre" and size:
            level0 = raw - size / 2
        elif unit == "px-read" and size and edge:
            level0 = raw * (size / edge)
            notes.append(f"reading resolution {size}/{edge:g} of level 0 from the given patch edge")
        coords = None if level0 is None else np.rint(level0).astype(np.int64)
        return cls(coords, size, mpp, raw, unit, edge, notes=tuple(notes))

    def placed(self, mpp: float | None = None, *, patch_size: int | None = None) -> Patches:
        """Compute level-0 coordinates from `raw_coords` and the slide's mpp or patch edge; only new notes."""
        mpp = self.mpp if mpp is None else mpp
        guess = self.edge_guess if patch_size is None else None
        if self.raw_coords is None or self.unit is None:
            size = self.patch_size if patch_size is None else patch_size
            return replace(self, mpp=mpp, patch_size=size, notes=(), edge_guess=guess)
        level0 = Patches.stored(
            self.raw_coords, self.unit, edge=self.raw_edge, mpp=mpp, patch_size=patch_size
        )
        return replace(
            self,
            coords=level0.coords,
            patch_size=level0.patch_size,
            mpp=level0.mpp,
            notes=level0.notes,
            edge_guess=guess,
        )

    def take(self, rows: Any) -> Patches:
        """Select rows by indices, booleans or a slice."""
        names = ("coords", "raw_coords")
        return replace(self, **{k: v[rows] for k in names if (v := getattr(self, k)) is not None})

    def boxes(self, name: str = "The bag") -> IntArray:
        """Compute level-0 boxes (n, 4) as x0, y0, x1, y1; if they are unknown, say why in the error."""
        if self.coords is None or self.patch_size is None:
            raise InputError(f"{name} cannot be drawn: {self.missing}.")
        return np.concatenate([self.coords, self.coords + self.patch_size], axis=1)

    @property
    def missing(self) -> str | None:
        """Why boxes are unknown and the way out, or None."""
        if self.coords is None:
            way_out = (
                "it has no coordinates; explaining and evaluating work without, and slides/ has its scores"
            )
            return _WAY_OUT.get(self.unit or "", way_out)
        return _WAY_OUT["px"] if self.patch_size is None else None

    @property
    def guessed_edge(self) -> Patches | None:
        """The edge and what it was guessed from, without places; None for an edge that is known."""
        if self.patch_size is None or self.edge_guess is None:
            return None
        return Patches(patch_size=self.patch_size, edge_guess=self.edge_guess)

    @property
    def edge_note(self) -> str | None:
        """A sentence on an edge that was guessed, for files and pictures; None for an edge that is known."""
        if self.patch_size is None or self.edge_guess is None:
            return None
        return (
            f"The patch edge of {self.patch_size} px is a guess from {self.edge_guess}; --patch-size "
            "(Python: `patch_size=`) sets it."
        )

    @classmethod
    def joined(cls, parts: Sequence[Patches]) -> Patches:
        """Concatenate the patches of several slides; leave out values that differ."""
        names = ("patch_size", "mpp", "unit", "raw_edge")
        shared: dict[str, Any] = {name: shared_value(parts, name) for name in names}
        for name in ("coords", "raw_coords"):
            arrays = [getattr(part, name) for part in parts]
            shared[name] = None if any(array is None for array in arrays) else np.concatenate(arrays)
        guess = next((part.edge_guess for part in parts if part.edge_guess is not None), None)
        return cls(**shared, edge_guess=guess)


class Places(TypedDict, total=False):
    """The attributes of patches that bags and explanations take by name."""

    patch_size: int | None
    mpp: float | None
    raw_coords: npt.NDArray[np.float64] | None
    unit: str | None
    raw_edge: float | None
    slide_size: tuple[int, int] | None


def merged(patches: Patches | None, coords: Any | EllipsisType, places: Places) -> Patches:
    """Override attributes of patches by those passed by name; coords of `...` were not passed."""
    changes: dict[str, Any] = {**places} if coords is ... else {"coords": coords, **places}
    if "patch_size" in places:
        changes["edge_guess"] = None
    base = Patches() if patches is None else patches
    return replace(base, **changes) if changes else base


def _of_patches(name: str, doc: str) -> Any:
    return property(attrgetter(f"patches.{name}"), doc=doc)


class Placed:
    """Gives an object with `patches` their attributes."""

    patches: Patches
    coords: IntArray | None = _of_patches("coords", "Top-left corners (n, 2) in level-0 pixels, or None.")
    patch_size: int | None = _of_patches("patch_size", "The patch edge in level-0 pixels.")
    mpp: float | None = _of_patches("mpp", "Microns per level-0 pixel.")
    raw_coords: npt.NDArray[np.float64] | None = _of_patches(
        "raw_coords", "Coordinates (n, 2) as stored, if their unit is not level-0 pixels."
    )
    unit: str | None = _of_patches("unit", "The unit of `raw_coords`.")
    raw_edge: float | None = _of_patches("raw_edge", "The patch edge as stored.")
    slide_size: tuple[int, int] | None = _of_patches(
        "slide_size", "Width and height of the slide's level 0, if the file stores them."
    )


def shared_value(parts: Sequence[Any], name: str) -> Any:
    """Return an attribute if all parts have the same value, else None."""
    values = {getattr(part, name) for part in parts}
    return values.pop() if len(values) == 1 else None


@dataclass(frozen=True, eq=False, init=False)
class Bag(Placed):
    """Instances of one slide: features (n, d), and level-0 boxes if they are known.

    `patches` has their places; its attributes are also the bag's, and can be passed by name: `coords` are the
    top-left corners in level-0 pixels, `patch_size` is the level-0 edge. `inferred` lists, as sentences, the
    values that were inferred, not read. `columns` has other values per instance, such as annotations.
    `extras` has other inputs of a network: arrays with a row per instance, and n x n matrices that join
    instances, which are sparse (SciPy) or have a name that starts with "adj".

    >>> bag = Bag(np.zeros((3, 8)), coords=[[0, 0], [256, 0], [0, 256]], patch_size=256, slide_id="s1")
    >>> bag
    Bag('s1', 3 patches x 8 features, patch_size=256)
    """

    features: FloatArray
    patches: Patches
    slide_id: str | None
    encoder: str | None
    source: str | None
    format: str | None
    version: str | None
    inferred: tuple[str, ...]
    columns: Mapping[str, npt.NDArray[Any]]
    extra: dict[str, Any]
    extras: Mapping[str, Any]

    def __init__(
        self,
        features: npt.ArrayLike,
        coords: npt.ArrayLike | EllipsisType | None = ...,
        *,
        patches: Patches | None = None,
        slide_id: str | None = None,
        encoder: str | None = None,
        source: str | None = None,
        format: str | None = None,  # noqa: A002 - the name that users know
        version: str | None = None,
        inferred: Sequence[str] = (),
        columns: Mapping[str, npt.NDArray[Any]] | None = None,
        extra: dict[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        **places: Unpack[Places],
    ) -> None:
        name = called(slide_id, source)
        values = as_features(features, name=name)
        own = merged(patches, coords, places)
        edge, mpp = own.patch_size, own.mpp
        if edge is not None and not (0 < edge < _LARGEST and float(edge).is_integer()):
            raise bad_parameter("patch_size", name, "an int in the range [1, inf)", edge)
        if mpp is not None and not 0 < mpp < np.inf:
            raise bad_parameter("mpp", name, "a float in the range (0, inf)", mpp)
        own = replace(own, coords=_as_coords(own.coords, n=len(values), name=name), notes=())
        if extra is None or "slide_size" in places:  # otherwise `extra` has the size that the file stores
            extra = {**(extra or {}), **dict(zip(LEVEL0, own.slide_size or (), strict=False))}
        width, height = (small_number(str(extra.get(key))) for key in LEVEL0)
        own = replace(own, slide_size=(width, height) if width and height else None)
        for key, column in {"raw_coords": own.raw_coords, **(columns or {})}.items():
            if column is not None and len(column) != len(values):
                raise InputError(
                    f"The column {key!r} of {name} must have {len(values)} rows. Got {len(column)} instead."
                )
        self.__dict__.update(  # the class is frozen
            features=values,
            patches=own,
            slide_id=slide_id,
            encoder=encoder,
            source=source,
            format=format,
            version=version,
            inferred=tuple(inferred),
            columns=columns or {},
            extra=extra,
            extras=_as_extras(extras or {}, n=len(values), name=name),
        )

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        facts = [
            f"{key}={value}" for key in ("patch_size", "mpp", "encoder") if (value := getattr(self, key))
        ]
        size = f"{counted(len(self), 'patch')} x {counted(self.dim, 'feature')}"
        return f"Bag({', '.join([repr(self.slide_id), size, *facts])})"

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return int(self.features.shape[1])

    @property
    def called(self) -> str:
        """The bag in a sentence: its file, else its name."""
        return called(self.slide_id, self.source)

    def select(self, rows: npt.ArrayLike) -> Bag:
        """Select rows, in the given order."""
        index = np.asarray(rows)
        return replace(
            self,
            features=self.features[index],
            patches=self.patches.take(index),
            columns={key: values[index] for key, values in self.columns.items()},
            extras=select_extras(self.extras, index),
        )

    def boxes(self) -> IntArray:
        """Compute level-0 boxes (n, 4) as x0, y0, x1, y1; if they are unknown, say why in the error."""
        return self.patches.boxes(self.source or (f"Bag {self.slide_id!r}" if self.slide_id else "The bag"))

    def placed(self, *, mpp: float | None = None, patch_size: int | None = None) -> Bag:
        """Compute level-0 coordinates from `raw_coords` and the slide's mpp or the patch edge.

        >>> stamp = Bag(np.zeros((1, 4)), raw_coords=np.array([[256.0, 0.0]]), unit="um", raw_edge=256)
        >>> stamp.placed(mpp=0.5).boxes().tolist()
        [[512, 0, 1024, 512]]
        """
        placed = self.patches.placed(mpp, patch_size=patch_size)
        return replace(self, patches=placed, inferred=self.inferred + placed.notes)


def called(slide_id: str | None, source: str | None = None) -> str:
    """Name a bag in a sentence.

    >>> called("s1"), called("s1", "features/s1.h5"), called(None)
    ("bag 's1'", 'features/s1.h5', 'the bag')
    """
    return source or (f"bag {slide_id!r}" if slide_id else "the bag")


def as_features(values: Any, *, name: str = "the bag") -> FloatArray:
    """Convert to a contiguous float32 (n, d) array of real numbers."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths, or several arrays
        array = np.empty(0, dtype=object)
    if array.dtype == object:
        raise InputError(
            f"Features of {name} must be numbers, in one array (patches, width); pass coordinates apart, as "
            f"Bag(features, coords=...). Got a {type(values).__name__} instead."
        )
    if array.dtype.kind not in "fiub":
        raise InputError(f"Features of {name} must be numbers. Got dtype {array.dtype} instead.")
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise InputError(f"Features of {name} must have shape (patches, width). Got {array.shape} instead.")
    return np.ascontiguousarray(array, dtype=np.float32)


def joins_instances(name: str, values: Any) -> bool:
    """Whether an extra is an n x n matrix between instances: sparse, or with a name that starts with adj."""
    return hasattr(values, "tocsr") or name.lower().startswith("adj")


def _as_extras(extras: Mapping[str, Any], *, n: int, name: str) -> dict[str, Any]:
    """Check extras: arrays with a row per instance, or square matrices, which may be sparse."""
    checked = {}
    for key, values in extras.items():
        array = values if hasattr(values, "tocsr") else np.asarray(values)
        must = (n, n) if joins_instances(key, array) else (n, *array.shape[1:])
        if array.shape != must:
            raise InputError(
                f"The extra {key!r} of {name} must have shape {must}. Got {array.shape} instead."
            )
        checked[key] = array
    return checked


def select_extras(extras: Mapping[str, Any], index: npt.NDArray[Any]) -> dict[str, Any]:
    """Select rows of extras, in the given order; of matrices both rows and columns."""
    selected = {}
    for key, values in extras.items():
        rows = (values.tocsr() if hasattr(values, "tocsr") else values)[index]
        selected[key] = rows[:, index] if joins_instances(key, values) else rows
    return selected


def _as_coords(values: Any, *, n: int, name: str) -> IntArray | None:
    if values is None:
        return None
    coords = np.asarray(values)
    if coords.shape != (n, 2):
        raise InputError(f"Coordinates of {name} must have shape ({n}, 2). Got {coords.shape} instead.")
    if coords.dtype.kind not in "iuf" or not np.all(np.isfinite(coords)):
        raise InputError(f"Coordinates of {name} must be finite numbers. Got dtype {coords.dtype} instead.")
    rounded = np.rint(coords) if coords.dtype.kind == "f" else coords
    return np.ascontiguousarray(rounded, dtype=np.int64)


class StoredBag(Bag):
    """A bag that keeps features in their stored type, such as half precision; `features` converts them.

    Callers can convert `stored` where it is fast, such as on a GPU.

    >>> bag = StoredBag(np.ones((2, 3), dtype=np.float16))
    >>> bag.stored.dtype.name, bag.features.dtype.name, len(bag), bag.dim
    ('float16', 'float32', 2, 3)
    """

    stored: npt.NDArray[Any]

    def __init__(self, features: npt.ArrayLike, *args: Any, **fields: Any) -> None:
        values = np.asarray(features)
        super().__init__(np.empty((len(values), 0), np.float32), *args, **fields)
        object.__setattr__(self, "stored", values)
        del self.__dict__["features"]  # the property below takes its place

    @cached_property
    def features(self) -> FloatArray:
        """The features in float32."""
        return as_features(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return int(self.stored.shape[1])
