"""The verbs of this layer: open, read and write bags."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import Bag
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, XmilError
from xmil.data.containers import open_contents
from xmil.data.header import Ask, Header, write_extra
from xmil.data.readers import find_reader
from xmil.data.readers.trident import OURS, STATED

StrPath = str | PathLike[str]


def read_bag(
    path: StrPath,
    format: str = "auto",  # noqa: A002 - the word users know
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
    rows: npt.ArrayLike | None = None,
) -> Bag:
    """Read the features of one slide, in any known layout, with level-0 boxes where they can be known.

    `mpp` (of the slide) and `patch_size` (level-0 pixels) settle what a file leaves open; `rows` reads only
    some instances, in that order. What was worked out rather than read is listed in `bag.inferred`.

    >>> import tempfile, numpy as np
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/s1.npy", np.zeros((5, 8), "float16"))
    ...     read_bag(f"{folder}/s1.npy", rows=[4, 0])
    Bag('s1', 2 instances x 8 features)
    """
    return open_bag(path, format, mpp=mpp, patch_size=patch_size).read(rows)


def open_bag(
    path: StrPath,
    format: str = "auto",  # noqa: A002 - the word users know
    *,
    mpp: float | None = None,
    patch_size: int | None = None,
) -> Header:
    """Everything about a stored bag but its features, which `read` brings on demand."""
    ask = Ask(mpp, patch_size)  # refused before anything is opened
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
        # a reader met something it did not foresee in a damaged file
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise FileError(
            f"{path}: damaged or of another layout ({reason}); copy or extract it again, or name its layout "
            "with format=."
        ) from error


def write_bag(bag: Bag, path: StrPath) -> None:
    """Write a bag in TRIDENT's layout, with mpp added, whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     bag = Bag(np.zeros((2, 4)), coords=[[0, 0], [256, 0]], patch_size=256, mpp=0.5)
    ...     write_bag(bag, f"{folder}/s.h5")
    ...     read_bag(f"{folder}/s.h5").boxes().tolist()
    [[0, 0, 256, 256], [256, 0, 512, 256]]
    """
    write_atomically(path, lambda temporary: _write(bag, temporary, Path(path)))


def _write(bag: Bag, temporary: str, path: Path) -> None:
    import h5py

    shared = {"name": bag.slide_id or path.stem, "savetodir": path.parent.name}
    with h5py.File(temporary, "w") as file:
        carried = {
            key: getattr(bag, key) for key in ("slide_id", "mpp", "inferred", "unit", "raw_edge", "extra")
        }
        file.attrs[OURS] = json.dumps({"version": __version__, "from": bag.format, **carried}, default=str)
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
