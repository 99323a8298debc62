"""Flip curves: the explained output while instances leave or enter a bag in the order of their scores.

Also the effect of keeping or dropping the top instances, and the band of random orders.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any, Unpack
from zlib import crc32

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
TIE_ORDERS = 16  # orders of equal scores to average over
PARTITIONS, PARTS = 2, 10  # of a bag, to find how far its patches can move a value
ROUNDINGS = 8  # of the largest output: a value that moves by less does not move
Scores = Explanation | npt.ArrayLike
Seed = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class Curve:
    """The explained output after each step of dropping or adding instances.

    `values[k]` belongs to `counts[k]` instances dropped (or added). `flipped` is the first step with another
    predicted class than step 0, None if there is none or the model has no classes. `at_zero` is the output
    once all instances with a positive score are out, `flipped_at_zero` whether the full bag's decision has
    changed by then. `decides`: whether the model has classes to decide between. `scale` is a large change of
    the output: 1 for a probability. Show `warnings` with the curve.

    A curve over the orders of equal scores has their mean values, and `flipped` is the first step at which
    more than half of the orders predict another class.
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
        self._bag_word = bag_word(self.bag, x)
        self.mode = mode
        for line in self.network.trial_warnings:  # once, although a cohort opens the network for each bag
            words = re.sub(r"\d\S*", "", line)  # numbers may differ between bags
            if words not in _WARNED:
                logger.warning("%s", line)
            _WARNED.add(words)
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

    @cached_property
    def scale(self) -> float:
        """A large change of the output: its range, or for a regression how far patches can move the value.

        It is 1 for a probability, t for the risk of t time bins, 1 for a log risk (a hazard 2.7 times as
        high). For a value it is the range over the full bag, the empty one and random tenths of the bag, so
        that it does not depend on the zero of the unit; 0 if the values differ by rounding alone.
        """
        if self.output.scale is not None:
            return self.output.scale
        rng = np.random.default_rng(PARTITIONS)
        drawn = [rng.permutation(np.arange(self.n) % PARTS) for _ in range(PARTITIONS)]
        parts = [part == k for part in drawn for k in range(min(PARTS, self.n))]
        everything = np.ones(self.n, dtype=bool)
        logits = self._sub_bags([everything, ~everything, *parts])
        values = self._values(logits)
        spread = float(values.max() - values.min())
        rounding = ROUNDINGS * torch.finfo(logits.dtype).eps * float(logits.abs().max())
        return spread if spread > rounding else 0.0

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

    def tie_seed(self, seed: int) -> list[int]:
        """Make the seed that orders equal scores of this bag: bags that shared one could all be lucky."""
        return [seed, self._bag_word]

    def curves(
        self,
        requests: Sequence[tuple[Scores, str]],
        *,
        action: str = "drop",
        steps: int | str = STEPS,
        seed: int = 0,
        over_ties: bool = False,
    ) -> list[Curve]:
        """Compute curves of several scores, each with its order; at every step their bags form one batch.

        Equal scores leave in one random order, or with `over_ties` in several, of which each curve is the
        mean.

        >>> import torch, xmil
        >>> net = xmil.create_model("transmil", in_dim=4, n_classes=2, dim=8, seed=0)
        >>> flips = Flips(net, torch.eye(4), target=1)
        >>> [curve.order for curve in flips.curves([([1, 2, 3, 4], "morf"), ([1, 2, 3, 4], "lerf")])]
        ['morf', 'lerf']
        """
        ranked = [self.check_scores(scores) for scores, _ in requests]
        counts = step_counts(self.n, steps)
        check_names("action", [action], ACTIONS)
        own_seed = self.tie_seed(seed)
        leaving = []  # for each request, its orders (k, n)
        for scores, (_, order) in zip(ranked, requests, strict=True):
            if over_ties:
                leaving.append(tie_orders(scores, counts, order=order, seed=own_seed))
            else:
                leaving.append(flip_order(scores, order=order, seed=own_seed)[None])
        add = action == "add"
        every = np.concatenate(leaving)
        logits = self.logits_of(every if add else every[:, ::-1], counts if add else self.n - counts)
        values = self._values(logits.flatten(0, 1)).reshape(len(every), -1)
        decisions = self._decisions(logits.flatten(0, 1)).reshape(len(every), -1)
        changed = decisions != decisions[:, :1]
        zeros = self._sub_bags([scores <= 0 for scores in ranked])
        at_zero, (full_decision,) = self._values(zeros), self._decisions(self._parts.full)
        flipped_at_zero = self._decisions(zeros) != full_decision
        curves, start = [], 0
        for i, (own, (_, order)) in enumerate(zip(leaving, requests, strict=True)):
            rows = slice(start, start + len(own))
            start += len(own)
            most_changed = changed[rows].mean(axis=0) > 0.5
            curves.append(
                Curve(
                    values=values[rows].mean(axis=0),
                    counts=counts,
                    flipped=int(most_changed.argmax()) if most_changed.any() else None,
                    at_zero=float(at_zero[i]),
                    flipped_at_zero=bool(flipped_at_zero[i]),
                    target=self.output.target,
                    order=order,
                    action=action,
                    mode=self.mode,
                    decides=self.decides,
                    scale=self.scale,
                    warnings=self.network.warnings,
                )
            )
        return curves

    def gains(self, orders: npt.NDArray[np.int64], *, steps: int) -> Floats:
        """Compute the SRG of orders (q, n), most relevant first: v(the first m) - v(the last m), by size."""
        sizes = step_counts(self.n, min(steps, self.n))[1:-1]
        if not len(sizes):
            return np.zeros(len(orders))
        logits = self.logits_of(np.concatenate([orders, orders[:, ::-1]]), sizes)
        values = self._values(logits.flatten(0, 1)).reshape(2, len(orders), -1)
        differences = (values[0] - values[1]).sum(axis=1) / (len(sizes) + 1)  # straight lines between sizes
        return np.asarray(differences * STEPS / (STEPS + 1))  # as for curves of 100 steps

    def gains_over_ties(self, scores: Sequence[Floats], *, steps: int, seed: int = 0) -> Floats:
        """Compute the SRG of scores (n,), each the mean over orders of equal scores; 0 if all are equal."""
        sizes = step_counts(self.n, min(steps, self.n))
        either_end = np.union1d(sizes, self.n - sizes)
        orders = [tie_orders(own, either_end, seed=self.tie_seed(seed)) for own in scores]
        gains = self.gains(np.concatenate(orders), steps=steps)
        ends = np.cumsum([len(own) for own in orders])
        means = [part.mean() for part in np.split(gains, ends[:-1])]
        return np.where([has_order(own) for own in scores], means, 0.0)

    def part(self, rows: npt.NDArray[np.int64]) -> Flips:
        """Restrict to the sub-bag of these rows, with the same target."""
        twin, index = copy(self), torch.from_numpy(rows).to(self._parts.x.device)
        vars(twin).pop("scale", None)  # of the full bag
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
        """Compute logits (q, sizes, c) of bags: for each size m, the first m of sequences (q, n).

        Equal sequences are run once.
        """
        different = {row.tobytes(): row for row in sequences}
        places = {key: i for i, key in enumerate(different)}
        orders = torch.from_numpy(np.stack([*different.values()])).to(self._parts.full.device)
        with frozen(self.network.module), torch.no_grad():
            logits = self._parts.nested(orders, [int(m) for m in sizes], mode=self.mode).to(self._parts.x)
        return logits[[places[row.tobytes()] for row in sequences]]

    def values_of(self, keep: Sequence[npt.NDArray[np.bool_]]) -> list[float]:
        """Compute the explained output of the bags of the kept instances."""
        return [float(value) for value in self._values(self._sub_bags(keep))]

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
    "percent" is 100, "each" is one by one. Equal scores leave in a random order drawn from `seed` and the
    bag's name, or its features if it has none. The empty bag is n zero vectors. The output is the target's
    probability, or the hazard of a time bin; for models without classes, the value minus its reference, or
    the risk, which no step can flip. `forward`, `returns` and `average` as for `explain`.

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

    `scores` and `target` as for `flip`. The mean over orders of equal scores: 0 if all are equal.

    Blücher et al., "Decoupling Pixel Flipping and Occlusion Strategy for Consistent XAI Benchmarks", 2024.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> srg(net, torch.ones(3, 4), [3.0, 2.0, 1.0], target=1)  # equal instances: the order cannot matter
    0.0
    """
    flips = Flips(model, bag, target=target_of(scores, target), mode=mode, **how)
    both: list[tuple[Scores, str]] = [(scores, "morf"), (scores, "lerf")]
    first, last = flips.curves(both, steps=steps, seed=seed, over_ties=True)
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
    return flips.values_of([top_instances(flips.check_scores(scores), top, seed=flips.tie_seed(seed))])[0]


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
    top_ones = top_instances(flips.check_scores(scores), top, seed=flips.tie_seed(seed))
    full, without = flips.values_of([np.ones(flips.n, dtype=bool), ~top_ones])
    return full - without


def top_instances(scores: Floats, top: float, *, seed: Seed = 0) -> npt.NDArray[np.bool_]:
    """Mark the share of instances with the highest scores, at least one; ties by a seeded order.

    >>> top_instances(np.array([0.1, 0.9, 0.5]), 0.5)
    array([False, True, True])
    """
    return np.isin(np.arange(len(scores)), flip_order(scores, seed=seed)[: count_top(len(scores), top)])


def top_over_ties(scores: Floats, top: float, *, seed: Seed = 0) -> npt.NDArray[np.bool_]:
    """Mark the instances (k, n) that `top_instances` does, in each of several orders of equal scores."""
    count = count_top(len(scores), top)
    orders = tie_orders(scores, [count], seed=seed)
    return np.stack([np.isin(np.arange(len(scores)), order[:count]) for order in orders])


def count_top(n: int, top: float) -> int:
    """Count the share of n instances, at least one."""
    if not 0 < top <= 1:
        raise bad_parameter("top", "sufficiency and necessity", "a share in the range (0, 1]", top)
    return max(1, round(n * top))


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


def flip_order(scores: Floats, *, order: str = "morf", seed: Seed = 0) -> npt.NDArray[np.int64]:
    """Order instances as they are flipped; equal scores in a random order.

    >>> flip_order(np.array([0.1, -0.9, 0.5]), order="abs")
    array([1, 2, 0])
    """
    ties = np.random.default_rng(seed).permutation(len(scores))
    return np.lexsort((ties, _sort_key(scores, order)))


def tie_orders(
    scores: Floats, sizes: Sequence[int] | npt.NDArray[np.int64], *, order: str = "morf", seed: Seed = 0
) -> npt.NDArray[np.int64]:
    """Order instances (k, n) as they are flipped, k times, so that equal scores share their places evenly.

    One order is enough if none of the bags of the first so many instances (`sizes`) holds a part of equal
    scores. Otherwise each group of equal scores is rotated and reversed: every member of a group is in each
    place about as often, and what one order gains by luck its reverse loses.

    >>> tie_orders(np.array([0.5, 0.5, 0.9]), [1]), len(tie_orders(np.array([0.5, 0.5, 0.9]), [2]))
    (array([[2, 1, 0]]), 2)
    """
    base = flip_order(scores, order=order, seed=seed)
    ordered, n = _sort_key(scores, order)[base], len(base)
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))  # of each group
    lengths = np.diff(np.append(first, n))
    starts, widths = np.repeat(first, lengths), np.repeat(lengths, lengths)
    inner = [size for size in sizes if 0 < size < n]
    widest = max((int(widths[size]) for size in inner if starts[size] < size), default=1)
    if widest == 1:
        return base[None]
    rotations = 1 if widest == 2 else min(TIE_ORDERS // 2, widest)  # the reverse of two is their rotation
    orders = np.empty((2 * rotations, n), dtype=np.int64)
    for k in range(rotations):
        places = (np.arange(n) - starts + k * widths // rotations) % widths
        orders[2 * k, starts + places] = base
        orders[2 * k + 1, starts + widths - 1 - places] = base
    return orders


def has_order(scores: Floats) -> bool:
    """Whether scores order the instances at all."""
    return bool(scores.min() < scores.max())


def _sort_key(scores: Floats, order: str) -> Floats:
    """Numbers that rise in the order of flipping."""
    check_names("order", [order], ORDERS)
    key: Floats = {"morf": -scores, "lerf": scores, "abs": -np.abs(scores)}[order]
    return key


def bag_word(name: str | None, x: Tensor) -> int:
    """Make a number from the name of a bag, or from its features if it has none, for seeds of its own."""
    if name is not None:
        return crc32(name.encode(errors="surrogatepass"))
    return crc32(x.detach().cpu().contiguous().view(torch.uint8).numpy().data)
