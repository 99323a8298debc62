"""Slides through every library: the same pixels, mpp from metadata, broken files in one line each."""

from __future__ import annotations

import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.slides.pyramids import claim_size, write_bomb, write_jpeg_ome, write_pyramid
from xmil.core.errors import FileError, InputError
from xmil.slides import find_slides, open_slide
from xmil.slides.backends import UnreadableSlideError
from xmil.slides.slide import on_white

pytest.importorskip("openslide")

KINDS = {
    "tiled.tif": ({}, "OpenSlide"),
    "deflated.tif": ({"compression": "zlib"}, "OpenSlide"),
    "strips.tif": ({"tile": None}, "tifffile"),
    "packed-strips.tif": ({"tile": None, "compression": "zlib"}, "tifffile"),
    "planes.tif": ({"planar": True, "tile": None, "compression": "zlib"}, "tifffile"),
    "planes.ome.tif": ({"planar": True, "ome": True, "compression": "zlib"}, "tifffile"),
    "levels.ome.tif": ({"ome": True}, "tifffile"),
    "deflated.ome.tiff": ({"ome": True, "compression": "zlib"}, "tifffile"),
}


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (700, 1100, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_gives_the_same_pixels(name: str, tmp_path: Path, noise: np.ndarray) -> None:
    options, backend = KINDS[name]
    path = write_pyramid(tmp_path / name, noise, mpp=0.37, **options)
    with open_slide(path) as slide:
        assert slide.backend.startswith(backend)
        assert slide.name == name.split(".")[0]
        assert (slide.dimensions, slide.bounds) == ((1100, 700), (0, 0, 1100, 700))
        assert slide.level_dimensions == ((1100, 700), (550, 350), (275, 175))
        assert slide.level_downsamples == pytest.approx((1, 2, 4))
        assert slide.mpp == pytest.approx(0.37, rel=1e-4)
        np.testing.assert_array_equal(slide.read_region((500, 130), 0, (300, 270)), noise[130:400, 500:800])
        beyond = slide.read_region((1000, -50), 0, (300, 100))
        np.testing.assert_array_equal(beyond[50:, :100], noise[:50, 1000:])
        assert (beyond[:50] == 255).all()
        assert (beyond[:, 100:] == 255).all()
        small = np.asarray(Image.fromarray(noise).resize((550, 350), Image.Resampling.BOX))
        np.testing.assert_array_equal(slide.read_region((400, 200), 1, (50, 60)), small[100:160, 200:250])


@pytest.mark.parametrize("photometric", ["ycbcr", "rgb"])
def test_jpeg_in_ome_needs_no_codec_package(photometric: str, tmp_path: Path) -> None:
    coarse = np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((600, 350), Image.Resampling.BICUBIC))
    write_jpeg_ome(tmp_path / "j.ome.tif", pixels, photometric=photometric)
    with open_slide(tmp_path / "j.ome.tif") as slide:
        assert (slide.backend, slide.mpp) == ("tifffile, ome", 0.37)
        assert slide.level_dimensions == ((600, 350), (300, 175))
        read = slide.read_region((37, 51), 0, (500, 280))
        assert np.abs(read.astype(int) - pixels[51:331, 37:537]).mean() < 2
        small = slide.read_region((0, 0), 1, (300, 175))
        assert np.abs(small.astype(int) - pixels[::2, ::2]).mean() < 2


def test_mpp_of_an_ome_file_that_openslide_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.ome.tif"
    about = {"axes": "YXS", "PhysicalSizeX": 370, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 0.37}
    pixels = np.zeros((300, 300, 3), dtype=np.uint8)
    tifffile.imwrite(path, pixels, ome=True, metadata=about, tile=(64, 64), photometric="rgb")
    monkeypatch.setattr("xmil.slides.backends.tiff.open_ome", _no_codec)
    with open_slide(path) as slide:
        assert slide.backend.startswith("OpenSlide")
        assert slide.mpp_source == "OME PhysicalSize"
        assert slide.mpp == pytest.approx(0.37, rel=1e-4)


def _no_codec(path: Path) -> None:
    raise UnreadableSlideError("no codec")


