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
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray
from xmil.core.errors import XmilError
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
from xmil.insights.report import PAGES
from xmil.insights.slide import make_slide_worker
from xmil.insights.tables import write_insight
from xmil.runs import Listener
from xmil.runs.cohort_run import CohortRun, TableRow, Tally
from xmil.runs.ensemble import model_paths
from xmil.runs.inputs import named_slides
from xmil.runs.requests import InsightRequest
from xmil.runs.workers.pool import MakeWorker, Workers
from xmil.storage import Run, explained_run, pick_explanation

LOOKED_FOR = ("method", "target", "concepts", "dictionary", "seed")


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
    pictures: Mapping[str, Path] = {}
    if request.slides is not None:
        pictures = named_slides(request.slides, follow_links=request.follow_links, say=listener.say).slides
    files, _ = feature_files(request.features, follow_links=request.follow_links)
    analysis = InsightRun(
        out,
        explained,
        request,
        {slide_name(path): path for path in reversed(list(files))},
        pictures=dict(pictures),
        columns=read_columns(
            request.cohort,
            explained.slides,
            label=request.label,
            causes=request.causes,
            run_cases={slide: row.get("case_id", "") for slide, row in explained.rows.items()},
        ),
        beside=tuple(explained_run(path).path for path in request.beside),
        evaluated=None if request.evaluated is None else evaluated_run(request.evaluated),
        regions={} if request.regions is None else region_files(request.regions),
    )
    check_inputs(analysis)
    tally = analysis.execute(
        list(analysis.items), workers=request.pool, restart=request.restart, listener=listener
    )
    listener.say(f"{len(tally.done)} slides analysed, {tally}. See {out / 'report.html'}.")
    return Run(analysis.out)


@dataclass(frozen=True)
class InsightRun(CohortRun[str, dict[str, Any]]):
    """A folder of findings on one run of explanations."""

    explained: Run
    request: InsightRequest
    paths: Mapping[str, Path]  # of the features, by slide
    pictures: Mapping[str, Path]
    columns: CohortColumns
    beside: tuple[Path, ...]  # further runs of the same slides
    evaluated: Path | None
    regions: Mapping[str, Path]
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
        return pick_explanation(self.explained.file(slide), self.request.method, self.request.target)

    def identity_of(self, slide: str) -> list[Any]:
        """What a slide's findings were made from: its explanations, its features and its region."""
        runs = [run / "slides" / f"{slide}.parquet" for run in (self.explained.path, *self.beside)]
        region = [self.regions[slide]] if slide in self.regions else []
        return [identity(path) for path in (*runs, self.paths[slide], *region)]

    def settings(self) -> dict[str, Any]:
        """What is looked for, in which run."""
        model = self.request.model
        more = {
            "within": list(self.request.within),
            "beside": [str(path.resolve()) for path in self.beside],
            "weights": self.weights,
        }
        return {
            **{name: getattr(self.request, name) for name in LOOKED_FOR},
            "of": self.explained.about.get("fingerprint"),
            "model": None if model is None else str(model),
            **{name: value for name, value in more.items() if value},
        }

    @cached_property
    def weights(self) -> list[str]:
        """Checksums of the model's files: findings of other weights are not taken for those of these."""
        paths = [] if self.request.model is None else model_paths(self.request.model)
        return [file_digest(path) for path in paths if isinstance(path, Path) and path.exists()]

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
        sample, request = self._sample_features(), self.request
        size = min(request.concepts, len(sample))
        dictionary = fit_dictionary(sample, concepts=size, kind=request.dictionary, seed=request.seed)
        dictionary.save(self.dictionary_path)

    def _sample_features(self) -> FloatArray:
        """Patches of every slide that can be read, in proportion; files are asked for these rows alone."""
        seed, layout, sizes = self.request.seed, self.request.format, {}
        for slide in self.items:
            with suppress(XmilError):  # the slide's failure says why
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
        return [*files, self.dictionary_path, *(self.out / name for name in (*PAGES, "album.pdf"))]

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
        sizes, patches = ([r["biomarkers"][name] for r in results] for name in ("mean_absolute", "patches"))
        scale = STRONG * float(np.average(sizes, weights=patches))  # the cohort's own
        for slide, result in zip(slides, results, strict=True):
            e, own = self.explanation(slide), result["biomarkers"]
            own["strong_share"] = strong_share(e.scores, scale)
            if slide in self.regions:
                inside = region_mask(self.regions[slide], e, self.request.within)
                own["region_strong_share"] = strong_share(e.scores, scale, region=inside)
            tally.rows |= {row["slide_id"]: row for row in self.rows_of(slide, result)}
        self._write_tables(self.folder, items, tally)
        about = {"strong_above": scale, **write_insight(self, slides, results)}
        if self.request.album:
            write_album(self, slides, results)
        return about
