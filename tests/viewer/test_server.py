"""What the server says is what the files hold; what is wrong with one file stays with it."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.viewer.asking import app_of, ask, pixels
from tests.viewer.make_run import Made, make_bag, make_run, patch_colours, write_slide
from xmil.core.bag import Bag
from xmil.core.explanation import Explanation
from xmil.core.task import Target
from xmil.data import read_bag
from xmil.storage import read_explanations, write_explanations
from xmil.viewer.app import create_app
from xmil.viewer.cache import Cache, Files
from xmil.viewer.collection import Collection
from xmil.viewer.deepzoom import OpenSlides, Pictures, full_level


def test_run_lists_the_slides_of_the_table(app: Any, made: Made) -> None:
    found = ask(app, "/api/run.json").json
    with (made.runs[0] / "slides.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [slide["id"] for slide in found["slides"]] == [row["slide_id"] for row in rows] == made.names
    assert [slide["key"] for slide in found["slides"]] == list(range(len(rows)))
    for slide, row in zip(found["slides"], rows, strict=True):
        assert (slide["case"], slide["label"], slide["predicted"]) == (
            row["case_id"],
            row["label"],
            row["predicted"],
        )
        assert slide["correct"] == (row["correct"] == "True")
        assert slide["probability"] == float(row[f"p:{row['predicted']}"])
        assert (slide["n"], slide["image"], slide["error"]) == (96, True, None)
        paper = json.loads((made.runs[0] / "certificates" / f"{slide['id']}.json").read_text())
        assert slide["verdict"] == paper["methods"][0]["verdict"]
    assert (found["live"], found["whatif"], found["similar"]) == (True, True, True)
    assert [run["name"] for run in found["runs"]] == ["run-attnmil", "run-transmil"]
    assert str(made.slides.parent) not in json.dumps(found)  # no path of the machine


@pytest.mark.parametrize("run", [0, 1])
def test_slide_and_evidence_are_the_files(app: Any, made: Made, run: int) -> None:
    slide = ask(app, "/api/slides/1/slide.json").json
    found = slide["sets"][run]
    stored = read_explanations(made.runs[run] / "slides" / "slide-1.parquet")
    assert [c["name"] for c in found["columns"]] == [e.column for e in stored]
    assert [c["target"] for c in found["columns"]] == [str(e.target) for e in stored]
    assert [c["signed"] for c in found["columns"]] == [e.signed for e in stored]
    assert [c["audit"] for c in found["columns"]] == [e.audit and e.audit.as_dict() for e in stored]
    assert found["logits"] == pytest.approx(stored[0].logits)
    assert sum(found["probabilities"]) == pytest.approx(1)
    assert (found["run"], found["n"], found["edge"], found["placed"]) == (run, 96, 256, True)
    size = {"width": 3072, "height": 2048, "tile_size": 256, "overlap": 0, "levels": 13}
    assert slide["image"] == {**size, "finest": 12, "bounds": [0, 0, 3072, 2048]}
    assert slide["mpp"] == pytest.approx(0.5)

    answer = ask(app, f"/api/slides/1/evidence-{run}.bin")
    assert answer.headers["content-type"] == "application/octet-stream"
    n = found["n"]
    corners = np.frombuffer(answer.body[: 8 * n], dtype="<i4").reshape(2, n)
    scores = np.frombuffer(answer.body[8 * n :], dtype="<f4").reshape(len(stored), n)
    np.testing.assert_array_equal(corners.T, stored[0].coords)
    np.testing.assert_array_equal(scores, np.stack([e.scores for e in stored]))


def test_certificate_carries_curves_and_band(app: Any, made: Made) -> None:
    paper = ask(app, "/api/slides/0/slide.json").json["sets"][0]["certificate"]
    rows = pq.read_table(made.runs[0] / "results" / "slide-0.parquet").to_pylist()
    assert [m["method"] for m in paper["methods"]] == [row["method"] for row in rows]
    for method, row in zip(paper["methods"], rows, strict=True):
        assert method["morf"] == row["morf"]
        assert len(method["morf"]) == len(paper["random_band"]["mean"])
        assert method["sentence"]
        assert method["aupc"] == pytest.approx(np.mean(method["morf"]))


def test_certificate_of_another_run_of_the_same_model(made: Made, tmp_path: Path) -> None:
    by_case = tmp_path / "by-case"
    shutil.copytree(made.runs[0], by_case)
    shutil.rmtree(by_case / "certificates")
    about = json.loads((by_case / "run.json").read_text())
    (by_case / "run.json").write_text(json.dumps({**about, "settings": {"by": "case"}}))
    bare = tmp_path / "explained"
    shutil.copytree(made.runs[0], bare)
    shutil.rmtree(bare / "certificates")
    app = create_app(Collection([bare, made.runs[1], made.runs[0], by_case]))
    sets = ask(app, "/api/slides/0/slide.json").json["sets"]
    assert sets[0]["certificate"] == sets[2]["certificate"] is not None
    assert sets[0]["certificate"] != sets[1]["certificate"]
    assert sets[3]["certificate"] is None  # other bags, other predictions
    alone = create_app(Collection([bare]))
    assert ask(alone, "/api/slides/0/slide.json").json["sets"][0]["certificate"] is None


def test_another_slide_of_the_name_is_told(made: Made, tmp_path: Path) -> None:
    ids = [row["id"] for row in ask(create_app(Collection(made.runs)), "/api/run.json").json["slides"]]
    Image.new("RGB", (1500, 1000), "pink").save(tmp_path / f"{ids[0]}.png")
    shown = Collection(made.runs[:1], slides=tmp_path, mpp=0.5)
    error = ask(create_app(shown), "/api/slides/0/slide.json").json["error"]
    assert re.search(r"\d+ of 96 patches of the run .* lie outside this slide of 1500 x 1000 px", error)
    right = Collection(made.runs[:1], slides=made.slides)
    assert ask(create_app(right), "/api/slides/0/slide.json").json["error"] is None


def test_runs_of_one_name_are_told_apart(made: Made, tmp_path: Path) -> None:
    for kind in ("explain", "evaluate"):
        shutil.copytree(made.runs[0], tmp_path / kind / "model")
    folders = [tmp_path / "explain" / "model", tmp_path / "evaluate" / "model", made.runs[1]]
    runs = ask(create_app(Collection(folders)), "/api/run.json").json["runs"]
    assert [run["name"] for run in runs] == ["explain/model", "evaluate/model", made.runs[1].name]


def test_tiles_show_the_patches_in_place(app: Any) -> None:
    colours = patch_colours(96, seed=2)
    for index in (0, 17, 95):
        row, column = divmod(index, 12)
        tile = pixels(ask(app, f"/tiles/2/12/{column}_{row}.jpeg").body)
        assert tile.shape == (256, 256, 3)
        assert np.abs(tile - colours[index]).max() <= 4  # JPEG of one colour
        half = pixels(ask(app, f"/tiles/2/11/{column // 2}_{row // 2}.jpeg").body)
        y, x = 128 * (row % 2) + 64, 128 * (column % 2) + 64
        assert np.abs(half[y, x] - colours[index]).max() <= 6
        patch = pixels(ask(app, f"/api/slides/2/patch-0-{index}.jpeg").body)
        assert patch.shape == (256, 256, 3)
        assert np.abs(patch - colours[index]).max() <= 4


def test_every_level_has_its_tiles_and_nothing_beyond(app: Any) -> None:
    sizes = []
    for level in range(13):
        width, height = (-(-edge // 2 ** (12 - level)) for edge in (3072, 2048))
        columns, rows = -(-width // 256), -(-height // 256)
        last = pixels(ask(app, f"/tiles/0/{level}/{columns - 1}_{rows - 1}.jpeg").body)
        sizes.append((width, height))
        assert last.shape[:2] == (height - 256 * (rows - 1), width - 256 * (columns - 1))
        assert ask(app, f"/tiles/0/{level}/{columns}_0.jpeg").status == 404
        assert ask(app, f"/tiles/0/{level}/0_{rows}.jpeg").status == 404
    assert ask(app, "/tiles/0/13/0_0.jpeg").status == 404
    thumbnail = pixels(ask(app, "/api/slides/0/thumbnail.jpeg").body)
    assert thumbnail.shape[:2] == sizes[8][::-1]


def test_slide_without_coarse_levels_is_put_together(tmp_path: Path) -> None:
    """A tile far from the slide's own levels is made from finer tiles and shows the same picture."""
    import tifffile

    ramp = np.broadcast_to(np.linspace(0, 255, 4999)[None, :, None], (3001, 4999, 3)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "flat.tif", ramp, tile=(256, 256), photometric="rgb")
    shown = Pictures(tmp_path)
    small = pixels(shown.thumbnail("flat"))
    assert small.shape[:2] == (94, 157)
    np.testing.assert_allclose(small[40, :, 0], np.linspace(0, 255, 157), atol=5)
    assert pixels(shown.tile("flat", 0, 0, 0)).shape == (1, 1, 3)
    shown.close()


