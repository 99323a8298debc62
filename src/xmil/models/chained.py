"""Join a slide encoder and a probe fitted on its embeddings into one model, explained down to patches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter, check_choice
from xmil.core.task import TASKS
from xmil.models.base import MILModel


def chain(
    encoder: nn.Module,
    probe: Any,
    *,
    forward: Callable[..., Any] | None = None,
    task: str | None = None,
    class_names: Sequence[str] | None = None,
    reference: Any = None,
) -> Chain:
    """Join a slide encoder and its probe into one model.

    `probe` is a torch module, an xmil model trained on slide embeddings, a fitted scikit-learn
    `LogisticRegression`, `Ridge` or `LinearRegression`, a pipeline of scalers and PCA before one, a fitted
    Cox model (`params_` or `coef_`), or the coefficients of one with `task="cox"`; the model predicts what
    the probe predicts. `forward(encoder, x, *, coords)` picks the embedding if the encoder returns several.
    Task and class names come from the probe.

    >>> import numpy as np
    >>> from sklearn.linear_model import LogisticRegression
    >>> slides = np.random.default_rng(0).normal(size=(20, 4))
    >>> net = chain(nn.AvgPool2d((10, 1)), LogisticRegression().fit(slides, slides[:, 0] > 0))
    >>> net.task, net.class_names
    ('classification', ('False', 'True'))
    """
    if not isinstance(encoder, nn.Module):
        raise bad_parameter("encoder", "chain", "a torch.nn.Module", type(encoder).__name__)
    check_choice("task", task, [None, *TASKS], owner="chain")
    module = probe if isinstance(probe, nn.Module) else convert_probe(probe, task=task)
    if reference is None:
        reference = getattr(getattr(module, "spec", None), "reference", None)
    return Chain(
        encoder,
        module,
        forward=forward,
        task=task or getattr(module, "task", None) or "classification",
        class_names=getattr(module, "class_names", None) if class_names is None else tuple(class_names),
        reference=reference,
    ).eval()


class Chain(nn.Module):
    """See `chain`. Takes the arguments of its encoder and returns the probe's outputs (1, c)."""

    def __init__(
        self,
        encoder: nn.Module,
        probe: nn.Module,
        *,
        forward: Callable[..., Any] | None = None,
        task: str = "classification",
        class_names: tuple[str, ...] | None = None,
        reference: Any = None,
    ) -> None:
        super().__init__()
        self.encoder, self.probe = encoder, probe
        self.task, self.class_names, self.reference = task, class_names, reference
        self.time_bins = getattr(getattr(probe, "spec", None), "time_bins", None)
        self.caller = forward

    @property
    def call_signature(self) -> inspect.Signature:
        """The signature of the encoder, or of the function that calls it."""
        if self.caller is None:
            return inspect.signature(self.encoder.forward)
        signature = inspect.signature(self.caller)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The probe's outputs for the embedding of one bag."""
        call = self.encoder if self.caller is None else partial(self.caller, self.encoder)
        embedding = self._embedding(call(*args, **kwargs))
        return self.probe(embedding.unsqueeze(1) if isinstance(self.probe, MILModel) else embedding)

    def _embedding(self, output: Any) -> Tensor:
        """Find the one vector (1, e) whose width the probe takes: that of its first linear layer."""
        if isinstance(self.probe, AffineProbe | MILModel):
            width: int | None = self.probe.in_dim
        else:
            layers = (m for m in self.probe.modules() if isinstance(m, nn.Linear))
            width = next((layer.in_features for layer in layers), None)
        vectors = [
            v for v in _tensors(output) if v.is_floating_point() and v.shape[:-1].numel() == 1 and v.ndim
        ]
        fitting = [v.reshape(1, -1) for v in vectors if width in (None, v.shape[-1])]
        if len(fitting) == 1:
            return fitting[0]
        shapes = ", ".join(str(tuple(v.shape)) for v in _tensors(output)) or type(output).__name__
        what = f"{len(fitting) or 'no'} vector{'s' * (len(fitting) > 1)}"
        expected = "" if width is None else f" of the width {width} that the probe takes"
        raise InputError(
            f"The encoder {type(self.encoder).__name__} returned {what}{expected}; its output was {shapes}. "
            "Pass chain(..., forward=lambda encoder, x: ...) to pick the slide's embedding."
        )


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


