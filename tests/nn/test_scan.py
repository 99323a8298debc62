"""The selective scan against its recurrence, step by step, and its gradients against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from xmil.nn import scan_adjoint, selective_scan

SIZES = [(1, 1), (1, 7), (3, 40)]
Inputs = tuple[Tensor, ...]


@pytest.fixture(params=["plain", "one chunk", "chunks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain operations; the in-place recurrence in one chunk; and in chunks of five steps."""
    if request.param != "plain":
        monkeypatch.setattr("xmil.nn.scan.SHORT", 0)
    if request.param == "chunks":
        monkeypatch.setattr("xmil.nn.scan.CHUNK_ELEMENTS", 5 * 3 * 4 * 2)
    return str(request.param)


def inputs(b: int, n: int, e: int = 4, s: int = 2, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    dt = torch.nn.functional.softplus(draw(b, n, e))
    return draw(b, n, e), dt, -draw(e, s).exp(), draw(b, n, s), draw(b, n, s), draw(e)


def by_steps(values: Inputs) -> np.ndarray:
    """The recurrence in loops over bags, steps, channels and states."""
    x, dt, A, B, C, D = (value.double().numpy() for value in values)
    y = np.zeros_like(x)
    for b in range(len(x)):
        h = np.zeros(A.shape)
        for t in range(x.shape[1]):
            for e in range(A.shape[0]):
                for s in range(A.shape[1]):
                    h[e, s] = np.exp(dt[b, t, e] * A[e, s]) * h[e, s] + dt[b, t, e] * B[b, t, s] * x[b, t, e]
                y[b, t, e] = sum(C[b, t, s] * h[e, s] for s in range(A.shape[1])) + D[e] * x[b, t, e]
    return y


def in_autograd(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The recurrence in operations that autograd differentiates by itself."""
    h, out = x.new_zeros(x.shape[0], *A.shape), []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        h = decay * h + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        out.append((h * C[:, t, None, :]).sum(-1) + D * x[:, t])
    return torch.stack(out, dim=1)


@pytest.mark.parametrize(("b", "n"), SIZES)
def test_values(b: int, n: int, way: str) -> None:
    values = inputs(b, n)
    np.testing.assert_allclose(selective_scan(*values).numpy(), by_steps(values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("b", "n"), SIZES)
def test_gradients(b: int, n: int, dtype: torch.dtype, tolerance: float, way: str) -> None:
    leaves = [value.requires_grad_(True) for value in inputs(b, n, dtype=dtype)]
    seed = torch.randn(b, n, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad(in_autograd(*leaves), leaves, seed)
    found = torch.autograd.grad(selective_scan(*leaves), leaves, seed)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize(("b", "n"), SIZES)
def test_adjoint(b: int, n: int, dtype: torch.dtype, tolerance: float, way: str) -> None:
    """With constant coefficients the gradient to x is one scan backwards."""
    x, *constants = inputs(b, n, dtype=dtype)
    x.requires_grad_(True)
    seed = torch.randn(b, n, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))
    (expected,) = torch.autograd.grad(in_autograd(x, *constants), x, seed)
    found = scan_adjoint(seed, *constants)
    torch.testing.assert_close(
        found, expected, rtol=10 * tolerance, atol=tolerance * float(expected.abs().max())
    )


def test_stacked_models(way: str) -> None:
    """Under vmap, where several models are trained at once."""
    several = [inputs(2, n) for n in (9, 9, 9)]
    stacked = [torch.stack(group) for group in zip(*several, strict=True)]
    found = torch.vmap(selective_scan)(*stacked)
    for one, values in zip(found, several, strict=True):
        torch.testing.assert_close(one, selective_scan(*values))


def test_nothing_of_the_size_of_all_states_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph holds the inputs and a state for each chunk."""
    monkeypatch.setattr("xmil.nn.scan.SHORT", 0)
    monkeypatch.setattr("xmil.nn.scan.CHUNK_ELEMENTS", 10 * 4 * 8)
    kept: list[int] = []
    leaves = [value.requires_grad_(True) for value in inputs(1, 200, s=8)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        selective_scan(*leaves)
    assert max(kept) == max(200 * 8, 20 * 4 * 8)
