"""A slide encoder with its probe: predictions are the probe's own, accounts close down to patches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, StandardScaler
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, XmilError

D, E, N = 6, 5, 10


class SlideEncoder(nn.Module):
    """A transformer over patches with a position code from their coordinates."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.form = nn.Linear(D, E), nn.LayerNorm(E), form
        self.mix = nn.MultiheadAttention(E, 1, batch_first=True)

    def forward(self, x: Tensor, coords: Tensor) -> object:
        h = self.inner(x) + torch.sin(coords.sum(dim=-1, keepdim=True) / 500)
        h = self.norm(h + self.mix(h, h, h)[0])
        slide = h.mean(dim=1)
        return {"tensor": slide, "list": [slide], "dict": {"slide": slide, "tokens": h}}[self.form]


def bags(n: int = 24) -> list[xmil.Bag]:
    rng = np.random.default_rng(0)
    return [
        xmil.Bag(rng.normal(size=(N, D)) + i % 3, coords=rng.integers(0, 4000, size=(N, 2))) for i in range(n)
    ]


@torch.no_grad()
def embed(encoder: SlideEncoder) -> np.ndarray:
    rows = []
    for bag in bags():
        out = encoder(torch.from_numpy(bag.features)[None], torch.from_numpy(bag.coords)[None])
        rows.append(out[0].double().numpy())
    return np.stack(rows)


PROBES = {
    "binary": lambda h, y: LogisticRegression().fit(h, y > 0),
    "multinomial": lambda h, y: LogisticRegression(C=100).fit(h, np.array(["a", "b", "c"])[y]),
    "ridge": lambda h, y: Ridge(alpha=0.1).fit(h, y * 10 + 50),
    # behind a LayerNorm features sum to zero: without PCA the coefficients would be rounding
    "two values": lambda h, y: make_pipeline(PCA(3), LinearRegression()).fit(
        h, np.stack([y, -3 * y], axis=1)
    ),
    "scaled": lambda h, y: make_pipeline(StandardScaler(), LogisticRegression()).fit(h, y),
    "reduced": lambda h, y: make_pipeline(MinMaxScaler(), PCA(3, whiten=True), MaxAbsScaler(), Ridge()).fit(
        h, y
    ),
}


@pytest.mark.parametrize("name", PROBES)
def test_predictions_are_scikit_learns(name: str) -> None:
    encoder = SlideEncoder().eval()
    h, y = embed(encoder), np.arange(24) % 3
    if name == "scaled":
        with torch.no_grad():
            encoder.norm.weight.mul_(50), encoder.norm.bias.fill_(900)
        h = embed(encoder)  # far from zero: what the scaler is for
    probe = PROBES[name](h, y)
    net = xmil.chain(encoder, probe)
    for i, bag in enumerate(bags()[:6]):
        e = xmil.explain(net, bag, method="lrp")
        if hasattr(probe, "predict_proba"):
            expected = probe.predict_proba(h[i : i + 1])[0]
            with torch.no_grad():
                z = net(torch.from_numpy(bag.features)[None], coords=torch.from_numpy(bag.coords)[None])[0]
            p = torch.cat([1 - z.sigmoid(), z.sigmoid()]) if len(z) == 1 else z.softmax(dim=0)
            np.testing.assert_allclose(p.numpy(), expected, atol=1e-6)
            assert str(e.target) == str(probe.predict(h[i : i + 1])[0])
        else:
            expected = np.ravel(probe.predict(h[i : i + 1]))
            np.testing.assert_allclose(e.logits, expected, rtol=1e-6, atol=1e-6)
            assert net.task == "regression"
        assert abs(e.audit.other) < 1e-4 * max(1, abs(e.output))
        shares = e.audit.instances + e.audit.bias + e.audit.epsilon + e.audit.cut + e.audit.other
        assert shares == pytest.approx(e.output, abs=1e-6)


def test_coordinates_travel_into_the_encoder() -> None:
    encoder, bag = SlideEncoder().eval(), bags()[0]
    h = embed(encoder)
    net = xmil.chain(encoder, LogisticRegression().fit(h, h[:, 0] > np.median(h[:, 0])))
    e = xmil.explain(net, bag, method="single", target=1)
    assert e.params["call"] == "net(x, coords=coords)"
    for k in (0, 4):
        part = bag.select([k])
        alone = net(torch.from_numpy(part.features)[None], torch.from_numpy(part.coords)[None])
        assert e.scores[k] == pytest.approx(torch.sigmoid(alone)[0, 0].item(), abs=1e-6)
    with pytest.raises(InputError, match="Chain asks for 'coords'"):
        xmil.explain(net, bag.features)


