"""Attention of foreign modules: the softmaxes of a pass that weigh the instances."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.methods.network import Network

BLOCK = 1024  # query rows whose weights are held at once


@dataclass(frozen=True)
class Weights:
    """Weights of one softmax, over the last of their dimensions; `place` is the module that took it.

    `received` are the mean weights (keys,) over all rows before it, `first` and `last` those of the first and
    the last row: of a class token, where there is one. `rows` counts them, heads apart.
    """

    place: str
    shape: tuple[int, ...]
    received: Tensor
    first: Tensor
    last: Tensor
    columns: Tensor | None
    rows: int
    ends: bool = False  # whether the class token stands behind the instances
    source: tuple[Tensor, int] | None = None  # the softmax and its dimension, where gradients are kept

    @property
    def length(self) -> int:
        """How many things are weighed."""
        return len(self.received)


@dataclass(frozen=True)
class Captured:
    """Attention (n, k) to the instances, a column for all classes or for each, and in words what it is."""

    weights: Tensor
    said: str

    def of(self, target: int) -> Tensor:
        """The attention (n,) for a target; what depends on all classes has the mean of theirs."""
        own = target < self.weights.shape[1] > 1
        return self.weights[:, target] if own else self.weights.mean(dim=1)


class SoftmaxWatch(TorchFunctionMode):
    """Keeps what every softmax of a pass gave, attention within one call included."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.seen: list[Weights] = []
        self._paths = {id(part): path for path, part in module.named_modules()}

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        out = func(*args, **options)
        name = getattr(func, "__name__", "")
        if name == "softmax" and isinstance(out, Tensor) and out.ndim:
            given = args[1] if len(args) > 1 else options.get("dim")
            dim = -1 if given is None else int(given)
            self._keep(out.movedim(dim, -1), (out, dim) if out.requires_grad else None)
        elif name == "scaled_dot_product_attention":
            self._keep_attention(*args, **options)
        elif name == "multi_head_attention_forward":
            both = func(*args, **{**options, "need_weights": True, "average_attn_weights": True})
            self._keep(both[1])
        return out

    def _keep(self, weights: Tensor, source: tuple[Tensor, int] | None = None) -> None:
        """Weights over the last dimension; the one before it counts rows, the others heads and bags."""
        flat = weights.detach().reshape(-1, weights.shape[-1])
        steps = weights.shape[-2] if weights.ndim > 1 else 1
        first, last = (flat.reshape(-1, steps, flat.shape[1])[:, at].mean(dim=0) for at in (0, -1))
        columns = flat.T if len(flat) <= steps and len(flat) < flat.shape[1] else None
        shape = tuple(weights.shape)
        self.seen.append(
            Weights(self._place(), shape, flat.mean(dim=0), first, last, columns, len(flat), source=source)
        )

    def _keep_attention(self, query: Tensor, key: Tensor, *others: Any, **options: Any) -> None:
        """Weights of fused attention, worked out in blocks of rows; masked attention is passed over."""
        masked = options.get("attn_mask") is not None or options.get("is_causal") or len(others) > 1
        if masked or query.shape[:-2] != key.shape[:-2]:
            return
        scale = options.get("scale") or query.shape[-1] ** -0.5
        total, first = torch.zeros_like(key[..., 0].reshape(-1, key.shape[-2])[0]), None
        for rows in query.detach().split(BLOCK, dim=-2):
            weights = (rows @ key.detach().mT * scale).softmax(dim=-1)
            first = weights[..., 0, :].reshape(-1, key.shape[-2]).mean(dim=0) if first is None else first
            last = weights[..., -1, :].reshape(-1, key.shape[-2]).mean(dim=0)
            total = total + weights.reshape(-1, key.shape[-2]).sum(dim=0)
        count = query.shape[:-1].numel()
        shape = (*query.shape[:-1], key.shape[-2])
        if first is not None:
            self.seen.append(Weights(self._place(), shape, total / count, first, last, None, count))

    def _place(self) -> str:
        """The innermost part of the module on the call stack."""
        frame = sys._getframe(1)
        while frame is not None:
            path = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return f"module {path!r}" if path else "the module itself"
            frame = frame.f_back  # type: ignore[assignment]
        return "the module itself"


def captured_attention(network: Network, x: Tensor, logits: Tensor, *, layer: int | str) -> Captured:
    """The attention of a foreign module to the instances of x (1, n, d); `layer` numbers the softmaxes."""
    n = x.shape[1]
    found = _used(network, x, *_over_instances(network, x))
    if not found:
        raise UnsupportedError(
            f"No softmax of {network.name} weighs the {n} instances: it has no attention to show; use lrp, "
            "ig or single."
        )
    at = _chosen(found, n, layer)
    taken, how = _taken(found[at], n, logits.shape[1])
    place = f"in {found[at].place}, of shape {found[at].shape}"
    return Captured(taken, f"softmax {at} of {len(found)} over instances, {place}{how}")


