"""An encoder: a network with its transform of patches, device and precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter, unknown_name
from xmil.slides.slide import PatchFit

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
PRECISIONS = {"float32": None, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Transform:
    """Resize the shorter edge to `size / crop`, crop the centre to `size`, normalise by mean and std.

    Without a size, patches keep theirs.

    >>> tuple(Transform(size=224)(np.zeros((256, 256, 3), dtype=np.uint8)).shape)
    (3, 224, 224)
    """

    size: int | None = None
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    crop: float = 1.0
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise InputError("An encoder's mean and std must be three numbers each, with std above zero.")
        if self.interpolation not in FILTERS:
            raise bad_parameter("interpolation", "Transform", f"one of {list(FILTERS)}", self.interpolation)

    def __call__(self, patch: npt.NDArray[np.uint8]) -> Tensor:
        """Resize and crop a patch (h, w, 3) to (3, size, size), in uint8."""
        pixels = self.fit(patch)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))

    def scaled(self, batch: Tensor) -> Tensor:
        """Normalise a batch in uint8; return batches of floats unchanged."""
        if batch.dtype != torch.uint8:
            return batch
        mean, std = _colours(self.mean, self.std, batch.device)
        return (batch.float() / 255 - mean) / std

    @property
    def fit(self) -> PatchFit:
        """The resizing and cropping of a patch."""
        return PatchFit(self.size, self.crop, self.interpolation)


@lru_cache(maxsize=16)
def _colours(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std on a device, cached, since each copy would wait for the GPU."""
    first, second = (torch.tensor(values, device=device).view(3, 1, 1) for values in (mean, std))
    return first, second


@dataclass(frozen=True)
class Encoder:
    """Patches to vectors: `encoder(batch)` takes a stack of outputs of `encoder.transform`.

    >>> from xmil.encoders import load_encoder
    >>> encoder = load_encoder("resnet18", random=True)
    >>> tuple(encoder(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape)
    (2, 512)
    """

    name: str
    dim: int
    network: Callable[[Tensor], Any]
    transform: Callable[[np.ndarray[Any, Any]], Tensor] = field(default_factory=Transform)
    device: str = "cpu"
    precision: str = "float32"
    about: dict[str, Any] = field(default_factory=dict)
    layout: torch.memory_format = torch.contiguous_format  # of a batch

    def __call__(self, batch: Tensor) -> Tensor:
        """Features (b, dim) in float32 on the encoder's device."""
        kind = PRECISIONS[self.precision]
        autocast = torch.autocast(torch.device(self.device).type, dtype=kind, enabled=kind is not None)
        with torch.inference_mode(), autocast:
            x = batch.to(self.device, non_blocking=True)
            if isinstance(self.transform, Transform):
                x = x.contiguous(memory_format=self.layout) if x.ndim == 4 else x
                x = self.transform.scaled(x)
            out = self.network(x)
        return vectors(out, self.name, len(batch)).float()


def vectors(output: Any, name: str, count: int) -> Tensor:
    """Convert a network's output to one vector per patch: average maps, refuse anything else."""
    out = output[0] if isinstance(output, tuple | list) and len(output) == 1 else output
    if not isinstance(out, Tensor):
        raise InputError(f"The encoder {name!r} must return one tensor. Got {type(out).__name__} instead.")
    if out.ndim == 4:
        out = torch.mean(out, dim=(2, 3))
    if out.ndim != 2 or len(out) != count:
        shape = tuple(out.shape)
        raise InputError(f"The encoder {name!r} must return one vector per patch. Got shape {shape} instead.")
    return out


def make_encoder(
    name: str,
    network: Any,
    transform: Callable[[np.ndarray[Any, Any]], Tensor],
    *,
    device: str = "cpu",
    precision: str = "auto",
    about: dict[str, Any] | None = None,
    on: str | None = None,
) -> Encoder:
    """Make an encoder, whose width a trial finds; `on` is the device of a network that torch cannot move."""
    if precision == "auto":
        precision = "float16" if torch.device(device).type == "cuda" and on is None else "float32"
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, ("auto", *PRECISIONS))
    if isinstance(network, nn.Module):
        network = network.eval().to(device)
    encoder = Encoder(name, 0, network, transform, on or device, precision, about or {})
    patch = transform(np.full((256, 256, 3), 255, dtype=np.uint8))
    return replace(encoder, dim=int(encoder(patch.unsqueeze(0)).shape[1]))


def compile_encoder(encoder: Encoder) -> Encoder:
    """Compile the network of an encoder, for batches of one size, channels last."""
    if not isinstance(encoder.network, nn.Module) or isinstance(encoder.network, torch.jit.ScriptModule):
        raise InputError(f"The encoder {encoder.name!r} is not a torch network; leave out `compile=True`.")
    network = encoder.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    compiled = torch.compile(network, dynamic=False)
    about = {**encoder.about, "compiled": True}
    return replace(encoder, network=compiled, about=about, layout=torch.channels_last)
