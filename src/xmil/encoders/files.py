"""Encoders from files: ONNX and TorchScript.

A TorchScript file is a program: it runs in torch's interpreter, not in Python's, but its operators can read
and write files. Open only files from people you trust; the same holds for `module:function`. ONNX files and
state dicts hold no code.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmil.core.errors import FileError, InputError
from xmil.encoders.transform import Transform


def load_script(path: Path, device: str) -> tuple[Any, Transform]:
    """A TorchScript module; its input takes ImageNet's colours unless told otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch deprecates the format; the files are still there
            module = torch.jit.load(str(path), map_location=device)
    except (RuntimeError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise FileError(
            f"{path}: not a TorchScript file ({reason}); a state dict goes to --weights."
        ) from None
    return module.eval(), Transform()


def load_onnx(path: Path, device: str) -> tuple[OnnxNetwork, Transform]:
    """A network in onnxruntime; a fixed input size in the graph sets the transform's."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError("onnxruntime is not installed; pip install 'xmil[encoders]'.") from None
    kinds = ["CPUExecutionProvider"]
    if device.startswith("cuda"):
        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise InputError(
                "This onnxruntime cannot use a GPU; install onnxruntime-gpu, or pass --device cpu."
            )
        kinds = ["CUDAExecutionProvider", *kinds]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=kinds)
    except Exception as error:  # onnxruntime raises its own kinds
        raise FileError(f"{path}: not an ONNX network ({' '.join(str(error).split())[:160]}).") from None
    shape = session.get_inputs()[0].shape
    if len(session.get_inputs()) != 1 or len(shape) != 4:
        raise FileError(f"{path}: takes {shape}; an encoder takes one batch of pictures (b, 3, h, w).")
    size = shape[2] if isinstance(shape[2], int) and shape[2] == shape[3] else None
    return OnnxNetwork(session), Transform(size=size)


class OnnxNetwork:
    """A session as a function of tensors."""

    def __init__(self, session: Any) -> None:
        self.session = session
        entry = session.get_inputs()[0]
        self.input, self.half = entry.name, "float16" in entry.type
        self.batch = entry.shape[0] if isinstance(entry.shape[0], int) else None
        self.output = session.get_outputs()[0].name

    def __call__(self, x: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, dim), in pieces where the graph has a fixed batch."""
        values = x.cpu().numpy().astype(np.float16 if self.half else np.float32)
        if self.batch is None:
            return torch.from_numpy(self._run(values))
        parts = [self._padded(values[i : i + self.batch]) for i in range(0, len(values), self.batch)]
        return torch.from_numpy(np.concatenate(parts))

    def _padded(self, values: Any) -> Any:
        """A piece smaller than the graph's batch, filled up and cut again."""
        missing = (self.batch or 0) - len(values)
        filled = np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
        return self._run(filled)[: len(values)]

    def _run(self, values: Any) -> Any:
        return self.session.run([self.output], {self.input: values})[0]
