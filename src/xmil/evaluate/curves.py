"""Flip curves: the explained output while instances leave or enter a bag in the order of their scores.

Also the effect of keeping or dropping the top instances, and the band of random orders.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.core.explanation import Explanation
from xmil.core.task import TASKS, Target
from xmil.evaluate.statistics import Floats
from xmil.methods import Bags as Bags
from xmil.methods import Question
from xmil.network import CallOptions, as_bag, check_same_bag, frozen, open_network
from xmil.subsets import MODES, open_subsets

logger = logging.getLogger(__name__)

_WARNED: set[str] = set()  # warnings of networks, without their numbers
ORDERS = ("morf", "lerf", "abs")
ACTIONS = ("drop", "add")
STEPS = 100  # default of a curve
Scores = Explanation | npt.ArrayLike


@dataclass(frozen=True, eq=False)
class Curve:
    """The explained output after each step of dropping or adding instances.

    `values[k]` belongs to `counts[k]` instances dropped (or added). `flipped` is the first step with another
    predicted class than step 0, None if there is none or the model has no classes. `at_zero` is the output
    once all instances with a positive score are out, `flipped_at_zero` whether the full bag's decision has
    changed by then. `decides`: whether the model has classes to decide between. `scale` is a large change of
    the output: 1 for a probability. Show `warnings` with the curve.
    """

    values: Floats
    counts: npt.NDArray[np.int64]
    flipped: int | None
    at_zero: float
    flipped_at_zero: bool
    target: Target
    order: str
    action: str
    mode: str
    decides: bool = True
    scale: float = 1.0
    warnings: tuple[str, ...] = ()

    @property
    def aupc(self) -> float:
        """Area under the perturbation curve: the mean of the values."""
        return float(self.values.mean())

    @property
    def aopc(self) -> float:
        """Area over the perturbation curve: the mean change from the first value."""
        return float((self.values[0] - self.values).mean())

    @property
    def steps(self) -> int:
        """The number of steps after the start."""
        return len(self.values) - 1

    def __repr__(self) -> str:
        kind = f"{self.order}, {self.action}, {self.mode}"
        return f"Curve({kind}, {self.steps} steps, aupc={self.aupc:.6g}, flipped={self.flipped})"


def _warn_once(line: str) -> None:
    """Log a warning on a network once, although a cohort opens the same network for each bag.

    Its numbers may differ between bags.
    """
    if (words := re.sub(r"\d\S*", "", line)) not in _WARNED:
        _WARNED.add(words)
        logger.warning("%s", line)


class Flips:
    """Compute curves of one model, bag and target; the instances are embedded once for all of them.

    Leave out `target` if the model has one output; None is the predicted class.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0)
    >>> flips = Flips(net, torch.ones(5, 4), target=1)
    >>> [flips.curve([1, 2, 3, 4, 5], order=order).steps for order in ("morf", "lerf")]
    [100, 100]
    """

    def __init__(
        self,
        model: nn.Module | str | PathLike[str],
        bag: Bags,
        *,
        target: Any = ...,
        mode: str = "remove",
        **how: Unpack[CallOptions],
    ) -> None:
        check_names("mode", [mode], MODES)
        bag = as_bag(bag)
        self.network, x = open_network(model, bag, **how)
        self.bag: str | None = getattr(bag, "slide_id", None)
        self.mode = mode
        for line in self.network.trial_warnings:
            _warn_once(line)
        with frozen(self.network.module), torch.no_grad():
            self._parts = open_subsets(self.network, x)
        n_outputs, task = self._parts.full.shape[-1], TASKS[self.network.task]
        if target is ... and n_outputs == 1 and (task.truth == "class" or task.count_targets(1) == 1):
            target = task.count_targets(1) - 1  # the value, the risk, or class 1
        elif target is ...:
            names = self.network.target_names(n_outputs) or range(n_outputs)
            raise InputError(
                f"Bare scores do not say which target they explain; pass the Explanation, or `target=` "
                f"(one of {', '.join(map(str, names))}; None for the predicted class)."
            )
        question = Question([target], None, self.network, default="probability")
        (self.output,) = question.outputs(self._parts.full)

    @property
    def n(self) -> int:
        """The number of instances in the bag."""
        return self._parts.n

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits (c,) of the full bag."""
        return self._parts.logits[0].float().cpu().numpy()

    @property
    def decides(self) -> bool:
        """Whether the model has classes to decide between; a value or a risk cannot flip."""
        return TASKS[self.network.task].decides

    @property
    def decision(self) -> int | None:
        """The predicted class of the full bag; for multi-label models whether the target is predicted."""
        return int(self._decisions(self._parts.full)[0]) if self.decides else None

    @property
    def scale(self) -> float:
        """A large change of the output: its range, or for a regression its own size.

        It is 1 for a probability, t for the risk of t time bins, 1 for a log risk (a hazard 2.7 times as
        high). For a value it is the largest of the reference and the distances of the full and the empty bag
        from it.
        """
        if self.output.scale is not None:
            return self.output.scale
        ends = self._values(torch.cat([self._parts.full, self._parts.empty]))
        return float(max(np.abs(ends).max(), *map(abs, self.network.references(self._parts.full.shape[-1]))))

    def curve(
        self,
        scores: Scores,
        *,
        order: str = "morf",
        action: str = "drop",
        steps: int | str = STEPS,
        seed: int = 0,
    ) -> Curve:
        """Compute the curve of scores (n,) or of an explanation of this target; parameters as for `flip`."""
        return self.curves([(scores, order)], action=action, steps=steps, seed=seed)[0]

    def curves(
        self,
        requests: Sequence[tuple[Scores, str]],
        *,
        action: str = "drop",
        steps: int | str = STEPS,
        seed: int = 0,
    ) -> list[Curve]:
        """Compute curves of several scores, each with its order; at every step their bags form one batch.

        >>> import torch, xmil
        >>> net = xmil.create_model("transmil", in_dim=4, n_classes=2, dim=8, seed=0)
        >>> flips = Flips(net, torch.eye(4), target=1)
        >>> [curve.order for curve in flips.curves([([1, 2, 3, 4], "morf"), ([1, 2, 3, 4], "lerf")])]
        ['morf', 'lerf']
        """
        ranked = [self.check_scores(scores) for scores, _ in requests]
        counts = step_counts(self.n, steps)
        check_names("action", [action], ACTIONS)
        orders = [order for _, order in requests]
        leaving = [flip_order(r, order=order, seed=seed) for r, order in zip(ranked, orders, strict=True)]
        add = action == "add"
        sequences = np.stack([order if add else order[::-1] for order in leaving])
        logits = self.logits_of(sequences, counts if add else self.n - counts)
        zeros = self._sub_bags([scores <= 0 for scores in ranked])
        ends = torch.cat([zeros.unsqueeze(1), self._parts.full.expand(len(requests), 1, -1)], dim=1)
        # (q * (steps + 3), c); the last two are the bag without positive scores and the full bag
        every = torch.cat([logits, ends], dim=1).flatten(0, 1)
        values = self._values(every).reshape(len(requests), -1)
        decisions = self._decisions(every).reshape(len(requests), -1)
        scale = self.scale
        changed = decisions[:, :-2] != decisions[:, :1]
        return [
            Curve(
                values=values[i, :-2],
                counts=counts,
                flipped=int(changed[i].argmax()) if changed[i].any() else None,
                at_zero=float(values[i, -2]),
                flipped_at_zero=bool(decisions[i, -2] != decisions[i, -1]),
                target=self.output.target,
                order=order,
                action=action,
                mode=self.mode,
                decides=self.decides,
                scale=scale,
                warnings=self.network.warnings,
            )
            for i, order in enumerate(orders)
        ]

    def gains(self, orders: npt.NDArray[np.int64], *, steps: int) -> Floats:
        """Compute the SRG of orders (q, n), most relevant first: v(the first m) - v(the last m), by size."""
        sizes = step_counts(self.n, min(steps, self.n))[1:-1]
        if not len(sizes):
            return np.zeros(len(orders))
        logits = self.logits_of(np.concatenate([orders, orders[:, ::-1]]), sizes)
        values = self._values(logits.flatten(0, 1)).reshape(2, len(orders), -1)
        differences = (values[0] - values[1]).sum(axis=1) / (len(sizes) + 1)  # straight lines between sizes
        return np.asarray(differences * STEPS / (STEPS + 1))  # as for curves of 100 steps

    def part(self, rows: npt.NDArray[np.int64]) -> Flips:
        """Restrict to the sub-bag of these rows, with the same target."""
        twin, index = copy(self), torch.from_numpy(rows).to(self._parts.x.device)
        twin.network = self.network.part(index)
        with frozen(self.network.module), torch.no_grad():
            twin._parts = open_subsets(twin.network, self._parts.x[:, index])
        return twin

    def check_scores(self, scores: Scores) -> Floats:
        """Convert scores (n,) to double precision; refuse an explanation of another bag or target."""
        if isinstance(scores, Explanation):
            check_same_bag(scores, self.bag)
            if scores.target != self.output.target:
                raise InputError(
                    f"The explanation is for the target {scores.target}, but `target=` is "
                    f"{self.output.target}; leave `target=` out, or pass the explanation's scores to measure "
                    "them for another target."
                )
            scores = scores.scores
        values = scores.detach().cpu().numpy() if isinstance(scores, Tensor) else np.asarray(scores)
        if values.dtype.kind not in "fiub" or values.shape != (self.n,):
            raise InputError(
                f"The scores must be {self.n} numbers, one for each patch. Got shape {values.shape}."
            )
        if not np.isfinite(values).all():
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InputError(f"The scores must be finite. Patch {first} has {values[first]}.")
        return values.astype(np.float64)

    def logits_of(
        self, sequences: npt.NDArray[np.int64], sizes: Sequence[int] | npt.NDArray[np.int64]
    ) -> Tensor:
        """Compute logits (q, sizes, c) of bags: for each size m, the first m of sequences (q, n)."""
        orders = torch.from_numpy(np.ascontiguousarray(sequences)).to(self._parts.full.device)
        with frozen(self.network.module), torch.no_grad():
            return self._parts.nested(orders, [int(m) for m in sizes], mode=self.mode).to(self._parts.x)

    def values_of(self, keep: Sequence[npt.NDArray[np.bool_]]) -> list[float]:
        """Compute the explained output of the bags of the kept instances."""
        return [float(value) for value in self._values(self._sub_bags(keep))]

    def value_of(self, keep: npt.NDArray[np.bool_]) -> float:
        """Compute the explained output of the bag of the kept instances."""
        return self.values_of([keep])[0]

    def _sub_bags(self, keep: Sequence[npt.NDArray[np.bool_]]) -> Tensor:
        """Compute logits (q, c) of the bags of the kept instances; run equal bags once."""
        different = {mask.tobytes(): mask for mask in keep}
        masks = torch.from_numpy(np.stack([*different.values()])).to(self._parts.x.device)
        with frozen(self.network.module), torch.no_grad():
            logits = self._parts.run(masks, mode=self.mode).to(self._parts.x)
        outputs = dict(zip(different, logits, strict=True))
        return torch.stack([outputs[mask.tobytes()] for mask in keep])

    def _values(self, logits: Tensor) -> Floats:
        return np.asarray(self.output(logits.double()).cpu().numpy(), dtype=np.float64)

    def _decisions(self, logits: Tensor) -> npt.NDArray[np.int64]:
        target = int(self.output.target)
        return TASKS[self.network.task].decisions(logits.double().cpu().numpy(), target)


