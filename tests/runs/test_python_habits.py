"""What users of Python try first: one method or several, all classes, a device, a model they have at hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import xmil
from xmil.core.errors import InputError

DIM = 6


class Net(nn.Module):
    """A network of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean(dim=1))


@pytest.fixture
def features(tmp_path: Path) -> Path:
    folder = tmp_path / "features"
    folder.mkdir()
    for i in range(4):
        rng = np.random.default_rng(i)
        coords = np.stack(np.divmod(np.arange(12), 4), axis=1) * 256
        bag = xmil.Bag(rng.normal(size=(12, DIM)).astype("float32"), coords=coords, patch_size=256)
        xmil.write_bag(bag, folder / f"s{i}.h5")
    return folder


@pytest.fixture
def model() -> nn.Module:
    return xmil.create_model("attnmil", in_dim=DIM, n_classes=3, dim=8, seed=0, class_names=["a", "b", "c"])


def bag_of(n: int = 9) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(n, DIM)).astype("float32")


def test_method_and_methods_are_one_parameter(model: nn.Module, features: Path, tmp_path: Path) -> None:
    assert xmil.explain(model, bag_of(), methods="gxi").method == "gxi"
    assert xmil.explain(model, bag_of(), methods=["gxi"]).method == "gxi"
    for several in ({"methods": ["lrp", "gxi"]}, {"method": ["lrp", "gxi"]}):
        with pytest.raises(InputError, match="one method at a time"):
            xmil.explain(model, bag_of(), **several)
    xmil.save_model(model, tmp_path / "m.safetensors")
    done = xmil.explain_slides(tmp_path / "m.safetensors", features, out=tmp_path / "run", method="gxi")
    assert done.settings["methods"] == ["gxi"]
    with pytest.raises(InputError, match="method= and methods="):
        xmil.explain_slides(model, features, out=tmp_path / "two", method="gxi", methods=["lrp"])
    with pytest.raises(InputError, match="takes one method"):
        xmil.insight_slides(done, features=features, methods=["gxi", "lrp"])


def test_all_targets_and_the_predicted_one(model: nn.Module) -> None:
    every = xmil.explain(model, bag_of(), target="all")
    assert [e.target.cls for e in every] == [0, 1, 2]
    one = xmil.explain(model, bag_of(), target="predicted")
    assert (one.target, one.scores.tolist()) == (
        xmil.explain(model, bag_of()).target,
        every[int(one.target)].scores.tolist(),
    )


def test_a_device_is_named_and_the_model_goes_back(model: nn.Module) -> None:
    here = xmil.explain(model, torch.from_numpy(bag_of()), target=1, device="cpu")
    assert here.scores.tolist() == xmil.explain(model, bag_of(), target=1).scores.tolist()
    if not torch.cuda.is_available():
        for name in ("cuda", "cuda:3"):
            with pytest.raises(InputError, match="no GPU"):
                xmil.explain(model, bag_of(), device=name)
    with pytest.raises(InputError, match="Unknown device 'gpu'"):
        xmil.predict(model, bag_of(), device="gpu")
    assert next(model.parameters()).device.type == "cpu"


