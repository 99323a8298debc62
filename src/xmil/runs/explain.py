"""`explain_slides`: every slide of a cohort explained, into a folder that goes on where it stopped.

run.json, slides.csv, failures.csv
slides/<slide_id>.parquet   one file per slide, by atomic rename
interactions/<slide_id>.<target>.parquet    with --interactions
summary/                    see `xmil.runs.summary`
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError, InputError, UnknownNameError
from xmil.core.identity import unchanged
from xmil.core.names import counted, listed
from xmil.core.run import Run
from xmil.core.runfiles import SLIDES, read_rows, read_run
from xmil.core.storage import read_provenance
from xmil.data.cases import Case
from xmil.models.base import ModelSpec
from xmil.runs.cautions import Missing, made_otherwise, seen_warning
from xmil.runs.cohort_run import CohortRun, TableRow, Tally, as_workers, in_process
from xmil.runs.ensemble import (
    AUTO,
    Ensemble,
    StrPath,
    bins_warning,
    ensemble_warning,
    model_paths,
    with_background,
)
from xmil.runs.explainer import Explained, ExplainJob, file_provenance, make_explainer, slide_file
from xmil.runs.inputs import Inputs, Unsaid, named, reading_of, task_cases
from xmil.runs.listener import Listener
from xmil.runs.rows import columns, slide_row
from xmil.runs.settings import LABEL, ExplainSettings, with_contexts, with_vectors
from xmil.runs.summary import MANY, SlideSummary, summarise_run
from xmil.runs.workers.pool import MakeWorker, Workers, checked_device


def explain_slides(
    model: StrPath | Sequence[StrPath],
    features: StrPath,
    *,
    out: StrPath,
    methods: str | Iterable[str] = "lrp",
    target: str | int | Iterable[str] = "predicted",
    cohort: StrPath | None = None,
    label: str = "",
    time: str = "time",
    event: str = "event",
    split: str | Iterable[str] = (),
    by: str = "slide",
    output: str | None = None,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    contexts: int = 0,
    keep: float = 0.5,
    interactions: int = 0,
    save_vectors: bool = False,
    mpp: float | None = None,
    patch_size: int | None = None,
    format: str = "auto",  # noqa: A002 - the word users know
    class_names: str | Iterable[str] = (),
    device: str = "cpu",
    memory: int = 10**9,
    background: StrPath = AUTO,
    seed: int = 0,
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    full_digests: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Explain every slide of a folder of feature files, or one file, into the folder `out`.

    The same as `xmil explain`, with the same files. `params` holds a method's own parameters by its name, as
    {"ig": {"steps": 100}}. With `contexts` the scores of lrp, ig and gxi are means over so many sub-bags,
    each of which keeps the share `keep`; `interactions` asks for the pairs among so many of the strongest
    patches; `save_vectors` keeps lrp's relevance (n, d) of each feature in the slides' files. A folder that a
    run was stopped in is filled further. `mpp`, `patch_size`, `format` and `class_names` say what files do
    not; a column `mpp` of the cohort does so for each slide. A model may be a function of yours that builds
    it, as "mine:build" or "nets/mine.py:build". `background` is for models that have none of their own:
    "auto", "none", or a folder of features whose mean patch lrp measures against.
    """
    hear, chosen = listener or Listener(), as_workers(workers)
    asked = (str(target),) if isinstance(target, int) else tuple(listed(target))
    reading = reading_of(mpp, patch_size, format)
    chosen_methods = tuple(listed(methods))
    own = with_contexts(params or {}, chosen_methods, contexts, keep)
    own = with_vectors(own, chosen_methods) if save_vectors else own
    settings = ExplainSettings(chosen_methods, asked, output or None, own, by, seed, reading, interactions)
    if LABEL in settings.targets and cohort is None:
        raise InputError("--target label needs a --cohort with the labels.")
    where = device if chosen.kind == "ray" else checked_device(device)
    unsaid = Unsaid(tuple(listed(class_names)) or None, Path(features), reading)
    models = Ensemble.load(model_paths(model), where if in_process(chosen) else "cpu", unsaid=unsaid)
    spec = _checked(settings, models)
    if interactions and len(models.models) > 1:
        raise InputError("--interactions is for one model; an ensemble has none in common.")
    table = None if cohort is None else Path(cohort)
    inputs = Inputs(Path(features), table, tuple(listed(split)), by, follow_links)
    inputs.check_apart(Path(out))
    cases, missing = task_cases(inputs, spec, label=label, time=time, event=event, say=hear.say)
    if "lrp" in chosen_methods:
        files = [path for case in cases for path in case.paths]
        models = with_background(
            models, background, files=files, out=Path(out), restart=restart, say=hear.say
        )
    run = ExplainRun(Path(out), models, settings, inputs, where, memory, missing, full_digests)
    before = read_run(run.out) or {}
    what = "slides" if by == "slide" else "cases"
    tally = run.go(cases, workers=chosen, restart=restart, listener=hear, what=what)
    if run.far:
        who = "1 slide stands" if len(run.far) == 1 else f"{len(run.far)} slides stand"
        hear.say(f"{who} out from the others: {named(run.far)} (summary/outliers.csv)")
    hear.say(f"{len(tally.done)} explained, {tally}. Written to {out}.")
    if (line := run.others(cases, before)) is not None:
        hear.say(line)
    return run.saved()


