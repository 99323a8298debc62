"""The cohort's part of an insight run: findings, tables, sanity tests, report and card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.budget import csv_rows
from xmil.core.durable import write_text
from xmil.core.errors import XmilError, refuse_damage
from xmil.core.text import counted, read_truth
from xmil.data import read_bag
from xmil.evaluate import LIMIT, SurvivalCurve, randomisation
from xmil.evaluate.statistics import FEWEST, Floats, spearman
from xmil.insights.biomarkers import OUTCOMES, correlation_with, read_number, survival_curves, survival_of
from xmil.insights.concepts import REMOVAL, find_strategies, removal_agreement
from xmil.insights.pictures import cut_patches, suspect_patches, write_sheet
from xmil.insights.report import BIOMARKERS, CONCEPTS, PAGES, ConceptRow, Findings
from xmil.insights.shortcuts import (
    LIGHT,
    Association,
    patch_associations,
    rank_associations,
    slide_associations,
    why_untested,
)
from xmil.methods import explain
from xmil.storage import write_table

if TYPE_CHECKING:
    from xmil.insights.run import Analysis

PICTURES, ON_SHEET = 12, 25  # patches of a concept in the report, and on its sheet
ONE_MODEL = 0.7  # if one model has a larger share of the absolute scores, the mean is hardly of several
REDRAWS = 3  # of new weights, in a sanity test
SAME = 0.9  # least rank correlation of repeated scores with the run's
OUTPUT = "plain output"
STABILITY = "concept_stability.csv"


@dataclass(frozen=True)
class _Cohort:
    """The analysed slides of a run, and their results."""

    run: Analysis
    slides: Sequence[str]
    results: Sequence[Mapping[str, Any]]

    @cached_property
    def cases(self) -> list[str] | None:
        """The case of each slide, or the slide itself; None if no slide has a case."""
        cases = self.run.columns.cases
        return [cases.get(slide, slide) for slide in self.slides] if cases else None

    def count_cases(self, rows: npt.ArrayLike) -> int:
        """Count the cases, or slides treated as independent, among marked slides (n,)."""
        units = self.slides if self.cases is None else self.cases
        return len({units[i] for i in np.flatnonzero(rows).tolist()})

    @cached_property
    def labels(self) -> list[Any] | None:
        """The label of each slide; None if no slide has one."""
        known = self.run.columns.label
        return [known.get(slide) for slide in self.slides] if known else None

    @cached_property
    def outcome(self) -> tuple[list[float], list[float]] | None:
        """Time and event of each slide, nan where unknown; None without these columns."""
        columns = self.run.columns.outcomes
        if not columns:
            return None
        times, events = ([columns[name].get(s, float("nan")) for s in self.slides] for name in OUTCOMES)
        return times, events

    def biomarker(self, name: str) -> list[float]:
        """List a biomarker by slide, nan where it is missing."""
        if name == OUTPUT:
            return [float(result["output"]) for result in self.results]
        return [result["biomarkers"].get(name, float("nan")) for result in self.results]

    @cached_property
    def causes(self) -> dict[str, list[Any]]:
        """The columns to test, by slide."""
        columns = self.run.columns.causes
        return {name: [cells.get(slide) for slide in self.slides] for name, cells in columns.items()}

    @cached_property
    def profiles(self) -> Floats:
        """Relevance by slide and concept (m, k), of slides with a profile."""
        return np.array([result["profile"] for result in self.results])


def write_insight(
    run: Analysis, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Write all files over the cohort; return the entries for run.json."""
    cohort = _Cohort(run, slides, results)
    rows = [i for i, result in enumerate(results) if "profile" in result]
    split = _Cohort(run, [slides[i] for i in rows], [results[i] for i in rows])  # slides with concepts
    strategies = None
    if split.slides:
        strategies = find_strategies(split.profiles, cases=split.cases, seed=run.request.seed)
    shortcuts = _find_shortcuts(cohort)
    reasons = {
        name: why_untested(cells, cohort.cases, labels=cohort.labels) for name, cells in cohort.causes.items()
    }
    findings = Findings(
        title=run.explained.path.resolve().name,
        about=_describe(cohort),
        concepts=_rank_concepts(split),
        slides=split.slides or list(slides),
        target=_name_target(cohort),
        strategies=strategies,
        accuracy=() if strategies is None else strategies.accuracy(_decisions(split)),
        shortcuts=shortcuts,
        cases=None if cohort.cases is None else len(set(cohort.cases)),
        untested={name: why for name, why in reasons.items() if why is not None},
        suspects=suspect_patches(run, shortcuts),
        agreement=_read_agreement(run) if split.slides else {},
        removals=_write_removals(cohort),
        biomarkers=_write_biomarkers(cohort),
        stability=_write_stability(cohort),
        audit=_mean_audit(cohort),
        faithfulness=_read_faithfulness(run),
        sanity=_test_sanity(run, slides),
        curves=_write_curves(cohort),
        notes=_write_notes(cohort, has_concepts=bool(split.slides)),
    )
    _write_tables(split, findings)
    for name, write in PAGES.items():
        write_text(run.out / name, write(findings))
    return {"shortcuts": [str(a) for a in shortcuts if a.is_shortcut]}


