"""`verify`: damage, foreign files, changed features and models are found; a whole run has no fault."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import xmil
from tests.runs.cohorts import make_cohort
from xmil.cli import main
from xmil.core.errors import InputError
from xmil.runs.verify import verify_run
from xmil.storage import open_folder, read_explanations, read_provenance, write_explanations


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verified")
    (root / "features").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        bag = xmil.Bag(
            rng.normal(size=(40, 6)), coords=rng.integers(0, 999, (40, 2)), patch_size=32, slide_id=name
        )
        xmil.write_bag(bag, root / "features" / f"{name}.h5")
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=0), root / "m.safetensors"
    )
    xmil.explain_slides(root / "m.safetensors", root / "features", out=root / "run")
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs"


def error_line(run: Path) -> str:
    return "\n".join(map(str, verify_run(xmil.open_run(run))))


def test_a_whole_run_has_no_fault(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_line(made / "run") == ""
    with pytest.raises(SystemExit) as left:
        main(["verify", str(made / "run")])
    assert not left.value.code
    assert "3 slides checked, 0 faults" in capsys.readouterr().out


def test_every_flipped_byte_of_the_scores_is_found(copy: Path) -> None:
    path = copy / "slides" / "b.parquet"
    whole = path.read_bytes()
    place = len(whole) // 8
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    assert "slides/b.parquet" in error_line(copy)


def test_what_is_missing_cut_off_or_foreign_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "slides" / "a.parquet").unlink()
    path = copy / "slides" / "b.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    shutil.copy(copy / "slides" / "c.parquet", copy / "slides" / "stranger.parquet")
    faults = error_line(copy)
    for name in ("slides/a.parquet", "slides/b.parquet", "slides/stranger.parquet: is not in slides.csv"):
        assert name in faults
    with pytest.raises(SystemExit) as left:
        main(["verify", str(copy), "--json"])
    assert left.value.code == 1
    assert '"faults"' in capsys.readouterr().out


def test_slides_that_the_last_command_was_not_given_are_a_note(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "moved"
    shutil.copytree(made, root)
    for features in (root / "features", root / "features" / "a.h5"):
        xmil.explain_slides(root / "m.safetensors", features, out=root / "again")
    with pytest.raises(SystemExit) as left:
        main(["verify", str(root / "again")])
    assert not left.value.code
    out = capsys.readouterr().out
    assert "2 slides explained earlier and not in slides.csv" in out
    (root / "again" / "slides" / "b.parquet").write_bytes(b"damaged")
    assert "slides/b.parquet" in error_line(root / "again")


def test_changed_features_and_models_are_named(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(made, root)
    xmil.explain_slides(root / "m.safetensors", root / "features", out=root / "again")
    bag = xmil.read_bag(root / "features" / "a.h5")
    xmil.write_bag(xmil.Bag(bag.features + 1, slide_id="a"), root / "features" / "a.h5")
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=1), root / "m.safetensors"
    )
    faults = error_line(root / "again")
    assert "a.h5 has changed since it was explained" in faults
    assert "the model has changed since" in faults
    assert "slides/b.parquet" not in faults


def test_a_rewritten_score_does_not_fit_the_audit(copy: Path) -> None:
    path = copy / "slides" / "b.parquet"
    table = pq.read_table(path)
    name = next(name for name in table.column_names if name.startswith("lrp:"))
    scores = table[name].to_numpy().copy()
    scores[3] += 0.01
    place = table.column_names.index(name)
    pq.write_table(table.set_column(place, table.schema.field(name), [scores]), path)
    assert f"slides/b.parquet: the scores of {name} add up to" in error_line(copy)


def test_an_edit_that_keeps_the_sum_is_found(copy: Path) -> None:
    path = copy / "slides" / "b.parquet"
    table = pq.read_table(path)
    name = next(name for name in table.column_names if name.startswith("lrp:"))
    swapped = table[name].to_numpy()[::-1].copy()
    place = table.column_names.index(name)
    pq.write_table(table, path)  # packed anew: other bytes, which the ledger tells
    assert error_line(copy).startswith("slides/b.parquet: has changed since it was written")
    pq.write_table(table.set_column(place, table.schema.field(name), [swapped]), path)
    assert error_line(copy) == ("slides/b.parquet: has changed since it was written; explain the slide again")


def test_the_table_is_compared_with_the_slides_files(copy: Path) -> None:
    path = copy / "slides.csv"
    head, first, *rest = path.read_text().splitlines()
    cells = dict(zip(head.split(","), first.split(","), strict=True))
    column = next(name for name in cells if name.startswith("p:"))
    cells |= {column: "0.125", "n": "41"}
    path.write_text("\n".join([head, ",".join(cells.values()), *rest]) + "\n")
    faults = error_line(copy).splitlines()
    assert f"slides.csv: {column} of a is '0.125'" in faults[0]
    assert faults[1:] == ["slides.csv: n of a is '41', but 40 in the slide's file"]


def test_features_and_settings_that_are_gone_are_faults(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "features", tmp_path / "features")
    xmil.explain_slides(made / "m.safetensors", tmp_path / "features", out=tmp_path / "run")
    (tmp_path / "features" / "a.h5").unlink()
    with pytest.raises(SystemExit) as left:
        main(["verify", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert left.value.code == 1
    assert "a.h5, which it explains, no longer exists" in said
    assert "3 slides checked, 1 fault, 0 failed slides." in said
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(InputError, match=r"damaged; put back a copy of it"):
        error_line(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    assert "run.json: is missing" in error_line(tmp_path / "run")


def test_the_slides_of_a_case_share_one_account(made: Path, tmp_path: Path) -> None:
    (tmp_path / "cohort.csv").write_text("slide_id,case_id\na,x\nb,x\nc,y\n")
    args = {"cohort": tmp_path / "cohort.csv", "by": "case", "methods": ["lrp", "gxi"]}
    xmil.explain_slides(made / "m.safetensors", made / "features", out=tmp_path / "run", **args)
    assert error_line(tmp_path / "run") == ""


@pytest.mark.parametrize("kind", ["evaluate", "predict", "train", "tiles", "embedded", "ensemble"])
def test_damage_in_a_run_of_any_kind_is_named(kind: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / kind, tmp_path / kind)
    whole = {path: path.read_bytes() for path in (tmp_path / kind).rglob("*.*") if path.is_file()}
    before = set(error_line(tmp_path / kind).splitlines())
    assert not any("cannot be read" in line or "changed since it was" in line for line in before)
    for path in whole:
        if path.suffix in (".json", ".parquet", ".h5", ".safetensors", ".png") and path.name != "run.json":
            path.write_bytes(whole[path][: len(whole[path]) // 2])
            new = set(error_line(tmp_path / kind).splitlines()) - before
            assert any(line.startswith(path.relative_to(tmp_path / kind).as_posix()) for line in new)
            path.write_bytes(whole[path])


def test_a_damaged_table_and_a_pipe_are_faults_among_others(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "slides" / "a.parquet").unlink()
    os.mkfifo(copy / "slides" / "a.parquet")
    assert (
        error_line(copy).splitlines()[0]
        == "slides/a.parquet: is not a file; remove it and explain the slide again"
    )
    (copy / "slides.csv").write_bytes(b"\xff\xfe")
    (copy / "failures.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(SystemExit) as left:
        main(["verify", str(copy)])
    said = capsys.readouterr().out
    assert left.value.code == 1
    for name in ("slides.csv: not a readable table", "failures.csv: cannot be read", "slides/a.parquet:"):
        assert name in said


def test_links_and_missing_models_are_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "train", tmp_path / "train")
    (tmp_path / "train" / "fold0" / "model.safetensors").unlink()
    (tmp_path / "train" / "fold1" / "model.safetensors").rename(tmp_path / "elsewhere")
    (tmp_path / "train" / "fold1" / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert error_line(tmp_path / "train").splitlines() == [
        "fold0/model.safetensors: is missing; run the command again",
        "fold1/model.safetensors: is a link, which is not followed; copy the file in",
    ]


def test_the_file_used_of_several_is_named(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "features"
    shutil.copytree(made / "features", folder)
    np.save(folder / "a.npy", xmil.read_bag(folder / "a.h5").features + 1)
    words = ["explain", "--model", made / "m.safetensors", "--features", folder, "--out", tmp_path / "run"]
    with pytest.raises(SystemExit):
        main([*map(str, words), "--methods", "lrp,gxi,ig,shapley"])
    said = capsys.readouterr()
    assert "1 slide with several files: a (a.h5 is used)." in said.out + said.err
    assert error_line(tmp_path / "run") == ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/", "no longer exists"),
        ("pipe", "cannot be read"),
        ("mine:build", ""),  # a function is not called to see what it builds
        ("mine:" + "b" * 5000, ""),
        ("/" + "x" * 5000, "no longer exists"),
        ("x" * 5000, ""),  # named from a folder that is not known: `unknowns` says so
    ],
)
def test_a_model_that_is_none_is_a_fault_and_nothing_else_is_read(copy: Path, path: str, why: str) -> None:
    os.mkfifo(copy.parent / "pipe")
    about = json.loads((copy / "run.json").read_text())
    place = str(copy.parent / path) if path == "pipe" else path
    about["model"]["path"] = about["models"][0]["path"] = place
    (copy / "run.json").write_text(json.dumps(about))
    faults = [str(fault) for fault in verify_run(xmil.open_run(copy)) if fault.what == place[:300]]
    assert [why in fault for fault in faults] == [True] * bool(why)


@pytest.mark.parametrize(
    "options",
    [
        {"params": {"lrp": {"contexts": 7}, "gxi": {"contexts": 7}}, "methods": ("lrp", "gxi")},
        {"params": {"lrp": {"contexts": 9, "keep": 0.37}}},
        {"params": {"lrp": {"contexts": 8, "keep": None}}},
        {"params": {"lrp": {"contexts": 7}}, "by": "case", "ensemble": True},
    ],
)
def test_means_over_sub_bags_fit_their_audit(tmp_path: Path, options: dict[str, Any]) -> None:
    models = 2 if options.pop("ensemble", False) else 1
    root = make_cohort(tmp_path, 2, models=models)
    files = [root / f"m{i}.safetensors" for i in range(models)]
    cohort, out = root / "cohort.csv", root / "run"
    xmil.explain_slides(files, root / "features", cohort=cohort, out=out, check="none", **options)
    assert error_line(out) == ""
    path = out / "slides" / "s001.parquet"
    first, *others = read_explanations(path)
    scores = first.scores.copy()
    scores[3] += 0.01
    provenance = read_provenance(path)[0]["provenance"]
    write_explanations([replace(first, scores=scores), *others], path, provenance=provenance)
    assert f"slides/s001.parquet: the scores of {first.column} add up to" in error_line(out)


def test_tiles_and_features_made_before_the_run_belong_to_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    for name, kind in (("tiles", "tile"), ("features", "embed")):
        with open_folder(out / name, kind):
            pass
    with open_folder(out, "explain"):
        pass
    assert error_line(out) == ""
    without_lines(out / "ledger.jsonl", b'"run"')  # as an earlier version wrote it
    assert error_line(out) == ""
    shutil.copytree(out / "tiles", out / "others")
    assert [fault.what for fault in verify_run(xmil.open_run(out))] == ["others"]


def without_lines(ledger: Path, part: bytes) -> None:
    """Rewrite a ledger without the entries that have a part."""
    head, *lines = ledger.read_bytes().splitlines(keepends=True)
    rest = [line for line in lines if part not in line]
    assert len(rest) < len(lines)
    digest = hashlib.sha256(b"".join(rest)).hexdigest()
    header = json.dumps({**json.loads(head), "lines": len(rest), "sha256": digest})
    ledger.write_bytes(b"".join([header.encode() + b"\n", *rest]))


def test_a_slide_whose_line_was_lost_is_listed_again(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(made, root)
    words = (root / "m.safetensors", root / "features")
    run = xmil.explain_slides(*words, out=root / "again", check="none")
    without_lines(run.path / "ledger.jsonl", b"slides/b.parquet")
    assert error_line(run.path) == ""
    xmil.explain_slides(*words, out=run.path, check="none")
    assert b"slides/b.parquet" in (run.path / "ledger.jsonl").read_bytes()
    assert error_line(run.path) == ""


def test_a_slide_whose_line_was_lost_must_be_whole_and_of_the_run(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(made, root)
    words = (root / "m.safetensors", root / "features")
    runs = [xmil.explain_slides(*words, out=root / f"{i}", seed=i, check="none").path for i in range(2)]
    path = runs[0] / "slides" / "b.parquet"
    whole = path.read_bytes()
    without_lines(runs[0] / "ledger.jsonl", b"slides/b.parquet")
    for content in (whole[:-40], (runs[1] / "slides" / "b.parquet").read_bytes()):
        path.write_bytes(content)
        assert "slides/b.parquet" in error_line(runs[0])
