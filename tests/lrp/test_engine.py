"""Any network: explained with no change, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnsupportedError
from xmil.lrp import RULES, AffineRule, Composite, Engine, register_rule, trace, with_gradient_of
from xmil.network import frozen

FEATURES = torch.randn(30, 16, generator=torch.Generator().manual_seed(3))


class Transformer(nn.Module):
    """`nn.TransformerEncoder` with GELU and a class token."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        return self.head(self.encoder(tokens)[:, 0])


class FunctionalClam(nn.Module):
    """A gated network written with functional calls, an unusual return value and its own class names."""

    class_names = ("benign", "tumour")

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 16) * 0.3)
        self.b1 = nn.Parameter(torch.randn(8))
        self.va, self.ua = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4, 8))
        self.wa = nn.Parameter(torch.randn(1, 4))
        self.wc = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(F.linear(x.squeeze(0), self.w1, self.b1))
        gate = torch.tanh(h @ self.va.T) * torch.sigmoid(h @ self.ua.T)
        a = torch.softmax(gate @ self.wa.T, dim=0)
        return {"logits": (a.T @ h) @ self.wc.T, "attention": a}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(16, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv1d(8, 8, 3)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.transpose(1, 2)))


class Running(nn.Module):
    """Pooling by a running log-sum-exp, which has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 2)
        self.pool = nn.ModuleDict({"smooth": _Pool()})

    def forward(self, x: Tensor) -> Tensor:
        return self.pool["smooth"](self.embed(x))


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.logcumsumexp(x, dim=1)[:, -1]


def audited(e: xmil.Explanation, tolerance: float = 1e-4) -> bool:
    assert e.audit is not None
    return abs(e.audit.other) <= tolerance * max(abs(e.output), float(np.abs(e.logits).max()))


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder(norm_first: bool) -> None:
    net = Transformer(norm_first=norm_first).train()
    e = xmil.explain(net, FEATURES, method="lrp", target=2)
    x = FEATURES[None].requires_grad_(True)  # with a gradient to compute, torch takes the same kernels
    assert np.array_equal(e.logits, net.eval()(x)[0].detach().numpy())
    assert audited(e)
    assert e.audit is not None
    assert e.audit.class_token != 0


def test_functional_network() -> None:
    net = FunctionalClam()
    e = xmil.explain(net, FEATURES, target="tumour", forward=lambda net, x: net(x)["logits"])
    assert e.target == 1
    assert str(e.target) == "tumour"
    assert audited(e)
    h = F.relu(F.linear(FEATURES, net.w1, net.b1))
    a = torch.softmax((torch.tanh(h @ net.va.T) * torch.sigmoid(h @ net.ua.T)) @ net.wa.T, dim=0)
    g = a * net.wc[1] * (h > 0)  # attention is constant, the rest linear and ReLU
    expected = (FEATURES * (g @ net.w1)).sum(dim=1)
    np.testing.assert_allclose(e.scores, expected.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_functional_network_without_forward_is_read_by_name() -> None:
    net = FunctionalClam()
    e = xmil.explain(net, FEATURES, target=1)
    picked = xmil.explain(net, FEATURES, target=1, forward=lambda net, x: net(x)["logits"])
    assert e.params["call"] == "net(x)['logits']"
    np.testing.assert_array_equal(e.scores, picked.scores)


def test_convolutional_head() -> None:
    net = Convolutional()
    for composite in (Composite(), Composite({"conv.0.*": AffineRule(1e-3, 0.2)})):
        e = xmil.explain(net, FEATURES, target=0, composite=composite)
        assert audited(e)
    assert e.audit is not None
    assert e.audit.epsilon != 0


def test_uncovered_operation_is_refused_by_name_and_path() -> None:
    with pytest.raises(UnsupportedError, match=r"'logcumsumexp'.*'pool\.smooth' \(_Pool\)"):
        xmil.explain(Running(), FEATURES, target=0)
    assert xmil.explain(Running(), FEATURES, method="ig", target=0).scores.shape == (30,)


def test_a_rule_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))

    @register_rule("logcumsumexp")
    def running_maximum(engine: Engine, function: Callable[..., Tensor], x: Tensor, dim: int) -> Tensor:
        largest = x.cummax(dim).values
        out = largest + (function(x, dim) - largest).detach()
        engine.ledger.keep("bias", (out - largest).detach(), out)
        return out

    assert audited(xmil.explain(Running(), FEATURES, target=0))


def test_a_rule_of_ones_own_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Maximum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.logsumexp(x[..., :2], dim=1)

    monkeypatch.setattr(RULES, "_entries", dict(RULES._entries))

    @register_rule("logsumexp")
    def hard_maximum(engine: Engine, function: Callable[..., Tensor], x: Tensor, dim: int) -> Tensor:
        return with_gradient_of(x.amax(dim), function(x, dim))

    monkeypatch.setattr("xmil.methods.lrp.REFUSED_OTHER", np.inf)  # it keeps no account
    e = xmil.explain(Maximum(), FEATURES, target=0, preset="exact")
    assert np.flatnonzero(e.scores).tolist() == [int(FEATURES[:, 0].argmax())]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return 2 * g


class _Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(x).sum(dim=1)[:, :2]


class _Probabilities(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)[:, :2].softmax(dim=-1)


class _Hyper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.mean(dim=1), x[0, :3])


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (_Custom(), "_Doubled"),
        (_Probabilities(), "return logits"),
        (_Hyper(), "weight that depends on the input"),
    ],
)
def test_what_no_rule_covers_is_refused(net: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        xmil.explain(net, FEATURES, target=0, returns="logit")


def test_batch_statistics_are_refused() -> None:
    net = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 2))
    with pytest.raises(UnsupportedError, match="statistics of the batch"):
        xmil.explain(net, FEATURES, target=0, forward=lambda net, x: net(x).mean(dim=0))


def test_relevance_at_layers_agrees_where_nothing_is_kept_between() -> None:
    model = xmil.create_model("attnmil", in_dim=16, n_classes=2, dim=8, n_layers=3, seed=0)
    at = {
        layer: xmil.explain(model, FEATURES, target=1, layer=layer, bias="redistribute", epsilon=1e-9).scores
        for layer in (None, "instance.0", "instance.1", "instance.2")
    }
    for scores in at.values():
        np.testing.assert_allclose(scores, at[None], rtol=1e-3, atol=1e-5)


def test_layers_are_named_or_refused() -> None:
    model = xmil.create_model("transmil", in_dim=16, n_classes=2, dim=16, seed=0)
    with pytest.raises(xmil.XmilError, match=r"Did you mean 'instance'"):
        xmil.explain(model, FEATURES, layer="instanc")
    with pytest.raises(InputError, match="one row for each of the 30 patches"):
        xmil.explain(model, FEATURES, layer="layers.0")
    with pytest.raises(InputError, match="returned no tensor"):
        xmil.explain(model, FEATURES, layer="layers.0.attn.to_qkv")
    assert len(xmil.explain(model, FEATURES, layer="instance").scores) == 30


def test_feature_level() -> None:
    model = xmil.create_model("attnmil", in_dim=16, n_classes=2, seed=0)
    e = xmil.explain(model, FEATURES, target=1, feature_level=True)
    assert e.relevance is not None
    assert e.relevance.shape == (30, 16)
    np.testing.assert_allclose(e.relevance.sum(axis=1), e.scores, rtol=1e-5, atol=1e-7)


def test_batches_of_bags_are_explained_as_each_alone() -> None:
    model = xmil.create_model("transmil", in_dim=16, n_classes=2, dim=16, seed=0)
    x = torch.randn(3, 20, 16)
    with frozen(model):
        together = trace(model, x, module=model).relevance(lambda logits: logits[:, 1]).input.instances
        alone = [trace(model, bag[None], module=model).relevance(lambda logits: logits[:, 1]) for bag in x]
    torch.testing.assert_close(together, torch.cat([r.input.instances for r in alone]), rtol=1e-4, atol=1e-6)


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="epsilon"):
        AffineRule(bias="redistribute")
    with pytest.raises(InputError, match="gamma"):
        AffineRule(gamma=-1)
    with pytest.raises(InputError, match="bias"):
        AffineRule(bias="keep")
    with pytest.raises(InputError, match="gates"):
        Composite(gates="soft")
