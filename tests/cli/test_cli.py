"""The command line: inspect, split, exit codes, one-line errors, instant help."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import xmil
from tests.data import producers as p
from tests.data.test_write import explanation
from tests.runs.cohorts import make_cohort
from xmil.cli import main
from xmil.cli._app import command_panels

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("XMIL_DATA", ROOT.parent / "shared" / "data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="XMIL_DATA is not here")


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def inspected(*paths: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    code, out, err = run("inspect", "--json", *paths, capsys=capsys)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from xmil.cli._app import build; build();"
        "heavy = {'torch', 'numpy', 'h5py', 'pyarrow', 'zarr', 'scipy', 'pydantic'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_explaining_a_bag_needs_no_requests() -> None:
    """Pydantic declares options of commands; xmil.explain has none of them."""
    code = (
        "import sys, numpy, xmil; model = xmil.create_model('meanpool', in_dim=4, n_classes=2, seed=0);"
        "xmil.explain(model, numpy.eye(4, dtype='float32'), method='lrp', target=1);"
        "sys.exit('pydantic' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["", *command_panels(), "study init", "study report"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*command.split(), "--help", capsys=capsys)
    assert code == 0
    assert "Usage" in out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys=capsys)
    assert code == 0
    assert "Usage" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys)[:2] == (0, f"xmil {xmil.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspct"],
        ["inspect"],
        ["inspect", "--mpp", "x", "a"],
        ["inspect", "nowhere.h5"],
        ["split", "nowhere.csv"],
        ["--no"],
    ],
)
def test_errors_take_one_line_and_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2
    assert err.startswith("xmil: error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_name_that_is_not_text_is_printed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"kind": "tile", "model": {"path": "\\ud800"}}')
    (tmp_path / os.fsdecode(b"\xff.txt")).touch()
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    words = [sys.executable, "-m", "xmil.cli", "verify", str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\ud800" in done.stdout


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = run("split", "nowhere.csv", "--debug", capsys=capsys)
    assert "Traceback" in err


@pytest.mark.parametrize("debug", [True, False])
def test_debug_shows_the_traceback_of_inspect(debug: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xmil", *["--debug"] * debug, "inspect", str(tmp_path / "nowhere")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}  # a process of its own, as pytest owns the logging
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert ("Traceback" in done.stderr) == debug
    assert done.stderr.splitlines()[-1] == f"xmil: error: {tmp_path / 'nowhere'}: no such file."


def test_some_failed_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("inspect", p.plain(tmp_path), tmp_path / "nowhere.h5", capsys=capsys)
    assert code == 1
    assert "plain features" in out
    assert err == f"xmil: error: {tmp_path / 'nowhere.h5'}: no such file.\n"


def test_inspect_a_feature_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = p.features()
    values[2, 3], values[4] = np.nan, 0
    bag = xmil.Bag(values, p.XY, patch_size=p.EDGE, mpp=p.MPP, slide_id="s1", encoder="uni_v1")
    xmil.write_bag(bag, tmp_path / "s1.h5")
    [report] = inspected(tmp_path / "s1.h5", capsys=capsys)
    facts = report["facts"]
    assert (report["kind"], facts["format"], facts["encoder"]) == ("features", "trident", "uni_v1")
    assert (facts["instances"], facts["width"], facts["NaN"], facts["all-zero rows"]) == (p.N, p.D, 1, 1)
    assert facts["coordinates"] == "top-left corners in level-0 pixels"
    assert facts["level-0 extent"] == [1024, 512, 3072, 3584]
    assert report["missing"] == []
    assert len(report["problems"]) == 2


def test_inspect_says_what_is_missing_and_inferred(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = p.stamp2(tmp_path)
    code, out, _ = run("inspect", path, capsys=capsys)
    assert code == 0
    assert "coordinates are in microns; pass the slide's --mpp" in out
    _, out, _ = run("inspect", path, "--mpp", p.MPP, capsys=capsys)
    assert "missing" not in out
    [report] = inspected(p.clam_features(tmp_path), capsys=capsys)
    (note,) = report["inferred"]
    assert note.startswith("patch edge 512 from the smallest coordinate gap")


def test_inspect_a_folder_flags_the_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, width, encoder in (("a", 8, "uni"), ("b", 8, "uni"), ("c", 16, "conch")):
        xmil.write_bag(
            xmil.Bag(np.zeros((3, width)), slide_id=name, encoder=encoder), tmp_path / f"{name}.h5"
        )
    (tmp_path / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\nnonsense")
    [report] = inspected(tmp_path, capsys=capsys)
    assert report["facts"]["width"] == {"8": 2, "16": 1}
    assert report["facts"]["encoder"] == {"uni": 2, "conch": 1}
    said = " ".join(report["problems"])
    assert "mixed width: 2 with 8, 1 with 16" in said
    assert "mixed encoder: 2 with uni, 1 with conch" in said
    assert "1 files cannot be read" in said
    _, out, _ = run("inspect", tmp_path, capsys=capsys)
    assert "broken.h5" in out
    assert "instances" in out


def test_inspect_an_empty_folder_points_below(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    p.clam_features(tmp_path)
    p.clam_pt(tmp_path)
    [report] = inspected(tmp_path, capsys=capsys)
    assert "h5_files (1 files), pt_files (1 files)" in report["problems"][0]


def test_inspect_a_clam_project_names_the_nested_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    p.clam_features(tmp_path / "FEATURES")
    p.clam_pt(tmp_path / "FEATURES")
    [report] = inspected(tmp_path, capsys=capsys)
    assert "FEATURES/h5_files (1 files), FEATURES/pt_files (1 files)" in report["problems"][0]


def test_inspect_a_folder_of_nothing_is_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text("nothing to see")
    code, out, err = run("inspect", tmp_path, capsys=capsys)
    assert (code, out) == (2, "")
    assert "no feature files, checkpoints or slides" in err


def test_inspect_a_checkpoint_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xmil.save_model(xmil.create_model("addmil", in_dim=6, n_classes=2), tmp_path / "model.safetensors")
    [report] = inspected(tmp_path, capsys=capsys)
    assert (report["kind"], report["facts"]["name"]) == ("checkpoint", "addmil")


def test_inspect_a_folder_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("b.jpg", "a.png"):
        image.new("RGB", (50, 30)).save(tmp_path / name)
    (tmp_path / "broken.svs").write_text("not a slide")
    [report] = inspected(tmp_path, capsys=capsys)
    assert (report["what"], report["facts"]["slides"]) == ("a folder of slides", 3)
    assert [(row["file"], row.get("size")) for row in report["rows"]] == [
        ("a.png", [50, 30]),
        ("b.jpg", [50, 30]),
        ("broken.svs", None),
    ]
    assert "mpp is not stored in 2 of 2" in report["missing"][0]
    assert report["problems"] == ["1 files cannot be read"]
    _, out, _ = run("inspect", tmp_path, capsys=capsys)
    assert "50 x 30" in out


def test_inspect_explanation_run_and_cohort(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "slides").mkdir(parents=True)
    explanation().save(tmp_path / "run" / "slides" / "s1.parquet")
    (tmp_path / "run" / "run.json").write_text('{"version": "0.1.0", "seed": 0, "config": {}}')
    (tmp_path / "run" / "failures.csv").write_text("slide_id,error\ns2,bad\n")
    table = tmp_path / "c.csv"
    table.write_text("slide_id,case_id,label,split\ns1,c1,1,train\ns2,c1,0,test\n")
    stored, ran, cohort = inspected(
        tmp_path / "run" / "slides" / "s1.parquet", tmp_path / "run", table, capsys=capsys
    )
    assert stored["kind"] == "explanation"
    assert "lrp:HPV+" in stored["facts"]
    assert (ran["kind"], ran["facts"]["slides explained"], ran["facts"]["columns"]) == (
        "run",
        1,
        ["lrp:HPV+"],
    )
    assert "1 slide failed" in ran["problems"][0]
    assert (cohort["kind"], cohort["facts"]["label"]) == ("cohort", {"0": 1, "1": 1})
    assert "1 cases are in two parts of 'split': c1" in cohort["problems"][0]


def test_inspect_wsinfer_boxes_and_the_papers_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = p.paper(tmp_path, container="folder")
    boxes, bag = inspected(p.wsinfer_csv(tmp_path), folder, capsys=capsys)
    assert boxes["what"] == "wsinfer coordinates without features"
    assert bag["facts"]["instances"] == p.N


def test_inspect_names_one_reason_for_a_torch_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": slice(3)}, tmp_path / "objects.pt")
    torch.save(torch.zeros(768), tmp_path / "vector.pt")
    torch.save({"layer.weight": torch.zeros(3, 3)}, tmp_path / "other.pt")
    reasons = {
        "objects": "could run code",
        "vector": "slide-level embedding",
        "other": "of an unknown family",
    }
    for name, reason in reasons.items():
        code, _, err = run("inspect", tmp_path / f"{name}.pt", capsys=capsys)
        assert (code, err.count(str(tmp_path))) == (2, 1), err
        assert reason in err


def test_split_writes_a_column_and_never_parts_a_case(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "c.csv"
    rows = [f"s{i},c{i // 2},{(i // 2) % 2}" for i in range(40)]
    table.write_text("slide_id,case_id,label\n" + "\n".join(rows) + "\n")
    code, out, _ = run("split", table, "--folds", 5, "--stratify", "label", "--seed", 1, capsys=capsys)
    assert code == 0
    assert "none on two sides" in out
    cohort = xmil.read_cohort(table)
    assert cohort.leaking_cases("fold") == []
    assert sorted(set(cohort.column("fold"))) == list("01234")
    code, _, err = run("split", table, "--folds", 5, capsys=capsys)
    assert (code, "has a column 'fold' already; pass --overwrite" in err) == (2, True)
    code, out, _ = run("split", table, "--out", tmp_path / "o.parquet", capsys=capsys)
    assert code == 0
    assert set(xmil.read_cohort(tmp_path / "o.parquet").column("split")) == {"train", "val", "test"}


def test_split_leaves_the_columns_of_the_table_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, parquet = tmp_path / "c.csv", tmp_path / "c.parquet"
    rows = [["x", f"scans/{i:03}.svs", f"0{i}", "" if i else "old"] for i in range(6)]
    write = [["note", "Slide_ID", "Patient", "Subset"], *rows]
    table.write_text("\n".join(",".join(row) for row in write) + "\n")
    code, _, err = run("split", table, capsys=capsys)
    assert (code, "'Subset'" in err) == (2, True)
    for out in (parquet, table):
        assert run("split", table, "--overwrite", "--out", out, capsys=capsys)[0] == 0
    with table.open(newline="") as file:
        after = list(csv.reader(file))
    assert [row[:3] for row in after] == [row[:3] for row in write]
    assert (after[0][3], {row[3] for row in after[1:]}) == ("Subset", {"train", "val", "test"})
    assert pq.read_table(parquet).to_pydict()["Patient"] == [row[2] for row in rows]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--folds", 1],
        ["--folds", 99],
        ["--fractions", "train=0.5"],
        ["--fractions", "a"],
        ["--stratify", "labels"],
    ],
)
def test_bad_splits(tmp_path: Path, arguments: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "c.csv"
    table.write_text("slide_id,label\n" + "\n".join(f"s{i},{i % 2}" for i in range(8)) + "\n")
    before = table.read_text()
    code, _, err = run("split", table, *arguments, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert table.read_text() == before


@needs_data
def test_real_checkpoints_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"attnmil_camelyon": "attnmil", "attnmil_random": "attnmil", "transmil_random": "transmil"}
    names |= {"addmil_random": "addmil", "attnmil_nsclc": "attnmil"}
    paths = [DATA / "golden" / name / "best_model.pt" for name in names]
    reports = inspected(*paths, DATA / "checkpoints" / "clam" / "s_0_checkpoint.pt", capsys=capsys)
    assert [report["kind"] for report in reports] == ["checkpoint"] * 6
    assert [report["facts"]["name"] for report in reports] == [*names.values(), "clam_sb"]
    assert [report["facts"]["in_dim"] for report in reports] == [768, 96, 96, 96, 768, 1024]


@needs_data
def test_real_features_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    train, test = inspected(*sorted((DATA / "mnist").glob("*.npz"), reverse=True), capsys=capsys)
    assert (train["facts"]["instances"], test["facts"]["instances"]) == (14_000, 6_000)
    assert (test["facts"]["width"], test["facts"]["stored as"], test["facts"]["NaN"]) == (512, "float16", 0)
    code, _, err = run("inspect", DATA / "golden" / "attnmil_nsclc" / "expected.npz", capsys=capsys)
    assert code == 2
    assert "unknown layout; it holds n1_features (1, 768)" in err


@needs_data
def test_real_slides_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openslide")
    cmu, tcga = inspected(*sorted((DATA / "slides").glob("*.svs")), capsys=capsys)
    assert (cmu["facts"]["size"], cmu["facts"]["mpp"], cmu["missing"]) == ([[2220, 2967]], 0.499, [])
    assert (tcga["facts"]["size"], len(tcga["facts"]["levels"]), tcga["facts"]["mpp"]) == (
        [[4443, 3567]],
        2,
        None,
    )
    assert "mpp is not stored" in tcga["missing"][0]


def test_slides_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.svs").write_text("not a slide")
    (tmp_path / "cut.tif").write_bytes(b"II*\0" + b"\xff" * 40)
    code, _, err = run("inspect", tmp_path / "text.svs", tmp_path / "cut.tif", capsys=capsys)
    assert code == 2
    assert err.count("not a slide or image that can be read") == 2


@needs_data
def test_real_folders_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openslide")
    golden, slides, colon = inspected(
        DATA / "golden" / "attnmil_camelyon", DATA / "slides", DATA / "colon", capsys=capsys
    )
    assert (golden["kind"], golden["facts"]["name"]) == ("checkpoint", "attnmil")
    assert [(row["size"], row["mpp"]) for row in slides["rows"]] == [
        ([2220, 2967], 0.499),
        ([4443, 3567], None),
    ]
    assert (colon["what"], colon["problems"]) == ("a folder of slides", [])


def test_split_reports_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "cohort.csv"
    table.write_text("slide_id,case_id\n" + "".join(f"s{i},c{i // 2}\n" for i in range(8)))
    code, out, _ = run("split", table, "--folds", "2", "--json", capsys=capsys)
    told = json.loads(out)
    assert (code, told["column"]) == (0, "fold")
    assert told["sides"] == {"0": {"slides": 4, "cases": 2}, "1": {"slides": 4, "cases": 2}}


def test_split_without_cases_promises_nothing_about_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "cohort.csv"
    table.write_text("image,label\n" + "".join(f"s{i},{i % 2}\n" for i in range(12)), encoding="utf-8")
    code, said, _ = run("split", table, capsys=capsys)
    assert code == 0
    assert "none on two sides" not in said
    assert "case_id" in said


def test_an_option_of_before_is_not_sent_to_one_that_the_command_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, said = run("split", tmp_path / "cohort.csv", "--fold", "5", capsys=capsys)
    assert code == 2
    assert "--drop" not in said
    assert "--folds" in said


def test_a_cohort_without_rows_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 2)
    (tmp_path / "empty.csv").write_text("slide_id,label\n", encoding="utf-8")
    where = ["--model", folder / "m0.safetensors", "--features", folder / "features"]
    more = ["--cohort", tmp_path / "empty.csv", "--out", tmp_path / "out"]
    code, _, said = run("predict", *where, *more, capsys=capsys)
    assert code == 2
    assert "empty.csv: has no rows" in said
