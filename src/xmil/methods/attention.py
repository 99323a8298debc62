"""Attention as an explanation: pooling weights, or class-token attention of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xmil.core.errors import bad_parameter
from xmil.core.target import Target
from xmil.methods.captured import captured_attention
from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import Attribution, Attributions, register_method
from xmil.models import MILModel
from xmil.nn.attention import SelfAttention, row_blocks

FUSIONS = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}


def _unsupported(network: Network) -> str | None:
    """Why a model of ours has no attention; whether another's has is seen when it runs."""
    return None if network.model is None else network.model.no_attention


@torch.no_grad()
def attention_batch(network: Network, x: Tensor, outputs: Sequence[Output], *, fold: bool = True) -> Tensor:
    """Attention (b, outputs, n) of many bags to their instances."""
    weights = attention_of(network, x, fold=fold)[1]
    return torch.stack([branch(weights, output.target, network) for output in outputs], dim=1)


@register_method(
    "attention",
    signed=False,
    cost="1 to 2",
    supports=_unsupported,
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

    Pooling models: the softmax weights, of the class's own branch where there is one. TransMIL: what the
    class token attends to, in one `layer` (0, 1, ..., or -1 for the last) or by "rollout", the product over
    layers of 0.5 A + 0.5 I with the heads fused by "mean", "max" or "min"; `normalise` scales rows to one.
    A is the published matrix, over the padded sequence; what falls on padding is left out of the scores,
    and what falls on the repeated instances that fill the square is given back to them, unless `fold=False`
    (as the published code has it). Modules of others: the last softmax that pools the instances, else the
    last that weighs them, or number `layer` of these; the explanation says which.
    """
    if network.model is None:
        return _foreign(network, x, question, layer=layer, heads=heads)
    logits, weights = attention_of(network, x, layer=layer, heads=heads, normalise=normalise, fold=fold)
    outputs = question.outputs(logits)
    return Attributions(
        logits, [Attribution(o, float(o(logits)), branch(weights, o.target, network)[0]) for o in outputs]
    )


def _foreign(
    network: Network, x: Tensor, question: Question, *, layer: int | str, heads: str
) -> Attributions:
    """The softmax of a foreign module that weighs the instances, and which it is."""
    if heads != "mean":
        raise bad_parameter("heads", f"attention of {network.name}", "'mean'", heads)
    logits = network(x)
    found = captured_attention(network, x, logits, layer=layer)
    said = f"The attention shown is {found.said}."
    return Attributions(
        logits,
        [
            Attribution(
                output,
                float(output(logits)),
                found.of(int(output.target)),
                params={"softmax": found.said},
                warnings=(said,),
            )
            for output in question.outputs(logits)
        ],
    )


def attention_of(
    network: Network,
    x: Tensor,
    *,
    layer: int | str = "rollout",
    heads: str = "mean",
    normalise: bool = False,
    fold: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logits (b, c) and attention (b, n, branches) of bags (b, n, d)."""
    if heads not in FUSIONS:
        raise bad_parameter("heads", "attention", f"one of {sorted(FUSIONS)}", heads)
    model = network.model
    assert model is not None  # noqa: S101  # `_unsupported` has refused others
    if model.attention_layers():
        logits, row = _transformer(network, model, x, layer=layer, heads=heads, normalise=normalise)
        return logits, (_folded(row, x.shape[1]) if fold else row[:, : x.shape[1]]).unsqueeze(-1)
    if layer != "rollout":
        raise bad_parameter("layer", f"attention of {network.name}", "left out: it has one attention", layer)
    h = model.embed(x)
    return network.aggregate(h), network.attention_weights(h)


def branch(weights: Tensor, target: Target, network: Network) -> Tensor:
    """The column (b, n) of the target's class, where each class has its own; else the mean of the columns."""
    columns = weights.shape[-1]
    per_class = network.model is not None and network.model.class_attention
    if not per_class or int(target) >= columns:  # the risk of a survival model depends on every bin
        return weights.mean(dim=-1)
    return weights[..., int(target)]


def _transformer(
    network: Network, model: MILModel, x: Tensor, *, layer: int | str, heads: str, normalise: bool
) -> tuple[Tensor, Tensor]:
    inputs: list[tuple[SelfAttention, Tensor]] = []
    with ExitStack() as stack:
        for attn in model.attention_layers():
            handle = attn.register_forward_pre_hook(lambda attn, args: inputs.append((attn, args[0])))
            stack.callback(handle.remove)
        logits = network(x)
    row: Tensor | None = None
    for i in reversed(_chosen_layers(layer, len(inputs))):
        attn, h = inputs[i]
        matrix = attn.attention(h, 1 if row is None else None)  # at first only the class token's row
        row = _class_token_row(matrix.skip, h) if row is None else row
        residual = 0.5 if layer == "rollout" else 0.0
        row = _step(matrix, row, attn.heads, heads, residual=residual, normalise=normalise)
    assert row is not None  # noqa: S101  # narrows the type for mypy
    return logits, row[:, -h.shape[1] + 1 :]


def _class_token_row(skip: int, h: Tensor) -> Tensor:
    """The row vector over the padding and the class token that picks the latter."""
    row = h.new_zeros(len(h), skip + 1)
    row[:, skip] = 1.0
    return row


def _step(matrix: Any, row: Tensor, n_heads: int, fusion: str, *, residual: float, normalise: bool) -> Tensor:
    """The row vector times (1 - residual) A + residual I, rows scaled to one on demand.

    The mean over heads commutes with the product, which stays linear in n; the other fusions need the rows
    of the matrix and take them in blocks.
    """
    if fusion == "mean":
        if normalise:
            row = row / ((1 - residual) * matrix.row_sums().mean(dim=1) + residual)
        attended: Tensor = matrix.left(row.unsqueeze(1).expand(-1, n_heads, -1)).mean(dim=1)
        return (1 - residual) * attended + residual * _padded(row, attended)
    attended = torch.zeros(0)
    for block in _nonzero_blocks(row, n_heads):
        fused = FUSIONS[fusion](matrix.rows(block), dim=1)  # type: ignore[operator]
        part = row[:, block]
        if normalise:
            part = part / ((1 - residual) * fused.sum(dim=-1) + residual)
        attended = attended if attended.numel() else torch.zeros_like(fused[:, 0])
        attended = attended + (1 - residual) * torch.einsum("bn,bnm->bm", part, fused)
        attended[:, block] += residual * part
    return attended


def _padded(row: Tensor, like: Tensor) -> Tensor:
    return F.pad(row, (0, like.shape[1] - row.shape[1]))


def _chosen_layers(layer: int | str, n_layers: int) -> list[int]:
    if layer == "rollout":
        return list(range(n_layers))
    if isinstance(layer, int) and -n_layers <= layer < n_layers:
        return [layer % n_layers]
    raise bad_parameter("layer", "attention", f"'rollout' or an int in the range [0, {n_layers})", layer)


def _nonzero_blocks(row: Tensor, n_heads: int) -> Iterator[slice]:
    if int((row != 0).sum()) == len(row):  # the first step: the class token alone
        k = int(row[0].argmax())
        return iter([slice(k, k + 1)])
    return row_blocks(row.shape[1], width=row.shape[1] * n_heads)


def _folded(row: Tensor, n: int) -> Tensor:
    """Attention to the tokens that repeat the first instances, given back to those instances."""
    folded = row[:, :n].clone()
    repeats = row[:, n:]
    folded[:, : repeats.shape[1]] += repeats
    return folded
