"""LRP, layer-wise relevance propagation through the whole model: presets, baselines and audit.

Hense, Jamshidi Idaji et al., "xMIL: Insightful Explanations for Multiple Instance Learning in
Histopathology", NeurIPS 2024.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.errors import InputError, UnsupportedError, bad_parameter, check_names
from xmil.core.explanation import Audit
from xmil.lrp import AffineRule, Composite, Flow, Trace, fetch, record, replay, trace
from xmil.methods.method import (
    BAG,
    MEAN,
    PRESET,
    Attribution,
    Attributions,
    Baseline,
    Output,
    Question,
    describe_background,
    describe_baseline,
    find_background,
    find_baseline,
    register_method,
    stored_background,
)
from xmil.models import MILModel
from xmil.network import Network, attempt, frozen
from xmil.nn import PPEG, SelfAttention

PRESETS = ("default", "exact", "centred", "paper", "released")
TRANSFORMERS = ("stamp_vit", "transmil")
RELEASED = ("attnmil", "transmil")  # models for which the authors' code differs from the paper's formulas
EPSILON = 1e-8  # the paper's
MEAN_STRENGTH, WEAKER = 0.5, 0.25  # chosen on validation bags: docs/studies/better-rule.md
STRENGTHS = {"addmil": WEAKER}
WHOLE_REFERENCE = ("addmil", "mambamil")  # models whose reference is a bag of n baselines
_SHARE_OUT = AffineRule(epsilon=EPSILON, bias="redistribute")
_ENDS = {"instance.0.*": _SHARE_OUT, "classifier.*": _SHARE_OUT}

REFUSED_OTHER, WARNED_OTHER = 0.2, 1e-3  # of the largest term of the audit
WARNED_CUT = 0.1  # of the sum of the absolute shares
NOTHING = 1e-6  # of the output: scores with a smaller total count as zero


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
    background = stored_background(network)
    centring = Centring() if composite is not None else preset_centring(network, preset, background)
    if preset == "released" and composite is None and network.model is not None:
        network = Network(released_copy(network.model)) if network.name == "transmil" else network
    with frozen(network.module):
        centre = centring.find(network, x)
        traced = trace_bags(network, x, rules, centre if centring.secants else None)
        scores = []
        for i, output in enumerate(outputs):
            flow = traced.relevance(output.to_share, keep=i < len(outputs) - 1).input
            scores.append(_split_off_baseline(flow, centre)[0])
        return torch.stack(scores, dim=1)


def _split_off_baseline(flow: Flow, centre: Baseline | None) -> tuple[Tensor, Tensor | None]:
    """Split relevance into scores (b, n) and the share of instances that equal the baseline."""
    if centre is None:
        return flow.instances, None
    share = flow.against(centre.shift)
    return flow.instances - share, share


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
    background: Any = None,
    baseline: Any = PRESET,
    strength: float | None = None,
    secants: bool | None = None,
) -> Attributions:
    """Relevance of each instance, summed over its features.

    The rules are those of `composite`, else of the `preset`; `epsilon`, `gamma` and `bias` then replace its
    settings everywhere. `layer` names a submodule at whose output to stop (such an explanation has no
    audit); `feature_level` keeps (n, d); `detach_pe` makes TransMIL's position encoding (PPEG) a constant,
    whose share is cut. With a `baseline` mu of `strength` a (1 by default) an instance scores
    (x_i - a mu) . g_i, and the audit books a mu . g_i as `baseline`; with `secants` activations are also
    compared with those of a mu. Without a `baseline` the preset decides: `default` compares both with the
    mean of the `background` (a Bag, an array (k, d), a Background, a path), by default the model's own; if
    there is none, or with "bag", it is `exact` (docs/studies/better-rule.md).
    """
    if composite is not None and not isinstance(composite, Composite):
        raise bad_parameter("composite", "lrp", "a Composite", composite)
    rules = preset_composite(network, preset) if composite is None else composite
    rules = rules if gates is None else replace(rules, gates=gates)
    settings: dict[str, Any] = {"epsilon": epsilon, "gamma": gamma, "bias": bias}
    changes = {name: value for name, value in settings.items() if value is not None}
    overrides = {pattern: replace(rule, **changes) for pattern, rule in rules.overrides.items()}
    rules = replace(rules, default=replace(rules.default, **changes), overrides=overrides)
    if detach_pe:
        if not any(name.startswith("ppeg.") for name, _ in network.module.named_parameters()):
            raise UnsupportedError(
                f"detach_pe is only for TransMIL with PPEG, not for {network.name}; leave it out."
            )
        rules = replace(rules, overrides={"ppeg.*": AffineRule(constant=True), **rules.overrides})
    ordinary = find_background(background, network=network, x=x, method="lrp")
    centring = Centring(baseline, strength, secants=False, background=ordinary)
    if isinstance(baseline, str) and baseline == PRESET:
        plain = composite is not None or layer is not None
        centring = Centring() if plain else preset_centring(network, preset, ordinary)
        centring = centring if strength is None else replace(centring, strength=strength)
    if secants is not None:
        if not isinstance(secants, bool):
            raise bad_parameter("secants", "lrp", "True or False", secants)
        centring = replace(centring, secants=secants)
    options: dict[str, Any] = {"layer": layer, "feature_level": feature_level, "centring": centring}
    if preset == "released" and composite is None and network.name == "transmil":
        # scores come from the stripped copy, classes and logits from the true model
        assert network.model is not None  # noqa: S101  # preset_composite refuses others
        with torch.no_grad():
            logits = network(x)
        targets = [output.target for output in question.outputs(logits)]
        stripped = released_copy(network.model)
        with frozen(stripped):
            result = _propagate(Network(stripped), x, replace(question, targets=targets), rules, **options)
        return replace(result, logits=logits)
    return _propagate(network, x, question, rules, **options)


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
    at_input = centring.find(network, x) if layer is None else None
    traced = trace_bags(network, x, rules, at_input if centring.secants else None, layer=layer)
    outputs = question.outputs(traced.logits)
    attributions = []
    for i, output in enumerate(outputs):
        relevance = traced.relevance(output.to_share, keep=i < len(outputs) - 1)
        flow = relevance.input if layer is None else relevance.layers[layer]
        if flow.tensor.shape[:2] != (1, x.shape[1]):
            raise InputError(
                f"The layer {layer!r} gives {tuple(flow.tensor.shape)}, not one row for each of the "
                f"{x.shape[1]} patches; name a layer before the patches are joined or padded."
            )
        centre = at_input if layer is None else centring.find(network, flow.tensor)
        (scores,), baseline = _split_off_baseline(flow, centre)
        features, audit, notes = None, None, centring.describe(centre)
        sums = [relevance.output.double().reshape(()), scores.double().sum()]
        sums += [] if baseline is None else [baseline.double().sum()]
        value, instances, *of_baseline = fetch(sums)
        if feature_level:
            shift = 0.0 if centre is None else centre.shift
            features = replace(flow, tensor=flow.tensor - shift).features[0]
        if layer is None:
            shares = {**relevance.shares, **dict(zip(["baseline"], of_baseline, strict=False))}
            audit = Audit.close(output=value, instances=instances, **shares)
            notes["warnings"] += account_warnings(audit, size=relevance.size, cuts=relevance.cuts)
        check_reached(network, x, output, scores=flow.instances[0], value=value, audit=audit)
        attributions.append(Attribution(output, value, scores, audit, features, **notes))
    return Attributions(traced.logits, attributions)


def trace_bags(
    network: Network, x: Tensor, rules: Composite, reference: Baseline | None, *, layer: str | None = None
) -> Trace:
    """Trace bags (b, n, d) under the rules; with a reference, compare activations with its own.

    The reference runs as a bag of one instance, which costs next to nothing, or of n copies if one alone
    takes another path through the model or has another scale: additive models scale by the number of
    instances, and Mamba's convolutions see the previous instances.
    """

    options: dict[str, Any] = {"module": network.module, "composite": rules}
    layers = [] if layer is None else [layer]

    def run(x: Tensor, shift: Tensor | None) -> Trace:
        if shift is not None:
            one = shift.reshape(-1, 1, x.shape[-1])
            alone = network.part(torch.zeros(1, dtype=torch.long, device=x.device))
            tries = [(alone, one), (network, one.expand(-1, x.shape[1], -1).contiguous())]
            for net, bags in tries[1:] if network.name in WHOLE_REFERENCE else tries:
                try:
                    recorded = record(net, bags, **options)
                except (
                    RuntimeError,
                    ValueError,
                    IndexError,
                    AssertionError,
                ):  # the model needs more instances
                    continue
                traced = trace(network, x, layers=layers, against=recorded, **options)
                if traced.matched:
                    return traced
        return trace(network, x, layers=layers, **options)

    shift = None if reference is None else reference.shift
    if x.is_cuda and layer is None and network.is_built_in and not network.takes_companions:
        return replay.traced(run, x, shift, module=network.module, rules=rules)
    return run(x, shift)


# The presets.


def preset_composite(network: Network, preset: str) -> Composite:
    """The rules of a preset for a model.

    `exact`: every constant keeps its share, without stabilisers. `paper`: the paper's formulas on the true
    network. `released`: see `released_copy`. `default` and `centred`: `exact` with the baseline of
    `preset_centring` (docs/studies/better-rule.md).
    """
    check_names("preset", [preset], PRESETS)
    if preset in ("default", "exact", "centred"):
        return Composite()
    if preset == "paper" and network.name in TRANSFORMERS:
        return Composite(_ENDS, default=AffineRule(epsilon=EPSILON))
    if network.name == "transmil" or (preset == "paper" and network.name == "mambamil"):
        return Composite(_ENDS)
    if preset == "released" and network.name not in RELEASED:
        raise UnsupportedError(
            f"The preset 'released' is for transmil and attnmil, not {network.name}; use 'paper'."
        )
    if network.model is not None:
        return Composite(default=_SHARE_OUT, attention=AffineRule(epsilon=EPSILON))
    return Composite(default=AffineRule(epsilon=EPSILON))


@dataclass(frozen=True)
class Centring:
    """The baseline that instances are compared with, and whether activations are, too (`secants`)."""

    baseline: Any = None
    strength: float | None = None
    secants: bool = False
    background: Background | None = None

    def find(self, network: Network, x: Tensor) -> Baseline | None:
        """Find the baseline for bags x (b, n, d)."""
        options: dict[str, Any] = {"network": network, "x": x, "background": self.background}
        return find_baseline(self.baseline, self.strength, method="lrp", **options)

    def describe(self, centre: Baseline | None) -> dict[str, Any]:
        """Return parameters that reproduce the scores, and warnings, for an attribution."""
        notes = describe_baseline(centre)
        if centre is None:
            return {**notes, "params": {"baseline": None}}
        of_background = self.background is not None and centre.name == self.background.title
        origin = {"background": describe_background(self.background)} if of_background else {}
        return {**notes, "params": {**notes["params"], "secants": self.secants, **origin}}


def preset_centring(network: Network, preset: str, background: Background | None) -> Centring:
    """Choose the baseline of a preset.

    `centred` takes the background's mean, or the bag's if there is none; `default` only takes a background's,
    because the bag's mean contains the bag's own evidence.
    """
    if preset != "centred" and (preset != "default" or background is None):
        return Centring()
    if background is None:
        return Centring(BAG, WEAKER, secants=True)
    return Centring(MEAN, STRENGTHS.get(network.name, MEAN_STRENGTH), secants=True, background=background)


def released_copy(model: MILModel) -> MILModel:
    """Make the network that the authors' code explains in place of a TransMIL.

    It has no bias in the attention's output projection and in PPEG, and its layer norm divides by the
    unbiased standard deviation plus eps.
    """
    stripped = copy.deepcopy(model)
    for module in stripped.modules():
        if isinstance(module, SelfAttention):
            module.to_out[0].register_parameter("bias", None)
        if isinstance(module, PPEG):
            module.proj.bias = module.proj1.bias = module.proj2.bias = None
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, _UnbiasedNorm(child))
    return stripped


class _UnbiasedNorm(nn.Module):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        out: Tensor = centred / (torch.std(x, dim=-1, keepdim=True) + self.eps) * self.weight
        return out if self.bias is None else out + self.bias


# The audit.


def account_warnings(audit: Audit, *, size: float, cuts: Sequence[str] = ()) -> tuple[str, ...]:
    """Write warnings about an audit; refuse one that is far from closing.

    `size` is the largest term of the output; `cuts` names the places of constants that depend on the bag.
    """
    shares = {name: abs(value) for name, value in audit.as_dict().items() if name != "output"}
    scale = max(size, abs(audit.output), *(value for name, value in shares.items() if name != "other"))
    if shares["other"] > REFUSED_OTHER * scale:
        raise UnsupportedError(
            f"The audit does not close: {audit}. Either the rules are unstable here (another preset, a "
            "larger epsilon or model.double() may help), or the model runs operations that the engine "
            "cannot see."
        )
    warnings = []
    if shares["cut"] > WARNED_CUT * sum(shares.values()):
        where = f" ({'; '.join(cuts)})" if cuts else " (the explained output is not linear in the logits)"
        warnings.append(
            f"{shares['cut'] / sum(shares.values()):.0%} of the relevance stops at values that depend on the "
            f"bag but carry no relevance{where}: the scores leave that part out. Compare with "
            "`method='single'` or `method='one_removed'`."
        )
    if shares["other"] > WARNED_OTHER * scale:
        warnings.append(
            f"The audit only closes to {shares['other'] / scale:.1%}: the precision is low, or the rules are "
            "unstable for this bag. model.double(), another preset or a larger epsilon may help."
        )
    return tuple(warnings)


def check_reached(
    network: Network, x: Tensor, output: Output, *, scores: Tensor, value: float, audit: Audit | None
) -> None:
    """Refuse scores that are all zero for an output whose gradient is not."""
    least = NOTHING * abs(value)
    if float(scores.abs().sum()) > least:
        return
    depends = audit is not None and abs(audit.cut) > WARNED_CUT * abs(value)
    if not depends:  # the sizes of gradient times input per instance
        x = x.detach().requires_grad_(True)
        with torch.enable_grad():
            explained = output(network(x)).sum()
        if explained.requires_grad:
            (gradient,) = torch.autograd.grad(explained, x, materialize_grads=True)
            depends = float((x.detach() * gradient).sum(dim=-1).abs().sum()) > least
    if depends:
        raise UnsupportedError(
            "No relevance reaches the patches, though the output depends on them: it stops at values that "
            "the rules take as constants, such as a softmax or a detached tensor. Use a method that needs no "
            "rules: ig, gxi, single, one_removed."
        )


class ZeroMapError(UnsupportedError):
    """A map of zeros for an output that depends on the instances."""


def check_zero_map(network: Network, x: Tensor, attribution: Attribution) -> None:
    """Refuse scores that are all zero for an output that changes when instances leave the bag (1, n, d).

    Evidence that switches a unit off, as in 2 - relu(1 - x), leaves no gradient to follow. So if every score
    is zero, a few passes over parts of the bag decide. The baseline's share counts as having reached the
    instances.
    """
    audit = attribution.audit
    reached = float(attribution.scores.abs().sum()) + (0.0 if audit is None else abs(audit.baseline))
    if reached <= NOTHING * abs(attribution.value) and _output_changes(network, x, attribution.output):
        raise ZeroMapError(
            "Every score is zero, yet the output changes when patches leave the bag: the evidence switches "
            "units of the model off, as in relu(1 - x), or passes a threshold, and relevance cannot flow "
            "back from there. Use a method that compares outputs: one_added, shapley, single, one_removed or "
            "ig; `method='auto'` chooses the best."
        )


@torch.no_grad()
def _output_changes(network: Network, x: Tensor, output: Output) -> bool:
    """Whether the output of the empty bag, or of half of the bag, differs beyond rounding.

    If the model does not run on a half, zero vectors take the place of the other half.
    """
    rows = torch.arange(x.shape[1], device=x.device)
    halves = [rows < len(rows) // 2, rows >= len(rows) // 2, rows % 2 == 0, rows % 2 == 1]
    logits = [network(x), attempt(partial(network, torch.zeros_like(x)))]
    for half in (half for half in halves if bool(half.any()) and not bool(half.all())):
        at = rows[half]
        alone = attempt(partial(network, x[:, at], at.unsqueeze(0)))
        logits.append(attempt(partial(network, x * half.unsqueeze(1))) if alone is None else alone)
    runs = torch.cat([each for each in logits if each is not None])
    values = output(runs)
    size = runs.abs().amax(dim=1).maximum(values.abs())
    rounding = torch.finfo(runs.dtype).eps ** 0.5 * size.maximum(size[0])
    return bool(((values - values[0]).abs() > rounding).any())
