"""Run one forward pass under the rules, then a backward pass for each explained output.

The engine is a torch function mode that sees every operation of the forward pass and replaces its gradient.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from traceback import walk_stack
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.lrp.marks import CONSTANT, CUT, GATE, LIVE, Marks, recognise, storage_of, tensors_in
from xmil.lrp.operations import (
    CARRIES_GATES,
    FUNCTION_RULES,
    GRADIENT_IS_RULE,
    LEAVES_TORCH,
    PRODUCTS,
    READS_NUMBERS,
    RULES,
    VALUES_FROM_FIRST,
    AffineRule,
    Composite,
    is_live,
    is_rule,
    live_tensors,
    name_of,
    no_values,
    out_of_place,
    positional,
)
from xmil.lrp.values import (
    ELEMENTWISE,
    Activations,
    Entry,
    Flow,
    Ledger,
    Recorder,
    ReferencePass,
    Secants,
    accounted,
    message_of,
    product_sum,
    without_rule,
)

NO_RULES_NEEDED = "use a method that needs none: ig, gxi, grad2, one_added, single, one_removed."
WAY_OUT = f"Register a rule with xmil.lrp.register_rule, or {NO_RULES_NEEDED}"
COMPARE = "a method that compares outputs: one_added, single, one_removed, shapley."
INT8 = f"int8 numbers have no gradient: explain the model in float32, or use {COMPARE}"
NAMED_CUTS = 3  # how many places a warning lists


class Engine(TorchFunctionMode):
    """Mode that sees every operation of a forward pass and replaces gradients by rules.

    The mode belongs to the thread that entered it; no module is changed.
    """

    def __init__(
        self,
        composite: Composite,
        module: nn.Module,
        *,
        own: bool = False,
        activations: Activations | None = None,
    ) -> None:
        super().__init__()
        self.activations = activations
        self.composite = composite
        self.module = module
        self.ledger = Ledger()
        self.marks = Marks(module)
        self.unseen = UnseenNodes()
        self.start: Tensor | None = None  # the explained input, if layers of it may be entries
        self.entries: list[Entry] = []
        self.cuts: list[str] = []  # where constants that depend on the input were taken as values
        self._names = {storage_of(p): name for name, p in module.named_parameters() if p.numel()}
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
        if (name := name_of(func)) in HOOKS:  # gradients under the rules would mislead them
            return HOOKS[name]()
        check_transforms(args)
        depends = max(self.marks.survey(args), self.marks.survey(options))
        if depends == CONSTANT:
            out = func(*args, **options)
            self.marks.note_constants(out, [*args, *options.values()])
            return out
        if depends == LIVE and is_foreign(func, name):
            with self:
                return without_overrides(func)(*args, **options)
        if depends == LIVE:
            with self.unseen.during(name), without_recomputing():
                out = self._ruled(func, name, *positional(name, args, options))
        else:
            out = func(*args, **options)
        self._note(name, args, out)
        return out

    def _ruled(self, func: Any, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run an operation under its rule; one that works in place runs on a copy, which is written back."""
        if name == "__setitem__" and is_live(args[0]):
            self._need_own_tensors()
        plain = out_of_place(func, name, options)
        if plain is None:
            return self._run(func, name, args, options)
        self._need_own_tensors()
        options.pop("inplace", None)
        target, *rest = args
        before = target.clone()
        self.marks.follow(target, before)
        out = self._run(plain, name_of(plain), [before, *rest], options)
        return RULES["copy_"](self, Tensor.copy_, target, out)

    def _run(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation under its rule; without a rule it fails once relevance reaches it."""
        try:
            out = self._by_rule(func, name, args, kwargs)
        except _NoRuleError as error:
            out = without_rule(func(*args, **kwargs), str(error))
        if name in CARRIES_GATES and not (name == "div" and self.marks.of(out) == GATE):
            self.marks.carry(self._gates_of(name, args, kwargs), out)
        if is_live(out) and not kwargs:
            recognise(self.marks, name, args, out)
        return out

    def _by_rule(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.activations is not None and name in ELEMENTWISE:
            ruled = self.activations(self.ledger, func, name, args, kwargs)
            if ruled is not None:
                return ruled
        if name in RULES:
            return self.own(RULES[name](self, func, *args, **kwargs))
        out = func(*args, **kwargs)
        if name not in GRADIENT_IS_RULE and live_tensors(out):
            if name.endswith("_") and not name.startswith("__"):  # its argument has changed already
                raise UnsupportedError(self._no_rule(func, ""))
            return without_rule(out, self._no_rule(func, ""))
        return out

    def _gates_of(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The live tensors that must be gates for the result to be one."""
        if name == "div":
            return live_tensors(args[0])
        if name in PRODUCTS:
            constants = [tensor for tensor in tensors_in(list(args)) if not is_live(tensor)]
            if any(self.name_of_parameter(tensor) is not None for tensor in constants):
                return []
        return live_tensors(args) + live_tensors(kwargs)

    def _note(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Mark constants that were computed from the input."""
        if name in READS_NUMBERS:
            self.marks.put_number(out)
            return
        if name in LEAVES_TORCH:
            self.marks.has_left_torch |= args[0].is_floating_point()
            return
        values = args[1:] if no_values(name) else args[:1]
        if (no_values(name) or name in VALUES_FROM_FIRST) and self.marks.survey(values) == CONSTANT:
            self.marks.note_constants(out, args)
            return
        if name == "broadcast_tensors":
            sources = args[0] if isinstance(args[0], list | tuple) else args
            for source, tensor in zip(sources, out, strict=True):
                self.marks.follow(source, tensor)
            return
        for tensor in tensors_in(out):
            if not tensor.requires_grad:
                self.marks.put(tensor, CUT)
        if name == "__setitem__" or (name.endswith("_") and not name.startswith("__")):
            for written in (args[0], args[0]._base):
                if isinstance(written, Tensor) and not written.requires_grad:
                    self.marks.put(written, CUT)

    def _need_own_tensors(self) -> None:
        """Restart the pass for an in-place operation, with every ruled result in its own tensor."""
        if not self._own:
            raise StartOver

    def own(self, out: Any) -> Any:
        """Copy a ruled result if the pass changes tensors in place."""
        if not self._own or not is_live(out):
            return out
        copy = out.clone()
        self.marks.follow(out, copy)
        return copy

    def name_of_parameter(self, tensor: Tensor) -> str | None:
        """The dotted name of the parameter that a tensor is, or is a view of."""
        return self._names.get(storage_of(tensor))

    def rule_for(self, weight: Tensor | None) -> AffineRule:
        """The affine rule of a weight, by the name of the parameter it is or is a view of."""
        return self.composite.rule_for(None if weight is None else self.name_of_parameter(weight))

    def share_of(self, constant: Any, otherwise: str = "bias") -> str:
        """The share that gets a constant term's relevance: `cut` if the term depends on the input."""
        if is_live(constant) or not self.marks.depends(constant):
            return otherwise
        if len(self.cuts) < NAMED_CUTS and (place := self.where()) not in self.cuts:
            self.cuts.append(place)
        return CUT

    def keep(self, constant: Any, out: Tensor, *, share: str = "bias") -> None:
        """Book what a constant term of `out` will receive, to `share` or to `cut`."""
        self.ledger.keep(self.share_of(constant, share), constant, out)

    def keep_constants(
        self, out: Tensor, compute: Callable[..., Tensor], *values: Any, share: str = "bias"
    ) -> Tensor:
        """Book what the constants among `values` add to `out` = compute(*values), linear in all of them."""
        shares = [
            None if is_live(v) or (not isinstance(v, Tensor) and v == 0) else self.share_of(v, share)
            for v in values
        ]
        with torch.no_grad():
            for name in {own for own in shares if own is not None}:
                terms = [
                    v if own == name else torch.zeros_like(v) if isinstance(v, Tensor) else 0.0
                    for v, own in zip(values, shares, strict=True)
                ]
                self.ledger.keep(name, compute(*terms), out)
        return out

    def accounted(self, constant: Tensor, anchor: Tensor, *, share: str = "bias") -> Tensor:
        """Make a constant a live tensor that books its own relevance; `anchor` is another live argument."""
        share = self.share_of(constant, share)
        return accounted(constant, anchor, lambda g: self.ledger.add(share, product_sum(constant, g)))

    def without_gates(self, factors: Sequence[Any]) -> list[Any]:
        """Detach the gates and weights among the factors of a product, if another factor is live."""
        as_constants = {"weight", "gate"} if self.composite.gates == "signal" else {"weight"}
        live = [factor for factor in factors if is_live(factor)]
        if all(self.marks.of(factor) in as_constants for factor in live):
            return list(factors)
        return [f.detach() if is_live(f) and self.marks.of(f) in as_constants else f for f in factors]

    def enter(self, linear: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run a linear layer; one on the explained input becomes an entry, where relevance may end."""
        live = torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)
        if x is not self.start or weight.ndim != 2 or not live:
            return linear(x, weight, bias)
        with torch.no_grad():
            out = linear(x, weight, None)
        self.entries.append(Entry(out.requires_grad_(True), weight.detach()))
        return out if bias is None else out + bias

    @contextmanager
    def rerun(self, activations: Activations | None) -> Iterator[None]:
        """Apply the rules to a piece of the pass that the backward pass runs again."""
        previous, self.activations = self.activations, activations
        try:
            with self:
                yield
        finally:
            self.activations = previous

    def check_constant(self, operation: str, **parameters: Tensor | None) -> None:
        """Refuse an affine operation whose weights themselves depend on the input."""
        for role, value in parameters.items():
            if is_live(value) and isinstance(value, nn.Parameter):
                raise UnsupportedError(
                    f"The {role} of {operation!r} is a parameter outside the explained module, "
                    f"{self.where()}; put both into one nn.Module and explain that."
                )
            if is_live(value):
                self.refuse(operation, f"with a {role} that depends on the input")

    def refuse(self, function: Any, detail: str = "") -> NoReturn:
        """Leave an operation without a rule: the pass goes on and fails only if relevance comes this way."""
        raise _NoRuleError(self._no_rule(function, detail))

    def _no_rule(self, function: Any, detail: str) -> str:
        name = function if isinstance(function, str) else name_of(function)
        what = f"{name!r} {detail}".rstrip()
        quantised = str(function).startswith("quantized.")
        return f"No LRP rule for the operation {what}, {self.where()}. {INT8 if quantised else WAY_OUT}"

    @cached_property
    def _paths(self) -> dict[int, str]:
        return {id(m): path for path, m in self.module.named_modules()}

    def where(self) -> str:
        """The innermost module on the call stack, by its path in the explained module."""
        owner = innermost_module(self._paths)
        if owner is None:
            return "outside any module"
        path, kind = self._paths[id(owner)], type(owner).__name__
        return f"in module {path!r} ({kind})" if path else f"in {kind}"


HOOKS: dict[str, Callable[[], Any]] = {  # on tensors during a forward pass, and what registering them returns
    "register_hook": lambda: RemovableHandle(OrderedDict()),
    "register_post_accumulate_grad_hook": lambda: RemovableHandle(OrderedDict()),
    "retain_grad": lambda: None,
}
_OVERRIDES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def is_foreign(function: Any, name: str) -> bool:
    """Whether a function outside torch asked for overrides, as copies of torch's code do.

    It is not torch's operation of that name, so only a rule that a user registered applies to it.
    """
    if not isinstance(function, FunctionType) or function.__module__.startswith(("torch.", "xmil.")):
        return False
    return name not in RULES or RULES[name].__module__.startswith("xmil.")


def without_overrides(function: FunctionType) -> FunctionType:
    """Copy a function without its request for overrides, so that the mode sees each operation inside."""
    names = function.__globals__ | dict.fromkeys(_OVERRIDES, lambda *_: False)
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def innermost_module(paths: Mapping[int, str]) -> nn.Module | None:
    """The innermost module on the call stack whose id is among the keys of `paths`."""
    owners = (frame.f_locals.get("self") for frame, _ in walk_stack(sys._getframe(1)))
    return next((owner for owner in owners if isinstance(owner, nn.Module) and id(owner) in paths), None)


class StartOver(BaseException):
    """Restart the forward pass; not an error."""


class _NoRuleError(UnsupportedError):
    """A rule that cannot take its arguments."""


_transforms = torch._C._functorch.peek_interpreter_stack
_sequence = torch._C._autograd._get_sequence_nr
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NO_HOOKS = nullcontext()


class UnseenNodes:
    """Finds the nodes of autograd's graph whose operations the engine did not see.

    Autograd numbers its nodes per thread in order of creation: a node created between two operations of the
    engine comes from one that it did not see, such as an operation in a `torch.jit` function.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._after: list[str] = []
        self._name = ""
        self.start()

    def start(self) -> None:
        """Ignore all nodes created so far."""
        self._last = _sequence()
        self._previous = "the start"

    def during(self, name: str) -> UnseenNodes:
        self._name = name
        return self

    def __enter__(self) -> None:
        if self._depth == 0:
            self.update()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._last, self._previous = _sequence(), self._name

    def update(self) -> None:
        """Note the nodes created since the last operation ended."""
        now = _sequence()
        if now != self._last:
            self._starts.append(self._last)
            self._ends.append(now)
            self._after.append(self._previous)

    def operation_before(self, node: Any) -> str | None:
        """The operation that ran before an unseen node; None if the engine saw the node's operation."""
        number = node._sequence_nr()
        i = bisect_right(self._starts, number) - 1
        return self._after[i] if i >= 0 and number < self._ends[i] else None


def check_transforms(args: Sequence[Any]) -> None:
    """Refuse `torch.func` transforms of live tensors: their parts look like constants."""
    if _transforms() is None:
        return
    for value in args:
        while isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            value = torch._C._functorch.get_unwrapped(value)
            if value.requires_grad:
                raise UnsupportedError(
                    "LRP cannot see into torch.func transforms such as vmap; call the function on the whole "
                    "batch, or use a method that needs no rules: ig, gxi, grad2, single, one_removed."
                )


def without_recomputing() -> AbstractContextManager[Any]:
    """Make `torch.utils.checkpoint` store tensors: recomputing them would bypass the rules."""
    hooks = _saving_hooks(True)
    if hooks is None or not getattr(hooks[0], "__module__", "").startswith("torch.utils.checkpoint"):
        return _NO_HOOKS
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


Forward = Callable[[Tensor], Tensor]  # bags to logits, or logits to an output
LINEAR = 1e-5  # an output whose remainder is relatively smaller is linear up to rounding


@dataclass(frozen=True)
class Relevance:
    """Relevance of one explained output: at the input, at the named layers, and what constants keep.

    `size` is the largest term of the output as a sum over logits and a constant; rounding errors scale with
    it even if the terms cancel. `cuts` names the first places that treat a value that depends on the input
    as a constant.
    """

    output: Tensor
    input: Flow
    layers: Mapping[str, Flow]
    shares: Mapping[str, float]
    size: float = 0.0
    cuts: tuple[str, ...] = ()


class Trace:
    """A finished forward pass under the rules, ready for backward passes."""

    def __init__(self, engine: Engine, x: Tensor, logits: Tensor, layers: Mapping[str, Tensor]) -> None:
        self._engine = engine
        self._x = x
        self._logits = logits
        self._layers = layers
        self._entries = tuple(engine.entries)

    @property
    def matched(self) -> bool:
        """Whether this pass ran the same activations as its reference pass."""
        activations = self._engine.activations
        return not isinstance(activations, Secants) or activations.matched

    @property
    def logits(self) -> Tensor:
        """The model's own outputs (b, c), detached; on any device."""
        return self._logits.detach()

    def backward(self, seed: Tensor, *, keep: bool) -> list[Tensor | None]:
        """Gradients of the logits weighted by `seed`, under the rules; clears the ledger first."""
        self._engine.ledger.clear()
        ends = [self._x, *(entry.out for entry in self._entries), *self._layers.values()]
        return list(torch.autograd.grad(self._logits, ends, seed, retain_graph=keep, allow_unused=True))

    def forget_module(self) -> None:
        """Drop the module, so that a stored trace does not keep it alive."""
        self._engine.module = nn.Module()

    def relevance(self, output: Forward, *, keep: bool = False) -> Relevance:
        """Relevance of output(logits), a tensor (b,); `keep` leaves the graph for another output."""
        logits = self.logits.requires_grad_(True)
        with torch.enable_grad():
            value = output(logits)
            (seed,) = torch.autograd.grad(value.sum(), logits)
        direct, *gradients = self.backward(seed.to(self._logits.device), keep=keep)
        by_entry = [*zip(self._entries, gradients, strict=False)]
        at_input = Flow(self._x.detach(), direct, by_entry)
        terms = seed.double() * logits.detach().double()
        difference = (value.detach().double() - terms.sum(dim=-1)).sum()
        with torch.no_grad():
            empty = output(torch.zeros_like(logits)).double().sum()
        shares, (remainder, largest, at_zero) = self._engine.ledger.totals(
            difference, terms.abs().max(), empty
        )
        size = max(abs(remainder), largest)
        # the part of the remainder that depends on the logits: zero for a linear output
        nonlinear = remainder - at_zero if abs(remainder - at_zero) > LINEAR * size else 0.0
        shares["cut"] += nonlinear
        shares["bias"] += remainder - nonlinear
        named = zip(self._layers.items(), gradients[len(by_entry) :], strict=True)
        layers = {name: Flow(tensor.detach(), gradient) for (name, tensor), gradient in named}
        return Relevance(value.detach(), at_input, layers, shares, size, tuple(self._engine.cuts))


def trace(
    forward: Forward,
    x: Tensor,
    *,
    module: nn.Module,
    composite: Composite | None = None,
    layers: Sequence[str] = (),
    against: ReferencePass | None = None,
) -> Trace:
    """Run `forward` once under the rules; the module must be frozen (see `xmil.network.frozen`).

    `layers` are dotted names of submodules; the trace gives the relevance of their outputs too. With
    `against`, a pass from `record`, activations are measured from that pass (see `Secants`).
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"The compiled module {part.original_name} hides its operations. {WAY_OUT}"
            )
    engine = partial(Engine, composite or Composite(), module)
    return _with_engine(forward, x, engine, lambda: None if against is None else Secants(against), layers)


def record(
    forward: Forward, x: Tensor, *, module: nn.Module, composite: Composite | None = None
) -> ReferencePass:
    """Record the inputs of all activations, for `trace(against=)`."""
    engine = partial(Engine, composite or Composite(), module)
    recorder = _with_engine(forward, x, engine, Recorder)._engine.activations
    assert isinstance(recorder, Recorder)  # noqa: S101  # narrows the type for mypy
    return recorder.inputs


def _with_engine(
    forward: Forward,
    x: Tensor,
    engine: Callable[..., Engine],
    activations: Callable[[], Activations | None],
    layers: Sequence[str] = (),
) -> Trace:
    """Run a pass; if it changes tensors in place, run it again with a tensor for each result."""
    try:
        return _trace(forward, x, engine(activations=activations()), layers)
    except StartOver:
        return _trace(forward, x, engine(activations=activations(), own=True), layers)


def _trace(forward: Forward, x: Tensor, engine: Engine, layers: Sequence[str]) -> Trace:
    x = x.detach().requires_grad_(True)
    captured: dict[str, Tensor] = {}

    def capture(name: str, out: Any) -> None:
        if tensors := live_tensors(out):
            captured[name] = tensors[0]

    with torch.enable_grad(), hooked(engine.module, layers, capture):
        start = engine.own(x)
        engine.start = x if start is x else None
        engine.unseen.start()
        with engine:
            logits = forward(start)
        engine.unseen.update()
    for name in layers:
        if name not in captured:
            raise InputError(f"The layer {name!r} returned no tensor that depends on the input.")
    _check_graph(engine, logits)
    return Trace(engine, x, logits, {name: captured[name] for name in layers})


def _check_graph(engine: Engine, logits: Tensor) -> None:
    """Refuse an output whose relevance cannot reach the input, or would pass an operation without a rule.

    Modes do not see custom autograd functions: these have a rule by name, or are refused.
    """
    if not logits.requires_grad:
        raise UnsupportedError(
            "No relevance can reach the input: the output is a constant under the rules, such as a softmax "
            "or a detached tensor, or was computed under no_grad. Let the model return logits, or pass "
            "forward= to pick them; if a part of it runs under no_grad, such as a frozen encoder, use "
            f"{COMPARE}"
        )
    for node in _nodes(logits.grad_fn):
        function = getattr(type(node), "_forward_cls", None)
        if function is None:
            if (after := engine.unseen.operation_before(node)) is not None:
                raise UnsupportedError(
                    f"LRP did not see the operation behind {node.name()!r}, which ran after {after!r}, as in "
                    f"a torch.jit function. {WAY_OUT}"
                )
        elif (message := message_of(node)) is not None:
            raise UnsupportedError(message)
        elif not is_rule(function):
            name = f"{function.__module__}.{function.__qualname__}"
            if name not in FUNCTION_RULES:
                register = f"Register one with xmil.lrp.register_function({name!r}), or {NO_RULES_NEEDED}"
                advice = _ADVICE.get(name, register)
                raise UnsupportedError(f"No LRP rule for the custom autograd function {name!r}. {advice}")
            rule = partial(FUNCTION_RULES[name], engine, node)
            node.register_hook(lambda *gradients, rule=rule: tuple(rule(*gradients)))


_ADVICE = {
    "torch.utils.checkpoint.CheckpointFunction": (
        "Call torch.utils.checkpoint with use_reentrant=False, or switch checkpointing off."
    ),
    "mamba_ssm.ops.selective_scan_interface.MambaInnerFn": (
        "Set use_fast_path=False on the Mamba layers: their scan has a rule."
    ),
}


def _nodes(start: Any) -> Iterator[Any]:
    visited, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        stack.extend(following for following, _ in node.next_functions)


@contextmanager
def hooked(module: nn.Module, layers: Sequence[str], hook: Callable[[str, Any], Any]) -> Iterator[None]:
    """Call `hook(name, output)` after each run of a layer within the block; it may return a new output."""
    parts = dict(module.named_modules())
    for layer in layers:
        if layer not in parts or not layer:
            raise unknown_name("layer", layer, (name for name in parts if name))
    handles = [
        parts[name].register_forward_hook(lambda _, __, out, name=name: hook(name, out)) for name in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
