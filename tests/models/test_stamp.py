"""STAMP's vision transformer: its checkpoints as Lightning writes them, and its formula."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.models.originals import Array, arrays, layer_norm, layers, linear, softmax, tensors
from xmil.core.errors import CheckpointError, InputError

D, DIM, HEADS, FEED, C = 7, 8, 2, 5, 3


def keys(*, alibi: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"class_token": (DIM,)}
    shapes |= layers(project_features__0=(DIM, D), transformer__norm=(DIM,), mlp_head__0=(C, DIM))
    for i in range(2):
        attention, feed = f"transformer__layers__{i}__0__", f"transformer__layers__{i}__1__"
        shapes |= layers(**{f"{attention}norm": (DIM,), f"{feed}0": (DIM,)})
        shapes |= layers(**{f"{feed}1": (FEED, DIM), f"{feed}4": (DIM, FEED)})
        mhsa = f"transformer.layers.{i}.0.mhsa"
        if not alibi:
            shapes |= {f"{mhsa}.in_proj_weight": (3 * DIM, DIM), f"{mhsa}.in_proj_bias": (3 * DIM,)}
            shapes |= layers(**{f"{attention}mhsa__out_proj": (DIM, DIM)})
            continue
        for kind in ("query", "key", "value"):
            names = [f"{attention}mhsa__{kind}_encoders__{h}" for h in range(HEADS)]
            shapes |= layers(**dict.fromkeys(names, (DIM // HEADS, DIM)))
        shapes |= layers(**{f"{attention}mhsa__fc": (DIM, DIM)})
        for h in range(HEADS):
            shapes[f"{mhsa}.attentions.{h}.bias_scale"] = (1,)
            shapes[f"{mhsa}.attentions.{h}.scale_distance.running_mean"] = (1,)
            shapes[f"{mhsa}.attentions.{h}.scale_distance.items_so_far"] = (1,)
    return shapes


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(lambda v: float(torch.erf(torch.tensor(v))))(x / np.sqrt(2)))


def attention_by_hand(w: dict[str, Array], name: str, x: Array, places: Array | None) -> Array:
    joined = []
    for h in range(HEADS):
        part = slice(h * DIM // HEADS, (h + 1) * DIM // HEADS)
        if places is None:
            rows = np.split(w[f"{name}.in_proj_weight"], 3), np.split(w[f"{name}.in_proj_bias"], 3)
            q, k, v = (x @ rows[0][i][part].T + rows[1][i][part] for i in range(3))
        else:
            q, k, v = (linear(w, f"{name}.{kind}_encoders.{h}", x) for kind in ("query", "key", "value"))
        weights = softmax(q @ k.T / np.sqrt(DIM // HEADS), axis=1)
        if places is not None:
            distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
            at = f"{name}.attentions.{h}"
            mean, scale = w[f"{at}.scale_distance.running_mean"], w[f"{at}.bias_scale"]
            weights = weights - distance / mean * scale
        joined.append(weights @ v)
    out = np.concatenate(joined, axis=1)
    return linear(w, f"{name}.{'out_proj' if places is None else 'fc'}", out)


def by_hand(state: dict[str, torch.Tensor], x: Array, microns: Array | None) -> Array:
    w = arrays(state)
    h = np.concatenate([w["class_token"][None], gelu(linear(w, "project_features.0", x))])
    places = None if microns is None else np.concatenate([np.zeros((1, 2)), microns])
    for i in range(2):
        layer = f"transformer.layers.{i}"
        h = h + attention_by_hand(w, f"{layer}.0.mhsa", layer_norm(w, f"{layer}.0.norm", h), places)
        h = h + linear(w, f"{layer}.1.4", gelu(linear(w, f"{layer}.1.1", layer_norm(w, f"{layer}.1.0", h))))
    return linear(w, "mlp_head.0", layer_norm(w, "transformer.norm", h)[0])


@contextmanager
def stamps_classes() -> Iterator[tuple[type, object]]:
    """A class of STAMP's and an object of another package, to be pickled and then gone."""
    name = "stamp.modeling.models.vision_tranformer"
    modules = [".".join(name.split(".")[:k]) for k in range(1, 5)]
    for path in modules:
        sys.modules[path] = types.ModuleType(path)
    network = type("VisionTransformer", (), {"__module__": name})
    version = type("Version", (), {"__module__": name})
    sys.modules[name].VisionTransformer, sys.modules[name].Version = network, version  # type: ignore[attr-defined]
    try:
        known = version()
        known.text = "2.5.0"
        yield network, known
    finally:
        for path in modules:
            del sys.modules[path]


