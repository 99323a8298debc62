"""Baselines: scores by the formula, an account that closes, one object for every method."""

import numpy as np
import pytest
import torch

import xmil
from xmil.core.errors import XmilError
from xmil.lrp import trace
from xmil.methods import preset_composite
from xmil.network import Network, frozen

D, C, N = 6, 3, 9
MODELS = xmil.list_models()


def _model(name: str) -> torch.nn.Module:
    params = {
        "transmil": {"dim": 8, "heads": 2, "landmarks": 4},
        "attnmil": {"dim": 8, "attention_dim": 4},
    }
    model = xmil.create_model(name, in_dim=D, n_classes=C, seed=1, **params.get(name, {}))
    for parameter in model.parameters():  # biases that matter
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture
def bag() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(N, D)) + 1.5).astype(np.float32)


def _gradient(model: torch.nn.Module, bag: np.ndarray, target: int, preset: str) -> np.ndarray:
    network = Network(model)
    with frozen(model):
        x = torch.from_numpy(bag).unsqueeze(0)
        traced = trace(network, x, module=model, composite=preset_composite(network, preset))
        return traced.relevance(lambda z: z[:, target]).input.gradient[0].numpy()


@pytest.mark.parametrize("preset", ["exact", "paper"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_and_account_are_the_formula(name, preset, bag):
    model, mu, a = _model(name), bag[:4].mean(axis=0), 0.7
    e = xmil.explain(model, bag, method="lrp", target=1, preset=preset, baseline=mu, strength=a)
    plain = xmil.explain(model, bag, method="lrp", target=1, preset=preset, baseline=None)
    g = _gradient(model, bag, 1, preset)
    np.testing.assert_allclose(e.scores, ((bag - a * mu) * g).sum(axis=1), rtol=1e-4, atol=2e-5)
    assert e.audit.baseline == pytest.approx(float(a * (g @ mu).sum()), rel=1e-5, abs=2e-5)
    assert e.audit.output == plain.audit.output
    scale = max(1.0, *(abs(v) for v in e.audit.as_dict().values()))
    assert abs(e.audit.other) <= 1e-5 * scale
    parts = {k: v for k, v in e.audit.as_dict().items() if k not in ("output", "other")}
    assert sum(parts.values()) == pytest.approx(e.output, abs=1e-5 * scale)


@pytest.mark.parametrize("name", MODELS)
def test_a_bag_of_baselines_scores_zero(name, bag):
    same = np.repeat(bag[:1], N, axis=0)
    e = xmil.explain(_model(name), same, method="lrp", target=0, preset="exact", baseline="bag")
    np.testing.assert_allclose(e.scores, 0, atol=1e-5)


def test_every_way_to_say_it_is_one(bag):
    model = _model("attnmil")
    model.background = xmil.background([bag])
    ways = [
        bag.mean(axis=0),
        bag,
        torch.from_numpy(bag),
        xmil.Bag(bag, slide_id="s"),
        "bag",
        "mean",
        model.background,
    ]
    scores = [
        xmil.explain(model, bag, target=1, preset="exact", baseline=way, strength=0.5).scores for way in ways
    ]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], atol=1e-6)


def test_where_it_is_from_is_recorded(bag):
    model = _model("attnmil")
    e = xmil.explain(model, bag, baseline="mean", strength=0.5)
    assert (e.params["baseline"], e.params["strength"]) == ("mean of the bag", 0.5)
    assert "no background" in e.warnings[0]
    model.background = xmil.background([bag, bag[:3]])
    e = xmil.explain(model, bag, baseline="mean")
    assert (e.params["baseline"], e.params["strength"]) == (f"mean of {N + 3} patches", 1.0)
    assert list(e.warnings) == []


def test_a_saved_explanation_keeps_it(bag, tmp_path):
    e = xmil.explain(_model("attnmil"), bag, baseline=bag[0])
    e.save(tmp_path / "e.parquet")
    loaded = xmil.Explanation.load(tmp_path / "e.parquet")
    assert loaded.params["baseline"] == "given"
    assert loaded.audit.baseline == e.audit.baseline != 0


