"""`python -m xmil.bench`: the measuring half of `xmil bench` for machines that have torch and little else.

It fills the folder with NumPy files and trained models; `xmil bench --out DIR --report` writes the tables
and the page where the package's dependencies are installed.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from xmil.bench.plans import Asked, measure
from xmil.core.errors import XmilError


def main() -> int:
    """Measure what is missing; 0 done, 1 more to do, 2 nothing could be done."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = _arguments()
    asked = Asked(
        suites=tuple(args.suite),
        methods=tuple(args.method),
        models=tuple(args.model),
        only=args.only,
        quick=args.quick,
        tasks=tuple(args.task),
        repetitions=args.repetitions,
        seed=args.seed,
        data=args.data,
        device=args.device,
        minutes=args.minutes,
    )
    try:
        done, left_out = measure(asked, Path(args.out), lambda text: logging.info("%s", text))
    except XmilError as error:
        logging.error("xmil: error: %s", error)
        return 2
    for reason in left_out:
        logging.warning("left out: %s", reason)
    return int(not done)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m xmil.bench", description=__doc__)
    for name in ("--suite", "--method", "--model", "--task"):
        parser.add_argument(name, action="append", default=[])
    parser.add_argument("--only", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repetitions", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
