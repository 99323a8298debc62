"""Models without classes: the value above its reference, the risk of hazards, the log risk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import xmil
from xmil.core.errors import InputError, UnknownNameError, UnsupportedError
from xmil.core.explanation import Audit
from xmil.methods import METHODS, account_warnings

WIDTH, BINS, REFERENCE = 6, 4, 0.7
TASKS = {
    "regression": {"n_classes": 1, "reference": REFERENCE},
    "survival": {"n_classes": BINS, "time_bins": (12, 24, 36.5)},
    "cox": {"n_classes": 1},
}
SMALL = {
    "transmil": {"dim": 16},
    "attnmil": {"dim": 8, "attention_dim": 4},
    "addmil": {"hidden": 8},
    "clam_sb": {"dim": 8, "attention_dim": 4},
    "clam_mb": {"dim": 8, "attention_dim": 4},
    "mambamil": {"dim": 8, "attention_dim": 4},
    "stamp_vit": {"dim": 8, "heads": 2, "feedforward": 4},
}
PAIRS = [(name, task) for name in xmil.list_models() for task in TASKS]


def model_of(name: str, task: str, **more: object) -> xmil.models.MILModel:
    """A small model whose biases matter."""
    settings = {**TASKS[task], **SMALL.get(name, {}), **more}
    model = xmil.create_model(name, in_dim=WIDTH, task=task, seed=3, **settings)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model


def by_hand(task: str, logits: Tensor) -> Tensor:
    """The explained output (b,) of outputs (b, c), step by step."""
    if task == "regression":
        return logits[:, 0] - REFERENCE
    if task == "cox":
        return logits[:, 0]
    alive, total = torch.ones_like(logits[:, 0]), torch.zeros_like(logits[:, 0])
    for t in range(logits.shape[1]):
        alive = alive * (1 - 1 / (1 + torch.exp(-logits[:, t])))
        total = total + alive
    return -total


@pytest.fixture
def bag(rng: np.random.Generator) -> Tensor:
    return torch.from_numpy(2 * rng.normal(size=(23, WIDTH)).astype(np.float32))


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_every_method_explains_the_models_own_output(name: str, task: str, bag: Tensor) -> None:
    model = model_of(name, task)
    with torch.no_grad():
        expected = float(by_hand(task, model(bag[None]).double()))
    for method in xmil.list_methods(model):
        e = xmil.explain(model, bag, method=method)
        assert e.output == pytest.approx(expected, abs=2e-6), method
        assert str(e.target) == {"regression": "value"}.get(task, "risk")
        assert e.params["output"] == {"regression": "value"}.get(task, "risk")
        assert e.scores.shape == (len(bag),)
        assert np.isfinite(e.scores).all()


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_the_account_closes(name: str, task: str, bag: Tensor) -> None:
    model = model_of(name, task)
    methods = [m for m in xmil.list_methods(model) if METHODS[m].conserves and m != "ig"]
    for method in methods:
        for e in xmil.explain_classes(model, bag, method=method):
            assert e.audit is not None
            assert e.audit.output == e.output
            assert abs(e.audit.other) <= 1e-4 * max(abs(e.output), float(np.abs(e.logits).max()))


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_lrp_shares_the_output_out_as_by_hand(name: str, task: str, bag: Tensor) -> None:
    """Relevance of single logits, weighted by hand with a slow sum along the path from zero logits."""
    model = model_of(name, task).double()
    x = bag.double()
    found = xmil.explain(model, x, method="lrp")
    with torch.no_grad():
        z = model(x[None])
    path = ((torch.arange(4000)[:, None] + 0.5) / 4000 * z).requires_grad_(True)  # (4000, c)
    slopes = torch.autograd.grad(by_hand(task, path).sum(), path)[0].mean(dim=0)
    logits = [
        xmil.explain(model, x, method="lrp", target=t, output="logit").scores for t in range(z.shape[1])
    ]
    expected = sum(float(slope) * scores for slope, scores in zip(slopes, logits, strict=True))
    np.testing.assert_allclose(found.scores, expected, rtol=1e-4, atol=1e-6)


def test_bias_holds_the_risk_of_zero_logits(bag: Tensor) -> None:
    model = model_of("attnmil", "survival", bias=False)
    with torch.no_grad():
        model.instance[0][0].bias.zero_()
    e = xmil.explain(model, bag)
    assert e.audit is not None
    assert e.audit.bias == pytest.approx(-(0.5 + 0.25 + 0.125 + 0.0625), abs=1e-6)
    assert e.audit.instances == pytest.approx(e.output - e.audit.bias, abs=1e-5)


def test_bias_holds_the_reference(bag: Tensor) -> None:
    plain, shifted = (
        xmil.explain(model_of("attnmil", "regression", reference=r), bag) for r in (None, REFERENCE)
    )
    assert plain.audit is not None
    assert shifted.audit is not None
    assert shifted.output == pytest.approx(plain.output - REFERENCE, abs=1e-6)
    assert shifted.audit.bias == pytest.approx(plain.audit.bias - REFERENCE, abs=1e-6)
    np.testing.assert_array_equal(plain.scores, shifted.scores)


@pytest.mark.parametrize(("name", "task"), PAIRS)
def test_gradients_are_those_of_the_output(name: str, task: str, bag: Tensor) -> None:
    model = model_of(name, task).double()
    x = bag.double().requires_grad_(True)
    (gradient,) = torch.autograd.grad(by_hand(task, model(x[None])).sum(), x)
    gxi = xmil.explain(model, x.detach(), method="gxi").scores
    grad2 = xmil.explain(model, x.detach(), method="grad2").scores
    np.testing.assert_allclose(gxi, (gradient * x).sum(-1).detach(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad2, gradient.square().sum(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("task", TASKS)
def test_integrated_gradients_close(task: str, bag: Tensor) -> None:
    model = model_of("attnmil", task)
    e = xmil.explain(model, bag, method="ig", steps=200)
    with torch.no_grad():
        empty = float(by_hand(task, model(torch.zeros_like(bag)[None])))
    assert e.audit is not None
    assert e.audit.bias == pytest.approx(empty, abs=1e-5)
    assert abs(e.audit.other) < 1e-2 * abs(e.output - empty)


@pytest.mark.parametrize(("name", "task"), PAIRS)
@pytest.mark.parametrize("mode", ["remove", "mask"])
def test_flip_follows_the_output(name: str, task: str, mode: str, bag: Tensor) -> None:
    model = model_of(name, task)
    e = xmil.explain(model, bag)
    curve = xmil.flip(model, bag, e.scores, target=e.target, steps="each", mode=mode)
    order = np.argsort(-e.scores, kind="stable")
    for k in (0, 1, 7, len(bag)):
        kept = np.sort(order[k:])
        left = torch.zeros_like(bag)
        left[kept] = bag[kept]
        if mode == "remove" and k < len(bag):
            left = bag[kept]
        with torch.no_grad():
            expected = float(by_hand(task, model(left[None]).double()))
        assert curve.values[k] == pytest.approx(expected, abs=1e-5)
    assert curve.flipped is None
    assert not curve.decides
    assert not curve.flipped_at_zero
    assert xmil.Flips(model, bag, target=e.target).decision is None


def test_time_bins_are_targets(bag: Tensor) -> None:
    model = model_of("clam_mb", "survival")
    z = xmil.explain(model, bag).logits
    every = xmil.explain_classes(model, bag)
    assert [str(e.target) for e in every] == ["0-12", "12-24", "24-36.5", "36.5+", "risk"]
    assert [e.output for e in every[:BINS]] == pytest.approx(z.tolist())
    hazard = xmil.explain(model, bag, method="one_removed", target="12-24")
    assert hazard.output == pytest.approx(1 / (1 + np.exp(-z[1])), abs=1e-6)
    curve = xmil.flip(model, bag, hazard.scores, target=1)
    assert curve.values[0] == pytest.approx(hazard.output, abs=1e-6)
    assert (curve.flipped, curve.scale) == (None, 1.0)
    against = xmil.explain(model, bag, target=xmil.Target("36.5+", against=0))
    assert against.output == pytest.approx(z[3] - z[0], abs=1e-5)
    np.testing.assert_allclose(against.scores, every[3].scores - every[0].scores, atol=1e-5)


def test_the_risk_has_the_attention_of_every_bin(bag: Tensor) -> None:
    model = model_of("clam_mb", "survival")
    bins = [xmil.explain(model, bag, method="attention", target=t).scores for t in range(BINS)]
    risk = xmil.explain(model, bag, method="attention").scores
    np.testing.assert_allclose(risk, np.mean(bins, axis=0), atol=1e-7)


def test_named_values(bag: Tensor) -> None:
    model = xmil.create_model(
        "meanpool",
        in_dim=WIDTH,
        n_classes=2,
        task="regression",
        class_names=("Ki67", "TIL"),
        reference=(0.2, 0.5),
        seed=0,
    )
    z = xmil.explain(model, bag).logits
    e = xmil.explain(model, bag, target="TIL")
    assert (e.column, e.output) == ("lrp:TIL", pytest.approx(z[1] - 0.5, abs=1e-6))
    contrast = xmil.explain(model, bag, target=xmil.Target("TIL", against="Ki67"))
    assert contrast.output == pytest.approx(z[1] - 0.5 - (z[0] - 0.2), abs=1e-6)
    assert xmil.explain(model, bag, target="TIL", output="logit").output == pytest.approx(z[1], abs=1e-6)


@pytest.mark.parametrize(
    ("task", "question", "message"),
    [
        ("regression", {"output": "probability", "method": "gxi"}, "no output 'probability'"),
        ("cox", {"output": "log_odds"}, "output='risk' or 'logit'"),
        ("survival", {"output": "contrastive", "target": 1}, "no contrast"),
        ("survival", {"output": "probability"}, "name a time bin"),
        ("survival", {"output": "risk", "target": 1}, "no output 'risk'"),
        ("survival", {"target": xmil.Target("risk", against=0)}, "name a time bin"),
        ("cox", {"target": 1}, r"0 \(risk\). Got 1"),
        ("regression", {"target": "risk"}, "Unknown class 'risk'"),
    ],
)
def test_what_a_task_does_not_have_is_refused(
    task: str, question: dict[str, object], message: str, bag: Tensor
) -> None:
    with pytest.raises((UnsupportedError, InputError, UnknownNameError), match=message):
        xmil.explain(model_of("attnmil", task), bag, **question)


def test_a_class_has_no_value(bag: Tensor) -> None:
    model = xmil.create_model("meanpool", in_dim=WIDTH, n_classes=2, seed=0)
    with pytest.raises(UnsupportedError, match="no output 'value'"):
        xmil.explain(model, bag, output="value")


class Regressor(torch.nn.Module):
    """A user's own network, which says what its output means."""

    task, reference, class_names = "regression", 2.0, ["age"]

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean(dim=1)