def flip(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    scores: Scores,
    *,
    target: Any = ...,
    order: str = "morf",
    action: str = "drop",
    mode: str = "remove",
    steps: int | str = STEPS,
    seed: int = 0,
    **how: Unpack[CallOptions],
) -> Curve:
    """Follow the explained output while instances are dropped from the bag, or added to an empty one.

    `scores` is an explanation, which brings its target, or one number per instance, which needs `target` if
    the model has more than one output. `order`: most relevant first ("morf"), least relevant first ("lerf"),
    largest absolute score first ("abs"). `mode`: dropped instances are removed ("remove") or become zero
    vectors in place ("mask"). `steps` is their number; round(n k / steps) instances are out after the k-th.
    "percent" is 100, "each" is one by one. Equal scores leave in a random order drawn from `seed`. The empty
    bag is n zero vectors. The output is the target's probability, or the hazard of a time bin; for models
    without classes, the value minus its reference, or the risk, which no step can flip. `forward`, `returns`
    and `average` as for `explain`.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> curve = flip(net, torch.eye(4), [0.3, -0.1, 0.2, 0.0], target=1, steps="each")
    >>> curve.values.shape, curve.counts.tolist()
    ((5,), [0, 1, 2, 3, 4])
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    return flips.curve(scores, order=order, action=action, steps=steps, seed=seed)


def srg(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    scores: Scores,
    *,
    target: Any = ...,
    mode: str = "remove",
    steps: int | str = STEPS,
    seed: int = 0,
    **how: Unpack[CallOptions],
) -> float:
    """Symmetric relevance gain: AUPC with the least relevant first minus AUPC with the most relevant first.

    `scores` and `target` as for `flip`.

    Blücher et al., "Decoupling Pixel Flipping and Occlusion Strategy for Consistent XAI Benchmarks", 2024.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> srg(net, torch.ones(3, 4), [3.0, 2.0, 1.0], target=1)  # equal instances: the order cannot matter
    0.0
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    first, last = flips.curves([(scores, "morf"), (scores, "lerf")], steps=steps, seed=seed)
    return last.aupc - first.aupc


