"""Rules for custom autograd functions, which no mode sees: they correct the gradients that each one gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from xmil.core.registry import Registry

if TYPE_CHECKING:
    from xmil.lrp.engine import Engine

Gradients = Sequence[Tensor | None]
FunctionRule = Callable[["Engine", Any, Gradients, Gradients], Gradients]
AutogradFunction = TypeVar("AutogradFunction", bound=type[torch.autograd.Function])

FUNCTION_RULES: Registry[FunctionRule] = Registry("rule of an autograd function", group="xmil.functions")
_RULES_THEMSELVES: set[type] = set()


def register_function(*names: str) -> Callable[[FunctionRule], FunctionRule]:
    """Decorator that makes a function the rule of custom autograd functions, named `module.Class`.

    The rule is called in the backward pass as `rule(engine, node, gradients, upstream)`: the node of the
    graph (its `saved_tensors` are at hand), the gradient that the function gives for each tensor it took, and
    those that came to its outputs. It returns the gradients to go on with; None stops there.
    """

    def add(rule: FunctionRule) -> FunctionRule:
        for name in names:
            FUNCTION_RULES.add(name, rule)
        return rule

    return add


def backward_is_rule(function: AutogradFunction) -> AutogradFunction:
    """Class decorator: the backward of this autograd function is an LRP rule already.

    Rules of your own are often written as such functions; without this they are refused as unknown.
    """
    _RULES_THEMSELVES.add(function)
    return function


def full_name(function: type) -> str:
    """The name a custom autograd function is registered under."""
    return f"{function.__module__}.{function.__qualname__}"


def is_rule(function: type) -> bool:
    """Whether the function's backward is a rule."""
    return function in _RULES_THEMSELVES or function.__module__.startswith("xmil.lrp.")


def correct(engine: Engine, node: Any, rule: FunctionRule) -> Any:
    """Let a rule change what a node of the graph hands on; returns the hook's handle."""

    def hook(gradients: Any, upstream: Any) -> tuple[Tensor | None, ...]:
        return tuple(rule(engine, node, gradients, upstream))

    return node.register_hook(hook)
