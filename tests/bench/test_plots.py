"""Pictures of a run: what is drawn, and the colours of tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from tests.bench.test_files import CONFIGURATION, METHODS, measured
from xmil.bench import (
    COLUMNS,
    TASKS,
    bag_auroc,
    clearest_bag,
    colour_tiles,
    colours,
    draw_all,
    load_instances,
    probabilities,
    summarise,
)
from xmil.heatmaps import SIGNED, Scale, method_colour


def test_bars_and_bags_are_drawn_without_images_and_with_them(tmp_path):
    marked = replace(CONFIGURATION, task=TASKS["confounder"], instances=load_instances("digits"))
    for i, c in enumerate((CONFIGURATION, marked)):
        table = summarise([measured(tmp_path / str(i), configuration=c)], METHODS)
        drawn = draw_all(table, [c], METHODS, tmp_path / str(i))
        assert [path.name for path in drawn] == ["bars.png", "bags-attnmil.png"]
        assert all(path.read_bytes()[:4] == b"\x89PNG" for path in drawn)


def test_a_run_without_stored_models_has_bars_alone(tmp_path):
    table = summarise([measured(tmp_path / "elsewhere")], METHODS)
    assert [p.name for p in draw_all(table, [CONFIGURATION], ["lrp"], tmp_path)] == ["bars.png"]


def test_a_telling_bag_has_every_sign_in_like_numbers():
    evidence = np.zeros((3, 2, 6), dtype=np.int8)
    evidence[0, :, :5] = [[-1], [1]]  # two signs
    evidence[1, 1] = [1, 1, 1, 1, -1, 0]
    evidence[2, 1] = [1, 1, -1, -1, 0, 0]
    evidence[2, 0] = -evidence[2, 1]
    assert clearest_bag(evidence)[0] == 2
    assert clearest_bag(evidence[:1]) == (0, 1)  # positive evidence rather than negative


def test_tiles_are_red_for_and_blue_against_and_dark_where_there_is_ink():
    images = np.zeros((12, 4, 4))
    images[:, 2, 2] = 9
    picture = colour_tiles(images, np.array([1.0, -1.0, *[0.0] * 10]), signed=True)
    edge = 4 + 3  # padding, and a gap
    assert picture.shape == (2 * edge, COLUMNS * edge, 3)
    red, blue, neutral = picture[0, 0], picture[0, edge], picture[0, 2 * edge]
    assert red[0] > red[2] + 0.3
    assert blue[2] > blue[0] + 0.3
    assert np.ptp(neutral) < 0.02
    assert picture[3, 3].max() < 0.1
    assert (picture[edge:, 2 * edge :] == 1).all()  # nothing after the last digit


@pytest.mark.parametrize(("signed", "scores"), [(True, [-0.3, 0.0, 0.2]), (False, [0.1, 0.2, 0.3])])
def test_tiles_have_the_colours_of_heatmaps(signed, scores):
    limit = 0.3
    painted = Scale(-limit if signed else 0.1, limit, signed, SIGNED if signed else "viridis").paint(scores)
    np.testing.assert_allclose(colours(np.array(scores), signed=signed, depth=1.0), painted[:, :3] / 255)
    pale = colours(np.array(scores), signed=signed, depth=0.5)
    np.testing.assert_allclose(pale, 0.5 + painted[:, :3] / 510)


def test_colours_of_methods_that_share_a_plot_differ():
    shown = ["random", "attention", "single", "logits", "gxi", "ig", "lrp", "shapley"]
    assert len({method_colour(name) for name in shown}) == len(shown)


def test_the_test_auroc_is_the_mean_over_classes():
    model = CONFIGURATION.fresh_models().model(0)
    table, test = CONFIGURATION.table(), CONFIGURATION.splits(0).test
    x = table.bags(table.to_rows(test.rows))
    p = model(x).softmax(dim=-1).detach().numpy()
    expected = np.mean(
        [roc_auc_score(test.labels == c, p[:, c]) for c in range(4) if (test.labels == c).any()]
    )
    assert bag_auroc(probabilities(model, x), test.labels) == pytest.approx(expected)
