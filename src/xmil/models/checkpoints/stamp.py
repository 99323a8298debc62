"""STAMP: Lightning checkpoints of its vision transformer, with the task among their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xmil.models.checkpoints.families import Converted, State, family, n_outputs, ordered, rename, shape
from xmil.models.checkpoints.files import HYPER_PARAMETERS

TASKS = {"classification": "classification", "regression": "regression", "survival": "cox"}
HEADS = 8  # STAMP's own, where its settings do not say


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
        state, notes = _joined(state, layers, heads[0]), ["mean distances are part of each head's slope"]
    elif "n_heads" not in hyper:
        notes = [f"taken as {HEADS} heads: no settings in the file say how many"]
    if hyper.get("task") not in (None, *TASKS):
        notes = [*notes, f"its settings have the task {hyper['task']!r}, which is unknown here"]
    dim, in_dim = shape(state, "instance.0.weight")
    params = {
        "dim": dim,
        "heads": heads[0] if alibi else int(hyper.get("n_heads", HEADS)),
        "n_layers": len(layers),
        "feedforward": shape(state, "layers.0.feed.1.weight")[0],
        "alibi": alibi,
    }
    outputs = n_outputs(state, "classifier.weight")
    names, task = hyper.get("categories"), hyper.get("task")
    says: dict[str, Any] = {"task": TASKS[task]} if task in TASKS else {}
    if isinstance(names, list | tuple) and len(names) == outputs and all(isinstance(n, str) for n in names):
        says |= {"class_names": tuple(names), "task": says.get("task", "classification")}
    return Converted("stamp_vit", in_dim, outputs, params, dict(state), notes, says)


def _joined(state: State, layers: list[str], heads: int) -> dict[str, torch.Tensor]:
    """The encoders of each head as one projection, and the slopes of the distances."""
    joined = {key: value for key, value in state.items() if ".attn." not in key or ".to_out." in key}
    for i in layers:
        at = f"layers.{i}.attn."
        for part in ("weight", "bias"):
            rows = [state[f"{at}{kind}_encoders.{h}.{part}"] for kind in _KINDS for h in range(heads)]
            joined[f"{at}to_qkv.{part}"] = torch.cat(rows)
        scales = [state[f"{at}attentions.{h}.bias_scale"] for h in range(heads)]
        means = [state[f"{at}attentions.{h}.scale_distance.running_mean"] for h in range(heads)]
        joined[f"{at}slopes"] = torch.cat(scales) / torch.cat(means)
    return joined


_KINDS = ("query", "key", "value")
