"""Files and runs: every input is the one it was, every file that vanishes is named, nothing is lost.

The number in a test's name is that of the fault it was written for.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile

import xmil
from tests.runs.cohorts import (
    NAMES,
    WIDTH,
    bytes_of,
    command,
    make_cohort,
    make_model,
    table,
    write_slide,
)
from tests.slides.pyramids import textured, write_pyramid
from tests.training.cohorts import config_of, write_cohort
from xmil.cli._app import run
from xmil.core.durable import identity, unchanged
from xmil.core.errors import FileError, InputError, StopError
from xmil.core.explanation import Audit
from xmil.data.bags import Case
from xmil.data.files import feature_facts
from xmil.execute import step
from xmil.execute.workers import Workers
from xmil.heatmaps.words import NOTE
from xmil.methods.lrp import account_warnings
from xmil.runs.ensemble import Ensemble
from xmil.runs.inputs import training_overlap_warning
from xmil.slides.open import slide_files
from xmil.storage import lock_folder

MEAN = "tests.encoders.builders:network"


def replaced(path: Path, make: Any) -> None:
    """Another file of the same size and time in the place of one."""
    before = path.stat()
    make(path)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_features(path: Path, *, n: int = 20) -> None:
    write_slide(path, np.random.default_rng(99), n)


# 13: how features were made


def embedded(folder: Path, name: str, *, encoder: str, weights: str | None, **more: Any) -> Path:
    """A feature file as `xmil embed` writes it."""
    rng = np.random.default_rng(0)
    made = {"name": encoder, "weights": None if weights is None else f"w.pt, sha256 {weights}", **more}
    extra = {"patch_size": 256, "encoder": made}
    xy = 256 * np.stack(np.divmod(np.arange(12), 4), axis=1)
    bag = xmil.Bag(
        rng.normal(size=(12, WIDTH)).astype(np.float32), coords=xy, patch_size=256, mpp=0.5,
        encoder=encoder, extra=extra,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    xmil.write_bag(bag, folder / f"{name}.h5")
    return folder / f"{name}.h5"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"encoder": "uni", "weights": "a" * 16}, None),
        ({"encoder": "mine", "weights": "a" * 16}, None),
        ({"encoder": "uni", "weights": "b" * 16}, "an encoder with the weights bbbb"),
        ({"encoder": "conch", "weights": None}, "those of 'conch'"),
        ({"encoder": "uni", "weights": "a" * 16, "stain_norm": True}, "stain normalisation on"),
        ({"encoder": "uni", "weights": "a" * 16, "precision": "float16"}, "may differ"),
    ],
)
def test_item_13_features_of_other_weights_or_making(
    given: dict[str, Any], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"weights": "a" * 16, "patch_px": 256, "mpp": 0.5, "stain_norm": False, "precision": "float32"}
    make_model(tmp_path / "m.safetensors", encoder="uni", features=known)
    assert xmil.load_model(tmp_path / "m.safetensors").spec.features == known
    embedded(tmp_path / "features", "s0", **{"stain_norm": False, "precision": "float32", **given})
    for name, more in (("explain", []), ("predict", []), ("evaluate", ["--methods", "lrp", "--steps", "4"])):
        places = ["--model", str(tmp_path / "m.safetensors"), "--features", str(tmp_path / "features")]
        assert run([name, *places, "--out", str(tmp_path / name), *more]) == 0
        told = capsys.readouterr().out
        assert ("warning" in told) == (said is not None), told
        assert said is None or said in told
        assert bool(xmil.open_run(tmp_path / name).warnings) == (said is not None)


def test_item_13_other_patches_of_the_same_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "m.safetensors", encoder="uni", features={"patch_px": 512, "mpp": 1.0})
    path = embedded(tmp_path / "features", "s0", encoder="uni", weights=None)
    assert feature_facts(xmil.open_bag(path)) == {"encoder": "uni", "patch_px": 256, "mpp": 0.5}
    places = ["--model", str(tmp_path / "m.safetensors"), "--features", str(path)]
    assert run(["explain", *places, "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "patches of 512 px, but 1 slide has those of patches of 256 px" in told
    assert "patches at 1.0 µm/px, but 1 slide has those of patches at 0.5 µm/px" in told


def test_item_13_training_stores_how_its_features_were_made(tmp_path: Path) -> None:
    folder = write_cohort(tmp_path, n=20, encoder=None)
    for path in (folder / "features").iterdir():
        bag = xmil.read_bag(path)
        made = {"weights": "w.pt, sha256 " + "c" * 16, "stain_norm": False}
        extra = {"encoder": made, "patch_size": 224}
        xmil.write_bag(xmil.Bag(bag.features, encoder="uni", extra=extra), path)
    xmil.train(config_of(folder, train={"epochs": 1}))
    spec = xmil.load_model(folder / "out" / "model" / "model.safetensors").spec
    assert spec.encoder == "uni"
    assert dict(spec.features or {}) == {"weights": "c" * 16, "stain_norm": False, "patch_px": 224}
    made = {"weights": "w.pt, sha256 " + "d" * 16}
    first = sorted((folder / "features").iterdir())[0]
    bag = xmil.Bag(xmil.read_bag(first).features, encoder="uni", extra={"encoder": made})
    xmil.write_bag(bag, first)
    with pytest.raises(InputError, match="use one encoder"):
        xmil.train(config_of(folder, out=str(folder / "mixed"), train={"epochs": 1}))


# 14: links


def linked(folder: Path) -> Path:
    """Three links to feature files elsewhere, and one file."""
    make_cohort(folder, 4)
    (folder / "store").mkdir()
    for i in range(3):
        path = folder / "features" / f"s{i:03}.h5"
        shutil.move(path, folder / "store" / path.name)
        path.symlink_to(folder / "store" / path.name)
    return folder


@pytest.mark.parametrize("name", ["explain", "predict", "evaluate"])
def test_item_14_linked_feature_files_are_followed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = linked(tmp_path)
    more = ["--methods", "lrp", "--steps", "4"] if name == "evaluate" else []
    assert run([name, *command(folder, *more)[1:]]) == 0
    assert len(xmil.open_run(folder / "run")) == 4
    capsys.readouterr()
    assert run([name, *command(folder, *more, "--no-follow-links", out="alone")[1:]]) == 0
    assert "3 links not followed" in capsys.readouterr().out
    assert len(xmil.open_run(folder / "alone")) == 1


def test_item_14_a_link_that_leads_nowhere_fails_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = linked(tmp_path)
    (folder / "store" / "s001.h5").unlink()
    loop = folder / "features" / "s002.h5"
    loop.unlink()
    loop.symlink_to(loop)
    places = ["--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    assert run(["explain", *places, "--out", str(folder / "run")]) == 1
    assert "2 explained, 0 already done, 2 failed" in capsys.readouterr().out
    assert set(xmil.open_run(folder / "run").failed) == {"s001", "s002"}


def test_item_14_training_follows_links(tmp_path: Path) -> None:
    folder = write_cohort(tmp_path, n=20)
    shutil.move(folder / "features", folder / "store")
    (folder / "features").mkdir()
    for path in (folder / "store").iterdir():
        (folder / "features" / path.name).symlink_to(path)
    xmil.train(config_of(folder, train={"epochs": 1}))
    assert json.loads((folder / "out" / "run.json").read_text())["bags"]["count"] == 20
    data = {"follow_links": False}
    with pytest.raises(InputError, match="20 links not followed"):
        xmil.train(config_of(folder, out=str(folder / "none"), data=data, train={"epochs": 1}))


def test_item_14_slides_in_linked_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of slides on another disk, a loop, and a link to nothing."""
    slides, store = tmp_path / "slides", tmp_path / "store"
    slides.mkdir()
    store.mkdir()
    pixels = textured([(0, 0, 256, 256)], (256, 256))
    write_pyramid(store / "a.tif", pixels, tile=(64, 64))
    write_pyramid(slides / "b.tif", pixels, tile=(64, 64))
    (slides / "far").symlink_to(store)
    (slides / "loop").symlink_to(slides)
    (slides / "gone.svs").symlink_to(tmp_path / "nothing.svs")
    files, left = slide_files(slides)
    assert [path.name for path in files] == ["b.tif", "a.tif"]
    assert [path.name for path in left] == ["gone.svs", "loop"]
    assert run(["tile", str(slides), "--out", str(tmp_path / "tiles"), "--size", "64"]) == 0
    told = capsys.readouterr().out
    assert "on 2 slides" in told
    assert told.count("a link that was not followed") == 2
    options = ["--out", str(tmp_path / "near"), "--size", "64", "--no-follow-links"]
    assert run(["tile", str(slides), *options]) == 0
    told = capsys.readouterr().out
    assert "on 1 slide," in told
    assert "far: a link that was not followed" in told


