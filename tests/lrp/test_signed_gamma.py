"""The signed gamma rule: its formula, zennit's result on the same folded network, and no explosion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.encoders.torchvisions import timm_or_skip
from tests.methods.test_folded import lived_in
from xmil.lrp import AffineRule, Composite, trace
from xmil.methods import fold_batch_norm
from xmil.network import frozen
from xmil.nn import ResNet


def relevance_of(
    net: nn.Module, x: Tensor, g: Tensor, signed: bool = True, **rule: float
) -> tuple[Tensor, float]:
    """Relevance at the input of g . net(x), and what constants kept."""
    with frozen(net):
        found = trace(
            net, x, module=net, composite=Composite(default=AffineRule(**rule, signed=signed))
        ).relevance(lambda out: out @ g)
    return found.input.features, float(sum(found.shares.values()))


@pytest.mark.parametrize("gamma", [0.25, 10.0])
def test_a_linear_layer_by_the_formula(gamma: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 5).double()
    x, g = torch.randn(1, 6, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    found, kept = relevance_of(layer, x, g, gamma=gamma)
    out, weight, bias = (t.detach().numpy() for t in (layer(x)[0], layer.weight, layer.bias))
    slow, slow_kept = np.zeros(6), 0.0
    for j in range(5):
        terms = [float(x[0, i]) * weight[j, i] for i in range(6)] + [bias[j]]
        strong = [t + gamma * t if t * out[j] > 0 else t for t in terms]
        assert abs(sum(strong)) >= abs(out[j])  # what keeps the account from exploding
        shares = [t / sum(strong) * out[j] * float(g[j]) for t in strong]
        slow += shares[:6]
        slow_kept += shares[6]
    np.testing.assert_allclose(found[0].numpy(), slow, rtol=1e-9)
    assert kept == pytest.approx(slow_kept, rel=1e-6)


@pytest.mark.parametrize(("name", "value"), [("gamma", 0.1), ("gamma", 10.0), ("epsilon", 0.25)])
def test_zennit_gives_the_same_on_the_folded_network(name: str, value: float) -> None:
    timm_or_skip()  # zennit imports torchvision
    pytest.importorskip("zennit", reason="zennit is not installed")
    from zennit.composites import LayerMapComposite
    from zennit.rules import Epsilon, Gamma, Norm, Pass

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((3, 6), (6, 8), (8, 8)):
        layers += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    net = lived_in(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())).double()
    x, g = torch.randn(1, 3, 32, 32, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    folded = fold_batch_norm(net, x)
    ours, _ = relevance_of(folded, x, g, **{name: value})
    rule = Gamma(value, stabilizer=1e-300) if name == "gamma" else Epsilon(value)
    rules = [(nn.Conv2d, rule), (nn.ReLU, Pass()), (nn.AdaptiveAvgPool2d, Norm(stabilizer=1e-300))]
    theirs = x.clone().requires_grad_(True)
    with LayerMapComposite(rules).context(folded) as hooked:
        out = hooked(theirs)
        (found,) = torch.autograd.grad(out, theirs, grad_outputs=out.detach() * g)
    torch.testing.assert_close(ours, found, rtol=1e-6, atol=1e-9 * float(found.abs().max()))


@pytest.mark.parametrize("gamma", [0.1, 1.0, 10.0])
def test_gamma_in_a_residual_network_keeps_its_account(gamma: float) -> None:
    torch.manual_seed(0)
    net = lived_in(ResNet("resnet18"))
    x, g = torch.randn(1, 3, 64, 64), torch.randn(512)
    folded = fold_batch_norm(net, x)
    found, kept = relevance_of(folded, x, g, gamma=gamma)
    out = folded(x).detach()
    held = float((out * g).abs().sum())
    assert float(found.abs().sum()) <= 10 * held
    if gamma == 0.1:  # strengthening positive terms alone lets denominators pass through zero
        unsigned, _ = relevance_of(folded, x, g, gamma=gamma, signed=False)
        assert float(unsigned.abs().sum()) > 100 * float(found.abs().sum())
    assert float(found.double().sum()) + kept == pytest.approx(float(out @ g), abs=1e-3 * held)
