"""Which of a slide's explanations are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from xmil.core.explanation import Explanation
from xmil.core.target import Target
from xmil.slides.words import VALUES

PREDICTED, ALL = "predicted", "all"
CLASS_FREE = "all classes"


def is_predicted(target: Target, logits: npt.ArrayLike, task: str = "classification") -> bool:
    """Whether a target is the class that the model predicts, or the one value it has.

    >>> is_predicted(Target(1), [0.2, 1.4]), is_predicted(Target(0), [0.2, 1.4])
    (True, False)
    """
    values = np.asarray(logits, dtype=np.float64)
    if task in VALUES or len(values) < 2:
        return True
    return target.against is None and target.cls == int(values.argmax())


def without_repeats(explanations: Sequence[Explanation]) -> list[Explanation]:
    """The explanations with scores that are the same for every class, as attention's mostly are, once."""
    kept: dict[str, Explanation] = {}
    for e in explanations:
        first = next((k for k in kept.values() if _repeats(e, k)), None)
        if first is None:
            kept[e.column] = e
        else:
            target = Target(first.target.cls, name=CLASS_FREE)
            kept = {key: replace(k, target=target) if k is first else k for key, k in kept.items()}
    return list(kept.values())


def _repeats(e: Explanation, first: Explanation) -> bool:
    same = e.method == first.method and not e.signed and not first.signed and e.target != first.target
    return same and np.array_equal(e.scores, first.scores)
