"""The explained number as a function of the outputs: logit, contrast, log-odds, probability, value, risk.

The torch side of `xmil.core.task`: each task registers here what of its outputs can be explained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import UnsupportedError, unknown_name
from xmil.core.registry import Registry
from xmil.core.target import Target
from xmil.core.task import TASKS
from xmil.methods.network import Network
from xmil.nn.survival import risk_slopes, survival_risk

OUTPUTS = ("logit", "contrastive", "log_odds", "probability")  # of a class
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Output:
    """An explained number: `function` maps logits (b, c) to values (b,), differentiably.

    `shared`, where the function is not linear, has the same values, and gradients that times the logits are
    what each logit adds to the value. `scale` is what counts as a large change; None for a value, which is
    measured by its own size.
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
        """The function for methods that share the value out among logits: LRP, instance logits."""
        return self.function if self.shared is None else self.shared


@dataclass(frozen=True)
class AskedOutput:
    """One target of a task, with the kind of output the user named, or the method's default.

    `references` are the values that each of the `n_outputs` outputs is explained against.
    """

    task: str
    target: Target
    kind: str | None
    n_outputs: int
    default: str = "logit"
    references: Sequence[float] = ()

    @property
    def cls(self) -> int:
        """The target's number."""
        return int(self.target)

    @property
    def against(self) -> int | None:
        """The number of the class it is contrasted with."""
        return None if self.target.against is None else int(self.target.against)

    def kind_among(self, known: Sequence[str], default: str | None = None) -> str:
        """The kind of output: that asked for, else the task's or the method's default; others are refused."""
        kind = self.kind or default or self.default
        if kind not in known:
            outputs = " or ".join(repr(name) for name in known)
            raise UnsupportedError(f"A {self.task} model has no output {kind!r} here; use output={outputs}.")
        return kind


TASK_OUTPUTS: Registry[Callable[[AskedOutput], Output]] = Registry(
    "task with outputs", group="xmil.task_outputs"
)


def own_outputs() -> tuple[str, ...]:
    """The outputs of models without classes, by their nouns; every method takes them.

    >>> own_outputs()
    ('risk', 'value')
    """
    return tuple(dict.fromkeys(TASKS[name].noun for name in TASKS if not TASKS[name].decides))


@dataclass(frozen=True)
class Question:
    """What a user asks for: targets, resolved once the logits are known, and the kind of output.

    Without a kind, that of the task is taken: the value of a regression, the risk of a survival model, and
    the `default` where the target is a class or a time bin.
    """

    targets: Sequence[Any] | None
    kind: str | None
    network: Network
    default: str = "logit"

    def __post_init__(self) -> None:
        known = (*OUTPUTS, *own_outputs())
        for kind in (self.kind, self.default):
            if kind is not None and kind not in known:
                raise unknown_name("output", kind, known)

    def outputs(self, logits: Tensor) -> list[Output]:
        """The explained outputs for the logits (1, c) of a bag; without targets, every class."""
        c, task = logits.shape[-1], TASKS[self.network.task]
        n = task.count_targets(c)
        targets = range(n) if self.targets is None else self.targets
        names, predicted = self.network.target_names(c), 0
        if any(Target.of(t).cls is None for t in targets):  # else the device need not be waited for
            predicted = task.predicted(logits.detach()[0].double().cpu())
        resolved = [
            Target.of(t).resolve(n_classes=n, predicted=predicted, class_names=names) for t in targets
        ]
        return [self._output(target, c) for target in resolved]

    def _output(self, target: Target, c: int) -> Output:
        references = self.network.references(c)
        task = self.network.task
        return TASK_OUTPUTS[task](AskedOutput(task, target, self.kind, c, self.default, references))


def class_output(target: Target, kind: str, *, task: str = "classification", n_outputs: int = 2) -> Output:
    """The explained output of a class.

    >>> class_output(Target(1), "logit")(torch.tensor([[0.5, 2.0]]))
    tensor([2.])
    """
    return TASK_OUTPUTS[task](AskedOutput(task, target, kind, n_outputs))


@TASK_OUTPUTS.register("classification")
def _classification(asked: AskedOutput) -> Output:
    kind, c, against = asked.kind_among(OUTPUTS), asked.cls, asked.against
    make = {"logit": _logit, "contrastive": _contrastive, "log_odds": _log_odds, "probability": _probability}
    return Output(asked.target, kind, lambda logits: make[kind](logits, c, against))


