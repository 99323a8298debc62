"""Strategies, shortcuts, stability and biomarkers against slow versions and known answers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import spearmanr

from xmil.core.errors import InputError
from xmil.insights import (
    Association,
    appearance,
    correlation_with,
    find_consensus,
    find_strategies,
    light,
    map_biomarkers,
    patch_associations,
    patch_correlations,
    rank_associations,
    slide_associations,
    strong_share,
    survival_curves,
    survival_of,
)
from xmil.insights.biomarkers import STRONG
from xmil.insights.concepts import Strategies
from xmil.insights.report import Findings, report_html


def names(n: int) -> list[str]:
    return [f"s{i}" for i in range(n)]


def ask(values: np.ndarray, columns: dict, **options) -> list[Association]:
    """What is said of columns of slides that are taken as independent."""
    return rank_associations(slide_associations(values, columns, names(len(values)), cases=None, **options))


def test_planted_columns_are_found_and_clean_ones_are_not() -> None:
    """A site behind the output comes first; in clean cohorts nothing is called a shortcut."""
    first, none = 0, 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        output = rng.normal(size=100)
        clean = {
            "scanner": rng.choice(["x", "y", "z"], 100).tolist(),
            "age": rng.normal(size=100).tolist(),
            "batch": rng.choice(["1", "2"], 100).tolist(),
        }
        site = np.where(rng.random(100) < 0.85, output > 0, output < 0)
        planted = {**clean, "site": ["A" if s else "B" for s in site]}
        found = rank_associations(
            slide_associations(output, planted, names(100), draws=500, seed=seed, cases=None)
        )
        first += found[0].cause == "site" and found[0].is_shortcut
        none += not any(a.is_shortcut for a in ask(output, clean, draws=500))
    assert first >= 18
    assert none >= 18


def test_effects_are_rank_correlations_and_their_p_values_are_even_under_chance() -> None:
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=40), rng.normal(size=40)
    (found,) = slide_associations(y, {"x": x.tolist()}, names(40), draws=1000, cases=None)
    assert found.effect == pytest.approx(spearmanr(x, y).statistic)
    ps = [
        slide_associations(
            rng.normal(size=20), {"x": rng.normal(size=20).tolist()}, names(20), draws=200, cases=None
        )[0].p
        for _ in range(200)
    ]
    assert 0.4 < np.mean(ps) < 0.6


def test_a_property_of_the_picture_is_found_within_slides() -> None:
    rng = np.random.default_rng(0)
    relevance = [rng.normal(size=60) for _ in range(20)]
    seen = [{"blue ink": (r > 1).astype(float), "focus": rng.random(60)} for r in relevance]
    within = [patch_correlations(r, row) for r, row in zip(relevance, seen, strict=True)]
    found = rank_associations(patch_associations(within, names(20), cases=None))
    assert (found[0].cause, found[0].is_shortcut, found[1].is_shortcut) == ("blue ink", True, False)
    assert len(found[0].slides) == 5


def test_a_site_with_more_cases_is_no_shortcut_and_one_the_model_uses_is() -> None:
    """Among slides of one label the output must go with the site."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    site = np.where(rng.random(200) < 0.8, labels, 1 - labels)
    innocent, guilty = labels * 4 + rng.normal(size=200), labels * 2 + site * 2 + rng.normal(size=200)
    columns = {"site": ["ab"[i] for i in site]}
    told = labels.tolist()
    assert ask(innocent, columns)[0].is_shortcut
    assert not ask(innocent, columns, labels=told)[0].is_shortcut
    assert ask(guilty, columns, labels=told)[0].is_shortcut
    output, mark = np.zeros(40), ["no"] * 40
    output[[3, 7, 21, 30]], mark[3], mark[7], mark[21], mark[30] = 5.0, *["yes"] * 4
    (found,) = slide_associations(output + 0.1 * rng.normal(size=40), {"pen": mark}, names(40), cases=None)
    assert {"s3", "s7", "s21", "s30"} <= set(found.slides)


