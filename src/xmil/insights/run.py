"""`insight`: what the model looks at over a cohort, from saved explanations and features.

run.json, slides.csv, failures.csv
dictionary.npz                       the concepts
slides/<slide_id>.json               the results of each slide
concept_stability.csv                agreement of seeds on groups of patches, by the number of concepts
concepts.csv, profiles.csv           relevance by concept, over the cohort and by slide
concepts/<slide_id>.npz              the share of each patch's score through each concept
classes.csv                          relevance by concept, class and slide, if several classes were explained
atlas/concept_<k>.jpg                patches of the leading concepts
strategies.csv, shortcuts.csv, biomarkers.csv, survival.csv, removals.csv, stability.csv, sanity.csv
consensus/<slide_id>.parquet         the agreement of the models of an ensemble, or of several runs
report.html, card.html, card.json, card.md, album.pdf
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray
from xmil.core.durable import unchanged, write_text
from xmil.core.errors import InputError, UnknownNameError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.request import takes
from xmil.core.text import counted, shorten
from xmil.data import feature_files, open_bag, read_bag, read_cohort
from xmil.data.cohort import read_cell
from xmil.data.header import slide_name
from xmil.execute import Listener, Step, TableRow, Tally, execute
from xmil.heatmaps import cut_patch, place_on
from xmil.insights.biomarkers import (
    OUTCOMES,
    STRONG,
    find_consensus,
    map_biomarkers,
    read_number,
    region_biomarkers,
    region_files,
    region_mask,
    strong_share,
)
from xmil.insights.concepts import (
    ConceptShares,
    Dictionary,
    compare_sizes,
    even_counts,
    feature_weights,
    fit_dictionary,
    leading_concepts,
    remove_concepts,
    split_scores,
)
from xmil.insights.pictures import write_album
from xmil.insights.shortcuts import INK, LIGHT, appearance, light, patch_correlations
from xmil.insights.tables import STABILITY, write_insight
from xmil.methods import explain
from xmil.methods.inside import baseline_shift, explain_again
from xmil.network import open_network
from xmil.runs.ensemble import BACKGROUND, Ensemble, load_models, recorded_features, recorded_model
from xmil.runs.inputs import caseless_warning, named_slides
from xmil.runs.requests import InsightRequest
from xmil.slides import open_slide
from xmil.storage import (
    ConceptMaps,
    Item,
    Record,
    Run,
    explained_run,
    fingerprint,
    make_folder,
    open_run,
    pick_explanation,
    read_explanations,
    read_json,
    read_provenance,
    write_explanations,
    write_table,
)

DECISIVE = ("method", "target", "concepts", "dictionary", "seed")
CASE, LABEL = "case_id", "label"
NOT_CAUSES = ("slide_id", CASE, "split", "fold", "path", "patient", *OUTCOMES)
Column = Mapping[str, Any]
VIEWED = 96  # patches of a slide to read as pictures, evenly by score
PIXELS = 64  # of such a picture
EXAMPLES = 5  # patches per concept and slide
DELETED = 5  # leading concepts to delete, if there is a model
Models = Sequence[Any]


@takes(InsightRequest, "run")
def insight(request: InsightRequest, *, listener: Listener | None = None) -> Run:
    """Find concepts, strategies, shortcuts and biomarkers in a run of `xmil explain`.

    Results go to RUN/insight or `out`. `features` are the explained files, by default where the run found
    them. Concepts need relevance per feature: explanations with stored vectors (lrp's `feature_level`), or
    the `model`, by default the checkpoint that the run names. `cohort` has labels, cases and columns of
    acquisition; `causes` names those to test, by default all but ids, splits and outcomes. `slides` provides
    pictures, for properties of patches and examples in the report. If `model` is the folder of a training,
    stability is measured over its folds; `beside` names other runs of the same slides to compare. `evaluated`
    is a run of `xmil evaluate`, whose certificates go into card and album. `album` writes a PDF with a page
    for each slide. `regions` is a folder of annotations, <slide_id>.geojson: biomarkers are then also
    computed within them, or within their classes `within`. With the model, `sanity` slides are explained
    again, by it and by a copy with new weights, and the card states how the scores changed.
    """
    listener, run = listener or Listener(), request.run
    explained = explained_run(run.path if isinstance(run, Run) else run)
    features = request.features or recorded_features(explained)
    model = request.model or recorded_model(explained, listener.say)
    request = request.replace(features=features, model=model)
    out = request.out or explained.path / "insight"
    pictures: Mapping[str, Path] = {}
    if request.slides is not None:
        pictures = named_slides(request.slides, follow_links=request.follow_links, say=listener.say).slides
    files, _ = feature_files(features, follow_links=request.follow_links)
    analysis = Analysis(
        out,
        request,
        explained,
        {slide_name(path): path for path in reversed(list(files))},
        pictures=dict(pictures),
        columns=read_columns(request, explained),
        beside=tuple(explained_run(path).path for path in request.beside),
        evaluated=None if request.evaluated is None else open_run(request.evaluated),
        regions={} if request.regions is None else region_files(request.regions),
    )
    check_inputs(analysis)
    step = Step(
        "insight",
        [Item(slide, slide, analysis.inputs_of(slide), by_time=False) for slide in analysis.items],
        settings=request.with_options(analysis.settings()),
        about={"run": str(explained.path.resolve()), "task": explained.task},
        make_worker=partial(make_slide_worker, analysis if request.pool.in_process else replace(analysis)),
        prepare=analysis.fit_dictionary,
        adopt=analysis.adopt,
        finish=analysis.finish,
        doing="analysing slides",
        verb="analysed",
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    listener.say(f"{len(tally.done)} slides analysed, {tally}. See {out / 'report.html'}.")
    return Run(out)


insight_slides = insight  # named as the other verbs over slides are


@dataclass(frozen=True)
class Analysis:
    """What all slides share: the run that explained them, the request, and their files."""

    out: Path
    request: InsightRequest
    explained: Run
    paths: Mapping[str, Path]  # of the features, by slide
    pictures: Mapping[str, Path]
    columns: CohortColumns
    beside: tuple[Path, ...]  # other runs of the same slides
    evaluated: Run | None
    regions: Mapping[str, Path]

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The slides of the run that have features."""
        return tuple(slide for slide in self.explained if slide in self.paths)

    @property
    def dictionary_path(self) -> Path:
        """The file of the dictionary."""
        return self.out / "dictionary.npz"

    def explanation(self, slide: str) -> Explanation:
        """Read the explanation of a slide by the method and target of the request."""
        return pick_explanation(self.explained.file(slide), self.request.method, self.request.target)

    def inputs_of(self, slide: str) -> tuple[Path, ...]:
        """The inputs of a slide's results: its explanations, its features and its region."""
        runs = [run / "slides" / f"{slide}.parquet" for run in (self.explained.path, *self.beside)]
        region = [self.regions[slide]] if slide in self.regions else []
        return (*runs, self.paths[slide], *region)

    def settings(self) -> dict[str, Any]:
        """The settings that decide results, and the run."""
        optional = {
            "within": list(self.request.within),
            "beside": [str(path.resolve()) for path in self.beside],
            "weights": self.weights,
        }
        return {
            **{name: getattr(self.request, name) for name in DECISIVE},
            "of": self.explained.about.get("fingerprint"),
            **{name: value for name, value in optional.items() if value},
        }

    @cached_property
    def weights(self) -> list[str]:
        """Digests of the models, so that results of other weights are not reused."""
        return [] if self.models is None else list(self.models.digests)

    @cached_property
    def models(self) -> Ensemble | None:
        """The models, with the background of the run."""
        if self.request.model is None:
            return None
        background = Background.load(self.explained.path / BACKGROUND)
        return load_models(self.request.model, background, self.request.features)

    def fit_dictionary(self) -> None:
        """Fit the dictionary and judge its size, unless an earlier run with these settings did."""
        table = self.out / STABILITY
        if self.dictionary_path.is_file() and table.is_file():
            return
        sample, request = self._sample_features(), self.request
        options: dict[str, Any] = {"kind": request.dictionary, "seed": request.seed}
        options["concepts"] = min(request.concepts, len(sample))
        if not self.dictionary_path.is_file():
            fit_dictionary(sample, **options).save(self.dictionary_path)
        agreement = compare_sizes(sample, **options)
        write_table(table, ("concepts", "agreement"), agreement.items())

    def _sample_features(self) -> FloatArray:
        """Sample patches of every readable slide, in proportion; read only these rows of the files."""
        seed, layout, sizes = self.request.seed, self.request.format, {}
        for slide in self.items:
            with suppress(XmilError):  # reported as the slide's failure
                header = open_bag(self.paths[slide], layout)
                sizes[slide] = (len(header), header.dim)
        counts = even_counts([n for n, _ in sizes.values()], seed=seed)
        rng, start = np.random.default_rng(seed), 0
        sample = np.empty((int(counts.sum()), next(iter(sizes.values()))[1]), dtype=np.float32)
        for slide, count in zip(sizes, counts.tolist(), strict=True):
            rows = np.sort(rng.permutation(sizes[slide][0])[:count])
            if count:
                sample[start : start + count] = open_bag(self.paths[slide], layout).read(rows).features
                start += count
        return sample

    def adopt(self, item: Item[str]) -> Record | None:
        """Make the record of a slide from its result, which in a run of xmil 0.2 says what made it."""
        try:
            result = read_json(self.result_file(item.key))
        except XmilError:
            return None
        mark = fingerprint("insight", self.request.with_options(self.settings()))
        if result.get("fingerprint") != mark or not isinstance(result.get("source"), list):
            return None
        return Record(self.rows_of(item.key, result), sources=result["source"], extra=result)

    def result_file(self, slide: str) -> Path:
        """The file of a slide's result."""
        return self.out / "slides" / f"{slide}.json"

    def rows_of(self, slide: str, result: dict[str, Any]) -> list[TableRow]:
        """Make the slide's row with its output and biomarkers."""
        row = {"slide_id": slide, "target": result["target"], "output": result["output"]}
        return [{**row, **result["biomarkers"]}]

    @cached_property
    def doubts(self) -> list[str]:
        """A sentence for each input that does not belong to the run."""
        doubts = []
        if featureless := [slide for slide in self.explained if slide not in self.paths]:
            doubts.append(f"{_count(featureless, ' of the run left out, without features')}.")
        if pictureless := [slide for slide in self.items if self.pictures and slide not in self.pictures]:
            doubts.append(f"{_count(pictureless, ' without a picture')}.")
        doubts += self.columns.notes
        if changed := [slide for slide in self.items if not _has_explained_features(self, slide)]:
            doubts.append(
                f"The features of {_count(changed)} are not those that the run explained; give the folder "
                "that it names."
            )
        explained = {str(digest) for digest in self.explained.settings.get("models") or () if digest}
        models, evaluated = self.models, self.evaluated
        if models is not None and explained and set(models.digests) != explained:
            names = ", ".join(path.name for path in models.paths)
            doubts.append(
                f"The run was explained with other models than {names}: scores and biomarkers are the "
                "run's; concepts, deletions and sanity tests are those of the model given."
            )
        stored = None if evaluated is None else evaluated.about.get("models")
        rows = [row for row in stored if isinstance(row, dict)] if isinstance(stored, list) else []
        digests = {str(row["digest"]) for row in rows if row.get("digest")}
        if evaluated is not None and explained and digests and digests != explained:
            doubts.append(
                f"{evaluated.path.name} evaluated other models than the run's: its certificates and measures "
                "are not of these explanations; evaluate the run's model."
            )
        return doubts

    def finish(self, tally: Tally) -> Mapping[str, Any]:
        """Write the tables over the cohort, report and card."""
        slides = [slide for slide in self.items if slide in tally.records]
        results = [tally.records[slide].extra or read_json(self.result_file(slide)) for slide in slides]
        sizes, patches = ([r["biomarkers"][name] for r in results] for name in ("mean_absolute", "patches"))
        scale = STRONG * float(np.average(sizes, weights=patches))  # the cohort's own
        for slide, result in zip(slides, results, strict=True):
            e, own = self.explanation(slide), result["biomarkers"]
            own["strong_share"] = strong_share(e.scores, scale)
            if slide in self.regions:
                inside = region_mask(self.regions[slide], e, self.request.within)
                own["region_strong_share"] = strong_share(e.scores, scale, region=inside)
            tally.records[slide] = replace(tally.records[slide], rows=self.rows_of(slide, result))
        about = {"strong_above": scale, **write_insight(self, slides, results)}
        if self.request.album:
            write_album(self, slides, results)
        return {"warnings": self.doubts, **about}


# Checking the inputs: columns of the cohort, features, model, slides and other runs.


@dataclass(frozen=True)
class CohortColumns:
    """Columns of the cohort by slide: label, possible causes, time and event; None where unknown.

    `cases` has the patient of each slide, or is empty if patients are unknown. `notes` lists what the table
    lacks.
    """

    label: Column = field(default_factory=dict)
    causes: Mapping[str, Column] = field(default_factory=dict)
    outcomes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cases: Mapping[str, str] = field(default_factory=dict)


def read_columns(request: InsightRequest, explained: Run) -> CohortColumns:
    """Read the columns of the cohort's table for the run's slides; refuse a table of other slides.

    If the table has no `case_id`, use the cases that the run recorded.
    """
    cohort, label, causes, slides = request.cohort, request.label, request.causes, explained.slides
    recorded = {slide: row["case_id"] for slide, row in explained.rows.items() if row.get("case_id")}
    if all(slide == case for slide, case in recorded.items()):  # a run without cases records the slides
        recorded = {}
    if cohort is None:
        return CohortColumns(cases=recorded)
    table = read_cohort(cohort, slide_column=request.slide_column)
    if not set(table.slides) & set(slides):
        first = f" Its first is {table.slides[0]!r}, the run's {slides[0]!r}." if len(table) else ""
        raise InputError(f"{cohort}: names none of the run's slides; give the table of this cohort.{first}")
    columns: dict[str, dict[str, str | None]] = {
        name: dict(zip(table.slides, map(read_cell, table.column(name)), strict=True))
        for name in table.columns
        if name != "slide_id"
    }
    causes = () if causes == ("all",) and "all" not in columns else causes
    for name in [*causes, *([] if label == LABEL else [label])]:
        if name not in columns:
            raise InputError(f"{cohort}: has no column {name!r}; found {', '.join(columns)}.")
    label, labels, label_notes = _find_labels(columns, label, explained)
    tested = causes or tuple(name for name in columns if name not in (*NOT_CAUSES, label))
    cases = {slide: case for slide, case in columns.get(CASE, {}).items() if case is not None} or recorded
    outcomes, unfit = _read_outcomes(columns, cases)
    notes = [*label_notes, *_missing_cells(Path(cohort).name, slides, columns, labels, label, cases), *unfit]
    if not tested:
        where = "; shortcuts were looked for in pictures" if request.slides else ""
        notes.append(f"{cohort}: has no column of a site or scanner{where}.")
    has_labels = any(labels.get(slide) is not None for slide in slides)
    return CohortColumns(
        labels if has_labels else {}, {name: columns[name] for name in tested}, outcomes, tuple(notes), cases
    )


def _find_labels(columns: Mapping[str, Column], label: str, explained: Run) -> tuple[str, Column, list[str]]:
    """Find the label's column and cells, and a note if they are in another column.

    Without the named column: the labels that the run recorded, else the column with the model's classes.
    """
    if label in columns:
        return label, columns[label], []
    recorded = {slide: row["label"] for slide, row in explained.rows.items() if row.get("label")}
    if recorded:
        return label, recorded, []
    classes = set(map(str, explained.spec.get("class_names") or ()))
    for name, cells in columns.items():
        values = {cell for slide in explained.slides if (cell := cells.get(slide)) is not None}
        if len(values) > 1 and values <= classes:
            return name, columns[name], [f"{name!r} holds the model's classes and is taken as the label."]
    return label, {}, []


def _missing_cells(
    table: str,
    slides: Sequence[str],
    columns: Mapping[str, Column],
    labels: Column,
    label: str,
    cases: Mapping[str, str],
) -> list[str]:
    """Write a sentence each for slides without a row, without a label and without a case."""
    notes = []
    rows: Iterable[str] = next(iter(columns.values()), slides)
    if absent := [slide for slide in slides if slide not in rows]:
        notes.append(f"{table}: has no row for {_count(absent, ' of the run')}.")
    unlabelled = [slide for slide in slides if labels.get(slide) is None]
    if len(unlabelled) == len(slides):
        notes.append(
            f"No slide has a {label!r}: shortcuts are tested over all slides together, so what goes with the "
            "truth looks like one. Name the column of the truth with `label=`."
        )
    elif unlabelled:
        who = _count(unlabelled, f" without a {label!r}")
        notes.append(f"Shortcuts in columns and light are tested without {who}.")
    if not cases:
        notes.append(
            f"{table}: has no case_id, so slides are taken as independent; if patients have several slides, "
            "p-values and intervals claim too much."
        )
    elif alone := caseless_warning([slide for slide in slides if slide not in cases]):
        notes.append(alone)
    return notes


def _count(slides: list[str], which: str = "") -> str:
    return f"{counted(len(slides), 'slide')}{which} ({shorten(slides, 5)})"


def _read_outcomes(
    columns: Mapping[str, Column], cases: Mapping[str, str]
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Read times and events as numbers, or say why they are not valid outcomes."""
    if not set(OUTCOMES) <= set(columns):
        return {}, []
    outcomes = {name: {s: read_number(cell) for s, cell in columns[name].items()} for name in OUTCOMES}
    times, events = ([value for value in outcomes[name].values() if value == value] for name in OUTCOMES)
    if not (times and events and min(times) >= 0 and set(events) <= {0.0, 1.0}):
        return {}, ["Survival was left out: 'time' must be numbers from 0 on, and 'event' 0 or 1."]
    for name, values in outcomes.items():
        of_case: dict[str, float] = {}
        for slide, value in values.items():
            case = cases.get(slide, slide)
            if value == value and of_case.setdefault(case, value) != value:
                return {}, [f"Survival was left out: slides of case {case!r} differ in {name!r}."]
    return outcomes, []


def check_inputs(run: Analysis) -> None:
    """Refuse inputs that do not fit the run, before computing anything."""
    if run.evaluated is not None:
        folder = run.evaluated.path
        if run.evaluated.kind != "evaluate" or not (folder / "summary.csv").is_file():
            raise InputError(
                f"{folder}: not a finished run of `xmil evaluate`; give its folder, or leave it out."
            )
    if not run.items:
        raise InputError(
            f"{run.request.features}: holds no features of the run's slides; name the folder that was "
            "explained."
        )
    _check_widths(run)
    _check_method(run)
    files_of = {"slides": run.pictures, "annotations (SLIDE.geojson)": run.regions}
    for what, files in files_of.items():
        if files and not any(slide in files for slide in run.items):
            raise InputError(f"{next(iter(files.values())).parent}: holds no {what} of the run's slides.")
    for path in run.beside:
        if not any(slide in run.items for slide in Run(path).slides):
            raise InputError(f"{path}: explains none of the run's slides; name a run of the same slides.")


def _check_widths(run: Analysis) -> None:
    """Refuse features of another width than the explained ones, and a model that takes another width."""
    width, unread = run.explained.spec.get("in_dim"), []
    if run.models is not None and isinstance(width, int):
        taken = run.models.spec.in_dim
        if taken != width:
            raise InputError(
                f"{run.models.paths[0]}: takes {taken} features, and the run explained {width}; give the "
                "run's model."
            )
    for slide in run.items:
        try:
            own = open_bag(run.paths[slide], run.request.format).dim
        except XmilError as error:
            unread.append(error)  # reported as the slide's failure, unless all slides fail
            continue
        width = width if isinstance(width, int) else own
        if own != width:
            raise InputError(
                f"{run.paths[slide]}: has {own} features, and the run explained {width}; give the features "
                "that were explained."
            )
    if len(unread) == len(run.items):
        raise unread[0]


def _check_method(run: Analysis) -> None:
    """Refuse a method or target that no slide was explained with."""
    unknown = []
    for slide in run.items:
        try:
            run.explanation(slide)
        except UnknownNameError as error:
            unknown.append(error)
        except XmilError:
            return  # unreadable, which the slide's failure reports
        else:
            return
    raise unknown[0]


def _has_explained_features(run: Analysis, slide: str) -> bool:
    """Whether a feature file is the explained one, as far as the run recorded it."""
    try:
        provenance = read_provenance(run.explained.file(slide))[0].get("provenance")
        stored = provenance.get("source") if isinstance(provenance, dict) else None
        path = run.paths[slide]
        return stored is None or unchanged(path, stored, times=True) or unchanged(path, stored)
    except XmilError:
        return True  # unreadable, which the slide's failure reports


# One slide: its concepts, its biomarkers, the look of its patches.


def make_slide_worker(run: Analysis) -> Callable[[Item[str]], Record]:
    """Make a function that analyses a slide, with dictionary and models loaded once."""
    models: Models = () if run.models is None else run.models.models
    dictionary = Dictionary.load(run.dictionary_path)

    def analyse(item: Item[str]) -> Record:
        result = _analyse(run, dictionary, models, item.key)
        write_text(run.result_file(item.key), json.dumps(result) + "\n")
        return Record(run.rows_of(item.key, result), extra=result)

    return analyse


def _analyse(run: Analysis, dictionary: Dictionary, models: Models, slide: str) -> dict[str, Any]:
    for folder in ("slides", "concepts", "consensus"):
        make_folder(run.out / folder)
    e = run.explanation(slide)
    bag = read_bag(run.paths[slide], run.request.format)
    if len(bag) != len(e):
        raise InputError(
            f"{run.paths[slide]}: has {len(bag)} patches and the explanation {len(e)}; give the features "
            "that were explained."
        )
    result: dict[str, Any] = {
        "target": str(e.target),
        "output": float(e.output),
        "audit": None if e.audit is None else e.audit.as_dict(),
        "biomarkers": map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp),
        "seen": _view_patches(run.pictures.get(slide), e),
    }
    shares = _split(run, dictionary, e, bag, models)
    if shares is not None:
        maps = ConceptMaps(shares.concepts, e.scores, e.method, str(e.target))
        maps.save(run.out / "concepts" / f"{slide}.npz")
        result |= _summarise(shares)
        result["removals"] = _delete_leading(models, e, dictionary, bag, shares)
        result["classes"] = _class_profiles(run, slide, dictionary, bag, models)
    scores = _scores_of_models(run, slide, e, bag, models)
    consensus = None if scores is None else find_consensus(scores)
    if slide in run.regions:
        inside = region_mask(run.regions[slide], e, run.request.within)
        result["biomarkers"] |= region_biomarkers(e, inside, consensus)
    if consensus is not None:
        result["stability"] = consensus.summary
        result["biomarkers"] |= consensus.shares
        path = run.out / "consensus" / f"{slide}.parquet"
        note = "Patches on which the models disagree, or spread widely, are zero."
        agreed = replace(
            e, scores=consensus.scores, spread=consensus.std, warnings=[*e.warnings, note],
            audit=None, relevance=None, stderr=None, stable=None,
        )  # fmt: skip
        write_explanations([agreed], path)
    return result


def _split(
    run: Analysis, dictionary: Dictionary, e: Explanation, bag: Bag, models: Models
) -> ConceptShares | None:
    """Split the scores by concept; None without relevance per feature, stored or computed with the models."""
    if e.relevance is not None:
        stored = Background.load(run.explained.path / BACKGROUND)
        background = stored or getattr(next(iter(models), None), "background", None)
        weights, baseline = _weigh_features(e, bag, background)
    elif models:  # the mean over models, with one at a time in memory
        parts = (
            _weigh_features(explain_again(model, bag, e), bag, getattr(model, "background", None))
            for model in models
        )
        weights, baseline = next(parts)
        for model_weights, model_baseline in parts:
            weights += model_weights
            baseline += model_baseline
        weights /= len(models)
        baseline /= len(models)
    else:
        return None
    return split_scores(dictionary, bag.features, weights, baseline)


def _weigh_features(e: Explanation, bag: Bag, background: Background | None) -> tuple[FloatArray, FloatArray]:
    """Compute the relevance per unit of each feature (n, d), and of patches that equal the baseline (n,)."""
    relevance = np.asarray(e.relevance, dtype=np.float32)
    shift, notes = baseline_shift(e, torch.from_numpy(bag.features), background, width=relevance.shape[1])
    if notes:
        raise InputError(f"{e.bag}: {notes[0]}")
    weights = feature_weights(bag.features - shift.numpy(), relevance)
    return weights, weights @ shift.numpy()


def _scores_of_models(
    run: Analysis, slide: str, e: Explanation, bag: Bag, models: Models
) -> FloatArray | None:
    """Collect scores (m, n) of the models of an ensemble, and of other runs; None if there is only one."""
    rows = [e.scores]
    if len(models) > 1:
        rows = [explain(model, bag, method=e.method, target=e.target).scores for model in models]
    for other in run.beside:
        path = other / "slides" / f"{slide}.parquet"
        second = pick_explanation(path, run.request.method, str(e.target.cls))
        if len(second) != len(e):
            raise InputError(
                f"{path}: explains {len(second)} patches, and {run.explained.path.name} {len(e)}."
            )
        rows.append(second.scores)
    return np.stack(rows) if len(rows) > 1 else None


def _summarise(shares: ConceptShares) -> dict[str, Any]:
    """Summarise a slide: its profile over concepts, the rest, and each concept's strongest patches."""
    strength = np.abs(shares.concepts)
    rows = np.argsort(-strength, axis=0, kind="stable")[:EXAMPLES]
    examples = [
        [[int(i), float(strength[i, k])] for i in rows[:, k] if strength[i, k] > 0]
        for k in range(strength.shape[1])
    ]
    rest = float(shares.residual.sum(dtype=np.float64) + shares.offset.sum(dtype=np.float64))
    return {"profile": shares.profile.tolist(), "residual": rest, "examples": examples}


def _class_profiles(
    run: Analysis, slide: str, dictionary: Dictionary, bag: Bag, models: Models
) -> dict[str, list[float]]:
    """Compute the profile of every explained class, if there are several and none is named."""
    every = [e for e in read_explanations(run.explained.file(slide)) if e.method == run.request.method]
    if run.request.target is not None or len(every) < 2:
        return {}
    pairs = ((str(e.target), _split(run, dictionary, e, bag, models)) for e in every)
    return {target: shares.profile.tolist() for target, shares in pairs if shares is not None}


def _delete_leading(
    models: Models, e: Explanation, dictionary: Dictionary, bag: Bag, shares: ConceptShares
) -> list[dict[str, Any]]:
    """Measure what deleting the slide's leading concepts does to the explained logit."""
    if not models or not isinstance(e.target.cls, int) or e.target.cls >= len(e.logits):
        return []
    output = MeanLogit(models, e.target.cls)
    leaders = leading_concepts(shares.profile[None], DELETED).tolist()
    slope = output.slope(bag.features)
    return remove_concepts(output, dictionary, bag.features, shares, slope=slope, concepts=leaders)


@dataclass(frozen=True, eq=False)
class MeanLogit:
    """The mean logit of a class over models, as a function of a bag's features."""

    models: Models
    cls: int

    def __call__(self, features: FloatArray) -> float:
        with torch.no_grad():
            return float(self._mean(torch.from_numpy(features)))

    def slope(self, features: FloatArray) -> FloatArray:
        """Compute the gradient at the features (n, d)."""
        x = torch.from_numpy(features).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self._mean(x), x)
        return np.asarray(gradient.numpy(), dtype=np.float32)

    def _mean(self, x: Any) -> Any:
        logits = [open_network(model, x.detach())[0](x[None])[0, self.cls] for model in self.models]
        return sum(logits) / len(logits)


def _view_patches(path: Path | None, e: Explanation) -> dict[str, Any]:
    """Measure the look of patches, evenly over the range of scores: within-slide correlations and means."""
    if path is None:
        return {}
    order = np.argsort(e.scores, kind="stable")
    rows = order[np.unique(np.linspace(0, len(order) - 1, VIEWED).round().astype(int))]
    try:
        with open_slide(path) as slide:
            boxes = place_on(e, slide).boxes()
            pixels = np.stack([cut_patch(slide, boxes[i], PIXELS) for i in rows])
    except XmilError as error:
        return {"problem": str(error)}  # the other results need no picture
    each = [appearance(patch) for patch in pixels]
    values = {name: np.array([numbers[name] for numbers in each]) for name in each[0]}
    within = patch_correlations(e.scores[rows], values)
    tint = light(pixels)
    return {
        "correlations": {name: value for name, value in within.items() if np.isfinite(value)},
        "means": {name: float(value.mean()) for name, value in values.items()},
        "made": {name: float((values[name] > 0).mean()) for name in INK} | {LIGHT: tint.colour},
        "stain": tint.stain,
    }
