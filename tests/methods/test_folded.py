"""Folding batch norm changes no output, touches no original, and leaves alone what it cannot fold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from xmil.core.errors import UnsupportedError
from xmil.methods import fold_batch_norm
from xmil.nn import ResNet


def lived_in(module: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics and scales as after a training."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.copy_(torch.randn(part.num_features, generator=generator))
            part.running_var.copy_(torch.rand(part.num_features, generator=generator) + 0.5)
            part.weight.data.copy_(torch.randn(part.num_features, generator=generator))
            part.bias.data.copy_(torch.randn(part.num_features, generator=generator))
    return module.eval()


@torch.no_grad()
def test_a_folded_resnet_gives_the_same_features_without_any_norm() -> None:
    net = lived_in(ResNet("resnet18"))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = torch.randn(2, 3, 32, 32)
    folded = fold_batch_norm(net, x[:1])
    torch.testing.assert_close(folded(x), net(x), rtol=1e-3, atol=1e-3 * float(net(x).abs().max()))
    assert not any(isinstance(part, nn.BatchNorm2d) for part in folded.modules())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


class Shared(nn.Module):
    """One convolution read by a norm and by itself, a norm with an activation, and one that reads a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.active, self.last = ActiveNorm(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.active(self.first(x))
        return self.last(self.second(h) + h).mean(dim=(2, 3))


class ActiveNorm(nn.BatchNorm2d):
    """A norm that goes on to its activation, as timm's do."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


@torch.no_grad()
def test_norms_with_activations_fold_and_norms_of_sums_stay() -> None:
    net, x = lived_in(Shared()), torch.randn(2, 3, 8, 8)
    folded = fold_batch_norm(net, x)
    torch.testing.assert_close(folded(x), net(x), rtol=1e-4, atol=1e-5)
    assert isinstance(folded.last, nn.BatchNorm2d)
    assert not folded.active.running_mean.any()
    assert (folded.active.weight == 1).all()


class Around(nn.Module):
    """The convolution's own output is read beside the norm: folding would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolution(x)
        return (self.norm(h) + h).mean(dim=(2, 3))


def test_what_would_compute_something_else_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="Batch norm of Around cannot be folded"):
        fold_batch_norm(lived_in(Around()), torch.randn(1, 3, 8, 8))