def _describe(cohort: _Cohort) -> dict[str, Any]:
    run, cases = cohort.run, cohort.cases
    about, request = run.explained.about, run.request
    patients = ", taken as independent" if cases is None else f" of {counted(len(set(cases)), 'case')}"
    patches = int(sum(cohort.biomarker("patches")))
    folder = Path(str(about.get("features"))).name
    models = [m for m in about.get("models") or [about.get("model")] if isinstance(m, dict)]
    spec = (models[0].get("spec") or {}) if models else {}
    digests = ", ".join(str(m.get("digest"))[:12] for m in models)
    words = f"{spec.get('name')}, {spec.get('in_dim')} features, SHA-256 {digests}"
    return {
        "model": words if models else None,
        "data": f"{counted(len(cohort.slides), 'slide')}{patients}, {counted(patches, 'patch')}; "
        f"features from {folder}/",
        "task": run.explained.task,
        "method": request.method,
        "target": _name_target(cohort),
        "verdict": "not measured" if run.explained.verdict is None else run.explained.verdict.sentence,
        "dictionary": f"{request.dictionary}, {request.concepts} concepts",
        "version": about.get("version"),
    }


def _name_target(cohort: _Cohort) -> str:
    """Name the explained class, if it is the same for all slides."""
    targets = {str(result["target"]) for result in cohort.results}
    only = "the explained class" if len(targets) > 1 else next(iter(targets), "the target")
    return f"class {only}" if only.isdigit() else only


def _write_notes(cohort: _Cohort, *, has_concepts: bool) -> list[str]:
    notes, results = [], cohort.results
    if len(targets := {str(result["target"]) for result in results}) > 1:
        notes.append(
            f"Slides were explained for different targets ({', '.join(sorted(targets))}); name a `target=`."
        )
    if not has_concepts:
        notes.append("No relevance per feature is stored and no model was given: concepts were left out.")
    shares = [r["stability"]["largest_model_share"] for r in results if r.get("stability")]
    if shares and np.nanmean(shares) > ONE_MODEL:
        notes.append(
            f"One model gives {100 * np.nanmean(shares):.0f} % of all absolute score: the mean map is nearly "
            "its alone. agreed_share counts the models evenly."
        )
    if unread := [r["seen"]["problem"] for r in results if "problem" in r["seen"]]:
        notes.append(f"The pictures of {len(unread)} slides could not be used, the first: {unread[0]}")
    if cohort.outcome is not None:
        try:
            survival_of(cohort.biomarker(OUTPUT), *cohort.outcome, cases=cohort.cases)
        except XmilError as error:  # if survival fails for the plain output, it does for most biomarkers
            notes.append(str(error))
    return notes + cohort.run.doubts + [str(line) for line in cohort.run.explained.warnings]


