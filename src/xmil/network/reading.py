"""Reading what a module returns: finding the logits, and converting probabilities to logits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from xmil.core.errors import InputError
from xmil.core.task import TASKS

LOGITS = ("logits", "logit", "bag_logits", "bag_logit", "slide_logits", "wsi_logits")
Path = tuple[Any, ...]


class UnreadableError(InputError):
    """The returned value is not logits, or not certainly so."""


class AmbiguousError(UnreadableError):
    """Several returned tensors may be the logits."""


@dataclass(frozen=True)
class LogitsPath:
    """The place of the logits in a returned value.

    >>> str(LogitsPath((0, "logits"))), LogitsPath((1,))((0, torch.zeros(3))).shape
    ("[0]['logits']", torch.Size([1, 3]))
    """

    path: Path = ()

    def __str__(self) -> str:
        return "".join(f".{key[1:]}" if _is_attribute(key) else f"[{key!r}]" for key in self.path)

    def __call__(self, raw: Any) -> Tensor:
        for key in self.path:
            raw = getattr(raw, key[1:]) if _is_attribute(key) else raw[key]
        logits = as_logits(raw)
        if logits is None:
            raise _no_logits(raw)
        return logits


def as_logits(value: Any) -> Tensor | None:
    """Convert a tensor (c,), (1, ..., 1, c) or () to logits (1, c); None for anything else."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
        return None
    if value.ndim == 2 and value.shape[0] == 1:
        return value
    if value.ndim <= 1 or value.shape[:-1].numel() == 1:
        return value.reshape(1, -1)
    return None


def find_logits(raw: Any, n: int, *, name: str, other: Any = None) -> LogitsPath:
    """Find the one tensor that can be the logits of a bag of n instances; refuse several.

    `other` is the returned value for a bag of another size: tensors with another shape there have a number
    per instance. Without it, tensors with n numbers count as such.
    """
    if isinstance(raw, Tensor):
        if as_logits(raw) is None:
            raise _no_logits(raw, name)
        return LogitsPath()
    leaves = [(path, logits) for path, value in _leaves(raw) if (logits := as_logits(value)) is not None]
    named = [path for path, _ in leaves if path and str(path[-1]).lstrip(".").lower() in LOGITS]
    if len(named) == 1:
        return LogitsPath(named[0])
    if (hazards := find_hazards(raw)) is not None:
        return hazards
    # leave out numbers per instance, losses next to longer tensors, and tensors computed from another one
    shapes = {path: value.shape for path, value in _leaves(other)}
    own_leaves = dict(_leaves(raw))

    def is_per_instance(path: Path, value: Tensor) -> bool:
        return shapes[path] != own_leaves[path].shape if path in shapes else value.shape[1] == n

    leaves = [(path, value) for path, value in leaves if not is_per_instance(path, value)] or leaves
    longer = [(path, value) for path, value in leaves if value.shape[1] > 1]
    losses = all("loss" in str(path[-1]).lower() for path, value in leaves if value.shape[1] == 1)
    leaves = longer if longer and losses else leaves
    candidates = [
        (path, value)
        for i, (path, value) in enumerate(leaves)
        if not any(_follows(value, other, later=j < i) for j, (_, other) in enumerate(leaves) if j != i)
    ]
    if len(candidates) == 1:
        return LogitsPath(candidates[0][0])
    if not candidates:
        raise _no_logits(raw, name)
    places = ", ".join(f"{LogitsPath(path)} of shape {tuple(value.shape)}" for path, value in candidates)
    raise AmbiguousError(
        f"{name} returned a {type(raw).__name__} in which several tensors may be the logits: {places}; pass "
        f"forward= to select them, such as forward=lambda net, x: net(x){LogitsPath(candidates[0][0])}."
    )


def find_hazards(raw: Any) -> LogitsPath | None:
    """Find hazards (1, t) that are returned with their survival function, prod(1 - hazards)."""
    leaves = [(path, logits) for path, value in _leaves(raw) if (logits := as_logits(value)) is not None]
    for path, hazards in leaves:
        if hazards.shape[1] > 1 and bool(((hazards > 0) & (hazards < 1)).all()):
            survival = torch.cumprod(1 - hazards, dim=1)
            if any(other.shape == survival.shape and torch.allclose(other, survival) for _, other in leaves):
                return LogitsPath(path)
    return None


