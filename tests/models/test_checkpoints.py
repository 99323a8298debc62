"""Checkpoints: each family by its keys, ours by round trip, and files that must be refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import xmil
from xmil.core.errors import CheckpointError
from xmil.models import describe_checkpoint
from xmil.models.checkpoints import FAMILIES

TRANSMIL = {"dim": 16, "heads": 8, "landmarks": 8}
XMIL_TRANSMIL = [
    (r"^instance\.0\.", "_fc1."),
    (r"^classifier\.", "_fc2."),
    (r"^ppeg\.", "pos_layer."),
    (r"^class_token", "cls_token"),
]
MIL_LAB = [
    (r"^attention\.V", "global_attn.attention_a.0"),
    (r"^attention\.U", "global_attn.attention_b.0"),
    (r"^attention\.w", "global_attn.attention_c"),
]

# family -> (our model, its parameters, how its keys become the family's, prefix, container)
CASES = {
    "xmil-attnmil": (
        "attnmil",
        {"dim": 8, "attention_dim": 4, "n_layers": 2, "n_out_layers": 1},
        [
            (r"^instance", "linear_layers"),
            (r"^attention\.V", "attention.0"),
            (r"^attention\.w", "attention.2"),
            (r"^out", "out_layers"),
        ],
        "",
        "model_state_dict",
    ),
    "xmil-transmil": (
        "transmil",
        TRANSMIL,
        [*XMIL_TRANSMIL, (r"^layers", "translayers")],
        "",
        "model_state_dict",
    ),
    "xmil-addmil": (
        "addmil",
        {"hidden": 7},
        [(r"^attention\.", "pointer.model."), (r"^classifier\.", "classifier.model.")],
        "",
        "model_state_dict",
    ),
    "clam": (
        "clam_sb",
        {"dim": 8, "attention_dim": 4},
        [
            (r"^instance\.0\.0", "attention_net.0"),
            (r"^attention\.V", "attention_net.2.attention_a.0"),
            (r"^attention\.U", "attention_net.2.attention_b.0"),
            (r"^attention\.w", "attention_net.2.attention_c"),
            (r"^classifier\.", "classifiers."),
        ],
        "",
        None,
    ),
    "transmil": (
        "transmil",
        TRANSMIL,
        [*XMIL_TRANSMIL, (r"^layers\.0", "layer1"), (r"^layers\.1", "layer2")],
        "model.",
        "state_dict",
    ),
    "mil-lab-transmil": (
        "transmil",
        {**TRANSMIL, "heads": 4, "n_feature_layers": 2},
        [
            (r"^instance\.0\.0", "patch_embed.0"),
            (r"^instance\.1\.0", "patch_embed.3"),
            (r"^ppeg", "pos_layer"),
            (r"^class_token", "cls_token"),
            (r"^layers\.(\d)\.attn", r"blocks.\1.attention"),
            (r"^layers", "blocks"),
        ],
        "model.",
        None,
    ),
    "mil-lab-abmil": (
        "attnmil",
        {"dim": 8, "attention_dim": 4, "gated": True},
        [(r"^instance\.0\.0", "patch_embed.0"), *MIL_LAB],
        "model.",
        None,
    ),
    "hippo": (
        "attnmil",
        {"dim": 8, "attention_dim": 4, "gated": True},
        [
            (r"^instance\.0\.0", "encoder.0"),
            (r"^attention\.V", "attention_weights.attention_V.0"),
            (r"^attention\.U", "attention_weights.attention_U.0"),
            (r"^attention\.w", "attention_weights.attention_weights"),
            (r"^classifier", "head"),
        ],
        "",
        None,
    ),
    "xmil-mambamil": (
        "mambamil",
        {"dim": 8, "attention_dim": 4, "n_layers": 2, "undo": "published"},
        [
            (r"^instance\.0\.0", "proj.0"),
            (r"^layers\.(\d)\.mamba\.branches\.0\.conv", r"mamba_block.layers.\1.mamba.conv1d"),
            (r"^layers\.(\d)\.mamba\.branches\.0\.", r"mamba_block.layers.\1.mamba."),
            (r"^layers", "mamba_block.layers"),
            (r"^attention\.V", "attention.0"),
            (r"^attention\.w", "attention.2"),
            (r"^classifier", "linear_head"),
        ],
        "",
        "model_state_dict",
    ),
    "stamp-vit": (
        "stamp_vit",
        {"dim": 16, "feedforward": 12},
        [
            (r"^instance", "project_features"),
            (r"^layers\.(\d)\.norm", r"transformer.layers.\1.0.norm"),
            (r"^layers\.(\d)\.attn\.to_qkv\.", r"transformer.layers.\1.0.mhsa.in_proj_"),
            (r"^layers\.(\d)\.attn\.to_out\.0", r"transformer.layers.\1.0.mhsa.out_proj"),
            (r"^layers\.(\d)\.feed", r"transformer.layers.\1.1"),
            (r"^norm", "transformer.norm"),
            (r"^classifier", "mlp_head.0"),
        ],
        "model.",
        "state_dict",
    ),
    "mil-lab-transformer": (
        "transmil",
        {**TRANSMIL, "attention": "dot_product", "residual_kernel": None, "qkv_bias": True, "ppeg": False},
        [
            (r"^instance\.0\.0", "patch_embed.0"),
            (r"^class_token", "cls_token"),
            (r"^layers\.(\d)\.attn\.to_qkv\.", r"blocks.\1.attention.in_proj_"),
            (r"^layers\.(\d)\.attn\.to_out\.0", r"blocks.\1.attention.out_proj"),
            (r"^layers", "blocks"),
        ],
        "model.",
        None,
    ),
    "torchmil-abmil": (
        "attnmil",
        {"dim": 6, "attention_dim": 4, "n_layers": 0, "gated": True},
        [(r"^attention\.V", "pool.fc1"), (r"^attention\.U", "pool.fc_gated"), (r"^attention\.w", "pool.fc2")],
        "",
        None,
    ),
    "torchmil-dsmil": (
        "dsmil",
        {"query_dim": 5},
        [(r"^instance_classifier", "inst_classifier"), (r"^query", "q_nn")],
        "",
        None,
    ),
    "mil-lab-dsmil": (
        "dsmil",
        {"dim": 8, "query_dim": 5, "query_layers": 1, "values": "linear", "norm": True},
        [
            (r"^instance\.0\.0", "patch_embed.0"),
            (r"^instance_classifier", "i_classifier.inst_classifier"),
            (r"^query\.0", "b_classifier.q"),
            (r"^values\.0", "b_classifier.v.1"),
            (r"^norm", "b_classifier.norm"),
            (r"^bag_classifier", "classifier"),
        ],
        "model.",
        None,
    ),
    "dsmil": (
        "dsmil",
        {"query_dim": 5, "streams": "bag"},
        [
            (r"^instance_classifier", "i_classifier.fc.0"),
            (r"^query", "b_classifier.q"),
            (r"^bag_classifier", "b_classifier.fcc"),
        ],
        "",
        None,
    ),
}


def in_family(
    model: torch.nn.Module, rules: list[tuple[str, str]], prefix: str = ""
) -> dict[str, torch.Tensor]:
    state = {}
    for key, value in model.state_dict().items():
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, key)
            if new != key:
                key = new
                break
        state[prefix + key] = value
    return state


@pytest.mark.parametrize("family", CASES)
def test_families(family: str, tmp_path: Path) -> None:
    name, params, rules, prefix, container = CASES[family]
    model = xmil.create_model(name, in_dim=6, n_classes=3, seed=0, **params)
    state = in_family(model, rules, prefix)
    torch.save({container: state, "epoch": 3} if container else state, tmp_path / "checkpoint.pt")
    loaded = xmil.load_model(tmp_path / "checkpoint.pt")
    x = torch.randn(1, 10, 6)
    assert torch.equal(loaded(x), model(x))
    assert not loaded.training
    described = describe_checkpoint(tmp_path / "checkpoint.pt")
    assert (described["family"], described["name"], described["in_dim"], described["n_classes"]) == (
        family,
        name,
        6,
        3,
    )


def test_the_encoder_comes_from_settings_or_from_the_published_name(tmp_path: Path) -> None:
    name, params, rules, prefix, _ = CASES["mil-lab-abmil"]
    model = xmil.create_model(name, in_dim=6, n_classes=3, seed=0, **params)
    place = tmp_path / "abmil.base.uni_v2.pc108-24k"
    place.mkdir()
    torch.save(in_family(model, rules, prefix), place / "pytorch_model.bin")
    assert xmil.load_model(place).spec.encoder == "uni_v2"
    settings = {"patch_encoder": "ctranspath", "tile_size_um": 256, "tile_size_px": 224}
    (place / "config.json").write_text(json.dumps(settings))
    spec = xmil.load_model(place).spec
    assert (spec.encoder, spec.features) == ("ctranspath", {"patch_px": 224, "mpp": 1.1429})


@pytest.mark.parametrize("prefix", ["model.", "module.", "net.", "model.model.", "module.model."])
def test_foreign_keys_beside_a_prefix_are_dropped_and_named(prefix: str, tmp_path: Path) -> None:
    model = xmil.create_model("addmil", in_dim=6, n_classes=2, hidden=7)
    state = {f"{prefix}{key}": value for key, value in in_family(model, CASES["xmil-addmil"][2]).items()}
    torch.save({"state_dict": state | {"loss.weight": torch.ones(2)}}, tmp_path / "m.ckpt")
    assert torch.equal(xmil.load_model(tmp_path / "m.ckpt").classifier[0].weight, model.classifier[0].weight)
    [note] = describe_checkpoint(tmp_path / "m.ckpt")["notes"]
    assert note.startswith("dropped loss.weight")
    assert f"'{prefix.split('.')[0]}." in note


def test_a_lightning_transmil_with_a_loss_of_its_own(tmp_path: Path) -> None:
    model = xmil.create_model("transmil", in_dim=6, n_classes=2, **TRANSMIL)
    state = {f"model.model.{key}": value for key, value in in_family(model, CASES["transmil"][2]).items()}
    torch.save({"state_dict": state | {"model.loss.weight": torch.ones(2)}}, tmp_path / "m.ckpt")
    found = describe_checkpoint(tmp_path / "m.ckpt")
    assert found["family"] == "transmil"
    [note] = found["notes"]
    assert note.startswith("dropped model.loss.weight")
    assert "'model.model.'" in note


def test_a_prefix_alone_drops_nothing(tmp_path: Path) -> None:
    model = xmil.create_model("addmil", in_dim=6, n_classes=2, hidden=7)
    state = {f"net.{key}": value for key, value in in_family(model, CASES["xmil-addmil"][2]).items()}
    torch.save(state, tmp_path / "m.pt")
    assert describe_checkpoint(tmp_path / "m.pt")["notes"] == []


def test_a_stranger_under_a_prefix_is_named_by_its_own_keys(tmp_path: Path) -> None:
    torch.save({"model.conv.weight": torch.zeros(1), "loss.weight": torch.zeros(1)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"unknown family\. Keys: model\.conv\.weight, loss\.weight"):
        xmil.load_model(tmp_path / "m.pt")


def test_every_family_is_tested() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize("infix", ["", "module."])
@pytest.mark.parametrize("gated", [True, False])
def test_clam_variants(infix: str, gated: bool, tmp_path: Path) -> None:
    """Multi-branch, DataParallel, with dropout (index 3), the instance loss's tensors along."""
    model = xmil.create_model("clam_mb", in_dim=6, n_classes=2, dim=8, attention_dim=4, gated=gated, seed=0)
    net = f"attention_net.{infix}"
    parts = (
        ("3.attention_a.0", "3.attention_b.0", "3.attention_c") if gated else ("3.module.0", "", "3.module.3")
    )
    rules = [
        (r"^instance\.0\.0", f"{net}0"),
        (r"^attention\.V", net + parts[0]),
        (r"^attention\.U", net + parts[1]),
        (r"^attention\.w", net + parts[2]),
    ]
    state = in_family(model, rules) | {
        "instance_classifiers.0.weight": torch.zeros(2, 8),
        "instance_loss_fn.labels": torch.zeros(2),
    }
    torch.save(state, tmp_path / "s_0_checkpoint.pt")
    loaded = xmil.load_model(tmp_path / "s_0_checkpoint.pt")
    x = torch.randn(1, 10, 6)
    assert torch.equal(loaded(x), model(x))
    assert describe_checkpoint(tmp_path / "s_0_checkpoint.pt")["notes"] == [
        "ignored 2 keys of the instance loss"
    ]


