"""One forward pass under the rules, then a backward pass for each explained output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.lrp.engine import WAY_OUT, Engine, StartOver
from xmil.lrp.operations import FUNCTION_RULES, Composite, is_rule, live_tensors
from xmil.lrp.values import Flow, Recorder, ReferencePass, Secants, message_of

Forward = Callable[[Tensor], Tensor]
OutputFunction = Callable[[Tensor], Tensor]
LINEAR = 1e-5  # an output that leaves less than this is linear up to rounding


@dataclass(frozen=True)
class Relevance:
    """Relevance of one explained output: at the input, at the named layers, and what constants keep.

    `size` is the largest term of the output as a sum over logits and a constant: rounding goes with it, even
    where the terms cancel. `cuts` are the first places where a constant that depends on the input was taken
    as a value.
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
        """Whether this pass had the activations of its reference pass."""
        activations = self._engine.activations
        return not isinstance(activations, Secants) or activations.matched

    @property
    def logits(self) -> Tensor:
        """The model's own outputs (b, c), detached, on the device or off it."""
        return self._logits.detach()

    def pull(self, seed: Tensor, *, keep: bool) -> list[Tensor | None]:
        """The way back from the logits, weighted by `seed`: gradients under the rules, with a new account."""
        self._engine.ledger.clear()
        ends = [self._x, *(entry.out for entry in self._entries), *self._layers.values()]
        return list(torch.autograd.grad(self._logits, ends, seed, retain_graph=keep, allow_unused=True))

    def forget_module(self) -> None:
        """Let go of the module, so that a trace that is kept does not keep it alive."""
        self._engine.module = nn.Module()

    def relevance(self, output: OutputFunction, *, keep: bool = False) -> Relevance:
        """Relevance of output(logits), a tensor (b,); `keep` leaves the graph for another output."""
        logits = self.logits.requires_grad_(True)
        with torch.enable_grad():
            value = output(logits)
            (seed,) = torch.autograd.grad(value.sum(), logits)
        direct, *gradients = self.pull(seed.to(self._logits.device), keep=keep)
        ways = [*zip(self._entries, gradients, strict=False)]
        at_input = Flow(self._x.detach(), direct, ways)
        terms = seed.double() * logits.detach().double()
        beside = (value.detach().double() - terms.sum(dim=-1)).sum()
        with torch.no_grad():
            empty = output(torch.zeros_like(logits)).double().sum()
        shares, (rest, largest, at_zero) = self._engine.ledger.totals(beside, terms.abs().max(), empty)
        size = max(abs(rest), largest)
        # what the output has beside its logits and depends on them: nothing if it is linear
        beyond = rest - at_zero if abs(rest - at_zero) > LINEAR * size else 0.0
        shares["cut"] += beyond
        shares["bias"] += rest - beyond
        named = zip(self._layers.items(), gradients[len(ways) :], strict=True)
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

    `layers` are dotted names of submodules whose outputs' relevance is wanted. Activations pass on
    what they have over those of the pass `against` (see `record` and `Secants`).
    """
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"The compiled module {part.original_name} hides its operations. {WAY_OUT}"
            )

    def engine(own: bool) -> Engine:
        activations = None if against is None else Secants(against)
        return Engine(composite or Composite(), module, own=own, activations=activations)

    return _with_engine(forward, x, engine, layers)


def record(
    forward: Forward, x: Tensor, *, module: nn.Module, composite: Composite | None = None
) -> ReferencePass:
    """What the activations of a reference pass see, for `trace(against=)`."""
    recorders: list[Recorder] = []

    def engine(own: bool) -> Engine:
        recorders.append(Recorder())
        return Engine(composite or Composite(), module, own=own, activations=recorders[-1])

    _with_engine(forward, x, engine, ())
    return recorders[-1].inputs


def _with_engine(
    forward: Forward, x: Tensor, engine: Callable[[bool], Engine], layers: Sequence[str]
) -> Trace:
    """A pass; one that changes tensors in place is run again with tensors of its own."""
    try:
        return _trace(forward, x, engine(False), layers)
    except StartOver:
        return _trace(forward, x, engine(True), layers)


def _trace(forward: Forward, x: Tensor, engine: Engine, layers: Sequence[str]) -> Trace:
    x = x.detach().requires_grad_(True)
    captured: dict[str, Tensor] = {}

    def capture(name: str, out: Any) -> None:
        if tensors := live_tensors(out):
            captured[name] = tensors[0]

    with torch.enable_grad(), hooked(engine.module, layers, capture):
        start = engine.own(x)
        engine.start = x if start is x else None
        engine.sight.start()
        with engine:
            logits = forward(start)
        engine.sight.look()
    for name in layers:
        if name not in captured:
            raise InputError(f"The layer {name!r} gave no tensor that depends on the input.")
    _check_graph(engine, logits)
    return Trace(engine, x, logits, {name: captured[name] for name in layers})


def _check_graph(engine: Engine, logits: Tensor) -> None:
    """Refuse an output that relevance cannot leave, or that took a way without rules.

    Custom autograd functions pass by every mode: they have a rule by name, or are refused.
    """
    if not logits.requires_grad:
        raise UnsupportedError(
            "No relevance can reach the input: the output is constant under the rules, as a softmax or a "
            "detached tensor is, or was computed under no_grad. Let the model return logits, or pass "
            "forward= to pick them."
        )
    for node in _nodes(logits.grad_fn):
        function = getattr(type(node), "_forward_cls", None)
        if function is None:
            if (after := engine.sight.missed(node)) is not None:
                raise UnsupportedError(
                    f"LRP did not see the operation behind {node.name()!r}, which ran after {after!r}, as in "
                    f"a torch.jit function. {WAY_OUT}"
                )
        elif (message := message_of(node)) is not None:
            raise UnsupportedError(message)
        elif not is_rule(function):
            name = f"{function.__module__}.{function.__qualname__}"
            if name not in FUNCTION_RULES:
                way = _OTHER_WAYS.get(name, f"Give it one with xmil.lrp.register_function. {WAY_OUT}")
                raise UnsupportedError(f"No LRP rule for the custom autograd function {name!r}. {way}")
            rule = partial(FUNCTION_RULES[name], engine, node)
            node.register_hook(lambda *gradients, rule=rule: tuple(rule(*gradients)))


_OTHER_WAYS = {
    "torch.utils.checkpoint.CheckpointFunction": (
        "Call torch.utils.checkpoint with use_reentrant=False, or switch checkpointing off to explain."
    ),
    "mamba_ssm.ops.selective_scan_interface.MambaInnerFn": (
        "Set use_fast_path=False on the Mamba layers: the scan by itself has a rule."
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
    """Call `hook(name, output)` whenever a layer has run, within the block; it may give another output."""
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
