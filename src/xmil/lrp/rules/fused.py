"""Fused kernels of other packages, by the names of their autograd functions.

Their backward gives gradients for all they took. The rules let those to the values pass and stop the others:
attention weights, and a scan's steps and matrices, are constants.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.functions import Gradients, register_function

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

FLASH = "flash_attn.flash_attn_interface."


@register_function(f"{FLASH}FlashAttnFunc", f"{FLASH}FlashAttnVarlenFunc", "xformers.ops.fmha._fMHA")
def attention(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """Queries, keys, values: the AH-rule."""
    return [None, None, gradients[2], *[None] * (len(gradients) - 3)]


@register_function(f"{FLASH}FlashAttnQKVPackedFunc", f"{FLASH}FlashAttnVarlenQKVPackedFunc")
def packed_attention(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """Queries, keys and values in one tensor (..., 3, h, d)."""
    return [_last_of(gradients[0]), *[None] * (len(gradients) - 1)]


@register_function(f"{FLASH}FlashAttnKVPackedFunc", f"{FLASH}FlashAttnVarlenKVPackedFunc")
def half_packed_attention(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """Queries, and keys and values in one tensor (..., 2, h, d)."""
    return [None, _last_of(gradients[1]), *[None] * (len(gradients) - 2)]


def _last_of(gradient: Tensor | None) -> Tensor | None:
    """The values' part of a packed gradient."""
    if gradient is None:
        return None
    kept = torch.zeros_like(gradient)
    kept[..., -1, :, :] = gradient[..., -1, :, :]
    return kept


@register_function("mamba_ssm.ops.selective_scan_interface.SelectiveScanFn")
def selective_scan(engine: Engine, node: Any, gradients: Gradients, upstream: Gradients) -> Gradients:
    """u, delta, A, B, C, D, z: linear in u with the rest constant; y silu(z) in halves where z is live."""
    u, *others = gradients
    ruled: list[Tensor | None] = [u, *[None] * len(others)]
    z = node.saved_tensors[6] if getattr(node, "has_z", False) else None
    if z is None or not node.needs_input_grad[6] or u is None or upstream[0] is None:
        return ruled
    scanned = node.saved_tensors[-1]
    place = _place_of_z(node)
    ruled[0], ruled[place] = 0.5 * u, 0.5 * upstream[0] * scanned * torch.sigmoid(z)
    return ruled


def _place_of_z(node: Any) -> int:
    """Where z is among the tensors given: D, before it, may be None."""
    return 6 if node.saved_tensors[5] is not None else 5
