"""One slide without --out: a picture that cannot be written, the command that keeps the scores, pairs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import xmil
from tests.cli.test_cli import run
from tests.cli.test_first_steps import here, model  # noqa: F401 - fixtures
from tests.data import producers as p
from tests.runs.cohorts import command, make_cohort, table
from xmil.cli._command import flags_of, in_flags
from xmil.heatmaps import BLUE, RED
from xmil.runs.requests import ExplainRequest
from xmil.storage import read_explanations

LINE_COLOURS = [tuple(bytes.fromhex(colour[1:])) for colour in (RED, BLUE)]


def test_a_picture_that_cannot_be_written_is_said(
    here: Path,  # noqa: F811
    model: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "s1.heatmap.png").mkdir()
    bag = p.trident(here.parent)
    code, out, err = run("explain", "--model", model, "--features", bag, capsys=capsys)
    assert (code, err) == (1, "")
    assert out.startswith("s1: predicted ")
    assert f"Picture: {here / 's1.heatmap.png'}: cannot be written (Is a directory); pass --out" in out
    _, out, _ = run("explain", "--model", model, "--features", bag, "--json", capsys=capsys)
    told = json.loads(out)
    assert told["picture"] is None
    assert "cannot be written" in told["warnings"][-1]


def test_the_command_that_keeps_the_scores_can_be_pasted(
    here: Path,  # noqa: F811
    model: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "--methods lrp,gxi --param lrp.contexts=8 --config interactions=4 --target all "
    asked += "--param lrp.preset=exact --no-follow-links"
    more = [*asked.split(), "--class-names", "no tumour,tumour"]
    bag = p.trident(here.parent)
    code, out, err = run("explain", "--model", model, "--features", bag, *more, capsys=capsys)
    assert code == 0, err
    assert out.count("Pairs that interact for ") == 2
    assert out.count(" and ") >= 6
    words = shlex.split(out.splitlines()[-1].removeprefix("Next: "), comments=True)
    assert words[-2:] == ["--out", "run-s1"]
    assert run(*words[1:], capsys=capsys)[0] == 0
    kept = xmil.open_run(here / "run-s1")
    assert kept.class_names == ("no tumour", "tumour")
    assert {e.method for e in read_explanations(kept.file("s1"))} == {"lrp", "gxi"}
    assert kept.interactions("s1", target="tumour").pairs.shape == (6, 2)
    pair = kept.interactions("s1", target="tumour").pairs[0]
    assert f"tumour: patches {pair[0]} and {pair[1]} (" in out


def test_the_method_that_one_slide_chose_is_named_with_its_figures(
    here: Path,  # noqa: F811
    model: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    bag = p.trident(here.parent)
    words = ("explain", "--model", model, "--features", bag, "--methods", "auto")
    code, out, err = run(*words, capsys=capsys)
    assert code == 0, err
    told = json.loads(run(*words, "--json", capsys=capsys)[1])
    assert told["choice"] in out
    assert told["explanations"][0]["method"] in told["choice"]


def test_pairs_are_lines_in_the_picture(
    here: Path,  # noqa: F811
    model: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    slide = here.parent / "s1.png"
    Image.new("RGB", (3200, 3700), (230, 230, 230)).save(slide)
    one = ["explain", "--model", model, "--features", p.trident(here.parent), "--slides", slide]
    inked = []
    for more in ([], ["--config", "interactions=4"]):
        code, out, err = run(*one, "--target", "all", *more, capsys=capsys)
        assert code == 0, err
        with Image.open(here / "s1.heatmap.png") as picture:
            inked.append([(np.asarray(picture)[:, :, :3] == rgb).all(axis=2).sum() for rgb in LINE_COLOURS])
    assert out.count("6 of 6 pairs beyond three standard errors") == 2  # a bag this small is enumerated
    assert sum(inked[1]) > sum(inked[0]) + 1000
    words = shlex.split(out.splitlines()[-1], comments=True)
    assert words[-4:] == ["--out", "run-s1", "--slides", str(here.parent)]


def test_slides_left_out_of_a_folder_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 4)
    assert run(*command(folder), capsys=capsys)[0] == 0
    one = ["explain", "--model", folder / "m0.safetensors", "--features", folder / "features" / "s001.h5"]
    code, out, _ = run(*one, "--out", folder / "run", capsys=capsys)
    assert code == 0
    assert ": s000, s002, s003." in out
    way = f"--features {folder / 'features'} --cohort {folder / 'cohort.csv'}"
    assert f"the same command with {way} brings them back." in out
    assert len(table(folder / "run" / "slides.csv")) == 1
    _, out, _ = run(*command(folder), capsys=capsys)
    assert "0 explained, 4 already done" in out
    assert "earlier not among" not in out
    assert len(table(folder / "run" / "slides.csv")) == 4


def test_explained_and_not_drawn_is_done_in_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 2)
    (folder / "slides").mkdir()
    (folder / "slides" / "s000.tif").write_text("no slide")
    code, out, err = run(*command(folder), "--slides", folder / "slides", capsys=capsys)
    assert code == 1
    assert "2 explained" in out
    assert err.count("xmil: error: explained, but not drawn: ") == 1


def test_python_words_become_options() -> None:
    sentence = in_flags("allow more with `permutations=`.", flags_of(ExplainRequest))
    assert sentence == "allow more with --param shapley.permutations=."
