"""Attention as an explanation: pooling weights, class-token attention, or a softmax of a foreign module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError, bad_parameter, check_choice
from xmil.core.task import Target
from xmil.lrp import innermost_module
from xmil.methods.method import Attributions, Output, Question, attributions, register_method
from xmil.network import Network, Watch, attempt
from xmil.nn import SelfAttention, row_blocks

FUSIONS = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


@torch.no_grad()
def attention_batch(network: Network, x: Tensor, outputs: Sequence[Output], *, fold: bool = True) -> Tensor:
    """Attention (b, outputs, n) of many bags to their instances."""
    weights = compute_attention(network, x, fold=fold)[1]
    return torch.stack([branch(weights, output.target, network) for output in outputs], dim=1)


@register_method(
    "attention",
    signed=False,
    cost="1 to 2",
    # whether a foreign module has attention only shows when it runs
    supports=lambda network: None if network.model is None else network.model.no_attention,
    batch=attention_batch,
)
@torch.no_grad()
def attention(
    network: Network,
    x: Tensor,
    question: Question,
    *,
    layer: int | str = "rollout",
    heads: str = "mean",
    normalise: bool = False,
    fold: bool = True,
) -> Attributions:
    """Attention to each instance.

    Pooling models: the softmax weights, of the class's own branch if there is one. TransMIL: the attention of
    the class token in one `layer` (0, 1, ..., or -1 for the last) or by "rollout", the product over layers
    of 0.5 A + 0.5 I with the heads fused by "mean", "max" or "min"; `normalise` scales rows to one. A is the
    published matrix, over the padded sequence; the scores leave out the attention to padding, and instances
    that are repeated to fill the square also get the attention to their copies, unless `fold=False` (as in
    the published code). Foreign modules: the last softmax that pools the instances, else the last that
    weights them, or number `layer` of these; the explanation names it.
    """
    fields: dict[str, Any] = {}
    if network.model is not None:
        logits, (weights,) = compute_attention(
            network, x, layer=layer, heads=heads, normalise=normalise, fold=fold
        )
    else:
        if heads != "mean":
            raise bad_parameter("heads", f"attention of {network.name}", "'mean'", heads)
        logits = network(x)
        weights, description = capture_attention(network, x, logits.shape[1], layer=layer)
        fields["params"] = {"softmax": description}
        fields["warnings"] = (f"The attention shown is {description}.",)
    return attributions(logits, question, lambda o: branch(weights, o.target, network), **fields)


def compute_attention(
    network: Network,
    x: Tensor,
    *,
    layer: int | str = "rollout",
    heads: str = "mean",
    normalise: bool = False,
    fold: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute logits (b, c) and attention (b, n, branches) of bags (b, n, d)."""
    check_choice("heads", heads, FUSIONS, owner="attention")
    model = network.model
    assert model is not None  # noqa: S101  # `capture_attention` is for foreign modules
    if not model.attention_layers():
        if layer != "rollout":
            must = "left out: it has one attention"
            raise bad_parameter("layer", f"attention of {network.name}", must, layer)
        h = model.embed(x)
        return network.aggregate(h), network.attention_weights(h)
    inputs: list[tuple[SelfAttention, Tensor]] = []
    with ExitStack() as stack:
        for attn in model.attention_layers():
            handle = attn.register_forward_pre_hook(lambda attn, args: inputs.append((attn, args[0])))
            stack.callback(handle.remove)
        logits = network(x)
    count, residual = len(inputs), 0.0
    if layer == "rollout":
        residual = 0.5
    elif isinstance(layer, int) and -count <= layer < count:
        inputs = [inputs[layer]]
    else:
        raise bad_parameter("layer", "attention", f"'rollout' or an int in the range [0, {count})", layer)
    row = torch.zeros(0)
    for attn, h in reversed(inputs):
        matrix = attn.attention(h, None if row.numel() else 1)  # at first only the class token's row
        if not row.numel():  # select the class token, after the padding
            row = h.new_zeros(len(h), matrix.skip + 1)
            row[:, matrix.skip] = 1.0
        row = _step(matrix, row, attn.heads, heads, residual=residual, normalise=normalise)
    instances, n = row[:, -h.shape[1] + 1 :], x.shape[1]
    received, repeats = instances[:, :n].clone(), instances[:, n:]  # repeats of the first instances
    if fold:
        received[:, : repeats.shape[1]] += repeats
    return logits, received.unsqueeze(-1)


def branch(weights: Tensor, target: Target, network: Network) -> Tensor:
    """Return the column (..., n) of the target's class, or the mean of the columns if classes share them."""
    per_class = network.model is None or network.model.class_attention
    if not per_class or int(target) >= weights.shape[-1]:  # the risk of a survival model needs every bin
        return weights.mean(dim=-1)
    return weights[..., int(target)]


