"""Digit slides: what was drawn is what OpenSlide reads, tissue detection keeps the digits and only them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xmil.demo.digit_slides import GRID, MARGIN, TILE, DigitSlide, draw_slide, draw_tile, place_digits
from xmil.demo.digit_slides import write_digit_slide as write

openslide = pytest.importorskip("openslide")
tifffile = pytest.importorskip("tifffile")


@pytest.fixture(scope="module")
def slide() -> DigitSlide:
    return place_digits("s", np.random.default_rng(0).integers(1797, size=30), seed=1)


@pytest.fixture(scope="module")
def path(slide: DigitSlide, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("slides") / "s.tiff"
    write(file, slide)
    return file


def test_openslide_reads_each_tile_as_drawn(slide: DigitSlide, path: Path) -> None:
    with openslide.OpenSlide(str(path)) as file:
        assert file.level_count == 3
        assert file.level_downsamples == (1.0, 4.0, 16.0)
        assert file.dimensions == tuple(TILE * (side + 2 * MARGIN) for side in GRID)
        assert float(file.properties["openslide.mpp-x"]) == pytest.approx(0.5)
        for row, corner in zip(slide.rows, slide.coords.tolist(), strict=True):
            seen = np.asarray(file.read_region(corner, 0, (TILE, TILE)).convert("RGB"))
            assert np.array_equal(seen, draw_tile(int(row)))


def test_lower_levels_show_the_same_slide(slide: DigitSlide, path: Path) -> None:
    whole = draw_slide(slide).astype(float)
    with tifffile.TiffFile(path) as file:
        for page, scale in zip(file.pages[1:], (4, 16), strict=True):
            small = page.asarray().astype(float)
            h, w = small.shape[:2]
            mean = whole[: h * scale, : w * scale].reshape(h, scale, w, scale, 3).mean(axis=(1, 3))
            assert np.abs(small - mean).max() <= 1


def test_otsu_keeps_the_digits_and_drops_the_glass(slide: DigitSlide) -> None:
    filters = pytest.importorskip("skimage.filters")
    small = draw_slide(slide)[8::16, 8::16].astype(float)
    grey, saturation = small.mean(axis=-1), np.ptp(small, axis=-1)
    for tissue in (grey < filters.threshold_otsu(grey), saturation > filters.threshold_otsu(saturation)):
        shares = tissue.reshape(GRID[1] + 2, 16, GRID[0] + 2, 16).mean(axis=(1, 3))
        found = {(x - MARGIN, y - MARGIN) for y, x in np.argwhere(shares > 0.5).tolist()}
        assert found == set(map(tuple, slide.cells.tolist()))
    assert min(draw_tile(int(row)).std() for row in slide.rows) >= 8


def test_placing_is_seeded_in_reading_order_and_without_doubles() -> None:
    a, b, c = (place_digits("s", range(30), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(a.cells, b.cells)
    assert not np.array_equal(a.cells, c.cells)
    reading = a.cells[:, 1] * GRID[0] + a.cells[:, 0]
    assert (np.diff(reading) > 0).all()
