"""Many models of one architecture as one: stacked parameters, a forward pass for all of them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from xmil.core.errors import unknown_name
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


class SGD:
    """SGD with momentum, as torch.optim.SGD without dampening."""

    def __init__(self, flat: Tensor, *, lr: float, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.state = {"velocity": torch.zeros_like(flat)}

    def step(self, flat: Tensor, gradient: Tensor) -> None:
        """Change the parameters in place."""
        flat.sub_(self.state["velocity"].mul_(self.momentum).add_(gradient), alpha=self.lr)


class Adam:
    """Adam with torch.optim.Adam's defaults."""

    def __init__(
        self, flat: Tensor, *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps
        zeros = torch.zeros_like
        ones = torch.ones(len(flat), 1, dtype=torch.float64, device=flat.device)
        self.state = {"mean": zeros(flat), "square": zeros(flat), "decay1": ones, "decay2": ones.clone()}

    def step(self, flat: Tensor, gradient: Tensor) -> None:
        """Change the parameters in place."""
        s, (beta1, beta2) = self.state, self.betas
        s["mean"].lerp_(gradient, 1 - beta1)
        s["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1 = (1 - s["decay1"].mul_(beta1)).to(flat.dtype)
        correction2 = (1 - s["decay2"].mul_(beta2)).sqrt().to(flat.dtype)
        denominator = (s["square"].sqrt() / correction2).add_(self.eps)
        flat.addcdiv_(s["mean"] / correction1, denominator, value=-self.lr)


OPTIMIZERS: dict[str, Callable[..., SGD | Adam]] = {"sgd": SGD, "adam": Adam}


def make_optimizer(name: str, flat: Tensor, *, lr: float) -> SGD | Adam:
    """A fresh optimizer for stacked parameters (R, p)."""
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name](flat, lr=lr)


logger = logging.getLogger(__name__)

WARMUP_RUNS = 3  # what CUDA asks for before a recording


class Repeated:
    """A function of no arguments that changes `state` in place, without anything the host must wait for.

    Steps of small models are bound by launching kernels; a graph launches them all at once.
    """

    def __init__(self, function: Callable[[], None], state: Sequence[Tensor]) -> None:
        self._function = function
        self._state = state
        self._recordable = state[0].is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._recordable:
            self._graph = self._record()
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """Record one run; the state is afterwards as it was. What cannot be recorded is run as it is."""
        before = [tensor.detach().clone() for tensor in self._state]
        try:
            return self._capture()
        except RuntimeError as error:
            logger.warning("The training step runs without a CUDA graph: %s", str(error).splitlines()[0])
            self._recordable = False
            return None
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._state, before, strict=True):
                    tensor.copy_(value)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP_RUNS):
                self._function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._function()
        return graph