def test_an_area_is_where_it_was_asked(tmp_path: Path) -> None:
    """A black square at a known place, read at scales that are no powers of two."""
    pixels = np.full((1200, 1600, 3), 255, dtype=np.uint8)
    pixels[330:630, 510:810] = 0
    with open_slide(write_pyramid(tmp_path / "s.tif", pixels)) as slide:
        for scale in (1.0, 1.37, 2.0, 3.3, 5.1):
            width = round(300 / scale)
            inside = slide.read_area((510, 330, 300, 300), (width, width))
            assert inside[1:-1, 1:-1].max() <= 2
            size = (round(1600 / scale), round(1200 / scale))
            dark = np.argwhere(slide.read_area((0, 0, 1600, 1200), size)[..., 0] < 128)
            expected = np.array([[330, 510], [630, 810]]) * (size[0] / 1600)
            assert np.abs(dark.min(axis=0) - expected[0]).max() <= 1
            assert np.abs(dark.max(axis=0) + 1 - expected[1]).max() <= 1


def test_a_large_reduction_is_read_in_bands(
    tmp_path: Path, noise: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pyramid(tmp_path / "s.tif", noise, levels=(), compression="zlib", tile=None)
    with open_slide(path) as slide:
        whole = slide.thumbnail(250).astype(int)
        asked: list[int] = []
        read = type(slide)._read

        def counted(self, level, x, y, size):
            asked.append(size[0] * size[1])
            return read(self, level, x, y, size)

        monkeypatch.setattr(type(slide), "_read", counted)
        monkeypatch.setattr("xmil.slides.slide.BAND", 50_000)
        banded = slide.thumbnail(250)
    assert len(asked) > 10
    assert max(asked) <= 60_000
    assert np.abs(banded - whole).mean() < 3  # the filter does not see across a band's edge


def test_threads_read_the_same(tmp_path: Path, noise: np.ndarray) -> None:
    places = [(x, y) for x in range(0, 1000, 90) for y in range(0, 600, 70)]
    for options in ({}, {"ome": True, "compression": "zlib"}):
        path = write_pyramid(tmp_path / "s.ome.tif", noise, **options)
        with open_slide(path) as slide, ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda xy: slide.read_region(xy, 0, (90, 70)), places))
        for (x, y), patch in zip(places, found, strict=True):
            np.testing.assert_array_equal(patch[: 700 - y, : 1100 - x], noise[y : y + 70, x : x + 90])


def test_pictures_take_a_given_mpp(tmp_path: Path) -> None:
    Image.fromarray(np.full((50, 80, 3), 9, dtype=np.uint8)).save(tmp_path / "p.png")
    Image.new("RGBA", (80, 50), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    with open_slide(tmp_path / "p.png") as slide:
        assert (slide.mpp, slide.mpp_source) == (None, None)
    with open_slide(tmp_path / "p.png", mpp=0.25) as slide:
        assert (slide.mpp, slide.mpp_source, slide.dimensions) == (0.25, "given", (80, 50))
    with open_slide(tmp_path / "clear.png") as slide:
        assert (slide.thumbnail() == 255).all()
    with pytest.raises(InputError, match="positive"):
        open_slide(tmp_path / "p.png", mpp=-1)


def test_half_transparent_pixels_lie_on_white() -> None:
    rgba = np.array([[[100, 0, 200, 128]]], dtype=np.uint8)
    expected = np.round(np.array([100, 0, 200]) * 128 / 255 + 255 * (127 / 255))
    assert np.abs(on_white(rgba)[0, 0] - expected).max() <= 1


@pytest.mark.parametrize(
    ("dots", "unit", "mpp"), [(72, "INCH", None), (50_800, "INCH", 0.5), (300, "INCH", None)]
)
def test_resolution_tags_of_printers_are_not_believed(
    dots: int, unit: str, mpp: float | None, tmp_path: Path
) -> None:
    for tile in (None, (64, 64)):
        path = tmp_path / f"{tile is None}.tif"
        pixels = np.zeros((100, 100, 3), dtype=np.uint8)
        tifffile.imwrite(
            path, pixels, resolution=(dots, dots), resolutionunit=unit, tile=tile, photometric="rgb"
        )
        with open_slide(path) as slide:
            assert slide.mpp == (None if mpp is None else pytest.approx(mpp))


def broken(folder: Path, data: bytes | None) -> dict[str, str]:
    """Broken files and what their line must say."""
    (folder / "zero.svs").write_bytes(b"")
    (folder / "text.svs").write_text("not a slide\n" * 50)
    (folder / "nothing.tif").write_bytes(b"II*\0" + struct.pack("<I", 0))
    (folder / "no-tags.tif").write_bytes(b"II*\0" + struct.pack("<IHI", 8, 0, 0))
    tifffile.imwrite(folder / "deep.tif", np.full((64, 64, 3), 7, dtype=np.uint16), photometric="rgb")
    tifffile.imwrite(folder / "stack.tif", np.zeros((5, 64, 64), dtype=np.uint8))
    tifffile.imwrite(
        folder / "huge.tif", np.zeros((512, 512, 3), dtype=np.uint8), tile=(256, 256), photometric="rgb"
    )
    claim_size(folder / "huge.tif", 2**31 - 1, 2**31 - 1)
    write_bomb(folder / "bomb.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)).save(
        folder / "cut.jpg"
    )
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:9000])
    said = {"zero.svs": "empty", "text.svs": "OpenSlide does not know", "nothing.tif": "holds no picture"}
    said |= {"no-tags.tif": "holds no picture", "deep.tif": "uint16", "stack.tif": "axes QYX"}
    said |= {"huge.tif": "more pixels than its 4 tiles", "bomb.png": "too large", "cut.jpg": "truncated"}
    if data is not None:
        for share in (0.02, 0.5, 0.98):
            (folder / f"cut-{share}.svs").write_bytes(data[: int(len(data) * share)])
            said[f"cut-{share}.svs"] = "damaged or truncated"
    return said