def test_a_column_that_repeats_the_label_is_no_shortcut() -> None:
    """Any model that is right goes with it; a column that the label determines is named as such."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 200)
    output, told = labels * 4 + rng.normal(size=200), labels.tolist()
    diagnosis = ["normal" if label == 0 else "tumour" for label in told]
    assert ask(output, {"diagnosis": diagnosis}, labels=told) == []
    three = [
        label if i % 2 else 2 * label for i, label in enumerate(told)
    ]  # 0, 1 and 2; a clinic has 1 and 2
    (found,) = ask(output, {"clinic": diagnosis}, labels=three)
    assert (found.confounded, found.is_shortcut) == (True, False)
    assert found.corrected < 0.01
    assert found.measure.endswith("label not held fixed")
    kinds = [f"{word} {i % 2}" for i, word in enumerate(diagnosis)]  # differs among slides of one label
    (finer,) = ask(output, {"subtype": kinds}, labels=told)
    assert not finer.confounded
    assert not finer.is_shortcut


def test_within_labels_the_effect_is_the_mean_within_each() -> None:
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=40), rng.normal(size=40)
    labels = [0] * 20 + [1] * 20
    (found,) = slide_associations(y, {"x": x.tolist()}, names(40), labels=labels, draws=100, cases=None)
    halves = [spearmanr(x[i : i + 20], y[i : i + 20]).statistic for i in (0, 20)]
    assert found.effect == pytest.approx(np.mean(halves))


def test_the_light_is_told_from_the_stain_that_goes_with_it() -> None:
    rng = np.random.default_rng(0)
    stain = rng.normal(size=(120, 3))
    light = stain @ rng.normal(size=(3, 3)) + rng.normal(size=(120, 3))
    cells = {"tint": [tuple(row) for row in light]}
    beside = {"tint": [tuple(row) for row in stain]}
    for output, alone, controlled in ((stain[:, 0], True, False), (light[:, 0], True, True)):
        y = output + 0.3 * rng.normal(size=120)
        assert ask(y, cells)[0].is_shortcut == alone
        assert ask(y, cells, beside=beside)[0].is_shortcut == controlled


def test_tissue_is_described_and_never_accused() -> None:
    rng = np.random.default_rng(0)
    relevance = [rng.normal(size=60) for _ in range(20)]
    within = [patch_correlations(r, {"brightness": -r, "blue ink": (r > 5).astype(float)}) for r in relevance]
    (found,) = rank_associations(patch_associations(within, names(20), cases=None))
    assert (found.cause, found.tissue, found.is_shortcut) == ("brightness", True, False)
    assert found.effect == pytest.approx(-1)
    ignored = [patch_correlations(r, {"blue ink": (np.abs(r) < 0.2).astype(float)}) for r in relevance]
    assert not rank_associations(patch_associations(ignored, names(20), cases=None))[0].is_shortcut


def test_columns_that_cannot_be_asked_are_left_out() -> None:
    y = np.arange(20.0)
    columns = {
        "constant": ["a"] * 20,
        "id": names(20),
        "empty": [None] * 18 + ["a", "b"],
        "site": ["a", "b"] * 10,
    }
    assert [a.cause for a in slide_associations(y, columns, names(20), cases=None)] == ["site"]
    assert rank_associations([]) == []
    with pytest.raises(InputError, match="one value per slide"):
        slide_associations(y[:5], columns, names(20), cases=None)


def test_slides_without_a_label_are_asked_about_no_more() -> None:
    """Unlabelled slides of one site with high outputs: among labelled ones nothing goes with the site."""
    rng = np.random.default_rng(3)
    outputs, sites = rng.normal(size=60), ["north", "south"] * 30
    labels = [str(i % 3 // 2) for i in range(40)] + [None] * 20
    outputs[40:] += [5.0 if site == "north" else -5.0 for site in sites[40:]]
    names = [f"s{i}" for i in range(60)]
    (all_slides,) = slide_associations(outputs, {"site": sites}, names, cases=None)
    (found,) = slide_associations(outputs, {"site": sites}, names, labels=labels, cases=None)
    (alone,) = slide_associations(
        outputs[:40], {"site": sites[:40]}, names[:40], labels=labels[:40], cases=None
    )
    assert all_slides.effect > 0.1
    assert (found.effect, found.p, found.n) == (alone.effect, alone.p, 40)


def test_draws_in_blocks_have_the_chance_of_draws_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    outputs, ages = rng.normal(size=50), rng.normal(size=50)
    names = [f"s{i}" for i in range(50)]
    within = [{"blue ink": float(value)} for value in rng.normal(0.1, 1, size=50)]
    whole = [
        *slide_associations(outputs, {"age": list(ages)}, names, cases=None),
        *patch_associations(within, names, cases=None),
    ]
    monkeypatch.setattr("xmil.evaluate.statistics.BLOCK", 50 * 700)
    parts = [
        *slide_associations(outputs, {"age": list(ages)}, names, cases=None),
        *patch_associations(within, names, cases=None),
    ]
    assert [a.effect for a in parts] == [a.effect for a in whole]
    assert [a.p for a in parts] == pytest.approx([a.p for a in whole], abs=0.03)


def patients(rng: np.random.Generator, *, alike: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """The case of each of 100 slides of 20 patients, and a number that slides of one patient share."""
    cases = np.repeat(np.arange(20), 5)
    own = np.sqrt(alike) * rng.normal(size=20)[cases] + np.sqrt(1 - alike) * rng.normal(size=100)
    return cases, own


def test_slides_of_one_patient_are_one_piece_of_evidence() -> None:
    """Null cohorts of 20 patients with five slides each: p < 0.05 about as often as it says."""
    low = dict.fromkeys(("site", "scanner", "age", "tint", "blue ink"), 0)
    cohorts = 60
    for seed in range(cohorts):
        rng = np.random.default_rng(seed)
        cases, output = patients(rng)
        labels = rng.integers(0, 2, 20)[cases].tolist()
        tint = rng.normal(size=(20, 3))[cases] + 0.3 * rng.normal(size=(100, 3))
        columns = {
            "site": rng.choice(["a", "b"], 20)[cases].tolist(),
            "scanner": rng.choice(["x", "y"], 100).tolist(),
            "age": rng.normal(size=20)[cases].tolist(),
            "tint": [tuple(row) for row in tint.tolist()],
        }
        who = [f"p{case}" for case in cases]
        within = [{"blue ink": float(value)} for value in patients(rng)[1]]
        found = slide_associations(
            output, columns, names(100), cases=who, labels=labels, draws=200, seed=seed
        ) + patch_associations(within, names(100), cases=who, draws=200, seed=seed)
        assert {(a.n, a.cases) for a in found} == {(100, 20)}
        for a in found:
            low[a.cause] += a.p < 0.05
    assert max(low.values()) <= 8, low


def test_planted_causes_are_found_among_patients_and_within_them() -> None:
    """A site of whole patients, and a pen on single slides of patients."""
    first = {"site": 0, "pen": 0}
    for seed in range(10):
        rng = np.random.default_rng(seed)
        cases, output = patients(rng)
        causes = {"site": rng.permutation(20)[cases] % 2, "pen": rng.integers(0, 2, 100)}
        for cause, cells in causes.items():
            y = output + 3 * cells
            columns = {"scanner": rng.choice(["x", "y"], 100).tolist(), cause: [str(c) for c in cells]}
            found = rank_associations(slide_associations(y, columns, names(100), cases=cases.tolist()))
            first[cause] += found[0].cause == cause and found[0].is_shortcut
    assert min(first.values()) >= 9, first


def test_one_slide_per_patient_gives_what_independent_slides_give() -> None:
    rng = np.random.default_rng(0)
    y, columns = rng.normal(size=40), {"x": rng.normal(size=40).tolist(), "site": list("abcd") * 10}
    labels = rng.integers(0, 2, 40).tolist()
    alone, own = (
        slide_associations(y, columns, names(40), cases=cases, labels=labels, draws=300)
        for cases in (None, names(40))
    )
    assert [(a.effect, a.p) for a in alone] == [(a.effect, a.p) for a in own]
    assert ([a.cases for a in alone], [a.cases for a in own]) == ([None, None], [40, 40])
    assert str(own[0]).count("40 slides of 40 cases") == 1


def test_every_patient_weighs_the_same_however_many_slides() -> None:
    """Ten patients with one slide each, and the first two of them with ten copies of it."""
    rng = np.random.default_rng(0)
    y, x = rng.normal(size=10), rng.normal(size=10)
    rows = np.r_[np.arange(10), np.repeat([0, 1], 9)]
    (one,) = slide_associations(y, {"x": x.tolist()}, names(10), cases=names(10), draws=100)
    cases = [f"s{i}" for i in rows]
    assert correlation_with(y[rows], x[rows].tolist(), cases=cases) == correlation_with(
        y, x.tolist(), cases=None
    )
    (many,) = slide_associations(y[rows], {"x": x[rows].tolist()}, names(28), cases=cases, draws=100)
    assert (many.n, many.cases) == (28, 10)
    assert np.sign(many.effect) == np.sign(one.effect)
    within = [{"blue ink": float(value)} for value in y]
    (few,) = patch_associations(within, names(10), cases=None)
    (all_,) = patch_associations([within[i] for i in rows], names(28), cases=cases)
    assert all_.effect == pytest.approx(few.effect)


def test_columns_are_asked_of_enough_patients() -> None:
    y, few = np.arange(40.0), [f"p{i // 8}" for i in range(40)]
    columns = {"site": ["a", "b"] * 20, "ward": few}
    assert slide_associations(y, columns, names(40), cases=few) == []
    many = [f"p{i // 4}" for i in range(40)]
    assert [a.cause for a in slide_associations(y, {**columns, "ward": many}, names(40), cases=many)] == [
        "site"
    ]


def test_survival_counts_patients() -> None:
    """Null cohorts as above; the curves are those of the patients' means."""
    pytest.importorskip("lifelines", reason="the extra 'insight' is not installed")
    low = np.zeros(2)
    for seed in range(40):
        rng = np.random.default_rng(seed)
        cases, biomarker = patients(rng)
        times, events = rng.exponential(size=20)[cases], (rng.random(20) < 0.7)[cases]
        who = [f"p{case}" for case in cases]
        found = survival_of(biomarker, times, events, cases=who)
        low += np.array([found.cox_p, found.log_rank_p]) < 0.05
    assert (low <= 5).all()
    means = biomarker.reshape(20, 5).mean(axis=1)
    alone = survival_of(means, times[::5], events[::5], cases=None)
    assert (found.n, found.events, found.cox_p) == (20, alone.events, pytest.approx(alone.cox_p))
    curves = survival_curves(biomarker, times, events, cases=who)
    assert [(c.n, c.slides) for c in curves] == [(10, 50), (10, 50)]
    with pytest.raises(InputError, match="one event"):
        survival_of(biomarker, times, np.arange(100) % 2, cases=who)


