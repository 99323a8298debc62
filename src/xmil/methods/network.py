"""A model as the methods see it: bags in, outputs out, whatever the module returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, XmilError, bad_parameter
from xmil.core.task import TASKS
from xmil.lrp.marks import part_of_bag
from xmil.methods.calling import PLAIN, Way, forward_way
from xmil.methods.chances import ChanceWatch, as_log_odds, seeded
from xmil.methods.closures import Rows, values_by_row
from xmil.methods.companions import Companions, named_companions
from xmil.methods.declared import declared_names, declared_references
from xmil.methods.faults import sub_bag_fault
from xmil.methods.reading import Reading
from xmil.models import MILModel

ForwardFunction = Callable[..., Any]  # (net, x, *, companions by name)
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


@cache
def _own_companions(model: type[MILModel]) -> dict[str, bool]:
    """What the `aggregate` of a model of ours takes beside the instances."""
    return named_companions(model.aggregate)


class Network:
    """A module with the way to call it. Our models take batches of bags; others one bag at a time.

    Wherever a bag lacks instances of the full one, its `rows` (b, n) of the full bag come with it, -1 for
    padding, so that the companions (coordinates, adjacency, see `Companions`) that the user's `forward` or a
    model's `aggregate` names as keyword-only parameters stay beside their instances. `sub` runs sub-bags,
    `part` is the network for one of them as if it were the whole bag.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: ForwardFunction | None = None,
        *,
        companions: Companions | None = None,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"A model must be a torch.nn.Module. Got {type(module).__name__} instead.")
        self.module = module
        self.model = module if isinstance(module, MILModel) and forward is None else None
        self.companions = companions or Companions({}, n=None)
        self.by_user = forward is not None
        self.way = PLAIN if forward is None else forward_way(forward, named_companions(forward))
        self.reading = Reading()
        self.link = "none"  # how outputs become logits: as they are, their "source", or by a "log"
        self.draws = 0  # of a module that is random in eval mode; their mean output is taken
        self.params: dict[str, Any] = {}  # what an explanation records of all this
        self.remarks: tuple[str, ...] = ()  # found out in the trial
        self.whole: Tensor | None = None  # the bag of the trial
        self.copies = False  # whether the module changes what it is given
        self.fixed: XmilError | None = None  # why sub-bags are refused
        self._forward = forward
        self._own_names = {} if self.model is None else _own_companions(type(self.model))
        self._rows: Tensor | None = None  # of the full bag, where this is the network of a part

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
        value = None if self._spec("relative") else self._spec("reference")
        return declared_references(value, n_outputs, task=self.task, owner=self.name)

    def target_names(self, n_outputs: int) -> tuple[str, ...] | None:
        """Names of what can be explained, where they are known."""
        names = self._class_names(n_outputs)
        return TASKS[self.task].target_names(n_outputs, names, self._spec("time_bins"))

    def _spec(self, name: str) -> Any:
        """A setting of a model's spec, or an attribute of another's module."""
        return getattr(getattr(self.module, "spec", self.module), name, None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What belongs beside every explanation: the word of a model of ours, and what the trial found."""
        own = self.module.warnings if isinstance(self.module, MILModel) else ()
        return (*own, *self.remarks)

    def _class_names(self, n_outputs: int) -> tuple[str, ...] | None:
        """Names of the classes, where the model knows them; those of a spec are checked already."""
        if isinstance(self.module, MILModel) and hasattr(self.module, "spec"):
            return self.module.class_names
        names = getattr(self.module, "class_names", None)
        return declared_names(names, n_outputs, task=self.task, owner=self.name)

    @property
    def is_built_in(self) -> bool:
        """Whether the model is of this package: nothing but its tensors and settings decides what it does."""
        return self.model is not None and type(self.model).__module__.startswith("xmil.models.")

    @property
    def takes_companions(self) -> bool:
        """Whether outputs of a model of ours depend on more than features: coordinates, say."""
        return bool(self._own_names)

    def __call__(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Outputs (b, c) of bags (b, n, d); `rows` (b, n) where they are not the full bag."""
        if self.model is not None:
            logits: Tensor = self.model(x, **self._given(x, rows))
            return logits
        return self._one_by_one(x, rows)

    def embed(self, x: Tensor) -> Tensor:
        """What can be computed once for all perturbed bags: embedded instances, or the instances."""
        return x if self.model is None else self.model.embed(x)

    def aggregate(self, h: Tensor, mask: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Outputs (b, c) of bags of embedded instances (b, n, e), those outside the mask left out."""
        if self.model is not None:
            return self.model.aggregate(h, mask, **self._given(h, rows))
        if mask is None:
            return self._one_by_one(h, rows)
        full = torch.arange(h.shape[1], device=h.device).expand(h.shape[:2]) if rows is None else rows
        kept = zip(h, mask, full, strict=True)
        return torch.cat([self._one(bag[m].unsqueeze(0), r[m].unsqueeze(0)) for bag, m, r in kept])

    def subsets(self, h: Tensor, members: Tensor) -> Tensor:
        """Outputs (m, c) of parts of the full bag h (1, n, e), none of them empty; `members` is (m, n)."""
        if self.model is not None and not self._own_names:
            return self.model.subsets(h[0], members)  # in closed form, where the model has one
        return self.aggregate(h.expand(len(members), -1, -1), members)

    def attention_weights(self, h: Tensor) -> Tensor:
        """The weights (b, n, k) by which a model of ours joins the embedded instances of full bags."""
        assert self.model is not None  # noqa: S101  # others have no such weights
        return self.model.attention_weights(h, **self._given(h, None))

    def sub(self, h: Tensor, rows: Tensor) -> Tensor:
        """Outputs (b, c) of sub-bags of the full bag h (1, n, e), as `embed` gives it.

        `rows` (b, m) names the instances of each in order, padded with -1 (see `rows_of`); one without any
        is the empty bag. Runs in batches that fit the budget.
        """
        parts = [self._sub(h, rows[batch]) for batch in self.batches(len(rows), rows.shape[1])]
        return torch.cat(parts)

    def _sub(self, h: Tensor, rows: Tensor) -> Tensor:
        real = rows >= 0
        if bool(real.all()):
            return self.aggregate(h[0][rows], None, rows)
        some = real.any(dim=1)
        out = self.empty(h).repeat(len(rows), 1)
        if bool(some.any()):
            picked = rows[some]
            out[some] = self.aggregate(h[0][picked.clamp_min(0)], real[some], picked)
        return out

    def empty(self, h: Tensor) -> Tensor:
        """Outputs (1, c) of the empty bag: as many zero vectors as the full bag h (1, n, e) has instances."""
        if self.model is None:
            return self(torch.zeros_like(h))
        zero = self.model.embed(h.new_zeros(1, 1, self.model.in_dim))
        return self.aggregate(zero.expand(1, h.shape[1], -1))

    def with_companions(self, **others: Tensor) -> Network:
        """The network with other values in place of some companions."""
        twin = copy.copy(self)
        twin.companions = self.companions.replaced(others)
        return twin

    def part(self, rows: Tensor) -> Network:
        """The network for the bag of the given rows (m,) of the full one, in that order."""
        twin = copy.copy(self)
        twin._rows = rows if self._rows is None else self._rows[rows]
        return twin

    def aggregate_batches(self, n_bags: int, n: int, make: Callable[[slice], Tensor]) -> Tensor:
        """Outputs (n_bags, c) of many bags of n embedded instances, made and run a batch at a time."""
        return torch.cat([self.aggregate(make(batch)) for batch in self.batches(n_bags, n)])

    def batches(self, n_bags: int, n: int) -> Iterator[slice]:
        """Slices of range(n_bags) whose temporaries fit the budget, for bags of n instances."""
        width = max((p.shape[0] for p in self.module.parameters() if p.ndim > 1), default=1)
        step = max(1, _budget.get() // (4 * 16 * max(1, n) * max(width, 1)))
        return (slice(start, min(start + step, n_bags)) for start in range(0, n_bags, step))

    def _one_by_one(self, x: Tensor, rows: Tensor | None) -> Tensor:
        if len(x) == 1:
            return self._one(x, rows)
        each = [None] * len(x) if rows is None else rows.split(1)
        return torch.cat([self._one(bag, row) for bag, row in zip(x.split(1), each, strict=True)])

    def _given(self, x: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        """The companions that are named, beside the instances of bags (b, n, .)."""
        named = self.way.names if self.model is None else self._own_names
        if not named:
            return {}
        wanted = [name for name, must in named.items() if must or name in self.companions]
        asker = "forward" if self.by_user else self.name
        if (error := self.companions.lacking(wanted, asker)) is not None:
            raise error
        if not wanted:
            return {}
        at = self.rows(x, rows)
        return {name: part_of_bag(self.companions.given(name, at, x)) for name in wanted}

    def rows(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Rows of the full bag (b, m) for bags (b, m, .)."""
        n = self.companions.n or x.shape[1]
        whole = torch.arange(n, device=x.device) if self._rows is None else self._rows
        at = whole.expand(len(x), -1) if rows is None else torch.where(rows < 0, -1, whole[rows])
        if at.shape != x.shape[:2]:
            raise InputError(
                f"A bag of {x.shape[1]} instances does not say which of the {n} of the full one it holds; "
                "pass their rows."
            )
        return at

    def _one(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Logits (1, c) of one bag; of a sub-bag with the reason where it cannot be run."""
        if rows is None and self._rows is None:
            return self._drawn(x, rows)
        if self.fixed is not None:
            raise self.fixed
        try:
            return self._drawn(x, rows)
        except (XmilError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever a user's module raises
            raise sub_bag_fault(self, x.shape[1], error) from error

    def _drawn(self, x: Tensor, rows: Tensor | None) -> Tensor:
        if not self.draws:
            return self.logits(x, rows)
        draws = []
        for seed in range(self.draws):
            with seeded(seed):
                draws.append(self.logits(x, rows))
        return torch.stack(draws).mean(dim=0)

    def logits(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits (1, c) of one bag, from one pass."""
        if self.link != "source":
            out = self.reading(self.raw(x, rows))
            return as_log_odds(out, self.task) if self.link == "log" else out
        with ChanceWatch() as watch:
            out = self.reading(self.raw(x, rows))
        source = watch.source(out)
        return as_log_odds(out, self.task) if source is None else source.reshape(1, -1)

    def by_row(self, n: int) -> Rows:
        """What `forward`, or else the module, holds with a row for each of n instances."""
        return values_by_row(self._forward, self.module, n)

    def raw(self, x: Tensor, rows: Tensor | None = None) -> Any:
        """What the module returns for one bag."""
        return self.way.call(self.module, x.clone() if self.copies else x, self._given(x, rows))

    def tried(self, way: Way, x: Tensor) -> Any:
        """What the module returns for any bag, called in a way of its own."""
        same = x.shape[1] == self.companions.n
        wanted = [name for name, must in way.names.items() if must or name in self.companions]
        given = {k: self.companions.given(k, self.rows(x), x) for k in wanted} if same else {}
        return way.call(self.module, x, given)
