"""A worker that explains cases: reads their bags, runs every model, writes one Parquet for each slide."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import Bag
from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.core.identity import identity
from xmil.core.run import pairs_file
from xmil.core.runfiles import make_folder
from xmil.core.storage import write_explanations
from xmil.data.bags import open_bag
from xmil.data.cases import Case, join_bags, named
from xmil.data.siblings import is_plain
from xmil.methods import explain_targets, interactions, memory_budget
from xmil.runs.cohort_run import stopping
from xmil.runs.ensemble import Ensemble, average, predicted_by
from xmil.runs.inputs import NOTHING, Unsaid
from xmil.runs.rows import Row, slide_row
from xmil.runs.settings import PREDICTED, ExplainSettings
from xmil.runs.summary import SlideSummary, summarise_slide
from xmil.runs.workers.pool import Stages

LEAST_MEMORY = 1 << 24  # below this a smaller budget no longer helps


@dataclass(frozen=True)
class ExplainJob:
    """What a worker needs to know: the models' files, the settings, where results go, the memory to use."""

    paths: tuple[Path, ...]
    digests: tuple[str, ...]
    settings: ExplainSettings
    out: Path
    fingerprint: str
    device: str = "cpu"
    memory: int = 1 << 30
    full_digests: bool = False
    unsaid: Unsaid = NOTHING


@dataclass(frozen=True)
class Read:
    """A case's slides, read: one bag, the slides' own bags, and their rows in it."""

    bag: Bag
    parts: list[Bag]
    rows: list[slice]
    sources: list[str]
    seconds: float


