"""Are concepts pure, and does deleting one do what its relevance says?

`python -m benchmarks.insight_concepts digits|colon --data PATH --out DIR`. The dictionary's kind and size are
chosen on validation bags; what is printed comes from test bags.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import xmil
from benchmarks.colon.bags import ColonBag, read_bags
from benchmarks.colon.train import fit
from benchmarks.insight_ensembles import TRAINING, unpack
from xmil.bench import CELLS, SETUPS, TASKS, BagSet, Configuration, Protocol, train_stacked
from xmil.insights import (
    ConceptShares,
    Dictionary,
    feature_weights,
    fit_dictionary,
    leading_concepts,
    removal_agreement,
    remove_concepts,
    split_scores,
)
from xmil.insights.run import MeanLogit
from xmil.models import MILModel

DICTIONARIES = [(kind, k) for kind in ("kmeans", "nmf", "topk") for k in (20, 40, 80, 160)]
TOP, LEADING = 50, 5
SIZES, TARGET = (2000, 500, 200), 3  # bags; the class that needs both an 8 and a 9
Array = npt.NDArray[Any]
Bags = tuple[list[tuple[Array, Array]], list[Array], list[Array]]


@dataclass(frozen=True, eq=False)
class Looked:
    """Bags through a dictionary: their shares, and the kind of each patch."""

    shares: list[ConceptShares]
    kinds: list[Array]
    rows: list[Array]  # what tells one patch from another

    @property
    def leaders(self) -> list[int]:
        """The concepts with most relevance over the bags."""
        return [int(k) for k in leading_concepts([shares.profile for shares in self.shares], LEADING)]


def relevance_of(model: MILModel, x: Array, target: int) -> Array:
    """What a unit of each feature is worth (n, d)."""
    e = xmil.explain(model, x, method="lrp", target=target, feature_level=True, baseline=None)
    return feature_weights(x, e.relevance if e.relevance is not None else np.zeros_like(x))


def through(
    dictionary: Dictionary, bags: Sequence[tuple[Array, Array]], kinds: list[Array], rows: list[Array]
) -> Looked:
    """Bags as pairs of features and weights, split among the concepts."""
    return Looked([split_scores(dictionary, x, g) for x, g in bags], kinds, rows)


def purity(looked: Looked, *, top: int = TOP) -> list[float]:
    """The share of the commonest kind among a leading concept's strongest patches, each patch once."""
    kinds, rows = np.concatenate(looked.kinds), np.concatenate(looked.rows)
    _, once = np.unique(rows, return_index=True)
    strength = np.concatenate([np.abs(shares.concepts) for shares in looked.shares])[once]
    found = []
    for k in looked.leaders:
        best = np.argsort(-strength[:, k], kind="stable")[:top]
        best = best[strength[best, k] > 0]
        if len(best):
            found.append(float(np.bincount(kinds[once][best]).max() / len(best)))
    return found


def deletions(
    model: MILModel, dictionary: Dictionary, looked: Looked, features: Sequence[Array], target: int
) -> dict[str, float]:
    """How often deleting a leading concept moves the logit as predicted, and how closely."""

    output = MeanLogit((model,), target)
    made = [
        r
        for x, shares in zip(features, looked.shares, strict=True)
        for r in remove_concepts(
            output, dictionary, x, shares, slope=output.slope(x), concepts=looked.leaders
        )
        if r["relevance"] or r["predicted"] or r["measured"]  # the concept is in the bag
    ]
    measured = [r["measured"] for r in made]
    by_slope = removal_agreement([r["predicted"] for r in made], measured)
    by_relevance = removal_agreement([r["relevance"] for r in made], measured)
    return {
        **by_slope,
        **{f"{name} of relevance": value for name, value in by_relevance.items()},
        "n": float(len(made)),
    }


def digits(data: Path, *, device: str, repetitions: int, processes: int = 1) -> list[dict[str, Any]]:
    """4-Bags for AttnMIL: dictionaries for each repetition, chosen on its validation bags."""
    made = Configuration(
        TASKS["four_bags"],
        SETUPS["attnmil"],
        unpack(data),
        Protocol(repetitions=repetitions, sizes=SIZES, training=TRAINING),
        device,
    )
    fitted = train_stacked(made).models
    with tempfile.TemporaryDirectory() as held:
        for r in range(repetitions):
            one = fitted.model(r).cpu()
            assert isinstance(one, MILModel)  # narrows the type for mypy
            xmil.save_model(one, Path(held) / f"{r}.safetensors")
        ask = partial(_repetition, made=replace(made, device="cpu"), models=Path(held))
        if processes == 1:
            return [ask(r) for r in range(repetitions)]
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            return list(pool.map(ask, range(repetitions)))


