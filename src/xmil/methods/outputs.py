"""The explained number as a function of the logits: logit, contrast, log-odds, probability."""

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

OUTPUTS = ("logit", "contrastive", "log_odds", "probability")


@dataclass(frozen=True)
class Output:
    """An explained number: `function` maps logits (b, c) to values (b,), differentiably."""

    target: Target
    kind: str
    function: Callable[[Tensor], Tensor]

    def __call__(self, logits: Tensor) -> Tensor:
        return self.function(logits)


@dataclass(frozen=True)
class Question:
    """What a user asks for: targets, resolved once the logits are known, and the kind of output."""

    targets: Sequence[Any] | None
    kind: str
    network: Network

    def __post_init__(self) -> None:
        if self.kind not in OUTPUTS:
            raise unknown_name("output", self.kind, OUTPUTS)

    def outputs(self, logits: Tensor) -> list[Output]:
        """The explained outputs for the logits (1, c) of a bag; without targets, every class."""
        n_classes = count_classes(logits, self.network)
        targets = range(n_classes) if self.targets is None else self.targets
        names, predicted = self.network.class_names, predicted_class(logits, self.network)
        resolved = [
            Target.of(t).resolve(n_classes=n_classes, predicted=predicted, class_names=names) for t in targets
        ]
        return [Output(t, self.kind, output_function(t, self.kind, self.network.task)) for t in resolved]


def count_classes(logits: Tensor, network: Network) -> int:
    """Classes that can be asked for: a single logit stands for two."""
    c = logits.shape[-1]
    return 2 if c == 1 and network.task == "classification" else c


def predicted_class(logits: Tensor, network: Network) -> int:
    """The class with the highest probability."""
    return int(class_logits(logits.detach(), network.task)[0].argmax())


def class_logits(logits: Tensor, task: str) -> Tensor:
    """Logits with a column per class: one z becomes (-z / 2, z / 2), whose softmax is its sigmoid."""
    if logits.shape[-1] == 1 and task == "classification":
        return torch.cat([-0.5 * logits, 0.5 * logits], dim=-1)
    return logits


def output_function(target: Target, kind: str, task: str) -> Callable[[Tensor], Tensor]:
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
    if task == "multilabel":
        raise UnsupportedError("A multi-label model has no contrast between classes; use output='logit'.")
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
    if task == "multilabel" or logits.shape[-1] == 1:
        return _logit(logits, c, None, task)
    others = torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=-1)
    return logits[:, c] - torch.logsumexp(others, dim=-1)


def _probability(logits: Tensor, c: int, against: int | None, task: str) -> Tensor:
    if task == "multilabel" and against is None:
        return torch.sigmoid(logits[:, c])
    if against is not None:
        return torch.sigmoid(_difference(logits, c, against, task))
    if logits.shape[-1] == 1:
        return torch.sigmoid(_logit(logits, c, None, task))
    return F.softmax(logits, dim=-1)[:, c]


def _difference(logits: Tensor, c: int, against: int, task: str) -> Tensor:
    full = class_logits(logits, task)
    return full[:, c] - full[:, against]
