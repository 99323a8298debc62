"""One slide of an insight run: its concepts, its biomarkers, what its patches look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray
from xmil.core.durable import write_text
from xmil.core.errors import InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.data import read_bag
from xmil.heatmaps import cut_patch, place_on
from xmil.insights.biomarkers import (
    find_consensus,
    map_biomarkers,
    region_biomarkers,
    region_mask,
)
from xmil.insights.concepts import (
    ConceptShares,
    Dictionary,
    feature_weights,
    leading_concepts,
    remove_concepts,
    split_scores,
)
from xmil.insights.shortcuts import INK, LIGHT, appearance, light, patch_correlations
from xmil.methods import explain
from xmil.methods.inside import baseline_shift, explain_again
from xmil.runs.cohort_run import stopping
from xmil.runs.ensemble import BACKGROUND, load_run_models
from xmil.slides import open_slide
from xmil.storage import ConceptMaps, pick_explanation, read_explanations, write_explanations

if TYPE_CHECKING:
    from xmil.insights.run import InsightRun

VIEWED = 96  # patches of a slide whose pictures are read, evenly by score
PIXELS = 64  # of such a picture
EXAMPLES = 5  # patches per concept and slide
DELETED = 5  # leading concepts that are deleted, where the model is at hand
REMOVAL = ("concept", "relevance", "predicted", "measured")
Models = Sequence[Any]


def make_slide_worker(run: InsightRun) -> Callable[[str], dict[str, Any]]:
    """A function from a slide to what it gives, with dictionary and models loaded once."""
    model = run.request.model
    models: Models = () if model is None else load_run_models(model, run.explained.path)
    return partial(_analyse, run, Dictionary.load(run.dictionary_path), models)


def _analyse(run: InsightRun, dictionary: Dictionary, models: Models, slide: str) -> dict[str, Any]:
    e = run.explanation(slide)
    bag = read_bag(run.paths[slide], run.request.format)
    if len(bag) != len(e):
        raise InputError(
            f"{run.paths[slide]}: has {len(bag)} patches and the explanation {len(e)}; give the features "
            "that were explained."
        )
    result: dict[str, Any] = {
        "fingerprint": run.folder.fingerprint,
        "source": run.identity_of(slide),
        "target": str(e.target),
        "output": float(e.output),
        "audit": None if e.audit is None else e.audit.as_dict(),
        "biomarkers": map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp),
        "seen": _view_patches(run.pictures.get(slide), e),
    }
    shares = _split(run, dictionary, e, bag, models)
    if shares is not None:
        maps = ConceptMaps(shares.concepts, e.scores, e.method, str(e.target))
        stopping(lambda: maps.save(run.out / "concepts" / f"{slide}.npz"))
        result |= _summarise(shares)
        result["removals"] = _delete_leading(slide, models, e, dictionary, bag, shares)
        result["classes"] = _class_profiles(run, slide, dictionary, bag, models)
    scores = _scores_of_models(run, slide, e, bag, models)
    consensus = None if scores is None else find_consensus(scores)
    if slide in run.regions:
        inside = region_mask(run.regions[slide], e, run.request.within)
        result["biomarkers"] |= region_biomarkers(e, inside, consensus)
    if consensus is not None:
        result["stability"] = consensus.summary
        result["biomarkers"] |= consensus.shares
        path = run.out / "consensus" / f"{slide}.parquet"
        note = "Patches on which the models disagree, or spread widely, are zero."
        agreed = replace(
            e, scores=consensus.scores, spread=consensus.std, warnings=[*e.warnings, note],
            audit=None, relevance=None, stderr=None, stable=None,
        )  # fmt: skip
        stopping(lambda: write_explanations([agreed], path))
    path = run.out / "slides" / f"{slide}.json"
    stopping(lambda: write_text(path, json.dumps(result) + "\n"))
    return result


def _split(
    run: InsightRun, dictionary: Dictionary, e: Explanation, bag: Bag, models: Models
) -> ConceptShares | None:
    """The scores by concept; None without relevance per feature, stored or computed with the models."""
    if e.relevance is not None:
        stored = Background.load(run.explained.path / BACKGROUND)
        background = stored or getattr(next(iter(models), None), "background", None)
        weights, baseline = _feature_worth(e, bag, background)
    elif models:  # the mean over models, of which one after another is in memory
        parts = (
            _feature_worth(explain_again(model, bag, e), bag, getattr(model, "background", None))
            for model in models
        )
        weights, baseline = next(parts)
        for more, other in parts:
            weights += more
            baseline += other
        weights /= len(models)
        baseline /= len(models)
    else:
        return None
    return split_scores(dictionary, bag.features, weights, baseline)


def _feature_worth(e: Explanation, bag: Bag, background: Background | None) -> tuple[FloatArray, FloatArray]:
    """What a unit of each feature is worth (n, d), and what a patch that equals the baseline has (n,)."""
    relevance = np.asarray(e.relevance, dtype=np.float32)
    shift, notes = baseline_shift(e, torch.from_numpy(bag.features), background, width=relevance.shape[1])
    if notes:
        raise InputError(f"{e.bag}: {notes[0]}")
    weights = feature_weights(bag.features - shift.numpy(), relevance)
    return weights, weights @ shift.numpy()


def _scores_of_models(
    run: InsightRun, slide: str, e: Explanation, bag: Bag, models: Models
) -> FloatArray | None:
    """Scores (m, n) of the models of an ensemble, and of further runs; None where there is one alone."""
    rows = [e.scores]
    if len(models) > 1:
        rows = [explain(model, bag, method=e.method, target=e.target).scores for model in models]
    for other in run.beside:
        path = other / "slides" / f"{slide}.parquet"
        second = pick_explanation(path, run.request.method, str(e.target.cls))
        if len(second) != len(e):
            raise InputError(
                f"{path}: explains {len(second)} patches, and {run.explained.path.name} {len(e)}."
            )
        rows.append(second.scores)
    return np.stack(rows) if len(rows) > 1 else None


def _summarise(shares: ConceptShares) -> dict[str, Any]:
    """The slide's profile over concepts, what they do not hold, and each concept's strongest patches."""
    strength = np.abs(shares.concepts)
    rows = np.argsort(-strength, axis=0, kind="stable")[:EXAMPLES]
    examples = [
        [[int(i), float(strength[i, k])] for i in rows[:, k] if strength[i, k] > 0]
        for k in range(strength.shape[1])
    ]
    rest = float(shares.residual.sum(dtype=np.float64) + shares.offset.sum(dtype=np.float64))
    return {"profile": shares.profile.tolist(), "residual": rest, "examples": examples}


def _class_profiles(
    run: InsightRun, slide: str, dictionary: Dictionary, bag: Bag, models: Models
) -> dict[str, list[float]]:
    """The profile of every class that the run explains, where there are several and none is named."""
    every = [e for e in read_explanations(run.explained.file(slide)) if e.method == run.request.method]
    if run.request.target is not None or len(every) < 2:
        return {}
    pairs = ((str(e.target), _split(run, dictionary, e, bag, models)) for e in every)
    return {target: shares.profile.tolist() for target, shares in pairs if shares is not None}


def _delete_leading(
    slide: str, models: Models, e: Explanation, dictionary: Dictionary, bag: Bag, shares: ConceptShares
) -> list[dict[str, Any]]:
    """What deleting the slide's leading concepts does to the explained logit."""
    if not models or not isinstance(e.target.cls, int) or e.target.cls >= len(e.logits):
        return []
    output = MeanLogit(models, e.target.cls)
    leaders = leading_concepts(shares.profile[None], DELETED).tolist()
    slope = output.slope(bag.features)
    removals = remove_concepts(slide, output, dictionary, bag.features, shares, slope=slope, concepts=leaders)
    return [{key: getattr(removal, key) for key in REMOVAL} for removal in removals]


