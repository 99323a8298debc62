"""Networks of users: every answer is right, refused with the way out, or carries its warning."""

# ruff: noqa: NPY002  # users' modules draw from NumPy's global generator

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnsupportedError, XmilError
from xmil.network import open_network

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
    with pytest.raises(InputError, match=r"explanation is for the target 1, .* 0"):
        xmil.flip(model, features(), e, target=0)
    flipped = xmil.flip(model, features(), e.scores, target=0)  # asked for in so many words
    assert flipped.target == 0


class TopInstances(nn.Module):
    """The mean of the four instances with the largest first feature: a bag of one cannot be run."""

    def forward(self, x: Tensor) -> Tensor:
        best = x[..., 0].topk(4, dim=1).indices
        return x.gather(1, best.unsqueeze(-1).expand(-1, -1, x.shape[-1])).mean(dim=1)[:, :2]


def test_item_03_ig_probes_the_bag_itself() -> None:
    e = xmil.explain(TopInstances(), features(), method="ig", target=1, steps=8)
    gxi = xmil.explain(TopInstances(), features(), method="gxi", target=1)
    np.testing.assert_allclose(e.scores, gxi.scores, atol=1e-6)  # piecewise linear, one piece on this path
    assert int((e.scores != 0).sum()) == 4


class Placed(nn.Module):
    """A sum of the first feature, weighed by where the patch lies."""

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        weighed = x[..., 0] * coords.to(x.dtype)[..., 0]
        return torch.stack([weighed.sum(dim=1), x[..., 1].mean(dim=1)], dim=1)


PLACES = torch.arange(24).reshape(1, 12, 2)
HELD = {"at": PLACES[0].numpy()}


class Holder:
    def __init__(self) -> None:
        self.places = PLACES

    def call(self, net: nn.Module, x: Tensor) -> Tensor:
        return net(x, self.places[:, : x.shape[1]])


def closing(kind: str):
    places, rows, whole = PLACES, PLACES[0].tolist(), xmil.Bag(features(), coords=PLACES[0])
    return {
        "tensor": lambda net, x: net(x, places),
        "sliced": lambda net, x: net(x, places[:, : x.shape[1]]),
        "global": lambda net, x: net(x, PLACES[:, : x.shape[1]]),
        "array": lambda net, x: net(x, torch.from_numpy(HELD["at"])[: x.shape[1]].unsqueeze(0)),
        "list": lambda net, x: net(x, torch.tensor(rows)[: x.shape[1]].unsqueeze(0)),
        "bag": lambda net, x: net(x, torch.from_numpy(whole.coords)[: x.shape[1]].unsqueeze(0)),
        "default": lambda net, x, at=places: net(x, at[:, : x.shape[1]]),
        "method": Holder().call,
    }[kind]


CLOSURES = ["tensor", "sliced", "global", "array", "list", "bag", "default", "method"]


@pytest.mark.parametrize("kind", CLOSURES)
def test_item_04_companions_that_are_closed_over_are_refused(kind: str) -> None:
    forward = closing(kind)
    for method in ("single", "one_removed", "combined", "milli", "shapley"):
        with pytest.raises(InputError, match=r"one row for each of the 12 patches.*forward's signature"):
            xmil.explain(Placed(), features(), method=method, target=0, forward=forward)
    with pytest.raises(InputError, match="one row for each of the 12 patches"):
        xmil.flip(Placed(), features(), np.arange(12), target=0, forward=forward)
    e = xmil.explain(Placed(), features(), method="gxi", target=0, forward=forward)  # the bag stays whole
    np.testing.assert_allclose(e.scores, (features()[:, 0] * PLACES[0, :, 0]).numpy(), rtol=1e-6)


class ReadsGlobal(nn.Module):
    """Takes its places from outside, as a notebook's module does."""

    def forward(self, x: Tensor) -> Tensor:
        return Placed()(x, PLACES[:, : x.shape[1]])


