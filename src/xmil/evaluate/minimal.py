"""Find the smallest set of instances that decides: its removal flips the decision, or it alone keeps it.

Several searches each find a set, with exact evaluations: by the order of a bound if there is one, by the
effect of single instances, and by greedy steps. The best set is then thinned, and members are exchanged.
Smaller sets are excluded by proof (`xmil.subsets.bounds`) or by trying all of a size, as far as evaluations
allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from os import PathLike
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError, bad_parameter, check_names
from xmil.core.task import TASKS, Target
from xmil.methods import Bags, Question
from xmil.network import CallOptions, attempt, frozen, open_network
from xmil.subsets import Bound, Subsets, bound_of, check_finite, open_subsets

KINDS = ("flip", "keep")
BATCH = 2048  # sets evaluated at once
RUNS, OF_A_HEAD, OF_A_SUM = 4_000, 1_000_000, 50_000_000  # evaluations, by the cost of one
EXHAUSTIVE = 40_000  # sets of one size that may all be tried
EXCHANGES = 10_000_000  # sets to try when counting those that differ in one member
SMALL = 15  # size of bags whose sets can all be tried
TIE = 1e-5  # of the largest output, including the empty bag's: margins this small are run on the model itself
TIES = 64  # sets near a tie to run on the model
EXCHANGED = 4  # pairs of members to try to replace by one instance


@dataclass(frozen=True, eq=False)
class MinimalSet:
    """The smallest set found; the smallest possible one has between `lower` and `upper` members.

    If no set was found, `instances` (upper,) and `upper` are None, and no set has fewer than `lower` members;
    `lower` is the bag's size if that holds for all proper subsets. `decided` is the decision of the full bag,
    whether the target is predicted. `tried` counts evaluated sets.

    Other sets may be as small: `equal` counts them and this one, which is the strongest: it moves the outputs
    farthest past the decision. Unless `all_equal`, there may be more than were counted.
    """

    instances: npt.NDArray[np.int64] | None
    lower: int
    upper: int | None
    kind: str
    target: Target
    decided: bool
    n: int
    tried: int
    equal: int = 0
    all_equal: bool = False

    @property
    def exact(self) -> bool:
        """Whether it is proven that no set is smaller, or that there is none."""
        return self.lower == (self.n if self.upper is None else self.upper)

    @property
    def sentence(self) -> str:
        """The result as a sentence."""
        does = "whose removal changes" if self.kind == "flip" else "that alone keep"
        if self.upper is None:
            none = "There is no set" if self.exact else "No set was found"
            open_ = "" if self.exact else f"; one of {self.lower} or more is not ruled out"
            fewer = f"fewer than {self.n} patch{'' if self.n == 1 else 'es'}"
            return f"{none} of {fewer} {does} the prediction on {self.target}{open_}."
        size = f"of patches {does} the prediction on {self.target} has {self.upper} of {self.n}"
        smallest = f"The smallest set {size}."
        if not self.exact:
            smallest = (
                f"The smallest set found {size}; a smaller one, of {self.lower} or more, is not ruled out."
            )
        if self.equal > 1:
            least = "" if self.all_equal else "at least "
            smallest += f" It is the strongest of {least}{self.equal} sets of this size."
        elif not self.all_equal:
            smallest += " Other sets may be as small."
        return " ".join([smallest, *([self.caution] if self.caution else [])])

    @property
    def caution(self) -> str | None:
        """A warning if most single patches are such a set: then none of them decides by itself."""
        if self.upper != 1 or 2 * self.equal <= self.n:
            return None
        effect = "change the prediction when removed" if self.kind == "flip" else "keep the prediction alone"
        reason = "it is close to the boundary" if self.kind == "flip" else "the patches are much alike"
        return (
            f"Caution: {self.equal} of {self.n} single patches {effect}: {reason}, and no single patch "
            "decides it."
        )

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types for files."""
        members = None if self.instances is None else self.instances.tolist()
        keys = ("kind", "lower", "upper", "n", "tried", "exact", "equal", "all_equal", "caution", "sentence")
        return {"instances": members, "target": str(self.target), **{key: getattr(self, key) for key in keys}}


