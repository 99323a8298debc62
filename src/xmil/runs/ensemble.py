"""The models of a fold ensemble as one: mean outputs, mean explanations and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from xmil.core.bag import Bag
from xmil.core.errors import InputError
from xmil.core.explanation import Audit, Explanation
from xmil.core.task import TASKS
from xmil.methods.opening import open_network
from xmil.models import MILModel
from xmil.models.base import ModelSpec
from xmil.nn.frozen import frozen

_SAME = ("in_dim", "n_classes", "task", "class_names", "encoder")


def check_ensemble(models: Sequence[MILModel], paths: Sequence[Path]) -> None:
    """Refuse models that do not answer the same question."""
    first = models[0].spec
    for model, path in zip(models[1:], paths[1:], strict=True):
        for name in _SAME:
            if getattr(model.spec, name) != getattr(first, name):
                raise InputError(
                    f"{path}: its {name} is {getattr(model.spec, name)!r}, that of {paths[0]} "
                    f"{getattr(first, name)!r}; the models of an ensemble must agree."
                )


def shared_spec(specs: Sequence[ModelSpec]) -> ModelSpec:
    """The spec of an ensemble: its first model's; time bins of their own have no common names."""
    return specs[0] if _same_bins(specs) else replace(specs[0], time_bins=None)


def bins_warning(specs: Sequence[ModelSpec]) -> str | None:
    """One sentence where the models of an ensemble cut time into bins of their own."""
    if _same_bins(specs):
        return None
    cuts = "; ".join(
        ", ".join(f"{edge:g}" for edge in spec.time_bins or ()) or "unknown" for spec in specs[:3]
    )
    return (
        f"the models cut time into bins of their own ({cuts}{'; ...' if len(specs) > 3 else ''}): the mean "
        "of their bin0, bin1, ... belongs to no single interval. The risk is comparable."
    )


def _same_bins(specs: Sequence[ModelSpec]) -> bool:
    return all(spec.time_bins == specs[0].time_bins for spec in specs)


def predicted_by(models: Sequence[MILModel], bag: Bag) -> int:
    """The target an ensemble predicts: by the mean of its models' outputs."""
    outputs = []
    for model in models:
        with frozen(model), torch.no_grad():
            network, x = open_network(model, bag)
            outputs.append(network(x).double())
    return TASKS[models[0].spec.task].predicted(torch.cat(outputs).mean(dim=0).cpu())


def average(explanations: Sequence[Explanation], spec: ModelSpec) -> Explanation:
    """The mean of the models' explanations of one target, with the standard deviation over the models.

    Outputs and audits are means as well: what holds for each model's account holds for the mean. The target
    has the name that the ensemble's spec gives it.
    """
    first = explanations[0]
    scores = np.stack([e.scores for e in explanations]).astype(np.float64)  # (m, n)
    logits = np.stack([e.logits for e in explanations]).astype(np.float64)
    return replace(
        first,
        target=first.target.resolve(n_classes=spec.n_targets, predicted=0, class_names=spec.target_names),
        scores=scores.mean(axis=0).astype(np.float32),
        spread=scores.std(axis=0, ddof=1).astype(np.float32),
        logits=logits.mean(axis=0).astype(np.float32),
        output=float(np.mean([e.output for e in explanations])),
        audit=_mean_audit([e.audit for e in explanations]),
        model=f"{first.model} x {len(explanations)}",
        relevance=None,
    )


def _mean_audit(audits: Sequence[Audit | None]) -> Audit | None:
    known = [audit.as_dict() for audit in audits if audit is not None]
    if len(known) < len(audits):
        return None
    return Audit(**{name: float(np.mean([audit[name] for audit in known])) for name in known[0]})
