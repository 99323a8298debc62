"""The explained number as a function of the outputs: logit, contrast, log-odds, probability, value, risk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import UnsupportedError, unknown_name
from xmil.core.target import Target
from xmil.methods.network import Network
from xmil.models.tasks import CLASS_TASKS, count_targets
from xmil.nn.survival import risk_slopes, survival_risk

OUTPUTS = ("logit", "contrastive", "log_odds", "probability")  # of a class
OWN_OUTPUTS = ("value", "risk")  # of models without classes; every method takes them
SIGMOID_TASKS = ("multilabel", "survival")  # a chance of its own for each output
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Output:
    """An explained number: `function` maps logits (b, c) to values (b,), differentiably.

    `shared`, where the function is not linear, has the same values, and gradients that times the logits are
    what each logit adds to the value.
    """

    target: Target
    kind: str
    function: Function
    shared: Function | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)

    @property
    def to_share(self) -> Function:
        """The function for methods that share the value out among logits: LRP, instance logits."""
        return self.function if self.shared is None else self.shared


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
        for kind in (self.kind, self.default):
            if kind is not None and kind not in (*OUTPUTS, *OWN_OUTPUTS):
                raise unknown_name("output", kind, (*OUTPUTS, *OWN_OUTPUTS))

    def outputs(self, logits: Tensor) -> list[Output]:
        """The explained outputs for the logits (1, c) of a bag; without targets, every class."""
        c, task = logits.shape[-1], self.network.task
        n = count_targets(task, c)
        targets = range(n) if self.targets is None else self.targets
        names, predicted = self.network.target_names(c), predicted_target(logits, task)
        resolved = [
            Target.of(t).resolve(n_classes=n, predicted=predicted, class_names=names) for t in targets
        ]
        return [self._output(target, c) for target in resolved]

    def _output(self, target: Target, c: int) -> Output:
        task = self.network.task
        if task == "survival" and int(target) == c:
            return _risk_output(target, self.kind)
        kind = self.kind or _kind_of(task, self.default)
        _check_kind(kind, task)
        if task == "regression" and kind == "value":
            return Output(target, kind, _deviation(target, self.network.references(c)))
        return Output(target, kind, output_function(target, "logit" if kind == "risk" else kind, task))


def predicted_target(logits: Tensor, task: str) -> int:
    """The class with the highest probability; the value or the risk of a model without classes."""
    if task in CLASS_TASKS:
        return int(class_logits(logits.detach(), task)[0].argmax())
    return logits.shape[-1] if task == "survival" else 0


def _kind_of(task: str, default: str) -> str:
    return {"regression": "value", "cox": "risk"}.get(task, default)


def _check_kind(kind: str, task: str) -> None:
    """Refuse an output that a task does not have."""
    known = {"regression": ("value", "logit"), "cox": ("risk", "logit")}.get(task, OUTPUTS)
    if task in ("multilabel", "survival") and kind == "contrastive":
        what = "A multi-label" if task == "multilabel" else "A survival"
        raise UnsupportedError(f"{what} model has no contrast between classes; use output='logit'.")
    if kind not in known:
        outputs = " or ".join(repr(name) for name in known)
        raise UnsupportedError(f"A {task} model has no output {kind!r} here; use output={outputs}.")


def _risk_output(target: Target, kind: str | None) -> Output:
    """The risk of discrete hazards: not linear, so shared out along the path from zero logits."""
    if kind not in (None, "risk") or target.against is not None:
        asked = "contrast" if target.against is not None else kind
        raise UnsupportedError(f"The risk of a survival model has no {asked}; name a time bin as the target.")
    return Output(target, "risk", survival_risk, _shared_risk)


def _shared_risk(logits: Tensor) -> Tensor:
    slopes = risk_slopes(logits)
    moved = (slopes * (logits - logits.detach())).sum(dim=-1)  # zero; carries the slopes
    return survival_risk(logits.detach()) + moved


def _deviation(target: Target, reference: list[float]) -> Function:
    """The value minus its reference, or the difference of two such deviations."""
    c, against = int(target), None if target.against is None else int(target.against)
    if against is None:
        return lambda values: values[:, c] - reference[c]
    return lambda values: (values[:, c] - reference[c]) - (values[:, against] - reference[against])


def class_logits(logits: Tensor, task: str) -> Tensor:
    """Logits with a column per class: one z becomes (-z / 2, z / 2), whose softmax is its sigmoid."""
    if logits.shape[-1] == 1 and task == "classification":
        return torch.cat([-0.5 * logits, 0.5 * logits], dim=-1)
    return logits


def output_function(target: Target, kind: str, task: str) -> Function:
    """The function from logits (b, c) to the explained numbers (b,)."""
    c = int(target)
    against = None if target.against is None else int(target.against)
    make = {"logit": _logit, "contrastive": _contrastive, "log_odds": _log_odds, "probability": _probability}[
        kind
    ]
    return lambda logits: make(logits, c, against, task)


def _logit(logits: Tensor, c: int, against: int | None, task: str) -> Tensor:
    if against is not None:
        return _difference(logits, c, against, task)
    if logits.shape[-1] == 1 and task == "classification":
        return logits[:, 0] if c == 1 else -logits[:, 0]
    return logits[:, c]


def _contrastive(logits: Tensor, c: int, against: int | None, task: str) -> Tensor:
    """Sum over the other classes of z_cc' p_cc', with constant weights p_cc' = softmax over c' of -z_cc'."""
    others = [i for i in range(class_logits(logits, task).shape[-1]) if i != c]
    if not others:
        raise UnsupportedError("A model with one output has nothing to contrast; use output='logit'.")
    z = torch.stack([_difference(logits, c, other, task) for other in others], dim=-1)
    weighted = z * F.softmax(-z, dim=-1).detach()
    return weighted.sum(dim=-1) if against is None else weighted[:, others.index(against)]


def _log_odds(logits: Tensor, c: int, against: int | None, task: str) -> Tensor:
    """log p / (1 - p)."""
    if against is not None:
        return _difference(logits, c, against, task)
    if task in SIGMOID_TASKS or logits.shape[-1] == 1:
        return _logit(logits, c, None, task)
    others = torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=-1)
    return logits[:, c] - torch.logsumexp(others, dim=-1)


def _probability(logits: Tensor, c: int, against: int | None, task: str) -> Tensor:
    if task in SIGMOID_TASKS and against is None:
        return torch.sigmoid(logits[:, c])
    if against is not None:
        return torch.sigmoid(_difference(logits, c, against, task))
    if logits.shape[-1] == 1:
        return torch.sigmoid(_logit(logits, c, None, task))
    return F.softmax(logits, dim=-1)[:, c]


def _difference(logits: Tensor, c: int, against: int, task: str) -> Tensor:
    full = class_logits(logits, task)
    return full[:, c] - full[:, against]