def test_real_slide(data_dir: Path, tmp_path: Path) -> None:
    """A scanner's file: the tiles are the pixels that OpenSlide reads."""
    openslide = pytest.importorskip("openslide")
    folder = data_dir / "slides"
    shown = Pictures(folder)
    facts, error = shown.describe("CMU-1-Small-Region")
    assert error is None
    assert facts is not None
    assert (facts["image"]["width"], facts["mpp"]) == (2220, pytest.approx(0.499))
    tile = pixels(shown.tile("CMU-1-Small-Region", facts["image"]["finest"], 4, 5))
    with openslide.OpenSlide(str(folder / "CMU-1-Small-Region.svs")) as slide:
        assert {"label", "macro", "thumbnail"} >= set(slide.associated_images)
        region = np.asarray(slide.read_region((1024, 1280), 0, (256, 256)).convert("RGB")).astype(int)
    assert np.abs(tile - region).mean() < 4
    shown.close()


def test_without_slides_the_evidence_stands_alone(made: Made) -> None:
    app = create_app(Collection(made.runs))
    assert not any(slide["image"] for slide in ask(app, "/api/run.json").json["slides"])
    slide = ask(app, "/api/slides/0/slide.json").json
    assert (slide["image"], slide["error"], slide["mpp"]) == (None, None, 0.5)
    assert len(ask(app, "/api/slides/0/evidence-0.bin").body) == 96 * 4 * 8
    missing = ask(app, "/tiles/0/8/0_0.jpeg")
    assert missing.status == 404
    assert "slides=" in missing.json["error"]


