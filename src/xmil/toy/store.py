"""Results and trained models of a run, one pair of files for each configuration."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xmil.core import runfiles
from xmil.core.absence import not_made
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError
from xmil.core.parsing import parse_json
from xmil.core.storage import write_atomically
from xmil.models import create_model
from xmil.toy.benchmark import Configuration, Row, score, train
from xmil.toy.race import Fitted
from xmil.toy.scoring import MethodSpec
from xmil.toy.stacked import Stacked

KEY = b"xmil-toy"
FLAT, BUFFER = "parameters", "buffer|"


@dataclass(frozen=True)
class Store:
    """A run's folder: `results/NAME.parquet` (rows), `models/NAME.safetensors` (the best checkpoints)."""

    folder: Path

    def results(self, configuration: Configuration) -> list[Row]:
        """The rows of a configuration with the same settings, or none."""
        path = self._path("results", configuration, ".parquet")
        if not path.is_file():
            return []
        settings, rows = read_results(path)
        return rows if settings == _plain(configuration.settings()) else []

    def save_results(self, configuration: Configuration, rows: list[Row]) -> None:
        """Write the rows, whole or not at all."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        header = json.dumps(configuration.settings())
        names = {"task": configuration.task.name, "model": configuration.setup.name}
        table = pa.Table.from_pylist([{**names, **row} for row in rows]).replace_schema_metadata(
            {KEY: header}
        )
        path = self._path("results", configuration, ".parquet")
        write_atomically(path, lambda temporary: pq.write_table(table, temporary))

    def models(self, configuration: Configuration) -> Fitted | None:
        """The trained models of a configuration with the same settings, or None."""
        path = self._path("models", configuration, ".safetensors")
        if not path.is_file():
            return None
        header, tensors = read_models(path, configuration.device)
        if header["settings"] != _plain(configuration.settings()):
            return None
        fresh = configuration.fresh_models()
        buffers = {name: tensors[BUFFER + name] for name in fresh.buffers}
        return Fitted(Stacked(fresh.template, tensors[FLAT], buffers), **header["fitted"])

    def save_models(self, configuration: Configuration, fitted: Fitted) -> None:
        """Write the best checkpoints, whole or not at all."""
        from safetensors.torch import save_file

        tensors = {BUFFER + name: value for name, value in fitted.models.buffers.items()}
        tensors = {name: _whole(value) for name, value in {**tensors, FLAT: fitted.models.flat}.items()}
        summary = {key: getattr(fitted, key) for key in ("best_epoch", "best_loss", "epochs")}
        header = json.dumps({"settings": configuration.settings(), "fitted": summary})
        path = self._path("models", configuration, ".safetensors")
        write_atomically(path, lambda temporary: save_file(tensors, temporary, {KEY.decode(): header}))

    def _path(self, kind: str, configuration: Configuration, suffix: str) -> Path:
        folder = self.folder / kind
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(not_made(folder, error)) from None
        return folder / f"{configuration.name}{suffix}"


def read_models(path: Path, device: str = "cpu") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The settings and how training went, and the stacked tensors, of a file of models."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=device) as file:
            header: dict[str, Any] = parse_json(file.metadata()[KEY.decode()])
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not a file of models ({error}); delete it to train again.") from None


def read_results(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The settings and rows of a results file."""
    import pyarrow as pa

    try:
        table = read_parquet(path)
        settings: dict[str, Any] = parse_json(table.schema.metadata[KEY])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not a results file ({error}); delete it to compute it again.") from None
    return settings, table.to_pylist()


def _plain(settings: dict[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(settings))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


logger = logging.getLogger(__name__)


OnProgress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def run_configuration(
    configuration: Configuration,
    methods: Sequence[MethodSpec],
    store: Store,
    *,
    on_progress: OnProgress | None = None,
) -> list[Row]:
    """The rows of a configuration; models and scores that are stored already are not computed again."""
    say = on_progress or (lambda *_: None)
    rows = store.results(configuration)
    scored = {row["method"] for row in rows}
    todo = [spec for spec in methods if str(spec) not in scored and applies(spec, configuration)]
    if todo:
        fitted = store.models(configuration)
        started = time.perf_counter()
        if fitted is None:
            epochs = configuration.protocol.training_of(configuration.setup).epochs
            fitted = train(configuration, on_epoch=lambda epoch, _: say("train", epoch, epochs))
            store.save_models(configuration, fitted)
            logger.info("%s trained in %.1f s", configuration.name, time.perf_counter() - started)
        repetitions = configuration.protocol.repetitions
        found = score(
            configuration, fitted.models, todo, on_repetition=lambda done: say("explain", done, repetitions)
        )
        rows = rows + [
            {
                **row,
                "best_epoch": fitted.best_epoch[row["repetition"]],
                "epochs": fitted.epochs[row["repetition"]],
            }
            for row in found
        ]
        store.save_results(configuration, rows)
    asked = {str(spec) for spec in methods}
    names = {"task": configuration.task.name, "model": configuration.setup.name}
    return [{**names, **row} for row in rows if row["method"] in asked]


def applies(spec: MethodSpec, configuration: Configuration) -> bool:
    """Whether a method can explain the configuration's model."""

    model = create_model(configuration.setup.name, in_dim=2, n_classes=2, **configuration.setup.params)
    return spec.supports(model)


def write_run(folder: Path, settings: dict[str, Any]) -> None:
    """run.json: what was asked for, and with what it was computed."""
    device = device_name(settings.get("device", "cpu"))
    runfiles.write_run(folder, "toy", {"settings": settings, "machine": {"device": device}})


def device_name(device: str) -> str:
    """A device in words."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return f"{device}, {torch.get_num_threads()} threads"
