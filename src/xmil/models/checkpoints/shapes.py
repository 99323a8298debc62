"""What the shapes of weights say, under the names of our models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from xmil.core.errors import CheckpointError
from xmil.models.checkpoints.families import Converted, State, count, rename, shape


def abmil_of(state: dict[str, Tensor], *, n_layers: int, dropout: float) -> Converted:
    """An AttnMIL with the keys of ours."""
    dim, in_dim = shape(state, "instance.0.0.weight")
    branches, attention_dim = shape(state, "attention.w.weight")
    params = {
        "dim": dim,
        "attention_dim": attention_dim,
        "gated": "attention.U.weight" in state,
        "branches": branches,
        "n_layers": n_layers,
        "dropout": dropout,
    }
    return Converted("attnmil", in_dim, n_outputs(state, "classifier.weight"), params, state)


def transmil_of(state: State, params: dict[str, Any], notes: list[str], *, default_heads: int) -> Converted:
    """What the shapes of a TransMIL say, under the names of ours."""
    state = rename(
        state,
        (r"_fc1\.", "instance.0."),
        (r"_fc2\.", "classifier."),
        (r"pos_layer\.", "ppeg."),
        (r"cls_token", "class_token"),
    )
    if params.get("pool") == "sum":
        state.pop("class_token", None)
    dim, in_dim = shape(state, "instance.0.0.weight")
    convolution = state.get("layers.0.attn.res_conv.weight")
    heads = default_heads if convolution is None else int(convolution.shape[0])
    found = {
        "dim": dim,
        "heads": heads,
        "head_dim": shape(state, "layers.0.attn.to_qkv.weight")[0] // (3 * heads),
        "n_layers": count(state, r"layers\.(\d+)\."),
        "landmarks": max(1, dim // 2),
        "residual_kernel": None if convolution is None else int(convolution.shape[2]),
        "ppeg": "ppeg.proj.weight" in state,
        "bias": "classifier.bias" in state,
    }
    return Converted(
        "transmil", in_dim, n_outputs(state, "classifier.weight"), {**params, **found}, state, notes
    )


def n_outputs(state: State, key: str) -> int:
    """The number of outputs: rows of the last layer."""
    if key not in state:
        raise CheckpointError(
            f"the classifier is missing ({key}); a checkpoint without a head cannot be explained."
        )
    return int(state[key].shape[0])
