"""Figures: text that fits and does not overlap, words of the colour bars, sheets of patches, every format."""

from __future__ import annotations

import functools
import io
import operator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

import xmil
from tests.slides.squares import boxes_of, colours, explanation, grid, write_tiff
from xmil.core.errors import XmilError
from xmil.core.task import Target
from xmil.heatmaps import Caption, Picture, Scale, beyond_scale, blend, ends, extremes, subtitle
from xmil.heatmaps.panel import (
    DPI,
    WIDEST,
    Heading,
    PanelColumn,
    Ruler,
    draw_panel,
    fit_text,
    text_width,
)
from xmil.slides import open_slide

XY, EDGE = grid(8, 5, 100, at=(40, 30)), 100


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = write_tiff(
        tmp_path_factory.mktemp("slide") / "s1.tif", (1000, 640), boxes_of(XY, EDGE), mpp=0.5, steps=(2,)
    )
    with open_slide(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def several():
    rng = np.random.default_rng(0)
    e = explanation(XY, EDGE, scores=rng.standard_t(2, size=len(XY)))
    unsigned = explanation(XY, EDGE, scores=rng.uniform(size=len(XY)), method="attention", signed=False)
    return [
        e,
        unsigned,
        replace(e, method="ig", target=Target(1, 0, "a class with quite a long name", "another one")),
    ]


def texts(figure):
    """Every text with its place in pixels."""
    figure.set_dpi(DPI)
    renderer = FigureCanvasAgg(figure).get_renderer()
    found = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    return {text: text.get_window_extent(renderer) for text in found if text.get_text()}


def check_layout(figure):
    """All text inside the figure, none over another, none over a picture but the ruler's."""
    placed = texts(figure)
    width, height = figure.get_size_inches() * DPI
    pictures = [axes.get_window_extent() for axes in figure.axes]
    for text, box in placed.items():
        assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= -1, text.get_text()
        if text in figure.texts:
            assert not any(_overlap(box, other) for other in pictures), text.get_text()
    for (a, first), (b, second) in combinations(placed.items(), 2):
        assert not _overlap(first, second), (a.get_text(), b.get_text())


def _overlap(a, b, slack=1.5):
    return min(a.x1, b.x1) - max(a.x0, b.x0) > slack and min(a.y1, b.y1) - max(a.y0, b.y0) > slack


@pytest.mark.parametrize("kind", ["overlay", "side", "panel", "patches"])
@pytest.mark.parametrize("size", [150, 700])
def test_nothing_overlaps(slide, several, kind, size):
    figure = xmil.heatmap(
        several,
        slide,
        picture=kind,
        size=size,
        label="HPV+",
        prediction="HPV- (p = 0.71)",
        region=(100, 60, 300, 90),
    )
    assert isinstance(figure, Picture)
    check_layout(figure)


def test_long_names_are_made_to_fit(slide, several):
    e = replace(
        several[0], bag="TCGA-" + "0123456789-" * 12, target=Target(1, name="an endless class name " * 5)
    )
    check_layout(xmil.heatmap([e, e], slide, size=300, label="x" * 90))


def test_a_tall_slide_and_many_methods(several):
    tall = grid(1, 12, 100)
    many = [
        replace(several[0], method=f"m{i}", coords=tall, scores=several[0].scores[: len(tall)])
        for i in range(7)
    ]
    check_layout(xmil.heatmap(many, size=500))


def words(figure):
    return [text.get_text() for text in texts(figure)]


def test_what_a_panel_says(slide, several):
    found = words(xmil.heatmap(several[:2], slide, label="HPV+", prediction="HPV- (p = 0.71)"))
    for wanted in (
        "s1",
        "Slide",
        "LRP",
        "for HPV+",
        "Attention",
        "supports HPV+",
        "speaks against HPV+",
    ):
        assert wanted in found
    assert "label HPV+   ·   predicted HPV- (p = 0.71)" in found
    assert {"low attention", "high attention", "0", "100 µm"} <= set(found)
    assert any(text.startswith("≥ ") for text in found)  # scores beyond the whiskers
    assert not any(text.startswith("≥ ") for text in words(xmil.heatmap(several[0], slide, clip="none")))


def test_patches_beyond_the_scale_are_told(several):
    """Heavy tails: a fifth of the patches look alike, and the legend says so; clipped less, it does not."""
    steps = np.arange(1.0, len(XY) + 1)
    scores = np.where(steps % 5 == 0, 10 * steps, 0.01 * steps)
    tailed = replace(several[0], scores=scores.astype(np.float32))
    reds = Scale.of(scores, signed=True).paint(scores[scores > 1])
    assert (reds == reds[0]).all()
    told = beyond_scale(0.2, Scale.of(scores, signed=True).times_beyond(scores))
    assert "20 % of patches" in told
    assert "times the scale" in told
    for kind in ("overlay", "panel"):
        figure = xmil.heatmap(tailed, picture=kind, size=300)
        check_layout(figure)
        assert " ".join(text.get_text() for text in texts(figure)).count(told) == 1  # whole, in lines
    for quiet in ({"clip": "none"}, {"clip": "percentile"}, {"scale": Scale(-500, 500, True, "red-blue")}):
        assert "beyond" not in "".join(text.get_text() for text in texts(xmil.heatmap(tailed, **quiet)))


def test_words_of_other_tasks(several):
    assert ends(several[0], "cox") == ("lowers the risk", "raises the risk")
    assert ends(several[0], "regression") == ("lowers the value", "raises the value")
    assert ends(several[2])[1] == "supports a class with quite a long name over another one"
    assert subtitle(several[0], "survival") == "for the risk"
    assert ends(replace(several[0], target=Target(2))) == ("speaks against class 2", "supports class 2")
    assert Caption("s1").facts() == ""


def test_pictures_are_shown_pixel_for_pixel(slide, several):
    """The slide's own pixels appear unchanged in the figure, in the place of its axes."""
    figure = xmil.heatmap(several[0], slide, picture="side", size=400)
    held = io.BytesIO(figure._repr_png_())
    drawn = np.asarray(Image.open(held).convert("RGB"))
    axes = figure.axes[0].get_window_extent()
    x, y = round(axes.x0), round(drawn.shape[0] - axes.y1)
    wanted = slide.read_area(slide.bounds, (400, 256))
    np.testing.assert_array_equal(drawn[y + 4 : y + 180, x + 4 : x + 390], wanted[4:180, 4:390])


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_formats(tmp_path, slide, several, suffix, magic):
    figure = xmil.heatmap(several[:2], slide, size=200)
    for name in "ab":
        figure.write(tmp_path / f"{name}.{suffix}")
    assert (tmp_path / f"a.{suffix}").read_bytes().startswith(magic)
    if suffix == "svg":
        assert (
            "supports HPV+" in (tmp_path / "a.svg").read_text()
            or "<defs>" in (tmp_path / "a.svg").read_text()
        )
    with pytest.raises(XmilError, match="Unknown picture format"):
        figure.write(tmp_path / "a.bmp")


def test_map_is_transparent_without_patches(slide, several):
    picture = xmil.heatmap(several[0], slide, picture="map", size=500)
    assert picture.mode == "RGBA"
    assert picture.size == (500, 320)
    alpha = np.array(picture)[..., 3]
    assert alpha[15:265, 20:420].min() == 255
    alpha[15:265, 20:420] = 0
    assert alpha.max() == 0


def test_own_canvas_without_a_slide(several):
    check_layout(xmil.heatmap(several))
    assert xmil.heatmap(several[0], picture="map").size == (900, 600)  # patches and half a patch around
    for kind in ("side", "patches"):
        with pytest.raises(XmilError, match="needs the slide"):
            xmil.heatmap(several[0], picture=kind)


def test_overlay_greys_all_of_the_tissue(slide, several):
    heat = np.zeros((10, 10, 4), dtype=np.uint8)
    heat[2:5, 2:5] = (255, 0, 0, 255)
    tissue = np.full((10, 10, 3), (200, 80, 160), dtype=np.uint8)
    mixed = blend(tissue, heat, alpha=0.5)
    grey = 0.299 * 200 + 0.587 * 80 + 0.114 * 160
    np.testing.assert_allclose(
        mixed[6:], grey, atol=1
    )  # vivid tissue without patches would look like evidence
    assert (blend(tissue, heat, alpha=0.5, tissue="colour")[6:] == tissue[6:]).all()
    np.testing.assert_allclose(mixed[3, 3], [(255 + grey) / 2, grey / 2, grey / 2], atol=2)
    np.testing.assert_allclose(blend(tissue, heat, alpha=0.5, tissue="colour")[3, 3], [228, 40, 80], atol=2)
    assert (blend(tissue, heat, alpha=0.0, tissue="colour") == tissue).all()
    for bad in ({"alpha": 1.5}, {"alpha": 0.5, "tissue": "blue"}):
        with pytest.raises(XmilError):
            blend(tissue, heat, **bad)


def test_region_zooms(slide, several):
    """A region inside one patch is all of that patch's colour."""
    x, y = XY[10]
    picture = np.asarray(xmil.heatmap(several[0], slide, picture="map", region=(x + 5, y + 5, 80, 60)))
    assert len(np.unique(picture.reshape(-1, 4), axis=0)) == 1
    assert picture.shape[1] / picture.shape[0] == pytest.approx(80 / 60, rel=0.01)
    with pytest.raises(XmilError, match="no part of the slide's area 0,0,1000,640"):
        xmil.heatmap(several[0], slide, region=(5000, 0, 10, 10))


def test_sheets_show_the_extremes(slide, several):
    e = several[0]
    high, low = extremes(e, 6)
    assert high == np.argsort(-e.scores, kind="stable")[:6].tolist()
    assert low == np.argsort(e.scores, kind="stable")[:6].tolist()
    positive = replace(e, scores=np.abs(e.scores))
    assert extremes(positive, 3)[1] == []
    assert "no patch with a negative score for HPV+" in words(
        xmil.heatmap(positive, slide, picture="patches")
    )
    few = replace(several[1], scores=several[1].scores[:3], coords=XY[:3])
    assert sorted(functools.reduce(operator.iadd, extremes(few, 8), [])) == [0, 1, 2]


def test_sheets_cut_the_right_patch(slide, several):
    figure = xmil.heatmap(several[0], slide, picture="patches", top=3)
    high, low = extremes(several[0], 3)
    images = [axes.get_images()[0].get_array() for axes in figure.axes]
    for i, image in zip([*high, *low], images, strict=True):
        inner = image[20:-20, 20:-20]
        assert (inner == colours(len(XY))[i]).all()


def test_an_open_slide_stays_open_and_paths_do(slide, several):
    xmil.heatmap(several[0], slide, size=100)
    xmil.heatmap(several[0], str(slide.path), size=100)
    assert slide.thumbnail(50).shape == (32, 50, 3)


@pytest.mark.parametrize("region", [(1, 2), 5, (1, 2, "a", 4), (float("nan"), 0, 10, 10)])
def test_bad_regions(slide, several, region):
    with pytest.raises(XmilError, match="region"):
        xmil.heatmap(several[0], slide, region=region)


def test_patches_off_the_slide_are_told(slide, several):
    far = np.concatenate([XY, XY[:4] + 100_000])
    with pytest.warns(UserWarning, match=f"{len(XY)} of {len(far)} patches lie on this slide"):
        xmil.heatmap(explanation(far, EDGE), slide, picture="map")
    with pytest.raises(XmilError, match="the explained slide has 77 x 88"):
        xmil.heatmap(explanation(XY, EDGE, slide_size=(77, 88)), slide, picture="map")


def test_bad_requests(slide, several):
    with pytest.raises(XmilError, match="no explanation"):
        xmil.heatmap([], slide)
    with pytest.raises(XmilError, match="Unknown picture"):
        xmil.heatmap(several[0], slide, picture="poster")
    with pytest.raises(XmilError, match="different places"):
        xmil.heatmap([several[0], replace(several[1], coords=XY + 1)], slide)
    with pytest.raises(XmilError, match="no coordinates"):
        xmil.heatmap(replace(several[0], coords=None), slide)


def test_rulers_are_round():
    assert Ruler.fit(1000, 0.5) == Ruler(200.0, "100 µm")
    assert Ruler.fit(1200, 30.0).name == "5 mm"
    assert Ruler.fit(1000, None) is None


def test_text_is_measured():
    assert fit_text("short", 500, 20) == ("short", pytest.approx(20 * 72 / DPI))
    shown, points = fit_text("a very long line of words " * 5, 200, 20)
    assert shown.endswith("…")
    assert text_width(shown, points * DPI / 72) <= 200
    assert text_width("a $5 b $6", 20) > text_width("a 5 b 6", 20)


def test_names_in_any_script_are_drawn(tmp_path: Path) -> None:
    """Letters that no font has are spelt, which is said once; file names have no spaces."""
    e = xmil.Explanation(
        np.array([1.0, -1.0], np.float32), np.array([0.0, 1.0], np.float32), 1.0, "lrp",
        xmil.Target(1, name="腫瘍 \N{SLIGHTLY SMILING FACE}"), True, bag="スライド",
        coords=np.array([[0, 0], [256, 0]]), patch_size=256,
    )  # fmt: skip
    (tmp_path / "slides").mkdir()
    e.save(tmp_path / "slides" / "スライド.parquet")
    drawn = xmil.draw_slides(tmp_path, pictures=["panel", "overlay"], to=["png"])
    assert not drawn.failed
    names = [path.name for path in (tmp_path / "heatmaps" / "overlay").iterdir()]
    assert names == ["スライド.lrp.腫瘍_\N{SLIGHTLY SMILING FACE}.png"]


@pytest.mark.parametrize(("edge", "rows"), [(1200, 1), (2400, 3)])
def test_a_panel_is_never_too_wide(edge: int, rows: int) -> None:
    """Five pictures of 1,200 px stand in a row; of 2,400 px, two do."""
    pixels = np.zeros((30, edge, 3), np.uint8)
    columns = [PanelColumn(str(i), "", (pixels,)) for i in range(5)]
    figure = draw_panel(columns, heading=Heading("a slide"))
    assert figure.get_figwidth() * DPI <= WIDEST
    assert len({round(axes.get_position().y0, 6) for axes in figure.axes}) == rows
    check_layout(figure)
