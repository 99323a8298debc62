"""Gradient methods: gradient times input, squared gradients, integrated gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.core.explanation import Audit
from xmil.methods.baseline import described, find_baseline
from xmil.methods.network import Network
from xmil.methods.outputs import Question
from xmil.methods.registry import Attribution, Attributions, register_method

INTEGRATIONS = ("gausslegendre", "riemann_left", "riemann_right", "riemann_middle", "riemann_trapezoid")


@register_method("gxi", signed=True, cost="about 3", contexts=True)
def gradient_times_input(network: Network, x: Tensor, question: Question) -> Attributions:
    """Sum over features of gradient * input."""
    return _from_gradients(network, x, question, lambda gradient: (gradient * x).sum(dim=-1))


@register_method("grad2", signed=False, cost="about 3")
def squared_gradient(network: Network, x: Tensor, question: Question) -> Attributions:
    """Sum over features of the squared gradient."""
    return _from_gradients(network, x, question, lambda gradient: gradient.square().sum(dim=-1))


# no "contrastive": its weights are constants of one bag, and a path has many
@register_method(
    "ig",
    signed=True,
    conserves=True,
    cost="3 x steps",
    outputs=("logit", "log_odds", "probability"),
    contexts=True,
)
def integrated_gradients(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    steps: int = 50,
    integration: str = "gausslegendre",
    baseline: Any = None,
    strength: float | None = None,
) -> Attributions:
    """Integrated gradients from a bag of zeros (Sundararajan et al. 2017), by Captum.

    With a `baseline` the path starts at a bag of such instances, times the `strength`. In the audit the bias
    is the output at the start and `other` the convergence gap.
    """
    from captum.attr import IntegratedGradients

    if not isinstance(steps, int) or steps < 1:
        raise bad_parameter("steps", "ig", "an int in the range [1, inf)", steps)
    if integration not in INTEGRATIONS:
        raise bad_parameter("integration", "ig", f"one of {list(INTEGRATIONS)}", integration)
    centre = find_baseline(baseline, strength, network=network, x=x, method="ig")
    start = torch.zeros_like(x) if centre is None else centre.shift.expand_as(x).contiguous()
    with torch.enable_grad():
        probe = network(x.detach().requires_grad_(True))
    _check_gradient(network, probe)
    logits = probe.detach()
    del probe  # and its graph
    with torch.no_grad():
        at_start = network(start)
    found = []
    for output in question.outputs(logits):
        captum = IntegratedGradients(lambda bags, f=output: f(network(bags)))
        # one bag of the path at a time: the memory of a gradient, whatever the steps
        parts = captum.attribute(x, start, n_steps=steps, method=integration, internal_batch_size=1)
        scores = parts.sum(dim=-1)[0].to(x.dtype)
        value, constant = float(output(logits)), float(output(at_start))
        audit = Audit.close(output=value, instances=float(scores.double().sum()), bias=constant)
        found.append(Attribution(output, value, scores, audit, **described(centre)))
    return Attributions(logits, found)


def _from_gradients(
    network: Network, x: Tensor, question: Question, score: Callable[[Tensor], Tensor]
) -> Attributions:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = network(x)
        _check_gradient(network, logits)
        outputs = question.outputs(logits)
        found = []
        for i, output in enumerate(outputs):
            value = output(logits)
            keep = i < len(outputs) - 1
            (gradient,) = torch.autograd.grad(value.sum(), x, retain_graph=keep, materialize_grads=True)
            with torch.no_grad():
                found.append(Attribution(output, float(value), score(gradient)[0]))
    return Attributions(logits.detach(), found)


def _check_gradient(network: Network, logits: Tensor) -> None:
    if not logits.requires_grad:
        raise UnsupportedError(
            f"The output of {network.name} has no gradient: it is constant, or computed under no_grad."
        )
