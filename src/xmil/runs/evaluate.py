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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from xmil.core.bag import Bag
from xmil.core.budget import check_objects, parquet_rows, read_parquet
from xmil.core.durable import write_atomically, write_text
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
from xmil.execute import Listener, Step, TableRow, Tally, execute
from xmil.methods import list_methods
from xmil.models import MILModel
from xmil.runs.ensemble import (
    Ensemble,
    model_paths,
    open_models,
    warnings_of_models,
    with_background,
    worker_with,
)
from xmil.runs.explain import slide_share
from xmil.runs.inputs import (
    Missing,
    class_index,
    decided_labels,
    guessed_edges,
    guessed_edges_warning,
    item_of_case,
    stored_edge,
    task_cases,
)
from xmil.runs.requests import EvaluateRequest
from xmil.runs.rows import columns_of_cases, slide_row
from xmil.slides import find_slides
from xmil.storage import (
    Item,
    Record,
    Run,
    fingerprint,
    make_folder,
    read_provenance,
    write_explanations,
    write_json,
)

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
    made_of = describe_inputs(request, models, truth)
    run_settings = request.with_options({**made_of, **settings.as_dict()})
    about = {"fingerprint": fingerprint("evaluate", run_settings), **made_of}
    measure = Measurement(request, settings, truth, about)
    summary = Summary(measure, models, missing, cases)
    step = Step(
        "evaluate",
        [measure.item_of(case) for case in cases],
        settings=run_settings,
        about={
            **models.about(),
            "methods": settings.methods,
            "targets": ["predicted"],
            **request.places(),
            "request": request.as_dict(),
            **missing.as_dict(),
        },
        make_worker=worker_with(
            models, device, partial(make_measurer, measure), in_process=request.pool.in_process
        ),
        prepare=partial(models.save_background, out),
        adopt=partial(measure.adopt, spec=vars(models.spec)),
        finish=summary.write,
        columns=columns_of_cases,
        doing=f"evaluating {request.by}s",
        verb="measured",
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    for line in summary.lines:
        listener.say(line)
    listener.say(f"{len(tally.done)} measured, {len(tally.before)} already done. Written to {out}.")
    return Run(out)


def describe_inputs(request: EvaluateRequest, models: Ensemble, truth: Truth | None) -> dict[str, Any]:
    """The inputs that decide the results, besides the measures."""
    return {
        "model": models.digests[0],
        "features": str(request.features.resolve()),
        "truth": None if truth is None else str(truth.folder.resolve()),
        "truth_names": [] if truth is None else list(truth.names),
        "mask_downsample": 1.0 if truth is None else truth.downsample,
        "by": request.by,
        "reading": request.reading,
        **models.settings(),
        **({} if request.slides is None else {"slides": str(request.slides.resolve())}),
    }


@dataclass(frozen=True)
class Measurement:
    """What all cases share: the request, the measures, the ground truth; `about` goes into their files."""

    request: EvaluateRequest
    chosen: FaithfulnessSettings
    truth: Truth | None
    about: Mapping[str, Any]

    def item_of(self, case: Case) -> Item[Case]:
        """Make the item of a case: its features, the ground truth of each slide, its label."""
        truth = self.truth
        files = [] if truth is None else [truth.file(slide) for slide in case.slides]
        return item_of_case(case, *files, label=case.label)

    def rows_of(self, case: Case, result: list[Row], spec: Mapping[str, Any]) -> list[TableRow]:
        """Make the row of each slide: its prediction, and how faithful each method is in the first mode."""
        row = result[0]
        seconds = float(row["seconds"]) / len(row["parts"])
        measures = {
            f"{name}:{row['method']}": float(f"{row[name]:.6g}")
            for row in result
            for name in MEASURES
            if row["mode"] == self.chosen.modes[0] and row.get(name) is not None
        }
        return [
            slide_row(case, i, logits=row["logits"], spec=spec, n=n, seconds=seconds) | measures
            for i, n in enumerate(row["parts"])
        ]

    def adopt(self, item: Item[Case], *, spec: Mapping[str, Any]) -> Record | None:
        """Make the record of a case from its results, which say what they were made from."""
        try:
            path = result_file(self.request.out, item.what)
            table = read_parquet(path)
            metadata = table.schema.metadata or {}
            if metadata.get(KEY, b"").decode() != self.about["fingerprint"]:
                return None
            sources = parse_json(metadata.get(SOURCES, b"[]"))
            check_objects(table, path)
            result = table.to_pylist()
            if not result or any(row["label"] != item.what.label for row in result):
                return None
            rows = self.rows_of(item.what, result, spec)
        except (FileError, OSError, ValueError, LookupError, TypeError, pa.ArrowException):
            return None  # absent or damaged: measure it again
        return Record(rows, sources=sources, decides=dict(item.decides), extra=result)


@dataclass
class Summary:
    """What sums up a run: tables and figures over all cases; `lines` are for the screen."""

    measure: Measurement
    models: Ensemble
    missing: Missing
    cases: Sequence[Case]
    lines: list[str] = field(default_factory=list)

    def write(self, tally: Tally) -> Mapping[str, Any]:
        """Write results.parquet, the summary in all formats and the figure."""
        request, out = self.measure.request, self.measure.request.out
        cases = [case for case in self.cases if case.name in tally.records]
        rows = [row for case in cases for row in self._result(case, tally.records[case.name])]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_atomically(out / "results.parquet", lambda part: pq.write_table(table, part))
        patients = {case.name: case.case_id or case.name for case in self.cases}
        has_patients = any(case.case_id is not None for case in self.cases)
        summary = summarise(
            rows,
            cases=patients if has_patients else None,
            smallest=request.smallest,
            seed=self.measure.chosen.seed,
        )
        texts = {f"summary.{suffix}": render(summary) for suffix, render in FORMATS.items()}
        for name, text in {**texts, "statistics.csv": statistics_csv(summary)}.items():
            write_text(out / name, text)
        draw_summary(rows, summary, out / "faithfulness.png")
        self.lines.append(as_text(summary))
        best = {mode: str(best) for mode, best in summary.best.items()}
        return {"best": best, "warnings": self._warnings(cases)}

    def _result(self, case: Case, record: Record) -> list[Row]:
        if record.extra is not None:
            return list(record.extra)
        return parquet_rows(result_file(self.measure.request.out, case))

    def _warnings(self, cases: Sequence[Case]) -> list[str]:
        """Those of every run with models, and one on guessed patch edges, if the ground truth meets them."""
        edges = {}
        slides = [slide for case in cases for slide in case.slides]
        for slide in slides if self.measure.truth is not None else ():
            with suppress(XmilError, OSError):  # a damaged file is named elsewhere
                header, _ = read_provenance(self.measure.request.out / "slides" / f"{slide}.parquet")
                edges[slide] = stored_edge(header)
        guessed = guessed_edges_warning(guessed_edges(edges.items()))
        return [*warnings_of_models(self.models, cases, self.missing), *filter(None, [guessed])]


def make_measurer(measure: Measurement, models: Ensemble) -> Callable[[Item[Case]], Record]:
    """Make the function that measures one case and writes its files."""
    return partial(measure_case, measure, models.models[0], vars(models.spec))


def measure_case(measure: Measurement, model: MILModel, spec: Mapping[str, Any], item: Item[Case]) -> Record:
    """Measure one case and write its files."""
    case = item.what
    for name in (case.name, *case.slides):
        if not is_plain(name):
            raise InputError(f"The name {name!r} cannot name a file; rename the slide or case.")
    start = time.perf_counter()
    pairs = enumerate(zip(case.slides, case.paths, strict=True))
    reading = measure.request.reading
    bags = [named(read_bag(path, **case.reading(i, reading)), name) for i, (name, path) in pairs]
    bag, _ = join_bags(bags, name=case.name)
    parts = [] if measure.truth is None else [measure.truth.evidence(bag) for bag in bags]
    known_parts = [part for part in parts if part is not None]
    is_complete = len(known_parts) == len(bags)  # evidence needs all slides of a case
    evidence = np.concatenate(known_parts) if is_complete else None
    result = evaluate_slide(model, bag, measure.chosen, label=case.label, evidence=evidence)
    for row in result.rows:
        row |= {"seconds": time.perf_counter() - start, "parts": [len(part) for part in bags]}
    write_case(measure, item, result, bags, names=spec["class_names"])
    return Record(measure.rows_of(case, result.rows, spec), extra=result.rows)


def write_case(
    measure: Measurement,
    item: Item[Case],
    result: SlideResult,
    bags: Sequence[Bag],
    *,
    names: Sequence[str] | None,
) -> None:
    """Write the files of a case."""
    case, out = item.what, measure.request.out
    about = dict(measure.about)
    if len(bags) > 1:
        n = sum(map(len, bags))
        about["case"] = {"name": case.name, "slides": list(case.slides), "instances": n}
    for folder in ("slides", "results", "certificates"):
        make_folder(out / folder)
    certificate = result.as_dict(case.name, slides=case.slides, class_names=names)
    start = 0
    for name, bag in zip(case.slides, bags, strict=True):
        rows, start = slice(start, start + len(bag)), start + len(bag)
        several, every = len(bags) > 1, result.explanations
        shares = [slide_share(e, bag, rows) for e in every] if several else every
        write_explanations(shares, out / "slides" / f"{name}.parquet", provenance=about)
        write_json(out / "certificates" / f"{name}.json", certificate)
        draw_certificate(case.name, result, out / "certificates" / f"{name}.png")
    marks = {KEY: measure.about["fingerprint"], SOURCES: json.dumps(list(item.sources))}
    table = pa.Table.from_pylist(result.rows, schema=SCHEMA.with_metadata(marks))
    path = result_file(out, case)
    write_atomically(path, lambda part: pq.write_table(table, part, compression="zstd"))


def result_file(out: Path, case: Case) -> Path:
    """The file of a case's measures."""
    return out / "results" / f"{case.name}.parquet"
