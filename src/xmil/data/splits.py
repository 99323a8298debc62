"""Splits by case: stratified folds or fractions, seeded, no case in two splits.

Unlike scikit-learn's splitters, they accept classes with a single case, and a seed gives the same split in
every version.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np

from xmil.core.errors import InputError, bad_parameter
from xmil.core.text import counted, shorten
from xmil.data.cohort import SPLIT, Cohort

logger = logging.getLogger(__name__)
FOLD = "fold"


def split_folds(
    cohort: Cohort,
    folds: int,
    *,
    stratify: str | None = None,
    seed: int = 0,
    column: str = FOLD,
    sites: str | None = None,
) -> Cohort:
    """Add a column of fold numbers, by case; slides without a label stay empty.

    `sites` names a column: all cases of a site then go to one fold.

    >>> cohort = Cohort({"slide_id": tuple("abcdef"), "case_id": tuple("112233"), "y": tuple("001100")})
    >>> split_folds(cohort, 3, stratify="y").column("fold")
    ('0', '0', '2', '2', '1', '1')
    """
    strata = _strata(cohort, stratify)
    cases = sum(map(len, strata.values()))
    if not isinstance(folds, int) or not 2 <= folds <= cases:
        raise bad_parameter(
            "folds", "split_folds", f"an int in the range [2, {cases}], the number of cases", folds
        )
    if sites is not None:
        shares = {str(k): 1 / folds for k in range(folds)}
        side = _by_site(cohort, strata, shares, sites=sites, seed=seed)
    else:  # deal all strata in one go, so that folds differ by at most one case
        rng = np.random.default_rng(seed)
        dealt = [case for members in strata.values() for case in rng.permutation(members)]
        side = {str(case): str(i % folds) for i, case in enumerate(dealt)}
    return cohort.with_column(column, [side.get(case) for case in cohort.cases])


def split_fractions(
    cohort: Cohort,
    fractions: Mapping[str, float],
    *,
    stratify: str | None = None,
    seed: int = 0,
    column: str = SPLIT,
    sites: str | None = None,
) -> Cohort:
    """Add a column of split names, by case, with the shares in `fractions` of each stratum.

    `sites` names a column: all cases of a site then go to one split, so that shares are approximate.

    >>> cohort = Cohort({"slide_id": tuple("abcd"), "case_id": tuple("abcd")})
    >>> split_fractions(cohort, {"train": 0.5, "test": 0.5}).column("split")
    ('train', 'test', 'train', 'test')
    """
    total = sum(fractions.values())
    positive = len(fractions) > 1 and all(np.isfinite(share) and share > 0 for share in fractions.values())
    if not positive or not np.isclose(total, 1):
        raise bad_parameter(
            "fractions", "split_fractions", "two or more positive shares that sum to 1", fractions
        )
    shares = {str(name): float(share) for name, share in fractions.items()}
    strata = _strata(cohort, stratify)
    if sites is not None:
        side = _by_site(cohort, strata, shares, sites=sites, seed=seed)
    else:
        rng, owed, side = np.random.default_rng(seed), np.zeros(len(shares)), {}
        for members in strata.values():
            counts, owed = _allot(len(members), np.array(list(shares.values())), owed)
            names = np.repeat(list(shares), counts)
            side.update(zip(map(str, rng.permutation(members)), map(str, names), strict=True))
    if missing := set(shares) - set(side.values()):
        raise InputError(
            f"Too few cases ({len(side)}) to fill {', '.join(sorted(missing))}; use fewer splits."
        )
    return cohort.with_column(column, [side.get(case) for case in cohort.cases])


def check_labels(cohort: Cohort, column: str) -> None:
    """Refuse cases whose slides have different labels: a split by case cannot stratify them."""
    labels: dict[str, set[str]] = {}
    for case, cell in zip(cohort.cases, cohort.column(column), strict=True):
        labels.setdefault(case, set()).update(() if cell is None else (cell,))
    mixed = [f"{case} ({', '.join(sorted(own))})" for case, own in sorted(labels.items()) if len(own) > 1]
    if mixed:
        raise InputError(
            f"{counted(len(mixed), 'case')} with slides of different {column!r}: {shorten(mixed, 5)}; "
            "correct the table, or leave out `stratify=` if labels belong to slides."
        )


def _by_site(
    cohort: Cohort, strata: Mapping[str, list[str]], shares: Mapping[str, float], *, sites: str, seed: int
) -> dict[str, str]:
    """Split cases by whole sites: the largest first, each to the split that lacks its labels most."""
    home: dict[str, str] = {}
    for case, site in zip(cohort.cases, cohort.column(sites), strict=True):
        if site is None:
            raise InputError(f"Case {case!r} has no {sites}; fill it in, or split without `sites=`.")
        if home.setdefault(case, site) != site:
            raise InputError(f"Case {case!r} has two sites, {home[case]!r} and {site!r}; correct the table.")
    counts: dict[str, Counter[str]] = {}  # of labels, by site
    for label, members in strata.items():
        for case in members:
            counts.setdefault(home[case], Counter())[label] += 1
    if len(counts) < len(shares):
        raise InputError(f"Column {sites!r} has {len(counts)} sites, too few for {len(shares)} splits.")
    filled: dict[str, Counter[str]] = {side: Counter() for side in shares}
    rng = np.random.default_rng(seed)
    side_of: dict[str, str] = {}
    for site in sorted(map(str, rng.permutation(sorted(counts))), key=lambda site: -counts[site].total()):
        cost = {
            side: sum(n * (2 * filled[side][k] + n) / (share * len(strata[k])) for k, n in labels)
            for labels in (sorted(counts[site].items()),)
            for side, share in shares.items()
        }
        side_of[site] = min(cost, key=lambda side: cost[side])
        filled[side_of[site]].update(counts[site])
    empty = [side for side in shares if side not in side_of.values()]
    if empty:
        raise InputError(f"No site is left for {empty[0]!r}; use fewer splits, or other shares.")
    return {case: side_of[home[case]] for members in strata.values() for case in members}


def _allot(n: int, shares: np.ndarray, owed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round shares of n to whole counts; the next stratum makes up for the rounding error."""
    ideal = shares * n + owed
    counts = np.maximum(np.floor(ideal + 1e-9), 0).astype(int)
    while counts.sum() < n:
        counts[np.argmax(ideal - counts)] += 1
    while counts.sum() > n:
        counts[np.argmin(np.where(counts > 0, ideal - counts, np.inf))] -= 1
    return counts, ideal - counts


def _strata(cohort: Cohort, stratify: str | None) -> dict[str, list[str]]:
    """Cases by label, both sorted; a case with several labels has the commonest."""
    labels: dict[str, list[str]] = {}
    cells = [""] * len(cohort) if stratify is None else cohort.column(stratify)
    for case, cell in zip(cohort.cases, cells, strict=True):
        if cell is not None:
            labels.setdefault(case, []).append(cell)
    strata: dict[str, list[str]] = {}
    for case in sorted(labels):
        count = Counter(labels[case])
        label = max(sorted(count), key=count.__getitem__)
        strata.setdefault(label, []).append(case)
    left_out = len(set(cohort.cases)) - len(labels)
    if left_out:
        logger.warning("%d cases have no %s and are in no split.", left_out, stratify)
    if not strata:
        raise InputError("There are no cases to split: the cohort is empty or has no labels.")
    return dict(sorted(strata.items()))
