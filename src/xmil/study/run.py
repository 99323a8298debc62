"""A run: every configuration trained, explained and scored, going on where an earlier run stopped."""

from __future__ import annotations

import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmil._version import __version__
from xmil.core.provenance import git_commit
from xmil.core.storage import write_text
from xmil.study.benchmark import Configuration, Row, score, train
from xmil.study.scoring import MethodSpec
from xmil.study.store import Store

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
    from xmil.models import create_model

    model = create_model(configuration.setup.name, in_dim=2, n_classes=2, **configuration.setup.params)
    return spec.supports(model)


def write_run(folder: Path, settings: dict[str, Any]) -> None:
    """run.json: what was asked for, and with what it was computed."""
    about = {
        "command": "toy",
        "settings": settings,
        "versions": {"xmil": __version__, "torch": torch.__version__, "numpy": np.__version__},
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "device": device_name(settings.get("device", "cpu"))},
        "commit": git_commit(),
    }
    text = json.dumps(about, indent=2, default=str) + "\n"
    write_text(folder / "run.json", text)


def device_name(device: str) -> str:
    """A device in words."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return f"{device}, {torch.get_num_threads()} threads"
