"""A slide encoder and the probe fitted on its embeddings, as one model that is explained down to patches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter
from xmil.core.task import TASKS
from xmil.models.base import MILModel
from xmil.models.fitted import AffineProbe, convert_probe


def chain(
    encoder: nn.Module,
    probe: Any,
    *,
    forward: Callable[..., Any] | None = None,
    task: str | None = None,
    class_names: Sequence[str] | None = None,
    reference: Any = None,
) -> Chain:
    """A slide encoder with its probe as one model.

    `probe` is a torch module, a model of ours trained on slide embeddings, a fitted scikit-learn
    `LogisticRegression`, `Ridge` or `LinearRegression` or a pipeline of scalers and PCA before one, a fitted
    Cox model (`params_` or `coef_`), or the coefficients of one with `task="cox"`; predictions are the
    probe's own. `forward(encoder, x, *, coords)` gives the embedding where the encoder returns more than one.
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
    if task is not None and task not in TASKS:
        raise bad_parameter("task", "chain", f"one of {list(TASKS)}", task)
    found = probe if isinstance(probe, nn.Module) else convert_probe(probe, task=task)
    return Chain(
        encoder,
        found,
        forward=forward,
        task=task or getattr(found, "task", None) or "classification",
        class_names=getattr(found, "class_names", None) if class_names is None else tuple(class_names),
        reference=_reference(found) if reference is None else reference,
    ).eval()


class Chain(nn.Module):
    """See `chain`. It is called as its encoder is, and returns the probe's outputs (1, c)."""

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
        """How the chain is called: as its encoder, or as the function that calls it."""
        if self.caller is None:
            return inspect.signature(self.encoder.forward)
        whole = inspect.signature(self.caller)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The probe's outputs for the embedding of one bag."""
        given = (
            self.encoder(*args, **kwargs)
            if self.caller is None
            else self.caller(self.encoder, *args, **kwargs)
        )
        embedding = self._embedding(given)
        if not isinstance(self.probe, AffineProbe):
            out: Tensor = self.probe(
                embedding.unsqueeze(1) if isinstance(self.probe, MILModel) else embedding
            )
            return out
        return F.linear(embedding.to(self.probe.weight.dtype), self.probe.weight, self.probe.bias)

    def _embedding(self, given: Any) -> Tensor:
        """The one vector (1, e) of the width that the probe takes."""
        width = _width(self.probe)
        found = [v for v in _tensors(given) if v.is_floating_point() and v.shape[:-1].numel() == 1 and v.ndim]
        fitting = [v.reshape(1, -1) for v in found if width in (None, v.shape[-1])]
        if len(fitting) == 1:
            return fitting[0]
        shapes = ", ".join(str(tuple(v.shape)) for v in _tensors(given)) or type(given).__name__
        what = f"{len(fitting) or 'no'} vector{'s' * (len(fitting) > 1)}"
        wide = "" if width is None else f" of the width {width} that the probe takes"
        raise InputError(
            f"The encoder {type(self.encoder).__name__} gave {what}{wide} (it gave {shapes}); pass "
            "chain(..., forward=lambda encoder, x: ...) to pick the slide's."
        )


def _reference(probe: nn.Module) -> Any:
    """What a regression of ours is explained against; None for any other probe."""
    return getattr(getattr(probe, "spec", None), "reference", None)


def _width(probe: nn.Module) -> int | None:
    """The width that a probe takes: that of its first linear layer."""
    if isinstance(probe, AffineProbe | MILModel):
        return probe.in_dim
    return next((m.in_features for m in probe.modules() if isinstance(m, nn.Linear)), None)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for value in given.values() if isinstance(given, Mapping) else given:
            yield from _tensors(value)