@TASK_OUTPUTS.register("multilabel")
def _multilabel(asked: AskedOutput) -> Output:
    return _sigmoids(asked, "A multi-label")


@TASK_OUTPUTS.register("survival")
def _survival(asked: AskedOutput) -> Output:
    """A time bin, or the risk: not linear, so shared out along the path from zero logits."""
    risk, kind = asked.n_outputs, asked.kind
    if risk not in (asked.cls, asked.against):
        return _sigmoids(asked, "A survival")
    if kind not in (None, "risk") or asked.against is not None:
        what = "contrast" if asked.against is not None else kind
        raise UnsupportedError(f"The risk of a survival model has no {what}; name a time bin as the target.")
    return Output(asked.target, "risk", survival_risk, _shared_risk, scale=float(asked.n_outputs))


@TASK_OUTPUTS.register("cox")
def _cox(asked: AskedOutput) -> Output:
    kind, c = asked.kind_among(("risk", "logit"), "risk"), asked.cls
    return Output(asked.target, kind, lambda logits: logits[:, c])


@TASK_OUTPUTS.register("regression")
def _regression(asked: AskedOutput) -> Output:
    """The value minus its reference, or the difference of two such deviations; or the bare output."""
    kind, c, against = asked.kind_among(("value", "logit"), "value"), asked.cls, asked.against
    known = asked.references if kind == "value" else [0.0] * asked.n_outputs
    scale = None if kind == "value" else 1.0
    if against is None:
        return Output(asked.target, kind, lambda values: values[:, c] - known[c], scale=scale)
    apart = known[c] - known[against]
    return Output(asked.target, kind, lambda values: values[:, c] - values[:, against] - apart, scale=scale)


def _shared_risk(logits: Tensor) -> Tensor:
    slopes = risk_slopes(logits)
    moved = (slopes * (logits - logits.detach())).sum(dim=-1)  # zero; carries the slopes
    return survival_risk(logits.detach()) + moved


def _sigmoids(asked: AskedOutput, who: str) -> Output:
    """Outputs with a chance of their own each: labels, hazards."""
    kind, c, against = asked.kind_among(OUTPUTS), asked.cls, asked.against
    if kind == "contrastive":
        raise UnsupportedError(f"{who} model has no contrast between classes; use output='logit'.")
    if against is not None:
        return Output(asked.target, kind, lambda logits: _sigmoid_if(kind, logits[:, c] - logits[:, against]))
    return Output(asked.target, kind, lambda logits: _sigmoid_if(kind, logits[:, c]))


def _sigmoid_if(kind: str, odds: Tensor) -> Tensor:
    return torch.sigmoid(odds) if kind == "probability" else odds


def class_logits(logits: Tensor) -> Tensor:
    """Logits with a column per class: one z becomes (-z / 2, z / 2), whose softmax is its sigmoid."""
    return torch.cat([-0.5 * logits, 0.5 * logits], dim=-1) if logits.shape[-1] == 1 else logits


def _logit(logits: Tensor, c: int, against: int | None) -> Tensor:
    if against is not None:
        return _difference(logits, c, against)
    if logits.shape[-1] == 1:
        return logits[:, 0] if c == 1 else -logits[:, 0]
    return logits[:, c]


def _contrastive(logits: Tensor, c: int, against: int | None) -> Tensor:
    """Sum over the other classes of z_cc' p_cc', with constant weights p_cc' = softmax over c' of -z_cc'."""
    others = [i for i in range(class_logits(logits).shape[-1]) if i != c]
    z = torch.stack([_difference(logits, c, other) for other in others], dim=-1)
    weighted = z * F.softmax(-z, dim=-1).detach()
    return weighted.sum(dim=-1) if against is None else weighted[:, others.index(against)]


def _log_odds(logits: Tensor, c: int, against: int | None) -> Tensor:
    """log p / (1 - p)."""
    if against is not None:
        return _difference(logits, c, against)
    if logits.shape[-1] == 1:
        return _logit(logits, c, None)
    others = torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=-1)
    return logits[:, c] - torch.logsumexp(others, dim=-1)


def _probability(logits: Tensor, c: int, against: int | None) -> Tensor:
    if against is not None:
        return torch.sigmoid(_difference(logits, c, against))
    if logits.shape[-1] == 1:
        return torch.sigmoid(_logit(logits, c, None))
    return F.softmax(logits, dim=-1)[:, c]


def _difference(logits: Tensor, c: int, against: int) -> Tensor:
    full = class_logits(logits)
    return full[:, c] - full[:, against]
