"""What a run comes to: intervals, verdicts, the suite's tests of itself, the page, and two runs compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.bench.runs import referee, tiny_plan
from xmil.bench import (
    Measure,
    Unit,
    checks,
    column_of,
    compare_runs,
    draws_of,
    kendall,
    measured_on,
    places,
    read_units,
    verdict_of,
    weak_spots,
    write_report,
)
from xmil.bench.verdicts import rank, row_title
from xmil.core.errors import FileError
from xmil.evaluate.statistics import bootstrap_mean

LRP = """
import xmil

def score(model, bag, target):
    return {}xmil.explain(model, bag, method="lrp", target=target).scores
"""
UP, DOWN = Measure("up", "Up", ""), Measure("down", "Down", "", -1)


def made(columns, *, suite="evidence", repetitions=1, seed=0):
    """A unit of drawn values: each method has a mean of both measures and a spread."""
    rng = np.random.default_rng(seed)
    settings = {"suite": suite, "problem": {"name": "p"}, "model": {"name": "m"}}
    unit = Unit(Path("none"), settings, ("up", "down"))
    for r in range(repetitions):
        shared = rng.normal(size=(40, 1))
        bags = [str(i) for i in range(40)]
        unit.facts[r] = {"auroc": 0.9, "bags": bags, "checksum": "c", "seed": r, "forward": 1.0}
        for method, (mean, spread) in columns.items():
            noise = shared + spread * rng.normal(size=(40, 2))
            unit.values[r, method] = noise + np.array([mean, -mean])
            unit.rows[r, method] = {"digest": "", "seconds": 1.0}
    return unit


def test_intervals_of_one_repetition_are_the_bootstrap_over_bags():
    unit = made({"a": (0.5, 1.0)})
    found = draws_of(unit, [0], draws=4000).interval("a", "up")
    values = unit.values[0, "a"][:, 0]
    plain = bootstrap_mean(values, units=range(len(values)), draws=4000, seed=5)
    assert found.estimate == pytest.approx(plain.estimate)
    assert (found.low, found.high) == pytest.approx((plain.low, plain.high), abs=0.03)


def test_intervals_grow_with_the_spread_between_repetitions():
    unit = made({"a": (0.5, 0.1)}, repetitions=4)
    for r in range(4):
        unit.values[r, "a"][:] = r  # no spread within, much between
    found = draws_of(unit, range(4)).interval("a", "up")
    assert found.estimate == 1.5
    assert found.low < 0.8 < 2.2 < found.high


def test_bags_without_a_value_are_left_out():
    unit = made({"a": (0.5, 1.0), "b": (0.1, 1.0)})
    unit.values[0, "a"][:30] = np.nan
    draws = draws_of(unit, [0])
    assert draws.mean("a", "up") == pytest.approx(unit.values[0, "a"][30:, 0].mean())
    assert np.isfinite(draws.redrawn[:, 1]).all()


def test_paired_differences_are_narrower_than_their_rows():
    unit = made({"a": (0.5, 0.05), "b": (0.3, 0.05)})
    draws = draws_of(unit, [0])
    gap, alone = draws.difference("a", "b", "up"), draws.interval("a", "up")
    assert gap.estimate == pytest.approx(draws.mean("a", "up") - draws.mean("b", "up"))
    assert gap.high - gap.low < 0.3 * (alone.high - alone.low)


@pytest.mark.parametrize(("measure", "best"), [(UP, "good"), (DOWN, "good")])
def test_a_clear_lead_is_said_and_a_tie_is_not(measure, best):
    clear = made({"good": (1.0, 0.1), "bad": (0.0, 0.1), "random": (9.0, 0.1), "oracle": (99.0, 0.0)})
    draws = draws_of(clear, [0])
    found = verdict_of(clear, draws, measure, [0])
    assert (found.best, found.second, found.apart, found.level) == (best, "bad", ("bad",), ())
    assert found.lead.low > 0
    assert "ahead of every other row" in found.sentence
    close = made({"one": (0.5, 1.0), "two": (0.5, 1.0)})
    told = verdict_of(close, draws_of(close, [0]), measure, [0])
    assert told.level == (told.second,)
    assert f"cannot be told apart from {told.second}" in told.sentence


def test_a_lead_below_the_smallest_difference_is_none():
    unit = made({"one": (0.5, 1e-4), "two": (0.495, 1e-4), "three": (0.4, 1e-4)})
    found = verdict_of(unit, draws_of(unit, [0]), UP, [0])
    assert found.lead.low > 0.004  # sure, and too small to matter
    assert (found.best, found.apart, found.level) == ("one", ("three",), ("two",))
    lrp = made({"one": (0.5, 1e-4), "lrp": (0.495, 1e-4)})
    lrp.measures = ("auprc2", "auroc2", "ndcg", "pearson", "spearman")
    lrp.values = {key: np.repeat(value[:, :1], 5, axis=1) for key, value in lrp.values.items()}
    assert weak_spots([column_of(lrp)]) == []


def test_patients_are_the_unit_on_tissue():
    """Forty bags of ten patients, the same in both repetitions: copies of a bag say no more than one."""
    unit = made({"a": (0.5, 1.0), "b": (0.3, 1.0)}, suite="tissue", repetitions=2)
    patients = [f"p{i % 10}" for i in range(40)]
    for r in range(2):
        unit.facts[r]["cases"] = patients
        for method in "ab":
            unit.values[r, method] = unit.values[0, method][np.arange(40) % 10]
    found = verdict_of(unit, draws_of(unit, [0, 1]), UP, [0, 1])
    assert (found.unit, found.n, found.units) == ("case", 10, 10)
    wide = draws_of(unit, [0, 1], draws=4000).interval("a", "up")
    plain = bootstrap_mean(unit.values[0, "a"][:10, 0], units=range(10), draws=4000, seed=5)
    assert (wide.estimate, wide.low, wide.high) == pytest.approx(
        (plain.estimate, plain.low, plain.high), abs=0.04
    )


def test_mixed_bags_of_tissue_count_by_repetition_and_few_have_no_interval():
    unit = made({"good": (1.0, 0.1), "bad": (0.0, 0.1)}, suite="tissue", repetitions=9)
    few = verdict_of(unit, draws_of(unit, range(7)), UP, range(7))
    assert (few.unit, few.n, few.lead.exists, few.level) == ("repetition", 7, False, ("bad",))
    assert "no interval: 7 repetitions, and 8 are needed" in few.sentence
    many = verdict_of(unit, draws_of(unit, range(9)), UP, range(9))
    assert (many.unit, many.n, many.apart) == ("repetition", 9, ("bad",))


def test_repetitions_are_the_unit_where_there_are_enough():
    unit = made({"a": (0.5, 0.1), "b": (0.3, 0.1)}, repetitions=6)
    found = verdict_of(unit, draws_of(unit, range(6)), UP, range(6))
    assert (found.unit, found.n) == ("repetition", 6)
    few = verdict_of(unit, draws_of(unit, range(5)), UP, range(5))
    assert (few.unit, few.n) == ("bag", 200)


def test_places_leave_the_oracle_out():
    unit = made({"oracle": (9.0, 0.0), "a": (0.5, 0.0), "b": (0.7, 0.0), "random": (0.1, 0.0)})
    draws = draws_of(unit, [0])
    assert places(draws, UP) == places(draws, DOWN) == {"b": 1, "a": 2, "random": 3}


def test_means_that_differ_by_rounding_share_a_place():
    """Processors add up in different orders: a place must not depend on the last bit."""
    means = {"a": 0.1 + 0.2, "b": 0.3, "c": 0.2, "failed": float("nan"), "d": 0.5}
    assert rank(means) == {"d": 1, "a": 2, "b": 2, "c": 4}


def test_kendall_by_hand():
    assert kendall(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(1 / 3)
    assert np.isnan(kendall(np.array([1.0, 1]), np.array([1.0, 2])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    plan = tiny_plan(tasks=("four_bags", "pos_neg_count"))
    methods = ("oracle", "random", "constant", "lrp_flipped", "lrp", "ig", "attention")
    assert referee(out, methods=methods, plan=plan)
    assert referee(out, "faithfulness", methods=methods, plan=plan)
    return out


@pytest.fixture(scope="module")
def summary(folder):
    return write_report(folder, {"seed": 0, "protocol_name": "tiny"})


def test_the_report_tells_where_rows_were_measured(tmp_path):
    unit = made({"a": (0.5, 1.0), "b": (0.1, 1.0)})
    unit.path = tmp_path / "units" / "evidence--p--m.npz"
    elsewhere = {
        "versions": {"xmil": "9"},
        "python": "3",
        "system": "s",
        "commit": "c0ffee",
        "device": "GPU 7",
    }
    for row in unit.rows.values():
        row["measured"] = elsewhere
    unit.save()
    assert measured_on(read_units(tmp_path)) == [elsewhere]


def test_wrong_rows_come_last_and_the_oracle_is_perfect(summary):
    assert [place["device"] for place in summary["measured"]] == ["cpu"]
    for suite in summary["suites"]:
        assert [check for check in suite["controls"] if not check["passed"]] == []
        overall = [check["what"] for check in suite["controls"] if "overall" in check["what"]]
        assert overall == ["Random, constant, lrp_flipped come last overall"]
    evidence = summary["suites"][0]
    for column in evidence["columns"]:
        rows = {row["method"]: row["cells"] for row in column["rows"]}
        assert all(cell["estimate"] == pytest.approx(1.0) for cell in rows["oracle"].values())
        lead = {m: cells["auprc2"]["place"] for m, cells in rows.items() if m != "oracle"}
        assert min(lead[m] for m in ("random", "constant", "lrp_flipped")) > lead["lrp"]


def test_a_wrong_row_in_front_fails_the_suites_tests():
    unit = made({"lrp": (0.2, 0.1), "random": (0.9, 0.1), "constant": (0.0, 0.1), "oracle": (0.4, 0.0)})
    unit.measures = ("auprc2", "auroc2", "ndcg", "pearson", "spearman")
    unit.values = {key: np.repeat(value[:, :1], 5, axis=1) for key, value in unit.values.items()}
    failed = [check.what for check in checks([column_of(unit)]) if not check.passed]
    assert failed == [
        "the oracle has 1 in every measure: p, m",
        "Random is behind the best: p, m",
        "Random, constant come last overall",
    ]


def test_every_column_and_measure_has_a_verdict_with_its_interval(summary):
    for suite in summary["suites"]:
        for column in suite["columns"]:
            assert [v["measure"] for v in column["verdicts"]] == [m["name"] for m in suite["measures"]]
            for v in column["verdicts"]:
                assert v["lead"]["low"] <= v["lead"]["estimate"] <= v["lead"]["high"]
                assert row_title(v["best"]) in v["sentence"]
                if v["lead"]["low"] <= 0:
                    assert v["second"] in v["level"], "no lead is claimed that the interval does not show"


def test_measures_and_suites_are_compared(summary):
    for suite in summary["suites"]:
        tau = np.array(suite["agreement"]["tau"], dtype=float)
        np.testing.assert_allclose(tau, tau.T)
        assert np.nanmax(tau) <= 1
    assert {row["problem"] for row in summary["across"]} == {"four_bags", "pos_neg_count"}


def test_the_page_stands_alone(folder, summary):
    page = (folder / "index.html").read_text()
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)
    held = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1).replace("<\\/", "</"))
    assert json.loads((folder / "results.json").read_text())["suites"] == summary["suites"]
    for shown, known in zip(held["suites"], summary["suites"], strict=True):
        for a, b in zip(shown["columns"], known["columns"], strict=True):
            assert [v["sentence"] for v in a["verdicts"]] == [v["sentence"] for v in b["verdicts"]]
            cells = [(row["cells"], other["cells"]) for row, other in zip(a["rows"], b["rows"], strict=True)]
            pairs = [(p[m]["estimate"], q[m]["estimate"]) for p, q in cells for m in p]
            assert all(p == pytest.approx(q, rel=1e-4) for p, q in pairs if q is not None)
    for column in summary["suites"][0]["columns"]:
        assert column["verdicts"][0]["sentence"].split(";")[0] in page
    assert summary["versions"]["xmil"] in page


def test_the_parquet_file_has_every_bag(folder, summary):
    table = pq.read_table(folder / "bags.parquet").to_pylist()
    units = read_units(folder)
    assert len(table) == sum(len(v) for u in units for v in u.values.values())
    row = next(r for r in table if r["suite"] == "evidence" and r["method"] == "oracle" and r["auprc2"])
    assert row["auprc2"] == 1.0


def test_a_run_equals_itself_and_a_changed_row_is_found(folder, tmp_path):
    path = tmp_path / "mine.py"
    outs = [tmp_path / name for name in ("a", "b", "c")]
    plan = tiny_plan(tasks=("pos_neg_count",))
    for out, sign in zip(outs[:2], ("", "-"), strict=True):
        path.write_text(LRP.format(sign))
        referee(out, methods=("lrp", f"{path}:score"), plan=plan)
    changed = [c for c in compare_runs(*outs[:2]) if c.sure]
    assert {c.method for c in changed} == {"mine:score"}
    assert all(c.difference.estimate == 0 for c in compare_runs(outs[0], outs[0]))
    other = replace(plan, protocol=replace(plan.protocol, seed=5))
    referee(outs[2], methods=("lrp",), plan=other)
    unpaired = compare_runs(outs[0], outs[2])
    assert {c.reason for c in unpaired} == {"the bags differ"}
    assert unpaired[0].difference is None
    with pytest.raises(FileError, match="has no results"):
        compare_runs(outs[0], tmp_path / "nothing")
