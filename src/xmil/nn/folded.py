"""Batch norm in eval mode folded into the layer before it: the same function with fewer steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xmil.core.errors import UnsupportedError

ALIKE = 1e-3  # of the largest output: a folded network that differs by more is refused


@torch.no_grad()
def fold_batch_norm(module: nn.Module, x: Tensor) -> nn.Module:
    """A copy in which every batch norm that reads one layer's output alone is part of that layer.

    `x` is an input to try: it shows which layer feeds which norm, and that the copy computes the same. Norms
    that read anything else stay.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    >>> fold_batch_norm(net, torch.randn(1, 3, 8, 8))
    Sequential(
      (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
    )
    """
    twin = copy.deepcopy(module)
    for layer, norm in _pairs(twin, x):
        _fold(layer, norm)
        _neutralise(twin, norm)
    before, after = module(x), twin(x)
    if not isinstance(before, Tensor) or not _alike(before, after):
        raise UnsupportedError(
            f"Batch norm of {type(module).__name__} cannot be folded: the folded copy gives another output. "
            "Leave gamma and epsilon out, or use method='tokens' or 'occlusion'."
        )
    return twin


def _alike(before: Tensor, after: Tensor) -> bool:
    return float((before - after).abs().max()) <= ALIKE * max(float(before.abs().max()), 1e-12)


def _pairs(module: nn.Module, x: Tensor) -> list[tuple[nn.Module, _BatchNorm]]:
    """Layers whose output goes into a batch norm, each of them run once."""
    made: list[tuple[Tensor, nn.Module]] = []  # outputs are held, so that their identity is their own
    read: list[tuple[nn.Module, _BatchNorm]] = []
    runs: dict[nn.Module, int] = {}

    def after(layer: nn.Module, _: Any, out: Any) -> None:
        runs[layer] = runs.get(layer, 0) + 1
        if isinstance(layer, nn.Conv2d | nn.Linear) and isinstance(out, Tensor):
            made.append((out, layer))

    def before(norm: nn.Module, given: Any) -> None:
        source = next((layer for out, layer in made if given and out is given[0]), None)
        if source is not None and isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            read.append((source, norm))

    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear | _BatchNorm)]
    handles = [part.register_forward_hook(after) for part in parts]
    handles += [part.register_forward_pre_hook(before) for part in parts if isinstance(part, _BatchNorm)]
    try:
        module(x)
    finally:
        for handle in handles:
            handle.remove()
    sources = [layer for layer, _ in read]
    return [(a, b) for a, b in read if runs[a] == runs[b] == sources.count(a) == 1]


def _fold(layer: nn.Module, norm: _BatchNorm) -> None:
    assert isinstance(layer, nn.Conv2d | nn.Linear)  # noqa: S101  # as found by _pairs
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: S101, PT018
    scale = torch.rsqrt(norm.running_var + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -norm.running_mean * scale if norm.bias is None else norm.bias - norm.running_mean * scale
    bias = shift if layer.bias is None else layer.bias * scale + shift
    layer.weight = nn.Parameter(layer.weight * scale.view(-1, *[1] * (layer.weight.ndim - 1)))
    layer.bias = nn.Parameter(bias.clone())


def _neutralise(module: nn.Module, norm: _BatchNorm) -> None:
    """An identity in place of the norm; a norm with an activation of its own stays, as a scale of one."""
    if type(norm) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if child is norm:
                    setattr(parent, name, nn.Identity())
        return
    assert norm.running_mean is not None and norm.running_var is not None  # noqa: S101, PT018
    norm.running_mean.zero_()
    norm.running_var.fill_(1 - norm.eps)
    if norm.weight is not None:
        norm.weight.fill_(1.0)
        norm.bias.zero_()
