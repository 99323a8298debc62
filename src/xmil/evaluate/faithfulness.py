"""Faithfulness of methods on one slide: explanations, curves in both modes, certificates, evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from xmil.core.bag import Bag
from xmil.core.errors import UnsupportedError, bad_parameter, unknown_name
from xmil.core.explanation import Explanation
from xmil.evaluate.certificate import Certificate
from xmil.evaluate.evidence import auprc2, auroc2, average_precision, ndcg
from xmil.evaluate.flip import Curve, Flips, Scores, step_counts
from xmil.evaluate.localisation import pointing_game, relevance_mass
from xmil.evaluate.measures import Band, band_of, random_draws, top_instances
from xmil.evaluate.minimal import MinimalSet, minimal_set
from xmil.evaluate.parts import MODES
from xmil.methods import explain, list_methods
from xmil.methods.registry import seeds

DEFAULT_METHODS = ("lrp", "attention", "single", "gxi", "ig", "random")
EVIDENCE = ("auprc2", "auroc2", "ap", "ndcg", "pointing", "mass")
Row = dict[str, Any]


AFFORDABLE = 50_000  # sub-bags that may be tried for the smallest set that decides


@dataclass(frozen=True)
class FaithfulnessSettings:
    """What is measured. In the first mode: curves in both directions and the random band; in others: morf.

    `top` is the share for sufficiency and necessity, `orders` the number of random orders. `truth_class` is
    the class for which the ground truth is evidence; for other targets its sign is turned.
    """

    methods: tuple[str, ...] = DEFAULT_METHODS
    modes: tuple[str, ...] = MODES
    steps: int = 100
    orders: int = 20
    top: float = 0.1
    seed: int = 0
    truth_class: int = 1

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in MODES:
                raise unknown_name("mode", mode, MODES)
        if not self.methods or not self.modes:
            raise bad_parameter("methods and modes", "evaluate", "at least one each", [])
        if not isinstance(self.orders, int) or self.orders < 2:
            raise bad_parameter("orders", "evaluate", "an int in the range [2, inf)", self.orders)
        if not 0 < self.top <= 1:
            raise bad_parameter("top", "evaluate", "a share in the range (0, 1]", self.top)
        step_counts(1, self.steps)

    def check(self, model: nn.Module) -> None:
        """Refuse methods that cannot explain the model."""
        able, known = list_methods(model), list_methods()
        for name in self.methods:
            if name not in known:
                raise unknown_name("method", name, known)
            if name not in able:
                raise UnsupportedError(
                    f"The method {name!r} cannot explain this model. Those that can: {', '.join(able)}."
                )

    def as_dict(self) -> dict[str, Any]:
        """The settings in plain types."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class SlideResult:
    """What was measured on one slide: a row for each method and mode, and a certificate for each method.

    `deciding` is the smallest set of patches whose removal flips the decision, for models that decide and
    whose sub-bags have a closed form: for others it would cost more than all the rest.
    """

    rows: list[Row]
    explanations: list[Explanation]
    certificates: list[Certificate]
    band: Band
    deciding: MinimalSet | None = None

    @property
    def headline(self) -> Certificate:
        """The certificate that titles, captions and lists of slides speak of: the first method's."""
        return self.certificates[0]


def evaluate_slide(
    model: nn.Module,
    bag: Bag,
    settings: FaithfulnessSettings,
    *,
    label: int | None = None,
    evidence: npt.NDArray[np.float64] | None = None,
) -> SlideResult:
    """Explain the predicted class of a bag with each method, and measure how faithful the scores are.

    Of a model without classes the value or the risk is explained; it is neither right nor wrong. `evidence`
    (n,) is the ground truth for `settings.truth_class`: positive, negative or zero.
    """
    explanations = [_explain(model, bag, method, settings.seed) for method in settings.methods]
    target = int(explanations[0].target)
    flips = {mode: Flips(model, bag, target=target, mode=mode) for mode in settings.modes}
    first = flips[settings.modes[0]]
    band, certificates = _certificates(first, explanations, settings)
    morf = {mode: [c.morf for c in certificates] for mode in settings.modes[:1]}
    for mode in settings.modes[1:]:
        asked = [(e.scores, "morf") for e in explanations]
        morf[mode] = flips[mode].curves(asked, steps=settings.steps, seed=settings.seed)
    kept = {mode: _kept(flips[mode], explanations, settings) for mode in settings.modes}
    about = {
        "slide_id": bag.slide_id,
        "n": len(bag),
        **_decided(first, label),
        "explained": first.output.kind,
        "logits": first.logits.tolist(),
    }
    rows = []
    for i, (e, certificate) in enumerate(zip(explanations, certificates, strict=True)):
        shared = {**about, "method": e.method, "target": target, **_evidence(e, evidence, first, settings)}
        for mode in settings.modes:
            measured = _measured(morf[mode][i], *kept[mode][i])
            rows.append({**shared, **measured, **_certified(certificate, mode)})
    return SlideResult(rows, explanations, certificates, band, _deciding(model, bag, first))


