"""The tables, report and card of an insight run."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.errors import InputError, XmilError
from xmil.core.names import counted
from xmil.core.runfiles import write_table
from xmil.core.storage import write_text
from xmil.findings.appearance import LIGHT
from xmil.findings.biomarkers import SurvivalCurve, correlation_with, survival_curves, survival_of
from xmil.findings.concepts import removal_agreement
from xmil.findings.report import SHOWN, ConceptRow, Findings, report_html
from xmil.findings.report_card import card_html, card_json, card_markdown
from xmil.findings.shortcuts import Association, patch_associations, ranked, slide_associations, why_unasked
from xmil.findings.strategies import Strategies, find_strategies
from xmil.runs.insight_cohort import number
from xmil.runs.insight_pictures import accused_patches, patch_pictures, write_sheet
from xmil.runs.insight_sanity import sanity_tests
from xmil.runs.insight_slide import REMOVAL

if TYPE_CHECKING:
    from xmil.runs.insight import InsightRun

PICTURES, ON_SHEET = 12, 25  # patches of a concept in the report, and on its sheet
ONE_MODEL = 0.7  # share of the absolute scores from which on a mean is hardly one of several models
SHARES = (
    "strong_share", "supporting_share", "agreed_share", "masked_share", "positive_relevance_share",
    "hot_regions", "largest_region", "mixing", "region_strong_share", "region_supporting_share", "tapas",
)  # fmt: skip


def write_insight(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Everything over the cohort; gives what run.json says of it."""
    profiles = np.array([r["profile"] for r in results if "profile" in r])
    with_profile = [slide for slide, r in zip(slides, results, strict=True) if "profile" in r]
    strategies = find_strategies(profiles, seed=run.chosen.seed) if len(profiles) else None
    shortcuts = _shortcuts(run, slides, results)
    found = Findings(
        title=run.run.path.resolve().name,
        about=_about(run, results),
        concepts=_concepts(run, with_profile, [r for r in results if "profile" in r], profiles),
        slides=with_profile or list(slides),
        target=_target_words(results),
        strategies=strategies,
        accuracy=() if strategies is None else strategies.accuracy(_correct(run, with_profile)),
        shortcuts=shortcuts,
        unasked=_unasked(run, slides),
        accused=accused_patches(run, shortcuts),
        removals=_removals(run, slides, results),
        biomarkers=_biomarkers(run, slides, results),
        stability=_stability(slides, results, run),
        audit=_audit(results),
        faithfulness=_faithfulness(run),
        sanity=sanity_tests(run, slides),
        curves=_curves(run, slides, results),
        notes=_notes(run, slides, results, profiles),
    )
    known = [r for r in results if "profile" in r]
    _write_tables(run, found, with_profile, profiles, strategies, known)
    write_text(run.out / "report.html", report_html(found))
    write_text(run.out / "card.html", card_html(found))
    write_text(run.out / "card.json", card_json(found))
    write_text(run.out / "card.md", card_markdown(found))
    return {"shortcuts": [str(a) for a in shortcuts if a.found]}