@dataclass(frozen=True, eq=False)
class Band:
    """Curves of random orders: their mean and the interval with 95 % of them at each step."""

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
        """The interval with 95 % of the random orders' AUPCs."""
        low, high = np.quantile(self.aupcs, (0.025, 0.975))
        return float(low), float(high)


def random_band(flips: Flips, *, orders: int = 20, steps: int | str = STEPS, seed: int = 0) -> Band:
    """Compute the band of seeded random orders of one bag.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> band = random_band(Flips(net, torch.eye(4), target=1), orders=5)
    >>> band.mean.shape, bool((band.low <= band.high).all())
    ((101,), True)
    """
    return band_of(flips.curves(random_draws(flips.n, orders=orders, seed=seed), steps=steps))


def random_draws(n: int, *, orders: int, seed: int) -> list[tuple[Floats, str]]:
    """Draw seeded random scores of n instances, with the order in which they leave."""
    if not isinstance(orders, int) or orders < 2:
        raise bad_parameter("orders", "a random band", "an int in the range [2, inf)", orders)
    rng = np.random.default_rng(seed)
    return [(rng.permutation(n).astype(np.float64), "morf") for _ in range(orders)]


def band_of(curves: Sequence[Curve]) -> Band:
    """Compute the band of the curves of random draws."""
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
    **how: Unpack[CallOptions],
) -> float:
    """Measure what the top share of the instances preserves: the output of the bag of these alone.

    `scores` and `target` as for `flip`.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> x = torch.eye(4)
    >>> e = xmil.explain(net, x)
    >>> sufficiency(net, x, e, top=1.0) == float(xmil.flip(net, x, e).values[0])
    True
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    return flips.value_of(top_instances(flips.check_scores(scores), top, seed=seed))


def necessity(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    scores: Scores,
    *,
    top: float = 0.1,
    target: Any = ...,
    mode: str = "remove",
    seed: int = 0,
    **how: Unpack[CallOptions],
) -> float:
    """Measure what dropping the top share of the instances destroys: the output with, minus without them.

    `scores` and `target` as for `flip`.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> round(necessity(net, torch.ones(4, 4), [4, 3, 2, 1], top=0.5, target=1), 6)  # equal instances
    0.0
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    top_ones = top_instances(flips.check_scores(scores), top, seed=seed)
    full, without = flips.values_of([np.ones(flips.n, dtype=bool), ~top_ones])
    return full - without


