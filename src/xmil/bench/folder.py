"""The folder of a run: measurements and trained models, each file written atomically.

`units/` has one NumPy file per column (a suite, a problem and a model), which grows by repetition; `models/`
has the weights: all repetitions of our models on digits in one file, others one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from xmil.bench.protocol import Configuration
from xmil.bench.training import Fitted, Stacked
from xmil.core.budget import read_arrays
from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, InputError, refuse_damage
from xmil.core.text import parse_json
from xmil.storage import make_folder, write_arrays

HEADER = "header"
STACK_KEY, WEIGHTS_KEY = "xmil-toy", "xmil-bench"  # for the settings in a file's metadata
FLAT, BUFFER = "parameters", "buffer|"
Grid = npt.NDArray[np.float64]


def _plain(settings: Any) -> Any:
    """The settings after a round trip through JSON."""
    return json.loads(json.dumps(settings, default=str))


def file_name(*parts: str) -> str:
    """Make a file's name from names that may contain a colon.

    >>> file_name("evidence", "four_bags", "mine:build")
    'evidence--four_bags--mine-build'
    """
    return "--".join(part.replace(":", "-").replace("/", "-") for part in parts)


@dataclass
class Unit:
    """The measurements of one column: a suite, a problem and a model.

    `values[r, method]` is (bags, measures); `facts` has, for each repetition, the bags' checksum, the model's
    AUROC, the names of the bags and the time of a forward pass; `rows` has the digest and cost of each entry.
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
        """Store the facts of a repetition; refuse other bags than were measured before."""
        stored = self.facts.get(repetition)
        if stored is not None and stored["checksum"] != facts["checksum"]:
            raise InputError(
                f"{self.path.name}: the test bags of repetition {repetition} have changed since the "
                "measurement (their checksum differs); choose another `out=`, or restore the data."
            )
        self.facts[repetition] = facts

    def add(self, repetition: int, name: str, values: dict[str, Grid], about: dict[str, Any]) -> None:
        """Add a row: one value for each bag and measure."""
        self.values[repetition, name] = np.stack([values[m] for m in self.measures], axis=1)
        self.rows[repetition, name] = about

    def save(self) -> None:
        """Write the file atomically."""
        header = {
            "settings": self.settings,
            "measures": list(self.measures),
            "facts": {str(r): f for r, f in self.facts.items()},
            "rows": [{"repetition": r, "method": m, **about} for (r, m), about in self.rows.items()],
        }
        values = (self.values[key].astype(np.float32) for key in self.rows)
        arrays: dict[str, Any] = {f"v{i}": rows for i, rows in enumerate(values)}
        arrays[HEADER] = np.frombuffer(json.dumps(header, default=str).encode(), dtype=np.uint8)
        write_arrays(self.path, arrays)

    @classmethod
    def read(cls, path: Path) -> Unit:
        """Read the unit of a file."""
        with refuse_damage(f"{path}: not a file of the benchmark", way="delete it"):
            stored = read_arrays(path, width=8)
            return cls._of(path, parse_json(stored[HEADER].tobytes().decode()), stored)

    @classmethod
    def _of(cls, path: Path, header: dict[str, Any], stored: Mapping[str, Any]) -> Unit:
        """Make the unit of a header and its arrays; mismatches raise Python's own errors."""
        unit = cls(path, dict(header["settings"]), tuple(map(str, header["measures"])))
        if not (unit.suite and unit.problem and unit.model):
            raise ValueError("it names no suite, problem or model")
        unit.facts = {int(r): dict(facts) for r, facts in header["facts"].items()}
        for i, row in enumerate(header["rows"]):
            values = stored[f"v{i}"].astype(np.float64)
            key = (int(row.pop("repetition")), str(row.pop("method")))
            facts = unit.facts[key[0]]
            if values.shape != (len(facts["bags"]), len(unit.measures)):
                raise ValueError(f"the values of {key[1]} do not fit its bags and measures")
            times = float(facts["forward"]) + float(row["seconds"])
            if math.isinf(float(facts["auroc"])) or not math.isfinite(times):  # no AUROC of bags of one class
                raise ValueError(f"the facts of {key[1]} are not numbers")
            unit.rows[key], unit.values[key] = row, values
        return unit