def test_a_users_network_may_name_its_task(bag: Tensor) -> None:
    net = Regressor()
    e = xmil.explain(net, bag, method="lrp")
    assert e.column == "lrp:age"
    assert e.output == pytest.approx(net(bag[None]).item() - 2.0, abs=1e-6)
    assert xmil.flip(net, bag, e.scores, target="age").values[0] == pytest.approx(e.output, abs=1e-6)


@pytest.mark.parametrize("wrap", [np.array, torch.tensor, tuple, list])
def test_an_array_of_references_is_taken(wrap: Any, bag: Tensor) -> None:
    net = Regressor()
    net.linear, net.class_names = torch.nn.Linear(WIDTH, 2), np.array(["age", "size"])
    net.reference = wrap([1.0, 3.0])
    e = xmil.explain(net, bag, target="size", method="gxi")
    assert e.output == pytest.approx(net(bag[None])[0, 1].item() - 3.0, abs=1e-6)


@pytest.mark.parametrize("reference", [[1.0], np.array([1.0, 2.0, 3.0]), "two", {"age": 1.0}, float("nan")])
def test_a_reference_that_does_not_fit_is_refused(reference: Any, bag: Tensor) -> None:
    net = Regressor()
    net.linear, net.class_names, net.reference = torch.nn.Linear(WIDTH, 2), None, reference
    with pytest.raises(InputError, match=r"'reference' parameter of Regressor must be .* list of 2"):
        xmil.explain(net, bag, target=1)
    net.task = "classification"  # which has none: the attribute is the module's own affair
    assert xmil.explain(net, bag, target=1, method="gxi").scores.any()


