"""Find an encoder by what the user calls it.

In this order: a registered name; a file (`.onnx`, TorchScript); `module:function` or `file.py:function`; a
timm model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError, XmilError, unknown_name
from xmil.core.named_function import load_function
from xmil.encoders.encoder import Encoder, Transform, compile_encoder, make_encoder
from xmil.encoders.foreign import file_digest
from xmil.encoders.registry import ENCODERS

SCRIPTS = (".pt", ".pth", ".ts", ".jit", ".torchscript")


def list_encoders() -> list[str]:
    """Names that `load_encoder` knows by itself; timm's models, files and functions come on top."""
    from xmil.encoders.timms import RECIPES

    return sorted({*ENCODERS, *RECIPES})


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
    """An encoder ready to run.

    `weights` is a file in place of the published weights; `size`, `mean` and `std` override the encoder's own
    transform; `random` builds it untrained. `precision` "auto" is half on a GPU, single on a CPU.
    `compiled` compiles the network and lays pixels out channel by channel: quicker on a GPU, and the last
    digits of features differ.
    """
    file = None if weights is None else Path(weights)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # an untrained network is the same in every worker
        network, transform, on = _built(name, file, device=device, random=random)
    wanted: dict[str, Any] = {"size": size, "mean": mean, "std": std}
    changed = {key: value for key, value in wanted.items() if value is not None}
    if changed:
        if not isinstance(transform, Transform):
            raise InputError(
                f"The encoder {name!r} has a transform of its own; size, mean and std are fixed."
            )
        transform = replace(transform, **changed)
    about = {"transform": _described(transform), "weights": _origin(name, file, random=random)}
    made = make_encoder(
        short_name(name), network, transform, device=device, precision=precision, about=about, on=on
    )
    return compile_encoder(made) if compiled else made


def _built(name: str, weights: Path | None, *, device: str, random: bool) -> tuple[Any, Any, str | None]:
    """A network, its transform, and its device where torch cannot move it."""
    path = Path(name)
    if name in ENCODERS:
        return *ENCODERS[name](weights, random), None
    if path.suffix.lower() == ".onnx":
        from xmil.encoders.foreign import load_onnx

        return *load_onnx(_file(path), device), "cpu"
    if path.suffix.lower() in SCRIPTS:
        from xmil.encoders.foreign import load_script

        return *load_script(_file(path), device), None
    if ":" in name and not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        return *_from_function(name, weights), None
    from xmil.encoders.timms import load_timm

    return *load_timm(name, weights, random=random), None


def _from_function(name: str, weights: Path | None) -> tuple[Any, Any]:
    """What `module:function` gives: a network, or a network with its transform."""
    made = load_function(name, kind="encoder")
    try:
        built = made() if weights is None else made(str(weights))
    except XmilError:
        raise
    except Exception as error:
        raise InputError(f"The encoder {name!r} failed: {type(error).__name__}: {error}.") from error
    if isinstance(built, Encoder):
        return built.network, built.transform
    network, transform = built if isinstance(built, tuple) else (built, Transform())
    if not callable(network) or not callable(transform):
        raise InputError(f"The encoder {name!r} must give a network, or a network and its transform.")
    return network, transform


def _file(path: Path) -> Path:
    if not path.is_file():
        raise FileError(absent(path))
    return path


def short_name(name: str) -> str:
    """A name that a folder can have.

    >>> short_name("hf-hub:MahmoodLab/UNI"), short_name("models/mine.onnx"), short_name("package:build")
    ('UNI', 'mine', 'build')
    """
    path = Path(name)
    return (
        path.stem if path.suffix.lower() in (*SCRIPTS, ".onnx") else name.replace(":", "/").rpartition("/")[2]
    )


def _described(transform: Any) -> Any:
    from dataclasses import asdict

    return asdict(transform) if isinstance(transform, Transform) else str(transform)


def _origin(name: str, weights: Path | None, *, random: bool) -> str:
    if random:
        return "random"
    path = weights or Path(name)
    return f"{path.name}, sha256 {file_digest(path)}" if path.is_file() else f"published, {name}"


def unknown_encoder(name: str) -> XmilError:
    """The error for a name that nothing knows."""
    return unknown_name("encoder", name, [*list_encoders(), "any timm model", "FILE.onnx", "module:function"])
