"""Activations against a reference pass, from the formula."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xmil.lrp import record, trace
from xmil.network import frozen

ACTIVATIONS = [F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, torch.tanh, F.softplus]


class Net(nn.Module):
    def __init__(self, activation) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(4, 5), nn.Linear(5, 2), activation

    def forward(self, x):
        return self.last(self.activation(self.first(x)).mean(dim=1))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_relevance_is_what_neurons_have_over_the_reference(activation):
    torch.manual_seed(0)
    net, x, mu = Net(activation), torch.randn(1, 6, 4), torch.randn(1, 1, 4)
    with frozen(net):
        traced = trace(net, x, module=net, against=record(net, mu, module=net))
        relevance = traced.relevance(lambda z: z[:, 1])
        over = activation(net.first(x)) - activation(net.first(mu))
    assert traced.matched
    flow = relevance.input
    torch.testing.assert_close(
        flow.instances - flow.against(mu), over @ net.last.weight[1] / 6, atol=1e-5, rtol=1e-4
    )
    total = float(flow.instances.sum()) + relevance.shares["bias"]
    assert total == pytest.approx(float(relevance.output), abs=1e-5)


@pytest.mark.parametrize("activation", [F.gelu, F.relu, torch.tanh])
def test_an_instance_that_equals_the_reference_has_the_tangent(activation):
    torch.manual_seed(0)
    net, x = Net(activation), torch.randn(1, 1, 4)
    leaf = x.clone().requires_grad_(True)
    (tangent,) = torch.autograd.grad(net(leaf)[0, 0], leaf)
    with frozen(net):
        traced = trace(net, x, module=net, against=record(net, x, module=net))
        gradient = traced.relevance(lambda z: z[:, 0]).input.gradient
    torch.testing.assert_close(gradient, tangent, atol=1e-3, rtol=1e-3)


def test_another_number_of_activations_is_no_match():
    net = Net(F.relu)
    with frozen(net):
        seen = record(net, torch.ones(1, 1, 4), module=net)
        assert not trace(net, torch.ones(1, 3, 4), module=net, against=[*seen, *seen]).matched
