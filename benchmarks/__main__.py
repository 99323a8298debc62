"""Run every benchmark of speed, or those named: `python -m benchmarks [NAME ...]`.

Each runs in a process of its own with its defaults; one that fails does not keep the others from running.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import torch

QUICK = (
    "core",
    "read",
    "paint",
    "flip",
    "toy",
    "embed",
    "prediction",
    "cohort",
    "scale",
    "viewer",
    "viewer_page",
)  # each ends in minutes; the studies are run by name


def main() -> None:
    names = sys.argv[1:] or QUICK
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}", flush=True)
    failed = [name for name in names if not _passed(name)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _passed(name: str) -> bool:
    print(f"\n== {name}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    return subprocess.run(command, check=False).returncode == 0  # noqa: S603  # our own programs


if __name__ == "__main__":
    main()
