"""`insight` over a run: concepts, shortcuts and biomarkers of a planted cohort, resumed and bad input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import numpy as np
import pytest
import torch

import xmil
from tests.slides.pyramids import write_pyramid
from xmil.cli import main
from xmil.core.errors import InputError
from xmil.evaluate.statistics import spearman
from xmil.heatmaps import BLUE, RED, Scale
from xmil.insights import pictures
from xmil.insights.biomarkers import STRONG
from xmil.storage import ConceptMaps

D, N, SLIDES, EDGE = 8, 24, 24, 32


def make_model(path: Path) -> Path:
    """Mean pooling that likes the first feature and dislikes the second."""
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=0)
    xmil.save_model(model, path)
    return path


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slides of two kinds of patches; blue ink lies on the patches of one kind; a site behind the output."""
    root = tmp_path_factory.mktemp("study")
    (root / "features").mkdir()
    (root / "slides").mkdir()
    rng = np.random.default_rng(0)
    kinds = np.abs(np.random.default_rng(5).normal(size=(3, D))) * 2
    model = xmil.load_model(make_model(root / "model.safetensors"))
    with torch.no_grad():
        worth = (model(torch.from_numpy(kinds.astype(np.float32)).unsqueeze(1))[:, 1]).numpy()
    strongest = int(worth.argmax())
    rows = ["slide_id,label,diagnosis,site,scanner,time,event"]
    corners = np.array([[x * EDGE, y * EDGE] for y in range(4) for x in range(6)])
    for i in range(SLIDES):
        share = rng.random()
        kind = np.where(rng.random(N) < share, strongest, rng.integers(0, 3, N))
        features = np.abs(kinds[kind] + rng.normal(size=(N, D)) * 0.1).astype(np.float32)
        bag = xmil.Bag(features, coords=corners, patch_size=EDGE, mpp=0.5, slide_id=f"s{i:02}")
        xmil.write_bag(bag, root / "features" / f"s{i:02}.h5")
        pixels = np.full((4 * EDGE, 6 * EDGE, 3), (200, 120, 170), dtype=np.uint8)
        for k, (x, y) in enumerate(corners):
            if kind[k] == strongest:
                pixels[y + 4 : y + 20, x + 4 : x + 28] = (30, 60, 190)
        write_pyramid(root / "slides" / f"s{i:02}.tif", pixels, levels=())
        label = int((share > 0.5) != (i % 3 == 0))
        rows.append(
            f"s{i:02},{label},{'tumour' if label else 'normal'},{'north' if share > 0.5 else 'south'},"
            f"{rng.choice(['x', 'y'])},{(7 * i) % SLIDES + 1},{int(i % 3 > 0)}"
        )
    (root / "cohort.csv").write_text("\n".join(rows) + "\n")
    xmil.explain_slides(root / "model.safetensors", root / "features", out=root / "run", target="1")
    return root


@pytest.fixture(scope="module")
def looked(study: Path) -> xmil.Run:
    return xmil.insight(
        study / "run",
        features=study / "features",
        cohort=study / "cohort.csv",
        slides=study / "slides",
        model=study / "model.safetensors",
        concepts=3,
    )


def rows_of(run: xmil.Run, name: str) -> list[dict[str, str]]:
    return rows_of_csv(run.path / name)


def rows_of_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_shares_of_concepts_and_the_rest_make_the_score(study: Path, looked: xmil.Run) -> None:
    run = xmil.open_run(study / "run")
    for slide in list(run)[:5]:
        held = json.loads((looked.path / "slides" / f"{slide}.json").read_text())
        e = run.explanation(slide, method="lrp")
        total = sum(held["profile"]) + held["residual"]
        assert total == pytest.approx(float(e.scores.sum()), rel=1e-3, abs=1e-4)
        assert held["output"] == pytest.approx(e.output)
        maps = ConceptMaps.load(looked.path / "concepts" / f"{slide}.npz")
        assert maps.values.sum(axis=0) == pytest.approx(held["profile"], rel=1e-4, abs=1e-5)
        assert (maps.method, maps.target, len(maps)) == ("lrp", str(e.target), len(e))


