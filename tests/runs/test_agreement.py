"""Annotations against the scores of a run: measures by hand, both layouts, every door."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from tests.viewer.given_scores import grid, write_run
from xmil.cli._app import run as command
from xmil.core.errors import InputError
from xmil.runs.agreement import compare_annotations, measure_agreement
from xmil.storage import Run

EDGE, COLUMNS, ROWS = 10, 4, 3
INSIDE = np.array([True, True, False, False] * 2 + [False] * 4)  # the upper left 2 x 2 patches


def collection(*boxes: tuple[int, int, int, int], kind: str = "Tumor", **head: Any) -> str:
    features = [
        {
            "type": "Feature",
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[x, y], [x + w, y], [x + w, y + h], [x, y + h], [x, y]]],
            },
            "properties": {"classification": {"name": kind}},
        }
        for x, y, w, h in boxes
    ]
    return json.dumps({"type": "FeatureCollection", "features": features, **head})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    rng = np.random.default_rng(0)
    for i in range(4):
        scores = {
            ("lrp", "tumour"): (3.0 * INSIDE + rng.random(12)).astype(np.float32),
            ("attention", "tumour"): rng.random(12).astype(np.float32),
        }
        write_run(folder, f"s{i}", scores, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
    with (folder / "slides.csv").open("w", encoding="utf-8") as stream:
        stream.write("slide_id,case_id\n" + "".join(f"s{i},c{i // 2}\n" for i in range(4)))
    return folder


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    folder = tmp_path / "drawn"
    (folder / "s1").mkdir(parents=True)
    (folder / "s0.geojson").write_text(collection((0, 0, 20, 20)), encoding="utf-8")
    (folder / "s1" / "anna.geojson").write_text(
        collection((-5, -5, 20, 20), xmil={"origin": [5, 5]}), encoding="utf-8"
    )
    (folder / "s1" / "ben.geojson").write_text(collection((20, 0, 20, 20)), encoding="utf-8")
    (folder / "s2.geojson").write_text(collection((500, 500, 20, 20)), encoding="utf-8")
    (folder / "other.geojson").write_text(collection((0, 0, 20, 20)), encoding="utf-8")
    return folder


def test_rows_and_summary_are_as_by_hand(run: Path, drawn: Path) -> None:
    said: list[str] = []
    agreement = compare_annotations(Run(run), drawn, say=said.append)
    rows = {(row["slide_id"], row["reader"], row["method"]): row for row in agreement.rows}
    assert set(rows) == {
        (s, r, m) for s, r in (("s0", ""), ("s1", "anna"), ("s1", "ben")) for m in ("lrp", "attention")
    }
    own = rows["s0", "", "lrp"]
    assert (own["auroc"], own["dice"], own["pointing"], own["marked"]) == (1.0, 1.0, 1.0, 4)
    assert own["chance"] == pytest.approx(4 / 12)
    assert rows["s1", "anna", "lrp"]["auroc"] == 1.0  # the file counts from an origin of its own
    assert rows["s1", "ben", "lrp"]["dice"] == 0.0
    assert [(row["slide_id"], row["file"]) for row in agreement.left_out] == [
        (name, str(drawn / f"{name}.geojson")) for name in ("other", "s2")
    ]
    assert all(row["error"].startswith(row["file"]) for row in agreement.left_out)
    assert all(any(name in line for line in said) for name in ("other", "s2"))
    dice = next(r for r in agreement.summary if (r["method"], r["measure"]) == ("lrp", "dice"))
    assert dice["mean"] == pytest.approx(2 / 3)
    assert (dice["n"], dice["slides"], dice["cases"]) == (3, 2, 1)


def test_each_class_of_regions_is_measured_by_itself(run: Path, tmp_path: Path) -> None:
    drawn = tmp_path / "classes"
    drawn.mkdir()
    features = [
        *json.loads(collection((0, 0, 20, 20)))["features"],
        *json.loads(collection((20, 0, 20, 20), kind="Artefact"))["features"],
        *json.loads(collection((20, 0, 20, 20), (500, 0, 20, 20), kind="Off"))["features"],
        *json.loads(collection((500, 0, 20, 20), kind="Far"))["features"],
        {**json.loads(collection((0, 0, 10, 10)))["features"][0], "properties": {}},
    ]
    (drawn / "s0.geojson").write_text(json.dumps({"features": features}), encoding="utf-8")
    found = compare_annotations(Run(run), drawn)
    lrp = {row["class"]: row for row in found.rows if row["method"] == "lrp"}
    assert {kind: (row["marked"], row["dice"]) for kind, row in lrp.items() if kind} == {
        "Tumor": (4, 1.0), "Artefact": (4, 0.0), "Off": (4, 0.0),
    }  # fmt: skip
    assert lrp[""]["marked"] == 1
    assert {row["class"] for row in found.summary} == {"Tumor", "Artefact", "Off", ""}
    (fault,) = found.left_out
    assert "Far" in fault["error"]
    assert [name for name in ("Tumor", "Artefact", "(no class)") if name not in found.as_text()] == []


def test_a_case_counts_once_and_its_test_is_exact(run: Path, drawn: Path) -> None:
    (drawn / "s2.geojson").write_text(collection((0, 0, 20, 20)), encoding="utf-8")
    found = compare_annotations(Run(run), drawn).summary
    dice = next(row for row in found if (row["method"], row["measure"]) == ("lrp", "dice"))
    assert (dice["n"], dice["cases"]) == (4, 2)
    assert dice["mean"] == pytest.approx((2 / 3 + 1) / 2)  # regions of s0 and s1 are one case's
    assert dice["p"] == 0.5  # 2 of the 4 flips of two signs


def test_the_command_needs_no_model(run: Path, drawn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agree = ["study", "agreement"]
    assert command([*agree, str(run), "--annotations", str(drawn)]) == 0
    table = capsys.readouterr().out
    assert "LRP " in table
    assert "Attention " in table
    with (run / "agreement.csv").open(encoding="utf-8") as stream:
        assert len(list(csv.DictReader(stream))) == 6
    assert (run / "agreement_summary.csv").is_file()
    with (run / "agreement_failures.csv").open(encoding="utf-8") as stream:
        assert [row["slide_id"] for row in csv.DictReader(stream)] == ["other", "s2"]
    assert command([*agree, str(run)]) == 2
    assert "--annotations" in capsys.readouterr().err
    assert command([*agree, "--annotations", str(drawn)]) == 2
    assert command([*agree, str(run), "--annotations", str(drawn / "nowhere")]) == 2
    assert command([*agree, str(run), "--annotations", str(drawn), "--classes", "Stroma"]) == 2
    assert command(["evaluate", str(run), "--annotations", str(drawn)]) == 2
    assert "study agreement" in capsys.readouterr().err


def test_python_and_a_folder_of_ones_own(run: Path, drawn: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    measure_agreement(run, annotations=drawn, out=out)
    assert sorted(path.name for path in out.iterdir()) == [
        "agreement.csv", "agreement_failures.csv", "agreement_summary.csv",
    ]  # fmt: skip
    with pytest.raises(InputError, match="study agreement"):
        xmil.evaluate_slides(run=run, annotations=drawn, out=out)


def test_the_viewer_shows_what_readers_drew(run: Path, drawn: Path) -> None:
    pytest.importorskip("starlette", reason="the viewer is not installed")
    from tests.viewer.asking import ask
    from xmil.viewer.app import create_app
    from xmil.viewer.collection import Collection

    app = create_app(Collection([run]))
    assert ask(app, "/api/agreement-0.json").json["rows"] == []
    (run / "annotations" / "s0").mkdir(parents=True)
    (drawn / "s0.geojson").rename(run / "annotations" / "s0" / "anna.geojson")
    answer = ask(app, "/api/agreement-0.json")
    assert answer.status == 200
    assert [(row["reader"], row["dice"]) for row in answer.json["rows"] if row["method"] == "lrp"] == [
        ("anna", 1.0)
    ]
    assert str(run) not in answer.body.decode()