def _leaves(raw: Any, path: Path = (), depth: int = 0) -> Iterator[tuple[Path, Any]]:
    """Yield tensors in tuples, lists, dicts and plain objects, with their places."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(raw, Tensor):
        yield path, raw
    elif isinstance(raw, Mapping):
        items = raw.items()
    elif isinstance(raw, tuple) and hasattr(raw, "_fields"):
        items = [(f".{field}", getattr(raw, field)) for field in raw._fields]
    elif isinstance(raw, list | tuple):
        items = enumerate(raw)
    elif hasattr(raw, "__dict__") and not isinstance(raw, type):
        items = [(f".{key}", value) for key, value in vars(raw).items()]
    for key, value in items if depth < 4 else ():
        yield from _leaves(value, (*path, key), depth + 1)


def _is_attribute(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(".")


def _follows(value: Tensor, source: Tensor, *, later: bool) -> bool:
    """Whether a tensor is a copy of an earlier one, or its probabilities or decisions."""
    if value.shape != source.shape:
        return False
    if later and torch.equal(value, source):
        return True
    if torch.equal(value, source) or bool(((source == 0) | (source == 1)).all()):
        return False
    results = (source.softmax(dim=-1), source.sigmoid(), source.log_softmax(dim=-1))
    decisions = (source >= 0.5).to(source)
    return any(torch.allclose(value, result, atol=1e-6) for result in (*results, decisions))


def _no_logits(raw: Any, name: str = "The model") -> UnreadableError:
    if isinstance(raw, Tensor):
        shape = tuple(raw.shape)
        return UnreadableError(f"{name} must return logits (1, c) or (c,) for one bag. Got {shape}.")
    return UnreadableError(
        f"{name} returned a {type(raw).__name__} without a tensor of logits (1, c) or (c,); pass forward= to "
        "select them, such as forward=lambda net, x: net(x)['logits']."
    )


RETURNS = ("logit", "probability")
MOST_LOGITS = 1 << 16  # no model has more outputs
_LOGARITHMS = ("log_softmax", "special_log_softmax", "_log_softmax")
_SQUASH = ("softmax", "sigmoid", "sigmoid_", "special_expit", "expit")
_SAME = (
    "squeeze", "unsqueeze", "view", "reshape", "flatten", "__getitem__", "float", "double", "to", "clone",
    "contiguous", "type_as",
)  # fmt: skip
_SIGNED = ("tanh", "erf", "special_erf")  # plus one, they are probabilities times two
_KEEP_PROBABILITIES = (
    "clamp", "clip", "clamp_min", "clamp_max", "cat", "concat", "stack", "where", "lerp",
    "mean", "sum", "prod", "amax", "amin", "max", "min", "maximum", "minimum", "topk", "sort", "kthvalue",
    "median", "quantile", "gather", "index_select", "take_along_dim", "masked_select", "split", "chunk",
    "unbind", "transpose", "permute", "movedim", "rsub", "__rsub__", "sub", "__sub__", "add", "__add__",
    "__radd__", "mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "pow", "__pow__", "sqrt",
    "square", "dot", "matmul", "__matmul__", "bmm", "mm", "mv", "einsum",
)  # fmt: skip  # from probabilities alone these make probabilities, if the result is within [0, 1]


class Watch(TorchFunctionMode):
    """Run every operation of a pass unchanged, and show it to `see`."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        out = func(*args, **options)
        self.see(func, args, options, out)
        return out

    @abstractmethod
    def see(self, function: Any, args: Sequence[Any], options: dict[str, Any], out: Any) -> None:
        """Inspect an operation and its result."""


