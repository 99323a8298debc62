"""Shapley values of instances: the mean change of the output as each joins the others in every order.

Shapley, "A Value for n-Person Games", 1953; permutation sampling as in Castro, Gómez and Tejada, "Polynomial
calculation of the Shapley value based on sampling", 2009, each permutation with its reverse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.errors import bad_parameter
from xmil.core.explanation import Audit
from xmil.methods.baseline import described, find_baseline
from xmil.methods.coalitions import Coalitions, RunCoalitions, coalitions_of
from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import Attribution, Attributions, register_method, seed_words

logger = logging.getLogger(__name__)

AFFORDABLE = 12  # bags up to this size are enumerated: 4,096 coalitions
LARGEST = 20  # the largest bag that can be enumerated at all
CHUNK = 16  # pairs of permutations between two looks at the standard errors
WIDE = 128  # the same on a graphics card, which many small batches would leave idle
FEWEST = 2 * CHUNK  # pairs before the first look: fewer make poor standard errors
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Estimate:
    """Mean and standard error (o, n) of sampled values for o outputs, with the number of samples."""

    mean: Tensor
    stderr: Tensor
    samples: int


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
    so many `permutations`; None takes them all. Small bags are enumerated: `exact` asks for it or against
    it. `progress(done, total)` is called as permutations are done. In the audit the bias is the output of
    the empty bag: n zero vectors, or n instances like the `baseline` times its `strength`.
    """
    _check(precision, permutations, exact, x.shape[1])
    game = coalitions_of(network, x)
    centre = find_baseline(baseline, strength, network=network, x=x, method="shapley")
    if centre is not None:
        game.empty = network(centre.shift.expand_as(x).contiguous()).double()
    outputs = question.outputs(game.model_logits)
    if exact or (exact is None and _affordable(game.n, permutations)):
        found = _enumerated(game, outputs)
    else:
        orders = _Orders(game, np.random.default_rng(seed_words(seed, "shapley")), permutations)
        found = orders.sample(outputs, precision, progress)
    warnings = _shortfall(found, precision)
    about = described(centre)
    each = _attributions(game, outputs, found, (*warnings, *about["warnings"]), x)
    return Attributions(game.model_logits, [replace(one, params=about["params"]) for one in each])


def _attributions(
    game: Coalitions, outputs: Sequence[Output], found: Estimate, warnings: tuple[str, ...], x: Tensor
) -> list[Attribution]:
    parts = []
    for output, scores, stderr in zip(outputs, found.mean, found.stderr, strict=True):
        value, at_none = float(output(game.full)), float(output(game.empty))
        audit = Audit.close(output=value, instances=float(scores.sum()), bias=at_none)
        part = Attribution(
            output,
            value,
            scores.to(x.dtype),
            audit,
            stderr=stderr,
            stable=sure_signs(scores, stderr, found.samples),
            warnings=warnings,
        )
        parts.append(part)
    return parts


def sure_signs(scores: Tensor, stderr: Tensor, samples: int | Tensor) -> Tensor:
    """Where the sign is sure: |score| > t(.975, samples - 1) stderr; nowhere with a single sample."""
    from scipy.stats import t as student  # not at the top: other methods do without scipy

    counts = torch.as_tensor(samples, device=scores.device)
    degrees = np.maximum(1, counts.cpu().numpy() - 1)
    quantile = torch.as_tensor(student.ppf(0.975, degrees), dtype=scores.dtype, device=scores.device)
    return (scores.abs() > quantile * stderr) & (counts > 1)


def exact_shapley(values: Tensor, n: int) -> Tensor:
    """Shapley values (n,) from the values (2^n,) of all coalitions, coalition s holding i where bit i is set.

    >>> exact_shapley(torch.tensor([0.0, 1.0, 2.0, 5.0]), 2).tolist()
    [2.0, 3.0]
    """
    codes = torch.arange(1 << n, device=values.device)
    sizes = bits_of(codes, n).sum(dim=1)
    found = []
    for i in range(n):
        others = codes[(codes >> i) & 1 == 0]
        gains = values[others | (1 << i)] - values[others]
        by_size = gains.new_zeros(n).index_add_(0, sizes[others], gains)
        counts = torch.bincount(sizes[others], minlength=n)
        found.append((by_size / counts).mean())  # each size counts alike, each coalition of a size as well
    return torch.stack(found)


def bits_of(codes: Tensor, n: int) -> Tensor:
    """Masks (b, n): instance i is in coalition s where bit i of s is set."""
    return (codes.unsqueeze(1) >> torch.arange(n, device=codes.device)) & 1 == 1


def _enumerated(game: Coalitions, outputs: Sequence[Output]) -> Estimate:
    codes = torch.arange(1 << game.n, device=game.x.device)
    logits = torch.cat([game.logits(bits_of(part, game.n)) for part in codes.split(4096)])
    means = torch.stack([exact_shapley(output(logits), game.n) for output in outputs])
    return Estimate(means, torch.zeros_like(means), 1 << game.n)


class _Said:
    """Words that take time to find: a record that no one hears never asks for them."""

    def __init__(self, words: Callable[[], str]) -> None:
        self._words = words

    def __str__(self) -> str:
        return self._found

    @cached_property
    def _found(self) -> str:
        return self._words()