def _about(run: InsightRun, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    held = run.run.about
    patches = int(sum(r["biomarkers"]["patches"] for r in results))
    folder = Path(str(held.get("features"))).name
    return {
        "model": _model_words(held),
        "data": f"{counted(len(results), 'slide')}, {counted(patches, 'patch')}; features from {folder}/",
        "task": run.run.task,
        "method": run.chosen.method,
        "target": _target_words(results),
        "dictionary": f"{run.chosen.dictionary}, {run.chosen.concepts} concepts",
        "version": held.get("version"),
    }


def _target_words(results: Sequence[Mapping[str, Any]]) -> str:
    """What was explained: a class by its name or number, where all slides have one."""
    targets = {str(r["target"]) for r in results}
    if len(targets) > 1:
        return "the explained class"
    only = next(iter(targets), "the target")
    return f"class {only}" if only.isdigit() else only


def _model_words(about: Mapping[str, Any]) -> str | None:
    """The models' kind, width and checksums."""
    models = about.get("models") or [about.get("model")]
    known = [model for model in models if isinstance(model, dict)]
    if not known:
        return None
    spec = known[0].get("spec") or {}
    sums = ", ".join(str(model.get("digest"))[:12] for model in known)
    return f"{spec.get('name')}, {spec.get('in_dim')} features, SHA-256 {sums}"


def _notes(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]], profiles: Any
) -> list[str]:
    notes = []
    targets = {str(r["target"]) for r in results}
    if len(targets) > 1:
        notes.append(
            f"Slides were explained for different targets ({', '.join(sorted(targets))}); name one: --target."
        )
    if not len(profiles):
        notes.append("No relevance per feature is stored and no model was given: concepts were left out.")
    shares = [r["stability"]["largest_model_share"] for r in results if r.get("stability")]
    if shares and np.nanmean(shares) > ONE_MODEL:
        notes.append(
            f"One model gives {100 * np.nanmean(shares):.0f} % of all absolute score: the mean map is nearly "
            "its alone. agreed_share counts the models evenly."
        )
    unread = [r["seen"]["problem"] for r in results if "problem" in r["seen"]]
    if unread:
        notes.append(f"The pictures of {len(unread)} slides could not be used, the first: {unread[0]}")
    if run.columns.outcomes:
        notes += _unsurvived(run, slides, results)
    return notes + run.doubts + [str(line) for line in run.run.warnings]


def _shortcuts(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> list[Association]:
    outputs = [float(r["output"]) for r in results]
    columns = _causes(run, slides)
    made = [r["seen"].get("made", {}) for r in results]
    for name in dict.fromkeys(name for row in made for name in row):
        columns[name] = [_cell(row.get(name)) for row in made]
    within = [r["seen"].get("correlations", {}) for r in results]
    seed, known = run.chosen.seed, run.columns.label
    labels = [known.get(slide) for slide in slides] if known else None
    stain = {LIGHT: [_cell(r["seen"].get("stain", (np.nan,) * 3)) for r in results]}
    return ranked(
        slide_associations(outputs, columns, slides, labels=labels, beside=stain, seed=seed)
        + patch_associations(within, slides, seed=seed)
    )


def _causes(run: InsightRun, slides: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [cells.get(slide) for slide in slides] for name, cells in run.columns.causes.items()}


def _unasked(run: InsightRun, slides: Sequence[str]) -> dict[str, str]:
    told = {name: why_unasked(cells) for name, cells in _causes(run, slides).items()}
    return {name: why for name, why in told.items() if why is not None}


def _cell(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value  # read back from a file


def _concepts(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]], profiles: Any
) -> list[ConceptRow]:
    if not len(profiles):
        return []
    strength = np.abs(profiles).mean(axis=0)
    leads = np.bincount(np.abs(profiles).argmax(axis=1), minlength=profiles.shape[1])
    rows = []
    for place, k in enumerate(np.argsort(-strength, kind="stable")):
        wanted = [
            (size, slide, i) for slide, r in zip(slides, results, strict=True) for i, size in r["examples"][k]
        ]
        best = sorted(wanted, key=lambda item: -item[0])[:ON_SHEET] if place < SHOWN else []
        pictures = [data for _, data in patch_pictures(run, [(slide, i) for _, slide, i in best])]
        write_sheet(run, int(k), pictures)
        shown = tuple(pictures[:PICTURES])
        rows.append(
            ConceptRow(int(k), float(profiles[:, k].mean()), float(strength[k]), int(leads[k]), shown)
        )
    return rows