def test_slides_that_no_run_explains_can_stand_beside(made: Made, tmp_path: Path) -> None:
    """Another stain in the slides' folder has a number and no evidence; the list does not show it."""
    shutil.copytree(made.slides, tmp_path / "slides")
    write_slide(tmp_path / "slides" / "ihc.tif", patch_colours(6).reshape(2, 3, 3), edge=64)
    app = create_app(Collection(made.runs, slides=tmp_path / "slides"))
    about = ask(app, "/api/run.json").json
    assert [slide["id"] for slide in about["slides"]] == made.names
    [other] = about["others"]
    assert other["id"] == "ihc"
    found = ask(app, f"/api/slides/{other['key']}/slide.json").json
    assert (found["image"]["width"], found["sets"], found["error"]) == (192, [], None)
    assert ask(app, f"/tiles/{other['key']}/8/0_0.jpeg").status == 200
    assert ask(app, f"/api/slides/{other['key'] + 1}/slide.json").status == 404
    assert ask(app, f"/api/slides/{other['key']}/evidence-0.bin").status == 404


def test_similar_patches_are_the_nearest_by_cosine(app: Any, made: Made) -> None:
    x = read_bag(made.features / "slide-1.h5").features.astype(np.float64)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    for index in (0, 50):
        cosines = unit @ unit[index]
        cosines[index] = -2
        expected = np.argsort(-cosines)[:12]
        found = ask(app, f"/api/slides/1/similar-0-{index}.json").json["neighbours"]
        assert [item["index"] for item in found] == expected.tolist()
        assert [item["similarity"] for item in found] == pytest.approx(cosines[expected], abs=1e-5)
    assert ask(app, "/api/slides/1/similar-0-96.json").status == 404
    assert ask(create_app(Collection(made.runs)), "/api/slides/1/similar-0-0.json").status == 404


