"""Each painted square covers its patch: on the picture, in the OME-TIFF, in the GeoJSON."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import xmil
from tests.data import producers
from tests.heatmaps.tiles import read_tiles
from tests.slides.squares import (
    boxes_of,
    explanation,
    extent,
    grid,
    seen,
    tifffile,
    write_scn,
    write_tiff,
)
from xmil.core.errors import XmilError
from xmil.heatmaps import Pyramid, place_on, write_geojson, write_scores
from xmil.slides import open_slide
from xmil.slides.slide import export_frame

SIZE = (2111, 1607)  # no multiple of anything


def painted_boxes(e, slide, size):
    """Where each patch's colour lies on the picture `map`."""
    picture = np.asarray(xmil.heatmap(e, slide, picture="map", size=size, clip="none"))
    scale = xmil.heatmaps.Scale.of(e.scores, signed=e.signed, clip="none")
    wanted = scale.paint(e.scores)
    assert len(np.unique(wanted, axis=0)) == len(e)
    pixels = picture.view(np.uint32)[..., 0]
    return [extent(pixels == colour) for colour in wanted.view(np.uint32)[:, 0]]


def check_picture(e, boxes, slide, size):
    """Painted squares against the squares in the slide's own pixels: an edge is off by one pixel at most."""
    canvas = xmil.heatmaps.Canvas.fit(slide.bounds, longest=size)
    thumbnail = slide.read_area(slide.bounds, canvas.size)
    for i, found in enumerate(painted_boxes(e, slide, size)):
        exact = np.clip(
            (boxes[i].reshape(2, 2) - slide.bounds[:2]) / canvas.downsample, 0, canvas.size
        ).ravel()
        np.testing.assert_allclose(found, seen(thumbnail, i, len(boxes), exact), atol=1)
        np.testing.assert_allclose(found, exact, atol=0.5 + 1e-9)


def check_exports(e, boxes, slide, folder, frame="bounds"):
    """Raw scores, level by level, and boxes read back."""
    placed = place_on(e, slide)
    area = export_frame(placed.boxes(), slide, frame=frame)
    write_geojson(folder / "s.geojson", [placed], origin=area[:2])
    np.testing.assert_array_equal(read_tiles(folder / "s.geojson").boxes, boxes)
    write_scores(folder / "s.ome.tif", [placed], Pyramid.of(area, mpp=slide.mpp))
    with tifffile.TiffFile(folder / "s.ome.tif") as file:
        levels = [np.squeeze(level.asarray()) for level in file.series[0].levels]
    assert len(levels) >= 2
    for k, level in enumerate(levels):
        for i, score in enumerate(e.scores):
            exact = (boxes[i].reshape(2, 2) - area[:2]).ravel() / 2**k
            limit = np.tile(level.shape[::-1], 2)
            found = extent(level == score)
            np.testing.assert_allclose(found, np.clip(exact, 0, limit), atol=0.5 if k else 0)


@pytest.mark.parametrize(
    ("mpp", "edge", "stride", "at"),
    [
        (0.2517, 509, 509, (13, 7)),  # 256 px at 0.5 µm on a 40x slide
        (0.5034, 254, 254, (0, 0)),  # on a 20x slide
        (0.2517, 509, 640, (101, 55)),  # with gaps
    ],
)
def test_squares_on_the_slide(tmp_path, mpp, edge, stride, at):
    xy = grid(3, 2, edge, stride=stride, at=at)
    boxes = boxes_of(xy, edge)
    path = write_tiff(tmp_path / "s1.tif", SIZE, boxes, mpp=mpp)
    with open_slide(path) as slide:
        assert slide.mpp == pytest.approx(mpp, rel=1e-6)
        assert len(slide.level_dimensions) == 3
        for size in (187, 333, 1024, 2111):
            check_picture(explanation(xy, edge), boxes, slide, size)
        check_exports(explanation(xy, edge), boxes, slide, tmp_path)


@pytest.mark.parametrize("frame", ["bounds", "level0"])
def test_slides_with_a_bounds_offset(tmp_path, frame):
    bounds, size = (701, 433, 1999, 1502), (3001, 2404)
    xy = grid(3, 2, 508, at=(760, 470))
    boxes = boxes_of(xy, 508)
    path = write_scn(tmp_path / "s1.scn", size, boxes, mpp=0.252, bounds=bounds)
    with open_slide(path) as slide:
        assert slide.bounds == bounds
        check_picture(explanation(xy, 508), boxes, slide, 777)
        check_exports(explanation(xy, 508), boxes, slide, tmp_path, frame=frame)