def test_the_planted_site_and_ink_are_found_and_the_scanner_is_not(looked: xmil.Run) -> None:
    rows = {row["cause"]: row for row in reversed(rows_of(looked, "shortcuts.csv"))}
    assert rows["site"]["found"] == "True"
    assert rows["blue ink"]["found"] == "True"
    assert float(rows["blue ink"]["effect"]) > 0.5
    assert rows["scanner"]["found"] == "False"
    assert not {"label", "diagnosis"} & set(rows)
    card = json.loads((looked.path / "card.json").read_text())
    assert card["shortcuts_not_asked"] == ["diagnosis: repeats the label"]


def test_five_slides_are_too_few_and_the_report_says_how_many_are_needed(study: Path, tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / "features").mkdir(exist_ok=True)
        copyfile(study / "features" / f"s{i:02}.h5", tmp_path / "features" / f"s{i:02}.h5")
    found = xmil.insight(
        study / "run", features=tmp_path / "features", cohort=study / "cohort.csv",
        slides=study / "slides", out=tmp_path / "few",
    )  # fmt: skip
    assert rows_of(found, "shortcuts.csv") == []
    assert "8 slides are needed, but there are 5" in (found.path / "report.html").read_text()


def test_a_column_with_the_models_classes_is_the_label(study: Path, tmp_path: Path) -> None:
    """A cohort whose label has another name: the diagnosis is no shortcut, and slides of one are compared."""
    table = rows_of_csv(study / "cohort.csv")
    lines = ["slide_id,diagnosis,site", *(f"{r['slide_id']},{r['diagnosis']},{r['site']}" for r in table)]
    (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
    names = ("normal", "tumour")
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=0, class_names=names)
    xmil.save_model(model, tmp_path / "model.safetensors")
    features = study / "features"
    run = xmil.explain_slides(tmp_path / "model.safetensors", features, out=tmp_path / "run", target="1")
    found = xmil.insight(run, features=features, cohort=tmp_path / "cohort.csv")
    assert [row["cause"] for row in rows_of(found, "shortcuts.csv")] == ["site"]
    notes = json.loads((found.path / "card.json").read_text())["notes"]
    assert any("taken as the label" in note for note in notes)


def test_deleted_concepts_move_the_output_as_predicted(looked: xmil.Run) -> None:
    card = json.loads((looked.path / "card.json").read_text())
    assert card["concept_removal"]["agreement"] >= 0.9
    assert card["concept_removal"]["correlation"] >= 0.8
    assert card["slides"] == SLIDES


def test_the_report_is_one_file_with_pictures_and_limits(looked: xmil.Run) -> None:
    page = (looked.path / "report.html").read_text()
    assert "data:image/jpeg;base64," in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "not a medical device" in page
    assert "Look at this first" in page
    first = rows_of(looked, "concepts.csv")[0]
    side = "for" if float(first["mean_relevance"]) > 0 else "against"
    words = f'<span class="{side}">speaks {side} class 1</span>'
    assert f"Concept {first['concept']} {words}" in page
    assert "**limits**" in (looked.path / "card.md").read_text()
    run = xmil.open_run(looked.path.parent)
    labels = {row["slide_id"]: row["label"] for row in rows_of_csv(looked.path.parent.parent / "cohort.csv")}
    told = rows_of(looked, "strategies.csv")
    for strategy in {row["strategy"] for row in told}:
        own = [row["slide_id"] for row in told if row["strategy"] == strategy]
        right = np.mean([run.rows[slide]["predicted"] == labels[slide] for slide in own])
        assert f"<td>{strategy}</td><td>{len(own)}</td><td>{100 * right:.0f} %</td>" in page


def test_the_report_says_whether_seeds_agree_on_the_concepts(looked: xmil.Run) -> None:
    rows = rows_of(looked, "concept_stability.csv")
    assert [row["concepts"] for row in rows] == ["3"]
    assert float(rows[0]["agreement"]) > 0.9  # three kinds of patches
    card = json.loads((looked.path / "card.json").read_text())
    assert "the same 3 concepts" in card["concept_stability"]


