"""OME-TIFF: opens in tifffile and OpenSlide with the right mpp and levels; scores to the bit."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.slides.squares import boxes_of, explanation, grid, openslide, tifffile
from xmil.core.errors import XmilError
from xmil.heatmaps import Pyramid, Scale, write_colours, write_scores

XY, EDGE = grid(7, 5, 254, at=(11, 17)), 254
FRAME = (0, 0, 2111, 1607)


@pytest.fixture
def pair():
    rng = np.random.default_rng(0)
    values = [rng.normal(size=len(XY)).astype(np.float32), rng.uniform(size=len(XY)).astype(np.float32)]
    return [
        explanation(XY, EDGE, scores=values[0]),
        explanation(XY, EDGE, scores=values[1], method="attention", signed=False),
    ]


def test_scores(tmp_path, pair):
    write_scores(tmp_path / "s.ome.tif", pair, Pyramid.of(FRAME, mpp=0.2517))
    with tifffile.TiffFile(tmp_path / "s.ome.tif") as file:
        assert file.is_ome
        assert file.is_bigtiff
        assert len(file.series) == 1
        series = file.series[0]
        assert series.axes == "CYX"
        assert [level.shape for level in series.levels] == [(2, 1607, 2111), (2, 804, 1056), (2, 402, 528)]
        image = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]
        pixels, about = series.asarray(), image["Pixels"]
    assert image["Name"] == "s1 scores"
    assert pixels.dtype == np.float32
    assert about["PhysicalSizeX"] == about["PhysicalSizeY"] == pytest.approx(0.2517)
    assert about["PhysicalSizeXUnit"] == "µm"
    assert [channel["Name"] for channel in about["Channel"]] == ["lrp:HPV+", "attention:HPV+"]
    for channel, e in zip(pixels, pair, strict=True):
        wanted = np.full((1607, 2111), np.nan, dtype=np.float32)
        for (x0, y0, x1, y1), score in zip(boxes_of(XY, EDGE), e.scores, strict=True):
            wanted[y0:y1, x0:x1] = score
        np.testing.assert_array_equal(channel, wanted)


def test_openslide_finds_mpp_and_levels(tmp_path, pair):
    pyramid = Pyramid.of(FRAME, mpp=0.2517)
    scale = Scale.of(pair[0].scores, signed=True)
    write_colours(tmp_path / "c.ome.tif", pair[0], scale, pyramid)
    write_scores(tmp_path / "s.ome.tif", pair, pyramid)
    for name in ("c.ome.tif", "s.ome.tif"):
        with openslide.OpenSlide(tmp_path / name) as slide:
            assert slide.level_dimensions == ((2111, 1607), (1056, 804), (528, 402))
            assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.2517, rel=1e-6)
            assert float(slide.properties["openslide.mpp-y"]) == pytest.approx(0.2517, rel=1e-6)
            assert slide.level_downsamples[1] == pytest.approx(2, rel=1e-3)
    with tifffile.TiffFile(tmp_path / "c.ome.tif") as file:
        levels = [level.asarray() for level in file.series[0].levels]
    with openslide.OpenSlide(tmp_path / "c.ome.tif") as slide:
        for i, (width, height) in enumerate(slide.level_dimensions):
            np.testing.assert_array_equal(
                np.asarray(slide.read_region((0, 0), i, (width, height))), levels[i]
            )
    x, y = XY[8] + 3
    assert levels[0][y, x].tolist() == scale.paint(pair[0].scores[8:9])[0].tolist()
    assert levels[0][5, 5, 3] == 0


def test_a_reduced_pyramid_keeps_the_slides_scale(tmp_path, pair):
    write_scores(tmp_path / "s.ome.tif", pair[:1], Pyramid.of(FRAME, downsample=3, mpp=0.25))
    with tifffile.TiffFile(tmp_path / "s.ome.tif") as file:
        about = tifffile.xml2dict(file.ome_metadata)["OME"]["Image"]["Pixels"]
        shape = file.series[0].shape
    assert np.squeeze(np.empty(shape)).shape == (536, 704)
    assert about["PhysicalSizeX"] == pytest.approx(0.75)
    with openslide.OpenSlide(tmp_path / "s.ome.tif") as slide:
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(0.75)


def test_without_mpp_none_is_made_up(tmp_path, pair):
    write_scores(tmp_path / "s.ome.tif", pair, Pyramid.of(FRAME))
    with tifffile.TiffFile(tmp_path / "s.ome.tif") as file:
        assert "PhysicalSizeX" not in file.ome_metadata
    with openslide.OpenSlide(tmp_path / "s.ome.tif") as slide:
        assert "openslide.mpp-x" not in slide.properties


def test_large_slides_need_little_memory(tmp_path):
    """A 16,384-px pyramid of scattered patches: the picture would take 1 GB."""
    rng = np.random.default_rng(0)
    e = explanation(rng.integers(0, 60_000, size=(300, 2)), 512)
    tracemalloc.start()
    write_scores(tmp_path / "s.ome.tif", [e], Pyramid.of((0, 0, 65_536, 4_000), mpp=0.25))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6
    with tifffile.TiffFile(tmp_path / "s.ome.tif") as file:
        assert file.series[0].shape[-2:] == (1000, 16_384)


def test_bad_downsample():
    with pytest.raises(XmilError, match="downsample"):
        Pyramid.of(FRAME, downsample=0)
