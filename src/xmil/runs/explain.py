"""A run of `explain` over a cohort: a folder that fills slide by slide and goes on where it stopped.

run.json, slides.csv, failures.csv
slides/<slide_id>.parquet   one file per slide, by atomic rename
summary/                    see `xmil.runs.summary`
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError, XmilError
from xmil.core.runfiles import SLIDES, RunFolder, file_digest, write_table
from xmil.core.storage import read_provenance
from xmil.data.cases import Case
from xmil.data.encoder_names import encoder_warning
from xmil.models import MILModel
from xmil.models.base import ModelSpec
from xmil.runs.cautions import Missing, seen_warning
from xmil.runs.ensemble import bins_warning, shared_spec
from xmil.runs.explainer import Explained, ExplainJob, file_provenance, make_explainer, slide_file
from xmil.runs.rows import Row, columns, slide_row, source_of
from xmil.runs.settings import ExplainSettings
from xmil.runs.workers.pool import Workers, process

LOOKING = 16  # threads that look for slides done earlier: they wait for the disk
AT_A_TIME = 10_000  # slides they are given: a million waiting answers would fill memory
RESTING = 20  # times as long as the tables took to write, they are left alone


@dataclass
class ExplainTally:
    """What a run did: slides explained now, found done, and failed with the reason; their rows."""

    explained: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    encoders: list[str | None] = field(default_factory=list)


@dataclass(frozen=True)
class ExplainRun:
    """A run's folder, models and settings."""

    out: Path
    paths: tuple[Path, ...]
    models: Sequence[MILModel]
    settings: ExplainSettings
    features: Path
    cohort: Path | None = None
    device: str = "cpu"
    memory: int = 1 << 30
    missing: Missing = field(default_factory=Missing)

    @property
    def spec(self) -> ModelSpec:
        """What the models have in common."""
        return shared_spec([model.spec for model in self.models])

    @property
    def folder(self) -> RunFolder:
        """The folder, known by the settings and the models' weights."""
        digests = [file_digest(path) for path in self.paths]
        return RunFolder(self.out, "explain", {**self.settings.as_dict(), "models": digests})

    def about(self) -> dict[str, Any]:
        """What run.json says beside the settings."""
        specs = [asdict(model.spec) for model in self.models]
        models = [
            {"path": str(path), "digest": file_digest(path), "spec": spec}
            for path, spec in zip(self.paths, specs, strict=True)
        ]
        return {
            "model": {**models[0], "spec": asdict(self.spec)},
            "models": models,
            "class_names": specs[0]["class_names"],
            "task": specs[0]["task"],
            "methods": list(self.settings.methods),
            "targets": list(self.settings.targets),
            "features": str(self.features.resolve()),
            "cohort": None if self.cohort is None else str(self.cohort.resolve()),
            "seed": self.settings.seed,
            **self.missing.as_dict(),
        }

    def explain(
        self,
        cases: Sequence[Case],
        *,
        engine: Workers | None = None,
        restart: bool = False,
        on_case: Callable[[], None] = lambda: None,
    ) -> ExplainTally:
        """Explain the cases that are not done; one that fails is recorded and the rest goes on."""
        folder = self.folder
        job = ExplainJob(self.paths, self.settings, self.out, folder.fingerprint, self.device, self.memory)
        with folder.opened(self.about(), folders=("slides",), restart=restart):
            known = _seconds(self.out / SLIDES)
            tally = ExplainTally()
            with _tables(folder, tally, cases) as save:
                waiting = list(self._waiting(job, cases, tally, known, on_case))
                for outcome in process(waiting, partial(make_explainer, job), engine):
                    _note(tally, outcome.item, outcome.result, outcome.error)
                    on_case()
                    save()
            return tally

    def warnings(self, tally: ExplainTally, cases: Sequence[Case]) -> list[str]:
        """Sentences on encoders, time bins, slides that are missing and cases of the training."""
        every = (
            seen_warning(self.paths, cases),
            encoder_warning(self.spec.encoder, tally.encoders),
            bins_warning([model.spec for model in self.models]) if self.settings.asks_bins else None,
            self.missing.warning(),
        )
        return [warning for warning in every if warning is not None]

    def _waiting(
        self,
        job: ExplainJob,
        cases: Sequence[Case],
        tally: ExplainTally,
        known: dict[str, float],
        on_case: Callable[[], None],
    ) -> Iterator[Case]:
        """The cases that are not done; rows of the others go into the tally."""
        with ThreadPoolExecutor(LOOKING) as threads:
            for start in range(0, len(cases), AT_A_TIME):
                some = cases[start : start + AT_A_TIME]
                looked = threads.map(lambda case: self._done(job, case, known), some)
                for case, rows in zip(some, looked, strict=True):
                    if rows is None:
                        yield case
                        continue
                    tally.found += case.slides
                    tally.rows |= {row["slide_id"]: row for row in rows}
                    on_case()

    def _done(self, job: ExplainJob, case: Case, known: dict[str, float]) -> list[Row] | None:
        """The rows of a case whose files are all there, of these settings and of these feature files."""
        try:
            found = [read_provenance(slide_file(self.out, slide)) for slide in case.slides]
            wanted = [file_provenance(job, case, source_of(path)) for path in case.paths]
            if not all(_made_of(case, *pair) for pair in zip(found, wanted, strict=True)):
                return None
            logits = [self._logits(header) for header, _ in found]
        except (FileError, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
            return None  # not there, or damaged: it is explained again
        spec = vars(self.spec)
        return [
            slide_row(case, i, logits=logits[i], spec=spec, n=n, seconds=known.get(case.slides[i]))
            for i, (_, n) in enumerate(found)
        ]

    def _logits(self, header: dict[str, Any]) -> Any:
        """The logits that a slide's file holds: the model's, or each model's."""
        if len(self.models) > 1:
            return header["provenance"]["logits"]
        return next(iter(header["columns"].values()))["logits"]


def _made_of(case: Case, found: tuple[dict[str, Any], int], wanted: dict[str, Any]) -> bool:
    """Whether a file was made from what would be used again."""
    stored = found[0].get("provenance", {})
    together = stored.get("case", {"slides": list(case.slides[:1])})["slides"] == list(case.slides)
    return together and all(stored.get(key) == value for key, value in wanted.items())


def _note(tally: ExplainTally, case: Case, done: Explained | None, error: str | None) -> None:
    if error is not None or done is None:
        tally.failed |= dict.fromkeys(case.slides, error or "no result")
        return
    tally.explained += case.slides
    tally.rows |= {row["slide_id"]: row for row in done.rows}
    tally.encoders.append(done.encoder)


@contextmanager
def _tables(folder: RunFolder, tally: ExplainTally, cases: Sequence[Case]) -> Iterator[Callable[[], None]]:
    """Keep the run's tables up to date, now and then; and at the end, whatever ends the run."""
    rest = time.monotonic() + 5.0

    def save(*, now: bool = False) -> None:
        nonlocal rest
        if now or time.monotonic() >= rest:
            start = time.monotonic()
            write_slides(folder.path / SLIDES, tally.rows, cases)
            folder.write_failures(tally.failed)
            rest = time.monotonic() + max(5.0, RESTING * (time.monotonic() - start))

    try:
        yield save
    except BaseException:  # a full disk, an interruption: say what is done, if the disk lets us
        with suppress(XmilError):
            save(now=True)
        raise
    save(now=True)


def write_slides(path: Path, rows: dict[str, Row], cases: Sequence[Case]) -> None:
    """slides.csv in the cohort's order."""
    ordered = [rows[slide] for case in cases for slide in case.slides if slide in rows]
    names = columns(ordered)
    write_table(path, names, ([row.get(name) for name in names] for row in ordered))


def _seconds(path: Path) -> dict[str, float]:
    """The times of slides explained earlier."""
    with suppress(OSError, ValueError, csv.Error), path.open(newline="", encoding="utf-8") as stream:
        return {
            row["slide_id"]: float(row["seconds"]) for row in csv.DictReader(stream) if row.get("seconds")
        }
    return {}
