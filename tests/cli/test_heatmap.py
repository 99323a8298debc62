"""`xmil heatmap` from run folder to files: failures, resuming, styles, workers."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import xmil
from tests.heatmaps.tiles import read_tiles
from tests.slides.squares import boxes_of, explanation, grid, openslide, tifffile, write_scn, write_tiff
from xmil.cli._app import run as xmil_run
from xmil.core.task import Target
from xmil.heatmaps import Picture, caption
from xmil.storage import write_explanations

XY, EDGE = grid(4, 3, 100, at=(40, 30)), 100
NAMES = ("HPV-", "HPV+")
METHOD_KINDS = {"lrp": "better", "attention": "worse"}


@pytest.fixture
def place(tmp_path):
    """A run with three slides: one whole, one whose slide is broken, one without a slide; and the slides."""
    run, slides = tmp_path / "run", tmp_path / "wsi"
    (run / "slides").mkdir(parents=True)
    slides.mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        several = [
            explanation(XY, EDGE, scores=rng.normal(size=len(XY)), bag=name),
            explanation(
                XY, EDGE, scores=rng.uniform(size=len(XY)), method="attention", signed=False, bag=name
            ),
        ]
        write_explanations(several, run / "slides" / f"{name}.parquet")
    write_tiff(slides / "a.tif", (600, 480), boxes_of(XY, EDGE), mpp=0.5, steps=(2,))
    (slides / "b.svs").write_text("not a slide")
    (run / "run.json").write_text(json.dumps({"task": "classification", "class_names": NAMES}))
    rows = [
        ["slide_id", "label", "predicted", "correct", "p:HPV-", "p:HPV+"],
        ["a", "1", "0", "False", "0.71", "0.29"],
    ]
    (run / "slides.csv").write_text("\n".join(",".join(row) for row in rows) + "\n")
    return tmp_path


def heat(place: Path, *more: str, run: str = "run") -> int:
    return xmil_run(["heatmap", str(place / run), "--size", "200", "--config", "top=2", *more])


def test_anndata_of_a_run_and_a_folder_of_something_else(place, capsys):
    anndata = pytest.importorskip("anndata", reason="anndata is an extra")
    assert xmil_run(["export", str(place / "run"), "--to", "anndata"]) == 0
    table = anndata.read_h5ad(place / "run" / "export" / "anndata" / "a.h5ad")
    assert table.var_names.tolist() == ["lrp:HPV+", "attention:HPV+"]
    np.testing.assert_array_equal(table.obsm["spatial"], XY + EDGE / 2)
    np.testing.assert_array_equal(
        table.X[:, 0], xmil.Explanation.load(place / "run/slides/a.parquet", method="lrp").scores
    )
    capsys.readouterr()
    assert xmil_run(["export", str(place / "run"), "--to", "csv", "--out", str(place / "wsi")]) == 2
    assert "xmil export" in capsys.readouterr().err


def test_pictures_of_an_earlier_run_are_named(place, capsys):
    wanted = ("--pictures", "map", "--to", "png", "--methods", "lrp")
    heat(place, *wanted)
    assert "earlier run" not in capsys.readouterr().out
    for path in (place / "run" / "slides").iterdir():  # explained again, with the classes named otherwise
        other = explanation(XY, EDGE, bag=path.stem)
        write_explanations([replace(other, target=Target(1, name="other"))], path)
    heat(place, *wanted)
    assert (
        "3 files older than the explanations there, of an earlier run: map/a.lrp." in capsys.readouterr().out
    )
    heat(place, *wanted, run="run/slides/a.parquet")
    assert "3 files older" in capsys.readouterr().out  # not the new ones of other slides


def test_a_run(place, capsys):
    code = heat(
        place, "--slides", str(place / "wsi"), "--to", "geojson,scores,colours,csv,parquet,png,svg",
        "--pictures", "panel,overlay,side,patches,map",
    )  # fmt: skip
    told = capsys.readouterr().out
    assert code == 1
    assert "b: failed:" in told
    assert "b.svs" in told
    assert "c: failed:" in told
    assert "no slide named 'c'" in told
    out = place / "run" / "heatmaps"
    with (out / "failures.csv").open() as handle:
        assert [row["slide_id"] for row in csv.DictReader(handle)] == ["b", "c"]
    found = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert found == {
        ".lock", "ledger.jsonl", "run.json", "slides.csv", "failures.csv",
        "panel/a.png", "panel/a.svg", "geojson/a.geojson", "groovy/a.groovy", "csv/a.csv",
        "parquet/a.parquet", "scores/a.scores.ome.tif",
        *(f"colours/a.{m}.HPV+.colours.ome.tif" for m in ("lrp", "attention")),
        *(f"map/a.{m}.HPV+.png" for m in ("lrp", "attention")),
        *(
            f"{kind}/a.{m}.HPV+.{s}"
            for kind in ("overlay", "side", "patches")
            for m in ("lrp", "attention")
            for s in ("png", "svg")
        ),
    }  # fmt: skip
    np.testing.assert_array_equal(read_tiles(out / "geojson/a.geojson").boxes, boxes_of(XY, EDGE))
    table = pq.read_table(out / "parquet/a.parquet")
    assert table.column_names == ["x0", "y0", "x1", "y1", "lrp:HPV+", "attention:HPV+"]
    with (out / "csv/a.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    np.testing.assert_allclose(
        [float(row["lrp:HPV+"]) for row in rows], table["lrp:HPV+"].to_numpy(), rtol=1e-6
    )
    with openslide.OpenSlide(out / "colours/a.lrp.HPV+.colours.ome.tif") as slide:
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.5)
    assert tifffile.imread(out / "scores/a.scores.ome.tif").shape == (2, 480, 600)
    run = xmil.open_run(place / "run")
    facts = caption("a", run.rows["a"], class_names=run.class_names).facts()
    assert "label HPV+" in facts
    assert facts.endswith("predicted HPV- (p = 0.71), wrong")


def test_without_slides(place, capsys):
    assert heat(place, "--to", "png,geojson,scores") == 0
    out = place / "run" / "heatmaps"
    assert (out / "panel" / "b.png").is_file()
    assert not (out / "patches").exists()  # they are cut from slides
    assert tifffile.imread(out / "scores/c.scores.ome.tif").shape[-2:] == (330, 440)
    assert "3 slides" in capsys.readouterr().out


def test_resume_restart_and_style(place, capsys):
    panel = place / "run/heatmaps/panel/a.png"
    assert heat(place) == 0
    first = panel.stat().st_mtime_ns
    (place / "run/heatmaps/panel/b.png").unlink()
    capsys.readouterr()
    assert heat(place) == 0
    assert "1 file written" in capsys.readouterr().out
    assert panel.stat().st_mtime_ns == first
    assert heat(place, "--config", "alpha=0.9") == 2
    assert "alpha 0.5, not 0.9" in capsys.readouterr().err
    assert heat(place, "--config", "alpha=0.9", "--restart") == 0
    assert panel.stat().st_mtime_ns > first


def test_new_explanations_are_drawn_again(place):
    assert heat(place) == 0
    panel = place / "run/heatmaps/panel/a.png"
    before = panel.read_bytes()
    path = place / "run/slides/a.parquet"
    write_explanations([explanation(XY, EDGE, bag="a")], path)
    assert heat(place) == 0
    assert panel.read_bytes() != before


def test_one_scale_for_the_cohort(place):
    big = explanation(XY, EDGE, scores=np.linspace(-50, 50, len(XY)), bag="b")
    write_explanations([big], place / "run/slides/b.parquet")
    (place / "run/slides/c.parquet").unlink()
    common = ["--pictures", "map", "--to", "png", "--methods", "lrp", "--clip", "none"]
    assert heat(place, *common, "--out", str(place / "own")) == 0
    assert heat(place, *common, "--out", str(place / "all"), "--scale", "cohort") == 0
    strength = {}
    for which in ("own", "all"):
        pixels = np.asarray(_image(place / which / "map" / "a.lrp.HPV+.png")).astype(int)
        strength[which] = np.abs(pixels[..., 0] - pixels[..., 2]).max()
    assert strength["own"] > 120
    assert strength["all"] < 60


def _image(path):
    from PIL import Image

    return Image.open(path)


def test_one_explanation_file(place):
    out = place / "one"
    assert heat(place, "--out", str(out), run="run/slides/a.parquet") == 0
    assert (out / "panel" / "a.png").is_file()
    assert heat(place, run="run/slides/a.parquet") == 0
    assert (place / "run/heatmaps/panel/a.png").is_file()


def test_two_workers_draw_the_same(place):
    for workers in ("1", "2"):
        assert heat(place, "--out", str(place / workers), "--workers", workers, "--to", "png") == 0
    for path in (place / "1").rglob("*.png"):
        assert path.read_bytes() == (place / "2" / path.relative_to(place / "1")).read_bytes()


def test_choosing(place, capsys):
    held = explanation(XY, EDGE, bag="c")
    other = replace(held, target=Target(0, name="HPV-"))
    write_explanations([held, other], place / "run/slides/c.parquet")
    common = ["--pictures", "overlay", "--to", "png"]
    assert heat(place, *common, "--names", "a", "--methods", "attention") == 0
    assert [p.name for p in (place / "run/heatmaps/overlay").iterdir()] == ["a.attention.HPV+.png"]
    assert heat(place, *common, "--out", str(place / "neg"), "--target", "HPV-") == 0
    assert [p.name for p in (place / "neg/overlay").iterdir()] == ["c.lrp.HPV-.png"]
    assert heat(place, "--names", "z") == 2
    assert heat(place, "--target", "HPV") == 2
    assert "Did you mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--clip", "box"], "--clip must be whiskers, none, or a percentile"),
        (["--scale", "all"], "--scale must be"),
        (["--config", "alpha=2"], "alpha must be"),
        (["--size", "0"], "--size must be"),
        (["--config", "region=1,2,3"], "region must be"),
        (["--pictures", "poster"], "Unknown picture"),
        (["--to", "bmp"], "Unknown export"),
        (["--to", "png,xml"], "Unknown export"),
        (["--to", "none"], "nothing to draw"),
        (["--config", "frame=x"], "Unknown frame"),
        (["--slides", "/nowhere"], "no such file or folder"),
        (["--methods", "lrpp"], "Unknown method 'lrpp'. Did you mean"),
        (
            ["--pictures", "side,patches", "--to", "png"],
            "side and patches cannot be drawn without --slides",
        ),
    ],
)
def test_bad_arguments(place, capsys, options, words):
    assert heat(place, *options) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert len(told.err.strip().splitlines()) == 1
    assert "failed" not in told.out


def test_patches_beyond_the_scale_are_told_once(place, capsys):
    tailed = np.where(np.arange(len(XY)) < 3, 50.0, np.linspace(0, 0.1, len(XY)))
    for name in ("a", "c"):
        write_explanations(
            [explanation(XY, EDGE, scores=tailed, bag=name)], place / "run" / "slides" / f"{name}.parquet"
        )
    drawn = ("--pictures", "map", "--to", "png")
    told = "a, c: up to 25 % of the patches lie beyond the colour scale and share its full colour"
    same = "--pictures map --to png --size 200 --config top=2"
    way = f"xmil heatmap {place / 'run'} {same} --clip none --restart tells them apart."
    for _ in range(2):  # also where the pictures are there already
        assert heat(place, *drawn) == 0
        assert capsys.readouterr().out.count(f"{told}; {way}") == 1
    with (place / "run" / "heatmaps" / "slides.csv").open() as handle:
        assert [float(row["beyond_scale"]) for row in csv.DictReader(handle)] == [0.25, 0.0, 0.25]
    assert heat(place, *drawn, "--clip", "none", "--restart") == 0
    assert heat(place, "--pictures", "none", "--to", "csv", "--out", str(place / "tables")) == 0
    assert "patches lie beyond" not in capsys.readouterr().out


def test_the_proposed_command_draws_over_the_same_slides(place, capsys):
    tailed = np.where(np.arange(len(XY)) < 3, 50.0, np.linspace(0, 0.1, len(XY)))
    write_explanations([explanation(XY, EDGE, scores=tailed, bag="a")], place / "run/slides/a.parquet")
    out = place / "my maps"
    region = "40.0,30.0,400.0,300.0"
    options = ("--pictures", "side,map", "--to", "png", "--names", "a", "--config", f"region={region}",
               "--config", "alpha=0.4")  # fmt: skip
    assert heat(place, "--slides", str(place / "wsi"), "--out", str(out), *options) == 0
    before = {path: np.asarray(_image(path)) for path in out.glob("map/*.png")}
    line = next(text for text in capsys.readouterr().out.splitlines() if "beyond" in text)
    command = line.partition("; xmil ")[2].removesuffix(" tells them apart.")
    words = shlex.split(command)
    looks = {f"region={region}", "alpha=0.4"}
    assert {str(place / "wsi"), str(out), *looks, "side,map", "200"} < set(words)
    assert xmil_run(words) == 0
    for path, pixels in before.items():
        after = np.asarray(_image(path))
        assert after.shape == pixels.shape
        assert (after != pixels).any()  # another scale
    about = json.loads((out / "run.json").read_text())
    assert about["slides"] == str((place / "wsi").resolve())
    assert about["settings"]["clip"] == "none"


def test_pictures_over_slides_are_not_replaced_by_pictures_without(place, capsys):
    wanted = ("--names", "a", "--to", "png", "--pictures", "overlay")
    assert heat(place, *wanted, "--slides", str(place / "wsi")) == 0
    drawn = {path: path.read_bytes() for path in (place / "run/heatmaps/overlay").iterdir()}
    for more in ((), ("--restart",), ("--clip", "none", "--restart")):
        assert heat(place, *wanted, *more) == 2
        refused = capsys.readouterr().err
        assert f"--slides {place / 'wsi'}" in refused
        assert "--out" in refused
    assert heat(place, "--names", "a", "--to", "csv") == 0  # no pictures; the others stay as they are known
    assert heat(place, *wanted) == 2
    assert drawn == {path: path.read_bytes() for path in drawn}
    assert heat(place, *wanted, "--out", str(place / "alone")) == 0
    assert heat(place, *wanted, "--out", str(place / "alone"), "--slides", str(place / "wsi")) == 0


def test_pictures_that_need_the_slide_are_not_dropped_in_silence(place, capsys):
    assert heat(place, "--pictures", "panel,patches,side", "--to", "png") == 0
    assert "patches and side cannot be drawn without --slides; left out." in capsys.readouterr().out
    assert not (place / "run/heatmaps/patches").exists()


def _all_targets(place, name, logits):
    """Both classes, signed by lrp, and attention that is the same for both; as `--target all` writes."""
    held = replace(explanation(XY, EDGE, bag=name), logits=np.array(logits, dtype=np.float32))
    negative = replace(held, target=Target(0, name="HPV-"), scores=-held.scores)
    free = replace(held, method="attention", signed=False, scores=np.abs(held.scores))
    several = [negative, held, replace(free, target=negative.target), free]
    write_explanations(several, place / "run/slides" / f"{name}.parquet")
    return held


def test_the_predicted_class(place, capsys):
    for name, logits in (("a", (0.1, 2.0)), ("b", (2.0, 0.1))):
        _all_targets(place, name, logits)
    write_explanations([explanation(XY, EDGE, bag="c")], place / "run/slides/c.parquet")
    common = ["--pictures", "overlay", "--to", "png", "--methods", "lrp"]
    assert heat(place, *common, "--target", "predicted") == 0
    found = sorted(path.name for path in (place / "run/heatmaps/overlay").iterdir())
    assert found == ["a.lrp.HPV+.png", "b.lrp.HPV-.png", "c.lrp.HPV+.png"]
    assert heat(place, *common, "--target", "all", "--names", "a", "--out", str(place / "all")) == 0
    assert len(list((place / "all/overlay").iterdir())) == 2


def test_tiles_are_classed_by_the_predicted_class(place):
    held = _all_targets(place, "a", (0.1, 2.0))
    assert heat(place, "--pictures", "none", "--names", "a") == 0
    classes = read_tiles(place / "run/heatmaps/geojson/a.geojson").classes
    wanted = [f"{'supports' if score > 0 else 'speaks against'} HPV+" for score in held.scores]
    assert list(classes) == wanted


def test_attention_for_every_class_is_drawn_once(place):
    _all_targets(place, "a", (0.1, 2.0))
    assert heat(place, "--pictures", "overlay", "--to", "png,geojson,parquet", "--names", "a") == 0
    columns = {"lrp:HPV-", "lrp:HPV+", "attention:all classes"}
    out = place / "run/heatmaps"
    assert set(read_tiles(out / "geojson/a.geojson").measurements) == columns
    assert set(pq.read_table(out / "parquet/a.parquet").column_names[4:]) == columns
    assert {path.name for path in (out / "overlay").iterdir()} == {
        f"a.{column.replace(':', '.').replace(' ', '_')}.png" for column in columns
    }


def test_each_picture_has_the_verdict_on_the_map_it_draws(place, monkeypatch):
    """The first target of the slide's file was tested, with these methods."""
    _all_targets(place, "a", (0.1, 2.0))
    rows = [{"method": m, "kind": k, "srg": 0.4, "cases": 12} for m, k in METHOD_KINDS.items()]
    about = {"kind": "better", "method": "lrp", "methods": rows, "cases": list("abcdefghijkl")}
    (place / "run/run.json").write_text(json.dumps({"class_names": NAMES, "verdict": about}))
    texts: dict[str, list[str]] = {}

    def write(picture: Picture, path: Path, *_: object) -> None:
        texts[f"{path.parent.name}/{path.name}"] = [text.get_text() for text in picture.texts]

    monkeypatch.setattr(Picture, "write", write)
    options = ("--slides", str(place / "wsi"), "--names", "a", "--to", "png")
    assert heat(place, "--pictures", "overlay,side,patches,panel", *options) == 0
    words = {
        "lrp.HPV-": "LRP map better than a random order over 12 cases (SRG 0.40)",
        "lrp.HPV+": "LRP map not tested",
        "attention.all_classes": "Attention map worse than a random order over 12 cases (SRG 0.40)",
    }
    for column, sentence in words.items():
        for kind in ("overlay", "side", "patches"):
            about_maps = [text for text in texts[f"{kind}/a.{column}.png"] if " map " in text]
            assert about_maps == [sentence]
    assert [text for text in texts["panel/a.png"] if " map " in text] == list(words.values())


