"""The report of an insight run: one HTML file with its pictures inside, light or dark as the reader's screen.

Every number in it stands in a table of the run's folder, which is named beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from xmil.findings.biomarkers import SurvivalCurve
from xmil.findings.report_figures import strategy_figure, survival_figure
from xmil.findings.report_page import explained, grid, images, limits, page
from xmil.findings.report_words import (
    ACCOUNT,
    BIOMARKERS,
    MEASURES,
    STABILITY,
    UNCHECKED,
    UNCORRECTED,
    UNTESTED,
    short,
)
from xmil.findings.shortcuts import Association
from xmil.findings.strategies import Strategies

SHOWN = 8  # concepts


@dataclass(frozen=True)
class ConceptRow:
    """One concept over the cohort: mean relevance, mean absolute relevance, slides in which it leads."""

    concept: int
    relevance: float
    strength: float
    leads: int
    pictures: tuple[bytes, ...] = ()


@dataclass(frozen=True, eq=False)
class Findings:
    """Everything an insight run found; the report and the card are made of this alone."""

    title: str
    about: Mapping[str, Any]
    concepts: Sequence[ConceptRow]
    slides: Sequence[str]
    target: str = "the target"  # in words
    strategies: Strategies | None = None
    accuracy: Sequence[float] = ()
    shortcuts: Sequence[Association] = ()
    unasked: Mapping[str, str] = field(default_factory=dict)  # columns, and why nothing can be asked of them
    accused: Sequence[tuple[str, bytes]] = ()  # patches of the slides that the first shortcut names
    removals: Mapping[str, float] = field(default_factory=dict)
    biomarkers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stability: Mapping[str, float] = field(default_factory=dict)
    audit: Mapping[str, float] = field(default_factory=dict)
    faithfulness: Mapping[str, str] = field(default_factory=dict)
    sanity: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Sequence[SurvivalCurve]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def report_html(found: Findings) -> str:
    """The report as one page."""
    sections = {
        "Concepts": _concepts(found),
        "Strategies": _strategies(found),
        "Shortcuts": _shortcuts(found),
        "Biomarkers": _biomarkers(found),
        "Survival": survival_figure(found.curves),
        "Trust": _trust(found),
        "Limits": limits(),
        "Details": _details(found),
    }
    held = {name: part for name, part in sections.items() if part}
    links = "".join(f"<a href='#{name.lower()}'>{name}</a>" for name in held)
    parts = [f"<section id='{name.lower()}'>{part}</section>" for name, part in held.items()]
    return page(_title(found), "\n".join([_head(found), f"<nav class='small'>{links}</nav>", *parts]))


def verdict(found: Findings) -> str:
    """One sentence on shortcuts."""
    named = [a for a in found.shortcuts if a.found]
    tested = [a for a in found.shortcuts if not a.tissue]
    if not tested:
        return "Shortcuts were not looked for: no columns or pictures were given that could show one."
    if not named:
        return f"No shortcut was found in {len(tested)} tests."
    first = named[0]
    return (
        f"Look at this first: {first.cause} goes with what the model uses ({first.measure} "
        f"{first.effect:.2f} over {first.n} slides, corrected p = {first.corrected:.3g})."
    )


def _title(found: Findings) -> str:
    return f"What the model looks at: {found.title}"


def _head(found: Findings) -> str:
    told = "".join(f"<li>{line}</li>" for line in _in_short(found))
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    notes = f"<div class='notes'><b>Mind this</b><ul>{notes}</ul></div>" if notes else ""
    data = escape(str(found.about.get("data") or f"{len(found.slides)} slides"))
    title = f"<h1>{escape(_title(found))}</h1><p class='small'>{data}</p>"
    return f"{title}<div class='short'><ul>{told}</ul></div>{notes}"


def _in_short(found: Findings) -> list[str]:
    """The findings in a line each, as HTML."""
    lines = [f"<b>{escape(verdict(found))}</b>"]
    if found.concepts:
        first = found.concepts[:5]
        share = sum(row.strength for row in first) / (sum(row.strength for row in found.concepts) or 1.0)
        named = ", ".join(str(row.concept) for row in first)
        lines.append(
            f"{100 * share:.0f} % of the relevance lies in {len(first)} of {len(found.concepts)} concepts: "
            f"{named}."
        )
    if found.strategies is not None:
        lines.append(_ways(found.strategies))
    tested = found.sanity.get("weights drawn anew")
    lines.append(f"Sanity test with new weights: {escape(tested.split(';')[0])}." if tested else "")
    faithful = "was measured: see Trust" if found.faithfulness else f"was {UNTESTED}"
    lines.append(f"Faithfulness {escape(faithful)}.")
    return [line for line in lines if line]


def _ways(s: Strategies) -> str:
    if s.count == 1:
        return "All slides are decided for similar reasons."
    return f"Slides are decided in {s.count} ways (silhouette {short(s.silhouette)})."


def _concepts(found: Findings) -> str:
    if not found.concepts:
        return ""
    total = sum(row.strength for row in found.concepts) or 1.0
    cards = "".join(_concept(row, row.strength / total, found) for row in found.concepts[:SHOWN])
    more = len(found.concepts) - len(found.concepts[:SHOWN])
    rest = f"{more} further concepts are in the tables: " if more else ""
    told = f"<p>{escape(_deleted(found.removals))} (removals.csv).</p>" if found.removals else ""
    lead = (
        "<p>A concept is a kind of patch, or a part of what patches show, that the encoder tells from "
        "others. The model's output is shared out among them. Each is shown by the patches in which it "
        "counts most.</p>"
    )
    source = f"<p class='small'>{rest}concepts.csv, profiles.csv; larger sheets in atlas/</p>"
    return f"<h2>Concepts</h2>{lead}<div class='concepts'>{cards}</div>{told}{source}"


def _concept(row: ConceptRow, share: float, found: Findings) -> str:
    side, does = ("for", "adds {} to") if row.relevance > 0 else ("against", "takes {} from")
    average = does.format(short(abs(row.relevance)))
    return (
        f"<div><h3>Concept {row.concept} "
        f"<span class='{side}'>speaks {side} {escape(found.target)}</span></h3>"
        f"<div class='bar {side}'><i style='width:{100 * share:.0f}%'></i></div>"
        f"<p class='small'>{100 * share:.0f} % of the relevance; {average} a slide's output on average; "
        f"leads in {row.leads} of {len(found.slides)} slides</p>"
        f"{images(row.pictures, f'concept {row.concept}')}</div>"
    )


def _deleted(removals: Mapping[str, float]) -> str:
    named = (("the output's slope", ""), ("relevance", " of relevance"))
    told = [
        f"that {who} predicts in {100 * removals[f'agreement{end}']:.0f} % "
        f"(correlation {short(removals[f'correlation{end}'])})"
        for who, end in named
    ]
    return (
        f"Does the model need them? Deleting leading concepts, {int(removals['n'])} trials, moved the output "
        f"in the direction {', and in the one '.join(told)}"
    )


def _strategies(found: Findings) -> str:
    if found.strategies is None:
        return ""
    s = found.strategies
    known = np.isfinite(np.asarray(found.accuracy, dtype=np.float64)).any()
    head = [
        "strategy",
        "slides",
        *(["decided rightly"] if known else []),
        "leading concepts",
        "typical slide",
    ]
    rows = []
    for k in range(s.count):
        right = [_percent(found.accuracy[k])] if known else []
        leaders = ", ".join(map(str, s.leaders[k]))
        typical = found.slides[int(s.representatives[k])]
        rows.append([str(k), str(int((s.labels == k).sum())), *right, leaders, typical])
    lead = "<p>A strategy is a group of slides whose output is made of the same mix of concepts. "
    drawn = strategy_figure(s, found.slides)
    source = "<p class='small'>strategies.csv</p>"
    return f"<h2>Strategies</h2>{lead}{_ways(s)}</p>{grid(head, rows)}{drawn}{source}"


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.0f} %"


def _shortcuts(found: Findings) -> str:
    unasked = "; ".join(f"{name} ({why})" for name, why in found.unasked.items())
    left = f"<p class='small'>Not asked about: {escape(unasked)}.</p>" if unasked else ""
    if not found.shortcuts:
        return f"<h2>Shortcuts</h2><p>{escape(verdict(found))}</p>{left}" if left else ""
    asked = [a for a in found.shortcuts if not a.tissue]
    listed = [a for a in found.shortcuts if a.tissue]
    lead = (
        "<p>Does what the model uses go with how a slide was made? Slides of one label are compared, so that "
        "a site with more cases is no shortcut by itself. A finding is bold.</p>"
    )
    source = (
        "<p class='small'>shortcuts.csv; p from permutations within labels, corrected by Holm's method; a "
        "shortcut is called where p &lt; 0.01 and a tenth of the rank variance is explained.</p>"
    )
    shown = _accused(found.accused)
    shown = f"<p>Strongest patches of the slides that show it most:</p>{shown}" if shown else ""
    return f"<h2>Shortcuts</h2>{lead}{_asked(asked)}{shown}{left}{_tissue(listed)}{source}"


def _asked(rows: Sequence[Association]) -> str:
    head = ("cause", "asked per", "measure", "effect", "corrected p", "slides", "slides to look at")
    cells = [
        [a.cause, a.level, a.measure, *_figures(a), ", ".join(a.slides[:3]) if a.found else ""] for a in rows
    ]
    return grid(head, cells, marked=[a.found for a in rows]) if rows else ""


def _tissue(rows: Sequence[Association]) -> str:
    if not rows:
        return ""
    lead = (
        "<p class='small'>Tissue has these, too, so that they are listed and never called a shortcut (mean "
        "rank correlation with the score within slides):</p>"
    )
    cells = [[a.cause, *_figures(a)] for a in rows]
    return lead + grid(("property", "effect", "corrected p", "slides"), cells)


def _figures(a: Association) -> tuple[str, str, str]:
    return f"{a.effect:.2f}", f"{a.corrected:.2g}", str(a.n)


def _accused(patches: Sequence[tuple[str, bytes]]) -> str:
    """The patches of each slide under its name."""
    slides = dict.fromkeys(slide for slide, _ in patches)
    parts = [
        f"<figure><figcaption>{escape(slide)}</figcaption>"
        f"{images([data for name, data in patches if name == slide], f'patch of {slide}')}</figure>"
        for slide in slides
    ]
    return f"<div class='accused'>{''.join(parts)}</div>" if parts else ""


def _biomarkers(found: Findings) -> str:
    if not found.biomarkers:
        return ""
    lead = "<p>One number per slide, made from its map; the last row is the prediction without a map.</p>"
    tested = any("p of it" in row for row in found.biomarkers.values())
    source = f"<p class='small'>biomarkers.csv, slides.csv{f'; {UNCORRECTED}' if tested else ''}</p>"
    return f"<h2>Biomarkers from the maps</h2>{lead}{explained(found.biomarkers, BIOMARKERS)}{source}"


def _trust(found: Findings) -> str:
    """How far the maps can be trusted: faithfulness, sanity, stability, the account of the output."""
    faithful = {name: {"mean (95 % interval)": value} for name, value in found.faithfulness.items()}
    words = {name: MEASURES.get(name.split(",")[0], "") for name in faithful}
    sane = {name: {"": value} for name, value in found.sanity.items()}
    stable = {name: {"mean": short(value)} for name, value in found.stability.items()}
    sizes = {name.removeprefix("size of "): {"mean size": short(v)} for name, v in found.audit.items()}
    parts = [
        _part(
            "Faithfulness",
            explained(faithful, words),
            f"{UNTESTED.capitalize()}.",
            "summary.csv of the evaluation",
        ),
        _part("Sanity", explained(sane, {}, words_only=True), f"{UNCHECKED.capitalize()}.", "sanity.csv"),
        _part(
            "Stability across the models",
            explained(stable, STABILITY),
            "",
            "stability.csv; maps in consensus/",
        ),
        _part("Where the output went", explained(sizes, ACCOUNT), "", "slides/&lt;slide_id&gt;.json"),
    ]
    return f"<h2>How far the maps can be trusted</h2>{''.join(parts)}"


def _part(title: str, table: str, otherwise: str, source: str) -> str:
    if not table:
        return f"<h3>{title}</h3><p>{escape(otherwise)}</p>" if otherwise else ""
    return f"<h3>{title}</h3>{table}<p class='small'>{source}</p>"


def _details(found: Findings) -> str:
    rows = [[str(key), short(value)] for key, value in found.about.items() if value]
    table = grid(("what", "which"), rows).replace("<table>", "<table class='words'>")
    return f"<h2>Details</h2>{table}"