@dataclass(frozen=True, eq=False)
class MeanLogit:
    """The mean logit of a class over models, as a function of a bag's features."""

    models: Models
    cls: int

    def __call__(self, features: FloatArray) -> float:
        with torch.no_grad():
            return float(self._mean(torch.from_numpy(features)))

    def slope(self, features: FloatArray) -> FloatArray:
        """The gradient at the features (n, d)."""
        x = torch.from_numpy(features).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self._mean(x), x)
        return np.asarray(gradient.numpy(), dtype=np.float32)

    def _mean(self, x: Any) -> Any:
        return sum(model(x[None])[0, self.cls] for model in self.models) / len(self.models)


def _view_patches(path: Path | None, e: Explanation) -> dict[str, Any]:
    """What patches look like, evenly over the range of scores: within-slide correlations and means."""
    if path is None:
        return {}
    order = np.argsort(e.scores, kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, VIEWED).round().astype(int))]
    try:
        with open_slide(path) as slide:
            boxes = place_on(e, slide).boxes()
            pixels = np.stack([cut_patch(slide, boxes[i], PIXELS) for i in rows])
    except XmilError as error:
        return {"problem": str(error)}  # the rest of the slide's findings needs no picture
    each = [appearance(patch) for patch in pixels]
    values = {name: np.array([numbers[name] for numbers in each]) for name in each[0]}
    within = patch_correlations(e.scores[rows], values)
    lit = light(pixels)
    return {
        "correlations": {name: value for name, value in within.items() if np.isfinite(value)},
        "means": {name: float(value.mean()) for name, value in values.items()},
        "made": {name: float((values[name] > 0).mean()) for name in INK} | {LIGHT: lit.colour},
        "stain": lit.stain,
    }