def test_similar_of_a_bag_of_one(tmp_path: Path) -> None:
    made = make_run(tmp_path, slides=1, columns=1, rows=1, models=("attnmil",), certificates=False)
    app = create_app(Collection(made.runs, features=[made.features]))
    assert ask(app, "/api/slides/0/similar-0-0.json").json == {"neighbours": []}


def test_places_that_wait_for_the_mpp_of_the_slide(tmp_path: Path) -> None:
    (tmp_path / "run" / "slides").mkdir(parents=True)
    (tmp_path / "slides").mkdir()
    raw = np.array([[0.0, 0.0], [128.0, 64.0]])
    stored = Explanation(
        scores=np.array([1, -1], dtype=np.float32),
        logits=np.array([0.0, 1.0], dtype=np.float32),
        output=1.0,
        method="lrp",
        target=Target(1),
        signed=True,
        bag="s",
        raw_coords=raw,
        unit="um",
        raw_edge=64.0,
    )
    stored.save(tmp_path / "run" / "slides" / "s.parquet")
    loose = create_app(Collection([tmp_path / "run"]))
    found = ask(loose, "/api/slides/0/slide.json").json["sets"][0]
    assert (found["placed"], found["edge"]) == (False, None)
    assert len(ask(loose, "/api/slides/0/evidence-0.bin").body) == 2 * 4
    assert ask(loose, "/api/slides/0/patch-0-0.jpeg").status == 404

    write_slide(tmp_path / "slides" / "s.tif", patch_colours(4).reshape(2, 2, 3), mpp=0.5)
    placed = create_app(Collection([tmp_path / "run"], slides=tmp_path / "slides"))
    found = ask(placed, "/api/slides/0/slide.json").json["sets"][0]
    assert (found["placed"], found["edge"]) == (True, 128)
    body = ask(placed, "/api/slides/0/evidence-0.bin").body
    assert np.frombuffer(body[:16], "<i4").tolist() == [0, 256, 0, 128]


def test_the_browser_keeps_what_it_has(app: Any) -> None:
    for target in ("/api/run.json", "/api/slides/0/evidence-0.bin", "/tiles/0/8/0_0.jpeg"):
        tag = ask(app, target).headers["etag"]
        again = ask(app, target, headers={"If-None-Match": tag})
        assert (again.status, again.body) == (304, b"")
        assert ask(app, target, headers={"If-None-Match": '"other"'}).status == 200


def test_a_large_slide_is_whole(tmp_path: Path) -> None:
    """25,000 patches with six columns."""
    bag = make_bag("large", columns=200, rows=125, edge=256, seed=0)
    rng = np.random.default_rng(0)
    (tmp_path / "slides").mkdir()
    found = [
        Explanation(
            scores=rng.normal(size=len(bag)).astype(np.float32),
            logits=np.zeros(2, dtype=np.float32),
            output=0.0,
            method=method,
            target=Target(c),
            signed=True,
            coords=bag.coords,
            patch_size=256,
        )
        for method in ("lrp", "ig", "attention")
        for c in (0, 1)
    ]
    write_explanations(found, tmp_path / "slides" / "large.parquet")
    app = create_app(Collection([tmp_path]))
    assert ask(app, "/api/slides/0/slide.json").status == 200
    assert len(ask(app, "/api/slides/0/evidence-0.bin").body) == 25_000 * 4 * 8


