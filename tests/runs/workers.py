"""Workers that the engine tests send to other processes: importable by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError, StopError
from xmil.execute.workers import Stages


def make(folder: str = "", *, seconds: float = 0.0) -> Callable[[Any], Any]:
    """A worker whose items say what to do."""
    if folder:
        Path(folder, f"made-{os.getpid()}").touch()

    def work(item: Any) -> Any:
        time.sleep(seconds)
        match item:
            case "raise":
                raise InputError("This item  cannot\nbe used.")
            case "bug":
                raise KeyError("lost")
            case "stop":
                raise StopError("The disk is full.")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die once" if not Path(folder, "died").exists():
                Path(folder, "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "pid":
                return os.getpid()
        return f"{item}!"

    return work


def make_broken() -> Callable[[Any], Any]:
    """A worker that cannot be made."""
    raise InputError("The model is missing.")


def make_staged(log: str) -> Stages[Any, Any]:
    """A worker in two stages that writes down when each begins."""

    def note(line: str) -> None:
        with open(log, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def read(item: Any) -> Any:
        note(f"read {item}")
        if item == 2:
            raise InputError("Item 2 cannot be read.")
        return item * 10

    def work(item: Any, content: Any) -> Any:
        note(f"work {item}")
        return content + 1

    return Stages(read, work)
