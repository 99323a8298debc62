"""Companions: what travels with the instances of a bag into a user's `forward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.bag import Bag, joins_instances
from xmil.core.errors import InputError

INDEX = "index"


class MissingCompanionError(InputError):
    """A companion that a bag does not have."""


class Companions:
    """Values for each instance of one bag, by name, and for pairs of instances where they join them.

    `coords` (b, n, 2), `adjacency` (b, n, n) and whatever else `Bag.extras` holds are given for any choice of
    rows; `index` (b, n) are the rows themselves. Rows of -1 are padding: zeros, unjoined.
    """

    def __init__(
        self, values: Mapping[str, Any], *, n: int | None, name: str = "the bag", hint: str = ""
    ) -> None:
        self.n, self.name, self._values, self._hint = n, name, dict(values), hint
        self._tensors: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    @classmethod
    def of(cls, bag: Any, n: int) -> Companions:
        """The companions of a bag; those of a bare array of features are its rows' numbers alone."""
        if not isinstance(bag, Bag):
            return cls({}, n=n)
        values = {**bag.columns, "coords": bag.coords, "raw_coords": bag.raw_coords, "microns": _microns(bag)}
        values |= bag.extras
        hint = f" Its coordinates are in {bag.unit}; bag.placed(mpp=...) makes them level-0." * bool(bag.unit)
        return cls({key: v for key, v in values.items() if v is not None}, n=n, name=bag.called, hint=hint)

    @property
    def names(self) -> list[str]:
        """The companions that the bag has, but for `index`, which any has."""
        return list(self._values)

    def __contains__(self, name: object) -> bool:
        return name == INDEX or name in self._values

    def replaced(self, others: Mapping[str, Any]) -> Companions:
        """These companions, with others in place of some."""
        return Companions({**self._values, **others}, n=self.n, name=self.name, hint=self._hint)

    def given(self, name: str, rows: Tensor, like: Tensor) -> Tensor:
        """One companion for rows (b, m) of the bag: (b, m, ...), or (b, m, m) where it joins instances.

        Real numbers take the dtype of the features, and all their device.
        """
        if name == INDEX:
            return rows
        value = self._values[name]
        if hasattr(value, "tocsr"):
            return _sparse(value.tocsr(), rows, like)
        whole = self._tensor(name, like)
        real, at = rows >= 0, rows.clamp_min(0)
        if joins_instances(name, value):
            joined = whole[at.unsqueeze(2), at.unsqueeze(1)]
            return joined.masked_fill(~(real.unsqueeze(2) & real.unsqueeze(1)), 0)
        picked = whole[at]
        return picked.masked_fill(~real.reshape(*real.shape, *[1] * (picked.ndim - 2)), 0)

    def _tensor(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.device, like.dtype)
        if key not in self._tensors:
            self._tensors[key] = as_companion(self._values[name], like, name)
        return self._tensors[key]

    def lacking(self, names: Iterable[str], who: str) -> MissingCompanionError | None:
        """The error for companions that the bag does not have, or None."""
        missing = [name for name in names if name not in self]
        if not missing:
            return None
        held = sorted([INDEX, *self._values])
        way = "coords=..." if missing == ["coords"] else f"extras={{{missing[0]!r}: ...}}"
        return MissingCompanionError(
            f"{who} asks for {' and '.join(map(repr, missing))}, which {self.name} does not have (it has "
            f"{', '.join(held)}); pass a Bag with {way}.{self._hint if 'coords' in missing else ''}"
        )


def _microns(bag: Bag) -> npt.NDArray[Any] | None:
    """Top-left corners in microns, where the bag knows them."""
    if bag.raw_coords is not None and bag.unit == "um":
        return bag.raw_coords
    return None if bag.coords is None or bag.mpp is None else bag.coords * float(bag.mpp)


def as_companion(value: Any, like: Tensor, name: str) -> Tensor:
    """An array of numbers as a tensor beside the features: whole numbers int64, real ones in their dtype."""
    found = value if isinstance(value, Tensor) else _from_numpy(np.asarray(value), name)
    found = found.detach().to(like.device)
    if found.is_floating_point():
        return found.to(like.dtype)
    return found if found.dtype == torch.bool else found.long()


def _from_numpy(array: npt.NDArray[Any], name: str) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise InputError(f"The companion {name!r} must hold numbers. Got dtype {array.dtype} instead.")
    whole = array.astype(np.int64) if array.dtype.kind in "iu" else array
    return torch.from_numpy(np.ascontiguousarray(whole))


def named_companions(function: Callable[..., Any]) -> dict[str, bool]:
    """The keyword-only parameters of a function, and whether each must be given.

    >>> named_companions(lambda net, x, *, coords, index=None: 0)
    {'coords': True, 'index': False}
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def rows_of(kept: Tensor) -> Tensor:
    """Rows (b, m) of the kept instances (b, n), in the order of the bag, padded with -1.

    >>> rows_of(torch.tensor([[True, False, True], [False, True, False]])).tolist()
    [[0, 2], [1, -1]]
    """
    m = max(1, int(kept.sum(dim=1).max()))
    order = kept.long().argsort(dim=1, descending=True, stable=True)[:, :m]
    return order.masked_fill(~kept.gather(1, order), -1)


def _sparse(matrix: Any, rows: Tensor, like: Tensor) -> Tensor:
    """A sparse matrix between the rows (b, m), as a sparse tensor (b, m, m)."""
    b, m = rows.shape
    where, values = [], []
    for i, row in enumerate(rows.cpu().numpy()):
        real = np.flatnonzero(row >= 0)
        part = matrix[row[real]][:, row[real]].tocoo()
        where.append(np.stack([np.full(part.nnz, i), real[part.row], real[part.col]]))
        values.append(part.data)
    data = as_companion(np.concatenate(values), like, "adjacency")
    indices = torch.from_numpy(np.concatenate(where, axis=1)).to(like.device)
    return torch.sparse_coo_tensor(indices, data, (b, m, m), check_invariants=True).coalesce()
