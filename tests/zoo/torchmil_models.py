"""Every model of torchmil, small, with the way to call it on a bag of N instances."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import xmil

N, WIDTH = 20, 16
SMALL = {"in_shape": (WIDTH,), "att_dim": 8}
TRANSFORMER = {"transf_att_dim": 16, "transf_n_heads": 2, "pool_att_dim": 8}

# name of the row: class, settings, what forward takes beside the features
TORCHMIL: Mapping[str, tuple[str, dict[str, Any], str | None]] = {
    "ABMIL": ("ABMIL", SMALL, None),
    "ABMIL, gated": ("ABMIL", {**SMALL, "gated": True}, None),
    "CLAM_SB": ("CLAM_SB", {**SMALL, "k_sample": 2}, None),
    "DSMIL": ("DSMIL", SMALL, None),
    "DTFDMIL": ("DTFDMIL", {**SMALL, "n_groups": 2}, "mask"),
    "TransMIL": ("TransMIL", {**SMALL, "att_dim": 16, "n_heads": 2, "n_landmarks": 4}, None),
    "TransformerABMIL": ("TransformerABMIL", {"in_shape": (WIDTH,), **TRANSFORMER}, None),
    "IIBMIL": ("IIBMIL", {**SMALL, "att_dim": 16, "n_heads": 2}, None),
    "VAEABMIL": ("VAEABMIL", {"in_shape": (WIDTH,), "att_dim": 8}, None),
    "SmABMIL": ("SmABMIL", SMALL, "adj"),
    "SmABMIL, exact": ("SmABMIL", {**SMALL, "sm_mode": "exact"}, "adj"),
    "SmTransformerABMIL": ("SmTransformerABMIL", {"in_shape": (WIDTH,), **TRANSFORMER}, "adj"),
    "SmoothABMIL": ("SmoothABMIL", SMALL, "adj"),
    "ProbSmoothABMIL": ("ProbSmoothABMIL", {**SMALL, "n_samples_test": 5}, "adj"),
    "TransformerProbSmoothABMIL": (
        "TransformerProbSmoothABMIL",
        {"in_shape": (WIDTH,), "n_samples_test": 5, **TRANSFORMER},
        "adj",
    ),
    "CAMIL": (
        "CAMIL",
        {"in_shape": (WIDTH,), "nystrom_att_dim": 16, "pool_att_dim": 8, "n_heads": 2, "n_landmarks": 4},
        "adj",
    ),
    "DeepGraphSurv": ("DeepGraphSurv", {**SMALL, "hidden_dim": 8}, "adj"),
    "PatchGCN": ("PatchGCN", {**SMALL, "n_gcn_layers": 2, "hidden_dim": 8}, "adj"),
    "GTP": ("GTP", {**SMALL, "att_dim": 16, "n_clusters": 4, "n_heads": 2}, "adj"),
    "SETMIL": ("SETMIL", {**SMALL, "att_dim": 16, "set_n_heads": 2}, "coords"),
}  # fmt: skip


def build(row: str) -> tuple[nn.Module, Callable[..., Tensor]]:
    """The model of a row with random weights, and `forward=` for it."""
    import torchmil.models

    torch.manual_seed(0)
    name, settings, companion = TORCHMIL[row]
    if name == "VAEABMIL":
        settings = {**settings, "feat_ext": _autoencoder()}
    net = getattr(torchmil.models, name)(**settings).eval()
    return net, CALLS[companion]


def _autoencoder() -> nn.Module:
    from torchmil.nn import VariationalAutoEncoderMIL

    net: nn.Module = VariationalAutoEncoderMIL(input_shape=(WIDTH,), layer_sizes=[8, 8])
    return net


def bag() -> xmil.Bag:
    """Features, places on a grid five wide, and a ring as a normalised adjacency matrix."""
    features = np.random.default_rng(0).normal(size=(N, WIDTH)).astype(np.float32)
    eye, at = np.eye(N), np.arange(N)
    ring = (eye + np.roll(eye, 1, axis=0) + np.roll(eye, -1, axis=0)) / 3
    return xmil.Bag(
        features, coords=np.stack([at // 5, at % 5], axis=1), extras={"adjacency": ring.astype(np.float32)}
    )


def _logits(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(1, -1)


CALLS: Mapping[str | None, Callable[..., Tensor]] = {
    None: lambda net, x: _logits(net(x)),
    "adj": lambda net, x, *, adjacency: _logits(net(x, adjacency.to(x))),
    "mask": lambda net, x: _logits(net(x, torch.ones(1, x.shape[1]))),  # it does not run without
    "coords": lambda net, x, *, coords: _logits(net(x, coords)),
}
