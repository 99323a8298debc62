"""Splits by case: stratified folds or fractions, seeded, no case on two sides.

Written by hand rather than with scikit-learn's splitters: cases with a single member of a class are dealt out
too, and a seed means the same split in every version.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np

from xmil.core.errors import InputError, bad_parameter
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
    """The cohort with a column of fold numbers, by case; slides without a label stay empty.

    `sites` names a column: all cases of a site then lie in one fold.

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
    else:  # one deal over all strata, so that folds differ by one case at most
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
    """The cohort with a column of split names, by case, in the given shares of each stratum.

    `sites` names a column: all cases of a site then lie on one side, so that shares are met as sites allow.

    >>> cohort = Cohort({"slide_id": tuple("abcd"), "case_id": tuple("abcd")})
    >>> split_fractions(cohort, {"train": 0.5, "test": 0.5}).column("split")
    ('train', 'test', 'train', 'test')
    """
    total = sum(fractions.values())
    good = len(fractions) > 1 and all(np.isfinite(share) and share > 0 for share in fractions.values())
    if not good or not np.isclose(total, 1):
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


def _by_site(
    cohort: Cohort, strata: Mapping[str, list[str]], shares: Mapping[str, float], *, sites: str, seed: int
) -> dict[str, str]:
    """Sides of cases, each site whole: the largest first, to where its labels are missing most."""
    home: dict[str, str] = {}
    for case, site in zip(cohort.cases, cohort.column(sites), strict=True):
        if site is None:
            raise InputError(f"Case {case!r} has no {sites}; fill it in, or split without sites=.")
        if home.setdefault(case, site) != site:
            raise InputError(f"Case {case!r} lies in two sites, {home[case]!r} and {site!r}.")
    counts: dict[str, Counter[str]] = {}  # of the labels of each site
    for label, members in strata.items():
        for case in members:
            counts.setdefault(home[case], Counter())[label] += 1
    if len(counts) < len(shares):
        raise InputError(f"Column {sites!r} has {len(counts)} sites, too few for {len(shares)} sides.")
    filled: dict[str, Counter[str]] = {side: Counter() for side in shares}
    rng = np.random.default_rng(seed)
    place: dict[str, str] = {}
    for site in sorted(map(str, rng.permutation(sorted(counts))), key=lambda site: -counts[site].total()):
        cost = {
            side: sum(n * (2 * filled[side][k] + n) / (share * len(strata[k])) for k, n in labels)
            for labels in (sorted(counts[site].items()),)
            for side, share in shares.items()
        }
        place[site] = min(cost, key=lambda side: cost[side])
        filled[place[site]].update(counts[site])
    empty = [side for side in shares if side not in place.values()]
    if empty:
        raise InputError(f"No site is left for {empty[0]!r}; use fewer sides, or shares that sites can meet.")
    return {case: place[home[case]] for members in strata.values() for case in members}


def _allot(n: int, shares: np.ndarray, owed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole counts that sum to n; what rounding takes in one stratum is owed to the next."""
    ideal = shares * n + owed
    counts = np.maximum(np.floor(ideal + 1e-9), 0).astype(int)
    while counts.sum() < n:
        counts[np.argmax(ideal - counts)] += 1
    while counts.sum() > n:
        counts[np.argmin(np.where(counts > 0, ideal - counts, np.inf))] -= 1
    return counts, ideal - counts


def _strata(cohort: Cohort, stratify: str | None) -> dict[str, list[str]]:
    """Cases by label, both in sorted order; a case with several labels goes by the commonest."""
    labels: dict[str, list[str]] = {}
    cells = [""] * len(cohort) if stratify is None else cohort.column(stratify)
    for case, cell in zip(cohort.cases, cells, strict=True):
        if cell is not None:
            labels.setdefault(case, []).append(cell)
    strata: dict[str, list[str]] = {}
    for case in sorted(labels):
        label = labels[case][0]
        if len(labels[case]) > 1:
            count = Counter(labels[case])
            label = max(sorted(count), key=count.__getitem__)
        strata.setdefault(label, []).append(case)
    left_out = len(set(cohort.cases)) - len(labels)
    if left_out:
        logger.warning("%d cases have no %s and are in no split.", left_out, stratify)
    if not strata:
        raise InputError("There is no case to split; the cohort is empty or has no labels.")
    return dict(sorted(strata.items()))
