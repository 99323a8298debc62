"""A run of the benchmark from names: what `xmil bench` and `python -m xmil.bench` share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmil.bench.contestants import PAPER, model_entry
from xmil.bench.entries import MethodEntry, method_entry
from xmil.bench.folder import Folder
from xmil.bench.runner import Referee
from xmil.bench.suites import FULL, METHODS, QUICK_PLAN, SUITES, Plan, Suite, suite_named
from xmil.core.absence import not_made
from xmil.core.errors import FileError, InputError
from xmil.core.storage import write_text

QUICK_MODELS = ("attnmil",)
EVERY = "all"


@dataclass(frozen=True)
class Asked:
    """What a caller asks for: names of suites, methods, models, tasks; what is empty is the suites' own."""

    suites: tuple[str, ...]
    methods: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    only: bool = False  # the methods asked for and the controls, without those of the package
    quick: bool = False
    tasks: tuple[str, ...] = ()
    repetitions: int | None = None
    seed: int = 0
    data: str = "digits"
    encoder: str = "pixels"
    device: str = "cpu"
    minutes: float | None = None
    tissue: tuple[tuple[str, Any], ...] = ()

    def plan(self) -> Plan:
        """The plan of the suites."""
        base = QUICK_PLAN if self.quick else FULL
        changes: dict[str, Any] = {
            "seed": self.seed,
            **({"repetitions": self.repetitions} if self.repetitions else {}),
        }
        return replace(
            base,
            protocol=replace(base.protocol, **changes),
            data=self.data,
            encoder=self.encoder,
            tasks=self.tasks,
            fold_runs=self.repetitions or base.fold_runs,
            tissue=dict(self.tissue),
        )

    def chosen_suites(self) -> list[Suite]:
        """The suites by their names; `all` is every one."""
        names = list(SUITES) if EVERY in self.suites or not self.suites else list(dict.fromkeys(self.suites))
        return [suite_named(name) for name in names]

    def entries(self, suite: Suite) -> list[MethodEntry]:
        """The rows of a suite: its controls, the package's methods, and those asked for."""
        ours = ("random",) if self.only else METHODS
        names = dict.fromkeys([*suite.controls, *ours, *self.methods])
        return [method_entry(name) for name in names]

    def model_names(self) -> list[str]:
        """The models asked for beside, or instead of, the plan's."""
        return list(dict.fromkeys(self.models or (QUICK_MODELS if self.quick else PAPER)))

    def settings(self) -> dict[str, Any]:
        """What the results page says of the run."""
        name = "quick" if self.quick else "Table 1"
        return {**vars(self), "protocol_name": name, "plan": self.plan().as_dict()}


def measure(asked: Asked, out: Path, say: Callable[[str], None]) -> tuple[bool, list[str]]:
    """Fill the folder; whether all was done, and why suites were left out."""
    write_settings(out, asked)
    until = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    models = [model_entry(name) for name in asked.model_names()]
    suites, left_out = asked.chosen_suites(), []
    for suite in suites:
        referee = Referee(
            asked.plan(), asked.entries(suite), models, Folder(out), asked.device, say=say, until=until
        )
        problems = suite.problems(referee.plan)
        if not problems:
            left_out.append(f"{suite.name}: {suite.absent}")
        elif not referee.run(suite):
            return False, left_out
    if len(left_out) == len(suites):
        raise InputError(f"There is nothing to measure. {' '.join(left_out)}")
    return True, left_out


def export(asked: Asked, out: Path, folder: Path, say: Callable[[str], None]) -> list[Path]:
    """Write the bags and models of the suites for programs elsewhere; models are trained where need be."""
    models, found = [model_entry(name) for name in asked.model_names()], []
    for suite in asked.chosen_suites():
        referee = Referee(asked.plan(), (), models, Folder(out), asked.device, say=say)
        found += referee.export(suite, folder)
    return found


def write_settings(out: Path, asked: Asked) -> None:
    """run.json: what was asked for."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(not_made(out, error)) from None
    write_text(out / "run.json", json.dumps(asked.settings(), indent=1, default=str) + "\n")


def read_settings(out: Path) -> dict[str, Any]:
    """What a folder's last call asked for; empty where it cannot be told."""
    try:
        return dict(json.loads((out / "run.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def known_tasks(suites: Sequence[Suite], plan: Plan) -> list[str]:
    """Names of the problems that the suites have under a plan."""
    every = replace(plan, tasks=())
    return sorted({problem.name for suite in suites for problem in suite.problems(every)})
