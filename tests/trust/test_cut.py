"""Item 1: what stops at constants that depend on the bag is its own share, warned of or refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.core.errors import UnsupportedError
from xmil.heatmaps import subtitle

X = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))


class Head(nn.Module):
    """Logits read from a function of the embedded instances (1, n, 8)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lin, self.fc, self.function = nn.Linear(16, 8), nn.Linear(8, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function(self.lin(x)))


def mean(h: Tensor) -> Tensor:
    return h.mean(dim=1)


def quiet(h: Tensor) -> Tensor:
    with torch.no_grad():
        return 3 * mean(h)


def inferred(h: Tensor) -> Tensor:
    with torch.inference_mode():
        return 2 * mean(h)


def buffered(h: Tensor) -> Tensor:
    buffer = torch.zeros(1, 8)
    buffer[:, :8] = mean(h).detach()
    return buffer


def in_parts(h: Tensor) -> Tensor:
    buffer = torch.zeros(1, 8)
    buffer[:, 2:5].copy_(mean(h).detach()[:, 2:5])
    return buffer


CONSTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda h: F.softmax(mean(h), dim=-1),
    "detach": lambda h: mean(h).detach(),
    "data": lambda h: mean(h).data,
    "inverse": lambda h: 1 / (1 + mean(h) ** 2),
    "rsqrt": lambda h: torch.rsqrt(1 + mean(h) ** 2),
    "no_grad": quiet,
    "inference_mode": inferred,
    "item": lambda h: mean(h)[0, 0].item() * torch.ones(1, 8),
    "number": lambda h: torch.full((1, 8), 1.0) * h.mean().item(),
    "one hot": lambda h: F.one_hot(mean(h).argmax(dim=-1), 8).float(),
    "written": buffered,
    "written in part": in_parts,
    "token times weights": lambda h: F.softmax(mean(h), dim=-1) @ torch.ones(8, 8),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_item_01_added_constants_that_depend_on_the_bag_are_cut(name: str) -> None:
    net = Head(lambda h: CONSTANTS[name](h) + mean(h))
    e = xmil.explain(net, X, target=1)
    assert e.audit is not None
    with torch.no_grad():
        constant = CONSTANTS[name](net.lin(X[None]))
        by_hand = float((net.fc.weight[1] * constant).sum())
        live = float((net.fc.weight[1] * (X @ net.lin.weight.T)).mean(dim=0).sum())
        biases = float(net.fc.bias[1] + net.fc.weight[1] @ net.lin.bias)
    assert e.audit.cut == pytest.approx(by_hand, abs=1e-6)
    assert e.audit.instances == pytest.approx(live, abs=1e-6)
    assert e.audit.bias == pytest.approx(biases, abs=1e-6)
    share = abs(by_hand) / (abs(by_hand) + abs(live) + abs(biases))
    assert bool(e.warnings) == (share > 0.1)
    assert all(f"{share:.0%} of" in line and "in Head" in line for line in e.warnings)


