"""What a picture says in words: the method, the ends of a colour bar, the slide's label and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

import numpy as np
import numpy.typing as npt

from xmil.core.explanation import Explanation
from xmil.core.method_cards import card_of
from xmil.core.target import Target
from xmil.core.task import TASKS, Task
from xmil.heatmaps.scale import TOLD

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Caption:
    """What is known of a slide beside its scores; all of it text that is shown as it is."""

    name: str = ""
    label: str | None = None
    prediction: str | None = None
    task: str = "classification"
    correct: bool | None = None

    def facts(self) -> str:
        """Label and prediction in one line; empty where neither is known.

        >>> Caption("s1", label="HPV+", prediction="HPV- (p = 0.71)", correct=False).facts()
        'label HPV+   ·   predicted HPV- (p = 0.71), wrong'
        """
        verdict = ", wrong" if self.correct is False else ""
        parts = [f"label {self.label}"] if self.label is not None else []
        parts += [f"predicted {self.prediction}{verdict}"] if self.prediction is not None else []
        return "   ·   ".join(parts)


def title(explanation: Explanation) -> str:
    """The method as readers know it."""
    return card_of(explanation.method).title


def subtitle(explanation: Explanation, task: str = "classification") -> str:
    """What is explained.

    >>> import numpy as np
    >>> from xmil.core.target import Target
    >>> e = Explanation(np.zeros(1), np.zeros(2), 0.0, "lrp", Target(1, name="HPV+"), True)
    >>> subtitle(e), ends(e)
    ('for HPV+', ('speaks against HPV+', 'supports HPV+'))
    """
    unsure = explanation.stable is not None and not explanation.stable.all()
    said = "; hatched: sign uncertain" * unsure + "; has warnings" * bool(explanation.warnings)
    return f"for {_meaning(explanation, task).subject(explained(explanation))}{said}"


def explained(explanation: Explanation) -> str:
    """The explained class in words."""
    target = explanation.target
    if target.against is not None:
        return f"{_class(target.cls, target.name)} over {_class(target.against, target.against_name)}"
    return _class(target.cls, target.name)


def ends(explanation: Explanation, task: str = "classification") -> tuple[str, str]:
    """What the lowest and the highest colour mean."""
    if not explanation.signed:
        noun = "attention" if explanation.method == "attention" else "score"
        return f"low {noun}", f"high {noun}"
    return _meaning(explanation, task).ends(explained(explanation))


def beyond_scale(share: float) -> str:
    """The words on patches whose scores lie beyond a colour scale; none where they are few.

    >>> beyond_scale(0.34), beyond_scale(0.05)
    ('34 % of patches beyond the scale, at full colour; clip none shows all', '')
    """
    if share <= TOLD:
        return ""
    return f"{100 * share:.0f} % of patches beyond the scale, at full colour; clip none shows all"


def _meaning(explanation: Explanation, task: str) -> Task:
    """The task whose words fit: an explained value or risk is no class, whatever the caller took it for."""
    kind, asked = explanation.params.get("output"), TASKS[task]
    known = (TASKS[name] for name in TASKS)
    own = (other for other in known if not other.decides and other.noun == kind)
    return next(own, asked) if asked.decides else asked


def number(value: float, digits: int = 3) -> str:
    """A number with so many digits, powers of ten written out.

    >>> number(0.00123456), number(0.0), number(12345.6), number(0.00157321, 5)
    ('0.00123', '0', '12,346', '0.0015732')
    """
    size = abs(value)
    if size >= 1000 or not size:
        text = f"{value:,.0f}"
    elif size < 1e-3:
        power = floor(log10(size))
        text = f"{value / 10**power:.{digits}g}{TIMES}10{str(power).translate(SUPERSCRIPTS)}"
    else:
        text = f"{value:#.{digits}g}".rstrip(".") if digits > 3 else f"{value:.{digits}g}"
    return text.replace("-", MINUS)


def digits_for(low: float, high: float) -> int:
    """Digits that tell numbers between two ends apart.

    >>> digits_for(0.0, 1.0), digits_for(0.001571, 0.001579)
    (3, 5)
    """
    span, largest = high - low, max(abs(low), abs(high))
    return 3 if span <= 0 else max(3, min(9, ceil(log10(largest / span)) + 2))


def _class(cls: object, name: str | None) -> str:
    return name or f"class {cls}"


PREDICTED, ALL = "predicted", "all"
CLASS_FREE = "all classes"


def is_predicted(target: Target, logits: npt.ArrayLike, task: str = "classification") -> bool:
    """Whether a target is the class that the model predicts, or the one value it has.

    >>> is_predicted(Target(1), [0.2, 1.4]), is_predicted(Target(0), [0.2, 1.4])
    (True, False)
    """
    meaning = TASKS[task]
    if not meaning.decides or np.size(logits) < 2:
        return True
    return target.against is None and target.cls == meaning.predicted(logits)


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
