"""The published families: xMIL, CLAM, TransMIL, MIL-Lab, HIPPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from xmil.core.errors import CheckpointError
from xmil.models.checkpoints.families import Converted, State, count, drop, family, ordered, rename, shape


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
    return Converted("attnmil", in_dim, _classes(state, "classifier.weight"), params, state)


@family("xmil-transmil", r"translayers\.0\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def xmil_transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL of the paper's authors; its `mlp_layers` were never applied and are left out."""
    state, unused = drop(state, r"mlp_layers\.")
    notes = [f"ignored {', '.join(unused)}: computed and thrown away by the published code"] if unused else []
    state = rename(state, (r"translayers\.", "layers."))
    params = {
        "attention": "dot_product" if settings.get("attention") == "dot_prod" else "nystrom",
        "dropout": float(settings.get("dropout_feat") or 0.0),
        "attention_dropout": float(settings.get("dropout_att") or 0.0),
        "bag_dropout": float(settings.get("dropout_class") or 0.0),
        "pool": {"sum": "sum"}.get(settings.get("pool_method", ""), "class_token"),
    }
    return _transmil(state, params, notes, default_heads=8)


@family("xmil-addmil", r"pointer\.model\.0\.weight", r"classifier\.model\.0\.weight")
def xmil_addmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """AddMIL of the paper's authors."""
    state = rename(state, (r"pointer\.model\.", "attention."), (r"classifier\.model\.", "classifier."))
    hidden, in_dim = shape(state, "classifier.0.weight")
    return Converted("addmil", in_dim, _classes(state, "classifier.4.weight"), {"hidden": hidden}, state)


@family(
    "clam",
    r"attention_net\.(module\.)?0\.weight",
    r"attention_net\.(module\.)?[23]\.(attention_a\.0|module\.0)\.weight",
    r"classifiers\..*weight",
)
def clam(state: State, settings: Mapping[str, Any]) -> Converted:
    """CLAM, single- or multi-branch, gated or not; what serves the instance loss alone is left out."""
    state, unused = drop(state, r"instance_loss_fn\.", r"instance_classifiers\.")
    state = rename(state, (r"attention_net\.module\.", "attention_net."))
    state = rename(
        state,
        (r"attention_net\.0\.", "instance.0.0."),
        (r"attention_net\.[23]\.attention_a\.0\.", "attention.V."),
        (r"attention_net\.[23]\.attention_b\.0\.", "attention.U."),
        (r"attention_net\.[23]\.attention_c\.", "attention.w."),
        (r"attention_net\.[23]\.module\.0\.", "attention.V."),
        (r"attention_net\.[23]\.module\.[23]\.", "attention.w."),
    )
    dim, in_dim = shape(state, "instance.0.0.weight")
    params = {
        "dim": dim,
        "attention_dim": shape(state, "attention.V.weight")[0],
        "gated": "attention.U.weight" in state,
    }
    notes = [f"ignored {len(unused)} keys of the instance loss"] if unused else []
    multi = "classifiers.0.weight" in state
    if multi:
        n_classes = count(state, r"classifiers\.(\d+)\.weight")
    else:
        state = rename(state, (r"classifiers\.", "classifier."))
        n_classes = _classes(state, "classifier.weight")
    return Converted("clam_mb" if multi else "clam_sb", in_dim, n_classes, params, state, notes)


@family("transmil", r"layer1\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL as its authors published it."""
    state = rename(state, *((rf"layer{i}\.", f"layers.{i - 1}.") for i in range(1, 10)))
    return _transmil(state, {}, [], default_heads=8)


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
    return _transmil(state, params, [], default_heads=int(settings.get("num_heads") or 4))


@family(
    "mil-lab-abmil",
    r"patch_embed\.0\.weight",
    r"global_attn\.(attention_a\.0|module\.0)\.weight",
    r"classifier\.weight",
)
def mil_lab_abmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL of MIL-Lab, gated or not."""
    state = rename(
        state,
        (r"global_attn\.attention_a\.0\.", "attention.V."),
        (r"global_attn\.attention_b\.0\.", "attention.U."),
        (r"global_attn\.attention_c\.", "attention.w."),
        (r"global_attn\.module\.0\.", "attention.V."),
        (r"global_attn\.module\.[23]\.", "attention.w."),
    )
    n_layers = _patch_embed(state)
    return _abmil(state, n_layers=n_layers, dropout=float(settings.get("dropout") or 0.0))


@family(
    "hippo",
    r"encoder\.0\.weight",
    r"attention_V\.0\.weight",
    r"attention_weights\.weight",
    r"classifier\..*weight",
)
def hippo(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL of HIPPO, gated or not."""
    state = rename(
        state,
        (r"encoder\.0\.", "instance.0.0."),
        (r"attention_V\.0\.", "attention.V."),
        (r"attention_U\.0\.", "attention.U."),
        (r"attention_weights\.", "attention.w."),
        (r"classifier\.0\.", "classifier."),
    )
    return _abmil(state, n_layers=1, dropout=0.0)


def _abmil(state: dict[str, Tensor], *, n_layers: int, dropout: float) -> Converted:
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
    return Converted("attnmil", in_dim, _classes(state, "classifier.weight"), params, state)


def _transmil(state: State, params: dict[str, Any], notes: list[str], *, default_heads: int) -> Converted:
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
        "transmil", in_dim, _classes(state, "classifier.weight"), {**params, **found}, state, notes
    )


def _patch_embed(state: dict[str, Tensor]) -> int:
    """Rename MIL-Lab's `patch_embed.{i}` in place to `instance.{0, 1, ...}.0`; the number of layers."""
    numbers = ordered(state, r"patch_embed\.(\d+)\.weight")
    for new, old in enumerate(numbers):
        for part in ("weight", "bias"):
            if (tensor := state.pop(f"patch_embed.{old}.{part}", None)) is not None:
                state[f"instance.{new}.0.{part}"] = tensor
    return len(numbers)


def _classes(state: State, key: str) -> int:
    if key not in state:
        raise CheckpointError(
            f"the classifier is missing ({key}); a checkpoint without a head cannot be explained."
        )
    return int(state[key].shape[0])
