"""Similar patches over the cohort: codes find what the features say."""

from __future__ import annotations

from typing import Any

import numpy as np

import xmil
from tests.viewer.asking import ask
from tests.viewer.make_run import Made
from tests.waiting import wait_for


def test_similar_patches_of_other_slides_are_the_nearest(app: Any, made: Made) -> None:
    """With few patches each has a code: the nearest by cosine come first, as the slow way has them."""
    features = [
        xmil.read_bag(made.features / f"{name}.h5").features.astype(np.float64) for name in made.names
    ]
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in features]
    target = "/api/slides/1/alike-0-20.json"
    wait_for(lambda: ask(app, target).json["neighbours"] is not None)
    found = ask(app, target).json
    slow = [(float(u @ unit[1][20]), k, i) for k in (0, 2) for i, u in enumerate(unit[k])]
    best = sorted(slow, reverse=True)
    told = found["neighbours"]
    assert len(told) == 12
    assert (told[0]["key"], told[0]["index"]) == best[0][1:]
    assert all(n["key"] != 1 for n in told)
    exact = {(k, i): cosine for cosine, k, i in slow}
    np.testing.assert_allclose(
        [n["similarity"] for n in told], [exact[n["key"], n["index"]] for n in told], atol=1e-5
    )
    assert told[-1]["similarity"] >= best[40][0]  # codes may change the order, not by much
    assert ask(app, "/api/slides/1/alike-0-96.json").status == 404
