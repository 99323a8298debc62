"""The paper's authors: xMIL as published, and its successor with more tasks and models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xmil.core.errors import CheckpointError
from xmil.models.checkpoints.families import (
    Converted,
    State,
    count,
    drop,
    family,
    n_outputs,
    ordered,
    rename,
    shape,
    transmil_of,
)
from xmil.models.checkpoints.files import listed

# settings of both codes that say nothing of a loaded model, or that shapes and `convert` have answered
_TRAINING = """
mode split_path metadata_dirs patches_dirs features_dirs results_dir train_subsets val_subsets test_subsets
balance_key sampler drop_duplicates patch_filters train_bag_size sort_sampled_patches test_bag_sampling
test_repetitions max_bag_size min_bag_size preload_data targets metric_name train_batch_size val_batch_size
learning_rate weight_decay schedule_lr loss_type objective num_epochs val_interval early_stopping
stop_criterion optimizer grad_clip warmup test_checkpoint device num_workers seed batch_size patience
tolerance sampling dataset dataset_type noise groups logging_backend logging_project logging_entity
logging_name wandb_project wandb_entity num_repetitions
"""
_MODEL = """
aggregation_model input_dim head_dim num_classes features_dim num_features inner_attention_dim
dropout dropout_strategy dropout_att dropout_class dropout_feat num_layers n_layers n_out_layers no_bias
attention no_attn_residual pool_method no_ppeg pe_position pos_embed scan num_encoders head_type ref_value
class_names
"""
KNOWN = frozenset((_TRAINING + _MODEL).split())


def notes_on(settings: Mapping[str, Any]) -> list[str]:
    """Notes on settings that nobody here knows; one encoder for each instance is refused."""
    if int(settings.get("num_encoders") or 1) > 1:
        raise CheckpointError(
            f"args.json has num_encoders {settings['num_encoders']}, an encoder for each instance; build the "
            "network with its own code and give it to xmil.explain(net, bag)."
        )
    unknown = sorted(set(settings) - KNOWN) if "aggregation_model" in settings else []
    return [f"args.json has settings of unknown meaning: {listed(unknown)}"] if unknown else []


@family("xmil-attnmil", r"linear_layers\.0\.0\.weight", r"attention\.0\.weight", r"attention\.2\.weight")
def xmil_attnmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """AttnMIL of the paper's authors; ungated."""
    state = rename(
        state,
        (r"linear_layers\.", "instance."),
        (r"attention\.0\.", "attention.V."),
        (r"attention\.2\.", "attention.w."),
        (r"out_layers\.", "out."),
        (r"linear_head\.", "classifier."),
    )
    dim, in_dim = shape(state, "instance.0.0.weight")
    params = {
        "dim": dim,
        "attention_dim": shape(state, "attention.V.weight")[0],
        "n_layers": count(state, r"instance\.(\d+)\."),
        "n_out_layers": count(state, r"out\.(\d+)\."),
        "bias": "classifier.bias" in state,
        "dropout": float(settings.get("dropout") or 0.0),
        "dropout_at": settings.get("dropout_strategy") or "features",
    }
    return Converted(
        "attnmil", in_dim, n_outputs(state, "classifier.weight"), params, state, notes_on(settings)
    )


