"""xMIL-LRP: layer-wise relevance propagation through the whole model.

Hense, Jamshidi Idaji et al., "xMIL: Insightful Explanations for Multiple Instance Learning in
Histopathology", NeurIPS 2024.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import InputError, bad_parameter
from xmil.core.explanation import Audit
from xmil.lrp import AffineRule, Composite, Flow, Relevance, trace
from xmil.methods.account import account_warnings, check_reached
from xmil.methods.baseline import PRESET, Baseline, described, find_baseline
from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.presets import preset_baseline, preset_composite, released_copy
from xmil.methods.registry import Attribution, Attributions, register_method
from xmil.nn.frozen import frozen


@register_method("lrp", signed=True, conserves=True, cost="about 2", contexts=True)
def lrp(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    preset: str = "default",
    composite: Composite | None = None,
    epsilon: float | None = None,
    gamma: float | None = None,
    bias: str | None = None,
    gates: str | None = None,
    layer: str | None = None,
    feature_level: bool = False,
    baseline: Any = PRESET,
    strength: float | None = None,
) -> Attributions:
    """Relevance of each instance, summed over its features.

    The rules are those of `composite`, else of the `preset`; `epsilon`, `gamma` and `bias` then replace its
    settings everywhere. `layer` names a submodule at whose output to stop (such an explanation has no
    audit); `feature_level` keeps (n, d). With a `baseline` mu of `strength` a (1 unless said otherwise) an
    instance scores (x_i - a mu) . g_i, and the audit books a mu . g_i as `baseline`; by default the preset
    decides.
    """
    if composite is not None and not isinstance(composite, Composite):
        raise bad_parameter("composite", "lrp", "a Composite", composite)
    rules = preset_composite(network, preset) if composite is None else composite
    rules = _overridden(rules, epsilon=epsilon, gamma=gamma, bias=bias, gates=gates)
    if isinstance(baseline, str) and baseline == PRESET:
        baseline, usual = (None, None) if composite is not None else preset_baseline(network, preset)
        strength = usual if strength is None else strength
    options: dict[str, Any] = {
        "layer": layer,
        "feature_level": feature_level,
        "baseline": (baseline, strength),
    }
    if preset == "released" and composite is None and network.name == "transmil":
        return _released(network, x, question, rules, **options)
    return _propagate(network, x, question, rules, **options)


def _propagate(
    network: Network,
    x: Tensor,
    question: Question,
    rules: Composite,
    *,
    layer: str | None,
    feature_level: bool,
    baseline: tuple[Any, float | None],
) -> Attributions:
    traced = trace(
        network, x, module=network.module, composite=rules, layers=[] if layer is None else [layer]
    )
    outputs = question.outputs(traced.logits)
    found = []
    for i, output in enumerate(outputs):
        relevance = traced.relevance(output.to_share, keep=i < len(outputs) - 1)
        flow = _instances(relevance, x.shape[1], layer)
        centre = find_baseline(*baseline, network=network, x=flow.tensor, method="lrp")
        one = _attribution(relevance, flow, output, centre, layer is None, feature_level)
        check_reached(network, x, output, scores=flow.instances[0], value=one.value, audit=one.audit)
        found.append(one)
    return Attributions(traced.logits, found)


def _released(
    network: Network, x: Tensor, question: Question, rules: Composite, **options: Any
) -> Attributions:
    """Scores of the stripped copy, for the classes and logits of the true model."""
    assert network.model is not None  # noqa: S101  # the preset has refused others
    with torch.no_grad():
        logits = network(x)
    targets = [output.target for output in question.outputs(logits)]
    stripped = released_copy(network.model)
    with frozen(stripped):
        found = _propagate(Network(stripped), x, replace(question, targets=targets), rules, **options)
    return replace(found, logits=logits)


def _instances(relevance: Relevance, n: int, layer: str | None) -> Flow:
    """The flow at the input or at a layer that still has a row for each instance."""
    flow = relevance.input if layer is None else relevance.layers[layer]
    if flow.tensor.shape[:2] != (1, n):
        raise InputError(
            f"The layer {layer!r} gives {tuple(flow.tensor.shape)}, not one row for each of the {n} "
            "instances; name a layer before the instances are joined or padded."
        )
    return flow


def _attribution(
    relevance: Relevance,
    flow: Flow,
    output: Output,
    centre: Baseline | None,
    whole: bool,
    feature_level: bool,
) -> Attribution:
    scores, features, shares = flow.instances[0], None, dict(relevance.shares)
    if centre is not None:
        kept = flow.against(centre.shift)[0]
        scores = scores - kept
        shares["baseline"] = float(kept.double().sum())
    if feature_level:
        shift = 0.0 if centre is None else centre.shift
        features = replace(flow, tensor=flow.tensor - shift).features[0]
    value = float(relevance.output)
    audit, warnings = None, tuple[str, ...]()
    if whole:
        audit = Audit.close(output=value, instances=float(scores.double().sum()), **shares)
        warnings = account_warnings(audit, size=relevance.size, cuts=relevance.cuts)
    extra = described(centre)
    extra["warnings"] += warnings
    return Attribution(output, value, scores, audit, features, **extra)


def _overridden(rules: Composite, *, gates: str | None, **settings: Any) -> Composite:
    given = {name: value for name, value in settings.items() if value is not None}
    if gates is not None:
        rules = replace(rules, gates=gates)
    if not given:
        return rules

    def adapt(rule: AffineRule) -> AffineRule:
        return replace(rule, **given)

    return replace(
        rules,
        default=adapt(rules.default),
        overrides={pattern: adapt(rule) for pattern, rule in rules.overrides.items()},
    )
