"""Load an encoder by the name that a user gives.

In this order: a registered name; a file (`.onnx`, TorchScript); `module:function` or `file.py:function`; a
timm model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import (
    CheckpointError,
    FileError,
    InputError,
    XmilError,
    absent,
    one_line,
    unknown_name,
)
from xmil.core.registry import Registry, load_function
from xmil.encoders.encoder import IMAGENET, Encoder, Transform, compile_encoder, make_encoder
from xmil.encoders.foreign import download_state, file_digest, load_onnx, load_script, read_state
from xmil.nn.images import CTransPath, ResNet, load_ctranspath, load_resnet

SCRIPTS = (".pt", ".pth", ".ts", ".jit", ".torchscript")
PREFIXES = ("hf-hub:", "hf_hub:", "local-dir:")  # timm's
NO_WEIGHTS = "CTransPath's weights come from its authors; get them there and pass `weights='ctranspath.pth'`."
ALIASES = {  # names in TRIDENT, STAMP and CLAM, only letters and digits
    "univ1": "uni",
    "univ2": "uni2-h",
    "uni2": "uni2-h",
    "hoptimus0": "h-optimus-0",
    "provgigapath": "gigapath",
    "phikonv1": "phikon",
    "resnet50trunc": "resnet50_trunc",
}
WIDTHS = {  # of features, to suggest encoders that fit a model
    "resnet18": 512,
    "ctranspath": 768,
    "phikon": 768,
    "resnet50_trunc": 1024,
    "uni": 1024,
    "gigapath": 1536,
    "h-optimus-0": 1536,
    "uni2-h": 1536,
    "resnet50": 2048,
    "virchow": 2560,
    "virchow2": 2560,
}


def list_encoders() -> list[str]:
    """List the names that `load_encoder` knows, besides timm's models, files and functions."""
    return sorted({*ENCODERS, *RECIPES})


def known_encoder(name: str) -> str | None:
    """The known encoder with a name that a file gives; None for names that could run code or download.

    >>> known_encoder("UNI_v2"), known_encoder("resnet50_trunc"), known_encoder("mine.py:build")
    ('uni2-h', 'resnet50_trunc', None)
    """
    if name in ENCODERS or name in RECIPES:
        return name
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    names = {"".join(letter for letter in known if letter.isalnum()): known for known in list_encoders()}
    return ALIASES.get(plain) or names.get(plain)


def check_encoder(name: str, *, weights: str | Path | None = None, random: bool = False) -> None:
    """Refuse an encoder that cannot be loaded, as far as one can tell without building it."""
    path = Path(name)
    if weights is not None and not Path(weights).is_file():
        raise FileError(absent(Path(weights)))
    if name in ENCODERS:
        if name == "ctranspath" and weights is None and not random:
            raise InputError(NO_WEIGHTS)
    elif path.suffix.lower() in (".onnx", *SCRIPTS):
        if not path.is_file():
            raise FileError(absent(path))
    elif ":" in name and not name.startswith(PREFIXES):
        load_function(name, kind="encoder")
    else:
        _check_timm_name(name)


