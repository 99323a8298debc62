"""`evaluate_slides`: measure faithfulness over a cohort; an interrupted run can be resumed.

run.json, slides.csv, failures.csv
slides/<slide_id>.parquet        explanations, as `xmil explain` writes them
results/<slide_id>.parquet       a row for each method and mode, curves included
certificates/<slide_id>.json     and .png
results.parquet, summary.*, statistics.csv, faithfulness.png
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmil.core.bag import Bag
from xmil.core.budget import check_objects, read_parquet
from xmil.core.durable import identity, unchanged, write_atomically, write_text
from xmil.core.errors import FileError, InputError, XmilError, absent
from xmil.core.request import takes
from xmil.core.task import TASKS
from xmil.core.text import is_plain, parse_json
from xmil.data.bags import Case, join_bags, named, read_bag
from xmil.evaluate import (
    DEFAULT_METHODS,
    FORMATS,
    FaithfulnessSettings,
    Row,
    SlideResult,
    Truth,
    as_text,
    draw_certificate,
    draw_summary,
    evaluate_slide,
    statistics_csv,
    summarise,
)
from xmil.methods import list_methods
from xmil.execute import Listener
from xmil.runs.cohort_run import TableRow, Tally, slide_row
from xmil.runs.ensemble import ModelRun, model_paths, open_models, with_background
from xmil.runs.explain import slide_share
from xmil.runs.inputs import (
    class_index,
    decided_labels,
    guessed_edges,
    guessed_edges_warning,
    stored_edge,
    task_cases,
)
from xmil.runs.requests import EvaluateRequest
from xmil.slides import find_slides
from xmil.storage import Run, read_provenance, write_explanations, write_json

MEASURES = ("srg", "aupc", "sufficiency", "necessity", "auprc2")  # in slides.csv; results.parquet has all
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


@takes(EvaluateRequest, "model", "features")
def evaluate_slides(request: EvaluateRequest, *, listener: Listener | None = None) -> Run:
    """Measure how faithful each method is for a model, over the slides of a cohort, into the folder `out`.

    Same as `xmil evaluate`, with the same options and files. `truth` is a folder of GeoJSON, masks or
    instance labels; `background` as in `explain_slides`.
    """
    listener, out = listener or Listener(), request.out
    paths = model_paths(request.model)
    if len(paths) > 1:  # an ensemble has several outputs, but a curve has one
        names = ", ".join(map(str, paths))
        raise InputError(f"xmil evaluate takes one model. Got {len(paths)}; name one: {names}.")
    models, device = open_models(request)
    net = models.models[0]
    able = list_methods(net)
    methods = tuple(able) if request.methods == ("all",) else request.methods
    settings = FaithfulnessSettings(
        methods or tuple(name for name in DEFAULT_METHODS if name in able),
        request.modes, request.steps, request.orders, seed=request.seed,
        truth_class=1 if request.truth is None else class_index(request.truth_class, net),
    )  # fmt: skip
    settings.check(net)
    if not TASKS[net.task].decides:
        listener.say(f"A {net.task} model predicts no class, so every slide counts.")
    request.check_apart(out)
    if request.truth is not None and not request.truth.is_dir():
        raise InputError(absent(request.truth, "folder"))
    cases, missing = task_cases(request, net.spec, labels=decided_labels, say=listener.say)
    models = with_background(models, request, settings.methods, out=out, say=listener.say)
    truth = None
    if request.truth is not None:
        links = request.follow_links
        slides = {} if request.slides is None else find_slides(request.slides, follow_links=links)
        truth = Truth(request.truth, request.truth_names, request.mask_downsample, slides=slides)
    run = EvaluateRun(out, request, models, device, missing, truth, chosen=settings)
    tally = run.execute(cases, listener)
    for line in run.lines:
        listener.say(line)
    listener.say(f"{len(tally.done)} measured, {len(tally.found)} already done. Written to {out}.")
    return Run(run.out)


@dataclass(frozen=True)
class EvaluateRun(ModelRun[list[Row]]):
    request: EvaluateRequest
    chosen: FaithfulnessSettings = field(kw_only=True)
    truth: Truth | None = None
    lines: list[str] = field(default_factory=list)  # of the summary, for the screen
    kind = "evaluate"
    doing = "evaluating"
    folders = ("slides", "results", "certificates")
    verb = "measured"

    @cached_property
    def made_of(self) -> dict[str, Any]:
        """Inputs that decide the results, besides the measures."""
        truth = self.truth
        return {
            "model": self.models.digests[0],
            "features": str(self.request.features.resolve()),
            "truth": None if truth is None else str(truth.folder.resolve()),
            "truth_names": [] if truth is None else list(truth.names),
            "mask_downsample": 1.0 if truth is None else truth.downsample,
            "by": self.request.by,
            "reading": self.request.reading,
            **self.models.settings(),
            **({} if self.request.slides is None else {"slides": str(self.request.slides.resolve())}),
        }

    def settings(self) -> dict[str, Any]:
        return {**self.made_of, **self.chosen.as_dict()}

    def about(self) -> dict[str, Any]:
        about = {**self.models.about(), "methods": self.chosen.methods, "targets": ["predicted"]}
        return {**about, **self.request.places(), "request": self.request.as_dict(), **self.missing.as_dict()}

    def worker(self) -> Callable[[Case], list[Row]]:
        return self.measure_slide

    def find_result(self, item: Case) -> list[Row] | None:
        """Read the rows of a case measured with these settings, files and label."""
        try:
            table = read_parquet(self._result(item))
            metadata = table.schema.metadata or {}
            if metadata.get(KEY, b"").decode() != self.fingerprint:
                return None
            stored = parse_json(metadata.get(SOURCES, b"[]"))
            check_objects(table, self._result(item))
            files, rows = self._files(item), table.to_pylist()
            same = len(stored) == len(files) and all(
                word is None if path is None else unchanged(path, word, times=True)
                for path, word in zip(files, stored, strict=True)
            )
            return rows if same and rows and all(row["label"] == item.label for row in rows) else None
        except (FileError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            return None  # absent or damaged: measure it again

    def rows_of(self, item: Case, result: list[Row]) -> list[TableRow]:
        """Return the prediction for each slide, and how faithful each method is in the first mode."""
        row, spec = result[0], vars(self.models.spec)
        seconds = float(row["seconds"]) / len(row["parts"])
        measures = {
            f"{name}:{row['method']}": float(f"{row[name]:.6g}")
            for row in result
            for name in MEASURES
            if row["mode"] == self.chosen.modes[0] and row.get(name) is not None
        }
        return [
            slide_row(item, i, logits=row["logits"], spec=spec, n=n, seconds=seconds) | measures
            for i, n in enumerate(row["parts"])
        ]

    def warnings(self, items: Sequence[Case], tally: Tally[list[Row]]) -> list[str]:
        """Those of every run with models, and one on guessed patch edges, if the ground truth meets them."""
        edges = {}
        for slide in tally.rows if self.truth is not None else ():
            with suppress(XmilError, OSError):  # a damaged file is named elsewhere
                header, _ = read_provenance(self.out / "slides" / f"{slide}.parquet")
                edges[slide] = stored_edge(header)
        guessed = guessed_edges_warning(guessed_edges(edges.items()))
        return [*super().warnings(items, tally), *filter(None, [guessed])]

    def finish(self, items: Sequence[Case], tally: Tally[list[Row]]) -> Mapping[str, Any]:
        measured = [tally.results[case.slides[0]] for case in items if case.slides[0] in tally.results]
        rows = [row for case_rows in measured for row in case_rows]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_atomically(self.out / "results.parquet", lambda part: pq.write_table(table, part))
        cases = {case.name: case.case_id or case.name for case in items}
        named = any(case.case_id is not None for case in items)
        summary = summarise(
            rows, cases=cases if named else None, smallest=self.request.smallest, seed=self.chosen.seed
        )
        texts = {f"summary.{suffix}": render(summary) for suffix, render in FORMATS.items()}
        for name, text in {**texts, "statistics.csv": statistics_csv(summary)}.items():
            write_text(self.out / name, text)
        draw_summary(rows, summary, self.out / "faithfulness.png")
        self.lines.append(as_text(summary))
        return {"best": {mode: str(best) for mode, best in summary.best.items()}}

    def measure_slide(self, case: Case) -> list[Row]:
        """Measure one case and write its files."""
        for name in (case.name, *case.slides):
            if not is_plain(name):
                raise InputError(f"The name {name!r} cannot name a file; rename the slide or case.")
        start = time.perf_counter()
        files = self._files(case)
        sources = [None if path is None else identity(path, times=True) for path in files]
        pairs = enumerate(zip(case.slides, case.paths, strict=True))
        bags = [
            named(read_bag(path, **case.reading(i, self.request.reading)), name) for i, (name, path) in pairs
        ]
        bag, _ = join_bags(bags, name=case.name)
        parts = [] if self.truth is None else [self.truth.evidence(bag) for bag in bags]
        known_parts = [part for part in parts if part is not None]
        is_complete = len(known_parts) == len(bags)  # evidence needs all slides of a case
        evidence = np.concatenate(known_parts) if is_complete else None
        result = evaluate_slide(self.models.models[0], bag, self.chosen, label=case.label, evidence=evidence)
        for row in result.rows:
            row |= {"seconds": time.perf_counter() - start, "parts": [len(part) for part in bags]}
        self._write_slide(case, result, bags, sources)
        return result.rows

    def _files(self, case: Case) -> list[Path | None]:
        """The files of a case: features, and the ground truth of each slide, or None."""
        truth = self.truth
        return [*case.paths, *([] if truth is None else [truth.file(slide) for slide in case.slides])]

    def _write_slide(
        self, case: Case, result: SlideResult, bags: Sequence[Bag], sources: Sequence[str | None]
    ) -> None:
        """Write the files of a case, the result last, because it marks the case as done."""
        about = {"fingerprint": self.fingerprint, **self.made_of}
        if len(bags) > 1:
            n = sum(map(len, bags))
            about["case"] = {"name": case.name, "slides": list(case.slides), "instances": n}
        names = self.models.spec.class_names
        certificate = result.as_dict(case.name, slides=case.slides, class_names=names)
        start = 0
        for name, bag in zip(case.slides, bags, strict=True):
            rows, start = slice(start, start + len(bag)), start + len(bag)
            several, every = len(bags) > 1, result.explanations
            shares = [slide_share(e, bag, rows) for e in every] if several else every
            write_explanations(shares, self.out / "slides" / f"{name}.parquet", provenance=about)
            write_json(self.out / "certificates" / f"{name}.json", certificate)
            draw_certificate(case.name, result, self.out / "certificates" / f"{name}.png")
        marks = {KEY: self.fingerprint, SOURCES: json.dumps(list(sources))}
        table = pa.Table.from_pylist(result.rows, schema=SCHEMA.with_metadata(marks))
        write_atomically(self._result(case), lambda part: pq.write_table(table, part, compression="zstd"))

    def _result(self, case: Case) -> Path:
        return self.out / "results" / f"{case.name}.parquet"
