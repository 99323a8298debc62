"""The state of a training between two epochs: on disk, whole or not at all, read without running code."""

from __future__ import annotations

import csv
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import FileError
from xmil.core.pickles import check_torch_file
from xmil.core.storage import write_atomically, write_text

LAYOUT = 1
LAST, LOG, MODEL, METRICS, PREDICTIONS = (
    "last.ckpt",
    "log.csv",
    "model.safetensors",
    "metrics.json",
    "predictions.csv",
)


@dataclass
class BestEpoch:
    """The best epoch so far: its number (from 1), the monitored value, the validation loss, the weights."""

    epoch: int = 0
    value: float = float("nan")
    loss: float = float("nan")
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class State:
    """Everything that the next epoch depends on, and the log so far.

    Random numbers are no part of it: their generator is seeded by (seed, epoch, process) in each epoch.
    """

    epoch: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    precision: dict[str, Any] = field(default_factory=dict)
    best: BestEpoch = field(default_factory=BestEpoch)
    log: list[dict[str, float]] = field(default_factory=list)
    stopped: bool = False


def write_state(state: State, folder: Path) -> None:
    """Write the state, then the log that belongs to it."""
    content = {**vars(state), "best": vars(state.best), "layout": LAYOUT}
    buffer = io.BytesIO()
    torch.save(content, buffer)  # in memory first: a full disk is then an OSError, told in one line
    write_atomically(folder / LAST, lambda temporary: _put(temporary, buffer))
    write_log(state, folder)


def write_log(state: State, folder: Path) -> None:
    """Write the log that belongs to a state: a kill may have come between the two."""
    write_text(folder / LOG, log_text(state.log))


def read_state(folder: Path) -> State | None:
    """The state of a training that was interrupted; None where there is none."""
    path = folder / LAST
    if not path.is_file():
        return None
    try:
        check_torch_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.pop("layout") != LAYOUT:
            raise FileError(f"{path}: written by another version; pass --restart to train again.")
        return State(**{**content, "best": BestEpoch(**content["best"])})
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, TypeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileError(
            f"{path}: damaged ({told[:120]}); delete it, or pass --restart to train again."
        ) from None


def log_text(log: list[dict[str, float]]) -> str:
    """The log as CSV, one row for each epoch."""
    return csv_text([{name: _number(value) for name, value in row.items()} for row in log])


def csv_text(rows: list[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    """Rows as CSV; the columns are those of all rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def sweep(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


def _put(path: str, buffer: io.BytesIO) -> None:
    Path(path).write_bytes(buffer.getbuffer())


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.8g}"
