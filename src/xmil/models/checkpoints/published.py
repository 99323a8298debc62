"""Published families: CLAM (and CHIEF), TransMIL, HIPPO, DSMIL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xmil.models.checkpoints.families import (
    Converted,
    State,
    abmil_of,
    count,
    drop,
    family,
    n_outputs,
    rename,
    shape,
    transmil_of,
)


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
        n_classes = n_outputs(state, "classifier.weight")
    return Converted("clam_mb" if multi else "clam_sb", in_dim, n_classes, params, state, notes)


@family("transmil", r"layer1\.attn\.to_qkv\.weight", r"_fc1\.0\.weight", r"_fc2\.weight")
def transmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """TransMIL as its authors published it."""
    state = rename(state, *((rf"layer{i}\.", f"layers.{i - 1}.") for i in range(1, 10)))
    return transmil_of(state, {}, [], default_heads=8)


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
    return abmil_of(state, n_layers=1, dropout=0.0)


@family(
    "dsmil",
    r"i_classifier\.fc\.0\.weight",
    r"b_classifier\.q\.(0\.)?weight",
    r"b_classifier\.fcc\.weight",
)
def dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL as its authors published it: its score is the sigmoid of the bag stream, for each class alone."""
    state = rename(
        state,
        (r"i_classifier\.fc\.0\.", "instance_classifier."),
        (r"b_classifier\.q\.(\d)\.", r"query.\1."),
        (r"b_classifier\.q\.", "query.0."),
        (r"b_classifier\.v\.1\.", "values.0."),
        (r"b_classifier\.fcc\.", "bag_classifier."),
    )
    n_classes, in_dim = shape(state, "instance_classifier.weight")
    params = {
        "query_dim": shape(state, "query.0.weight")[0],
        "query_layers": 2 if "query.2.weight" in state else 1,
        "values": "relu" if "values.0.weight" in state else None,
        "streams": "bag",
    }
    task = "multilabel" if n_classes > 1 else "classification"
    return Converted("dsmil", in_dim, n_classes, params, state, says={"task": task})


ONE_LOGIT = {"task": "classification"}  # binary cross-entropy
TANH = "taken as tanh attention: the file does not say which activation it has"


@family("torchmil-abmil", r"pool\.fc1\.weight", r"pool\.fc2\.weight", r"classifier\.weight")
def torchmil_abmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """ABMIL, gated or not, and CLAM_SB, whose instance classifiers serve its loss alone."""
    state, unused = drop(state, r"inst_classifiers\.", r"inst_loss_fn\.", r"criterion\.")
    state = rename(
        state,
        (r"pool\.fc1\.", "attention.V."),
        (r"pool\.fc_gated\.", "attention.U."),
        (r"pool\.fc2\.", "attention.w."),
    )
    hidden, width = shape(state, "attention.V.weight")
    state["attention.w.bias"] = torch.zeros(1)  # a softmax would not notice
    params = {
        "dim": width,
        "attention_dim": hidden,
        "gated": "attention.U.weight" in state,
        "n_layers": 0,
    }
    notes = [TANH, *([f"ignored {len(unused)} keys of the loss"] if unused else [])]
    n_classes = shape(state, "classifier.weight")[0]
    return Converted("attnmil", width, n_classes, params, state, notes, dict(ONE_LOGIT))


@family("torchmil-dsmil", r"inst_classifier\.weight", r"bag_classifier\.weight", r"q_nn\.(0\.)?weight")
def torchmil_dsmil(state: State, settings: Mapping[str, Any]) -> Converted:
    """DSMIL: as its `predict` has it, the mean of both streams."""
    state, unused = drop(state, r"criterion\.")
    state = rename(
        state,
        (r"inst_classifier\.", "instance_classifier."),
        (r"q_nn\.(\d)\.", r"query.\1."),
        (r"q_nn\.", "query.0."),
        (r"v_nn\.1\.", "values.0."),
    )
    if state["bag_classifier.weight"].ndim == 2:  # a linear layer, which is a convolution of ours
        state["bag_classifier.weight"] = state["bag_classifier.weight"].unsqueeze(1)
    n_classes, width = shape(state, "instance_classifier.weight")
    params = {
        "query_dim": shape(state, "query.0.weight")[0],
        "query_layers": 2 if "query.2.weight" in state else 1,
        "values": "relu" if "values.0.weight" in state else None,
    }
    notes = ["the mean of both streams, as in torchmil's predict"]
    notes += [f"ignored {len(unused)} keys of the loss"] if unused else []
    return Converted("dsmil", width, n_classes, params, state, notes, dict(ONE_LOGIT))
