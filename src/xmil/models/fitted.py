"""Fitted probes of other libraries as one affine map: scikit-learn's linear models, Cox models."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from xmil.core.errors import InputError

Floats = npt.NDArray[np.float64]


class AffineProbe(nn.Module):
    """Outputs W h + b in double precision, with what they mean."""

    def __init__(
        self, weight: Floats, bias: Floats, *, task: str, class_names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.array(weight, dtype=np.float64)))
        self.bias = nn.Parameter(torch.from_numpy(np.array(bias, dtype=np.float64)))
        self.in_dim = self.weight.shape[1]
        self.task, self.class_names = task, class_names


def convert_probe(probe: Any, *, task: str | None = None) -> AffineProbe:
    """A fitted probe as an affine map whose outputs are its logits, values or log risk."""
    steps = [step for _, step in probe.steps] if hasattr(probe, "steps") else [probe]
    last = _last(steps[-1], task)
    weight, bias = last.weight.detach().numpy(), last.bias.detach().numpy()
    for step in reversed(steps[:-1]):
        scale, shift = _affine(step, weight.shape[1])
        weight, bias = weight @ scale, bias + weight @ shift
    return AffineProbe(weight, bias, task=last.task, class_names=last.class_names)


def _last(probe: Any, task: str | None) -> AffineProbe:
    if isinstance(probe, np.ndarray | list | tuple):
        if task != "cox":
            raise InputError(
                "Bare coefficients may mean anything; pass chain(..., task='cox') for a log risk."
            )
        return _cox(np.asarray(probe, dtype=np.float64), None)
    name = type(probe).__name__
    if hasattr(probe, "params_"):
        return _lifelines(probe)
    if not hasattr(probe, "coef_"):
        raise InputError(
            f"The probe {name} has no coefficients: fit it first, or pass a torch module, a linear "
            "scikit-learn model or a Cox model."
        )
    weight = np.atleast_2d(np.asarray(probe.coef_, dtype=np.float64))
    if "Cox" in name:
        return _cox(weight[0], np.asarray(getattr(probe, "offset_", 0.0)))
    bias = np.broadcast_to(np.asarray(probe.intercept_, dtype=np.float64).reshape(-1), (len(weight),))
    if not hasattr(probe, "classes_"):
        return AffineProbe(weight, bias, task=task or "regression")
    _check_softmax(probe, name, len(weight))
    return AffineProbe(
        weight, bias, task="classification", class_names=tuple(str(c) for c in probe.classes_.tolist())
    )


def _check_softmax(probe: Any, name: str, n_outputs: int) -> None:
    """Refuse classifiers whose probabilities are not the softmax or sigmoid of their linear outputs."""
    odd = name.startswith("SGD") and getattr(probe, "loss", "") != "log_loss"
    if odd or not hasattr(probe, "predict_proba"):
        raise InputError(f"The probe {name} gives no probabilities; fit a LogisticRegression instead.")
    apart = getattr(probe, "multi_class", None) == "ovr" or name.startswith("SGD")
    if n_outputs > 1 and (apart or getattr(probe, "solver", "") == "liblinear"):
        raise InputError(
            f"The probe {name} fits each class against the rest, which no softmax gives; fit a multinomial "
            "LogisticRegression instead."
        )


def _lifelines(probe: Any) -> AffineProbe:
    """A fitter with `params_` by covariate; where they are named by number, in the order of the numbers."""
    names = [str(name) for name in getattr(probe.params_, "index", range(len(probe.params_)))]
    values = np.asarray(probe.params_, dtype=np.float64)
    mean = getattr(probe, "_norm_mean", None)
    centre = None if mean is None else np.asarray(mean, dtype=np.float64)
    if sorted(names) == sorted(map(str, range(len(names)))):
        order = np.argsort([int(name) for name in names])
        values, centre = values[order], None if centre is None else centre[order]
    return _cox(values, None if centre is None else centre @ values)


def _cox(coefficients: Floats, offset: Any) -> AffineProbe:
    bias = np.zeros(1) if offset is None else -np.asarray(offset, dtype=np.float64).reshape(1)
    return AffineProbe(np.atleast_2d(coefficients), bias, task="cox")


def _affine(step: Any, width: int) -> tuple[Floats, Floats]:
    """A step before the last as x -> scale x + shift, `width` being what the next step takes."""
    if step is None or step == "passthrough":
        return np.eye(width), np.zeros(width)
    name = type(step).__name__
    if name == "StandardScaler":
        scale = np.ones(width) if step.scale_ is None else 1 / np.asarray(step.scale_, dtype=np.float64)
        mean = np.zeros(width) if not step.with_mean else np.asarray(step.mean_, dtype=np.float64)
        return np.diag(scale), -mean * scale
    if name in ("MinMaxScaler", "MaxAbsScaler"):
        if getattr(step, "clip", False):
            raise InputError("The probe's MinMaxScaler clips, which is not linear; fit it with clip=False.")
        scale = np.asarray(step.scale_, dtype=np.float64)
        return (
            (np.diag(scale), np.asarray(step.min_, dtype=np.float64))
            if name == "MinMaxScaler"
            else (np.diag(1 / scale), np.zeros(width))
        )
    if name == "PCA":
        parts = np.asarray(step.components_, dtype=np.float64)
        if step.whiten:
            parts = parts / np.sqrt(np.asarray(step.explained_variance_, dtype=np.float64))[:, None]
        return parts, -parts @ np.asarray(step.mean_, dtype=np.float64)
    raise InputError(
        f"The probe's step {name} is not known as a linear map; known: StandardScaler, MinMaxScaler, "
        "MaxAbsScaler, PCA."
    )
