"""Table 1 by the referee on a machine that has torch and little else, a process for each column.

    python benchmarks/table1.py --data FEATURES --device cuda --out DIR

fills DIR with `units/` and `models/` as `xmil bench --suite evidence` does; a second call goes on where the
first one stopped. Afterwards, on a machine with the package's dependencies, `xmil bench --out DIR`
writes the page.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from pathlib import Path

from xmil.bench import PAPER_MODELS, PAPER_TASKS, Request, measure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS))
    parser.add_argument("--models", default=",".join(PAPER_MODELS))
    parser.add_argument("--alone", action="store_true", help="all in this process")
    return parser.parse_args()


def in_processes(options: argparse.Namespace) -> None:
    """One process for each column: kernels of small models leave most of a GPU idle."""
    base = [sys.executable, *sys.argv, "--alone"]
    columns = [(model, task) for model in options.models.split(",") for task in options.tasks.split(",")]
    running = [subprocess.Popen([*base, "--models", m, "--tasks", t]) for m, t in columns]  # noqa: S603
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"a process failed: {codes}")


def main() -> None:
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    if not options.alone:
        in_processes(options)
        print(f"The whole table: {time.perf_counter() - started:.0f} s on {options.device}.")
        return
    request = Request(
        ("evidence",),
        models=tuple(options.models.split(",")),
        tasks=tuple(options.tasks.split(",")),
        quick=options.quick,
        repetitions=options.repetitions,
        data=options.data,
        device=options.device,
        minutes=options.minutes,
    )
    done, _ = measure(request, options.out)
    name = f"{options.models}, {options.tasks}"
    print(f"{name}: {time.perf_counter() - started:.0f} s{'' if done else ', not done yet'}", flush=True)


if __name__ == "__main__":
    main()