@pytest.mark.parametrize(
    "settings", [{"attention": "dot_prod"}, {"no_attn_residual": True}, {"pool_method": "sum"}]
)
def test_what_shapes_cannot_say_comes_from_the_settings(settings: dict[str, object], tmp_path: Path) -> None:
    params = dict(TRANSMIL)
    params.update({"attention": "dot_product"} if settings.get("attention") else {})
    params.update({"residual_kernel": None} if settings.get("no_attn_residual") else {})
    params.update({"pool": "sum"} if settings.get("pool_method") else {})
    model = xmil.create_model("transmil", in_dim=6, n_classes=2, seed=0, **params)
    state = in_family(model, [*XMIL_TRANSMIL, (r"^layers", "translayers")])
    state.setdefault("cls_token", torch.zeros(1, 1, 16))  # stored by the published code either way
    state["mlp_layers.0.0.weight"] = torch.zeros(16, 16)
    torch.save({"model_state_dict": state}, tmp_path / "best_model.pt")
    (tmp_path / "args.json").write_text(json.dumps(settings))
    loaded = xmil.load_model(tmp_path)  # the folder will do
    x = torch.randn(1, 10, 6)
    assert torch.equal(loaded(x), model(x))
    assert "mlp_layers.0.0.weight" in describe_checkpoint(tmp_path)["notes"][0]


