"""Rasterisation against a slow loop over patches, clipping against a box plot, colours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmil.core.errors import XmilError
from xmil.heatmaps import Canvas, Cells, Scale, clip_limits


def slow(boxes, scores, canvas):
    """Each patch adds its score to the pixels whose centre it covers, at least to that of its own centre."""
    width, height = canvas.size
    (dx, dy), (x, y) = canvas.downsample, canvas.box[:2]
    total, count = np.zeros((height, width)), np.zeros((height, width), int)
    for (x0, y0, x1, y1), score in zip(boxes, scores, strict=True):
        columns = [i for i in range(-5, width + 5) if x0 <= x + (i + 0.5) * dx < x1]
        rows = [j for j in range(-5, height + 5) if y0 <= y + (j + 0.5) * dy < y1]
        columns = columns or [int(np.floor(((x0 + x1) / 2 - x) / dx))]
        rows = rows or [int(np.floor(((y0 + y1) / 2 - y) / dy))]
        for j in rows:
            for i in columns:
                if 0 <= i < width and 0 <= j < height:
                    total[j, i] += score
                    count[j, i] += 1
    with np.errstate(invalid="ignore"):
        return np.where(count, total / count, np.nan)


def raster(boxes, scores, canvas):
    cells = Cells.cut(boxes, canvas)
    return cells.expand(cells.average(scores))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 30),
    edge=st.integers(1, 90),
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
)
def test_any_boxes_on_any_canvas(seed, n, edge, size):
    rng = np.random.default_rng(seed)
    xy = rng.integers(-80, 300, size=(n, 2))
    boxes, scores = np.concatenate([xy, xy + edge], axis=1), rng.normal(size=n)
    canvas = Canvas((rng.integers(-20, 20), rng.integers(-20, 20), 211.0, 307.5), size)
    np.testing.assert_allclose(raster(boxes, scores, canvas), slow(boxes, scores, canvas), atol=1e-6)


def test_single_patches_keep_their_score_to_the_bit(rng):
    xy = np.stack(np.meshgrid(np.arange(40), np.arange(30)), axis=-1).reshape(-1, 2) * 256
    scores = (rng.normal(size=len(xy)) * 10.0 ** rng.integers(-30, 5, len(xy))).astype(np.float32)
    painted = raster(np.concatenate([xy, xy + 256], axis=1), scores, Canvas((0, 0, 10240, 7680), (640, 480)))
    assert set(painted.ravel().tolist()) == set(scores.tolist())
    np.testing.assert_array_equal(painted[8::16, 8::16].ravel(), scores)


def test_neighbours_share_an_edge_and_no_pixel():
    xy = np.stack(np.meshgrid(np.arange(17), np.arange(13)), axis=-1).reshape(-1, 2) * 101
    cells = Cells.cut(np.concatenate([xy, xy + 101], axis=1), Canvas((0, 0, 17 * 101, 13 * 101), (333, 257)))
    assert (cells.expand(cells.counts) == 1).all()


def test_nothing_lies_outside():
    painted = raster(
        np.array([[-500, -500, -100, -100], [900, 0, 1000, 50]]),
        [1.0, 2.0],
        Canvas((0, 0, 800, 800), (80, 80)),
    )
    assert np.isnan(painted).all()
    with pytest.raises(XmilError, match="must have an area"):
        Canvas((0, 0, 0, 10), (1, 1))


def test_colours_expand_like_values(rng):
    xy = rng.integers(0, 700, size=(20, 2))
    cells = Cells.cut(np.concatenate([xy, xy + 60], axis=1), Canvas((0, 0, 800, 600), (311, 233)))
    scale = Scale.of(np.arange(20) - 10.0, signed=True)
    values = cells.average(np.arange(20) - 10.0)
    np.testing.assert_array_equal(cells.expand(scale.paint(values)), scale.paint(cells.expand(values)))


@pytest.mark.parametrize("seed", range(5))
def test_whiskers_are_those_of_a_box_plot(seed):
    values = np.random.default_rng(seed).standard_t(2, size=200 + seed)
    first, third = np.percentile(values, [25, 75])
    reach = 1.5 * (third - first)
    inside = values[(values >= first - reach) & (values <= third + reach)]
    assert clip_limits(values) == pytest.approx((inside.min(), inside.max()))


def test_clip_limits():
    values = np.concatenate([np.arange(100.0), [5000.0]])
    assert clip_limits(values, clip="none") == (0.0, 5000.0)
    assert clip_limits(values)[1] == 99.0
    low, high = clip_limits(values, clip="percentile", percentile=90)
    assert (low, high) == tuple(np.percentile(values, [10, 90]))
    assert clip_limits([3.0, 3.0]) == (3.0, 3.0)
    for bad, words in (
        ({"clip": "box"}, "Unknown clip"),
        ({"clip": "percentile", "percentile": 40}, "percentile"),
    ):
        with pytest.raises(XmilError, match=words):
            clip_limits(values, **bad)
    with pytest.raises(XmilError, match="finite"):
        clip_limits([1.0, np.nan])
    with pytest.raises(XmilError, match="no scores"):
        clip_limits([])


def test_signed_colours_are_centred_at_zero():
    scale = Scale.of([-1.0, 0.0, 4.0], signed=True, clip="none")
    blue, white, red, strong = scale.paint([-4.0, 0.0, 2.0, 4.0]).astype(int)
    assert white[:3].min() > 240
    assert red[0] > red[2]
    assert strong[0] - strong[2] > red[0] - red[2]
    assert blue[2] > blue[0]
    assert scale.paint([-99.0])[0].tolist() == blue.tolist()
    assert scale.paint([np.nan])[0].tolist() == [0, 0, 0, 0]
    np.testing.assert_array_equal(scale.paint([1e-9, -1e-9])[0], scale.paint([0.0])[0])


def test_a_scale_says_where_it_cuts():
    values = np.concatenate([np.linspace(-1, 1, 100), [50.0]])
    assert Scale.of(values, signed=True).cut == (False, True)
    assert Scale.of(-values, signed=True).cut == (True, False)
    assert Scale.of(values, signed=True, clip="none").cut == (False, False)


def test_constant_scores_have_a_colour():
    for signed in (True, False):
        painted = Scale.of(np.zeros(5), signed=signed).paint(np.zeros(5))
        assert (painted[:, 3] == 255).all()
        assert len(np.unique(painted, axis=0)) == 1


def test_an_unknown_colour_map_is_refused():
    with pytest.raises(XmilError, match="Unknown colour map"):
        Scale.of([1.0, 2.0], signed=False, colours="nope").paint([1.0])
