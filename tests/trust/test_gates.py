"""Item 2: the account does not depend on how a gate, or a product with it, is written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import xmil

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
Gate = Callable[[Tensor], Tensor]

GATES: dict[str, Gate] = {  # of the logits L (1, n, 1): all equal to sigmoid(L)
    "sigmoid": torch.sigmoid,
    "method": lambda L: L.sigmoid(),
    "one minus the other side": lambda L: 1 - torch.sigmoid(-L),
    "rsub": lambda L: torch.rsub(torch.sigmoid(-L), 1),
    "expit": torch.special.expit,
    "sum of gates": lambda L: 0.3 * torch.sigmoid(L) + 0.7 * torch.sigmoid(L),
    "product of gates": lambda L: torch.sigmoid(L).sqrt() * torch.sigmoid(L).sqrt(),
}

REWRITES: dict[str, Gate] = {  # all the identity
    "mT": lambda g: g.mT.mT,
    "1 - (1 - g)": lambda g: 1 - (1 - g),
    "clamp": lambda g: g.clamp(0.0, 1.0),
    "where": lambda g: torch.where(g > -1, g, torch.zeros(())),
    "method where": lambda g: g.where(g > -1, torch.zeros(())),
    "masked_fill": lambda g: g.masked_fill(g > 2, 0.0),
    "cat": lambda g: torch.cat([g[:, :2], g[:, 2:]], dim=1),
    "stack": lambda g: torch.stack([g, 2 * g])[0],
    "mean of stack": lambda g: torch.stack([g, g]).mean(dim=0),
    "split": lambda g: torch.cat(g.split(2, dim=1), dim=1),
    "unbind": lambda g: torch.stack(g.unbind(1), dim=1),
    "index": lambda g: g[:, torch.arange(6)],
    "index_select": lambda g: g.index_select(1, torch.arange(6)),
    "gather": lambda g: g.gather(1, torch.arange(6).view(1, 6, 1)),
    "reshape": lambda g: g.reshape(6).view(1, 6, 1),
    "unsqueeze": lambda g: g.unsqueeze(0).squeeze(0),
    "times one": lambda g: g * torch.ones(6, 1),
    "over one": lambda g: g / 1.0,
    "plus zero": lambda g: g + torch.zeros(6, 1),
    "negated twice": lambda g: torch.neg(-g),
    "flipped twice": lambda g: g.flip(1).flip(1),
    "expanded": lambda g: g.expand(1, 6, 3)[..., :1],
    "padded": lambda g: F.pad(g, (0, 0, 1, 1))[:, 1:-1],
    "maximum": lambda g: torch.maximum(g, torch.zeros(6, 1)),
    "einsum": lambda g: torch.einsum("bnk->bnk", g),
    "identity matrix": lambda g: torch.eye(6) @ g,
    "double": lambda g: g.double().float(),
    "dropout": lambda g: F.dropout(g, 0.5, training=False),
    "square root of the square": lambda g: g.square().sqrt(),
    "power": lambda g: (g**2) ** 0.5,
    "relu": F.relu,
    "scattered": lambda g: torch.zeros(1, 6, 1).scatter_add(1, torch.arange(6).view(1, 6, 1), g),
    "written": lambda g: _written(g),
    "keyword": lambda g: torch.mul(input=g, other=1.0),
}

POOLED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # all equal to sum over n of g h
    "sum": lambda g, h: (g * h).sum(dim=1),
    "other way round": lambda g, h: (h * g).sum(1),
    "keywords": lambda g, h: torch.sum(input=torch.mul(input=h, other=g), dim=1),
    "matmul": lambda g, h: (g.mT @ h).squeeze(1),
    "bmm": lambda g, h: torch.bmm(g.mT, h)[:, 0],
    "mm": lambda g, h: torch.mm(g[0].T, h[0]),
    "mv": lambda g, h: torch.mv(h[0].T, g[0, :, 0]).unsqueeze(0),
    "einsum": lambda g, h: torch.einsum("bnk,bnd->bd", g, h),
    "einsum of a list": lambda g, h: torch.einsum("bnk,bnd->bd", [g, h]),
    "in place": lambda g, h: h.clone().mul_(g).sum(dim=1),
}


def _written(g: Tensor) -> Tensor:
    out = torch.zeros(1, 6, 1)
    out[:, :6] = g
    return out


class Pooled(nn.Module):
    """relu(lin(x)), weighed by a gate and summed."""

    def __init__(self, gate: Gate, pooled: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lin, self.u, self.fc = nn.Linear(8, 5), nn.Linear(8, 1), nn.Linear(5, 2)
        self.gate, self.pooled = gate, pooled

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pooled(self.gate(self.u(x)), F.relu(self.lin(x))))


def account(gate: Gate, pooled: Callable[[Tensor, Tensor], Tensor]) -> tuple[np.ndarray, np.ndarray]:
    e = xmil.explain(Pooled(gate, pooled), X, target=1, preset="exact")
    assert e.audit is not None
    return e.scores, np.array(list(e.audit.as_dict().values()))


PLAIN = account(torch.sigmoid, POOLED["sum"])


def same(gate: Gate, pooled: Callable[[Tensor, Tensor], Tensor]) -> None:
    scores, shares = account(gate, pooled)
    np.testing.assert_allclose(scores, PLAIN[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(shares, PLAIN[1], rtol=1e-4, atol=1e-6)


def test_item_02_the_plain_gate_is_a_constant() -> None:
    net = Pooled(torch.sigmoid, POOLED["sum"])
    with torch.no_grad():
        g, h = torch.sigmoid(net.u(X)), F.relu(net.lin(X))
        expected = (X * ((g * (h > 0) * net.fc.weight[1]) @ net.lin.weight)).sum(dim=1)
    np.testing.assert_allclose(PLAIN[0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*GATES, *REWRITES])
def test_item_02_each_rewrite_gives_the_same_account(name: str) -> None:
    gate = GATES.get(name) or (lambda L: REWRITES[name](torch.sigmoid(L)))
    same(gate, POOLED["sum"])
    same(gate, POOLED["matmul"])


@pytest.mark.parametrize("name", POOLED)
def test_item_02_each_product_gives_the_same_account(name: str) -> None:
    same(torch.sigmoid, POOLED[name])


@settings(max_examples=60, deadline=None)
@given(
    gate=st.sampled_from(sorted(GATES)),
    steps=st.lists(st.sampled_from(sorted(REWRITES)), max_size=4),
    pooled=st.sampled_from(sorted(POOLED)),
)
def test_item_02_any_rewrites_give_the_same_account(gate: str, steps: list[str], pooled: str) -> None:
    def rewritten(logits: Tensor) -> Tensor:
        g = GATES[gate](logits)
        for step in steps:
            g = REWRITES[step](g)
        return g

    same(rewritten, POOLED[pooled])


def test_item_02_both_sides_of_a_mixture_are_gates() -> None:
    """s a + (1 - s) b, as in CAMIL: each side keeps what its gate lets through."""

    class Mixture(nn.Module):
        def __init__(self, other: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.a, self.b, self.u, self.fc = (nn.Linear(8, k) for k in (5, 5, 1, 5))
            self.fc, self.other = nn.Linear(5, 2), other

        def forward(self, x: Tensor) -> Tensor:
            logits = self.u(x)
            mixed = torch.sigmoid(logits) * self.a(x) + self.other(logits) * self.b(x)
            return self.fc(mixed.mean(dim=1))

    found = [
        xmil.explain(Mixture(other), X, target=0, preset="exact")
        for other in (lambda L: 1 - torch.sigmoid(L), lambda L: torch.sigmoid(-L))
    ]
    np.testing.assert_allclose(found[0].scores, found[1].scores, rtol=1e-4, atol=1e-6)
    for share in ("instances", "bias", "other"):
        assert getattr(found[0].audit, share) == pytest.approx(getattr(found[1].audit, share), abs=1e-6)


def test_item_02_a_linear_layer_on_gates_is_no_gate() -> None:
    """A sigmoid may be a hidden activation: what a layer reads from it is a value."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.W = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            read = torch.sigmoid(self.first(x)) @ self.W
            return (read * torch.tanh(x[..., :3])).mean(dim=1)

    e = xmil.explain(Hidden(), X, target=0, feature_level=True, preset="exact")
    assert e.relevance is not None
    assert np.abs(e.relevance[:, 3:]).max() > 1e-4  # reached through `first`


@pytest.mark.parametrize("rewrite", ["mT", "1 - (1 - g)", "cat", "einsum"])
def test_item_02_uniform_gates_are_shared_in_halves_however_written(rewrite: str) -> None:
    net = Pooled(lambda L: REWRITES[rewrite](torch.sigmoid(L)), POOLED["einsum"])
    plain = Pooled(torch.sigmoid, POOLED["sum"])
    one, other = (xmil.explain(n, X, target=1, gates="uniform", preset="exact") for n in (net, plain))
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-6)


def test_item_02_a_gate_that_was_written_over_is_none() -> None:
    def overwritten(h: Tensor) -> Tensor:
        g = torch.sigmoid(h)
        g[:] = torch.tanh(h)
        return g

    nets = [Pooled(gate, POOLED["sum"]) for gate in (overwritten, torch.tanh)]
    one, other = (xmil.explain(net, X, target=1, preset="exact") for net in nets)
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-6)
