"""Shapley values of instances: the mean change of the output when each joins the others, over all orders.

Shapley, "A Value for n-Person Games", 1953; permutation sampling as in Castro, Gómez and Tejada, "Polynomial
calculation of the Shapley value based on sampling", 2009, each permutation with its reverse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.errors import bad_parameter, check_count
from xmil.core.explanation import Audit
from xmil.methods.method import (
    Attribution,
    Attributions,
    Output,
    Question,
    describe_baseline,
    find_baseline,
    register_method,
    seed_words,
)
from xmil.network import Network
from xmil.subsets import Subsets, open_subsets

logger = logging.getLogger(__name__)

AFFORDABLE = 12  # bags up to this size are enumerated: 4,096 coalitions
LARGEST = 20  # the largest bag that can be enumerated at all
CHUNK = 16  # pairs of permutations between two checks of the standard errors
WIDE = 128  # the same on a GPU, which many small batches would leave idle
FEWEST = 2 * CHUNK  # pairs before the first check: fewer make poor standard errors
TIMED = 4  # permutations to time for an estimate of the duration
GAUSS = (0.5 - 12**-0.5, 0.5 + 12**-0.5)  # Gauss's points of the unit interval
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Estimate:
    """Mean and standard error of each of many sampled values, with the number of samples."""

    mean: Tensor
    stderr: Tensor
    samples: int

    @classmethod
    def of(cls, total: Tensor, squares: Tensor, samples: int) -> Estimate:
        """Estimate from sums of values and of their squares, of two samples or more."""
        mean = total / samples
        variance = (squares / samples - mean.square()).clamp(min=0)
        return cls(mean, (variance / (samples - 1)).sqrt(), samples)


@register_method("shapley", signed=True, conserves=True, cost="n / 2 per permutation; pooling models about 5")
@torch.no_grad()
def shapley(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    precision: float | None = 0.01,
    permutations: int = 1000,
    exact: bool | None = None,
    seed: int | Sequence[int] = 0,
    progress: Progress | None = None,
    baseline: Any = None,
    strength: float | None = None,
) -> Attributions:
    """The mean of v(S + i) - v(S) over the orders in which instances can join.

    Sampling stops once the largest standard error is at most `precision`, in units of the output, or after
    `permutations` orders; a precision of None takes them all. Small bags are enumerated, unless `exact`
    decides. `progress(done, total)` is called after each batch of permutations. In the audit the bias is the
    output of the empty bag: n zero vectors, or n copies of the `baseline` times its `strength`.
    """
    check_sampling("shapley", precision, permutations=(permutations, 4))
    if exact and x.shape[1] > LARGEST:
        raise bad_parameter("exact", "shapley", f"False for bags of more than {LARGEST} patches", exact)
    centre = find_baseline(baseline, strength, network=network, x=x, method="shapley")
    game = open_subsets(network, x, None if centre is None else centre.shift)
    outputs = question.outputs(game.logits)
    few = game.n <= LARGEST and (1 << game.n) <= permutations * (game.n - 1)
    if exact or (exact is None and (game.n <= AFFORDABLE or few)):
        codes = torch.arange(1 << game.n, device=x.device)
        logits = torch.cat([game.run(bits_of(part, game.n)) for part in codes.split(4096)])
        means = torch.stack([exact_shapley(output(logits), game.n) for output in outputs])
        estimate = Estimate(means, torch.zeros_like(means), len(codes))
    else:
        orders = _Orders(game, np.random.default_rng(seed_words(seed, "shapley")), permutations)
        estimate = orders.sample(outputs, precision, progress)
    shortfall = warn_of_shortfall(
        estimate.stderr, precision, samples=2 * estimate.samples, parameter="permutations"
    )
    notes, attributions = describe_baseline(centre), []
    for output, scores, stderr in zip(outputs, estimate.mean, estimate.stderr, strict=True):
        value, bias = float(output(game.full)), float(output(game.empty))
        attributions.append(
            Attribution(
                output,
                value,
                scores.to(x.dtype),
                Audit.close(output=value, instances=float(scores.sum()), bias=bias),
                stderr=stderr,
                stable=sure_signs(scores, stderr, estimate.samples),
                params=notes["params"],
                warnings=(*shortfall, *notes["warnings"]),
            )
        )
    return Attributions(game.logits, attributions)


def sure_signs(scores: Tensor, stderr: Tensor, samples: int | Tensor) -> Tensor:
    """Mark sure signs: |score| > t(.975, samples - 1) stderr; none with a single sample."""
    from scipy.stats import t as student  # not at the top: other methods need no scipy

    counts = torch.as_tensor(samples, device=scores.device)
    degrees = np.maximum(1, counts.cpu().numpy() - 1)
    quantile = torch.as_tensor(student.ppf(0.975, degrees), dtype=scores.dtype, device=scores.device)
    return (scores.abs() > quantile * stderr) & (counts > 1)


def exact_shapley(values: Tensor, n: int) -> Tensor:
    """Shapley values (n,) from the values (2^n,) of all coalitions; coalition s holds i if bit i of s is set.

    >>> exact_shapley(torch.tensor([0.0, 1.0, 2.0, 5.0]), 2).tolist()
    [2.0, 3.0]
    """
    codes = torch.arange(1 << n, device=values.device)
    sizes = bits_of(codes, n).sum(dim=1)
    shares = []
    for i in range(n):
        others = codes[(codes >> i) & 1 == 0]
        gains = values[others | (1 << i)] - values[others]
        by_size = gains.new_zeros(n).index_add_(0, sizes[others], gains)
        counts = torch.bincount(sizes[others], minlength=n)
        shares.append((by_size / counts).mean())  # sizes weigh the same, and so do the coalitions of a size
    return torch.stack(shares)


def bits_of(codes: Tensor, n: int) -> Tensor:
    """Make masks (b, n): instance i is in coalition s if bit i of s is set."""
    return (codes.unsqueeze(1) >> torch.arange(n, device=codes.device)) & 1 == 1


def time_call(run: Callable[[], Tensor]) -> float:
    """Measure the seconds of a call after a warm-up; reading a number waits for the device."""
    for _ in range(2):
        start = perf_counter()
        float(run().sum())
        took = perf_counter() - start
    return took


def measure_prefixes(
    game: Subsets, permutations: int, clock: Callable[[Callable[[], Tensor]], float] = time_call
) -> float:
    """Estimate the seconds that so many permutations take on this machine, from a few of them.

    If the model has to run on each sub-bag, two sizes represent all: Gauss's points.
    """
    if game.n == 1:
        return 0.0
    orders = torch.arange(game.n, device=game.x.device).repeat(permutations, 1)
    if game.cost != "run":
        return clock(lambda: game.prefixes(orders[:TIMED])) * permutations / len(orders[:TIMED])
    sizes = [min(max(1, round(share * game.n)), game.n - 1) for share in GAUSS]
    times = [clock(partial(game.nested, orders, [size])) for size in sizes]
    return (game.n - 1) * sum(times) / len(times)


class _Orders:
    """Permutations of a game's instances, each with its reverse, sampled to a precision."""

    def __init__(self, game: Subsets, rng: np.random.Generator, permutations: int) -> None:
        self.game, self.rng = game, rng
        self.pairs = -(-permutations // 2)
        self.chunk = WIDE if game.cost == "run" and game.x.is_cuda else CHUNK

    def sample(
        self, outputs: Sequence[Output], precision: float | None, progress: Progress | None
    ) -> Estimate:
        if logger.isEnabledFor(logging.INFO):  # the cost takes time to measure
            name, cost = self.game.network.name, self._describe_cost(precision)
            logger.info("shapley: %d patches on %s, %s", self.game.n, name, cost)
        total = squares = torch.zeros(len(outputs), self.game.n, device=self.game.x.device).double()
        done, start = 0, perf_counter()
        while done < self.pairs:
            drawn = min(self.chunk, self.pairs - done)
            gains = self._gains(outputs, drawn)  # (o, pairs, n)
            total, squares = total + gains.sum(dim=1), squares + gains.square().sum(dim=1)
            done += drawn
            if progress is not None:
                progress(2 * done, 2 * self.pairs)
            estimate = Estimate.of(total, squares, done)
            if done == drawn < self.pairs and precision is not None:
                self._announce_end(estimate, precision, perf_counter() - start)
            if done >= FEWEST and is_precise(estimate.stderr, precision):
                break
        return estimate

    def _gains(self, outputs: Sequence[Output], pairs: int) -> Tensor:
        """The gain from each instance, (o, pairs, n): the mean over an order and its reverse."""
        forth = torch.from_numpy(np.stack([self.rng.permutation(self.game.n) for _ in range(pairs)])).to(
            self.game.x.device
        )
        orders = torch.cat([forth, forth.flip(1)])
        logits = self.game.prefixes(orders)
        values = [output(logits.flatten(0, 1)).view(logits.shape[:2]) for output in outputs]
        steps = torch.stack([value.diff(dim=1) for value in values])  # (o, 2 pairs, n), sorted by order
        gains = torch.empty_like(steps).scatter_(2, orders.expand_as(steps), steps)
        both: Tensor = gains.unflatten(1, (2, pairs))
        return both.mean(dim=1)

    def _describe_cost(self, precision: float | None) -> str:
        """Describe how many permutations will run and how long they take, from the time of a few sub-bags."""
        drawn = min(self.chunk, self.pairs)
        pair = measure_prefixes(self.game, 2 * drawn) / drawn
        fewest = self.pairs if precision is None else min(self.pairs, max(FEWEST, drawn))
        ends = sorted({fewest, self.pairs})
        counts, times = ([str(2 * n) for n in ends], [write_duration(pair * n) for n in ends])
        return f"{' to '.join(counts)} permutations: about {' to '.join(dict.fromkeys(times))}"

    def _announce_end(self, estimate: Estimate, precision: float, seconds: float) -> None:
        """Log when sampling will stop: standard errors fall with the root of the samples."""
        needed = estimate.samples * (float(estimate.stderr.max()) / precision) ** 2
        chunks = -(-max(needed, FEWEST) // self.chunk) if needed < self.pairs else self.pairs
        pairs = int(min(self.pairs, chunks * self.chunk))
        logger.info(
            "shapley: about %d permutations for the precision of %g, %s in all",
            2 * pairs, precision, write_duration(seconds / estimate.samples * pairs),
        )  # fmt: skip


def write_duration(seconds: float) -> str:
    """Write a time with its unit, to two digits.

    >>> write_duration(0.3), write_duration(43.4), write_duration(600.0), write_duration(9000.0)
    ('1 s', '43 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"


def is_precise(stderr: Tensor, precision: float | None) -> bool:
    """Whether every standard error is within the precision; False if that is None."""
    return precision is not None and float(stderr.max()) <= precision


def warn_of_shortfall(
    stderr: Tensor, precision: float | None, *, samples: int, parameter: str
) -> tuple[str, ...]:
    """Write the warning that a precision was not reached with so many permutations or draws."""
    if precision is None or is_precise(stderr, precision):
        return ()
    return (
        f"The largest standard error is {float(stderr.max()):.3g}, above the precision of {precision:.3g}, "
        f"after {samples} {parameter}; allow more with `{parameter}=`.",
    )


def check_sampling(method: str, precision: Any, **counts: tuple[Any, int]) -> None:
    """Refuse a precision that is not positive, and counts below their least values."""
    if precision is not None and (not isinstance(precision, int | float) or not precision > 0):
        raise bad_parameter("precision", method, "a float in the range (0, inf), or None", precision)
    for name, (count, least) in counts.items():
        check_count(name, count, least, owner=method)
