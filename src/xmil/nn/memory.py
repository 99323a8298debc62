"""Large temporaries on the CPU: let the C library reuse freed memory instead of asking the kernel anew.

glibc maps every block above 32 MB afresh and unmaps it when freed; the kernel then clears the pages each
time. For bags of more than 30,000 instances that costs as much as the arithmetic. For the time of one
explanation such blocks come from the heap, where freed ones are used again; then the memory is given back.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LARGE_BYTES = 1 << 26  # bags below this never meet the limit
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_AT_EASE = {_M_MMAP_MAX: 65_536, _M_TRIM_THRESHOLD: 1 << 26}  # glibc's own limits
_BUSY = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1}

_lock = threading.Lock()
_users = 0


@contextmanager
def reused_memory(n_bytes: int) -> Iterator[None]:
    """Reuse freed memory within the block, if the data is large and the C library is glibc."""
    libc = _glibc() if n_bytes >= LARGE_BYTES else None
    if libc is None:
        yield
        return
    _count(libc, 1)
    try:
        yield
    finally:
        _count(libc, -1)


def _count(libc: ctypes.CDLL, change: int) -> None:
    global _users
    with _lock:
        _users += change
        for option, value in (_BUSY if _users else _AT_EASE).items():
            libc.mallopt(option, value)
        if not _users:
            libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt, libc.malloc_trim, libc.gnu_get_libc_version  # noqa: B018  # absent elsewhere
    except (OSError, AttributeError):
        return None
    return libc
