"""Embedding: the encoder's own numbers in the order of the patches, bounded reading ahead, clear failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import xmil
from tests.slides.pyramids import textured, write_pyramid
from xmil.core.errors import FileError, InputError, XmilError
from xmil.encoders import load_encoder
from xmil.execute import Tally, execute
from xmil.network import find_device
from xmil.runs.embed import AHEAD, Embedder, PatchStream, embed_step
from xmil.runs.requests import EmbedRequest
from xmil.slides import open_slide
from xmil.slides.stain import Macenko
from xmil.slides.tiling import TileSettings, tile_slide, write_tiling

pytest.importorskip("openslide")

MEAN, MORTAL = "tests.encoders.builders:network", "tests.encoders.builders:mortal"


def prepared(folder: Path, name: str, *, mpp: float = 0.37, seed: int = 0) -> tuple[Path, Path]:
    """A slide of 40 patches of 32 px at 0.5 µm/px, and its patches."""
    pixels = textured([(0, 0, 352, 220)], (360, 240), seed=seed)
    slide = write_pyramid(folder / f"{name}.tif", pixels, mpp=mpp, tile=(64, 64))
    with open_slide(slide) as opened:
        tiling = tile_slide(opened, TileSettings(size=32))
    return slide, write_tiling(tiling, folder / "tiles")


def embed_pairs(pairs: dict[str, tuple[Path, Path]], out: Path, request: EmbedRequest) -> Tally:
    """Embed slides, given as id to (slide, patches)."""
    step = embed_step(Embedder(out, request, find_device(request.place)), pairs)
    return execute(step, out, workers=request.pool, restart=request.restart)


def embed_request(encoder: str, **options: Any) -> EmbedRequest:
    """How to embed, on the CPU; which slides is said elsewhere."""
    options = {"tiles": "tiles", "slides": ["slides"], "device": "cpu", "readers": 0, **options}
    return EmbedRequest.build(encoder=encoder, **options)


def test_features_are_the_encoders_in_the_order_of_the_patches(tmp_path: Path) -> None:
    slide, patches = prepared(tmp_path, "s")
    settings = embed_request("resnet18", random=True, batch=7)
    results = embed_pairs({"s": (slide, patches)}, tmp_path / "out", settings)
    assert (results.failed, results.records["s"].facts) == ({}, {"patches": len(xmil.open_bag(patches))})
    bag = xmil.read_bag(tmp_path / "out" / "s.h5")
    tiles = xmil.open_bag(patches)
    assert len(bag) > 30
    np.testing.assert_array_equal(bag.coords, tiles.coords)
    assert (bag.patch_size, bag.encoder, bag.slide_id) == (43, "resnet18", "s")
    assert bag.mpp == pytest.approx(0.37, rel=1e-3)
    encoder = load_encoder("resnet18", random=True)
    with open_slide(slide) as opened:
        for i in (0, 6, 7, len(bag) - 1):
            x, y = tiles.coords[i]
            patch = opened.read_area((x, y, 43, 43), (32, 32))
            expected = encoder(encoder.transform(patch).unsqueeze(0))[0]
            np.testing.assert_allclose(bag.features[i], expected, atol=1e-4, rtol=1e-3)


def test_the_files_are_tridents(tmp_path: Path) -> None:
    slide, patches = prepared(tmp_path, "s")
    embed_pairs({"s": (slide, patches)}, tmp_path / "out", embed_request(MEAN))
    with h5py.File(tmp_path / "out" / "s.h5") as file, h5py.File(patches) as tiles:
        assert file["features"].dtype == np.float32
        assert dict(file["features"].attrs) == {"name": "s", "savetodir": "out", "encoder": "network"}
        stored, given = dict(file["coords"].attrs), dict(tiles["coords"].attrs)
        assert stored == {**given, "savetodir": "patches"}
        about = json.loads(file.attrs["xmil"])["extra"]["encoder"]
    assert (about["asked"], about["precision"], about["stain_norm"]) == (MEAN, "float32", False)
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert (record["kind"], record["settings"]["encoder"]) == ("embed", MEAN)


def test_reading_ahead_is_bounded_and_in_threads(tmp_path: Path) -> None:
    slide, patches = prepared(tmp_path, "s")
    seen: list[int] = []
    threads = set()

    def transform(patch: np.ndarray) -> torch.Tensor:
        seen.append(1)
        threads.add(threading.current_thread().name)
        return torch.zeros(1)

    settings = embed_request(MEAN, batch=5)
    with PatchStream(slide, patches, transform, settings) as loaded:
        for done, _ in enumerate(loaded):
            assert len(seen) <= (done + 1 + AHEAD) * 5
    assert len(seen) == len(loaded)
    assert all(name.startswith("xmil-patches") for name in threads)


def test_a_run_goes_on_and_failures_do_not_end_it(tmp_path: Path) -> None:
    good, bad = prepared(tmp_path, "a"), prepared(tmp_path, "b", seed=1)
    other = prepared(tmp_path, "c", seed=2)
    intact = bad[0].read_bytes()
    bad[0].write_bytes(b"no slide")
    slides = {"a": good, "b": bad, "c": (good[0].with_name("other.tif"), other[1])}
    write_pyramid(slides["c"][0], textured([(0, 0, 300, 200)], (300, 200)))
    out = tmp_path / "out"
    results = embed_pairs(slides, out, embed_request(MEAN))
    assert (list(results.done), sorted(results.failed)) == (["a"], ["b", "c"])
    assert "360 x 240 px" in results.failed["c"]
    assert (out / "failures.csv").read_text().startswith("slide_id,error\nb,")
    first = (out / "a.h5").stat().st_mtime_ns
    bad[0].write_bytes(intact)
    again = embed_pairs({"a": good, "b": bad}, out, embed_request(MEAN, batch=3))
    assert (again.before, list(again.done), again.failed) == (["a"], ["b"], {})
    assert (out / "a.h5").stat().st_mtime_ns == first
    assert (out / "failures.csv").read_text() == "slide_id,error\n"
    assert not [path for path in out.iterdir() if path.name.endswith(".part")]
    with pytest.raises(InputError, match=r"other settings \(stain_norm false, not true\)"):
        embed_pairs({"a": good}, out, embed_request(MEAN, stain_norm=True))
    (out / "slides").mkdir()  # of the user's: a restart removes features and nothing else
    (out / "slides" / "a.svs").write_text("mine")
    fresh = embed_pairs({"a": good}, out, embed_request(MEAN, stain_norm=True, restart=True))
    assert list(fresh.done) == ["a"]
    assert (out / "slides" / "a.svs").read_text() == "mine"


def test_damage_inside_a_slide_fails_that_slide(tmp_path: Path) -> None:
    slide, patches = prepared(tmp_path, "s")
    data = bytearray(slide.read_bytes())
    packed = write_pyramid(tmp_path / "z.tif", textured([(0, 0, 352, 220)], (360, 240)), compression="zlib")
    data = bytearray(packed.read_bytes())
    data[2000:9000] = bytes(7000)
    slide.write_bytes(data)
    with pytest.raises(InputError, match="No slide could be used"):
        embed_pairs({"s": (slide, patches)}, tmp_path / "out", embed_request(MEAN))
    assert "damaged" in xmil.open_run(tmp_path / "out").failed["s"]
    assert not (tmp_path / "out" / "s.h5").exists()


def test_stains_are_brought_to_the_reference(tmp_path: Path) -> None:
    slide, patches = prepared(tmp_path, "s")
    with PatchStream(
        slide, patches, torch.from_numpy, embed_request(MEAN, stain_norm=True, batch=4)
    ) as loaded:
        first = next(iter(loaded))[0].numpy()
        chosen = np.unique(np.linspace(0, len(loaded) - 1, 32).astype(int))
        fitted = Macenko.fit(np.stack([loaded.read(int(i)) for i in chosen]))
        np.testing.assert_array_equal(first, fitted.normalise(loaded.read(0)))
        assert np.abs(first.astype(int) - loaded.read(0)).mean() > 3


def test_patches_of_other_tools(tmp_path: Path) -> None:
    """CLAM's corners do not say how many pixels a patch has."""
    slide, _ = prepared(tmp_path, "s")
    with h5py.File(tmp_path / "clam.h5", "w") as file:
        coords = file.create_dataset("coords", data=np.array([[0, 0], [43, 43], [86, 0]]))
        about = {"patch_size": 43, "patch_level": 0, "downsample": [1.0, 1.0], "level_dim": [360, 240]}
        coords.attrs.update({**about, "downsampled_level_dim": [360, 240], "name": "s", "save_path": "x"})
    pair = {"s": (slide, tmp_path / "clam.h5")}
    with pytest.raises(FileError, match="pass `patch_px="):
        PatchStream(*pair["s"], torch.from_numpy, embed_request(MEAN))
    results = embed_pairs(pair, tmp_path / "out", embed_request(MEAN, patch_px=32))
    assert results.failed == {}
    assert xmil.read_bag(tmp_path / "out" / "s.h5").features.shape == (3, 24)


