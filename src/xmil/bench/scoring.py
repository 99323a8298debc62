"""Methods on many bags at once: every class of all test bags in a few passes.

A model's output for a bag does not depend on its batch mates, so a method's `batch` can score many bags of
one size at once, with the same scores as `xmil.explain`; a method without one scores bag by bag.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.core.task import Target
from xmil.lrp import Composite
from xmil.methods import METHODS, PRESETS, Output, class_output, explain_targets, preset_composite
from xmil.methods.gradients import STEPS
from xmil.models import AttnMIL, MILModel, TransMIL
from xmil.network import Network

CHUNK_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 28}  # features per pass; fits a CPU's cache
UNFOLDED = "unfolded"
VARIANTS = {"lrp": PRESETS, "attention": (UNFOLDED,)}
FIRST = "instance.0.0"  # the first layer of models that start with a linear one

Scorer = Callable[[Network, Tensor, list[Output]], Tensor]


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, written `name[:preset][@output]`, such as `lrp:paper` or `lrp@log_odds`.

    Presets of lrp are its sets of rules; `attention:unfolded` leaves out attention to repeated instances.

    `composite` replaces the preset's rules; it has no text form.
    """

    name: str
    preset: str | None = None
    output: str | None = None
    composite: Composite | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Parse a text; unknown names are errors.

        >>> MethodSpec.parse("lrp:paper@log_odds")
        MethodSpec(name='lrp', preset='paper', output='log_odds', composite=None)
        """
        front, _, output = text.partition("@")
        name, _, preset = front.partition(":")
        method = METHODS[name]
        if preset and name not in VARIANTS:
            raise InputError(
                f"The method {name!r} has no presets; only {' and '.join(VARIANTS)} do. Got {text!r}."
            )
        if preset and preset not in VARIANTS[name]:
            raise unknown_name(f"preset of {name}", preset, VARIANTS[name])
        if output and output not in method.outputs:
            raise unknown_name(f"output of {name}", output, method.outputs)
        return cls(name, preset or None, output or None)

    def __str__(self) -> str:
        preset = f":{self.preset}" if self.preset else ""
        return f"{self.name}{preset}" + (f"@{self.output}" if self.output else "")

    def supports(self, model: MILModel) -> bool:
        """Whether the method can explain the model."""
        network = Network(model)
        if METHODS[self.name].supports(network) is not None:
            return False
        if self.preset == UNFOLDED:
            return isinstance(model, TransMIL)  # no other model repeats instances
        try:
            preset_composite(network, self.preset or "default")
        except UnsupportedError:
            return False
        return True


def score_bags(
    model: nn.Module, x: Tensor, spec: MethodSpec, *, seed: int | list[int] = 0, n_classes: int | None = None
) -> Tensor:
    """Score bags (b, n, d) for every class, (b, c, n); `random` takes any module with `n_classes`.

    >>> import xmil
    >>> model = xmil.create_model("meanpool", in_dim=4, n_classes=3, seed=0)
    >>> score_bags(model, torch.ones(5, 2, 4), MethodSpec("lrp")).shape
    torch.Size([5, 3, 2])
    """
    if spec.name == "random":
        shape = (len(x), n_classes or int(model.n_classes), x.shape[1])  # type: ignore[arg-type]
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(x.device)
    assert isinstance(model, MILModel)  # noqa: S101  # narrows the type for mypy
    if spec.name == "lrp":
        rules = spec.composite or preset_composite(Network(model), spec.preset or "default")
        model, x = project(model, x, rules)
    elif spec.name in ("gxi", "ig"):
        model, x = project(model, x)
    network = Network(model)
    kind = spec.output or METHODS[spec.name].outputs[0]
    outputs = [class_output(Target(c), kind, task=network.task) for c in range(model.n_classes)]
    scorer, numbers = _scorer(spec), x.shape[1] * x.shape[2] * (STEPS if spec.name == "ig" else 1)
    bags_in_a_pass = max(1, CHUNK_NUMBERS[x.device.type] // numbers)
    scores = torch.cat([scorer(network, bags, outputs) for bags in x.split(bags_in_a_pass)])
    if not bool(torch.isfinite(scores).all()):
        raise UnsupportedError(f"The scores of the method {spec} are not finite; try another preset.")
    return scores


def _scorer(spec: MethodSpec) -> Scorer:
    batch = METHODS[spec.name].batch
    if batch is None:
        return partial(_one_by_one, spec=spec)
    if spec.name == "lrp":
        return partial(batch, preset=spec.preset or "default", composite=spec.composite)
    return partial(batch, fold=False) if spec.preset == UNFOLDED else batch


def _one_by_one(network: Network, x: Tensor, outputs: list[Output], *, spec: MethodSpec) -> Tensor:
    scores: list[Any] = [
        [
            e.scores
            for e in explain_targets(
                network.module, bag, None, method=spec.name, output=outputs[0].kind, check=False
            )
        ]
        for bag in x
    ]
    return torch.from_numpy(np.asarray(scores)).to(x.device)


def project(model: MILModel, x: Tensor, rules: Composite | None = None) -> tuple[MILModel, Tensor]:
    """Apply the first layer to the bags, (b, n, e), and drop it from the model, if scores stay the same.

    The gamma rule depends on the signs of the layer's weights, so it needs the layer.
    """
    gamma = 0.0 if rules is None else rules.rule_for(f"{FIRST}.weight").gamma
    if not isinstance(model, AttnMIL | TransMIL) or gamma:
        return model, x
    first = model.get_submodule(FIRST)
    if not isinstance(first, nn.Linear) or first.out_features >= first.in_features:
        return model, x
    narrow = copy.deepcopy(model)
    unit = nn.Linear(first.out_features, first.out_features, bias=first.bias is not None)
    unit.weight.data = torch.eye(first.out_features).to(first.weight)
    if first.bias is not None:
        unit.bias.data = first.bias.detach().clone()
    narrow.get_submodule(FIRST.rpartition(".")[0])[0] = unit  # type: ignore[operator]
    with torch.no_grad():
        if (background := model.background) is not None:
            mean, patches = (
                F.linear(torch.from_numpy(rows).to(x), first.weight).cpu().numpy()
                for rows in (background.mean, background.patches)
            )
            narrow.background = Background(mean, patches, background.n)
        return narrow, F.linear(x, first.weight)
