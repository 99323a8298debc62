"""Tasks on bags of digits: labels and the true evidence of each instance, as pure functions of the digits.

Hense, Jamshidi Idaji et al., "xMIL", NeurIPS 2024, Section 4.1; 4-Bags is by Early et al., ICLR 2022.

A bag is an array of codes (..., n). A code below ten is a digit; plus ten, it is the same digit with the
first of the task's variants, such as a mark; plus twenty, with the second. To add a task, register a
`DigitTask`; the tests find it by its name.

In a confounder, the label is meant to be "has an 8", but a planted variant predicts it better: a model uses
the shortcut, and an explanation must show that rather than the 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.registry import Registry

Codes = npt.NDArray[np.int64]
Signs = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]

DIGITS = 10
BAG_SIZE = 30
POSITIVE, NEGATIVE = (4, 6, 8), (5, 7, 9)
PAIRS = ((0, 1), (1, 2), (2, 3), (3, 4))


def draw_kinds(rng: np.random.Generator, n_bags: int, n: int, kinds: int) -> Codes:
    """Draw bags (n_bags, n): each kind enters a bag with probability one half, then n draws from those."""
    chosen = rng.random((n_bags, kinds)) < 0.5
    while (empty := ~chosen.any(axis=1)).any():
        chosen[empty] = rng.random((int(empty.sum()), kinds)) < 0.5
    picks = (rng.random((n_bags, n)) * chosen.sum(axis=1, keepdims=True)).astype(np.int64)
    order = np.argsort(~chosen, axis=1, kind="stable")  # chosen kinds first
    return np.take_along_axis(order, picks, axis=1)


def draw_rows(rng: np.random.Generator, codes: Codes, candidates: Sequence[Codes]) -> Codes:
    """Draw an instance of each code (..., n) from the rows of its kind."""
    picks, rows = rng.random(codes.shape), np.zeros_like(codes)
    for kind, candidate_rows in enumerate(candidates):
        mask = codes == kind
        rows[mask] = candidate_rows[(picks[mask] * len(candidate_rows)).astype(np.int64)]
    return rows


def draw_digits(rng: np.random.Generator, n_bags: int, n: int = BAG_SIZE) -> Codes:
    """Draw bags (n_bags, n) of digits."""
    return draw_kinds(rng, n_bags, n, DIGITS)


@dataclass(frozen=True)
class DigitTask:
    """A question about bags of digits.

    `label(codes)` maps (..., n) to classes (...); `evidence(codes)` to signs (..., n_classes, n): +1 if the
    instance supports the class, -1 if it refutes it, 0 if it does not matter. `why` says what the task
    probes. `draw(rng, n_bags, n)` samples bags of codes; `variants` are what it plants on instances.
    """

    name: str
    title: str
    n_classes: int
    label: Callable[[Codes], Codes]
    evidence: Callable[[Codes], Signs]
    why: str
    draw: Callable[[np.random.Generator, int, int], Codes] = draw_digits
    variants: tuple[str, ...] = ()


TASKS: Registry[DigitTask] = Registry("task", group="xmil.tasks")


def contains(codes: Codes, digit: int) -> Flags:
    """Whether each bag contains the digit, (...)."""
    return np.asarray((codes == digit).any(axis=-1))


def for_and_against(support: Signs) -> Signs:
    """Evidence (..., 2, n) of a two-class task from the evidence (..., n) for class 1."""
    return np.stack([-support, support], axis=-2)


def _four_bags_evidence(codes: Codes) -> Signs:
    eights, nines = (codes == 8).astype(np.int8), (codes == 9).astype(np.int8)
    return np.stack([-eights - nines, eights - nines, nines - eights, eights + nines], axis=-2)


def _pos_neg_label(codes: Codes) -> Codes:
    unique = [sum(contains(codes, d).astype(np.int64) for d in digits) for digits in (POSITIVE, NEGATIVE)]
    return np.asarray(unique[0] > unique[1], dtype=np.int64)


def _pos_neg_count_label(codes: Codes) -> Codes:
    counts = [np.isin(codes, digits).sum(axis=-1) for digits in (POSITIVE, NEGATIVE)]
    return np.asarray(counts[0] > counts[1], dtype=np.int64)


def _pos_neg_evidence(codes: Codes) -> Signs:
    return for_and_against(
        np.isin(codes, POSITIVE).astype(np.int8) - np.isin(codes, NEGATIVE).astype(np.int8)
    )


def _adjacent_label(codes: Codes) -> Codes:
    pairs = [contains(codes, a) & contains(codes, b) for a, b in PAIRS]
    return np.asarray(np.logical_or.reduce(pairs), dtype=np.int64)


def _adjacent_evidence(codes: Codes) -> Signs:
    member = np.zeros(codes.shape, dtype=bool)
    for a, b in PAIRS:
        present = (contains(codes, a) & contains(codes, b))[..., np.newaxis]
        member |= np.isin(codes, (a, b)) & present
    return for_and_against(member.astype(np.int8))


FLIPPING = (8, 9)
CAUSE = 8
AGREEMENT = 0.8  # how often the recorded label agrees with the digits
MARKED_SHARE = 0.2  # of the instances of a marked bag
SITES = ("site_a_weak", "site_a_strong", "site_b_weak", "site_b_strong")
STRONG_SHARE = 0.5  # of the instances of a bag, with the strong form of their site's effect
# evidence of a plain instance and of each variant for class 1
_SITE_SIGNS = np.array([0, 0, -1, 0, 1], dtype=np.int8)


def _flip_evidence(codes: Codes) -> Signs:
    support = np.zeros(codes.shape, dtype=np.int8)
    for digit, other in (FLIPPING, FLIPPING[::-1]):
        sign = np.where(contains(codes, other), 1, -1).astype(np.int8)[..., np.newaxis]
        support += (codes == digit) * sign
    return for_and_against(support)


def _draw_leak(rng: np.random.Generator, n_bags: int, n: int, share: float) -> tuple[Codes, Flags, Flags]:
    """Draw bags, the recorded label (n_bags, 1), which is "has an 8" with one error in five, and instances.

    At least one instance of every bag is drawn.
    """
    codes = draw_digits(rng, n_bags, n)
    agrees = rng.random(n_bags) < AGREEMENT
    chosen = rng.random((n_bags, n)) < share
    chosen[np.arange(n_bags), rng.integers(n, size=n_bags)] = True
    return codes, (contains(codes, CAUSE) == agrees)[:, np.newaxis], chosen


def draw_confounded(rng: np.random.Generator, n_bags: int, n: int) -> Codes:
    """Draw bags whose recorded label, "has an 8" with some errors, is given away by planted variants."""
    codes, recorded, marks = _draw_leak(rng, n_bags, n, MARKED_SHARE)
    return codes + np.where(marks & recorded, DIGITS, 0)


def draw_sites(rng: np.random.Generator, n_bags: int, n: int) -> Codes:
    """Draw bags from two sites; the second has those recorded as "has an 8", with one error in five.

    A site's effect is on every instance of its bags: strong on some, a quarter as strong on the others.
    """
    codes, second, strong = _draw_leak(rng, n_bags, n, STRONG_SHARE)
    return np.asarray(codes + DIGITS * (1 + strong + 2 * second), dtype=np.int64)


def _planted(name: str, title: str, why: str, variant: str) -> DigitTask:
    return DigitTask(
        name,
        title,
        2,
        lambda codes: np.asarray((codes >= DIGITS).any(axis=-1), dtype=np.int64),
        lambda codes: for_and_against((codes >= DIGITS).astype(np.int8)),
        why,
        draw=draw_confounded,
        variants=(variant,),
    )


for _task in (
    DigitTask(
        "four_bags",
        "4-Bags",
        4,
        lambda codes: contains(codes, 8) + 2 * contains(codes, 9),
        _four_bags_evidence,
        "evidence for and against, four classes",
    ),
    DigitTask(
        "pos_neg",
        "Pos-Neg",
        2,
        _pos_neg_label,
        _pos_neg_evidence,
        "weighing unique numbers (the paper's words)",
    ),
    DigitTask(
        "pos_neg_count",
        "Pos-Neg (counts)",
        2,
        _pos_neg_count_label,
        _pos_neg_evidence,
        "weighing instances (the released code)",
    ),
    DigitTask(
        "adjacent_pairs",
        "Adjacent Pairs",
        2,
        _adjacent_label,
        _adjacent_evidence,
        "an instance counts only beside another",
    ),
    DigitTask(
        "standard",
        "Standard",
        2,
        lambda codes: contains(codes, 8).astype(np.int64),
        lambda codes: for_and_against((codes == 8).astype(np.int8)),
        "one positive digit, the usual MIL",
    ),
    DigitTask(
        "context_flip",
        "Context Flip",
        2,
        lambda codes: (contains(codes, FLIPPING[0]) == contains(codes, FLIPPING[1])).astype(np.int64),
        _flip_evidence,
        "class 1 if 8 and 9 are both in the bag or both missing: an 8 supports it beside a 9 and refutes it "
        "alone, so no method that scores an instance by itself can be right",
    ),
    _planted(
        "confounder",
        "Confounder",
        "the label was meant to be 'has an 8' and agrees with it in 80 % of the bags, but a mark gives it "
        "away in all: a model takes the mark, and an explanation must show that rather than the 8",
        "mark",
    ),
):
    TASKS.add(_task.name, _task)

CONFOUNDERS = (
    TASKS["confounder"],
    _planted("planted_tint", "Tint", "a pale tint on a fifth of the instances gives the label away", "tint"),
    _planted(
        "planted_blur", "Blur", "a fifth of the instances being out of focus gives the label away", "blur"
    ),
    DigitTask(
        "planted_site",
        "Site effect",
        2,
        lambda codes: np.asarray((codes // DIGITS > 2).any(axis=-1), dtype=np.int64),
        lambda codes: for_and_against(_SITE_SIGNS[codes // DIGITS]),
        "two sites, each with its own light on all instances, stronger on half of them, give the label away",
        draw=draw_sites,
        variants=SITES,
    ),
)
