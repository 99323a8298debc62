"""The registry of explanation methods, and what each declares of itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from torch import Tensor

from xmil.core.errors import bad_parameter, unknown_name
from xmil.core.explanation import Audit
from xmil.core.method_cards import MethodCard, card_of
from xmil.core.registry import Registry
from xmil.methods.network import Network
from xmil.methods.outputs import OUTPUTS, Output, Question


@dataclass(frozen=True)
class Attribution:
    """Scores (n,) for one output, with the explained number and, where the method conserves, the audit.

    `params` is what the method settled itself and an explanation records; `warnings` are sentences that
    belong beside the scores wherever they are shown. Methods that sample add standard errors (n,) and
    where the sign is sure (n,).
    """

    output: Output
    value: float
    scores: Tensor
    audit: Audit | None = None
    relevance: Tensor | None = None
    stderr: Tensor | None = None
    stable: Tensor | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attributions:
    """What a method returns: the model's logits (1, c) and an attribution for each output."""

    logits: Tensor
    of: Sequence[Attribution]


CONTEXTS = {"contexts": None, "keep": 0.5, "seed": 0}  # how many sub-bags, what share each keeps, their draw
Explain = Callable[..., Attributions]
Batch = Callable[..., Tensor]
Support = Callable[[Network], str | None]


@dataclass(frozen=True)
class Method:
    """An explanation method.

    `run(network, x, question, **parameters)` explains one bag (1, n, d). `supports` says why a model cannot
    be explained, or None. `outputs` are the explained numbers it takes, its default first. `cost` is in
    forward passes over a bag of n instances. `card` has its titles and its colour. `contexts`: whether its
    scores can be averaged over sub-bags, see `methods/contexts.py`. Where the method can,
    `batch(network, x, outputs, **parameters)` scores many bags (b, n, d) of one size together, (b, k, n).
    """

    name: str
    run: Explain
    signed: bool
    conserves: bool
    cost: str
    outputs: tuple[str, ...]
    supports: Support
    card: MethodCard
    contexts: bool = False
    batch: Batch | None = None

    @property
    def seeded(self) -> bool:
        """Whether the method itself draws at random, and so takes a seed."""
        return "seed" in inspect.signature(self.run).parameters

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The method's own parameters and their defaults, and those of contexts where it takes them."""
        signature = inspect.signature(self.run)
        own = {p.name: p.default for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
        return {**own, **CONTEXTS} if self.contexts else own

    def check_parameters(self, given: Mapping[str, Any]) -> None:
        """Refuse a parameter the method does not have."""
        for name in given:
            if name not in self.parameters:
                raise unknown_name(f"parameter of {self.name}", name, self.parameters)


def seed_words(seed: Any, method: str) -> list[int]:
    """A seed, one number or several, as NumPy takes it."""
    words = list(seed) if isinstance(seed, list | tuple) else [seed]
    if not words or not all(isinstance(word, int) and word >= 0 for word in words):
        raise bad_parameter("seed", method, "an int in the range [0, inf), or several", seed)
    return words


def seeds(method: str, name: str, seed: int, *, contexts: bool = False) -> dict[str, Any]:
    """The seed of a method that draws, or whose contexts are drawn: the same for a bag each time."""
    return {"seed": [seed, crc32(name.encode())]} if METHODS[method].seeded or contexts else {}


METHODS: Registry[Method] = Registry("method", group="xmil.methods")


def register_method(
    name: str,
    *,
    signed: bool,
    cost: str,
    conserves: bool = False,
    outputs: tuple[str, ...] = OUTPUTS,
    supports: Support = lambda _: None,
    card: MethodCard | None = None,
    contexts: bool = False,
    batch: Batch | None = None,
) -> Callable[[Explain], Explain]:
    """Decorator that registers a function `(network, x, question, *, ...)` as an explanation method.

    `card` is how it is named and coloured; without one it goes by its name.
    """

    def add(run: Explain) -> Explain:
        shown = card or card_of(name)
        method = Method(name, run, signed, conserves, cost, outputs, supports, shown, contexts, batch)
        METHODS.add(name, method)
        return run

    return add


__all__ = [
    "METHODS",
    "Attribution",
    "Attributions",
    "Method",
    "Output",
    "Question",
    "register_method",
    "seed_words",
    "seeds",
]