@pytest.mark.parametrize("name", xmil.list_models())
def test_our_own_round_trip(name: str, tmp_path: Path) -> None:
    params = {"dim": 16, "n_layers": 3} if name == "transmil" else {}
    model = xmil.create_model(
        name,
        in_dim=6,
        n_classes=2,
        seed=0,
        class_names=["no", "yes"],
        encoder="uni_v1",
        task="multilabel",
        **params,
    )
    xmil.save_model(model, tmp_path / "model.safetensors")
    loaded = xmil.load_model(tmp_path / "model.safetensors")
    assert loaded.spec == model.spec
    x = torch.randn(1, 10, 6)
    assert torch.equal(loaded(x), model(x))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_class_names_can_be_given(tmp_path: Path) -> None:
    xmil.save_model(xmil.create_model("meanpool", in_dim=6, n_classes=2), tmp_path / "m.safetensors")
    model = xmil.load_model(tmp_path / "m.safetensors", class_names=["HPV-", "HPV+"])
    e = xmil.explain(model, np.ones((3, 6)), target="HPV+")
    assert (e.target == 1, e.column) == (True, "lrp:HPV+")
    with pytest.raises(CheckpointError, match="2 names"):
        xmil.load_model(tmp_path / "m.safetensors", class_names=["one"])


