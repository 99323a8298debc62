"""Is anything found where nothing is? `python -m benchmarks.null_cohorts shortcuts` (or another question).

Null cohorts of 100 slides, of 100, 50 and 20 patients: outputs, biomarkers and differences between methods
of one patient's slides go together (intra-class correlation 0.7), and nothing else does. Printed for the case
as the unit, and for slides taken as independent, in percent of the cohorts: p < 0.05, by test; a shortcut or
a better method called; and, with something planted, found. `--first` and `--cohorts` cut a run in slices.
Another question, `rare`: how often the bootstrap's interval of an AUROC holds the true one, by the cases of
a rare class. `strategies`: how often profiles of one cloud are called several strategies, and how often two
clouds are found, for 60 cases with one slide and 40 with four alike slides.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from benchmarks.record import write_results
from xmil.core.text import markdown_table
from xmil.evaluate import Row, hazard_p, median_halves, statistics, summarise
from xmil.insights import Association, find_strategies, rank_associations, slide_associations

SLIDES, ALIKE = 100, 0.7
SHIFT, HAZARD, LOWER, SPREAD = 1.5, 2.0, 0.05, 0.1  # what is planted; the deviation of an AUPC
CAUSES = ("site", "age", "scanner", "tint")
HEADS = {
    "shortcuts": (*CAUSES, "called", "planted site found", "planted scanner found"),
    "survival": ("Cox", "log-rank", "planted hazard found, Cox", "log-rank"),
    "methods": ("t-test", "Wilcoxon", "called better", "planted better method called"),
    "rare": ("AUROC 0.5 covered", "AUROC 0.86 covered"),
    "strategies": ("several ways", "two ways"),
}
COHORTS = {"shortcuts": 200, "survival": 1000, "methods": 2000, "rare": 1000, "strategies": 90}
PROFILES = {  # concepts that vary, cases, slides of each, and how far two clouds lie apart, in deviations
    "one cloud, 2 concepts vary": (2, 60, 1, 0),
    "one cloud, 3 concepts vary": (3, 60, 1, 0),
    "one cloud, 2 concepts vary, four alike slides a case": (2, 40, 4, 0),
    "one skewed cloud, 3 concepts vary": (3, 60, 1, -1),
    "two clouds, 4 deviations apart": (2, 60, 1, 4),
    "two clouds, 6 deviations apart": (2, 60, 1, 6),
    "two clouds, 8 deviations apart": (2, 60, 1, 8),
}
CONCEPTS, SIZE = 20, 3.0  # of a profile; its mean in two clouds
CASES, RARE, SHIFTS = 40, (1, 2, 3, 4, 5, 6, 8, 12, 20), (0.0, 1.5)  # cases in all, with the class; its shift
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def shared(rng: np.random.Generator, cases: Ints, alike: float = ALIKE) -> Floats:
    """A number per slide that slides of one patient share in part."""
    own = rng.normal(size=int(cases.max()) + 1)[cases]
    return np.asarray(np.sqrt(alike) * own + np.sqrt(1 - alike) * rng.normal(size=len(cases)))


def cases_of(patients: int) -> Ints:
    """The patient of each slide."""
    return np.repeat(np.arange(patients), SLIDES // patients)


def units_of(cases: Ints, *, by_case: bool) -> list[str] | None:
    """What counts once: a patient, or each slide."""
    return [f"p{case}" for case in cases] if by_case else None


def shortcuts(seed: int, patients: int, *, by_case: bool, planted: str = "") -> list[Association]:
    """What insight says of a cohort; a planted cause moves the output of its slides."""
    rng, cases = np.random.default_rng(seed), cases_of(patients)
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
    names, units = [f"s{i}" for i in range(SLIDES)], units_of(cases, by_case=by_case)
    return rank_associations(
        slide_associations(output, columns, names, cases=units, labels=labels, draws=1000, seed=seed)
    )


def survival(seed: int, patients: int, *, by_case: bool, hazard: float = 1.0) -> tuple[float, float]:
    """The p of Cox regression and log-rank test, as insight has them, at this hazard per deviation."""
    rng, cases = np.random.default_rng(seed), cases_of(patients)
    biomarker = shared(rng, cases)
    own = np.bincount(cases, weights=biomarker) / np.bincount(cases)
    rate = hazard ** (own / own.std())
    times, events = (rng.exponential(size=patients) / rate)[cases], (rng.random(patients) < 0.7)[cases]
    units = units_of(cases, by_case=by_case) or range(SLIDES)
    _, log_rank_p = median_halves(biomarker, times, events, units=units)
    return hazard_p(biomarker, times, events, units=units), log_rank_p


def methods(seed: int, patients: int, *, by_case: bool, lower: float = 0.0) -> tuple[float, float, bool]:
    """The p of both tests of two methods in `xmil evaluate`, and whether one is called better."""
    rng, cases = np.random.default_rng(seed), cases_of(patients)
    aupc = {"lrp": 0.4 - lower + SPREAD * shared(rng, cases), "ig": 0.4 + SPREAD * shared(rng, cases)}
    about = {"mode": "remove", "correct": None, "label": None, "logits": [0.0, 0.0]}
    rows: list[Row] = [
        {"slide_id": f"s{i}", "method": name, "aupc": float(value), **about}
        for name, values in aupc.items()
        for i, value in enumerate(values)
    ]
    units = units_of(cases, by_case=by_case)
    by_slide = None if units is None else {f"s{i}": unit for i, unit in enumerate(units)}
    summary = summarise(rows, cases=by_slide, seed=seed)
    (test,) = summary.comparisons["remove"]
    best = summary.best["remove"]
    return test.t_p, test.wilcoxon_p, best.better and (lower == 0 or best.method == "lrp")


def count_shortcuts(seeds: range, patients: int, *, by_case: bool) -> list[int]:
    """Cohorts with p < 0.05 by cause, with a shortcut called, and with the planted one called first."""
    null = [shortcuts(seed, patients, by_case=by_case) for seed in seeds]
    low = [sum(a.p < 0.05 for every in null for a in every if a.cause == cause) for cause in CAUSES]
    called = sum(any(a.is_shortcut for a in every) for every in null)
    planted = []
    for cause in ("site", "scanner"):
        first = [shortcuts(seed, patients, by_case=by_case, planted=cause)[0] for seed in seeds]
        planted.append(sum(a.cause == cause and a.is_shortcut for a in first))
    return [*low, called, *planted]


def count_survival(seeds: range, patients: int, *, by_case: bool) -> list[int]:
    """Cohorts with p < 0.05 in Cox regression and log-rank test, without an effect and with one."""
    pairs = [
        np.array([survival(seed, patients, by_case=by_case, hazard=hazard) for seed in seeds])
        for hazard in (1.0, HAZARD)
    ]
    return [int(n) for p in pairs for n in (p < 0.05).sum(axis=0)]


def count_methods(seeds: range, patients: int, *, by_case: bool) -> list[int]:
    """Cohorts with p < 0.05 in each test, one of two equal methods called better, the better one."""
    null = np.array([methods(seed, patients, by_case=by_case) for seed in seeds])
    found = sum(methods(seed, patients, by_case=by_case, lower=LOWER)[2] for seed in seeds)
    return [*map(int, (null[:, :2] < 0.05).sum(axis=0)), int(null[:, 2].sum()), found]


def covers(seed: int, positives: int, shift: float) -> bool:
    """Whether the bootstrap's interval holds the true AUROC of a class that so many cases have."""
    rng, y = np.random.default_rng(seed), np.arange(CASES) < positives
    measure = {"auroc": partial(statistics.auroc, positive=y, scores=rng.normal(size=CASES) + shift * y)}
    interval = statistics.bootstrap(measure, units=range(CASES), seed=seed)["auroc"]
    return interval.low <= NormalDist().cdf(shift / 2**0.5) <= interval.high


