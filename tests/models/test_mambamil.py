"""MambaMIL: its formula in NumPy, its scans and positions, its relevance by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xmil
from tests.models.originals import Array, arrays, layer_norm, linear, relu, sigmoid, softmax
from xmil.core.errors import InputError
from xmil.models import MambaMIL

D, DIM = 6, 8


def model_of(**params: object) -> MambaMIL:
    model = xmil.create_model("mambamil", in_dim=D, n_classes=3, seed=0, dim=DIM, attention_dim=4, **params)
    assert isinstance(model, MambaMIL)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and not name.endswith(".D"):
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.double()


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def branch_by_hand(w: dict[str, Array], name: str, x: Array) -> Array:
    """One scan over x (n, e), step by step."""
    n, width = x.shape
    kernel, bias = w[f"{name}.conv.weight"][:, 0], w[f"{name}.conv.bias"]
    padded = np.concatenate([np.zeros((3, width)), x])
    u = silu(np.stack([(padded[t : t + 4] * kernel.T).sum(axis=0) + bias for t in range(n)]))
    A = -np.exp(w[f"{name}.A_log"])
    rank, s = w[f"{name}.dt_proj.weight"].shape[1], A.shape[1]
    made = linear(w, f"{name}.x_proj", u)
    dt = np.log1p(np.exp(linear(w, f"{name}.dt_proj", made[:, :rank])))
    B, C = made[:, rank : rank + s], made[:, rank + s :]
    h, y = np.zeros(A.shape), np.zeros_like(u)
    for t in range(n):
        h = np.exp(dt[t][:, None] * A) * h + (dt[t] * u[t])[:, None] * B[t]
        y[t] = h @ C[t] + w[f"{name}.D"] * u[t]
    return y


def orders_by_hand(scan: str, coords: Array | None, n: int) -> list[tuple[list[int], str]]:
    there = list(range(n))
    if scan == "simple":
        return [(there, "")]
    if scan == "bidirectional":
        return [(there, ""), (there[::-1], "")]
    assert coords is not None
    columns = sorted(range(n), key=lambda i: (coords[i][0], coords[i][1]))
    flipped = there[::-1]
    return [(there, ""), (flipped, ""), (columns, ""), ([flipped[i] for i in columns], "last")]


def by_hand(model: MambaMIL, x: Array, coords: Array | None = None) -> Array:
    w, n = arrays(model.state_dict()), len(x)
    h = relu(linear(w, "instance.0.0", x))
    if model.positions == "sinusoidal":
        assert coords is not None
        omega = 10000.0 ** -(np.arange(DIM // 4) / (DIM // 4 - 1))
        px, py = (coords[:, [k]] // model.grid * omega for k in (0, 1))
        h = h + np.concatenate([np.sin(px), np.cos(px), np.sin(py), np.cos(py)], axis=1)
    if model.positions == "learned":
        assert coords is not None
        h = h + w["columns"][coords[:, 0] // model.grid] + w["rows"][coords[:, 1] // model.grid]
    start = h
    for i in range(len(model.layers)):
        both = linear(w, f"layers.{i}.mamba.in_proj", layer_norm(w, f"layers.{i}.norm", h))
        signal, gate = both[:, : 2 * DIM], silu(both[:, 2 * DIM :])
        total = np.zeros_like(signal)
        for k, (order, last) in enumerate(orders_by_hand(model.scan, coords, n)):
            y = branch_by_hand(w, f"layers.{i}.mamba.branches.{k}", signal[order]) * gate[order]
            if last and model.undo == "published":  # flipped first, then put back: the wrong way round
                columns = sorted(range(n), key=lambda j: (coords[j][0], coords[j][1]))  # type: ignore[index]
                placed = np.zeros_like(y)
                placed[columns] = y[::-1]
                total += placed
            else:
                total[order] += y
        out = linear(w, f"layers.{i}.mamba.out_proj", total)
        h = h + out if model.residual == "layer" else out
    h = layer_norm(w, "norm", h + start if model.residual == "block" else h)
    weights = softmax(linear(w, "attention.w", np.tanh(linear(w, "attention.V", h))))
    return linear(w, "classifier", weights.T @ h)[0]


VARIANTS: list[dict[str, object]] = [
    {},
    {"n_layers": 2},
    {"n_layers": 2, "residual": "layer"},
    {"scan": "bidirectional"},
    {"scan": "cross"},
    {"scan": "cross", "undo": "published", "n_layers": 2},
    {"positions": "sinusoidal", "grid": 100},
    {"positions": "learned", "scan": "cross"},
]


def places(n: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct places in no order, with gaps: not a full grid."""
    return 256 * np.stack(np.unravel_index(rng.permutation(35)[:n], (5, 7)), axis=1).astype(np.int64)


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("n", [1, 13])
@torch.no_grad()
def test_the_formula(params: dict[str, object], n: int, rng: np.random.Generator) -> None:
    model, x, coords = model_of(**params), rng.normal(size=(n, D)), places(n, rng)
    found = model(torch.from_numpy(x)[None], coords=torch.from_numpy(coords)[None])[0]
    np.testing.assert_allclose(found.numpy(), by_hand(model, x, coords), rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_both_ways_back_agree_on_a_full_grid(rng: np.random.Generator) -> None:
    y, x = np.divmod(np.arange(12), 4)  # row by row
    coords = torch.from_numpy(256 * np.stack([x, y], axis=1))[None]
    exact, published = model_of(scan="cross"), model_of(scan="cross", undo="published")
    bag = torch.from_numpy(rng.normal(size=(1, 12, D)))
    torch.testing.assert_close(exact(bag, coords=coords), published(bag, coords=coords))
    holes = [0, 1, 3, 4, 6, 9, 10]
    one, other = (m(bag[:, holes], coords=coords[:, holes]) for m in (exact, published))
    assert not torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("params", VARIANTS)
@torch.no_grad()
def test_padding_and_batch_mates_change_nothing(params: dict[str, object], rng: np.random.Generator) -> None:
    model = model_of(**params)
    x = torch.from_numpy(rng.normal(size=(3, 9, D)))
    coords = torch.from_numpy(np.stack([places(9, rng) for _ in range(3)]))
    mask = torch.rand(3, 9) < 0.6
    mask[:, 0] = True
    together = model(x, mask, coords=coords)
    alone = [model(x[i, mask[i]][None], coords=coords[i, mask[i]][None]) for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("params", [{"scan": "cross"}, {"positions": "learned"}, {"positions": "sinusoidal"}])
def test_coordinates_are_asked_for(params: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"needs coordinates: explain a Bag with coords, or call"):
        xmil.explain(model_of(**params), np.ones((4, D)))


def test_learned_positions_end_somewhere(rng: np.random.Generator) -> None:
    model = model_of(positions="learned", grid=1)
    bag = xmil.Bag(rng.normal(size=(3, D)).astype(np.float32), coords=np.array([[0, 0], [5, 2], [1024, 0]]))
    with pytest.raises(InputError, match="Positions 0 to 1024 on a grid of 1 pixels"):
        xmil.explain(model, bag)


@pytest.mark.parametrize(
    "params",
    [{"scan": "zigzag"}, {"positions": "rope"}, {"residual": "none"}, {"undo": "x"}, {"grid": 0}],
)
def test_wrong_settings(params: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(params))!r} parameter of mambamil"):
        model_of(**params)


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("method", ["lrp", "single", "one_removed", "attention", "ig"])
def test_coordinates_travel_with_the_instances(
    params: dict[str, object], method: str, rng: np.random.Generator
) -> None:
    model, n = model_of(**params).float(), 7
    bag = xmil.Bag(rng.normal(size=(n, D)).astype(np.float32), coords=places(n, rng))
    e = xmil.explain(model, bag, method=method, target=1)
    x, coords = torch.from_numpy(bag.features)[None], torch.from_numpy(bag.coords)[None]
    with torch.no_grad():
        assert e.logits == pytest.approx(model(x, coords=coords)[0].numpy(), abs=1e-6)
        probability = model(x, coords=coords).softmax(-1)[0, 1]
        for k in range(n):
            rest = [i for i in range(n) if i != k]
            alone = model(x[:, [k]], coords=coords[:, [k]]).softmax(-1)[0, 1]
            without = model(x[:, rest], coords=coords[:, rest]).softmax(-1)[0, 1]
            by_loop = {"single": alone, "one_removed": probability - without}.get(method)
            assert by_loop is None or e.scores[k] == pytest.approx(float(by_loop), abs=1e-6)
    if method == "lrp":
        assert e.audit is not None
        assert abs(e.audit.other) <= 1e-5 * max(1.0, abs(e.output))
    if method == "attention":
        assert e.scores.sum() == pytest.approx(1.0, abs=1e-5)


EPSILON = 1e-8


def shared_out(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, whose relevance goes to `part`, the product without the bias, in shares of part + epsilon."""
    denominator = (part + EPSILON * torch.where(part >= 0, 1.0, -1.0)).detach()
    return part * (value.detach() / denominator)


def relevance_by_hand(
    w: dict[str, torch.Tensor], x: torch.Tensor, target: int, *, ends: bool = False
) -> tuple[Array, float]:
    """The authors' rules for one layer and the simple scan, with every constant written as detached.

    `ends`: the first and the last layer share out their biases, as in the authors' code.
    """
    x = x.clone().requires_grad_(True)

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        centred = h - h.mean(dim=-1, keepdim=True)
        std = (h.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt().detach()
        return centred / std * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gated(v: torch.Tensor) -> torch.Tensor:
        return v * torch.sigmoid(v).detach()

    product = x @ w["instance.0.0.weight"].T
    linear_out = product + w["instance.0.0.bias"]
    h = torch.relu(shared_out(product, linear_out) if ends else linear_out)
    name = "layers.0.mamba"
    u, z = (norm(h, "layers.0.norm") @ w[f"{name}.in_proj.weight"].T).chunk(2, dim=-1)
    padded = torch.cat([u.new_zeros(3, u.shape[1]), u])
    kernel = w[f"{name}.branches.0.conv.weight"][:, 0].T
    u = gated(torch.stack([(padded[t : t + 4] * kernel).sum(0) for t in range(len(x))])
              + w[f"{name}.branches.0.conv.bias"])  # fmt: skip
    made = (u @ w[f"{name}.branches.0.x_proj.weight"].T).detach()
    A = -w[f"{name}.branches.0.A_log"].exp()
    rank, s = made.shape[1] - 2 * A.shape[1], A.shape[1]
    dt = torch.nn.functional.softplus(
        made[:, :rank] @ w[f"{name}.branches.0.dt_proj.weight"].T + w[f"{name}.branches.0.dt_proj.bias"]
    )
    state, out = torch.zeros_like(A), []
    for t in range(len(x)):
        state = torch.exp(dt[t][:, None] * A) * state + (dt[t] * u[t])[:, None] * made[t, rank : rank + s]
        out.append(state @ made[t, rank + s :] + w[f"{name}.branches.0.D"] * u[t])
    y, gate = torch.stack(out), gated(z)
    halves = 0.5 * (y * gate.detach() + y.detach() * gate)  # the product, shared in halves
    mixed = norm(halves @ w[f"{name}.out_proj.weight"].T + h, "norm")
    attention = torch.tanh(mixed @ w["attention.V.weight"].T + w["attention.V.bias"])
    weights = (attention @ w["attention.w.weight"].T + w["attention.w.bias"]).softmax(dim=0).detach()
    pooled = (weights * mixed).sum(dim=0)
    part = pooled @ w["classifier.weight"][target]
    logit = part + w["classifier.bias"][target]
    logit = shared_out(part, logit) if ends else logit
    (gradient,) = torch.autograd.grad(logit, x)
    return (gradient * x).sum(dim=1).detach().numpy(), float(logit.detach())


@pytest.mark.parametrize("n", [1, 11])
def test_relevance_by_hand(n: int, rng: np.random.Generator) -> None:
    model, x = model_of(), torch.from_numpy(rng.normal(size=(n, D)))
    expected, logit = relevance_by_hand(model.state_dict(), x, 2)
    e = xmil.explain(model, x, method="lrp", target=2)
    assert e.output == pytest.approx(logit, rel=1e-6)
    np.testing.assert_allclose(e.scores, expected, rtol=1e-5, atol=1e-7)


def in_successors_layout(model: MambaMIL, suffixes: str = "") -> dict[str, torch.Tensor]:
    """The state dict as the authors' code stores it, written key by key."""
    state, own = {}, model.state_dict()
    names = {"instance.0.0": "proj.0", "attention.V": "attention.0", "attention.w": "attention.2"}
    names |= {"classifier": "linear_head", "norm": "norm"}
    for ours, theirs in names.items():
        for part in ("weight", "bias"):
            state[f"{theirs}.{part}"] = own[f"{ours}.{part}"]
    if model.columns is not None:
        state |= {"pos_embed_x": own["columns"], "pos_embed_y": own["rows"]}
    for i in range(len(model.layers)):
        block, layer = f"mamba_block.layers.{i}", f"layers.{i}"
        state |= {f"{block}.norm.{part}": own[f"{layer}.norm.{part}"] for part in ("weight", "bias")}
        state |= {
            f"{block}.mamba.{p}.weight": own[f"{layer}.mamba.{p}.weight"] for p in ("in_proj", "out_proj")
        }
        for k, suffix in enumerate(suffixes or [""]):
            end, branch = f"_{suffix}" * bool(suffix), f"{layer}.mamba.branches.{k}"
            state |= {
                f"{block}.mamba.conv1d{end}.weight": own[f"{branch}.conv.weight"],
                f"{block}.mamba.conv1d{end}.bias": own[f"{branch}.conv.bias"],
                f"{block}.mamba.x_proj{end}.weight": own[f"{branch}.x_proj.weight"],
                f"{block}.mamba.dt_proj{end}.weight": own[f"{branch}.dt_proj.weight"],
                f"{block}.mamba.dt_proj{end}.bias": own[f"{branch}.dt_proj.bias"],
                f"{block}.mamba.A{end}_log": own[f"{branch}.A_log"],
                f"{block}.mamba.D{end}": own[f"{branch}.D"],
            }
    return state


def written(folder: Path, model: MambaMIL, suffixes: str = "", **changes: object) -> Path:
    settings = {
        "aggregation_model": "mamba_mil",
        "pos_embed": model.positions,
        "scan": model.scan,
        "features_dim": DIM,
        "head_type": "classification",
        **changes,
    }
    torch.save({"model_state_dict": in_successors_layout(model, suffixes)}, folder / "best_model.pt")
    (folder / "args.json").write_text(json.dumps(settings))
    return folder / "best_model.pt"


@pytest.mark.parametrize(
    ("suffixes", "params"),
    [
        ("", {}),
        ("", {"n_layers": 2, "positions": "sinusoidal"}),
        ("ab", {"scan": "bidirectional"}),
        ("abcd", {"scan": "cross", "undo": "published", "positions": "learned"}),
    ],
)
@torch.no_grad()
def test_the_successors_checkpoints(
    suffixes: str, params: dict[str, object], tmp_path: Path, rng: np.random.Generator
) -> None:
    model = model_of(**params)
    loaded = xmil.load_model(written(tmp_path, model, suffixes))
    assert isinstance(loaded, MambaMIL)
    assert (loaded.scan, loaded.positions, loaded.undo) == (model.scan, model.positions, "published")
    x, coords = rng.normal(size=(9, D)), places(9, rng)
    found = loaded(torch.from_numpy(x)[None], coords=torch.from_numpy(coords)[None])[0]
    np.testing.assert_allclose(found.numpy(), by_hand(model, x, coords), rtol=1e-9, atol=1e-10)
    assert any("level-0 coordinates" in note for note in loaded.notes) == (model.positions != "none")


def test_scores_of_a_successors_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    """Its rules, written out: epsilon 1e-8 without bias in the first and the last layer."""
    model = model_of()
    loaded = xmil.load_model(written(tmp_path, model))
    x = torch.from_numpy(rng.normal(size=(12, D)))
    expected, logit = relevance_by_hand(model.state_dict(), x, 1, ends=True)
    e = xmil.explain(loaded, x, method="lrp", target=1, preset="paper")
    assert e.output == pytest.approx(logit, rel=1e-6)
    np.testing.assert_allclose(e.scores, expected, rtol=1e-4, atol=1e-6)


def test_settings_that_do_not_fit_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(xmil.XmilError, match=r"1 scans.*'cross' scan"):
        xmil.load_model(written(tmp_path, model_of(), scan="cross"))
    path = written(tmp_path, model_of())
    (tmp_path / "args.json").unlink()
    assert (
        "assumed no position code: args.json has no pos_embed, or is missing" in xmil.load_model(path).notes
    )


# A long bag goes through a layer in parts, each of which hands its state on to the next.


@pytest.fixture
def parts_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmil.nn.scan.SHORT", 3)
    monkeypatch.setattr("xmil.nn.scan.PART_ELEMENTS", 1)


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("n", [4, 13])
@torch.no_grad()
def test_the_formula_in_parts(
    params: dict[str, object], n: int, rng: np.random.Generator, parts_of_three: None
) -> None:
    model, x, coords = model_of(**params), rng.normal(size=(2, n, D)), places(n, rng)
    found = model(torch.from_numpy(x), coords=torch.from_numpy(coords).expand(2, -1, -1))
    for one, bag in zip(found, x, strict=True):
        np.testing.assert_allclose(one.numpy(), by_hand(model, bag, coords), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("params", VARIANTS)
@pytest.mark.parametrize("preset", ["exact", "paper", "centred"])
def test_relevance_in_parts(
    params: dict[str, object], preset: str, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """Scores and every share of the account are those of the whole sequence."""
    model, bag = model_of(**params), xmil.Bag(rng.normal(size=(13, D)), coords=places(13, rng))
    whole = xmil.explain(model, bag, target=1, preset=preset)
    request.getfixturevalue("parts_of_three")
    parts = xmil.explain(model, bag, target=1, preset=preset)
    np.testing.assert_allclose(parts.scores, whole.scores, rtol=1e-5, atol=1e-7)
    assert whole.audit is not None
    assert parts.audit is not None
    assert parts.audit.as_dict() == pytest.approx(whole.audit.as_dict(), abs=1e-10)


def test_relevance_at_a_layer_within_is_of_the_whole_sequence(
    rng: np.random.Generator, parts_of_three: None
) -> None:
    e = xmil.explain(model_of(), rng.normal(size=(13, D)), layer="layers.0.mamba.in_proj", preset="exact")
    assert len(e.scores) == 13


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that any operation makes, forwards or backwards."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in (out if isinstance(out, tuple) else [out]) if isinstance(one, torch.Tensor)]
        self.numbers = max([self.numbers, *(tensor.numel() for tensor in tensors)])
        return out


def test_a_long_bag_takes_no_more_than_its_scanned_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal and gate, twice as wide, and the states, sixteen times as many, are made a part at a time."""
    monkeypatch.setattr("xmil.nn.scan.PART_ELEMENTS", 1)
    monkeypatch.setattr("xmil.nn.scan.CHUNK_ELEMENTS", 1 << 14)
    model, n = model_of().float(), 2000
    x = torch.randn(n, D, generator=torch.Generator().manual_seed(0))
    with Largest() as forward, torch.no_grad():
        model(x[None])
    with Largest() as explaining:
        xmil.explain(model, x, target=1)
    assert max(forward.numbers, explaining.numbers) <= n * 2 * DIM
