"""Reading processes: the bytes that threads give, whichever slide a batch is of; deaths and damage named."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.runs.test_embed import MEAN, MORTAL, embed_pairs, embed_request, kill_on_the_way, prepared
from tests.slides.pyramids import textured, write_pyramid
from tests.waiting import wait_for
from xmil.runs.feed.feed import Feed, Part
from xmil.runs.feed.reader import PatchSource
from xmil.slides import open_slide
from xmil.slides.slide import PatchFit

pytest.importorskip("openslide")


def test_processes_give_the_bytes_that_threads_give(tmp_path: Path, full: bool) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("ab")}
    threads = embed_request("resnet18", random=True, batch=13, stain_norm=True, input_size=40)
    ways = {"threads": threads, "processes": threads.replace(readers=2)}
    for way, settings in ways.items():
        embed_pairs(slides, tmp_path / way / "out", settings)
    if full:
        embed_pairs(slides, tmp_path / "two" / "out", threads.replace(readers=1, workers=2))
    for name in slides:
        one, other = ((tmp_path / way / "out" / f"{name}.h5").read_bytes() for way in ways)
        assert len(one) > 30 * 512 * 4
        assert one == other
        assert not full or (tmp_path / "two" / "out" / f"{name}.h5").stat().st_size == len(one)


def test_damage_fails_its_slide_and_no_other(tmp_path: Path) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("abc")}
    packed = write_pyramid(tmp_path / "z.tif", textured([(0, 0, 352, 220)], (360, 240)), compression="zlib")
    data = bytearray(packed.read_bytes())
    data[2000:9000] = bytes(7000)
    slides["b"][0].write_bytes(data)  # opens, and breaks under way
    slides["c"][0].write_bytes(b"no slide")
    out = tmp_path / "out"
    results = embed_pairs(slides, out, embed_request(MEAN, batch=5, readers=2))
    assert (results.done, sorted(results.failed)) == (["a"], ["b", "c"])
    assert "b.tif: damaged" in results.failed["b"]
    assert sorted(path.name for path in out.glob("*.h5")) == ["a.h5"]
    assert not list(out.glob(".*.part"))


def parts_of(slide: Path, count: int) -> list[Part]:
    source = PatchSource(slide, 32, 32, PatchFit())
    xy0 = np.arange(count)[:, None] * [8, 4]
    return [Part(0, source, np.array([i]), xy0[i : i + 1]) for i in range(count)]


def test_a_process_that_dies_is_replaced_and_its_patches_are_read_again(tmp_path: Path) -> None:
    slide, _ = prepared(tmp_path, "s")
    seen = {}
    with Feed(1, 32 * 32 * 3) as feed, open_slide(slide) as opened:
        feed.add(parts_of(slide, 8))
        while (filled := feed.next()) is not None:
            assert filled.pixels is not None
            row = int(filled.part.rows[0])
            seen[row] = filled.pixels[0].copy()
            feed.release(filled.slot)
            if row == 2:
                feed._processes[0].program.kill()
        for row, pixels in seen.items():
            np.testing.assert_array_equal(pixels, opened.read_region((row * 8, row * 4), 0, (32, 32)))
    assert sorted(seen) == list(range(8))


def test_patches_that_kill_twice_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    slide, _ = prepared(tmp_path, "s")
    with Feed(1, 32 * 32 * 3) as feed:
        feed.add(parts_of(slide, 4))
        feed._hand_out()
        os.kill(feed._processes[0].program.pid, signal.SIGKILL)
        found = None
        while found is None:  # each new process is killed before it can answer, until the part is given up
            found = feed._receive(feed._processes[0])
            if found is None:
                feed._hand_out()
                feed._processes[0].program.kill()
        assert found.error is not None
        assert "s.tif: the process that read it died twice (exit -9)" in found.error
        feed._hand_out()
        rest = [feed.next(), feed.next(), feed.next()]
        assert sorted(int(one.part.rows[0]) for one in rest if one is not None) == [1, 2, 3]
        assert feed.next() is None


def test_a_killed_run_takes_its_readers_with_it_and_goes_on(tmp_path: Path) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("abc")}
    out = tmp_path / "out"
    children = kill_on_the_way(tmp_path, out, "--config", "readers=2")
    assert len(children) == 2
    wait_for(lambda: not any(is_reader(pid) for pid in children))
    done = sorted(path.stem for path in out.glob("*.h5"))
    assert 0 < len(done) < 3
    results = embed_pairs(slides, out, embed_request(MORTAL, batch=8, readers=2))
    assert (results.before, sorted(results.done)) == (done, sorted(set("abc") - set(done)))
    assert not list(out.glob(".*.part"))


def is_reader(pid: str) -> bool:
    try:
        return b"xmil.runs.feed.reader" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_gives_the_features_of_a_cpu(tmp_path: Path) -> None:
    """Batches across slides, the last one padded: each row is its own patch's."""
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("abc")}
    settings = embed_request(MEAN, precision="float32", batch=16)
    embed_pairs(slides, tmp_path / "cpu", settings)
    embed_pairs(slides, tmp_path / "gpu", settings.replace(device="cuda", readers=2))
    for name in slides:
        one, two = (xmil.read_bag(tmp_path / way / f"{name}.h5").features for way in ("cpu", "gpu"))
        np.testing.assert_allclose(two, one, atol=1e-5)
