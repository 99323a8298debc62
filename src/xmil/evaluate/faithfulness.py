"""Faithfulness of methods on one slide: explanations, curves in both modes, certificates, evidence.

A certificate says how far one can trust a slide's scores, in numbers and in a sentence. Sanity checks test
whether a method depends on the weights, is stable and conserves the output.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from xmil.core.bag import Bag
from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.core.explanation import Explanation
from xmil.evaluate.curves import (
    Bags,
    Band,
    Curve,
    Flips,
    Scores,
    band_of,
    random_draws,
    top_over_ties,
)
from xmil.evaluate.evidence import average_precision, score_bag
from xmil.evaluate.marks import pointing_game, relevance_mass
from xmil.evaluate.minimal import MinimalSet, minimal_set
from xmil.evaluate.statistics import spearman
from xmil.evaluate.verdict import Judge, Verdict
from xmil.methods import METHODS, explain, seeds
from xmil.network import Network
from xmil.subsets import MODES

DEFAULT_METHODS = ("lrp", "attention", "single", "gxi", "ig", "random")
EVIDENCE = ("auprc2", "auroc2", "ap", "ndcg", "pointing", "mass")
Row = dict[str, Any]

AFFORDABLE = 50_000  # sub-bags to try for the smallest set that decides
UNEXPLAINED = 0.01  # the largest share of the output that an audit may leave unexplained
LIMIT = 0.5  # of the mean rank correlation under redrawn weights


@dataclass(frozen=True)
class FaithfulnessSettings:
    """What to measure: in the first mode curves in both directions and the random band, in others only morf.

    `top` is the share for sufficiency and necessity, `orders` the number of random orders in the band of the
    figure; the verdict has its own. `truth_class` is the class for which the ground truth is evidence; other
    targets reverse its sign.
    """

    methods: tuple[str, ...] = DEFAULT_METHODS
    modes: tuple[str, ...] = MODES
    steps: int = 100
    orders: int = 20
    top: float = 0.1
    seed: int = 0
    truth_class: int = 1

    def __post_init__(self) -> None:
        check_names("mode", self.modes, MODES)
        if not self.methods or not self.modes:
            raise bad_parameter("methods and modes", "evaluate", "at least one each", [])

    def check(self, model: nn.Module) -> None:
        """Refuse methods that cannot explain the model."""
        for name in self.methods:
            METHODS[name].check_model(Network(model))

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class Certificate:
    """One method on one slide: its curves, the band of random orders, its audit, and the verdict."""

    explanation: Explanation
    morf: Curve
    lerf: Curve
    band: Band
    verdict: Verdict

    @property
    def srg(self) -> float:
        """Symmetric relevance gain."""
        return self.lerf.aupc - self.morf.aupc

    @property
    def unexplained(self) -> float | None:
        """The share of the output that the audit leaves unexplained; None without an audit.

        A value or a risk, whose zero means little, is measured against the output's scale instead.
        """
        audit = self.explanation.audit
        if audit is None:
            return None
        whole = abs(audit.output) if self.morf.decides else self.morf.scale
        return abs(audit.other) / max(whole, 1e-12)

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        on_flip = "No removal changes the prediction."
        if not self.morf.decides:
            kind = self.explanation.params.get("output", "value")
            noun = kind if kind in ("value", "risk") else "hazard"
            on_flip = f"The output is a {noun}: there is no prediction to change."
        elif self.morf.flipped is not None:
            top = 100 * self.morf.flipped / self.morf.steps
            on_flip = f"Removing the top {top:.0f} % changes the prediction."
        on_audit, share = "Scores of this method do not add up to the output.", self.unexplained
        if (audit := self.explanation.audit) is not None and share is not None:
            add_up = "add up" if share <= UNEXPLAINED else "do not add up"
            rest = audit.output - audit.instances - audit.other
            parts = f"Patches ({audit.instances:+.2g}) and other parts ({rest:+.2g}) {add_up}"
            parts = f"{parts} to the output ({audit.output:+.2g})".replace("-", "\N{MINUS SIGN}")
            on_audit = f"{parts}; {100 * share:.1f} % is unexplained."
        return f"{self.verdict} {on_flip} {on_audit}"

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types for the certificate's file."""
        audit = self.explanation.audit
        return {
            "method": self.explanation.method,
            "target": str(self.explanation.target),
            **self.verdict.as_dict(),
            "sentence": self.sentence,
            "aupc": self.morf.aupc,
            "srg": self.srg,
            "flipped": self.morf.flipped,
            "at_zero": self.morf.at_zero,
            "flipped_at_zero": self.morf.flipped_at_zero if self.morf.decides else None,
            "random_aupc": self.band.aupc,
            "random_interval": list(self.band.aupc_interval),
            "audit": None if audit is None else audit.as_dict(),
        }


