"""Interactions of patches: what a pair adds beyond its two members, averaged over the company it keeps.

The Shapley interaction index of Grabisch and Roubens, "An axiomatic approach to the concept of interaction
among players in cooperative games", 1999: the mean of v(S + ij) - v(S + i) - v(S + j) + v(S), the size of S
uniform on 0..n-2 and S uniform among the others. Few players are sampled by strata, see `strata`. For many, a
set that holds each instance with one probability, itself uniform on [0, 1], is such an S for every pair at
once, so that all pairs share each draw: per draw the set is run with none, one and two of the chosen
instances the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
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
from xmil.methods.coalitions import Coalitions, coalitions_of
from xmil.methods.explain import Bags, explain
from xmil.methods.opening import Calling, as_bag, check_same_bag, open_network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import seed_words
from xmil.methods.shapley import LARGEST, bits_of
from xmil.methods.strata import MOST, Strata
from xmil.nn.frozen import frozen

logger = logging.getLogger(__name__)

ENUMERATED = 12  # so many players are enumerated: 4,096 coalitions
CHUNK = 8  # pairs of draws between two looks at the standard errors
FEWEST = 2 * CHUNK
LOOKS = 8  # at the standard errors of strata
MASKS = 1 << 27  # entries of the coalitions that are written out at once
Progress = Callable[[int, int], None]
Masks = Callable[[Tensor], Tensor]  # coalitions of players (b, p) to logits (b, c)


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
    **how: Unpack[Calling],
) -> Interactions:
    """Which pairs of patches act together: Shapley interaction indices with standard errors.

    Pairs are those among the `top` patches with the largest scores by a method's name, an explanation or
    given scores (`by`), whatever their sign; with `groups`, a label for each patch, those among the groups.
    Up to twelve patches or groups are enumerated (`exact=False` asks against it); more are sampled until the
    largest standard error is at most `precision`, in units of the output, or after so many `draws`.
    `progress(done, total)` is called as draws are done. `how` a module of your own is called is as for
    `explain`.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0)
    >>> found = interactions(net, torch.eye(4), target=1)
    >>> found.pairs.shape, bool((abs(found.values[0]) >= abs(found.values)).all())
    ((6, 2), True)
    """
    _check(top, precision, draws)
    bag = as_bag(bag)
    network, x = open_network(model, bag, **how)
    question = Question([target], output, network)
    with frozen(network.module), torch.no_grad():
        game = coalitions_of(network, x)
        (asked,) = question.outputs(game.model_logits)
    if game.n < 2:
        raise InputError("Interactions need a bag of two instances or more.")
    members, names = _members(groups, game.n)
    if groups is None and game.n > top:
        chosen = _strongest(network.module, bag, by, top, n=game.n, target=asked.target, output=output, **how)
    else:
        chosen = np.arange(len(members) if members is not None else game.n)
    players = _Players(game, asked, members, torch.from_numpy(chosen).to(x.device))
    with frozen(network.module), torch.no_grad():
        if players.n <= ENUMERATED if exact is None else exact:
            found = players.enumerate()
        else:
            found = players.sample(precision, draws // 2, seed_words(seed, "interactions"), progress)
    return _result(found, players, bag, names, {"top": top, "draws": draws, "output": asked.kind})


@dataclass(frozen=True)
class _Found:
    """Values and standard errors of all pairs of the chosen players, and the pairs alone."""

    values: Tensor
    stderr: Tensor
    alone: Tensor
    warnings: tuple[str, ...] = ()


class _Players:
    """The players of a bag's game: its instances, or groups of them; pairs are of the chosen ones."""

    def __init__(self, game: Coalitions, output: Output, members: Tensor | None, chosen: Tensor) -> None:
        self.game, self.output, self.chosen = game, output, chosen
        self.members = None if members is None else members.to(game.x.device)  # (p, n)
        self.n = game.n if members is None else len(members)
        self.pairs = torch.tensor(list(combinations(range(len(chosen)), 2)), device=game.x.device)  # (k, 2)
        self.largest = 0.0

    def sample(
        self, precision: float | None, draws: int, seed: list[int], progress: Progress | None
    ) -> _Found:
        toggles = self._toggles()
        self._announce(2 * draws, len(toggles))
        rng = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        budget = 2 * draws * len(toggles)
        if self.n <= MOST and (strata := Strata(self.n, budget, rng)).within(budget):
            return self._stratified(strata, 2 * draws, len(toggles), precision, progress)
        total = squares = torch.zeros(len(self.pairs), device=self.game.x.device).double()
        done = 0
        while done < draws:
            changes = self._both(rng, toggles, min(CHUNK, draws - done))
            total, squares = total + changes.sum(dim=0), squares + changes.square().sum(dim=0)
            done += len(changes)
            if progress is not None:
                progress(2 * done, 2 * draws)
            mean = total / done
            stderr = ((squares / done - mean.square()).clamp(min=0) / max(1, done - 1)).sqrt()
            if done >= FEWEST and _enough(stderr, precision):
                break
        return _Found(mean, self._rounded(stderr), self._alone(), _shortfall(stderr, precision, 2 * done))

    def _stratified(
        self, strata: Strata, draws: int, each: int, precision: float | None, progress: Progress | None
    ) -> _Found:
        """As many sub-bags as `draws` of `each` would take, all of them for all pairs."""
        budget, count, i, j = draws * each, strata.first, *self.pairs.T
        strata.add_full(*self._run(strata.every()))
        done = strata.enumerated
        while True:
            if strata.shares:
                strata.add(*self._run(batch := strata.draw(count)))
                done += len(batch)
            if progress is not None:
                progress(min(draws, done // each), draws)
            count = budget - done if strata.shares else 0
            if precision is not None or progress is not None:
                count = min(budget // LOOKS, count)
            if count > 0 and precision is None:
                continue
            mean, stderr = (found[i, j] for found in strata.estimate(self.chosen))
            if count <= 0 or _enough(stderr, precision):
                break
        return _Found(
            mean, self._rounded(stderr), self._alone(), _shortfall(stderr, precision, -(-done // each))
        )

    def _run(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        held = batch.to(self.game.x.device)
        return held, self.values(held)

    def values(self, masks: Tensor) -> Tensor:
        """The output (b,) of coalitions (b, p) of players."""
        if self.members is not None:
            masks = (masks.double() @ self.members.double()) > 0
        found = self.output(self.game.logits(masks))
        self.largest = max(self.largest, float(found.abs().max()))
        return found

    def _both(self, rng: torch.Generator, toggles: Tensor, draws: int) -> Tensor:
        """Changes (draws, k): the mean of a draw and its complement."""
        chance = torch.rand(draws, 1, generator=rng)
        held = (torch.rand(draws, self.n, generator=rng) < chance).to(self.game.x.device)
        at_once = max(1, MASKS // (2 * len(toggles) * self.n))
        parts = [self._changes(torch.cat([part, ~part]), toggles) for part in held.split(at_once)]
        return torch.cat([part.unflatten(0, (2, -1)).mean(dim=0) for part in parts])

    def _changes(self, held: Tensor, toggles: Tensor) -> Tensor:
        """v(S + ij) - v(S + i) - v(S + j) + v(S) for each pair, S what is held (b, p) but i and j: (b, k)."""
        values = self._toggled(held, toggles)
        k = len(self.chosen)
        none, one, two = values[:, :1], values[:, 1 : k + 1], values[:, k + 1 :]
        i, j = self.pairs.T
        same = held[:, self.chosen[i]] == held[:, self.chosen[j]]
        return torch.where(same, 1.0, -1.0) * (two - one[:, i] - one[:, j] + none)

    def _toggled(self, held: Tensor, toggles: Tensor) -> Tensor:
        """The output (b, m) of what is held (b, p) after each toggle (m, chosen)."""
        here = held[:, self.chosen].unsqueeze(1) ^ toggles
        if self.members is None:
            logits = self.game.around(held, self.chosen, here)
            values = self.output(logits.flatten(0, 1))
            self.largest = max(self.largest, float(values.abs().max()))
        else:
            masks = held.unsqueeze(1).repeat(1, len(toggles), 1)
            masks[:, :, self.chosen] = here
            values = self.values(masks.flatten(0, 1))
        return values.view(here.shape[:2])

    def _toggles(self) -> Tensor:
        """Which of the chosen change sides: none, each one, each pair; (1 + p + k, p)."""
        eye = torch.eye(len(self.chosen), dtype=torch.bool, device=self.chosen.device)
        return torch.cat([eye[:1] ^ eye[:1], eye, eye[self.pairs[:, 0]] | eye[self.pairs[:, 1]]])

    def _alone(self) -> Tensor:
        nobody = torch.zeros(self.n, dtype=torch.bool, device=self.game.x.device)
        return self._changes(nobody.unsqueeze(0), self._toggles())[0]

    def enumerate(self) -> _Found:
        if self.n > LARGEST:
            raise bad_parameter("exact", "interactions", f"False for more than {LARGEST} players", True)
        codes = torch.arange(1 << self.n, device=self.game.x.device)
        values = self.values(bits_of(codes, self.n))
        every = [exact_interaction(values, self.n, int(i), int(j)) for i, j in self.chosen[self.pairs]]
        mean = torch.stack(every)
        return _Found(mean, self._rounded(torch.zeros_like(mean)), self._alone())

    def _rounded(self, stderr: Tensor) -> Tensor:
        """Standard errors that count the rounding of the model's numbers, too."""
        rounding = torch.finfo(self.game.x.dtype).eps * self.largest
        return (stderr.square() + rounding**2).sqrt()

    def _announce(self, draws: int, sets: int) -> None:
        logger.info(
            "interactions: up to %d draws of %d sub-bags each on %s",
            draws, sets, self.game.network.name,
        )  # fmt: skip


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
    """Which instances each group holds (p, n), and the groups' names; None where instances play."""
    if groups is None:
        return None, None
    labels = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if labels.shape != (n,):
        raise bad_parameter("groups", "interactions", f"{n} labels, one for each instance", labels.shape)
    names, index = np.unique(labels.astype(str), return_inverse=True)
    if len(names) < 2:
        raise InputError("Interactions need two groups or more; all instances have one label.")
    return torch.from_numpy(index == np.arange(len(names))[:, None]), tuple(names.tolist())


def _strongest(
    model: nn.Module, bag: Any, by: Any, top: int, *, n: int, **options: Any
) -> npt.NDArray[np.int64]:
    """The instances with the largest absolute scores, ascending."""
    if isinstance(by, Explanation):
        check_same_bag(by, getattr(bag, "slide_id", None))
        by = by.scores
    scores = explain(model, bag, method=by, **options).scores if isinstance(by, str) else np.asarray(by)
    if scores.shape != (n,) or scores.dtype.kind not in "fiub":
        must = f"a method's name, an Explanation of the bag, or {n} scores"
        raise bad_parameter("by", "interactions", must, by)
    return np.sort(np.argsort(-np.abs(scores), kind="stable")[:top]).astype(np.int64)


def _result(
    found: _Found, players: _Players, bag: Any, names: tuple[str, ...] | None, params: dict[str, Any]
) -> Interactions:
    order = found.values.abs().argsort(descending=True, stable=True)
    pairs = players.chosen[players.pairs][order].cpu().numpy().astype(np.int64)
    known = bag if isinstance(bag, Bag) else Bag(np.zeros((0, 1), dtype=np.float32))
    placed = names is None and known.coords is not None
    return Interactions(
        pairs=pairs,
        values=found.values[order].cpu().numpy(),
        stderr=found.stderr[order].cpu().numpy(),
        alone=found.alone[order].cpu().numpy(),
        target=players.output.target,
        output=float(players.output(players.game.full)),
        names=names,
        groups=None if players.members is None else players.members.long().argmax(dim=0).cpu().numpy(),
        bag=known.slide_id,
        model=players.game.network.name,
        corners=known.coords[pairs].reshape(len(pairs), 4) if placed and known.coords is not None else None,
        patch_size=known.patch_size if placed else None,
        params=params,
        warnings=found.warnings,
    )


def _enough(stderr: Tensor, precision: float | None) -> bool:
    return precision is not None and float(stderr.max()) <= precision


def _shortfall(stderr: Tensor, precision: float | None, draws: int) -> tuple[str, ...]:
    largest = float(stderr.max())
    if precision is None or largest <= precision:
        return ()
    return (
        f"The largest standard error is {largest:.3g}, above the precision of {precision:.3g}, after {draws} "
        "draws; allow more with draws=.",
    )


def _check(top: Any, precision: Any, draws: Any) -> None:
    if isinstance(top, bool) or not isinstance(top, int) or top < 2:
        raise bad_parameter("top", "interactions", "an int in the range [2, inf)", top)
    if precision is not None and (not isinstance(precision, int | float) or not precision > 0):
        raise bad_parameter("precision", "interactions", "a float in the range (0, inf), or None", precision)
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 4:
        raise bad_parameter("draws", "interactions", "an int in the range [4, inf)", draws)