def top_instances(scores: Floats, top: float, *, seed: int = 0) -> npt.NDArray[np.bool_]:
    """Mark the share of instances with the highest scores, at least one; ties by a seeded order.

    >>> top_instances(np.array([0.1, 0.9, 0.5]), 0.5)
    array([False, True, True])
    """
    if not 0 < top <= 1:
        raise bad_parameter("top", "sufficiency and necessity", "a share in the range (0, 1]", top)
    is_top = np.zeros(len(scores), dtype=bool)
    is_top[flip_order(scores, seed=seed)[: max(1, round(len(scores) * top))]] = True
    return is_top


def target_of(scores: Scores, target: Any) -> Any:
    """Choose the target to measure: `target`, else the explanation's."""
    return scores.target if target is ... and isinstance(scores, Explanation) else target


def step_counts(n: int, steps: int | str) -> npt.NDArray[np.int64]:
    """Count the instances that are out after each step, from 0 to n.

    >>> step_counts(3, 4), step_counts(3, "each"), len(step_counts(3, "percent"))
    (array([0, 1, 2, 2, 3]), array([0, 1, 2, 3]), 101)
    """
    number = {"percent": 100, "each": n}.get(steps) if isinstance(steps, str) else steps
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
        raise bad_parameter("steps", "flip", "an int in the range [1, inf), 'percent' or 'each'", steps)
    return np.array([round(n * k / int(number)) for k in range(int(number) + 1)], dtype=np.int64)


def flip_order(scores: Floats, *, order: str = "morf", seed: int = 0) -> npt.NDArray[np.int64]:
    """Order instances as they are flipped; equal scores in a random order.

    >>> flip_order(np.array([0.1, -0.9, 0.5]), order="abs")
    array([1, 2, 0])
    """
    check_names("order", [order], ORDERS)
    key = {"morf": -scores, "lerf": scores, "abs": -np.abs(scores)}[order]
    return np.lexsort((np.random.default_rng(seed).permutation(len(scores)), key))
