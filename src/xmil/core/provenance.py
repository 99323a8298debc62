"""With what a result was computed: versions, machine, commit."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xmil._version import __version__


def provenance() -> dict[str, Any]:
    """Versions, Python, system, and the commit of the code's checkout, where there is one.

    >>> sorted(provenance())
    ['commit', 'python', 'system', 'versions']
    """
    others = {name: found for name in ("torch", "numpy") if (found := _installed(name))}
    return {
        "versions": {"xmil": __version__, **others},
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """The commit of the code's checkout, where there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603  # fixed words
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
