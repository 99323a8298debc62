"""`evaluate_slides`: faithfulness over a cohort, into a folder that goes on where it stopped.

run.json, slides.csv, failures.csv
slides/<slide_id>.parquet        explanations, as `xmil explain` writes them
results/<slide_id>.parquet       a row for each method and mode, curves included
certificates/<slide_id>.json     and .png
results.parquet, summary.*, statistics.csv, faithfulness.png
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from xmil.core.absence import absent
from xmil.core.bag import Bag
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, InputError
from xmil.core.identity import identity, unchanged
from xmil.core.names import listed
from xmil.core.parsing import parse_json
from xmil.core.run import Run
from xmil.core.runfiles import write_json
from xmil.core.storage import write_atomically, write_explanations, write_text
from xmil.core.task import TASKS
from xmil.data.bags import read_bag
from xmil.data.cases import Case, join_bags, named
from xmil.data.siblings import is_plain
from xmil.evaluate.faithfulness import (
    DEFAULT_METHODS,
    FaithfulnessSettings,
    Row,
    SlideResult,
    evaluate_slide,
)
from xmil.evaluate.faithfulness_plots import draw_certificate, draw_summary
from xmil.evaluate.faithfulness_table import FORMATS, as_text, statistics_csv, summarise
from xmil.evaluate.localisation import Truth
from xmil.evaluate.parts import MODES
from xmil.methods import list_methods
from xmil.runs.cautions import Missing, made_otherwise, seen_warning
from xmil.runs.cohort_run import CohortRun, TableRow, Tally, as_workers, in_process, stopping
from xmil.runs.ensemble import AUTO, Ensemble, StrPath, model_paths, with_background
from xmil.runs.explainer import slide_share
from xmil.runs.inputs import Inputs, Unsaid, class_index, find_cases, reading_of
from xmil.runs.listener import Listener
from xmil.runs.rows import columns, slide_row
from xmil.runs.workers.pool import MakeWorker, Workers, checked_device
from xmil.slides import find_slides

KEY, SOURCES = b"xmil-faithfulness", b"xmil-sources"
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


def evaluate_slides(
    model: StrPath,
    features: StrPath,
    *,
    out: StrPath,
    cohort: StrPath | None = None,
    label: str = "",
    split: str | Iterable[str] = (),
    by: str = "slide",
    methods: str | Iterable[str] = "",
    modes: str | Iterable[str] = MODES,
    steps: int = 100,
    orders: int = 20,
    top: float = 0.1,
    truth: StrPath | None = None,
    truth_class: str | int = 1,
    truth_names: str | Iterable[str] = (),
    slides: StrPath | None = None,
    mask_downsample: float = 1.0,
    mpp: float | None = None,
    patch_size: int | None = None,
    format: str = "auto",  # noqa: A002 - the word users know
    class_names: str | Iterable[str] = (),
    device: str = "cpu",
    background: StrPath = AUTO,
    seed: int = 0,
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    full_digests: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Measure how faithful each method is for a model, over the slides of a cohort, into the folder `out`.

    The same as `xmil evaluate`, with the same files. `truth` is a folder of GeoJSON, masks or instance
    labels; `background` as in `explain_slides`.
    """
    hear, chosen = listener or Listener(), as_workers(workers)
    where = device if chosen.kind == "ray" else checked_device(device)
    reading = reading_of(mpp, patch_size, format)
    unsaid = Unsaid(tuple(listed(class_names)) or None, Path(features), reading)
    models = Ensemble.load(_one_model(model), where if in_process(chosen) else "cpu", unsaid=unsaid)
    net = models.models[0]
    settings = FaithfulnessSettings(
        _methods(methods, net), tuple(listed(modes)), steps, orders, top, seed,
        1 if truth is None else class_index(str(truth_class), net),
    )  # fmt: skip
    settings.check(net)
    if not TASKS[net.task].decides:
        hear.say(f"A {net.task} model predicts no class, so every slide counts.")
    table = None if cohort is None else Path(cohort)
    inputs = Inputs(Path(features), table, tuple(listed(split)), by, follow_links)
    inputs.check_apart(Path(out))
    column = label if TASKS[net.task].decides else None
    cases, missing = find_cases(inputs, label=column, spec=net.spec, say=hear.say)
    if "lrp" in settings.methods:
        files = [path for case in cases for path in case.paths]
        models = with_background(
            models, background, files=files, out=Path(out), restart=restart, say=hear.say
        )
    known = _truth(truth, listed(truth_names), mask_downsample, slides, follow_links=follow_links)
    run = EvaluateRun(
        Path(out), models, settings, inputs, reading, known,
        None if slides is None else Path(slides), where, missing, full_digests,
    )  # fmt: skip
    what = "slides" if by == "slide" else "cases"
    tally = run.go(cases, workers=chosen, restart=restart, listener=hear, what=what)
    for line in run.lines:
        hear.say(line)
    hear.say(f"{len(tally.done)} measured, {len(tally.found)} already done. Written to {out}.")
    return run.saved()


