"""The parts of a slide's scores that go through the concepts of a dictionary, as one file per slide."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.absence import absent
from xmil.core.bag import FloatArray
from xmil.core.budget import check_archive
from xmil.core.errors import FileError
from xmil.core.parsing import parse_json
from xmil.core.storage import write_atomically

LAYOUT = 1


@dataclass(frozen=True, eq=False)
class ConceptMaps:
    """Values (n, k): what of each patch's score, one of `scores` (n,), goes through each concept."""

    values: FloatArray
    scores: FloatArray
    method: str
    target: str

    def __len__(self) -> int:
        return len(self.values)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one compressed NumPy file, whole or not at all."""
        about = json.dumps({"layout": LAYOUT, "method": self.method, "target": self.target}).encode()
        arrays = {"values": self.values, "scores": self.scores, "about": np.frombuffer(about, dtype=np.uint8)}
        write_atomically(path, lambda part: _write(part, arrays))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ConceptMaps:
        """Read what `save` wrote."""
        try:
            check_archive(path)
            with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as held:
                about = parse_json(bytes(held["about"]).decode())
                values, scores = (np.asarray(held[name], dtype=np.float32) for name in ("values", "scores"))
            if values.ndim != 2 or scores.shape != values.shape[:1]:
                raise ValueError("values and scores do not fit")
            return cls(values, scores, str(about["method"]), str(about["target"]))
        except FileNotFoundError:
            raise FileError(absent(path)) from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise FileError(f"{path}: not a file of concepts ({error}); run `xmil insight` again.") from None


def _write(path: str, arrays: dict[str, Any]) -> None:
    with Path(path).open("wb") as stream:
        np.savez_compressed(stream, **arrays)
