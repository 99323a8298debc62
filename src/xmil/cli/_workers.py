"""The options of who computes, shared by every command that goes over slides."""

from __future__ import annotations

from typing import Annotated

import typer

from xmil.core.errors import InputError
from xmil.runs.workers.pool import Workers

_PANEL = "Engine"
Kind = Annotated[
    str, typer.Option("--engine", help="local: this machine; ray: a Ray cluster.", rich_help_panel=_PANEL)
]
WorkerCount = Annotated[
    int,
    typer.Option(
        help="Worker processes, each with its own model; 0 runs in this process (with ray: as many as fit).",
        rich_help_panel=_PANEL,
    ),
]
Address = Annotated[
    str,
    typer.Option(
        help="Address of a running Ray cluster ('auto' finds it); by default Ray is started on this machine.",
        rich_help_panel=_PANEL,
    ),
]
Cpus = Annotated[float, typer.Option(help="CPUs per worker.", rich_help_panel=_PANEL)]
Gpus = Annotated[
    float,
    typer.Option(
        help="GPUs per worker; 0.25 lets four workers share one. Default with ray and --device cuda: 1.",
        rich_help_panel=_PANEL,
    ),
]


def workers_of(
    kind: str,
    *,
    workers: int = 0,
    address: str = "",
    cpus: float = 1.0,
    gpus: float = 0.0,
    device: str = "cpu",
) -> Workers:
    """The workers that the options ask for."""
    if workers < 0:
        raise InputError(f"--workers must be a whole number, 0 or more. Got {workers} instead.")
    if kind == "ray" and device.startswith("cuda") and not gpus:
        gpus = 1.0
    count = workers or (0 if kind == "ray" else 1)
    return Workers(kind, workers=count, address=address or None, cpus=cpus, gpus=gpus)