def write(
    path: Path, *, alibi: bool = False, prefix: str = "model.", **settings: object
) -> dict[str, torch.Tensor]:
    """A checkpoint as Lightning writes STAMP's: classes and objects among the settings."""
    state = tensors(keys(alibi=alibi))
    for key in state:
        if "running_mean" in key:
            state[key] = state[key].abs() + 1
    said = {"n_heads": HEADS, "task": "classification", "categories": ["a", "b", "c"], **settings}
    with stamps_classes() as (network, version):
        hyper = {"model_class": network, "stamp_version": version, "train_patients": {"p1", "p2"}, **said}
        content = {
            "epoch": 3,
            "pytorch-lightning_version": "2.5.0",
            "state_dict": {f"{prefix}{key}": value for key, value in state.items()},
            "hyper_parameters": {**hyper, "category_weights": torch.ones(3)},
        }
        torch.save(content, path)
    return state


@pytest.mark.parametrize("prefix", ["model.", "vision_transformer."])
@pytest.mark.parametrize("alibi", [False, True])
@torch.no_grad()
def test_logits_equal_the_formula(alibi: bool, prefix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    state = write(tmp_path / "m.ckpt", alibi=alibi, prefix=prefix)
    model = xmil.load_model(tmp_path / "m.ckpt")
    assert (model.spec.name, model.task, model.class_names) == (
        "stamp_vit",
        "classification",
        ("a", "b", "c"),
    )
    for n in (1, 8):
        x, microns = rng.normal(size=(n, D)), rng.uniform(0, 3, size=(n, 2))
        places = {"microns": torch.from_numpy(microns).float()[None]} if alibi else {}
        found = model(torch.from_numpy(x).float()[None], **places)[0].numpy()
        expected = by_hand(state, x, microns if alibi else None)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("said", "task"),
    [("classification", "classification"), ("regression", "regression"), ("survival", "cox")],
)
def test_the_task_is_in_the_settings(said: str, task: str, tmp_path: Path) -> None:
    write(tmp_path / "m.ckpt", task=said, categories=None)
    if said != "survival":
        model = xmil.load_model(tmp_path / "m.ckpt")
        assert (model.task, model.warnings) == (task, ())
    else:
        assert xmil.load_model(tmp_path / "m.ckpt", head=0).task == task  # STAMP's has one output


def test_settings_that_say_nothing_are_noted(tmp_path: Path) -> None:
    write(tmp_path / "m.ckpt", task="ranking", categories=None)
    model = xmil.load_model(tmp_path / "m.ckpt")
    assert any("'ranking'" in note for note in model.notes)
    assert model.warnings


def test_relevance_of_places_in_microns(tmp_path: Path, rng: np.random.Generator) -> None:
    """Distances travel with the instances, from a bag with level-0 coordinates and mpp."""
    write(tmp_path / "m.ckpt", alibi=True)
    model = xmil.load_model(tmp_path / "m.ckpt")
    x, coords = rng.normal(size=(6, D)).astype(np.float32), rng.integers(0, 20, size=(6, 2))
    bag = xmil.Bag(x, coords=coords, mpp=0.25)
    e = xmil.explain(model, bag, method="lrp", target=1)
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * max(abs(e.output), 1.0)
    alone = xmil.explain(model, bag, method="single", target=1)
    with torch.no_grad():
        for k in range(6):
            place = torch.from_numpy(coords[k] * 0.25).float()[None, None]
            p = model(torch.from_numpy(x[k])[None, None], microns=place).softmax(-1)[0, 1]
            assert alone.scores[k] == pytest.approx(float(p), abs=1e-6)
    with pytest.raises(InputError, match="needs positions in microns"):
        xmil.explain(model, x)
    with pytest.raises(xmil.XmilError, match="subtracts distances from attention"):
        xmil.explain(model, bag, method="attention")


def test_attention_of_the_class_token(rng: np.random.Generator) -> None:
    model = xmil.create_model("stamp_vit", in_dim=D, n_classes=2, dim=8, heads=2, n_layers=1, feedforward=4)
    x = rng.normal(size=(5, D)).astype(np.float32)
    e = xmil.explain(model, x, method="attention", layer=0)
    with torch.no_grad():
        h = model.embed(torch.from_numpy(x)[None])
        tokens = torch.cat([model.class_token.expand(1, 1, -1), h], dim=1)
        attn = model.layers[0].attn
        q, k = (attn.project(model.layers[0].norm(tokens), part) for part in (0, 1))
        weights = (q @ k.mT / 2).softmax(-1)[0, :, 0, 1:].mean(dim=0)
    np.testing.assert_allclose(e.scores, weights.numpy(), rtol=1e-5, atol=1e-7)


