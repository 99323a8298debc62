"""Ways of calling a foreign module: with or without a batch, with companions, with a dict or a graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError

FEATURES = ("x", "X", "features", "feats", "patch_features", "feature", "data", "bag", "bags", "input", "h")
COMPANIONS = {
    "coords": ("coords", "coord", "coordinates", "patch_coords", "pos", "positions", "xy"),
    "adjacency": ("adjacency", "adj", "adj_mat", "adj_matrix", "edge_index"),
    "index": ("index",),
}
MASKS = ("mask", "attention_mask", "attn_mask", "padding_mask", "key_padding_mask")
_KNOWN = {alias: name for name, aliases in COMPANIONS.items() for alias in aliases}

Call = Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Any]


MakeMask = Callable[[Tensor], Tensor]  # a mask (1, n) for a bag (1, n, d)


@dataclass(frozen=True)
class Way:
    """One way to call a module with a bag (1, n, d); `text` is how a user would write it.

    `names` are the companions it hands over, and whether each must be there.
    """

    text: str
    call: Call
    names: Mapping[str, bool] = field(default_factory=dict)
    batch: bool = True  # whether the bag is handed over as (1, n, d), else as (n, d)
    with_mask: Callable[[MakeMask, str], Way] | None = None  # the same with another mask, and its name


PLAIN = Way("net(x)", lambda module, x, _: module(x))


def ways_to_call(module: nn.Module, held: Sequence[str]) -> Iterator[Way]:
    """The ways that fit the signature of the module, most usual first; `held` are the bag's companions."""
    wanted = required(module)
    if wanted is None or len(wanted) <= 1:
        if not _only_keywords(module):
            yield PLAIN
            yield Way("net(x[0])", lambda module, x, _: module(x[0]), batch=False)
        else:
            yield from (_by_keyword(name, batch=batch) for name in ("data", "x") for batch in (True, False))
        if wanted is not None:
            yield from _masked(module, {})
            yield from (
                _offering(batch=batch, mask=mask) for mask in (False, True) for batch in (True, False)
            )
        return
    others = {name: companion_of(name, held) for name in wanted[1:]}
    yield from (_with_companions(others, batch=batch) for batch in (True, False))
    yield from (_with_companions(others, batch=batch, real=True) for batch in (True, False))
    yield from _masked(module, others)


def _masked(module: nn.Module, others: Mapping[str, str | None]) -> Iterator[Way]:
    """The ways with a mask of ones or zeros, for modules that have a parameter for one."""
    name = next((name for name in _parameters(module) if name in MASKS), None)
    if name is not None:
        asked = {**others, name: None}
        for make, made in ((ones, "ones"), (zeros, "zeros")):
            for batch in (True, False):
                yield _with_companions(asked, batch=batch, mask=name, make=make, made=made)


def required(module: nn.Module) -> list[str] | None:
    """Parameters of `forward` that must be given, the features first; None where it cannot be known."""
    found = _signature(module)
    if found is None:
        return None
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in found.parameters.values() if p.default is p.empty and p.kind not in loose]


def optional_companions(module: nn.Module, held: Sequence[str]) -> dict[str, str]:
    """Parameters with a default that would take a companion the bag holds, and its name."""
    parameters = _parameters(module).values()
    found = {p.name: companion_of(p.name, held) for p in parameters if p.default is None}
    return {name: to for name, to in found.items() if to in held and to is not None}


def companion_of(parameter: str, held: Sequence[str]) -> str | None:
    """The companion that a parameter's name asks for; None for a mask, which a bag on its own needs not.

    >>> companion_of("patch_coords", []), companion_of("stain", ["stain"]), companion_of("mask", [])
    ('coords', 'stain', None)
    """
    if parameter in held:
        return parameter
    return None if parameter in MASKS else _KNOWN.get(parameter, parameter)


def forward_way(forward: Callable[..., Any], names: Mapping[str, bool]) -> Way:
    """The way of a user's own function."""
    return Way("forward(net, x)", lambda module, x, given: forward(module, x, **given), names)


def _signature(module: nn.Module) -> inspect.Signature | None:
    """How a module is called, a chain as its encoder is; None where it cannot be known, as of traced ones."""
    found = getattr(module, "call_signature", None)
    try:
        return found if isinstance(found, inspect.Signature) else inspect.signature(module.forward)
    except (TypeError, ValueError):
        return None


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    found = _signature(module)
    return {} if found is None else found.parameters


def _only_keywords(module: nn.Module) -> bool:
    """Whether `forward` takes nothing but **keywords."""
    kinds = [p.kind for p in _parameters(module).values()]
    return kinds == [inspect.Parameter.VAR_KEYWORD]


