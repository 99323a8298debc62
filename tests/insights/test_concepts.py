"""Concepts: dictionaries write the features, and relevance through them adds up."""

from __future__ import annotations

import numpy as np
import pytest

import xmil
from xmil.core.errors import FileError, InputError, UnknownNameError
from xmil.insights import (
    KINDS,
    Dictionary,
    compare_sizes,
    even_counts,
    feature_weights,
    fit_dictionary,
    leading_concepts,
    recommend_size,
    remove_concepts,
    seed_agreement,
    split_scores,
)
from xmil.insights.run import MeanLogit

D = 12


def patches(n: int = 400, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Patches of four kinds around four directions, never negative, and their kinds."""
    rng = np.random.default_rng(seed)
    centres = np.abs(np.random.default_rng(42).normal(size=(4, D))) * 3
    kinds = rng.integers(0, 4, n)
    return np.abs(centres[kinds] + rng.normal(size=(n, D)) * 0.2).astype(np.float32), kinds


@pytest.mark.parametrize("kind", KINDS)
def test_shares_add_up_to_the_score(kind: str) -> None:
    x, _ = patches()
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, seed=0)
    e = xmil.explain(model, x, method="lrp", target=1, preset="exact", feature_level=True)
    found = fit_dictionary(x, concepts=6, kind=kind, seed=0)
    shares = split_scores(found, x, feature_weights(x, e.relevance))
    total = shares.concepts.sum(axis=1) + shares.offset + shares.residual
    np.testing.assert_allclose(total, e.scores, rtol=1e-3, atol=1e-5 * np.abs(e.scores).max())
    np.testing.assert_allclose(shares.profile, shares.concepts.sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_concepts_are_the_kinds_of_patches(kind: str) -> None:
    x, kinds = patches()
    codes = fit_dictionary(x, concepts=16 if kind == "topk" else 4, kind=kind, seed=0).codes(x)
    used = np.argsort(-codes.sum(axis=0))[:4]
    top = [np.bincount(kinds[np.argsort(-codes[:, k])[:20]], minlength=4).max() / 20 for k in used]
    assert np.mean(top) >= 0.9


def test_codes_of_nmf_lower_the_error_as_much_as_non_negative_least_squares() -> None:
    from scipy.optimize import nnls

    x, _ = patches(30)
    found = fit_dictionary(patches()[0], concepts=5, kind="nmf")
    ours = np.linalg.norm(found.residual(x), axis=1)
    best = [nnls(found.atoms.T.astype(float), row.astype(float))[1] for row in x]
    np.testing.assert_allclose(ours, best, rtol=0.05, atol=0.02)


def test_a_deleted_concept_moves_the_output_as_its_relevance_says() -> None:
    x, _ = patches(60)
    model = xmil.create_model("meanpool", in_dim=D, n_classes=2, seed=0)  # linear: relevance is exact
    e = xmil.explain(model, x, method="lrp", target=1, preset="exact", feature_level=True)
    found = fit_dictionary(x, concepts=4, seed=0)
    shares = split_scores(found, x, feature_weights(x, e.relevance))

    output = MeanLogit((model,), 1)
    slope = output.slope(x)
    for removal in remove_concepts(output, found, x, shares, slope=slope, concepts=range(4)):
        assert removal["measured"] == pytest.approx(removal["relevance"], rel=0.3, abs=0.05)
        little = 0.01 * found.codes(x)[:, [removal["concept"]]] * found.atoms[removal["concept"]]
        per_step = (output(x - little) - output(x)) / 0.01
        assert removal["predicted"] == pytest.approx(per_step, rel=0.02, abs=1e-3)


def test_the_sample_is_even_bounded_and_repeatable() -> None:
    sizes = np.random.default_rng(0).integers(1, 2000, 50)
    counts = even_counts(sizes, limit=5000, seed=1)
    assert counts.sum() == 5000
    assert (np.abs(counts - sizes * 5000 / sizes.sum()) < 1).all()
    np.testing.assert_array_equal(counts, even_counts(sizes, limit=5000, seed=1))
    assert even_counts([3, 0, 2]).tolist() == [3, 0, 2]
    with pytest.raises(InputError, match="no patches"):
        even_counts([])


def test_the_leading_concepts_have_the_most_relevance_of_either_sign() -> None:
    assert leading_concepts([[1.0, -3.0, 0.0], [1.0, 3.0, 0.0]], top=2).tolist() == [1, 0]


def test_saved_and_read_back(tmp_path) -> None:
    x, _ = patches(100)
    for kind in KINDS:
        found = fit_dictionary(x, concepts=3, kind=kind)
        found.save(tmp_path / "d.npz")
        np.testing.assert_array_equal(Dictionary.load(tmp_path / "d.npz").codes(x), found.codes(x))
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(FileError, match="not a dictionary of concepts"):
        Dictionary.load(tmp_path / "broken.npz")


def test_bad_input_is_named() -> None:
    x, _ = patches(10)
    with pytest.raises(UnknownNameError, match="dictionary 'k-means'"):
        fit_dictionary(x, kind="k-means")
    with pytest.raises(InputError, match=r"range \[1, 10\]"):
        fit_dictionary(x, concepts=11)
    with pytest.raises(InputError, match="never negative"):
        fit_dictionary(-x, concepts=2, kind="nmf")
    with pytest.raises(InputError, match=f"width {D}"):
        fit_dictionary(x, concepts=2).codes(x[:, :3])


def test_the_number_of_concepts_is_recommended_by_what_seeds_agree_on() -> None:
    """Six kinds of patches: twenty concepts cut them anew with each seed, six are found by all."""
    rng = np.random.default_rng(0)
    kinds = 3 * rng.normal(size=(6, 16))
    x = (kinds[rng.integers(0, 6, 1200)] + 0.5 * rng.normal(size=(1200, 16))).astype(np.float32)
    agreement = compare_sizes(x, concepts=20)
    assert max(agreement) == 20
    assert agreement[20] < 0.6
    assert agreement[6] > 0.95
    assert recommend_size(agreement) == 6
    assert compare_sizes(x, concepts=20) == agreement
    assert seed_agreement(np.abs(x), concepts=2, kind="nmf") <= 1