def test_broken_files_take_one_line(tmp_path: Path) -> None:
    said = broken(tmp_path, None)
    for name, reason in said.items():
        with pytest.raises(FileError, match=reason) as caught:
            open_slide(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    for name, reason in {"absent.svs": "no such file", ".": "without DICOM"}.items():
        with pytest.raises(FileError, match=reason):
            open_slide(tmp_path / name)


def test_damage_inside_shows_when_it_is_read(data_dir: Path, tmp_path: Path) -> None:
    data = (data_dir / "slides" / "CMU-1-Small-Region.svs").read_bytes()
    for name, reason in broken(tmp_path, data).items():
        if name.startswith("cut-"):
            with pytest.raises(FileError, match=reason):
                open_slide(tmp_path / name)
    scrambled = bytearray(data)
    scrambled[200_000:800_000] = bytes(600_000)
    (tmp_path / "scrambled.svs").write_bytes(scrambled)
    with (
        open_slide(tmp_path / "scrambled.svs") as slide,
        pytest.raises(FileError, match="damaged, cannot read level 0 at"),
    ):
        slide.thumbnail(100)


def test_real_slides(data_dir: Path) -> None:
    found = find_slides(data_dir / "slides")
    assert list(found) == ["CMU-1-Small-Region", "TCGA-CR-7395-01A-01-TS1"]
    with open_slide(found["CMU-1-Small-Region"]) as slide:
        assert (slide.dimensions, slide.mpp, slide.magnification) == ((2220, 2967), 0.499, 20)
        assert slide.thumbnail(300).shape == (300, 224, 3)
    with open_slide(found["TCGA-CR-7395-01A-01-TS1"]) as slide:
        assert (slide.mpp, slide.magnification, len(slide.level_dimensions)) == (None, None, 2)


def test_slides_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.svs", "b.OME.TIF", "a.png", ".hidden.svs", "notes.txt", "below/c.x.ndpi"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    for folder in ("visualization", "contours_geojson"):  # of patches that were laid beside the slides
        (tmp_path / folder).mkdir()
    (tmp_path / "visualization" / "z.png").write_bytes(b"x")
    for part in ("scan/1.dcm", "scan/2.dcm", "ham/h.vms", "ham/h(0,1).jpg", "run/run.json", "run/over.png"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).write_bytes(b"x")
    found = {name: path.relative_to(tmp_path).as_posix() for name, path in find_slides(tmp_path).items()}
    assert found == {
        "a": "a.svs",
        "b": "b.OME.TIF",
        "c.x": "below/c.x.ndpi",
        "h": "ham/h.vms",
        "scan": "scan",
    }
    (tmp_path / "below" / "a.tif").write_bytes(b"x")
    with pytest.raises(FileError, match="'a' is at"):
        find_slides(tmp_path)


def test_slides_need_no_torch() -> None:
    code = "import sys, xmil.slides, xmil.slides.tiling, xmil.slides.stain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
