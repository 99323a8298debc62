"""The folder of a run: one file for each column, filled repetition by repetition; plain NumPy files."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.absence import not_made
from xmil.core.errors import FileError, InputError
from xmil.core.storage import write_atomically

HEADER = "header"
Grid = npt.NDArray[np.float64]


def plain(settings: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(settings, default=str))


def file_name(*parts: str) -> str:
    """A name for a file from names that may hold a colon.

    >>> file_name("evidence", "four_bags", "mine:build")
    'evidence--four_bags--mine-build'
    """
    return "--".join(part.replace(":", "-").replace("/", "-") for part in parts)


@dataclass
class Unit:
    """What was measured in one column: a suite, a problem and a model.

    `values[r, method]` is (bags, measures); `facts` holds, for each repetition, the bags' checksum, the
    model's AUROC, the names of the bags and the time of a forward pass; `rows` what each entry was and cost.
    """

    path: Path
    settings: dict[str, Any]
    measures: tuple[str, ...]
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    rows: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    values: dict[tuple[int, str], Grid] = field(default_factory=dict)

    @property
    def suite(self) -> str:
        """The suite's name."""
        return str(self.settings["suite"])

    @property
    def problem(self) -> str:
        """The problem's name."""
        return str(self.settings["problem"]["name"])

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.settings["model"]["name"])

    @property
    def repetitions(self) -> list[int]:
        """Repetitions with any row, in order."""
        return sorted({r for r, _ in self.rows})

    @property
    def methods(self) -> list[str]:
        """Methods with any row, in the order they were measured."""
        return list(dict.fromkeys(method for _, method in self.rows))

    def check(self, repetition: int, facts: dict[str, Any]) -> None:
        """Refuse to go on where the bags are not those measured before."""
        known = self.facts.get(repetition)
        if known is not None and known["checksum"] != facts["checksum"]:
            raise InputError(
                f"{self.path.name}: the test bags of repetition {repetition} have changed since they were "
                "measured (their checksum differs); choose another --out, or restore the data."
            )
        self.facts[repetition] = facts

    def add(self, repetition: int, name: str, values: dict[str, Grid], about: dict[str, Any]) -> None:
        """A row: one value for each bag and measure."""
        self.values[repetition, name] = np.stack([values[m] for m in self.measures], axis=1)
        self.rows[repetition, name] = about

    def save(self) -> None:
        """Write the file, whole or not at all."""
        keys = list(self.rows)
        header = {
            "settings": self.settings,
            "measures": list(self.measures),
            "facts": {str(r): f for r, f in self.facts.items()},
            "rows": [{"repetition": r, "method": m, **self.rows[r, m]} for r, m in keys],
        }
        arrays: dict[str, Any] = {f"v{i}": self.values[key].astype(np.float32) for i, key in enumerate(keys)}
        arrays[HEADER] = np.frombuffer(json.dumps(header, default=str).encode(), dtype=np.uint8)

        def write(temporary: str) -> None:
            with open(temporary, "wb") as stream:
                np.savez_compressed(stream, **arrays)

        write_atomically(self.path, write)

    @classmethod
    def read(cls, path: Path) -> Unit:
        """The unit of a file."""
        try:
            with np.load(path, allow_pickle=False) as file:
                header = json.loads(file[HEADER].tobytes().decode())
                arrays = [file[f"v{i}"].astype(np.float64) for i in range(len(header["rows"]))]
        except (OSError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
            raise FileError(f"{path}: not a file of the benchmark ({error}); delete it.") from None
        unit = cls(path, header["settings"], tuple(header["measures"]))
        unit.facts = {int(r): f for r, f in header["facts"].items()}
        for row, values in zip(header["rows"], arrays, strict=True):
            key = (int(row.pop("repetition")), str(row.pop("method")))
            unit.rows[key], unit.values[key] = row, values
        return unit


@dataclass(frozen=True)
class Folder:
    """A run's folder: `units/*.npz` (what was measured), `models/` (what was trained)."""

    path: Path

    def unit(self, settings: dict[str, Any], measures: Sequence[str]) -> Unit:
        """The unit of these settings: what is there of it, or a fresh one; other settings are refused."""
        names = (settings["suite"], settings["problem"]["name"], settings["model"]["name"])
        path = self._made("units") / f"{file_name(*names)}.npz"
        if not path.is_file():
            return Unit(path, plain(settings), tuple(measures))
        unit = Unit.read(path)
        changed = differences(unit.settings, plain(settings))
        if changed or unit.measures != tuple(measures):
            raise InputError(
                f"{path}: was measured with other settings ({', '.join(changed) or 'measures'}); "
                "choose another --out, or delete the file."
            )
        return unit

    def units(self) -> list[Unit]:
        """Every unit in the folder."""
        return [Unit.read(path) for path in sorted((self.path / "units").glob("*.npz"))]

    def model_file(self, *names: str) -> Path:
        """Where a trained model lies."""
        return self._made("models") / f"{file_name(*names)}.safetensors"

    def _made(self, name: str) -> Path:
        folder = self.path / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(not_made(folder, error)) from None
        return folder


def differences(first: dict[str, Any], second: dict[str, Any], before: str = "") -> list[str]:
    """Which settings differ, by their dotted names.

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ['b.c']
    """
    found = []
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{before}{key}.")
        elif a != b:
            found.append(f"{before}{key}")
    return found