class _Orders:
    """Permutations of a game's instances, each with its reverse, sampled until they tell enough."""

    def __init__(self, game: Coalitions, rng: np.random.Generator, permutations: int) -> None:
        self.game, self.rng = game, rng
        self.pairs = -(-permutations // 2)
        self.chunk = WIDE if isinstance(game, RunCoalitions) and game.x.is_cuda else CHUNK

    def sample(
        self, outputs: Sequence[Output], precision: float | None, progress: Progress | None
    ) -> Estimate:
        self._announce(precision)
        total = squares = torch.zeros(len(outputs), self.game.n, device=self.game.x.device).double()
        done, start = 0, perf_counter()
        while done < self.pairs:
            drawn = min(self.chunk, self.pairs - done)
            gains = self._gains(outputs, drawn)  # (o, pairs, n)
            total, squares = total + gains.sum(dim=1), squares + gains.square().sum(dim=1)
            done += drawn
            if progress is not None:
                progress(2 * done, 2 * self.pairs)
            found = _estimate(total, squares, done)
            if done == drawn < self.pairs and precision is not None:
                self._announce_end(found, precision, perf_counter() - start)
            if precision is not None and done >= FEWEST and float(found.stderr.max()) <= precision:
                break
        return found

    def _gains(self, outputs: Sequence[Output], pairs: int) -> Tensor:
        """What each instance adds on joining, (o, pairs, n): the mean over an order and its reverse."""
        forth = torch.from_numpy(np.stack([self.rng.permutation(self.game.n) for _ in range(pairs)])).to(
            self.game.x.device
        )
        orders = torch.cat([forth, forth.flip(1)])
        logits = self.game.prefixes(orders)
        values = [output(logits.flatten(0, 1)).view(logits.shape[:2]) for output in outputs]
        steps = torch.stack([value.diff(dim=1) for value in values])  # (o, 2 pairs, n), in the order's order
        gains = torch.empty_like(steps).scatter_(2, orders.expand_as(steps), steps)
        both: Tensor = gains.unflatten(1, (2, pairs))
        return both.mean(dim=1)

    def _announce(self, precision: float | None) -> None:
        logger.info(
            "shapley: %d instances on %s, %s",
            self.game.n, self.game.network.name, _Said(partial(self._ahead, precision)),
        )  # fmt: skip

    def _ahead(self, precision: float | None) -> str:
        """How many permutations are ahead and how long they take, from the time of a few sub-bags."""
        drawn = min(self.chunk, self.pairs)
        pair = self.game.seconds(2 * drawn) / drawn
        fewest = self.pairs if precision is None else min(self.pairs, max(FEWEST, drawn))
        ends = [self.pairs] if fewest == self.pairs else [fewest, self.pairs]
        counts, times = ([str(2 * n) for n in ends], [lasting(pair * n) for n in ends])
        return f"{' to '.join(counts)} permutations: about {' to '.join(dict.fromkeys(times))}"

    def _announce_end(self, found: Estimate, precision: float, seconds: float) -> None:
        """Say where sampling will stop: standard errors fall with the root of the samples."""
        wanted = found.samples * (float(found.stderr.max()) / precision) ** 2
        chunks = -(-max(wanted, FEWEST) // self.chunk) if wanted < self.pairs else self.pairs
        pairs = int(min(self.pairs, chunks * self.chunk))
        logger.info(
            "shapley: about %d permutations for the precision of %g, %s in all",
            2 * pairs, precision, lasting(seconds / found.samples * pairs),
        )  # fmt: skip


def lasting(seconds: float) -> str:
    """A time in the words of a clock, to two digits.

    >>> lasting(0.3), lasting(43.4), lasting(600.0), lasting(9000.0)
    ('1 s', '43 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(1.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"


def _estimate(total: Tensor, squares: Tensor, n: int) -> Estimate:
    mean = total / n
    if n == 1:
        return Estimate(mean, torch.full_like(mean, float("inf")), n)
    variance = (squares / n - mean.square()).clamp(min=0) * n / (n - 1)
    return Estimate(mean, (variance / n).sqrt(), n)


def _affordable(n: int, permutations: int) -> bool:
    return n <= AFFORDABLE or (n <= LARGEST and (1 << n) <= permutations * (n - 1))


def _shortfall(found: Estimate, precision: float | None) -> tuple[str, ...]:
    """The sentence on a precision that was not reached."""
    largest = float(found.stderr.max())
    if precision is None or largest <= precision:
        return ()
    return (
        f"The largest standard error is {largest:.3g}, above the precision of {precision:.3g}, after "
        f"{2 * found.samples} permutations; allow more with permutations=.",
    )


def _check(precision: float | None, permutations: int, exact: bool | None, n: int) -> None:
    if precision is not None and (not isinstance(precision, int | float) or not precision > 0):
        raise bad_parameter("precision", "shapley", "a float in the range (0, inf), or None", precision)
    if isinstance(permutations, bool) or not isinstance(permutations, int) or permutations < 4:
        raise bad_parameter("permutations", "shapley", "an int in the range [4, inf)", permutations)
    if exact and n > LARGEST:
        raise bad_parameter("exact", "shapley", f"False for bags of more than {LARGEST} instances", exact)
