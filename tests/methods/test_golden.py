"""Published values: the authors' checkpoints and scores, to the stated tolerances."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

import xmil

MODELS = ["attnmil_camelyon", "attnmil_nsclc", "attnmil_random", "transmil_random", "addmil_random"]
EPS = float(np.finfo(np.float32).eps)
ROUNDINGS = 8  # of float32, of an output: two ways to it may lie this far apart
DRAWS, MOVES = 4, 4  # of features that are off by a rounding, and how many times their effect is allowed
METHODS = {
    "lrp": "lrp",
    "gi": "gxi",
    "grad2": "grad2",
    "ig": "ig",
    "single": "single",
    "removed": "one_removed",
    "logits": "logits",
}


def golden(data_dir: Path, name: str) -> tuple[xmil.models.MILModel, dict[str, np.ndarray]]:
    with np.load(data_dir / "golden" / name / "expected.npz") as stored:
        expected = dict(stored)
    return xmil.load_model(data_dir / "golden" / name / "best_model.pt"), expected


def bags(expected: dict[str, np.ndarray]) -> list[str]:
    return [key.removesuffix("_features") for key in expected if key.endswith("_features")]


@pytest.mark.parametrize("name", MODELS)
def test_logits(data_dir: Path, name: str) -> None:
    model, expected = golden(data_dir, name)
    for bag in bags(expected):
        e = xmil.explain(model, expected[f"{bag}_features"], method="random")
        np.testing.assert_allclose(e.logits, expected[f"{bag}_logits"], rtol=0, atol=1e-5)


def rounding_of_lrp(model: xmil.models.MILModel, x: np.ndarray, e: xmil.Explanation) -> float:
    """How far the scores of the paper's rules move if each feature is off by one rounding."""
    moves = []
    for seed in range(DRAWS):
        signs = np.random.default_rng(seed).choice([-1, 1], size=x.shape)
        near = (x * (1 + EPS * signs)).astype(np.float32)
        scores = xmil.explain(model, near, method="lrp", target=e.target, preset="paper").scores
        moves.append(float(np.abs(scores - e.scores).max()))
    return max(moves)


@pytest.mark.parametrize("name", MODELS)
def test_scores(data_dir: Path, name: str) -> None:
    model, expected = golden(data_dir, name)
    checked = 0
    for bag in bags(expected):
        for key in (k for k in expected if k.startswith(f"{bag}_") and k[-1].isdigit()):
            _, kind, cls = key.split("_")
            trans = kind == "lrp" and name.startswith("transmil")
            preset = {"preset": "released" if trans else "paper"} if kind == "lrp" else {}
            x = expected[f"{bag}_features"]
            e = xmil.explain(model, x, method=METHODS[kind], target=int(cls), **preset)
            error, largest = np.abs(e.scores - expected[key]).max(), np.abs(expected[key]).max()
            rounding = 0.0
            if kind == "removed":  # one output minus another
                rounding = ROUNDINGS * EPS * abs(e.output)
            elif kind == "lrp" and not trans:  # relevance over sums that cancel
                rounding = MOVES * rounding_of_lrp(model, x, e)
            assert error <= (1e-2 if trans else 1e-4) * largest + rounding, (key, error, largest)
            checked += 1
    assert checked >= 6


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("transmil")])
def test_attention(data_dir: Path, name: str) -> None:
    model, expected = golden(data_dir, name)
    for bag in bags(expected):
        e = xmil.explain(model, expected[f"{bag}_features"], method="attention")
        np.testing.assert_allclose(e.scores, expected[f"{bag}_attention"], rtol=1e-4)


def test_rollout_before_folding(data_dir: Path) -> None:
    """The published rollout does not give the repeated instances their share back: compare the others."""
    model, expected = golden(data_dir, "transmil_random")
    for bag in bags(expected):
        n = len(expected[f"{bag}_features"])
        repeated = int(np.ceil(np.sqrt(n))) ** 2 - n
        e = xmil.explain(model, expected[f"{bag}_features"], method="attention", normalise=True)
        np.testing.assert_allclose(e.scores[repeated:], expected[f"{bag}_attention"][repeated:], rtol=5e-3)


@pytest.mark.parametrize("preset", ["exact", "paper", "default"])
def test_presets_rank_alike(data_dir: Path, preset: str) -> None:
    model, expected = golden(data_dir, "transmil_random")
    for bag in ("n37", "n150"):
        for cls in (0, 1):
            e = xmil.explain(model, expected[f"{bag}_features"], target=cls, preset=preset)
            assert spearmanr(e.scores, expected[f"{bag}_lrp_{cls}"])[0] >= 0.8


def test_released_explains_another_network(data_dir: Path) -> None:
    model, expected = golden(data_dir, "transmil_random")
    e = xmil.explain(model, expected["n37_features"], target=1, preset="released")
    assert np.abs(e.logits - expected["n37_logits"]).max() <= 1e-5
    assert abs(e.output - e.logits[1]) > 1e-3
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * max(1.0, abs(e.output))


def test_clam_checkpoint(data_dir: Path, rng: np.random.Generator) -> None:
    model = xmil.load_model(data_dir / "checkpoints" / "clam" / "s_0_checkpoint.pt")
    e = xmil.explain(model, rng.normal(size=(500, 1024)), target=1)
    assert (model.spec.name, len(e)) == ("clam_sb", 500)
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * np.abs(e.logits).max()
