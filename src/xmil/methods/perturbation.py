"""Methods that compare outputs of the model: with and without an instance, instances alone, sampled sub-bags.

`single`, `one_removed`, `combined` and `milli`: Early et al., "Model Agnostic Interpretability for Multiple
Instance Learning", ICLR 2022, arXiv:2201.11701. Also the instance logits of additive models, and random
scores, which a method must beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.bag import FloatArray
from xmil.core.errors import bad_parameter, check_count
from xmil.core.explanation import Audit
from xmil.methods.method import (
    Attribution,
    Attributions,
    Output,
    Question,
    attributions,
    describe_background,
    find_background,
    register_method,
    seed_words,
    stored_background,
)
from xmil.methods.shapley import sure_signs
from xmil.network import Network, fewest_instances
from xmil.subsets import open_subsets

OUTPUTS = ("probability", "logit", "log_odds", "contrastive")
COMPANY, DRAWS = 3, 8  # chosen on digits: docs/studies/choice.md


@torch.no_grad()
def single_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    if len(x) == 1:
        alone = open_subsets(network, x).singles().to(x.dtype)
    else:
        alone = network.aggregate(network.embed(x).flatten(0, 1).unsqueeze(1))
    return torch.stack([output(alone).view(x.shape[:2]) for output in outputs], dim=1)


@torch.no_grad()
def removed_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    if len(x) == 1:
        bag = open_subsets(network, x)
        logits, without = bag.logits, bag.without_each().to(x.dtype)
    else:
        h = network.embed(x)
        rests = [torch.cat([h[:, :k], h[:, k + 1 :]], dim=1) for k in range(h.shape[1])]
        if h.shape[1] == 1:
            rests = [network.embed(torch.zeros_like(x))]
        logits = network.aggregate(h)
        without = torch.stack([network.aggregate(rest) for rest in rests], dim=1).flatten(0, 1)
    return torch.stack([o(logits).unsqueeze(1) - o(without).view(x.shape[:2]) for o in outputs], dim=1)


@register_method("single", signed=False, cost="n passes over one patch", outputs=OUTPUTS, batch=single_batch)
@torch.no_grad()
def single(network: Network, x: Tensor, question: Question) -> Attributions:
    """f({x_k}): the output of each instance alone."""
    bag = open_subsets(network, x)
    alone = bag.singles().to(x.dtype)
    return attributions(bag.logits, question, lambda o: o(alone))


@register_method(
    "one_removed", signed=True, cost="n; about 2 for pooling models", outputs=OUTPUTS, batch=removed_batch
)
@torch.no_grad()
def one_removed(network: Network, x: Tensor, question: Question) -> Attributions:
    """f(X) - f(X without x_k)."""
    bag = open_subsets(network, x)
    without = bag.without_each().to(x.dtype)
    return attributions(bag.logits, question, lambda o: o(bag.logits) - o(without))


@torch.no_grad()
def added_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags, each with the company it would have alone."""
    patches = None if (ordinary := stored_background(network)) is None else ordinary.patches
    rng = np.random.default_rng(seed_words(0, "one_added"))
    decks, guests = draw_companies(rng, x.shape[1], patches, company=COMPANY, draws=DRAWS)
    h = network.embed(x)
    if patches is not None:
        others = network.embed(torch.from_numpy(patches[guests]).to(x)[None])
        h = torch.cat([h, others.expand(len(h), -1, -1)], dim=1)

    def run(parts: npt.NDArray[np.int64]) -> list[Tensor]:
        """Run the parts (n, m) of every bag, equal parts once; return each output (b, n)."""
        if not parts.size:  # a bag of one instance without it
            return [output(network(torch.zeros_like(x))).view(-1, 1) for output in outputs]
        rows, back = np.unique(np.sort(parts, axis=1), axis=0, return_inverse=True)
        logits = network.aggregate(h[:, torch.from_numpy(rows).to(x.device)].flatten(0, 1))
        return [output(logits).view(len(h), -1)[:, back.ravel()] for output in outputs]

    total = torch.zeros(len(x), len(outputs), x.shape[1], device=x.device)
    for deck in decks:
        company, spare = deck[: len(deck) - (patches is None)], deck[-1]
        joined = [[*company, spare if k in company else k] for k in range(x.shape[1])]
        apart = [[i for i in part if i != k] if k in company else part[:-1] for k, part in enumerate(joined)]
        pairs = zip(run(np.array(joined)), run(np.array(apart)), strict=True)
        total += torch.stack([together - without for together, without in pairs], dim=1)
    return total / len(decks)


