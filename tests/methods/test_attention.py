"""Attention of foreign modules: the softmax over instances, found by its shape, against weights by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnsupportedError

N, D = 9, 6
X = torch.randn(N, D, generator=torch.Generator().manual_seed(0))


class Pooling(nn.Module):
    """A softmax over features first, then one over instances, then one over classes that is not returned."""

    def __init__(self, columns: int = 1, features: int = D) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.score, self.head = (
            nn.Linear(D, features),
            nn.Linear(features, columns),
            nn.Linear(D, 2),
        )

    def weights(self, x: Tensor) -> Tensor:
        return self.score(self.inner(x).softmax(dim=-1)).softmax(dim=-2)  # (..., n, k)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.head(self.weights(x).mT @ x).mean(dim=-2)
        self.chance = pooled.softmax(dim=-1)
        return pooled


def explained(net: nn.Module, **options: object) -> xmil.Explanation:
    return xmil.explain(net, X, method="attention", target=1, **options)


@pytest.mark.parametrize("columns", [1, 2, 4])
def test_pooling_weights(columns: int) -> None:
    net = Pooling(columns).eval()
    e = explained(net)
    np.testing.assert_allclose(e.scores, net.weights(X).mean(dim=1).detach().numpy(), atol=1e-6)
    assert "softmax 0 of 1 over patches, in the module itself" in e.params["softmax"]
    assert any(line.startswith("The attention shown is softmax 0") for line in e.warnings)


def test_a_softmax_over_as_many_features_is_not_taken() -> None:
    """Features as many as instances: only what loses one with an instance weighs instances."""
    net = Pooling(1, features=N).eval()
    np.testing.assert_allclose(explained(net).scores, net.weights(X)[:, 0].detach().numpy(), atol=1e-6)


class Transformer(nn.Module):
    """Two layers of attention with a class token, written out, fused, or as torch's own module."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.token, self.head = kind, nn.Parameter(torch.randn(1, 1, D)), nn.Linear(D, 2)
        self.qkv = nn.ModuleList([nn.Linear(D, 3 * D) for _ in range(2)])
        self.whole = nn.ModuleList([nn.MultiheadAttention(D, 2, batch_first=True) for _ in range(2)])
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h, self.kept = torch.cat([self.token, x], dim=1), []
        for qkv, whole in zip(self.qkv, self.whole, strict=True):
            if self.kind == "module":
                self.kept.append(whole(h, h, h, average_attn_weights=False)[1].detach())
                h = h + whole(h, h, h, need_weights=False)[0]
                continue
            q, k, v = (part.unflatten(-1, (2, D // 2)).transpose(1, 2) for part in qkv(h).chunk(3, dim=-1))
            product = (q @ k.mT / (D // 2) ** 0.5).detach()
            product = (product - product.amax(dim=-1, keepdim=True)).exp()
            self.kept.append(product / product.sum(dim=-1, keepdim=True))
            mixed = (
                F.scaled_dot_product_attention(q, k, v)
                if self.kind == "fused"
                else (q @ k.mT / (D // 2) ** 0.5).softmax(dim=-1) @ v
            )
            h = h + mixed.transpose(1, 2).flatten(-2)
        return self.head(h[:, 0])


@pytest.mark.parametrize("kind", ["plain", "fused", "module"])
def test_the_class_tokens_row(kind: str) -> None:
    net = Transformer(kind).eval()
    e = explained(net)
    with torch.no_grad():
        net(X.unsqueeze(0))
    kept = net.kept  # explain runs fewer instances afterwards
    np.testing.assert_allclose(e.scores, kept[-1].mean(dim=1)[0, 0, 1:].numpy(), atol=1e-6)
    assert "taken as the class token" in e.params["softmax"]
    first = explained(net, layer=0)
    np.testing.assert_allclose(first.scores, kept[0].mean(dim=1)[0, 0, 1:].numpy(), atol=1e-6)


def test_without_a_token_what_instances_receive() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x @ x.mT).softmax(dim=-1) @ x).mean(dim=1)[:, :2]

    expected = (X @ X.mT).softmax(dim=-1).mean(dim=0)
    np.testing.assert_allclose(explained(Mixing()).scores, expected.numpy(), atol=1e-6)


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"No softmax of Mean .* 9 patches"):
        explained(type("Mean", (nn.Module,), {"forward": lambda self, x: x.mean(dim=1)[:, :2]})())
    with pytest.raises(
        InputError, match=r"'layer' parameter of attention must be an int in the range \[0, 1\)"
    ):
        explained(Pooling(), layer=1)
    with pytest.raises(InputError, match="'heads' parameter"):
        explained(Pooling(), heads="max")
    assert "attention" in xmil.list_methods(Pooling())


class Regularised(nn.Module):
    """A second softmax over the instances, computed last, that no logit uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.h = nn.Linear(6, 1), nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.a(x).softmax(dim=1)
        self.penalty = self.b(x).softmax(dim=1).sum()
        return self.h((weights * x).sum(dim=1))


class Heads(nn.Module):
    """As many heads as classes, joined by the last layer, or one head for each class."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.h, self.apart = nn.Linear(6, 2), nn.Linear(12, 2), apart

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.a(x).transpose(1, 2).softmax(dim=-1) @ x  # (1, 2, 6)
        if self.apart:
            return (pooled * self.h.weight.reshape(2, 2, 6)[:, 0]).sum(dim=-1)
        return self.h(pooled.flatten(1))


class Tokened(nn.Module):
    """One layer of attention over the instances and a class token before or behind them."""

    def __init__(self, *, behind: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.h, self.behind = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2), behind
        self.token = nn.Parameter(torch.randn(1, 1, 6))

    def weights(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, self.token] if self.behind else [self.token, x], dim=1)
        return (self.q(rows) @ self.k(rows).mT).softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([x, self.token] if self.behind else [self.token, x], dim=1)
        return self.h((self.weights(x) @ rows)[:, -1 if self.behind else 0])


@pytest.mark.parametrize("behind", [True, False])
def test_a_class_token_may_stand_before_or_behind(behind: bool) -> None:
    net, x = Tokened(behind=behind), torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    e = xmil.explain(net, x, method="attention")
    row = net.weights(x[None])[0].detach()[-1, :-1] if behind else net.weights(x[None])[0].detach()[0, 1:]
    np.testing.assert_allclose(e.scores, row, rtol=1e-5)


def test_a_softmax_that_no_output_uses_is_not_shown() -> None:
    net, x = Regularised(), torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    e = xmil.explain(net, x, method="attention")
    np.testing.assert_allclose(e.scores, net.a(x).softmax(dim=0)[:, 0].detach(), rtol=1e-5)


@pytest.mark.parametrize("apart", [True, False])
def test_rows_are_of_classes_only_where_each_is_of_one(apart: bool) -> None:
    net, x = Heads(apart=apart), torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    e = xmil.explain(net, x, method="attention", target=1)
    weights = net.a(x).softmax(dim=0).detach()
    np.testing.assert_allclose(e.scores, weights[:, 1] if apart else weights.mean(dim=1), rtol=1e-5)
