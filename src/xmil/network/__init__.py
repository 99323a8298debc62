"""Any module as f(bag): how to call it, what it returns, what travels with it, whether to trust it."""

from xmil.network.calling import Companions
from xmil.network.network import (
    CallOptions,
    ForwardFunction,
    Network,
    as_bag,
    as_model,
    check_same_bag,
    declared_names,
    declared_references,
    find_device,
    frozen,
    on_device,
    open_network,
)
from xmil.network.prediction import Prediction, predict
from xmil.network.reading import Watch
from xmil.network.trust import attempt, fewest_instances, first_line

__all__ = [
    "CallOptions",
    "Companions",
    "ForwardFunction",
    "Network",
    "Prediction",
    "Watch",
    "as_bag",
    "as_model",
    "attempt",
    "check_same_bag",
    "declared_names",
    "declared_references",
    "fewest_instances",
    "find_device",
    "first_line",
    "frozen",
    "on_device",
    "open_network",
    "predict",
]