def test_pictures_are_drawn_again_when_the_verdict_changes(place):
    wanted = ("--names", "a", "--pictures", "panel", "--to", "png")
    assert heat(place, *wanted) == 0
    panel = place / "run/heatmaps/panel/a.png"
    before = panel.read_bytes()
    about = {"kind": "better", "method": "lrp", "methods": [{"method": "lrp", "kind": "better", "srg": 0.4}]}
    (place / "run/run.json").write_text(json.dumps({"class_names": NAMES, "verdict": about}))
    assert heat(place, *wanted) == 0
    assert panel.read_bytes() != before


def test_a_slide_of_another_size_is_refused(place, capsys):
    """Even where all patches lie on it: the features' file told the size."""
    held = replace(explanation(XY, EDGE, bag="a"), slide_size=(600, 480))
    path = place / "run/slides/a.parquet"
    write_explanations([held], path)
    common = ["--slides", str(place / "wsi"), "--pictures", "overlay", "--to", "png", "--names", "a"]
    assert heat(place, *common) == 0
    write_explanations([replace(held, slide_size=(500, 480))], path)
    assert heat(place, *common, "--restart") == 2
    assert "has 600 x 480 px; the explained slide has 500 x 480" in capsys.readouterr().out
    far = np.concatenate([XY, [[5000, 5000]]])
    write_explanations([explanation(far, EDGE, bag="a")], path)
    assert heat(place, *common, "--restart") == 0
    assert "12 of 13 patches lie on this slide" in capsys.readouterr().out


