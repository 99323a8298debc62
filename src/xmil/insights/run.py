"""`insight`: what the model looks at over a cohort, from saved explanations and features.

run.json, slides.csv, failures.csv
dictionary.npz                       the concepts
slides/<slide_id>.json               what each slide gave
concepts.csv, profiles.csv           relevance by concept, over the cohort and by slide
concepts/<slide_id>.npz              what of each patch's score goes through each concept
classes.csv                          relevance by concept, class and slide, if several classes were explained
atlas/concept_<k>.jpg                patches of the leading concepts
strategies.csv, shortcuts.csv, biomarkers.csv, survival.csv, removals.csv, stability.csv, sanity.csv
consensus/<slide_id>.parquet         what the models of an ensemble, or several runs, agree on
report.html, card.html, card.json, card.md, album.pdf
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray
from xmil.core.errors import InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.identity import file_digest, identity
from xmil.core.request import takes
from xmil.core.text import parse_json
from xmil.data import feature_files, open_bag
from xmil.data.header import slide_name
from xmil.insights.biomarkers import STRONG, region_files, region_mask, strong_share
from xmil.insights.concepts import even_counts, fit_dictionary
from xmil.insights.inputs import CohortColumns, check_inputs, evaluated_run, find_doubts, read_columns
from xmil.insights.pictures import write_album
from xmil.insights.slide import make_slide_worker
from xmil.insights.tables import write_insight
from xmil.runs import Listener
from xmil.runs.cohort_run import CohortRun, TableRow, Tally
from xmil.runs.ensemble import model_paths
from xmil.runs.inputs import StrPath, named_slides
from xmil.runs.requests import InsightRequest
from xmil.runs.workers.pool import MakeWorker, Workers
from xmil.storage import Run, explained_run, pick_explanation

SANITY = 10  # slides of the sanity tests
REPORTS = ("report.html", "card.html", "card.json", "card.md", "album.pdf")


@takes(InsightRequest, "run")
def insight(request: InsightRequest, *, listener: Listener | None = None) -> Run:
    """Concepts, strategies, shortcuts and biomarkers of a run of `xmil explain`, into RUN/insight or `out`.

    `features` are the files that were explained. Concepts need relevance per feature: explanations with
    stored vectors (lrp's `feature_level`), or the `model`. `cohort` brings labels, cases and columns of
    acquisition; `causes` names those to test, by default all that are not ids, splits or outcomes. `slides`
    bring pictures: properties of patches, and examples in the report. `model` may be the folder of a
    training: stability is then that of its folds; `beside` names further runs of the same slides to compare
    with. `evaluated` is a run of `xmil evaluate`, whose certificates go into card and album. `album` writes
    a PDF with a page for each slide. `regions` is a folder of annotations, <slide_id>.geojson: biomarkers
    are then given within them as well, or within their classes `within`. With the model, `sanity` slides are
    explained again, with it and with new weights in it, and the card says how the scores changed.
    """
    listener, run = listener or Listener(), request.run
    explained = explained_run(run.path if isinstance(run, Run) else run)
    out = request.out or explained.path / "insight"
    cases = {slide: row.get("case_id", "") for slide, row in explained.rows.items()}
    pictures = {}
    if request.slides is not None:
        listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
        pictures = dict(listing.slides)
    analysis = InsightRun(
        out,
        explained,
        InsightChoice(request.method, request.target, request.concepts, request.dictionary, request.seed),
        _feature_paths(request.features, explained, follow_links=request.follow_links),
        model=request.model,
        pictures=pictures,
        columns=read_columns(
            request.cohort,
            explained.slides,
            label=request.label,
            causes=list(request.causes),
            run_cases=cases,
        ),
        beside=tuple(explained_run(path).path for path in request.beside),
        evaluated=None if request.evaluated is None else evaluated_run(request.evaluated),
        album=request.album,
        regions={} if request.regions is None else region_files(request.regions),
        within=request.within,
        sanity=request.sanity,
        layout=request.format,
    )
    check_inputs(analysis)
    tally = analysis.execute(
        list(analysis.items), workers=request.pool, restart=request.restart, listener=listener
    )
    listener.say(f"{len(tally.done)} slides analysed, {tally}. See {out / 'report.html'}.")
    return Run(analysis.out)


@dataclass(frozen=True)
class InsightChoice:
    """What is looked for."""

    method: str = "lrp"
    target: str | None = None
    concepts: int = 20
    dictionary: str = "kmeans"
    seed: int = 0


@dataclass(frozen=True)
class InsightRun(CohortRun[str, dict[str, Any]]):
    """A folder of findings on one run of explanations."""

    explained: Run
    choice: InsightChoice
    paths: Mapping[str, Path]  # of the features, by slide
    model: Path | None = None
    pictures: Mapping[str, Path] = field(default_factory=dict)
    columns: CohortColumns = field(default_factory=CohortColumns)
    beside: tuple[Path, ...] = ()  # further runs of the same slides
    evaluated: Path | None = None
    album: bool = False
    regions: Mapping[str, Path] = field(default_factory=dict)
    within: tuple[str, ...] = ()  # classes of annotations that make a region
    sanity: int = SANITY
    layout: str = "auto"  # of the features
    kind = "insight"
    folders = ("slides", "concepts", "consensus")
    verb = "looked at"

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The slides of the run that have features."""
        return tuple(slide for slide in self.explained if slide in self.paths)

    @property
    def dictionary_path(self) -> Path:
        """The file of the dictionary."""
        return self.out / "dictionary.npz"

    def explanation(self, slide: str) -> Explanation:
        """The explanation of a slide that is looked at."""
        return pick_explanation(self.explained.file(slide), self.choice.method, self.choice.target)

    def identity_of(self, slide: str) -> list[Any]:
        """What a slide's findings were made from: its explanations, its features and its region."""
        runs = [run / "slides" / f"{slide}.parquet" for run in (self.explained.path, *self.beside)]
        region = [self.regions[slide]] if slide in self.regions else []
        return [identity(path) for path in (*runs, self.paths[slide], *region)]

    def settings(self) -> dict[str, Any]:
        """What is looked for, in which run."""
        model = None if self.model is None else str(self.model)
        more: dict[str, Any] = {"within": list(self.within)} if self.within else {}
        more |= {"beside": [str(path.resolve()) for path in self.beside]} if self.beside else {}
        more |= {"weights": self.weights} if self.weights else {}
        return {**vars(self.choice), "of": self.explained.about.get("fingerprint"), "model": model, **more}

    @cached_property
    def weights(self) -> list[str]:
        """Checksums of the model's files: findings of other weights are not taken for those of these."""
        if self.model is None:
            return []
        paths = [path for path in model_paths(self.model) if isinstance(path, Path)]
        return [file_digest(path) for path in paths if path.exists()]

    def about(self) -> dict[str, Any]:
        """The run that is looked at."""
        return {"run": str(self.explained.path.resolve()), "task": self.explained.task}

    def slides_of(self, item: str) -> Sequence[str]:
        """An item is one slide."""
        return (item,)

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        """Fit the dictionary, unless an earlier run of these settings has left it."""
        if self.dictionary_path.is_file():
            return
        sample, choice = self._sample_features(), self.choice
        size = min(choice.concepts, len(sample))
        dictionary = fit_dictionary(sample, concepts=size, kind=choice.dictionary, seed=choice.seed)
        dictionary.save(self.dictionary_path)

    def _sample_features(self) -> FloatArray:
        """Patches of every slide that can be read, in proportion; files are asked for these rows alone."""
        seed, sizes = self.choice.seed, {}
        for slide in self.items:
            with suppress(XmilError):  # the slide's failure says why
                header = open_bag(self.paths[slide], self.layout)
                sizes[slide] = (len(header), header.dim)
        counts = even_counts([n for n, _ in sizes.values()], seed=seed)
        rng, start = np.random.default_rng(seed), 0
        sample = np.empty((int(counts.sum()), next(iter(sizes.values()))[1]), dtype=np.float32)
        for slide, count in zip(sizes, counts.tolist(), strict=True):
            rows = np.sort(rng.permutation(sizes[slide][0])[:count])
            if count:
                sample[start : start + count] = open_bag(self.paths[slide], self.layout).read(rows).features
                start += count
        return sample

    def make_worker(self, workers: Workers) -> MakeWorker[str, dict[str, Any]]:  # noqa: ARG002 - the base's
        """A worker has the dictionary, the model and the places of the files."""
        return partial(make_slide_worker, self)

    def find_result(self, item: str) -> dict[str, Any] | None:
        """What a slide gave earlier under these settings."""
        try:
            result = parse_json((self.out / "slides" / f"{item}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(result, dict) or result.get("fingerprint") != self.folder.fingerprint:
            return None
        return result if result.get("source") == self.identity_of(item) else None

    def outputs(self, items: Sequence[str]) -> list[Path]:
        """What a restart removes."""
        kinds = (("slides", "json"), ("concepts", "npz"), ("consensus", "parquet"))
        files = [self.out / folder / f"{slide}.{suffix}" for folder, suffix in kinds for slide in items]
        return [*files, self.dictionary_path, *(self.out / name for name in REPORTS)]

    def rows_of(self, item: str, result: dict[str, Any]) -> list[TableRow]:
        """The slide with its output and biomarkers."""
        row = {"slide_id": item, "target": result["target"], "output": result["output"]}
        return [{**row, **result["biomarkers"]}]

    def warnings(self, items: Sequence[str], tally: Tally[dict[str, Any]]) -> list[str]:  # noqa: ARG002
        """Features, models and evaluations that are not the run's."""
        return self.doubts

    @cached_property
    def doubts(self) -> list[str]:
        """What was given and is not what the run was made of."""
        return find_doubts(self)

    def finish(
        self,
        items: Sequence[str],
        tally: Tally[dict[str, Any]],
        workers: Workers,  # noqa: ARG002 - the base's signature
    ) -> Mapping[str, Any]:
        """Write the tables over the cohort, report and card."""
        slides = [slide for slide in items if slide in tally.results]
        results = [tally.results[slide] for slide in slides]
        scale = self._add_strong_shares(slides, results)
        for slide, result in zip(slides, results, strict=True):
            tally.rows |= {row["slide_id"]: row for row in self.rows_of(slide, result)}
        self._write_tables(self.folder, items, tally)
        about = {"strong_above": scale, **write_insight(self, slides, results)}
        if self.album:
            write_album(self, slides, results)
        return about

    def _add_strong_shares(self, slides: Sequence[str], results: Sequence[dict[str, Any]]) -> float:
        """Give each slide the share of patches that score above the cohort's scale; returns that scale."""
        biomarkers = [result["biomarkers"] for result in results]
        sizes = [own["mean_absolute"] for own in biomarkers]
        scale = STRONG * float(np.average(sizes, weights=[own["patches"] for own in biomarkers]))
        for slide, own in zip(slides, biomarkers, strict=True):
            e = self.explanation(slide)
            own["strong_share"] = strong_share(e.scores, scale)
            if slide in self.regions:
                inside = region_mask(self.regions[slide], e, self.within)
                own["region_strong_share"] = strong_share(e.scores, scale, region=inside)
        return scale


def _feature_paths(features: StrPath, run: Run, *, follow_links: bool) -> dict[str, Path]:
    files, _ = feature_files(features, follow_links=follow_links)
    paths = {slide_name(path): path for path in reversed(list(files))}
    if not any(slide in paths for slide in run):
        raise InputError(
            f"{features}: holds no features of the run's slides; name the folder that was explained."
        )
    return paths
