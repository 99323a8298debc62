"""Arrays with a few words on them as one NumPy file; the concept maps of a slide are such a file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from xmil.core.bag import FloatArray
from xmil.core.budget import check_archive
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, absent
from xmil.core.text import parse_json

LAYOUT = 1  # of a file of concept maps
Stored = TypeVar("Stored")


def save_arrays(path: str | PathLike[str], arrays: dict[str, Any], about: dict[str, Any]) -> None:
    """Write arrays and a few words on them as one compressed NumPy file, whole or not at all."""
    packed = {**arrays, "about": np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)}

    def write(part: str) -> None:
        with Path(part).open("wb") as stream:
            np.savez_compressed(stream, **packed)

    write_atomically(path, write)


def load_arrays(
    path: str | PathLike[str], build: Callable[[dict[str, Any], Any], Stored], what: str, way_out: str
) -> Stored:
    """Build what `save_arrays` wrote from its arrays and words; `what` and `way_out` are for the error."""
    try:
        check_archive(path)
        with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return build(arrays, parse_json(bytes(arrays.pop("about")).decode()))
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise FileError(f"{path}: not a {what} ({error}); {way_out}.") from None


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
        about = {"layout": LAYOUT, "method": self.method, "target": self.target}
        save_arrays(path, {"values": self.values, "scores": self.scores}, about)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ConceptMaps:
        """Read what `save` wrote."""

        def build(arrays: dict[str, Any], about: Any) -> ConceptMaps:
            values, scores = (np.asarray(arrays[name], dtype=np.float32) for name in ("values", "scores"))
            if values.ndim != 2 or scores.shape != values.shape[:1]:
                raise ValueError("values and scores do not fit")
            return cls(values, scores, str(about["method"]), str(about["target"]))

        return load_arrays(path, build, "file of concepts", "run `xmil insight` again")
