"""Is a known hazard ratio inside its interval? `python -m benchmarks.insight_survival`.

The biomarker is the share of supporting patches of a synthetic map; times are exponential with a hazard ratio
of 2 per standard deviation of the share, a third is censored.
"""

from __future__ import annotations

import argparse

import numpy as np

from xmil.insights import SurvivalSplit, map_biomarkers, survival_of

RATIO = 2.0


def cohort(seed: int, *, slides: int = 150, patches: int = 200, ratio: float = RATIO) -> SurvivalSplit:
    """One cohort, and what `xmil insight` says of its share of supporting patches."""
    rng = np.random.default_rng(seed)
    truth = rng.beta(2, 2, slides)
    maps = np.where(rng.random((slides, patches)) < truth[:, None], 1.0, -1.0) + 0.3 * rng.normal(
        size=(slides, patches)
    )
    share = np.array([map_biomarkers(scores)["supporting_share"] for scores in maps])
    scaled = (share - share.mean()) / share.std()
    times = rng.exponential(1 / np.exp(np.log(ratio) * scaled))
    ends = rng.exponential(2.0, slides)
    return survival_of(share, np.minimum(times, ends), times <= ends, cases=None)


def main() -> None:
    """How often the interval holds the ratio, and the mean estimate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cohorts", type=int, default=100)
    args = parser.parse_args()
    found = [cohort(seed) for seed in range(args.cohorts)]
    held = sum(f.hazard_ratio.low <= RATIO <= f.hazard_ratio.high for f in found)
    mean = np.exp(np.mean([np.log(f.hazard_ratio.estimate) for f in found]))
    print(
        f"hazard ratio {RATIO:g} inside the 95 % interval in {held} of {len(found)} cohorts; mean {mean:.3f}"
    )


if __name__ == "__main__":
    main()