def test_red_speaks_for_the_class_as_in_every_heatmap(looked: xmil.Run) -> None:
    page = (looked.path / "report.html").read_text()
    colour = {name: re.search(rf"--{name}: (#\w+)", page)[1] for name in ("for", "against")}
    assert colour == {"for": RED, "against": BLUE}
    red, _, blue = Scale(-1.0, 1.0, True, "red-blue").paint([1.0, 0.0, -1.0])[:, :3].astype(int)
    for name, end in (("for", red), ("against", blue)):
        own = [int(colour[name][i : i + 2], 16) for i in (1, 3, 5)]
        assert np.argmax(own) == np.argmax(end)
        assert f".{name} {{ color: var(--{name}); }}" in page


def test_patients_are_counted_where_the_cohort_names_them(
    study: Path, looked: xmil.Run, tmp_path: Path
) -> None:
    """Two slides to a patient; without case_id the report says that slides are taken as independent."""
    first, *lines = (study / "cohort.csv").read_text().splitlines()
    lines = [f"{line},p{i // 2}" for i, line in enumerate(lines)]
    rows = [line.split(",") for line in lines]
    of_first = [rows[i - i % 2] for i in range(len(rows))]  # outcomes are the patient's
    lines = [",".join([*row[:5], *head[5:7], row[7]]) for row, head in zip(rows, of_first, strict=True)]
    (tmp_path / "cohort.csv").write_text("\n".join([f"{first},case_id", *lines]) + "\n")
    given = {"features": study / "features", "slides": study / "slides", "concepts": 3}
    found = xmil.insight(study / "run", cohort=tmp_path / "cohort.csv", out=tmp_path / "i", **given)
    cards = [json.loads((run.path / "card.json").read_text()) for run in (looked, found)]
    assert [card["slides"] for card in cards] == [SLIDES, SLIDES]
    assert cards[1]["cases"] == SLIDES // 2
    assert "taken as independent" in cards[0]["cases"]
    assert any("no case_id" in note for note in cards[0]["notes"])
    assert not any("case_id" in note for note in cards[1]["notes"])
    assert {row["cases"] for row in rows_of(looked, "shortcuts.csv")} == {""}
    assert {row["cases"] for row in rows_of(found, "shortcuts.csv")} == {"12"}
    assert {(row["slides"], row["cases"]) for row in rows_of(found, "biomarkers.csv")} == {("24", "12")}
    if rows_of(found, "survival.csv"):  # lifelines is there
        groups = {(row["group"], row["n"], row["slides"]) for row in rows_of(found, "survival.csv")}
        assert groups == {("above the median", "6", "12"), ("up to the median", "6", "12")}
    pages = [(run.path / "report.html").read_text() for run in (looked, found)]
    assert "Slides are taken as independent" in pages[0]
    assert "24 slides of 12 cases" in pages[1]


def test_outcomes_that_differ_within_a_patient_leave_survival_out(study: Path, tmp_path: Path) -> None:
    first, *lines = (study / "cohort.csv").read_text().splitlines()
    lines = [f"{first},case_id", *(f"{line},p{i // 2}" for i, line in enumerate(lines))]
    (tmp_path / "cohort.csv").write_text("\n".join(lines) + "\n")
    found = xmil.insight(
        study / "run", features=study / "features", cohort=tmp_path / "cohort.csv", out=tmp_path / "i",
        concepts=3,
    )  # fmt: skip
    notes = json.loads((found.path / "card.json").read_text())["notes"]
    assert any("slides of case 'p0' differ in 'time'" in note for note in notes)
    assert not (found.path / "survival.csv").exists()


def test_the_table_has_a_row_per_slide_with_biomarkers(looked: xmil.Run) -> None:
    table = looked.table()
    assert len(table) == SLIDES
    assert table["supporting_share"].between(0, 1).all()
    assert looked.kind == "insight"


