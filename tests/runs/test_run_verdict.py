"""The verdict with every run, its cases and its words; `--methods auto` and what a resumed run keeps."""

from __future__ import annotations

import json
import shutil
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import xmil
from xmil.cli._app import run
from xmil.data.inspection import inspect_run
from xmil.heatmaps import verdict_on, without_repeats
from xmil.methods import METHODS, Attributions, register_method
from xmil.methods.method import attributions
from xmil.storage import read_explanations
from xmil.viewer.collection import Collection

D, N = 6, 20


def model() -> xmil.models.MILModel:
    """Reads the first feature, strongly."""
    net = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=0)
    with torch.no_grad():
        net.instance[0][0].weight[:, 0] += 1.0
        net.classifier.weight[1] += 3.0
        net.classifier.weight[0] -= 3.0
        net.classifier.bias.copy_(torch.tensor([6.0, -6.0]))
    return net


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 slides of 10 cases."""
    folder = tmp_path_factory.mktemp("cohort")
    (folder / "features").mkdir()
    rows = ["slide_id,case_id"]
    for i in range(20):
        x = 0.3 * np.random.default_rng(i).normal(size=(N, D)).astype(np.float32)
        x[: 4 + i % 3, 0] += 2.0
        xmil.write_bag(xmil.Bag(x, slide_id=f"s{i:02d}"), folder / "features" / f"s{i:02d}.h5")
        rows.append(f"s{i:02d},c{i // 2}")
    (folder / "cohort.csv").write_text("\n".join(rows) + "\n")
    xmil.save_model(model(), folder / "m.safetensors")
    return folder


def explained(cohort: Path, out: Path, **options: object) -> xmil.Run:
    options = {"cohort": cohort / "cohort.csv", "target": ["1"], **options}
    return xmil.explain_slides(cohort / "m.safetensors", cohort / "features", out=out, **options)


def test_a_run_says_that_its_maps_are_better_than_random(cohort: Path, tmp_path: Path) -> None:
    done = explained(cohort, tmp_path / "run")
    verdict = done.verdict
    assert verdict is not None
    assert (verdict.kind, verdict.method, verdict.orders) == ("better", "lrp", 999)
    assert sorted(verdict.cases) == [f"c{i}" for i in range(10)]
    assert verdict.table["srg"]["lrp"] > 0.05
    assert verdict.table["low"]["lrp"] > 0
    assert "one_added" in verdict.table.index
    assert verdict.sentence.startswith("LRP finds what the model uses: SRG 0.")
    stored = json.loads((done.path / "run.json").read_text())["verdict"]
    assert stored == json.loads(json.dumps(verdict.as_dict()))


def test_the_srg_of_a_verdict_is_the_mean_over_cases(cohort: Path, tmp_path: Path) -> None:
    done = explained(cohort, tmp_path / "run", check="all")
    net, by_case = xmil.load_model(cohort / "m.safetensors"), {}
    for i in range(20):
        e = done.explanation(f"s{i:02d}", method="lrp")
        bag = xmil.read_bag(cohort / "features" / f"s{i:02d}.h5")
        flips = xmil.Flips(net, bag, target=e.target)
        own = flips.gains(np.argsort(-e.scores, kind="stable")[None], steps=10)
        by_case.setdefault(i // 2, []).append(float(own[0]))
    assert done.verdict is not None
    assert done.verdict.table["srg"]["lrp"] == pytest.approx(
        np.mean([np.mean(own) for own in by_case.values()]), abs=1e-5
    )


@pytest.mark.parametrize(("check", "cases"), [("3", 3), ("none", None)])
def test_check_says_how_many_cases(cohort: Path, tmp_path: Path, check: str, cases: int | None) -> None:
    verdict = explained(cohort, tmp_path / "run", check=check).verdict
    if cases is None:
        assert verdict is None
        files = (cohort / "m.safetensors", cohort / "features")
        alone = xmil.explain_slides(*files, out=tmp_path / "alone", target=["1"], check="8").verdict
        assert alone is not None
        assert (alone.unit, len(alone.cases)) == ("slide", 8)  # no table says whose the slides are
    else:
        assert verdict is not None
        assert (verdict.kind, len(verdict.cases)) == ("cannot tell", cases)
        assert "8 are needed" in verdict.sentence
        assert verdict.brief == "not known whether the LRP map shows what the model uses"


def test_a_slow_machine_writes_the_same_run_json(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second run an hour passes between any two looks at the clock."""
    out, hours = tmp_path / "run", count(step=3600.0)
    quick = json.loads((explained(cohort, out).path / "run.json").read_text())
    for name in ("perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: float(next(hours)))
    slow = json.loads((explained(cohort, out, restart=True).path / "run.json").read_text())
    assert len(quick["verdict"]["cases"]) == 10
    assert slow == quick


@pytest.mark.parametrize(
    ("name", "check", "most", "methods"),
    [
        ("dsmil", "auto", 95, ["attention", "lrp"]),
        ("dsmil", "auto", 96, ["attention", "lrp", "one_added"]),
        ("dsmil", "8", 95, ["attention", "lrp", "one_added"]),
        ("attnmil", "auto", 95, ["attention", "lrp", "one_added"]),  # its closed form needs few runs
    ],
)
def test_auto_skips_a_rival_that_runs_a_model_for_each_of_many_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, check: str, most: int, methods: list[str]
) -> None:
    """Eight slides of 12 patches."""
    monkeypatch.setattr("xmil.runs.check.MAX_RIVAL_PATCHES", most)
    features = tmp_path / "features"
    features.mkdir()
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(12, D)).astype(np.float32)
        xmil.write_bag(xmil.Bag(x), features / f"s{i}.h5")
    net = xmil.create_model(name, in_dim=D, n_classes=2, seed=0)
    out = tmp_path / "run"
    verdict = xmil.explain_slides(
        net, features, out=out, methods=["attention"], target=["1"], check=check
    ).verdict
    assert verdict is not None
    assert list(verdict.table.index) == methods
    assert ("check=16 tries one_added" in verdict.sentence) == ("one_added" not in methods)


