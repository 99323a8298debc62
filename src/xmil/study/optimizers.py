"""SGD and Adam on one flat tensor of stacked parameters, every model for itself.

Written out rather than taken from torch.optim: state is indexed by model, so that finished models can leave,
and the step is a handful of kernels that a CUDA graph can record.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from xmil.core.errors import unknown_name


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