@family("xmil-transmil", r"translayers\.0\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def xmil_transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL of the paper's authors; its `mlp_layers` were never applied and are left out."""
    state, unused = drop(state, r"mlp_layers\.")
    notes = [f"ignored {', '.join(unused)}: computed and thrown away by the published code"] if unused else []
    if settings.get("no_ppeg") or _place_of_ppeg(settings) == -1:
        state, unused = drop(state, r"pos_layer\.")
        notes += [f"ignored {', '.join(unused)}: the model was trained without them"] if unused else []
    state = rename(state, (r"translayers\.", "layers."))
    params = {
        "attention": "dot_product" if settings.get("attention") == "dot_prod" else "nystrom",
        "dropout": float(settings.get("dropout_feat") or 0.0),
        "attention_dropout": float(settings.get("dropout_att") or 0.0),
        "bag_dropout": float(settings.get("dropout_class") or 0.0),
        "pool": {"sum": "sum"}.get(settings.get("pool_method", ""), "class_token"),
    }
    return transmil_of(state, params, notes + notes_on(settings), default_heads=8)


def _place_of_ppeg(settings: Mapping[str, Any]) -> int:
    """After which layer the positions are encoded, as older settings have it; -1 for nowhere."""
    place = settings.get("pe_position", 1)
    if place not in (-1, 1):
        raise CheckpointError(
            f"args.json has pe_position {place!r}; only 1 (after the first layer) and -1 load."
        )
    return int(place)


@family("xmil-addmil", r"pointer\.model\.0\.weight", r"classifier\.model\.0\.weight")
def xmil_addmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """AddMIL of the paper's authors."""
    state = rename(state, (r"pointer\.model\.", "attention."), (r"classifier\.model\.", "classifier."))
    hidden, in_dim = shape(state, "classifier.0.weight")
    outputs = n_outputs(state, "classifier.4.weight")
    return Converted("addmil", in_dim, outputs, {"hidden": hidden}, state, notes_on(settings))


@family(
    "xmil-mambamil",
    r"proj\.0\.weight",
    r"mamba_block\.layers\.0\.mamba\.in_proj\.weight",
    r"attention\.2\.weight",
    r"linear_head\.weight",
)
def xmil_mambamil(state: State, settings: Mapping[str, Any]) -> Converted:
    """MambaMIL of the successor; a cross scan is put back as its code does."""
    state = rename(
        state,
        (r"proj\.0\.", "instance.0.0."),
        (r"pos_embed_x$", "columns"),
        (r"pos_embed_y$", "rows"),
        (r"mamba_block\.", ""),
        (r"attention\.0\.", "attention.V."),
        (r"attention\.2\.", "attention.w."),
        (r"linear_head\.", "classifier."),
    )
    part = re.compile(  # `conv1d_a`, `A_b_log` and their like are branches 0, 1, ...
        r"(layers\.\d+\.mamba\.)(conv1d|x_proj|dt_proj|A_log|A|D)(?:_([a-d]))?(_log)?((?:\.\w+)?)$"
    )
    scans = {key: match for key in state if (match := part.match(key))}
    names = sorted({match[3] or "" for match in scans.values()})
    renamed = {key: value for key, value in state.items() if key not in scans}
    for key, match in scans.items():
        own = {"conv1d": "conv", "A": "A_log"}.get(match[2], match[2])
        renamed[f"{match[1]}branches.{names.index(match[3] or '')}.{own}{match[5]}"] = state[key]
    state, n_branches = renamed, len(names)
    scan = {1: "simple", 2: "bidirectional", 4: "cross"}.get(n_branches)
    if scan is None or settings.get("scan", scan) != scan:
        raise CheckpointError(
            f"{n_branches} scans in a layer, which is not the {settings.get('scan')!r} scan."
        )
    positions, notes = _positions(state, settings)
    dim, in_dim = shape(state, "instance.0.0.weight")
    params = {
        "dim": dim,
        "attention_dim": shape(state, "attention.V.weight")[0],
        "n_layers": len(ordered(state, r"layers\.(\d+)\.")),
        "scan": scan,
        "positions": positions,
        "undo": "published",
    }
    outputs = n_outputs(state, "classifier.weight")
    return Converted("mambamil", in_dim, outputs, params, state, notes + notes_on(settings))


def _positions(state: State, settings: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The position code, and a note where it was assumed or where coordinates become places on a grid."""
    if "columns" not in state and "pos_embed" not in settings:
        return "none", ["taken as without a position code: no args.json has pos_embed"]
    positions = "learned" if "columns" in state else str(settings["pos_embed"])
    grid = "places are level-0 coordinates over 256 pixels; another grid is a parameter of create_model"
    return positions, [] if positions == "none" else [grid]