@pytest.mark.parametrize(
    "join",
    [
        lambda c, h: torch.cat([c, h], dim=1).mean(dim=1),
        lambda c, h: torch.stack([c.expand_as(h), h]).mean(dim=(0, 2)),
        lambda c, h: torch.where(torch.arange(8) > 3, c, h).mean(dim=1),
        lambda c, h: torch.maximum(c, h).mean(dim=1),
        lambda c, h: h.clamp(max=c).mean(dim=1),
        lambda c, h: h.index_add(1, torch.arange(10), c.expand_as(h)).mean(dim=1),
        lambda c, h: F.linear(h, torch.eye(8), c[0, 0]).mean(dim=1),
        lambda c, h: torch.addmm(c[0], h[0], torch.eye(8)).mean(dim=0, keepdim=True),
        lambda c, h: F.layer_norm(h, (8,), torch.ones(8), c[0, 0]).mean(dim=1),
    ],
)
def test_item_01_joined_constants_that_depend_on_the_bag_are_cut(
    join: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """The same constant given from outside is a class token or a bias; nothing else of the account moves."""
    inside = Head(lambda h: join(F.softmax(h.mean(dim=1, keepdim=True), dim=-1), h))
    with torch.no_grad():
        constant = F.softmax(inside.lin(X[None]).mean(dim=1, keepdim=True), dim=-1)
    outside = Head(lambda h: join(constant, h))
    one, other = (xmil.explain(net, X, target=0) for net in (inside, outside))
    assert one.audit is not None
    assert other.audit is not None
    assert other.audit.cut == 0
    assert one.audit.cut != 0
    kept = one.audit.cut + one.audit.bias + one.audit.class_token
    assert kept == pytest.approx(other.audit.bias + other.audit.class_token, abs=1e-6)
    np.testing.assert_allclose(one.scores, other.scores, atol=1e-7)
    assert abs(one.audit.other) < 1e-6


@pytest.mark.parametrize("name", ["softmax", "detach", "inverse", "no_grad"])
def test_item_01_scores_that_are_all_zero_are_refused(name: str) -> None:
    net = Head(lambda h: CONSTANTS[name](h) + 1e-9 * mean(h))
    with pytest.raises(UnsupportedError, match=r"No relevance reaches the patches.*ig, gxi, single"):
        xmil.explain(net, X, target=1)
    assert np.abs(xmil.explain(net, X, method="single", target=1).scores).max() > 1e-3


class SwitchedOff(nn.Module):
    """Evidence in feature 0 switches a unit off, which raises the output."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.n_outputs = n_outputs

    def forward(self, x: Tensor) -> Tensor:
        z = 2 - F.relu(1 - 8 * F.relu(x[..., :1]).mean(dim=1))
        return z if self.n_outputs == 1 else torch.cat([torch.zeros_like(z), z], dim=-1)


def _bag(evidence: Sequence[int], n: int = 12) -> Tensor:
    bag = torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    bag[:, 0] = 0
    bag[list(evidence), 0] = 10.0
    return bag


@pytest.mark.parametrize(
    ("evidence", "options"),
    [(range(12), {}), ([0, 11], {}), ([5], {}), ([5], {"preset": "paper"}), (range(12), {"contexts": 8})],
)
@pytest.mark.parametrize("n_outputs", [1, 2])
def test_item_01_zero_scores_of_evidence_that_switches_off_are_refused(
    n_outputs: int, evidence: Sequence[int], options: dict[str, Any]
) -> None:
    bag = _bag(evidence)
    with pytest.raises(UnsupportedError, match=r"Every score is zero.*shapley, single, one_removed"):
        xmil.explain(SwitchedOff(n_outputs), bag, target=1, **options)
    assert np.abs(xmil.explain(SwitchedOff(n_outputs), bag, method="single", target=1).scores).max() > 0.5


def test_item_01_zero_scores_are_refused_where_sub_bags_cannot_run() -> None:
    class Fixed(SwitchedOff):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(-1, 12, 4))

    with pytest.raises(UnsupportedError, match="Every score is zero"):
        xmil.explain(Fixed(2), _bag([5]), target=1)


@pytest.mark.parametrize("n", [1, 2, 12])
def test_item_01_zero_scores_of_a_constant_output_are_no_fault(n: int) -> None:
    e = xmil.explain(SwitchedOff(2), _bag([0], n), target=0)
    assert np.all(e.scores == 0)
    assert all("Every score is zero" in text or "same features" in text for text in e.warnings)


def test_item_01_zero_scores_of_instances_that_equal_the_baseline_are_no_fault() -> None:
    bag = torch.ones(6, 16)
    e = xmil.explain(Head(mean), bag, target=1, baseline="bag")
    assert e.audit is not None
    assert np.abs(e.scores).max() < 1e-6
    assert abs(e.audit.baseline) > 1e-3


def test_item_01_the_warning_goes_where_the_scores_go(tmp_path: Path) -> None:
    e = xmil.explain(Head(lambda h: CONSTANTS["softmax"](h) + mean(h)), X, target=1)
    e.save(tmp_path / "e.parquet")
    again = xmil.Explanation.load(tmp_path / "e.parquet")
    assert list(again.warnings) == list(e.warnings)
    assert subtitle(e) == "for class 1; without a background; has warnings"


def test_item_01_zero_features_are_no_fault() -> None:
    net = Head(mean)
    e = xmil.explain(net, torch.zeros(4, 16), target=1, preset="exact")
    assert np.all(e.scores == 0)
    assert ["Every score is zero" in text for text in e.warnings] == [True]


@pytest.mark.parametrize("name", xmil.list_models())
def test_item_01_our_models_cut_nothing(name: str) -> None:
    e = xmil.explain(xmil.create_model(name, in_dim=16, n_classes=3, seed=0), X, target=1, preset="exact")
    assert e.audit is not None
    assert e.audit.cut == 0
    assert not e.warnings


def test_item_01_weights_only_weigh() -> None:
    """Attention multiplies live values: nothing is cut, however the class token takes part."""
    token = torch.ones(1, 1, 8)

    def pooled(h: Tensor) -> Tensor:
        tokens = torch.cat([token.type_as(h).expand(1, -1, -1), h + torch.zeros_like(h)], dim=1)
        return (F.softmax(tokens.sum(dim=-1, keepdim=True), dim=1) * tokens).sum(dim=1)

    e = xmil.explain(Head(pooled), X, target=1)
    assert e.audit is not None
    assert e.audit.cut == 0
    assert e.audit.class_token != 0


@pytest.mark.parametrize(("output", "at_zero"), [("log_odds", -np.log(2)), ("probability", 1 / 3)])
def test_item_01_what_a_bent_output_leaves_is_cut(output: str, at_zero: float) -> None:
    model = xmil.create_model("meanpool", in_dim=16, n_classes=3, seed=0)
    e = xmil.explain(model, X, target=1, output=output)
    z = torch.tensor(e.logits, requires_grad=True)
    value = F.softmax(z, 0)[1] if output == "probability" else z[1] - torch.logsumexp(z[[0, 2]], 0)
    (slope,) = torch.autograd.grad(value, z)
    assert e.audit is not None
    assert e.audit.cut == pytest.approx((value - slope @ z).item() - at_zero, abs=1e-6)
    assert abs(e.audit.other) < 1e-6


class Placed(nn.Module):
    """Coordinates are added to the embedded features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.p, self.h = nn.Linear(6, 5), nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        return self.h(torch.relu(self.e(x) + self.p(coords.float() / 1000)).mean(dim=1))


def test_what_places_add_is_cut_and_no_bias() -> None:
    rng = np.random.default_rng(0)
    features, coords = rng.normal(size=(9, 6)).astype(np.float32), rng.integers(0, 9000, (9, 2))
    near, far = (
        xmil.explain(Placed(), xmil.Bag(features, coords=coords + shift, patch_size=256), target=1)
        for shift in (0, 200_000)
    )
    assert near.audit.bias == pytest.approx(far.audit.bias, abs=0.5)
    assert abs(far.audit.cut - near.audit.cut) > 1
    assert any("stops at values that depend on the bag" in text for text in far.warnings)