@pytest.mark.parametrize(
    ("names", "outputs", "fault"),
    [
        (np.array(["b", "a"]), 2, None),
        (np.array([4, 7]), 1, None),  # one logit has two classes
        ({0: "b", 1: "a"}, 2, "must be a list of 2 different names"),
        ({"b", "a"}, 2, "must be a list of 2 different names"),
        ("ba", 2, "must be a list of 2 different names"),
        (["a", "a"], 2, "must be a list of 2 different names"),
        (["a", "b", "c"], 2, "2 outputs.*3 class names"),
        (["a"], 1, "1 output.*set class_names to 2"),
    ],
)
def test_class_names_of_a_users_network(names: Any, outputs: int, fault: str | None, bag: Tensor) -> None:
    net = Regressor()
    net.task, net.linear, net.class_names = "classification", torch.nn.Linear(WIDTH, outputs), names
    if fault is None:
        e = xmil.explain(net, bag, target=str(names[1]), method="gxi")
        assert (int(e.target), e.target.name) == (1, str(names[1]))
    else:
        with pytest.raises(InputError, match=fault):
            xmil.explain(net, bag, target=1)


def test_explanations_are_saved_with_their_target(bag: Tensor, tmp_path) -> None:
    e = xmil.explain(model_of("attnmil", "survival"), bag)
    e.save(tmp_path / "e.parquet")
    again = xmil.Explanation.load(tmp_path / "e.parquet", target="risk")
    assert (again.column, again.output, again.audit) == ("lrp:risk", e.output, e.audit)


def test_a_saturated_risk_is_explained_without_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """Every patient dies in the first bin: the risk is 0, and large shares cancel in its account."""
    model = xmil.create_model("addmil", in_dim=64, n_classes=4, task="survival", seed=1)
    e = xmil.explain(model, np.random.default_rng(1).normal(size=(3000, 64)))
    assert abs(e.output) < 1e-20
    assert e.audit is not None
    assert abs(e.audit.other) < 1e-5
    assert not caplog.records


def test_an_account_is_judged_by_the_size_of_its_terms() -> None:
    account = Audit.close(output=0.0, instances=2e-5, bias=-1.4e-5)
    assert account_warnings(account, size=0.94) == ()
    with pytest.raises(UnsupportedError, match="does not close"):
        account_warnings(account, size=1e-5)
