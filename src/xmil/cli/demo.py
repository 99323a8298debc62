"""`xmil demo`: signed evidence on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-out"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer bags: seconds instead of a minute.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of bags and models.")] = 0,
) -> None:
    """Train two models on bags of handwritten digits, explain them with several methods, draw the result."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from xmil.demo import run_demo

    torch.set_num_threads(1)  # small models: threads would wait for each other more than they work
    console = Console()
    result = run_demo(out, quick=quick, seed=seed, progress=lambda line: console.print(f"[dim]{line}[/dim]"))
    methods = list(dict.fromkeys(method for _, method in result.auprc2))
    table = Table(title="AUPRC-2 against the true evidence (1 is perfect)")
    table.add_column("model")
    table.add_column("test accuracy", justify="right")
    for method in methods:
        table.add_column(method, justify="right")
    for model, accuracy in result.accuracy.items():
        scores = [f"{result.auprc2[model, method]:.2f}" for method in methods]
        table.add_row(model, f"{accuracy:.2f}", *scores)
    console.print(table)
    console.print(f"Picture: {result.picture}")
