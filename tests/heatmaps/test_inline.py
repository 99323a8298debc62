"""An explanation in a notebook: tables, pictures, HTML."""

from __future__ import annotations

import re

import numpy as np
import pytest

import xmil
from xmil.core.errors import InputError
from xmil.core.explanation import Audit


def explanation(**more):
    scores = np.array([0.5, -1.0, 2.0, 0.0], dtype=np.float32)
    audit = Audit(output=2.5, instances=1.5, bias=1.0)
    return xmil.Explanation(scores, np.zeros(2), 2.5, "lrp", xmil.Target(1), True, audit=audit, **more)


PLACES = {"coords": np.array([[0, 0], [256, 0], [0, 256], [256, 256]]), "patch_size": 256}


def test_the_table_holds_what_is_known_per_patch() -> None:
    plain = explanation().to_pandas()
    assert plain.columns.tolist() == ["score"]
    placed = explanation(
        **PLACES, stderr=np.full(4, 0.1), stable=np.array([True, True, True, False])
    ).to_pandas()
    assert placed.columns.tolist() == ["x0", "y0", "score", "stderr", "stable"]
    assert placed.loc[2].tolist()[:3] == [0, 256, 2.0]


def test_top_is_ordered_by_score_and_keeps_the_row_numbers() -> None:
    e = explanation(**PLACES)
    assert e.top(3).index.tolist() == [2, 0, 3]
    assert len(e.top(100)) == 4
    with pytest.raises(InputError, match=r"'k' parameter of Explanation.top"):
        e.top(0)


def test_plot_draws_a_map_where_patches_have_places_and_ranks_otherwise() -> None:
    from xmil.heatmaps import Picture

    assert isinstance(explanation(**PLACES).plot(size=300), Picture)
    ranked = explanation().plot()
    (line,) = [drawn for drawn in ranked.axes[0].lines if len(drawn.get_xdata()) == 4]
    assert line.get_ydata().tolist() == [2.0, 0.5, 0.0, -1.0]
    with pytest.raises(InputError, match="has no coordinates, so size cannot be used"):
        explanation().plot(size=300)


def test_html_shows_picture_account_and_warnings() -> None:
    page = explanation(**PLACES, warnings=["A <share> was cut."])._repr_html_()
    assert "data:image/png;base64," in page
    assert "A &lt;share&gt; was cut." in page
    heads = re.findall("<th>(.*?)</th>", page)
    assert heads == ["Output", "Patches", "Bias", "Unexplained"]


def test_warnings_are_a_list_and_survive_the_file(tmp_path) -> None:
    e = explanation(**PLACES, warnings=("one", "two"), stderr=np.full(4, 0.25), stable=np.arange(4) > 1)
    assert explanation().warnings == []
    e.save(tmp_path / "e.parquet")
    back = xmil.Explanation.load(tmp_path / "e.parquet")
    assert back.warnings == ["one", "two"]
    np.testing.assert_array_equal(back.stderr, e.stderr)
    np.testing.assert_array_equal(back.stable, e.stable)
    assert back.audit == e.audit
