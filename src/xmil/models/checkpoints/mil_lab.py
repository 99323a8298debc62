"""MIL-Lab: models with `patch_embed` in front, a safetensors or bin file with config.json beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xmil.models.checkpoints.families import (
    Converted,
    State,
    abmil_of,
    drop,
    family,
    n_outputs,
    ordered,
    rename,
    shape,
    transmil_of,
)


@family(
    "mil-lab-transmil",
    r"blocks\.0\.attention\.to_qkv\.weight",
    r"patch_embed\.0\.weight",
    r"classifier\.weight",
)
def mil_lab_transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL of MIL-Lab."""
    state = rename(
        state, (r"blocks\.(\d+)\.attention\.", r"layers.\1.attn."), (r"blocks\.(\d+)\.", r"layers.\1.")
    )
    params = {"n_feature_layers": _patch_embed(state), "dropout": float(settings.get("dropout") or 0.0)}
    return transmil_of(state, params, [], default_heads=int(settings.get("num_heads") or 4))


@family(
    "mil-lab-abmil",
    r"patch_embed\.0\.weight",
    r"global_attn\.(attention_a\.0|module\.0)\.weight",
    r"classifier\.weight",
)
def mil_lababmil_of(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL of MIL-Lab, gated or not, and its CLAM, which adds what serves the instance loss alone."""
    state = rename(
        state,
        (r"global_attn\.attention_a\.0\.", "attention.V."),
        (r"global_attn\.attention_b\.0\.", "attention.U."),
        (r"global_attn\.attention_c\.", "attention.w."),
        (r"global_attn\.module\.0\.", "attention.V."),
        (r"global_attn\.module\.[23]\.", "attention.w."),
    )
    state, unused = drop(state, r"instance_loss_fn\.", r"instance_classifiers\.")
    n_layers = _patch_embed(state)
    converted = abmil_of(state, n_layers=n_layers, dropout=float(settings.get("dropout") or 0.0))
    converted.notes.extend([f"ignored {len(unused)} keys of the instance loss"] if unused else [])
    return converted


@family(
    "mil-lab-dsmil",
    r"patch_embed\.0\.weight",
    r"i_classifier\.inst_classifier\.weight",
    r"b_classifier\.q\.weight",
    r"classifier\.weight",
)
def mil_lab_dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL of MIL-Lab; `b_classifier.fcc` is never applied and left out."""
    state, unused = drop(state, r"b_classifier\.fcc\.")
    state = rename(
        state,
        (r"i_classifier\.inst_classifier\.", "instance_classifier."),
        (r"b_classifier\.q\.", "query.0."),
        (r"b_classifier\.v\.1\.", "values.0."),
        (r"b_classifier\.norm\.", "norm."),
        (r"classifier\.", "bag_classifier."),
    )
    n_layers = _patch_embed(state)
    dim, in_dim = shape(state, "instance.0.0.weight")[0], shape(state, "instance.0.0.weight")[1]
    params = {
        "dim": dim,
        "n_layers": n_layers,
        "query_dim": shape(state, "query.0.weight")[0],
        "query_layers": 1,
        "values": "linear",
        "norm": True,
        "dropout": float(settings.get("dropout_v") or 0.0),
    }
    notes = [f"ignored {', '.join(unused)}: never applied by MIL-Lab's code"] if unused else []
    return Converted("dsmil", in_dim, n_outputs(state, "bag_classifier.weight"), params, state, notes)


@family(
    "mil-lab-transformer",
    r"blocks\.0\.attention\.in_proj_weight",
    r"patch_embed\.0\.weight",
    r"cls_token",
    r"classifier\.weight",
)
def mil_lab_transformer(state: State, settings: Mapping[str, Any]) -> Converted:
    """MIL-Lab's transformer without an MLP in its layers: a TransMIL with dense attention, no positions."""
    state = rename(
        state,
        (r"blocks\.(\d+)\.attention\.in_proj_", r"layers.\1.attn.to_qkv."),
        (r"blocks\.(\d+)\.attention\.out_proj\.", r"layers.\1.attn.to_out.0."),
        (r"blocks\.(\d+)\.", r"layers.\1."),
    )
    params = {
        "n_feature_layers": _patch_embed(state),
        "dropout": float(settings.get("dropout") or 0.0),
        "attention": "dot_product",
        "qkv_bias": True,
    }
    heads = settings.get("num_heads")
    notes = [] if heads else ["taken as 8 heads: no config.json has num_heads"]
    return transmil_of(state, params, notes, default_heads=int(heads or 8))


def _patch_embed(state: dict[str, Tensor]) -> int:
    """Rename MIL-Lab's `patch_embed.{i}` in place to `instance.{0, 1, ...}.0`; the number of layers."""
    numbers = ordered(state, r"patch_embed\.(\d+)\.weight")
    for new, old in enumerate(numbers):
        for part in ("weight", "bias"):
            if (tensor := state.pop(f"patch_embed.{old}.{part}", None)) is not None:
                state[f"instance.{new}.0.{part}"] = tensor
    return len(numbers)
