"""Other Python processes of ours, which never import from the current folder.

Python puts the current folder first on the path of `python -c` and `python -m`: a stray `numpy.py` there
would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

SAFE_PATH = "PYTHONSAFEPATH"  # read by every Python that starts, as its option -P


def python_command(*arguments: str) -> list[str]:
    """Write the command that runs this Python without the current folder on its path."""
    return [sys.executable, "-P", *arguments]


def python_environment(**settings: str) -> dict[str, str]:
    """Make the environment of a Python that imports from where this one does."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    return {**os.environ, SAFE_PATH: "1", "PYTHONPATH": path, **settings}


def safe_path() -> AbstractContextManager[None]:
    """Start all Pythons within the block without the current folder on their path."""
    return variable(SAFE_PATH, "1")


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