def test_item_04_modules_that_read_from_outside_are_seen() -> None:
    at = PLACES

    def embed(encoder: nn.Module, x: Tensor) -> Tensor:
        return Placed()(encoder(x), at[:, : x.shape[1]])

    chained = xmil.chain(nn.Identity(), nn.Linear(2, 2), forward=embed)
    for net, forward in ((ReadsGlobal(), None), (ReadsGlobal(), lambda net, x: net(x)), (chained, None)):
        with pytest.raises(InputError, match="one row for each of the 12 patches"):
            xmil.explain(net, features(), method="single", target=0, forward=forward)
        assert len(xmil.explain(net, features(), method="gxi", target=0, forward=forward)) == 12


def test_item_04_the_right_way_gives_the_right_numbers() -> None:
    bag = xmil.Bag(features(), coords=PLACES[0])
    for forward in (None, lambda net, x, *, coords: net(x, coords)):
        e = xmil.explain(Placed(), bag, method="single", target=0, output="logit", forward=forward)
        np.testing.assert_allclose(e.scores, (features()[:, 0] * PLACES[0, :, 0]).numpy(), rtol=1e-6)


def test_item_04_what_is_hidden_deeper_is_refused_when_it_does_not_fit() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(1, 12, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.table).mean(dim=1)[:, :2]

    with pytest.raises(InputError, match="runs on all 12 patches of the bag, but not on 11 of them"):
        xmil.explain(Own(), features(), method="one_removed", target=0)
    net = TopInstances()
    net.places = PLACES[0]
    with pytest.raises(InputError, match="TopInstances holds 'places' of shape \\(12, 2\\)"):
        xmil.flip(net, features(), np.arange(12), target=0)


def test_item_04_what_a_call_leaves_behind_is_no_companion() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.attention = x[..., 0].softmax(dim=1)
            return (self.attention.unsqueeze(-1) * x).sum(dim=1)[:, :2]

    net, calls = Keeps(), []

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        calls.append(x.shape[1])
        return net(x)

    for way in (None, forward):
        assert np.ptp(xmil.explain(net, features(), method="single", target=0, forward=way).scores) > 0


