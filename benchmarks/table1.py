"""Table 1 on a machine that has torch and little else: what `xmil toy --table1` computes.

    python benchmarks/table1.py --data FEATURES --device cuda --out DIR

trains and scores every configuration, in one process for each model, and leaves `models/*.safetensors` and
`rows/*.json`. Afterwards, where the package's dependencies are installed,

    python benchmarks/table1.py --data FEATURES --out DIR --adopt
    xmil toy --table1 --repetitions 30 --data FEATURES --out DIR

turns the rows into Parquet and writes tables and plots without training again.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from xmil.core.storage import write_atomically
from xmil.toy.benchmark import Configuration, Row
from xmil.toy.digit_tasks import TASKS
from xmil.toy.instances import load_instances
from xmil.toy.protocol import PAPER_MODELS, PAPER_TASKS, SETUPS, TABLE1_METHODS, Protocol
from xmil.toy.result_table import as_text, summarise
from xmil.toy.scoring import MethodSpec
from xmil.toy.store import Store, run_configuration

METHODS = (*TABLE1_METHODS, "lrp@log_odds", "grad2")


@dataclass(frozen=True)
class JsonStore(Store):
    """A store whose rows are JSON: no Parquet library is needed."""

    def results(self, configuration: Configuration) -> list[Row]:
        path = self._path("rows", configuration, ".json")
        if not path.is_file():
            return []
        saved = json.loads(path.read_text())
        same = saved["settings"] == json.loads(json.dumps(configuration.settings()))
        return list(saved["rows"]) if same else []

    def save_results(self, configuration: Configuration, rows: list[Row]) -> None:
        text = json.dumps({"settings": configuration.settings(), "rows": rows})
        path = self._path("rows", configuration, ".json")
        write_atomically(path, lambda temporary: Path(temporary).write_text(text) and None)


def configurations(arguments: argparse.Namespace) -> list[Configuration]:
    training = {} if arguments.epochs is None else {"epochs": arguments.epochs}
    protocol = Protocol(
        repetitions=arguments.repetitions, sizes=tuple(map(int, arguments.bags.split(","))), training=training
    )
    instances = load_instances(arguments.data)
    return [
        Configuration(TASKS[task], SETUPS[model], instances, protocol, arguments.device)
        for model in arguments.models.split(",")
        for task in arguments.tasks.split(",")
    ]


def compute(arguments: argparse.Namespace) -> list[Row]:
    store = JsonStore(Path(arguments.out))
    specs = [MethodSpec.parse(text) for text in arguments.methods.split(",")]
    rows = []
    for configuration in configurations(arguments):
        started = time.perf_counter()
        rows += run_configuration(configuration, specs, store)
        print(f"{configuration.name}: {time.perf_counter() - started:.1f} s", flush=True)
    return rows


def in_processes(arguments: argparse.Namespace) -> None:
    """One process for each model: kernels of small models leave most of a GPU idle."""
    base = [sys.executable, *sys.argv]
    running = [subprocess.Popen([*base, "--models", m, "--alone"]) for m in arguments.models.split(",")]  # noqa: S603
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"a process failed: {codes}")


def adopt(arguments: argparse.Namespace) -> None:
    """Rows from JSON to Parquet."""
    folder = Path(arguments.out)
    for configuration in configurations(arguments):
        rows = JsonStore(folder).results(configuration)
        if rows:
            Store(folder).save_results(configuration, rows)
            print(f"{configuration.name}: {len(rows)} rows")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--bags", default="2000,500,1000")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS))
    parser.add_argument("--models", default=",".join(PAPER_MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--alone", action="store_true", help="all in this process")
    parser.add_argument("--adopt", action="store_true", help="only turn rows into Parquet")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    started = time.perf_counter()
    if arguments.adopt:
        adopt(arguments)
        return
    if not arguments.alone:
        in_processes(arguments)
    rows = compute(arguments)
    if not arguments.alone:
        print(as_text(summarise(rows)))
        name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
        print(
            f"\nThe whole table: {time.perf_counter() - started:.0f} s on {name}, torch {torch.__version__}."
        )


if __name__ == "__main__":
    main()