def test_item_14_a_runs_folder_is_read_without_links(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder)) == 0
    stolen = folder / "run" / "slides" / "s000.parquet"
    shutil.move(stolen, folder / "away.parquet")
    stolen.symlink_to(folder / "away.parquet")
    with pytest.raises(FileError, match="without following links"):
        xmil.open_run(folder / "run").explanation("s000")
    assert run(["heatmap", str(folder / "run"), "--pictures", "map", "--to", "png"]) == 1
    assert "without following links" in xmil.open_run(folder / "run" / "heatmaps").failed["s000"]


# 15: slides of the training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training on some rows of a table; the others have no split."""
    folder = write_cohort(tmp_path_factory.mktemp("trained"), n=20)
    lines = (folder / "cohort.csv").read_text().splitlines()
    lines = [line.rsplit(",", 1)[0] + "," if line.startswith(("s0,", "s1,")) else line for line in lines]
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    xmil.train(config_of(folder, train={"epochs": 1}))
    return folder / "out" / "model" / "model.safetensors"


@pytest.mark.parametrize(
    ("slide", "case", "said"),
    [
        ("s2", "c2", "1 of the 1 bag here was in the training of a model"),
        ("s2.svs", "c2", "1 of the 1 bag here was in the training of a model"),
        ("s2", None, "1 of the 1 bag here was in the training of a model"),
        ("s8", "c8", None),  # of the test split
        ("s0", "c0", None),  # took no part
        ("new", "new", None),
        ("c2", "c2", None),  # a slide that is called as a case was
        ("other", "c2", "but other slides"),
    ],
)
def test_item_15_slides_of_the_training(
    trained: Path, slide: str, case: str | None, said: str | None
) -> None:
    told = training_overlap_warning(
        [trained], [Case(slide, (slide,), (Path("x.h5"),), case_id=case or slide)]
    )
    assert (told is None) == (said is None), told
    assert said is None or said in str(told)


