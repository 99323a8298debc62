"""The studies of insight in little: a planted mark, masks and shares of an ensemble, pure concepts, pens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the studies draw pictures")

from benchmarks import insight_shortcuts as shortcuts
from benchmarks.insight_concepts import Looked, deletions, purity, relevance_of, through
from benchmarks.insight_ensembles import Members, masks, pack, shares, unpack
from benchmarks.insight_planting import INKS, Planting, plant
from benchmarks.minimal_bounds import count
from benchmarks.null_cohorts import count_methods

import xmil
from xmil.bench import TASKS, BagSet
from xmil.insights import LIGHT, ConceptShares, appearance, fit_dictionary, light


def first(study: shortcuts.Study, n: int) -> shortcuts.Study:
    """A study of the first bags alone."""
    columns = {name: cells[:n] for name, cells in study.columns.items()}
    return replace(
        study,
        features=study.features[:n],
        labels=study.labels[:n],
        pictures=study.pictures[:n],
        columns=columns,
    )


def test_the_mark_that_gives_the_label_away_comes_first() -> None:
    study = first(shortcuts.digit_study("digits", seed=5000, n_train=200), 40)
    found = shortcuts.look(study, seed=0, epochs=20)
    assert found["first"], found["rows"]
    assert found["auroc"] > 0.9


@pytest.mark.parametrize("kind", ["tint", "pen"])
def test_plantings_show_in_most_pictures_of_their_class(kind: str) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    pictures = np.clip(np.array([190, 120, 165]) + rng.integers(-30, 30, (40, 60, 60, 1)), 0, 255).astype(
        np.uint8
    )
    pictures[:, :4] = 245
    colour = (1.0, 0.9, 1.0) if kind == "tint" else INKS["blue ink"]
    planted = Planting(kind, (LIGHT,), 1, 0.9, colour)
    out = plant(pictures, labels, planted, rng)
    changed = (out != pictures).any(axis=(1, 2, 3))
    assert changed[labels == 1].mean() > 0.7
    assert changed[labels == 0].mean() < 0.3
    one = int(np.flatnonzero(changed)[0])
    if kind == "tint":
        assert light(out[[one]]).colour[0] - light(pictures[[one]]).colour[0] > 0.05
    else:
        assert appearance(out[one])["blue ink"] > 0.02 > appearance(pictures[one])["blue ink"]


def members(noise: float, seed: int = 0) -> Members:
    """An ensemble whose scores are the evidence with noise of their own."""
    rng = np.random.default_rng(seed)
    task = TASKS["pos_neg_count"]
    codes = task.draw(rng, 60, 30)
    evidence = task.evidence(codes)
    scores = evidence + noise * rng.normal(size=(5, *evidence.shape))
    return Members(scores, BagSet(codes, codes, task.label(codes)), evidence, 1.0)


def test_an_ensemble_beats_its_models_and_what_all_agree_on_counts_the_evidence() -> None:
    noisy = masks(members(0.8))
    assert noisy["mean of five"] > noisy["single model"] + 0.05
    found = shares(members(0.4))
    assert found["agreed"] > 0.9 > found["one model"]
    assert masks(members(0.0))["mean of five"] == pytest.approx(1.0)


def test_purity_counts_each_patch_once_and_deletions_of_a_linear_model_agree() -> None:
    concepts = np.zeros((6, 2), dtype=np.float32)
    concepts[:, 0] = [6, 5, 4, 3, 2, 1]
    part = ConceptShares(concepts, np.zeros(6, np.float32), np.zeros(6, np.float32), concepts)
    looked = Looked([part, part], [np.array([1, 1, 1, 2, 2, 2])] * 2, [np.arange(6)] * 2)
    assert purity(looked, top=4)[0] == 0.75
    rng = np.random.default_rng(0)
    model = xmil.create_model("meanpool", in_dim=6, n_classes=2, n_layers=0, seed=0)
    bags = [np.abs(rng.normal(size=(20, 6))).astype(np.float32) for _ in range(5)]
    dictionary = fit_dictionary(np.concatenate(bags), concepts=4, kind="nmf")
    kinds: list[Any] = [np.zeros(20, dtype=int)] * 5
    made = through(dictionary, [(x, relevance_of(model, x, 1)) for x in bags], kinds, kinds)
    found = deletions(model, dictionary, made, bags, 1)
    assert found["agreement"] == found["agreement of relevance"] == 1.0
    assert found["correlation"] == pytest.approx(1.0, abs=1e-3)


def test_packed_digits_come_back(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    for name in ("train", "test"):
        y = np.arange(200) % 10
        np.savez(tmp_path / f"{name}.npz", x=np.abs(rng.normal(size=(200, 4))), y=y)
    pack(tmp_path, tmp_path / "packed", digits=100)
    back = unpack(tmp_path / "packed")
    original = unpack(tmp_path)
    top = original.features.max()
    for row in back.features[:5]:
        far = np.abs(original.features - row).max(axis=1).min()
        assert far <= top / 255


@pytest.mark.parametrize("patients", [100, 50, 20])
def test_equal_methods_are_called_better_as_rarely_as_the_level_says(patients: int) -> None:
    """One, two and five slides a patient, of which those of a patient are alike."""
    t, wilcoxon, better, planted = count_methods(range(16), patients, by_case=True)
    assert max(t, wilcoxon, better) <= 3
    assert planted >= 4


@pytest.mark.parametrize("peaked", [False, True])
def test_no_bound_of_a_minimal_set_is_false(peaked: bool) -> None:
    assert count(range(14), peaked=peaked) == [28, 0, 0, 0]
