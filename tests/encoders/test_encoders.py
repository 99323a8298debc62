"""Encoders by name, file and function: the right numbers, their own transforms, clear errors."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.encoders.builders import Mean
from tests.encoders.torchvisions import timm_or_skip
from xmil.core.errors import CheckpointError, FileError, InputError, UnknownNameError
from xmil.encoders import IMAGENET, Transform, list_encoders, load_encoder
from xmil.nn import CTransPath, ResNet

PATCH = np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)


def batch(size: int = 64, n: int = 2) -> torch.Tensor:
    return torch.randint(
        0, 255, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def by_hand(x: torch.Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    channels = [(x[:, i].double() / 255 - mean[i]) / std[i] for i in range(3)]
    return torch.stack(channels, dim=1).float()


def test_names() -> None:
    assert {"resnet18", "resnet50", "ctranspath", "uni", "virchow2", "phikon"} <= set(list_encoders())


@pytest.mark.parametrize(("name", "dim"), [("resnet18", 512), ("resnet50", 2048)])
def test_resnets_take_torchvisions_files(name: str, dim: int, tmp_path: Path) -> None:
    source = ResNet(name).eval()
    classified = {**source.state_dict(), "fc.weight": torch.zeros(9, dim), "fc.bias": torch.zeros(9)}
    torch.save(
        {"state_dict": {f"module.{key}": value for key, value in classified.items()}}, tmp_path / "w.pth"
    )
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    x = batch()
    with torch.no_grad():
        expected = source(by_hand(x, *IMAGENET))
    for file in ("w.pth", "w.safetensors"):
        encoder = load_encoder(name, weights=tmp_path / file)
        assert (encoder.name, encoder.dim, encoder.precision) == (name, dim, "float32")
        assert encoder.about["weights"].startswith(f"{file}, sha256 ")
        torch.testing.assert_close(encoder(x), expected, atol=1e-5, rtol=1e-4)


def test_clams_encoder_is_resnet50_without_the_last_stage(tmp_path: Path) -> None:
    source = ResNet("resnet50").eval()
    torch.save({**source.state_dict(), "fc.weight": torch.zeros(9, 2048)}, tmp_path / "w.pth")
    encoder, x = load_encoder("resnet50_trunc", weights=tmp_path / "w.pth"), batch()
    source.layer4 = torch.nn.Identity()
    with torch.no_grad():
        expected = source(by_hand(x, *IMAGENET))
    assert encoder.dim == 1024
    torch.testing.assert_close(encoder(x), expected, atol=1e-5, rtol=1e-4)


def test_published_weights_come_from_torchs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    source = ResNet("resnet18")
    torch.save(source.state_dict(), tmp_path / "checkpoints" / "resnet18-f37072fd.pth")
    encoder = load_encoder("resnet18")
    torch.testing.assert_close(encoder.network.conv1.weight, source.conv1.weight)
    assert encoder.about["weights"] == "published, resnet18"
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").unlink()
    monkeypatch.setattr(urllib.request, "_opener", None)  # urllib keeps the proxies that it saw first
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(FileError, match=r"cannot be downloaded .* pass `weights=`"):
        load_encoder("resnet18")


def test_random_encoders_are_the_same_everywhere() -> None:
    torch.manual_seed(7)
    first = load_encoder("resnet18", random=True)
    after = torch.rand(1)
    second = load_encoder("resnet18", random=True)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), after)  # the caller's generator is left alone
    torch.testing.assert_close(first(batch()), second(batch()))


def ctranspath_shapes() -> dict[str, tuple[int, ...]]:
    """Keys and shapes of the published file, written out."""
    shapes: dict[str, tuple[int, ...]] = {}
    stem = {
        "0.weight": (12, 3, 3, 3),
        "3.weight": (24, 12, 3, 3),
        "6.weight": (96, 24, 1, 1),
        "6.bias": (96,),
    }
    for norm, width in ((1, 12), (4, 24)):
        stem |= {f"{norm}.{key}": (width,) for key in ("weight", "bias", "running_mean", "running_var")}
        stem[f"{norm}.num_batches_tracked"] = ()
    shapes |= {f"patch_embed.proj.{key}": shape for key, shape in stem.items()}
    shapes |= {"patch_embed.norm.weight": (96,), "patch_embed.norm.bias": (96,)}
    windows = {0: 64, 1: 16, 2: 4}
    for i, (depth, heads) in enumerate(zip((2, 2, 6, 2), (3, 6, 12, 24), strict=True)):
        w = 96 * 2**i
        for j in range(depth):
            block = f"layers.{i}.blocks.{j}."
            if j % 2 and i < 3:
                shapes[block + "attn_mask"] = (windows[i], 49, 49)
            shapes |= {f"{block}norm{k}.{part}": (w,) for k in (1, 2) for part in ("weight", "bias")}
            shapes[block + "attn.relative_position_bias_table"] = (169, heads)
            shapes[block + "attn.relative_position_index"] = (49, 49)
            shapes |= {block + "attn.qkv.weight": (3 * w, w), block + "attn.qkv.bias": (3 * w,)}
            shapes |= {block + "attn.proj.weight": (w, w), block + "attn.proj.bias": (w,)}
            shapes |= {block + "mlp.fc1.weight": (4 * w, w), block + "mlp.fc1.bias": (4 * w,)}
            shapes |= {block + "mlp.fc2.weight": (w, 4 * w), block + "mlp.fc2.bias": (w,)}
        if i < 3:
            end = f"layers.{i}.downsample."
            shapes |= {end + "reduction.weight": (2 * w, 4 * w), end + "norm.weight": (4 * w,)}
            shapes[end + "norm.bias"] = (4 * w,)
    return shapes | {"norm.weight": (768,), "norm.bias": (768,)}


def test_ctranspath_takes_the_published_layout(tmp_path: Path) -> None:
    state = CTransPath().state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == ctranspath_shapes()
    for value in state.values():
        if value.is_floating_point():
            value.uniform_(0.01, 0.05)
    fixed = ("attn_mask", "relative_position_index")
    torch.save({"model": state}, tmp_path / "ctranspath.pth")
    encoder = load_encoder("ctranspath", weights=tmp_path / "ctranspath.pth")
    assert (encoder.dim, tuple(encoder.transform(PATCH).shape)) == (768, (3, 224, 224))
    for key, value in encoder.network.state_dict().items():
        if not key.endswith(fixed):
            torch.testing.assert_close(value, state[key])
    wrong = {**state, "norm.weight": torch.zeros(5)}
    lacking = {key: value for key, value in state.items() if not key.startswith("layers.2")}
    for bad in (wrong, lacking, {**state, "layers.9.norm": torch.zeros(1)}):
        torch.save({"model": bad}, tmp_path / "bad.pth")
        with pytest.raises(CheckpointError, match="not the weights of CTransPath"):
            load_encoder("ctranspath", weights=tmp_path / "bad.pth")
    with pytest.raises(InputError, match="come from its authors"):
        load_encoder("ctranspath")


def test_ctranspath_is_a_swin_transformer() -> None:
    """The same weights in timm's Swin-T behind the same stem give the same features."""
    timm = timm_or_skip()
    ours = CTransPath().eval()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0, 0.05)
    theirs = timm.create_model("swin_tiny_patch4_window7_224", pretrained=False, num_classes=0).eval()
    theirs.patch_embed = ours.patch_embed
    moved = {}
    for key, value in ours.state_dict().items():
        stage = int(key.split(".")[1]) if ".downsample." in key else None
        name = key if stage is None else key.replace(f"layers.{stage}.", f"layers.{stage + 1}.")
        if not name.endswith(("attn_mask", "relative_position_index")):
            moved[name] = value
    missing, unexpected = theirs.load_state_dict(moved, strict=False)
    assert unexpected == []
    assert all(key.endswith(("attn_mask", "relative_position_index")) for key in missing)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-5)


