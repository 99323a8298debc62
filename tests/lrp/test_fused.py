"""Fused kernels by their published signatures: stand-ins computed plainly, against the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lrp.test_rules import TIGHT, closes, normal, relevance_of
from xmil.core.errors import UnsupportedError
from xmil.lrp import FUNCTION_RULES, RULES, Engine, backward_is_rule, register_function, register_rule, trace


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention of (b, n, h, e), and the logarithms of its normalisers (b, h, n)."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bnhe,bmhe->bhnm", q, k) * scale
    return torch.einsum("bhnm,bmhe->bnhe", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1)


def recomputed(ctx: Any, function: Any, gradient: Tensor) -> list[Tensor | None]:
    """Gradients for saved tensors by autograd, as a fused backward gives them."""
    tensors = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
    with torch.enable_grad():
        out = function(*tensors)
    return list(torch.autograd.grad(out, [t for t in tensors if t is not None], gradient, allow_unused=True))


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                deterministic, return_softmax, is_grad_enabled):  # fmt: skip
        ctx.save_for_backward(q, k, v)
        ctx.scale = softmax_scale
        out, lse = attended(q, k, v, softmax_scale)
        return (out, lse, None) if return_softmax else out

    @staticmethod
    def backward(ctx, gradient, *_):
        found = recomputed(ctx, lambda q, k, v: attended(q, k, v, ctx.scale)[0], gradient)
        return (*found, *[None] * 9)


class FlashAttnQKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, dropout_p, softmax_scale, causal):
        ctx.save_for_backward(qkv)
        return attended(*qkv.unbind(2))[0]

    @staticmethod
    def backward(ctx, gradient):
        return (*recomputed(ctx, lambda qkv: attended(*qkv.unbind(2))[0], gradient), None, None, None)


class FlashAttnKVPackedFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, dropout_p):
        ctx.save_for_backward(q, kv)
        return attended(q, *kv.unbind(2))[0]

    @staticmethod
    def backward(ctx, gradient):
        return (*recomputed(ctx, lambda q, kv: attended(q, *kv.unbind(2))[0], gradient), None)


class _fMHA(torch.autograd.Function):  # noqa: N801  # as published
    @staticmethod
    def forward(ctx, op, q, k, v, attn_bias=None, p=0.0, scale=None):
        ctx.save_for_backward(q, k, v)
        return attended(q, k, v)[0]

    @staticmethod
    def backward(ctx, gradient):
        found = recomputed(ctx, lambda q, k, v: attended(q, k, v)[0], gradient)
        return (None, *found, None, None, None)


class SelectiveScanFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
        ctx.has_z = z is not None
        out = scanned(u, delta, A, B, C, D)
        ctx.save_for_backward(
            u, delta, A, B, C, D, *([z] if ctx.has_z else []), delta_bias, u, *([out] * ctx.has_z)
        )
        return out * F.silu(z) if ctx.has_z else out

    @staticmethod
    def backward(ctx, gradient):
        u, delta, A, B, C, D, *rest = ctx.saved_tensors
        given = [t for t in (u, delta, A, B, C, D) if t is not None]
        leaves = [t.detach().requires_grad_() for t in given]
        z = rest[0] if ctx.has_z else None
        with torch.enable_grad():
            y = scanned(*leaves) if D is not None else scanned(*leaves, None)
            y = y if z is None else y * F.silu(z)
        found = list(torch.autograd.grad(y, leaves, gradient))
        found += [None] * (6 - len(found))
        dz = None if z is None else gradient * rest[-1] * torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))
        return (*found, dz, None, None)


def scanned(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> Tensor:
    """h_t = exp(dt A) h_{t-1} + dt B_t u_t, y_t = C_t h_t + D u_t; u (b, e, n), B and C (b, s, n)."""
    h, out = torch.zeros(*u.shape[:2], A.shape[1], dtype=u.dtype), []
    for t in range(u.shape[-1]):
        dt = delta[..., t, None]
        h = torch.exp(dt * A) * h + dt * B[:, None, :, t] * u[..., t, None]
        out.append((h * C[:, None, :, t]).sum(dim=-1))
    y = torch.stack(out, dim=-1)
    return y if D is None else y + D[:, None] * u


for _function, _home in (
    (FlashAttnFunc, "flash_attn.flash_attn_interface"),
    (FlashAttnQKVPackedFunc, "flash_attn.flash_attn_interface"),
    (FlashAttnKVPackedFunc, "flash_attn.flash_attn_interface"),
    (_fMHA, "xformers.ops.fmha"),
    (SelectiveScanFn, "mamba_ssm.ops.selective_scan_interface"),
):
    _function.__module__ = _home

WQ, WK, WV = (
    torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
)


def heads(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).unflatten(-1, (2, 4))


ATTENTIONS = {
    "flash": lambda q, k, v: FlashAttnFunc.apply(
        q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, False, True
    ),
    "flash packed": lambda q, k, v: FlashAttnQKVPackedFunc.apply(torch.stack([q, k, v], 2), 0.0, None, False),
    "flash half packed": lambda q, k, v: FlashAttnKVPackedFunc.apply(q, torch.stack([k, v], dim=2), 0.0),
    "xformers": lambda q, k, v: _fMHA.apply(None, q, k, v),
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    ).transpose(1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_fused_attention_is_dense_attention_with_constant_weights(name: str) -> None:
    x, seed = normal(1, 7, 8), normal(1, 7, 8)
    module = nn.Identity()
    traced = trace(
        lambda t: ATTENTIONS[name](heads(t, WQ), heads(t, WK), heads(t, WV)).reshape(1, -1), x, module=module
    )
    found = traced.relevance(lambda logits: (logits * seed.flatten()).sum(dim=-1))
    q, k, v = (heads(x, w) for w in (WQ, WK, WV))
    torch.testing.assert_close(traced.logits, attended(q, k, v)[0].reshape(1, -1), **TIGHT)
    p = (torch.einsum("bnhe,bmhe->bhnm", q, k) / 2).softmax(dim=-1)
    to_values = torch.einsum("bhnm,bnhe->bmhe", p, seed.unflatten(-1, (2, 4))).flatten(2)
    torch.testing.assert_close(found.input.features, x * (to_values @ WV.T), **TIGHT)
    assert closes(found)


def dilated(x: Tensor, attention: Any, dense: bool) -> Tensor:
    """Two branches of attention over segments, mixed by their normalisers, as LongNet mixes them."""
    outs, norms = [], []
    for length in (3, 6):
        parts = [(heads(s, WQ), heads(s, WK), heads(s, WV)) for s in x.split(length, dim=1)]
        found = [attended(*part) if dense else attention(*part) for part in parts]
        outs.append(torch.cat([f[0] for f in found], dim=1))
        norms.append(torch.cat([f[1] for f in found], dim=2).transpose(1, 2).unsqueeze(-1))
    total = torch.stack(norms).logsumexp(dim=0)
    return sum(out * (norm - total).exp() for out, norm in zip(outs, norms, strict=True))


def test_dilated_attention_by_its_normalisers_equals_dense_attention() -> None:
    def flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = FlashAttnFunc.apply(q, k, v, 0.0, None, False, (-1, -1), 0.0, None, False, True, True)
        return out, lse

    x, seed = normal(1, 6, 8), normal(1, 6, 2, 4)
    found = relevance_of(lambda t: dilated(t, flash, dense=False), x, seed=seed)
    plain = relevance_of(lambda t: dilated(t, None, dense=True), x, seed=seed)
    torch.testing.assert_close(found.output, plain.output, **TIGHT)
    torch.testing.assert_close(found.input.features, plain.input.features, **TIGHT)
    assert closes(found)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_selective_scan_has_constant_steps_and_matrices(gated: bool, direct: bool) -> None:
    e, s, n = 3, 2, 5
    w_delta, w_b, w_c, w_z = normal(e, e), normal(s, e), normal(s, e), normal(e, e)
    A, D = -normal(e, s).exp(), normal(e) if direct else None
    u, seed = normal(1, e, n), normal(1, e, n)

    def scan(t: Tensor) -> Tensor:
        parts = (F.softplus(w_delta @ t), A, w_b @ t, w_c @ t, D, w_z @ t if gated else None)
        return SelectiveScanFn.apply(t, *parts)

    found = relevance_of(scan, u, seed=seed)
    parts = (F.softplus(w_delta @ u), A, w_b @ u, w_c @ u, D)
    z, half = w_z @ u, 0.5 if gated else 1.0
    y = scanned(u, *parts)
    weight = seed * F.silu(z) if gated else seed
    expected = torch.zeros_like(u)
    for i in range(e):
        for t in range(n):  # what one input adds to the scan, with the rest constant
            alone = torch.zeros_like(u)
            alone[0, i, t] = u[0, i, t]
            expected[0, i, t] = half * (weight * scanned(alone, *parts)).sum()
    if gated:
        expected += u * (w_z.T @ (0.5 * seed * y * torch.sigmoid(z)))
    torch.testing.assert_close(found.input.features, expected, rtol=1e-9, atol=1e-10)
    assert closes(found)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_a_rule_for_a_custom_function_can_be_added() -> None:
    name = f"{__name__}.Doubled"
    with pytest.raises(UnsupportedError, match=r"Doubled.*xmil\.lrp\.register_function"):
        relevance_of(Doubled.apply, normal(2, 3), seed=normal(2, 3))

    @register_function(name)
    def halved(engine: Engine, node: Any, gradients: Any, upstream: Any) -> list[Tensor]:
        return [0.5 * gradients[0]]

    try:
        x, g = normal(2, 3), normal(2, 3)
        torch.testing.assert_close(relevance_of(Doubled.apply, x, seed=g).input.features, x * g, **TIGHT)
    finally:
        del FUNCTION_RULES._entries[name]


def test_a_rule_may_be_an_autograd_function_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    @backward_is_rule
    class Pool(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, out):
            ctx.save_for_backward(x, out)
            return out.view_as(out)

        @staticmethod
        def backward(ctx, gradient):
            x, out = ctx.saved_tensors
            return (gradient * out).unsqueeze(0) * F.softmax(x, dim=0) / x, None

    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))

    @register_rule("logsumexp")
    def by_weight(engine: Engine, function: Any, x: Tensor, dim: int) -> Tensor:
        """Every input gets its softmax weight of the relevance."""
        return Pool.apply(x, function(x.detach(), dim))

    x, g = normal(4, 3), normal(3)
    found = relevance_of(lambda v: torch.logsumexp(v, 0), x, seed=g)
    torch.testing.assert_close(found.input.features, F.softmax(x, 0) * (g * torch.logsumexp(x, 0)), **TIGHT)


def test_side_outputs_without_a_rule_do_not_matter() -> None:
    """A loss and a statistic in forward; the logits do not need them."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.seen = nn.Linear(4, 2).double(), None

        def forward(self, x: Tensor) -> Tensor:
            logits = self.fc(x).mean(dim=1)
            self.loss = F.cross_entropy(logits, torch.tensor([1])) + torch.logdet(torch.cov(x[0].T))
            self.seen = Doubled.apply(x).erfinv()
            return logits

    net = WithLoss().requires_grad_(False)
    x = normal(1, 6, 4)
    found = trace(net, x, module=net).relevance(lambda logits: logits[:, 1])
    torch.testing.assert_close(found.input.features, x * net.fc.weight[1] / 6, **TIGHT)
    assert net.loss.requires_grad  # it was live, and is left alone


def test_what_lies_on_the_way_is_refused_from_any_depth() -> None:
    with pytest.raises(UnsupportedError, match="'logcumsumexp'"):
        relevance_of(lambda v: (v.logcumsumexp(0)[-1] * 2 + v[0]).relu(), normal(4, 3), seed=normal(3))
    with pytest.raises(UnsupportedError, match="'pow' with an exponent that depends on the input"):
        relevance_of(lambda v: v.abs() ** v + v, normal(4, 3), seed=normal(4, 3))
    with pytest.raises(UnsupportedError, match="'digamma'"):
        relevance_of(lambda v: v.abs().digamma().topk(2, dim=0).values, normal(4, 3), seed=normal(2, 3))