def test_strategies_split_where_reasons_differ_and_only_there() -> None:
    rng = np.random.default_rng(0)
    profiles = np.vstack([np.tile([5, 0, 0], (9, 1)), np.tile([0, 4, 0], (9, 1)), np.tile([0, 0, 3], (9, 1))])
    found = find_strategies(profiles + rng.normal(size=profiles.shape) * 0.2)
    assert found.count == 3
    assert len(set(found.labels[:9])) == len(set(found.labels[9:18])) == 1
    assert found.accuracy(np.r_[np.ones(9), np.zeros(9), np.full(9, np.nan)])[found.labels[0]] == 1.0
    assert {int(found.labels[i]) for i in found.representatives} == {0, 1, 2}
    assert sorted(row[0] for row in found.leaders) == [0, 1, 2]
    odd = np.vstack([profiles[:18], [[0.0, 0.0, 9.0]]])  # one odd slide is no strategy
    assert find_strategies(odd + rng.normal(size=odd.shape) * 0.2).count == 2
    assert find_strategies(np.ones((10, 3))).count == 1
    assert find_strategies(np.ones((1, 3))).count == 1


def gaussian_profiles(seed: int, n: int, varying: int) -> np.ndarray:
    """Profiles of one Gaussian cloud around zero that varies in some of its six concepts."""
    rng = np.random.default_rng(seed)
    spread = np.where(np.arange(6) < varying, 1.0, 0.05)
    return rng.normal(size=(n, 6)) * spread