class Payload:
    """Runs a command when unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch pwned",)


def dangerous(how: str, path: Path) -> None:
    contents = {"torch": Payload(), "state": {"model_state_dict": {"a": Payload()}}}
    contents["inside"] = {"state_dict": {"w": torch.zeros(1)}, "hook": Payload()}
    contents["class"] = {"state_dict": {"w": torch.zeros(1)}, "slice": slice(3)}
    if how == "pickle":
        path.write_bytes(pickle.dumps(Payload()))
    elif how == "old pickle":
        path.write_bytes(pickle.dumps(Payload(), protocol=0))
    else:
        torch.save(contents[how], path)


@pytest.mark.parametrize("how", ["pickle", "old pickle", "torch", "inside", "state", "class"])
def test_a_pickle_that_would_run_code_is_refused(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    dangerous(how, path)
    with pytest.raises(CheckpointError, match="refused, it holds more than tensors") as caught:
        xmil.load_model(path)
    assert str(path) in str(caught.value)
    assert not re.search("weights_only|safe_globals|trusted|PyTorch", str(caught.value))  # torch's advice
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"hello", b"\xf4\x01\x02" * 100])
def test_garbage_is_not_called_dangerous(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not a (readable )?checkpoint") as caught:
        xmil.load_model(tmp_path / "model.pt")
    assert not re.search("refused|weights_only|PyTorch", str(caught.value))


def test_numpy_scalars_of_an_optimiser_pass(tmp_path: Path) -> None:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8)
    state = in_family(model, CASES["xmil-attnmil"][2])
    torch.save(
        {"model_state_dict": state, "optimizer": {"lr": np.float64(0.1), "n": np.int64(2)}}, tmp_path / "m.pt"
    )
    assert torch.equal(xmil.load_model(tmp_path / "m.pt").classifier.weight, model.classifier.weight)


def broken_files(folder: Path) -> dict[str, Path]:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8)
    state = in_family(model, CASES["xmil-attnmil"][2])
    xmil.save_model(model, folder / "ours.safetensors")
    torch.save(state, folder / "good.pt")
    files = {
        name: folder / name
        for name in (
            "missing.pt",
            "empty.pt",
            "text.pt",
            "page.pt",
            "noise.pt",
            "renamed.pt",
            "cut.pt",
            "cut.safetensors",
            "features.pt",
            "lacks.pt",
            "extra.pt",
            "shape.pt",
            "stranger.pt",
            "nothing.pt",
            "headless.pt",
            "spec.safetensors",
        )
    }
    files["empty.pt"].write_bytes(b"")
    files["text.pt"].write_text("hello")
    files["page.pt"].write_text("<!DOCTYPE html>\n<p>Not found")
    files["noise.pt"].write_bytes(b"I\xff\x00\x01" * 50)
    files["renamed.pt"].write_bytes((folder / "ours.safetensors").read_bytes())
    files["cut.pt"].write_bytes((folder / "good.pt").read_bytes()[:-300])
    files["cut.safetensors"].write_bytes((folder / "ours.safetensors").read_bytes()[:100])
    torch.save(torch.zeros(3, 4), files["features.pt"])
    torch.save({k: v for k, v in state.items() if k != "attention.0.bias"}, files["lacks.pt"])
    torch.save(state | {"surprise": torch.zeros(1)}, files["extra.pt"])
    torch.save(state | {"classifier.weight": torch.zeros(2, 9)}, files["shape.pt"])
    torch.save({"conv.weight": torch.zeros(1)}, files["stranger.pt"])
    torch.save({"epoch": 3}, files["nothing.pt"])
    torch.save({k: v for k, v in state.items() if not k.startswith("classifier")}, files["headless.pt"])
    save_file(
        {"w": torch.zeros(1)}, files["spec.safetensors"], metadata={"xmil": json.dumps({"name": "attnmil"})}
    )
    files["folder"] = folder / "sub"
    files["folder"].mkdir()
    return files


MESSAGES = {
    "missing.pt": "no such file",
    "empty.pt": r"is empty \(0 bytes\); download or copy it again",
    "text.pt": r"not a checkpoint \(it starts with 'hello'\); download or copy it again",
    "page.pt": r"not a checkpoint \(it starts with '<!DOCTYPE html>'\); download",
    "noise.pt": r"not a checkpoint \(.*signature\); download",
    "renamed.pt": r"holds safetensors; rename it to end in \.safetensors",
    "cut.pt": r"truncated or not a checkpoint \(.*\); download or copy it again",
    "cut.safetensors": r"not a readable safetensors file \(.*\); download or copy it again",
    "features.pt": "read_bag",
    "lacks.pt": r"missing: attention\.V\.bias",
    "extra.pt": "unexpected: surprise",
    "shape.pt": r"wrong shape: classifier\.weight \(2, 9\), expected \(2, 8\)",
    "stranger.pt": r"of an unknown family\. Keys: conv\.weight\. Tried: clam lacks",
    "nothing.pt": "holds no tensors; keys: epoch",
    "headless.pt": "without a head",
    "spec.safetensors": "in_dim",
    "folder": "name the checkpoint file",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_broken_files(name: str, tmp_path: Path) -> None:
    path = broken_files(tmp_path)[name]
    with pytest.raises(CheckpointError, match=MESSAGES[name]) as caught:
        xmil.load_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["o.pt", "o", "o.safetensors.bin"])
def test_only_safetensors_are_written(name: str, tmp_path: Path) -> None:
    model = xmil.create_model("meanpool", in_dim=6, n_classes=2)
    with pytest.raises(CheckpointError, match=re.escape(f"{name}: save_model writes safetensors; end the")):
        xmil.save_model(model, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("stored", "loaded"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32)],
)
def test_double_weights_stay_double(stored: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8).to(stored)
    xmil.save_model(model, tmp_path / "o.safetensors")
    weight = xmil.load_model(tmp_path / "o.safetensors").classifier.weight
    assert weight.dtype == loaded
    assert torch.equal(weight, model.classifier.weight.to(loaded))


def test_only_our_models_are_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="create_model or load_model, not Linear"):
        xmil.save_model(torch.nn.Linear(2, 2), tmp_path / "m.safetensors")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    model = xmil.create_model("meanpool", in_dim=6, n_classes=2)
    with pytest.raises(xmil.XmilError, match="cannot be written"):
        xmil.save_model(model, tmp_path / "no" / "such" / "folder.safetensors")
