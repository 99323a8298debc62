"""Does `xmil insight` find what is not there? `python -m benchmarks.insight_null`.

Null cohorts of 100 slides, of 100, 50 and 20 patients: outputs and biomarkers of one patient's slides go
together (intra-class correlation 0.7), and nothing else does. Printed: of how many cohorts p < 0.05, by
question; in how many a shortcut is called; and, with a planted cause, in how many it is found.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from xmil.core.text import text_table
from xmil.insights import Association, rank_associations, slide_associations, survival_of

SLIDES, ALIKE, SHIFT = 100, 0.7, 1.5
CAUSES = ("site", "age", "scanner", "tint")
Floats = npt.NDArray[np.float64]


def shared(rng: np.random.Generator, cases: npt.NDArray[np.int64], alike: float = ALIKE) -> Floats:
    """A number per slide that slides of one patient share in part."""
    own = rng.normal(size=int(cases.max()) + 1)[cases]
    return np.asarray(np.sqrt(alike) * own + np.sqrt(1 - alike) * rng.normal(size=len(cases)))


def cohort(seed: int, patients: int, *, by_case: bool, planted: str = "") -> list[Association]:
    """What is said of a cohort; a planted cause moves the output of its slides."""
    rng = np.random.default_rng(seed)
    cases = np.repeat(np.arange(patients), SLIDES // patients)
    site, scanner = rng.integers(0, 2, patients)[cases], rng.integers(0, 2, SLIDES)
    output = shared(rng, cases) + SHIFT * {"": 0, "site": site, "scanner": scanner}[planted]
    tint = np.stack([shared(rng, cases) for _ in range(3)], axis=1)
    columns = {
        "site": site.astype(str).tolist(),
        "age": rng.normal(size=patients)[cases].tolist(),
        "scanner": scanner.astype(str).tolist(),
        "tint": [tuple(row) for row in tint.tolist()],
    }
    labels = rng.integers(0, 2, patients)[cases].tolist()
    units = [f"p{case}" for case in cases] if by_case else None
    names = [f"s{i}" for i in range(SLIDES)]
    return rank_associations(
        slide_associations(output, columns, names, cases=units, labels=labels, draws=1000, seed=seed)
    )


def cox_p(seed: int, patients: int, *, by_case: bool) -> float:
    """The p-value of a biomarker that says nothing of survival."""
    rng = np.random.default_rng(seed)
    cases = np.repeat(np.arange(patients), SLIDES // patients)
    times, events = rng.exponential(size=patients)[cases], (rng.random(patients) < 0.7)[cases]
    units = [f"p{case}" for case in cases] if by_case else None
    return survival_of(shared(rng, cases), times, events, cases=units).cox_p


def measure(patients: int, cohorts: int, *, by_case: bool) -> list[str]:
    """One row: false positives by question, shortcuts called, and planted causes found."""
    null = [cohort(seed, patients, by_case=by_case) for seed in range(cohorts)]
    low = [sum(a.p < 0.05 for every in null for a in every if a.cause == cause) for cause in CAUSES]
    cox = sum(cox_p(seed, patients, by_case=by_case) < 0.05 for seed in range(cohorts))
    called = sum(any(a.is_shortcut for a in every) for every in null)
    found = []
    for planted in ("site", "scanner"):
        told = [cohort(seed, patients, by_case=by_case, planted=planted)[0] for seed in range(cohorts)]
        found.append(sum(a.cause == planted and a.is_shortcut for a in told))
    unit = "cases" if by_case else "slides"
    return [f"{patients} x {SLIDES // patients}", unit, *map(str, [*low, cox, called, *found])]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohorts", type=int, default=200)
    args = parser.parse_args()
    head = ["patients x slides", "unit", *CAUSES, "Cox", "called", "planted site", "planted scanner"]
    rows = [
        measure(patients, args.cohorts, by_case=by_case)
        for patients in (100, 50, 20)
        for by_case in (True, False)
    ]
    print(text_table([head, *rows]))


if __name__ == "__main__":
    main()
