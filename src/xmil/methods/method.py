"""What a method is: the question it answers, the baseline it compares with, the attribution it returns.

The explained number is a function of the outputs: logit, contrast, log-odds, probability, value or risk. This
is the torch side of `xmil.core.task`: each task registers here which of its outputs can be explained. A
baseline is a typical ordinary instance; evidence is what differs from it: "mean" (of the model's background),
"bag" (the bag's own mean), an array (d,) or (k, d), a Bag, or None. With it LRP scores (x_i - a mu) . g_i,
and integrated gradients start there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from os import PathLike
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.background import USER, Background
from xmil.core.bag import Bag
from xmil.core.errors import InputError, UnsupportedError, bad_parameter, check_names
from xmil.core.explanation import Audit
from xmil.core.registry import Registry
from xmil.core.task import TASKS, Target
from xmil.network import Network

OUTPUTS = ("logit", "contrastive", "log_odds", "probability")  # of a class
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Output:
    """An explained number: `function` maps logits (b, c) to values (b,), differentiably.

    `shared` is set if the function is not linear: it has the same values, and its gradient times the logits
    is what each logit adds to the value. `scale` is a large change of the output; None for the value of a
    regression: how far patches move it.
    """

    target: Target
    kind: str
    function: Function
    shared: Function | None = None
    scale: float | None = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    @property
    def to_share(self) -> Function:
        """The function for methods that distribute the value over logits: LRP, instance logits."""
        return self.function if self.shared is None else self.shared


@dataclass(frozen=True)
class OutputRequest:
    """One target of a task, with the kind of output that the user named, and the method's default.

    `references` holds a value for each of the `n_outputs` outputs, relative to which it is explained.
    """

    task: str
    target: Target
    kind: str | None
    n_outputs: int
    default: str = "logit"
    references: Sequence[float] = ()

    @property
    def cls(self) -> int:
        return int(self.target)

    @property
    def against(self) -> int | None:
        return None if self.target.against is None else int(self.target.against)

    def kind_among(self, kinds: Sequence[str], default: str | None = None) -> str:
        """Return the user's kind of output, else the task's or the method's default; refuse others."""
        kind = self.kind or default or self.default
        if kind not in kinds:
            outputs = " or ".join(repr(name) for name in kinds)
            raise UnsupportedError(
                f"A {self.task} model has no output {kind!r} here; use `output={outputs}`."
            )
        return kind


TASK_OUTPUTS: Registry[Callable[[OutputRequest], Output]] = Registry(
    "task with outputs", group="xmil.task_outputs"
)


def own_outputs() -> tuple[str, ...]:
    """List the outputs of models without classes; every method can explain them.

    >>> own_outputs()
    ('risk', 'value')
    """
    return tuple(dict.fromkeys(TASKS[name].noun for name in TASKS if not TASKS[name].decides))


@dataclass(frozen=True)
class Question:
    """What a user wants explained: targets, resolved with the logits, and the kind of output.

    The default kind depends on the task: the value of a regression, the risk of a survival model, and
    `default` if the target is a class or a time bin.
    """

    targets: Sequence[Any] | None
    kind: str | None
    network: Network
    default: str = "logit"

    def __post_init__(self) -> None:
        kinds = [kind for kind in (self.kind, self.default) if kind is not None]
        check_names("output", kinds, (*OUTPUTS, *own_outputs()))

    def outputs(self, logits: Tensor) -> list[Output]:
        """Make the explained outputs for the logits (1, c) of a bag; without targets, of every class."""
        c, task = logits.shape[-1], TASKS[self.network.task]
        n = task.count_targets(c)
        targets = range(n) if self.targets is None else self.targets
        names, predicted = self.network.target_names(c), 0
        if any(Target.of(t).cls is None for t in targets):  # otherwise do not wait for the device
            predicted = task.predicted(logits.detach()[0].double().cpu())
        resolved = [
            Target.of(t).resolve(n_classes=n, predicted=predicted, class_names=names) for t in targets
        ]
        name, references = self.network.task, self.network.references(c)
        requests = [OutputRequest(name, t, self.kind, c, self.default, references) for t in resolved]
        return [TASK_OUTPUTS[name](request) for request in requests]


