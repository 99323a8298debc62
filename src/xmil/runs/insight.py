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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import FloatArray
from xmil.core.errors import InputError, XmilError
from xmil.core.identity import file_digest
from xmil.core.names import listed
from xmil.core.parsing import parse_json
from xmil.core.run import Run
from xmil.data import feature_files, open_bag
from xmil.data.header import Header
from xmil.data.siblings import slide_name
from xmil.findings.dictionary import even_counts, fit_dictionary
from xmil.runs.cohort_run import CohortRun, TableRow, Tally, as_workers
from xmil.runs.insight_album import write_album
from xmil.runs.insight_cohort import CohortColumns, read_columns
from xmil.runs.insight_inputs import check_inputs, doubts, evaluated_run, explained_run
from xmil.runs.insight_regions import region_files
from xmil.runs.insight_shares import add_strong_shares
from xmil.runs.insight_slide import InsightJob, make_insight_worker
from xmil.runs.insight_tables import write_insight
from xmil.runs.listener import Listener
from xmil.runs.slide_inputs import StrPath, named_slides
from xmil.runs.workers.pool import MakeWorker, Workers

SANITY = 10  # slides of the sanity tests
MADE = ("report.html", "card.html", "card.json", "card.md", "album.pdf")


def insight(
    run: StrPath | Run,
    *,
    features: StrPath,
    cohort: StrPath | None = None,
    slides: StrPath | None = None,
    model: StrPath | None = None,
    out: StrPath | None = None,
    method: str = "lrp",
    target: str | int | None = None,
    label: str = "label",
    concepts: int = 20,
    dictionary: str = "kmeans",
    causes: str | Sequence[str] = (),
    beside: str | Sequence[StrPath] = (),
    evaluated: StrPath | None = None,
    album: bool = False,
    regions: StrPath | None = None,
    within: str | Sequence[str] = (),
    sanity: int = SANITY,
    seed: int = 0,
    format: str = "auto",  # noqa: A002 - the word users know
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    listener: Listener | None = None,
) -> Run:
    """Concepts, strategies, shortcuts and biomarkers of a run of `xmil explain`, into RUN/insight or `out`.

    `features` are the files that were explained. Concepts need relevance per feature: explanations with
    stored vectors (`--save-vectors`), or the `model`. `cohort` brings labels and columns of acquisition;
    `causes` names those to ask about, by default all that are not ids, splits or outcomes. `slides` bring
    pictures: properties of patches, and examples in the report. `model` may be the folder of a training:
    stability is then that of its folds; `beside` names further runs of the same slides to compare with.
    `evaluated` is a run of `xmil evaluate`, whose certificates go into card and album. `album` writes a PDF
    with a page for each slide. `regions` is a folder of annotations, <slide_id>.geojson: biomarkers are then
    given within them as well, or within their classes `within`. With the model, `sanity` slides are explained
    again, with it and with new weights in it, and the card says how the scores changed.
    """
    hear = listener or Listener()
    held = explained_run(run)
    place = held.path / "insight" if out is None else Path(out)
    chosen = InsightChoice(method, None if target is None else str(target), concepts, dictionary, seed)
    found = InsightRun(
        place,
        held,
        chosen,
        _feature_paths(features, held, follow_links=follow_links),
        None if model is None else Path(model),
        {} if slides is None else dict(named_slides(slides, follow_links=follow_links, say=hear.say).slides),
        read_columns(cohort, held.slides, label=label, causes=listed(causes)),
        tuple(explained_run(path).path for path in (listed(beside) if isinstance(beside, str) else beside)),
        None if evaluated is None else evaluated_run(evaluated),
        album,
        {} if regions is None else region_files(regions),
        tuple(listed(within)),
        sanity,
        format,
    )
    check_inputs(found)
    tally = found.go(list(found.items), workers=as_workers(workers), restart=restart, listener=hear)
    hear.say(f"{len(tally.done)} slides analysed, {tally}. See {place / 'report.html'}.")
    return found.saved()


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
    """A folder of findings on one run."""

    run: Run
    chosen: InsightChoice
    paths: Mapping[str, Path]
    model: Path | None = None
    pictures: Mapping[str, Path] = field(default_factory=dict)
    columns: CohortColumns = field(default_factory=CohortColumns)
    beside: tuple[Path, ...] = ()
    evaluated: Path | None = None
    album: bool = False
    regions: Mapping[str, Path] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    sanity: int = SANITY
    layout: str = "auto"  # of the features
    kind = "insight"
    folders = ("slides", "concepts", "consensus")
    verb = "looked at"

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The slides of the run that have features."""
        return tuple(slide for slide in self.run if slide in self.paths)

    def settings(self) -> dict[str, Any]:
        """What is looked for, in which run."""
        model = None if self.model is None else str(self.model)
        more: dict[str, Any] = {"within": list(self.within)} if self.within else {}
        more |= {"beside": [str(path.resolve()) for path in self.beside]} if self.beside else {}
        more |= {"weights": self.weights} if self.weights else {}
        return {**vars(self.chosen), "of": self.run.about.get("fingerprint"), "model": model, **more}

    @cached_property
    def weights(self) -> list[str]:
        """Checksums of the model's files: findings of other weights are not taken for those of these."""
        if self.model is None:
            return []
        from xmil.runs.ensemble import model_paths

        return [file_digest(path) for path in model_paths(self.model) if path.exists()]

    def about(self) -> dict[str, Any]:
        """The run that is looked at."""
        return {"run": str(self.run.path.resolve()), "task": self.run.task}

    def slides_of(self, item: str) -> Sequence[str]:
        """An item is one slide."""
        return (item,)

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        """Fit the dictionary, unless an earlier run of these settings has left it."""
        path = self.out / "dictionary.npz"
        if path.is_file():
            return
        sample = self._sample()
        kinds = min(self.chosen.concepts, len(sample))
        fit_dictionary(sample, concepts=kinds, kind=self.chosen.dictionary, seed=self.chosen.seed).save(path)

    def _sample(self) -> FloatArray:
        """Patches of every slide that can be read, in proportion; files are asked for these rows alone."""
        seed = self.chosen.seed
        sizes = {slide: (len(header), header.dim) for slide, header in self._headers()}
        counts = even_counts([n for n, _ in sizes.values()], seed=seed)
        rng, start = np.random.default_rng(seed), 0
        held = np.empty((int(counts.sum()), next(iter(sizes.values()))[1]), dtype=np.float32)
        for slide, count in zip(sizes, counts.tolist(), strict=True):
            rows = np.sort(rng.permutation(sizes[slide][0])[:count])
            if count:
                held[start : start + count] = open_bag(self.paths[slide], self.layout).read(rows).features
                start += count
        return held

    def _headers(self) -> Iterator[tuple[str, Header]]:
        for slide in self.items:
            with suppress(XmilError):  # the slide's failure says why
                yield slide, open_bag(self.paths[slide], self.layout)

    def make_worker(self, workers: Workers) -> MakeWorker[str, dict[str, Any]]:  # noqa: ARG002 - the base's
        """A worker has the dictionary, the model and the places of the files."""
        return partial(make_insight_worker, self.job)

    @cached_property
    def job(self) -> InsightJob:
        """What a worker needs to know."""
        return InsightJob(
            self.out, self.run.path, dict(self.paths), self.model, dict(self.pictures),
            self.chosen.method, self.chosen.target, self.folder.fingerprint, self.beside,
            {slide: path for slide, path in self.regions.items() if slide in self.paths}, self.within,
            self.layout,
        )  # fmt: skip

    def known(self, item: str) -> dict[str, Any] | None:
        """What a slide gave earlier under these settings."""
        try:
            held = parse_json((self.out / "slides" / f"{item}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        known = isinstance(held, dict) and held.get("fingerprint") == self.folder.fingerprint
        return held if known and held.get("source") == self.job.identity_of(item) else None

    def outputs(self, items: Sequence[str]) -> list[Path]:
        """What a restart removes."""
        made = [self.out / "slides" / f"{slide}.json" for slide in items]
        made += [self.out / "concepts" / f"{slide}.npz" for slide in items]
        made += [self.out / "consensus" / f"{slide}.parquet" for slide in items]
        return [*made, self.out / "dictionary.npz", *(self.out / name for name in MADE)]

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
        return doubts(self)

    def finish(
        self,
        items: Sequence[str],
        tally: Tally[dict[str, Any]],
        workers: Workers,  # noqa: ARG002 - the base's signature
    ) -> Mapping[str, Any]:
        """Tables over the cohort, report and card."""
        slides = [slide for slide in items if slide in tally.results]
        results = [tally.results[slide] for slide in slides]
        scale = add_strong_shares(self, slides, results)
        tally.rows |= {
            row["slide_id"]: row for s, r in zip(slides, results, strict=True) for row in self.rows_of(s, r)
        }
        self._write_tables(self.folder, items, tally)
        made = {"strong_above": scale, **write_insight(self, slides, results)}
        if self.album:
            write_album(self, slides, results)
        return made


def _feature_paths(features: StrPath, run: Run, *, follow_links: bool) -> dict[str, Path]:
    files, _ = feature_files(features, follow_links=follow_links)
    known = {slide_name(path): path for path in reversed(list(files))}
    if not any(slide in known for slide in run):
        raise InputError(
            f"{features}: holds no features of the run's slides; name the folder that was explained."
        )
    return known
