"""xMIL-LRP: layer-wise relevance propagation through the whole model.

Hense, Jamshidi Idaji et al., "xMIL: Insightful Explanations for Multiple Instance Learning in
Histopathology", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import InputError, UnsupportedError, bad_parameter
from xmil.core.explanation import Audit
from xmil.lrp import AffineRule, Composite, Flow, Relevance, Trace, record, replay, trace
from xmil.lrp.ledger import fetched
from xmil.methods.account import account_warnings, check_reached
from xmil.methods.baseline import PRESET, Baseline, described, find_baseline
from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.presets import Centring, preset_centring, preset_composite, released_copy
from xmil.methods.registry import Attribution, Attributions, register_method
from xmil.nn.frozen import frozen


def lrp_batch(
    network: Network,
    x: Tensor,
    outputs: Sequence[Output],
    *,
    preset: str = "default",
    composite: Composite | None = None,
) -> Tensor:
    """Relevance (b, outputs, n) of the instances of many bags."""
    rules = preset_composite(network, preset) if composite is None else composite
    centring = Centring() if composite is not None else preset_centring(network, preset)
    if preset == "released" and composite is None and network.model is not None:
        network = Network(released_copy(network.model)) if network.name == "transmil" else network
    with frozen(network.module):
        centre = find_baseline(**centring.asked, network=network, x=x, method="lrp")
        traced = traced_bags(network, x, rules, centre if centring.secant else None)
        found = []
        for i, output in enumerate(outputs):
            flow = traced.relevance(output.to_share, keep=i < len(outputs) - 1).input
            found.append(_centred(flow, centre)[0])
        return torch.stack(found, dim=1)


def _centred(flow: Flow, centre: Baseline | None) -> tuple[Tensor, Tensor | None]:
    """Scores (b, n), and what of them instances that equal the baseline would get."""
    if centre is None:
        return flow.instances, None
    kept = flow.against(centre.shift)
    return flow.instances - kept, kept


@register_method("lrp", signed=True, conserves=True, cost="about 2", contexts=True, batch=lrp_batch)
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
    detach_pe: bool = False,
    baseline: Any = PRESET,
    strength: float | None = None,
) -> Attributions:
    """Relevance of each instance, summed over its features.

    The rules are those of `composite`, else of the `preset`; `epsilon`, `gamma` and `bias` then replace its
    settings everywhere. `layer` names a submodule at whose output to stop (such an explanation has no
    audit); `feature_level` keeps (n, d); `detach_pe` takes TransMIL's position encoding (PPEG) as a constant,
    whose share is cut. With a `baseline` mu of `strength` a (1 unless said otherwise) an instance scores
    (x_i - a mu) . g_i, and the audit books a mu . g_i as `baseline`. Without one the preset decides:
    `default` holds instances and activations against the model's background (docs/better-rule.md).
    """
    if composite is not None and not isinstance(composite, Composite):
        raise bad_parameter("composite", "lrp", "a Composite", composite)
    rules = preset_composite(network, preset) if composite is None else composite
    rules = _overridden(rules, epsilon=epsilon, gamma=gamma, bias=bias, gates=gates)
    rules = _without_positions(rules, network) if detach_pe else rules
    centring = Centring(baseline, strength)
    if isinstance(baseline, str) and baseline == PRESET:
        plain = composite is not None or layer is not None
        centring = Centring() if plain else preset_centring(network, preset)
        centring = centring if strength is None else replace(centring, strength=strength)
    options: dict[str, Any] = {"layer": layer, "feature_level": feature_level, "centring": centring}
    if preset == "released" and composite is None and network.name == "transmil":
        return _released(network, x, question, rules, **options)
    return _propagate(network, x, question, rules, **options)


def _without_positions(rules: Composite, network: Network) -> Composite:
    """The rules with the convolutions of PPEG as constants."""
    if not any(name.startswith("ppeg.") for name, _ in network.module.named_parameters()):
        raise UnsupportedError(
            f"detach_pe is for TransMIL with PPEG, which {network.name} is not; leave it out."
        )
    return replace(rules, overrides={"ppeg.*": AffineRule(constant=True), **rules.overrides})


def _propagate(
    network: Network,
    x: Tensor,
    question: Question,
    rules: Composite,
    *,
    layer: str | None,
    feature_level: bool,
    centring: Centring,
) -> Attributions:
    asked = {
        "baseline": centring.baseline,
        "strength": centring.strength,
        "network": network,
        "method": "lrp",
    }
    at_input = find_baseline(x=x, **asked) if layer is None else None
    traced = traced_bags(network, x, rules, at_input if centring.secant else None, layer=layer)
    outputs = question.outputs(traced.logits)
    found = []
    for i, output in enumerate(outputs):
        relevance = traced.relevance(output.to_share, keep=i < len(outputs) - 1)
        flow = _instances(relevance, x.shape[1], layer)
        centre = at_input if layer is None else find_baseline(x=flow.tensor, **asked)
        one = _attribution(relevance, flow, output, centre, layer is None, feature_level)
        check_reached(network, x, output, scores=flow.instances[0], value=one.value, audit=one.audit)
        found.append(one)
    return Attributions(traced.logits, found)


def traced_bags(
    network: Network, x: Tensor, rules: Composite, reference: Baseline | None, *, layer: str | None = None
) -> Trace:
    """Bags (b, n, d) under the rules, with activations against those of a reference where there is one.

    The reference is run as one instance by itself, which costs next to nothing, or as a bag of n of them
    where a single one takes another way through the model, or another scale, as in additive models.
    """

    def run(x: Tensor, shift: Tensor | None) -> Trace:
        return _traced(network, x, rules, shift, layers=[] if layer is None else [layer])

    shift = None if reference is None else reference.shift
    if layer is None and network.is_built_in and not network.takes_companions:
        return replay.traced(run, x, shift, module=network.module, rules=rules)
    return run(x, shift)


def _traced(
    network: Network, x: Tensor, rules: Composite, shift: Tensor | None, *, layers: Sequence[str]
) -> Trace:
    options: dict[str, Any] = {"module": network.module, "composite": rules}
    if shift is not None:
        one = shift.reshape(-1, 1, x.shape[-1])
        alone = network.part(torch.zeros(1, dtype=torch.long, device=x.device))
        tries = [(alone, one), (network, one.expand(-1, x.shape[1], -1).contiguous())]
        for net, bags in tries[1:] if network.name == "addmil" else tries:
            try:
                seen = record(net, bags, **options)
            except (
                RuntimeError,
                ValueError,
                IndexError,
                AssertionError,
            ):  # a model that wants more instances
                continue
            traced = trace(network, x, layers=layers, against=seen, **options)
            if traced.matched:
                return traced
    return trace(network, x, layers=layers, **options)


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
    ((scores,), kept), features, shares = _centred(flow, centre), None, dict(relevance.shares)
    sums = [relevance.output.double().reshape(()), scores.double().sum()]
    sums += [] if kept is None else [kept.double().sum()]
    value, instances, *booked = fetched(sums)
    shares |= dict(zip(["baseline"], booked, strict=False))
    if feature_level:
        shift = 0.0 if centre is None else centre.shift
        features = replace(flow, tensor=flow.tensor - shift).features[0]
    audit, warnings = None, tuple[str, ...]()
    if whole:
        audit = Audit.close(output=value, instances=instances, **shares)
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
