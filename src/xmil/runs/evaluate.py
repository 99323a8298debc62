"""A faithfulness run over a cohort: a folder that fills slide by slide and goes on where it stopped.

run.json, slides.csv, failures.csv
slides/<slide_id>.parquet        explanations, as `xmil explain` writes them
results/<slide_id>.parquet       a row for each method and mode, curves included
certificates/<slide_id>.json     and .png
results.parquet, summary.*, statistics.csv, faithfulness.png
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from xmil.core.bag import Bag
from xmil.core.errors import InputError, StopError, WriteError
from xmil.core.runfiles import SLIDES, RunFolder, file_digest, write_json, write_table
from xmil.core.storage import write_atomically, write_explanations
from xmil.data.bags import read_bag
from xmil.data.cases import Case, join_bags, named
from xmil.data.siblings import is_plain
from xmil.evaluate.faithfulness import FaithfulnessSettings, Row, SlideResult, evaluate_slide
from xmil.evaluate.localisation import Truth
from xmil.models import load_model
from xmil.runs.explainer import slide_share
from xmil.runs.rows import columns, slide_row
from xmil.runs.workers.pool import Workers, process

__all__ = ["EvaluateOutcome", "EvaluateRun", "LabelledSlide", "file_digest"]

logger = logging.getLogger(__name__)

KEY = b"xmil-faithfulness"
FOLDERS = ("slides", "results", "certificates")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("slide_id", "method", "mode", "verdict", "explained")]
    + [(name, pa.int64()) for name in ("n", "label", "predicted", "target", "flipped")]
    + [(name, pa.bool_()) for name in ("correct", "flipped_at_zero")]
    + [
        (name, pa.float64())
        for name in ("seconds", "output", "aupc", "srg", "aopc", "sufficiency", "necessity", "at_zero")
    ]
    + [(name, pa.float64()) for name in ("random_aupc", "unexplained")]
    + [(name, pa.float64()) for name in ("auprc2", "auroc2", "ap", "ndcg", "pointing", "mass")]
    + [(name, pa.list_(pa.float64())) for name in ("logits", "morf", "lerf")]
    + [("parts", pa.list_(pa.int64()))]
)


@dataclass(frozen=True)
class LabelledSlide:
    """A slide of the cohort: its name, feature file, true class and case, where they are known.

    Where all slides of a case are one bag, it is the case: `parts` are its slides and their files.
    """

    slide_id: str
    path: Path
    label: int | None = None
    case_id: str | None = None
    parts: tuple[tuple[str, Path], ...] = ()

    @classmethod
    def of(cls, case: Case) -> LabelledSlide:
        """What is one bag of a cohort."""
        parts = tuple(zip(case.slides, case.paths, strict=True))
        return cls(case.name, case.paths[0], case.label, case.case_id, parts)

    @property
    def slides(self) -> tuple[tuple[str, Path], ...]:
        """The slides that make the bag, with their files."""
        return self.parts or ((self.slide_id, self.path),)


@dataclass
class EvaluateOutcome:
    """What a run did: slides measured now, found done, and failed with the reason."""

    measured: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateRun:
    """A run's folder with its settings; `inputs` (model, features, ...) must stay the same as well.

    `about` is written into run.json beside them: the model's spec and where things lie. `reading` are options
    of `read_bag`.
    """

    folder: Path
    settings: FaithfulnessSettings
    inputs: dict[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)
    reading: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A name for the settings and inputs; results under another one are not mixed in."""
        return self._run_folder.fingerprint

    def prepare(self) -> None:
        """Make the folder and write run.json; a folder with a run of other settings is refused."""
        self._run_folder.prepare(self.about, folders=FOLDERS)

    @contextmanager
    def opened(self, *, restart: bool = False) -> Iterator[None]:
        """The prepared folder, for this run alone; `restart` clears it of an earlier run first."""
        with self._run_folder.opened(self.about, folders=FOLDERS, restart=restart):
            yield

    def measure(
        self,
        model: nn.Module | Path,
        slides: Sequence[LabelledSlide],
        *,
        truth: Truth | None = None,
        on_slide: Callable[[str], None] | None = None,
        engine: Workers | None = None,
        device: str = "cpu",
    ) -> EvaluateOutcome:
        """Measure the slides that have no result yet; one that fails is recorded and the rest goes on.

        Workers other than this process need the model's file, from which each loads its own.
        """
        outcome, tell = EvaluateOutcome(), on_slide or (lambda _: None)
        waiting = []
        for slide in slides:
            if self._done(slide):
                outcome.found.append(slide.slide_id)
                tell(slide.slide_id)
            else:
                waiting.append(slide)
        for done in process(waiting, partial(_make_measurer, self, model, truth, device), engine):
            if done.error is None:
                outcome.measured.append(done.item.slide_id)
            else:
                outcome.failed[done.item.slide_id] = done.error
                logger.warning("%s failed: %s", done.item.slide_id, done.error)
                self._run_folder.write_failures(outcome.failed)
            tell(done.item.slide_id)
        self._run_folder.write_failures(outcome.failed)
        return outcome

    def measure_slide(self, model: nn.Module, slide: LabelledSlide, truth: Truth | None = None) -> None:
        """Measure one slide and write its files."""
        for name in (slide.slide_id, *(part for part, _ in slide.slides)):
            if not is_plain(name):
                raise InputError(f"The name {name!r} cannot name a file; rename the slide or case.")
        start = time.perf_counter()
        bags = [named(read_bag(path, **self.reading), name) for name, path in slide.slides]
        bag, _ = join_bags(bags, name=slide.slide_id)
        evidence = None if truth is None else _evidence(truth, bags)
        result = evaluate_slide(model, bag, self.settings, label=slide.label, evidence=evidence)
        for row in result.rows:
            row |= {"seconds": time.perf_counter() - start, "parts": [len(part) for part in bags]}
        try:
            self._write_slide(slide, result, bags)
        except WriteError as error:  # the next slide would fare no better
            raise StopError(f"{error} The slides done so far are kept; the same command goes on.") from None

    def rows(self, slides: Sequence[LabelledSlide]) -> list[Row]:
        """The rows of the slides that have a result, curves included."""
        tables = [
            pq.read_table(self._result(slide), partitioning=None) for slide in slides if self._done(slide)
        ]
        return [row for table in tables for row in table.to_pylist()]

    def write_results(self, rows: list[Row]) -> None:
        """All rows in one table."""
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_atomically(self.folder / "results.parquet", lambda part: pq.write_table(table, part))

    def write_slides(self, slides: Sequence[LabelledSlide], rows: Sequence[Row]) -> None:
        """slides.csv: what the model says of each slide."""
        spec = self.about.get("model", {}).get("spec", {})
        first = {row["slide_id"]: row for row in reversed(rows)}
        table = [
            slide_row(_case(slide), i, logits=row["logits"], spec=spec, n=n, seconds=_share_of_time(row))
            for slide in slides
            if (row := first.get(slide.slide_id)) is not None
            for i, n in enumerate(row["parts"])
        ]
        names = columns(table)
        write_table(self.folder / SLIDES, names, ([row.get(name) for name in names] for row in table))

    def _write_slide(self, slide: LabelledSlide, result: SlideResult, bags: Sequence[Bag]) -> None:
        """The result goes last: once it is there, the slide is done."""
        from xmil.evaluate.faithfulness_plots import draw_certificate

        about = {"fingerprint": self.fingerprint, **self.inputs}
        if len(bags) > 1:
            n = sum(map(len, bags))
            about["case"] = {
                "name": slide.slide_id,
                "slides": [name for name, _ in slide.slides],
                "instances": n,
            }
        start = 0
        for (name, _), bag in zip(slide.slides, bags, strict=True):
            rows, start = slice(start, start + len(bag)), start + len(bag)
            own = (
                [slide_share(e, bag, rows) for e in result.explanations]
                if len(bags) > 1
                else result.explanations
            )
            write_explanations(own, self.folder / "slides" / f"{name}.parquet", provenance=about)
            paper = self.folder / "certificates" / name
            write_json(_with(paper, ".json"), certificate_dict(slide, result, self.about.get("class_names")))
            draw_certificate(slide.slide_id, result, _with(paper, ".png"))
        table = pa.Table.from_pylist(result.rows, schema=SCHEMA.with_metadata({KEY: self.fingerprint}))
        write_atomically(self._result(slide), lambda part: pq.write_table(table, part, compression="zstd"))

    def _done(self, slide: LabelledSlide) -> bool:
        try:
            metadata = pq.read_schema(self._result(slide)).metadata or {}
        except (OSError, pa.ArrowException):
            return False
        return bool(metadata.get(KEY, b"").decode() == self.fingerprint)

    def _result(self, slide: LabelledSlide) -> Path:
        return self.folder / "results" / f"{slide.slide_id}.parquet"

    @property
    def _run_folder(self) -> RunFolder:
        return RunFolder(self.folder, "evaluate", {**self.inputs, **self.settings.as_dict()})


