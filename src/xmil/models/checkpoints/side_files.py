"""Files beside a checkpoint that say what its outputs mean: args.json, ref_value.json, survival_bins.npy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.errors import CheckpointError
from xmil.core.parsing import parse_json

SETTINGS = ("args.json", "config.json")  # of xMIL and of MIL-Lab
REFERENCE, BINS = "ref_value.json", "survival_bins.npy"
HEAD_TYPES = ("classification", "regression", "survival")


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings that xMIL (args.json) or MIL-Lab (config.json) wrote beside the weights."""
    for name in SETTINGS:
        if (folder / name).is_file():
            settings = _json(folder / name)
            return dict(settings) if isinstance(settings, Mapping) else {}
    return {}


def outputs_beside(folder: Path, settings: Mapping[str, Any], n_outputs: int) -> dict[str, Any]:
    """What the files in a folder say of the outputs, as fields of a `ModelSpec`; nothing where they do not.

    The paper's settings, which have no `head_type`, are those of a classifier.
    """
    task = _task(folder, settings)
    if task == "regression":
        return {"task": task, "reference": _reference(folder, settings), "relative": True}
    if task == "survival":
        return {"task": task, "time_bins": _time_bins(folder, n_outputs)}
    return {} if task is None else {"task": task}


def _task(folder: Path, settings: Mapping[str, Any]) -> str | None:
    files = {"regression": (folder / REFERENCE).is_file(), "survival": (folder / BINS).is_file()}
    beside = [task for task, there in files.items() if there]
    head_type = settings.get("head_type")
    if head_type is not None and head_type not in HEAD_TYPES:
        known = ", ".join(HEAD_TYPES)
        raise CheckpointError(f"args.json has the head_type {head_type!r}, not one of {known}; give task=.")
    said = {*beside, *([head_type] if head_type is not None else [])}
    if len(said) > 1:
        told = f"head_type {head_type!r}" if head_type is not None else "no head_type"
        names = " and ".join(name for name in (REFERENCE, BINS) if (folder / name).is_file())
        raise CheckpointError(
            f"the files beside it contradict each other: {told} in args.json, and {names}; give task=."
        )
    if said:
        return str(said.pop())
    return "classification" if "aggregation_model" in settings else None


def _reference(folder: Path, settings: Mapping[str, Any]) -> float | tuple[float, ...] | None:
    """The value that the outputs are deviations from."""
    path = folder / REFERENCE
    found = _json(path) if path.is_file() else settings.get("ref_value")
    values = found if isinstance(found, list) else [found]
    if found is None:
        return None
    if not values or not all(_is_number(value) for value in values):
        raise CheckpointError(f"{path.name} beside it holds {found!r}, not a number; give reference=.")
    return tuple(map(float, values)) if isinstance(found, list) else float(found)


def _time_bins(folder: Path, n_outputs: int) -> tuple[float, ...] | None:
    """The times between the bins: the stored edges without the first and the last."""
    path = folder / BINS
    if not path.is_file():
        return None
    try:
        edges = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{BINS} beside it is not an array of numbers ({type(error).__name__}); give time_bins=."
        ) from None
    if not isinstance(edges, np.ndarray) or edges.dtype.kind not in "fiu" or edges.shape != (n_outputs + 1,):
        shape = getattr(edges, "shape", None)
        raise CheckpointError(
            f"{BINS} beside it has the shape {shape}, not {n_outputs + 1} edges of {n_outputs} bins; "
            "give time_bins=."
        )
    return tuple(float(edge) for edge in edges[1:-1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{path}: not readable JSON ({line}).") from None