def test_two_slides_of_one_name_take_a_line(place, capsys):
    (place / "run/slides/b.parquet").unlink()
    write_explanations([explanation(XY, EDGE, bag="a")], place / "run/slides/b2.parquet")
    write_tiff(place / "wsi/b2.tif", (600, 480), boxes_of(XY, EDGE), mpp=0.5, steps=(2,))
    (place / "wsi/a.svs").write_text("not a slide")
    common = ["--pictures", "overlay", "--to", "png"]
    assert heat(place, "--slides", str(place / "wsi"), *common) == 1
    told = capsys.readouterr().out
    assert told.count("the slide 'a'") == 1
    assert "1 slide: 1 file written" in told


def test_no_run(tmp_path, capsys):
    assert xmil_run(["heatmap", str(tmp_path)]) == 2
    assert "no explanations here" in capsys.readouterr().err
    assert xmil_run(["heatmap", str(tmp_path / "none")]) == 2


def test_a_damaged_file_does_not_stop_the_rest(place, capsys):
    (place / "run/slides/b.parquet").write_bytes(b"PAR1 nonsense")
    assert heat(place, "--scale", "cohort", "--to", "png", "--target", "HPV+") == 1
    assert "b.parquet: not a readable Parquet file" in capsys.readouterr().out


def test_patches_that_wait_for_the_slide(place):
    """Microns are placed by the slide's mpp; without it the line says what is missing."""
    um = XY * 0.5
    e = explanation(None, None, raw_coords=um.astype(float), unit="um", raw_edge=50.0, bag="a")
    for name in "bc":
        (place / f"run/slides/{name}.parquet").unlink()
    write_explanations([e], place / "run/slides/a.parquet")
    assert heat(place) == 2
    assert heat(place, "--slides", str(place / "wsi"), "--pictures", "overlay") == 0
    np.testing.assert_array_equal(
        read_tiles(place / "run/heatmaps/geojson/a.geojson").boxes, boxes_of(XY, EDGE)
    )