def test_feature_level_sums_to_the_scores(bag):
    e = xmil.explain(_model("transmil"), bag, baseline="bag", feature_level=True)
    np.testing.assert_allclose(e.relevance.sum(axis=1), e.scores, atol=1e-5)


def test_ig_starts_at_the_baseline(bag):
    model, mu = _model("attnmil"), bag.mean(axis=0)
    e = xmil.explain(model, bag, method="ig", target=1, baseline="bag", steps=64)
    at_start = xmil.explain(model, np.tile(mu, (N, 1)), target=1).output
    assert e.audit.bias == pytest.approx(at_start, abs=1e-5)
    assert e.scores.sum() == pytest.approx(e.output - at_start, abs=1e-3)
    zero = xmil.explain(model, bag, method="ig", target=1, baseline="bag", strength=0.0, steps=64)
    plain = xmil.explain(model, bag, method="ig", target=1, steps=64)
    np.testing.assert_allclose(zero.scores, plain.scores, atol=1e-6)


@pytest.mark.parametrize("name", ["attnmil", "transmil", "maxpool"])
def test_shapley_values_start_at_the_baseline(name, bag):
    model = _model(name)
    few, start = bag[:5], np.tile(0.5 * bag[0], (5, 1))
    e = xmil.explain(model, few, method="shapley", target=1, baseline=bag[0], strength=0.5)
    at_start = float(model(torch.from_numpy(start).unsqueeze(0)).detach()[0, 1])
    assert e.audit.bias == pytest.approx(at_start, abs=1e-5)
    assert e.scores.sum() == pytest.approx(e.output - at_start, abs=1e-4)
    assert e.params["baseline"] == "given"


def test_a_layer_can_be_the_place(bag):
    model = _model("attnmil")
    plain = xmil.explain(model, bag, target=1, preset="exact", layer="instance", baseline=None)
    e = xmil.explain(model, bag, target=1, preset="exact", layer="instance", baseline="bag")
    h = model.embed(torch.from_numpy(bag).unsqueeze(0))[0].detach().numpy()
    given = xmil.explain(model, bag, target=1, preset="exact", layer="instance", baseline=h.mean(axis=0))
    np.testing.assert_allclose(e.scores, given.scores, atol=1e-6)
    assert np.abs(e.scores - plain.scores).max() > 1e-3


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"baseline": "median"}, "baseline"),
        ({"baseline": np.zeros(D + 1)}, "must have the width"),
        ({"baseline": np.full(D, np.nan)}, "finite"),
        ({"baseline": np.zeros((0, D))}, "finite"),
        ({"baseline": object()}, "baseline"),
        ({"baseline": "bag", "strength": 1.5}, "strength"),
        ({"baseline": None, "strength": 0.5}, "baseline="),
    ],
)
@pytest.mark.parametrize("method", ["lrp", "ig"])
def test_refused(params, said, method, bag):
    with pytest.raises(XmilError, match=said):
        xmil.explain(_model("attnmil"), bag, method=method, **params)


def test_a_background_goes_with_the_model(bag, tmp_path):
    model = _model("attnmil")
    xmil.save_model(model, tmp_path / "bare.safetensors")
    assert xmil.load_model(tmp_path / "bare.safetensors").background is None
    model.background = xmil.background([bag, 2 * bag], keep=5)
    xmil.save_model(model, tmp_path / "m.safetensors")
    found = xmil.load_model(tmp_path / "m.safetensors").background
    np.testing.assert_array_equal(found.mean, model.background.mean)
    np.testing.assert_array_equal(found.patches, model.background.patches)
    assert (found.n, len(found.patches)) == (2 * N, 5)


def test_background_of_a_folder_is_that_of_its_bags(bag, tmp_path):
    for i in range(3):
        np.save(tmp_path / f"s{i}.npy", bag + i)
    found = xmil.background(tmp_path, keep=4)
    np.testing.assert_allclose(found.mean, bag.mean(axis=0) + 1, rtol=1e-6)
    rows = np.concatenate([bag + i for i in range(3)])
    assert all((rows == patch).all(axis=1).any() for patch in found.patches)
    assert xmil.background(tmp_path, files=1).n == N
    np.testing.assert_array_equal(found.patches, xmil.background(tmp_path, keep=4).patches)


