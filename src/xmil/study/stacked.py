"""Many models of one architecture as one: stacked parameters, a forward pass for all of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from xmil.models import MILModel


class Stacked:
    """R models: one flat tensor (R, p), of which `parameters` are views, and buffers (R, ...)."""

    def __init__(self, template: nn.Module, flat: Tensor, buffers: dict[str, Tensor]) -> None:
        self.template = template
        self.flat = flat
        self.buffers = buffers
        self.parameters = _views(template, flat)
        self._forward = vmap(self._call, in_dims=(0, 0, 0), randomness="error")

    @classmethod
    def of(cls, models: Sequence[MILModel], device: torch.device | str = "cpu") -> Stacked:
        """Copies of the models, stacked on a device."""
        parameters, buffers = stack_module_state(list(models))
        flat = torch.cat([p.detach().flatten(1) for p in parameters.values()], dim=1)
        template = copy.deepcopy(models[0]).to(device)
        return cls(template, flat.to(device), {name: b.clone().to(device) for name, b in buffers.items()})

    def __len__(self) -> int:
        return len(self.flat)

    def __call__(self, x: Tensor, *, train: bool = False) -> Tensor:
        """Outputs (R, b, c) of bags (R, b, n, d), each model with its own bags."""
        self.template.train(train)
        out: Tensor = self._forward(self.parameters, self.buffers, x)
        return out

    def _call(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.template, (parameters, buffers), (x,))
        return out

    def state(self) -> dict[str, Tensor]:
        """The flat parameters and the buffers, by name; in-place changes of these change the models."""
        return {"": self.flat, **self.buffers}

    def select(self, keep: Tensor) -> Stacked:
        """The models at some places."""
        return Stacked(self.template, self.flat[keep], {name: b[keep] for name, b in self.buffers.items()})

    def models(self) -> list[nn.Module]:
        """The models one by one, in eval mode."""
        return [self.model(i) for i in range(len(self))]

    def model(self, i: int) -> nn.Module:
        """A copy of the i-th model, in eval mode."""
        model = copy.deepcopy(self.template).eval()
        values = {**self.parameters, **self.buffers}
        model.load_state_dict({name: value[i].detach() for name, value in values.items()})
        return model


def _views(template: nn.Module, flat: Tensor) -> dict[str, Tensor]:
    """The parameters as leaves (R, ...) that share the flat tensor's memory."""
    views, start = {}, 0
    for name, parameter in template.named_parameters():
        end = start + parameter.numel()
        views[name] = flat[:, start:end].view(len(flat), *parameter.shape).detach().requires_grad_(True)
        start = end
    return views
