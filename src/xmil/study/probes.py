"""Two tasks beyond the paper: evidence that changes its sign with context, and a planted confounder."""

from __future__ import annotations

import numpy as np

from xmil.study.tasks import DIGITS, TASKS, Codes, Signs, Task, contains, draw_digits, for_and_against

FLIPPING = (8, 9)
CAUSE = 8
AGREEMENT = 0.8  # how often the recorded label agrees with the digits
MARKED_SHARE = 0.2  # of the instances of a marked bag


def _flip_label(codes: Codes) -> Codes:
    a, b = (contains(codes, digit) for digit in FLIPPING)
    return np.asarray(a == b, dtype=np.int64)


def _flip_evidence(codes: Codes) -> Signs:
    support = np.zeros(codes.shape, dtype=np.int8)
    for digit, other in (FLIPPING, FLIPPING[::-1]):
        sign = np.where(contains(codes, other), 1, -1).astype(np.int8)[..., np.newaxis]
        support += (codes == digit) * sign
    return for_and_against(support)


def _marked(codes: Codes) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    marked: np.ndarray[tuple[int, ...], np.dtype[np.bool_]] = codes >= DIGITS
    return marked


def _confounder_label(codes: Codes) -> Codes:
    return np.asarray(_marked(codes).any(axis=-1), dtype=np.int64)


def _confounder_evidence(codes: Codes) -> Signs:
    return for_and_against(_marked(codes).astype(np.int8))


def draw_confounded(rng: np.random.Generator, n_bags: int, n: int) -> Codes:
    """Bags of digits whose recorded label, "has an 8" with some errors, leaks as marks on instances."""
    codes = draw_digits(rng, n_bags, n)
    agrees = rng.random(n_bags) < AGREEMENT
    recorded = contains(codes, CAUSE) == agrees
    marks = rng.random((n_bags, n)) < MARKED_SHARE
    marks[np.arange(n_bags), rng.integers(n, size=n_bags)] = True
    return codes + np.where(marks & recorded[:, np.newaxis], DIGITS, 0)


TASKS.add(
    "context_flip",
    Task(
        "context_flip",
        "Context Flip",
        2,
        _flip_label,
        _flip_evidence,
        "class 1 if 8 and 9 are both in the bag or both missing: an 8 supports it beside a 9 and refutes it "
        "alone, so no method that scores an instance by itself can be right",
    ),
)
TASKS.add(
    "confounder",
    Task(
        "confounder",
        "Confounder",
        2,
        _confounder_label,
        _confounder_evidence,
        "the label was meant to be 'has an 8' and agrees with it in 80 % of the bags, but a mark gives it "
        "away in all: a model takes the mark, and an explanation must show that rather than the 8",
        draw=draw_confounded,
        marks=True,
    ),
)
