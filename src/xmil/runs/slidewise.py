"""A command over slides: a folder that fills file by file and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from xmil.core.errors import InputError, StopError, WriteError
from xmil.core.runfiles import RUN, RunFolder, read_run
from xmil.runs.workers.pool import MakeWorker, Workers, process

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Results:
    """Slides done now with what the worker gave, found done, and failed with the reason."""

    done: dict[str, Any] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def work_on_slides(
    folder: RunFolder,
    slides: Mapping[str, Item],
    make_worker: MakeWorker[tuple[str, Item], Any],
    *,
    output: Callable[[str], Path],
    about: Mapping[str, Any] | None = None,
    folders: Sequence[str] = (),
    engine: Workers | None = None,
    restart: bool = False,
    on_slide: Callable[[], None] = lambda: None,
    current: Callable[[str], bool] = lambda _: True,
    refused: Mapping[str, str] | None = None,
) -> Results:
    """Work on the slides whose output is not there or not `current`; after a failure the rest goes on.

    `refused` are slides that cannot be worked on, with the reason: failures from the start.
    `restart` removes the outputs of these slides first, and nothing else: the folder may hold other things.
    """
    if restart:
        _forget(folder, [output(name) for name in slides])
    with folder.opened(about or {}, folders=folders):
        results = Results(
            failed=dict(refused or {}),
            found=[name for name in slides if output(name).is_file() and current(name)],
        )
        for _ in results.found:
            on_slide()
        done = set(results.found)
        waiting = [(name, item) for name, item in slides.items() if name not in done]
        try:
            for outcome in process(waiting, make_worker, engine):
                _record(outcome.item[0], outcome.result, outcome.error, results)
                on_slide()
        finally:
            folder.write_failures(dict(sorted(results.failed.items())))
    return results


def stopping(work: Callable[[], Result]) -> Result:
    """Do the work; where the disk refuses, no other slide can be written either, so the run stops."""
    try:
        return work()
    except WriteError as error:
        raise StopError(str(error)) from None


def _record(name: str, result: Any, error: str | None, results: Results) -> None:
    if error is None:
        results.done[name] = result
    else:
        results.failed[name] = error


def _forget(folder: RunFolder, outputs: Sequence[Path]) -> None:
    """Remove outputs and the record of the run they are of; a folder of another command is refused."""
    known = read_run(folder.path / RUN)
    if known is not None and known.get("kind") != folder.kind:
        raise InputError(f"{folder.path}: holds a run of `xmil {known.get('kind')}`; choose another --out.")
    for path in (*outputs, folder.path / RUN):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(f"{path}: cannot be removed ({error.strerror}).") from None
