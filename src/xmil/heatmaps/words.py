"""The texts of pictures: the method, the ends of a colour bar, the slide's label and prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import ceil, floor, log10
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.explanation import Explanation, card_of, measured_against
from xmil.core.task import TASKS, Target, Task
from xmil.core.text import name_class, read_truth
from xmil.core.verdict import KINDS, RunVerdict
from xmil.heatmaps.style import BEYOND, FAR

MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
PREDICTED, ALL = "predicted", "all"
CLASS_FREE = "all classes"
NOT_TESTED = "not tested"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Caption:
    """The text of a picture about a slide, shown unchanged."""

    name: str = ""
    label: str | None = None
    prediction: str | None = None
    task: str = "classification"
    correct: bool | None = None

    def facts(self) -> str:
        """Write label and prediction in one line; empty if neither is known.

        >>> Caption("s1", label="HPV+", prediction="HPV- (p = 0.71)", correct=False).facts()
        'label HPV+   ·   predicted HPV- (p = 0.71), wrong'
        """
        wrong = ", wrong" if self.correct is False else ""
        parts = [f"label {self.label}"] if self.label is not None else []
        parts += [f"predicted {self.prediction}{wrong}"] if self.prediction is not None else []
        return "   ·   ".join(parts)


def caption(
    slide_id: str,
    row: Mapping[str, str],
    explanations: Sequence[Explanation] = (),
    *,
    task: str = "classification",
    class_names: Sequence[str] | None = None,
) -> Caption:
    """Name a slide with label and prediction: from its row in the run's table, else from its explanations.

    >>> caption("s1", {"label": "1", "predicted": "0", "p:neg": "0.71"}, class_names=("neg", "pos")).facts()
    'label pos   ·   predicted neg (p = 0.71)'
    """
    names, meaning, predicted = class_names or (), TASKS[task], None
    logits = explanations[0].logits if explanations else np.zeros(0)
    if not meaning.decides:
        value = row.get(meaning.noun)
        predicted = number(float(value)) if value else None
    elif (name := name_class(row.get("predicted"), names)) is not None:
        p = row.get(f"p:{name}") or row.get(f"p:{row.get('predicted')}")
        predicted = f"{name} (p = {float(p):.2f})" if p else name
    elif meaning.truth == "class" and len(logits) > 1:
        chances = meaning.numbers(logits)
        best = int(chances.argmax())
        own = {e.target.cls: e.target.name for e in explanations if e.target.name}
        name = own.get(best) or name_class(str(best), names) or str(best)
        predicted = f"{f'class {name}' if name.isdigit() else name} (p = {chances[best]:.2f})"
    label, correct = name_class(row.get("label"), names), read_truth(row.get("correct"))
    return Caption(slide_id, label, predicted, task, correct)


def verdict_on(
    explanation: Explanation,
    verdict: RunVerdict | None,
    *,
    tested: Target | None = None,
    certificate: Mapping[str, Any] | None = None,
) -> str:
    """Say what tests say of one map: those of its slide's certificate, else those of its method over the run.

    `tested` is the slide's target that the run's verdict was measured on. A map of another method or class
    was not tested.

    >>> rows = [{"method": "lrp", "kind": "better", "srg": 0.47}]
    >>> verdict = RunVerdict("better", method="lrp", methods=rows, cases=["a", "b"])
    >>> one, other = (Explanation([0], [0, 0], 0.0, "lrp", Target(cls), True) for cls in (0, 1))
    >>> verdict_on(one, verdict, tested=Target(0))
    'LRP map better than a random order over 2 cases (SRG 0.47)'
    >>> verdict_on(other, verdict, tested=Target(0)), verdict_on(one, None)
    ('LRP map not tested', 'LRP map not tested')
    """
    is_free = explanation.target.name == CLASS_FREE  # one map for every class, so also for the tested one
    own = _certified(certificate or {}, explanation.method, None if is_free else str(explanation.target))
    if own is None and verdict is not None and (is_free or explanation.target == tested):
        own = verdict.of(explanation.method)
    return f"{title(explanation)} map {NOT_TESTED}" if own is None else own.brief


def _certified(certificate: Mapping[str, Any], method: str, target: str | None) -> RunVerdict | None:
    """Read the verdict of a slide's certificate on a method, for one target or any; None if it has none."""
    stored = certificate.get("methods")
    for row in stored if isinstance(stored, list) else ():
        if (
            not isinstance(row, dict)
            or row.get("method") != method
            or target not in (None, row.get("target"))
        ):
            continue
        kind, srg = row.get("verdict"), row.get("srg")
        if kind in KINDS and isinstance(srg, int | float):
            unit = "case" if certificate.get("slides") else "slide"  # slides of a case that were one bag
            judged = {"method": method, "kind": kind, "srg": srg}
            return RunVerdict(str(kind), method=method, methods=[judged], cases=[""], unit=unit)
    return None