Floats = npt.NDArray[np.float64]


class AffineProbe(nn.Module):
    """Outputs W h + b in double precision, with their task and class names."""

    def __init__(
        self, weight: Floats, bias: Floats, *, task: str, class_names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.from_numpy(np.array(weight, dtype=np.float64)))
        self.bias = nn.Parameter(torch.from_numpy(np.array(bias, dtype=np.float64)))
        self.in_dim = self.weight.shape[1]
        self.task, self.class_names = task, class_names

    def forward(self, h: Tensor) -> Tensor:
        """(1, e) to (1, c)."""
        return F.linear(h.to(self.weight.dtype), self.weight, self.bias)


def convert_probe(probe: Any, *, task: str | None = None) -> AffineProbe:
    """Convert a fitted probe to an affine map whose outputs are its logits, values or log risk."""
    steps = [step for _, step in probe.steps] if hasattr(probe, "steps") else [probe]
    last = _convert_last(steps[-1], task)
    weight, bias = last.weight.detach().numpy(), last.bias.detach().numpy()
    for step in reversed(steps[:-1]):
        scale, shift = _convert_step(step, weight.shape[1])
        weight, bias = weight @ scale, bias + weight @ shift
    return AffineProbe(weight, bias, task=last.task, class_names=last.class_names)


def _convert_last(probe: Any, task: str | None) -> AffineProbe:
    if isinstance(probe, np.ndarray | list | tuple):
        if task != "cox":
            raise InputError(
                "Bare coefficients have no known task; pass chain(..., task='cox') for a log risk."
            )
        return _cox(np.asarray(probe, dtype=np.float64), None)
    name = type(probe).__name__
    if hasattr(probe, "params_"):
        names = [str(name) for name in getattr(probe.params_, "index", range(len(probe.params_)))]
        values = np.asarray(probe.params_, dtype=np.float64)
        mean = getattr(probe, "_norm_mean", None)
        centre = None if mean is None else np.asarray(mean, dtype=np.float64)
        if sorted(names) == sorted(map(str, range(len(names)))):
            order = np.argsort([int(name) for name in names])
            values, centre = values[order], None if centre is None else centre[order]
        return _cox(values, None if centre is None else centre @ values)
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
    is_hinge = name.startswith("SGD") and getattr(probe, "loss", "") != "log_loss"
    if is_hinge or not hasattr(probe, "predict_proba"):
        raise InputError(f"The probe {name} predicts no probabilities; fit a LogisticRegression instead.")
    one_vs_rest = getattr(probe, "multi_class", None) == "ovr" or name.startswith("SGD")
    if len(weight) > 1 and (one_vs_rest or getattr(probe, "solver", "") == "liblinear"):
        raise InputError(
            f"The probe {name} fits each class against the rest, not with a softmax; fit a multinomial "
            "LogisticRegression instead."
        )
    return AffineProbe(
        weight, bias, task="classification", class_names=tuple(str(c) for c in probe.classes_.tolist())
    )


def _cox(coefficients: Floats, offset: Any) -> AffineProbe:
    bias = np.zeros(1) if offset is None else -np.asarray(offset, dtype=np.float64).reshape(1)
    return AffineProbe(np.atleast_2d(coefficients), bias, task="cox")


def _convert_step(step: Any, width: int) -> tuple[Floats, Floats]:
    """Convert a step before the last to x -> scale x + shift; the next step takes `width` numbers."""
    if step is None or step == "passthrough":
        return np.eye(width), np.zeros(width)
    name = type(step).__name__
    if name == "StandardScaler":
        scale = np.ones(width) if step.scale_ is None else 1 / np.asarray(step.scale_, dtype=np.float64)
        mean = np.zeros(width) if not step.with_mean else np.asarray(step.mean_, dtype=np.float64)
        return np.diag(scale), -mean * scale
    if name in ("MinMaxScaler", "MaxAbsScaler"):
        if getattr(step, "clip", False):
            raise InputError("The probe's MinMaxScaler clips, which is not linear; fit it with `clip=False`.")
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
        f"The probe's step {name} is not supported; use StandardScaler, MinMaxScaler, MaxAbsScaler or PCA."
    )
