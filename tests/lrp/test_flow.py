"""Entries: the way back may end at the first linear layer, and nothing of the relevance changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.lrp import AffineRule, Composite, Relevance, trace
from xmil.network import frozen

RULES = {
    "gradient": AffineRule(),
    "epsilon": AffineRule(epsilon=0.1),
    "gamma": AffineRule(epsilon=1e-6, gamma=0.25),
    "absorb": AffineRule(epsilon=0.01, bias="absorb"),
}


class Twice(nn.Module):
    """The input goes through two linear layers, and past them as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([torch.relu(self.first(x)) + self.second(x), x], dim=-1)
        return self.head(joined.mean(dim=1))


class Once(nn.Module):
    """The input goes through one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean(dim=1)


def relevance_of(net: nn.Module, forward: Any, x: Tensor, rule: AffineRule) -> tuple[Relevance, int]:
    with frozen(net):
        traced = trace(forward, x, module=net, composite=Composite(default=rule))
        return traced.relevance(lambda logits: logits[:, 1]), len(traced._entries)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("kind", "entries"), [(Once, 1), (Twice, 2)])
def test_an_entry_gives_what_the_whole_way_gives(kind: type, entries: int, rule: AffineRule) -> None:
    torch.manual_seed(0)
    net, x = kind().double(), torch.randn(3, 6, 5, dtype=torch.float64)
    short, entered = relevance_of(net, net, x, rule)
    whole, none = relevance_of(net, lambda x: net(x.clone()), x, rule)
    assert (entered, none) == (entries if rule.is_gradient else 0, 0)
    tight = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(short.input.instances, whole.input.instances, **tight)
    torch.testing.assert_close(short.input.features, whole.input.features, **tight)
    for shift in (torch.randn(5, dtype=torch.float64), torch.randn(3, 1, 5, dtype=torch.float64)):
        torch.testing.assert_close(short.input.against(shift), whole.input.against(shift), **tight)
    assert short.shares == pytest.approx(whole.shares, rel=1e-10, abs=1e-12)
    total = short.input.instances.sum() + sum(short.shares.values())
    torch.testing.assert_close(total, short.output.sum(), **tight)


def test_a_layer_that_the_output_does_not_need_is_passed_over() -> None:
    torch.manual_seed(0)
    net, x = Twice(), torch.randn(1, 6, 5)
    found, entries = relevance_of(
        net, lambda x: (net.first(x), net.second(x).mean(dim=1))[1], x, RULES["gradient"]
    )
    assert entries == 2
    torch.testing.assert_close(found.input.instances, (x @ net.second.weight[1]).detach() / 6)


@pytest.mark.parametrize("name", ["attnmil", "transmil"])
def test_features_add_up_to_the_scores(name: str) -> None:
    model = xmil.create_model(
        name, in_dim=6, n_classes=2, dim=8, seed=0, **({"heads": 2} if name == "transmil" else {})
    )
    bag = xmil.Bag(torch.randn(9, 6, generator=torch.Generator().manual_seed(0)).numpy())
    plain = xmil.explain(model, bag, method="lrp")
    deep = xmil.explain(model, bag, method="lrp", feature_level=True)
    assert deep.relevance is not None
    torch.testing.assert_close(
        torch.tensor(deep.relevance.sum(axis=1)), torch.tensor(plain.scores), rtol=1e-4, atol=1e-6
    )
