"""Networks of users: every answer is right, refused with the way out, or carries its warning."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError

D = 5


def features(n: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("target", [0, 1, None, xmil.Target(0, against=1)])
def test_item_11_measures_take_the_target_of_the_explanation(target: object) -> None:
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=0)
    e = xmil.explain(model, features(), target=target)
    for measure in (xmil.srg, xmil.sufficiency, xmil.necessity):
        assert measure(model, features(), e) == measure(model, features(), e.scores, target=e.target)
    curve = xmil.flip(model, features(), e)
    assert curve.target == e.target
    full = model(features().unsqueeze(0)).softmax(dim=-1)[0, int(e.target)].item()
    assert curve.values[0] == pytest.approx(full, abs=1e-6)


def test_item_11_bare_scores_of_several_readings_are_refused() -> None:
    scores = np.arange(12.0)
    for task, n in (("classification", 2), ("multilabel", 2), ("regression", 3), ("survival", 3)):
        model = xmil.create_model("meanpool", in_dim=D, n_classes=n, dim=8, seed=0, task=task)
        for measure in (xmil.flip, xmil.srg, xmil.sufficiency, xmil.necessity):
            with pytest.raises(InputError, match="do not say which target"):
                measure(model, features(), scores)
    for task, cls in (("classification", 1), ("regression", 0), ("cox", 0), ("multilabel", 0)):
        model = xmil.create_model("meanpool", in_dim=D, n_classes=1, dim=8, seed=0, task=task)
        assert xmil.flip(model, features(), scores).target == cls


def test_item_11_an_explanation_is_not_measured_for_another_target() -> None:
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, dim=8, seed=0)
    e = xmil.explain(model, features(), target=1)
    with pytest.raises(InputError, match="explanation is of the target 1, but 0"):
        xmil.flip(model, features(), e, target=0)
    flipped = xmil.flip(model, features(), e.scores, target=0)  # asked for in so many words
    assert flipped.target == 0


class TopInstances(nn.Module):
    """The mean of the four instances with the largest first feature: a bag of one cannot be run."""

    def forward(self, x: Tensor) -> Tensor:
        best = x[..., 0].topk(4, dim=1).indices
        return x.gather(1, best.unsqueeze(-1).expand(-1, -1, x.shape[-1])).mean(dim=1)[:, :2]


def test_item_3_ig_probes_the_bag_itself() -> None:
    e = xmil.explain(TopInstances(), features(), method="ig", target=1, steps=8)
    gxi = xmil.explain(TopInstances(), features(), method="gxi", target=1)
    np.testing.assert_allclose(e.scores, gxi.scores, atol=1e-6)  # piecewise linear, one piece on this path
    assert int((e.scores != 0).sum()) == 4