def _make_measurer(
    run: EvaluateRun, model: nn.Module | Path, truth: Truth | None, device: str
) -> Callable[[LabelledSlide], None]:
    net = load_model(model).to(device) if isinstance(model, Path) else model
    return lambda slide: run.measure_slide(net, slide, truth)


def _case(slide: LabelledSlide) -> Case:
    names, paths = zip(*slide.slides, strict=True)
    return Case(slide.slide_id, names, paths, slide.label, slide.case_id)


def _evidence(truth: Truth, bags: Sequence[Bag]) -> npt.NDArray[np.float64] | None:
    """The ground truth of a bag's slides, one after another; None unless all of them have one."""
    found = [truth.evidence(bag) for bag in bags]
    known = [part for part in found if part is not None]
    return np.concatenate(known) if len(known) == len(bags) else None


def _share_of_time(row: Row) -> float:
    return float(row["seconds"]) / len(row["parts"])


def certificate_dict(
    slide: LabelledSlide, result: SlideResult, class_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a slide's certificate says, in plain types; classes by number, and by name where they have one."""
    first = result.rows[0]
    named_classes = {
        f"{key}_name": class_names[first[key]]
        for key in ("label", "predicted")
        if class_names and first[key] is not None and first[key] < len(class_names)
    }
    band = {
        name: [round(float(v), 6) for v in getattr(result.band, name)] for name in ("mean", "low", "high")
    }
    return {
        "slide_id": slide.slide_id,
        **({"slides": [name for name, _ in slide.slides]} if len(slide.slides) > 1 else {}),
        **{key: first[key] for key in ("n", "label", "predicted", "correct", "explained", "output", "mode")},
        **named_classes,
        "methods": [certificate.as_dict() for certificate in result.certificates],
        "random_band": band,
    }


def _with(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"  # names may hold dots