def title(explanation: Explanation) -> str:
    """Title the method for readers."""
    return card_of(explanation.method).title


def subtitle(explanation: Explanation, task: str = "classification") -> str:
    """Say what is explained.

    >>> import numpy as np
    >>> from xmil.core.task import Target
    >>> e = Explanation(np.zeros(1), np.zeros(2), 0.0, "lrp", Target(1, name="HPV+"), True)
    >>> subtitle(e), ends(e)
    ('for HPV+', ('speaks against HPV+', 'supports HPV+'))
    """
    unsure = explanation.stable is not None and not explanation.stable.all()
    against = measured_against(explanation.method, explanation.params)
    notes = f"; {against}" * bool(against)
    notes += "; hatched: sign uncertain" * unsure + "; has warnings" * bool(explanation.warnings)
    if explanation.method == "attention":
        return f"weight of each patch, for no class{notes}"
    notes += "; a control, drawn at random" * (explanation.method == "random")
    return f"for {_meaning(explanation, task).subject(explained(explanation))}{notes}"


def explained(explanation: Explanation) -> str:
    """Name the explained class in words."""
    target = explanation.target
    words = target.name or f"class {target.cls}"
    if target.against is not None:
        words += f" over {target.against_name or f'class {target.against}'}"
    return words


def ends(explanation: Explanation, task: str = "classification") -> tuple[str, str]:
    """Say what the lowest and the highest colour mean."""
    if not explanation.signed:
        noun = "attention" if explanation.method == "attention" else "score"
        return f"low {noun}", f"high {noun}"
    return _meaning(explanation, task).ends(explained(explanation))


TECHNICAL = re.compile(  # technical terms, which figures for readers avoid
    r"[\w.]+=|`|\bof shape\b|\b(tensors?|softmax|forward|logits?|dtype|audit\.\w+)\b|\(\d+, ?\d"
)
BRACKETS = re.compile(r" \((?:[^()]|\([^()]*\))*\)")
PARTS = re.compile(r"(?<=[.;]) ")  # between sentences, and after semicolons
NOTE = "Technical notes belong to this map: slides.csv of the run and e.warnings have them."
EVEN = 0.5  # deviation over mean of scores that hardly differ
FEWEST = 8  # patches; with fewer, even scores mean nothing


def figure_notes(explanations: Sequence[Explanation]) -> list[str]:
    """Write the notes above a picture: warnings without technical parts, and why a map has one colour."""
    warnings = list(dict.fromkeys(text for e in explanations for text in e.warnings))
    plain = [plain_words(text) for text in warnings]
    notes = [*filter(None, plain), *([NOTE] if plain != warnings else [])]
    notes += [note for e in explanations if (note := e.patches.edge_note)]
    return list(dict.fromkeys([*notes, *(text for e in explanations if (text := why_one_colour(e)))]))


