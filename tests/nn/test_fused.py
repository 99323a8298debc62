"""Attention by fused kernels against the formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xmil.nn import normalised_attention, split_attention, transposed_attention

SIZES = st.integers(1, 70)


def drawn(m: int, n: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 3, m, 8), (2, 3, n, 8), (2, 3, n, 8), (2, 3, m, 8), (1, 1, 1, n)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


@given(m=SIZES, n=SIZES, parts=st.integers(1, 9), biased=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_any_split_equals_the_formula(m: int, n: int, parts: int, biased: bool, seed: int) -> None:
    q, k, v, _, bias = drawn(m, n, seed)
    scores = 0.3 * q @ k.mT + (bias if biased else 0.0)
    whole = bias.expand(2, 3, 1, n) if biased else None
    out, sums = split_attention(q, k, v, whole, scale=0.3, parts=parts)
    torch.testing.assert_close(out, scores.softmax(dim=-1) @ v, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(sums, scores.logsumexp(dim=-1), atol=2e-6, rtol=2e-5)


@given(m=SIZES, n=SIZES, masked=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_transposed_product_equals_the_formula(m: int, n: int, masked: bool, seed: int) -> None:
    q, k, v, g, bias = drawn(m, n, seed)
    if masked:  # all but the first key, perhaps
        bias = bias.masked_fill(bias > 0, float("-inf"))
        bias[..., 0] = 0.0
    weights = (0.3 * q @ k.mT + bias).softmax(dim=-1)
    known = normalised_attention(q, k, v, bias, scale=0.3)
    assert known is not None
    found = transposed_attention(q, k, g, bias, known[1], scale=0.3)
    assert found is not None
    torch.testing.assert_close(found, weights.mT @ g, atol=5e-6, rtol=5e-5)


@pytest.mark.parametrize("change", ["double", "three dimensions", "another width", "no keys"])
def test_what_no_kernel_takes_is_left_to_others(change: str) -> None:
    q, k, v, _, _ = drawn(4, 5, 0)
    if change == "double":
        q, k, v = q.double(), k.double(), v.double()
    elif change == "three dimensions":
        q, k, v = q[0], k[0], v[0]
    elif change == "another width":
        v = v[..., :6]
    else:
        k, v = k[:, :, :0], v[:, :, :0]
    assert normalised_attention(q, k, v, None, scale=1.0) is None