def class_output(target: Target, kind: str, *, task: str = "classification", n_outputs: int = 2) -> Output:
    """Make the explained output of a class.

    >>> class_output(Target(1), "logit")(torch.tensor([[0.5, 2.0]]))
    tensor([2.])
    """
    return TASK_OUTPUTS[task](OutputRequest(task, target, kind, n_outputs))


@TASK_OUTPUTS.register("classification")
def _classification(request: OutputRequest) -> Output:
    kind, c, against = request.kind_among(OUTPUTS), request.cls, request.against
    return Output(request.target, kind, lambda logits: _class_value(kind, logits, c, against))


@TASK_OUTPUTS.register("survival")
def _survival(request: OutputRequest) -> Output:
    """A time bin, or the risk, which is not linear: its shares are integrals on the path from zero logits."""
    risk, kind = request.n_outputs, request.kind
    if risk not in (request.cls, request.against):
        return _sigmoids(request)
    if kind not in (None, "risk") or request.against is not None:
        refused = "contrast" if request.against is not None else kind
        raise UnsupportedError(
            f"The risk of a survival model has no {refused}; name a time bin as the target."
        )
    return Output(request.target, "risk", survival_risk, _shared_risk, scale=float(request.n_outputs))


@TASK_OUTPUTS.register("cox")
def _cox(request: OutputRequest) -> Output:
    kind, c = request.kind_among(("risk", "logit"), "risk"), request.cls
    return Output(request.target, kind, lambda logits: logits[:, c])


@TASK_OUTPUTS.register("regression")
def _regression(request: OutputRequest) -> Output:
    """The value minus its reference, the difference of two such deviations, or the raw output."""
    kind, c, against = request.kind_among(("value", "logit"), "value"), request.cls, request.against
    references = request.references if kind == "value" else [0.0] * request.n_outputs
    scale = None if kind == "value" else 1.0
    if against is None:
        return Output(request.target, kind, lambda values: values[:, c] - references[c], scale=scale)
    offset = references[c] - references[against]
    return Output(
        request.target, kind, lambda values: values[:, c] - values[:, against] - offset, scale=scale
    )


def _shared_risk(logits: Tensor) -> Tensor:
    slopes = risk_slopes(logits)
    zero = (slopes * (logits - logits.detach())).sum(dim=-1)  # its gradient is the slopes
    return survival_risk(logits.detach()) + zero


@TASK_OUTPUTS.register("multilabel")
def _sigmoids(request: OutputRequest) -> Output:
    """Outputs with one sigmoid each: labels, hazards."""
    kind, c, against = request.kind_among(OUTPUTS), request.cls, request.against
    if kind == "contrastive":
        raise UnsupportedError(
            f"A {request.task} model has no contrast between classes; use `output='logit'`."
        )
    return Output(
        request.target,
        kind,
        lambda z: _sigmoid_if(kind, z[:, c] if against is None else z[:, c] - z[:, against]),
    )


def _sigmoid_if(kind: str, odds: Tensor) -> Tensor:
    return torch.sigmoid(odds) if kind == "probability" else odds


def class_logits(logits: Tensor) -> Tensor:
    """Give logits a column per class: one z becomes (-z / 2, z / 2), whose softmax is its sigmoid."""
    return torch.cat([-0.5 * logits, 0.5 * logits], dim=-1) if logits.shape[-1] == 1 else logits


def _class_value(kind: str, logits: Tensor, c: int, against: int | None) -> Tensor:
    """The logit of a class, its log-odds log p / (1 - p), its probability, or its contrast.

    The contrast is the sum over the other classes of z_cc' p_cc', with constant weights p_cc' = softmax over
    c' of -z_cc'.
    """
    if kind == "contrastive":
        rest = [i for i in range(class_logits(logits).shape[-1]) if i != c]
        z = torch.stack([_difference(logits, c, other) for other in rest], dim=-1)
        weighted = z * F.softmax(-z, dim=-1).detach()
        return weighted.sum(dim=-1) if against is None else weighted[:, rest.index(against)]
    if against is not None:
        return _sigmoid_if(kind, _difference(logits, c, against))
    if logits.shape[-1] == 1:
        return _sigmoid_if(kind, logits[:, 0] if c == 1 else -logits[:, 0])
    if kind == "probability":
        return F.softmax(logits, dim=-1)[:, c]
    if kind == "log_odds":
        rest_logits = torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=-1)
        return logits[:, c] - torch.logsumexp(rest_logits, dim=-1)
    return logits[:, c]