def load_encoder(
    name: str,
    *,
    weights: str | Path | None = None,
    device: str = "cpu",
    precision: str = "auto",
    size: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    random: bool = False,
    compiled: bool = False,
) -> Encoder:
    """Load an encoder, ready to run.

    `weights` is a file that replaces the published weights; `size`, `mean` and `std` override the encoder's
    own transform; `random` leaves it untrained. `precision` "auto" is half on a GPU, single on a CPU.
    `compiled` compiles the network for channels-last pixels: faster on a GPU, but the last digits of features
    differ.
    """
    file = None if weights is None else Path(weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # an untrained network is the same in every worker
        network, transform, on = _build(name, file, device=device, random=random)
    overrides: dict[str, Any] = {"size": size, "mean": mean, "std": std}
    changed = {key: value for key, value in overrides.items() if value is not None}
    if changed:
        if not isinstance(transform, Transform):
            raise InputError(
                f"The encoder {name!r} has its own transform; leave out its input size, mean and std."
            )
        transform = replace(transform, **changed)
    path = file or Path(name)
    origin = f"{path.name}, sha256 {file_digest(path)}" if path.is_file() else f"published, {name}"
    about = {
        "transform": asdict(transform) if isinstance(transform, Transform) else str(transform),
        "weights": "random" if random else origin,
    }
    encoder = make_encoder(
        short_name(name), network, transform, device=device, precision=precision, about=about, on=on
    )
    return compile_encoder(encoder) if compiled else encoder


def _build(name: str, weights: Path | None, *, device: str, random: bool) -> tuple[Any, Any, str | None]:
    """Build a network and its transform; also its device if torch cannot move it."""
    path = Path(name)
    if name in ENCODERS:
        return *ENCODERS[name](weights, random), None
    if (suffix := path.suffix.lower()) in (".onnx", *SCRIPTS):
        if not path.is_file():
            raise FileError(absent(path))
        return (*load_onnx(path, device), "cpu") if suffix == ".onnx" else (*load_script(path, device), None)
    if ":" in name and not name.startswith(PREFIXES):
        return *_from_function(name, weights), None
    return *load_timm(name, weights, random=random), None


def _from_function(name: str, weights: Path | None) -> tuple[Any, Any]:
    """Call `module:function`, which returns a network, or a network with its transform."""
    function = load_function(name, kind="encoder")
    try:
        built = function() if weights is None else function(str(weights))
    except XmilError:
        raise
    except Exception as error:
        raise InputError(f"The encoder {name!r} failed: {type(error).__name__}: {error}.") from error
    if isinstance(built, Encoder):
        return built.network, built.transform
    network, transform = built if isinstance(built, tuple) else (built, Transform())
    if not callable(network) or not callable(transform):
        raise InputError(f"The encoder {name!r} must return a network, or a network and its transform.")
    return network, transform


def short_name(name: str) -> str:
    """Shorten a name for use as the name of a folder.

    >>> short_name("hf-hub:MahmoodLab/UNI"), short_name("models/mine.onnx"), short_name("package:build")
    ('UNI', 'mine', 'build')
    """
    is_file = Path(name).suffix.lower() in (*SCRIPTS, ".onnx")
    return Path(name).stem if is_file else name.replace(":", "/").rpartition("/")[2]


Built = tuple[Any, Transform]
Builder = Callable[[Path | None, bool], Built]

ENCODERS: Registry[Builder] = Registry("encoder", group="xmil.encoders")

TORCHVISION = {  # ImageNet weights, first version: the file's name ends with its hash
    "resnet18": "https://download.pytorch.org/models/resnet18-f37072fd.pth",
    "resnet50": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
    "resnet50_trunc": "https://download.pytorch.org/models/resnet50-0676ba61.pth",
}


def _resnet(name: str) -> Builder:
    def build(weights: Path | None, random: bool) -> Built:
        if random:
            return ResNet(name), Transform()
        url = TORCHVISION[name]
        state = download_state(name, url) if weights is None else read_state(weights)
        return load_resnet(state, name, source=weights or url), Transform()

    return build


for _name in TORCHVISION:
    ENCODERS.add(_name, _resnet(_name))


@ENCODERS.register("ctranspath")
def _ctranspath(weights: Path | None, random: bool) -> Built:
    """CTransPath; `ctranspath.pth` comes from the authors and cannot be downloaded by a program."""
    transform = Transform(size=CTransPath.size)
    if random:
        return CTransPath(), transform
    if weights is None:
        raise InputError(NO_WEIGHTS)
    return load_ctranspath(read_state(weights), source=weights), transform


H_OPTIMUS = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))


@dataclass(frozen=True)
class Recipe:
    """A pathology encoder: its hub address, architecture in timm, pooling and normalisation."""

    hub: str
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    swiglu: bool = False  # a gated MLP with SiLU
    tokens: int | None = None  # concatenate class token and mean of the tokens from this index on
    colours: tuple[tuple[float, ...], tuple[float, ...]] = IMAGENET
    crop: float = 1.0
    interpolation: str = "bilinear"


VIRCHOW = {"img_size": 224, "init_values": 1e-5, "mlp_ratio": 5.3375, "dynamic_img_size": True}
GIANT = {"img_size": 224, "num_heads": 24, "embed_dim": 1536, "init_values": 1e-5}

