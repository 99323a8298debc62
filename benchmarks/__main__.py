"""Run every benchmark, or those named: `python -m benchmarks [NAME ...]`."""

from __future__ import annotations

import platform
import sys
from importlib import import_module

import torch

QUICK = (
    "core",
    "read",
    "paint",
    "flip",
    "toy",
    "embed",
    "prediction",
)  # each has a main() that ends in minutes; the studies are run by name


def main() -> None:
    names = sys.argv[1:] or QUICK
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}")
    for name in names:
        print(f"\n== {name}")
        sys.argv = [name]  # each parses its own options and takes its defaults here
        import_module(f"benchmarks.{name}").main()


if __name__ == "__main__":
    main()