@dataclass(frozen=True)
class Folder:
    """A run's folder: `units/*.npz` (measurements) and `models/*.safetensors` (trained models)."""

    path: Path

    def unit(self, settings: dict[str, Any], measures: Sequence[str], *, replace: bool = False) -> Unit:
        """Open the unit of these settings, or start a new one.

        A file with other settings is an error; with `replace` it is measured again.
        """
        names = (settings["suite"], settings["problem"]["name"], settings["model"]["name"])
        make_folder(self.path / "units")
        path = self.path / "units" / f"{file_name(*names)}.npz"
        fresh = Unit(path, _plain(settings), tuple(measures))
        if not path.is_file():
            return fresh
        unit = Unit.read(path)
        changed = differences(unit.settings, fresh.settings)
        if not changed and unit.measures == fresh.measures:
            return unit
        if replace:
            return fresh
        raise InputError(
            f"{path}: has other settings ({', '.join(changed) or 'measures'}); "
            "choose another `out=`, or delete the file."
        )

    def units(self) -> list[Unit]:
        """Read every unit in the folder."""
        return [Unit.read(path) for path in sorted((self.path / "units").glob("*.npz"))]

    def stack(self, configuration: Configuration) -> Fitted | None:
        """Load the trained models of a configuration; None if there are none with the same settings."""
        path = self._model_file(configuration.name)
        if not path.is_file():
            return None
        header, tensors = read_stack(path, configuration.device)
        if header["settings"] != _plain(configuration.settings()):
            return None
        fresh = configuration.fresh_models()
        buffers = {name: tensors[BUFFER + name] for name in fresh.buffers}
        return Fitted(Stacked(fresh.template, tensors[FLAT], buffers), **header["fitted"])

    def save_stack(self, configuration: Configuration, fitted: Fitted) -> None:
        """Write the best checkpoints of a configuration atomically."""
        tensors = {BUFFER + name: value for name, value in fitted.models.buffers.items()}
        summary = {key: getattr(fitted, key) for key in ("best_epoch", "best_loss", "epochs")}
        header = json.dumps({"settings": configuration.settings(), "fitted": summary})
        path = self._model_file(configuration.name)
        save_tensors(path, {**tensors, FLAT: fitted.models.flat}, {STACK_KEY: header})

    def load_weights(self, model: nn.Module, names: Sequence[str], settings: dict[str, Any]) -> bool:
        """Load the weights under these names into a model; False if there are none with these settings."""
        path = self._model_file(file_name(*names))
        if not path.is_file():
            return False
        stored, tensors = read_stack(path, key=WEIGHTS_KEY)
        if stored != _plain(settings):
            return False
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise FileError(f"{path}: not this model's weights ({error}); delete it.") from None
        return True

    def save_weights(self, model: nn.Module, names: Sequence[str], settings: dict[str, Any]) -> None:
        """Write a model's weights under these names atomically."""
        about = {WEIGHTS_KEY: json.dumps(_plain(settings))}
        save_tensors(self._model_file(file_name(*names)), model.state_dict(), about)

    def _model_file(self, name: str) -> Path:
        make_folder(self.path / "models")
        return self.path / "models" / f"{name}.safetensors"


def read_stack(
    path: Path, device: str = "cpu", *, key: str = STACK_KEY
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file of models: its settings (for a stack, also the course of training) and tensors."""
    from safetensors import SafetensorError, safe_open

    damage = refuse_damage(
        f"{path}: not a file of models", way="delete it to train again", kinds=(SafetensorError,)
    )
    with damage, safe_open(path, framework="pt", device=device) as file:
        header: dict[str, Any] = parse_json(file.metadata()[key])
        return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors atomically."""
    from safetensors.torch import save_file

    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_atomically(path, lambda temporary: save_file(copies, temporary, about))


def differences(first: dict[str, Any], second: dict[str, Any], before: str = "") -> list[str]:
    """List the settings that differ, by their dotted names.

    >>> differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}})
    ['b.c']
    """
    names = []
    for key in sorted({*first, *second}):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            names += differences(a, b, f"{before}{key}.")
        elif a != b:
            names.append(f"{before}{key}")
    return names
