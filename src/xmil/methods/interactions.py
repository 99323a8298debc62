"""Interactions of patches: what a pair adds beyond its two members, averaged over sets of the others.

The Shapley interaction index of Grabisch and Roubens, "An axiomatic approach to the concept of interaction
among players in cooperative games", 1999: the mean of v(S + ij) - v(S + i) - v(S + j) + v(S), the size of S
uniform on 0..n-2 and S uniform among the others. Few players are enumerated or sampled by strata, see
`Strata`. For many, draw a probability uniformly from [0, 1] and take each instance with it: the set is such
an S for every pair, so all pairs share each draw. Each draw runs the set with none, one and two of the chosen
instances toggled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from os import PathLike
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.bag import Bag
from xmil.core.errors import InputError, bad_parameter
from xmil.core.explanation import Explanation
from xmil.core.interactions import Interactions
from xmil.methods.explain import Bags, explain
from xmil.methods.method import Output, Question, seed_words
from xmil.methods.shapley import (
    LARGEST,
    Estimate,
    Progress,
    bits_of,
    check_sampling,
    is_precise,
    warn_of_shortfall,
)
from xmil.network import CallOptions, as_bag, check_same_bag, frozen, open_network
from xmil.subsets import Subsets, open_subsets

logger = logging.getLogger(__name__)

ENUMERATED = 12  # up to this many players are enumerated: 4,096 coalitions
CHUNK = 8  # pairs of draws between two checks of the standard errors
FEWEST = 2 * CHUNK
CHECKS = 8  # of the standard errors of strata
MASKS = 1 << 27  # entries of the coalitions in memory at once
MOST = 50  # players in strata: a pair has more strata with more players, and each needs samples
HITS = 4  # mean number of coalitions in the rarest stratum of a pair in the first round
SPARED = 4  # a size is enumerated if it would get at least this many samples per coalition
FITTED = 4, 8  # coalitions per column of a surrogate: the fewest and the most
POWERS = 3  # of the size, in the slopes of a surrogate's members
RIDGE = 1e-9  # share of the mean square of the columns, some of which depend on each other
PATTERNS = ((1, 1), (1, 0), (0, 1), (0, 0))
Runs = tuple[Tensor, Tensor]  # coalitions (b, n) and their values (b,)


def interactions(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    *,
    target: Any = None,
    top: int = 50,
    groups: npt.ArrayLike | None = None,
    output: str | None = None,
    by: str | Explanation | npt.ArrayLike = "lrp",
    precision: float | None = 0.01,
    draws: int = 500,
    exact: bool | None = None,
    seed: int | Sequence[int] = 0,
    progress: Progress | None = None,
    **how: Unpack[CallOptions],
) -> Interactions:
    """Find pairs of patches that act together: Shapley interaction indices with standard errors.

    The pairs are those of the `top` patches with the largest absolute scores; `by` is a method's name, an
    explanation or scores. With `groups`, a label for each patch, they are pairs of groups. Up to twelve
    patches or groups are enumerated (unless `exact=False`); more are sampled until the largest standard error
    is at most `precision`, in units of the output, or after `draws` draws. `progress(done, total)` is called
    after each batch of draws. `how` is `forward`, `returns` and `average`, as for `explain`.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0)
    >>> pairs = interactions(net, torch.eye(4), target=1)
    >>> pairs.pairs.shape, bool((abs(pairs.values[0]) >= abs(pairs.values)).all())
    ((6, 2), True)
    """
    check_sampling("interactions", precision, top=(top, 2), draws=(draws, 4))
    bag = as_bag(bag)
    network, x = open_network(model, bag, **how)
    question = Question([target], output, network)
    with frozen(network.module), torch.no_grad():
        game = open_subsets(network, x)
        (explained,) = question.outputs(game.logits)
    if game.n < 2:
        raise InputError("Interactions need a bag of two patches or more.")
    members, names = _members(groups, game.n)
    if groups is None and game.n > top:
        chosen = _strongest(
            network.module, bag, by, top, n=game.n, target=explained.target, output=output, **how
        )
    else:
        chosen = np.arange(len(members) if members is not None else game.n)
    players = _Players(game, explained, members, torch.from_numpy(chosen).to(x.device))
    with frozen(network.module), torch.no_grad():
        if players.n <= ENUMERATED if exact is None else exact:
            estimate = players.enumerate()
        else:
            seeds = seed_words(seed, "interactions")
            estimate = players.sample(precision, draws // 2, seeds, progress)
        values = estimate.mean
        warnings = warn_of_shortfall(estimate.stderr, precision, samples=estimate.samples, parameter="draws")
        rounding = torch.finfo(x.dtype).eps * players.largest
        stderr = (estimate.stderr.square() + rounding**2).sqrt()
        nobody = torch.zeros(1, players.n, dtype=torch.bool, device=x.device)
        (alone,) = players.changes(nobody)
    order = values.abs().argsort(descending=True, stable=True)
    pairs = players.chosen[players.pairs][order].cpu().numpy().astype(np.int64)
    source = bag if isinstance(bag, Bag) else Bag(np.zeros((0, 1), dtype=np.float32))
    placed = groups is None and source.coords is not None
    return Interactions(
        pairs=pairs,
        values=values[order].cpu().numpy(),
        stderr=stderr[order].cpu().numpy(),
        alone=alone[order].cpu().numpy(),
        target=explained.target,
        output=float(explained(game.full)),
        names=names,
        groups=None if members is None else members.long().argmax(dim=0).numpy(),
        bag=source.slide_id,
        model=network.name,
        corners=source.coords[pairs].reshape(len(pairs), 4) if placed and source.coords is not None else None,
        patch_size=source.patch_size if placed else None,
        params={"top": top, "draws": draws, "output": explained.kind},
        warnings=warnings,
    )


class _Players:
    """The players of a bag's game: its instances, or groups of them; pairs are of the chosen ones."""

    def __init__(self, game: Subsets, output: Output, members: Tensor | None, chosen: Tensor) -> None:
        self.game, self.output, self.chosen = game, output, chosen
        self.members = None if members is None else members.to(game.x.device)  # (p, n)
        self.n = game.n if members is None else len(members)
        self.pairs = torch.tensor(list(combinations(range(len(chosen)), 2)), device=game.x.device)  # (k, 2)
        self.largest = 0.0
        # which of the chosen are toggled: none, each one, each pair; (1 + p + k, p)
        eye = torch.eye(len(chosen), dtype=torch.bool, device=chosen.device)
        self.toggles = torch.cat([eye[:1] ^ eye[:1], eye, eye[self.pairs[:, 0]] | eye[self.pairs[:, 1]]])

    def sample(
        self, precision: float | None, draws: int, seed: list[int], progress: Progress | None
    ) -> Estimate:
        each = len(self.toggles)
        logger.info(
            "interactions: up to %d draws of %d sub-bags each on %s",
            2 * draws, each, self.game.network.name,
        )  # fmt: skip
        rng = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        budget = 2 * draws * each
        strata = Strata(self.n, budget, rng) if self.n <= MOST else None
        if strata is not None and strata.enumerated + strata.first <= budget:  # enough to fill them
            return self._stratified(strata, 2 * draws, each, precision, progress)
        total = squares = torch.zeros(len(self.pairs), device=self.game.x.device).double()
        done, at_once = 0, max(1, MASKS // (2 * each * self.n))
        while done < draws:
            count = min(CHUNK, draws - done)
            chance = torch.rand(count, 1, generator=rng)
            masks = (torch.rand(count, self.n, generator=rng) < chance).to(self.game.x.device)
            parts = [self.changes(torch.cat([part, ~part])) for part in masks.split(at_once)]
            changes = torch.cat([part.unflatten(0, (2, -1)).mean(dim=0) for part in parts])  # (count, k)
            total, squares = total + changes.sum(dim=0), squares + changes.square().sum(dim=0)
            done += len(changes)
            if progress is not None:
                progress(2 * done, 2 * draws)
            estimate = Estimate.of(total, squares, done)
            if done >= FEWEST and is_precise(estimate.stderr, precision):
                break
        return replace(estimate, samples=2 * done)

    def _stratified(
        self, strata: Strata, draws: int, each: int, precision: float | None, progress: Progress | None
    ) -> Estimate:
        """Sample by strata, with as many sub-bags as `draws` of `each` would take, shared by all pairs."""
        budget, count, i, j = draws * each, strata.first, *self.pairs.T
        device = self.game.x.device
        masks = strata.every().to(device)
        strata.full = (masks, self.values(masks))
        done = strata.enumerated
        while True:
            if strata.shares:
                masks = strata.draw(count).to(device)
                strata.add(masks, self.values(masks))
                done += len(masks)
            if progress is not None:
                progress(min(draws, done // each), draws)
            count = budget - done if strata.shares else 0
            if precision is not None or progress is not None:
                count = min(budget // CHECKS, count)
            if count > 0 and precision is None:
                continue
            mean, stderr = (table[i, j] for table in strata.estimate(self.chosen))
            if count <= 0 or is_precise(stderr, precision):
                break
        return Estimate(mean, stderr, -(-done // each))

    def values(self, masks: Tensor) -> Tensor:
        """Compute the output (b,) of coalitions (b, p) of players."""
        if self.members is not None:
            masks = (masks.double() @ self.members.double()) > 0
        values = self.output(self.game.run(masks))
        self.largest = max(self.largest, float(values.abs().max()))
        return values

    def changes(self, masks: Tensor) -> Tensor:
        """v(S + ij) - v(S + i) - v(S + j) + v(S) for each pair (b, k), S a mask (b, p) without i and j."""
        choices = masks[:, self.chosen].unsqueeze(1) ^ self.toggles  # (b, m, chosen)
        if self.members is None:
            logits = self.game.around(masks, self.chosen, choices)
            values = self.output(logits.flatten(0, 1)).view(choices.shape[:2])
            self.largest = max(self.largest, float(values.abs().max()))
        else:
            changed = masks.unsqueeze(1).repeat(1, len(self.toggles), 1)
            changed[:, :, self.chosen] = choices
            values = self.values(changed.flatten(0, 1)).view(choices.shape[:2])
        k = len(self.chosen)
        none, one, two = values[:, :1], values[:, 1 : k + 1], values[:, k + 1 :]
        i, j = self.pairs.T
        same = masks[:, self.chosen[i]] == masks[:, self.chosen[j]]
        return torch.where(same, 1.0, -1.0) * (two - one[:, i] - one[:, j] + none)

    def enumerate(self) -> Estimate:
        if self.n > LARGEST:
            raise bad_parameter("exact", "interactions", f"False for more than {LARGEST} players", True)
        codes = torch.arange(1 << self.n, device=self.game.x.device)
        values = self.values(bits_of(codes, self.n))
        pairs = self.chosen[self.pairs]
        mean = torch.stack([exact_interaction(values, self.n, int(i), int(j)) for i, j in pairs])
        return Estimate(mean, torch.zeros_like(mean), 0)


def exact_interaction(values: Tensor, n: int, i: int, j: int) -> Tensor:
    """The Shapley interaction index of two players from the values (2^n,) of all coalitions.

    >>> exact_interaction(torch.tensor([0.0, 1.0, 2.0, 5.0]), 2, 0, 1).item()
    2.0
    """
    codes = torch.arange(1 << n, device=values.device)
    first, second = 1 << i, 1 << j
    others = codes[codes & (first | second) == 0]
    change = (
        values[others | first | second] - values[others | first] - values[others | second] + values[others]
    )
    sizes = bits_of(others, n).sum(dim=1)
    by_size = change.new_zeros(n - 1).index_add_(0, sizes, change)
    return (by_size / torch.bincount(sizes, minlength=n - 1)).mean()


def _members(groups: Any, n: int) -> tuple[Tensor | None, tuple[str, ...] | None]:
    """Return the members (p, n) of each group and the groups' names; None without groups."""
    if groups is None:
        return None, None
    labels = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if labels.shape != (n,):
        raise bad_parameter("groups", "interactions", f"{n} labels, one for each patch", labels.shape)
    names, index = np.unique(labels.astype(str), return_inverse=True)
    if len(names) < 2:
        raise InputError("Interactions need two groups or more; all patches have the same label.")
    return torch.from_numpy(index == np.arange(len(names))[:, None]), tuple(names.tolist())


def _strongest(
    model: nn.Module, bag: Any, by: Any, top: int, *, n: int, **options: Any
) -> npt.NDArray[np.int64]:
    """Find the instances with the largest absolute scores, ascending."""
    if isinstance(by, Explanation):
        check_same_bag(by, getattr(bag, "slide_id", None))
        by = by.scores
    scores = explain(model, bag, method=by, **options).scores if isinstance(by, str) else np.asarray(by)
    if scores.shape != (n,) or scores.dtype.kind not in "fiub":
        must = f"a method's name, an Explanation of the bag, or {n} scores"
        raise bad_parameter("by", "interactions", must, by)
    return np.sort(np.argsort(-np.abs(scores), kind="stable")[:top]).astype(np.int64)


class Strata:
    """Estimate interactions of few players from sampled coalitions, each of which counts for every pair.

    The interaction index is a sum over sizes of differences of means: v over the coalitions of one size that
    hold both of a pair, one of them, or none. Every sampled coalition is in one such stratum of each pair, so
    all pairs share it; Kolpaczki et al., "SVARM-IQ", AISTATS 2024, sample strata in this way. Here only the
    difference from a surrogate is sampled: samples come in two halves, and the surrogate of each is fitted
    to the other. Sizes with few coalitions are enumerated.
    """

    def __init__(self, n: int, budget: int, rng: torch.Generator) -> None:
        self.n, self.rng = n, rng
        weights = {}  # relative number of samples that a size needs
        for s in range(3, n - 2):
            both, none = s * (s - 1), (n - s) * (n - s - 1)  # proportional to each stratum's share
            weights[s] = float((1 / both + 2 / (s * (n - s)) + 1 / none) ** 0.5)
        total = sum(weights.values()) or 1.0
        self.shares = {s: w / total for s, w in weights.items() if SPARED * comb(n, s) > budget * w / total}
        self.full_sizes = [s for s in range(n + 1) if s not in self.shares]
        self.enumerated = sum(comb(n, s) for s in self.full_sizes)  # coalitions
        self.columns = n + 1 + POWERS * n + n * (n - 1) // 2  # parameters of a surrogate
        self.full: Runs | None = None  # of the enumerated sizes, once they have run
        self.halves: tuple[list[Runs], list[Runs]] = ([], [])

    @property
    def first(self) -> int:
        """The number of coalitions of the first round."""
        if not self.shares:
            return 0
        pairs = self.n * (self.n - 1)
        rarest = {s: min(s * (s - 1), (self.n - s) * (self.n - s - 1)) for s in self.shares}
        hit = max(HITS * pairs / rarest[s] / share for s, share in self.shares.items())
        return max(round(hit), 2 * FITTED[0] * self.columns)

    def every(self) -> Tensor:
        """List the coalitions of the enumerated sizes."""
        rows = [torch.tensor(list(combinations(range(self.n), s))).long() for s in self.full_sizes]
        members = [part.view(comb(self.n, s), s) for s, part in zip(self.full_sizes, rows, strict=True)]
        return torch.cat([self._masks(part) for part in members])

    def draw(self, count: int) -> Tensor:
        """Draw about `count` coalitions in random order, more of the sizes with rare strata."""
        counts = {s: max(2, round(count * share)) for s, share in self.shares.items()}
        orders = {s: torch.rand(k, self.n, generator=self.rng).argsort(dim=1) for s, k in counts.items()}
        masks = torch.cat([self._masks(order[:, :s]) for s, order in orders.items()])
        return masks[torch.randperm(len(masks), generator=self.rng)]

    def add(self, masks: Tensor, values: Tensor) -> None:
        """Add drawn coalitions and their values."""
        for part, half in enumerate(self.halves):
            half.append((masks[part::2], values[part::2]))

    def estimate(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate interaction indices and standard errors (k, k) of the chosen players."""
        mean, variance = self._sum(_concatenate([self.full]), None, chosen)
        if self.shares:
            halves, most = [_concatenate(half) for half in self.halves], FITTED[1] * self.columns
            parts = [
                self._sum(half, Surrogate.fit(masks[:most], values[:most]), chosen)
                for half, (masks, values) in zip(halves, halves[::-1], strict=True)
            ]
            mean = mean + (parts[0][0] + parts[1][0]) / 2
            variance = (parts[0][1] + parts[1][1]) / 4
        return mean / (self.n - 1), variance.sqrt() / (self.n - 1)

    def _sum(self, runs: Runs, near: Surrogate | None, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over the sizes of the runs, with the variance, which is zero for enumerated sizes."""
        masks, values = runs
        rest, sizes = values if near is None else values - near(masks), masks.sum(dim=1)
        total = variance = torch.zeros(len(chosen), len(chosen), dtype=torch.float64, device=chosen.device)
        for size in sizes.unique().tolist():
            at = sizes == size
            pooled = rest[at].square().mean()
            for (p, q), (number, sums, squares) in _moments(masks[at][:, chosen].double(), rest[at]).items():
                if p + q <= size <= self.n - 2 + p + q:
                    counts = number.round().clamp(min=1)
                    mean = sums / counts
                    spread = (squares - counts * mean.square()).clamp(min=0) / (counts - 1).clamp(min=1)
                    doubt = torch.where(number.round() >= 2, spread, pooled) / counts
                    exact = 0.0 if near is None else near.mean(size, p, q)[chosen][:, chosen]
                    total = total + (1 if p == q else -1) * (mean + exact)
                    variance = variance + (0.0 if near is None else doubt)
        return total, variance

    def _masks(self, members: Tensor) -> Tensor:
        """Make the coalitions (b, n) of members (b, size)."""
        return torch.zeros(len(members), self.n, dtype=torch.bool).scatter_(1, members, True)


def _concatenate(runs: Sequence[Runs | None]) -> Runs:
    masks, values = zip(*filter(None, runs), strict=True)
    return torch.cat(masks), torch.cat(values).double()


def _moments(members: Tensor, rest: Tensor) -> dict[tuple[int, int], list[Tensor]]:
    """Count coalitions (k, k), and sum values and squares, by which of a pair are members (b, k)."""
    tables: dict[tuple[int, int], list[Tensor]] = {pattern: [] for pattern in PATTERNS}
    for weights in (torch.ones_like(rest), rest, rest.square()):
        both = members.T @ (weights[:, None] * members)
        one, every = weights @ members, weights.sum()
        tables[1, 1].append(both)
        tables[1, 0].append(one[:, None] - both)
        tables[0, 1].append(one[None, :] - both)
        tables[0, 0].append(every - one[:, None] - one[None, :] + both)
    return tables


@dataclass(frozen=True)
class Surrogate:
    """A simple approximation of the game with known means over any stratum; only the difference is sampled.

    Its value of a coalition is a level for each size (n + 1,), plus a sum over members whose slopes are
    parabolas in the size (3, n), plus a sum over pairs of members (n, n), symmetric with an empty diagonal.
    Memberships are minus the coalition's share of all players.
    """

    levels: Tensor
    slopes: Tensor
    pairs: Tensor

    @classmethod
    def fit(cls, masks: Tensor, values: Tensor) -> Surrogate:
        """Fit to values (b,) of coalitions (b, n) by least squares."""
        n, sizes = masks.shape[1], masks.sum(dim=1)
        share = (sizes.double() / n)[:, None]
        inside = masks.double() - share
        i, j = torch.triu_indices(n, n, offset=1, device=masks.device)
        each_size = torch.eye(n + 1, dtype=torch.float64, device=masks.device)[sizes]
        members = [inside * share**p for p in range(POWERS)]
        x = torch.cat([each_size, *members, inside[:, i] * inside[:, j]], dim=1)
        gram = x.T @ x
        gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
        solution = torch.linalg.solve(gram, x.T @ values)
        levels, slopes, added = solution.split([n + 1, POWERS * n, n * (n - 1) // 2])
        pairs = masks.new_zeros(n, n, dtype=torch.float64).index_put_((i, j), added)
        return cls(levels, slopes.view(POWERS, n), pairs + pairs.T)

    def __call__(self, masks: Tensor) -> Tensor:
        """Values (b,) of coalitions (b, n)."""
        sizes = masks.sum(dim=1)
        share = sizes.double() / masks.shape[1]
        inside = masks.double() - share[:, None]
        powers = torch.stack([share**p for p in range(POWERS)], dim=1)
        members = (inside * (powers @ self.slopes)).sum(dim=1)
        return self.levels[sizes] + members + ((inside @ self.pairs) * inside).sum(dim=1) / 2

    def mean(self, size: int, p: int, q: int) -> Tensor:
        """Compute means (n, n) over the coalitions of a size that hold i (p = 1) or not (0), and j (q)."""
        n = len(self.pairs)
        share, rest = size / n, size - p - q
        one = rest / max(1, n - 2)
        both = rest * (rest - 1) / max(1, (n - 2) * (n - 3))
        other, two = one - share, both - 2 * share * one + share**2  # for one and for two other players
        first, second = p - share, q - share
        slopes = sum(share**k * self.slopes[k] for k in range(POWERS))
        assert isinstance(slopes, Tensor)  # noqa: S101  # narrows the type for mypy
        rows = self.pairs.sum(dim=1)  # what each player adds with all others
        b, i, j = slopes, rows[:, None], rows[None, :]
        alone = first * b[:, None] + second * b[None, :] + other * (b.sum() - b[:, None] - b[None, :])
        beside = other * (first * (i - self.pairs) + second * (j - self.pairs))
        apart = two * (rows.sum() / 2 - i - j + self.pairs)
        mean: Tensor = self.levels[size] + alone + first * second * self.pairs + beside + apart
        return mean