RECIPES: dict[str, Recipe] = {
    "uni": Recipe(
        "hf-hub:MahmoodLab/UNI", "vit_large_patch16_224", {"init_values": 1e-5, "dynamic_img_size": True}
    ),
    "uni2-h": Recipe(
        "hf-hub:MahmoodLab/UNI2-h",
        "vit_giant_patch14_224",
        GIANT
        | {"patch_size": 14, "depth": 24, "mlp_ratio": 2.66667 * 2, "no_embed_class": True, "reg_tokens": 8}
        | {"dynamic_img_size": True},
        swiglu=True,
    ),
    "virchow": Recipe(
        "hf-hub:paige-ai/Virchow",
        "vit_huge_patch14_224",
        VIRCHOW | {"global_pool": ""},
        swiglu=True,
        tokens=1,
        interpolation="bicubic",
    ),
    "virchow2": Recipe(
        "hf-hub:paige-ai/Virchow2",
        "vit_huge_patch14_224",
        VIRCHOW | {"reg_tokens": 4, "global_pool": ""},
        swiglu=True,
        tokens=5,
        interpolation="bicubic",
    ),
    "gigapath": Recipe(
        "hf-hub:prov-gigapath/prov-gigapath",
        "vit_giant_patch14_dinov2",
        GIANT | {"patch_size": 16, "depth": 40, "mlp_ratio": 5.33334},
        crop=0.875,
        interpolation="bicubic",
    ),
    "h-optimus-0": Recipe(
        "hf-hub:bioptimus/H-optimus-0",
        "vit_giant_patch14_reg4_dinov2",
        {"img_size": 224, "init_values": 1e-5, "dynamic_img_size": False},
        colours=H_OPTIMUS,
    ),
    "phikon": Recipe("hf-hub:1aurent/vit_base_patch16_224.owkin_pancancer", "vit_base_patch16_224"),
}


def _check_timm_name(name: str) -> None:
    """Refuse a name that neither xmil nor timm knows, or that needs timm if timm is missing."""
    if name in RECIPES or name.startswith(PREFIXES):
        _import_timm()
        return
    known = [*list_encoders(), "any timm model", "FILE.onnx", "module:function"]
    unknown = unknown_name("encoder", name, known)
    try:
        timm = _import_timm()
    except InputError as error:
        raise InputError(f"{unknown} It may be a timm model, but {error}") from None
    if not timm.is_model(name):
        raise unknown


def load_timm(name: str, weights: Path | None, *, random: bool = False) -> tuple[Any, Transform]:
    """Load a model by timm's name, including `hf-hub:`, or by the name of a recipe."""
    _check_timm_name(name)
    timm, recipe = _import_timm(), RECIPES.get(name)
    model = _create(timm, recipe or name, pretrained=weights is None and not random)
    if weights is not None:
        state = read_state(weights)
        keys = set(model.state_dict())
        heads = ("head.", "fc.", "classifier.", "head_dist.")
        usable = {key: value for key, value in state.items() if key in keys or not key.startswith(heads)}
        try:
            model.load_state_dict(usable)
        except RuntimeError as error:
            raise CheckpointError(f"{weights}: not the weights of {name}: {one_line(error)}") from None
    if recipe is None:
        config = timm.data.resolve_model_data_config(model)
        return model, Transform(
            size=int(config["input_size"][-1]),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            crop=float(config["crop_pct"]) if config.get("crop_mode", "center") == "center" else 1.0,
            interpolation=str(config["interpolation"]),
        )
    mean, std = recipe.colours
    transform = Transform(224, mean, std, crop=recipe.crop, interpolation=recipe.interpolation)
    return (model if recipe.tokens is None else ClassAndMean(model, recipe.tokens)), transform


class ClassAndMean(nn.Module):
    """The class token and the mean of the patch tokens, concatenated."""

    def __init__(self, network: nn.Module, first: int) -> None:
        super().__init__()
        self.network, self.first = network, first

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, 2 width)."""
        tokens = self.network(x)
        return torch.cat([tokens[:, 0], tokens[:, self.first :].mean(dim=1)], dim=-1)


def _create(timm: Any, source: str | Recipe, *, pretrained: bool) -> Any:
    """Create the network of a recipe or of a timm name."""
    arguments: dict[str, Any] = {}
    name = source if isinstance(source, str) else source.hub if pretrained else source.architecture
    if isinstance(source, Recipe):
        gated = {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU}
        arguments = {**source.arguments, **(gated if source.swiglu else {})}
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **arguments)
    except Exception as error:  # the hub, the network, a licence to accept
        raise FileError(
            f"The encoder {name!r} cannot be fetched ({type(error).__name__}: {one_line(error)}); accept its "
            "licence and log in to the hub, or download its weights and pass `weights=`."
        ) from None


def _import_timm() -> Any:
    try:
        import timm
        import timm.data
        import timm.layers
    except ImportError:
        raise InputError("timm is not installed; pip install 'xmil[encoders]'.") from None
    except RuntimeError as error:  # torchvision built for another torch
        raise InputError(
            f"timm cannot be imported: {error}; install the torchvision for your torch."
        ) from None
    return timm
