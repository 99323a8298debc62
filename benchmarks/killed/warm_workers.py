"""Worker processes that begin with everything imported, and are otherwise as spawned ones are.

Importing torch takes far longer than the work between two points of writing. A fork server of the attempt's
own, forked before the command opens any file, keeps what matters of spawning: workers hold no file of the
run, belong to the attempt's process group, and see the death of the process that started them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import forkserver, get_context, util
from typing import Any

from xmil.execute import workers


def start_server() -> None:
    """Fork the server now, from a process without threads, and let the command take its workers from it."""
    spawn = util.spawnv_passfds

    def fork(path: Any, args: Sequence[Any], passed: Sequence[int]) -> int:
        if "forkserver" not in str(args[-1]):
            return int(spawn(path, args, passed))
        if (child := os.fork()) == 0:
            _serve(*passed)
        return child

    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawn
    workers.get_context = lambda _: get_context("forkserver")  # type: ignore[assignment]


def _serve(listener: int, alive: int) -> None:
    """Serve until the process that forked this one is gone: its end of the pipe must be the only one."""
    try:
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in (0, 1, 2, listener, alive):
                try_close(int(name))
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def try_close(handle: int) -> None:
    """Close a handle; the one that listed the others is gone already."""
    try:
        os.close(handle)
    except OSError:
        return