class Chances(nn.Module):
    """Returns probabilities, in one of the ways of the field."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.head = kind, nn.Linear(D, 1 if kind in ("sigmoid", "clamped", "mean") else 3)
        if kind == "labels":
            self.task = "multilabel"

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=1))

    def forward(self, x: Tensor) -> object:
        z = self.logits(x)
        return {
            "sigmoid": lambda: z.sigmoid(),
            "clamped": lambda: (z.sigmoid().clamp(1e-5, 1 - 1e-5), (z > 0).float(), x[..., 0].softmax(dim=1)),
            "mean": lambda: self.head(x).sigmoid().mean(dim=1),
            "softmax": lambda: torch.softmax(z, dim=-1)[0],
            "own": lambda: z.exp() / z.exp().sum(dim=-1, keepdim=True),
            "labels": lambda: nn.functional.sigmoid(z),
        }[self.kind]()

    def expected(self, x: Tensor) -> np.ndarray:
        found = self(x.unsqueeze(0))
        found = found[0] if isinstance(found, tuple) else found
        return found.detach().reshape(-1).double().numpy()


CHANCES = ["sigmoid", "clamped", "mean", "softmax", "own", "labels"]


@pytest.mark.parametrize("kind", CHANCES)
def test_item_05_probabilities_are_asked_for_and_shown_as_they_are(kind: str) -> None:
    net, x = Chances(kind).eval(), features(4)
    with pytest.raises(InputError, match=r"look like probabilities.*returns='probability'"):
        xmil.explain(net, x, method="gxi")
    p = net.expected(x)
    target = 1 if len(p) == 1 else 2
    expected = p[0] if len(p) == 1 else p[2]
    curve = xmil.flip(net, x, np.arange(4), target=target, returns="probability")
    assert curve.values[0] == pytest.approx(expected, abs=1e-6)
    e = xmil.explain(net, x, method="single", target=target, returns="probability")
    alone = [net.expected(x[[i]])[-1] for i in range(4)]
    np.testing.assert_allclose(e.scores, alone, atol=1e-6)
    assert e.params["returns"] == "probability"
    predicted = xmil.explain(net, x, method="gxi", returns="probability").target
    assert predicted == (int(p[0] > 0.5) if len(p) == 1 else int(p.argmax()))


@pytest.mark.parametrize("kind", ["sigmoid", "softmax", "labels"])
def test_item_05_lrp_explains_the_logits_behind_the_probabilities(kind: str) -> None:
    net, x = Chances(kind).eval(), features(4)
    e = xmil.explain(net, x, method="lrp", target=1, returns="probability")
    column = 0 if kind == "sigmoid" else 1
    parts = (net.head(x) / 4)[:, column] - net.head.bias[column] / 4
    np.testing.assert_allclose(e.scores, parts.detach().numpy(), atol=1e-6)
    assert abs(e.audit.other) < 1e-5


def test_item_05_what_announces_itself_wrongly_is_refused() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(dim=1)[:, :2] * 5

    with pytest.raises(InputError, match="probabilities; leave out `returns="):
        xmil.explain(Large(), features(), returns="probability")
    net = Chances("labels")
    net.task = "classification"
    with pytest.raises(InputError, match="task = 'multilabel'"):
        xmil.explain(net, features(), returns="probability")
    with pytest.raises(XmilError, match="Did you mean 'probability'"):
        xmil.explain(Large(), features(), returns="probabilities")
    own = xmil.create_model("meanpool", in_dim=D, n_classes=2)
    with pytest.raises(InputError, match="it returns logits"):
        xmil.explain(own, features(), returns="probability")
    same = xmil.explain(Chances("sigmoid"), features(), method="gxi", returns="logit", target=1)
    assert 0 < same.logits[0] < 1  # taken at the user's word


class Dice(nn.Module):
    """Random in eval mode: by torch, NumPy or Python."""

    def __init__(self, kind: str = "torch") -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        noise = {
            "torch": lambda: float(torch.rand(())),
            "numpy": lambda: np.random.rand(),
            "python": random.random,
        }
        return x.mean(dim=1)[:, :2] * (1 + noise[self.kind]())


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_item_06_random_modules_are_remarked_and_averaged(kind: str) -> None:
    net, x = Dice(kind), features()
    one = xmil.explain(net, x, method="gxi", target=1)
    assert any("random in eval mode: two passes over this bag differ by" in line for line in one.warnings)
    again = xmil.explain(net, x, method="gxi", target=1)
    np.testing.assert_array_equal(one.scores, again.scores)  # seeded
    mean = xmil.explain(net, x, method="gxi", target=1, average=400)
    assert "mean output of 400 draws" in mean.warnings[0]
    np.testing.assert_allclose(mean.scores, (1.5 * x[:, 1] / 12).numpy(), rtol=0.06)  # 1 + a half
    np.testing.assert_allclose(mean.logits, 1.5 * x.mean(dim=0)[:2].numpy(), rtol=0.06)
    lrp = xmil.explain(net, x, method="lrp", target=1, average=3)
    assert abs(lrp.audit.other) < 1e-5


def test_item_06_curves_carry_the_remark(caplog: pytest.LogCaptureFixture) -> None:
    curve = xmil.flip(Dice(), features(), np.arange(12), target=1, average=3)
    assert "random in eval mode" in curve.warnings[0]
    assert "random in eval mode" in caplog.text
    again = xmil.flip(Dice(), features(), np.arange(12), target=1, average=3)
    np.testing.assert_array_equal(curve.values, again.values)
    caplog.clear()
    for times in (2, 3):  # as over the slides of a cohort: the numbers differ, the remark is the same
        other = xmil.flip(Dice(), times * features(), np.arange(12), target=1, average=3)
        assert other.warnings != curve.warnings
    assert caplog.text == ""


def test_item_06_users_generators_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    net, draws = Dice(), []
    network, x = open_network(net, features(), average=4)
    torch.set_rng_state(states[0])  # the two trial passes draw freely
    draws = [network(x) for _ in range(2)]
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_item_06_modules_that_are_not_random_carry_no_warning() -> None:
    assert xmil.explain(TopInstances(), features(), method="gxi", average=5).warnings == []
    with pytest.raises(InputError, match="'average' parameter"):
        xmil.explain(TopInstances(), features(), method="gxi", average=0)


class Wide(nn.Module):
    """Takes width 7."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(dim=1))


