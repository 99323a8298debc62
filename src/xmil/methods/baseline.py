"""Baselines: what ordinary instances look like, so that evidence is what departs from them.

A baseline is given as "mean" (of the model's background), "bag" (the bag's own mean), an array (d,) or
(k, d), a Bag, or None. One object serves every method: LRP scores (x_i - a mu) . g_i, integrated gradients
start there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.background import Background
from xmil.core.bag import Bag
from xmil.core.errors import InputError, bad_parameter
from xmil.methods.network import Network

PRESET = "preset"  # the baseline that the preset has
MEAN, BAG = "mean", "bag"
WHAT = '"mean", "bag", an array (d,) or (k, d), a Bag or None'


@dataclass(frozen=True, eq=False)
class Baseline:
    """An instance `point`, (d,) or broadcast against bags (b, n, d), with the strength it is taken off with.

    `name` says where it is from, for the provenance; `note` is a sentence to show beside the scores.
    """

    point: Tensor
    strength: float
    name: str
    note: str | None = None

    def provenance(self) -> dict[str, Any]:
        """What an explanation records of it."""
        return {"baseline": self.name, "strength": self.strength}

    @property
    def shift(self) -> Tensor:
        """The point times the strength."""
        return self.strength * self.point


def described(baseline: Baseline | None) -> dict[str, Any]:
    """What an attribution carries of its baseline: parameters and warnings."""
    if baseline is None:
        return {"params": {}, "warnings": ()}
    return {"params": baseline.provenance(), "warnings": () if baseline.note is None else (baseline.note,)}


def find_baseline(
    baseline: Any, strength: float | None, *, network: Network, x: Tensor, method: str
) -> Baseline | None:
    """The baseline a user asked for, for bags x (b, n, d); None for none.

    "mean" without a background with the model falls back to the bag's own mean, and says so.
    """
    if baseline is None:
        if strength is not None:
            raise InputError(f"The 'strength' of {method} scales a baseline; pass baseline= as well.")
        return None
    a = _checked_strength(strength, method)
    if isinstance(baseline, str):
        if baseline not in (MEAN, BAG):
            raise bad_parameter("baseline", method, WHAT, baseline)
        stored = stored_background(network) if baseline == MEAN else None
        if stored is not None:
            return Baseline(_as_point(stored.mean, x, method), a, f"mean of {stored.n} patches")
        note = (
            "The model has no background of its own: the bag's mean is the baseline."
            if baseline == MEAN
            else None
        )
        return Baseline(x.mean(dim=1, keepdim=True), a, "mean of the bag", note)
    name = "given"
    if isinstance(baseline, Bag):
        name = f"mean of {baseline.slide_id or 'a bag'}"
    if isinstance(baseline, Background):
        return Baseline(_as_point(baseline.mean, x, method), a, f"mean of {baseline.n} patches")
    return Baseline(_as_point(baseline, x, method), a, name)


def stored_background(network: Network) -> Background | None:
    """The background that came with the model."""
    found = getattr(network.module, "background", None)
    return found if isinstance(found, Background) else None


def _checked_strength(strength: float | None, method: str) -> float:
    if strength is None:
        return 1.0
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise bad_parameter("strength", method, "a float in the range [0, 1]", strength)
    return float(strength)


def _as_point(values: Any, x: Tensor, method: str) -> Tensor:
    """One instance (d,) in the bag's dtype, the mean of several."""
    values = values.features if isinstance(values, Bag) else values
    try:
        rows = (
            values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values, dtype=np.float64))
        )
    except (TypeError, ValueError):
        raise bad_parameter("baseline", method, WHAT, type(values).__name__) from None
    rows = rows.detach().to(x.device, torch.float64)
    point = rows if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1]).mean(dim=0) if rows.ndim else rows
    if point.shape != x.shape[-1:]:
        raise InputError(
            f"The baseline of {method} must have the width of the instances, {x.shape[-1]}. "
            f"Got {tuple(rows.shape)}."
        )
    if not bool(torch.isfinite(point).all()):
        raise InputError(f"The baseline of {method} is not finite; it holds NaN or inf, or no instance.")
    return point.to(x.dtype)