@pytest.mark.parametrize("varying", [2, 3])
def test_one_cloud_of_cases_is_one_strategy(varying: int) -> None:
    """Unit length spreads such a cloud over a circle, of which any split has a fair silhouette."""
    found = [find_strategies(gaussian_profiles(seed, 24, varying), seed=seed) for seed in range(3)]
    assert [s.count for s in found] == [1] * 3
    assert max(s.silhouette for s in found) > 0.25  # convincing, had it not been tested


def test_alike_slides_of_a_patient_are_no_strategy() -> None:
    rng = np.random.default_rng(1)
    profiles = np.repeat(gaussian_profiles(1, 16, 2), 4, axis=0) + 0.01 * rng.normal(size=(64, 6))
    cases = [f"p{i}" for i in np.repeat(np.arange(16), 4)]
    assert find_strategies(profiles, cases=cases).count == 1
    few = find_strategies(profiles[:28], cases=cases[:28])  # seven cases
    assert (few.count, few.p) == (1, 1.0)


def test_the_first_lines_name_only_strategies_that_pass() -> None:
    """The lines are those of a report without strategies, unless several were found."""

    def first_lines(strategies: Strategies | None) -> str:
        findings = Findings("run", {}, (), [f"s{i}" for i in range(16)], strategies=strategies, cases=16)
        return re.search(r'class="short".*?</div>', report_html(findings), re.DOTALL)[0]

    one = find_strategies(gaussian_profiles(0, 16, 2))
    two = replace(one, labels=np.arange(16) % 2, representatives=np.array([0, 1]), leaders=((0,), (1,)))
    assert (one.count, two.count) == (1, 2)
    assert first_lines(one) == first_lines(None)
    assert first_lines(two) != first_lines(None)


