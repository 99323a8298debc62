"""Encoders from files: ONNX and TorchScript.

A TorchScript file is a program: it runs in torch's interpreter, not in Python's, but its operators can read
and write files. Only open files from people you trust, and only name a `module:function` that you trust. ONNX
files and state dicts contain no code.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.budget import check_budget
from xmil.core.errors import CheckpointError, FileError, InputError, absent, one_line
from xmil.core.pickles import check_torch_file
from xmil.encoders.encoder import Transform

AGAIN = "download or copy it again, or save the encoder's state_dict() alone"


def load_script(path: Path, device: str) -> tuple[Any, Transform]:
    """Load a TorchScript module, with ImageNet's normalisation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch deprecates the format, but users still have files
            module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError, OSError) as error:
        raise FileError(
            f"{path}: not a TorchScript file ({one_line(error)}); pass a state dict as `weights=`."
        ) from None
    return module.eval(), Transform()


def load_onnx(path: Path, device: str) -> tuple[OnnxNetwork, Transform]:
    """Load a network in onnxruntime; a fixed input size in the graph sets that of the transform."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError("onnxruntime is not installed; pip install 'xmil[encoders]'.") from None
    kinds = ["CPUExecutionProvider"]
    if device.startswith("cuda"):
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise InputError(
                "This onnxruntime cannot use a GPU; install onnxruntime-gpu, or pass `device='cpu'`."
            )
        kinds = ["CUDAExecutionProvider", *kinds]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=kinds)
    except Exception as error:  # onnxruntime raises its own types
        raise FileError(
            f"{path}: not an ONNX network ({one_line(error)}); copy or export it again."
        ) from None
    shape = session.get_inputs()[0].shape
    if len(session.get_inputs()) != 1 or len(shape) != 4:
        raise FileError(f"{path}: must take one batch of pictures (b, 3, h, w). It takes {shape} instead.")
    size = shape[2] if isinstance(shape[2], int) and shape[2] == shape[3] else None
    return OnnxNetwork(session), Transform(size=size)


class OnnxNetwork:
    """An ONNX session as a function of tensors."""

    def __init__(self, session: Any) -> None:
        self.session = session
        entry = session.get_inputs()[0]
        self.input, self.half = entry.name, "float16" in entry.type
        self.batch = entry.shape[0] if isinstance(entry.shape[0], int) else None
        self.output = session.get_outputs()[0].name

    def __call__(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, dim), in batches of the graph's size if that is fixed."""
        values = x.cpu().numpy().astype(np.float16 if self.half else np.float32)
        step = self.batch or len(values)
        padded = np.pad(values, ((0, -len(values) % step), (0, 0), (0, 0), (0, 0)))
        parts = [
            self.session.run([self.output], {self.input: padded[i : i + step]})[0]
            for i in range(0, len(padded), step)
        ]
        return torch.from_numpy(np.concatenate(parts)[: len(values)])


WRAPPERS = ("model", "state_dict", "model_state_dict", "teacher", "module")
PREFIXES = ("module.", "model.", "backbone.", "encoder.")


def read_state(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weights file, without wrappers and shared prefixes."""
    if not path.is_file():
        raise FileError(absent(path))
    try:
        state = _load(path)
    except Exception as error:  # damaged archives raise almost any type
        reason = "its pickle holds other objects than tensors, and could run code"
        if not isinstance(error, pickle.UnpicklingError):
            line = one_line(error)
            reason = line if " " in line else f"{type(error).__name__} {line}"
        raise CheckpointError(f"{path}: not readable as weights ({reason}); {AGAIN}.") from None
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds {type(state).__name__}, not a state dict; {AGAIN}.")
    while wrappers := [key for key in WRAPPERS if isinstance(state.get(key), Mapping)]:
        state = state[wrappers[0]]
    tensors = {str(key): value for key, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path}: holds no weights; name a file with a state dict.")
    nbytes = sum(value.numel() * value.element_size() for value in tensors.values())
    check_budget(nbytes, "the weights", path)
    while prefix := next((p for p in PREFIXES if all(key.startswith(p) for key in tensors)), None):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def download_state(name: str, url: str) -> dict[str, Tensor]:
    """Load published weights from torch's cache or by download, and check their hash."""
    try:
        return torch.hub.load_state_dict_from_url(
            url, map_location="cpu", check_hash=True, progress=False, weights_only=True
        )
    except Exception as error:  # network, hash, disk
        raise FileError(
            f"The weights of {name} cannot be downloaded ({one_line(error)}); download {url} elsewhere and "
            "pass `weights=`."
        ) from None


def file_digest(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    check_torch_file(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)  # refused anyway
        return torch.load(path, map_location="cpu", weights_only=True)
