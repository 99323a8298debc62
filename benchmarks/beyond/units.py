"""The studies in units that processes take one by one: a trained model and what is measured of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

import xmil
from benchmarks.beyond import errors, learning, pairs, sets, table
from benchmarks.beyond.digits import Trained, several, stored
from benchmarks.colon import train as colon
from benchmarks.colon.bags import ColonBag, folds, read_bags
from xmil.bench import (
    FLIPPING,
    SETUPS,
    TASKS,
    Configuration,
    Protocol,
    load_instances,
    save_stack,
    train_stacked,
)
from xmil.core.background import background_of
from xmil.models import MILModel

Row = dict[str, Any]
COURSES = {
    "onehot": learning.Course("adjacent_pairs"),
    "onehot, smaller bags too": learning.Course("adjacent_pairs", smaller=True),
    "flip": learning.Course("context_flip", smaller=True, steps=3000),
}
EPOCHS = {"attnmil": 400, "transmil": 200}  # at most; otherwise training is the paper's


@dataclass(frozen=True)
class Scope:
    """Where data and models are, and how much is measured."""

    digits: str
    colon: Path
    models: Path
    device: str = "cpu"
    repetitions: int = 10
    bags: int = 10
    quick: bool = False

    def settings(self, model: str) -> Row:
        """The protocol of the models of Table 1."""
        small = {"sizes": (32, 16, 20), "training": {"epochs": 2}}
        return {
            "repetitions": self.repetitions,
            **(small if self.quick else {"training": {"epochs": EPOCHS[model]}}),
        }


def train_table(scope: Scope, model: str, task: str) -> Row:
    """The models of one column of Table 1, all repetitions at once."""
    protocol = Protocol(**scope.settings(model))
    c = Configuration(TASKS[task], SETUPS[model], load_instances(scope.digits), protocol, scope.device)
    fitted = train_stacked(c)
    save_stack(scope.models, c, fitted)
    return {"epochs": fitted.epochs}


def train_course(scope: Scope, name: str) -> Row:
    """The models of a course."""
    course = _course(scope, name)
    found = learning.learn(course, repetitions=scope.repetitions, device=scope.device)
    learning.save(found, scope.models / f"{name}.pt")
    return {"steps": course.steps}


def _course(scope: Scope, name: str) -> learning.Course:
    return replace(COURSES[name], steps=20) if scope.quick else COURSES[name]


def _table_model(scope: Scope, model: str, task: str, repetition: int) -> Trained:
    (one,) = stored(
        task, model, folder=scope.models, data=scope.digits,
        repetitions=1, first=repetition, settings=scope.settings(model),
    )  # fmt: skip
    return one


def _course_model(scope: Scope, name: str, repetition: int) -> Trained:
    course = _course(scope, name)
    models = learning.load(course, scope.models / f"{name}.pt", scope.repetitions)
    (one,) = several(course.configuration(scope.repetitions), models, 1, first=repetition)
    return one


def evidence(scope: Scope, model: str, task: str, repetition: int) -> Row:
    """AUPRC-2 of LRP, of contexts and of Shapley values."""
    one = _table_model(scope, model, task, repetition)
    return {**table.measured(one, task, model, bags=3 if scope.quick else None)}


def partners(scope: Scope, model: str, task: str, repetition: int) -> Row:
    """AP of true partners in bags of 30, sampled."""
    one = _table_model(scope, model, task, repetition)
    draws = 8 if scope.quick else 64
    found = [
        pairs.precisions(one.model, x, codes, draws=draws) for x, codes in pairs.positives(one, scope.bags)
    ]
    return {"auroc": one.auroc, "bags": len(found), **_means(found)}


def one_hot(scope: Scope, name: str, repetition: int) -> Row:
    """AP of true partners in bags of 12, every coalition run."""
    one = _course_model(scope, name, repetition)
    found = [pairs.precisions(one.model, x, codes) for x, codes in pairs.positives(one, scope.bags)]
    return {"auroc": one.auroc, "bags": len(found), **_means(found)}


def flip_signs(scope: Scope, name: str, repetition: int) -> Row:
    """Whether an 8 and a 9 speak for class 1 together."""
    one = _course_model(scope, name, repetition)
    both = np.all([(one.test.codes == digit).any(axis=1) for digit in FLIPPING], axis=0)
    right = []
    for i in np.flatnonzero(both)[: 2 * scope.bags]:
        found = xmil.interactions(one.model, one.x[i], target=1, top=12)
        right.append(pairs.flips_rightly(found, one.test.codes[i]))
    return {"auroc": one.auroc, "bags": len(right), "right": float(np.mean(right))}


def intervals(scope: Scope, model: str, task: str, repetition: int) -> Row:
    """How often intervals hold what they should, on one bag."""
    one = _table_model(scope, model, task, repetition)
    long, counts, seeds = (50, (8, 16), 2) if scope.quick else (4000, (24, 48, 96, 192, 384), 20)
    x = one.x[0]
    row: Row = {"contexts": errors.coverage(one.model, x, seeds=seeds, counts=counts, long=long)}
    n, some = (14, seeds) if model == "attnmil" else (9, max(2, seeds // 2))
    row["shapley"] = errors.shapley(one.model, x[:n], some)
    if model == "attnmil":
        row["interactions"] = errors.interactions(one.model, x[:n], some)
    return row


def exhaustive_sets(scope: Scope, model: str, task: str, repetition: int) -> Row:
    """Minimal sets of bags of 15 against all subsets."""
    one = _table_model(scope, model, task, repetition)
    n, rows = (8 if scope.quick else 15), []
    for x in one.x[: scope.bags, :n]:
        for kind, size in sets.exhaustive(one.model, x).items():
            found = xmil.minimal_set(one.model, x, kind=kind)
            rows.append(
                {
                    "equal": found.upper == size,
                    "enclosed": found.lower <= (size or n) <= (found.upper or n),
                    "any": size is not None,
                }
            )
    return {"searches": rows, **(_gaps(one, scope) if model == "attnmil" else {})}


def _gaps(one: Trained, scope: Scope) -> Row:
    gaps = []
    for n in (30, 300):
        joined = one.x[: 10 * scope.bags].reshape(-1, n, one.x.shape[2])[: scope.bags]
        for x in joined:
            found = xmil.minimal_set(one.model, x)
            gaps.append(
                {"n": n, "lower": found.lower, "upper": found.upper, "greedy": sets.greedy(one.model, x)}
            )
    return {"gaps": gaps}


def colon_run(scope: Scope, model: str, task: str, run: int) -> Row:
    """A model of the colon benchmark: evidence, minimal sets, and intervals."""
    bags = read_bags(scope.colon)
    test = set(folds(bags, task, seed=run // 5)[run % 5].tolist())
    training = [bag for i, bag in enumerate(bags) if i not in test]
    net = colon.fit(model, training, task, seed=run, epochs=1 if scope.quick else colon.EPOCHS)
    net.background = background_of([bag.features.numpy() for bag in training])
    held = [bags[i] for i in sorted(test) if len(bags[i].features) > 4][: 3 if scope.quick else None]
    with torch.no_grad():
        chances = [float(net(bag.features.unsqueeze(0)).softmax(1)[0, 1]) for bag in held]
    labels = [bag.label(task) for bag in held]
    row: Row = {"auroc": float(roc_auc_score(labels, chances)) if len(set(labels)) > 1 else None}
    row |= _colon_evidence(net, held, task, shapley=model == "attnmil")
    row["contexts"] = _colon_intervals(net, held, quick=scope.quick or model != "attnmil")
    if model == "attnmil":
        row["sets"] = [_colon_sets(net, bag) for bag in held]
    return row


def _colon_evidence(net: MILModel, held: list[ColonBag], task: str, *, shapley: bool) -> Row:
    ways: dict[str, Row] = {"lrp": {}, "contexts=24": {"contexts": 24}}
    ways |= {"shapley": {"method": "shapley", "permutations": 200, "precision": None}} if shapley else {}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for bag in held:
        truth = bag.evidence(task)
        if len(set(np.sign(truth).tolist())) > 1:
            for name, how in ways.items():
                scores = xmil.explain(net, bag.features, target=1, **{"method": "lrp", **how}).scores
                found[name].append(xmil.auprc2(truth, scores))
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _colon_intervals(net: MILModel, held: list[ColonBag], *, quick: bool) -> list[Any]:
    """Two images of middling size."""
    long, counts, seeds = (200, (24,), 2) if quick else (1000, (24, 48, 96), 5)
    some = sorted(held, key=lambda bag: abs(len(bag.features) - 150))[:2]
    return [
        c for bag in some for c in errors.coverage(net, bag.features, seeds=seeds, counts=counts, long=long)
    ]


def _colon_sets(net: MILModel, bag: ColonBag) -> Row:
    found = xmil.minimal_set(net, bag.features)
    return {
        "n": len(bag.features),
        "lower": found.lower,
        "upper": found.upper,
        "greedy": sets.greedy(net, bag.features),
    }


def _means(found: list[dict[str, float]]) -> Row:
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]} if found else {}


TABLE = [(model, task) for task in ("adjacent_pairs", "pos_neg_count", "four_bags") for model in EPOCHS]
AFTER: dict[tuple[str, str], list[Callable[..., Row]]] = {
    **{column: [evidence] for column in TABLE},
    ("transmil", "adjacent_pairs"): [partners, intervals, evidence],
    ("attnmil", "adjacent_pairs"): [intervals, evidence],
    ("transmil", "pos_neg_count"): [exhaustive_sets, evidence],
    ("attnmil", "pos_neg_count"): [exhaustive_sets, evidence],
}
AFTER_COURSE = {"onehot": one_hot, "onehot, smaller bags too": one_hot, "flip": flip_signs}
