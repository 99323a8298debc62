"""`explain_slides`: explain every slide of a cohort into a folder; an interrupted run can be resumed.

run.json, slides.csv, failures.csv
tiles/, features/           if slides came without features, see `xmil.runs.slide_features`
slides/<slide_id>.parquet   one file per slide, by atomic rename
interactions/<slide_id>.<target>.parquet    with `interactions=`
summary/                    see `xmil.runs.summary`
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import Bag, Patches
from xmil.core.durable import unchanged
from xmil.core.errors import (
    FileError,
    InputError,
    UnknownNameError,
    XmilError,
    check_names,
    unknown_name,
)
from xmil.core.explanation import Explanation, measured_columns
from xmil.core.request import takes
from xmil.core.task import RISK, TASKS, Target
from xmil.core.text import counted, is_plain, shorten
from xmil.data.bags import Case, join_bags, named, open_bag, read_case
from xmil.data.files import UNTRAINED, feature_facts, is_untrained
from xmil.evaluate.choice import CANDIDATES, Choice
from xmil.execute import Listener, Stages, Step, Tally, execute
from xmil.methods import (
    METHODS,
    OUTPUTS,
    PRESETS,
    explain_targets,
    interactions,
    own_outputs,
    seeds,
)
from xmil.models import MILModel
from xmil.models.base import ModelSpec
from xmil.network import Network
from xmil.runs.check import SOME, Check, RunChoice, choose_for_run, in_seeded_order, judge_run
from xmil.runs.ensemble import (
    Ensemble,
    average,
    bins_warning,
    model_paths,
    open_models,
    predicted_by,
    warnings_of_models,
    with_background,
    worker_with,
)
from xmil.runs.inputs import (
    Missing,
    guessed_edges,
    guessed_edges_warning,
    item_of_case,
    stored_edge,
    task_cases,
)
from xmil.runs.requests import ExplainRequest
from xmil.runs.rows import columns_of_cases, slide_row
from xmil.runs.summary import MANY, SlideSummary, summarise_run, summarise_slide
from xmil.storage import (
    SLIDES,
    Item,
    Record,
    Run,
    check_folder,
    fingerprint,
    interactions_file,
    make_folder,
    other_settings,
    read_explanations,
    read_provenance,
    read_rows,
    read_run,
    write_explanations,
)
from xmil.subsets import memory_budget

if TYPE_CHECKING:
    from xmil.runs.slide_features import SlideFeatures

KIND = "explain"
GROWS = ("methods", "params")  # settings that a later run may extend
PREDICTED, LABEL, ALL = "predicted", "label", "all"
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, StopIteration)  # raised by odd headers
KEEP = 0.5  # share of the patches in each sub-bag of contexts
LEAST_MEMORY = 1 << 24  # below this a smaller budget no longer helps
AUTO, AUTO_METHODS = "auto", {method for method, _ in CANDIDATES.values()}
Parameters = Mapping[str, Mapping[str, Any]]  # parameters by method


@takes(ExplainRequest, "model", "features")
def explain_slides(request: ExplainRequest, *, listener: Listener | None = None) -> Run:
    """Explain every slide of a folder of feature files, or one file, into the folder `out`.

    Same as `xmil explain`, with the same options and files. `params` holds parameters by method,
    such as {"ig": {"steps": 100}}; with {"lrp": {"contexts": 24}}, also of ig and gxi, scores are means over
    that many sub-bags. `interactions` adds the pairs among that many of the strongest patches. A stopped run
    continues in its folder, and other `methods` add their columns to it. `mpp`, `patch_size`, `format` and
    `class_names` fill in what files lack; such columns of the cohort do so per slide. A model may be
    your own function that builds it, as "mine:build" or "nets/mine.py:build". `background` is a folder or
    file of ordinary features that lrp and one_added measure against, in place of the model's own.

    With `slides` the maps are also drawn, into OUT/heatmaps, whose failures.csv lists the slides that could
    not be drawn. Without features, slides are tiled and encoded first, into OUT/tiles and OUT/features, with
    `encoder` or the encoder that the model's checkpoint names.
    """
    listener = listener or Listener()
    run = explain_run(request, listener)
    if request.slides is not None:
        draw_run(run, request, listener)
    return run


def draw_run(run: Run, request: ExplainRequest, listener: Listener) -> Run:
    """Draw the maps of a request's run over its slides."""
    from xmil.runs.heatmap import draw_slides

    names = ("slides", "patch_size", "follow_links", "restart")
    drawing: dict[str, Any] = {name: getattr(request, name) for name in names}
    drawing["mpp"] = None if request.features is None else request.mpp  # features made here store it
    try:
        return draw_slides(run, **drawing, listener=listener)
    except XmilError as error:
        raise type(error)(f"explained, but not drawn: {error}") from None


