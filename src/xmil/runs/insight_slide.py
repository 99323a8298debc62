"""One slide of an insight run: its concepts, its biomarkers, what its patches look like."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray
from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.identity import identity
from xmil.core.storage import read_explanations, write_explanations, write_text
from xmil.data import read_bag
from xmil.findings.appearance import INK, LIGHT, appearance, light
from xmil.findings.biomarkers import map_biomarkers
from xmil.findings.concept_maps import ConceptMaps
from xmil.findings.concepts import ConceptShares, feature_weights, leading, remove_concepts, split_scores
from xmil.findings.dictionary import Dictionary
from xmil.findings.shortcuts import patch_correlations
from xmil.findings.stability import Consensus, consensus
from xmil.runs.cohort_run import stopping
from xmil.runs.insight_regions import region_biomarkers, region_mask

LOOKED_AT = 96  # patches of a slide whose pictures are read, evenly by score
PIXELS = 64  # of such a picture
EXAMPLES = 5  # patches per concept and slide
Models = Sequence[Any]
REMOVAL = ("concept", "relevance", "predicted", "measured")
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
    beside: tuple[Path, ...] = ()  # further runs of the same slides
    regions: Mapping[str, Path] = field(default_factory=dict)
    within: tuple[str, ...] = ()  # classes of annotations that make a region
    layout: str = "auto"  # of the features

    def identity_of(self, slide: str) -> list[Any]:
        """What a slide's findings were made from: its explanations, its features and its region."""
        runs = [run / "slides" / f"{slide}.parquet" for run in (self.run, *self.beside)]
        region = [self.regions[slide]] if slide in self.regions else []
        return [identity(path) for path in (*runs, self.features[slide], *region)]


def make_insight_worker(job: InsightJob) -> Callable[[str], dict[str, Any]]:
    """A function from a slide to what it gives, with dictionary and models loaded once."""
    dictionary = Dictionary.load(job.out / "dictionary.npz")
    models = () if job.model is None else run_models(job.model, job.run)
    return lambda slide: _look(job, dictionary, models, slide)


def run_models(path: Path, run: Path) -> Models:
    """The models at a path, with the background that the run of explanations lent them."""
    from xmil.runs.ensemble import BACKGROUND, Ensemble, model_paths

    held, kept = Ensemble.load(model_paths(path)), Background.load(run / BACKGROUND)
    return (held if kept is None else held.lent(kept)).models


def _look(job: InsightJob, dictionary: Dictionary, models: Models, slide: str) -> dict[str, Any]:
    e = chosen_explanation(job.run / "slides" / f"{slide}.parquet", job.method, job.target)
    bag = read_bag(job.features[slide], job.layout)
    if len(bag) != len(e):
        raise InputError(
            f"{job.features[slide]}: has {len(bag)} patches and the explanation {len(e)}; give the features "
            "that were explained."
        )
    shares = _shares(job, dictionary, e, bag, models)
    found: dict[str, Any] = {
        "fingerprint": job.fingerprint,
        "source": job.identity_of(slide),
        "target": str(e.target),
        "output": float(e.output),
        "audit": None if e.audit is None else e.audit.as_dict(),
        "biomarkers": map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp),
        "seen": _seen(job.slides.get(slide), e),
    }
    if shares is not None:
        maps = ConceptMaps(shares.concepts, e.scores, e.method, str(e.target))
        stopping(lambda: maps.save(job.out / "concepts" / f"{slide}.npz"))
        found |= _concepts(shares) | {"removals": _removals(slide, models, e, dictionary, bag, shares)}
        found["classes"] = _classes(job, slide, dictionary, bag, models)
    each = _each(job, slide, e, bag, models)
    agreed = None if each is None else consensus(each)
    if slide in job.regions:
        inside = region_mask(job.regions[slide], e, job.within)
        found["biomarkers"] |= region_biomarkers(e, inside, agreed)
    if agreed is not None:
        found["stability"] = agreed.summary
        found["biomarkers"] |= agreed.shares
        path = job.out / "consensus" / f"{slide}.parquet"
        stopping(lambda: write_explanations([_agreed(e, agreed)], path))
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


def _shares(
    job: InsightJob, dictionary: Dictionary, e: Explanation, bag: Bag, models: Models
) -> ConceptShares | None:
    """The scores by concept; None without relevance per feature, stored or made again with the models."""
    if e.relevance is not None:
        from xmil.runs.ensemble import BACKGROUND

        kept = Background.load(job.run / BACKGROUND) or getattr(next(iter(models), None), "background", None)
        weights, baseline = _worth(e, bag, kept)
    elif models:
        weights, baseline = _mean_worth(models, e, bag)
    else:
        return None
    return split_scores(dictionary, bag.features, weights, baseline)


def _mean_worth(models: Models, e: Explanation, bag: Bag) -> tuple[FloatArray, FloatArray]:
    """What `_worth` gives, as the mean over models, of which one after another is in memory."""
    parts = (_worth(_again(model, e, bag), bag, getattr(model, "background", None)) for model in models)
    weights, baseline = next(parts)
    for more, other in parts:
        weights += more
        baseline += other
    weights /= len(models)
    baseline /= len(models)
    return weights, baseline