def test_predict_says_what_the_task_has(model: nn.Module, tmp_path: Path) -> None:
    said = xmil.predict(model, bag_of())
    logits = model(torch.from_numpy(bag_of())[None])[0].detach()
    np.testing.assert_allclose(said.logits, logits.numpy(), rtol=1e-6)
    np.testing.assert_allclose(said.probabilities, logits.softmax(0).numpy(), rtol=1e-6)
    assert (said.cls, said.name) == (int(logits.argmax()), "abc"[int(logits.argmax())])
    assert (said.value, said.risk) == (None, None)
    kinds = {"regression": 1, "survival": 4, "cox": 1}
    for task, outputs in kinds.items():
        net = xmil.create_model("meanpool", in_dim=DIM, n_classes=outputs, task=task, seed=0)
        one = xmil.predict(net, bag_of())
        z = net(torch.from_numpy(bag_of())[None])[0].detach().double()
        expected = -torch.cumprod(torch.sigmoid(-z), 0).sum() if task == "survival" else z[0]
        number = one.value if task == "regression" else one.risk
        assert number == pytest.approx(float(expected), rel=1e-6)
        assert (one.probabilities, one.cls) == (None, None)
    labels = xmil.create_model("meanpool", in_dim=DIM, n_classes=3, task="multilabel", seed=0)
    z = labels(torch.from_numpy(bag_of())[None])[0].detach()
    np.testing.assert_allclose(xmil.predict(labels, bag_of()).probabilities, z.sigmoid().numpy(), rtol=1e-6)
    assert xmil.predict(Net(), bag_of()).probabilities.sum() == pytest.approx(1)


def test_runs_take_a_loaded_model_and_leave_it_as_it_was(
    model: nn.Module, features: Path, tmp_path: Path
) -> None:
    model.train()
    attributes, state = set(vars(model)), copy.deepcopy(model.state_dict())
    run = xmil.explain_slides(model, features, out=tmp_path / "run", device="cpu")
    assert (model.training, set(vars(model)), model.background) == (True, attributes, None)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    xmil.save_model(model, tmp_path / "m.safetensors")
    other = xmil.explain_slides(tmp_path / "m.safetensors", features, out=tmp_path / "other", device="cpu")
    for slide in run:
        target = other.explanation(slide).target
        assert run.explanation(slide).target == target
        assert run.explanation(slide).scores.tolist() == other.explanation(slide).scores.tolist()
    again = xmil.explain_slides(model, features, out=tmp_path / "run", device="cpu")
    assert len(again) == 4
    with pytest.raises(InputError, match="save_model"):
        xmil.explain_slides(model, features, out=tmp_path / "two", workers=2)


def test_runs_take_a_network_of_your_own(features: Path, tmp_path: Path) -> None:
    net = Net()
    attributes = set(vars(net))
    run = xmil.explain_slides(net, features, out=tmp_path / "run", device="cpu", class_names=["x", "y"])
    assert set(vars(net)) == attributes
    assert (run.spec["name"], run.class_names, len(run)) == ("Net", ("x", "y"), 4)
    answers = xmil.predict_slides(net, features, out=tmp_path / "predicted", device="cpu").table()
    assert len(answers) == 4
    with pytest.raises(InputError, match="Got dict"):
        xmil.explain_slides({"head": 1}, features, out=tmp_path / "none")


def test_the_table_of_an_evaluation_has_the_measures(
    model: nn.Module, features: Path, tmp_path: Path
) -> None:
    run = xmil.evaluate_slides(
        model, features, out=tmp_path / "run", methods=["lrp", "random"], steps=5, orders=2, device="cpu"
    )
    table = run.table().set_index("slide_id")
    assert {"srg:lrp", "srg:random", "aupc:lrp", "sufficiency:lrp", "necessity:lrp"} <= set(table)
    bag = xmil.read_bag(features / "s1.h5")
    e = run.explanation("s1", method="lrp")
    assert table.loc["s1", "srg:lrp"] == pytest.approx(xmil.srg(model, bag, e, steps=5), abs=1e-5)


def test_warnings_show_in_the_repr(model: nn.Module) -> None:
    e = xmil.explain(model, bag_of(), contexts=12)
    assert (len(e.warnings) > 0, f"{len(e.warnings)} warning" in repr(e)) == (True, True)
    assert "warning" not in repr(replace(e, warnings=[]))


def test_names_follow_a_pattern(model: nn.Module) -> None:
    e = xmil.explain(model, bag_of(), target=1)
    assert isinstance(xmil.flip(model, bag_of(), e), xmil.Curve)
    assert xmil.insight is xmil.insight_slides
