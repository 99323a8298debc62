"""All studies over the processes of one machine: `python -m benchmarks.beyond.everything --help`.

    python -m benchmarks.beyond.everything --digits FOLDER --colon FILE --out DIR --device cuda --workers 13

Models train in processes of their own (`--trainers`), and each is measured as soon as it is there. Rows go to
DIR/rows.jsonl as they come; DIR/summary.json is made of what there is, also after `--minutes` are over.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.beyond import units
from benchmarks.beyond.summary import summary
from benchmarks.beyond.units import Row, Scope

COLON = [(task, model) for task in ("epithelial", "balance") for model in ("attnmil", "transmil")]
FEW_RUNS = 5  # of TransMIL on colon, which takes the longest


def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out
    work: Path = arguments.work or out
    (work / "models").mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    scope = Scope(
        str(unpacked_digits(arguments.digits, work)), unpacked_colon(arguments.colon, work), work / "models",
        arguments.device, arguments.repetitions, arguments.bags, arguments.quick,
    )  # fmt: skip
    runner = _Runner(scope, arguments.workers, arguments.trainers, arguments.minutes)
    with (out / "rows.jsonl").open("a") as stream:
        runner.go(lambda row: print(json.dumps(row), file=stream, flush=True))
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    found = json.dumps(summary(rows), indent=1)
    (out / "summary.json").write_text(found)
    print(found, flush=True)
    for process in active_children():  # what still runs when the minutes are over is not waited for
        process.terminate()
    os._exit(0)


class _Runner:
    """Trainings first; what follows from each goes to the workers as soon as it is done."""

    def __init__(self, scope: Scope, workers: int, trainers: int, minutes: float) -> None:
        spawn = get_context("spawn")
        self.scope, self.until = scope, time.monotonic() + 60 * minutes
        self.started = time.monotonic()
        self.trainers, self.workers = (
            ProcessPoolExecutor(count, mp_context=spawn, initializer=partial(torch.set_num_threads, 1))
            for count in (trainers, workers)
        )
        self.open: dict[Future[Row], tuple[Row, list[Callable[[], None]]]] = {}

    def go(self, keep: Callable[[Row], None]) -> None:
        """All units, or those that are done in time."""
        self._submit_all()
        while self.open and (left := self.until - time.monotonic()) > 0:
            done, _ = wait(self.open, timeout=left, return_when=FIRST_COMPLETED)
            for future in done:
                about, then = self.open.pop(future)
                row = {**about, **_result(future), "at": round(time.monotonic() - self.started, 1)}
                print(row["study"], row.get("model", ""), row.get("task", row.get("course", "")),
                      row.get("repetition", ""), row.get("error", ""), row["at"], flush=True)  # fmt: skip
                keep(row)
                for step in then if "error" not in row else []:
                    step()

    def _submit_all(self) -> None:
        scope = self.scope
        for name, measure in units.AFTER_COURSE.items():
            about = {"study": "train", "course": name}
            self._train(partial(units.train_course, scope, name), about, partial(self._course, name, measure))
        for model, task in units.TABLE:
            about = {"study": "train", "model": model, "task": task}
            self._train(
                partial(units.train_table, scope, model, task), about, partial(self._column, model, task)
            )
        for run in range(scope.repetitions):
            for task, model in COLON if run < FEW_RUNS else COLON[::2]:
                about = {"study": "colon_run", "model": model, "task": task, "repetition": run}
                self._measure(partial(units.colon_run, scope, model, task, run), about)

    def _column(self, model: str, task: str) -> None:
        for measure in units.AFTER[model, task]:
            for r in range(self.scope.repetitions):
                about = {"study": measure.__name__, "model": model, "task": task, "repetition": r}
                self._measure(partial(measure, self.scope, model, task, r), about)

    def _course(self, name: str, measure: Callable[..., Row]) -> None:
        for r in range(self.scope.repetitions):
            about = {"study": measure.__name__, "course": name, "repetition": r}
            self._measure(partial(measure, self.scope, name, r), about)

    def _train(self, job: Callable[[], Row], about: Row, then: Callable[[], None]) -> None:
        self.open[self.trainers.submit(job)] = (about, [then])

    def _measure(self, job: Callable[[], Row], about: Row) -> None:
        self.open[self.workers.submit(job)] = (about, [])


def _result(future: Future[Row]) -> Row:
    error = future.exception()
    return {"error": f"{type(error).__name__}: {error}"} if error is not None else future.result()


def unpacked_digits(folder: Path, out: Path) -> Path:
    """The features of digits in half precision; eight bits a feature (`*8.npz`, x and scale) are unpacked."""
    packed = sorted(folder.glob("digits_*8.npz"))
    if not packed:
        return folder
    (out / "digits").mkdir(exist_ok=True)
    for path in packed:
        with np.load(path) as arrays:
            x = (arrays["x"] * arrays["scale"]).astype(np.float16)
            np.savez(out / "digits" / path.name.replace("8.npz", ".npz"), x=x, y=arrays["y"])
    return out / "digits"


def unpacked_colon(path: Path, out: Path) -> Path:
    """The features that `benchmarks.colon.features` wrote; eight bits a feature are unpacked."""
    with np.load(path) as arrays:
        found: dict[str, Any] = dict(arrays)
    if "scale" not in found:
        return path
    found["features"] = (found["features"] * found.pop("scale")).astype(np.float16)
    np.savez(out / "colon.npz", **found)
    return out / "colon.npz"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--digits", type=Path, required=True, help="folder of digits' features")
    parser.add_argument("--colon", type=Path, required=True, help="features of the colon nuclei")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="for models and unpacked features; the same by default")
    parser.add_argument("--device", default="cpu", help="where models of digits are trained")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--trainers", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--bags", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--quick", action="store_true", help="hardly any training, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
