"""Rows of results as tables: places, the paper's figures, and four formats."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from xmil.bench import (
    Unit,
    as_csv,
    as_latex,
    as_markdown,
    as_text,
    notes,
    paper_figure,
    summarise,
)

MEASURES = ("auprc2", "ndcg")
VALUES = {"random": (0.30, 0.32), "attention": (0.5, 0.54), "lrp": (0.9, 0.96), "lrp:paper": (0.88, 0.9)}


def unit_of(task="four_bags", model="attnmil", values=VALUES, *, embedded=False, auroc=(1.0, 0.9)):
    """A unit of two repetitions of one bag each, with these values of AUPRC-2 and half of them of NDCG."""
    protocol = {"sizes": [2000, 500, 1000], "training": {}}
    problem = {"name": task, "protocol": protocol, "data": {"embedded": embedded}}
    unit = Unit(Path("none"), {"suite": "evidence", "problem": problem, "model": {"name": model}}, MEASURES)
    for r, area in enumerate(auroc):
        unit.facts[r] = {"auroc": area, "bags": ["bag"], "seed": r}
        for method, pair in values.items():
            unit.rows[r, method] = {"seconds": 1.0}
            unit.values[r, method] = np.array([[pair[r], pair[r] / 2]])
    return unit


ADDMIL = {"logits": (0.7, 0.7), "attention": (0.4, 0.4)}
METHODS = ["random", "attention", "lrp", "lrp:paper", "logits"]
TABLE = summarise([unit_of(), unit_of("pos_neg_count", "addmil", ADDMIL)], METHODS)
COLUMN = ("four_bags", "attnmil")


def test_cells_hold_mean_spread_paper_and_place():
    cell = TABLE.cell("lrp", COLUMN)
    assert (cell.mean, cell.std) == (pytest.approx(0.93), pytest.approx(0.03))
    assert cell.values == pytest.approx((0.9, 0.96))
    assert (cell.paper, cell.place) == (0.91, 1)
    assert TABLE.cell("lrp:paper", COLUMN).place == 2
    assert TABLE.cell("lrp:paper", COLUMN).paper == 0.91  # every variant stands beside the method's row
    assert TABLE.cell("logits", COLUMN) is None
    assert TABLE.cell("auroc", COLUMN).mean == pytest.approx(0.95)
    assert TABLE.methods == ["random", "attention", "logits", "lrp", "lrp:paper"]


def test_other_measures_and_other_data_have_no_paper_figures():
    other, foreign = summarise([unit_of()], METHODS, "ndcg"), summarise([unit_of(embedded=True)], METHODS)
    for table in (other, foreign):
        assert all(table.cell(method, COLUMN).paper is None for method in VALUES)
    assert "[" not in as_text(foreign)
    assert other.cell("lrp", COLUMN).mean == pytest.approx(0.465)


def test_models_that_did_not_learn_do_not_count_unless_none_did():
    half, none = unit_of(auroc=(0.9, 0.6)), unit_of(auroc=(0.5, 0.6))
    assert summarise([half], METHODS).cell("lrp", COLUMN).values == (0.9,)
    assert summarise([half], METHODS).cell("auroc", COLUMN).mean == pytest.approx(0.75)
    assert summarise([none], METHODS).cell("lrp", COLUMN).values == pytest.approx((0.9, 0.96))
    some, every = notes([half, none, unit_of()])
    assert "1 of 2 models did not learn" in some
    assert "no model learned" in every


def test_a_table_of_fewer_repetitions_takes_the_first():
    assert summarise([unit_of()], METHODS, repetitions=1).cell("lrp", COLUMN).values == (0.9,)


def test_text_marks_best_and_second_and_puts_the_paper_below():
    lines = as_text(TABLE).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("LRP "))
    assert "0.930 ± 0.030 *" in lines[at]
    assert "[0.91, +0.020]" in lines[at + 1]
    assert "0.890 ± 0.010 +" in next(line for line in lines if line.startswith("LRP paper"))


def test_csv_has_one_line_for_each_cell():
    found = list(csv.DictReader(io.StringIO(as_csv(TABLE))))
    assert len(found) == len(TABLE.cells) == 4 + 1 + 2 + 1
    best = next(line for line in found if line["method"] == "lrp")
    assert float(best["mean"]) == pytest.approx(0.93)
    assert (float(best["paper"]), float(best["difference"]), best["place"]) == (
        0.91,
        pytest.approx(0.02),
        "1",
    )
    assert {line["measure"] for line in found if line["method"] == "auroc"} == {"auroc"}


def test_markdown_is_bold_and_underlined():
    lines = as_markdown(TABLE).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "**0.930 ± 0.030** [0.91, +0.020]" in as_markdown(TABLE)
    assert "<u>0.890 ± 0.010</u>" in as_markdown(TABLE)
    assert lines[0] == "|  | 4-Bags AttnMIL | Pos-Neg (counts) AddMIL |"


def test_latex_is_bold_and_underlined():
    text = as_latex(TABLE)
    assert r"\textbf{0.930 $\pm$ 0.030} [0.91, +0.020]" in text
    assert r"\underline{0.890 $\pm$ 0.010}" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in body} == {2}
    assert text.count(r"\begin{tabular}{lcc}") == text.count(r"\end{tabular}") == 1


def test_titles_are_escaped_for_latex():
    values = {"one_removed": (0.1, 0.1), "gxi@log_odds": (0.2, 0.2), "grad2": (0.3, 0.3)}
    text = as_latex(summarise([unit_of(values=values)], list(values)))
    assert r"G$\times$I@log\_odds" in text
    assert "Grad$^2$" in text


@pytest.mark.parametrize(
    ("task", "model", "method", "value"),
    [
        ("four_bags", "attnmil", "lrp", 0.91),
        ("pos_neg", "transmil", "gxi", 0.44),
        ("pos_neg_count", "addmil", "logits", 0.68),
        ("adjacent_pairs", "transmil", "auroc", 0.92),
        ("adjacent_pairs", "addmil", "lrp", None),
        ("standard", "attnmil", "lrp", None),
        ("four_bags", "attnmil", "milli", None),
    ],
)
def test_figures_of_the_paper(task, model, method, value):
    assert paper_figure(task, model, method) == value