def test_auto_reads_a_bounded_number_of_cases(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("xmil.runs.check.MAX_TRIES", 3)
    for check, cases in (("auto", 3), ("8", 8)):
        verdict = explained(cohort, tmp_path / "run", check=check).verdict
        assert verdict is not None
        assert len(verdict.cases) == cases


def test_auto_keeps_a_verdict_that_was_asked_for(cohort: Path, tmp_path: Path) -> None:
    asked = explained(cohort, tmp_path / "run", check="8").verdict
    assert asked is not None
    assert (asked.kind, len(asked.cases)) == ("better", 8)
    assert explained(cohort, tmp_path / "run", check="auto").verdict == asked


def test_a_case_that_fails_later_leaves_the_verdict(cohort: Path, tmp_path: Path) -> None:
    features = tmp_path / "features"
    shutil.copytree(cohort / "features", features)
    first = xmil.explain_slides(cohort / "m.safetensors", features, out=tmp_path / "run", target=["1"])
    assert first.verdict is not None
    gone = first.verdict.cases[0]
    (features / f"{gone}.h5").write_bytes(b"damaged")
    again = xmil.explain_slides(cohort / "m.safetensors", features, out=tmp_path / "run", target=["1"])
    assert again.verdict is not None
    assert gone not in again.verdict.cases


def test_maps_that_know_nothing_or_the_opposite_are_called_so(cohort: Path, tmp_path: Path) -> None:
    @register_method("backwards", signed=True, cost="1")
    def backwards(network, x, question) -> Attributions:  # type: ignore[no-untyped-def]
        result = METHODS["single"].run(network, x, question)
        for a in result.of:
            object.__setattr__(a, "scores", -a.scores)
        return result

    try:
        worse = explained(cohort, tmp_path / "worse", methods=["backwards"]).verdict
    finally:
        METHODS._entries.pop("backwards")
    assert worse is not None
    assert worse.kind == "worse"
    assert "one_added does better" in worse.sentence or "lrp does better" in worse.sentence
    chance = explained(cohort, tmp_path / "random", methods=["random"]).verdict
    assert chance is not None
    assert chance.kind == "no better"


def test_a_run_of_maps_without_an_order_cannot_tell(cohort: Path, tmp_path: Path) -> None:
    """Zeros in every slide, whose evidence lies in the same rows: no order of them is a lucky one."""

    @register_method("flat", signed=True, cost="1")
    @torch.no_grad()
    def flat(network, x, question) -> Attributions:  # type: ignore[no-untyped-def]
        return attributions(network(x), question, lambda _: torch.zeros(x.shape[1]))

    try:
        verdict = explained(cohort, tmp_path / "run", methods=["flat"]).verdict
    finally:
        METHODS._entries.pop("flat")
    assert verdict is not None
    assert (verdict.kind, len(verdict.cases)) == ("cannot tell", 10)
    assert verdict.table["srg"]["flat"] == 0.0
    assert verdict.table["kind"]["one_added"] == "better"


def test_warnings_of_several_methods_name_theirs(cohort: Path, tmp_path: Path) -> None:
    one = explained(
        cohort, tmp_path / "one", methods=["gxi"], params={"gxi": {"contexts": 4}}, check="none"
    ).table()
    two = explained(
        cohort, tmp_path / "two", methods=["gxi", "random"], params={"gxi": {"contexts": 4}}, check="none"
    ).table()
    assert one["warnings"].str.startswith("The scores are means").all()
    assert two["warnings"].str.startswith("gxi: The scores are means").all()


def test_auto_chooses_keeps_its_choice_and_is_judged_on_other_cases(cohort: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    one = [str(cohort / "features")]
    done = xmil.explain_slides(cohort / "m.safetensors", one[0], out=out, methods=["auto"], target=["1"])
    about = json.loads((out / "run.json").read_text())
    choice = about["choice"]
    assert about["methods"] == [choice["method"]]
    assert len(choice["cases"]) == 10  # half of 20 slides, each its own case
    assert done.verdict is not None
    assert not set(done.verdict.cases) & set(choice["cases"])
    assert "chosen on 10 other cases" in done.verdict.sentence
    (out / "slides" / "s03.parquet").unlink()
    again = xmil.explain_slides(cohort / "m.safetensors", one[0], out=out, methods=["auto"], target=["1"])
    assert json.loads((out / "run.json").read_text())["choice"] == choice
    assert again.explanation("s03").method == choice["method"]


def test_auto_with_few_cases_is_cross_fitted(cohort: Path, tmp_path: Path) -> None:
    done = explained(cohort, tmp_path / "run", methods=["auto"])
    assert done.verdict is not None
    assert done.verdict.kind == "better"
    assert len(done.verdict.cases) == 10
    assert "other half" in done.verdict.sentence
    (done.path / "slides" / "s03.parquet").unlink()
    again = explained(cohort, tmp_path / "run", methods=["auto"])  # no case judges what it chose itself
    assert again.verdict == done.verdict


def test_the_screen_has_one_line(cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = ["--model", str(cohort / "m.safetensors"), "--features", str(cohort / "features")]
    assert run(["explain", *paths, "--target", "1", "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.count("finds what the model uses: SRG") == 1
    assert run(["explain", *paths, "--config", "check=some", "--out", str(tmp_path / "other")]) == 2
    assert "--config check must" in capsys.readouterr().err


def test_captions_the_viewer_and_notebooks_show_the_verdict(cohort: Path, tmp_path: Path) -> None:
    done = explained(cohort, tmp_path / "run")
    assert done.verdict is not None
    assert done.verdict.brief.startswith("LRP map better than a random order over 10 cases (SRG 0.")
    assert done.verdict.sentence in done._repr_html_()
    fact = Collection([done.path]).facts(0)
    assert (fact["verdict"], fact["verdict_method"], fact["verdict_cases"]) == ("better", "lrp", 10)
    assert fact["verdict_sentence"] == done.verdict.sentence
    assert inspect_run(done.path).facts["verdict"] == done.verdict.sentence


def switching() -> nn.Module:
    """Evidence switches a unit off, so that the scores of lrp are those of the leak alone."""

    class OffSwitch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            off = torch.relu(1 - 8 * x[..., :1].relu().mean(dim=1))
            return 2 - off + 0.05 * x[..., 1:2].mean(dim=1)

    return OffSwitch().eval()


def test_a_map_that_misses_the_evidence_is_no_better_and_the_run_names_what_is(tmp_path: Path) -> None:
    """So many patches that the output changes little with any order but the right one."""
    (tmp_path / "features").mkdir()
    for i in range(8):
        x = np.random.default_rng(i).normal(size=(400, D)).astype(np.float32)
        x[:, 0] = 0
        x[:80, 0] = 1
        xmil.write_bag(xmil.Bag(x), tmp_path / "features" / f"s{i}.h5")
    verdict = xmil.explain_slides(
        switching(), tmp_path / "features", out=tmp_path / "run", target=["1"], check="8"
    ).verdict
    assert verdict is not None
    assert abs(verdict.table["srg"]["lrp"]) < 0.01
    assert verdict.kind == "no better"
    assert "one_added does better" in verdict.sentence


def test_the_methods_of_a_run_are_judged_by_their_own_maps(cohort: Path, tmp_path: Path) -> None:
    """Not by maps of the same name with other parameters, and beside no others if they are all there."""
    own = {"params": {"one_added": {"company": 1, "draws": 1}}, "check": "8"}
    alone = explained(cohort, tmp_path / "alone", methods=["one_added"], **own).verdict
    both = explained(cohort, tmp_path / "both", methods=["one_added", "lrp"], **own).verdict
    assert alone is not None
    assert both is not None
    assert list(both.table.index) == ["one_added", "lrp"]
    assert both.table["srg"].to_dict() == pytest.approx(alone.table["srg"].to_dict())


def test_auto_with_few_cases_judges_the_maps_of_the_run(cohort: Path, tmp_path: Path) -> None:
    """Those with the run's parameters: here one patch in one draw is the company."""
    own = {"params": {"one_added": {"company": 1, "draws": 1}, "lrp": {"preset": "paper"}}, "check": "all"}
    auto = explained(cohort, tmp_path / "auto", methods=["auto"], **own).verdict
    named = explained(cohort, tmp_path / "named", methods=["lrp", "one_added"], **own).verdict
    assert auto is not None
    assert named is not None
    for method in ("lrp", "one_added"):
        assert auto.table["srg"][method] == pytest.approx(named.table["srg"][method], abs=1e-6)


def test_auto_says_that_single_patches_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "features").mkdir()
    for i in range(10):
        xmil.write_bag(xmil.Bag(np.full((1, D), 1.0 + i, np.float32)), tmp_path / "features" / f"s{i}.h5")
    done = xmil.explain_slides(model(), tmp_path / "features", out=tmp_path / "run", methods=["auto"])
    assert done.verdict is not None
    assert done.verdict.kind == "cannot tell"
    assert "fewer than 5 patches" in done.verdict.sentence
    assert json.loads((done.path / "run.json").read_text())["methods"] == ["lrp"]


def test_the_verdict_on_a_method_is_its_own(cohort: Path, tmp_path: Path) -> None:
    verdict = explained(cohort, tmp_path / "run", methods=["lrp", "random"]).verdict
    assert verdict is not None
    assert verdict.of("lrp") == verdict
    other = verdict.of("random")
    assert other is not None
    assert (other.method, other.kind) == ("random", verdict.table["kind"]["random"])
    assert other.brief.startswith("Random map no better")
    assert verdict.of("gxi") is None


def test_each_map_has_the_verdict_on_its_own_method_and_class(cohort: Path, tmp_path: Path) -> None:
    done = explained(cohort, tmp_path / "run", methods=["lrp", "random", "attention"], target=["1", "0"])
    verdict = done.verdict
    assert verdict is not None
    own = {}
    for name in ("lrp", "random", "attention"):
        judged = verdict.of(name)
        assert judged is not None
        own[name] = judged.brief
    words = {
        (e.method, str(e.target)): verdict_on(e, verdict, tested=xmil.Target(1))
        for e in without_repeats(read_explanations(done.path / "slides/s00.parquet"))
    }
    assert words == {
        ("lrp", "1"): own["lrp"],
        ("lrp", "0"): "LRP map not tested",
        ("random", "1"): own["random"],
        ("random", "0"): "Random map not tested",
        ("attention", "all classes"): own["attention"],
    }
    assert words["random", "1"] != words["lrp", "1"]


def test_a_map_of_an_evaluated_slide_has_the_verdict_of_its_certificate() -> None:
    e = xmil.explain(model(), torch.ones(3, D), method="lrp", target=1)
    rows = [
        {"method": "lrp", "target": "0", "verdict": "better", "srg": 0.5},
        {"method": "random", "target": "1", "verdict": "worse", "srg": -0.5},
    ]
    assert verdict_on(e, None, certificate={"methods": rows}) == "LRP map not tested"
    rows.append({"method": "lrp", "target": "1", "verdict": "no better", "srg": 0.01})
    words = "LRP map no better than a random order over 1 slide (SRG 0.01)"
    assert verdict_on(e, None, certificate={"methods": rows}) == words
    assert verdict_on(e, None, certificate={"methods": "damaged"}) == "LRP map not tested"