def test_two_clouds_are_found_by_case() -> None:
    rng = np.random.default_rng(2)
    profiles = np.repeat([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]], 16, axis=0) + 0.5 * rng.normal(size=(32, 3))
    cases = [i // 2 for i in range(32)]
    found = find_strategies(profiles, cases=cases)
    assert (found.count, found.tested) == (2, 2)
    assert found.p <= 0.01
    assert np.array_equal(found.labels[::2], found.labels[1::2])
    assert set(found.labels[:16]) != set(found.labels[16:])
    assert np.array_equal(found.embedding[::2], found.embedding[1::2])


def test_the_mask_follows_its_definition() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(5, 400))
    found = find_consensus(scores)
    slow = []
    for i in range(400):
        column = scores[:, i]
        opposed = np.sign(column.mean()) * np.mean(np.sign(column)) <= 0
        noisy = column.std() > np.quantile(scores.std(axis=0), 0.995)
        slow.append(not opposed and not noisy)
    assert found.mask.tolist() == slow
    assert (found.scores[~found.mask] == 0).all()
    assert found.shares["agreed_share"] == pytest.approx((scores > 0).all(axis=0).mean())
    silent = find_consensus(np.vstack([scores, np.zeros(400)]))  # a model that learnt nothing has no say
    assert silent.shares["agreed_share"] == found.shares["agreed_share"]
    assert find_consensus([[1.0, -1.0], [6.0, 0.0]]).summary["largest_model_share"] == 0.75
    with pytest.raises(InputError, match="two models or more"):
        find_consensus(scores[:1])


def test_biomarkers_of_a_map() -> None:
    grid = np.array([[x * 256, y * 256] for y in range(4) for x in range(5)])
    scores = np.full(20, -1.0)
    scores[[0, 1, 5, 18, 19]] = 2.0  # an L of three, and a pair
    found = map_biomarkers(scores, coords=grid, patch_size=256, mpp=0.5)
    assert found["supporting_share"] == 0.25
    assert (found["hot_regions"], found["largest_region"]) == (2, 3)
    assert found["border"] == 8 + 6
    assert found["density_per_mm2"] == pytest.approx(5 / (20 * (0.128**2)))
    inside = map_biomarkers(scores, region=np.arange(20) < 2)
    assert (inside["patches"], inside["supporting_share"]) == (2, 1.0)
    assert np.isnan(inside["hot_regions"])
    with pytest.raises(InputError, match="mark each of the 20"):
        map_biomarkers(scores, region=[True])


def test_regions_borders_and_mixing_are_those_of_a_walk_over_the_patches() -> None:
    rng = np.random.default_rng(0)
    grid = np.array([[x, y] for y in range(12) for x in range(15)])[rng.permutation(180)[:140]]
    scores = rng.choice([-1.0, 0.0, 1.0], 140, p=[0.3, 0.1, 0.6])
    held = {(int(x), int(y)): s for (x, y), s in zip(grid, scores, strict=True)}
    beside = {p: [(p[0] + i, p[1] + j) for i, j in ((1, 0), (-1, 0), (0, 1), (0, -1))] for p in held}
    left, sizes = {p for p, s in held.items() if s > 0}, []
    border = sum(q not in left for p in left for q in beside[p])
    while left:
        stack, size = [left.pop()], 0
        while stack:
            size += 1
            for q in set(beside[stack.pop()]) & left:
                left.remove(q)
                stack.append(q)
        sizes.append(size)
    sides = [(held[p], held[q]) for p in held for q in beside[p] if q in held and held[p] * held[q] != 0]
    found = map_biomarkers(scores, coords=grid * 10 - 40, patch_size=10)
    assert (found["hot_regions"], found["largest_region"]) == (len(sizes), max(sizes))
    assert found["border"] == border
    assert found["mixing"] == pytest.approx(np.mean([a != b for a, b in sides]))