def test_encoders_that_return_more() -> None:
    h = embed(SlideEncoder().eval())
    probe = LogisticRegression().fit(h, h[:, 0] > np.median(h[:, 0]))
    plain = xmil.explain(xmil.chain(SlideEncoder(), probe), bags()[0]).scores
    for form in ("list", "dict"):
        np.testing.assert_array_equal(
            xmil.explain(xmil.chain(SlideEncoder(form), probe), bags()[0]).scores, plain
        )
    picked = xmil.chain(
        SlideEncoder("dict"),
        probe,
        forward=lambda encoder, x, *, coords: encoder(x, coords)["tokens"].mean(1),
    )
    np.testing.assert_allclose(xmil.explain(picked, bags()[0]).scores, plain, atol=1e-6)
    wide = xmil.chain(SlideEncoder(), nn.Linear(E + 1, 2))
    with pytest.raises(
        InputError, match=r"SlideEncoder returned no vector of the width 6 .*output was \(1, 5\)"
    ):
        xmil.explain(wide, bags()[0])


def test_torch_probes_and_names() -> None:
    torch.manual_seed(2)  # with the first seed all four hidden units are off
    probe = nn.Sequential(nn.Linear(E, 4), nn.ReLU(), nn.Linear(4, 2))
    net = xmil.chain(SlideEncoder(), probe, class_names=["no", "yes"])
    e = xmil.explain(net, bags()[0], target="yes")
    assert abs(e.audit.other) < 1e-5
    risk = xmil.chain(SlideEncoder(), nn.Linear(E, 1), task="cox")
    assert str(xmil.explain(risk, bags()[0]).target) == "risk"


class Params(list):
    """Coefficients by covariate, as a table's column holds them."""

    def __init__(self, values: list[float], index: list[str]) -> None:
        super().__init__(values)
        self.index = index


def test_cox_models() -> None:
    beta, mean = np.array([0.3, -1.0, 0.5, 2.0, -0.2]), np.arange(E) / 10.0
    h = embed(SlideEncoder().eval())[0]
    order = [3, 1, 0, 4, 2]
    shuffled = SimpleNamespace(
        params_=Params(beta[order].tolist(), [str(i) for i in order]), _norm_mean=mean[order]
    )
    named = SimpleNamespace(params_=Params(beta.tolist(), list("abcde")), _norm_mean=mean)
    for fitter in (shuffled, named):
        e = xmil.explain(xmil.chain(SlideEncoder(), fitter), bags()[0])
        assert e.output == pytest.approx((h - mean) @ beta, abs=1e-6)
        assert e.params["output"] == "risk"
    bare = xmil.explain(xmil.chain(SlideEncoder(), beta, task="cox"), bags()[0])
    assert bare.output == pytest.approx(h @ beta, abs=1e-6)

    class CoxPHSurvivalAnalysis:
        coef_ = beta

    assert xmil.explain(
        xmil.chain(SlideEncoder(), CoxPHSurvivalAnalysis()), bags()[0]
    ).output == pytest.approx(h @ beta, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda h, y: LogisticRegression(), "has no coefficients: fit it first"),
        (lambda h, y: RidgeClassifier().fit(h, y), "no probabilities"),
        (lambda h, y: make_pipeline(Normalizer(), Ridge()).fit(h, y), "step Normalizer"),
        (lambda h, y: make_pipeline(MinMaxScaler(clip=True), Ridge()).fit(h, y), "clips"),
        (lambda h, y: np.ones(E), "Bare coefficients"),
    ],
)
def test_probes_that_cannot_be_one(make: object, words: str) -> None:
    h = np.random.default_rng(0).normal(size=(12, E))
    with pytest.raises(XmilError, match=words):
        xmil.chain(SlideEncoder(), make(h, np.arange(12) % 3))
    with pytest.raises(XmilError, match="'encoder' parameter of chain"):
        xmil.chain(len, nn.Linear(2, 2))
