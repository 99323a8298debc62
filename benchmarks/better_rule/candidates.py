"""Candidate rules, side by side on the same bags: where to centre, by what, and how much.

`x:BY:A` is (x_i - a mu) . g_i with the exact rules' gradient; `h:A` centres behind the embedding, by that of
the mean patch; `s:BY:A` is (x_i - a mu) . g_i with activations against the baseline's as well
(`xmil.lrp.values`). BY is `mean`, of the training patches, `balanced`, the mean of the means per bag
label, or `bag`, the bag's own; `+c` is the mean over half-bags.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from xmil.core.task import Target
from xmil.lrp import Flow, record, trace
from xmil.methods import class_output
from xmil.methods.explain import deal
from xmil.models import AddMIL, MILModel
from xmil.network import frozen

CONTEXTS = 24
IG_STEPS = 20


@dataclass(frozen=True)
class Ordinary:
    """Ordinary patches (d,): the mean of the training patches, and the mean of its means per bag label."""

    mean: Tensor
    balanced: Tensor

    def point(self, x: Tensor, by: str) -> Tensor:
        """What bags x (b, n, d) are measured against."""
        return x.mean(dim=1, keepdim=True) if by == "bag" else getattr(self, by)


Rule = Callable[[MILModel, Tensor, Ordinary], Tensor]  # model, bags (b, n, d) to scores (b, c, n)


def _flows(
    model: MILModel, t: Tensor, forward: Callable[[Tensor], Tensor], reference: Tensor | None
) -> list[Flow]:
    seen = None if reference is None else record(forward, reference, module=model)
    traced = trace(forward, t, module=model, against=seen)
    outputs = [
        class_output(Target(c), "logit", n_outputs=model.n_classes).function for c in range(model.n_classes)
    ]
    return [traced.relevance(o, keep=o is not outputs[-1]).input for o in outputs]


def _centred(flows: Sequence[Flow], point: Tensor) -> Tensor:
    return torch.stack([flow.instances - flow.against(point) for flow in flows], dim=1)


def exact(model: MILModel, x: Tensor, ordinary: Ordinary) -> Tensor:
    """The exact rules, no baseline."""
    return _centred(_flows(model, x, model, None), torch.zeros_like(ordinary.mean))


def at_input(model: MILModel, x: Tensor, ordinary: Ordinary, *, by: str, strength: float) -> Tensor:
    """(x_i - a mu) . g_i."""
    return _centred(_flows(model, x, model, None), strength * ordinary.point(x, by))


def embedded(model: MILModel, x: Tensor, ordinary: Ordinary, *, strength: float) -> Tensor:
    """Behind the embedding, by the embedding of the mean patch."""
    with torch.no_grad():
        h, point = model.embed(x), model.embed(ordinary.mean.view(1, 1, -1))[0, 0]
    return _centred(_flows(model, h, model.aggregate, None), strength * point)


def secant(model: MILModel, x: Tensor, ordinary: Ordinary, *, by: str, strength: float) -> Tensor:
    """(x_i - a mu) . g_i, activations against a patch a mu alone."""
    point = strength * ordinary.point(x, by)
    reference = point.view(-1, 1, x.shape[-1])
    if isinstance(model, AddMIL):  # scales with the number of instances
        reference = reference.expand(-1, x.shape[1], -1).contiguous()
    return _centred(_flows(model, x, model, reference), point)


def in_contexts(model: MILModel, x: Tensor, ordinary: Ordinary, *, rule: Rule) -> Tensor:
    """The mean of a rule over the half-bags that hold each instance, all of them in one pass."""
    b, n, _ = x.shape
    rows = torch.stack([torch.as_tensor(r) for r in deal(n, contexts=CONTEXTS, keep=0.5)]).to(x.device)
    scores = rule(model, x[:, rows].flatten(0, 1), ordinary).unflatten(0, (b, len(rows)))  # (b, m, c, n / 2)
    total = scores.new_zeros(b, scores.shape[2], n)
    total.index_add_(2, rows.flatten(), scores.transpose(1, 2).flatten(2))
    return total / torch.bincount(rows.flatten(), minlength=n)


@torch.no_grad()
def single(model: MILModel, x: Tensor, _: Ordinary) -> Tensor:
    """Each instance as a bag of its own."""
    return model(x.flatten(0, 1).unsqueeze(1)).unflatten(0, x.shape[:2]).transpose(1, 2)


@torch.no_grad()
def one_removed(model: MILModel, x: Tensor, _: Ordinary) -> Tensor:
    """What the output loses with each instance."""
    h, full = model.embed(x), model(x)
    without = [model.aggregate(torch.cat([h[:, :k], h[:, k + 1 :]], dim=1)) for k in range(x.shape[1])]
    return full.unsqueeze(-1) - torch.stack(without, dim=-1)


def gradient_input(model: MILModel, x: Tensor, _: Ordinary) -> Tensor:
    """Gradient times input."""
    x = x.detach().requires_grad_(True)
    logits = model(x).sum(dim=0)
    return torch.stack(
        [(torch.autograd.grad(o, x, retain_graph=True)[0] * x).sum(dim=-1).detach() for o in logits], dim=1
    )


def integrated(model: MILModel, x: Tensor, _: Ordinary) -> Tensor:
    """Integrated gradients from zero, by the midpoint rule."""
    total = 0
    for k in range(IG_STEPS):
        t = (x * ((k + 0.5) / IG_STEPS)).detach().requires_grad_(True)
        logits = model(t).sum(dim=0)
        total = total + torch.stack([torch.autograd.grad(o, t, retain_graph=True)[0] for o in logits], dim=1)
    return (total * x.unsqueeze(1)).sum(dim=-1).detach() / IG_STEPS


@torch.no_grad()
def own_logits(model: MILModel, x: Tensor, _: Ordinary) -> Tensor:
    """What an additive model says itself."""
    assert isinstance(model, AddMIL)  # narrows the type
    return model.instance_logits(model.embed(x)).transpose(1, 2)


def candidates(how_many: str = "all") -> dict[str, Rule]:
    """Candidates by name, and the methods they are measured against: "few", "some", "more" or "all"."""
    few = how_many == "few"
    means, bags = ((0.25, 0.5, 1.0), (0.5,)) if few else ((0.0, 0.25, 0.5, 0.75, 1.0), (0.25, 0.5, 1.0))
    found: dict[str, Rule] = {"exact": exact, "single": single}
    found |= {f"s:mean:{a}": partial(secant, by="mean", strength=a) for a in means}
    found |= {f"s:bag:{a}": partial(secant, by="bag", strength=a) for a in bags}
    found |= {"s:balanced:0.5": partial(secant, by="balanced", strength=0.5), "ig": integrated}
    if how_many == "more":
        found |= {"s:mean:0.5+c": partial(in_contexts, rule=found["s:mean:0.5"])}
    if how_many == "all":
        at = [(by, a) for by in ("mean", "bag") for a in (0.5, 1.0)]
        found |= {f"x:{by}:{a}": partial(at_input, by=by, strength=a) for by, a in at}
        found |= {f"h:{a}": partial(embedded, strength=a) for a in (0.25, 0.5, 1.0)}
        averaged = ("exact", "s:mean:0.5", "s:bag:0.5")
        found |= {f"{name}+c": partial(in_contexts, rule=found[name]) for name in averaged}
        found |= {"one_removed": one_removed, "gxi": gradient_input}
    return found


def scores_of(model: MILModel, x: Tensor, ordinary: Ordinary, rules: dict[str, Rule]) -> dict[str, Tensor]:
    """The scores (b, c, n) of every rule; an additive model's own logits beside them."""
    if isinstance(model, AddMIL):
        rules = {**rules, "logits": own_logits}
    with frozen(model):
        return {name: rule(model, x, ordinary).detach() for name, rule in rules.items()}