def test_timm_models_bring_their_transform(tmp_path: Path) -> None:
    timm = timm_or_skip()
    name = "resnet10t"
    model = timm.create_model(name, pretrained=False, num_classes=5).eval()
    torch.save(model.state_dict(), tmp_path / "w.pth")
    encoder = load_encoder(name, weights=tmp_path / "w.pth")
    config = timm.data.resolve_model_data_config(model)
    assert encoder.transform.size == config["input_size"][-1]
    theirs = timm.data.create_transform(**config, is_training=False)(Image.fromarray(PATCH))
    ours = encoder.transform(PATCH).unsqueeze(0)
    torch.testing.assert_close(encoder.transform.scaled(ours)[0], theirs, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(theirs.unsqueeze(0)), pre_logits=True)
    torch.testing.assert_close(encoder(ours), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match=r"w\.pth: not the weights of resnet14t"):
        load_encoder("resnet14t", weights=tmp_path / "w.pth")


@pytest.mark.parametrize(
    ("name", "dim", "millions"),
    [
        ("uni", 1024, 303),
        ("uni2-h", 1536, 681),
        ("virchow", 1280, 631),
        ("virchow2", 1280, 631),
        ("gigapath", 1536, 1135),
        ("h-optimus-0", 1536, 1135),
        ("phikon", 768, 86),
    ],
)
def test_pathology_encoders_have_the_published_sizes(name: str, dim: int, millions: int) -> None:
    timm = timm_or_skip()
    from xmil.encoders.load import RECIPES, _create

    with torch.device("meta"):
        model = _create(timm, RECIPES[name], pretrained=False)
    assert model.num_features == dim
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == pytest.approx(millions, abs=1)


