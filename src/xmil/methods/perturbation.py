"""Perturbation methods: single instances, and bags without one instance.

Early et al., "Model Agnostic Interpretability for Multiple Instance Learning", ICLR 2022, arXiv:2201.11701.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import Attribution, Attributions, register_method
from xmil.methods.removal import logits_without_each

OUTPUTS = ("probability", "logit", "log_odds", "contrastive")


@register_method("single", signed=False, cost="n passes over one instance", outputs=OUTPUTS)
@torch.no_grad()
def single(network: Network, x: Tensor, question: Question) -> Attributions:
    """f({x_k}): the output of each instance alone."""
    logits, h = _embedded(network, x)
    alone = single_logits(network, h)
    return Attributions(logits, [_attribution(o, logits, o(alone)) for o in question.outputs(logits)])


@register_method("one_removed", signed=True, cost="n; about 2 for pooling models", outputs=OUTPUTS)
@torch.no_grad()
def one_removed(network: Network, x: Tensor, question: Question) -> Attributions:
    """f(X) - f(X without x_k)."""
    logits, h = _embedded(network, x)
    without = logits_without_each(network, x, h)
    return Attributions(
        logits, [_attribution(o, logits, o(logits) - o(without)) for o in question.outputs(logits)]
    )


@register_method("combined", signed=False, cost="as single and one_removed together", outputs=OUTPUTS)
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
    """Logits (n, c) of the n bags of one embedded instance of a bag (1, n, e)."""
    return network.sub(h, torch.arange(h.shape[1], device=h.device).unsqueeze(1))


def _embedded(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (1, c) of a bag, and its embedded instances (1, n, e), computed once."""
    h = network.embed(x)
    return network.aggregate(h), h


def _attribution(output: Output, logits: Tensor, scores: Tensor) -> Attribution:
    return Attribution(output, float(output(logits)), scores)