class ProbabilityWatch(Watch):
    """Track which tensors are probabilities, by their computation, and the logits behind them."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: Any = WeakIdKeyDictionary()
        self._signed: Any = WeakIdKeyDictionary()
        self._logs: Any = WeakIdKeyDictionary()

    def see(self, function: Any, args: Sequence[Any], options: dict[str, Any], out: Any) -> None:
        name = getattr(function, "__name__", "")
        first, rest = args[0] if args else options.get("input"), args[1:]
        for part in out if isinstance(out, list | tuple) else (out,):
            if not isinstance(part, Tensor):
                continue
            follows = isinstance(first, Tensor) and first in self._sources
            if name in _LOGARITHMS or (name in _SAME and isinstance(first, Tensor) and first in self._logs):
                self._logs[part] = None
            if name in _SQUASH and isinstance(first, Tensor):
                small = first.numel() <= MOST_LOGITS and not name.endswith("_")
                self._sources[part] = first if small else None  # attention should not stay in memory
            elif name in _SAME and follows:
                source = self._sources[first]
                self._sources[part] = None if source is None else function(source, *rest, **options)
            elif name in ("clamp", "clip") and follows:
                self._sources[part] = self._sources[first] if _to_unit(rest, options) else None
            elif name in _SIGNED:
                self._signed[part] = None
            elif self._makes_probabilities(name, first, rest, options):
                self._sources[part] = None

    def _makes_probabilities(self, name: str, first: Any, rest: Any, options: Any) -> bool:
        """Whether an operation other than a sigmoid or softmax makes probabilities."""
        if name == "hardsigmoid" or (name in ("clamp", "clip") and _to_unit(rest, options)):
            return True
        if name in ("add", "__add__", "__radd__") and isinstance(first, Tensor) and first in self._signed:
            return [*rest] == [1]
        parts = list(first) if isinstance(first, list | tuple) else [first]
        tensors = [t for t in (*parts, *rest) if isinstance(t, Tensor)]
        return name in _KEEP_PROBABILITIES and bool(tensors) and all(t in self._sources for t in tensors)

    def is_probability(self, out: Tensor) -> bool:
        """Whether a tensor was only computed from softmaxes and sigmoids."""
        return out in self._sources

    def is_log_probability(self, out: Tensor) -> bool:
        """Whether a tensor is a log_softmax."""
        return out in self._logs

    def source(self, out: Tensor) -> Tensor | None:
        """The logits of a tensor that is directly their softmax or sigmoid, else None."""
        source: Tensor | None = self._sources.get(out)
        return source


def _to_unit(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether the bounds of a clamp are close to 0 and 1."""
    bounds = [*arguments, *(options[name] for name in ("min", "max") if name in options)]
    if len(bounds) != 2 or not all(isinstance(bound, int | float) for bound in bounds):
        return False
    return bool(0 <= bounds[0] < 0.01 and 0.99 < bounds[1] <= 1)


def look_like_probabilities(p: Tensor, *, is_computed: bool) -> bool:
    """Whether outputs (1, c) are probabilities: within [0, 1], and computed as such or adding up to one."""
    if not bool(((p >= 0) & (p <= 1)).all()):
        return False
    return is_computed or (p.shape[1] > 1 and abs(float(p.double().sum()) - 1) < 1e-4)


def check_probabilities(p: Tensor, task: str, name: str) -> None:
    """Refuse outputs that cannot be probabilities of the task."""
    if not bool(((p >= -1e-6) & (p <= 1 + 1e-6)).all()):
        low, high = float(p.min()), float(p.max())
        raise InputError(
            f"The outputs of {name} are {low:.3g} to {high:.3g}, not probabilities; leave out `returns=`."
        )
    total = float(p.double().sum())
    if TASKS[task].link == "softmax" and p.shape[1] > 1 and abs(total - 1) > 1e-3:
        raise InputError(
            f"The probabilities of {name} add up to {total:.4g}, not to 1: for a sigmoid per class set the "
            "module's attribute task = 'multilabel', for the hazards of time bins task = 'survival'."
        )


def to_log_odds(p: Tensor, task: str) -> Tensor:
    """Convert probabilities to logits (1, c): by the sigmoid for one output or separate ones, else softmax.

    >>> to_log_odds(torch.tensor([[0.2, 0.8]]), "classification").softmax(dim=-1)
    tensor([[0.2000, 0.8000]])
    """
    tiny = torch.finfo(p.dtype).eps
    if p.shape[1] == 1 or TASKS[task].link == "sigmoid":
        inner = p.clamp(tiny, 1 - tiny)
        return inner.log() - (1 - inner).log()
    return p.clamp_min(tiny).log()


def to_probabilities(logits: Tensor, task: str) -> Tensor:
    """Convert logits (1, c) to probabilities."""
    if logits.shape[1] == 1 or TASKS[task].link == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1)