def _truth(
    folder: StrPath | None, names: list[str], downsample: float, slides: StrPath | None, *, follow_links: bool
) -> Truth | None:
    if folder is None:
        return None
    place = Path(folder)
    if not place.is_dir():
        raise InputError(absent(place, "folder"))
    found = {} if slides is None else find_slides(slides, follow_links=follow_links)
    return Truth(place, tuple(names), downsample, slides=found)


def _one_model(path: StrPath) -> tuple[Path, ...]:
    """The checkpoint a path stands for; an ensemble has several, whose curves would be of several outputs."""
    files = model_paths(path)
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise InputError(
            f"{path}: xmil evaluate takes one model, and here are {len(files)}; name one: {names}."
        )
    return files


def _methods(given: str | Iterable[str], net: nn.Module) -> tuple[str, ...]:
    able = list_methods(net)
    if given == "all":
        return tuple(able)
    return tuple(listed(given)) or tuple(name for name in DEFAULT_METHODS if name in able)


@dataclass(frozen=True)
class EvaluateRun(CohortRun[Case, list[Row]]):
    """A run's folder, model and settings; `reading` are options of `read_bag`."""

    models: Ensemble
    chosen: FaithfulnessSettings
    inputs: Inputs
    reading: Mapping[str, Any] = field(default_factory=dict)
    truth: Truth | None = None
    slides: Path | None = None
    device: str = "cpu"
    missing: Missing = field(default_factory=Missing)
    full_digests: bool = False
    lines: list[str] = field(default_factory=list)  # of the summary, for the screen
    kind = "evaluate"
    folders = ("slides", "results", "certificates")
    verb = "measured"

    @cached_property
    def made_of(self) -> dict[str, Any]:
        """What the results are of, beside what is measured."""
        truth = self.truth
        return {
            "model": self.models.digests[0],
            "features": str(self.inputs.features.resolve()),
            "truth": None if truth is None else str(truth.folder.resolve()),
            "truth_names": [] if truth is None else list(truth.names),
            "mask_downsample": 1.0 if truth is None else truth.downsample,
            "by": self.inputs.by,
            "reading": dict(self.reading),
            **self.models.unsaid.as_dict(),
            **({} if self.slides is None else {"slides": str(self.slides.resolve())}),
        }

    def settings(self) -> dict[str, Any]:
        """What is measured, and on what."""
        return {**self.made_of, **self.chosen.as_dict()}

    def about(self) -> dict[str, Any]:
        """What run.json says beside the settings."""
        about = {**self.models.about(), "methods": self.chosen.methods, "targets": ["predicted"]}
        return {**about, **self.inputs.as_dict(), **self.missing.as_dict()}

    @cached_property
    def fingerprint(self) -> str:
        """A name for the settings."""
        return self.folder.fingerprint

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        """Keep the background that the model was lent."""
        self.models.keep_background(self.out)

    def slides_of(self, item: Case) -> Sequence[str]:
        """The slides of a case."""
        return item.slides

    def make_worker(self, workers: Workers) -> MakeWorker[Case, list[Row]]:
        """Workers in other processes load the model from the file that was hashed here."""
        if in_process(workers):
            return partial(_make_measurer, self, self.models)
        return partial(_make_measurer, replace(self, models=replace(self.models, models=())), None)

    def warnings(self, items: Sequence[Case], tally: Tally[list[Row]]) -> list[str]:
        """Sentences on slides that are missing, slides of the training and features made otherwise."""
        done = [case for case in items if case.slides[0] in tally.results]
        made = made_otherwise(self.models.spec, done)
        every = (self.missing.warning(), seen_warning(self.models.paths, items), made)
        return [warning for warning in every if warning is not None]

    def known(self, item: Case) -> list[Row] | None:
        """The rows of a case that was measured with these settings, on these files and this label."""
        try:
            table = read_parquet(self._result(item))
            metadata = table.schema.metadata or {}
            if metadata.get(KEY, b"").decode() != self.fingerprint:
                return None
            stored = parse_json(metadata.get(SOURCES, b"[]"))
            now, rows = self._files(item), table.to_pylist()
            same = len(stored) == len(now) and all(
                word is None if path is None else unchanged(path, word, full=self.full_digests, times=True)
                for path, word in zip(now, stored, strict=True)
            )
            return rows if same and rows and all(row["label"] == item.label for row in rows) else None
        except (FileError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            return None  # not there, or damaged: it is measured again

    def rows_of(self, item: Case, result: list[Row]) -> list[TableRow]:
        """What the model says of each slide."""
        row, spec = result[0], vars(self.models.spec)
        seconds = float(row["seconds"]) / len(row["parts"])
        return [
            slide_row(item, i, logits=row["logits"], spec=spec, n=n, seconds=seconds)
            for i, n in enumerate(row["parts"])
        ]

    def header(self, rows: Sequence[TableRow]) -> list[str]:
        """Names first, outputs between, the rest last."""
        return columns(rows)

    def finish(
        self,
        items: Sequence[Case],
        tally: Tally[list[Row]],
        workers: Workers,  # noqa: ARG002
    ) -> Mapping[str, Any]:
        """All rows in one table, and the summary of the methods."""
        measured = [tally.results[case.slides[0]] for case in items if case.slides[0] in tally.results]
        rows = [row for own in measured for row in own]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_atomically(self.out / "results.parquet", lambda part: pq.write_table(table, part))
        summary = summarise(rows, seed=self.chosen.seed)
        texts = {f"summary.{suffix}": render(summary) for suffix, render in FORMATS.items()}
        for name, text in {**texts, "statistics.csv": statistics_csv(summary)}.items():
            write_text(self.out / name, text)
        draw_summary(rows, summary, self.out / "faithfulness.png")
        self.lines.append(as_text(summary))
        return {"best": {mode: str(best) for mode, best in summary.best.items()}}

    def measure_slide(self, model: nn.Module, case: Case) -> list[Row]:
        """Measure one case and write its files."""
        for name in (case.name, *case.slides):
            if not is_plain(name):
                raise InputError(f"The name {name!r} cannot name a file; rename the slide or case.")
        start = time.perf_counter()
        full, files = self.full_digests, self._files(case)
        sources = [None if path is None else identity(path, full=full, times=True) for path in files]
        pairs = enumerate(zip(case.slides, case.paths, strict=True))
        bags = [named(read_bag(path, **case.reading(i, self.reading)), name) for i, (name, path) in pairs]
        bag, _ = join_bags(bags, name=case.name)
        evidence = None if self.truth is None else _evidence(self.truth, bags)
        result = evaluate_slide(model, bag, self.chosen, label=case.label, evidence=evidence)
        for row in result.rows:
            row |= {"seconds": time.perf_counter() - start, "parts": [len(part) for part in bags]}
        stopping(partial(self._write_slide, case, result, bags, sources))
        return result.rows

    def _files(self, case: Case) -> list[Path | None]:
        """What a case is measured on: features, and the truth of its slides, None of one that has none."""
        truth = self.truth
        return [*case.paths, *([] if truth is None else [truth.file(slide) for slide in case.slides])]

    def _write_slide(
        self, case: Case, result: SlideResult, bags: Sequence[Bag], sources: Sequence[str | None]
    ) -> None:
        """The result goes last: once it is there, the slide is done."""
        about = {"fingerprint": self.fingerprint, **self.made_of}
        if len(bags) > 1:
            n = sum(map(len, bags))
            about["case"] = {"name": case.name, "slides": list(case.slides), "instances": n}
        start = 0
        for name, bag in zip(case.slides, bags, strict=True):
            rows, start = slice(start, start + len(bag)), start + len(bag)
            several, every = len(bags) > 1, result.explanations
            own = [slide_share(e, bag, rows) for e in every] if several else every
            write_explanations(own, self.out / "slides" / f"{name}.parquet", provenance=about)
            paper = self.out / "certificates" / name
            write_json(_with(paper, ".json"), certificate_dict(case, result, self.models.spec.class_names))
            draw_certificate(case.name, result, _with(paper, ".png"))
        marks = {KEY: self.fingerprint, SOURCES: json.dumps(list(sources))}
        table = pa.Table.from_pylist(result.rows, schema=SCHEMA.with_metadata(marks))
        write_atomically(self._result(case), lambda part: pq.write_table(table, part, compression="zstd"))

    def _result(self, case: Case) -> Path:
        return self.out / "results" / f"{case.name}.parquet"


def _make_measurer(run: EvaluateRun, loaded: Ensemble | None) -> Callable[[Case], list[Row]]:
    models = loaded or run.models.again(run.device)
    own = replace(run, models=models)
    return lambda case: own.measure_slide(models.models[0], case)


def _evidence(truth: Truth, bags: Sequence[Bag]) -> npt.NDArray[np.float64] | None:
    """The ground truth of a bag's slides, one after another; None unless all of them have one."""
    found = [truth.evidence(bag) for bag in bags]
    known = [part for part in found if part is not None]
    return np.concatenate(known) if len(known) == len(bags) else None


def certificate_dict(
    case: Case, result: SlideResult, class_names: Sequence[str] | None = None
) -> dict[str, Any]:
    """What a slide's certificate says, in plain types; classes by number, and by name where they have one."""
    first, headline = result.rows[0], result.headline.as_dict()
    named_classes = {
        f"{key}_name": class_names[first[key]]
        for key in ("label", "predicted")
        if class_names and first[key] is not None and first[key] < len(class_names)
    }
    band = {
        name: [round(float(v), 6) for v in getattr(result.band, name)] for name in ("mean", "low", "high")
    }
    return {
        "slide_id": case.name,
        **({"slides": list(case.slides)} if len(case.slides) > 1 else {}),
        **{key: first[key] for key in ("n", "label", "predicted", "correct", "explained", "output", "mode")},
        **named_classes,
        "headline": {key: headline[key] for key in ("method", "verdict", "sentence")},
        "methods": [certificate.as_dict() for certificate in result.certificates],
        "deciding": None if result.deciding is None else result.deciding.as_dict(),
        "random_band": band,
    }


def _with(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"  # names may hold dots