def test_overlapping_patches_are_averaged(tmp_path):
    xy = grid(6, 5, 512, stride=256, at=(3, 5))
    boxes = boxes_of(xy, 512)
    path = write_tiff(tmp_path / "s1.tif", SIZE, boxes, mpp=0.25)
    scores = np.arange(len(xy), dtype=np.float32)
    with open_slide(path) as slide:
        e = explanation(xy, 512, scores=scores)
        write_scores(tmp_path / "s.ome.tif", [e], Pyramid.of(export_frame(e.boxes(), slide), mpp=slide.mpp))
    painted = np.squeeze(tifffile.imread(tmp_path / "s.ome.tif"))
    for x, y in ((10, 10), (300, 10), (600, 700), (1700, 1500), (3, 5), (1794, 1540), (1795, 5)):
        over = (boxes[:, 0] <= x) & (x < boxes[:, 2]) & (boxes[:, 1] <= y) & (y < boxes[:, 3])
        wanted = scores[over].mean() if over.any() else np.nan
        assert painted[y, x] == pytest.approx(wanted, nan_ok=True)


LAYOUTS = {
    "clam": (lambda root: (producers.clam_patches(root), producers.clam_features(root))[1], {}, 0.25),
    "clam pt": (
        lambda root: (producers.clam_patches(root), producers.clam_features(root), producers.clam_pt(root))[
            2
        ],
        {},
        0.25,
    ),
    "trident": (producers.trident, {}, 0.25),
    "trident f16": (lambda root: producers.trident(root, dtype=np.float16), {}, 0.25),
    "stamp 2": (producers.stamp2, {}, 0.25),
    "stamp 2.0": (lambda root: producers.stamp2(root, version="2.0.1"), {}, 0.25),
    "marugoto": (producers.marugoto, {}, 0.5),  # 256 µm are 512 px at 0.5 µm
    "slideflow": (producers.slideflow, {}, 0.25),
    "slideflow npy": (lambda root: producers.slideflow(root, zipped=False), {}, 0.25),
    "tiatoolbox": (producers.tiatoolbox, {"patch_size": producers.EDGE}, 0.25),
    "spatialdata": (lambda root: producers.spatialdata(root, shuffle=False), {}, 0.25),
    "gigapath": (producers.gigapath, {}, 0.25),
    "paper pt": (producers.paper, {}, 0.25),
    "paper npz": (lambda root: producers.paper(root, container="npz"), {}, 0.25),
    "paper folder": (lambda root: producers.paper(root, container="folder"), {}, 0.25),
    "plain": (
        lambda root: producers.plain(root, container="npz", coords=True),
        {"patch_size": producers.EDGE},
        0.25,
    ),
}


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    """The producers' six patches on a slide, at each mpp."""
    root = tmp_path_factory.mktemp("slides")
    return {
        mpp: write_tiff(root / f"s-{mpp}.tif", (3600, 3700), producers.BOXES, mpp=mpp) for mpp in (0.25, 0.5)
    }


def _folder(path):
    path.mkdir()
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(tmp_path, squares, layout):
    write, drawing, mpp = LAYOUTS[layout]
    if layout in ("tiatoolbox", "spatialdata"):
        pytest.importorskip("zarr", reason="zarr is not installed")
    bag = xmil.read_bag(write(_folder(tmp_path / "files")))
    model = xmil.create_model("attnmil", in_dim=bag.dim, n_classes=2, seed=0)
    e = replace(
        xmil.explain(model, bag, method="lrp", target=1), scores=explanation(producers.XY, 512).scores
    )
    e.save(tmp_path / "e.parquet")
    saved = xmil.Explanation.load(tmp_path / "e.parquet")
    with open_slide(squares[mpp]) as slide:
        placed = place_on(saved, slide, **drawing)
        np.testing.assert_array_equal(placed.boxes(), producers.BOXES)
        check_picture(placed, producers.BOXES, slide, 800)
        check_exports(placed, producers.BOXES, slide, tmp_path)


def test_coordinates_that_wait_for_the_mpp(tmp_path):
    """STAMP's microns on a slide whose mpp is no round number: within half a level-0 pixel."""
    mpp, edge = 0.2457, 256.0
    um = np.array([[0.0, 0.0], [256.0, 0.0], [0.0, 256.0]])
    boxes = np.rint(boxes_of(um, edge) / mpp).astype(int)
    path = write_tiff(tmp_path / "s1.tif", (2222, 2123), boxes, mpp=mpp)
    e = explanation(None, None, raw_coords=um, unit="um", raw_edge=edge)
    with pytest.raises(XmilError, match="microns; pass the slide's `mpp=`"):
        xmil.heatmap(e, picture="map")
    with open_slide(path) as slide:
        check_picture(e, boxes, slide, 500)
        assert np.abs(place_on(e, slide).boxes() - boxes_of(um, edge) / mpp).max() <= 1


def test_a_slide_of_another_case_is_refused(tmp_path):
    path = write_tiff(tmp_path / "s1.tif", (600, 500), boxes_of(grid(2, 2, 100), 100), mpp=0.5)
    with pytest.raises(XmilError, match="0 of 4 patches lie on this slide of 600 x 500 px"):
        xmil.heatmap(explanation(grid(2, 2, 512, at=(9000, 9000)), 512), path)
    with pytest.raises(XmilError, match="6 of 30 patches"):  # coordinates of twice the resolution
        xmil.heatmap(
            explanation(grid(6, 5, 200), 200), write_tiff(tmp_path / "s2.tif", (550, 410), [], mpp=0.5)
        )
