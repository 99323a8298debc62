"""Scores averaged over random sub-bags: how much each depends on the company an instance keeps.

Each of `contexts` sub-bags keeps the share `keep` of the instances and is explained by itself, in the bag's
order. An instance's score is the mean over the sub-bags that hold it; its standard error is their standard
deviation over the root of their number. Sub-bags are dealt like hands from shuffled decks: with `keep=0.5`
each two are complementary halves, and with any share the numbers of sub-bags that hold two instances differ
by one at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import InputError, bad_parameter
from xmil.core.explanation import Audit
from xmil.methods.network import Network
from xmil.methods.outputs import Question
from xmil.methods.registry import CONTEXTS, Attribution, Attributions, Method, seed_words
from xmil.methods.shapley import sure_signs

FEWEST = 2  # sub-bags that must hold an instance: one has no standard error
SKEWED, OFTEN = 1.5, 0.1  # the skewness that few normal samples have, and the share of patches that may
Rows = npt.NDArray[np.int64]


def run_method(
    method: Method, network: Network, x: Tensor, question: Question, params: Mapping[str, Any]
) -> Attributions:
    """The method on the bag, or the mean over its sub-bags where contexts are asked for."""
    own = {key: value for key, value in params.items() if not method.contexts or key not in CONTEXTS}
    asked = {**CONTEXTS, **{key: value for key, value in params.items() if key not in own}}
    if not method.contexts or asked["contexts"] is None:
        return method.run(network, x, question, **own)
    return _Contexts(method, network, x, own).run(question, **asked)


def deal(n: int, *, contexts: int, keep: float, seed: int | Sequence[int] = 0) -> list[Rows]:
    """The instances of each sub-bag, ascending: ceil(keep n) of n, dealt from shuffled decks.

    >>> [rows.tolist() for rows in deal(4, contexts=4, keep=0.5)]
    [[0, 2], [1, 3], [2, 3], [0, 1]]
    """
    size = _checked(n, contexts, keep)
    rng = np.random.default_rng(seed_words(seed, "contexts"))
    deck: list[int] = []
    hands = []
    for _ in range(contexts):
        hand = deck[:size]
        deck = deck[size:]
        if len(hand) < size:  # a new deck, of which the hand takes the first that it does not hold
            fresh = rng.permutation(n).tolist()
            held = set(hand)
            taken = [i for i in fresh if i not in held][: size - len(hand)]
            gone = set(taken)
            hand, deck = hand + taken, [i for i in fresh if i not in gone]
        hands.append(np.sort(np.array(hand, dtype=np.int64)))
    return hands


class _Contexts:
    """A method on the sub-bags of one bag (1, n, d)."""

    def __init__(self, method: Method, network: Network, x: Tensor, params: Mapping[str, Any]) -> None:
        self.method, self.network, self.x, self.params = method, network, x, params
        if params.get("feature_level"):
            raise InputError("Contexts average scores of instances; leave out feature_level=True.")

    def run(self, question: Question, *, contexts: int, keep: float, seed: Any) -> Attributions:
        with torch.no_grad():
            logits = self.network(self.x)
        outputs = question.outputs(logits)
        fixed = replace(question, targets=[output.target for output in outputs])
        hands = deal(self.x.shape[1], contexts=contexts, keep=keep, seed=seed)
        found = [self._sub_bag(rows, fixed) for rows in hands]
        each = [[parts[k] for parts in found] for k in range(len(outputs))]
        means = [self._mean(parts, hands) for parts in each]
        said = _said(hands, self.x.shape[1], audited=means[0].audit is not None)
        return Attributions(
            logits,
            [
                replace(mean, value=float(output(logits)), output=output, warnings=(said, *mean.warnings))
                for mean, output in zip(means, outputs, strict=True)
            ],
        )

    def _sub_bag(self, rows: Rows, question: Question) -> Sequence[Attribution]:
        at = torch.from_numpy(rows).to(self.x.device)
        return self.method.run(self.network.part(at), self.x[:, at], question, **self.params).of

    def _mean(self, parts: Sequence[Attribution], hands: Sequence[Rows]) -> Attribution:
        """Mean and standard error over the sub-bags that hold each instance."""
        n, device = self.x.shape[1], self.x.device
        counts, total, squares = (torch.zeros(n, dtype=torch.float64, device=device) for _ in range(3))
        rows = torch.from_numpy(np.concatenate(hands)).to(device)
        scores = torch.cat([part.scores.double() for part in parts])
        counts.index_add_(0, rows, torch.ones_like(scores))
        mean = total.index_add_(0, rows, scores) / counts
        squares.index_add_(0, rows, (scores - mean[rows]).square())
        stderr = (squares / (counts - 1) / counts).sqrt()
        cubes = torch.zeros_like(squares).index_add_(0, rows, (scores - mean[rows]) ** 3)
        said = tuple(dict.fromkeys(line for part in parts for line in part.warnings))
        return replace(
            parts[0],
            scores=mean.to(self.x.dtype),
            audit=mean_audit([part.audit for part in parts]),
            stderr=stderr,
            stable=sure_signs(mean, stderr, counts.long()),
            warnings=said + _skewed(squares / counts, cubes / counts),
        )


def mean_audit(audits: Sequence[Audit | None]) -> Audit | None:
    """Each share's mean; None where the method keeps no account."""
    kept = [audit.as_dict() for audit in audits if audit is not None]
    if len(kept) < len(audits):
        return None
    return Audit(**{name: float(np.mean([shares[name] for shares in kept])) for name in kept[0]})


def _skewed(squares: Tensor, cubes: Tensor) -> tuple[str, ...]:
    """The sentence on scores that a few sub-bags decide: their standard errors are rough."""
    skewness = cubes.abs() / squares.clamp(min=1e-30) ** 1.5
    share = float((skewness > SKEWED).double().mean())
    if share <= OFTEN:
        return ()
    return (
        f"The scores of {share:.0%} of the patches are skewed over the sub-bags, so that their standard "
        "errors are too small more often than they should be; interval() allows for it, more contexts help.",
    )


def _said(hands: Sequence[Rows], n: int, *, audited: bool) -> str:
    what, size = "scores and the audit" if audited else "scores", len(hands[0])
    said = f"The {what} are means over {len(hands)} sub-bags of {size} instances"
    if size == n:
        return f"{said}."
    total = f", so their sum is about {n / size:.3g} times audit.instances" if audited else ""
    return (
        f"{said}; a score is the mean over those that hold its patch{total}: compare the order of these "
        "scores with that of plain ones, not their size."
    )


def _checked(n: int, contexts: Any, keep: Any) -> int:
    """How many instances a sub-bag keeps, once the parameters are sound."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise bad_parameter("keep", "contexts", "a float in the range (0, 1]", keep)
    size = max(1, ceil(keep * n - 1e-9))  # 0.1 * 30 is a little above 3
    fewest = ceil(FEWEST * n / size)
    if isinstance(contexts, bool) or not isinstance(contexts, int) or contexts < fewest:
        need = f"an int in the range [{fewest}, inf), so that each of {n} instances is in {FEWEST} sub-bags"
        raise bad_parameter("contexts", "explain", need, contexts)
    return size