def minimal_set(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    *,
    target: Any = None,
    kind: str = "flip",
    evaluations: int | None = None,
    **how: Unpack[CallOptions],
) -> MinimalSet:
    """Find the smallest set of patches that decides, with a lower bound.

    `kind="flip"`: the smallest set whose removal changes whether the target is the predicted class (for
    multi-label models, whether it is predicted); `"keep"`: the smallest set that alone keeps it. Sets are
    proper subsets of the bag. The default target is the predicted class. `evaluations` is the number of sets
    to try at most; its default depends on the cost of one. `how` is `forward`, `returns` and `average`, as
    for `explain`.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=4, n_classes=2, seed=0)
    >>> least = minimal_set(net, torch.eye(4), kind="keep")
    >>> least.lower, least.upper, len(least.instances)
    (1, 1, 1)
    """
    check_names("kind", [kind], KINDS)
    if evaluations is not None and (not isinstance(evaluations, int) or evaluations < 1):
        raise bad_parameter("evaluations", "minimal_set", "an int in the range [1, inf)", evaluations)
    network, x = open_network(model, bag, **how)
    if not TASKS[network.task].decides:
        raise UnsupportedError(f"A {network.task} model has no classes, but minimal sets need them.")
    with frozen(network.module), torch.no_grad():
        game = open_subsets(network, x)
        (output,) = Question([target], None, network).outputs(game.logits)
        affordable = {"run": RUNS, "head": OF_A_HEAD, "sum": OF_A_SUM}[game.cost]
        if game.cost == "run" and game.n <= SMALL:
            affordable = EXHAUSTIVE
        question = _Sets(game, output.target, kind, evaluations or affordable)
        return _search(question, bound_of(game))


