"""`xmil evaluate` for models without classes: every slide counts, nothing flips, scales are the output's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import xmil
from xmil.cli._app import run
from xmil.core.explanation import Audit
from xmil.evaluate import Certificate, Flips, Judge, random_band

D, N = 5, 20
MODELS = {
    "regression": {"n_classes": 1, "reference": 40.0},
    "survival": {"n_classes": 3, "time_bins": (1.0, 2.0)},
    "cox": {"n_classes": 1},
}


def reading_model(task: str, *, strength: float = 4.0) -> xmil.models.MILModel:
    """A model that reads the first feature of the mean instance."""
    model = xmil.create_model("meanpool", in_dim=D, dim=2, task=task, seed=0, **MODELS[task])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.instance[0][0].weight[0, 0] = 1.0
        model.classifier.weight[:, 0] = strength
        model.classifier.bias.fill_(40.0 if task == "regression" else -1.0)
    return model


def features(seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(N, D)).astype(np.float32) * 0.1
    x[:6, 0] += 2.0
    return x


@pytest.mark.parametrize("task", MODELS)
def test_a_run_over_a_cohort(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "features").mkdir()
    for i in range(3):
        bag = xmil.Bag(features(i), slide_id=f"s{i}")
        xmil.write_bag(bag, tmp_path / "features" / f"s{i}.h5")
    (tmp_path / "cohort.csv").write_text("slide_id,label\ns0,3.5\ns1,100\ns2,\n")
    xmil.save_model(reading_model(task), tmp_path / "m.safetensors")
    paths = ["--model", f"{tmp_path}/m.safetensors", "--features", f"{tmp_path}/features"]
    more = ["--cohort", f"{tmp_path}/cohort.csv", "--out", f"{tmp_path}/out", "--methods", "lrp,gxi,random"]
    assert run(["evaluate", *paths, *more, "--orders", "5", "--modes", "remove"]) == 0
    said = capsys.readouterr().out
    assert "predicts no class" in said
    assert "3 methods on 3 slides. None left out." in said
    assert "flipped" not in said
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    kind = "value" if task == "regression" else "risk"
    assert {row["explained"] for row in rows} == {kind}
    assert {(row["predicted"], row["correct"], row["label"]) for row in rows} == {(None, None, None)}
    assert {row["verdict"] for row in rows if row["method"] == "lrp"} == {"better"}
    certificate = json.loads((tmp_path / "out" / "certificates" / "s0.json").read_text())
    sentence = certificate["methods"][0]["sentence"]
    assert f"The output is a {kind}: there is no prediction to change." in sentence
    assert ") add up to the output (" in sentence
    e = xmil.explain(xmil.load_model(tmp_path / "m.safetensors"), features(0))
    assert certificate["output"] == pytest.approx(e.output, abs=1e-5)
    assert (tmp_path / "out" / "faithfulness.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("task", "weak", "strong"), [("regression", 1e-6, 0.1), ("survival", 0.02, 1.0), ("cox", 0.005, 1.0)]
)
def test_what_counts_as_flat_goes_with_the_scale(task: str, weak: float, strong: float) -> None:
    """Orders that differ by less than 1 % of the output's scale cannot be told apart.

    A value has no scale but what patches move it by: 40 plus a little moves, 40 plus rounding does not.
    """
    found = {}
    for strength in (weak, strong):
        model, x = reading_model(task, strength=strength), features(0)
        e = xmil.explain(model, x)
        (verdict,) = Judge(Flips(model, x, target=e.target)).verdicts([("lrp", e)])
        found[strength] = verdict.kind
    assert found == {weak: "cannot tell", strong: "better"}


def test_an_output_near_zero_is_audited_on_its_scale() -> None:
    """A value at its reference has nothing to share out: rounding is no gap in the account."""
    model, x = reading_model("regression"), features(0)
    value = xmil.explain(model, x, output="logit").output
    at = xmil.create_model("meanpool", in_dim=D, n_classes=1, dim=2, task="regression", reference=value)
    at.load_state_dict(model.state_dict())
    e = xmil.explain(at, x)
    flips = Flips(at, x, target=0)
    band = random_band(flips, orders=5)
    (verdict,) = Judge(flips).verdicts([("lrp", e)])
    certificate = Certificate(e, flips.curve(e.scores), flips.curve(e.scores, order="lerf"), band, verdict)
    assert abs(e.output) < 1e-4
    assert certificate.unexplained is not None
    assert certificate.unexplained < 1e-5
    assert ") add up to the output (" in certificate.sentence


def test_scales() -> None:
    x = features(0)
    assert Flips(reading_model("survival"), x, target=None).scale == 3.0
    assert Flips(reading_model("survival"), x, target=1).scale == 1.0
    assert Flips(reading_model("cox"), x, target=None).scale == 1.0
    largest = 4.0 * x[:, 0].max()  # the best patch alone, against the empty bag
    assert largest / 4 < Flips(reading_model("regression"), x, target=None).scale <= largest


def test_the_zero_of_a_unit_decides_nothing() -> None:
    """The same value in Celsius, in Kelvin and from a reference: the same scale, verdict and audit."""
    x, results = features(0), []
    for offset, reference in ((0.0, None), (273.0, None), (273.0, 260.0)):
        model = xmil.create_model(
            "meanpool", in_dim=D, n_classes=1, dim=2, task="regression", reference=reference
        )
        model.load_state_dict(reading_model("regression").state_dict())
        with torch.no_grad():
            model.classifier.bias.fill_(offset)
        e = xmil.explain(model, x)
        assert e.audit is not None
        e = replace(e, audit=Audit.close(output=e.output, instances=e.output - 0.01))  # .01 is unexplained
        flips = Flips(model, x, target=0)
        curves = [flips.curve(e.scores, order=order) for order in ("morf", "lerf")]
        (verdict,) = Judge(flips).verdicts([("lrp", e)])
        certificate = Certificate(e, *curves, random_band(flips, orders=5), verdict)
        (share,) = Judge(flips).srgs([e.scores]) / flips.scale
        assert verdict.kind == "better"
        results.append([flips.scale, share, certificate.unexplained])
    rounding = 8 * np.finfo(np.float32).eps * 273  # of a value
    np.testing.assert_allclose(results[1:], results[:1] * 2, rtol=0, atol=rounding)


def test_the_predicted_label_of_several_is_right_or_wrong(tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    for i in range(2):
        xmil.write_bag(xmil.Bag(features(i), slide_id=f"s{i}"), tmp_path / "features" / f"s{i}.h5")
    (tmp_path / "cohort.csv").write_text("slide_id,label\ns0,c\ns1,a\n")
    model = xmil.create_model(
        "meanpool", in_dim=D, n_classes=3, task="multilabel", class_names=("a", "b", "c"), seed=0
    )
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([-1.0, -1.0, 2.0]))
    xmil.save_model(model, tmp_path / "m.safetensors")
    paths = ["--model", f"{tmp_path}/m.safetensors", "--features", f"{tmp_path}/features"]
    more = ["--cohort", f"{tmp_path}/cohort.csv", "--out", f"{tmp_path}/out", "--methods", "lrp"]
    assert run(["evaluate", *paths, *more, "--orders", "3", "--modes", "remove"]) == 0
    rows = pq.read_table(tmp_path / "out" / "results.parquet").to_pylist()
    assert {row["slide_id"]: (row["predicted"], row["correct"]) for row in rows} == {
        "s0": (2, True),
        "s1": (2, False),
    }