def strategies(seed: int, varying: int, n: int, alike: int, apart: float) -> int:
    """The number of strategies that insight names for one cloud, or for two clouds at a distance.

    The cloud lies around zero, or is of exponential variates if `apart` is negative. The two clouds differ in
    the first of the concepts that vary, and share another with a large mean.
    """
    rng = np.random.default_rng(seed)
    profiles = 0.05 * rng.normal(size=(n, CONCEPTS))
    own = rng.exponential(size=(n, varying)) if apart < 0 else rng.normal(size=(n, varying))
    if apart > 0:
        half = rng.permutation(n) < n // 2
        own[half, 0] += apart
        profiles[:, -1] += SIZE * apart
    profiles[:, :varying] += own
    slides = np.repeat(profiles, alike, axis=0)
    slides += 0.02 * rng.normal(size=slides.shape) * (alike > 1)
    cases = np.repeat(np.arange(n), alike).tolist()
    return find_strategies(slides, cases=cases, seed=seed).count


def main() -> None:
    """Print the table of a question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=HEADS)
    parser.add_argument("--cohorts", type=int)
    parser.add_argument("--first", type=int, default=0, help="seed of the first cohort")
    parser.add_argument("--patients", type=int, nargs="+", choices=(100, 50, 20), default=(100, 50, 20))
    parser.add_argument("--units", nargs="+", choices=("case", "slide"), default=("case", "slide"))
    parser.add_argument("--record", metavar="FILE", help="write the table as a file of results")
    args = parser.parse_args()
    cohorts = args.cohorts or COHORTS[args.question]
    counters = {"shortcuts": count_shortcuts, "survival": count_survival, "methods": count_methods}
    rows = []
    if args.question == "rare":
        seeds = range(args.first, args.first + cohorts)
        for k in RARE:
            counts = [sum(covers(seed, k, shift) for seed in seeds) for shift in SHIFTS]
            rows.append([str(k), "case", *(f"{100 * n / cohorts:.1f}" for n in counts)])
    if args.question == "strategies":
        seeds = range(args.first, args.first + cohorts)
        for name, profile in PROFILES.items():
            counts = [strategies(seed, *profile) for seed in seeds]
            shares = [sum(count > 1 for count in counts), sum(count == 2 for count in counts)]
            rows.append([name, "case", *(f"{100 * n / cohorts:.1f}" for n in shares)])
            print(*rows[-1], flush=True)
    for n in () if rows else args.patients:
        for unit in args.units:
            seeds = range(args.first, args.first + cohorts)
            counts = counters[args.question](seeds, n, by_case=unit == "case")
            rows.append([f"{n} x {SLIDES // n}", unit, *(f"{100 * k / cohorts:.1f}" for k in counts)])
    first = {"rare": f"cases of {CASES} with the class", "strategies": "profiles"}.get(
        args.question, "patients x slides"
    )
    columns = [first, "unit", *HEADS[args.question]]
    print(markdown_table(columns, rows))
    if args.record:
        title, question = (
            f"Null cohorts: {args.question}",
            "How often is something found where nothing is? (%)",
        )
        write_results(args.record, title=title, question=question, columns=columns, rows=rows)


if __name__ == "__main__":
    main()
