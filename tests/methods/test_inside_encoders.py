"""Maps inside patches by encoder family: where they stop, that they add up, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from tests.encoders.torchvisions import timm_or_skip
from tests.methods.test_inside import Convolutions, encoder_of, explained, slide  # noqa: F401 - a fixture
from xmil.core.errors import UnsupportedError
from xmil.encoders import load_encoder
from xmil.methods import EncoderNetwork, MapSettings, Tile, TileMap, cuts, finer_layer, map_tile
from xmil.network import frozen
from xmil.nn import ResNet

FAMILIES = {  # timm's name: layer that `lrp` stops at, places along the edge of a tile of 64 px
    "resnet10t": ("layer3", 4),
    "vit_tiny_patch16_224": (None, 4),
    "swin_tiny_patch4_window7_224": (None, 4),
    "convnext_atto": (None, 4),
}


def tile_for(net: nn.Module, edge: int, *, seed: int = 0) -> tuple[EncoderNetwork, Tile, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(1, 3, edge, edge, generator=generator)
    with torch.no_grad():
        features = net(pixels)
    weights = torch.randn(features.shape[1], generator=generator)
    return EncoderNetwork(net, net), Tile(pixels, weights, lambda *_: pixels), features[0] * weights


def check_adds_up(made: TileMap, terms: Tensor) -> None:
    total = float(made.values.double().sum()) + made.constant
    assert abs(total - float(terms.double().sum())) <= 1e-4 * float(terms.abs().sum())


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_lrp_of_timms_families(name: str) -> None:
    timm = timm_or_skip()
    torch.manual_seed(0)
    more = {} if "resnet" in name or "convnext" in name else {"img_size": 64}
    net = timm.create_model(name, num_classes=0, **more).eval()
    network, tile, terms = tile_for(net, 64)
    with frozen(net):
        tokens = map_tile("tokens", network, tile, MapSettings())
        finer = map_tile("lrp", network, tile, MapSettings())
        gamma = 0.25 if "resnet" in name else 0.0
        given = map_tile("lrp", network, tile, MapSettings(gamma=gamma))
        torch.testing.assert_close(given.values, finer.values)  # the family's preset
        strong = map_tile("lrp", network, tile, MapSettings(gamma=1.0))
        for made in (tokens, finer, strong):
            check_adds_up(made, terms)
        assert list(cuts(net, [network.layers["lrp"]], tile.pixels))
    stop, edge = FAMILIES[name]
    assert finer.values.shape == (edge, edge)
    assert stop in (None, network.layers["lrp"])


def test_lrp_stops_where_everything_passes() -> None:
    """In ResNet50 the last finer grid lies inside a block that a skip goes around."""
    net = ResNet("resnet50").eval()
    pixels = torch.randn(1, 3, 64, 64)
    assert finer_layer(net, pixels) == "layer3"
    assert not list(cuts(net, ["layer4.0.conv1"], pixels))


class Cancelling(nn.Module):
    """Two large terms that cancel: an account at the pixels says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 4, 1, bias=False), nn.Conv2d(3, 4, 1, bias=False)
        self.down.weight.data = self.up.weight.data * (1 - 1e-5 * torch.rand(4, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (1e6 * self.up(x) - 1e6 * self.down(x.roll(1, dims=-1))).mean(dim=(2, 3))


def test_an_account_that_explodes_is_refused_by_name() -> None:
    torch.manual_seed(0)
    net = Cancelling()
    network, tile, _ = tile_for(net, 16)
    with frozen(net), pytest.raises(UnsupportedError, match="explodes at the layer 'up'"):
        map_tile("lrp", network, tile, MapSettings(layer="up"))


def slowly_turned(network, tile: Tile, step: int) -> np.ndarray:
    """The mean over the tile and its eight views, one by one, place by place."""
    sides = [(step, 0), (-step, 0), (0, step), (0, -step)]
    first = map_tile("tokens", network, tile, MapSettings()).values.numpy()
    edge = len(first)
    held = {(y, x): [first[y, x]] for y in range(edge) for x in range(edge)}
    for k, (mirrored, turns) in enumerate([(m, t) for m in (0, 1) for t in (0, 2, 1, 3)]):
        if step == 0 and k == 0:
            continue  # the tile itself
        dx, dy = sides[k % 4]
        pixels = tile.shifted(dx / edge, dy / edge)
        pixels = torch.rot90(pixels.flip(-1) if mirrored else pixels, turns, (2, 3))
        values = map_tile("tokens", network, Tile(pixels, tile.weights, tile.shifted), MapSettings()).values
        upright = np.rot90(values.numpy(), -turns)
        upright = upright[:, ::-1] if mirrored else upright
        for y, x in held:
            if 0 <= y - dy < edge and 0 <= x - dx < edge:
                held[y, x].append(upright[y - dy, x - dx])
    mean = np.array([[np.mean(held[y, x]) for x in range(edge)] for y in range(edge)])
    return mean + (first.sum() - mean.sum()) / mean.size


@pytest.mark.parametrize("step", [0, 2])
def test_turned_maps_are_the_mean_over_views_and_add_up_as_tokens_do(step: int) -> None:
    torch.manual_seed(0)
    net = Convolutions()
    wide = torch.randn(1, 3, 128, 128)

    def shifted(dx: float, dy: float) -> Tensor:
        x, y = 32 + round(dx * 64), 32 + round(dy * 64)
        return wide[..., y : y + 64, x : x + 64]

    network = EncoderNetwork(net, net)
    tile = Tile(shifted(0, 0), torch.randn(len(net(shifted(0, 0))[0])), shifted)
    with frozen(net):
        made = map_tile("turned", network, tile, MapSettings(reach=step / 8))
        plain = map_tile("tokens", network, tile, MapSettings())
        np.testing.assert_allclose(made.values.numpy(), slowly_turned(network, tile, step), atol=1e-5)
    assert float(made.values.sum()) == pytest.approx(float(plain.values.sum()), rel=1e-4)
    assert not np.allclose(made.values, plain.values, atol=1e-3)
    assert (made.constant, made.other) == (plain.constant, plain.other)


def test_what_a_denser_copy_of_the_ordinary_patch_has_is_shared_evenly() -> None:
    torch.manual_seed(0)
    net = Convolutions()
    pixels = torch.randn(1, 3, 64, 64)
    network, features = EncoderNetwork(net, net), net(pixels)[0].detach()
    mean, g = torch.rand(len(features)), 100 * torch.randn(len(features))
    plain = Tile(pixels, g, lambda *_: pixels)
    known = replace(plain, ordinary=mean)
    with frozen(net):
        made = map_tile("turned", network, known, MapSettings())
        more = map_tile("turned", network, replace(known, weights=g + 300 * mean), MapSettings())
        along = mean * (g @ mean) / (mean @ mean)
        slow = map_tile("turned", network, replace(plain, weights=g - along), MapSettings()).values
    slow = slow + (along @ features) / slow.numel()
    np.testing.assert_allclose(made.values.numpy(), slow.numpy(), rtol=1e-4, atol=1e-5)
    assert float(made.values.sum()) + made.constant == pytest.approx(float(g @ features), rel=1e-4)
    gained = (more.values - made.values).numpy()
    np.testing.assert_allclose(gained, 300 * float(mean @ features) / gained.size, rtol=1e-2)
    assert float(made.values.std()) > 0.02


def write_onnx(path: Path) -> Path:
    """A convolution, its positive part, the mean over places."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    made, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        made.make_node("Conv", ["x", "w"], ["c"], strides=[8, 8]),
        made.make_node("Relu", ["c"], ["r"]),
        made.make_node("GlobalAveragePool", ["r"], ["m"]),
        made.make_node("Flatten", ["m"], ["y"]),
    ]
    weights = np.random.default_rng(0).normal(size=(6, 3, 8, 8)).astype(np.float32)
    graph = made.make_graph(
        nodes,
        "net",
        [made.make_tensor_value_info("x", kind, ["b", 3, "h", "w"])],
        [made.make_tensor_value_info("y", kind, ["b", 6])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    onnx.save(made.make_model(graph, opset_imports=[made.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_onnx_encoders_by_occlusion_and_shifts_alone(slide: Path, tmp_path: Path) -> None:  # noqa: F811
    encoder = load_encoder(str(write_onnx(tmp_path / "net.onnx")))
    model, _, e = explained(encoder, slide)
    for method in ("occlusion", "shifted"):
        found = xmil.explain_inside(model, encoder, slide, e, patches=1, method=method, square=0.5)
        parts = found.audit.spatial + found.audit.constant + found.audit.other
        np.testing.assert_allclose(parts, e.scores[found.patches], rtol=1e-4, atol=1e-7)
    for method in ("tokens", "turned", "lrp"):
        with pytest.raises(UnsupportedError, match="hides its operations"):
            xmil.explain_inside(model, encoder, slide, e, patches=1, method=method)