def _correct(run: InsightRun, slides: Sequence[str]) -> list[float]:
    """Whether the run decided rightly: as it says itself, else by the label of the cohort given here."""
    known = {"true": 1.0, "1": 1.0, "false": 0.0, "0": 0.0}
    rows, found = run.run.rows, []
    for slide in slides:
        row, label = rows.get(slide, {}), str(run.columns.label.get(slide, ""))
        told = str(row.get("correct") or "").lower()
        if told not in known and f"p:{label}" in row:  # the label names a class of the model
            told = str(label == row.get("predicted")).lower()
        found.append(known.get(told, float("nan")))
    return found


def _removals(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    rows = [
        (slide, *(r[key] for key in REMOVAL))
        for slide, result in zip(slides, results, strict=True)
        for r in result.get("removals", ())
    ]
    write_table(run.out / "removals.csv", ("slide_id", *REMOVAL), rows)
    if len(rows) < 3:
        return {}
    relevance, predicted, measured = (np.array([row[i] for row in rows]) for i in (2, 3, 4))
    by_relevance = removal_agreement(relevance, measured)
    return {
        **removal_agreement(predicted, measured),
        **{f"{name} of relevance": value for name, value in by_relevance.items()},
        "n": float(len(rows)),
    }


def _biomarkers(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Each biomarker beside the plain prediction: correlation with numeric causes, hazard ratio."""
    known = [name for name in SHARES if any(name in r["biomarkers"] for r in results)]
    values = {name: [r["biomarkers"].get(name, float("nan")) for r in results] for name in known}
    values["plain output"] = [float(r["output"]) for r in results]
    found: dict[str, dict[str, str]] = {}
    for name, numbers in values.items():
        row: dict[str, str] = {"mean": f"{np.nanmean(numbers):.3g}" if np.isfinite(numbers).any() else ""}
        for cause, cells in run.columns.causes.items():
            column = [number(cells.get(slide)) for slide in slides]
            if np.isfinite(column).sum() >= 8 and len(set(column)) > 2:
                row[f"Spearman with {cause}"] = str(correlation_with(numbers, column, seed=run.chosen.seed))
        row |= _survival(run, slides, numbers)
        found[name] = row
    header = list(dict.fromkeys(key for row in found.values() for key in row))
    write_table(
        run.out / "biomarkers.csv",
        ("biomarker", *header),
        [(n, *(row.get(k) for k in header)) for n, row in found.items()],
    )
    return found


def _survival(run: InsightRun, slides: Sequence[str], numbers: Sequence[float]) -> dict[str, str]:
    times, events = run.columns.outcomes.get("time"), run.columns.outcomes.get("event")
    if times is None or events is None:
        return {}
    nan = float("nan")
    try:
        told = survival_of(numbers, [times.get(s, nan) for s in slides], [events.get(s, nan) for s in slides])
    except XmilError:
        return {"hazard ratio per SD": "not estimated"}
    return {
        "hazard ratio per SD": str(told.hazard_ratio),
        "p of it": f"{told.cox_p:.2g}",
        "log-rank p": f"{told.log_rank_p:.2g}",
    }


def _unsurvived(run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why there is no survival by the plain output, and so by hardly any biomarker."""
    times, events = (run.columns.outcomes[name] for name in ("time", "event"))
    nan = float("nan")
    outputs = [float(r["output"]) for r in results]
    try:
        survival_of(outputs, [times.get(s, nan) for s in slides], [events.get(s, nan) for s in slides])
    except XmilError as error:
        return [str(error)]
    return []


def _curves(
    run: InsightRun, slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> dict[str, list[SurvivalCurve]]:
    """Kaplan-Meier curves by the strong share, and by the plain output beside it."""
    times, events = run.columns.outcomes.get("time"), run.columns.outcomes.get("event")
    if times is None or events is None:
        return {}
    nan = float("nan")
    outcome = ([times.get(s, nan) for s in slides], [events.get(s, nan) for s in slides])
    found = {}
    for name in ("strong_share", "plain output"):
        values = [r["output"] if name == "plain output" else r["biomarkers"][name] for r in results]
        try:
            found[name] = survival_curves(values, *outcome)
        except XmilError:
            continue  # the notes say why
    rows = [
        (name, c.group, c.n, *point)
        for name, curves in found.items()
        for c in curves
        for point in zip(c.times, c.share, c.low, c.high, strict=True)
    ]
    header = ("biomarker", "group", "n", "time", "survival", "low", "high")
    write_table(run.out / "survival.csv", header, rows)
    return found


def _stability(
    slides: Sequence[str], results: Sequence[Mapping[str, Any]], run: InsightRun
) -> dict[str, float]:
    rows = [(slide, r["stability"]) for slide, r in zip(slides, results, strict=True) if r.get("stability")]
    if not rows:
        return {}
    names = list(rows[0][1])
    write_table(
        run.out / "stability.csv",
        ("slide_id", *names),
        [(slide, *(held[name] for name in names)) for slide, held in rows],
    )
    return {name.replace("_", " "): float(np.nanmean([held[name] for _, held in rows])) for name in names}


def _faithfulness(run: InsightRun) -> dict[str, str]:
    """The method's measures in the evaluated run, with their intervals."""
    if run.evaluated is None:
        return {}
    path = run.evaluated / "summary.csv"
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.DictReader(stream) if row.get("method") == run.chosen.method]
    except OSError:
        raise InputError(f"{path}: no such file; give the folder of a finished xmil evaluate.") from None
    if not rows:
        return {"slides that count": f"none for {run.chosen.method}; summary.txt says why"}
    return {
        f"{row['measure']}, {row['mode']}": f"{float(row['mean']):.3g} ({float(row['low']):.3g} to "
        f"{float(row['high']):.3g}), {row['n']} slides"
        for row in rows
    }


def _audit(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = [r["audit"] for r in results if r.get("audit")]
    if not known:
        return {}
    sizes = {name: float(np.mean([abs(a.get(name, 0.0)) for a in known])) for name in known[0]}
    return {f"size of {name}": value for name, value in sizes.items() if value}


def _write_classes(
    run: InsightRun, names: Sequence[str], slides: Sequence[str], results: Sequence[Mapping[str, Any]]
) -> None:
    """Relevance per concept, class and slide, where the run explains several classes."""
    rows = [
        (slide, target, *profile)
        for slide, result in zip(slides, results, strict=True)
        for target, profile in result.get("classes", {}).items()
    ]
    if rows:
        write_table(run.out / "classes.csv", ("slide_id", "target", *names), rows)


def _write_tables(
    run: InsightRun,
    found: Findings,
    slides: Sequence[str],
    profiles: Any,
    strategies: Strategies | None,
    results: Sequence[Mapping[str, Any]],
) -> None:
    rows = [(row.concept, row.relevance, row.strength, row.leads) for row in found.concepts]
    write_table(run.out / "concepts.csv", ("concept", "mean_relevance", "mean_absolute", "leads_in"), rows)
    names = [f"concept_{k}" for k in range(profiles.shape[1])] if len(profiles) else []
    write_table(
        run.out / "profiles.csv",
        ("slide_id", *names),
        [(s, *p.tolist()) for s, p in zip(slides, profiles, strict=True)],
    )
    _write_classes(run, names, slides, results)
    if strategies is not None:
        places = zip(slides, strategies.labels.tolist(), strategies.embedding.tolist(), strict=True)
        write_table(
            run.out / "strategies.csv",
            ("slide_id", "strategy", "x", "y"),
            [(s, k, *xy) for s, k, xy in places],
        )
    keys = ("cause", "level", "measure", "effect", "p", "corrected", "n", "found", "tissue")
    write_table(
        run.out / "shortcuts.csv",
        (*keys, "slides"),
        [(*(getattr(a, key) for key in keys), " ".join(a.slides)) for a in found.shortcuts],
    )
