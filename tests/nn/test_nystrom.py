"""Factored Nyström attention against the published way, written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from xmil.nn import DotProductAttention, NystromAttention


def written_out(layer: NystromAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output (b, n, d) and the matrices (b, h, N, N) over the padded sequence, one bag at a time."""
    outs, matrices = [], []
    m = layer.n_landmarks
    for bag in x:
        padded = F.pad(bag, (0, 0, -len(bag) % m, 0))
        q, k, v = (
            t.reshape(len(padded), layer.heads, -1).transpose(0, 1) for t in layer.to_qkv(padded).chunk(3, -1)
        )
        q = q / q.shape[-1] ** 0.5
        q_l, k_l = (t.reshape(layer.heads, m, -1, t.shape[-1]).mean(2) for t in (q, k))
        a1, a2, a3 = (torch.softmax(a @ b.mT, -1) for a, b in ((q, k_l), (q_l, k_l), (q_l, k)))
        z = a2.mT / (a2.sum(-1).max() * a2.sum(-2).max())
        eye = torch.eye(m, dtype=x.dtype)
        for _ in range(layer.pinv_iterations):
            z = 0.25 * z @ (13 * eye - a2 @ z @ (15 * eye - a2 @ z @ (7 * eye - a2 @ z)))
        a = a1 @ z @ a3
        out = a @ v if layer.res_conv is None else a @ v + layer.res_conv(v[None])[0]
        outs.append(layer.to_out(out.transpose(0, 1).flatten(1))[-len(bag) :])
        matrices.append(a)
    return torch.stack(outs), torch.stack(matrices)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), m=st.integers(1, 20), residual=st.booleans(), seed=st.integers(0, 1000))
def test_equals_the_published_computation(n: int, m: int, residual: bool, seed: int) -> None:
    torch.manual_seed(seed)
    layer = NystromAttention(12, heads=3, landmarks=m, residual_kernel=5 if residual else None).double()
    x = torch.randn(2, n, 12, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = written_out(layer, x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(layer(x, rows=1), expected[:, :1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n", [3, 8, 21])
def test_row_vectors_and_rows(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmil.nn.attention.BLOCK_ELEMENTS", 50)
    layer = NystromAttention(12, heads=3, landmarks=8).double()
    x = torch.randn(1, n, 12, dtype=torch.float64)
    with torch.no_grad():
        _, dense = written_out(layer, x)
        factors = layer.attention(x)
        tokens = factors.skip + n
        u = torch.zeros(1, 3, tokens, dtype=torch.float64)
        u[..., factors.skip :] = torch.randn(1, 3, n, dtype=torch.float64)
        real = dense[:, :, -n:, -n:]
        expected = torch.einsum("bhn,bhnm->bhm", u[..., factors.skip :], real)
        torch.testing.assert_close(factors.left(u)[..., factors.skip :], expected, rtol=1e-8, atol=1e-10)
        rows = factors.rows(slice(factors.skip, tokens))[..., factors.skip :]
        torch.testing.assert_close(rows, real, rtol=1e-8, atol=1e-10)
        sums = factors.row_sums()[..., factors.skip :]
        torch.testing.assert_close(sums, dense[:, :, -n:].sum(-1), rtol=1e-8, atol=1e-10)
        assert factors.rows(slice(0, tokens)).shape == (1, 3, tokens, tokens)


def test_a_bag_does_not_depend_on_its_batch_mates() -> None:
    layer = NystromAttention(12, heads=3, landmarks=4).double()
    x = torch.randn(3, 30, 12, dtype=torch.float64) * torch.tensor([0.1, 1.0, 30.0]).reshape(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(
            layer(x), torch.cat([layer(bag[None]) for bag in x]), rtol=1e-9, atol=1e-12
        )


def test_dot_product_attention() -> None:
    layer = DotProductAttention(12, heads=3, residual_kernel=5).double()
    x = torch.randn(1, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = (t.reshape(9, 3, 4).transpose(0, 1) for t in layer.to_qkv(x[0]).chunk(3, -1))
        a = torch.softmax(q @ k.mT / 2, -1)
        expected = layer.to_out((a @ v + layer.res_conv(v[None])[0]).transpose(0, 1).flatten(1))
        torch.testing.assert_close(layer(x)[0], expected)
        torch.testing.assert_close(layer(x, rows=2)[0], expected[:2])
        torch.testing.assert_close(layer.attention(x).rows(slice(0, 9))[0], a)
