"""ResNets that take torchvision's state dicts: names, sizes, a block written out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from xmil.core.errors import XmilError
from xmil.nn import ResNet, load_resnet


@pytest.mark.parametrize(
    ("name", "parameters", "dim"), [("resnet18", 11_176_512, 512), ("resnet50", 23_508_032, 2048)]
)
def test_sizes_are_torchvisions(name, parameters, dim):
    net = ResNet(name).eval()
    assert sum(p.numel() for p in net.parameters()) == parameters
    with torch.no_grad():
        assert net.feature_map(torch.zeros(1, 3, 64, 96)).shape == (1, dim, 2, 3)
        assert net(torch.zeros(2, 3, 64, 64)).shape == (2, dim)


def test_names_are_torchvisions():
    keys = set(ResNet("resnet18").state_dict())
    assert {
        "conv1.weight",
        "bn1.running_var",
        "layer1.0.conv1.weight",
        "layer2.0.downsample.0.weight",
    } <= keys
    assert "layer1.0.downsample.0.weight" not in keys
    assert {"layer1.0.conv3.weight", "layer1.0.downsample.1.bias"} <= set(ResNet("resnet50").state_dict())


def test_the_first_layers_by_hand():
    net = ResNet("resnet18").eval()
    x = torch.randn(1, 3, 32, 32)

    def norm(h, bn):
        return F.batch_norm(h, bn.running_mean, bn.running_var, bn.weight, bn.bias)

    block = net.layer1[0]
    with torch.no_grad():
        stem = F.max_pool2d(
            F.relu(norm(F.conv2d(x, net.conv1.weight, stride=2, padding=3), net.bn1)), 3, 2, 1
        )
        inner = F.relu(norm(F.conv2d(stem, block.conv1.weight, padding=1), block.bn1))
        expected = F.relu(stem + norm(F.conv2d(inner, block.conv2.weight, padding=1), block.bn2))
        torch.testing.assert_close(block(net.maxpool(F.relu(net.bn1(net.conv1(x))))), expected)


def test_loading():
    source = ResNet("resnet18")
    state = {**source.state_dict(), "fc.weight": torch.zeros(2, 512), "fc.bias": torch.zeros(2)}
    net = load_resnet(
        {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    )
    assert not net.training
    torch.testing.assert_close(net.conv1.weight, source.conv1.weight.half().float())
    with pytest.raises(XmilError, match="not the weights of a resnet50"):
        load_resnet(state, "resnet50")
    with pytest.raises(XmilError, match="Unknown ResNet"):
        ResNet("resnet19")
