"""Habits of foreign modules: survival hazards, masks, flags, state, hooks, compiled and quantised parts."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

import xmil
from xmil.core.errors import InputError, UnsupportedError

N, D = 9, 6
X = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
PLACED = xmil.Bag(X.numpy(), coords=np.arange(2 * N).reshape(N, 2) * 256)


class Base(nn.Module):
    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.score, self.head = nn.Linear(D, 5), nn.Linear(5, 1), nn.Linear(5, outputs)

    def pool(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        return self.head((self.score(h).softmax(dim=-2) * h).sum(dim=-2))


# Survival.


class Hazards(Base):
    """Hazards of four time bins, the survival that follows, and weights of six signatures."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        hazards = torch.sigmoid(self.pool(x))
        return (
            hazards,
            torch.cumprod(1 - hazards, dim=1),
            {"path": torch.ones(1, 6), "omic": torch.ones(1, 6)},
        )


@pytest.mark.parametrize("returns", [None, "probability"])
def test_hazards_are_steered_to_survival(returns: str | None) -> None:
    with pytest.raises(InputError, match="task = 'survival'"):
        xmil.explain(Hazards(), X, returns=returns)


def test_a_module_says_what_it_returns() -> None:
    """So that a run can explain it, which has no argument for that."""
    net = Hazards()
    net.task, net.returns = "survival", "probability"  # type: ignore[assignment]
    said = xmil.explain(net, X)
    del net.returns
    np.testing.assert_array_equal(said.scores, xmil.explain(net, X, returns="probability").scores)


@pytest.mark.parametrize("method", ["lrp", "ig", "one_removed"])
def test_hazards_are_explained_as_a_risk(method: str) -> None:
    net = Hazards()
    net.task = "survival"
    e = xmil.explain(net, X, method=method, returns="probability")
    with torch.no_grad():
        hazards, survival, _ = net(X[None])
    assert e.output == pytest.approx(-float(survival.sum()), abs=1e-5)
    np.testing.assert_allclose(e.logits, torch.logit(hazards)[0], atol=1e-5)


def own_attention(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, need_raw: bool = True) -> Tensor:
    """A copy of torch's code with an argument more, which asks for overrides as torch does."""
    if has_torch_function((query, key, value, weight)):
        return handle_torch_function(
            multi_head_attention_forward, (query, key, value, weight), query, key, value, weight, need_raw
        )
    scores = query @ key.mT
    return F.linear((scores.softmax(dim=-1) if need_raw else scores) @ value, weight)


multi_head_attention_forward = own_attention
own_attention.__name__ = "multi_head_attention_forward"


class OwnAttention(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(
            multi_head_attention_forward(h, h, h, self.embed.weight[:, :5], need_raw=True).mean(1)
        )


def test_a_function_of_ones_own_with_the_name_of_torchs_is_seen_by_its_parts() -> None:
    class Plain(OwnAttention):
        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return self.head(F.linear((h @ h.mT).softmax(dim=-1) @ h, self.embed.weight[:, :5]).mean(1))

    one, other = (xmil.explain(kind(), X, target=1, preset="exact") for kind in (OwnAttention, Plain))
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-5, atol=1e-7)
    assert one.audit is not None
    assert abs(one.audit.other) < 1e-5


# What is optional.