# 16: splits


def test_item_16_files_of_other_splits_have_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_cohort(tmp_path, 6)
    rows = [f"s{i:03},c{i},{NAMES[i % 2]},{('train', 'test')[i // 3]}" for i in range(6)]
    (folder / "cohort.csv").write_text("\n".join(["slide_id,case_id,label,split", *rows]) + "\n")
    (folder / "features" / "s005.h5").rename(folder / "features" / "stray.h5")
    assert run(command(folder, "--split", "test")) == 0
    told = capsys.readouterr().out
    assert "2 slides matched; 1 slides without features: s005" in told
    assert "1 feature files without a row: stray.h5" in told
    assert "s000.h5" not in told


# 18: ensembles that differ


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"class_names": ("pos", "neg")}, "its class_names is ('pos', 'neg')"),
        ({"encoder": "conch"}, "its encoder is 'conch'"),
        ({"task": "multilabel", "n_classes": 2, "class_names": NAMES, "encoder": "uni_v2"}, "its task is"),
    ],
)
@pytest.mark.parametrize("name", ["explain", "predict"])
def test_item_18_ensembles_that_differ_are_refused(
    name: str, spec: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 2)
    make_model(folder / "m1.safetensors", seed=1, **spec)
    assert run([name, *command(folder, models=2)[1:]]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["explain", "predict"])
