"""The selective scan of Mamba: linear in its sequence once the coefficients are constants.

Jafari et al., "MambaLRP: Explaining Selective State Space Sequence Models", NeurIPS 2024, arXiv:2406.07592.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from xmil.lrp.operations import register_rule
from xmil.nn.scan import scan_adjoint

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine


@register_rule("selective_scan")
def selective_scan(
    engine: Engine,
    function: Any,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
) -> Tensor:
    """Linear in x: dt, A, B and C only make the constant decay and the weights of what comes in and out."""
    constants = [value.detach() for value in (dt, A, B, C, D)]
    with torch.no_grad():
        out: Tensor = function(x, *constants)
    if not x.requires_grad:
        return out
    ruled: Tensor = _ConstantScan.apply(x, out, *constants)  # type: ignore[no-untyped-call]
    return ruled


class _ConstantScan(torch.autograd.Function):
    """Value `out`; the gradient goes to x alone, by one scan backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, *constants: Tensor) -> Tensor:
        ctx.save_for_backward(*constants)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return scan_adjoint(gradients[0], *ctx.saved_tensors), *[None] * 6