@dataclass(frozen=True, eq=False)
class SlideResult:
    """The results of one slide: a row for each method and mode, and a certificate for each method.

    `deciding` is the smallest set of patches whose removal flips the decision, for models with classes and a
    closed form of sub-bags; for others it would cost more than everything else.
    """

    rows: list[Row]
    explanations: list[Explanation]
    certificates: list[Certificate]
    band: Band
    deciding: MinimalSet | None = None

    @property
    def headline(self) -> Certificate:
        """The certificate of the first method, for titles, captions and lists of slides."""
        return self.certificates[0]

    def as_dict(
        self, slide_id: str, *, slides: Sequence[str] = (), class_names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Convert to plain types for the slide's certificate; classes by number and, if known, by name."""
        first, headline = self.rows[0], self.headline.as_dict()
        names = {
            f"{key}_name": class_names[first[key]]
            for key in ("label", "predicted")
            if class_names and first[key] is not None and first[key] < len(class_names)
        }
        edges = ("mean", "low", "high")
        keys = ("n", "label", "predicted", "correct", "explained", "output", "mode")
        return {
            "slide_id": slide_id,
            **({"slides": list(slides)} if len(slides) > 1 else {}),
            **{key: first[key] for key in keys},
            **names,
            "headline": {key: headline[key] for key in ("method", "verdict", "sentence")},
            "methods": [certificate.as_dict() for certificate in self.certificates],
            "deciding": None if self.deciding is None else self.deciding.as_dict(),
            "random_band": {name: [round(float(v), 6) for v in getattr(self.band, name)] for name in edges},
        }


def evaluate_slide(
    model: nn.Module,
    bag: Bag,
    settings: FaithfulnessSettings,
    *,
    label: int | None = None,
    evidence: npt.NDArray[np.float64] | None = None,
) -> SlideResult:
    """Explain the predicted class of a bag with each method, and measure how faithful the scores are.

    For a model without classes the value or the risk is explained, which is neither right nor wrong.
    `evidence` (n,) is the ground truth for `settings.truth_class`: positive, negative or zero.
    """
    explanations = [
        explain(model, bag, method=method, **seeds(method, str(bag.slide_id), settings.seed))
        for method in settings.methods
    ]
    target = int(explanations[0].target)
    flips = {mode: Flips(model, bag, target=target, mode=mode) for mode in settings.modes}
    first = flips[settings.modes[0]]
    # All curves of the first mode at once: methods, both orders, and the random draws.
    own: list[tuple[Scores, str]] = [(e.scores, order) for e in explanations for order in ("morf", "lerf")]
    draws = random_draws(first.n, orders=settings.orders, seed=settings.seed)
    how: dict[str, Any] = {"steps": settings.steps, "seed": settings.seed, "over_ties": True}
    curves = first.curves([*own, *draws], **how)
    band = band_of(curves[len(own) :])
    verdicts = Judge(first, seed=settings.seed).verdicts([(e.method, e.scores) for e in explanations])
    pairs = zip(explanations, curves[: len(own) : 2], curves[1 : len(own) : 2], verdicts, strict=True)
    certificates = [  # show the SRG of the curves only: the verdict's has fewer steps
        Certificate(e, morf, lerf, band, replace(verdict, srg=lerf.aupc - morf.aupc))
        for e, morf, lerf, verdict in pairs
    ]
    tie_seed = first.tie_seed(settings.seed)
    top = [top_over_ties(e.scores.astype(np.float64), settings.top, seed=tie_seed) for e in explanations]
    morf, tops = {settings.modes[0]: [c.morf for c in certificates]}, {}
    for mode in settings.modes:
        if mode not in morf:
            morf[mode] = flips[mode].curves(own[::2], **how)
        tops[mode] = _means_of(flips[mode], [*top, *(~masks for masks in top)])
    facts = {
        "slide_id": bag.slide_id,
        "n": len(bag),
        "label": label if first.decides else None,
        "predicted": target if first.decides else None,  # the explained class
        "correct": target == label if first.decides and label is not None else None,
        "explained": first.output.kind,
        "logits": first.logits.tolist(),
    }
    rows = []
    for i, (e, certificate) in enumerate(zip(explanations, certificates, strict=True)):
        shared = {**facts, "method": e.method, "target": target, **_evidence(e, evidence, first, settings)}
        for mode in settings.modes:
            alone, without = tops[mode][i :: len(explanations)]
            rows.append({**shared, **_measures(certificate, morf[mode][i], alone, without)})
    deciding = None
    pooling = None if first.network.model is None else first.network.model.pooling
    if first.decides and pooling in ("softmax", "max"):
        deciding = minimal_set(model, bag, target=target, evaluations=AFFORDABLE)
    return SlideResult(rows, explanations, certificates, band, deciding)


def _measures(certificate: Certificate, curve: Curve, alone: float, without: float) -> Row:
    """Measure a curve, with the outputs of the top patches alone and of the bag without them.

    SRG, verdict and random orders are only measured in the first mode, that of the certificate.
    """
    start, is_first = float(curve.values[0]), curve.mode == certificate.morf.mode
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
        "unexplained": certificate.unexplained,
        "srg": certificate.srg if is_first else None,
        "verdict": certificate.verdict.kind if is_first else None,
        "random_aupc": certificate.band.aupc if is_first else None,
        "lerf": certificate.lerf.values.tolist() if is_first else None,
    }


