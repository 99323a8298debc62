"""Companions travel with the instances: every method and curve against loops that subset by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError
from xmil.network import Companions, Network, open_network
from xmil.subsets import open_subsets

N, D = 11, 6


class AlibiViT(nn.Module):
    """One transformer block whose attention falls with the distance of patches, after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.token = nn.Linear(D, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.qkv, self.norm, self.head = nn.Linear(8, 24), nn.LayerNorm(8), nn.Linear(8, 2)
        self.slope = 0.05

    def forward(self, x: Tensor, coords: Tensor) -> Tensor:
        h = torch.cat([self.token, torch.relu(self.embed(x))], dim=1)
        at = torch.cat([coords.new_zeros(1, 1, 2), coords], dim=1).to(x.dtype)
        distance = torch.cdist(at, at) / 256
        distance[:, 0], distance[:, :, 0] = 0, 0
        q, k, v = self.qkv(self.norm(h)).chunk(3, dim=-1)
        weights = (q @ k.mT / 8**0.5).softmax(dim=-1) - self.slope * distance
        return self.head((h + weights @ v)[:, 0])


class LeftOfRight(nn.Module):
    """A position-dependent digit task: evidence counts by where it lies, and by the patch to its left."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(D, 1)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor, coords: Tensor, adjacency: Tensor) -> Tensor:
        seen = torch.sigmoid(self.read(x))  # (1, n, 1)
        place = coords.to(x.dtype)[..., :1] / 1000
        beside = adjacency @ seen
        return self.head(torch.cat([(seen * place).sum(dim=1), (seen * beside).mean(dim=1)], dim=-1))


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()


def bag(sparse: bool = False) -> xmil.Bag:
    rng = np.random.default_rng(0)
    coords = rng.permutation(40)[:N, None] * [[256, 0]] + rng.integers(0, 9, size=(N, 1)) * [[0, 256]]
    joined = (rng.random((N, N)) < 0.4).astype(np.float32)
    extras = {"adjacency": scipy.sparse.csr_array(joined) if sparse else joined, "stain": rng.random(N)}
    return xmil.Bag(rng.normal(size=(N, D)) * 2, coords=coords, patch_size=256, extras=extras)


FORWARDS = {
    AlibiViT: lambda net, x, *, coords: net(x, coords),
    LeftOfRight: lambda net, x, *, coords, adjacency: net(x, coords, adjacency),
}


def by_hand(net: nn.Module, rows: np.ndarray, features: Tensor | None = None) -> np.ndarray:
    """Logits of the bag of some rows, everything subset plainly."""
    whole = bag()
    x = torch.from_numpy(whole.features).double() if features is None else features
    coords = torch.from_numpy(whole.coords)[rows][None]
    joined = torch.from_numpy(whole.extras["adjacency"]).double()[rows][:, rows][None]
    given = (coords,) if isinstance(net, AlibiViT) else (coords, joined)
    with torch.no_grad():
        return net(x[rows][None], *given)[0].numpy()


@pytest.mark.parametrize("kind", [AlibiViT, LeftOfRight])
def test_perturbations_equal_a_plain_loop(kind: type[nn.Module]) -> None:
    net, rows = make(kind), np.arange(N)
    full = by_hand(net, rows)[1]
    alone = np.array([by_hand(net, rows[[k]])[1] for k in rows])
    removed = np.array([full - by_hand(net, np.delete(rows, k))[1] for k in rows])
    options = {"forward": FORWARDS[kind], "target": 1, "output": "logit"}
    for method, expected in (
        ("single", alone),
        ("one_removed", removed),
        ("combined", (alone + removed) / 2),
    ):
        scores = xmil.explain(net, bag(), method=method, **options).scores
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        assert np.ptp(scores) > 0.01


@pytest.mark.parametrize("kind", [AlibiViT, LeftOfRight])
def test_shapley_values_equal_a_plain_loop(kind: type[nn.Module]) -> None:
    """Exact values over all coalitions of six instances, each coalition's coordinates subset by hand."""
    net, n = make(kind), 6
    x = torch.zeros(N, D, dtype=torch.float64)
    empty = by_hand(net, np.arange(n), x)[1]  # as many zero vectors as the bag has instances
    value = {
        held: by_hand(net, np.array(held))[1] if held else empty
        for size in range(n + 1)
        for held in itertools.combinations(range(n), size)
    }
    expected = np.zeros(n)
    for held, worth in value.items():
        for i in set(range(n)) - set(held):
            share = math.factorial(len(held)) * math.factorial(n - len(held) - 1) / math.factorial(n)
            expected[i] += share * (value[tuple(sorted((*held, i)))] - worth)
    part, forward = bag().select(np.arange(n)), FORWARDS[kind]
    e = xmil.explain(net, part, method="shapley", target=1, exact=True, forward=forward)
    np.testing.assert_allclose(e.scores, expected, atol=1e-6)
    assert e.scores.sum() == pytest.approx(value[tuple(range(n))] - empty, abs=1e-5)


@pytest.mark.parametrize("kind", [AlibiViT, LeftOfRight])
@pytest.mark.parametrize("mode", ["remove", "mask"])
@pytest.mark.parametrize("action", ["drop", "add"])
def test_curves_equal_a_plain_loop(kind: type[nn.Module], mode: str, action: str) -> None:
    net = make(kind)
    scores = np.random.default_rng(1).normal(size=N)
    order, expected = np.argsort(-scores), []
    x = torch.from_numpy(bag().features).double()
    for step in range(N + 1):
        kept = np.sort(order[step:] if action == "drop" else order[:step])
        zeroed = torch.zeros_like(x)
        zeroed[kept] = x[kept]
        whole = mode == "mask" or not len(kept)
        logits = by_hand(net, np.arange(N), zeroed) if whole else by_hand(net, kept)
        expected.append(torch.from_numpy(logits).softmax(dim=0)[1].item())
    found = xmil.flip(
        net, bag(), scores, target=1, mode=mode, action=action, steps="each", forward=FORWARDS[kind]
    )
    np.testing.assert_allclose(found.values, expected, atol=1e-6)


@pytest.mark.parametrize("method", ["lrp", "gxi", "grad2", "ig", "milli", "random"])
def test_every_method_brings_them(method: str) -> None:
    net = make(LeftOfRight)
    e = xmil.explain(net, bag(), method=method, forward=FORWARDS[LeftOfRight], target=1)
    np.testing.assert_allclose(e.logits, by_hand(net, np.arange(N)), atol=1e-6)


def test_milli_coalitions_keep_their_companions() -> None:
    """With every coalition drawn whole, the weighted fit sees only right values: those of the plain loop."""
    net, seen = make(LeftOfRight), []

    def forward(module: nn.Module, x: Tensor, *, coords: Tensor, adjacency: Tensor, index: Tensor) -> Tensor:
        out = module(x, coords, adjacency)
        seen.append((index[0].numpy(), out[0].detach().numpy()))
        return out

    xmil.explain(net, bag(), method="milli", samples=30, forward=forward, target=1, check=False)
    assert len({len(rows) for rows, _ in seen}) > 3
    for rows, logits in seen:
        np.testing.assert_allclose(logits, by_hand(net, rows), atol=1e-9)


def test_dtypes_shapes_and_names() -> None:
    seen: dict[str, Tensor] = {}

    def forward(
        net: nn.Module, x: Tensor, *, coords: Tensor, index: Tensor, stain: Tensor, mpp: int = 7
    ) -> Tensor:
        seen.update(coords=coords, index=index, stain=stain, mpp=torch.tensor(mpp))
        return x.mean(dim=1)[:, :2]

    xmil.explain(nn.Linear(1, 1), bag(), method="gxi", forward=forward, target=1, check=False)
    assert seen["coords"].dtype == torch.int64
    assert seen["coords"].tolist() == [bag().coords.tolist()]
    assert seen["index"].tolist() == [list(range(N))]
    assert seen["stain"].dtype == torch.float32
    assert seen["stain"].shape == (1, N)
    assert seen["mpp"] == 7  # what the bag lacks keeps its default


def test_padding_is_zero_and_unjoined() -> None:
    rows = torch.tensor([[0, 2, 5], [4, -1, -1]])
    x = torch.zeros(1, N, D)
    for sparse in (False, True):
        held = Companions.of(bag(sparse), N)
        joined = held.select("adjacency", rows, x)
        joined = joined.to_dense() if sparse else joined
        expected = torch.zeros(2, 3, 3)
        expected[0] = torch.from_numpy(bag().extras["adjacency"])[[0, 2, 5]][:, [0, 2, 5]]
        expected[1, 0, 0] = float(bag().extras["adjacency"][4, 4])
        assert torch.equal(joined, expected)
    coords = held.select("coords", rows, x)
    assert coords[1].tolist() == [bag().coords[4].tolist(), [0, 0], [0, 0]]
    assert held.select("index", rows, x) is rows


def test_sub_bags_of_a_batch_and_parts_of_parts() -> None:
    net = make(LeftOfRight)
    network, x = open_network(net, bag(), forward=FORWARDS[LeftOfRight])
    kept = torch.rand(5, N, generator=torch.Generator().manual_seed(0)) < 0.5
    kept[3] = False
    with torch.no_grad():
        found = open_subsets(network, x).run(kept).numpy()
        zeros = by_hand(net, np.arange(N), torch.zeros(N, D, dtype=torch.float64))
        for row, mask in zip(found, kept.numpy(), strict=True):
            expected = by_hand(net, np.flatnonzero(mask)) if mask.any() else zeros
            np.testing.assert_allclose(row, expected, atol=1e-12)
        first, then = torch.tensor([1, 3, 4, 8]), torch.tensor([2, 0])
        part = network.part(first).part(then)(x[:, [4, 1]])
        np.testing.assert_allclose(part[0].numpy(), by_hand(net, np.array([4, 1])), atol=1e-12)
        with pytest.raises(InputError, match="which of the 11"):
            network(x[:, :3])


@pytest.mark.parametrize("name", ["attnmil", "transmil", "dsmil", "addmil", "maxpool"])
def test_sub_bags_of_our_models_are_those_bags(name: str) -> None:
    model = xmil.create_model(name, in_dim=D, n_classes=2, seed=0)
    x = torch.from_numpy(bag().features).unsqueeze(0)
    kept = torch.rand(6, N, generator=torch.Generator().manual_seed(0)) < 0.4
    kept[0] = False
    network = Network(model)
    with torch.no_grad():
        found = open_subsets(network, x).run(kept).float()
        each = [model(x[:, mask] if mask.any() else torch.zeros_like(x)) for mask in kept]
    torch.testing.assert_close(found, torch.cat(each), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["single", "one_removed", "milli", "shapley", "attention", "lrp"])
def test_our_models_that_need_coordinates_get_them(method: str) -> None:
    """MambaMIL scans columns: sub-bags in one padded batch equal those bags alone, with their coordinates."""
    model = xmil.create_model(
        "mambamil", in_dim=D, n_classes=2, seed=0, dim=8, scan="cross", positions="sinusoidal"
    )
    network, x = open_network(model, bag())
    kept = torch.rand(5, N, generator=torch.Generator().manual_seed(1)) < 0.5
    coords = torch.from_numpy(bag().coords)
    with torch.no_grad():
        found = open_subsets(network, x).run(kept).float()
        each = [model(x[:, mask], coords=coords[mask].unsqueeze(0)) for mask in kept]
    torch.testing.assert_close(found, torch.cat(each), atol=1e-5, rtol=1e-5)
    e = xmil.explain(model, bag(), method=method, target=1)
    with torch.no_grad():
        np.testing.assert_allclose(e.logits, model(x, coords=coords.unsqueeze(0))[0].numpy(), atol=1e-5)


def test_what_the_bag_lacks_is_named() -> None:
    net = make(AlibiViT)
    with pytest.raises(InputError, match=r"forward asks for 'coords', which the bag does not have .*coords="):
        xmil.explain(net, bag().features, forward=FORWARDS[AlibiViT])
    stamp = xmil.Bag(np.ones((2, D)), raw_coords=np.ones((2, 2)), unit="um", raw_edge=256, slide_id="s1")
    with pytest.raises(InputError, match=r"bag 's1' .*coordinates are in um; bag.placed\(mpp=\.\.\.\)"):
        xmil.explain(net, stamp, forward=FORWARDS[AlibiViT])
    with pytest.raises(InputError, match=r"'graph', which .*extras=\{'graph': \.\.\.\}"):
        xmil.flip(net, bag(), np.ones(N), target=1, forward=lambda net, x, *, graph: x)


def test_selected_bags_keep_their_extras() -> None:
    for whole in (bag(), bag(sparse=True)):
        part = whole.select([4, 2])
        joined = part.extras["adjacency"]
        joined = joined.toarray() if hasattr(joined, "toarray") else joined
        np.testing.assert_array_equal(joined, bag().extras["adjacency"][[4, 2]][:, [4, 2]])
        np.testing.assert_array_equal(part.extras["stain"], whole.extras["stain"][[4, 2]])
    with pytest.raises(InputError, match=r"extra 'adjacency' of the bag must have shape \(3, 3\)"):
        xmil.Bag(np.ones((3, D)), extras={"adjacency": np.ones((3, 2))})
    with pytest.raises(InputError, match=r"extra 'stain' of the bag must have shape \(3,\)"):
        xmil.Bag(np.ones((3, D)), extras={"stain": np.ones(2)})
