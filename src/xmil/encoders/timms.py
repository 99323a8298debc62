"""Models of timm, those on the Hugging Face hub included, with the transform of their own config.

The pathology encoders below need arguments that their cards give; here they have a short name. Most are
gated: accept the licence on the hub and log in, or download the file and pass it as weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xmil.core.errors import CheckpointError, FileError, InputError
from xmil.encoders.encoder import IMAGENET, Transform
from xmil.encoders.foreign import read_state

H_OPTIMUS = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))


@dataclass(frozen=True)
class Recipe:
    """A pathology encoder: where it lies on the hub, its architecture in timm, its pooling and colours."""

    hub: str
    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)
    swiglu: bool = False  # a gated MLP with SiLU
    tokens: int | None = None  # class token and mean of the tokens from here on, side by side
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


def load_timm(name: str, weights: Path | None, *, random: bool = False) -> tuple[Any, Transform]:
    """A model by timm's name, `hf-hub:` included, or by the name of a recipe."""
    timm = _import_timm()
    recipe = RECIPES.get(name)
    if recipe is None:
        model = _created(timm, name, pretrained=weights is None and not random)
    else:
        model = _from_recipe(timm, recipe, pretrained=weights is None and not random)
    if weights is not None:
        _load(model, weights, name)
    if recipe is None:
        return model, _own_transform(timm, model)
    mean, std = recipe.colours
    transform = Transform(224, mean, std, crop=recipe.crop, interpolation=recipe.interpolation)
    return (model if recipe.tokens is None else ClassAndMean(model, recipe.tokens)), transform


class ClassAndMean(nn.Module):
    """The class token beside the mean of the patch tokens."""

    def __init__(self, network: nn.Module, first: int) -> None:
        super().__init__()
        self.network, self.first = network, first

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, 2 width)."""
        tokens = self.network(x)
        return torch.cat([tokens[:, 0], tokens[:, self.first :].mean(dim=1)], dim=-1)


def _from_recipe(timm: Any, recipe: Recipe, *, pretrained: bool) -> Any:
    arguments: dict[str, Any] = dict(recipe.arguments)
    if recipe.swiglu:
        arguments |= {"mlp_layer": timm.layers.SwiGLUPacked, "act_layer": nn.SiLU}
    name = recipe.hub if pretrained else recipe.architecture
    return _created(timm, name, pretrained=pretrained, **arguments)


def _created(timm: Any, name: str, *, pretrained: bool, **arguments: Any) -> Any:
    from xmil.encoders.load import unknown_encoder

    on_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if not on_hub and not name.startswith("local-dir:") and not timm.is_model(name):
        raise unknown_encoder(name)
    try:
        return timm.create_model(name, pretrained=pretrained, num_classes=0, **arguments)
    except Exception as error:  # the hub, the network, a licence not accepted
        reason = " ".join(str(error).split())[:200]
        raise FileError(
            f"The encoder {name!r} cannot be fetched ({type(error).__name__}: {reason}); accept its licence "
            "and log in to the hub, or download its weights and pass --weights."
        ) from None


def _load(model: nn.Module, path: Path, name: str) -> None:
    state = read_state(path)
    known = set(model.state_dict())
    heads = ("head.", "fc.", "classifier.", "head_dist.")
    kept = {key: value for key, value in state.items() if key in known or not key.startswith(heads)}
    try:
        model.load_state_dict(kept)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path}: not the weights of {name}: {reason}") from None


def _own_transform(timm: Any, model: Any) -> Transform:
    """The transform that the model's config asks for."""
    config = timm.data.resolve_model_data_config(model)
    return Transform(
        size=int(config["input_size"][-1]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        crop=float(config["crop_pct"]) if config.get("crop_mode", "center") == "center" else 1.0,
        interpolation=str(config["interpolation"]),
    )


def _import_timm() -> Callable[..., Any] | Any:
    try:
        import timm
        import timm.data
        import timm.layers
    except ImportError:
        raise InputError("timm is not installed; pip install 'xmil[encoders]'.") from None
    except RuntimeError as error:  # a torchvision built for another torch
        raise InputError(
            f"timm cannot be imported: {error}; install the torchvision of your torch."
        ) from None
    return timm
