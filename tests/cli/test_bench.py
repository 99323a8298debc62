"""`xmil bench`: a method, a model and foreign scores through the command, and one line for bad input."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bench.runs import NET, OWN
from tests.cli.test_cli import run
from xmil.cli import _app
from xmil.storage import lock_folder

ONE = ("--quick", "--task", "standard", "--repetitions", "1", "--only")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a run, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mine.py").write_text(OWN)
    (folder / "net.py").write_text(NET)
    entries = ["--methods", f"{folder / 'mine.py'}:score", "--methods", "lrp"]
    entries += ["--model", f"{folder / 'net.py'}:build", "--out", str(folder / "out")]
    with redirect_stdout(StringIO()) as text:
        code = _app.run(["bench", "--suite", "evidence", *ONE, *entries])
    assert code == 0
    return folder / "out", text.getvalue()


@pytest.fixture
def out(measured):
    return measured[0]


def test_a_method_and_a_model_of_ones_own(measured):
    out, text = measured
    assert "standard, net:build: " in text
    found = json.loads((out / "results.json").read_text())
    (column,) = found["suites"][0]["columns"]
    measure = column["verdicts"][0]["measure"]
    for row in column["rows"]:  # the score of what was entered is on the screen, of others in the report
        line = f"    {row['method']}: {measure} {row['cells'][measure]['estimate']:.3f}"
        assert (line in text) == (row["method"] in ("mine:score", "lrp")), line
    assert [r["method"] for r in column["rows"]] == [
        "oracle",
        "random",
        "constant",
        "lrp_flipped",
        "mine:score",
        "lrp",
    ]
    assert found["settings"]["protocol_name"] == "quick"
    assert (out / "index.html").is_file()
    assert (out / "bags.parquet").is_file()


def scored_elsewhere(folder):
    """Scores of exported bags by a program that knows only the files: the sum of each instance's features."""
    rows = []
    for path in sorted(folder.glob("*.npz")):
        problem, model, repetition = path.stem.split("--")
        with np.load(path) as file:
            named = list(zip(file["names"].tolist(), file["checksums"].tolist(), strict=True))
            for name, checksum in named:
                for target in range(int(file["n_classes"])):
                    scores = (2 * target - 1) * file[f"bag|{name}"].sum(axis=1)
                    key = {"problem": problem, "model": model, "repetition": int(repetition)}
                    rows.append(
                        {**key, "bag": name, "target": target, "scores": scores, "checksum": checksum}
                    )
    return rows


def write_scores(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)


def test_foreign_scores_enter_with_their_checksums(out, capsys, tmp_path):
    code, text, _ = run(
        "bench", "--suite", "evidence", *ONE, "--export", tmp_path, "--out", tmp_path / "o", capsys=capsys
    )
    assert code == 0
    assert "1 sets of bags" in text
    assert (tmp_path / "standard--attnmil--0.safetensors").is_file()
    rows = scored_elsewhere(tmp_path)
    write_scores(tmp_path / "theirs.parquet", rows)
    arguments = ("bench", "--suite", "evidence", *ONE, "--out", tmp_path / "o", "--methods")
    code, _, _ = run(*arguments, tmp_path / "theirs.parquet", capsys=capsys)
    assert code == 0
    table = pq.read_table(tmp_path / "o" / "bags.parquet").to_pylist()
    assert sum(r["method"] == "theirs" for r in table) == len(rows) // 2
    rows[7]["checksum"] = "0" * 64
    write_scores(tmp_path / "changed.parquet", rows)
    code, _, err = run(*arguments, tmp_path / "changed.parquet", capsys=capsys)
    assert code == 2
    assert "belong to another bag" in err
    write_scores(tmp_path / "short.parquet", rows[:6])
    code, _, err = run(*arguments, tmp_path / "short.parquet", capsys=capsys)
    assert (code, "has no scores for standard" in err) == (2, True)
    write_scores(tmp_path / "twice.parquet", [*rows, rows[0]])
    code, _, err = run(*arguments, tmp_path / "twice.parquet", capsys=capsys)
    assert (code, "two rows for standard, attnmil, repetition 0" in err) == (2, True)


def test_two_runs_are_compared(out, capsys):
    code, text, _ = run("bench", "--compare", out, out, capsys=capsys)
    assert code == 0
    assert "30 figures in both runs; 0 differ" in text
    _, text, _ = run("bench", "--compare", out, out, "--json", capsys=capsys)
    assert [row["first"] == row["second"] for row in json.loads(text)] == [True] * 30


def test_a_report_is_written_again(out, capsys):
    before = (out / "results.json").read_text()
    (out / "index.html").unlink()
    code, _, _ = run("bench", "--out", out, capsys=capsys)
    assert (code, (out / "results.json").read_text()) == (0, before)
    assert (out / "index.html").is_file()
    _, text, _ = run("bench", "--out", out, "--json", capsys=capsys)
    told = json.loads(text)
    assert told["finished"]
    assert [suite["title"] for suite in told["suites"]] == [s["title"] for s in json.loads(before)["suites"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--suite"),
        (("--suite", "evidense"), "Did you mean 'evidence'?"),
        (("--suite", "evidence", "--task", "standart"), "Did you mean 'standard'?"),
        (("--suite", "evidence", "--model", "atnmil"), "Did you mean 'attnmil'?"),
        (("--suite", "evidence", "--methods", "lpr"), "Did you mean 'lrp'?"),
        (("--suite", "evidence", "--methods", "absent.py:f"), "absent.py: no such file"),
        (("--suite", "evidence", "--methods", "absent.parquet"), "absent.parquet: no such file"),
        (("--suite", "evidence", "--model", "absent.pt"), "absent.pt: no such file"),
        (("--suite", "tissue", "--tissue", "absent"), "absent: no such folder"),
        (("--compare", "a", "b"), "has no results"),
    ],
)
def test_bad_input_takes_one_line(arguments, message, tmp_path, capsys):
    code, _, err = run("bench", "--quick", *arguments, "--out", tmp_path / "o", capsys=capsys)
    assert code == 2
    assert err.startswith("xmil: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_no_tissue_at_hand_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XMIL_DATA", str(tmp_path))
    code, _, err = run("bench", "--quick", "--suite", "tissue", "--out", tmp_path / "o", capsys=capsys)
    assert code == 2
    assert "no colon images in XMIL_DATA" in err


def test_a_folder_that_another_benchmark_fills_is_refused(tmp_path, capsys):
    with lock_folder(tmp_path):
        code, _, err = run("bench", "--suite", "evidence", *ONE, "--out", tmp_path, capsys=capsys)
    assert (code, "another run is writing there" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