class MaskMatters(Base):
    """A full mask is not the same as none: with one, a bias of the distance is added."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.pool(x) if mask is None else self.pool(x.masked_fill(mask.unsqueeze(-1), 0.0)) + 0.8


class MaskRequired(MaskMatters):
    def forward(self, x: Tensor, *, coords: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        return super().forward(x + 0 * coords.float().mean(), mask)


class MaskAgrees(Base):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.pool(x) if mask is None else self.pool(x.masked_fill(~mask.unsqueeze(-1), 0.0))


def test_no_mask_is_compared_with_a_full_one() -> None:
    with pytest.raises(InputError, match=r"lambda net, x, \*, coords: net\(x, coords=coords, mask=None\)"):
        xmil.explain(MaskRequired(), PLACED)
    assert any("mask=None" in text for text in xmil.explain(MaskMatters(), X).warnings)
    assert not xmil.explain(MaskAgrees(), X).warnings
    e = xmil.explain(
        MaskRequired(), PLACED, forward=lambda net, x, *, coords: net(x, coords=coords, mask=None)
    )
    assert not e.warnings


class NeedsItsOption(Base):
    def forward(self, x: Tensor, coords: Tensor | None = None) -> Tensor:
        if coords is None:
            raise ValueError("coordinates, please")
        return self.pool(x + coords.to(x.dtype).mean(dim=-1, keepdim=True) / 1000)


def test_optional_companions_that_the_body_needs_are_passed() -> None:
    e = xmil.explain(NeedsItsOption(), PLACED, target=1)
    assert e.params["call"] == "net(x, coords=coords)"
    with pytest.raises(InputError, match=r"coordinates, please.*'coords'.*pass a Bag with coords="):
        xmil.explain(NeedsItsOption(), X)


class Trains(Base):
    def forward(self, x: Tensor, is_train: bool = True) -> Tensor:
        return self.pool(x) * (2 if is_train else 1)


def test_a_flag_for_training_is_named() -> None:
    assert any("is_train=True" in text for text in xmil.explain(Trains(), X).warnings)
    assert not xmil.explain(Trains(), X, forward=lambda net, x: net(x, is_train=False)).warnings


# State.


class Counts(Base):
    """Keeps a running mean in a buffer, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean())
        self.passes = self.passes + 1
        return self.pool(x) / self.mean


@pytest.mark.parametrize("method", ["lrp", "gxi", "single", "one_removed"])
def test_a_stateful_network_is_left_as_it_was(method: str) -> None:
    net = Counts()
    mean, passes = net.mean, net.passes
    first, second = (xmil.explain(net, X, method=method, target=1) for _ in range(2))
    assert net.mean is mean
    assert net.passes is passes
    assert (float(mean), float(passes)) == (1.0, 0.0)
    np.testing.assert_array_equal(first.scores, second.scores)
    with torch.no_grad():
        np.testing.assert_allclose(first.logits, net(X[None])[0], rtol=1e-6)
    assert any("stateful" in text and "mean, passes" in text for text in first.warnings)
    assert not any("random" in text for text in first.warnings)


class Numbered(Base):
    """Counts its passes in a Python number, and answers by it."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.pool(x) * self.passes


class Drawn(Base):
    """Draws from a generator of its own, which no seed of ours reaches."""

    def forward(self, x: Tensor) -> Tensor:
        self.generator = getattr(self, "generator", torch.Generator())
        return self.pool(x + torch.randn(x.shape, generator=self.generator))


class Broken(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) * float("nan")


@pytest.mark.parametrize("method", ["lrp", "one_added"])
@pytest.mark.parametrize(
    ("kind", "fault"), [(Numbered, "stateful"), (Drawn, "stateful"), (Broken, "not finite")]
)
def test_what_no_seed_repeats_is_refused_by_its_name(kind: type[Base], fault: str, method: str) -> None:
    """Not as a module that reads (1, n, d) and (n, d) apart, nor as one that a seed would hold still."""
    with pytest.raises(UnsupportedError, match=fault):
        xmil.explain(kind(), X, method=method, target=1)


class Hooked(Base):
    """Keeps the gradients of its attention, as transformers that explain themselves do."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.embed(x))
        weights = self.score(h).softmax(dim=-2)
        weights.register_hook(self.save)
        weights.retain_grad()
        return self.head((weights * h).sum(dim=-2))

    def save(self, gradient: Tensor) -> None:
        self.gradient = gradient


