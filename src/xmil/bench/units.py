"""Measurements in files: `units/*.npz` of a run, one for each column (a suite, a problem and a model).

A file grows by repetition, and by method.
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

from xmil.core.budget import read_arrays
from xmil.core.errors import InputError, refuse_damage
from xmil.core.text import flatten, parse_json
from xmil.storage import make_folder, write_arrays

UNITS, HEADER = "units", "header"
Grid = npt.NDArray[np.float64]


def plain(settings: Any) -> Any:
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

    def tried(self, repetition: int) -> dict[str, str]:
        """The digest of each method that was measured, or does not support the model."""
        return dict(self.facts.get(repetition, {}).get("tried", {}))

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
        make_folder(self.path.parent)
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


def read_units(out: Path) -> list[Unit]:
    """Read every unit in the folder of a run."""
    return [Unit.read(path) for path in sorted((out / UNITS).glob("*.npz"))]


def open_unit(path: Path, settings: dict[str, Any], measures: Sequence[str], *, replace: bool) -> Unit:
    """Open the unit of these settings, or start a new one.

    A file with other settings is an error; with `replace` it is measured again.
    """
    fresh = Unit(path, plain(settings), tuple(measures))
    if not path.is_file():
        return fresh
    unit = Unit.read(path)
    old, new = flatten(unit.settings), flatten(fresh.settings)
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if not changed and unit.measures == fresh.measures:
        return unit
    if replace:
        return fresh
    raise InputError(
        f"{path}: has other settings ({', '.join(changed) or 'measures'}); "
        "choose another `out=`, or delete the file."
    )