def _difference(logits: Tensor, c: int, against: int) -> Tensor:
    full = class_logits(logits)
    return full[:, c] - full[:, against]


PRESET = "preset"  # the preset's own baseline
MEAN, BAG = "mean", "bag"
OF_BAG = "mean of the bag"
BASELINES = '"mean", "bag", an array (d,) or (k, d), a Bag or None'
BACKGROUNDS = 'a Bag, an array (k, d), a Background, a path, "bag" or None'


def find_background(background: Any, *, network: Network, x: Tensor, method: str) -> Background | None:
    """Find the ordinary patches that a method compares with: the user's, else those stored with the model.

    Return None if there are none, or for "bag": then the method only has the bag. The description that an
    explanation records (`describe_background`) selects the model's background again.
    """
    if isinstance(background, str) and background == BAG:
        return None
    stored = stored_background(network)
    if background is None or (isinstance(background, str) and background == describe_background(stored)):
        chosen = stored
    elif isinstance(background, Background):
        chosen = replace(background, source=USER)
    elif isinstance(background, str) and background.startswith(f"{USER} "):
        raise InputError(
            f"The background {background!r} cannot be found by its name; pass the background itself."
        )
    elif isinstance(background, Bag | PathLike | str) or np.ndim(background) == 2:
        from xmil.data import background as make_background

        rows = background.detach().cpu().numpy() if isinstance(background, Tensor) else background
        chosen = replace(make_background(rows), source=USER)
    else:
        raise bad_parameter("background", method, BACKGROUNDS, background)
    if chosen is not None and chosen.dim != x.shape[-1]:
        raise InputError(
            f"The background of {method} must have the width of the patches, {x.shape[-1]}. Got {chosen.dim}."
        )
    return chosen


def stored_background(network: Network) -> Background | None:
    """The background stored with the model."""
    background = getattr(network.module, "background", None)
    return background if isinstance(background, Background) else None


def describe_background(background: Background | None) -> str:
    """Describe a background for an explanation: its source and the digest of its content."""
    return BAG if background is None else f"{background.source} {background.digest}"


@dataclass(frozen=True, eq=False)
class Baseline:
    """An instance `point`, (d,) or broadcast against bags (b, n, d), to subtract times its `strength`.

    `name` is its origin, `digest` identifies it if the name does not; `note` is a sentence to show beside the
    scores.
    """

    point: Tensor
    strength: float
    name: str
    note: str | None = None
    digest: str | None = None

    @property
    def shift(self) -> Tensor:
        return self.strength * self.point


def describe_baseline(baseline: Baseline | None) -> dict[str, Any]:
    """Describe a baseline for an attribution: parameters and warnings."""
    if baseline is None:
        return {"params": {}, "warnings": ()}
    params = {"baseline": baseline.name, "strength": baseline.strength}
    params |= {"baseline_digest": baseline.digest} if baseline.digest else {}
    return {"params": params, "warnings": () if baseline.note is None else (baseline.note,)}


def find_baseline(
    baseline: Any,
    strength: float | None,
    *,
    network: Network,
    x: Tensor,
    method: str,
    background: Background | None = None,
) -> Baseline | None:
    """Find the user's baseline for bags x (b, n, d), or None.

    "mean" is the mean of the `background`, else of the model's, else of the bag, with a note. The name that
    an explanation records for a mean selects it again.
    """
    if baseline is None:
        if strength is not None:
            raise InputError(f"The 'strength' of {method} scales a baseline; pass `baseline=` as well.")
        return None
    a = 1.0 if strength is None else strength
    if isinstance(a, bool) or not isinstance(a, int | float) or not 0 <= a <= 1:
        raise bad_parameter("strength", method, "a float in the range [0, 1]", strength)
    background = background or stored_background(network)
    if not isinstance(baseline, str):
        point, name = _as_point(baseline, x, method), "given"
        if isinstance(baseline, Bag | Background):
            name = (
                baseline.title
                if isinstance(baseline, Background)
                else f"mean of {baseline.slide_id or 'a bag'}"
            )
        return Baseline(point, float(a), name, digest=sha256(point.cpu().numpy().tobytes()).hexdigest()[:16])
    if background is not None and baseline in (MEAN, background.title):
        return Baseline(_as_point(background.mean, x, method), float(a), background.title)
    if baseline not in (MEAN, BAG, OF_BAG):
        raise bad_parameter("baseline", method, BASELINES, baseline)
    note = "The model has no background, so the bag's mean is the baseline."
    return Baseline(x.mean(dim=1, keepdim=True), float(a), OF_BAG, note if baseline == MEAN else None)


