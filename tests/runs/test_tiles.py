"""Tiles decoded at the encoder's side: the pixels of the CPU's way, or the reason to leave them to it.

A GPU takes torchvision's decoder; on a CPU the same way goes through Pillow, so all but the decoder is here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import xmil
from tests.runs.test_embed import MEAN, embed_pairs, prepared
from xmil.core.errors import InputError, UnknownNameError
from xmil.core.fitting import PatchFit
from xmil.runs.embed import EmbedSettings, embed_slides
from xmil.runs.feed.pillow_resize import FILTERS, fitted, resized
from xmil.runs.feed.reader import PatchSource
from xmil.runs.feed.tiles import GpuTiles, UnfitForGpuError
from xmil.slides import open_slide
from xmil.slides.backends.direct import with_direct_tiles

pytest.importorskip("openslide")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("kind", sorted(FILTERS))
@pytest.mark.parametrize(("given", "wanted"), [(64, 50), (50, 64), (96, 48), (33, 32)])
def test_patches_are_resized_as_pillow_does(kind: str, given: int, wanted: int) -> None:
    patches = np.random.default_rng(0).integers(0, 256, (3, given, given, 3), dtype=np.uint8)
    filtering = getattr(Image.Resampling, kind.upper())
    expected = [np.asarray(Image.fromarray(one).resize((wanted, wanted), filtering)) for one in patches]
    np.testing.assert_array_equal(resized(torch.from_numpy(patches), wanted, kind), np.stack(expected))
    fit = PatchFit(32, 0.9, kind)
    np.testing.assert_array_equal(
        fitted(torch.from_numpy(patches), fit), np.stack([fit(one) for one in patches])
    )


def jpeg_slide(path: Path) -> Path:
    """320 x 240 px in JPEG tiles of 64, with a level of half the size."""
    import tifffile

    pytest.importorskip("imagecodecs")
    rough = np.random.default_rng(0).integers(60, 220, (30, 40, 3), dtype=np.uint8)
    picture = Image.fromarray(rough).resize((320, 240), Image.Resampling.BICUBIC)
    options = {"tile": (64, 64), "compression": "jpeg", "photometric": "ycbcr", "subsampling": (1, 1)}
    options |= {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(np.asarray(picture), **options)
        file.write(np.asarray(picture.reduce(2)), subfiletype=1, **options)
    return path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("edge0", "size"), [(40, 40), (64, 32), (80, 32)])
def test_patches_cut_from_tiles_are_those_read(tmp_path: Path, device: str, edge0: int, size: int) -> None:
    """Across tiles, beyond the edges, of both levels, resized; a GPU's decoder may be one grey level off."""
    xy0 = np.array([[0, 0], [50, 30], [-20, 10], [300, 200], [128, 64], [62, 190]])
    with with_direct_tiles(open_slide(jpeg_slide(tmp_path / "s.tif"))) as slide:
        source = PatchSource(slide.path, edge0, size, PatchFit(24, 0.9, "bicubic"))
        found = GpuTiles(slide, source, xy0, device).patches(xy0).cpu().numpy()
        expected = np.stack([source.pixels(slide, corner) for corner in xy0])
        assert found.shape == (6, 24, 24, 3)
        gap = np.abs(found.astype(int) - expected)
        assert gap.max() <= (0 if device == "cpu" else 1)


def test_a_run_by_tiles_is_the_run_by_processes(tmp_path: Path) -> None:
    slide = jpeg_slide(tmp_path / "j.tif")
    patches = xmil.Bag(np.zeros((70, 0)), coords=np.stack(np.divmod(np.arange(70), 7), 1) * 32, patch_size=32)
    xmil.write_bag(patches, tmp_path / "j.h5")
    slides = {"j": (slide, tmp_path / "j.h5"), "s": prepared(tmp_path, "s")}
    for decode in ("cpu", "gpu"):
        settings = EmbedSettings(MEAN, batch=7, readers=1, decode=decode)
        results = embed_pairs(slides, tmp_path / decode, settings)
        assert sorted(results.done) == ["j", "s"]
    for name in slides:
        one, two = (xmil.read_bag(tmp_path / way / f"{name}.h5") for way in ("cpu", "gpu"))
        np.testing.assert_allclose(one.features, two.features, atol=1e-6)
    (told,) = xmil.open_run(tmp_path / "gpu").about["warnings"]
    assert told == "s: decoded by the CPU, as its tiles are no plain JPEG."


def test_what_a_gpu_may_not_decode_is_said(tmp_path: Path) -> None:
    xy0 = np.array([[0, 0], [51, 30]])
    with with_direct_tiles(open_slide(jpeg_slide(tmp_path / "s.tif"))) as slide:
        with pytest.raises(UnfitForGpuError, match="whole pixels"):
            GpuTiles(slide, PatchSource(slide.path, 64, 32, PatchFit()), xy0, "cpu")
        with pytest.raises(UnfitForGpuError, match="resizes by nearest"):
            GpuTiles(slide, PatchSource(slide.path, 32, 32, PatchFit(16, 1.0, "nearest")), xy0, "cpu")
    with pytest.raises(UnknownNameError, match="decoder 'tpu'"):
        EmbedSettings(MEAN, decode="tpu")
    with pytest.raises(InputError, match="needs a GPU"):
        embed_slides(tmp_path, tmp_path, encoder=MEAN, device="cpu", decode="gpu")
