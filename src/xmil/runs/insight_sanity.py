"""Sanity tests of an insight run, on a few slides: new weights, and the same scores made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.errors import XmilError
from xmil.core.runfiles import write_table
from xmil.data import read_bag
from xmil.runs.insight_slide import chosen_explanation, run_models

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun

DRAWS = 3  # of new weights
SAME = 0.9  # rank correlation from which on scores made again are taken for the run's
COLUMNS = ("slide_id", "weights_redrawn", "made_again")


def sanity_tests(run: InsightRun, slides: Sequence[str]) -> dict[str, str]:
    """What the card says of them; a row for each slide goes to sanity.csv. Needs the model."""
    if run.model is None or not run.sanity or not slides:
        return {}
    models = run_models(run.model, run.run.path)
    chosen = np.unique(np.linspace(0, len(slides) - 1, run.sanity).round().astype(int))
    try:
        rows = [(slides[i], *_tested(run, models, slides[i])) for i in chosen]
    except XmilError as error:
        return {"not tested": str(error)}
    write_table(run.out / "sanity.csv", COLUMNS, rows)
    redrawn, again = (np.array([row[k] for row in rows], dtype=np.float64) for k in (1, 2))
    return {"weights drawn anew": _random_weights(redrawn, again), "made again": _made_again(again)}


def _tested(run: InsightRun, models: Sequence[Any], slide: str) -> tuple[float, float]:
    """Rank correlations with the scores under new weights, and with those stored in the run."""
    from xmil.evaluate.sanity import randomisation, rank_correlation
    from xmil.methods import explain

    e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
    bag = read_bag(run.paths[slide], run.layout)
    drawn = randomisation(
        models[0], bag, method=e.method, target=e.target, draws=DRAWS, seed=run.chosen.seed
    ).correlations
    again = [explain(model, bag, method=e.method, target=e.target).scores for model in models]
    return float(np.abs(drawn).mean()), rank_correlation(np.mean(again, axis=0), e.scores)


def _random_weights(found: np.ndarray, again: np.ndarray) -> str:
    """The verdict; none where the scores that were tested are not the run's."""
    from xmil.evaluate.sanity import LIMIT

    mean = float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
    verdict = "passed" if mean <= LIMIT else "failed: the scores hang little on what the model learnt"
    if _lowest(again) < SAME:
        verdict = "no verdict: the scores made again are not those of the run"
    return (
        f"{verdict}; mean |rank correlation| with the scores under new weights {mean:.2f} (at most {LIMIT}), "
        f"{len(found)} slides, {DRAWS} draws each (sanity.csv)"
    )


def _made_again(found: np.ndarray) -> str:
    return (
        f"lowest rank correlation with the stored scores {_lowest(found):.3f}, {len(found)} slides "
        "(sanity.csv); less than 1 where the run had settings of its own"
    )


def _lowest(found: np.ndarray) -> float:
    return float(np.nanmin(found)) if np.isfinite(found).any() else float("nan")
