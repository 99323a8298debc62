"""`predict`: the prediction of a model for one bag, in the terms of its task."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

import numpy as np
from torch import Tensor, nn

from xmil.core.bag import Bag, FloatArray
from xmil.core.task import TASKS, Floats, with_reference
from xmil.network.network import CallOptions, as_bag, as_model, on_device, open_network


@dataclass(frozen=True, eq=False)
class Prediction:
    """The prediction of a model for a bag.

    `logits` (c,) are its outputs. A model with classes has `probabilities` (k,), `cls`, the predicted class,
    and its `name`; for multi-label models `name` joins the labels above 0.5. Others have a `value`, one
    number or one for each output, or a `risk`.
    """

    logits: FloatArray
    task: str
    names: tuple[str, ...]
    probabilities: Floats | None = None
    cls: int | None = None
    name: str | None = None
    value: float | Floats | None = None
    risk: float | None = None

    def __repr__(self) -> str:
        if self.probabilities is not None:
            pairs = zip(self.names, self.probabilities, strict=True)
            return f"Prediction({self.name!r}, {', '.join(f'{name} {p:.3g}' for name, p in pairs)})"
        number = self.value if self.risk is None else self.risk
        return f"Prediction({'value' if self.risk is None else 'risk'} {number})"


def predict(
    model: nn.Module | str | PathLike[str],
    bag: Bag | Tensor | np.ndarray[Any, Any] | str | PathLike[str],
    *,
    device: str | None = None,
    **how: Unpack[CallOptions],
) -> Prediction:
    """Predict the output of a model for a bag; both may be paths, the options are those of `explain`.

    >>> import torch, xmil
    >>> model = xmil.create_model("meanpool", in_dim=4, n_classes=2, class_names=["benign", "tumour"], seed=0)
    >>> prediction = predict(model, torch.ones(3, 4))
    >>> prediction.name, prediction.probabilities.round(3).tolist()
    ('benign', [0.632, 0.368])
    """
    model, bag = as_model(model), as_bag(bag)
    with on_device(model, device) as place:
        bag = bag.to(place) if place is not None and isinstance(bag, Tensor) else bag
        network, x = open_network(model, bag, **how)
        logits = network.outputs(x)
    spec = vars(network.module.spec) if hasattr(network.module, "spec") else vars(network.module)
    task = TASKS[network.task]
    target_names = (network.target_names(len(logits)) or ())[: task.count_targets(len(logits))]
    names = task.names(len(logits), target_names or None, spec.get("time_bins"))
    outputs = with_reference(logits, spec)
    shared: dict[str, Any] = {"logits": logits.astype(np.float32), "task": task.name, "names": tuple(names)}
    numbers = task.numbers(outputs)
    if task.decides:
        (name,) = task.describe(outputs[None, None], names)["predicted"]
        cls = int(task.predicted(outputs))
        return Prediction(**shared, probabilities=numbers, cls=cls, name=str(name))
    if task.truth == "time":
        return Prediction(**shared, risk=float(numbers[0]))
    return Prediction(**shared, value=float(numbers[0]) if len(numbers) == 1 else numbers)