def draw_companies(
    rng: np.random.Generator, n: int, patches: FloatArray | None, *, company: int, draws: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Draw the rows (draws, company) of each company, and the background's patches among them, in order.

    Without a background they are instances of the bag, and the last one is a spare that replaces an instance
    of the company when that is scored. Patches of the background get the rows after the n instances.
    """
    most = n - 1 if patches is None else len(patches)
    spare, draws = min(company, most), draws if company < most else 1  # there is only one company
    size = n if patches is None else most
    decks = np.stack([rng.permutation(size)[: spare + (patches is None)] for _ in range(draws)])
    if patches is None:
        return decks, np.zeros(0, dtype=np.int64)
    return n + np.arange(decks.size).reshape(decks.shape), decks.ravel()


@register_method(
    "one_added",
    signed=True,
    cost="8 n passes over 4 patches; about 2 for pooling models",
    outputs=("log_odds", "logit", "contrastive", "probability"),
    batch=added_batch,
)
@torch.no_grad()
def one_added(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    company: int | None = None,
    draws: int = DRAWS,
    background: Any = None,
    seed: int | Sequence[int] = 0,
) -> Attributions:
    """f(company and x_k) - f(company): what an instance adds to a few ordinary ones, the mean over draws.

    The company consists of `company` patches of the `background` (a Bag, an array (k, d), a Background or a
    path), by default the model's own; if it has none, or with "bag", of other instances of the bag. Instances
    of a bag bring their coordinates and other companions; patches of a background take those of instances
    drawn from the bag. `e.params["company_from"]` names the source. The default size is three, or as many
    as the model needs.
    """
    company = fewest_instances(network, x, COMPANY) if company is None else company
    for name, value in {"company": company, "draws": draws}.items():
        check_count(name, value, owner="one_added")
    ordinary = find_background(background, network=network, x=x, method="one_added")
    text = describe_background(ordinary)
    params = {"company": company, "draws": draws, "company_from": text.split()[0], "background": text}
    fields: dict[str, Any] = {"params": params}
    patches = None if ordinary is None else ordinary.patches
    n, rows = x.shape[1], torch.arange(x.shape[1], device=x.device)
    rng = np.random.default_rng(seed_words(seed, "one_added"))
    decks, guests = draw_companies(rng, n, patches, company=company, draws=draws)
    draws = len(decks)
    if patches is None:
        parts, logits = (bag := open_subsets(network, x)), bag.logits
    else:
        places = torch.from_numpy(rng.integers(n, size=len(guests))).to(x.device)
        together = torch.cat([x, torch.from_numpy(patches[guests]).to(x)[None]], dim=1)
        parts, logits = open_subsets(network.part(torch.cat([rows, places])), together), network(x)
    at = torch.from_numpy(decks).to(x.device)
    pairs = [parts.beside(deck[:-1] if patches is None else deck, int(deck[-1]), rows) for deck in at]
    of = []
    for output in question.outputs(logits):
        gains = torch.stack([output(together) - output(apart) for together, apart in pairs])  # (draws, n)
        scores = gains.mean(dim=0)
        if draws > 1:
            stderr = gains.std(dim=0) / draws**0.5
            fields |= {"stderr": stderr, "stable": sure_signs(scores, stderr, draws)}
        of.append(Attribution(output, float(output(logits)), scores.to(x.dtype), **fields))
    return Attributions(logits, of)


@register_method(
    "combined",
    signed=False,
    cost="as single and one_removed together",
    outputs=OUTPUTS,
    batch=lambda *bags: 0.5 * (single_batch(*bags) + removed_batch(*bags)),
)
@torch.no_grad()
def combined(network: Network, x: Tensor, question: Question) -> Attributions:
    """The mean of `single` and `one_removed`."""
    bag = open_subsets(network, x)
    alone, without = bag.singles().to(x.dtype), bag.without_each().to(x.dtype)
    return attributions(bag.logits, question, lambda o: 0.5 * (o(alone) + o(bag.logits) - o(without)))


@register_method("milli", signed=True, cost="one per sample, and O(samples n^2) for the fit", outputs=OUTPUTS)
@torch.no_grad()
def milli(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    samples: int | None = None,
    alpha: float = 0.05,
    beta: float = 0.01,
    seed: int = 0,
) -> Attributions:
    """MILLI: coefficients of the output on which instances are in the bag, from sampled sub-bags.

    Instances are ranked by their output alone; `alpha` sets the chance of each to be in a sub-bag and `beta`
    how fast the chances level out with the rank, see `inclusion_chances`. `samples` is 2 n + 200 by default.
    """
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "milli", "a float in the range [0, 1]", alpha)
    n = x.shape[1]
    samples = 2 * n + 200 if samples is None else samples
    check_count("samples", samples, owner="milli")
    bag = open_subsets(network, x)
    alone = bag.singles().to(x.dtype)

    def score(output: Output) -> Tensor:
        ranks = output(alone).argsort(descending=True, stable=True).argsort().cpu().numpy()
        chances = inclusion_chances(n, alpha=alpha, beta=beta)[ranks]
        rng = np.random.default_rng(seed_words(seed, "milli"))
        members = rng.random((samples, n)) < chances
        empty = ~members.any(axis=1)
        members[empty, rng.integers(n, size=int(empty.sum()))] = True
        values = output(bag.run(torch.from_numpy(members).to(x.device))).cpu().numpy()
        weights = members @ chances / members.sum(axis=1)
        # weighted least squares with an intercept; lstsq takes the smallest of several solutions
        root = np.sqrt(np.maximum(weights, 0.0))[:, None]
        design = np.hstack([members.astype(float), np.ones((samples, 1))])
        solution = np.linalg.lstsq(design * root, values * root[:, 0], rcond=None)[0]
        return torch.from_numpy(solution[:-1].astype(np.float64)).to(x)

    return attributions(bag.logits, question, score)


def inclusion_chances(n: int, *, alpha: float, beta: float) -> npt.NDArray[np.float64]:
    """The chance that each rank 0..n-1 is in a sub-bag.

    >>> inclusion_chances(3, alpha=0.2, beta=0.0).round(2).tolist()
    [0.2, 0.5, 0.8]
    """
    last = max(1, n - 1)
    rank = np.arange(n)
    slope = -beta if alpha > 0.5 else beta
    if slope >= 0:
        return np.asarray((2 * alpha - 1) * (1 - rank / last) * np.exp(-slope * rank) + 1 - alpha)
    return np.asarray((1 - 2 * alpha) * (rank / last) * np.exp(slope * (last - rank)) + alpha)


@torch.no_grad()
def logits_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    parts, logits = _parts(network, x)
    return torch.stack([_shared(parts, logits, output)[0] for output in outputs], dim=1)


@register_method(
    "logits",
    signed=True,
    conserves=True,
    cost="1",
    outputs=("logit", "contrastive"),
    supports=lambda network: (
        None
        if getattr(network.model, "pooling", None) == "additive"
        else "its output is not a sum of patch logits"
    ),
    batch=logits_batch,
)
@torch.no_grad()
def instance_logits(network: Network, x: Tensor, question: Question) -> Attributions:
    """What each instance adds to the output of an additive model."""
    parts, logits = _parts(network, x)
    shared = []
    for output in question.outputs(logits):
        (scores,), value, slopes = _shared(parts, logits, output)
        rest = float(value.double() - (slopes * logits).double().sum())  # a reference, or the risk at zero
        audit = Audit.close(output=float(value), instances=float(scores.double().sum()), bias=rest)
        shared.append(Attribution(output, float(value), scores, audit))
    return Attributions(logits, shared)


def _parts(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what each instance adds to each output (b, n, c), and the outputs (b, c)."""
    model = network.model
    assert model is not None  # noqa: S101  # `supports` refuses others
    return model.instance_logits(model.embed(x)), network(x)


def _shared(parts: Tensor, logits: Tensor, output: Output) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores (b, n) of an output, its values (b,), and its slope per logit (b, c)."""
    with torch.enable_grad():
        leaf = logits.clone().requires_grad_(True)
        value = output.to_share(leaf)
        (slopes,) = torch.autograd.grad(value.sum(), leaf)
    return (parts @ slopes.unsqueeze(-1)).squeeze(-1), value, slopes


@register_method("random", signed=True, cost="1")
@torch.no_grad()
def random(network: Network, x: Tensor, question: Question, *, seed: int | Sequence[int] = 0) -> Attributions:
    """Standard normal scores: what a method must beat."""

    def score(output: Output) -> Tensor:
        rng = np.random.default_rng([*seed_words(seed, "random"), int(output.target)])
        return torch.from_numpy(rng.standard_normal(x.shape[1])).to(x)

    return attributions(network(x), question, score)
