"""One output of a checkpoint as a model of its own: its row of the last layer."""

from __future__ import annotations

from dataclasses import replace

from xmil.core.errors import CheckpointError, bad_parameter
from xmil.models.checkpoints.families import Converted
from xmil.models.registry import MODELS


def one_output(converted: Converted, head: int) -> Converted:
    """The conversion with the output `head` alone, such as the log risk beside an unused second output."""
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < converted.n_classes:
        raise bad_parameter("head", "load_model", f"an int in the range [0, {converted.n_classes})", head)
    layer = MODELS[converted.model].last_layer
    if layer is None:
        raise CheckpointError(f"the outputs of {converted.model} are not rows of one layer; leave out head=.")
    state = dict(converted.state)
    for key in (f"{layer}.weight", f"{layer}.bias"):
        if key in state:
            state[key] = state[key][head : head + 1]
    notes = [*converted.notes, f"output {head} of {converted.n_classes} was kept"]
    return replace(converted, n_classes=1, state=state, notes=notes)
