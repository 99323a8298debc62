"""Perturbation methods: single instances, and bags without one instance.

Early et al., "Model Agnostic Interpretability for Multiple Instance Learning", ICLR 2022, arXiv:2201.11701.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import Attribution, Attributions, register_method
from xmil.methods.removal import logits_without_each

OUTPUTS = ("probability", "logit", "log_odds", "contrastive")


@torch.no_grad()
def single_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags."""
    alone = single_logits(network, network.embed(x))
    return torch.stack([output(alone).view(x.shape[:2]) for output in outputs], dim=1)


@torch.no_grad()
def removed_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags."""
    logits, h = _embedded(network, x)
    rest = logits_without_each(network, x, h)
    return torch.stack([(o(logits).unsqueeze(1) - o(rest).view(x.shape[:2])) for o in outputs], dim=1)


@torch.no_grad()
def combined_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags."""
    return 0.5 * (single_batch(network, x, outputs) + removed_batch(network, x, outputs))


@register_method(
    "single",
    signed=False,
    cost="n passes over one instance",
    outputs=OUTPUTS,
    batch=torch.no_grad()(single_batch),
)
@torch.no_grad()
def single(network: Network, x: Tensor, question: Question) -> Attributions:
    """f({x_k}): the output of each instance alone."""
    logits, h = _embedded(network, x)
    alone = single_logits(network, h)
    return Attributions(logits, [_attribution(o, logits, o(alone)) for o in question.outputs(logits)])


@register_method(
    "one_removed",
    signed=True,
    cost="n; about 2 for pooling models",
    outputs=OUTPUTS,
    batch=removed_batch,
)
@torch.no_grad()
def one_removed(network: Network, x: Tensor, question: Question) -> Attributions:
    """f(X) - f(X without x_k)."""
    logits, h = _embedded(network, x)
    without = logits_without_each(network, x, h)
    return Attributions(
        logits, [_attribution(o, logits, o(logits) - o(without)) for o in question.outputs(logits)]
    )


@register_method(
    "combined",
    signed=False,
    cost="as single and one_removed together",
    outputs=OUTPUTS,
    batch=combined_batch,
)
@torch.no_grad()
def combined(network: Network, x: Tensor, question: Question) -> Attributions:
    """The mean of `single` and `one_removed`."""
    logits, h = _embedded(network, x)
    alone, without = single_logits(network, h), logits_without_each(network, x, h)
    return Attributions(
        logits,
        [
            _attribution(o, logits, 0.5 * (o(alone) + o(logits) - o(without)))
            for o in question.outputs(logits)
        ],
    )


def single_logits(network: Network, h: Tensor) -> Tensor:
    """Logits (b n, c) of the bags of one embedded instance each, of bags (b, n, e)."""
    if len(h) > 1:
        return network.aggregate(h.flatten(0, 1).unsqueeze(1))
    return network.sub(h, torch.arange(h.shape[1], device=h.device).unsqueeze(1))


def _embedded(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (1, c) of a bag, and its embedded instances (1, n, e), computed once."""
    h = network.embed(x)
    return network.aggregate(h), h


def _attribution(output: Output, logits: Tensor, scores: Tensor) -> Attribution:
    return Attribution(output, float(output(logits)), scores)
