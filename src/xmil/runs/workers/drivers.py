"""Who started a run: workers on the same machine end when that process does, however it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.5  # seconds between looks

_watched: set[Driver] = set()


class Driver(NamedTuple):
    """A process by its machine, number and start, since numbers are used again."""

    host: str
    pid: int
    begun: str


def this_process() -> Driver:
    """The driver that this process is."""
    return Driver(_machine(), os.getpid(), _begun(os.getpid()))


def leave_with(driver: Driver) -> None:
    """End this process once the driver has ended; nothing is known of drivers on other machines."""
    if driver in _watched or driver.host != _machine() or not driver.begun:
        return
    _watched.add(driver)
    threading.Thread(target=_watch, args=(driver,), name="xmil-driver", daemon=True).start()


def is_alive(driver: Driver) -> bool:
    """Whether the process of a driver on this machine still runs.

    >>> is_alive(this_process())
    True
    """
    return _begun(driver.pid) == driver.begun


def _watch(driver: Driver) -> None:
    while is_alive(driver):
        time.sleep(INTERVAL)
    os._exit(1)


def _machine() -> str:
    """The machine, and within it the space of process numbers."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _begun(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty where it is gone, a zombie, or nobody can tell."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if words[0] in "ZX" else words[19]
