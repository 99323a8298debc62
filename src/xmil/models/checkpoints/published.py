"""Published families: xMIL, MIL-Lab, CLAM (and CHIEF), TransMIL, HIPPO, DSMIL, torchmil, STAMP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import CheckpointError
from xmil.core.text import shorten
from xmil.models.checkpoints.families import (
    Converted,
    State,
    convert_transmil,
    count,
    drop,
    family,
    n_outputs,
    ordered,
    rename,
)
from xmil.models.checkpoints.files import HYPER_PARAMETERS

# settings of xMIL and MIL-Lab that do not matter for a loaded model, or that shapes and `convert` cover
_SETTINGS = """
mode split_path metadata_dirs patches_dirs features_dirs results_dir train_subsets val_subsets test_subsets
balance_key sampler drop_duplicates patch_filters train_bag_size sort_sampled_patches test_bag_sampling
test_repetitions max_bag_size min_bag_size preload_data targets metric_name train_batch_size val_batch_size
learning_rate weight_decay schedule_lr loss_type objective num_epochs val_interval early_stopping
stop_criterion optimizer grad_clip warmup test_checkpoint device num_workers seed batch_size patience
tolerance sampling dataset dataset_type noise groups logging_backend logging_project logging_entity
logging_name wandb_project wandb_entity num_repetitions
aggregation_model input_dim head_dim num_classes features_dim num_features inner_attention_dim
dropout dropout_strategy dropout_att dropout_class dropout_feat num_layers n_layers n_out_layers no_bias
attention no_attn_residual pool_method no_ppeg pe_position pos_embed scan num_encoders head_type ref_value
class_names
"""
KNOWN_SETTINGS = frozenset(_SETTINGS.split())
INSTANCE_LOSS = (r"instance_loss_fn\.", r"instance_classifiers\.")  # CLAM's
INSTANCE_LOSS_NOTE = "ignored {count} keys of the instance loss"


def notes_on(settings: Mapping[str, Any]) -> list[str]:
    """Note unknown settings; refuse a model with one encoder per instance."""
    if int(settings.get("num_encoders") or 1) > 1:
        raise CheckpointError(
            f"args.json has num_encoders {settings['num_encoders']}, an encoder for each patch; build the "
            "network with its own code and pass it to xmil.explain(net, bag)."
        )
    unknown = sorted(set(settings) - KNOWN_SETTINGS) if "aggregation_model" in settings else []
    return [f"args.json has unknown settings: {shorten(unknown, 6)}"] if unknown else []


def attention_model(
    model: str, state: State, params: dict[str, Any], notes: list[str], n_classes: int | None = None
) -> Converted:
    """Convert a model with `AttentionScores`, whose shapes give the widths."""
    attention_dim, dim = state["attention.V.weight"].shape
    first = state.get("instance.0.0.weight")
    in_dim = dim if first is None else int(first.shape[1])
    outputs = n_outputs(state, "classifier.weight") if n_classes is None else n_classes
    sizes = {"dim": dim, "attention_dim": attention_dim}
    return Converted(model, in_dim, outputs, {**sizes, **params}, dict(state), notes)


def abmil(state: State, *, n_layers: int, dropout: float, notes: list[str] | None = None) -> Converted:
    """Convert an AttnMIL, gated or not, with one or more attention branches."""
    params = {
        "gated": "attention.U.weight" in state,
        "branches": state["attention.w.weight"].shape[0],
        "n_layers": n_layers,
        "dropout": dropout,
    }
    return attention_model("attnmil", state, params, notes or [])


def attention_keys(prefix: str) -> list[tuple[str, str]]:
    """Rules that rename the keys of CLAM's attention, gated or not."""
    return [
        (rf"{prefix}attention_a\.0\.", "attention.V."),
        (rf"{prefix}attention_b\.0\.", "attention.U."),
        (rf"{prefix}attention_c\.", "attention.w."),
        (rf"{prefix}module\.0\.", "attention.V."),
        (rf"{prefix}module\.[23]\.", "attention.w."),
    ]


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
    params = {
        "n_layers": count(state, r"instance\.(\d+)\."),
        "n_out_layers": count(state, r"out\.(\d+)\."),
        "bias": "classifier.bias" in state,
        "dropout": float(settings.get("dropout") or 0.0),
        "dropout_at": settings.get("dropout_strategy") or "features",
    }
    return attention_model("attnmil", state, params, notes_on(settings))


