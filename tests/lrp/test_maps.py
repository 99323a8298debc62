"""Linear maps, hand-written softmaxes, distances: each against a slow version from its formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lrp.test_rules import TIGHT, closes, normal, relevance_of

Map = Callable[[Tensor], Tensor]
A = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
FILTER = torch.fft.rfft(A[0])
INDEX = torch.tensor([0, 2, 1, 0, 2, 2])

LINEAR: dict[str, Map] = {  # of x (6, 6): all linear
    "fft filter": lambda x: torch.fft.irfft(torch.fft.rfft(x) * FILTER, n=6),
    "fft2": lambda x: torch.fft.ifft2(torch.fft.fft2(x) * 2).real,
    "fft shift": lambda x: torch.fft.ifft(torch.fft.ifftshift(torch.fft.fftshift(torch.fft.fft(x)))).real,
    "complex views": lambda x: torch.view_as_real(torch.view_as_complex(x.reshape(6, 3, 2)) * (1 + 2j)),
    "complex parts": lambda x: torch.complex(x, 2 * x).conj().imag,
    "solve": lambda x: torch.linalg.solve(A, x),
    "solve by name": lambda x: torch.linalg.solve(A=A, B=x),
    "triangular": lambda x: torch.linalg.solve_triangular(A.tril(), x, upper=False),
    "cholesky": lambda x: torch.cholesky_solve(x, torch.linalg.cholesky(A @ A.mT)),
    "tensordot": lambda x: torch.tensordot(A, x, dims=([1], [0])),
    "sparse mm": lambda x: torch.sparse.mm(A.to_sparse(), x),
    "sparse of live values": lambda x: torch.sparse_coo_tensor(
        torch.stack([torch.arange(6), INDEX]), x[0], (6, 3)
    ).to_dense(),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "lerp by a tensor": lambda x: torch.lerp(x, x.flip(0), A),
    "scatter_reduce mean": lambda x: torch.zeros(3, 6).double().scatter_reduce(
        0, INDEX[:, None].expand(6, 6), x, "mean", include_self=False
    ),
    "index_reduce": lambda x: A[:3].index_reduce(0, INDEX, x, "mean", include_self=False),
    "addmm": lambda x: torch.addmm(x, A, x, beta=0.5, alpha=2),
    "baddbmm": lambda x: torch.baddbmm(x[None], A[None], x[None]),
    "addbmm": lambda x: torch.addbmm(x, A.expand(2, 6, 6), torch.stack([x, x])),
    "addmv": lambda x: torch.addmv(x[0], A, x[1]),
    "addcmul": lambda x: torch.addcmul(x, A, x, value=0.7),
    "addcdiv": lambda x: torch.addcdiv(x, x.flip(1), A.abs() + 1),
    "mean of var_mean": lambda x: torch.var_mean(x, dim=1)[1],
    "gather of a sum": lambda x: torch.zeros(3, 6).double().index_add(0, INDEX, x)[INDEX],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(beta|[Ss]parse invariant).*:UserWarning")  # torch's own
@pytest.mark.parametrize("name", LINEAR)
def test_linear_maps_pass_on_what_each_input_contributes(name: str) -> None:
    function = LINEAR[name]
    x = normal(6, 6)
    seed = normal(*function(x).shape)
    found = relevance_of(function, x, seed=seed)
    basis = torch.eye(36, dtype=x.dtype).reshape(36, 6, 6)
    contributed = torch.stack([(function(x.flatten()[i] * basis[i]) * seed).sum() for i in range(36)])
    torch.testing.assert_close(found.input.features.flatten(), contributed, **TIGHT)
    assert closes(found)


CONSTANTS: dict[str, Map] = {  # affine in x: the constants' part is kept
    "index_fill": lambda x: x.index_fill(1, torch.tensor([1, 3]), 0.7),
    "lerp to a constant": lambda x: torch.lerp(x, A, 0.3),
    "addmm": lambda x: torch.addmm(A, A, x),
    "baddbmm": lambda x: torch.baddbmm(A[None], x[None], A[None], beta=0.5),
    "addcmul": lambda x: torch.addcmul(A, A, x),
    "scatter_reduce sum": lambda x: A.scatter_reduce(0, INDEX[:, None].expand(6, 6), x, "sum"),
    "complex": lambda x: torch.view_as_real(torch.complex(x, A) * (1 + 2j)),
    "fft plus a constant": lambda x: torch.fft.irfft(torch.fft.rfft(x) + FILTER, n=6),
    "scatter a constant": lambda x: x.scatter_add(0, INDEX[:, None].expand(6, 6), A),
    "stack": lambda x: torch.stack([A, x, A]),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_beside_linear_maps_keep_their_part(name: str) -> None:
    function = CONSTANTS[name]
    x = normal(6, 6)
    seed = normal(*function(x).shape)
    found = relevance_of(function, x, seed=seed)
    kept = float((function(torch.zeros_like(x)) * seed).sum())
    assert sum(found.shares.values()) == pytest.approx(kept, abs=1e-9)
    assert closes(found)


def shifted(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax(dim=0, keepdim=True))
    return e / e.sum(dim=0, keepdim=True)


def by_groups(s: Tensor) -> Tensor:
    """The softmax of graph libraries: exponentials over their sums by group, here one group."""
    group = torch.zeros(6, 6, dtype=torch.long)
    top = s.new_zeros(1, 6).scatter_reduce(0, group, s.detach(), "amax", include_self=False)
    e = (s - top[0]).exp()
    total = s.new_zeros(1, 6).scatter_add_(0, group, e) + 1e-16
    return e / total[0]


SOFTMAXES: dict[str, Map] = {  # of s (6, 6) over the first dimension
    "softmax": lambda s: F.softmax(s, dim=0),
    "by hand": lambda s: s.exp() / s.exp().sum(dim=0),
    "shifted": shifted,
    "by groups": by_groups,
    "times the inverse": lambda s: s.exp() * (1 / s.exp().sum(dim=0)),
    "less logsumexp": lambda s: (s - torch.logsumexp(s, dim=0)).exp(),
    "exp of log_softmax": lambda s: F.log_softmax(s, dim=0).exp(),
    "log of a softmax": lambda s: F.softmax(torch.log(F.softmax(s, dim=0)), dim=0),
    "powers of e": lambda s: torch.e**s / (torch.e**s).sum(dim=0),
    "in place": lambda s: s.clone().sub_(1.0).exp_().div_((s - 1).exp().sum(dim=0)),
}
WEIGHED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda p, v: (p * v).sum(dim=0),
    "matmul": lambda p, v: p.T @ v,
    "einsum": lambda p, v: torch.einsum("nk,nd->kd", p, v),
}


@pytest.mark.parametrize("how", WEIGHED)
@pytest.mark.parametrize("name", SOFTMAXES)
def test_a_softmax_by_hand_weighs_as_a_softmax_does(name: str, how: str) -> None:
    x = normal(6, 6)
    x_out = WEIGHED[how](SOFTMAXES[name](x @ A), x)
    seed = normal(*x_out.shape)
    found = relevance_of(lambda v: WEIGHED[how](SOFTMAXES[name](v @ A), v), x, seed=seed)
    p = F.softmax(x @ A, dim=0)
    basis = torch.eye(36, dtype=x.dtype).reshape(36, 6, 6)
    by_hand = torch.stack([(WEIGHED[how](p, x.flatten()[i] * basis[i]) * seed).sum() for i in range(36)])
    torch.testing.assert_close(found.input.features.flatten(), by_hand, rtol=1e-8, atol=1e-8)
    assert closes(found)


def test_numerator_and_normaliser_apart() -> None:
    """sum e v / sum e, as linear attention and graph networks write it."""
    x, seed = normal(6, 6), normal(6)
    found = relevance_of(lambda v: ((v @ A).exp() * v).sum(0) / (v @ A).exp().sum(0), x, seed=seed)
    torch.testing.assert_close(found.input.features, F.softmax(x @ A, dim=0) * x * seed, rtol=1e-8, atol=1e-9)


def test_an_exponential_as_a_value_is_an_activation() -> None:
    x, g = normal(3, 5), normal(3, 5)
    found = relevance_of(lambda v: torch.where(v > 0, v, v.exp() - 1), x, seed=g)  # ELU by hand
    torch.testing.assert_close(found.input.features, g * F.elu(x), **TIGHT)
    assert closes(found)


@pytest.mark.parametrize("fixed", [False, True])
def test_distances(fixed: bool) -> None:
    """|x - y| is homogeneous in x and y together: x gets x . d|x - y| / dx, a constant y the rest."""
    x, y = normal(4, 3), normal(5, 3)
    seed = normal(4, 5)
    found = relevance_of(lambda v: torch.cdist(v, y if fixed else 2 * v[:1] + y.new_ones(5, 3)), x, seed=seed)
    assert closes(found)
    if fixed:
        difference = x[:, None] - y[None]
        slope = difference / difference.norm(dim=-1, keepdim=True)
        expected = (seed[..., None] * slope * x[:, None]).sum(dim=1)
        torch.testing.assert_close(found.input.features, expected, **TIGHT)


def test_weights_from_distances_are_constants() -> None:
    x, seed = normal(6, 3), normal(6, 3)
    plain = relevance_of(lambda v: F.softmax(-torch.cdist(v, v), dim=-1) @ v, x, seed=seed)
    p = F.softmax(-torch.cdist(x, x), dim=-1)
    torch.testing.assert_close(plain.input.features, x * (p.T @ seed), **TIGHT)


def test_gumbel_softmax_weighs() -> None:
    x, seed = normal(6, 3), normal(6, 3)
    torch.manual_seed(1)
    p = F.gumbel_softmax(x @ x.T, tau=0.5)

    def pooled(v: Tensor) -> Tensor:
        torch.manual_seed(1)
        return F.gumbel_softmax(v @ v.T, tau=0.5) @ v

    found = relevance_of(pooled, x, seed=seed)
    torch.testing.assert_close(found.input.features, x * (p.T @ seed), **TIGHT)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.var_mean(x, dim=1)[0],
        lambda x: x.prod(dim=1),
        lambda x: F.cosine_similarity(x, x.flip(0), dim=1),
        lambda x: x.scatter_reduce(0, INDEX[:, None].expand(6, 6), x.flip(0), "amax"),
        lambda x: A.scatter_reduce(0, INDEX[:, None].expand(6, 6), x, "amin"),
        lambda x: torch.lerp(x, x.flip(1), x.sigmoid()),
        lambda x: torch.addmm(x, x, x.T),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: F.pairwise_distance(x, 2 * A),
        lambda x: torch.expm1(x) + torch.sin(x) + torch.cos(x) + torch.log1p(x.abs()),
        lambda x: x + torch.floor(x) + torch.sign(x),
        lambda x: torch.linalg.solve(torch.eye(6).double() + x.T @ x, x),
        lambda x: torch.linalg.inv(torch.eye(6).double() + x.T @ x) @ x,
    ],
)
def test_the_account_closes(function: Map) -> None:
    x = normal(6, 6)
    assert closes(relevance_of(function, x, seed=normal(*function(x).shape)))


def test_step_functions_are_cut() -> None:
    x, g = normal(3, 5), normal(3, 5)
    found = relevance_of(lambda v: v + torch.round(v), x, seed=g)
    assert found.shares["cut"] == pytest.approx(float((torch.round(x) * g).sum()))