def _repetition(r: int, *, made: Configuration, models: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, splits, features = (
        xmil.load_model(models / f"{r}.safetensors"),
        made.splits(r),
        made.instances.features,
    )
    held = {part: _digit_bags(model, features, getattr(splits, part)) for part in ("validation", "test")}
    sample = features[np.unique(splits.train.rows)]
    found = {"repetition": r, **_chosen(model, sample, held, target=TARGET)}
    print(json.dumps(found), flush=True)
    return found


def _digit_bags(model: MILModel, features: Array, bags: BagSet) -> Bags:
    rows = bags.rows[: SIZES[2]]
    pairs = [(features[own], relevance_of(model, features[own], TARGET)) for own in rows]
    return pairs, [codes % 10 for codes in bags.codes[: SIZES[2]]], list(rows)


def _chosen(model: MILModel, sample: Array, held: dict[str, Bags], *, target: int) -> dict[str, Any]:
    """The purest dictionary on validation bags, and the one whose deletions go best, on test bags."""
    tried, facts = {}, {}
    for kind, k in DICTIONARIES:
        tried[f"{kind}, {k}"] = fit_dictionary(sample, concepts=k, kind=kind)
        facts[f"{kind}, {k}"] = _measured(model, tried[f"{kind}, {k}"], held["validation"], target)
    purest = max(facts, key=lambda name: facts[name]["purity"])
    truest = max(facts, key=lambda name: facts[name]["agreement"] + facts[name]["correlation"])
    return {
        "validation": facts,
        "purest": {"dictionary": purest, **_measured(model, tried[purest], held["test"], target)},
        "truest": {"dictionary": truest, **_measured(model, tried[truest], held["test"], target)},
    }


def _measured(model: MILModel, dictionary: Dictionary, bags: Bags, target: int) -> dict[str, float]:
    looked = through(dictionary, *bags)
    told = deletions(model, dictionary, looked, [x for x, _ in bags[0]], target)
    return {"purity": float(np.mean(purity(looked))), **told}


def colon_bags(path: Path) -> list[ColonBag]:
    """The bags of a feature file; eight bits are put back to the features' scale."""
    with np.load(path) as held:
        scale = torch.from_numpy(held["scale"]) if "scale" in held else None
    bags = read_bags(path)
    return bags if scale is None else [replace(bag, features=bag.features * scale) for bag in bags]


def colon(data: Path, *, folds: int, most: int, task: str = "epithelial") -> list[dict[str, Any]]:
    """The best single concept per cell type by relevance and by activation, on held-out images."""
    from benchmarks.better_rule.colon import held_out, parts

    bags = [replace(bag, features=bag.features[:most], cells=bag.cells[:most]) for bag in colon_bags(data)]
    found = []
    for run in range(folds):
        training, test = parts(bags, task, run)
        model = fit("attnmil", training, task, seed=run)
        own = {"validation": held_out(training, run), "test": test}
        sample = np.concatenate([bag.features.numpy() for bag in training])
        found.append({"fold": run, **_best_concepts(model, sample, own)})
        print(json.dumps(found[-1]), flush=True)
    return found


def _best_concepts(model: MILModel, sample: Array, own: dict[str, list[ColonBag]]) -> dict[str, Any]:
    dictionary = fit_dictionary(sample, concepts=40, kind="nmf")
    tables = {}
    for part, bags in own.items():
        pairs = [(bag.features.numpy(), relevance_of(model, bag.features.numpy(), 1)) for bag in bags]
        cells = [bag.cells for bag in bags]
        looked = through(dictionary, pairs, cells, cells)
        codes = np.concatenate([dictionary.codes(x) for x, _ in pairs])
        tables[part] = (np.concatenate([s.concepts for s in looked.shares]), codes, np.concatenate(cells))
        if part == "test":
            told = deletions(model, dictionary, looked, [x for x, _ in pairs], 1)
    rows: dict[str, Any] = {}
    for cell, name in enumerate(CELLS):
        for way, at in (("relevance", 0), ("activation", 1)):
            chosen = np.array(
                [_auroc(tables["validation"][2] == cell, v) for v in tables["validation"][at].T]
            )
            k = int(np.abs(chosen - 0.5).argmax())
            value = _auroc(tables["test"][2] == cell, tables["test"][at][:, k])
            rows[f"{name}, {way}"] = value if chosen[k] >= 0.5 else 1 - value
    return {**rows, **told}


def _auroc(truth: Array, values: Array) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, values)) if 0 < truth.sum() < len(truth) else 0.5


def main() -> None:
    """Run one of the studies and print its means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("digits", "colon"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--most", type=int, default=100_000, help="nuclei of a colon image")
    parser.add_argument("--task", choices=("epithelial", "balance"), default="epithelial", help="of colon")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.which == "digits":
        found = digits(args.data, device=args.device, repetitions=args.runs, processes=args.processes)
    else:
        found = colon(args.data, folds=args.runs, most=args.most, task=args.task)
    (args.out / f"concepts-{args.which}.json").write_text(json.dumps(found, indent=1))
    for key in found[0] if args.which == "colon" else ():
        if key != "fold":
            print(f"{key}: {np.nanmean([row[key] for row in found]):.3f}")
    for which in ("purest", "truest") if args.which == "digits" else ():
        for key in [name for name in found[0][which] if name not in ("dictionary", "n")]:
            print(f"{which}, {key}: {np.mean([row[which][key] for row in found]):.3f}")


if __name__ == "__main__":
    main()
