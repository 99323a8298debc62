"""In-place operations: the same values, scores and account as out of place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnsupportedError
from xmil.core.explanation import Audit
from xmil.lrp import AffineRule, Composite
from xmil.methods import account_warnings

X = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A small network around one step."""

    def __init__(self, step: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 2)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.shift = nn.Parameter(torch.randn(16))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self, self.first(x), x)).mean(dim=1)


def write(net: Net, y: Tensor, x: Tensor) -> Tensor:
    y[..., 3] = 0.5
    return y


def rewrite(net: Net, y: Tensor, x: Tensor) -> Tensor:
    return torch.cat([y[..., :3], torch.full_like(y[..., :1], 0.5), y[..., 4:]], dim=-1)


def buffer(net: Net, y: Tensor, x: Tensor) -> Tensor:
    out = torch.full((1, 20, 16), 2.0)
    out[..., :10].copy_(y[..., :10])
    return out


def joined(net: Net, y: Tensor, x: Tensor) -> Tensor:
    return torch.cat([y[..., :10], torch.full((1, 20, 6), 2.0)], dim=-1)


def twice(net: Net, y: Tensor, x: Tensor) -> Tensor:
    out = F.relu(y, inplace=True)
    return out + y  # y was changed too


PAIRS = {
    "relu": (lambda n, y, x: F.relu(y, inplace=True), lambda n, y, x: F.relu(y)),
    "silu": (lambda n, y, x: F.silu(y, inplace=True), lambda n, y, x: F.silu(y)),
    "relu6": (lambda n, y, x: F.relu6(y, inplace=True), lambda n, y, x: F.relu6(y)),
    "sigmoid_": (lambda n, y, x: y.sigmoid_(), lambda n, y, x: y.sigmoid()),
    "clamp_": (lambda n, y, x: y.clamp_(-0.3, 0.3), lambda n, y, x: y.clamp(-0.3, 0.3)),
    "+=": (lambda n, y, x: y.__iadd__(x).__iadd__(n.shift), lambda n, y, x: y + x + n.shift),
    "-=": (lambda n, y, x: y.__isub__(n.shift), lambda n, y, x: y - n.shift),
    "*=": (lambda n, y, x: y.__imul__(2).__imul__(x), lambda n, y, x: (y * 2) * x),
    "/=": (lambda n, y, x: y.__itruediv__(3), lambda n, y, x: y / 3),
    "norm, relu": (lambda n, y, x: F.relu(n.norm(y), inplace=True), lambda n, y, x: F.relu(n.norm(y))),
    "conv, relu": (
        lambda n, y, x: F.relu(n.conv(y.mT), inplace=True).mT,
        lambda n, y, x: F.relu(n.conv(y.mT)).mT,
    ),
    "masked_fill_": (lambda n, y, x: y.masked_fill_(x > 1, 0.7), lambda n, y, x: y.masked_fill(x > 1, 0.7)),
    "setitem": (write, rewrite),
    "copy_ into a part": (buffer, joined),
    "used again": (twice, lambda n, y, x: 2 * F.relu(y)),
    "on the input": (lambda n, y, x: n.first(x.mul_(1.5)), lambda n, y, x: n.first(x * 1.5)),
}


@pytest.mark.parametrize("preset", ["exact", "paper"])
@pytest.mark.parametrize("name", PAIRS)
def test_in_place_is_explained_as_out_of_place(name: str, preset: str) -> None:
    changed, plain = (Net(step) for step in PAIRS[name])
    before = X.clone()
    one = xmil.explain(changed, X, target=1, preset=preset)
    assert torch.equal(before, X)
    other = xmil.explain(plain, X, target=1, preset=preset)
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one.logits, other.logits, rtol=1e-6)
    with torch.no_grad():
        assert np.array_equal(one.logits, changed(X.clone()[None])[0].numpy())
    assert one.audit is not None
    assert other.audit is not None
    assert abs(one.audit.other) <= 1e-4 * max(1.0, abs(one.output))
    assert one.audit.bias + one.audit.class_token == pytest.approx(
        other.audit.bias + other.audit.class_token, abs=1e-4
    )


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning")
def test_what_the_engine_cannot_see_is_refused() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.net)(x[0]).mean(dim=0)

    net = Hidden()
    with pytest.raises(UnsupportedError, match="transforms such as vmap"):
        xmil.explain(net, X, target=0)
    net.net = torch.jit.trace(net.net, X)
    with pytest.raises(UnsupportedError, match="hides its operations"):
        xmil.explain(net, X, target=0)


@pytest.mark.parametrize("method", ["lrp", "gxi", "ig"])
def test_a_forward_pass_under_no_grad_is_refused(method: str) -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.last(torch.cat([self.first(x), torch.ones(1, 1, 8)], dim=1)).mean(dim=1)

    with pytest.raises(UnsupportedError, match="no_grad"):
        xmil.explain(Quiet(), X, method=method, target=0)