@pytest.mark.parametrize(("frame", "corner"), [("bounds", (40, 30)), ("level0", (141, 87))])
def test_exports_count_as_qupath_does(place, frame, corner):
    """On a slide with a bounds offset QuPath begins at the bounds; so do the files by default."""
    xy = XY + np.array([101, 57])
    for name in "bc":
        (place / f"run/slides/{name}.parquet").unlink()
    write_explanations([explanation(xy, EDGE, bag="a")], place / "run/slides/a.parquet")
    (place / "wsi/a.tif").unlink()
    bounds, size = (101, 57, 603, 481), (900, 800)
    write_scn(place / "wsi/a.scn", size, boxes_of(xy, EDGE), mpp=0.25, bounds=bounds)
    out = place / frame
    options = ["--slides", str(place / "wsi"), "--to", "geojson,scores,csv"]
    assert heat(place, *options, "--config", f"frame={frame}", "--out", str(out)) == 0
    held = json.loads((out / "geojson/a.geojson").read_text())
    assert held["features"][0]["geometry"]["coordinates"][0][0] == list(corner)
    np.testing.assert_array_equal(read_tiles(out / "geojson/a.geojson").boxes, boxes_of(xy, EDGE))
    painted = np.squeeze(tifffile.imread(out / "scores/a.scores.ome.tif"))
    assert painted.shape == ((481, 603) if frame == "bounds" else (800, 900))
    rows, columns = np.nonzero(~np.isnan(painted))
    assert (columns.min(), rows.min()) == corner
    with (out / "csv/a.csv").open() as handle:
        assert next(csv.DictReader(handle))["x0"] == "141"


def test_drawing_needs_no_torch(place):
    code = (
        "import sys, xmil; from xmil.heatmaps import draw_slide; from xmil.storage import read_explanations;"
        f"xmil.heatmap(read_explanations({str(place / 'run/slides/a.parquet')!r}), size=100);"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