def _by_keyword(name: str, *, batch: bool) -> Way:
    text = f"net({name}={'x' if batch else 'x[0]'})"
    return Way(text, lambda module, x, _: module(**{name: x if batch else x[0]}), batch=batch)


def ones(x: Tensor) -> Tensor:
    """A mask that is True for every instance."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def zeros(x: Tensor) -> Tensor:
    """A mask that is False for every instance."""
    return ~ones(x)


def _with_companions(
    others: Mapping[str, str | None],
    *,
    batch: bool,
    real: bool = False,
    mask: str | None = None,
    make: MakeMask = ones,
    made: str = "ones",
) -> Way:
    """The way with companions by keyword: in batches or not, as real numbers, with a mask."""
    end = f"{'' if batch else '[0]'}{'.float()' if real else ''}"
    said = [
        f"{name}={made if name == mask else None if to is None else to + end}" for name, to in others.items()
    ]

    def call(module: nn.Module, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        named = {name: None if to is None else given[to] for name, to in others.items()}
        if mask is not None:
            named[mask] = make(x)
        return module(x if batch else x[0], **{name: fit(value, x.dtype) for name, value in named.items()})

    def fit(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        value = value if value is None or batch else value[0]
        return value if value is None or not real else value.to(dtype)

    names = {to: True for to in others.values() if to}
    text = ", ".join(["x" if batch else "x[0]", *said])
    again = partial(_with_companions, others, batch=batch, real=real, mask=mask)
    masked = None if mask is None else lambda make, made: again(make=make, made=made)
    return Way(f"net({text})", call, names, batch, masked)


def _offering(*, batch: bool, mask: bool, make: MakeMask = ones, made: str = "ones") -> Way:
    names = dict.fromkeys(COMPANIONS, False)

    def call(module: nn.Module, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        marks = make(x) if mask else None
        marks = marks if marks is None or batch else marks[0]
        return module(Offer(x if batch else x[0], {k: v if batch else v[0] for k, v in given.items()}, marks))

    shape = f"{'(1, n, d)' if batch else '(n, d)'}{f' and a mask of {made}' if mask else ''}"
    text = f"net(data) with data['x'] or data.x of shape {shape}"
    again = partial(_offering, batch=batch, mask=mask)
    return Way(text, call, names, batch, (lambda make, made: again(make=make, made=made)) if mask else None)


class LackingError(KeyError, AttributeError):
    """A companion that a module asked an offer for, and the bag does not have."""


class Offer(dict[str, Any]):
    """Features and companions under the names that modules ask for, as items or attributes of one object.

    A mask is not among them unless asked for: one bag alone has no padding, and what True marks differs.

    >>> Offer(torch.zeros(3, 2), {})["feats"].shape, Offer(torch.zeros(3, 2), {}).batch.tolist()
    (torch.Size([3, 2]), [0, 0, 0])
    """

    def __init__(self, x: Tensor, given: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
        super().__init__()
        self._x, self._given, self._mask = x, given, mask

    def __missing__(self, name: str) -> Any:
        if name in FEATURES:
            return self._x
        if name in MASKS and self._mask is not None:
            return self._mask
        if name in ("batch", "num_nodes"):
            nodes = self._x.shape[-2]
            return (
                nodes if name == "num_nodes" else torch.zeros(nodes, dtype=torch.long, device=self._x.device)
            )
        companion = companion_of(name, list(self._given))
        if companion is None or companion not in self._given:
            raise LackingError(companion or name)
        value = self._given[companion]
        if name == "edge_index":
            dense = value.to_dense() if value.is_sparse else value
            return dense.nonzero().T.contiguous()
        return value.to(self._x.dtype) if name == "pos" else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in FEATURES or companion_of(name, list(self._given)) in self._given
        )

    def get(self, name: str, default: Any = None) -> Any:
        """The item, or the default where the bag does not have it."""
        return self[name] if name in self else default  # noqa: SIM401  # this is get

    def to(self, *_: Any, **__: Any) -> Offer:
        """Itself: everything is on the features' device already."""
        return self


def unknown_parameters(module: nn.Module, held: Sequence[str]) -> InputError | None:
    """The error for parameters of `forward` that no bag can fill, or None."""
    others = (required(module) or [])[1:]
    known = {*held, *COMPANIONS}
    strange = [name for name in others if (to := companion_of(name, held)) is not None and to not in known]
    if not strange:
        return None
    name, first = type(module).__name__, strange[0]
    return InputError(
        f"{name}.forward asks for {' and '.join(map(repr, strange))} beside the features, which no bag has; "
        f"pass forward=lambda net, x: net(x, {first}=...), or a Bag with extras={{{first!r}: ...}} if it "
        "has a row for each instance."
    )
