"""One forward pass under the rules, then a backward pass for each explained output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.lrp.composite import AffineRule, Composite
from xmil.lrp.ledger import Ledger
from xmil.lrp.operations import GRADIENT_IS_RULE, RULES, is_live, live_tensors, name_of, out_of_place

Forward = Callable[[Tensor], Tensor]
OutputFunction = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Flow:
    """A tensor and its gradient under the rules; their product is its relevance."""

    tensor: Tensor
    gradient: Tensor | None

    @property
    def features(self) -> Tensor:
        """Relevance of every number of the tensor."""
        return torch.zeros_like(self.tensor) if self.gradient is None else self.tensor * self.gradient

    @property
    def instances(self) -> Tensor:
        """Relevance summed over the last dimension."""
        if self.gradient is None:
            return self.tensor.new_zeros(self.tensor.shape[:-1])
        rows = zip(self.tensor.split(4096, dim=-2), self.gradient.split(4096, dim=-2), strict=True)
        return torch.cat([(tensor * gradient).sum(dim=-1) for tensor, gradient in rows], dim=-1)

    def against(self, baseline: Tensor) -> Tensor:
        """What instances that equal the baseline would get in these places: baseline . gradient, (b, n)."""
        if self.gradient is None:
            return self.tensor.new_zeros(self.tensor.shape[:-1])
        if baseline.ndim == 1:
            return self.gradient @ baseline
        return (self.gradient * baseline).sum(dim=-1)


@dataclass(frozen=True)
class Relevance:
    """Relevance of one explained output: at the input, at the asked layers, and what constants kept.

    `size` is the largest term of the output as a sum over logits and a constant: rounding goes with it, even
    where the terms cancel.
    """

    output: Tensor
    input: Flow
    layers: Mapping[str, Flow]
    shares: Mapping[str, float]
    size: float = 0.0


class Engine(TorchFunctionMode):
    """Sees every operation of a forward pass and puts the rules in place of gradients.

    The mode belongs to the thread that entered it; no module is changed.
    """

    def __init__(self, composite: Composite, module: nn.Module, *, own: bool = False) -> None:
        super().__init__()
        self.composite = composite
        self.module = module
        self.ledger = Ledger()
        self.gates: dict[int, Tensor] = {}  # outputs of sigmoids, kept alive so that ids stay theirs
        self._names = {_storage(p): name for name, p in module.named_parameters() if p.numel()}
        self._own = own
        composite.check_names(self._names.values())

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if not live_tensors(args) and not live_tensors(options):
            return func(*args, **options)
        name = name_of(func)
        if name == "__setitem__" and is_live(args[0]):
            self._need_own_tensors()
        plain = out_of_place(func, name, options)
        if plain is None:
            return self._run(func, name, args, options)
        self._need_own_tensors()
        options.pop("inplace", None)
        target, *others = args
        out = self._run(plain, name_of(plain), [target.clone(), *others], options)
        return target.copy_(out)

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operation under its rule; refused where it has none."""
        if name in RULES:
            return self._owned(RULES[name](self, func, *args, **kwargs))
        out = func(*args, **kwargs)
        if name not in GRADIENT_IS_RULE and live_tensors(out):
            return self.refuse(func)
        if self.gates and isinstance(out, Tensor) and id(args[0]) in self.gates:
            self.gates[id(out)] = out
        return out

    def _need_own_tensors(self) -> None:
        """An in-place operation: start over, with a tensor of its own for every ruled result."""
        if not self._own:
            raise _StartOver

    def _owned(self, out: Any) -> Any:
        """A ruled result that may be changed in place: what the rules hold on to is then another tensor."""
        if not self._own or not is_live(out):
            return out
        copy = out.clone()
        if id(out) in self.gates:
            self.gates[id(copy)] = copy
        return copy

    def name_of_parameter(self, tensor: Tensor) -> str | None:
        """The dotted name of the parameter that a tensor is, or is a view of."""
        return self._names.get(_storage(tensor))

    def rule_for(self, weight: Tensor | None) -> AffineRule:
        """The affine rule of a weight, by the name of the parameter it is or is a view of."""
        return self.composite.rule_for(None if weight is None else self.name_of_parameter(weight))

    def check_constant(self, operation: str, **parameters: Tensor | None) -> None:
        """Refuse an affine operation whose weights themselves depend on the input."""
        for role, value in parameters.items():
            if is_live(value) and isinstance(value, nn.Parameter):
                raise UnsupportedError(
                    f"The {role} of {operation!r} is a parameter outside the explained module, "
                    f"{self.where()}; put both into one nn.Module and explain that."
                )
            if is_live(value):
                raise UnsupportedError(
                    f"No LRP rule for {operation!r} with a {role} that depends on the input, {self.where()}. "
                    f"{_WAY_OUT}"
                )

    def refuse(self, function: Any, detail: str = "") -> NoReturn:
        """The error for an operation without a rule, with the module that called it."""
        what = f"{name_of(function)!r} {detail}".rstrip()
        raise UnsupportedError(f"No LRP rule for the operation {what}, {self.where()}. {_WAY_OUT}")

    def where(self) -> str:
        """The innermost module on the call stack, by its path in the explained module."""
        paths = {id(m): path for path, m in self.module.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths:
                path = paths[id(owner)]
                return (
                    f"in module {path!r} ({type(owner).__name__})" if path else f"in {type(owner).__name__}"
                )
            frame = frame.f_back  # type: ignore[assignment]
        return "outside any module"


class _StartOver(BaseException):
    """Not an error: the forward pass is run once more."""


_WAY_OUT = (
    "Register a rule with xmil.lrp.register_rule, or use a method that needs none: "
    "ig, gxi, grad2, single, one_removed."
)


class Trace:
    """A finished forward pass under the rules, ready for backward passes."""

    def __init__(self, engine: Engine, x: Tensor, logits: Tensor, layers: Mapping[str, Tensor]) -> None:
        self._engine = engine
        self._x = x
        self._logits = logits
        self._layers = layers

    @property
    def logits(self) -> Tensor:
        """The model's own outputs (b, c), detached."""
        return self._logits.detach()

    def relevance(self, output: OutputFunction, *, keep: bool = False) -> Relevance:
        """Relevance of output(logits), a tensor (b,); `keep` leaves the graph for another output."""
        ledger = self._engine.ledger
        ledger.clear()
        logits = self.logits.requires_grad_(True)
        with torch.enable_grad():
            value = output(logits)
            (seed,) = torch.autograd.grad(value.sum(), logits)
        wanted = [self._x, *self._layers.values()]
        gradients = torch.autograd.grad(self._logits, wanted, seed, retain_graph=keep, allow_unused=True)
        at = [Flow(tensor.detach(), gradient) for tensor, gradient in zip(wanted, gradients, strict=True)]
        shares = ledger.totals()
        terms = seed.double() * self.logits.double()
        constant = float((value.detach().double() - terms.sum(dim=-1)).sum())
        shares["bias"] += constant
        size = max(abs(constant), float(terms.abs().max()))
        return Relevance(value.detach(), at[0], dict(zip(self._layers, at[1:], strict=True)), shares, size)


def trace(
    forward: Forward,
    x: Tensor,
    *,
    module: nn.Module,
    composite: Composite | None = None,
    layers: Sequence[str] = (),
) -> Trace:
    """Run `forward` once under the rules; the module must be frozen (see `xmil.nn.frozen`).

    `layers` are dotted names of submodules whose outputs' relevance is wanted.
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"The compiled module {part.original_name} hides its operations. {_WAY_OUT}"
            )
    try:
        return _trace(forward, x, Engine(composite or Composite(), module), layers)
    except _StartOver:
        return _trace(forward, x, Engine(composite or Composite(), module, own=True), layers)


def _trace(forward: Forward, x: Tensor, engine: Engine, layers: Sequence[str]) -> Trace:
    x = x.detach().requires_grad_(True)
    captured: dict[str, Tensor] = {}
    with torch.enable_grad(), ExitStack() as stack:
        for name in layers:
            stack.enter_context(_capture(engine.module, name, captured))
        start = engine._owned(x)
        with engine:
            logits = forward(start)
    _check_graph(logits)
    return Trace(engine, x, logits, {name: captured[name] for name in layers})


def _check_graph(logits: Tensor) -> None:
    """Refuse an output without relevance, and custom autograd functions, which pass by every mode."""
    if not logits.requires_grad:
        raise UnsupportedError(
            "No relevance can reach the input: the output is constant under the rules, as a softmax or a "
            "detached tensor is, or was computed under no_grad. Let the model return logits, or pass "
            "forward= to pick them."
        )
    seen, stack = set(), [logits.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        cls = getattr(type(node), "_forward_cls", None)
        if cls is not None and not cls.__module__.startswith("xmil.lrp."):
            name = f"{cls.__module__}.{cls.__name__}"
            raise UnsupportedError(f"No LRP rule for the custom autograd function {name!r}. {_WAY_OUT}")
        stack.extend(following for following, _ in node.next_functions)


class _capture:  # noqa: N801  # reads as a verb
    """Keep the output of a submodule during a forward pass."""

    def __init__(self, module: nn.Module, name: str, into: dict[str, Tensor]) -> None:
        modules = dict(module.named_modules())
        if name not in modules:
            raise unknown_name("layer", name, (path for path in modules if path))
        self._module, self._name, self._into = modules[name], name, into

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self._keep)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        if self._name not in self._into and sys.exc_info()[0] is None:
            raise InputError(f"The layer {self._name!r} gave no tensor that depends on the input.")

    def _keep(self, _module: nn.Module, _args: Any, out: Any) -> None:
        if tensors := live_tensors(out):
            self._into[self._name] = tensors[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
