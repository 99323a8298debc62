"""JPEG tiles decoded without OpenSlide: its own pixels to the last bit, or it is left to read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.slides.pyramids import textured, write_pyramid
from xmil.slides import open_slide
from xmil.slides.backends.direct import DirectSlide, with_direct_tiles

pytest.importorskip("openslide")
pytest.importorskip("imagecodecs")  # writes JPEG tiles

PLACES = [(0, 0, 64, 64), (30, 50, 100, 100), (-20, 150, 64, 64), (200, 100, 140, 140), (17, 3, 33, 33)]


def smooth(seed: int = 0) -> np.ndarray:
    """Colours that JPEG keeps, with edges in them."""
    rough = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (30, 40, 3), dtype=np.uint8))
    return np.asarray(rough.resize((320, 240), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("subsampling", [(1, 1), (2, 1), (2, 2)])
def test_pixels_are_openslides(tmp_path: Path, subsampling: tuple[int, int]) -> None:
    import tifffile

    path = tmp_path / "s.tif"
    options = {"tile": (64, 64), "compression": "jpeg", "compressionargs": {"level": 80}}
    options |= {"photometric": "ycbcr", "subsampling": subsampling}
    with tifffile.TiffWriter(path) as file:
        for scale in (1, 2):
            pixels = np.asarray(Image.fromarray(smooth()).reduce(scale))
            file.write(pixels, subfiletype=scale - 1, metadata=None, **options)
    with open_slide(path) as plain, with_direct_tiles(open_slide(path)) as direct:
        assert isinstance(direct, DirectSlide)
        assert sorted(direct.direct) == [0, 1]
        for box in PLACES:
            for size in ((box[2], box[3]), (box[2] // 2, box[3] // 2), (21, 21)):
                np.testing.assert_array_equal(direct.read_area(box, size), plain.read_area(box, size))


def test_what_openslide_must_read_is_left_to_it(tmp_path: Path) -> None:
    pixels = textured([(0, 0, 300, 200)], (300, 200))
    packed = write_pyramid(tmp_path / "zlib.tif", pixels, tile=(64, 64), compression="zlib")
    with with_direct_tiles(open_slide(packed)) as slide:
        assert not isinstance(slide, DirectSlide)
    uneven = write_pyramid(tmp_path / "u.tif", smooth()[:239, :319], tile=(64, 64), compression="jpeg")
    with with_direct_tiles(open_slide(uneven)) as slide:
        assert isinstance(slide, DirectSlide)
        assert sorted(slide.direct) == [0]  # the other levels' scales are no whole numbers


def test_a_scanners_slide(data_dir: Path) -> None:
    path = data_dir / "slides" / "CMU-1-Small-Region.svs"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    rng = np.random.default_rng(0)
    with open_slide(path) as plain, with_direct_tiles(open_slide(path)) as direct:
        assert "directly" in direct.backend
        for x, y in rng.integers(-100, 2900, (8, 2)).tolist():
            np.testing.assert_array_equal(
                direct.read_area((x, y, 300, 300), (256, 256)), plain.read_area((x, y, 300, 300), (256, 256))
            )
