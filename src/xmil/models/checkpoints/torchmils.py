"""torchmil: state dicts of ABMIL, CLAM and DSMIL; bags of features as they are, one logit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xmil.models.checkpoints.families import Converted, State, drop, family, rename, shape

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