def _taken(chosen: Weights, n: int, n_outputs: int) -> tuple[Tensor, str]:
    """Attention (n, k) from one softmax, and what was done to it."""
    token = chosen.length - n  # 1 where a class token is among what is weighed
    if chosen.columns is not None and not token and chosen.columns.shape[1] == n_outputs > 1:
        return chosen.columns, ", a row for each class"
    instances = slice(0, n) if chosen.ends else slice(token, None)
    if chosen.rows < n:
        return chosen.received[instances, None], "" if chosen.rows == 1 else ", the mean of its rows"
    if token:
        which, row = ("last", chosen.last) if chosen.ends else ("first", chosen.first)
        return row[instances, None], f", the row of the {which} token, taken as the class token"
    return chosen.received[:, None], ", what each instance receives in the mean"


def _over_instances(network: Network, x: Tensor) -> tuple[list[Weights], list[int]]:
    """The softmaxes of a pass, and which are over n or n + 1 things and lose one when an instance leaves."""
    n = x.shape[1]
    seen = _watched(network, x, None)
    fitting = [i for i, weights in enumerate(seen) if weights.length in (n, n + 1)]
    if n > 1 and fitting:
        fewer = _watched(network, x[:, :-1], torch.arange(n - 1, device=x.device).unsqueeze(0))
        if len(fewer) == len(seen):
            fitting = [i for i in fitting if fewer[i].length == seen[i].length - 1]
    if n > 1 and any(seen[i].length == n + 1 for i in fitting):
        turned = _watched(network, x.flip(1), torch.arange(n, device=x.device).flip(0).unsqueeze(0))
        for i in fitting if len(turned) == len(seen) else ():
            seen[i] = replace(seen[i], ends=_token_ends(seen[i].received, turned[i].received, n))
    return seen, fitting


def _token_ends(received: Tensor, turned: Tensor, n: int) -> bool:
    """Whether what n + 1 things receive follows the instances, in turned order, with the token behind."""
    if len(received) != n + 1 or len(turned) != n + 1:
        return False
    before = torch.cat([received[:1], received[1:].flip(0)])
    behind = torch.cat([received[:-1].flip(0), received[-1:]])
    far, near = (float((turned - other).abs().max()) for other in (before, behind))
    return near < far / 10


def _used(network: Network, x: Tensor, seen: list[Weights], fitting: list[int]) -> list[Weights]:
    """The fitting ones that an output depends on; rows are of classes only where each is of one alone."""
    found = [seen[i] for i in fitting]
    if len(found) < 2 and all(weights.columns is None for weights in found):
        return found
    watch = SoftmaxWatch(network.module)
    with torch.enable_grad(), watch:
        logits = network(x.detach().requires_grad_(True))
    if len(watch.seen) != len(seen) or not logits.requires_grad:
        return found
    kept = []
    for i in fitting:
        slopes = _slopes(logits, watch.seen[i].source)
        if slopes is None or _is_diagonal(slopes):  # the first: within one call, taken as it is
            kept.append(seen[i])
        elif bool(slopes.any()):
            kept.append(replace(seen[i], columns=None))
    return kept or found


@torch.enable_grad()
def _slopes(logits: Tensor, source: tuple[Tensor, int] | None) -> Tensor | None:
    """Whether each logit (c, rows) depends on each row of a softmax."""
    if source is None:
        return None
    weights, dim = source
    found = []
    for logit in logits[0]:
        (slope,) = torch.autograd.grad(logit, weights, retain_graph=True, materialize_grads=True)
        found.append((slope.movedim(dim, -1).reshape(-1, slope.shape[dim]) != 0).any(dim=1))
    return torch.stack(found)


def _is_diagonal(slopes: Tensor) -> bool:
    eye = torch.eye(*slopes.shape, dtype=torch.bool, device=slopes.device)
    return slopes.shape[0] == slopes.shape[1] and bool(slopes.any()) and not bool((slopes & ~eye).any())


@torch.no_grad()
def _watched(network: Network, x: Tensor, rows: Tensor | None) -> list[Weights]:
    watch = SoftmaxWatch(network.module)
    try:
        with watch:
            network(x, rows)
    except Exception:
        if rows is None:
            raise
        return []  # a module that needs the whole bag
    return watch.seen


def _chosen(found: Sequence[Weights], n: int, layer: int | str) -> int:
    """The last softmax that pools; without one, the last of all."""
    if layer == "rollout":
        pooling = [i for i, weights in enumerate(found) if weights.rows < n and weights.length == n]
        return pooling[-1] if pooling else len(found) - 1
    if isinstance(layer, int) and not isinstance(layer, bool) and -len(found) <= layer < len(found):
        return layer % len(found)
    raise bad_parameter("layer", "attention", f"an int in the range [0, {len(found)})", layer)