def test_an_encoder_that_cannot_be_made_ends_the_run(tmp_path: Path) -> None:
    pair = prepared(tmp_path, "s")
    with pytest.raises(InputError, match="no licence"):
        embed_pairs({"s": pair}, tmp_path / "out", embed_request("tests.encoders.builders:broken"))


def test_a_run_without_a_result_does_not_bar_the_next(tmp_path: Path) -> None:
    """The encoder could not be had: no empty folder is left, and other settings may follow."""
    pair = prepared(tmp_path, "s")
    with pytest.raises(XmilError):
        embed_pairs({"s": pair}, tmp_path / "out", embed_request("tests.encoders.builders:broken"))
    assert not (tmp_path / "out").exists()
    embed_pairs({"s": pair}, tmp_path / "out", embed_request(MEAN))
    with pytest.raises(XmilError, match="other settings"):
        embed_pairs({"s": pair}, tmp_path / "out", embed_request(MEAN, stain_norm=True))


def test_two_processes_give_the_same(tmp_path: Path) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("ab")}
    settings = embed_request("resnet18", random=True)
    results = embed_pairs(slides, tmp_path / "two", settings.replace(workers=2))
    assert (sorted(results.done), results.failed) == (["a", "b"], {})
    embed_pairs(slides, tmp_path / "one", settings)
    for name in slides:
        two, one = (xmil.read_bag(tmp_path / folder / f"{name}.h5").features for folder in ("two", "one"))
        np.testing.assert_allclose(two, one, atol=1e-5, rtol=1e-4)


