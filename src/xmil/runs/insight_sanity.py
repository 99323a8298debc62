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
    return {"weights drawn anew": _random_weights(redrawn), "made again": _made_again(again)}


def other_models(run: InsightRun) -> list[str]:
    """A warning where the models at hand are not those that the run was explained with."""
    if run.model is None:
        return []
    from xmil.runs.ensemble import Ensemble, model_paths

    known = {str(digest) for digest in run.run.about.get("settings", {}).get("models", ())}
    if not known or known == set(Ensemble.load(model_paths(run.model)).digests):
        return []
    return [
        f"The run was explained with other models than {run.model.name}: scores and biomarkers are the "
        "run's; concepts, deletions and sanity tests are those of the model given."
    ]


def _tested(run: InsightRun, models: Sequence[Any], slide: str) -> tuple[float, float]:
    """Rank correlations with the scores under new weights, and with those stored in the run."""
    from xmil.evaluate.sanity import randomisation, rank_correlation
    from xmil.methods import explain

    e = chosen_explanation(run.run.file(slide), run.chosen.method, run.chosen.target)
    bag = read_bag(run.paths[slide])
    drawn = randomisation(
        models[0], bag, method=e.method, target=e.target, draws=DRAWS, seed=run.chosen.seed
    ).correlations
    again = [explain(model, bag, method=e.method, target=e.target).scores for model in models]
    return float(np.abs(drawn).mean()), rank_correlation(np.mean(again, axis=0), e.scores)


def _random_weights(found: np.ndarray) -> str:
    from xmil.evaluate.sanity import LIMIT

    mean = float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")
    verdict = "passed" if mean <= LIMIT else "failed: the scores hang little on what the model learnt"
    return (
        f"{verdict}; mean |rank correlation| with the scores under new weights {mean:.2f} (at most {LIMIT}), "
        f"{len(found)} slides, {DRAWS} draws each (sanity.csv)"
    )


def _made_again(found: np.ndarray) -> str:
    low = float(np.nanmin(found)) if np.isfinite(found).any() else float("nan")
    return (
        f"lowest rank correlation with the stored scores {low:.3f}, {len(found)} slides (sanity.csv); "
        "less than 1 where the run had settings of its own"
    )
