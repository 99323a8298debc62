"""Names of any characters in Groovy, CSV, LaTeX and pages stay data, and come back as they were."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

import xmil
from xmil.core.budget import csv_rows
from xmil.core.quoting import csv_cell, groovy_comment, groovy_text, latex_text, plain_cell, script_json
from xmil.core.text import csv_text, markdown_table
from xmil.storage import write_table

FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "-a", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''@x", "=\n1"]
PLAIN = ["a=b", "s-1", "'quoted'", "-", "+", "-1.5e-3", "+inf", "a\r=1", "a\r\nb", "a\n=1", "\u00e4", "1"]
NUMBERS = ["-0.45 [-0.97, 0.34]", "+1e-05 [-inf, 2]", "-2"]
BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x00\x1a"


@pytest.mark.parametrize("text", [*FORMULAS, *PLAIN, *NUMBERS])
def test_cells_come_back_as_they_were(text: str, tmp_path: Path) -> None:
    assert plain_cell(str(csv_cell(text))) == text
    path = tmp_path / "t.csv"
    path.write_bytes(csv_text(["name", text], [[text, "1"]]).encode())
    assert csv_rows(path) == [{"name": text, text: "1"}]


def test_no_cell_is_a_formula() -> None:
    text = csv_text(FORMULAS, [FORMULAS, [-1.5, *NUMBERS, "a\r=1"]])
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len(rows) == 3
    assert {cell[0] for cell in (*rows[0], *rows[1])} == {"'"}
    assert rows[2] == ["-1.5", *NUMBERS, "a\r=1"]


def test_a_cohort_keeps_names_that_look_like_formulas(tmp_path: Path) -> None:
    path, again = tmp_path / "cohort.csv", tmp_path / "again.csv"
    path.write_text("slide_id,label,-x\n=s1,-a,-1\n@s2,+b,2\n")
    cohort = xmil.read_cohort(path)
    cohort.save(again)
    assert again.read_text() == "slide_id,label,'-x\n'=s1,'-a,-1\n'@s2,'+b,2\n"
    assert xmil.read_cohort(again).columns == cohort.columns


def test_a_run_keeps_names_that_look_like_formulas(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "explain"}')
    write_table(tmp_path / "slides.csv", ("slide_id", "=p", "n"), [("=s1", "-a", -1), ("'@s2", None, 2)])
    run = xmil.open_run(tmp_path)
    assert list(run.rows) == ["=s1", "'@s2"]
    table = run.table()
    assert table.columns.tolist() == ["slide_id", "=p", "n"]
    assert table["slide_id"].tolist() == ["=s1", "'@s2"]
    assert (table["=p"][0], table["n"].tolist()) == ("-a", [-1, 2])


@pytest.mark.parametrize(
    "name", ["a\rprintln(7*7)\rx", f"a{BREAKS}b", r"a\u000dprintln(7*7)", "a'b$c", "\udcff\U0001f600"]
)
def test_a_name_stays_in_its_comment_and_its_literal(name: str) -> None:
    comment, literal = groovy_comment(name), groovy_text(name)
    assert comment.isprintable()
    assert re.search(r"(?<!\\)(\\\\)*\\u", comment) is None
    assert literal.isprintable()
    assert re.fullmatch(r"'([^'\\]|\\[nrt'\\]|\\u[0-9a-f]{4})*'", literal)
    body = re.sub(r"\\'", "'", literal[1:-1])
    assert json.loads(f'"{body}"').encode("utf-16", "surrogatepass") == name.encode("utf-16", "surrogatepass")


def test_names_in_latex_markdown_and_pages() -> None:
    assert latex_text("50%_a & $x^2~#{}\\") == (
        r"50\%\_a \& \$x\textasciicircum{}2\textasciitilde{}\#\{\}\textbackslash{}"
    )
    assert markdown_table(["a"], [["b | c\nd"]]) == "| a |\n|---|\n| b \\| c d |"
    evil = {"<!--<script>": "</script>"}
    assert "<" not in script_json(evil)
    assert json.loads(script_json(evil)) == evil