class _Sets:
    """Sets of instances as tensors of rows, and whether they reach the goal: flip or keep the decision."""

    def __init__(self, game: Subsets, target: Target, kind: str, evaluations: int) -> None:
        self.game, self.target, self.kind, self.left = game, target, kind, evaluations
        self.n, self.device, self.tried = game.n, game.x.device, 0
        empty = attempt(lambda: game.empty)
        self.size = 0.0 if empty is None else float(empty.abs().nan_to_num(0.0, 0.0).max())
        self.c, self.labels = int(target), TASKS[game.network.task].truth == "labels"
        self.decided = bool(self._predicted(game.full)[0])
        self.goal = self.decided if kind == "keep" else not self.decided

    @property
    def differences(self) -> tuple[Tensor, bool]:
        """Differences of outputs (r, c), positive if a set reaches the goal, and whether all must be."""
        c = self.game.full.shape[1]
        if self.labels or c == 1:
            sign = 1.0 if self.labels or self.c == 1 else -1.0
            rows = torch.zeros(1, c, dtype=torch.float64, device=self.device)
            rows[0, self.c if c > 1 else 0] = sign
        else:
            eye = torch.eye(c, dtype=torch.float64, device=self.device)
            rows = eye[self.c] - eye[[k for k in range(c) if k != self.c]]
        return (rows if self.goal else -rows), self.goal

    def gains(self, logits: Tensor) -> Tensor:
        """Measure how close each row of logits is to the goal; infinity once it is there."""
        reached, margin = self.strengths(logits)
        return torch.where(reached, float("inf"), margin.clamp(max=1e30))

    def strengths(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """For each row of logits, find whether it is at the goal, and how far beyond it."""
        self.tried += len(logits)
        self.left -= len(logits)
        return self._predicted(logits) == self.goal, self._margin(logits) * (1 if self.goal else -1)

    def masks(self, members: Tensor) -> Tensor:
        """Mark the instances that stay in the bag (b, n) for sets (b, m)."""
        inside = torch.full((len(members), self.n), self.kind == "flip", device=self.device)
        return inside.scatter_(1, members, self.kind != "flip")

    def try_each(self, members: Tensor, rows: Tensor) -> Tensor:
        """Measure the gains (k,) of a set (m,) with each of the rows (k,) added or removed."""
        return self.gains(self.toggled(members, rows))

    def toggled(self, members: Tensor, rows: Tensor) -> Tensor:
        """Run a set (m,) with each of the rows (k,) added or removed: logits (k, c)."""
        return self.game.toggled(self.masks(members.unsqueeze(0))[0], rows)

    def prefixes(self, order: Tensor, sizes: list[int]) -> Tensor:
        """Run the sets of the first m instances of an order (n,), for each size m: logits (len(sizes), c)."""
        if self.kind == "flip":
            order, sizes = order.flip(0), [self.n - m for m in sizes]
        return self.game.nested(order.unsqueeze(0), sizes)[0]

    def outside(self, members: Tensor) -> Tensor:
        """List the rows that are not in a set."""
        free = torch.ones(self.n, dtype=torch.bool, device=self.device)
        return free.index_fill_(0, members, False).nonzero().squeeze(1)

    def confirm(self, members: Tensor) -> bool:
        """Whether the model itself, run on the sub-bag, agrees with the closed form."""
        rows = self.masks(members.unsqueeze(0))[0].nonzero().T  # (1, m)
        logits = check_finite(self.game, self.game.network(self.game.x[:, rows[0]], rows), [rows.shape[1]])
        return bool(self._predicted(logits)[0] == self.goal)

    def _predicted(self, logits: Tensor) -> Tensor:
        if self.labels:
            return logits[:, self.c] > 0
        return _two_columns(logits).argmax(dim=1) == self.c

    def _margin(self, logits: Tensor) -> Tensor:
        if self.labels:
            return logits[:, self.c]
        full = _two_columns(logits)
        rivals = [k for k in range(full.shape[1]) if k != self.c]
        return full[:, self.c] - full[:, rivals].amax(dim=1)


def _two_columns(logits: Tensor) -> Tensor:
    """Give logits a column per class: one z becomes (-z, z)."""
    return torch.cat([-logits, logits], dim=1) if logits.shape[1] == 1 else logits


def _search(sets: _Sets, bound: Bound) -> MinimalSet:
    if sets.n == 1:
        return _result(sets, None, 1)
    differences, every = sets.differences
    if sets.kind == "flip":
        sizes = [bound.fewest(d, sets.n - 1) for d in differences]
    else:
        sizes = [1 if bound.single(d) else sets.n for d in differences]
    lower = max(sizes) if every else min(sizes)  # no set can be smaller
    if lower >= sets.n:
        return _result(sets, None, sets.n)
    best = None
    for members in _candidates(sets, bound, differences, lower):
        members = None if members is None else _confirm(sets, members)
        if members is not None and (best is None or len(members) < len(best)):
            best = members
        if best is not None and len(best) == lower:
            return _result(sets, best, lower)
    if best is not None:
        better = _thin(sets, best)
        while len(better) > 1 and sets.left > EXCHANGED * sets.n:
            shorter = _two_for_one(sets, better)
            if shorter is None:
                break
            better = _thin(sets, shorter)
        best = better if len(better) < len(best) and sets.confirm(better) else best
    return _result(sets, *_exhaust(sets, best, lower))


def _confirm(sets: _Sets, members: Tensor) -> Tensor | None:
    """Add a few members if rounding decides a tie; None if the model does not agree."""
    for _ in range(TIES):
        if sets.confirm(members):
            return members
        if len(members) >= sets.n - 1:
            break
        members = torch.cat([members, sets.outside(members)[:1]])
    return None


def _candidates(sets: _Sets, bound: Bound, differences: Tensor, lower: int) -> Iterator[Tensor | None]:
    """Yield sets that reach the goal, from one search after another."""
    if sets.kind == "flip":
        for d in differences:
            order = bound.order(d)
            if order is not None:
                yield _first_prefix(sets, order)
    everybody = torch.arange(sets.n, device=sets.device)
    gains = sets.try_each(everybody[:0], everybody)
    yield _first_prefix(sets, gains.argsort(descending=True, stable=True))
    evaluations = lower * sets.n - lower * (lower - 1) // 2  # of as many greedy steps as it takes at least
    if evaluations <= sets.left:
        yield _greedy(sets)


def _first_prefix(sets: _Sets, order: Tensor) -> Tensor | None:
    """Find the shortest prefix of an order that reaches the goal; None if no proper one does."""
    coarse = 64 if sets.game.cost == "run" else BATCH
    spread = max(1, (sets.n - 1) // coarse)
    sizes = list(range(1, sets.n, spread))
    hit = _first_size(sets, order, sizes)
    if hit is None:
        return None
    between = list(range(max(1, hit - spread + 1), hit + 1))
    return order[: _first_size(sets, order, between) or hit]


def _first_size(sets: _Sets, order: Tensor, sizes: list[int]) -> int | None:
    for start in range(0, len(sizes), 64):
        part = sizes[start : start + 64]
        hits = sets.gains(sets.prefixes(order, part)).isinf().nonzero()
        if len(hits):
            return part[int(hits[0, 0])]
    return None


def _greedy(sets: _Sets) -> Tensor | None:
    """Add the best instance again and again; None if evaluations run out."""
    members = torch.zeros(0, dtype=torch.long, device=sets.device)
    while len(members) < sets.n - 1 and sets.left > 2 * sets.n:
        rest = sets.outside(members)
        gains = sets.try_each(members, rest)
        best = int(gains.argmax())
        members = torch.cat([members, rest[best : best + 1]])
        if gains[best].isinf():
            return members
    return None


def _thin(sets: _Sets, members: Tensor) -> Tensor:
    """Remove members that the set does not need."""
    while len(members) > 1 and sets.left > len(members):
        gains = sets.try_each(members, members)
        if not gains.isinf().any():
            break
        place = int(gains.isinf().nonzero()[0, 0])
        members = _without(members, [place])
    return members


def _two_for_one(sets: _Sets, members: Tensor) -> Tensor | None:
    """Replace two members by one instance: try the pairs whose loss costs least; None if that fails."""
    pairs = torch.tensor(list(islice(combinations(range(len(members)), 2), BATCH)), device=sets.device)
    gains = torch.zeros(len(pairs), device=sets.device)
    if len(members) > 2:
        gains = torch.cat([
            sets.try_each(_without(members, [int(first)]), members[pairs[pairs[:, 0] == first, 1]])
            for first in pairs[:, 0].unique()
        ])  # fmt: skip
    for place in gains.topk(min(EXCHANGED, len(pairs))).indices:
        rest = _without(members, pairs[place].tolist())
        outside = sets.outside(rest)
        hits = sets.try_each(rest, outside).isinf().nonzero().squeeze(1)
        if len(hits):
            return torch.cat([rest, outside[hits[:1]]])
    return None


def _without(members: Tensor, places: list[int]) -> Tensor:
    """Remove the members at some places."""
    stays = torch.ones(len(members), dtype=torch.bool, device=members.device)
    stays[places] = False
    return members[stays]


def _exhaust(sets: _Sets, best: Tensor | None, lower: int) -> tuple[Tensor | None, int]:
    """Try all sets of each size from the lower bound up, as far as evaluations allow."""
    top = sets.n if best is None else len(best)
    while lower < top and _affordable(sets, lower):
        for members, logits in _every_group(sets, lower):
            gains = sets.gains(logits)
            near = members[gains > -TIE * logits.abs().amax(dim=1).clamp(min=sets.size)]
            for candidate in near[:TIES]:
                if sets.confirm(candidate):
                    return candidate, lower
            if len(near) > TIES:
                return best, lower
        lower += 1
    return best, lower


def _rivals(sets: _Sets, members: Tensor) -> tuple[int, list[Tensor], bool]:
    """Count the sets of the same size that reach the goal, find the strongest, and whether all were tried.

    All sets of this size are tried if that is affordable, else those that differ from this one in one member.
    """
    size, everybody = len(members), torch.arange(sets.n, device=sets.device)
    every, by_exchange = True, False
    if size == 1:
        tried = iter([(everybody.unsqueeze(1), sets.toggled(everybody[:0], everybody))])
    elif _affordable(sets, size):
        tried = _every_group(sets, size)
    else:
        every, by_exchange = False, True
        tried = _exchanges(sets, members)

    count, best, best_strengths = 0, [], []
    for group, logits in tried:
        reached, strengths = sets.strengths(logits)
        count += int(reached.sum())
        best.append(group[reached])
        best_strengths.append(strengths[reached])
        strongest = torch.cat(best_strengths).argsort(descending=True, stable=True)[:TIES]
        best = [torch.cat(best)[strongest]]
        best_strengths = [torch.cat(best_strengths)[strongest]]

    rivals = list(torch.cat(best)) if best else []
    if by_exchange:
        rivals = [torch.cat([_without(members, [int(place)]), row.view(1)]) for place, row in rivals]
    return count, rivals, every


def _affordable(sets: _Sets, size: int) -> bool:
    """Whether all sets of a size may be tried."""
    most = min(sets.left, EXHAUSTIVE)
    return sets.n <= most and comb(sets.n, size) <= most


def _every_group(sets: _Sets, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield all sets of a size, in batches, with their logits."""
    groups = combinations(range(sets.n), size)
    while batch := list(islice(groups, BATCH)):
        group = torch.tensor(batch, device=sets.device)
        yield group, sets.game.run(sets.masks(group))


def _exchanges(sets: _Sets, members: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield exchanges (k, 2) of one member, with their logits, as far as evaluations allow.

    An exchange is the place of the member that leaves and the row that comes; the first one changes nothing.
    """
    outside = sets.outside(members)
    none = torch.stack([torch.zeros_like(members[0]), members[0]])
    at_end = max(0, sets.left - EXCHANGES)  # evaluations that are left
    yield none.unsqueeze(0), sets.game.run(sets.masks(members.unsqueeze(0)))
    for place in range(len(members)):
        if sets.left - len(outside) < at_end:
            return
        rest = _without(members, [place])
        yield torch.stack([torch.full_like(outside, place), outside], dim=1), sets.toggled(rest, outside)


def _result(sets: _Sets, members: Tensor | None, lower: int) -> MinimalSet:
    problem = (sets.kind, sets.target, sets.decided, sets.n)
    if members is None:
        return MinimalSet(None, lower, None, *problem, sets.tried)
    count, rivals, every = _rivals(sets, members)
    for rival in rivals:
        if sets.confirm(rival):
            members = rival
            break
    rows = np.sort(members.cpu().numpy()).astype(np.int64)
    lower = min(lower, len(rows))  # a set that the model confirms refutes a higher bound
    return MinimalSet(rows, lower, len(rows), *problem, sets.tried, max(1, count), every)
