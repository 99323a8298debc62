"""What models say of themselves: parts of a bag, attention, instance logits."""

from __future__ import annotations

import pytest
import torch

import xmil
from xmil.core.errors import UnsupportedError
from xmil.models import MILModel
from xmil.models.attnmil import AttnMIL
from xmil.models.pooling import MaxPool

POOLING = {
    "addmil": "additive",
    "attnmil": "softmax",
    "clam_mb": "softmax",
    "clam_sb": "softmax",
    "maxpool": "max",
    "meanpool": "softmax",
}


def model_of(name: str) -> MILModel:
    return xmil.create_model(name, in_dim=6, n_classes=3, seed=1).double()


@pytest.mark.parametrize("name", xmil.list_models())
@torch.no_grad()
def test_subsets_equal_bags_of_their_own(name: str) -> None:
    model, x = model_of(name), torch.randn(11, 6, dtype=torch.float64)
    members = torch.rand(20, 11) < 0.4
    members[:, 3] |= ~members.any(dim=1)
    h = model.embed(x[None])[0]
    by_hand = torch.cat([model(x[row][None]) for row in members])
    torch.testing.assert_close(model.subsets(h, members), by_hand, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", xmil.list_models())
@torch.no_grad()
def test_without_each_equals_bags_of_their_own(name: str) -> None:
    model, x = model_of(name), torch.randn(11, 6, dtype=torch.float64)
    removed = torch.tensor([4, 0, 10, 7])
    found = model.without_each(model.embed(x[None])[0], removed)
    assert (found is not None) == (POOLING.get(name) in ("softmax", "max"))
    if found is not None:
        by_hand = torch.cat([model(torch.cat([x[:k], x[k + 1 :]])[None]) for k in removed])
        torch.testing.assert_close(found, by_hand, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_parts_without_the_instance_that_has_all_the_weight() -> None:
    model = model_of("attnmil")
    assert isinstance(model, AttnMIL)
    x = torch.randn(5, 6, dtype=torch.float64)
    model.attention.w.weight.mul_(1e4)
    h = model.embed(x[None])[0]
    top = int(model.attend(h[None])[0, :, 0].argmax())
    assert float(model.attention_weights(h[None])[0, top, 0]) == 1.0  # the others vanish beside it
    rest = torch.arange(5) != top
    by_hand = model(x[rest][None])
    torch.testing.assert_close(model.subsets(h, rest[None]), by_hand, rtol=1e-9, atol=1e-12)
    lost = model.without_each(h, torch.arange(5))
    assert lost is not None
    assert lost.isnan().any(dim=1).tolist() == (~rest).tolist()


@pytest.mark.parametrize("name", xmil.list_models())
def test_the_kind_of_pooling_is_said(name: str) -> None:
    assert model_of(name).pooling == POOLING.get(name)


@pytest.mark.parametrize("base", [AttnMIL, MaxPool])
@torch.no_grad()
def test_a_subclass_with_its_own_aggregation_loses_the_closed_form(base: type[MILModel]) -> None:
    class Doubled(base):  # type: ignore[misc, valid-type]
        def aggregate(self, h: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return 2 * super().aggregate(h, mask)

    model, members = Doubled(6, 2).eval(), torch.tensor([[True, False, True]])
    h = model.embed(torch.randn(1, 3, 6))[0]
    assert model.pooling is None
    assert model.without_each(h, torch.arange(3)) is None
    torch.testing.assert_close(model.subsets(h, members), model.aggregate(h[None, [0, 2]]))


@pytest.mark.parametrize("name", xmil.list_models())
@torch.no_grad()
def test_attention_is_said_and_given(name: str) -> None:
    model = model_of(name)
    h = model.embed(torch.randn(2, 7, 6, dtype=torch.float64))
    if model.no_attention is not None:
        assert name in ("meanpool", "maxpool")
    elif model.attention_layers():
        assert name in ("stamp_vit", "transmil")
    else:
        weights = model.attention_weights(h)
        assert weights.shape[:2] == (2, 7)
        assert not model.class_attention or weights.shape[2] == model.n_classes
        torch.testing.assert_close(weights.sum(dim=1), torch.ones_like(weights[:, 0]))


@torch.no_grad()
def test_only_additive_models_have_instance_logits() -> None:
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    additive = model_of("addmil")
    torch.testing.assert_close(additive.instance_logits(x).sum(dim=1), additive(x))
    with pytest.raises(UnsupportedError, match="not sums over instances"):
        model_of("dsmil").instance_logits(x)
    with pytest.raises(UnsupportedError, match="does not join instances by weights"):
        model_of("transmil").attention_weights(x)
