"""A worker that predicts cases: reads their bags and runs every model of an ensemble on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import Bag
from xmil.core.errors import UnsupportedError
from xmil.data.cases import Case, read_case
from xmil.engine.explainer import load_models
from xmil.engine.pool import Engine, Outcome, Stages, process
from xmil.methods.explain import as_tensor
from xmil.methods.network import Network
from xmil.models import MILModel
from xmil.nn.frozen import frozen


@dataclass(frozen=True)
class Answer:
    """What the models say of a bag: outputs (m, c), its number of instances, the encoder of its features."""

    outputs: npt.NDArray[np.float64]
    n: int
    encoder: str | None = None


def predict_cases(
    models: Sequence[Path],
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    engine: Engine | None = None,
    reading: dict[str, Any] | None = None,
) -> Iterator[Outcome[Case, Answer]]:
    """Outputs of one or several checkpoints for each case, as they are done; what fails has a reason.

    `reading` are options of `read_bag`.
    """
    make = partial(make_predictor, tuple(models), device, reading or {})
    return process(cases, make, engine)


def make_predictor(paths: tuple[Path, ...], device: str, reading: dict[str, Any]) -> Stages[Case, Answer]:
    """The worker of a prediction: one copy of the models for each process."""
    models = load_models(paths, device)
    return Stages(lambda case: read_case(case, **reading)[0], lambda _, bag: predict_bag(models, bag))


def predict_bag(models: Sequence[MILModel], bag: Bag) -> Answer:
    """The outputs of each model for a bag, in double precision."""
    outputs = [_outputs(model, bag) for model in models]
    return Answer(np.stack(outputs), len(bag), bag.encoder)


def _outputs(model: MILModel, bag: Bag) -> npt.NDArray[np.float64]:
    with frozen(model), torch.no_grad():
        outputs = model(as_tensor(bag, Network(model)))[0].double().cpu().numpy()
    if not np.isfinite(outputs).all():
        raise UnsupportedError(f"The outputs of {model.spec.name} are not finite for {bag.slide_id!r}.")
    return np.asarray(outputs)