@family("xmil-transmil", r"translayers\.0\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def xmil_transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL of the paper's authors; its `mlp_layers` have no effect and are left out."""
    position = settings.get("pe_position", 1)  # the layer before the position code, in older settings
    if position not in (-1, 1):
        raise CheckpointError(
            f"args.json has pe_position {position!r}; only 1 (after the first layer) and -1 are supported."
        )
    unused = "ignored {names}: the published code computes but never uses them"
    state, notes = drop(state, r"mlp_layers\.", note=unused)
    if settings.get("no_ppeg") or position == -1:
        state, more = drop(state, r"pos_layer\.", note="ignored {names}: the model was trained without them")
        notes += more
    state = rename(state, (r"translayers\.", "layers."))
    params = {
        "attention": "dot_product" if settings.get("attention") == "dot_prod" else "nystrom",
        "dropout": float(settings.get("dropout_feat") or 0.0),
        "attention_dropout": float(settings.get("dropout_att") or 0.0),
        "bag_dropout": float(settings.get("dropout_class") or 0.0),
        "pool": {"sum": "sum"}.get(settings.get("pool_method", ""), "class_token"),
    }
    return convert_transmil(state, params, notes + notes_on(settings), default_heads=8)


@family("xmil-addmil", r"pointer\.model\.0\.weight", r"classifier\.model\.0\.weight")
def xmil_addmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """AddMIL of the paper's authors."""
    state = rename(state, (r"pointer\.model\.", "attention."), (r"classifier\.model\.", "classifier."))
    hidden, in_dim = state["classifier.0.weight"].shape
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
    """MambaMIL of the xMIL authors; a cross scan is undone as in their code."""
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
    state = renamed
    scan = {1: "simple", 2: "bidirectional", 4: "cross"}.get(len(names))
    if scan is None or settings.get("scan", scan) != scan:
        raise CheckpointError(
            f"its layers have {len(names)} scans, which does not match the {settings.get('scan')!r} scan."
        )
    positions = "learned" if "columns" in state else str(settings.get("pos_embed", "none"))
    notes = []
    if positions != "none":
        notes = ["positions are level-0 coordinates over 256 pixels; create_model takes another grid"]
    elif "pos_embed" not in settings:
        notes = ["assumed no position code: args.json has no pos_embed, or is missing"]
    params = {
        "n_layers": count(state, r"layers\.(\d+)\."),
        "scan": scan,
        "positions": positions,
        "undo": "published",
    }
    return attention_model("mambamil", state, params, notes + notes_on(settings))


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
    return convert_transmil(state, params, default_heads=int(settings.get("num_heads") or 4))


@family(
    "mil-lab-abmil",
    r"patch_embed\.0\.weight",
    r"global_attn\.(attention_a\.0|module\.0)\.weight",
    r"classifier\.weight",
)
def mil_lab_abmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL of MIL-Lab, gated or not, and its CLAM, which only adds the instance loss."""
    state, notes = drop(state, *INSTANCE_LOSS, note=INSTANCE_LOSS_NOTE)
    state = rename(state, *attention_keys(r"global_attn\."))
    n_layers = _patch_embed(state)
    return abmil(state, n_layers=n_layers, dropout=float(settings.get("dropout") or 0.0), notes=notes)


@family(
    "mil-lab-dsmil",
    r"patch_embed\.0\.weight",
    r"i_classifier\.inst_classifier\.weight",
    r"b_classifier\.q\.weight",
    r"classifier\.weight",
)
def mil_lab_dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL of MIL-Lab; its code never applies `b_classifier.fcc`, which is left out."""
    never_applied = "ignored {names}: MIL-Lab's code never applies them"
    state, notes = drop(state, r"b_classifier\.fcc\.", note=never_applied)
    state = rename(
        state,
        (r"i_classifier\.inst_classifier\.", "instance_classifier."),
        (r"b_classifier\.q\.", "query.0."),
        (r"b_classifier\.v\.1\.", "values.0."),
        (r"b_classifier\.norm\.", "norm."),
        (r"classifier\.", "bag_classifier."),
    )
    n_layers = _patch_embed(state)
    dim, in_dim = state["instance.0.0.weight"].shape
    params = {
        "dim": dim,
        "n_layers": n_layers,
        "query_dim": state["query.0.weight"].shape[0],
        "query_layers": 1,
        "values": "linear",
        "norm": True,
        "dropout": float(settings.get("dropout_v") or 0.0),
    }
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
    notes = [] if heads else ["assumed 8 heads: config.json has no num_heads, or is missing"]
    return convert_transmil(state, params, notes, default_heads=int(heads or 8))


def _patch_embed(state: dict[str, Tensor]) -> int:
    """Rename MIL-Lab's `patch_embed.{i}` in place to `instance.{0, 1, ...}.0`; return how many."""
    numbers = ordered(state, r"patch_embed\.(\d+)\.weight")
    for new, old in enumerate(numbers):
        for part in ("weight", "bias"):
            if (tensor := state.pop(f"patch_embed.{old}.{part}", None)) is not None:
                state[f"instance.{new}.0.{part}"] = tensor
    return len(numbers)


@family(
    "clam",
    r"attention_net\.(module\.)?0\.weight",
    r"attention_net\.(module\.)?[23]\.(attention_a\.0|module\.0)\.weight",
    r"classifiers\..*weight",
)
def clam(state: State, settings: Mapping[str, Any]) -> Converted:
    """CLAM, single- or multi-branch, gated or not, without its instance loss."""
    state, notes = drop(state, *INSTANCE_LOSS, note=INSTANCE_LOSS_NOTE)
    state = rename(state, (r"attention_net\.module\.", "attention_net."))
    first = (r"attention_net\.0\.", "instance.0.0.")
    state = rename(state, first, *attention_keys(r"attention_net\.[23]\."))
    params = {"gated": "attention.U.weight" in state}
    if "classifiers.0.weight" in state:
        n_classes = count(state, r"classifiers\.(\d+)\.weight")
        return attention_model("clam_mb", state, params, notes, n_classes)
    state = rename(state, (r"classifiers\.", "classifier."))
    return attention_model("clam_sb", state, params, notes)


@family("transmil", r"layer1\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL as its authors published it."""
    state = rename(state, *((rf"layer{i}\.", f"layers.{i - 1}.") for i in range(1, 10)))
    return convert_transmil(state, {}, default_heads=8)


@family(
    "hippo",
    r"encoder\.0\.weight",
    r"attention_weights\.(attention_V\.0|0)\.weight",
    r"attention_weights\.(attention_weights|2)\.weight",
    r"head\.weight",
)
def hippo(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL of HIPPO, gated or not."""
    state = rename(
        state,
        (r"encoder\.0\.", "instance.0.0."),
        (r"attention_weights\.attention_V\.0\.", "attention.V."),
        (r"attention_weights\.attention_U\.0\.", "attention.U."),
        (r"attention_weights\.attention_weights\.", "attention.w."),
        (r"attention_weights\.0\.", "attention.V."),
        (r"attention_weights\.2\.", "attention.w."),
        (r"head\.", "classifier."),
    )
    return abmil(state, n_layers=1, dropout=0.0)


@family(
    "dsmil",
    r"i_classifier\.fc\.0\.weight",
    r"b_classifier\.q\.(0\.)?weight",
    r"b_classifier\.fcc\.weight",
)
def dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL as its authors published it: the score of each class is a sigmoid of the bag stream."""
    state = rename(
        state,
        (r"i_classifier\.fc\.0\.", "instance_classifier."),
        (r"b_classifier\.q\.(\d)\.", r"query.\1."),
        (r"b_classifier\.q\.", "query.0."),
        (r"b_classifier\.v\.1\.", "values.0."),
        (r"b_classifier\.fcc\.", "bag_classifier."),
    )
    n_classes, in_dim = state["instance_classifier.weight"].shape
    task = "multilabel" if n_classes > 1 else "classification"
    params = {**_query_and_values(state), "streams": "bag"}
    return Converted("dsmil", in_dim, n_classes, params, state, spec={"task": task})


def _query_and_values(state: State) -> dict[str, Any]:
    return {
        "query_dim": state["query.0.weight"].shape[0],
        "query_layers": 2 if "query.2.weight" in state else 1,
        "values": "relu" if "values.0.weight" in state else None,
    }


ONE_LOGIT = {"task": "classification"}  # binary cross-entropy
TANH = "assumed tanh attention: the file does not record the activation"


@family("torchmil-abmil", r"pool\.fc1\.weight", r"pool\.fc2\.weight", r"classifier\.weight")
def torchmil_abmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL, gated or not, and CLAM_SB without its instance loss."""
    loss = (r"inst_classifiers\.", r"inst_loss_fn\.", r"criterion\.")
    state, notes = drop(state, *loss, note="ignored {count} keys of the loss")
    state = rename(
        state,
        (r"pool\.fc1\.", "attention.V."),
        (r"pool\.fc_gated\.", "attention.U."),
        (r"pool\.fc2\.", "attention.w."),
    )
    state["attention.w.bias"] = torch.zeros(1)  # a softmax ignores it
    params = {"gated": "attention.U.weight" in state, "n_layers": 0}
    converted = attention_model("attnmil", state, params, [TANH, *notes])
    return replace(converted, spec=dict(ONE_LOGIT))


@family("torchmil-dsmil", r"inst_classifier\.weight", r"bag_classifier\.weight", r"q_nn\.(0\.)?weight")
def torchmil_dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL: the mean of both streams, as in its `predict`."""
    state, notes = drop(state, r"criterion\.", note="ignored {count} keys of the loss")
    state = rename(
        state,
        (r"inst_classifier\.", "instance_classifier."),
        (r"q_nn\.(\d)\.", r"query.\1."),
        (r"q_nn\.", "query.0."),
        (r"v_nn\.1\.", "values.0."),
    )
    if state["bag_classifier.weight"].ndim == 2:  # a linear layer; ours is a convolution
        state["bag_classifier.weight"] = state["bag_classifier.weight"].unsqueeze(1)
    n_classes, width = state["instance_classifier.weight"].shape
    notes = ["the mean of both streams, as in torchmil's predict", *notes]
    return Converted("dsmil", width, n_classes, _query_and_values(state), state, notes, dict(ONE_LOGIT))


STAMP_TASKS = {"classification": "classification", "regression": "regression", "survival": "cox"}
STAMP_HEADS = 8  # unless its settings have n_heads


@family(
    "stamp-vit",
    r"class_token",
    r"project_features\.0\.weight",
    r"transformer\.layers\.0\.0\.norm\.weight",
    r"mlp_head\.0\.weight",
)
def stamp_vit(state: State, settings: Mapping[str, Any]) -> Converted:
    """The vision transformer, with or without distances in its attention."""
    hyper = settings.get(HYPER_PARAMETERS, {})
    state = rename(
        state,
        (r"project_features\.", "instance."),
        (r"transformer\.layers\.(\d+)\.0\.norm\.", r"layers.\1.norm."),
        (r"transformer\.layers\.(\d+)\.0\.mhsa\.in_proj_", r"layers.\1.attn.to_qkv."),
        (r"transformer\.layers\.(\d+)\.0\.mhsa\.(out_proj|fc)\.", r"layers.\1.attn.to_out.0."),
        (r"transformer\.layers\.(\d+)\.0\.mhsa\.", r"layers.\1.attn."),
        (r"transformer\.layers\.(\d+)\.1\.", r"layers.\1.feed."),
        (r"transformer\.norm\.", "norm."),
        (r"mlp_head\.0\.", "classifier."),
    )
    layers = ordered(state, r"layers\.(\d+)\.")
    heads = [len(ordered(state, rf"layers\.{i}\.attn\.query_encoders\.(\d+)\.")) for i in layers]
    alibi, notes = any(heads), []
    if alibi:
        state, notes = (
            _joined_heads(state, layers, heads[0]),
            ["each head's slope includes the mean distance"],
        )
    elif "n_heads" not in hyper:
        notes = [f"assumed {STAMP_HEADS} heads: the file has no n_heads"]
    if hyper.get("task") not in (None, *STAMP_TASKS):
        notes = [*notes, f"its settings have the unknown task {hyper['task']!r}"]
    dim, in_dim = state["instance.0.weight"].shape
    params = {
        "dim": dim,
        "heads": heads[0] if alibi else int(hyper.get("n_heads", STAMP_HEADS)),
        "n_layers": len(layers),
        "feedforward": state["layers.0.feed.1.weight"].shape[0],
        "alibi": alibi,
    }
    outputs = n_outputs(state, "classifier.weight")
    names, task = hyper.get("categories"), hyper.get("task")
    spec: dict[str, Any] = {"task": STAMP_TASKS[task]} if task in STAMP_TASKS else {}
    if isinstance(names, list | tuple) and len(names) == outputs and all(isinstance(n, str) for n in names):
        spec |= {"class_names": tuple(names), "task": spec.get("task", "classification")}
    return Converted("stamp_vit", in_dim, outputs, params, dict(state), notes, spec)


def _joined_heads(state: State, layers: list[str], heads: int) -> dict[str, torch.Tensor]:
    """Join the encoders of all heads into one projection, and compute the slopes of the distances."""
    joined = {key: value for key, value in state.items() if ".attn." not in key or ".to_out." in key}
    for i in layers:
        attn = f"layers.{i}.attn."
        for part in ("weight", "bias"):
            kinds = ("query", "key", "value")
            rows = [state[f"{attn}{kind}_encoders.{h}.{part}"] for kind in kinds for h in range(heads)]
            joined[f"{attn}to_qkv.{part}"] = torch.cat(rows)
        scales = [state[f"{attn}attentions.{h}.bias_scale"] for h in range(heads)]
        means = [state[f"{attn}attentions.{h}.scale_distance.running_mean"] for h in range(heads)]
        joined[f"{attn}slopes"] = torch.cat(scales) / torch.cat(means)
    return joined