def test_weights_outside_the_module_are_named() -> None:
    head = nn.Linear(16, 2)
    with pytest.raises(UnsupportedError, match="outside the explained module"):
        xmil.explain(nn.Linear(16, 16), X, target=0, forward=lambda net, x: head(net(x)).mean(dim=1))


def test_products_with_parameters_follow_the_composite() -> None:
    class Product(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.W, self.b, self.how = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.randn(2)), how

        def forward(self, x: Tensor) -> Tensor:
            y = {
                "linear": lambda: F.linear(x[0], self.W.T, self.b),
                "matmul": lambda: x[0] @ self.W + self.b,
                "einsum": lambda: torch.einsum("nd,dc->nc", x[0], self.W) + self.b,
                "addmm": lambda: torch.addmm(self.b, x[0], self.W),
            }[self.how]()
            return y.mean(dim=0)

    for rule, hows in (
        (AffineRule(gamma=0.5), ("linear", "matmul", "einsum")),
        (AffineRule(epsilon=1e-3, bias="redistribute"), ("linear", "addmm")),
    ):
        found = [
            xmil.explain(
                Product(how), X, target=0, composite=Composite({"W": rule}), feature_level=True
            ).relevance
            for how in hows
        ]
        if rule.gamma:  # a bias added apart is no part of the product's denominator
            np.testing.assert_allclose(found[1], found[2], rtol=1e-4, atol=1e-6)
            plain = xmil.explain(Product("matmul"), X, target=0, feature_level=True).relevance
            assert np.abs(found[1] - plain).max() > 1e-2
        else:
            np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_gates_are_known_behind_views() -> None:
    class Gated(nn.Module):
        def __init__(self, view: bool) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.u, self.last, self.view = nn.Linear(16, 1), nn.Linear(16, 2), view

        def forward(self, x: Tensor) -> Tensor:
            gate = (
                torch.sigmoid(self.u(x)[..., 0]).unsqueeze(-1) * 1.0
                if self.view
                else torch.sigmoid(self.u(x))
            )
            return self.last(gate * x).mean(dim=1)

    one, other = (xmil.explain(Gated(view), X, target=0).scores for view in (False, True))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_glu_and_bilinear_close() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(8, 8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = F.glu(x, dim=-1)
            return torch.cat([self.mix(h, h), h], dim=-1).mean(dim=1)

    for gates in ("signal", "uniform"):
        e = xmil.explain(Both(), X, target=0, gates=gates)
        assert e.audit is not None
        assert abs(e.audit.other) < 1e-5


def test_patterns_must_fit_a_parameter() -> None:
    model = xmil.create_model("attnmil", in_dim=16, n_classes=2)
    with pytest.raises(InputError, match=r"'hed\.\*'.*instance"):
        xmil.explain(model, X, composite=Composite({"hed.*": AffineRule()}))


def test_a_rough_account_is_a_warning_and_an_open_one_refused() -> None:
    close, rough, wide = (Audit(1.0, 1.0 - other, other=other) for other in (1e-4, 5e-3, 0.5))
    assert account_warnings(close, size=1.0) == ()
    (sentence,) = account_warnings(rough, size=1.0)
    assert "0.5%" in sentence
    with pytest.raises(UnsupportedError, match="does not close"):
        account_warnings(wide, size=1.0)


def test_parts_shared_between_models_are_restored() -> None:
    import threading

    trunk = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5))
    models = [nn.Sequential(trunk, nn.Linear(16, 2)).train() for _ in range(2)]
    faults: list[Exception] = []

    def work(model: nn.Module) -> None:
        try:
            for _ in range(25):
                xmil.explain(model, X, target=0, forward=lambda net, x: net(x).mean(dim=1))
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(models[i % 2],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert all(m.training for model in models for m in model.modules())
    assert all(p.requires_grad for model in models for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": "a"}, "'epsilon' parameter"),
        ({"composite": {"a": 1}}, "'composite' parameter"),
        ({"method": "random", "seed": "a"}, "'seed' parameter"),
        ({"method": "milli", "samples": 1.5}, "'samples' parameter"),
        ({"method": "ig", "integration": "foo"}, "'integration' parameter"),
        ({"method": "ig", "output": "contrastive"}, "output of ig"),
        ({"method": "attention", "layer": 5}, "it has one attention"),
        ({"layer": 0}, "Unknown layer"),
    ],
)
def test_parameters_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(xmil.XmilError, match=message):
        xmil.explain(xmil.create_model("attnmil", in_dim=16, n_classes=2), X, **options)  # type: ignore[arg-type]