@dataclass(frozen=True)
class Explained:
    """What a worker did with a case: a row per slide, and what each adds to the run's summary."""

    rows: list[Row]
    summaries: dict[str, list[SlideSummary]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unwritten:
    """A case that is explained; its files are still to be written."""

    case: Case
    read: Read
    explanations: list[Explanation]
    logits: list[list[float]]
    seconds: float


def make_explainer(job: ExplainJob, loaded: Ensemble | None = None) -> Stages[Case, Explained]:
    """The worker of a job, with the models that are loaded, or with a copy of its own from the same files."""
    models = loaded or Ensemble.load(job.paths, job.device, digests=job.digests, unsaid=job.unsaid)
    explainer = Explainer(job, models)
    return Stages(explainer.read, explainer.work, explainer.write)


class Explainer:
    """Explains one case after another with the same models."""

    def __init__(self, job: ExplainJob, ensemble: Ensemble) -> None:
        self.job, self.models, self.spec = job, ensemble.models, ensemble.spec
        self._empty = pinned_empty if job.device.startswith("cuda") else np.empty

    def read(self, case: Case) -> Read:
        """The bags of a case; runs ahead in a thread."""
        start = time.perf_counter()
        for slide in case.slides:
            if not is_plain(slide):
                raise InputError(f"The slide_id {slide!r} cannot name a file; rename the slide.")
        full = self.job.full_digests
        for path in case.paths:
            read_ahead(path)
        sources = [identity(path, full=full, times=True) for path in case.paths]
        options, pairs = self.job.settings.reading, zip(case.slides, case.paths, strict=True)
        headers = [(open_bag(p, **case.reading(i, options)), s) for i, (s, p) in enumerate(pairs)]
        alone = len(headers) == 1  # slides of a case are joined in float32
        parts = [named(h.read_stored(self._empty) if alone else h.read(), slide) for h, slide in headers]
        bag, rows = join_bags(parts, name=case.name)
        if len(parts) > 1:  # views: the features are in memory once
            parts = [replace(part, features=bag.features[r]) for part, r in zip(parts, rows, strict=True)]
        return Read(bag, parts, rows, sources, time.perf_counter() - start)

    def work(self, case: Case, read: Read) -> Unwritten:
        """Explain a case."""
        start = time.perf_counter()
        explanations, logits = self._within_memory(case, read.bag)
        if self.job.settings.interactions:
            self._write_pairs(case, read.bag, explanations)
        seconds = (read.seconds + time.perf_counter() - start) / len(read.parts)
        return Unwritten(case, read, explanations, logits, seconds)

    def write(self, made: Unwritten) -> Explained:
        """Write the files of a case's slides, while the next case is explained."""
        summaries = {slide: self._write(made, place) for place, slide in enumerate(made.case.slides)}
        said = {"warnings": warnings_of(made.explanations)}
        about: dict[str, Any] = {"logits": made.logits, "spec": vars(self.spec), "seconds": made.seconds}
        parts = enumerate(made.read.parts)
        rows = [{**slide_row(made.case, i, n=len(part), **about), **said} for i, part in parts]
        return Explained(rows, summaries)

    def explain(self, case: Case, bag: Bag) -> tuple[list[Explanation], list[list[float]]]:
        """Every method and target of a bag, over the models of an ensemble the mean; each model's logits."""
        settings, predicted = self.job.settings, None
        if len(self.models) > 1 and PREDICTED in settings.targets:
            predicted = predicted_by(self.models, bag)
        targets = settings.targets_of(case, self.spec, predicted)
        found: list[Explanation] = []
        logits: list[list[float]] = []
        for method in settings.methods:
            params = settings.method_params(method, case.name)
            each = [
                explain_targets(m, bag, targets, method=method, output=settings.output, **params)
                for m in self.models
            ]
            logits = logits or [[float(value) for value in own[0].logits] for own in each]
            pairs = zip(*each, strict=True)
            found += each[0] if len(each) == 1 else [average(same, self.spec) for same in pairs]
        return list({e.column: e for e in found}.values()), logits  # the predicted class may be the label

    def _within_memory(self, case: Case, bag: Bag) -> tuple[list[Explanation], list[list[float]]]:
        """Explain with batches that fit the budget; where memory runs out, with smaller ones."""
        budget = self.job.memory
        while True:
            try:
                with memory_budget(budget):
                    return self.explain(case, bag)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            budget //= 4
            if budget < LEAST_MEMORY:
                raise InputError(
                    f"{case.name}: memory ran out for {len(bag):,} instances on {self.job.device}; use a "
                    "device with more, fewer --workers, or methods that need less."
                )
            if self.job.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def _write(self, made: Unwritten, place: int) -> list[SlideSummary]:
        case, read, explanations, logits = made.case, made.read, made.explanations, made.logits
        part, rows = read.parts[place], read.rows[place]
        own = explanations if len(read.parts) == 1 else [slide_share(e, part, rows) for e in explanations]
        about = {**file_provenance(self.job, case), "source": read.sources[place]}
        if len(logits) > 1:
            about["logits"] = logits  # of each model: the risk of an ensemble is the mean of risks
        if len(read.parts) > 1:
            about["case"] = {"name": case.name, "slides": list(case.slides), "instances": len(read.bag)}
        path = slide_file(self.job.out, case.slides[place])
        stopping(partial(write_explanations, own, path, provenance=about))
        return [summarise_slide(e) for e in own if len(e)]

    def _write_pairs(self, case: Case, bag: Bag, explanations: Sequence[Explanation]) -> None:
        """Interactions of each target, before the slide's file: that one says the slide is done."""
        settings = self.job.settings
        for target in dict.fromkeys(e.target for e in explanations):
            with memory_budget(self.job.memory):
                found = interactions(
                    self.models[0],
                    bag,
                    target=target,
                    top=settings.interactions,
                    output=settings.output,
                    seed=[settings.seed, crc32(case.name.encode())],
                )
            path = pairs_file(self.job.out, case.name, target)
            stopping(partial(make_folder, path.parent))
            stopping(partial(found.save, path))


def pinned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array in memory that a GPU copies from by itself."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return np.asarray(torch.empty(shape, dtype=kind, pin_memory=True).numpy())


def read_ahead(path: Path) -> None:
    """Have the system fetch a file while its head is looked at, where it takes such advice."""
    if hasattr(os, "posix_fadvise") and path.is_file():  # a pipe would wait for its other end
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def slide_file(out: Path, slide: str) -> Path:
    """The file of a slide's explanations."""
    return out / "slides" / f"{slide}.parquet"


def warnings_of(explanations: Sequence[Explanation]) -> str | None:
    """The sentences of a slide's explanations in one cell, each once."""
    said = dict.fromkeys(text for e in explanations for text in e.warnings)
    return " ".join(said) or None


def file_provenance(job: ExplainJob, case: Case) -> dict[str, Any]:
    """What a slide's file says of its making: it is done when this is what would be written again."""
    asked = [f"label={case.label}" if text == "label" else text for text in job.settings.targets]
    about = {"fingerprint": job.fingerprint, "targets": asked, **({"mpp": case.mpp} if case.mpp else {})}
    return dict(json.loads(json.dumps(about, default=str)))


def out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch or NumPy says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def slide_share(e: Explanation, part: Bag, rows: slice) -> Explanation:
    """The scores of one slide of a case, with the case's account."""
    return replace(e.take(rows, part.patches), bag=part.slide_id)