def _again(model: Any, e: Explanation, bag: Bag) -> Explanation:
    """The explanation made again with relevance per feature, against the baseline it had, if any."""
    from xmil.methods import explain
    from xmil.methods.worth import RULES

    params = e.params if e.method == "lrp" else {}
    rules = {key: value for key, value in params.items() if key in RULES}
    against = {} if params.get("baseline") else {"baseline": None}
    return explain(model, bag, method="lrp", target=e.target, feature_level=True, **against, **rules)


def _worth(e: Explanation, bag: Bag, background: Background | None) -> tuple[FloatArray, FloatArray]:
    """What a unit of each feature is worth (n, d), and what a patch that equals the baseline has (n,)."""
    import torch

    from xmil.methods.worth import shift_of

    relevance = np.asarray(e.relevance, dtype=np.float32)
    shift, notes = shift_of(e, torch.from_numpy(bag.features), background, width=relevance.shape[1])
    if notes:
        raise InputError(f"{e.bag}: {notes[0]}")
    weights = feature_weights(bag.features - shift.numpy(), relevance)
    return weights, weights @ shift.numpy()


def _each(job: InsightJob, slide: str, e: Explanation, bag: Bag, models: Models) -> FloatArray | None:
    """Scores (m, n) of the models of an ensemble, and of further runs; None where there is one alone."""
    from xmil.methods import explain

    rows = [e.scores]
    if len(models) > 1:
        rows = [explain(model, bag, method=e.method, target=e.target).scores for model in models]
    for run in job.beside:
        path = run / "slides" / f"{slide}.parquet"
        other = chosen_explanation(path, job.method, str(e.target.cls))
        if len(other) != len(e):
            raise InputError(f"{path}: explains {len(other)} patches, and {job.run.name} {len(e)}.")
        rows.append(other.scores)
    return np.stack(rows) if len(rows) > 1 else None


def _agreed(e: Explanation, agreed: Consensus) -> Explanation:
    """The map that the models agree on."""
    told = "Patches on which the models disagree, or spread widely, are zero."
    return replace(
        e, scores=agreed.scores, spread=agreed.std, audit=None, relevance=None, stderr=None, stable=None,
        warnings=[*e.warnings, told],
    )  # fmt: skip


def _concepts(shares: ConceptShares) -> dict[str, Any]:
    strength = np.abs(shares.concepts)
    rows = np.argsort(-strength, axis=0, kind="stable")[:EXAMPLES]
    examples = [
        [[int(i), float(strength[i, k])] for i in rows[:, k] if strength[i, k] > 0]
        for k in range(strength.shape[1])
    ]
    rest = float(shares.residual.sum(dtype=np.float64) + shares.offset.sum(dtype=np.float64))
    return {"profile": [float(value) for value in shares.profile], "residual": rest, "examples": examples}


def _classes(
    job: InsightJob, slide: str, dictionary: Dictionary, bag: Bag, models: Models
) -> dict[str, list[float]]:
    """The profile of every class that the run explains, where there are several and none is named."""
    every = [e for e in read_explanations(job.run / "slides" / f"{slide}.parquet") if e.method == job.method]
    if job.target is not None or len(every) < 2:
        return {}
    found = {}
    for e in every:
        shares = _shares(job, dictionary, e, bag, models)
        if shares is not None:
            found[str(e.target)] = [float(value) for value in shares.profile]
    return found


def _removals(
    slide: str, models: Models, e: Explanation, dictionary: Dictionary, bag: Bag, shares: ConceptShares
) -> list[dict[str, Any]]:
    """What deleting the slide's leading concepts does to the explained logit."""
    if not models or not isinstance(e.target.cls, int) or e.target.cls >= len(e.logits):
        return []
    output = MeanLogit(models, e.target.cls)
    chosen = leading(shares.profile[None], DELETED).tolist()
    slope = output.slope(bag.features)
    made = remove_concepts(slide, output, dictionary, bag.features, shares, slope=slope, concepts=chosen)
    return [{key: getattr(r, key) for key in REMOVAL} for r in made]


@dataclass(frozen=True, eq=False)
class MeanLogit:
    """The mean logit of a class over models, as a function of a bag's features."""

    models: Models
    cls: int

    def __call__(self, features: FloatArray) -> float:
        import torch

        with torch.no_grad():
            return float(self._of(torch.from_numpy(features)))

    def slope(self, features: FloatArray) -> FloatArray:
        """The gradient at the features (n, d)."""
        import torch

        x = torch.from_numpy(features).requires_grad_(True)
        (found,) = torch.autograd.grad(self._of(x), x)
        return np.asarray(found.numpy(), dtype=np.float32)

    def _of(self, x: Any) -> Any:
        return sum(model(x[None])[0, self.cls] for model in self.models) / len(self.models)


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
