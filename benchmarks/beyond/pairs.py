"""Interactions against what is known: partners of Adjacent Pairs, the sign in Context Flip, and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

import xmil
from benchmarks.beyond.digits import Trained, stored, trained
from xmil.bench import FLIPPING, PAIRS, TASKS, BagSet
from xmil.network import Network
from xmil.subsets import open_subsets

Floats = npt.NDArray[np.float64]


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """AP of the true pairs by repetition: one-hot digits, bags of 12, every coalition run."""
    del data, models
    repetitions, bags, settings = (2, 2, {"epochs": 10, "bags": 200}) if quick else (10, 5, {"epochs": 60})
    several = trained("adjacent_pairs", "transmil", data="onehot", n=12, repetitions=repetitions, **settings)
    return _partners(several, bags)


def partners(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """The same on features: bags of 30 cut to 12, every coalition run; then whole bags, sampled."""
    if models is None:
        raise SystemExit("partners needs --models, a folder of `xmil bench --suite paper`")
    repetitions, bags, draws = (2, 1, 8) if quick else (10, 3, 16)
    several = [*stored("adjacent_pairs", "transmil", folder=models, data=data, repetitions=repetitions)]
    found = {"cut to 12": _partners([_cut(one, 12) for one in several], bags)}
    print(found, flush=True)
    return {**found, "of 30": _partners(several, bags, draws=draws)}


def _cut(one: Trained, n: int) -> Trained:
    """The first instances of each bag, with the label that they have."""
    codes = one.test.codes[:, :n]
    labels = TASKS["adjacent_pairs"].label(codes).astype(np.int64)
    return replace(one, x=one.x[:, :n], test=BagSet(one.test.rows[:, :n], codes, labels))


def signs(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """Context Flip on one-hot digits, bags of 12; and hand-made sums."""
    del data, models
    repetitions, settings = (1, {"epochs": 10, "bags": 200}) if quick else (5, {"epochs": 120, "bags": 1000})
    several = trained("context_flip", "transmil", data="onehot", n=12, repetitions=repetitions, **settings)
    return {"sums": _sums(5 if quick else 20), "context flip": _signs(several, 2 if quick else 12)}


def _partners(several: Iterable[Trained], bags: int, **options: Any) -> dict[str, Any]:
    by_repetition: dict[str, list[float]] = {}
    aurocs = []
    for one in several:
        aurocs.append(one.auroc)
        scores = [precisions(one.model, x, digits, **options) for x, digits in positives(one, bags)]
        for name in scores[0]:
            by_repetition.setdefault(name, []).append(float(np.mean([s[name] for s in scores])))
        print(one.repetition, {name: round(v[-1], 3) for name, v in by_repetition.items()}, flush=True)
    first, product = by_repetition["shapley interaction"], by_repetition["product of lrp"]
    return {
        "auroc": float(np.mean(aurocs)),
        **{name: [float(np.mean(v)), float(np.std(v, ddof=1))] for name, v in by_repetition.items()},
        "p against the product": float(stats.ttest_rel(first, product).pvalue),
    }


def positives(one: Trained, bags: int) -> Iterator[tuple[Tensor, Any]]:
    """Test bags that the model rightly calls positive and that hold pairs that are no partners, too."""
    with torch.no_grad():
        right = (one.model(one.x).argmax(dim=1).numpy() == 1) & (one.test.labels == 1)
    for i in np.flatnonzero(right)[:bags]:
        yield one.x[i], one.test.codes[i]


def precisions(model: nn.Module, x: Tensor, digits: Any, **options: Any) -> dict[str, float]:
    """Average precision of the true partners under each way to score a pair."""
    n = len(x)
    found = xmil.interactions(model, x, target=1, top=n, precision=None, **options)
    lrp = xmil.explain(model, x, method="lrp", target=1).scores
    i, j = found.pairs.T
    truth = is_partner(digits[i], digits[j])
    ways = {
        "shapley interaction": found.values,
        "pair alone": found.alone,
        "product of lrp": lrp[i] * lrp[j],
        "leave two out": leave_two_out(model, x, found.pairs),
        "random": np.random.default_rng(0).random(len(found)),
    }
    return {name: float(average_precision_score(truth, values)) for name, values in ways.items()}


def is_partner(a: Any, b: Any) -> npt.NDArray[np.bool_]:
    low, high = np.minimum(a, b), np.maximum(a, b)
    return np.asarray([(pair in PAIRS) for pair in zip(low.tolist(), high.tolist(), strict=True)])


@torch.no_grad()
def leave_two_out(model: nn.Module, x: Tensor, pairs: Any) -> Floats:
    """v(all) - v(without i) - v(without j) + v(without both)."""
    game = open_subsets(Network(model), x.unsqueeze(0))
    full = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
    one = game.run(full ^ torch.eye(len(x), dtype=torch.bool, device=x.device))[:, 1]
    rows = torch.from_numpy(pairs.copy()).to(x.device)
    masks = full.repeat(len(pairs), 1).scatter_(1, rows, False)
    two = game.run(masks)[:, 1]
    i, j = rows.T
    return np.asarray((game.full[0, 1] - one[i] - one[j] + two).cpu().numpy())


def _signs(several: Iterable[Trained], bags: int) -> dict[str, Any]:
    """Bags with an 8 and a 9: their pairs must speak for class 1 together."""
    right, aurocs = [], []
    for one in several:
        aurocs.append(one.auroc)
        both = np.all([(one.test.codes == digit).any(axis=1) for digit in FLIPPING], axis=0)
        for i in np.flatnonzero(both)[:bags]:
            found = xmil.interactions(one.model, one.x[i], target=1, top=12)
            right.append(flips_rightly(found, one.test.codes[i]))
    return {"auroc": float(np.mean(aurocs)), "bags": len(right), "sign right": float(np.mean(right))}


def flips_rightly(found: Any, codes: Any) -> bool:
    """Whether the pairs of an 8 and a 9 speak for class 1 together, in the mean."""
    digits = np.sort(codes[found.pairs], axis=1)
    return bool(found.values[(digits == FLIPPING).all(axis=1)].mean() > 0)


class SumPool(nn.Module):
    """Logits that are sums over instances: no interaction by construction."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(8, 16, generator=rng))
        self.b = nn.Parameter(torch.randn(16, 2, generator=rng))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.a).tanh() @ self.b).sum(dim=1)


def _sums(models: int) -> dict[str, float]:
    """The share of pairs within three standard errors of none, enumerated and sampled."""
    kinds: dict[str, Callable[[int], Any]] = {
        "enumerated, 10": lambda seed: _of_sum(seed, 10),
        "sampled, 20": lambda seed: _of_sum(seed, 20, precision=None, draws=32),
    }
    return {
        name: float(np.mean(np.concatenate([~found(seed).sure for seed in range(models)])))
        for name, found in kinds.items()
    }


def _of_sum(seed: int, n: int, **options: Any) -> Any:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1000 + seed))
    return xmil.interactions(SumPool(seed), x, target=1, **options)
