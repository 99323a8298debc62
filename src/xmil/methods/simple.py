"""Instance logits of additive models, and the random baseline."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from xmil.core.explanation import Audit
from xmil.methods.network import Network
from xmil.methods.outputs import Output, Question
from xmil.methods.registry import Attribution, Attributions, register_method, seed_words


def _not_additive(network: Network) -> str | None:
    additive = network.model is not None and network.model.pooling == "additive"
    return None if additive else "its output is not a sum of instance logits"


@torch.no_grad()
def logits_batch(network: Network, x: Tensor, outputs: Sequence[Output]) -> Tensor:
    """Scores (b, outputs, n) of many bags."""
    parts, logits = _parts(network, x)
    return torch.stack([_shared(parts, logits, output)[0] for output in outputs], dim=1)


@register_method(
    "logits",
    signed=True,
    conserves=True,
    cost="1",
    outputs=("logit", "contrastive"),
    supports=_not_additive,
    batch=logits_batch,
)
@torch.no_grad()
def instance_logits(network: Network, x: Tensor, question: Question) -> Attributions:
    """What each instance adds to the output of an additive model."""
    parts, logits = _parts(network, x)
    found = []
    for output in question.outputs(logits):
        (scores,), value, seed = _shared(parts, logits, output)
        rest = float(value.double() - (seed * logits).double().sum())  # a reference, the risk of zero logits
        audit = Audit.close(output=float(value), instances=float(scores.double().sum()), bias=rest)
        found.append(Attribution(output, float(value), scores, audit))
    return Attributions(logits, found)


def _parts(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """What each instance adds to each output (b, n, c), and the outputs (b, c)."""
    model = network.model
    assert model is not None  # noqa: S101  # `_not_additive` has refused others
    return model.instance_logits(model.embed(x)), network(x)


def _shared(parts: Tensor, logits: Tensor, output: Output) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (b, n) of an output, its values (b,), and what each logit adds to it (b, c)."""
    with torch.enable_grad():
        leaf = logits.clone().requires_grad_(True)
        value = output.to_share(leaf)
        (seed,) = torch.autograd.grad(value.sum(), leaf)
    return (parts @ seed.unsqueeze(-1)).squeeze(-1), value, seed


@register_method("random", signed=True, cost="1")
@torch.no_grad()
def random(network: Network, x: Tensor, question: Question, *, seed: int | Sequence[int] = 0) -> Attributions:
    """Standard normal scores: what a method must beat."""
    logits = network(x)
    outputs = question.outputs(logits)
    generators = [np.random.default_rng([*seed_words(seed, "random"), int(o.target)]) for o in outputs]
    draws = [torch.from_numpy(rng.standard_normal(x.shape[1])).to(x) for rng in generators]
    return Attributions(
        logits, [Attribution(o, float(o(logits)), s) for o, s in zip(outputs, draws, strict=True)]
    )
