"""Flip curves, top instances, random bands: by hand, the slow way from the definition, ties, tiny bags."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xmil
from xmil.core.errors import InputError, XmilError
from xmil.evaluate import (
    ACTIONS,
    ORDERS,
    Flips,
    flip_order,
    necessity,
    random_band,
    step_counts,
    sufficiency,
    top_instances,
)

SMALL = {
    "attnmil": {"dim": 8, "attention_dim": 4},
    "transmil": {"dim": 16, "heads": 2, "landmarks": 4},
    "addmil": {"hidden": 8},
    "clam_sb": {"dim": 8, "attention_dim": 4},
    "clam_mb": {"dim": 8, "attention_dim": 4},
    "dsmil": {"query_dim": 4},
    "meanpool": {"dim": 8},
    "maxpool": {"dim": 8},
    "mambamil": {"dim": 8, "attention_dim": 4},
    "stamp_vit": {"dim": 8, "heads": 2, "feedforward": 4},
}
D = 6
DEPTH = 300  # float32 additions behind an output: sums over 6 to 41 terms, some ten of them in each layer


class Sum(nn.Module):
    """A foreign network: one logit, the sum of the first feature over instances."""

    def forward(self, x):
        return x[..., 0].sum(dim=1, keepdim=True)


def small(name, seed=0, **changes):
    model = xmil.create_model(name, in_dim=D, n_classes=2, seed=seed, **SMALL[name], **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)  # curves that move
    return model


def slow(model, x, order, counts, *, action, mode, cls):
    """The definition, one forward pass for each step; the bag keeps its own order."""
    values = []
    for count in counts:
        flipped = set(order[:count].tolist())
        keep = [i for i in range(len(x)) if (i in flipped) == (action == "add")]
        if mode == "mask":
            part = torch.zeros_like(x)
            part[keep] = x[keep]
        else:
            part = x[keep] if keep else torch.zeros_like(x)
        with torch.no_grad():
            values.append(torch.softmax(model(part.unsqueeze(0)), dim=-1)[0, cls].item())
    return np.array(values)


def rounding(model, x):
    """How far apart two float32 ways to a probability may lie.

    Each logit is a chain of some DEPTH roundings, each of up to eps of its largest value (1 after a norm), so
    two ways differ by twice as much; a probability of two classes moves by at most half of what they move.
    """
    with torch.no_grad():
        ends = (model(part.unsqueeze(0)) for part in (x, torch.zeros_like(x)))
        largest = max(1.0, *(logits.abs().max().item() for logits in ends))
    return DEPTH * float(np.finfo(np.float32).eps) * largest


def sigmoid(z):
    return 1 / (1 + np.exp(-np.asarray(z, dtype=float)))


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("mode", ["remove", "mask"])
@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 40),
    seed=st.integers(0, 10_000),
    order=st.sampled_from(ORDERS),
    action=st.sampled_from(ACTIONS),
    steps=st.sampled_from([1, 7, 100, "each"]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_fast_equals_slow(name, mode, n, seed, order, action, steps, scale):
    model = small(name, seed)
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(n, D)).astype(np.float32)) * scale
    scores = rng.integers(-3, 4, size=n).astype(np.float32)  # ties
    curve = xmil.flip(
        model, x, scores, target=1, order=order, action=action, mode=mode, steps=steps, seed=seed
    )
    flips = Flips(model, x, target=1)
    ranked = flip_order(flips.check_scores(scores), order=order, seed=flips.tie_seed(seed))
    expected = slow(model, x, ranked, step_counts(n, steps), action=action, mode=mode, cls=1)
    np.testing.assert_allclose(curve.values, expected, rtol=0, atol=rounding(model, x))
    positive = np.flatnonzero(scores > 0)
    (zero,) = slow(model, x, positive, [len(positive)], action="drop", mode=mode, cls=1)
    assert curve.at_zero == pytest.approx(zero, rel=0, abs=rounding(model, x))


def test_every_registered_model_is_compared():
    assert sorted(SMALL) == xmil.list_models()


def test_by_hand():
    """Sum model with features 3, -1, 2, -4 scored by themselves: the logit falls by what leaves."""
    x = torch.tensor([[3.0], [-1.0], [2.0], [-4.0]])
    scores = x[:, 0].numpy()
    expected = {
        ("morf", "drop"): [0, -3, -5, -4, 0],
        ("lerf", "drop"): [0, 4, 5, 3, 0],
        ("abs", "drop"): [0, 4, 1, -1, 0],
        ("morf", "add"): [0, 3, 5, 4, 0],
        ("lerf", "add"): [0, -4, -5, -3, 0],
    }
    for (order, action), logits in expected.items():
        for mode in ("remove", "mask"):
            curve = xmil.flip(Sum(), x, scores, order=order, action=action, mode=mode, steps="each")
            np.testing.assert_allclose(curve.values, sigmoid(logits), atol=1e-7)
            assert curve.aupc == pytest.approx(sigmoid(logits).mean())
            assert curve.aopc == pytest.approx(sigmoid(logits)[0] - sigmoid(logits).mean())
            assert curve.at_zero == pytest.approx(sigmoid(-5))
    gain = sigmoid([0, 4, 5, 3, 0]).mean() - sigmoid([0, -3, -5, -4, 0]).mean()
    assert xmil.srg(Sum(), x, scores, steps="each") == pytest.approx(gain)


def test_flipped_step_and_decision_at_zero():
    x = torch.tensor([[2.0], [1.0], [-1.0], [-1.5]])  # sum 0.5: class 1
    curve = xmil.flip(Sum(), x, x[:, 0].numpy(), steps="each")
    assert curve.flipped == 1  # -1.5 after the first
    assert curve.flipped_at_zero
    lerf = xmil.flip(Sum(), x, x[:, 0].numpy(), order="lerf", steps="each")
    assert lerf.flipped == 4  # only the empty bag, whose tie falls to class 0
    wrong = xmil.flip(Sum(), x, -x[:, 0].numpy(), steps="each")
    assert wrong.at_zero == pytest.approx(sigmoid(3))
    assert not wrong.flipped_at_zero


def test_mean_pooling_by_hand():
    """With identity embedding the mean of what is left; masked instances count as zeros."""
    model = xmil.create_model("meanpool", in_dim=1, n_classes=1, dim=1)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (1.0, 0.0, 1.0, 0.0), strict=True):
            parameter.fill_(value)
    x = torch.tensor([[4.0], [2.0], [1.0]])
    removed = xmil.flip(model, x, [3, 2, 1], steps="each").values
    masked = xmil.flip(model, x, [3, 2, 1], mode="mask", steps="each").values
    np.testing.assert_allclose(removed, sigmoid([7 / 3, 1.5, 1, 0]), atol=1e-6)
    np.testing.assert_allclose(masked, sigmoid([7 / 3, 1, 1 / 3, 0]), atol=1e-6)


def test_contract_counts_and_the_empty_bag():
    model, n = small("transmil"), 37
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0))
    curve = xmil.flip(model, x, x[:, 0].numpy(), target=1)
    assert curve.values.shape == (101,)
    assert curve.counts.tolist() == [round(n * k / 100) for k in range(101)]
    with torch.no_grad():
        empty = torch.softmax(model(torch.zeros(1, n, D)), dim=-1)[0, 1]
    assert curve.values[-1] == pytest.approx(float(empty), abs=1e-6)


def test_constant_scores_and_ties_leave_in_equal_steps():
    model, n = small("attnmil"), 200
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0))
    scores = np.zeros(n)
    scores[:20] = np.arange(20) + 1.0  # nine tenths are equal
    curve = xmil.flip(model, x, scores, target=1)
    assert np.diff(curve.counts).tolist() == [2] * 100
    assert len(np.unique(curve.values)) > 90  # no single step takes them all
    other = xmil.flip(model, x, scores, target=1, seed=1)
    np.testing.assert_array_equal(curve.values[:11], other.values[:11])  # the distinct scores come first
    assert not np.array_equal(curve.values, other.values)
    assert np.array_equal(curve.values, xmil.flip(model, x, scores, target=1, seed=0).values)
    constant = xmil.flip(model, x, np.ones(n), target=1)
    assert constant.at_zero == pytest.approx(constant.values[-1])
    np.testing.assert_array_equal(constant.counts, curve.counts)


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("n", [1, 2])
def test_tiny_bags(name, n):
    curve = xmil.flip(small(name), torch.ones(n, D), np.arange(n), target=1)
    assert curve.values.shape == (101,)
    assert np.isfinite(curve.values).all()
    steps = [0] * 51 + [1] * 50 if n == 1 else [0] * 26 + [1] * 49 + [2] * 26
    assert curve.counts.tolist() == steps
    assert len(np.unique(curve.values)) <= n + 1


def test_dominant_attention_leaves_no_rounding_behind():
    """After an instance with all the attention is gone, the rest must share the softmax exactly."""
    model = small("attnmil")
    with torch.no_grad():
        model.attention.w.weight.mul_(80)
    x = torch.randn(50, D, generator=torch.Generator().manual_seed(3)) * 10
    attention = model.attend(model.embed(x.unsqueeze(0)))[0, :, 0].detach().numpy().astype(np.float64)
    assert np.ptp(attention) > 80  # exp underflows in single precision
    flips = Flips(model, x, target=1)
    ranked = flip_order(flips.check_scores(attention), seed=flips.tie_seed(0))
    expected = slow(model, x, ranked, range(51), action="drop", mode="remove", cls=1)
    np.testing.assert_allclose(
        xmil.flip(model, x, attention, target=1, steps="each").values, expected, atol=1e-5
    )


def test_overridden_models_take_the_plain_way():
    class Odd(type(small("attnmil"))):
        def aggregate(self, h, mask=None):
            return super().aggregate(h, mask) + h.shape[1]

    odd = Odd(D, 1, dim=8, attention_dim=4)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    curve = xmil.flip(odd, x, np.arange(5), steps="each")
    with torch.no_grad():
        expected = torch.sigmoid(odd(x[:3].unsqueeze(0)))
    assert curve.values[2] == pytest.approx(float(expected), abs=1e-6)


def test_model_is_left_as_it_was():
    model = small("addmil").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    xmil.flip(model, torch.ones(4, D), np.arange(4), target=1)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_multilabel_and_named_targets():
    model = small("attnmil", task="multilabel", class_names=("a", "b"))
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(0))
    curve = xmil.flip(model, x, x[:, 0].numpy(), target="b")
    with torch.no_grad():
        expected = torch.sigmoid(model(x.unsqueeze(0)))[0, 1]
    assert curve.values[0] == pytest.approx(float(expected), abs=1e-6)
    assert curve.target == 1


@pytest.mark.parametrize("name", ["attnmil", "transmil"])
def test_models_without_classes_give_their_value(name):
    model = xmil.create_model(name, in_dim=D, n_classes=1, seed=0, **SMALL[name])
    model.spec = replace(model.spec, task="regression")
    x = torch.randn(9, D, generator=torch.Generator().manual_seed(0))
    curve = xmil.flip(model, x, x[:, 0].numpy(), target=0, steps="each")
    with torch.no_grad():
        assert curve.values[0] == pytest.approx(model(x.unsqueeze(0)).item(), abs=1e-6)
    assert curve.flipped is None
    assert not curve.flipped_at_zero


def test_one_embedding_serves_many_curves():
    model, calls = small("attnmil"), []
    model.instance.register_forward_hook(lambda *_: calls.append(1))
    flips = Flips(model, torch.randn(30, D), target=1)
    before = len(calls)
    for order in ORDERS:
        flips.curve(np.arange(30), order=order)
    assert len(calls) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"order": "mrof"}, "Did you mean 'morf'"),
        ({"action": "keep"}, "Unknown action 'keep'"),
        ({"mode": "zero"}, "Unknown mode 'zero'"),
        ({"steps": 0}, "The 'steps' parameter of flip must be an int"),
        ({"steps": "all"}, "'percent' or 'each'"),
        ({"scores": [1.0]}, "must be 3 numbers"),
        ({"scores": [1.0, np.nan, 2.0]}, "1 has nan"),
        ({"target": 7}, "0 to 1. Got 7"),
    ],
)
def test_errors_name_the_way_out(changes, words):
    scores = changes.pop("scores", [1.0, 2.0, 3.0])
    with pytest.raises(XmilError, match=words):
        xmil.flip(small("attnmil"), torch.ones(3, D), scores, **{"target": 1, **changes})


@pytest.mark.parametrize("name", ["transmil", "dsmil"])
def test_large_masked_bags_are_filled_in_turn(name, monkeypatch):
    x = torch.randn(30, D, generator=torch.Generator().manual_seed(0)) * 3
    scores = x[:, 0].numpy()
    batched = xmil.flip(small(name), x, scores, target=1, mode="mask").values
    monkeypatch.setattr("xmil.subsets.engine.LARGE", 0)
    np.testing.assert_allclose(
        xmil.flip(small(name), x, scores, target=1, mode="mask").values, batched, atol=1e-6
    )


def test_more_parts_than_a_block(monkeypatch):
    x = torch.randn(50, D, generator=torch.Generator().manual_seed(0)) * 3
    for name in ("attnmil", "maxpool", "clam_mb"):
        whole = xmil.flip(small(name), x, x[:, 0].numpy(), target=1, steps="each").values
        monkeypatch.setattr("xmil.subsets.closed_forms.BLOCK", 7)
        np.testing.assert_allclose(
            xmil.flip(small(name), x, x[:, 0].numpy(), target=1, steps="each").values, whole, atol=1e-7
        )
        monkeypatch.undo()


@pytest.mark.parametrize("mode", ["remove", "mask"])
@pytest.mark.parametrize("name", ["transmil", "dsmil", "addmil", "attnmil", "Sum"])
def test_curves_together_are_those_of_one_after_another(name, mode):
    """Several scores and orders at once, some of them without a positive score, and a sub-bag asked twice."""
    rng = np.random.default_rng(3)
    model = Sum() if name == "Sum" else small(name)
    flips = Flips(model, torch.from_numpy(rng.normal(size=(23, D)).astype(np.float32)), target=0, mode=mode)
    scores = [rng.normal(size=23), rng.normal(size=23), -np.ones(23)]
    asked = [(values, order) for values in scores for order in ("morf", "lerf")]
    together = flips.curves(asked, steps=9, seed=5)
    for (values, order), curve in zip(asked, together, strict=True):
        single = flips.curve(values, order=order, steps=9, seed=5)
        np.testing.assert_allclose(curve.values, single.values, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(curve.at_zero, single.at_zero, rtol=2e-5, atol=2e-6)
        assert (curve.order, curve.flipped, curve.flipped_at_zero) == (
            order,
            single.flipped,
            single.flipped_at_zero,
        )
    keep = [scores[0] > 0, scores[1] > 0, scores[0] > 0]
    np.testing.assert_allclose(
        flips.values_of(keep), [flips.values_of([kept])[0] for kept in keep], rtol=2e-5
    )


X = torch.tensor([[3.0], [-1.0], [2.0], [-4.0]])


def test_sufficiency_and_necessity_by_hand():
    scores = X[:, 0].numpy()
    assert sufficiency(Sum(), X, scores, top=0.5) == pytest.approx(sigmoid(5))
    assert necessity(Sum(), X, scores, top=0.5) == pytest.approx(sigmoid(0) - sigmoid(-5))
    assert sufficiency(Sum(), X, scores, top=0.01) == pytest.approx(sigmoid(3))  # one instance at least
    assert necessity(Sum(), X, scores, top=1.0) == pytest.approx(0.0)  # the empty bag is zeros


def test_top_instances_break_ties_by_seed():
    ties = np.zeros(100)
    a, b = (top_instances(ties, 0.2, seed=seed) for seed in (0, 1))
    assert a.sum() == b.sum() == 20
    assert not np.array_equal(a, b)


def test_random_band_is_that_of_plain_random_orders():
    model = xmil.create_model("attnmil", in_dim=5, n_classes=2, dim=8, attention_dim=4, seed=0)
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)) * 3
    band = random_band(Flips(model, x, target=1), orders=8, seed=4)
    rng = np.random.default_rng(4)
    curves = np.array([xmil.flip(model, x, rng.permutation(30), target=1).values for _ in range(8)])
    np.testing.assert_allclose(band.mean, curves.mean(axis=0))
    np.testing.assert_allclose(band.low, np.quantile(curves, 0.025, axis=0))
    assert band.aupc == pytest.approx(curves.mean())
    low, high = band.aupc_interval
    assert low <= band.aupc <= high


def test_bad_orders_and_shares():
    with pytest.raises(XmilError, match="orders"):
        random_band(Flips(Sum(), X), orders=1)
    with pytest.raises(XmilError, match="share in the range"):
        sufficiency(Sum(), X, [1, 2, 3, 4], top=0)


@pytest.mark.parametrize("measure", [xmil.flip, xmil.srg, xmil.sufficiency, xmil.necessity])
def test_an_explanation_of_another_slide_is_refused(measure) -> None:
    net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    one, two, nameless = (xmil.Bag(np.eye(4), slide_id=name) for name in ("s1", "s2", None))
    e = xmil.explain(net, one, target=1)
    with pytest.raises(InputError, match="of the bag 's1', but the bag here is 's2'"):
        measure(net, two, e)
    expected = measure(net, two, e.scores, target=1)
    for bag in (one, nameless):
        assert repr(measure(net, bag, e)) == repr(expected)