def test_strong_patches_score_above_the_mean_size_of_the_cohorts(study: Path, looked: xmil.Run) -> None:
    run = xmil.open_run(study / "run")
    scores = {slide: run.explanation(slide, method="lrp").scores for slide in run}
    scale = STRONG * np.abs(np.concatenate(list(scores.values()))).mean()
    table = looked.table().set_index("slide_id")["strong_share"]
    for slide, own in scores.items():
        assert table[slide] == pytest.approx((own > scale).mean())


def test_survival_is_kaplan_meiers_in_both_halves(looked: xmil.Run, study: Path) -> None:
    pytest.importorskip("lifelines", reason="the extra 'insight' is not installed")
    share = {row["slide_id"]: float(row["strong_share"]) for row in rows_of(looked, "slides.csv")}
    cohort = rows_of_csv(study / "cohort.csv")
    high = [row for row in cohort if share[row["slide_id"]] > np.median(list(share.values()))]
    left = 1.0
    told = [
        row
        for row in rows_of(looked, "survival.csv")
        if (row["biomarker"], row["group"]) == ("strong_share", "above the median")
    ]
    for time in sorted({float(row["time"]) for row in high}):
        risk = sum(float(row["time"]) >= time for row in high)
        died = sum(float(row["time"]) == time and row["event"] == "1" for row in high)
        left *= 1 - died / risk
        (point,) = [row for row in told if float(row["time"]) == time]
        assert float(point["survival"]) == pytest.approx(left)
        assert float(point["low"]) <= left <= float(point["high"])
    assert "Kaplan-Meier" in (looked.path / "report.html").read_text()


def test_the_card_holds_sanity_tests_and_the_atlas_a_sheet_per_leading_concept(looked: xmil.Run) -> None:
    card = json.loads((looked.path / "card.json").read_text())
    assert set(card["sanity"]) == {"weights drawn anew", "made again"}
    rows = rows_of(looked, "sanity.csv")
    assert len(rows) == 10
    assert all(float(row["made_again"]) == 1.0 for row in rows)
    redrawn = np.mean([float(row["weights_redrawn"]) for row in rows])
    assert f"{redrawn:.2f}" in card["sanity"]["weights drawn anew"]
    assert card["sanity"]["weights drawn anew"].startswith("passed" if redrawn <= 0.5 else "failed")
    assert len(list((looked.path / "atlas").glob("concept_*.jpg"))) == 3