def plain_words(warning: str) -> str:
    """Shorten a warning to its part before technical terms, without technical brackets; it may be empty.

    >>> plain_words("The scores contradict the model (logit 0.3); try method='single'. It compares outputs.")
    'The scores contradict the model.'
    """
    text = BRACKETS.sub(lambda match: "" if TECHNICAL.search(match[0]) else match[0], warning)
    plain = list(takewhile(lambda part: not TECHNICAL.search(part), PARTS.split(text)))
    return re.sub(r";$", ".", " ".join(plain))


def why_one_colour(e: Explanation, task: str = "classification") -> str | None:
    """Say why all patches have one colour, if no patch stands out from the others.

    >>> import numpy as np
    >>> from xmil.core.task import Target
    >>> print(why_one_colour(Explanation(np.full(9, 0.1), np.zeros(2), 0.0, "lrp", Target(1), True)))
    No patch stands out: each supports class 1 about equally, as with a model that says the same of any ...
    """
    scores = np.asarray(e.scores, dtype=np.float64)
    if not e.signed or len(scores) < FEWEST or not (scores.min() > 0 or scores.max() < 0):
        return None
    if scores.std() > EVEN * abs(scores.mean()):
        return None
    side = _meaning(e, task).ends(explained(e))[int(scores[0] > 0)]
    return (
        f"No patch stands out: each {side} about equally, as with a model that says the same of any tissue "
        "(untrained, or constant). Compare its predictions over several slides."
    )


def beyond_scale(share: float, times: float = 1.0) -> str:
    """Warn of patches with scores beyond a colour scale; empty if they are few and not far beyond.

    >>> beyond_scale(0.34), beyond_scale(0.05)
    ('34 % of patches beyond the scale, at full colour; clip none shows all', '')
    >>> beyond_scale(0.05, times=88.4)
    'the strongest score is 88 times the scale; clip none shows all'
    """
    far = f"the strongest score is {times:.0f} times the scale" if times > FAR else ""
    many = f"{100 * share:.0f} % of patches beyond the scale, at full colour" if share > BEYOND else ""
    return "; ".join(part for part in (many, far, "clip none shows all" if many or far else "") if part)


def _meaning(explanation: Explanation, task: str) -> Task:
    """Find the task with fitting words: an explained value or risk is not a class, whatever `task` is."""
    kind, default = explanation.params.get("output"), TASKS[task]
    tasks = (TASKS[name] for name in TASKS)
    own = (other for other in tasks if not other.decides and other.noun == kind)
    return next(own, default) if default.decides else default


def number(value: float, digits: int = 3) -> str:
    """Write a number with `digits` digits, and powers of ten written out.

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
    """Count the digits that distinguish numbers between two ends.

    >>> digits_for(0.0, 1.0), digits_for(0.001571, 0.001579)
    (3, 5)
    """
    span, largest = high - low, max(abs(low), abs(high))
    return 3 if span <= 0 else max(3, min(9, ceil(log10(largest / span)) + 2))


def is_predicted(target: Target, logits: npt.ArrayLike, task: str = "classification") -> bool:
    """Whether a target is the predicted class, or the model's only value.

    >>> is_predicted(Target(1), [0.2, 1.4]), is_predicted(Target(0), [0.2, 1.4])
    (True, False)
    """
    meaning = TASKS[task]
    if not meaning.decides or np.size(logits) < 2:
        return True
    return target.against is None and target.cls == meaning.predicted(logits)


def without_repeats(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Keep one explanation if scores are the same for every class, as with most attention."""
    different: dict[str, Explanation] = {}
    for e in explanations:
        for key, first in different.items():
            same = e.method == first.method and not e.signed and not first.signed
            if same and e.target != first.target and np.array_equal(e.scores, first.scores):
                different[key] = replace(first, target=Target(first.target.cls, name=CLASS_FREE))
                break
        else:
            different[e.column] = e
    return list(different.values())