def _find_shortcuts(cohort: _Cohort) -> list[Association]:
    def cell(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value  # read back from a file

    run, views = cohort.run, [result["seen"] for result in cohort.results]
    columns, pictures = {**cohort.causes}, [own.get("made", {}) for own in views]
    for name in dict.fromkeys(name for row in pictures for name in row):
        columns[name] = [cell(row.get(name)) for row in pictures]
    stain = {LIGHT: [cell(own.get("stain", (np.nan,) * 3)) for own in views]}
    shared: dict[str, Any] = {"cases": cohort.cases, "seed": run.request.seed}
    outputs, within = cohort.biomarker(OUTPUT), [own.get("correlations", {}) for own in views]
    return rank_associations(
        slide_associations(outputs, columns, cohort.slides, labels=cohort.labels, beside=stain, **shared)
        + patch_associations(within, cohort.slides, **shared)
    )


def _rank_concepts(cohort: _Cohort) -> list[ConceptRow]:
    """Rank the concepts by strength; the leading ones get pictures, also in the atlas."""
    if not cohort.slides:
        return []
    profiles = cohort.profiles
    strength = np.abs(profiles).mean(axis=0)
    leads = np.bincount(np.abs(profiles).argmax(axis=1), minlength=profiles.shape[1])
    rows = []
    for place, k in enumerate(np.argsort(-strength, kind="stable").tolist()):
        examples = [
            (size, slide, i)
            for slide, result in zip(cohort.slides, cohort.results, strict=True)
            for i, size in result["examples"][k]
        ]
        best = sorted(examples, key=lambda item: -item[0])[:ON_SHEET] if place < CONCEPTS else []
        pictures = [data for _, data in cut_patches(cohort.run, [(slide, i) for _, slide, i in best])]
        write_sheet(cohort.run, k, pictures)
        mean = float(profiles[:, k].mean())
        rows.append(ConceptRow(k, mean, float(strength[k]), int(leads[k]), tuple(pictures[:PICTURES])))
    return rows


def _read_agreement(run: Analysis) -> dict[int, float]:
    """Read the agreement of seeds by the number of concepts; the largest number is the dictionary's."""
    return {int(row["concepts"]): float(row["agreement"]) for row in csv_rows(run.out / STABILITY)}


def _decisions(cohort: _Cohort) -> list[float]:
    """Collect whether decisions are correct: by the run's table, else by the cohort's labels."""
    rows, labels, decisions = cohort.run.explained.rows, cohort.run.columns.label, []
    for slide in cohort.slides:
        row, label = rows.get(slide, {}), str(labels.get(slide, ""))
        correct = read_truth(row.get("correct"))
        if correct is None and f"p:{label}" in row:  # the label names a class of the model
            correct = label == row.get("predicted")
        decisions.append(float("nan") if correct is None else float(correct))
    return decisions


def _write_removals(cohort: _Cohort) -> dict[str, float]:
    rows = [
        (slide, *(removal[key] for key in REMOVAL))
        for slide, result in zip(cohort.slides, cohort.results, strict=True)
        for removal in result.get("removals", ())
    ]
    write_table(cohort.run.out / "removals.csv", ("slide_id", *REMOVAL), rows)
    if len(rows) < 3:
        return {}
    relevance, predicted, measured = (np.array([row[i] for row in rows]) for i in (2, 3, 4))
    by_relevance = removal_agreement(relevance, measured)
    return {
        **removal_agreement(predicted, measured),
        **{f"{name} of relevance": value for name, value in by_relevance.items()},
        "n": float(len(rows)),
    }


def _write_biomarkers(cohort: _Cohort) -> dict[str, dict[str, str]]:
    """Write each biomarker and the plain prediction, over cases: correlation with numeric causes, hazards."""
    run, table = cohort.run, {}
    for name in BIOMARKERS:
        if name != OUTPUT and not any(name in result["biomarkers"] for result in cohort.results):
            continue
        values = cohort.biomarker(name)
        usable = np.isfinite(values)
        row = {
            "mean": f"{np.nanmean(values):.3g}" if usable.any() else "",
            "slides": str(int(usable.sum())),
            **({} if cohort.cases is None else {"cases": str(cohort.count_cases(usable))}),
        }
        for cause, cells in cohort.causes.items():
            column = [read_number(cell) for cell in cells]
            if cohort.count_cases(np.isfinite(column)) >= FEWEST and len(set(column)) > 2:
                interval = correlation_with(values, column, cases=cohort.cases, seed=run.request.seed)
                row[f"Spearman with {cause}"] = str(interval)
        if cohort.outcome is not None:
            try:
                split = survival_of(values, *cohort.outcome, cases=cohort.cases, seed=run.request.seed)
            except XmilError:
                row["hazard ratio per SD"] = "not estimated"
            else:
                row["hazard ratio per SD"] = str(split.hazard_ratio)
                row |= {"permutation p": f"{split.cox_p:.2g}", "log-rank p": f"{split.log_rank_p:.2g}"}
        table[name] = row
    header = list(dict.fromkeys(key for row in table.values() for key in row))
    rows = [(name, *(row.get(key) for key in header)) for name, row in table.items()]
    write_table(run.out / "biomarkers.csv", ("biomarker", *header), rows)
    return table


def _write_curves(cohort: _Cohort) -> dict[str, list[SurvivalCurve]]:
    """Write Kaplan-Meier curves by the strong share and by the plain output."""
    if cohort.outcome is None:
        return {}
    curves = {}
    for name in ("strong_share", OUTPUT):
        with suppress(XmilError):  # the notes give the reason
            curves[name] = survival_curves(cohort.biomarker(name), *cohort.outcome, cases=cohort.cases)
    rows = [
        (name, curve.group, curve.n, curve.slides, *point)
        for name, groups in curves.items()
        for curve in groups
        for point in zip(curve.times, curve.share, curve.low, curve.high, strict=True)
    ]
    header = ("biomarker", "group", "n", "slides", "time", "survival", "low", "high")
    write_table(cohort.run.out / "survival.csv", header, rows)
    return curves


def _write_stability(cohort: _Cohort) -> dict[str, float]:
    pairs = zip(cohort.slides, cohort.results, strict=True)
    rows = [(slide, result["stability"]) for slide, result in pairs if result.get("stability")]
    if not rows:
        return {}
    names = list(rows[0][1])
    cells = [(slide, *(summary[name] for name in names)) for slide, summary in rows]
    write_table(cohort.run.out / "stability.csv", ("slide_id", *names), cells)
    return {
        name.replace("_", " "): float(np.nanmean([summary[name] for _, summary in rows])) for name in names
    }


def _read_faithfulness(run: Analysis) -> dict[str, str]:
    """Read the method's measures in the evaluated run, with their intervals."""
    if run.evaluated is None:
        return {}
    path, measures = run.evaluated.path / "summary.csv", {}
    with refuse_damage(f"{path}: not a readable summary", way="evaluate again"):
        rows = [row for row in csv_rows(path) if row.get("method") == run.request.method]
        for row in rows:
            mean, low, high = (f"{read_number(row[key]):.3g}" for key in ("mean", "low", "high"))
            between = "no interval" if low == "nan" else f"{low} to {high}"
            cases = f" of {row['cases']} cases" if row.get("cases") else ""
            measures[f"{row['measure']}, {row['mode']}"] = f"{mean} ({between}), {row['n']} slides{cases}"
    return measures or {"slides that count": f"none for {run.request.method}; summary.txt says why"}


def _mean_audit(cohort: _Cohort) -> dict[str, float]:
    audits = [result["audit"] for result in cohort.results if result.get("audit")]
    names = audits[0] if audits else ()
    sizes = {name: float(np.mean([abs(audit.get(name, 0.0)) for audit in audits])) for name in names}
    return {f"size of {name}": value for name, value in sizes.items() if value}


def _write_tables(cohort: _Cohort, findings: Findings) -> None:
    """Write the tables of concepts, also by slide and class, of strategies and of shortcuts."""
    out, slides, profiles = cohort.run.out, cohort.slides, cohort.profiles
    rows: list[tuple[Any, ...]] = [(c.concept, c.relevance, c.strength, c.leads) for c in findings.concepts]
    write_table(out / "concepts.csv", ("concept", "mean_relevance", "mean_absolute", "leads_in"), rows)
    names = [f"concept_{k}" for k in range(profiles.shape[1])] if slides else []
    rows = [(slide, *profile.tolist()) for slide, profile in zip(slides, profiles, strict=True)]
    write_table(out / "profiles.csv", ("slide_id", *names), rows)
    rows = [
        (slide, target, *profile)
        for slide, result in zip(slides, cohort.results, strict=True)
        for target, profile in result.get("classes", {}).items()
    ]
    if rows:
        write_table(out / "classes.csv", ("slide_id", "target", *names), rows)
    if (strategies := findings.strategies) is not None:
        places = zip(slides, strategies.labels.tolist(), strategies.embedding.tolist(), strict=True)
        rows = [(slide, k, *xy) for slide, k, xy in places]
        write_table(out / "strategies.csv", ("slide_id", "strategy", "x", "y"), rows)
    keys = ("cause", "level", "measure", "effect", "p", "corrected", "n", "cases")
    rows = [
        (*(getattr(a, key) for key in keys), a.is_shortcut, a.tissue, " ".join(a.slides))
        for a in findings.shortcuts
    ]
    write_table(out / "shortcuts.csv", (*keys, "found", "tissue", "slides"), rows)


def _test_sanity(run: Analysis, slides: Sequence[str]) -> dict[str, str]:
    """Explain a few slides again, with the model and with new weights, and write sentences for the card.

    Also write a row for each slide to sanity.csv. Without a model there is nothing to test.
    """
    if run.models is None or not run.request.sanity or not slides:
        return {}
    models = run.models.models
    chosen = np.unique(np.linspace(0, len(slides) - 1, run.request.sanity).round().astype(int))
    rows = []
    try:
        for slide in [slides[i] for i in chosen]:
            e, bag = run.explanation(slide), read_bag(run.paths[slide], run.request.format)
            options: dict[str, Any] = {"method": e.method, "target": e.target}
            drawn = randomisation(
                models[0], bag, draws=REDRAWS, seed=run.request.seed, **options
            ).correlations
            again = np.mean([explain(model, bag, **options).scores for model in models], axis=0)
            rows.append((slide, float(np.abs(drawn).mean()), spearman(again, e.scores)))
    except XmilError as error:
        return {"not tested": str(error)}
    write_table(run.out / "sanity.csv", ("slide_id", "weights_redrawn", "made_again"), rows)
    redrawn, repeated = ([row[k] for row in rows if np.isfinite(row[k])] for k in (1, 2))
    mean = float(np.mean(redrawn)) if redrawn else float("nan")
    lowest = min(repeated, default=float("nan"))
    verdict = "passed" if mean <= LIMIT else "failed: the scores depend little on what the model learned"
    if lowest < SAME:
        verdict = "no verdict: the scores made again are not those of the run"
    return {
        "weights drawn anew": f"{verdict}; mean |rank correlation| with the scores under new weights "
        f"{mean:.2f} (at most {LIMIT}), {len(rows)} slides, {REDRAWS} draws each (sanity.csv)",
        "made again": f"lowest rank correlation with the stored scores {lowest:.3f}, {len(rows)} slides "
        "(sanity.csv); less than 1 if the run had settings of its own",
    }
