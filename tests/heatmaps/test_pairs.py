"""Unsure signs as hatching, interactions as lines, in pictures and in GeoJSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection

import xmil
from xmil.core.errors import InputError
from xmil.core.interactions import Interactions
from xmil.heatmaps import HATCH, Canvas, pair_lines, write_pairs

CORNERS = np.array([[0, 0], [100, 0], [0, 100], [100, 100]])


def explanation(stable: list[bool] | None = None) -> xmil.Explanation:
    return xmil.Explanation(
        np.array([1.0, -1.0, 0.5, 0.2], dtype=np.float32), np.zeros(2), 0.0, "lrp", xmil.Target(1), True,
        coords=CORNERS, patch_size=100, stable=None if stable is None else np.array(stable),
    )  # fmt: skip


def pairs() -> Interactions:
    index = np.array([[0, 3], [1, 2], [0, 1]])
    return Interactions(
        index, np.array([2.0, -1.0, 0.1]), np.array([0.1, 0.1, 0.1]), np.zeros(3), xmil.Target(1), 0.0,
        bag="s", corners=CORNERS[index].reshape(3, 4), patch_size=100,
    )  # fmt: skip


def test_unsure_patches_are_hatched_and_others_are_not() -> None:
    sure, unsure = (
        np.asarray(xmil.heatmap(explanation(s), picture="map"))
        for s in ([True] * 4, [True, False, True, True])
    )
    dark = (unsure == HATCH).all(axis=-1)
    assert dark.any()
    assert not (sure == HATCH).all(axis=-1).any()
    rows, columns = np.nonzero(dark)
    scale = unsure.shape[1] / 300  # patches and a margin of half a patch
    assert columns.min() >= 149 * scale  # all on the second patch: x 100 to 200, y 0 to 100
    assert rows.max() <= 151 * scale
    np.testing.assert_array_equal(unsure[~dark], sure[~dark])


def test_the_picture_says_what_hatching_means() -> None:
    figure = xmil.heatmap(explanation([False, True, True, True]))
    assert any("hatched: sign uncertain" in text.get_text() for text in figure.texts)
    plain = xmil.heatmap(explanation([True] * 4))
    assert not any("hatched" in text.get_text() for text in plain.texts)


def test_lines_join_the_centres_of_sure_pairs() -> None:
    lines = pair_lines(pairs(), Canvas((0, 0, 200, 200), (100, 100)))
    np.testing.assert_allclose(lines.segments, [[25, 25, 75, 75], [75, 25, 25, 75]])  # the third is not sure
    assert lines.colours[0] != lines.colours[1]
    assert lines.widths[0] > lines.widths[1]


def test_lines_are_drawn_over_the_heatmap() -> None:
    figure = xmil.heatmap(explanation(), pairs=pairs())
    drawn = [c for axes in figure.axes for c in axes.collections if isinstance(c, LineCollection)]
    assert [len(c.get_segments()) for c in drawn] == [2, 2]


def test_pairs_of_another_target_or_bag_are_refused() -> None:
    with pytest.raises(InputError, match="The interactions are for 0, the explanations for 1"):
        xmil.heatmap(explanation(), pairs=replace(pairs(), target=xmil.Target(0)))
    with pytest.raises(InputError, match="of another bag"):
        xmil.heatmap(explanation(), pairs=replace(pairs(), pairs=np.array([[0, 9], [1, 2], [0, 1]])))


def test_the_picture_says_what_lines_mean() -> None:
    shown = xmil.heatmap(explanation(), pairs=pairs())
    assert any("red say more together, blue less" in text.get_text() for text in shown.texts)
    assert not any("together" in text.get_text() for text in xmil.heatmap(explanation()).texts)


def test_pairs_go_to_qupath_as_lines(tmp_path: Path) -> None:
    write_pairs(tmp_path / "p.geojson", pairs(), origin=(10, 20))
    found = json.loads((tmp_path / "p.geojson").read_text())
    first = found["features"][0]
    assert first["geometry"] == {"type": "LineString", "coordinates": [[40, 30], [140, 130]]}
    assert first["properties"]["measurements"]["value"] == 2.0
    names = [f["properties"]["classification"]["name"] for f in found["features"]]
    assert names == ["say more together", "say less together", "say more together"]
    assert len({f["id"] for f in found["features"]}) == 3


def test_groups_have_no_lines(tmp_path: Path) -> None:
    groups = Interactions(
        np.array([[0, 1]]), np.ones(1), np.ones(1), np.ones(1), xmil.Target(1), 0.0, names=("a", "b")
    )
    with pytest.raises(InputError, match="no places"):
        write_pairs(tmp_path / "g.geojson", groups)