def _deciding(model: nn.Module, bag: Bag, flips: Flips) -> MinimalSet | None:
    pooling = None if flips.network.model is None else flips.network.model.pooling
    if not flips.decides or pooling not in ("softmax", "max"):
        return None
    return minimal_set(model, bag, target=int(flips.output.target), evaluations=AFFORDABLE)


def _decided(flips: Flips, label: int | None) -> Row:
    """The explained class is the predicted one; models without classes predict none."""
    if not flips.decides:
        return {"label": None, "predicted": None, "correct": None}
    predicted = int(flips.output.target)
    return {
        "label": label,
        "predicted": predicted,
        "correct": None if label is None else predicted == label,
    }


def _explain(model: nn.Module, bag: Bag, method: str, seed: int) -> Explanation:
    return explain(model, bag, method=method, **seeds(method, str(bag.slide_id), seed))


def _certificates(
    flips: Flips, explanations: list[Explanation], settings: FaithfulnessSettings
) -> tuple[Band, list[Certificate]]:
    """All curves of the first mode together: methods, both orders, and the random draws."""
    asked: list[tuple[Scores, str]] = [(e.scores, order) for e in explanations for order in ("morf", "lerf")]
    draws = random_draws(flips.n, orders=settings.orders, seed=settings.seed)
    curves = flips.curves([*asked, *draws], steps=settings.steps, seed=settings.seed)
    band = band_of(curves[len(asked) :])
    pairs = zip(explanations, curves[: len(asked) : 2], curves[1 : len(asked) : 2], strict=True)
    return band, [Certificate(e, morf, lerf, band) for e, morf, lerf in pairs]


def _kept(
    flips: Flips, explanations: list[Explanation], settings: FaithfulnessSettings
) -> list[tuple[float, float]]:
    """The outputs of the top patches alone, and of the others, for each explanation."""
    top = [top_instances(e.scores.astype(np.float64), settings.top, seed=settings.seed) for e in explanations]
    values = flips.values_of([*top, *(~kept for kept in top)])
    return list(zip(values[: len(top)], values[len(top) :], strict=True))


def _measured(curve: Curve, alone: float, without: float) -> Row:
    """A curve's row: the outputs of the top patches alone and of the bag without them beside it."""
    start = float(curve.values[0])
    return {
        "mode": curve.mode,
        "output": start,
        "aupc": curve.aupc,
        "aopc": curve.aopc,
        "sufficiency": alone,
        "necessity": start - without,
        "flipped": curve.flipped,
        "at_zero": curve.at_zero,
        "flipped_at_zero": curve.flipped_at_zero if curve.decides else None,
        "morf": curve.values.tolist(),
    }


def _certified(certificate: Certificate, mode: str) -> Row:
    """What is measured in the first mode only; absent in the others."""
    row: Row = {"unexplained": certificate.unexplained}
    if mode != certificate.morf.mode:
        return {**row, "srg": None, "verdict": None, "random_aupc": None, "lerf": None}
    return {
        **row,
        "srg": certificate.srg,
        "verdict": certificate.verdict,
        "random_aupc": certificate.band.aupc,
        "lerf": certificate.lerf.values.tolist(),
    }


def _evidence(
    e: Explanation, truth: npt.NDArray[np.float64] | None, flips: Flips, settings: FaithfulnessSettings
) -> Mapping[str, float | None]:
    """Agreement with the truth, which is evidence for one class, or for a high value or risk."""
    if truth is None:
        return dict.fromkeys(EVIDENCE)
    evidence = truth if not flips.decides or int(e.target) == settings.truth_class else -truth
    scores = e.scores.astype(np.float64)
    positive = evidence > 0
    found = {
        "auprc2": auprc2(evidence, scores),
        "auroc2": auroc2(evidence, scores),
        "ap": average_precision(positive, scores) if positive.any() else float("nan"),
        "ndcg": ndcg(evidence, scores),
        "pointing": pointing_game(positive, scores),
        "mass": relevance_mass(positive, scores),
    }
    return {name: None if np.isnan(value) else float(value) for name, value in found.items()}