def _unread_warning(unread: Mapping[str, str]) -> str:
    """One sentence on slides whose files are damaged behind their heads, which say that they are done."""
    return (
        f"{counted(len(unread), 'slide')} left out of summary/, since the file in slides/ cannot be read: "
        f"{named(list(unread))}. Remove it and run the same command: the slide is explained again."
    )


def _checked(settings: ExplainSettings, models: Ensemble) -> ModelSpec:
    """What the models have in common, once each of them can do what the settings ask for."""
    try:
        for model in models.models:
            settings.check(model, models.spec)
    except UnknownNameError as error:
        warning = bins_warning(models.specs) if settings.asks_bins else None
        if warning is None:
            raise
        raise InputError(f"{error} Here {warning}") from None
    return models.spec


@dataclass(frozen=True)
class ExplainRun(CohortRun[Case, Explained]):
    """A run's folder, models and settings."""

    models: Ensemble
    chosen: ExplainSettings
    inputs: Inputs
    device: str = "cpu"
    memory: int = 1 << 30
    missing: Missing = field(default_factory=Missing)
    full_digests: bool = False
    far: list[str] = field(default_factory=list)  # slides that stand out from the others
    summed: dict[str, list[SlideSummary]] = field(default_factory=dict)  # of slides explained now
    kind = "explain"
    folders = ("slides",)
    verb = "explained"

    def settings(self) -> dict[str, Any]:
        """Methods, targets, parameters and the models' weights."""
        return {**self.chosen.as_dict(), "models": list(self.models.digests), **self.models.unsaid.as_dict()}

    def about(self) -> dict[str, Any]:
        """What run.json says beside the settings."""
        return {
            **self.models.about(),
            "methods": list(self.chosen.methods),
            "targets": list(self.chosen.targets),
            **self.inputs.as_dict(),
            "seed": self.chosen.seed,
            **self.missing.as_dict(),
        }

    @cached_property
    def job(self) -> ExplainJob:
        """What a worker needs to know."""
        models, fingerprint = self.models, self.folder.fingerprint
        return ExplainJob(
            models.paths, models.digests, self.chosen, self.out, fingerprint, self.device, self.memory,
            self.full_digests, models.unsaid,
        )  # fmt: skip

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        """Keep the background that the models were lent."""
        self.models.keep_background(self.out)

    def slides_of(self, item: Case) -> Sequence[str]:
        """The slides of a case."""
        return item.slides

    def make_worker(self, workers: Workers) -> MakeWorker[Case, Explained]:
        """Workers in other processes load the models from the files that were hashed here."""
        return partial(make_explainer, self.job, self.models if in_process(workers) else None)

    def rows_of(self, item: Case, result: Explained) -> list[TableRow]:  # noqa: ARG002 - the base's signature
        """A row per slide of the case; what its slides add to the summary is kept, unless they are many."""
        if len(self.summed) < MANY:
            self.summed.update(result.summaries)
        result.summaries.clear()
        return result.rows

    def header(self, rows: Sequence[TableRow]) -> list[str]:
        """Names first, outputs between, the rest last."""
        return columns(rows)

    def known(self, item: Case) -> Explained | None:
        """The rows of a case whose files are all there, of these settings and of these feature files."""
        try:
            stored = [read_provenance(slide_file(self.out, slide)) for slide in item.slides]
            if not all(self._made_of(item, i, header) for i, (header, _) in enumerate(stored)):
                return None
            return Explained([self._row(item, i, *header) for i, header in enumerate(stored)])
        except (FileError, OSError, ValueError, LookupError, TypeError, AttributeError, StopIteration):
            return None  # not there, or damaged: it is explained again

    def warnings(self, items: Sequence[Case], tally: Tally[Explained]) -> list[str]:
        """Sentences on encoders, time bins, slides that are missing and cases of the training."""
        models = self.models
        every = (
            seen_warning(models.paths, items),
            made_otherwise(models.spec, [case for case in items if case.slides[0] in tally.results]),
            bins_warning(models.specs) if self.chosen.asks_bins else None,
            ensemble_warning(models.specs, models.paths),
            self.missing.warning(),
        )
        return [warning for warning in every if warning is not None]

    def finish(self, items: Sequence[Case], tally: Tally[Explained], workers: Workers) -> Mapping[str, Any]:
        """The cohort at a glance; a warning where a slide's file, found done, cannot be read."""
        slides = [slide for case in items for slide in case.slides if slide in tally.rows]
        files = [slide_file(self.out, slide) for slide in slides]
        known = {slide_file(self.out, slide): found for slide, found in self.summed.items()}
        far, unread = summarise_run(self.out, files, workers=workers, known=known)
        self.far.extend(far)
        return {"warnings": [_unread_warning(unread)]} if unread else {}

    def others(self, items: Sequence[Case], before: Mapping[str, Any]) -> str | None:
        """A line on slides of the folder that are not among these, and what brings them back."""
        asked = {slide for case in items for slide in case.slides}
        left = sorted({path.stem for path in (self.out / "slides").glob("*.parquet")} - asked)
        if not left:
            return None
        now = self.inputs.as_dict()
        given = [f"--{key} {shlex.quote(str(before[key]))}" for key in now if before.get(key)]
        changed = any(before.get(key) != value for key, value in now.items())
        way = " ".join(given) if changed and given else "their --features, --cohort and --split"
        return (
            f"{self.out}: {counted(len(left), 'slide')} explained earlier not among these: {named(left, 3)}. "
            f"slides.csv and summary/ leave them out, their files are kept; the same command with {way} "
            "brings them back."
        )

    @cached_property
    def _seconds(self) -> dict[str, float]:
        """The times of slides explained earlier."""
        try:
            rows = read_rows(self.out / SLIDES)
            return {slide: float(row["seconds"]) for slide, row in rows.items() if row.get("seconds")}
        except (FileError, ValueError):
            return {}

    def _row(self, case: Case, place: int, header: dict[str, Any], n: int) -> TableRow:
        held = list(header["columns"].values())
        logits = header["provenance"]["logits"] if len(self.models.models) > 1 else held[0]["logits"]
        seconds = self._seconds.get(case.slides[place])
        row = slide_row(case, place, logits=logits, spec=vars(self.models.spec), n=n, seconds=seconds)
        said = dict.fromkeys(text for column in held for text in column.get("warnings", ()))
        return {**row, "warnings": " ".join(said) or None}

    def _made_of(self, case: Case, place: int, header: dict[str, Any]) -> bool:
        """Whether a file was made from what would be used again."""
        stored, wanted = header.get("provenance", {}), file_provenance(self.job, case)
        together = stored.get("case", {"slides": list(case.slides[:1])})["slides"] == list(case.slides)
        if not together or any(stored.get(key) != value for key, value in wanted.items()):
            return False
        return unchanged(case.paths[place], stored.get("source"), full=self.full_digests, times=True)
