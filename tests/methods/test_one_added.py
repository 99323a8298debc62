"""`one_added` against loops over companies: what a patch adds to a few ordinary ones."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import XmilError

D = 5
SMALL = {"transmil": {"dim": 16}, "mambamil": {"dim": 16, "attention_dim": 4}, "stamp_vit": {"dim": 16}}
NAMES = ("attnmil", "clam_mb", "maxpool", "meanpool", "addmil", "transmil", "mambamil")


def model_of(name: str) -> nn.Module:
    model = xmil.create_model(name, in_dim=D, n_classes=3, seed=2, **SMALL.get(name, {}))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.3)
    return model


def log_odds(model: nn.Module, rows: np.ndarray, cls: int = 1) -> float:
    with torch.no_grad():
        z = model(torch.from_numpy(rows).float()[None])[0].double()
    return float(z[cls] - torch.logsumexp(z[torch.arange(3) != cls], dim=0))


@pytest.mark.parametrize("name", NAMES)
def test_company_of_a_background(name: str, rng: np.random.Generator) -> None:
    """With as many patches as the company has seats there is one company."""
    model, bag, ordinary = model_of(name), rng.normal(size=(12, D)), rng.normal(size=(1, D))
    e = xmil.explain(model, bag, method="one_added", target=1, background=ordinary)
    alone = log_odds(model, ordinary)
    by_hand = [log_odds(model, np.stack([patch, *ordinary])) - alone for patch in bag]
    np.testing.assert_allclose(e.scores, by_hand, atol=1e-5)
    assert e.params["company_from"] == "user"
    assert e.signed
    assert e.params["output"] == "log_odds"
    assert e.stderr is None  # there is nothing to draw
    assert e.stable is None


@pytest.mark.parametrize("name", NAMES)
def test_company_of_the_bag(name: str, rng: np.random.Generator) -> None:
    """The mean over draws comes to the mean over every company of other patches."""
    model, bag = model_of(name), rng.normal(size=(6, D))
    e = xmil.explain(model, bag, method="one_added", target=1, company=2, draws=150, seed=3)
    expected = []
    for i in range(6):
        others = [np.array(rows) for rows in combinations(set(range(6)) - {i}, 2)]
        gains = [log_odds(model, bag[np.sort([*rows, i])]) - log_odds(model, bag[rows]) for rows in others]
        expected.append(np.mean(gains))
    assert e.params["company_from"] == "bag"
    assert (np.abs(e.scores - expected) < 4.5 * e.stderr + 1e-6).all()
    assert e.stable is not None


def test_every_other_patch_is_company_in_a_small_bag(rng: np.random.Generator) -> None:
    model, bag = model_of("attnmil"), rng.normal(size=(4, D))
    e = xmil.explain(model, bag, method="one_added", target=1)
    removed = xmil.explain(model, bag, method="one_removed", target=1, output="log_odds")
    np.testing.assert_allclose(e.scores, removed.scores, atol=1e-6)


def test_company_of_the_checkpoint(rng: np.random.Generator) -> None:
    model, bag, ordinary = model_of("attnmil"), rng.normal(size=(12, D)), rng.normal(size=(40, D))
    model.background = xmil.background([ordinary])
    e = xmil.explain(model, bag, method="one_added", target=1)
    own = xmil.explain(model, bag, method="one_added", target=1, background=ordinary)
    alone = xmil.explain(model, bag, method="one_added", target=1, background="bag")
    assert [part.params["company_from"] for part in (e, own, alone)] == ["checkpoint", "user", "bag"]
    np.testing.assert_array_equal(e.scores, own.scores)
    assert np.abs(e.scores - alone.scores).max() > 1e-3


def test_the_probe_has_signs_where_evidence_switches_a_unit_off() -> None:
    """f = 2 - relu(1 - 8 mean(x)): LRP has nothing to share out, the probe sees the switch."""

    class Off(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = 2 - torch.relu(1 - 8 * x[..., :1].relu().mean(1))
            return torch.cat([torch.zeros_like(z), z], dim=1)

    bag = torch.zeros(30, 2)
    bag[:3, 0] = 1.0
    ordinary = np.zeros((20, 2))
    scores = xmil.explain(Off(), bag, method="one_added", target=1, background=ordinary).scores
    np.testing.assert_allclose(scores, [min(1.0, 8 / 4)] * 3 + [0.0] * 27, atol=1e-6)


@pytest.mark.parametrize("background", [None, np.ones((9, D))])
def test_places_travel(background: np.ndarray | None, rng: np.random.Generator) -> None:
    """Patches of the bag keep their coordinates, those of a background stand at places of the bag."""

    class Placed(nn.Module):
        def forward(self, x: Tensor, coords: Tensor) -> Tensor:
            z = (x[..., 0] * coords[..., 0]).mean(dim=1, keepdim=True)
            return torch.cat([-z, z], dim=1) / 1000

    seen: list[tuple[Tensor, Tensor]] = []

    def forward(net: nn.Module, x: Tensor, *, coords: Tensor) -> Tensor:
        seen.append((x[0], coords[0]))
        out: Tensor = net(x, coords)
        return out

    features, coords = rng.normal(size=(20, D)), 256 * np.stack([np.arange(20), np.arange(20)], axis=1)
    bag = xmil.Bag(features, coords=coords, patch_size=256)
    e = xmil.explain(Placed(), bag, method="one_added", target=1, background=background, forward=forward)
    assert np.isfinite(e.scores).all()
    places = {tuple(row): i for i, row in enumerate(coords.tolist())}
    beside = [(x, where) for x, where in seen if len(x) in (3, 4)]  # a company, alone and with a patch
    assert len(beside) > 8 * 20
    for x, where in beside:
        for patch, place in zip(x, where.tolist(), strict=True):
            row = places[tuple(place)]
            ours = np.allclose(patch, features[row], atol=1e-6)
            assert ours or (background is not None and np.allclose(patch, 1.0))


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"company": 0}, "company"),
        ({"draws": True}, "draws"),
        ({"background": np.ones(D)}, "background"),
        ({"background": np.ones((4, D + 1))}, "background"),
        ({"background": "no/such/folder"}, "no/such/folder"),
        ({"background": "user 0265e09bb2e72c00"}, "0265e09bb2e72c00"),  # as e.params records it
    ],
)
def test_bad_input(wrong: dict[str, object], named: str, rng: np.random.Generator) -> None:
    with pytest.raises(XmilError, match=named):
        xmil.explain(model_of("meanpool"), rng.normal(size=(12, D)), method="one_added", **wrong)


def test_a_model_that_needs_more_patches_gets_a_larger_company(rng: np.random.Generator) -> None:
    """A top-k of four or more cannot run on the usual company of three."""

    class TopFive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., :2].topk(5, dim=1).values.mean(dim=1)

    bag = rng.normal(size=(20, D))
    e = xmil.explain(TopFive(), bag, method="one_added", target=1)
    assert e.params["company"] == 5
    named = xmil.explain(TopFive(), bag, method="one_added", target=1, company=5)
    np.testing.assert_array_equal(e.scores, named.scores)
    with pytest.raises(XmilError, match="at least 5 patches"):
        xmil.explain(TopFive(), bag, method="one_added", target=1, company=4)
    with pytest.raises(XmilError, match="not on 3"):  # it runs on no part of this bag
        xmil.explain(TopFive(), bag[:5], method="one_added", target=1)
