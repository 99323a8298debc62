"""Pickles that run code when they are loaded, and the watch that tells whether one did."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import numpy as np

WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn")
WATCHED += ("subprocess.Popen", "socket.connect", "socket.bind", "webbrowser.open", "ctypes.dlopen")
CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("os", "system", ("true",)),
    ("subprocess", "Popen", (["true"],)),
    ("subprocess", "check_output", (["true"],)),
    ("builtins", "exec", ("import os; os.system('true')",)),
    ("builtins", "eval", ("__import__('os').system('true')",)),
    ("runpy", "run_module", ("antigravity",)),
    ("importlib", "import_module", ("antigravity",)),
    ("webbrowser", "open", ("file:///",)),
    ("timeit", "timeit", ("__import__('os').system('true')",)),
    ("torch.hub", "load", ("x/y", "z")),
    ("torch._utils", "_import_dotted_name", ("os.system",)),
    ("functools", "partial", (print, "x")),
]


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def hostile(rng: np.random.Generator) -> Any:
    """A value whose pickle calls a function that no features and no weights need."""
    return called(*CALLS[int(rng.integers(len(CALLS)))])


def called(module: str, name: str, arguments: tuple[Any, ...]) -> Any:
    """A value whose pickle is that call."""
    return _Call(getattr(import_module(module), name), arguments)


class Watch:
    """Notes what a process does that no reader may do; it lasts as long as the process."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: tuple[Any, ...]) -> None:
        if event in WATCHED:
            self.seen.append(event)

    def taken(self) -> list[str]:
        """What was seen since the last time."""
        seen, self.seen = self.seen, []
        return seen