class Misleading(nn.Module):
    """Words of another error: "to have" was once read as a wrong width."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("Expected the moon to have two sides")


@pytest.mark.parametrize(
    ("net", "n", "words"),
    [
        (Wide(), 12, "takes features of width 7, but the bag has width 5"),
        (TopInstances(), 3, "TopInstances needs at least 4 patches, but the bag has 3"),
        (Placed(), 12, "Placed asks for 'coords', which the bag does not have"),
        (
            Misleading(),
            12,
            "could not take a bag of shape .*net\\(x\\) raised RuntimeError: Expected the moon",
        ),
    ],
)
def test_item_08_errors_say_what_was_found_out(net: nn.Module, n: int, words: str) -> None:
    for call in (
        lambda: xmil.explain(net, features(n)),
        lambda: xmil.flip(net, features(n), np.arange(n), target=1),
    ):
        with pytest.raises(XmilError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_item_08_sub_bags_that_are_too_small_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"needs at least 4 patches, .* 1;"):
        xmil.explain(TopInstances(), features(), method="single", target=1)
    with pytest.raises(UnsupportedError, match="mode='mask'"):
        xmil.flip(TopInstances(), features(), np.arange(12), target=1, steps="each")
    xmil.flip(TopInstances(), features(), np.arange(12), target=1, steps="each", mode="mask")


def test_item_08_a_method_that_fails_says_so_in_a_line() -> None:
    class Custom(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                raise RuntimeError("no gradients here")
            return x.mean(dim=1)[:, :2]

    with pytest.raises(
        UnsupportedError, match=r"runs on this bag, but the method 'gxi' failed .* no gradients"
    ):
        xmil.explain(Custom(), features(), method="gxi")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced_modules_and_inference_mode() -> None:
    net = Wide().eval()
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    expected = xmil.explain(net, x, method="gxi", target=1).scores
    for module in (torch.jit.trace(net, x.unsqueeze(0)), torch.jit.script(net)):
        np.testing.assert_allclose(
            xmil.explain(module, x, method="gxi", target=1).scores, expected, rtol=1e-5
        )
    with torch.inference_mode():
        bag = x.clone()
        np.testing.assert_array_equal(xmil.explain(net, bag, method="gxi", target=1).scores, expected)
        assert xmil.flip(net, bag, expected, target=1).values.shape == (101,)


def test_misspelt_options_are_refused() -> None:
    with pytest.raises(XmilError, match=r"Unknown parameter 'avrage'\. Did you mean 'average'"):
        xmil.flip(Wide(), torch.ones(3, 7), np.arange(3), target=1, avrage=3)


def test_modules_that_change_their_input_leave_the_bag_alone() -> None:
    class Scales(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(3).mean(dim=1)[:, :2]

    x = features()
    curve = xmil.flip(Scales(), x, np.arange(12), target=1, steps="each")
    e = xmil.explain(Scales(), x, method="one_removed", target=1, output="logit")
    assert torch.equal(x, features())
    without = [torch.cat([x[:k], x[k + 1 :]]).mean(dim=0) for k in range(12)]
    rest = [3 * (x.mean(dim=0) - mean)[1].item() for mean in without]
    np.testing.assert_allclose(e.scores, rest, atol=1e-5)
    assert curve.values[0] == pytest.approx((3 * x.mean(dim=0)[:2]).softmax(dim=0)[1].item(), abs=1e-6)


def test_paths_stand_for_bags_and_models(tmp_path) -> None:
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=0)
    bag = xmil.Bag(features(), coords=PLACES[0] * 256, patch_size=256, slide_id="s1")
    xmil.save_model(model, tmp_path / "m.safetensors")
    xmil.write_bag(bag, tmp_path / "s1.h5")
    e = xmil.explain(tmp_path / "m.safetensors", str(tmp_path / "s1.h5"), target=1)
    np.testing.assert_array_equal(e.scores, xmil.explain(model, bag, target=1).scores)
    assert (e.bag, e.patch_size) == ("s1", 256)
    assert len(xmil.explain_classes(str(tmp_path / "m.safetensors"), tmp_path / "s1.h5")) == 2
    paths = tmp_path / "m.safetensors", tmp_path / "s1.h5"
    assert xmil.srg(*paths, e) == xmil.srg(model, bag, e)
    np.testing.assert_array_equal(xmil.flip(*paths, e).values, xmil.flip(model, bag, e).values)
    with pytest.raises(XmilError, match="no such file"):
        xmil.explain(model, tmp_path / "s2.h5")
