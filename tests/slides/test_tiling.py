"""TissueMask and patches: counts and boxes by hand, background out, each region read once."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from PIL import Image

import xmil
from tests.slides.pyramids import GLASS, textured, write_pyramid
from tests.slides.squares import write_scn
from xmil.cli.inspect import inspect_slide
from xmil.core.errors import FileError, InputError
from xmil.evaluate import read_polygons
from xmil.slides import open_slide
from xmil.slides.tiling import (
    TileSettings,
    TissueMask,
    clean_mask,
    find_tissue,
    grey_std,
    outlines,
    read_patch,
    tile_slide,
    tissue_geojson,
    tissue_mask,
    write_tiling,
)

pytest.importorskip("openslide")
shapely = pytest.importorskip("shapely")

BOX = (512, 256, 1024, 768)  # tissue: 4 x 3 patches of 256


def tiled(path: Path, **settings: object):
    with open_slide(path) as slide:
        return tile_slide(slide, TileSettings(**settings))


@pytest.fixture
def slide_path(tmp_path: Path) -> Path:
    return write_pyramid(tmp_path / "s.tif", textured([BOX], (2200, 1500)))


def grid_of(box: tuple[int, int, int, int], edge: int) -> list[list[int]]:
    x, y, width, height = box
    return [[a, b] for b in range(y, y + height, edge) for a in range(x, x + width, edge)]


def test_patches_lie_on_the_tissue_and_nowhere_else(slide_path: Path) -> None:
    tiling = tiled(slide_path, min_tissue=0.5)
    assert tiling.xy0.tolist() == grid_of(BOX, 256)
    assert (tiling.edge0, tiling.mpp, tiling.flat) == (256, pytest.approx(0.5, rel=1e-4), 0)
    assert tiling.xy0.dtype == np.int64


@pytest.mark.parametrize(
    ("mpp", "asked", "edge"),
    [(0.25, {}, 512), (0.37, {}, 346), (0.5, {"mpp": 1.0}, 512), (0.25, {"magnification": 40}, 256)],
)
def test_edges_follow_the_resolution(mpp: float, asked: dict[str, float], edge: int, tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 2100, 1500)], (2100, 1500)), mpp=mpp)
    tiling = tiled(path, **asked)
    assert tiling.edge0 == edge
    assert len(tiling.xy0) == (2100 // edge) * (1500 // edge)


def test_overlapping_patches(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 1024, 512)], (1024, 512)))
    tiling = tiled(path, overlap=64)
    columns, rows = range(0, 1024 - 256 + 1, 192), range(0, 512 - 256 + 1, 192)
    assert tiling.xy0.tolist() == [[x, y] for y in rows for x in columns]


def test_the_grid_starts_at_the_bounds(slide_path: Path) -> None:
    with open_slide(slide_path) as slide:
        slide.bounds = (500, 240, 1100, 800)
        tiling = tile_slide(slide, TileSettings(min_tissue=0.5))
    assert tiling.xy0.min(axis=0).tolist() == [500, 240]
    assert (tiling.xy0.max(axis=0) + 256 <= [1600, 1040]).all()


def test_flat_patches_are_out(tmp_path: Path) -> None:
    pixels = textured([BOX], (2200, 1500))
    pixels[256:512, 512:768] = (190, 110, 160)  # stained, but nothing in it
    tiling = tiled(write_pyramid(tmp_path / "s.tif", pixels), min_tissue=0.5)
    assert tiling.flat == 1
    assert [512, 256] not in tiling.xy0.tolist()
    assert len(tiling.xy0) == 11


def test_each_patch_is_read_once(slide_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_slide(slide_path) as slide:
        calls: list[tuple[int, int, int, tuple[int, int]]] = []
        read = type(slide)._read

        def counted(self, level, x, y, size):
            calls.append((level, x, y, size))
            return read(self, level, x, y, size)

        monkeypatch.setattr(type(slide), "_read", counted)
        tiling = tile_slide(slide, TileSettings(min_tissue=0.5))
    patches = [call for call in calls if call[3] == (256, 256)]
    assert len(patches) == len(set(patches)) == len(tiling.xy0)
    seen = np.zeros((1500, 2200), dtype=int)
    for _, x, y, (width, height) in patches:
        seen[y : y + height, x : x + width] += 1
    assert seen.max() == 1
    assert len(calls) - len(patches) <= 2  # the thumbnail


def test_shares_are_exact() -> None:
    mask = np.zeros((10, 10), dtype=bool)
    mask[2:7, 3:9] = True
    tissue = TissueMask(mask, np.zeros((10, 10, 3), dtype=np.uint8), (7.5, 7.5))
    fine = mask.repeat(30, 0).repeat(30, 1)  # a quarter of a level-0 pixel each
    corners = np.array([[0, 0], [10, 11], [37, 22], [44, 44]])
    expected = [fine[4 * y : 4 * (y + 25), 4 * x : 4 * (x + 25)].mean() for x, y in corners]
    np.testing.assert_allclose(tissue.shares(corners, 25), expected, atol=1e-9)


def test_slides_without_tissue(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blank = np.clip(rng.normal(GLASS, 2, (900, 900, 3)), 0, 255).astype(np.uint8)
    for name, pixels in {
        "white": blank,
        "black": np.zeros_like(blank),
        "pure": np.full_like(blank, 255),
    }.items():
        with pytest.raises(FileError, match="no tissue found"):
            tiled(write_pyramid(tmp_path / f"{name}.tif", pixels))
    tiny = write_pyramid(tmp_path / "tiny.tif", textured([(0, 0, 100, 100)], (100, 100)), levels=())
    with pytest.raises(FileError, match="smaller than a patch"):
        tiled(tiny)
    dots = textured([(300, 300, 40, 40)], (900, 900))
    with pytest.raises(FileError, match="no tissue found"):
        tiled(write_pyramid(tmp_path / "dots.tif", dots))


def test_a_slide_all_of_tissue_is_not_cut_in_two() -> None:
    """Otsu would put its threshold between pale and dark tissue."""
    pixels = textured([(0, 0, 600, 600)], (600, 600))
    pixels[:, :300] = np.clip(pixels[:, :300].astype(int) - 60, 0, 255)
    pixels[:8] = GLASS
    assert tissue_mask(pixels)[20:].mean() > 0.99


def test_ink_and_specks_are_no_tissue() -> None:
    pixels = textured([(100, 100, 300, 300)], (600, 600))
    pixels[450:550, 450:550] = 3
    pixels[50, 50] = 0
    mask = clean_mask(tissue_mask(pixels), smallest=400)
    assert mask[110:390, 110:390].all()
    assert not mask[460:540, 460:540].any()
    assert not mask[40:60, 40:60].any()


def test_mpp_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([BOX], (2200, 1500)), mpp=None)
    with pytest.raises(FileError, match="pass `slide_mpp=`"):
        tiled(path)
    given = tiled(path, slide_mpp=0.5)
    assert (len(given.xy0) >= 12, given.inferred) == (True, ("mpp as given, not from the file",))
    with open_slide(path) as slide:
        slide.magnification = 20.0
        with pytest.raises(FileError, match="objective power is 20"):
            tile_slide(slide)
        by_power = tile_slide(slide, TileSettings(magnification=20))
    assert by_power.mpp == 0.5
    assert "by convention from the objective power 20" in by_power.inferred[0]


def test_patches_are_not_enlarged(slide_path: Path) -> None:
    with pytest.raises(InputError, match=r"too coarse for patches at 0\.25"):
        tiled(slide_path, mpp=0.25)


@pytest.mark.parametrize(
    "wrong", [{"size": 2}, {"overlap": 256}, {"mpp": 0}, {"min_tissue": 2}, {"slide_mpp": -1}]
)
def test_settings_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        TileSettings(**wrong)


def test_outlines_are_valid_and_of_the_masks_area(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    blobs = (
        np.asarray(Image.fromarray(rng.integers(0, 255, (20, 30), dtype=np.uint8)).resize((300, 200))) > 128
    )
    ragged = blobs ^ (rng.random(blobs.shape) > 0.97)  # diagonal contacts and single pixels
    for mask in (blobs, ragged, np.ones((5, 7), dtype=bool)):
        tissue = TissueMask(mask, np.zeros((*mask.shape, 3), dtype=np.uint8), (7.3, 7.1))
        shapes = [shapely.geometry.shape(f["geometry"]) for f in tissue_geojson(tissue)["features"]]
        assert all(shape.is_valid for shape in shapes)
        area = sum(shape.area for shape in shapes)
        # each corner is cut by an eighth of a pixel, inside and outside corners alike
        corners = sum(len(ring) for rings in outlines(tissue) for ring in rings)
        assert abs(area / (7.3 * 7.1) - mask.sum()) <= corners / 8 + 1
    hole = np.ones((30, 30), dtype=bool)
    hole[10:20, 10:20] = False
    rings = outlines(TissueMask(hole, np.zeros((30, 30, 3), dtype=np.uint8), (10.0, 10.0)))
    assert [len(piece) for piece in rings] == [2]
    ring = shapely.geometry.Polygon(rings[0][1])
    assert ring.bounds == (100, 100, 200, 200)


def test_files_are_tridents(slide_path: Path, tmp_path: Path) -> None:
    tiling = tiled(slide_path, min_tissue=0.5)
    path = write_tiling(tiling, tmp_path / "out")
    assert path == tmp_path / "out" / "patches" / "s_patches.h5"
    with h5py.File(path) as file:
        about = dict(file["coords"].attrs)
        assert file["coords"][:].tolist() == grid_of(BOX, 256)
    assert about == {
        "patch_size": 256,
        "patch_size_level0": 256,
        "level0_magnification": 20,
        "target_magnification": 20,
        "overlap": 0,
        "level0_width": 2200,
        "level0_height": 1500,
        "name": "s",
        "savetodir": "patches",
        "mpp": pytest.approx(0.5, rel=1e-4),
    }
    bag = xmil.open_bag(path)
    assert (bag.format, bag.slide_id, bag.patch_size, len(bag)) == ("trident", "s", 256, 12)
    drawn = json.loads((tmp_path / "out" / "contours_geojson" / "s.geojson").read_text())
    (shape,) = [shapely.geometry.shape(f["geometry"]) for f in drawn["features"]]
    assert shape.is_valid
    assert np.abs(np.subtract(shape.bounds, (512, 256, 1536, 1024))).max() <= 20
    picture = np.asarray(Image.open(tmp_path / "out" / "visualization" / "s.png").convert("RGB"))
    assert max(picture.shape) >= 1800
    scale = 1800 / 2200
    inside, outside = picture[34 + round(384 * scale), round(640 * scale)], picture[-20, -20]
    assert (outside > 235).all()
    assert inside[1] < 150


def test_outlines_count_from_the_scanned_bounds(tmp_path: Path) -> None:
    """As QuPath shows the slide; the file names its origin, and readers of ours come back to level 0."""
    bounds = (701, 433, 1400, 1000)
    box = np.array([[0, 0, 1, 1], [1000, 700, 1512, 1212]])  # the second colour is red
    path = write_scn(tmp_path / "s.scn", (2600, 1800), box, mpp=0.5, bounds=bounds)
    tiling = tiled(path, min_std=0, drop=())  # the red is that of a pen
    write_tiling(tiling, tmp_path / "out")
    file = tmp_path / "out" / "contours_geojson" / "s.geojson"
    drawn = json.loads(file.read_text())
    assert (drawn["xmil"]["origin"], drawn["xmil"]["slide"]) == ([701, 433], "s")
    (shape,) = [shapely.geometry.shape(f["geometry"]) for f in drawn["features"]]
    assert np.abs(np.subtract(shape.bounds, (299, 267, 811, 779))).max() <= 40
    ((ring, *_),) = read_polygons(file)
    assert np.abs(ring.min(axis=0) - (1000, 700)).max() <= 40


def test_pixels_that_are_not_square_are_named(tmp_path: Path) -> None:
    for name, options in (
        ("tags.tif", {"resolution": (2e4, 4e4), "resolutionunit": "CENTIMETER", "metadata": None}),
        ("s.ome.tif", {"metadata": {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25}}),
    ):
        path = tmp_path / name
        tifffile.imwrite(path, textured([(0, 0, 500, 500)], (600, 600)), photometric="rgb", **options)
        with pytest.raises(FileError, match=r"0.5 µm wide and 0.25 µm high, not square; .*slide_mpp="):
            tiled(path)
        assert "not square" in inspect_slide(path).missing[0]
        tiled(path, slide_mpp=0.5)


def test_real_slides_by_their_tissue(data_dir: Path) -> None:
    """Every patch lies on what a pathologist would call tissue, and nearly all tissue lies under a patch."""
    with open_slide(data_dir / "slides" / "CMU-1-Small-Region.svs") as slide:
        tiling = tile_slide(slide)
        white = [slide.read_area((x, y, 257, 257), (64, 64)).min(axis=2) > 215 for x, y in tiling.xy0]
    assert (tiling.edge0, tiling.mpp) == (257, 0.499)
    assert 40 <= len(tiling.xy0) <= 50
    assert max(patch.mean() for patch in white) < 0.9
    covered = np.zeros(tiling.tissue.mask.shape, dtype=bool)
    for x, y in tiling.xy0:
        sx, sy = tiling.tissue.scale
        covered[int(y / sy) : int((y + 257) / sy), int(x / sx) : int((x + 257) / sx)] = True
    whole = covered.copy()
    whole[:] = False
    whole[: int(257 * 11 / tiling.tissue.scale[1]), : int(257 * 8 / tiling.tissue.scale[0])] = True
    assert covered[tiling.tissue.mask & whole].mean() > 0.95


def test_a_real_slide_without_mpp(data_dir: Path) -> None:
    path = data_dir / "slides" / "TCGA-CR-7395-01A-01-TS1.svs"
    with pytest.raises(FileError, match="stores no microns per pixel"):
        tiled(path)
    assert 150 <= len(tiled(path, slide_mpp=0.5).xy0) <= 170


def test_the_thumbnail_of_the_mask_covers_level_0(slide_path: Path) -> None:
    with open_slide(slide_path) as slide:
        tissue = find_tissue(slide, mpp=0.5)
    rows, columns = tissue.mask.shape
    assert (columns * tissue.scale[0], rows * tissue.scale[1]) == pytest.approx((2200, 1500))
    xs = np.nonzero(tissue.mask)[1]
    assert np.abs(np.array([xs.min(), xs.max() + 1]) * tissue.scale[0] - [512, 1536]).max() <= 20


def test_the_std_is_of_grey_values() -> None:
    patch = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    grey = np.asarray(Image.fromarray(patch).convert("L")).astype(float)
    assert grey_std(patch) == pytest.approx(grey.std(), abs=0.3)


def test_edge_patches_are_kept_on_request(tmp_path: Path) -> None:
    """With 300 x 200 px of tissue and patches of 128 px, only 2 x 1 are whole; 3 x 2 cover everything."""
    path = tmp_path / "s.png"
    noise = np.random.default_rng(0).normal((200, 120, 170), 20, size=(200, 300, 3))
    Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(path)
    asked = {"size": 128, "slide_mpp": 0.5, "drop": (), "min_tissue": 0.1}
    assert tiled(path, **asked).xy0.tolist() == [[0, 0], [128, 0]]
    tiling = tiled(path, keep_edge=True, **asked)
    assert tiling.xy0.tolist() == [[x, y] for y in (0, 128) for x in (0, 128, 256)]
    with open_slide(path) as slide:
        patch = read_patch(slide, (256, 128), edge0=128, size=128)
        assert np.array_equal(patch[:72, :44], slide.read_area((256, 128, 44, 72), (44, 72)))
    assert (patch[72:] == 255).all()
    assert (patch[:, 44:] == 255).all()