def test_item_18_what_some_models_do_not_say_is_said(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 2)
    make_model(folder / "m0.safetensors", class_names=None, encoder=None)
    make_model(folder / "m1.safetensors", seed=1, encoder="UNI-v2")
    assert run([name, *command(folder, models=2)[1:]]) == 0
    told = capsys.readouterr().out
    assert "warning: m0.safetensors of the ensemble does not record its class names" in told
    about = xmil.open_run(folder / "run").about
    assert (about["class_names"], about["model"]["spec"]["encoder"]) == (list(NAMES), "UNI-v2")


# 19: one lock, taken before anything is touched


def kept(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def commands(folder: Path) -> dict[str, list[str]]:
    """Every command that writes a folder, over one small cohort."""
    slides = folder / "slides"
    places = ["--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    tiles = ["embed", "--tiles", str(folder / "tile"), "--slides", str(slides), "--encoder", MEAN]
    settings = {
        "out": str(folder / "train"),
        "data": {"features": str(folder / "features"), "cohort": str(folder / "cohort.csv")},
        "model": {"name": "attnmil", "dim": 8},
        "train": {"epochs": 1, "monitor": "loss"},
    }
    from xmil.training.config import dumps

    (folder / "train.toml").write_text(dumps(settings))
    return {
        "tile": ["tile", str(slides), "--size", "64"],
        "embed": [*tiles, "--device", "cpu"],
        "explain": ["explain", *places],
        "predict": ["predict", *places],
        "evaluate": ["evaluate", *places, "--methods", "lrp", "--steps", "4", "--orders", "2"],
        "heatmap": ["heatmap", str(folder / "explain"), "--pictures", "map", "--to", "png,csv"],
        "train": ["train", str(folder / "train.toml")],
    }


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    folder = make_cohort(tmp_path_factory.mktemp("everything"), 8)
    parts = ("train", "train", "train", "train", "val", "val", "test", "test")
    rows = [f"s{i:03},{NAMES[i % 2]},{part}" for i, part in enumerate(parts)]
    (folder / "cohort.csv").write_text("\n".join(["slide_id,label,split", *rows]) + "\n")
    (folder / "slides").mkdir()
    for i in range(2):
        pixels = textured([(0, 0, 256, 256)], (256, 256), seed=i)
        write_pyramid(folder / "slides" / f"s{i:03}.tif", pixels, tile=(64, 64))
    every = commands(folder)
    for name, arguments in every.items():
        assert run([*arguments, "--out", str(folder / name)]) == 0
    return folder, every


@pytest.mark.parametrize("name", ["tile", "embed", "explain", "predict", "evaluate", "heatmap", "train"])
def test_item_19_a_restart_is_refused_before_it_touches_anything(
    name: str, everything: tuple[Path, dict[str, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, every = everything
    before = kept(folder / name)
    with lock_folder(folder / name):
        assert run([*every[name], "--out", str(folder / name), "--restart"]) == 2
    assert "another run is writing there" in capsys.readouterr().err
    assert kept(folder / name) == before


# 20: a model that is replaced during a run


def test_item_20_workers_verify_the_model(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    path = folder / "m0.safetensors"
    models = Ensemble((path,)).load()
    make_model(path, seed=7)
    with pytest.raises(StopError, match="changed since the run started"):
        Ensemble((path,), models.digests).load()
    assert Ensemble((path,)).load().digests != models.digests


@pytest.mark.parametrize("name", ["explain", "predict", "evaluate"])
def test_item_20_no_slide_comes_from_another_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is replaced once the run has hashed it, before its workers have loaded it."""
    folder = make_cohort(tmp_path, 3)
    started = step.process

    def late(items: Any, make: Any, workers: Workers) -> Any:
        assert workers.workers == 2
        make_model(folder / "m0.safetensors", seed=9)
        return started(items, make)  # what a worker process would do, in this one

    monkeypatch.setattr(step, "process", late)
    more = ["--methods", "lrp", "--steps", "4"] if name == "evaluate" else []
    assert run([name, *command(folder, *more, "--workers", "2")[1:]]) == 2
    assert "changed since the run started" in capsys.readouterr().err
    assert not list((folder / "run").glob("slides/*.parquet"))


# 21: inputs that change


def test_item_21_identity_is_of_what_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    rng = np.random.default_rng(0)
    data = bytearray(rng.bytes(3 << 20))
    path.write_bytes(data)
    sampled, full = identity(path), identity(path, full=True)
    assert sampled.startswith("sampled:")
    for at in (0, 70_000, len(data) // 2 + 7, len(data) - 1):  # in head, samples or tail
        changed = bytearray(data)
        changed[at : at + 60_000] = bytes(len(changed[at : at + 60_000]))
        replaced(path, partial(_write, data=bytes(changed)))
        assert identity(path) != sampled
        assert not unchanged(path, sampled)
    between = bytearray(data)
    between[(1 << 16) + (1 << 12) + 5] ^= 1  # just after the first sample
    replaced(path, partial(_write, data=bytes(between)))
    assert unchanged(path, sampled)
    assert not unchanged(path, full)
    assert not unchanged(path, sampled, full=True)  # a sampled word does not do where a full one is asked for
    small = tmp_path / "small.bin"
    small.write_bytes(data[: 1 << 20])
    word = identity(small)
    replaced(small, partial(_write, data=bytes(between[: 1 << 20])))
    assert identity(small) != word


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["explain", "evaluate"])
def test_item_21_a_replaced_feature_file_is_done_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_cohort(tmp_path, 4)
    more = ["--methods", "lrp", "--steps", "4"] if name == "evaluate" else []
    arguments = [name, *command(folder, *more)[1:]]
    assert run(arguments) == 0
    before = bytes_of(folder / "run")
    replaced(folder / "features" / "s002.h5", other_features)
    capsys.readouterr()
    assert run(arguments) == 0
    assert "3 already done" in capsys.readouterr().out
    after = bytes_of(folder / "run")
    assert [slide for slide in before if before[slide] != after[slide]] == ["s002.parquet"]


def test_item_21_a_label_that_changed_is_measured_again(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 4)
    arguments = ["evaluate", *command(folder, "--methods", "lrp", "--steps", "4")[1:]]
    assert run(arguments) == 0
    text = (folder / "cohort.csv").read_text()
    (folder / "cohort.csv").write_text(text.replace("s001,c0,neg", "s001,c0,pos"))
    assert run(arguments) == 0
    rows = {row["slide_id"]: row for row in table(folder / "run" / "slides.csv")}
    assert rows["s001"]["label"] == "pos"
    assert (rows["s001"]["correct"] == "True") == (rows["s001"]["predicted"] == "pos")


def test_item_21_a_replaced_slide_is_tiled_and_embedded_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slides = tmp_path / "slides"
    slides.mkdir()
    for i in range(2):
        pixels = textured([(0, 0, 256, 256)], (256, 256), seed=i)
        write_pyramid(slides / f"s{i}.tif", pixels, tile=(64, 64))
    tile = ["tile", str(slides), "--out", str(tmp_path / "tiles"), "--size", "64"]
    embed = ["embed", "--tiles", str(tmp_path / "tiles"), "--slides", str(slides), "--encoder", MEAN]
    embed += ["--device", "cpu", "--out", str(tmp_path / "features")]
    for arguments in (tile, embed):
        assert run(arguments) == 0
    before = xmil.read_bag(tmp_path / "features" / "s1.h5").features
    other = textured([(0, 0, 256, 256)], (256, 256), seed=9) // 2 + 60
    replaced(slides / "s1.tif", lambda path: write_pyramid(path, other, tile=(64, 64)))
    capsys.readouterr()
    for arguments in (tile, embed):
        assert run(arguments) == 0
        told = capsys.readouterr().out
        assert "1 slide, 1 already done, 0 failed" in told
    assert not np.array_equal(before, xmil.read_bag(tmp_path / "features" / "s1.h5").features)


def test_item_21_pictures_of_replaced_explanations_are_drawn_again(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    assert run(command(folder)) == 0
    draw = ["heatmap", str(folder / "run"), "--pictures", "map", "--to", "png,csv"]
    assert run(draw) == 0
    before = (folder / "run" / "heatmaps" / "csv" / "s000.csv").read_bytes()
    path = folder / "run" / "slides" / "s000.parquet"
    stamp = path.stat()
    shutil.copy(folder / "run" / "slides" / "s001.parquet", path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert run(draw) == 0
    assert (folder / "run" / "heatmaps" / "csv" / "s000.csv").read_bytes() != before


def test_item_21_training_does_not_go_on_with_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_cohort(tmp_path, n=20)
    xmil.train(config_of(folder, train={"epochs": 1}))
    path = folder / "features" / "s3.h5"
    bag = xmil.read_bag(path)
    other = xmil.Bag(bag.features[::-1].copy(), slide_id="s3", encoder=bag.encoder)
    replaced(path, partial(xmil.write_bag, other))
    with pytest.raises(
        InputError, match=r"feature files of 1 slides have changed since the run began \(s3\)"
    ):
        xmil.train(config_of(folder, train={"epochs": 1}))
    assert xmil.train(config_of(folder, train={"epochs": 1}), restart=True).trained == ["model"]


# 22: chunks that were never written


@pytest.mark.parametrize("written", [200, 3000])
def test_item_22_unwritten_compressed_rows_are_refused_hdf5(written: int, tmp_path: Path) -> None:
    path = tmp_path / "s.h5"
    with h5py.File(path, "w") as file:
        options = {"chunks": (100, 8), "compression": "gzip"}
        features = file.create_dataset("features", (3000, 8), dtype=np.float32, **options)
        features[:written] = np.random.default_rng(0).normal(size=(written, 8))
        file.create_dataset("coords", data=np.zeros((3000, 2), dtype=np.int64))
    if written == 3000:
        assert len(xmil.read_bag(path)) == 3000
        return
    with pytest.raises(FileError, match="has 2 of 30 chunks; the others were never written"):
        xmil.read_bag(path)


def test_item_22_unwritten_corners_of_a_grid_of_chunks(tmp_path: Path) -> None:
    path = tmp_path / "s.h5"
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (11, 11), dtype=np.float32, chunks=(10, 10))
        features[:, :10] = 1.0
        file.create_dataset("coords", data=np.zeros((11, 2), dtype=np.int64))
    with pytest.raises(FileError, match="2 of 4 chunks"):
        xmil.read_bag(path)


def test_item_22_unwritten_rows_are_refused_zarr(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(tmp_path / "s.zarr"), mode="w", zarr_format=2)
    features = group.create_array("features", shape=(300, 8), chunks=(100, 8), dtype="float32")
    features[:100] = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    xy = np.stack(np.divmod(np.arange(300), 20), axis=1) * 256
    boxes = np.concatenate([xy, xy + 256], axis=1).astype(np.int64)
    group.create_array("coordinates", shape=boxes.shape, dtype=boxes.dtype)[:] = boxes
    with pytest.raises(FileError, match="has 1 of 3 chunks"):
        xmil.read_bag(tmp_path / "s.zarr", patch_size=256)
    features[100:] = 1.0
    assert len(xmil.read_bag(tmp_path / "s.zarr", patch_size=256)) == 300


# 23: pixels from elsewhere


def test_item_23_an_ome_tiff_of_files_elsewhere_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "slides"
    inside.mkdir()
    pixels = textured([(0, 0, 256, 256)], (256, 256))
    tifffile.imwrite(tmp_path / "secret.ome.tif", pixels // 3, photometric="rgb", ome=True)
    path = inside / "s.ome.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", ome=True)
    with tifffile.TiffFile(path) as file:
        text = str(file.ome_metadata)
    for name in ("../secret.ome.tif", "/etc/passwd", "..\\secret.ome.tif"):
        part = f'<TiffData IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:1</UUID></TiffData>'
        start, end = text.index("<TiffData"), text.index("</Pixels>")
        about = (text[:start] + part + text[end:]).encode()
        tifffile.imwrite(path, pixels, photometric="rgb", description=about, metadata=None)
        with pytest.raises(FileError, match="outside its folder"):
            xmil.open_slide(path)


# 24: the user's own files


def test_item_24_a_restart_leaves_the_users_files(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 3)
    assert run(command(folder)) == 0
    ours = xmil.open_run(folder / "run").explanation("s000")
    mine = {
        "slides/mine.parquet": lambda path: ours.save(path),
        "slides/table.parquet": lambda path: _table(path),
        "summary/notes.csv": lambda path: path.write_text("a,b\n"),
        "summary/figure.png": lambda path: path.write_bytes(b"png"),
        "summary/settings.json": lambda path: path.write_text("{}"),
        "certificates/paper.json": lambda path: path.write_text("{}"),
        "roc.png": lambda path: path.write_bytes(b"png"),
    }
    for name, write in mine.items():
        (folder / "run" / name).parent.mkdir(exist_ok=True)
        write(folder / "run" / name)
    (folder / "features" / "s002.h5").unlink()
    assert run(command(folder, "--methods", "gxi", "--restart")) == 0
    assert all((folder / "run" / name).is_file() for name in mine)
    assert not (folder / "run" / "slides" / "s002.parquet").exists()  # of the earlier run
    assert xmil.open_run(folder / "run").table()["slide_id"].tolist() == ["s000", "s001"]


def _table(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), path)


# 1: what an explanation warns of is in the table


def test_item_01_warnings_of_explanations_are_in_the_table(tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 2)
    arguments = command(folder, "--param", "lrp.contexts=4", "--target", "pos")
    assert run(arguments) == 0
    e = xmil.open_run(folder / "run").explanation("s000")
    assert e.warnings
    for _ in range(2):  # the second run finds its slides done
        told = xmil.open_run(folder / "run").table()["warnings"].tolist()
        assert told == [" ".join(e.warnings)] * 2
        assert run(arguments) == 0


def test_item_01_warnings_of_explanations_are_in_the_picture(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    xy = 256 * np.stack(np.divmod(np.arange(6), 3), axis=1)
    plain = xmil.Explanation(
        rng.normal(size=6), np.zeros(2), 1.0, "lrp", xmil.Target(1), True, coords=xy, patch_size=256
    )
    account = Audit(output=1.0, instances=0.69, cut=0.31)
    contradicted = (
        "The scores contradict the model: the half of the patches with the lower scores gives the higher "
        "output (2.1 against 0.3); try method='single', or method='auto', which compares methods."
    )
    places = ["in module 'pool.softmax' (Softmax)"]
    warned = replace(plain, warnings=[*account_warnings(account, size=1.0, cuts=places), contradicted])
    words = " ".join(text.get_text() for text in xmil.heatmap(warned, size=600).texts)  # type: ignore[union-attr]
    assert "31% of the relevance stops at values that depend on the bag but carry no relevance: the" in words
    assert "The scores contradict the model: the half of the patches with the lower scores gives" in words
    assert NOTE in words
    assert not any("warning" in text.get_text() for text in xmil.heatmap(plain, size=600).texts)  # type: ignore[union-attr]