def explain_run(request: ExplainRequest, listener: Listener) -> Run:
    """Explain the slides of a request, without drawing them."""
    out = request.out
    if out is None:
        raise InputError("The parameter 'out' is missing; name the folder for results.")
    if LABEL in request.target and request.cohort is None:
        raise InputError("`target='label'` needs a `cohort=` with the labels.")
    prepared = None if request.features is not None else features_of_slides(request, out, listener)
    request = request if prepared is None else prepared.request
    models, device = open_models(request)
    spec = check_request(request, models)
    before = {} if request.restart else read_run(out) or {}
    request.check_apart(out)
    cases, missing = task_cases(request, spec, say=listener.say)
    if prepared is not None:
        cases = [case for case in cases if prepared.slides.issuperset(case.slides)]
    earlier = earlier_methods(request, out, before)
    models = with_background(models, request, (*request.methods, *earlier), out=out, say=listener.say)
    chosen = None
    if AUTO in request.methods:
        chosen = chosen_method(request, models, cases, before)
        request = with_method(request, chosen.choice)
        listener.say(chosen.choice.sentence)
        earlier = earlier_methods(request, out, before)
    questions = Questions(request, models.settings(), models.digests, earlier)
    explaining = Explaining(questions, device, keeps_summaries=len(cases) <= MANY)
    summary = Summary(questions, models, cases, missing, chosen, before)
    step = Step(
        KIND,
        [questions.item_of(case) for case in cases],
        settings=questions.settings,
        about={**models.about(), **questions.about(), **missing.as_dict(), **summary.about()},
        make_worker=worker_with(
            models, device, partial(make_explainer, explaining), in_process=request.pool.in_process
        ),
        prepare=partial(prepare_folder, models, out),
        adopt=partial(adopt_slides, questions, models),
        finish=summary.write,
        columns=columns_of_cases,
        doing=f"explaining {request.by}s",
        verb="explained",
        refused={} if prepared is None else prepared.refused,
        grows=GROWS,
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    for line in [*summary.lines, f"{len(tally.done)} explained, {tally}. Written to {out}."]:
        listener.say(line)
    dropped = dropped_note(request, cases, before)
    if dropped is not None:
        listener.say(dropped)
    done = Run(out)
    if done.verdict is not None:
        listener.say(done.verdict.sentence)
    return done


def prepare_folder(models: Ensemble, out: Path) -> None:
    """Make the folder of the slides' files, and save the background, if one was chosen."""
    make_folder(out / "slides")
    models.save_background(out)


def chosen_method(
    request: ExplainRequest, models: Ensemble, cases: Sequence[Case], before: Mapping[str, Any]
) -> RunChoice:
    """Choose the method of a run with `auto`; a resumed run keeps its method."""
    if before.get("choice"):
        return RunChoice.from_dict(before["choice"])

    def bag_of(case: Case) -> tuple[Bag, Any]:
        bag, _ = read_case(case, **request.reading)
        predicted = predicted_by(models.models, bag) if len(models.models) > 1 else None
        return bag, case_targets(request, case, models.spec, predicted)[0]

    with memory_budget(request.memory):
        params = method_parameters(request)
        return choose_for_run(models.models, cases, bag_of, params=params, seed=request.seed)


def with_method(request: ExplainRequest, choice: Choice) -> ExplainRequest:
    """Replace `auto` in a request by the method that was chosen."""
    methods = dict.fromkeys(choice.method if name == AUTO else name for name in request.methods)
    params = {name: dict(own) for name, own in (request.params or {}).items() if name in methods}
    if choice.params:
        params[choice.method] = {**choice.params, **params.get(choice.method, {})}
    return request.replace(methods=tuple(methods), params=params or None)


def features_of_slides(request: ExplainRequest, out: Path, listener: Listener) -> SlideFeatures:
    """Tile and encode the slides of a request into `out`, after all checks that need no features."""
    from xmil.runs.slide_features import make_features

    spec: ModelSpec | None = None
    sources = model_paths(request.model)
    if all(isinstance(path, Path) or hasattr(getattr(path, "model", None), "spec") for path in sources):
        models, _ = open_models(request)  # other models need features for a trial
        check_request(request, models)
        spec = models.specs[0]
    check_folder(out, KIND)
    return make_features(request, spec, out, listener)


def method_parameters(request: ExplainRequest) -> Parameters:
    """Collect parameters by method; those with contexts also say which share of the bag each keeps.

    >>> params = {"lrp": {"contexts": 24}}
    >>> method_parameters(ExplainRequest.build(model="m.pt", features="f", params=params))
    {'lrp': {'keep': 0.5, 'contexts': 24}}
    """
    parameters = {name: dict(own) for name, own in (request.params or {}).items()}
    for name, own in parameters.items():
        if own.get("contexts") and name in METHODS and METHODS[name].contexts:
            parameters[name] = {"keep": KEEP, **own}
    return parameters


def earlier_methods(request: ExplainRequest, out: Path, before: Mapping[str, Any]) -> Parameters:
    """Find the methods of the run in a folder, with their parameters.

    A method with other parameters than in that run is an error. A method in run.json that no slide's file
    has, because adding it failed, does not count.
    """
    if before.get("kind") != KIND:
        return {}
    own, stored = method_parameters(request), before.get("settings", {})
    methods = stored_methods(out, before.get("fingerprint"), stored.get("methods", ()))
    earlier = {name: stored.get("params", {}).get(name, {}) for name in methods}
    again = [name for name in request.methods if name in earlier]
    old, new = {name: earlier[name] for name in again}, {name: own.get(name, {}) for name in again}
    if old != json.loads(json.dumps(new, default=str)):
        raise other_settings(out, {"params": old}, {"params": new})
    return earlier


def stored_methods(out: Path, fingerprint: str | None, names: Sequence[str]) -> list[str]:
    """Select the methods that some slide's file has; usually the first file has them all."""
    missing = set(names)
    for path in (out / "slides").glob("*.parquet"):
        if not missing:
            break
        with suppress(FileError, OSError, *DAMAGED):
            header, _ = read_provenance(path)
            if header.get("provenance", {}).get("fingerprint") == fingerprint:
                missing -= methods_of(header)
    return [name for name in names if name not in missing]


def methods_of(header: Mapping[str, Any]) -> set[str]:
    """The methods in the header of a slide's file."""
    return {column["method"] for column in header["columns"].values()}


def check_request(request: ExplainRequest, models: Ensemble) -> ModelSpec:
    """Refuse a request that the models or methods cannot serve; return the spec that the models share."""
    spec = models.spec
    if request.interactions and (request.interactions < 2 or request.by != "slide"):
        raise InputError(
            "Pairs that interact need two patches or more, of one slide: `interactions=2`, `by='slide'`."
        )
    if request.interactions and len(models.models) > 1:
        raise InputError(
            "Pairs that interact are found for one model, not for an ensemble; leave out `interactions=`."
        )
    if not request.methods or not request.target:
        raise InputError("There is nothing to explain: name at least one method and one target.")
    check_output(request)
    parameters = method_parameters(request)
    Check(request.check)
    for model in models.models:
        for name in (name for name in request.methods if name != AUTO):
            _check_method(name, model, parameters.get(name, {}), request.output)
    for name, own in parameters.items():
        if name not in request.methods and not (AUTO in request.methods and name in AUTO_METHODS):
            methods = ", ".join(request.methods)
            raise InputError(
                f"`params={name}.{next(iter(own), '...')}` is for {name!r}, which is not among the methods "
                f"({methods}).",
                parameter="params",
            )
    try:
        for text in request.target:
            _check_target(text, spec)
    except UnknownNameError as error:
        if not targets_bins(request) or (warning := bins_warning(models.specs)) is None:
            raise
        raise InputError(f"{error} Here {warning}") from None
    return spec


def targets_bins(request: ExplainRequest) -> bool:
    """Whether some target of a survival model is not its risk."""
    return not set(request.target) <= {PREDICTED, RISK}


def check_output(request: ExplainRequest) -> None:
    """Refuse an unknown output, which may be meant as the folder for results."""
    if request.output not in (None, *OUTPUTS, *own_outputs()):
        error = unknown_name("output", request.output, OUTPUTS)
        raise UnknownNameError(f"{error} For the folder for results, pass `out={request.output}`.")


def _check_method(name: str, model: MILModel, own: Mapping[str, Any], output: str | None) -> None:
    method = METHODS[name]
    method.check_model(Network(model))
    method.check_parameters(own)
    method.check_output(output)
    check_names("preset", [own.get("preset", "default")], PRESETS)


def case_targets(
    request: ExplainRequest, case: Case, spec: ModelSpec, predicted: int | None = None
) -> list[Any]:
    """List the targets of one bag; `predicted` is the class that an ensemble predicts."""
    targets: list[Any] = []
    for text in request.target:
        match text:
            case "predicted":
                targets.append(predicted)
            case "label":
                if case.label is None:
                    raise InputError(
                        f"{case.name}: has no label in the cohort, so `target='label'` cannot be explained."
                    )
                targets.append(int(case.label))
            case "all":
                targets += range(spec.n_targets)
            case _:
                targets.append(resolve_target(text, spec))
    distinct = list(dict.fromkeys(map(Target.of, targets)))
    return [target for target in distinct if target.cls is not None] if ALL in request.target else distinct


@dataclass(frozen=True)
class Questions:
    """What decides the results of a run: the request, the models, and the methods already in the folder."""

    request: ExplainRequest
    of_models: Mapping[str, Any]
    digests: tuple[str, ...]
    earlier: Parameters = field(default_factory=dict)

    @property
    def methods(self) -> Parameters:
        """All methods of the folder with their parameters, those of the request last."""
        own = method_parameters(self.request)
        return {**self.earlier, **{name: own.get(name, {}) for name in self.request.methods}}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the run."""
        request, methods = self.request, self.methods
        settings: dict[str, Any] = {
            "methods": list(methods),
            "targets": list(request.target),
            "output": request.output,
            "params": {name: own for name, own in methods.items() if own},
            "by": request.by,
            "seed": request.seed,
            "reading": request.reading,
        }
        pairs = {"interactions": request.interactions} if request.interactions else {}
        return request.with_options({**settings, **pairs, "models": list(self.digests), **self.of_models})

    @cached_property
    def fingerprint(self) -> str:
        """The name of the settings, in the file of each slide."""
        return fingerprint(KIND, self.settings, GROWS)

    def about(self) -> dict[str, Any]:
        """Entries of run.json on the request."""
        request = self.request
        return {
            "methods": list(self.methods),
            "targets": list(request.target),
            **request.places(),
            "request": request.as_dict(),
            "seed": request.seed,
        }

    def item_of(self, case: Case) -> Item[Case]:
        """Make the item of a case: done once its files have all methods of the request."""
        return item_of_case(case, parts=self.request.methods, targets=self.targets_of(case))

    def targets_of(self, case: Case) -> list[str]:
        """The targets of a case, where `label` says which."""
        return [f"label={case.label}" if text == LABEL else text for text in self.request.target]

    def file_provenance(self, case: Case) -> dict[str, Any]:
        """Provenance of a slide's file; the file is current if a new run would write the same."""
        about: dict[str, Any] = {"fingerprint": self.fingerprint, "targets": self.targets_of(case)}
        mpp = [own.get("mpp") for own in case.files]
        others = [{name: value for name, value in own.items() if name != "mpp"} for own in case.files]
        about |= {"mpp": mpp} if any(mpp) else {}
        about |= {"files": others} if any(others) else {}
        return dict(json.loads(json.dumps(about, default=str)))

    def source_of(self, case: Case, header: Mapping[str, Any]) -> str | None:
        """The features of a slide's file, if it was made with these settings for this case."""
        stored = header.get("provenance", {})
        together = stored.get("case", {"slides": list(case.slides[:1])})["slides"] == list(case.slides)
        if not together or any(stored.get(key) != v for key, v in self.file_provenance(case).items()):
            return None
        source = stored.get("source")
        return source if isinstance(source, str) else None


def adopt_slides(questions: Questions, models: Ensemble, item: Item[Case]) -> Record | None:
    """Make the record of a case from the headers of its files, if a run with these settings wrote them."""
    case, out = item.what, folder_of(questions.request)
    try:
        stored = [read_provenance(slide_file(out, slide)) for slide in case.slides]
        headers = [header for header, _ in stored]
        sources = [questions.source_of(case, header) for header in headers]
        if None in sources:
            return None
        shared = set.intersection(*map(methods_of, headers))
        seconds = read_rows(out / SLIDES)
        rows = []
        for place, (header, n) in enumerate(stored):
            columns = list(header["columns"].values())
            logits = header["provenance"]["logits"] if len(models.models) > 1 else columns[0]["logits"]
            spent = seconds.get(case.slides[place], {}).get("seconds")
            spec = vars(models.spec)
            row = slide_row(
                case, place, logits=logits, spec=spec, n=n, seconds=float(spent) if spent else None
            )
            rows.append({**row, **_column_notes(columns, stored_edge(header))})
        edges = guessed_edges(zip(case.slides, map(stored_edge, headers), strict=True))
    except (FileError, OSError, *DAMAGED):
        return None  # absent or damaged: explain it again
    return Record(rows, facts_of(edges), sorted(shared), list(sources), dict(item.decides))


def facts_of(edges: Mapping[str, Patches]) -> dict[str, Any]:
    """The facts of a record: patch edges that were guessed, by slide."""
    if not edges:
        return {}
    own = {slide: {"patch_size": e.patch_size, "edge_guess": e.edge_guess} for slide, e in edges.items()}
    return {"edges": own}


@dataclass
class Summary:
    """What sums up a run: summary/, the verdict and the warnings; `lines` are for the screen."""

    questions: Questions
    models: Ensemble
    cases: Sequence[Case]
    missing: Missing
    chosen: RunChoice | None  # with `auto`
    before: Mapping[str, Any]  # run.json of the earlier run in the folder
    lines: list[str] = field(default_factory=list)
    rows_before: set[str] = field(default_factory=set)  # slides in the earlier table

    def __post_init__(self) -> None:
        with suppress(XmilError):
            self.rows_before = set(read_rows(self.out / SLIDES))

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return folder_of(self.questions.request)

    def about(self) -> dict[str, Any]:
        """Entries of run.json on the choice of `auto`."""
        return {} if self.chosen is None else {"choice": self.chosen.as_dict()}

    def write(self, tally: Tally) -> Mapping[str, Any]:
        """Write the summary and the verdict; warn if a finished slide's file cannot be read."""
        cases = [case for case in self.cases if case.name in tally.records]
        files = [slide_file(self.out, slide) for case in cases for slide in case.slides]
        ready: dict[Path, list[SlideSummary]] = {}
        for record in tally.records.values():
            for slide, parts in (record.extra or {}).items():
                ready[slide_file(self.out, slide)] = parts
        workers = self.questions.request.pool
        summarised = summarise_run(
            self.out, files, workers=workers, ready=ready, made_of=self.before.get("summary")
        )
        edges = {
            slide: Patches(**own)
            for record in tally.records.values()
            for slide, own in record.facts.get("edges", {}).items()
        }
        self._describe(tally, summarised.outliers, edges)
        uses_bins = targets_bins(self.questions.request)
        warnings = warnings_of_models(self.models, cases, self.missing, uses_bins=uses_bins)
        warnings += filter(None, [guessed_edges_warning(edges), summarised.warning])
        verdict = self._judge(cases, tally)
        about = {} if verdict is None else {"verdict": verdict}
        return {**about, "summary": summarised.made_of, "warnings": warnings}

    def _describe(self, tally: Tally, outliers: Sequence[str], edges: Mapping[str, Patches]) -> None:
        """Write lines on outlier slides, and on warnings in slides.csv."""
        if outliers:
            n = counted(len(outliers), "outlier slide")
            self.lines.append(f"{n}: {shorten(list(outliers), 5)} (summary/outliers.csv)")
        rows, warned = tally.rows, {}
        for slide, row in rows.items():
            note = edges[slide].edge_note if slide in edges else None  # it has a line for all slides
            if text := str(row.get("warnings") or "").removesuffix(note or "").strip():
                warned[slide] = text
        if warned:
            slide, text = next(iter(warned.items()))
            share = f"{len(warned)} of {counted(len(rows), 'slide')} carry a warning (slides.csv)"
            self.lines.append(f"{share}; {slide}: {text}")

    def _judge(self, cases: Sequence[Case], tally: Tally) -> Mapping[str, Any] | None:
        """Judge the maps; keep the verdict of the folder if nothing is new and it has its cases."""
        request, chosen, judged = self.questions.request, self.chosen, self.before.get("verdict")
        check = Check(request.check)
        names = {case.case_id or case.name for case in cases}
        slides = {slide for case in cases for slide in case.slides}
        is_old = not tally.done and slides <= self.rows_before
        least = 0 if check.text == SOME else min(check.most, len(names))
        old = set(judged.get("cases", ())) if judged else set()
        if not check.most or (judged and is_old and len(old) >= least and names.issuperset(old)):
            return judged
        if chosen is not None and chosen.choice.verdict is not None:
            return chosen.choice.verdict.as_dict()
        used = frozenset() if chosen is None else chosen.cases
        judging = [case for case in cases if (case.case_id or case.name) not in used]
        note = f"the method was chosen on {counted(len(used), 'other case')}"
        if not judging:
            judging = list(cases)
            note = "the method was chosen on these cases, so this is optimistic"
        order = in_seeded_order(judging, request.seed)
        with memory_budget(request.memory):
            verdict = judge_run(check, self.models.models, order, self._maps, seed=request.seed)
        if verdict is not None and used:
            verdict = verdict.with_note(note)
        return None if verdict is None else verdict.as_dict()

    def _maps(self, case: Case) -> tuple[Bag, Target, dict[str, npt.NDArray[np.float32]]]:
        """Read a case's bag, and the scores of its first target by each method."""
        request = self.questions.request
        stored = [read_explanations(slide_file(self.out, slide)) for slide in case.slides]
        target = stored[0][0].target
        methods = dict.fromkeys([*request.methods, *(e.method for e in stored[0])])
        scored = {
            name: [e.scores for part in stored for e in part if (e.method, e.target) == (name, target)]
            for name in methods
        }
        scores = {name: np.concatenate(parts) for name, parts in scored.items() if len(parts) == len(stored)}
        return read_case(case, **request.reading)[0], target, scores


def dropped_note(request: ExplainRequest, items: Sequence[Case], before: Mapping[str, Any]) -> str | None:
    """Write a line on slides explained earlier but not now, and on how to bring them back."""
    out = folder_of(request)
    slides = {slide for case in items for slide in case.slides}
    dropped = sorted({path.stem for path in (out / "slides").glob("*.parquet")} - slides)
    if not dropped:
        return None
    current = request.places()
    inputs = [f"`{key}={shlex.quote(str(before[key]))}`" for key in current if before.get(key)]
    changed = any(before.get(key) != value for key, value in current.items())
    options = " ".join(inputs) if changed and inputs else "their `features=`, `cohort=` and `split=`"
    return (
        f"{out}: {counted(len(dropped), 'slide')} explained earlier, not part of this run: "
        f"{shorten(dropped, 3)}. "
        f"slides.csv and summary/ leave them out, but their files stay; the same command with {options} "
        "brings them back."
    )


def folder_of(request: ExplainRequest) -> Path:
    """The folder for results, which `explain_run` requires."""
    assert request.out is not None  # noqa: S101  # narrows the type for mypy
    return request.out


def _column_notes(columns: Sequence[Mapping[str, Any]], patches: Patches) -> dict[str, str | None]:
    """Fill the columns `measured` (what scores are measured against) and `warnings` of a slide's row."""
    methods_by_text: dict[str, dict[str, None]] = {}
    for column in columns:
        for text in column.get("warnings", ()):
            methods_by_text.setdefault(text, {})[column["method"]] = None
    several = len({column["method"] for column in columns}) > 1
    sentences = [
        f"{', '.join(methods)}: {text}" if several else text for text, methods in methods_by_text.items()
    ]
    sentences += filter(None, [patches.edge_note])
    return {"measured": "; ".join(measured_columns(columns)) or None, "warnings": " ".join(sentences) or None}


def resolve_target(text: str, spec: ModelSpec) -> Target:
    """Read a target as users write it: a class by name or number, or a contrast of two.

    Models of an ensemble may name it differently; its number is the same in all of them.

    >>> str(resolve_target("HPV+:HPV-", ModelSpec("attnmil", 4, 2, class_names=("HPV-", "HPV+"))))
    'HPV+-vs-HPV-'
    """
    target, names = Target(text), spec.target_names
    if ":" in text and text not in (names or ()):
        first, second = text.split(":", 1)
        target = Target(first.strip(), second.strip())
    return target.resolve(n_classes=spec.n_targets, predicted=0, class_names=names)


def _check_target(text: str, spec: ModelSpec) -> None:
    if text in (PREDICTED, ALL):
        return
    if text == LABEL:
        if TASKS[spec.task].truth != "class":
            raise InputError(
                f"The target 'label' is for classes, which a {spec.task} model lacks; use 'predicted'."
            )
        return
    target = resolve_target(text, spec)
    if target.against is not None and RISK in (target.name, target.against_name):
        raise InputError(f"The contrast {text!r} needs classes, values or time bins, not a risk.")


@dataclass(frozen=True)
class Explaining:
    """What the workers of a run share; summaries of slides travel back unless there are many."""

    questions: Questions
    device: str
    keeps_summaries: bool = True


@dataclass(frozen=True)
class Read:
    """The bag of a case, the bags of its slides, and their rows in it."""

    bag: Bag
    parts: list[Bag]
    rows: list[slice]
    earlier: list[list[Explanation]]  # of each slide, from its file
    seconds: float
    is_untrained: bool = False  # whether the encoder of its features is


@dataclass(frozen=True)
class ExplainedCase:
    """A case that is explained, but not written yet."""

    item: Item[Case]
    read: Read
    explanations: list[Explanation]
    logits: list[list[float]]
    seconds: float


def make_explainer(explaining: Explaining, models: Ensemble) -> Stages[Item[Case], Record]:
    """Make the worker: it reads a case ahead, and writes it while the next one is explained."""
    explainer = Explainer(explaining, models)
    return Stages(explainer.read, explainer.work, explainer.write)


class Explainer:
    """Explains one case after another with the models of a run."""

    def __init__(self, explaining: Explaining, models: Ensemble) -> None:
        self.questions, self.device = explaining.questions, explaining.device
        self.keeps_summaries = explaining.keeps_summaries
        self.models, self.spec = models.models, models.spec
        self.request = self.questions.request
        self.out = folder_of(self.request)
        self.parameters = method_parameters(self.request)
        self._empty = pinned_empty if self.device.startswith("cuda") else np.empty

    def read(self, item: Item[Case]) -> Read:
        """Read the bags of a case, ahead in a thread."""
        case = item.what
        start = time.perf_counter()
        for slide in case.slides:
            if not is_plain(slide):
                raise InputError(f"The slide_id {slide!r} cannot name a file; rename the slide.")
        for path in case.paths:
            read_ahead(path)
        options, pairs = self.request.reading, zip(case.slides, case.paths, strict=True)
        headers = [(open_bag(p, **case.reading(i, options)), s) for i, (s, p) in enumerate(pairs)]
        is_single = len(headers) == 1  # slides of a case are joined in float32
        parts = [named(h.read_stored(self._empty) if is_single else h.read(), slide) for h, slide in headers]
        bag, rows = join_bags(parts, name=case.name)
        if len(parts) > 1:  # views, to keep the features in memory once
            parts = [replace(part, features=bag.features[r]) for part, r in zip(parts, rows, strict=True)]
        earlier = [self._earlier(item, place) for place in range(len(parts))]
        trained = self.spec.features or {}
        untrained = any(is_untrained(trained, feature_facts(header)) for header, _ in headers)
        return Read(bag, parts, rows, earlier, time.perf_counter() - start, untrained)

    def _earlier(self, item: Item[Case], place: int) -> list[Explanation]:
        """Read the explanations in a slide's file of this run, to which other methods are added."""
        case = item.what
        path = slide_file(self.out, case.slides[place])
        if not path.exists():
            return []
        try:
            source = self.questions.source_of(case, read_provenance(path)[0])
            is_same = source == item.sources[place] or unchanged(case.paths[place], source, times=True)
            return read_explanations(path) if is_same else []
        except (FileError, OSError, *DAMAGED):
            return []  # damaged: explain it again

    def work(self, item: Item[Case], read: Read) -> ExplainedCase:
        start = time.perf_counter()
        case = item.what
        has = [{e.method for e in own} for own in read.earlier]
        methods = [name for name in self.request.methods if not all(name in own for own in has)]
        methods = methods or list(self.request.methods)  # a worker wrote the file and died before replying
        explanations, logits = self._within_memory(case, read.bag, methods)
        if read.is_untrained:
            explanations = [replace(e, warnings=[*e.warnings, UNTRAINED]) for e in explanations]
        if self.request.interactions and not all(has):
            self._write_pairs(case, read.bag, explanations)
        seconds = (read.seconds + time.perf_counter() - start) / len(read.parts)
        return ExplainedCase(item, read, explanations, logits, seconds)

    def write(self, work: ExplainedCase) -> Record:
        """Write the files of a case's slides while the next case is explained."""
        case, read = work.item.what, work.read
        written = {slide: self._write(work, place) for place, slide in enumerate(case.slides)}
        every = [e for own in (*read.earlier, work.explanations) for e in own]
        columns = [{"method": e.method, "params": e.params, "warnings": e.warnings} for e in every]
        about: dict[str, Any] = {"logits": work.logits, "spec": vars(self.spec), "seconds": work.seconds}
        rows = [
            {**slide_row(case, i, n=len(part), **about), **_column_notes(columns, part.patches)}
            for i, part in enumerate(read.parts)
        ]
        edges = guessed_edges(zip(case.slides, (part.patches for part in read.parts), strict=True))
        shared = set.intersection(*({e.method for e in own} for own in written.values()))
        summaries = None
        if self.keeps_summaries:
            summaries = {slide: [summarise_slide(e) for e in own if len(e)] for slide, own in written.items()}
        return Record(rows, facts_of(edges), sorted(shared), extra=summaries)

    def explain(
        self, case: Case, bag: Bag, methods: Sequence[str]
    ) -> tuple[list[Explanation], list[list[float]]]:
        """Explain every target by methods, averaged over an ensemble; also return each model's logits."""
        request, predicted = self.request, None
        if len(self.models) > 1 and PREDICTED in request.target:
            predicted = predicted_by(self.models, bag)
        targets = case_targets(request, case, self.spec, predicted)
        explanations: list[Explanation] = []
        logits: list[list[float]] = []
        for method in methods:
            own = self.parameters.get(method, {})  # random methods get a seed for each bag
            params = {**seeds(method, case.name, request.seed, contexts="contexts" in own), **own}
            each = [
                explain_targets(m, bag, targets, method=method, output=request.output, **params)
                for m in self.models
            ]
            logits = logits or [[float(value) for value in own[0].logits] for own in each]
            pairs = zip(*each, strict=True)
            explanations += each[0] if len(each) == 1 else [average(same, self.spec) for same in pairs]
        distinct = {e.column: e for e in explanations}  # the predicted class may be the label
        return list(distinct.values()), logits

    def _within_memory(
        self, case: Case, bag: Bag, methods: Sequence[str]
    ) -> tuple[list[Explanation], list[list[float]]]:
        """Explain with batches that fit the budget, with smaller ones if memory runs out."""
        budget = self.request.memory
        while True:
            try:
                with memory_budget(budget):
                    return self.explain(case, bag, methods)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            budget //= 4
            if budget < LEAST_MEMORY:
                raise InputError(
                    f"{case.name}: memory ran out for {len(bag):,} patches on {self.device}; use a "
                    "device with more, fewer `workers=`, or methods that need less."
                )
            if self.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def _write(self, work: ExplainedCase, place: int) -> list[Explanation]:
        """Write the file of a slide, with the explanations that it already had."""
        case, read, explanations, logits = work.item.what, work.read, work.explanations, work.logits
        part, rows = read.parts[place], read.rows[place]
        own = explanations if len(read.parts) == 1 else [slide_share(e, part, rows) for e in explanations]
        there = {e.column for e in read.earlier[place]}
        own = [*read.earlier[place], *(e for e in own if e.column not in there)]
        about = {**self.questions.file_provenance(case), "source": work.item.sources[place]}
        if len(logits) > 1:
            about["logits"] = logits  # of each model, since the risk of an ensemble is the mean of risks
        if len(read.parts) > 1:
            about["case"] = {"name": case.name, "slides": list(case.slides), "instances": len(read.bag)}
        write_explanations(own, slide_file(self.out, case.slides[place]), provenance=about)
        return own

    def _write_pairs(self, case: Case, bag: Bag, explanations: Sequence[Explanation]) -> None:
        """Write interactions of each target, before the slide's file, which marks the slide as done."""
        request = self.request
        for target in dict.fromkeys(e.target for e in explanations):
            with memory_budget(request.memory):
                pairs = interactions(
                    self.models[0],
                    bag,
                    target=target,
                    top=request.interactions,
                    output=request.output,
                    seed=[request.seed, crc32(case.name.encode())],
                )
            path = interactions_file(self.out, case.name, target)
            make_folder(path.parent)
            pairs.save(path)


def pinned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Allocate an array in page-locked memory, for asynchronous copies to a GPU."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    return np.asarray(torch.empty(shape, dtype=kind, pin_memory=True).numpy())


def read_ahead(path: Path) -> None:
    """Ask the system to prefetch a file while its header is read, if it can."""
    if hasattr(os, "posix_fadvise") and path.is_file():  # opening a pipe would block
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def slide_file(out: Path, slide: str) -> Path:
    return out / "slides" / f"{slide}.parquet"


def out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def slide_share(e: Explanation, part: Bag, rows: slice) -> Explanation:
    """The scores of one slide of a case, with the case's audit."""
    return replace(e.take(rows, part.patches), bag=part.slide_id)
