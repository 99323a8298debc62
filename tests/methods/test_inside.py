"""Maps inside a patch: they add up, lie where the cause lies, and fail with a sentence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from tests.slides.pyramids import textured, write_pyramid
from xmil.core.background import background_of
from xmil.core.errors import FileError, InputError, UnknownNameError, UnsupportedError
from xmil.core.inside import Inside
from xmil.encoders import load_encoder
from xmil.encoders.encoder import Encoder, Transform
from xmil.nn import CTransPath

EDGE = 64
TOKENS = ("tokens", "turned", "lrp", "occlusion", "shifted")


class Convolutions(nn.Module):
    """Three convolutions, mean over places: (b, 3, h, w) to (b, 8), places of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 6, 8, 8)
        self.layers = nn.Sequential(*(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean(dim=(2, 3))


class TinyViT(nn.Module):
    """Patch tokens of 16 px, two pre-norm blocks, class token or mean over the patch tokens."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.embed = nn.Conv2d(3, 16, 16, stride=16)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x).flatten(2).mT], dim=1)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return h[:, 0] if self.pool == "token" else h[:, 1:].mean(dim=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def encoder_of(module: nn.Module) -> Encoder:
    return Encoder("tiny", 0, module.eval(), Transform())


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_pyramid(tmp_path / "s.tif", textured([(0, 0, 320, 256)], (320, 256)), levels=())


def explained(encoder: Encoder, path: Path, *, keep: bool = True, **more):
    """The features of eight patches, a model on them, and its explanation."""
    corners = np.array([[x, y] for y in (0, 64) for x in (0, 64, 128, 192)])
    with xmil.open_slide(path) as opened:
        patches = [opened.read_area((x, y, EDGE, EDGE), (EDGE, EDGE)) for x, y in corners]
    batch = torch.stack([encoder.transform(patch) for patch in patches])
    bag = xmil.Bag(encoder(batch).numpy(), coords=corners, patch_size=EDGE, mpp=0.5, slide_id="s")
    model = xmil.create_model("attnmil", in_dim=bag.dim, n_classes=2, dim=8, seed=0)
    return model, bag, xmil.explain(model, bag, method="lrp", target=1, feature_level=keep, **more)


@pytest.mark.parametrize("build", [Convolutions, lambda: TinyViT("token"), lambda: TinyViT("mean")])
def test_token_maps_add_up_to_the_score(build, slide: Path) -> None:
    encoder = encoder_of(build())
    model, _, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=3)
    assert found.maps.shape[0] == 3
    assert found.maps.shape[1] * found.maps.shape[2] >= 16
    total = found.maps.sum(axis=(1, 2)) + found.audit.constant
    np.testing.assert_allclose(total, e.scores[found.patches], rtol=1e-4, atol=1e-6)
    assert np.abs(found.audit.other).max() <= 1e-4 * np.abs(e.scores[found.patches]).max()


def test_tokens_of_a_mean_pooled_network_are_the_last_map_times_relevance_per_feature(slide: Path) -> None:
    network = Convolutions()
    encoder = encoder_of(network)
    model, bag, e = explained(encoder, slide, baseline=None)
    found = xmil.explain_inside(model, encoder, slide, e, patches=[5], method="tokens")
    with xmil.open_slide(slide) as opened:
        x, y = bag.coords[5]
        patch = opened.read_area((int(x), int(y), EDGE, EDGE), (EDGE, EDGE))
    h = encoder.transform.scaled(encoder.transform(patch).unsqueeze(0))
    with torch.no_grad():
        for layer in network.layers:
            h = torch.relu(layer(h))
    features = h.mean(dim=(2, 3))[0]
    g = np.where(features.numpy() > 0, e.relevance[5] / features.clamp(min=1e-20).numpy(), 0)
    slow = np.einsum("c,chw->hw", g, h[0].numpy()) / (h.shape[2] * h.shape[3])
    np.testing.assert_allclose(found.maps[0], slow, rtol=1e-4, atol=1e-7)


def test_against_a_background_each_place_is_measured_by_it(slide: Path) -> None:
    network = Convolutions()
    encoder = encoder_of(network)
    model, bag, _ = explained(encoder, slide)
    model.background = background_of([0.5 * bag.features[:4]])
    e = xmil.explain(model, bag, method="lrp", target=1, feature_level=True)
    shift = e.params["strength"] * model.background.mean
    assert e.params["baseline"] == "mean of 4 patches"
    found = xmil.explain_inside(model, encoder, slide, e, patches=[5], method="tokens")
    with xmil.open_slide(slide) as opened:
        x, y = bag.coords[5]
        patch = opened.read_area((int(x), int(y), EDGE, EDGE), (EDGE, EDGE))
    with torch.no_grad():
        h = encoder.transform.scaled(encoder.transform(patch).unsqueeze(0))
        for layer in network.layers:
            h = torch.relu(layer(h))
    above = h[0].mean(dim=(1, 2)).numpy() - shift
    g = np.divide(e.relevance[5], above, out=np.zeros_like(above), where=above != 0)
    slow = np.einsum("c,chw->hw", g, h[0].numpy() - shift[:, None, None]) / h[0, 0].numel()
    np.testing.assert_allclose(found.maps[0], slow, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.maps.sum(), e.scores[5], rtol=1e-4)
    bare = xmil.explain(model, bag, method="lrp", target=1)
    again = xmil.explain_inside(model, encoder, slide, bare, patches=[5], method="tokens", features=bag)
    np.testing.assert_allclose(again.maps, found.maps, rtol=1e-3, atol=1e-6)
    assert [*found.warnings, *again.warnings] == []
    without = xmil.explain_inside(None, encoder, slide, e, patches=[5], method="tokens")
    assert e.params["baseline"] in without.warnings[0]
    exact = xmil.explain(model, bag, method="lrp", target=1, feature_level=True, baseline=None)
    none = xmil.explain_inside(None, encoder, slide, exact, patches=[5], method="tokens")
    assert "background" in none.warnings[0]
    np.testing.assert_allclose(without.maps.sum() + without.audit.constant, e.scores[5], rtol=1e-4)


@pytest.mark.parametrize("method", TOKENS)
def test_every_map_accounts_for_the_score(method: str, slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, _, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=2, method=method)
    assert np.isfinite(found.maps).all()
    assert np.abs(found.maps).max() > 0
    parts = found.audit.spatial + found.audit.constant + found.audit.other
    np.testing.assert_allclose(parts, e.scores[found.patches], rtol=1e-4, atol=1e-6)


class Redness(nn.Module):
    """One feature: how much red there is, place by place of 8 px, then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(8)

    def forward(self, x: Tensor) -> Tensor:
        red = torch.relu(x[:, :1] - x[:, 1:2] - 0.5)
        return self.pool(torch.cat([red, 0 * red + 0.01], dim=1)).mean(dim=(2, 3))


def planted(path: Path, x0: int, y0: int, **settings) -> Inside:
    """The map inside the patch at (64, 64) of a grey slide with a red square of 12 px."""
    pixels = np.full((128, 192, 3), 200, dtype=np.uint8)
    pixels[y0 : y0 + 12, x0 : x0 + 12] = (250, 20, 20)
    write_pyramid(path, pixels, levels=())
    scale = Transform(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    encoder = Encoder("red", 2, Redness(), scale)
    relevance = np.zeros((1, 2), dtype=np.float32)
    with xmil.open_slide(path) as opened:
        batch = scale(opened.read_area((64, 64, EDGE, EDGE), (EDGE, EDGE))).unsqueeze(0)
    relevance[0, 0] = encoder(batch)[0, 0]
    e = xmil.Explanation(
        relevance.sum(axis=1), np.zeros(2), 1.0, "lrp", xmil.Target(1), True,
        coords=np.array([[64, 64]]), patch_size=EDGE, mpp=0.5, relevance=relevance,
    )  # fmt: skip
    return xmil.explain_inside(None, encoder, path, e, patches=[0], **settings)


def lit(values: np.ndarray, boxes: np.ndarray) -> tuple[float, float]:
    """The middle of the place with the highest value."""
    left, top, right, bottom = boxes[values.argmax()]
    return (left + right) / 2, (top + bottom) / 2


@pytest.mark.parametrize("method", ["turned", "lrp", "occlusion"])
@pytest.mark.parametrize("corner", [(0, 0), (48, 8), (24, 40), (8, 48)])
def test_a_planted_square_lights_up_at_its_place(method: str, corner, tmp_path: Path) -> None:
    x0, y0 = 64 + corner[0], 64 + corner[1]
    found = planted(tmp_path / "s.tif", x0, y0, method=method)
    x, y = lit(found.maps[0].ravel(), found.cells()[0].reshape(-1, 4))
    token = EDGE / found.maps.shape[1] * 2 if method == "occlusion" else 8
    assert x0 - token <= x <= x0 + 12 + token
    assert y0 - token <= y <= y0 + 12 + token


def test_a_planted_square_lights_up_at_every_offset_in_map_tiles_and_tiff(tmp_path: Path) -> None:
    """Within one token of 8 px; across and down by turns, one pixel at a time."""
    tifffile = pytest.importorskip("tifffile", reason="the slide readers are not installed")
    from tests.heatmaps.tiles import read_tiles
    from xmil.heatmaps import write_inside_geojson, write_inside_tiff

    for offset in range(EDGE - 12 + 1):
        x0, y0 = 64 + offset, 64 + (offset * 7) % (EDGE - 11)
        found = planted(tmp_path / "s.tif", x0, y0)
        write_inside_geojson(tmp_path / "s.geojson", found)
        tiles = read_tiles(tmp_path / "s.geojson")
        places = [lit(found.maps[0].ravel(), found.cells()[0].reshape(-1, 4))]
        places += [lit(tiles.measurements["inside-turned:1"], tiles.boxes)]
        if offset % 13 == 0:
            with xmil.open_slide(tmp_path / "s.tif") as opened:
                write_inside_tiff(tmp_path / "s.ome.tif", found, opened)
            picture = np.squeeze(tifffile.imread(tmp_path / "s.ome.tif"))
            assert picture.shape == (128, 192)
            assert np.isnan(picture[:64]).all()
            rows, columns = np.nonzero(picture == np.nanmax(picture))
            places += [(columns.mean() + 0.5, rows.mean() + 0.5)]
        for x, y in places:
            assert x0 - 8 <= x <= x0 + 12 + 8
            assert y0 - 8 <= y <= y0 + 12 + 8


def test_cells_tile_the_patch(slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, _, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=[6])
    cells = found.cells()[0].reshape(-1, 4)
    assert cells[:, :2].min(axis=0).tolist() == found.boxes[0, :2].tolist()
    assert cells[:, 2:].max(axis=0).tolist() == found.boxes[0, 2:].tolist()
    assert ((cells[:, 2] - cells[:, 0]) * (cells[:, 3] - cells[:, 1])).sum() == EDGE**2


def test_without_stored_relevance_the_features_or_the_slide_serve(slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, bag, stored = explained(encoder, slide, baseline=None)
    _, _, bare = explained(encoder, slide, keep=False, baseline=None)
    first = xmil.explain_inside(model, encoder, slide, stored, patches=2)
    second = xmil.explain_inside(model, encoder, slide, bare, patches=2, features=bag)
    third = xmil.explain_inside(model, encoder, slide, bare, patches=2)
    np.testing.assert_allclose(second.maps, first.maps, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(third.maps, first.maps, rtol=1e-3, atol=1e-6)


def test_random_weights_destroy_the_map(slide: Path) -> None:
    """|mean rank correlation| with the maps of redrawn encoders stays small."""
    from scipy.stats import spearmanr

    encoder = encoder_of(Convolutions())
    model, _, e = explained(encoder, slide, baseline=None)
    first = xmil.explain_inside(model, encoder, slide, e, patches=[2])
    found = []
    for seed in range(20):
        torch.manual_seed(100 + seed)
        other = encoder_of(Convolutions())
        again, _, drawn = explained(other, slide, baseline=None)
        made = xmil.explain_inside(again, other, slide, drawn, patches=[2])
        found.append(spearmanr(first.maps.ravel(), made.maps.ravel()).statistic)
    assert abs(np.mean(found)) < 0.5  # the tiny network's few channels keep some structure of the tile
    assert np.min(found) < 0 < np.max(found)


def test_ready_encoders(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 320, 256)], (320, 256)), levels=())
    encoder = load_encoder("resnet18", random=True)
    model, _, e = explained(encoder, path)
    found = xmil.explain_inside(model, encoder, path, e, patches=1)
    assert found.maps.shape == (1, 2, 2)  # 64 px at stride 32
    np.testing.assert_allclose(
        found.maps.sum() + found.audit.constant[0], e.scores[found.patches[0]], rtol=1e-4
    )


def test_swin_tokens_add_up() -> None:
    from xmil.methods import EncoderNetwork, MapSettings, Tile, map_tile
    from xmil.network import frozen

    network = CTransPath().eval()
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        width = network(pixels).shape[1]
    tile = Tile(pixels, torch.randn(width), lambda dx, dy: pixels)
    with frozen(network):
        made = map_tile("tokens", EncoderNetwork(network, network), tile, MapSettings())
        whole = float((network(pixels) @ tile.weights).sum())
    assert made.values.shape == (7, 7)
    assert abs(float(made.values.sum()) + made.constant - whole) <= 1e-4 * max(1, abs(whole))


def test_boxes_choose_the_patches_whose_centre_they_hold(slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, bag, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=[[70, 10, 170, 40], [190, 90, 260, 130]])
    middle = bag.coords + EDGE / 2
    slow = [
        i
        for i, (x, y) in enumerate(middle)
        if (70 <= x < 170 and 10 <= y < 40) or (190 <= x < 260 and 90 <= y < 130)
    ]
    assert sorted(found.patches) == slow == [1, 2, 7]
    assert list(np.abs(e.scores[found.patches])) == sorted(np.abs(e.scores[slow]), reverse=True)
    with pytest.raises(InputError, match="level-0 pixels"):
        xmil.explain_inside(model, encoder, slide, e, patches=[[0, 0, 5, 5]])


def test_saved_and_read_back(slide: Path, tmp_path: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, _, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=2)
    found.save(tmp_path / "inside.npz")
    back = Inside.load(tmp_path / "inside.npz")
    np.testing.assert_array_equal(back.maps, found.maps)
    np.testing.assert_array_equal(back.audit.constant, found.audit.constant)
    assert (back.method, back.target, back.bag) == ("turned", "1", "s")
    (tmp_path / "broken.npz").write_bytes((tmp_path / "inside.npz").read_bytes()[:100])
    with pytest.raises(FileError, match="not a file of maps"):
        Inside.load(tmp_path / "broken.npz")


def test_errors_name_the_way_out(slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, bag, e = explained(encoder, slide, keep=False)
    with pytest.raises(UnknownNameError, match=r"map inside a patch 'token'\. Did you mean 'tokens'"):
        xmil.explain_inside(model, encoder, slide, e, method="token")
    with pytest.raises(UnknownNameError, match="setting of explain_inside 'squares'"):
        xmil.explain_inside(model, encoder, slide, e, squares=0.1)
    with pytest.raises(InputError, match=r"rows in the range \[0, 8\)"):
        xmil.explain_inside(model, encoder, slide, e, patches=[8])
    with pytest.raises(InputError, match="patch_px"):
        xmil.explain_inside(model, encoder, slide, e, features=-bag.features)
    with pytest.raises(UnsupportedError, match="need relevance per feature"):
        xmil.explain_inside(model, encoder, slide, xmil.explain(model, bag, method="gxi", target=1))
    hidden = Encoder("hidden", 8, lambda x: encoder.network(x), Transform())
    with pytest.raises(UnsupportedError, match="hides its operations"):
        xmil.explain_inside(model, hidden, slide, e, patches=1)
    assert len(xmil.explain_inside(model, hidden, slide, e, patches=1, method="occlusion")) == 1
    bare = xmil.explain(model, bag.features, method="lrp", target=1, feature_level=True)
    with pytest.raises(InputError, match="no coordinates"):
        xmil.explain_inside(model, encoder, slide, bare)


def test_gamma_that_does_not_close_is_refused_or_accounted_for(slide: Path) -> None:
    encoder = encoder_of(Convolutions())
    model, _, e = explained(encoder, slide)
    found = xmil.explain_inside(model, encoder, slide, e, patches=2, method="lrp", gamma=0.25)
    assert np.abs(found.audit.other).max() <= 1e-3 * max(1.0, float(np.abs(found.maps).sum()))