def test_strong_patches_are_those_above_the_cohorts_mean_size() -> None:
    cohort = [np.array([4.0, -1.0, 1.0]), np.array([0.5, -0.5, -3.0])]
    scale = STRONG * 10 / 6
    assert [strong_share(scores, scale) for scores in cohort] == [pytest.approx(1 / 3), 0.0]
    assert strong_share(cohort[0], scale, region=[True, False, False]) == 1.0
    assert np.isnan(strong_share(cohort[0], scale, region=[False] * 3))


def test_shares_of_support_follow_the_true_share() -> None:
    rng = np.random.default_rng(0)
    truth = rng.random(60)
    shares = []
    for share in truth:
        evidence = np.where(rng.random(200) < share, 1.0, -1.0)
        shares.append(map_biomarkers(evidence + rng.normal(size=200) * 0.4)["supporting_share"])
    assert correlation_with(shares, truth, cases=None).estimate > 0.9


def test_a_known_hazard_ratio_is_recovered() -> None:
    pytest.importorskip("lifelines", reason="the extra 'insight' is not installed")
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    times = rng.exponential(1 / np.exp(np.log(2.0) * x))
    censored = rng.exponential(3.0, size=600)
    found = survival_of(x, np.minimum(times, censored), times <= censored, cases=None)
    expected = 2.0 ** x.std()
    assert found.hazard_ratio.low < expected < found.hazard_ratio.high
    assert found.cox_p == found.log_rank_p == 1 / 5001  # the lowest that 5,000 permutations give
    with pytest.raises(InputError, match="ten slides"):
        survival_of(x[:5], times[:5], np.ones(5), cases=None)


@pytest.mark.parametrize(
    ("colour", "ink"),
    [
        ((30, 60, 190), "blue ink"),
        ((30, 140, 60), "green ink"),
        ((15, 15, 15), "black ink"),
        ((200, 20, 25), "red ink"),
    ],
)
def test_ink_is_told_from_stained_tissue(colour, ink: str) -> None:
    rng = np.random.default_rng(0)
    tissue = np.clip(np.array([190, 110, 160]) + rng.integers(-40, 40, (64, 64, 1)), 0, 255).astype(np.uint8)
    marked = tissue.copy()
    marked[:32] = colour
    plain = appearance(tissue)
    assert max(plain[name] for name in ("blue ink", "green ink", "black ink", "red ink")) < 0.02
    assert appearance(marked)[ink] > 0.4


def test_a_tint_colours_the_light_and_leaves_the_stain() -> None:
    rng = np.random.default_rng(0)
    tissue = np.clip(np.array([190, 110, 160]) + rng.integers(-40, 40, (6, 40, 40, 1)), 0, 255)
    tissue[:, :5] = 240
    plain = light(tissue.astype(np.uint8))
    tinted = light((tissue * np.array([1.0, 0.9, 0.95])).astype(np.uint8))
    assert tinted.colour[0] - plain.colour[0] == pytest.approx(-np.log(0.9), abs=0.01)
    assert tinted.colour[1] - plain.colour[1] == pytest.approx(np.log(0.95 / 0.9), abs=0.01)
    np.testing.assert_allclose(tinted.stain, plain.stain, atol=0.01)
    assert np.isnan(light(np.full((1, 8, 8, 3), 90, dtype=np.uint8)).colour).all()


def test_blur_lowers_focus() -> None:
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(0)
    sharp = rng.integers(0, 255, (64, 64, 1)).repeat(3, axis=2).astype(np.uint8)
    blurred = gaussian_filter(sharp.astype(float), (2, 2, 0)).astype(np.uint8)
    assert appearance(blurred)["focus"] < 0.5 * appearance(sharp)["focus"]


def test_the_report_opens_with_what_could_not_be_tested_and_with_a_failed_sanity_test() -> None:
    asked = [
        Association("tint", "slide", "multiple correlation", 0.1, 0.5, 12, 0.5),
        Association("black ink", "slide", "rank correlation", 0.5, 0.1, 12, 0.1, confounded=True),
    ]
    sanity = {"weights drawn anew": "failed: the scores depend little on what the model learned; 0.66"}
    page = report_html(Findings("run", {}, (), names(12), shortcuts=asked, cases=12, sanity=sanity))
    lead, caution = page.split("Caution")[:2]
    assert "No shortcut was found in 1 test; black ink goes with the label and could not be tested." in lead
    assert "failed: the scores depend little" in caution.split("</ul>")[0]
    assert "failed" not in lead