def _step(matrix: Any, row: Tensor, n_heads: int, fusion: str, *, residual: float, normalise: bool) -> Tensor:
    """Multiply the row vector by (1 - residual) A + residual I, with rows scaled to one if `normalise`.

    The mean over heads commutes with the product, which stays linear in n; the other fusions need the rows
    of the matrix, and compute them in blocks.
    """
    if fusion == "mean":
        if normalise:
            row = row / ((1 - residual) * matrix.row_sums().mean(dim=1) + residual)
        attended: Tensor = matrix.left(row.unsqueeze(1).expand(-1, n_heads, -1)).mean(dim=1)
        return (1 - residual) * attended + residual * F.pad(row, (0, attended.shape[1] - row.shape[1]))
    attended = torch.zeros(0)
    blocks = row_blocks(row.shape[1], width=row.shape[1] * n_heads)
    if int((row != 0).sum()) == len(row):  # the first step: the class token alone
        k = int(row[0].argmax())
        blocks = iter([slice(k, k + 1)])
    for block in blocks:
        fused = FUSIONS[fusion](matrix.rows(block), dim=1)  # type: ignore[operator]
        part = row[:, block]
        if normalise:
            part = part / ((1 - residual) * fused.sum(dim=-1) + residual)
        attended = attended if attended.numel() else torch.zeros_like(fused[:, 0])
        attended = attended + (1 - residual) * torch.einsum("bn,bnm->bm", part, fused)
        attended[:, block] += residual * part
    return attended


# Foreign modules: the softmaxes of a pass that weight the instances.

BLOCK = 1024  # query rows whose weights are in memory at once


@dataclass(frozen=True)
class Weights:
    """Weights of one softmax, over their last dimension; `place` is the module that ran it.

    `received` (keys,) is the mean over all rows, `first` and `last` are the first and the last row, one of
    which belongs to the class token if there is one. `rows` counts the rows of all heads.
    """

    place: str
    shape: tuple[int, ...]
    received: Tensor
    first: Tensor
    last: Tensor
    columns: Tensor | None
    rows: int
    ends: bool = False  # whether the class token comes after the instances
    source: tuple[Tensor, int] | None = None  # the softmax and its dimension, if it has a gradient


