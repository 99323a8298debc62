"""A command: `xmil extra-count RUN`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def extra_count(run: Annotated[Path, typer.Argument(help="A run's folder.")]) -> int:
    """Count the slides of a run."""
    print(f"{len(list((run / 'slides').glob('*.parquet')))} slides")  # noqa: T201  # the report of a command
    return 0
