"""What models say of themselves: how they pool, attention, instance logits."""

from __future__ import annotations

import pytest
import torch

import xmil
from xmil.core.errors import UnsupportedError
from xmil.models import MILModel

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
def test_the_kind_of_pooling_is_said(name: str) -> None:
    assert model_of(name).pooling == POOLING.get(name)


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
    with pytest.raises(UnsupportedError, match="not sums over patches"):
        model_of("dsmil").instance_logits(x)
    with pytest.raises(UnsupportedError, match="does not join patches by weights"):
        model_of("transmil").attention_weights(x)