def test_background_refused(bag):
    with pytest.raises(XmilError, match="at least one patch"):
        xmil.background([])
    with pytest.raises(XmilError, match="share a width"):
        xmil.background([bag, bag[:, :2]])
    with pytest.raises(XmilError, match="keep"):
        xmil.background([bag], keep=0)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_centred_account_closes(name, stored, bag):
    model = _model(name)
    model.background = xmil.background([bag[:5]]) if stored else None
    for e in xmil.explain_classes(model, bag, method="lrp", preset="centred"):
        scale = max(1.0, *(abs(v) for v in e.audit.as_dict().values()))
        assert abs(e.audit.other) <= 1e-5 * scale
        assert e.params["strength"] == (0.5 if stored and name != "addmil" else 0.25)
        assert e.params["baseline"] == ("mean of 5 patches" if stored else "mean of the bag")


def test_the_default_is_the_embedding_less_that_of_the_baseline(bag):
    """AttnMIL: attention times w . (h(x_i) - h(mu / 2)), whatever the neurons do in between."""
    model = _model("attnmil")
    model.background = xmil.background([bag[:5]])
    e = xmil.explain(model, bag, target=2)
    with torch.no_grad():
        h = model.embed(torch.from_numpy(bag))
        attention = torch.softmax(model.attend(h.unsqueeze(0))[0, :, 0], dim=0)
        over = h - model.embed(0.5 * torch.from_numpy(model.background.mean))
        expected = attention * (over @ model.classifier.weight[2])
    np.testing.assert_allclose(e.scores, expected.numpy(), atol=1e-5)


def test_an_additive_model_scores_its_logits_less_what_silence_gives(bag):
    """AddMIL, baseline zero: an instance's logits less those of one without attention, in the same order."""
    model = _model("addmil")
    model.background = xmil.background([0 * bag])
    e, own = (xmil.explain(model, bag, method=method, target=1) for method in ("lrp", "logits"))
    with torch.no_grad():
        silent = float(model.classifier(torch.zeros(D))[1])
    np.testing.assert_allclose(e.scores, own.scores - silent, atol=1e-5)


def test_the_default_is_centred_with_a_background_and_exact_without(bag):
    model = _model("transmil")
    explained = {p: xmil.explain(model, bag, preset=p).scores for p in ("default", "exact", "centred")}
    np.testing.assert_array_equal(explained["default"], explained["exact"])
    assert np.abs(explained["centred"] - explained["exact"]).max() > 1e-4
    model.background = xmil.background([bag[:5]])
    explained = {p: xmil.explain(model, bag, preset=p).scores for p in ("default", "centred")}
    np.testing.assert_array_equal(explained["default"], explained["centred"])


@pytest.mark.parametrize("name", MODELS)
def test_exact_and_paper_know_no_background(name, bag):
    model = _model(name)
    bare = [xmil.explain(model, bag, preset=preset).scores for preset in ("exact", "paper")]
    model.background = xmil.background([bag[:5]])
    for preset, scores in zip(("exact", "paper"), bare, strict=True):
        e = xmil.explain(model, bag, preset=preset)
        np.testing.assert_array_equal(e.scores, scores)
        assert e.audit.baseline == 0


class _Grumpy(torch.nn.Module):
    """Takes another way for a bag of one, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(D, 4), torch.nn.Linear(4, C)
        self.sizes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.append(x.shape[1])
        h = torch.relu(self.first(x))
        if x.shape[1] == 1:
            h = torch.tanh(h)
        return self.last(h.mean(dim=1))


def test_a_model_that_treats_one_instance_otherwise_sees_a_bag_of_them(bag):
    torch.manual_seed(0)
    net = _Grumpy()
    e = xmil.explain(net, bag, target=1, preset="centred")
    assert {1, N} <= set(net.sizes)
    with torch.no_grad():
        mu = 0.25 * torch.from_numpy(bag).mean(dim=0)
        over = torch.relu(net.first(torch.from_numpy(bag))) - torch.relu(net.first(mu))
        expected = over @ net.last.weight[1] / N
    np.testing.assert_allclose(e.scores, expected.numpy(), atol=1e-5)
