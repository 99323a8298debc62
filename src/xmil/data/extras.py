"""Extras of a bag in a file: arrays with a row per instance, and matrices between instances."""

from __future__ import annotations

from typing import Any

import numpy as np

from xmil.core.errors import FileError
from xmil.data.containers import Contents

FOLDER = "extras"
SPARSE = ("data", "indices", "indptr")
GRAPHS = ("adjacency", "adj", "edge_index")  # what others call a matrix between instances


def write_extra(file: Any, name: str, values: Any) -> None:
    """An array, or a sparse matrix as its three arrays, in an open HDF5 file."""
    plain = name.replace("/", "_")
    if not hasattr(values, "tocsr"):
        file.create_dataset(f"{FOLDER}/{plain}", data=np.asarray(values))
        return
    matrix = values.tocsr()
    for part in SPARSE:
        file.create_dataset(f"{FOLDER}.{part}/{plain}", data=getattr(matrix, part))


def stored_extras(found: Contents, n: int) -> dict[str, Any]:
    """The extras of a file that `write_extra` filled, for a bag of n instances."""
    whole = {name: found.read(f"{FOLDER}/{name}") for name in _names(found, FOLDER)}
    sparse = sorted({name for part in SPARSE for name in _names(found, f"{FOLDER}.{part}")})
    return {**whole, **{name: _sparse(found, name, n) for name in sparse}}


def _names(found: Contents, folder: str) -> list[str]:
    return [name.removeprefix(f"{folder}/") for name in found.arrays if name.startswith(f"{folder}/")]


def named_graphs(found: Contents, n: int) -> dict[str, Any]:
    """The matrix between instances of a file of named arrays: dense, or of an `edge_index` (2, e)."""
    name = next((name for name in GRAPHS if name in found), None)
    if name is None:
        return {}
    values = found.read(name)
    if name != "edge_index":
        return {"adjacency": values}
    from scipy.sparse import csr_array

    if values.ndim != 2 or len(values) != 2 or values.dtype.kind not in "iu" or not _within(values, n):
        raise FileError(
            f"{found.path}: 'edge_index' must hold pairs (2, e) of rows below {n}. Got {values.shape}."
        )
    return {"adjacency": csr_array((np.ones(values.shape[1], np.float32), tuple(values)), shape=(n, n))}


def _sparse(found: Contents, name: str, n: int) -> Any:
    from scipy.sparse import csr_array

    missing = [part for part in SPARSE if f"{FOLDER}.{part}/{name}" not in found]
    if missing:
        raise FileError(f"{found.path}: the extra {name!r} lacks {', '.join(missing)}; write the bag again.")
    data, indices, indptr = (found.read(f"{FOLDER}.{part}/{name}") for part in SPARSE)
    if len(indptr) != n + 1 or len(data) != len(indices) or not _within(indices, n):
        raise FileError(f"{found.path}: the extra {name!r} is damaged; write the bag again.")
    return csr_array((data, indices, indptr), shape=(n, n))


def _within(rows: Any, n: int) -> bool:
    return not rows.size or bool(rows.min() >= 0 and rows.max() < n)