def test_many_slides_are_listed_without_reading_them_again(
    fresh: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    source = fresh.runs[0] / "slides" / "slide-0.parquet"
    for i in range(500):
        os.link(source, fresh.runs[0] / "slides" / f"copy-{i}.parquet")
    app = app_of(fresh)
    ask(app, "/api/run.json")
    read: list[str] = []
    for name in ("read_metadata", "read_table", "ParquetFile"):
        monkeypatch.setattr(pq, name, lambda path, *_, **__: read.append(str(path)))
    assert len(ask(app, "/api/run.json").json["slides"]) == 502
    assert read == []


def test_looking_needs_no_torch(made: Made) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.viewer.asking import ask;"
        "from xmil.viewer.app import create_app; from xmil.viewer.collection import Collection;"
        f"app = create_app(Collection([Path({str(made.runs[0])!r})], slides=Path({str(made.slides)!r}),"
        f" features=[Path({str(made.features)!r})]));"
        "got = [ask(app, t).status for t in ('/api/run.json', '/api/slides/0/slide.json',"
        " '/tiles/0/9/0_0.jpeg', '/api/slides/0/evidence-0.bin', '/api/slides/0/similar-0-1.json')];"
        "assert got == [200] * 5, got; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_open_slides_are_few_and_closed_when_idle(made: Made) -> None:
    held = OpenSlides(limit=1)
    paths = sorted(made.slides.glob("*.tif"))
    with held.use(paths[0]) as first, held.use(paths[1]), held.use(paths[0]) as again:
        assert first is again
        assert len(held) == 2  # none in use is closed
        assert first.read_area((0, 0, 10, 10), (5, 5)).shape == (5, 5, 3)
    assert len(held) == 1
    held.close()
    assert len(held) == 0


def test_cached_results_are_bounded() -> None:
    cache: Cache[bytes] = Cache(100, len)
    for i in range(50):
        cache.put(i, b"x" * 30)
        assert cache.weight <= 100
    assert cache.get(49) is not None
    assert cache.get(0) is None
    cache.put(49, b"y")
    assert cache.weight == 30 * 2 + 1


def test_files_are_read_once_until_they_change(tmp_path: Path) -> None:
    path, reads = tmp_path / "a.txt", []

    def read(file: Path) -> str:
        reads.append(file)
        return file.read_text()

    files = Files(read, limit=4)
    path.write_text("one")
    assert [files.get(path), files.get(path)] == ["one", "one"]
    assert len(reads) == 1
    path.write_text("three")
    assert files.get(path) == "three"


def test_full_level() -> None:
    assert [full_level(*size) for size in ((1, 1), (2, 1), (3, 1), (256, 256), (257, 1))] == [0, 1, 2, 8, 9]


def test_bags_of_cases_answer_together(tmp_path: Path) -> None:
    """In a run by case, what-if sees the patches of all slides of the case."""
    import torch

    from xmil.models import load_model

    made = make_run(tmp_path, slides=2, columns=4, rows=3, edge=64, models=("attnmil",), certificates=False)
    table = (made.runs[0] / "slides.csv").read_text()
    for name in made.names:
        table = table.replace(f"case of {name}", "one case")
    (made.runs[0] / "slides.csv").write_text(table)
    about = json.loads((made.runs[0] / "run.json").read_text())
    (made.runs[0] / "run.json").write_text(json.dumps({**about, "settings": {"by": "case"}}))
    app = create_app(Collection(made.runs, features=[made.features]), models=made.models)
    body = json.dumps({"run": 0, "remove": [[0, 5]]}).encode()
    headers = {"content-type": "application/json"}
    found = ask(app, "/api/slides/1/whatif", method="POST", headers=headers, body=body).json
    bags: list[Bag] = [read_bag(made.features / f"{name}.h5") for name in made.names]
    whole = torch.from_numpy(np.concatenate([bag.features for bag in bags])).unsqueeze(0)
    net = load_model(made.models[0])
    kept = torch.ones(24, dtype=torch.bool)
    kept[12:17] = False
    with torch.no_grad():
        assert found["logits_before"] == pytest.approx(net(whole)[0].tolist(), abs=1e-5)
        assert found["logits_after"] == pytest.approx(net(whole[:, kept])[0].tolist(), abs=1e-5)
    assert found["n_left"] == 19