def test_hooks_on_tensors_do_not_refuse() -> None:
    class Bare(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.pool(x)

    for method in ("lrp", "gxi", "ig", "single"):
        hooked, plain = (xmil.explain(kind(), X, method=method, target=1) for kind in (Hooked, Bare))
        np.testing.assert_allclose(hooked.scores, plain.scores, rtol=1e-5, atol=1e-7)


COMPILED = """
import torch, xmil
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(6, 5), nn.Linear(5, 2)
    def forward(self, x):
        return self.head(self.embed(x).relu().mean(dim=1))
x = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
plain = xmil.explain(Net(), x, target=1)
inner, whole = Net(), Net()
inner.embed = torch.compile(inner.embed)
whole.compile()
for net in (torch.compile(Net()), inner, whole):
    for method in ("lrp", "single"):
        e = xmil.explain(net, x, method=method, target=1)
        assert method != "lrp" or abs(e.scores - plain.scores).max() < 1e-6
"""


def test_compiled_modules_are_explained_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Messages.


class Frozen(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.pool(x)


@pytest.mark.filterwarnings("ignore")  # torch is moving its quantisation to another package
@pytest.mark.parametrize("kind", ["no_grad", "int8"])
def test_what_has_no_gradient_is_pointed_to_methods_that_compare(kind: str) -> None:
    net: nn.Module = Frozen()
    if kind == "int8":

        class Bare(Base):
            def forward(self, x: Tensor) -> Tensor:
                return self.pool(x)

        net = torch.ao.quantization.quantize_dynamic(Bare(), {nn.Linear}, dtype=torch.qint8)
    for method in ("lrp", "ig", "gxi"):
        with pytest.raises(UnsupportedError, match="one_added, single, one_removed, shapley"):
            xmil.explain(net, X, target=1, method=method)
    assert xmil.explain(net, X, target=1, method="one_added").scores.any()
    assert len(xmil.explain(net, X, method="one_removed", target=1).scores) == N


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Custom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.pool(Doubled.apply(x))


def test_a_custom_function_gets_one_instruction() -> None:
    with pytest.raises(UnsupportedError, match=r"register_function\('.*Doubled'\)") as error:
        xmil.explain(Custom(), X, target=1)
    assert "register_rule" not in str(error.value)


class LogProbabilities(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.pool(x), dim=-1)


def test_log_probabilities_are_explained_and_pointed_to_logits() -> None:
    e = xmil.explain(LogProbabilities(), X, target=1)
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-5
    assert any("log_softmax" in text and "logits" in text for text in e.warnings)


class Mixture(nn.Module):
    """Expectation-maximisation for a mixture of Gaussians; weights, means and variances go to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.means, self.head = nn.Parameter(0.1 * torch.randn(3, D)), nn.Linear(3 + 6 * D, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights, means, variances = torch.full((1, 3), 1 / 3), self.means[None], torch.ones(1, 3, D)
        for _ in range(2):
            likelihood = -0.5 * (
                variances.log().sum(-1).unsqueeze(1)
                + (x**2) @ (1 / variances).mT
                + (means**2 / variances).sum(-1).unsqueeze(1)
                - 2 * x @ (means / variances).mT
            ) + weights.log().unsqueeze(1)
            share = (likelihood - likelihood.logsumexp(-1, keepdim=True)).exp()  # (1, n, 3)
            total = share.sum(dim=1) + 1
            weights = total / total.sum(dim=1, keepdim=True)
            means = (share.mT @ x + self.means) / total.unsqueeze(-1)
            variances = (share.mT @ x**2 + 1 + self.means**2) / total.unsqueeze(-1) - means**2
        return self.head(torch.cat([weights, means.flatten(1), variances.flatten(1)], dim=1))


def test_a_mixture_of_prototypes_is_explained() -> None:
    e = xmil.explain(Mixture(), X, target=1, preset="exact")
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-5
    assert np.abs(e.scores).max() > 0