def test_a_second_run_finds_everything_done_and_a_changed_slide_is_looked_at_again(
    study: Path, looked: xmil.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "insight", str(study / "run"), "--features", str(study / "features"),
        "--cohort", str(study / "cohort.csv"),
        "--slides", str(study / "slides"), "--model", str(study / "model.safetensors"), "--config",
        "concepts=3",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code
    assert f"0 slides analysed, {SLIDES} already done" in capsys.readouterr().out
    first = next(iter((study / "features").glob("*.h5")))
    was = first.read_bytes()
    bag = xmil.read_bag(first)
    xmil.write_bag(
        xmil.Bag(bag.features * 1.5, coords=bag.coords, patch_size=EDGE, slide_id=first.stem), first
    )
    with pytest.raises(SystemExit):
        main(arguments)
    assert "1 slides analysed" in capsys.readouterr().out
    first.write_bytes(was)
    with pytest.raises(SystemExit):  # the report that other tests read is of the slide as it was
        main(arguments)
    assert "1 slides analysed" in capsys.readouterr().out


def test_without_model_or_vectors_concepts_are_left_out_and_said(study: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "gone.safetensors")
    run = xmil.explain_slides(model, study / "features", out=tmp_path / "run", target="1")
    model.unlink()
    found = xmil.insight(run, out=tmp_path / "i", concepts=3)
    assert "concepts were left out" in (found.path / "report.html").read_text()
    assert rows_of(found, "concepts.csv") == []


def test_bad_input_is_one_sentence(study: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no features of the run's slides"):
        xmil.insight(study / "run", features=tmp_path / "empty")
    with pytest.raises(xmil.XmilError, match="in another layout"):
        xmil.insight(study / "run", features=study / "features", out=tmp_path / "f", format="stamp")
    with pytest.raises(InputError, match="no column 'hospital'"):
        xmil.insight(
            study / "run", features=study / "features", cohort=study / "cohort.csv", causes="hospital"
        )
    with pytest.raises(xmil.XmilError, match=r"Unknown target of s00\.parquet '7'\. Known: 1\."):
        xmil.insight(study / "run", features=study / "features", target="7", out=tmp_path / "j")


@pytest.fixture(scope="module")
def agreed(study: Path, tmp_path_factory: pytest.TempPathFactory) -> xmil.Run:
    """Three slides, two models, a second run beside, certificates and an album."""
    root = tmp_path_factory.mktemp("agreed")
    (root / "features").mkdir()
    for path in sorted((study / "features").glob("*.h5"))[:3]:
        (root / "features" / path.name).symlink_to(path)
    other = xmil.load_model(study / "model.safetensors")
    torch.manual_seed(0)
    with torch.no_grad():
        for weights in other.parameters():
            weights += 0.2 * weights.std(correction=0) * torch.randn_like(weights)
    xmil.save_model(other, root / "other.safetensors")
    xmil.explain_slides(root / "other.safetensors", root / "features", out=root / "run2", target="1")
    model, run = study / "model.safetensors", xmil.open_run(study / "run")
    names = [path.stem for path in sorted((root / "features").iterdir())]
    labels = [int(run.explanation(name, method="lrp").logits.argmax()) for name in names]
    lines = [f"{name},{label}" for name, label in zip(names, labels, strict=True)]
    (root / "cohort.csv").write_text("\n".join(["slide_id,label", *lines]) + "\n")
    xmil.evaluate_slides(
        model, root / "features", cohort=root / "cohort.csv", methods="lrp", out=root / "e", steps=4
    )
    return xmil.insight(
        study / "run", features=root / "features", slides=study / "slides", model=model, concepts=3,
        beside=[root / "run2"], evaluated=root / "e", album=True, out=root / "i",
    )  # fmt: skip


def test_stability_is_that_of_the_runs(study: Path, agreed: xmil.Run) -> None:
    both = [xmil.open_run(path) for path in (study / "run", agreed.path.parent / "run2")]
    table = {row["slide_id"]: row for row in rows_of(agreed, "stability.csv")}
    for slide in agreed:
        scores = np.stack([run.explanation(slide, method="lrp").scores for run in both])
        same = (np.sign(scores[0]) == np.sign(scores[1])).mean()
        assert float(table[slide]["sign_agreement"]) == pytest.approx(same + 0.5 * (1 - same))
        kept = xmil.Explanation.load(agreed.path / "consensus" / f"{slide}.parquet").scores
        np.testing.assert_allclose(kept[kept != 0], scores.mean(axis=0)[kept != 0], rtol=1e-5)
        assert (kept[np.sign(scores[0]) != np.sign(scores[1])] == 0).all()
        assert (kept != 0).any()
        held = json.loads((agreed.path / "slides" / f"{slide}.json").read_text())
        assert held["biomarkers"]["agreed_share"] == pytest.approx((scores > 0).all(axis=0).mean())


def test_the_folds_of_an_ensemble_agree_as_their_runs_do(
    study: Path, agreed: xmil.Run, tmp_path: Path
) -> None:
    root = agreed.path.parent
    for name, path in (("a", study / "model.safetensors"), ("b", root / "other.safetensors")):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "model.safetensors").write_bytes(path.read_bytes())
    best = {"models": ["a/model.safetensors", "b/model.safetensors"]}
    (tmp_path / "models" / "best.json").write_text(json.dumps(best))
    found = xmil.insight(
        study / "run", features=root / "features", model=tmp_path / "models", concepts=3, out=tmp_path / "i"
    )
    first, second = (rows_of(run, "stability.csv") for run in (agreed, found))
    for one, other in zip(first, second, strict=True):
        assert one["models"] == other["models"] == "2.0"
        assert float(one["rank_correlation"]) == pytest.approx(float(other["rank_correlation"]), abs=1e-6)
    notes = [json.loads((run.path / "card.json").read_text())["notes"] for run in (agreed, found)]
    assert [any("other models than" in note for note in own) for own in notes] == [False, True]


def test_a_model_that_drowns_the_others_is_named(study: Path, agreed: xmil.Run, tmp_path: Path) -> None:
    loud = xmil.load_model(study / "model.safetensors")
    with torch.no_grad():
        list(loud.parameters())[-2].mul_(50)  # the last layer's weights
    xmil.save_model(loud, tmp_path / "loud.safetensors")
    features = agreed.path.parent / "features"
    xmil.explain_slides(tmp_path / "loud.safetensors", features, out=tmp_path / "run", target="1")
    found = xmil.insight(study / "run", features=features, beside=[tmp_path / "run"], out=tmp_path / "i")
    notes = [json.loads((run.path / "card.json").read_text())["notes"] for run in (agreed, found)]
    assert [any("One model gives" in note for note in own) for own in notes] == [False, True]


def test_the_album_has_a_page_per_slide_and_the_card_its_certificates(agreed: xmil.Run) -> None:
    album = (agreed.path / "album.pdf").read_bytes()
    assert album.startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", album)) == 3
    card = json.loads((agreed.path / "card.json").read_text())
    summary = rows_of_csv(agreed.path.parent / "e" / "summary.csv")
    (row,) = [r for r in summary if (r["measure"], r["mode"]) == ("aupc", "remove")]
    assert card["faithfulness"]["aupc, remove"].startswith(f"{float(row['mean']):.3g} (")
    assert "not a medical device" in (agreed.path / "card.html").read_text()
    assert card["stability"]["models"] == 2.0


def test_a_page_of_the_album_has_no_verdict_on_another_class(
    study: Path, agreed: xmil.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates are on the predicted class; the run, and so the album, has class 1."""
    pages: list[str] = []

    def read(page: Any) -> Any:
        pages.append("\n".join(text.get_text() for text in page.texts))
        return page

    monkeypatch.setattr(pictures, "letter_figure", read)
    features, evaluated = agreed.path.parent / "features", tmp_path / "e"
    copytree(agreed.path.parent / "e", evaluated)
    for i, path in enumerate(sorted((evaluated / "certificates").glob("*.json"))):
        stored = json.loads(path.read_text())
        stored["methods"][0]["target"] = str(i % 2)
        path.write_text(json.dumps(stored))
    xmil.insight(study / "run", features=features, evaluated=evaluated, album=True, out=tmp_path / "i")
    assert ["was not tested" in page for page in pages] == [True, False, True]


def test_classes_and_regions(study: Path, agreed: xmil.Run, tmp_path: Path) -> None:
    """A profile per class, and biomarkers within an annotation."""
    features, model = agreed.path.parent / "features", study / "model.safetensors"
    run = xmil.explain_slides(model, features, out=tmp_path / "run", target="all")
    square = [[0, 0], [2 * EDGE, 0], [2 * EDGE, 4 * EDGE], [0, 4 * EDGE], [0, 0]]
    tumour = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [square]},
        "properties": {"classification": {"name": "Tumor"}},
    }
    (tmp_path / "regions").mkdir()
    for slide in run:
        (tmp_path / "regions" / f"{slide}.geojson").write_text(json.dumps([tumour]))
    with pytest.raises(SystemExit) as left:
        main([
            "insight", str(run.path), "--features", str(features), "--model", str(model), "--config",
            "concepts=3",
            "--regions", str(tmp_path / "regions"), "--config", "within=Tumor",
            "--beside", str(agreed.path.parent / "run2"),
        ])  # fmt: skip
    assert not left.value.code
    found = xmil.open_run(run.path / "insight")
    rows = rows_of(found, "classes.csv")
    assert len(rows) == 6
    for row in rows_of(found, "slides.csv"):
        e = run.explanation(row["slide_id"], method="lrp", target=1)
        inside = e.coords[:, 0] < 2 * EDGE
        assert float(row["region_supporting_share"]) == pytest.approx((e.scores[inside] > 0).mean())
        kept = xmil.Explanation.load(found.path / "consensus" / f"{row['slide_id']}.parquet").scores
        assert float(row["tapas"]) == pytest.approx((kept[inside] > 0).mean())
        one = [c for c in rows if c["slide_id"] == row["slide_id"]]
        (profile,) = [p for p in rows_of(found, "profiles.csv") if p["slide_id"] == row["slide_id"]]
        assert any(all(c[k] == profile[k] for k in profile) for c in one)


def test_the_runs_own_background_is_lent_to_the_model(agreed: xmil.Run, tmp_path: Path) -> None:
    features = agreed.path.parent / "features"
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=3)
    xmil.save_model(model, tmp_path / "model.safetensors")
    run = xmil.explain_slides(
        tmp_path / "model.safetensors", features, out=tmp_path / "run", target="1", background=features
    )
    plain = [xmil.explain(model, features / f"{slide}.h5", target=1).scores for slide in run]
    stored = [run.explanation(slide, method="lrp").scores for slide in run]
    assert min(spearman(a, b) for a, b in zip(plain, stored, strict=True)) < 0.999
    found = xmil.insight(run, features=features, model=tmp_path / "model.safetensors", concepts=3)
    assert [float(row["made_again"]) for row in rows_of(found, "sanity.csv")] == [1.0] * 3
    profiles = [json.loads((found.path / "slides" / f"{slide}.json").read_text()) for slide in run]
    for held, scores in zip(profiles, stored, strict=True):
        assert sum(held["profile"]) + held["residual"] == pytest.approx(
            float(scores.sum()), rel=1e-3, abs=1e-5
        )
    vectors = xmil.explain_slides(
        tmp_path / "model.safetensors", features, out=tmp_path / "vectors", target="1", background=features,
        params={"lrp": {"feature_level": True}},
    )  # fmt: skip
    kept = xmil.insight(vectors, features=features, concepts=3)
    for held, slide in zip(profiles, run, strict=True):
        again = json.loads((kept.path / "slides" / f"{slide}.json").read_text())
        assert again["profile"] == pytest.approx(held["profile"], rel=1e-3, abs=1e-5)
    other = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=4)
    xmil.save_model(other, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="restart"):
        xmil.insight(run, features=features, model=tmp_path / "model.safetensors", concepts=3)


NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return {"logits": self.head(x.relu().mean(dim=1))}


def build():
    return Net()
"""


def test_the_run_names_its_model_and_features(study: Path, looked: xmil.Run, tmp_path: Path) -> None:
    """The report is the same without naming them; naming them afterwards is no other setting."""
    options = {"cohort": study / "cohort.csv", "slides": study / "slides", "concepts": 3}
    plain = xmil.insight_slides(study / "run", out=tmp_path / "plain", **options)
    for name in ("concepts.csv", "removals.csv", "profiles.csv"):
        assert rows_of(plain, name) == rows_of(looked, name)
    named = {"features": study / "features", "model": study / "model.safetensors"}
    again = xmil.insight_slides(study / "run", out=tmp_path / "plain", **named, **options)
    assert again.settings == plain.settings


def test_a_network_of_your_own_has_concepts(study: Path, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    own = f"{tmp_path / 'nets.py'}:build"
    run = xmil.explain_slides(own, study / "features", out=tmp_path / "run", target="1")
    found = xmil.insight_slides(run, model=own, concepts=3, sanity=2)
    assert len(rows_of(found, "concepts.csv")) == 3
    assert len(rows_of(found, "removals.csv")) > 0
    assert rows_of(xmil.insight_slides(run, concepts=3, out=tmp_path / "without"), "concepts.csv") == []
