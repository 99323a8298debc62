"""`xmil bench`: speed and memory, measured on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from xmil.core.errors import InputError, unknown_name


def bench(
    names: Annotated[
        list[str] | None, typer.Argument(help="Benchmarks; without any, the quick ones.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Name the benchmarks and stop.")] = False,
) -> int:
    """Measure speed and memory here, as ratios within one run; needs a checkout of the sources."""
    root = _checkout()
    known = sorted(path.stem for path in (root / "benchmarks").glob("[a-z]*.py") if _runs(path))
    if list_:
        print("\n".join(known))
        return 0
    for name in names or []:
        if name not in known:
            raise unknown_name("benchmark", name, known)
    command = [sys.executable, "-m", "benchmarks", *(names or [])]
    return int(subprocess.run(command, cwd=root, check=False).returncode != 0)  # noqa: S603  # our own files


def _checkout() -> Path:
    """The root of the checkout that this package lies in."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise InputError(
            "The benchmarks come with the sources, not with an installed package; "
            "clone the repository and run 'make bench' there."
        )
    return root


def _runs(path: Path) -> bool:
    return "def main(" in path.read_text(encoding="utf-8")
