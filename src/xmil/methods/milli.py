"""MILLI: a weighted linear model over sampled coalitions of instances.

Early et al., "Model Agnostic Interpretability for Multiple Instance Learning", ICLR 2022, arXiv:2201.11701.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.errors import bad_parameter
from xmil.methods.network import Network
from xmil.methods.outputs import Question
from xmil.methods.perturbation import OUTPUTS, single_logits
from xmil.methods.registry import Attribution, Attributions, register_method, seed_words

Floats = npt.NDArray[np.float64]


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
    """Coefficients of the output on which instances are in the bag.

    Instances are ranked by their score alone; `alpha` is the chance of the first to be in a coalition and
    `beta` how fast the chances level out with the rank. `samples` is 2 n + 200 unless given.
    """
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise bad_parameter("alpha", "milli", "a float in the range [0, 1]", alpha)
    n = x.shape[1]
    samples = 2 * n + 200 if samples is None else samples
    if not isinstance(samples, int) or samples < 1:
        raise bad_parameter("samples", "milli", "an int in the range [1, inf)", samples)
    h = network.embed(x)
    logits, alone = network.aggregate(h), single_logits(network, h)
    found = []
    for output in question.outputs(logits):
        ranks = output(alone).argsort(descending=True, stable=True).argsort().cpu().numpy()
        chances = inclusion_chances(n, alpha=alpha, beta=beta)[ranks]
        coalitions = _draw(chances, samples, seed_words(seed, "milli"))
        values = output(_coalition_logits(network, h, coalitions)).double().cpu().numpy()
        weights = coalitions @ chances / coalitions.sum(axis=1)
        scores = torch.from_numpy(_fit(coalitions, values, weights)).to(x)
        found.append(Attribution(output, float(output(logits)), scores))
    return Attributions(logits, found)


def inclusion_chances(n: int, *, alpha: float, beta: float) -> Floats:
    """The chance of each rank 0..n-1 to be in a coalition.

    >>> inclusion_chances(3, alpha=0.2, beta=0.0).round(2).tolist()
    [0.2, 0.5, 0.8]
    """
    last = max(1, n - 1)
    rank = np.arange(n)
    slope = -beta if alpha > 0.5 else beta
    if slope >= 0:
        return np.asarray((2 * alpha - 1) * (1 - rank / last) * np.exp(-slope * rank) + 1 - alpha)
    return np.asarray((1 - 2 * alpha) * (rank / last) * np.exp(slope * (last - rank)) + alpha)


def _draw(chances: Floats, samples: int, seed: list[int]) -> npt.NDArray[np.bool_]:
    """Coalitions (samples, n), none of them empty."""
    rng = np.random.default_rng(seed)
    coalitions = rng.random((samples, len(chances))) < chances
    empty = ~coalitions.any(axis=1)
    coalitions[empty, rng.integers(len(chances), size=int(empty.sum()))] = True
    return coalitions


def _coalition_logits(network: Network, h: Tensor, coalitions: npt.NDArray[np.bool_]) -> Tensor:
    masks = torch.from_numpy(coalitions).to(h.device)
    return torch.cat([network.subsets(h, masks[batch]) for batch in network.batches(len(masks), h.shape[1])])


def _fit(coalitions: npt.NDArray[np.bool_], values: Floats, weights: Floats) -> Floats:
    """Weighted least squares with an intercept; the smallest coefficients where they are not determined."""
    root = np.sqrt(np.maximum(weights, 0.0))[:, None]
    design = np.hstack([coalitions.astype(float), np.ones((len(coalitions), 1))])
    solution = np.linalg.lstsq(design * root, values * root[:, 0], rcond=None)[0]
    return np.asarray(solution[:-1], dtype=np.float64)