class SoftmaxWatch(Watch):
    """Record the result of every softmax of a pass, including fused attention."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.softmaxes: list[Weights] = []
        self._paths = {id(part): path for path, part in module.named_modules()}

    def see(self, function: Any, args: Sequence[Any], options: dict[str, Any], out: Any) -> None:
        name = getattr(function, "__name__", "")
        if name == "softmax" and isinstance(out, Tensor) and out.ndim:
            dim = args[1] if len(args) > 1 else options.get("dim")
            dim = -1 if dim is None else int(dim)
            self._record(out.movedim(dim, -1), (out, dim) if out.requires_grad else None)
        elif name == "scaled_dot_product_attention":
            self._record_attention(*args, **options)
        elif name == "multi_head_attention_forward":
            both = function(*args, **{**options, "need_weights": True, "average_attn_weights": True})
            self._record(both[1])

    def _record(self, weights: Tensor, source: tuple[Tensor, int] | None = None) -> None:
        """Record weights over the last dimension; the one before it is rows, others are heads and bags."""
        flat = weights.detach().reshape(-1, weights.shape[-1])
        steps = weights.shape[-2] if weights.ndim > 1 else 1
        first, last = (flat.reshape(-1, steps, flat.shape[1])[:, at].mean(dim=0) for at in (0, -1))
        columns = flat.T if len(flat) <= steps and len(flat) < flat.shape[1] else None
        shape = tuple(weights.shape)
        self.softmaxes.append(
            Weights(self._place(), shape, flat.mean(dim=0), first, last, columns, len(flat), source=source)
        )

    def _record_attention(self, query: Tensor, key: Tensor, *positional: Any, **options: Any) -> None:
        """Compute the weights of fused attention in blocks of rows; skip masked attention."""
        masked = options.get("attn_mask") is not None or options.get("is_causal") or len(positional) > 1
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
            self.softmaxes.append(Weights(self._place(), shape, total / count, first, last, None, count))

    def _place(self) -> str:
        """Name the innermost part of the module on the call stack."""
        path = self._paths.get(id(innermost_module(self._paths)))
        return f"module {path!r}" if path else "the module itself"


def capture_attention(network: Network, x: Tensor, n_outputs: int, *, layer: int | str) -> tuple[Tensor, str]:
    """Return the attention (n, k) of a foreign module to the instances of x (1, n, d), and its description.

    It has one column, or one per class; `layer` is the number of the softmax.
    """
    n = x.shape[1]
    softmaxes = _select_used(network, x, *_find_instance_softmaxes(network, x))
    if not softmaxes:
        raise UnsupportedError(
            f"No softmax of {network.name} weights the {n} patches: it has no attention to show; use lrp, "
            "ig or single."
        )
    count = len(softmaxes)
    if layer == "rollout":  # the last that pools, else the last of all
        pooling = [i for i, w in enumerate(softmaxes) if w.rows < n and len(w.received) == n]
        at = pooling[-1] if pooling else count - 1
    elif isinstance(layer, int) and not isinstance(layer, bool) and -count <= layer < count:
        at = layer % count
    else:
        raise bad_parameter("layer", "attention", f"an int in the range [0, {count})", layer)
    softmax = softmaxes[at]
    description = f"softmax {at} of {count} over patches, in {softmax.place}, of shape {softmax.shape}"
    token = len(softmax.received) - n  # 1 if the softmax also weights a class token
    if softmax.columns is not None and not token and softmax.columns.shape[1] == n_outputs > 1:
        return softmax.columns, f"{description}, a row for each class"
    instances = slice(0, n) if softmax.ends else slice(token, None)
    if softmax.rows < n:
        mean = "" if softmax.rows == 1 else ", the mean of its rows"
        return softmax.received[instances, None], f"{description}{mean}"
    if token:
        which, row = ("last", softmax.last) if softmax.ends else ("first", softmax.first)
        return row[instances, None], f"{description}, the row of the {which} token, taken as the class token"
    return softmax.received[:, None], f"{description}, the mean weight of each patch"


def _find_instance_softmaxes(network: Network, x: Tensor) -> tuple[list[Weights], list[int]]:
    """Return the softmaxes of a pass, and the indices of those over instances, with or without a class token.

    Such a softmax has n or n + 1 weights, and one fewer when an instance leaves. Of n + 1, the class token is
    the last if reversing the instances reverses the other weights.
    """
    n = x.shape[1]
    every = _softmaxes(network, x, None)
    fitting = [i for i, weights in enumerate(every) if len(weights.received) in (n, n + 1)]
    if n > 1 and fitting:
        fewer = _softmaxes(network, x[:, :-1], torch.arange(n - 1, device=x.device).unsqueeze(0))
        if len(fewer) == len(every):
            fitting = [i for i in fitting if len(fewer[i].received) == len(every[i].received) - 1]
    if n > 1 and any(len(every[i].received) == n + 1 for i in fitting):
        reversed_ = _softmaxes(network, x.flip(1), torch.arange(n, device=x.device).flip(0).unsqueeze(0))
        for i in fitting if len(reversed_) == len(every) else ():
            received, from_reversed = every[i].received, reversed_[i].received
            if len(received) == len(from_reversed) == n + 1:
                before = torch.cat([received[:1], received[1:].flip(0)])
                after = torch.cat([received[:-1].flip(0), received[-1:]])
                far, near = (float((from_reversed - other).abs().max()) for other in (before, after))
                every[i] = replace(every[i], ends=near < far / 10)
    return every, fitting


def _select_used(network: Network, x: Tensor, every: list[Weights], fitting: list[int]) -> list[Weights]:
    """Select the softmaxes that an output depends on; rows are classes if each affects only its own logit."""
    candidates = [every[i] for i in fitting]
    if len(candidates) < 2 and all(weights.columns is None for weights in candidates):
        return candidates
    watch = SoftmaxWatch(network.module)
    with torch.enable_grad(), watch:
        logits = network(x.detach().requires_grad_(True))
        each = logits[0].unbind()
    if len(watch.softmaxes) != len(every) or not logits.requires_grad:
        return candidates
    used = []
    for i in fitting:
        source = watch.softmaxes[i].source
        if source is None:  # fused attention: there is no gradient to test
            used.append(every[i])
            continue
        rows = []  # whether each logit depends on each row of the softmax
        weights, dim = source
        for logit in each:
            (slope,) = torch.autograd.grad(logit, weights, retain_graph=True, materialize_grads=True)
            rows.append((slope.movedim(dim, -1).reshape(-1, slope.shape[dim]) != 0).any(dim=1))
        slopes = torch.stack(rows)  # (c, rows)
        beside = ~torch.eye(*slopes.shape, dtype=torch.bool, device=slopes.device)
        is_diagonal = slopes.shape[0] == slopes.shape[1] and not bool((slopes & beside).any())
        if bool(slopes.any()):
            used.append(every[i] if is_diagonal else replace(every[i], columns=None))
    return used or candidates


@torch.no_grad()
def _softmaxes(network: Network, x: Tensor, rows: Tensor | None) -> list[Weights]:
    """Record the softmaxes of a pass over a bag; none if a module cannot run on the rows."""
    with SoftmaxWatch(network.module) as watch:
        out = network(x) if rows is None else attempt(partial(network, x, rows))
    return [] if out is None else watch.softmaxes