def kill_on_the_way(folder: Path, out: Path, *options: str) -> list[str]:
    """Embed into a folder in a process that kills itself on the way; the processes that it had started."""
    command = [sys.executable, "-m", "xmil.cli", "embed", "--tiles", folder / "tiles", "--slides", folder]
    command += ["--encoder", MORTAL, "--out", out, "--batch", "8", "--device", "cpu", *options]
    environment = {**os.environ, "DIES_IN": str(out)}
    killed = subprocess.run([*map(str, command)], capture_output=True, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return out.with_name("children").read_text().split()


def test_a_killed_run_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("abc")}
    out = tmp_path / "out"
    assert kill_on_the_way(tmp_path, out) == []
    done = sorted(path.stem for path in out.glob("*.h5"))
    assert 0 < len(done) < 3
    results = embed_pairs(slides, out, embed_request(MORTAL, batch=8))
    assert (results.before, sorted(results.done)) == (done, sorted(set("abc") - set(done)))
    embed_pairs(slides, tmp_path / "whole", embed_request(MEAN))
    for name in slides:
        again, whole = (
            xmil.read_bag(tmp_path / folder / f"{name}.h5").features for folder in ("out", "whole")
        )
        np.testing.assert_allclose(again, whole, atol=1e-5)
    assert not list(out.glob(".*.part"))
