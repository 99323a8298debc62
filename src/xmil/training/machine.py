"""Lightning Fabric from the settings: device, precision, number of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from xmil.core.budget import available_memory
from xmil.core.errors import InputError, UnsupportedError
from xmil.core.task import TASKS
from xmil.training.config import Config, Train


def make_fabric(config: Config) -> Any:
    """A Fabric that is not launched yet: until then there is one process, or each knows its rank."""
    make = _fabric_class()
    settings = config.train
    accelerator, devices = _devices(settings)
    processes = settings.devices * settings.nodes
    if TASKS[config.task].compares and processes > 1:
        raise UnsupportedError(
            f"{config.task.capitalize()} compares all bags of a batch, so it trains on one device; set "
            "train.devices to 1."
        )
    try:
        return make(
            accelerator=accelerator,
            devices=devices,
            num_nodes=settings.nodes,
            strategy="ddp" if processes > 1 else "auto",
            precision=settings.precision,
        )
    except (ValueError, RuntimeError) as error:
        told = str(error).split("\n")[0]
        raise InputError(f"The device {settings.device!r} cannot run this training: {told}") from None


def is_first_process() -> bool:
    """Whether this process is the one that writes and speaks, before Fabric is launched too."""
    ranks = (os.environ.get(name) for name in ("RANK", "SLURM_PROCID", "NODE_RANK", "LOCAL_RANK"))
    return all(rank in (None, "0") for rank in ranks)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Only algorithms that give the same bits every time; the flags are put back afterwards."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def preload_bytes(settings: Train) -> int:
    """How many bytes of features a process keeps: as set, or its part of half of the free memory."""
    if settings.preload_gb is not None:
        return int(settings.preload_gb * 1e9)
    return (available_memory() or 0) // (2 * settings.devices)


def _devices(settings: Train) -> tuple[str, int | list[int]]:
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"Unknown device {settings.device!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"The device {settings.device!r} is not available; use cpu.")
    if device.index is not None and settings.devices == 1:
        return device.type, [device.index]
    return device.type, settings.devices


def _fabric_class() -> Any:
    for name in ("lightning_fabric", "lightning.fabric"):
        try:
            return import_module(name).Fabric
        except ImportError:
            continue
    raise UnsupportedError("Training needs Lightning Fabric; install it with: pip install 'xmil[train]'")