def _as_point(values: Any, x: Tensor, method: str) -> Tensor:
    """Convert a baseline to one instance (d,) in the bag's dtype, the mean of several."""
    values = values.features if isinstance(values, Bag) else values
    values = values.mean if isinstance(values, Background) else values
    try:
        rows = (
            values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values, dtype=np.float64))
        )
    except (TypeError, ValueError):
        raise bad_parameter("baseline", method, BASELINES, type(values).__name__) from None
    rows = rows.detach().to(x.device, torch.float64)
    point = rows if rows.ndim == 1 else rows.reshape(-1, rows.shape[-1]).mean(dim=0) if rows.ndim else rows
    if point.shape != x.shape[-1:]:
        raise InputError(
            f"The baseline of {method} must have the width of the patches, {x.shape[-1]}. "
            f"Got {tuple(rows.shape)}."
        )
    if not bool(torch.isfinite(point).all()):
        raise InputError(f"The baseline of {method} must be finite; it has NaN, inf or no patches.")
    return point.to(x.dtype)


@dataclass(frozen=True)
class Attribution:
    """Scores (n,) for one output, with the explained number and, if the method conserves, the audit.

    `params` are settings that the method chose itself, for the explanation to record; `warnings` are
    sentences to show wherever the scores are shown. Methods that sample add standard errors (n,) and whether
    each sign is certain (n,).
    """

    output: Output
    value: float
    scores: Tensor
    audit: Audit | None = None
    relevance: Tensor | None = None
    stderr: Tensor | None = None
    stable: Tensor | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attributions:
    """What a method returns: the model's logits (1, c) and an attribution for each output."""

    logits: Tensor
    of: Sequence[Attribution]


def attributions(
    logits: Tensor, question: Question, score: Callable[[Output], Tensor], **fields: Any
) -> Attributions:
    """Make a method's attributions from a function that scores (n,) one output."""
    outputs = question.outputs(logits)
    return Attributions(logits, [Attribution(o, float(o(logits)), score(o), **fields) for o in outputs])


CONTEXTS = {"contexts": None, "keep": 0.5, "seed": 0}  # number of sub-bags, share that each keeps
Explain = Callable[..., Attributions]
Batch = Callable[..., Tensor]
Support = Callable[[Network], str | None]


@dataclass(frozen=True)
class Method:
    """An explanation method.

    `run(network, x, question, **parameters)` explains one bag (1, n, d). `supports` says why a model cannot
    be explained, or returns None. `outputs` are the numbers it can explain, its default first. `cost` is in
    forward passes over a bag of n instances. `contexts`: whether its scores can be averaged over sub-bags.
    `batch(network, x, outputs, **parameters)`, if the method has it, scores many bags (b, n, d) of one size
    together, (b, k, n).
    """

    name: str
    run: Explain
    signed: bool
    conserves: bool
    cost: str
    outputs: tuple[str, ...]
    supports: Support
    contexts: bool = False
    batch: Batch | None = None

    @property
    def seeded(self) -> bool:
        """Whether the method itself is random, and so takes a seed."""
        return "seed" in inspect.signature(self.run).parameters

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The method's own parameters and their defaults, and those of contexts if it takes them."""
        signature = inspect.signature(self.run)
        own = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        return {**own, **CONTEXTS} if self.contexts else own

    def check_parameters(self, params: Mapping[str, Any]) -> None:
        check_names(f"parameter of {self.name}", params, self.parameters)

    def check_model(self, network: Network) -> None:
        """Refuse a model that the method cannot explain, and name the methods that can."""
        if (reason := self.supports(network)) is not None:
            able = [name for name in METHODS if METHODS[name].supports(network) is None]
            raise UnsupportedError(
                f"The method {self.name!r} cannot explain {network.name}: {reason}. "
                f"Use one that can: {', '.join(able)}."
            )

    def check_output(self, output: str | None) -> None:
        """Refuse a kind of output that the method does not explain; None is its default."""
        if output is not None:
            check_names(f"output of {self.name}", [output], (*self.outputs, *own_outputs()))


