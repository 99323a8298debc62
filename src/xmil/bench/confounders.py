"""Planted confounders: the label was meant to be "has an 8", but something else gives it away.

A model takes the shortcut, and an explanation must show that rather than the 8.
"""

from __future__ import annotations

import numpy as np

from xmil.toy.digit_tasks import (
    AGREEMENT,
    CAUSE,
    DIGITS,
    TASKS,
    Codes,
    DigitTask,
    Signs,
    contains,
    draw_confounded,
    draw_digits,
    for_and_against,
)

SITES = ("site_a_weak", "site_a_strong", "site_b_weak", "site_b_strong")
STRONG_SHARE = 0.5  # of the instances of a bag, those that carry their site's effect strongly
_SIGNS = np.array([0, 0, -1, 0, 1], dtype=np.int8)  # of a plain instance and of each variant, for class 1


def _planted_label(codes: Codes) -> Codes:
    return np.asarray((codes >= DIGITS).any(axis=-1), dtype=np.int64)


def _planted_evidence(codes: Codes) -> Signs:
    return for_and_against((codes >= DIGITS).astype(np.int8))


def draw_sites(rng: np.random.Generator, n_bags: int, n: int) -> Codes:
    """Bags from two sites; the second sends those recorded as "has an 8", wrong in one of five.

    A site's effect lies on every instance of its bags, on some strongly, on the others a quarter as strongly.
    """
    codes = draw_digits(rng, n_bags, n)
    agrees = rng.random(n_bags) < AGREEMENT
    second = contains(codes, CAUSE) == agrees
    strong = rng.random((n_bags, n)) < STRONG_SHARE
    strong[np.arange(n_bags), rng.integers(n, size=n_bags)] = True
    return np.asarray(codes + DIGITS * (1 + strong + 2 * second[:, np.newaxis]), dtype=np.int64)


def _site_label(codes: Codes) -> Codes:
    return np.asarray((codes // DIGITS > 2).any(axis=-1), dtype=np.int64)


def _site_evidence(codes: Codes) -> Signs:
    return for_and_against(_SIGNS[codes // DIGITS])


def _planted(variant: str, title: str, why: str) -> DigitTask:
    return DigitTask(
        f"planted_{variant}",
        title,
        2,
        _planted_label,
        _planted_evidence,
        why,
        draw=draw_confounded,
        variants=(variant,),
    )


CONFOUNDERS = (
    TASKS["confounder"],
    _planted("tint", "Tint", "a pale tint on a fifth of the instances gives the label away"),
    _planted("blur", "Blur", "a fifth of the instances being out of focus gives the label away"),
    DigitTask(
        "planted_site",
        "Site effect",
        2,
        _site_label,
        _site_evidence,
        "two sites, each with its own light on all instances, stronger on half of them, give the label away",
        draw=draw_sites,
        variants=SITES,
    ),
)