class Harmful:
    """Unpickles to a call."""

    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call, self.arguments


HARM = {
    "system": Harmful(os.system, "touch pwned"),
    "eval": Harmful(eval, "open('pwned', 'w')"),
    "popen": Harmful(subprocess.Popen, ["touch", "pwned"]),
    "getattr": Harmful(getattr, "x", "upper"),
    "import": Harmful(__import__, "os"),
    "open": Harmful(open, "pwned", "w"),
}


@pytest.mark.parametrize("where", ["hyper_parameters", "state_dict", "callbacks"])
@pytest.mark.parametrize("harm", HARM)
def test_a_checkpoint_that_would_run_code_is_refused(
    harm: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"pytorch-lightning_version": "2", "hyper_parameters": {}, "state_dict": {}, "callbacks": {}}
    content["state_dict"] = {f"model.{k}": v for k, v in tensors(keys(alibi=False)).items()}
    content[where]["x"] = HARM[harm]  # type: ignore[index]
    torch.save(content, tmp_path / "m.ckpt")
    with pytest.raises(CheckpointError, match="refused, it holds more than tensors"):
        xmil.load_model(tmp_path / "m.ckpt")
    assert not (tmp_path / "pwned").exists()


def test_stubs_take_the_place_of_calls_of_other_packages(tmp_path: Path) -> None:
    """A function of an installed package is not called either."""
    calls: list[int] = []
    module = types.ModuleType("otherpackage")
    module.strike = calls.append  # type: ignore[attr-defined]
    content = {"pytorch-lightning_version": "2", "hyper_parameters": {}, "callbacks": {}}
    content["state_dict"] = {f"model.{k}": v for k, v in tensors(keys(alibi=False)).items()}  # type: ignore[assignment]
    torch.save(content, tmp_path / "plain.ckpt")

    class Call:
        def __reduce__(self) -> str:
            return "strike"

    sys.modules["otherpackage"] = module
    try:
        Call.__module__ = "otherpackage"
        with (
            zipfile.ZipFile(tmp_path / "plain.ckpt") as plain,
            zipfile.ZipFile(tmp_path / "m.ckpt", "w") as made,
        ):
            for name in plain.namelist():
                data = plain.read(name)
                if name.endswith("data.pkl"):
                    called = b"cotherpackage\nstrike\n(K\x01tR"  # strike(1), left on the stack and dropped
                    data = data[:2] + called + b"0" + data[2:]
                made.writestr(name, data)
        assert xmil.load_model(tmp_path / "m.ckpt").spec.name == "stamp_vit"
    finally:
        del sys.modules["otherpackage"]
    assert calls == []


def test_a_compressed_archive_is_no_checkpoint(tmp_path: Path) -> None:
    """torch.save never compresses; a bomb does."""
    write(tmp_path / "m.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "m.ckpt") as plain,
        zipfile.ZipFile(tmp_path / "z.ckpt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError):
        xmil.load_model(tmp_path / "z.ckpt")


@pytest.mark.parametrize("fault", ["storage", "stride", "pickle"])
def test_damaged_checkpoints(fault: str, tmp_path: Path) -> None:
    write(tmp_path / "m.ckpt")
    with zipfile.ZipFile(tmp_path / "m.ckpt") as plain, zipfile.ZipFile(tmp_path / "z.ckpt", "w") as made:
        for name in plain.namelist():
            data = plain.read(name)
            if fault == "storage" and "/data/" in name:
                continue
            if fault == "stride" and "/data/" in name:
                data = data[:4]
            if fault == "pickle" and name.endswith("data.pkl"):
                data = data[:-20]
            made.writestr(name, data)
    with pytest.raises(CheckpointError):
        xmil.load_model(tmp_path / "z.ckpt")


def test_other_files_with_foreign_classes_stay_refused(tmp_path: Path) -> None:
    with stamps_classes() as (network, _):
        torch.save({"state_dict": {"w": torch.zeros(1)}, "net": network}, tmp_path / "m.pt")
        (tmp_path / "n.pt").write_bytes(pickle.dumps({"net": network}, protocol=2))
    for name in ("m.pt", "n.pt"):
        with pytest.raises(CheckpointError, match="refused, it holds more than tensors"):
            xmil.load_model(tmp_path / name)
