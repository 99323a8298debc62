"""What keeping or dropping the top instances does, what random orders do, and how sure a mean is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
from torch import nn

from xmil.core.errors import bad_parameter
from xmil.evaluate.flip import Bags, Curve, Flips, Floats, Scores, flip_order, target_of
from xmil.methods.opening import Calling


@dataclass(frozen=True, eq=False)
class Band:
    """Curves of random orders: their mean and the interval that holds 95 % of them at each step."""

    mean: Floats
    low: Floats
    high: Floats
    aupcs: Floats

    @property
    def aupc(self) -> float:
        """The mean AUPC of the random orders."""
        return float(self.aupcs.mean())

    @property
    def aupc_interval(self) -> tuple[float, float]:
        """The interval that holds 95 % of the random orders' AUPCs."""
        low, high = np.quantile(self.aupcs, (0.025, 0.975))
        return float(low), float(high)


def random_band(flips: Flips, *, orders: int = 20, steps: int | str = 100, seed: int = 0) -> Band:
    """The band of seeded random orders of one bag.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> band = random_band(Flips(net, torch.eye(4), target=1), orders=5)
    >>> band.mean.shape, bool((band.low <= band.high).all())
    ((101,), True)
    """
    if not isinstance(orders, int) or orders < 2:
        raise bad_parameter("orders", "random_band", "an int in the range [2, inf)", orders)
    return band_of(flips.curves(random_draws(flips.n, orders=orders, seed=seed), steps=steps))


def random_draws(n: int, *, orders: int, seed: int) -> list[tuple[Floats, str]]:
    """Seeded random scores of n instances, with the order in which they leave."""
    rng = np.random.default_rng(seed)
    return [(rng.permutation(n).astype(np.float64), "morf") for _ in range(orders)]


def band_of(curves: Sequence[Curve]) -> Band:
    """The band of the curves of random draws."""
    values = np.stack([curve.values for curve in curves])
    low, high = np.quantile(values, (0.025, 0.975), axis=0)
    return Band(values.mean(axis=0), low, high, values.mean(axis=1))


def sufficiency(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    scores: Scores,
    *,
    top: float = 0.1,
    target: Any = ...,
    mode: str = "remove",
    seed: int = 0,
    **how: Unpack[Calling],
) -> float:
    """What keeping the top share of the instances preserves: the output of the bag they make.

    `scores` and `target` as for `flip`.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> x = torch.eye(4)
    >>> e = xmil.explain(net, x)
    >>> sufficiency(net, x, e, top=1.0) == float(xmil.flip(net, x, e).values[0])
    True
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    return flips.value_of(top_instances(flips.checked(scores), top, seed=seed))


def necessity(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    scores: Scores,
    *,
    top: float = 0.1,
    target: Any = ...,
    mode: str = "remove",
    seed: int = 0,
    **how: Unpack[Calling],
) -> float:
    """What dropping the top share of the instances destroys: the output with minus without them.

    `scores` and `target` as for `flip`.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> necessity(net, torch.ones(4, 4), [4, 3, 2, 1], top=0.5, target=1)  # equal instances
    0.0
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    kept = ~top_instances(flips.checked(scores), top, seed=seed)
    whole, part = flips.values_of([np.ones(flips.n, dtype=bool), kept])
    return whole - part


def top_instances(scores: Floats, top: float, *, seed: int = 0) -> npt.NDArray[np.bool_]:
    """The share of instances with the highest scores, at least one; ties by a seeded order.

    >>> top_instances(np.array([0.1, 0.9, 0.5]), 0.5)
    array([False, True, True])
    """
    if not 0 < top <= 1:
        raise bad_parameter("top", "sufficiency and necessity", "a share in the range (0, 1]", top)
    chosen = np.zeros(len(scores), dtype=bool)
    chosen[flip_order(scores, seed=seed)[: max(1, round(len(scores) * top))]] = True
    return chosen