def seed_words(seed: Any, method: str) -> list[int]:
    """Convert a seed, one number or several, to a list for NumPy."""
    words = list(seed) if isinstance(seed, list | tuple) else [seed]
    if not words or not all(isinstance(word, int) and word >= 0 for word in words):
        raise bad_parameter("seed", method, "an int in the range [0, inf), or several", seed)
    return words


def seeds(method: str, name: str, seed: int, *, contexts: bool = False) -> dict[str, Any]:
    """Make the seed for a bag by its name, if the method or its contexts are random."""
    return {"seed": [seed, crc32(name.encode())]} if METHODS[method].seeded or contexts else {}


METHODS: Registry[Method] = Registry("method", group="xmil.methods")


def register_method(
    name: str,
    *,
    signed: bool,
    cost: str,
    conserves: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
    supports: Support = lambda _: None,
    contexts: bool = False,
    batch: Batch | None = None,
) -> Callable[[Explain], Explain]:
    """Decorator that registers a function `(network, x, question, *, ...)` as an explanation method."""

    def add(run: Explain) -> Explain:
        METHODS.add(name, Method(name, run, signed, conserves, cost, outputs, supports, contexts, batch))
        return run

    return add


# Discrete-time survival: outputs z (b, t) are logits of hazards, sigmoid(z_t) is the chance of the event in
# bin t for a patient who reaches it.

NODES = 32  # per stretch of the path integral
STRETCHES = (
    0.0,
    1 / 64,
    1 / 16,
    1 / 4,
    1.0,
)  # the risk of large logits changes most near the start of the path


def survival_function(logits: Tensor) -> Tensor:
    """S(t), the chance to survive the bins 0..t: the cumulative product of 1 - hazard.

    >>> survival_function(torch.zeros(1, 3))
    tensor([[0.5000, 0.2500, 0.1250]])
    """
    return F.logsigmoid(-logits).cumsum(dim=-1).exp()


def survival_risk(logits: Tensor) -> Tensor:
    """The risk (b,): minus the sum of S(t), from -t (nobody dies) to 0 (all die in the first bin).

    >>> survival_risk(torch.zeros(1, 3))
    tensor([-0.8750])
    """
    return -survival_function(logits).sum(dim=-1)


def risk_slopes(logits: Tensor) -> Tensor:
    """The mean gradient (b, t) of the risk on the straight path from zero logits to the logits.

    Times the logits it distributes risk(z) - risk(0) over the bins: integrated gradients of the risk.

    >>> z = torch.tensor([[2.0, -1.0, 0.5]])
    >>> shared = (risk_slopes(z) * z).sum(dim=-1)
    >>> bool((shared - survival_risk(z) + survival_risk(0 * z)).abs() < 1e-6)
    True
    """
    z = logits.detach().double()
    at, weights = (torch.from_numpy(part).to(z.device)[:, None, None] for part in _nodes())  # (m, 1, 1)
    return (weights * risk_gradient(at * z)).sum(dim=0).to(logits.dtype)


def risk_gradient(logits: Tensor) -> Tensor:
    """The gradient of the risk: the hazard of a bin times the sum of S over it and the later bins."""
    later = survival_function(logits).flip(-1).cumsum(dim=-1).flip(-1)
    return torch.sigmoid(logits) * later


@cache
def _nodes() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Nodes and weights of Gauss-Legendre quadrature on the stretches of [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(NODES)
    starts, lengths = np.array(STRETCHES[:-1]), np.diff(STRETCHES)
    places = starts[:, None] + 0.5 * lengths[:, None] * (x + 1)
    return places.ravel(), (0.5 * lengths[:, None] * w).ravel()
