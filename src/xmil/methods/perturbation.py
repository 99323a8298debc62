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
    logits, alone = network(x), single_logits(network, x)
    return Attributions(logits, [_attribution(o, logits, o(alone)) for o in question.outputs(logits)])


@register_method("one_removed", signed=True, cost="n; about 2 for pooling models", outputs=OUTPUTS)
@torch.no_grad()
def one_removed(network: Network, x: Tensor, question: Question) -> Attributions:
    """f(X) - f(X without x_k)."""
    logits, without = network(x), logits_without_each(network, x)
    return Attributions(
        logits, [_attribution(o, logits, o(logits) - o(without)) for o in question.outputs(logits)]
    )


@register_method("combined", signed=False, cost="as single and one_removed together", outputs=OUTPUTS)
@torch.no_grad()
def combined(network: Network, x: Tensor, question: Question) -> Attributions:
    """The mean of `single` and `one_removed`."""
    logits, alone, without = network(x), single_logits(network, x), logits_without_each(network, x)
    return Attributions(
        logits,
        [
            _attribution(o, logits, 0.5 * (o(alone) + o(logits) - o(without)))
            for o in question.outputs(logits)
        ],
    )


def single_logits(network: Network, x: Tensor) -> Tensor:
    """Logits (n, c) of the n bags of one instance."""
    h = network.embed(x)[0]
    return network.aggregate_batches(len(h), 1, lambda batch: h[batch].unsqueeze(1))


def _attribution(output: Output, logits: Tensor, scores: Tensor) -> Attribution:
    return Attribution(output, float(output(logits)), scores)
