"""Maps inside patches as a sheet and as tiles for QuPath."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.heatmaps.tiles import read_tiles
from tests.slides.pyramids import textured, write_pyramid
from xmil.core.errors import InputError, UnknownNameError
from xmil.core.inside import Inside, InsideAudit
from xmil.heatmaps import draw_between, draw_inside, half_level, lay_over, write_inside_geojson


def made(k: int = 3) -> Inside:
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(k, 4, 4)).astype(np.float32)
    corners = np.array([[64 * i, 32] for i in range(k)])
    audit = InsideAudit(*(np.zeros(k, dtype=np.float32) for _ in range(4)))
    return Inside(maps, np.hstack([corners, corners + 60]), np.arange(k), audit, "tokens", "1", "tiny", "s")


def test_places_lie_in_the_geojson_where_they_lie_in_the_patch(tmp_path: Path) -> None:
    inside = made()
    write_inside_geojson(tmp_path / "s.geojson", inside)
    tiles = read_tiles(tmp_path / "s.geojson")
    np.testing.assert_array_equal(tiles.boxes.astype(int), inside.cells().reshape(-1, 4))
    np.testing.assert_allclose(tiles.measurements["inside-tokens:1"], inside.maps.ravel(), rtol=1e-6)


def test_the_sheet_shows_each_patch_beside_its_map(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 320, 256)], (320, 256)), levels=())
    figure = draw_inside(made(), path)
    assert len([axis for axis in figure.axes if axis.images]) == 6
    assert len([axis for axis in made().plot().axes if axis.images]) == 3
    with pytest.raises(UnknownNameError, match="scale 'slide'"):
        draw_inside(made(), scale="slide")
    with pytest.raises(InputError, match="'alpha'"):
        draw_inside(made(), alpha=2)


def words_of(inside: Inside, **look: str) -> list[str]:
    return [text.get_text() for text in draw_inside(inside, **look).texts]


def test_patches_for_and_against_the_target_stand_apart() -> None:
    inside = made()
    inside.audit.score[:] = (0.2, -0.1, 0.3)
    words = words_of(inside)
    for_it = words.index("patches that support class 1")
    against = words.index("patches that speak against class 1")
    assert (
        for_it
        < words.index("score 0.2")
        < words.index("score 0.3")
        < against
        < words.index("score \N{MINUS SIGN}0.1")
    )
    inside.audit.score[:] = 1
    assert "patches that speak against class 1" not in words_of(inside)


def test_full_colour_is_the_largest_value_of_the_patch_or_of_all(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 320, 256)], (320, 256)), levels=())
    largest = np.abs(made().maps).max(axis=(1, 2))
    for scale, limits in (("patch", largest), ("sheet", np.full(3, largest.max()))):
        words = [text.get_text() for text in draw_inside(made(), path, scale=scale).texts]
        assert [word for word in words if word.startswith("full colour: ±")] == [
            f"full colour: ±{limit:.3g}" for limit in limits
        ]


def test_colour_grows_with_the_value_and_leaves_tissue_of_no_value_grey() -> None:
    tissue = np.random.default_rng(0).integers(0, 255, size=(1, 5, 3), dtype=np.uint8)
    over = lay_over(tissue, np.array([[-2.0, -1.0, 0.0, 1.0, 2.0]]), limit=2.0, alpha=1.0)[0].astype(int)
    assert np.ptp(over[2]) == 0  # grey
    assert over[0, 2] > over[0, 0]  # blue
    assert over[4, 0] > over[4, 2]  # red
    flat = np.full((1, 5, 3), 128, dtype=np.uint8)
    even = lay_over(flat, np.array([[-2.0, -1.0, 0.0, 1.0, 2.0]]), limit=2.0, alpha=1.0)[0].astype(float)
    np.testing.assert_allclose(even[[1, 3]], (even[[0, 4]] + even[2]) / 2, atol=1)


def test_the_picture_keeps_a_place_where_it_lies() -> None:
    values = np.zeros((4, 4), dtype=np.float32)
    values[1, 2] = 1.0
    drawn = draw_between(values, 64)
    y, x = np.unravel_index(drawn.argmax(), drawn.shape)
    assert (y // 16, x // 16) == (1, 2)
    np.testing.assert_allclose(draw_between(np.full((128, 128), 3.0), 64), 3.0)


def test_the_outline_holds_half_of_what_speaks_for_the_target() -> None:
    values = np.random.default_rng(1).normal(size=(40, 40))
    level = half_level(values)
    kept = values[values >= level].sum() / values[values > 0].sum()
    assert 0.5 <= kept < 0.5 + values.max() / values[values > 0].sum()
    figure = draw_inside(made())  # without tissue there is nothing to outline
    assert not any(axis.collections for axis in figure.axes)
