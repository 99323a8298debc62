"""Gradient methods: gradient times input, squared gradients, integrated gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import MOST_PASSES, UnsupportedError, check_choice, check_count
from xmil.core.explanation import Audit
from xmil.lrp import COMPARE
from xmil.methods.method import (
    Attribution,
    Attributions,
    Output,
    Question,
    describe_baseline,
    find_baseline,
    register_method,
)
from xmil.network import Network

STEPS = 50  # default of integrated gradients
WARNED_GAP, ROUNDING = 0.05, 1e-3  # of the change to explain, and of the output
ALL_ZERO = (
    "Every score is zero: the output has no gradient at these patches, for example after a threshold or "
    "with rounded weights. Compare with `method='one_added'` or `method='single'`."
)
NO_DERIVATIVE = "WarnNotImplemented"  # torch's name for a step that it cannot differentiate, such as int8
INTEGRATIONS = ("gausslegendre", "riemann_left", "riemann_right", "riemann_middle", "riemann_trapezoid")


Score = Callable[[Tensor, Tensor], Tensor]  # gradients and bags (b, n, d) to scores (b, n)


SCORES: dict[str, Score] = {
    "gxi": lambda gradient, x: (gradient * x).sum(dim=-1),
    "grad2": lambda gradient, _: gradient.square().sum(dim=-1),
}


def _score_bags(network: Network, x: Tensor, outputs: Sequence[Output], score: Score) -> Tensor:
    """Scores (b, outputs, n) of many bags: the gradient of a sum over bags contains that of each."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        return torch.stack(_scores(network(x), x, outputs, score), dim=1)


def _scores(logits: Tensor, x: Tensor, outputs: Sequence[Output], score: Score) -> list[Tensor]:
    """The scores (b, n) of each output; the graph lives until the last."""
    scores = []
    for i, output in enumerate(outputs):
        keep = i < len(outputs) - 1
        value = output(logits).sum()
        (gradient,) = torch.autograd.grad(value, x, retain_graph=keep, materialize_grads=True)
        scores.append(score(gradient, x.detach()))
    return scores


@register_method(
    "gxi", signed=True, cost="about 3", contexts=True, batch=partial(_score_bags, score=SCORES["gxi"])
)
def gradient_times_input(network: Network, x: Tensor, question: Question) -> Attributions:
    """Sum over features of gradient * input."""
    return _from_gradients(network, x, question, SCORES["gxi"])


@register_method("grad2", signed=False, cost="about 3", batch=partial(_score_bags, score=SCORES["grad2"]))
def squared_gradient(network: Network, x: Tensor, question: Question) -> Attributions:
    """Sum over features of the squared gradient."""
    return _from_gradients(network, x, question, SCORES["grad2"])


def integrated_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags from bags of zeros, all steps of the path at once."""
    start = torch.zeros_like(x)
    return torch.stack([_path(network, x, start, output, at_once=None) for output in outputs], dim=1)


def _path(
    network: Network,
    x: Tensor,
    start: Tensor,
    output: Output,
    *,
    steps: int = STEPS,
    integration: str = INTEGRATIONS[0],
    at_once: int | None,
) -> Tensor:
    """Integrated gradients (b, n) of bags (b, n, d); `at_once` bags of the path run together."""
    from captum.attr import IntegratedGradients

    captum = IntegratedGradients(lambda bags: output(network(bags)))
    parts = captum.attribute(x, start, n_steps=steps, method=integration, internal_batch_size=at_once)
    return torch.as_tensor(parts.sum(dim=-1), dtype=x.dtype)


# no "contrastive": its weights are constants of one bag, and a path has many
@register_method(
    "ig",
    signed=True,
    conserves=True,
    cost="3 x steps",
    outputs=("logit", "log_odds", "probability"),
    contexts=True,
    batch=integrated_batch,
)
def integrated_gradients(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    steps: int = STEPS,
    integration: str = INTEGRATIONS[0],
    baseline: Any = None,
    strength: float | None = None,
) -> Attributions:
    """Integrated gradients from a bag of zeros (Sundararajan et al. 2017), by Captum.

    With a `baseline` the path starts at a bag of copies of it times the `strength`. In the audit the bias is
    the output at the start and `other` the convergence gap.
    """
    check_count("steps", steps, most=MOST_PASSES, owner="ig")
    check_choice("integration", integration, INTEGRATIONS, owner="ig")
    centre = find_baseline(baseline, strength, network=network, x=x, method="ig")
    start = torch.zeros_like(x) if centre is None else centre.shift.expand_as(x).contiguous()
    with torch.enable_grad():
        probe = network(leaf := x.detach().requires_grad_(True))
    _check_gradient(network, probe, leaf)
    logits = probe.detach()
    del probe  # and its graph
    with torch.no_grad():
        at_start = network(start)
    attributions = []
    for output in question.outputs(logits):
        # one bag of the path at a time, so that memory does not grow with the steps
        (scores,) = _path(network, x, start, output, steps=steps, integration=integration, at_once=1)
        value, constant = float(output(logits)), float(output(at_start))
        audit = Audit.close(output=value, instances=float(scores.double().sum()), bias=constant)
        notes = describe_baseline(centre)
        gap = abs(audit.other) / max(abs(value - constant), abs(audit.instances), 1e-12)
        if gap > WARNED_GAP and abs(audit.other) > ROUNDING * max(abs(value), abs(constant)):
            notes["warnings"] += (
                f"The audit stays open by more than {WARNED_GAP:.0%}: part of the output may have no "
                "gradient (detached values, argmax). Take more steps, or compare with "
                "`method='single'` or `method='one_removed'`.",
            )
        attributions.append(Attribution(output, value, scores, audit, **notes))
    return Attributions(logits, attributions)


def _from_gradients(network: Network, x: Tensor, question: Question, score: Score) -> Attributions:
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        logits = network(x)
        _check_gradient(network, logits, x)
        outputs = question.outputs(logits)
        scores = _scores(logits, x, outputs, score)
    logits = logits.detach()
    values = [float(output(logits)) for output in outputs]
    attributions = [
        Attribution(output, value, each[0], warnings=() if bool(each.any()) else (ALL_ZERO,))
        for output, value, each in zip(outputs, values, scores, strict=True)
    ]
    return Attributions(logits, attributions)


def _check_gradient(network: Network, logits: Tensor, x: Tensor) -> None:
    """Refuse logits without a gradient at the bag."""
    steps = [] if logits.grad_fn is None else [logits.grad_fn]
    visited = set(steps)
    while steps:
        step = steps.pop()
        if getattr(step, "variable", None) is x:
            return
        inputs = () if step.name().endswith(NO_DERIVATIVE) else step.next_functions
        new = {each for each, _ in inputs if each is not None} - visited
        visited |= new
        steps += new
    raise UnsupportedError(
        f"The output of {network.name} has no gradient at the bag: it is constant, computed under no_grad or "
        f"in int8. Use {COMPARE}"
    )
