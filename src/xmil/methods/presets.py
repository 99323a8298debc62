"""Named sets of LRP rules, by architecture."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError, unknown_name
from xmil.lrp import AffineRule, Composite
from xmil.methods.baseline import BAG, MEAN, stored_background
from xmil.methods.network import Network
from xmil.models import MILModel
from xmil.nn.attention import SelfAttention
from xmil.nn.ppeg import PPEG

PRESETS = ("default", "exact", "centred", "paper", "released")
TRANSFORMERS = ("stamp_vit", "transmil")
RELEASED = ("attnmil", "transmil")  # models of the authors' code whose rules differ from the paper's formulas
EPSILON = 1e-8  # the paper's
MEAN_STRENGTH, WEAKER = 0.5, 0.25  # chosen on validation bags: docs/better-rule.md
_SHARE_OUT = AffineRule(epsilon=EPSILON, bias="redistribute")
_ENDS = {"instance.0.*": _SHARE_OUT, "classifier.*": _SHARE_OUT}


def preset_composite(network: Network, preset: str) -> Composite:
    """The rules of a preset for a model.

    `exact`: every constant keeps its share, nothing is stabilised. `paper`: the paper's formulas on the true
    network. `released`: see `released_copy`. `default` and `centred`: `exact`, to which `preset_centring`
    adds a baseline (docs/better-rule.md).
    """
    if preset not in PRESETS:
        raise unknown_name("preset", preset, PRESETS)
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
    """What instances are measured against: a baseline, and whether activations are as well (`secant`)."""

    baseline: Any = None
    strength: float | None = None
    secant: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The baseline and strength as `find_baseline` takes them."""
        return {"baseline": self.baseline, "strength": self.strength}


def preset_centring(network: Network, preset: str) -> Centring:
    """The baseline of a preset.

    `centred` has the model's background, or the bag's own mean where there is none; `default` has the first
    alone: the bag's mean holds the bag's own evidence.
    """
    stored, additive = stored_background(network) is not None, network.name == "addmil"
    if preset != "centred" and not (preset == "default" and stored):
        return Centring()
    strength = MEAN_STRENGTH if stored and not additive else WEAKER
    return Centring(MEAN if stored else BAG, strength, secant=True)


def released_copy(model: MILModel) -> MILModel:
    """The network that the authors' code explains in place of a TransMIL.

    No bias in the attention's output projection and in PPEG, and a layer norm with the unbiased standard
    deviation plus eps.
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
