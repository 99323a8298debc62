"""What the demo says of LRP: beside chance, and beside methods that do better."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from xmil.demo.results_page import PairResult, verdict
from xmil.demo.tissue import SectionResult, tissue_verdict


def test_the_tissue_sentence_names_chance_and_the_better_method() -> None:
    marked = np.arange(40) < 16
    scores = {"lrp": (np.arange(40) + 35) % 40, "attention": -np.arange(40)}
    maps = {name: SimpleNamespace(scores=own) for name, own in scores.items()}
    found = tissue_verdict([SectionResult("a", "epithelial", True, 0.9, marked, maps)])
    assert "5 of the 10 patches that LRP ranks highest" in found
    assert "Attention: 10" in found
    assert "chance: 4" in found
    alone = tissue_verdict([SectionResult("a", "epithelial", True, 0.9, marked, {"lrp": maps["attention"]})])
    assert "(chance: 4)" in alone


def test_the_digits_sentence_names_methods_that_are_ahead() -> None:
    def pair(**auprc2: float) -> PairResult:
        return PairResult("four_bags", "attnmil", 0.9, auprc2, {}, {}, {})

    told = verdict(
        [pair(lrp=0.9, attention=0.5, one_added=0.93), pair(lrp=0.9, attention=0.5, one_added=0.8)]
    )
    assert "all 2 pairs" in told
    assert "One added in 1" in told
    assert "ahead" not in verdict([pair(lrp=0.9, attention=0.5)])
