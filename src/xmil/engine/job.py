"""A folder that fills slide by slide, goes on where it stopped, and says which slides failed.

run.json         command, settings, versions
failures.csv     slide_id, error; without it, nothing failed
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError, StopError, WriteError
from xmil.core.provenance import provenance
from xmil.core.storage import write_text
from xmil.engine.pool import Engine, MakeWorker, process


@dataclass
class Results:
    """Slides done now with what the worker gave, found done, and failed with the reason."""

    done: dict[str, Any] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One command over slides; `settings` must stay the same for a folder to go on, `about` may change."""

    folder: Path
    kind: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, *, restart: bool = False) -> None:
        """Make the folder and write run.json; a folder that holds something else is refused."""
        if not restart:
            self._check()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be made ({error.strerror}).") from None
        record = {"kind": self.kind, "settings": dict(self.settings), **self.about, **provenance()}
        write_text(self.folder / "run.json", json.dumps(record, indent=2, default=str) + "\n")

    def run(
        self,
        slides: Mapping[str, Any],
        make_worker: MakeWorker[tuple[str, Any], Any],
        *,
        engine: Engine | None = None,
        output: Callable[[str], Path],
        restart: bool = False,
        on_slide: Callable[[], None] = lambda: None,
    ) -> Results:
        """Work on the slides whose output is not there; a failure is recorded and the rest goes on."""
        if restart:
            for name in slides:
                output(name).unlink(missing_ok=True)
        results = Results()
        waiting: list[tuple[str, Any]] = []
        for name, item in slides.items():
            if output(name).is_file():
                results.found.append(name)
                on_slide()
            else:
                waiting.append((name, item))
        try:
            self._work(waiting, make_worker, engine, results, on_slide)
        finally:
            self._write_failures(results.failed)
        return results

    def _work(
        self,
        waiting: Iterable[tuple[str, Any]],
        make_worker: MakeWorker[tuple[str, Any], Any],
        engine: Engine | None,
        results: Results,
        on_slide: Callable[[], None],
    ) -> None:
        for outcome in process(waiting, make_worker, engine):
            name = outcome.item[0]
            if outcome.error is None:
                results.done[name] = outcome.result
            else:
                results.failed[name] = outcome.error
            on_slide()

    def _check(self) -> None:
        path = self.folder / "run.json"
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            kind, settings = known["kind"], dict(known["settings"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{path}: damaged; remove it, or begin anew with --restart.") from None
        wanted = json.loads(json.dumps(dict(self.settings), default=str))
        differ = [key for key in {**settings, **wanted} if settings.get(key) != wanted.get(key)]
        if kind != self.kind or differ:
            what = f"other settings ({', '.join(sorted(differ))})" if kind == self.kind else repr(kind)
            raise InputError(
                f"{self.folder}: holds a run of {what}; choose another --out, or begin anew with --restart."
            )

    def _write_failures(self, failed: Mapping[str, str]) -> None:
        path = self.folder / "failures.csv"
        if not failed:
            path.unlink(missing_ok=True)
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["slide_id", "error"])
        writer.writerows(sorted(failed.items()))
        write_text(path, text.getvalue())


def stopping(work: Callable[[], Any]) -> Any:
    """Do the work; where the disk refuses, no other slide can be written either, so the run stops."""
    try:
        return work()
    except WriteError as error:
        raise StopError(str(error)) from None
