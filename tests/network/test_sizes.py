"""A module is called and read alike for bags of every size, also if n is the width of one of its layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError

D, HIDDEN, HEADS, PROTOTYPES = 16, 8, 4, 12


class Base(nn.Module):
    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, heads)
        self.head = nn.Linear(HIDDEN * heads, 2)


class OnePerHead(Base):
    """Written for (n, d): with n = HEADS a bag (1, n, d) runs as well, and means something else."""

    def __init__(self) -> None:
        super().__init__(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        weights = torch.transpose(self.score(h), 1, 0).softmax(dim=1)
        return self.head((weights @ h).reshape(1, -1))


class Prototypes(nn.Module):
    """Written for (1, n, d): with n = PROTOTYPES a bag (n, d) runs as well. They are not parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prototypes, self.head = torch.randn(PROTOTYPES, D), nn.Linear(PROTOTYPES, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.prototypes.T).relu().mean(dim=1))


class WithAttention(Base):
    """Logits without a name beside attention: with two instances both have two numbers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.embed(x)
        weights = self.score(h).softmax(dim=-2)
        return {"out": self.head((weights * h).sum(dim=-2)), "attention": weights.squeeze(-1)}


class WithEmbedding(WithAttention):
    """Logits and an embedding: which is which must not depend on n."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        pooled = (self.score(h := self.embed(x)).softmax(dim=-2) * h).sum(dim=-2)
        return self.head(pooled), pooled


class WithProbabilities(Base):
    """Written for (n, d), logits beside their softmax: (1, 1, d) of one instance runs and reads otherwise."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.embed(x)
        weights = self.score(h).T.softmax(dim=1)
        logits = self.head(weights @ h)
        return logits, logits.softmax(dim=1), weights


def bag(n: int) -> xmil.Bag:
    rng = np.random.default_rng(n)
    return xmil.Bag(rng.normal(size=(n, D)), coords=rng.integers(0, 4000, size=(n, 2)))


@pytest.mark.parametrize("method", ["lrp", "one_removed"])
@pytest.mark.parametrize(
    ("kind", "call", "n"),
    [
        (kind, call, n)
        for kind, call in (
            (OnePerHead, "net(x[0])"),
            (Prototypes, None),
            (WithAttention, "net(x)['out']"),
            (WithProbabilities, "net(x[0])[0]"),
        )
        for n in (2, HEADS, HIDDEN, PROTOTYPES, D, 17, 70)
    ]
    + [(WithProbabilities, "net(x[0])[0]", 1)],
)
def test_the_call_does_not_depend_on_the_size(
    kind: type[nn.Module], call: str | None, n: int, method: str
) -> None:
    e = xmil.explain(kind(), bag(n), method=method, target=1)
    assert e.params.get("call") == call
    assert len(e.scores) == n


@pytest.mark.parametrize("n", [2, HIDDEN, 17])
def test_an_embedding_is_never_taken_for_the_logits(n: int) -> None:
    with pytest.raises(InputError, match=r"\[0\] of shape \(1, 2\), \[1\] of shape \(1, 8\)"):
        xmil.explain(WithEmbedding(), bag(n))


@pytest.mark.parametrize("n", [65, 200])
def test_a_hidden_width_of_64_is_no_second_reading(n: int) -> None:
    """Shapes are compared on 64 instances."""
    net = nn.Sequential(nn.Linear(D, 64), nn.ReLU())
    net.add_module("pool", _Mean())
    net.add_module("head", nn.Linear(64, 2))
    assert len(xmil.explain(net, bag(n), target=1).scores) == n


class _Mean(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.mean(dim=1)


class Convolution(nn.Module):
    """Wants (1, d, n): with n = D a bag (1, n, d) runs as well, and features are pooled as instances."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Conv1d(D, HIDDEN, 1), nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).relu().amax(dim=-1))


@pytest.mark.parametrize("n", [D, D + 1])
@pytest.mark.parametrize("method", ["lrp", "one_added"])
def test_features_are_not_taken_for_instances(n: int, method: str) -> None:
    net = Convolution()
    with pytest.raises(InputError):
        xmil.explain(net, bag(n), method=method)
    e = xmil.explain(net, bag(n), method=method, target=1, forward=lambda net, x: net(x.mT))
    with torch.no_grad():
        np.testing.assert_allclose(e.logits, net(torch.tensor(bag(n).features).T[None])[0], rtol=1e-5)
