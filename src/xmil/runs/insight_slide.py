"""One slide of an insight run: its concepts, its biomarkers, what its patches look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import Bag, FloatArray
from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.identity import identity
from xmil.core.storage import read_explanations, write_text
from xmil.data import read_bag
from xmil.findings.appearance import INK, LIGHT, appearance, light
from xmil.findings.biomarkers import map_biomarkers
from xmil.findings.concepts import ConceptShares, feature_weights, leading, remove_concepts, split_scores
from xmil.findings.dictionary import Dictionary
from xmil.findings.shortcuts import patch_correlations
from xmil.runs.cohort_run import stopping

LOOKED_AT = 96  # patches of a slide whose pictures are read, evenly by score
PIXELS = 64  # of such a picture
EXAMPLES = 5  # patches per concept and slide
DELETED = 5  # leading concepts that are deleted, where the model is at hand


@dataclass(frozen=True)
class InsightJob:
    """What a worker needs to know."""

    out: Path
    run: Path
    features: Mapping[str, Path]
    model: Path | None
    slides: Mapping[str, Path]
    method: str
    target: str | None
    fingerprint: str

    def identity_of(self, slide: str) -> list[Any]:
        """What a slide's findings were made from: its explanations and its features."""
        return [identity(self.run / "slides" / f"{slide}.parquet"), identity(self.features[slide])]


def make_insight_worker(job: InsightJob) -> Callable[[str], dict[str, Any]]:
    """A function from a slide to what it gives, with dictionary and model loaded once."""
    from xmil.models import load_model

    dictionary = Dictionary.load(job.out / "dictionary.npz")
    model = None if job.model is None else load_model(job.model)
    return lambda slide: _look(job, dictionary, model, slide)


def _look(job: InsightJob, dictionary: Dictionary, model: Any, slide: str) -> dict[str, Any]:
    e = chosen_explanation(job.run / "slides" / f"{slide}.parquet", job.method, job.target)
    bag = read_bag(job.features[slide])
    if len(bag) != len(e):
        raise InputError(
            f"{job.features[slide]}: has {len(bag)} patches and the explanation {len(e)}; give the features "
            "that were explained."
        )
    relevance = _relevance(e, bag, model)
    shares = (
        None
        if relevance is None
        else split_scores(dictionary, bag.features, feature_weights(bag.features, relevance))
    )
    found: dict[str, Any] = {
        "fingerprint": job.fingerprint,
        "source": job.identity_of(slide),
        "target": str(e.target),
        "output": float(e.output),
        "audit": None if e.audit is None else e.audit.as_dict(),
        "spread": None if e.spread is None else float(np.mean(e.spread)),
        "biomarkers": map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp),
        "seen": _seen(job.slides.get(slide), e),
    }
    if shares is not None:
        found |= _concepts(shares) | {"removals": _removals(slide, model, e, dictionary, bag, shares)}
    path = job.out / "slides" / f"{slide}.json"
    stopping(lambda: write_text(path, json.dumps(found) + "\n"))
    return found


def chosen_explanation(path: Path, method: str, target: str | None) -> Explanation:
    """The explanation of a method and target; without a target the last of the method's."""
    every = [e for e in read_explanations(path) if e.method == method]
    if not every:
        raise unknown_name(f"method of {path.name}", method, [e.method for e in read_explanations(path)])
    if target is None:
        return every[-1]
    fitting = [e for e in every if target in (str(e.target), str(e.target.cls))]
    if not fitting:
        raise unknown_name(f"target of {path.name}", target, [str(e.target) for e in every])
    return fitting[0]


def _relevance(e: Explanation, bag: Bag, model: Any) -> FloatArray | None:
    """Relevance per feature: stored, or made again with the model."""
    if e.relevance is not None or model is None:
        return e.relevance
    from xmil.methods import explain

    again = explain(model, bag, method="lrp", target=e.target, feature_level=True, baseline=None)
    return again.relevance


def _concepts(shares: ConceptShares) -> dict[str, Any]:
    strength = np.abs(shares.concepts)
    rows = np.argsort(-strength, axis=0, kind="stable")[:EXAMPLES]
    examples = [
        [[int(i), float(strength[i, k])] for i in rows[:, k] if strength[i, k] > 0]
        for k in range(strength.shape[1])
    ]
    rest = float(shares.residual.sum(dtype=np.float64) + shares.offset.sum(dtype=np.float64))
    return {"profile": [float(value) for value in shares.profile], "residual": rest, "examples": examples}


def _removals(
    slide: str, model: Any, e: Explanation, dictionary: Dictionary, bag: Bag, shares: ConceptShares
) -> list[dict[str, Any]]:
    """What deleting the slide's leading concepts does to the explained logit."""
    if model is None or not isinstance(e.target.cls, int) or e.target.cls >= len(e.logits):
        return []
    import torch

    def output(features: FloatArray) -> float:
        with torch.no_grad():
            return float(model(torch.from_numpy(features)[None])[0, e.target.cls])

    chosen = leading(shares.profile[None], DELETED).tolist()
    made = remove_concepts(slide, output, dictionary, bag.features, shares, concepts=chosen)
    return [{"concept": r.concept, "predicted": r.predicted, "measured": r.measured} for r in made]


def _seen(path: Path | None, e: Explanation) -> dict[str, Any]:
    """What patches look like, evenly over the range of scores: within-slide correlations and means."""
    if path is None:
        return {}
    from xmil.heatmaps.canvas import place_on
    from xmil.heatmaps.sheets import cut_patch
    from xmil.slides import open_slide

    order = np.argsort(e.scores, kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, LOOKED_AT).round().astype(int))]
    try:
        with open_slide(path) as slide:
            boxes = place_on(e, slide).boxes()
            pixels = np.stack([cut_patch(slide, boxes[i], PIXELS) for i in rows])
    except XmilError as error:
        return {"problem": str(error)}  # the rest of the slide's findings needs no picture
    facts = [appearance(patch) for patch in pixels]
    values = {name: np.array([fact[name] for fact in facts]) for name in facts[0]}
    within = patch_correlations(e.scores[rows], values)
    lit = light(pixels)
    return {
        "correlations": {name: value for name, value in within.items() if np.isfinite(value)},
        "means": {name: float(value.mean()) for name, value in values.items()},
        "made": {name: float((values[name] > 0).mean()) for name in INK} | {LIGHT: lit.colour},
        "stain": lit.stain,
    }
