"""`xmil bench --suite paper`: a run from digits to tables and plots, and one line for bad input."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.bench.test_instances import write_idx, write_npz
from tests.cli.test_cli import run

PAPER = ("bench", "--suite", "paper")
TINY = ("--config", "bags=200,60,60", "--repetitions", "2", "--config", "epochs=30")


def test_a_quick_run_shows_lrp_above_attention(tmp_path, capsys):
    arguments = (*PAPER, "--quick", "--task", "four_bags,pos_neg_count", *TINY, "--out", tmp_path)
    code, out, _ = run(*arguments, capsys=capsys)
    assert code == 0
    assert "[" not in out  # scikit-learn's digits are not the paper's
    for task in ("four_bags", "pos_neg_count"):
        rows = pq.read_table(tmp_path / "results" / f"{task}-attnmil.parquet", partitioning=None).to_pylist()
        means = {m: np.mean([r["auprc2"] for r in rows if r["method"] == m]) for m in ("lrp", "attention")}
        assert means["lrp"] > means["attention"] + 0.2
    made = {path.name for path in tmp_path.iterdir()}
    assert {f"table1.{kind}" for kind in ("txt", "csv", "md", "tex")} <= made
    assert {"bars.png", "bags-attnmil.png", "run.json", "ndcg.csv"} <= made
    assert (tmp_path / "table1.txt").read_text() in out
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["settings"]["tasks"] == ["four_bags", "pos_neg_count"]
    code, out, _ = run(
        *arguments, "--config", "plots=false", "--json", capsys=capsys
    )  # nothing is trained again
    told = {(r["task"], r["method"]): r["mean"] for r in json.loads(out)["rows"]}
    assert told["pos_neg_count", "lrp"] == pytest.approx(means["lrp"])


def test_idx_images_are_data_too(tmp_path, capsys):
    write_idx(tmp_path, "train", 10)
    write_idx(tmp_path, "t10k", 4)
    sizes = ("--config", "bags=32,16,12", "--config", "epochs=2", "--repetitions", "1")
    arguments = (
        "--task",
        "confounder",
        "--model",
        "attnmil",
        "--methods",
        "lrp,gxi",
        "--out",
        tmp_path / "out",
    )
    code, out, _ = run(*PAPER, "--data", tmp_path, *sizes, *arguments, capsys=capsys)
    assert code == 0
    assert "Confounder AttnMIL" in out


def bad(*arguments, capsys):
    code, out, err = run(*PAPER, *arguments, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("xmil: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "four_bag"), "Did you mean 'four_bags'?"),
        (("--model", "atnmil"), "Did you mean 'attnmil'?"),
        (("--methods", "lrp,lpr"), "Did you mean 'lrp'?"),
        (("--methods", "lrp:papr"), "Did you mean 'paper'?"),
        (("--methods", "lrp@logits"), "Did you mean 'logit'?"),
        (("--methods", "logits", "--model", "attnmil"), "None of the methods logits can explain attnmil"),
        (
            ("--repetitions", "0"),
            "--repetitions must be an int in the range [1, 1000]. Got 0",
        ),
        (("--config", "epochs=0"), "epochs must be an int in the range"),
        (("--config", "bags=10,10"), "such as 2000,500,1000"),
        (("--config", "bags=10,1,10"), "at least two bags"),
        (("--device", "tpu"), "Unknown device 'tpu'"),
        (("--config", "digit_encoder=pixel"), "Did you mean 'pixels'?"),
        (("--data", "nowhere"), "nowhere: no such data"),
        (("--suite", "evidence"), "in a further call"),
    ],
)
def test_bad_arguments_take_one_line(arguments, message, tmp_path, capsys):
    assert message in bad(*arguments, "--out", tmp_path, capsys=capsys)


def test_bad_data_takes_one_line(tmp_path, capsys):
    write_npz(tmp_path / "f_train.npz", width=7)
    write_npz(tmp_path / "f_test.npz", width=8)
    assert "use one encoder for both" in bad("--data", tmp_path, capsys=capsys)
    write_npz(tmp_path / "seven.npz", without=(7,))
    assert "no images of 7" in bad("--data", tmp_path / "seven.npz", capsys=capsys)
    images = tmp_path / "idx" / "train-images-idx3-ubyte"
    images.parent.mkdir()
    write_idx(images.parent, "train", 2)
    images.write_bytes(images.read_bytes()[:-7])
    assert f"{images}: (20, 4, 4) declares 320 bytes" in bad("--data", images.parent, capsys=capsys)


def test_an_out_that_is_a_file_takes_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "choose another --out" in bad("--out", tmp_path / "file" / "x", capsys=capsys)