def test_class_token_beside_the_mean() -> None:
    from xmil.encoders.load import ClassAndMean

    tokens = torch.arange(24.0).reshape(1, 6, 4)
    found = ClassAndMean(torch.nn.Identity(), 3)(tokens)
    expected = torch.cat([tokens[0, 0], (tokens[0, 3] + tokens[0, 4] + tokens[0, 5]) / 3])
    torch.testing.assert_close(found[0], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_torchscript_file(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.ReLU()).eval()
    torch.jit.script(net).save(str(tmp_path / "mine.ts"))
    encoder = load_encoder(str(tmp_path / "mine.ts"), size=32)
    assert (encoder.name, encoder.dim, encoder.transform.size) == ("mine", 5, 32)
    x = batch(32)
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(x), net(by_hand(x, *IMAGENET)).mean(dim=(2, 3)), atol=1e-5, rtol=1e-4
        )
    torch.save(net.state_dict(), tmp_path / "state.pt")
    with pytest.raises(FileError, match=r"state\.pt: not a TorchScript file"):
        load_encoder(str(tmp_path / "state.pt"))


@pytest.mark.parametrize("fixed", [None, 3])
def test_an_onnx_file(fixed: int | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    weights = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    nodes = [
        onnx.helper.make_node("GlobalAveragePool", ["x"], ["m"]),
        onnx.helper.make_node("Flatten", ["m"], ["f"]),
        onnx.helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, [fixed or "b", 3, 24, 24])],
        [onnx.helper.make_tensor_value_info("y", kind, [fixed or "b", 7])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    encoder = load_encoder(str(tmp_path / "net.onnx"))
    assert (encoder.name, encoder.dim, encoder.transform.size) == ("net", 7, 24)
    x = batch(24, n=5)
    expected = by_hand(x, *IMAGENET).mean(dim=(2, 3)) @ torch.from_numpy(weights)
    torch.testing.assert_close(encoder(x), expected, atol=1e-5, rtol=1e-4)
    (tmp_path / "text.onnx").write_text("no network")
    with pytest.raises(FileError, match=r"text\.onnx: not an ONNX network"):
        load_encoder(str(tmp_path / "text.onnx"))


def test_a_function_of_the_users() -> None:
    here = "tests.encoders.builders"
    plain = load_encoder(f"{here}:network")
    assert (plain.name, plain.dim, plain.transform) == ("network", 24, Transform())
    x = batch()
    torch.testing.assert_close(plain(x), Mean()(by_hand(x, *IMAGENET)))
    sized = load_encoder(f"{here}:with_transform", mean=(0.5, 0.5, 0.5))
    assert sized.transform == Transform(16, (0.5, 0.5, 0.5), (1, 1, 1))
    own = load_encoder(f"{here}:own_transform")
    assert own(own.transform(PATCH).unsqueeze(0))[0, 0] == pytest.approx(PATCH[..., 0].mean(), rel=1e-4)
    with pytest.raises(InputError, match="its own transform"):
        load_encoder(f"{here}:own_transform", size=5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tests.encoders.builders:absent", "has no 'absent'"),
        ("no.such.module:f", "cannot be imported"),
        ("tests.encoders.builders:broken", "no licence"),
        ("tests.encoders.builders:NOT_A_FUNCTION", "has no 'NOT_A_FUNCTION' to call"),
        ("tests.encoders.builders:tokens", "one vector per patch"),
        ("absent.onnx", "no such file"),
        ("absent.ts", "no such file"),
    ],
)
def test_functions_and_files_that_fail(name: str, reason: str) -> None:
    with pytest.raises((InputError, FileError), match=reason):
        load_encoder(name)


def test_unknown_names_and_precisions() -> None:
    timm_or_skip()
    with pytest.raises(UnknownNameError, match="Did you mean 'resnet18'"):
        load_encoder("resnet_18")
    with pytest.raises(UnknownNameError, match="precision"):
        load_encoder("resnet18", random=True, precision="int4")


def test_weights_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("weights")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    said = {"text.pth": "not readable", "list.pth": "not a state dict", "empty.pth": "holds no weights"}
    for name, reason in {**said, "absent.pth": "no such file"}.items():
        with pytest.raises(FileError, match=reason):
            load_encoder("resnet18", weights=tmp_path / name)


def test_half_precision_is_near() -> None:
    x = batch()
    full = load_encoder("resnet18", random=True)(x)
    half = load_encoder("resnet18", random=True, precision="bfloat16")(x)
    assert half.dtype == torch.float32
    assert 0 < (full - half).abs().max() < 0.1 * full.abs().max()


def test_transforms_of_any_shape() -> None:
    wide = np.random.default_rng(0).integers(0, 255, (100, 150, 3), dtype=np.uint8)
    cut = Transform(size=64, crop=0.8)(wide)
    assert cut.shape == (3, 64, 64)
    resized = np.asarray(Image.fromarray(wide).resize((120, 80), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(cut.permute(1, 2, 0).numpy(), resized[8:72, 28:92])
    for wrong in ({"std": (1, 1)}, {"interpolation": "magic"}, {"std": (0, 1, 1)}):
        with pytest.raises(InputError):
            Transform(**wrong)
