"""A model as the methods see it: bags in, outputs out, whatever the module returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter
from xmil.models import MILModel
from xmil.models.tasks import TASKS, references, target_names

ForwardFunction = Callable[[nn.Module, Tensor], Tensor]
BUDGET_BYTES = 1 << 30  # what the temporaries of one batch of perturbed bags may take, about
_budget: ContextVar[int] = ContextVar("budget", default=BUDGET_BYTES)


@contextmanager
def memory_budget(n_bytes: int) -> Iterator[None]:
    """What the temporaries of one batch may take within the block, about: smaller batches, same scores."""
    if n_bytes < 1:
        raise bad_parameter("n_bytes", "memory_budget", "an int in the range [1, inf)", n_bytes)
    token = _budget.set(n_bytes)
    try:
        yield
    finally:
        _budget.reset(token)


class Network:
    """A module with the way to call it. Our models take batches of bags; others one bag at a time."""

    def __init__(self, module: nn.Module, forward: ForwardFunction | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"A model must be a torch.nn.Module. Got {type(module).__name__} instead.")
        self.module = module
        self._forward = forward
        self.model = module if isinstance(module, MILModel) and forward is None else None

    @property
    def name(self) -> str:
        """The registered name of a model of ours, or the class of another's."""
        spec = getattr(self.model, "spec", None)
        return spec.name if spec is not None else type(self.module).__name__

    @property
    def task(self) -> str:
        """What the outputs mean: the module's own `task`, where it is one we know, else classification."""
        task = getattr(self.module, "task", None)
        return task if isinstance(task, str) and task in TASKS else "classification"

    def references(self, n_outputs: int) -> list[float]:
        """The value of each output that a regression is explained against."""
        return references(None if self._spec("relative") else self._spec("reference"), n_outputs)

    def target_names(self, n_outputs: int) -> tuple[str, ...] | None:
        """Names of what can be explained, where they are known."""
        return target_names(self.task, n_outputs, self.class_names, self._spec("time_bins"))

    def _spec(self, name: str) -> Any:
        """A setting of a model's spec, or an attribute of another's module."""
        return getattr(getattr(self.module, "spec", self.module), name, None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a model of ours says belongs beside every explanation."""
        return self.module.warnings if isinstance(self.module, MILModel) else ()

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, where the model knows them."""
        names = getattr(self.module, "class_names", None)
        return tuple(map(str, names)) if isinstance(names, list | tuple) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (b, c) of bags (b, n, d)."""
        if self.model is not None:
            logits: Tensor = self.model(x)
            return logits
        return self._one(x) if len(x) == 1 else torch.cat([self._one(bag) for bag in x.split(1)])

    def embed(self, x: Tensor) -> Tensor:
        """What can be computed once for all perturbed bags: embedded instances, or the instances."""
        return x if self.model is None else self.model.embed(x)

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (b, c) of bags of embedded instances (b, n, e)."""
        if self.model is not None:
            return self.model.aggregate(h, mask)
        if mask is None:
            return self(h)
        return torch.cat([self._one(bag[row].unsqueeze(0)) for bag, row in zip(h, mask, strict=True)])

    def aggregate_batches(self, n_bags: int, n: int, make: Callable[[slice], Tensor]) -> Tensor:
        """Outputs (n_bags, c) of many bags of n embedded instances, made and run a batch at a time."""
        return torch.cat([self.aggregate(make(batch)) for batch in self.batches(n_bags, n)])

    def batches(self, n_bags: int, n: int) -> Iterator[slice]:
        """Slices of range(n_bags) whose temporaries fit the budget, for bags of n instances."""
        width = max((p.shape[0] for p in self.module.parameters() if p.ndim > 1), default=1)
        step = max(1, _budget.get() // (4 * 16 * max(1, n) * max(width, 1)))
        return (slice(start, min(start + step, n_bags)) for start in range(0, n_bags, step))

    def _one(self, x: Tensor) -> Tensor:
        out: Any = self.module(x) if self._forward is None else self._forward(self.module, x)
        if not isinstance(out, Tensor):
            raise InputError(
                f"{self.name} returned a {type(out).__name__}, not a tensor of logits; pass forward= to pick "
                "them, such as forward=lambda net, x: net(x)['logits']."
            )
        logits: Tensor = out.unsqueeze(0) if out.ndim == 1 else out
        if logits.ndim != 2 or logits.shape[0] != 1 or logits.shape[1] == 0:
            raise InputError(
                f"{self.name} must return logits (1, c) or (c,) for one bag. Got {tuple(out.shape)}."
            )
        return logits