def _evidence(
    e: Explanation, truth: npt.NDArray[np.float64] | None, flips: Flips, settings: FaithfulnessSettings
) -> Mapping[str, float | None]:
    """Measure agreement with the truth, which is evidence for one class, or for a high value or risk."""
    if truth is None:
        return dict.fromkeys(EVIDENCE)
    evidence = truth if not flips.decides or int(e.target) == settings.truth_class else -truth
    scores = e.scores.astype(np.float64)
    positive = evidence > 0
    values = {
        **score_bag(evidence, scores, measures=("auprc2", "auroc2", "ndcg")),
        "ap": average_precision(positive, scores),
        "pointing": pointing_game(positive, scores),
        "mass": relevance_mass(positive, scores),
    }
    return {name: None if np.isnan(values[name]) else float(values[name]) for name in EVIDENCE}


@dataclass(frozen=True, eq=False)
class Randomisation:
    """Rank correlation of a method's scores with those under redrawn weights, one for each draw.

    If a method depends on the model, its ranking changes: correlations are near 0. `passed` requires that
    their absolute mean is at most `LIMIT`.
    """

    method: str
    correlations: npt.NDArray[np.float64]

    @property
    def mean(self) -> float:
        """The mean over the draws."""
        return float(self.correlations.mean())

    @property
    def passed(self) -> bool:
        """Whether the scores change when the weights do."""
        return abs(self.mean) <= LIMIT


def randomisation(
    model: nn.Module,
    bag: Bags,
    *,
    method: str = "lrp",
    target: Any = 1,
    draws: int = 5,
    seed: int = 0,
    **params: Any,
) -> Randomisation:
    """Explain the bag again under redrawn weights; Adebayo et al. 2018, arXiv:1810.03292.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    >>> bag = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> randomisation(net, bag).passed, randomisation(net, bag, method="random").mean
    (True, 1.0)
    """
    base = explain(model, bag, method=method, target=target, **params).scores
    models = (redrawn(model, seed=seed + i) for i in range(draws))
    again = (explain(m, bag, method=method, target=target, **params).scores for m in models)
    return Randomisation(method, np.array([spearman(base, scores) for scores in again]))


def redrawn(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Copy a model and redraw its weights, each tensor from a normal with its own mean and deviation."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.numel() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.copy_(parameter.mean() + parameter.std() * noise)
    return twin


def stability(
    models: Sequence[nn.Module], bag: Bags, *, method: str = "lrp", target: Any = 1, **params: Any
) -> npt.NDArray[np.float64]:
    """Correlate the ranks (m, m) of one bag's scores between models: seeds, folds or checkpoints.

    >>> import torch, xmil
    >>> nets = [xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=seed) for seed in (0, 0)]
    >>> bool(stability(nets, torch.eye(4)).min() > 0.999)
    True
    """
    if len(models) < 2:
        raise InputError(f"Stability needs at least two models to compare. Got {len(models)}.")
    scores = [explain(model, bag, method=method, target=target, **params).scores for model in models]
    return np.array([[spearman(a, b) for b in scores] for a in scores])


def _means_of(flips: Flips, groups: Sequence[npt.NDArray[np.bool_]]) -> list[float]:
    """Compute the mean output of each group (k, n) of bags of kept instances."""
    values = flips.values_of([mask for group in groups for mask in group])
    ends = np.cumsum([len(group) for group in groups])
    return [float(part.mean()) for part in np.split(np.array(values), ends[:-1])]
