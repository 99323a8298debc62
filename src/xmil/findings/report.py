"""The report of an insight run: one HTML file with its pictures inside, and a card for model hubs.

Every number in it stands in a table of the run's folder, which is named beside it.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from xmil.findings.biomarkers import SurvivalCurve
from xmil.findings.report_figures import strategy_figure, survival_figure
from xmil.findings.shortcuts import Association
from xmil.findings.strategies import Strategies

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #8886; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.found { font-weight: 700; }
.patches { display: flex; flex-wrap: wrap; gap: 4px; margin: .4rem 0 1rem; }
.patches img { width: 72px; height: 72px; }
.accused { display: flex; flex-wrap: wrap; gap: 0 1.5rem; } .accused figure { margin: .4rem 0; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; }
.small { font-size: .9rem; opacity: .85; }
"""
CARD_STYLE = "td, th { text-align: left; vertical-align: top; }"
UNTESTED = "not tested: run xmil evaluate and give its folder (--evaluated)"
UNCORRECTED = "p is not corrected for the number of rows"
UNCHECKED = "not tested: give the model (--model)"
SHOWN = 8  # concepts
LIMITS = (
    "An explanation is about the model, not the disease.",
    "Concepts are directions of the encoder's features; their names are the reader's.",
    "An association is not a cause: a shortcut is a lead to look at, with its slides.",
    "A biomarker from a map is no better than the prediction beside it until it is tested on other data.",
    "For research use only: not a medical device.",
)


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
    strategies: Strategies | None = None
    accuracy: Sequence[float] = ()
    shortcuts: Sequence[Association] = ()
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
    parts = [
        _head(found),
        _concepts(found),
        _strategies(found),
        _shortcuts(found),
        _table("Biomarkers from the maps", found.biomarkers, f"biomarkers.csv; {UNCORRECTED}"),
        survival_figure(found.curves),
        _numbers("Stability across the models", found.stability, "stability.csv; maps in consensus/"),
        _numbers("Account of the outputs", found.audit, "slides/<slide_id>.json"),
        _faithfulness(found),
        _sanity(found),
        _limits(),
    ]
    head = f"<meta charset='utf-8'><title>{escape(found.title)}</title><style>{STYLE}</style>"
    body = "\n".join(part for part in parts if part)
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def verdict(found: Findings) -> str:
    """One sentence on shortcuts."""
    named = [a for a in found.shortcuts if a.found]
    tested = [a for a in found.shortcuts if not a.tissue]
    if not tested:
        return "No columns or image properties were given to test for shortcuts."
    if not named:
        return f"No shortcut was found in {len(tested)} tests."
    first = named[0]
    return (
        f"Look at this first: {first.cause} goes with what the model uses ({first.measure} "
        f"{first.effect:.2f} over {first.n} slides, corrected p = {first.corrected:.3g})."
    )


def card(found: Findings) -> dict[str, Any]:
    """The explanation card: what was explained, how, how far it can be trusted, and its limits."""
    return {
        "title": found.title,
        **found.about,
        "slides": len(found.slides),
        "account": dict(found.audit),
        "faithfulness": dict(found.faithfulness) or UNTESTED,
        "sanity": dict(found.sanity) or UNCHECKED,
        "concepts": len(found.concepts),
        "strategies": None if found.strategies is None else found.strategies.count,
        "shortcuts": [str(a) for a in found.shortcuts if a.found],
        "shortcuts_asked": list(dict.fromkeys(a.cause for a in found.shortcuts if not a.tissue)),
        "concept_removal": dict(found.removals),
        "stability": dict(found.stability),
        "notes": list(found.notes),
        "limits": list(LIMITS),
    }


def card_markdown(found: Findings) -> str:
    """The card for a model hub's README."""
    lines = [f"# Explanation card: {found.title}", ""]
    for key, value in card(found).items():
        if key in ("title", "limits") or value in (None, [], {}):
            continue
        name = key.replace("_", " ")
        if isinstance(value, list):
            lines += [f"**{name}**", "", *(f"- {item}" for item in value), ""]
        elif isinstance(value, Mapping):
            lines += [f"**{name}**", "", *(f"- {k}: {_short(v)}" for k, v in value.items()), ""]
        else:
            lines += [f"**{name}**: {_short(value)}", ""]
    return "\n".join([*lines, "**limits**", "", *(f"- {limit}" for limit in LIMITS), ""])


def card_html(found: Findings) -> str:
    """The card as a page."""
    rows = []
    for key, value in card(found).items():
        if key in ("title", "limits") or value in (None, [], {}):
            continue
        rows.append(f"<tr><th>{escape(key.replace('_', ' '))}</th><td>{_cell(value)}</td></tr>")
    title = escape(f"Explanation card: {found.title}")
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}{CARD_STYLE}</style>"
    body = f"<h1>{title}</h1><table>{''.join(rows)}</table>{_limits()}"
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(k))}: {escape(_short(v))}" for k, v in value.items())
    if isinstance(value, list):
        return "<br>".join(escape(str(item)) for item in value)
    return escape(_short(value))


def card_json(found: Findings) -> str:
    """The card as JSON."""
    return json.dumps(card(found), indent=2, default=str) + "\n"


def _head(found: Findings) -> str:
    facts = "; ".join(f"{escape(str(k))} {escape(_short(v))}" for k, v in found.about.items() if v)
    notes = "".join(f"<p>&#9888; {escape(note)}</p>" for note in found.notes)
    return (
        f"<h1>{escape(found.title)}</h1><p><b>{escape(verdict(found))}</b></p>{notes}"
        f"<p class='small'>{len(found.slides)} slides; {facts}.</p>"
    )


def _concepts(found: Findings) -> str:
    if not found.concepts:
        return ""
    rows = [
        f"<h3>Concept {row.concept}</h3><p>mean relevance {_short(row.relevance)} per slide, absolute "
        f"{_short(row.strength)}; leads in {row.leads} of {len(found.slides)} slides</p>{_patches(row)}"
        for row in found.concepts[:SHOWN]
    ]
    more = len(found.concepts) - len(rows)
    rest = f"{more} further concepts are in the tables: " if more else ""
    told = ""
    if found.removals:
        told = f"<p>{escape(_deleted(found.removals))} (removals.csv).</p>"
    source = f"<p class='small'>{rest}concepts.csv, profiles.csv</p>"
    return f"<h2>What the model looks at</h2>{told}{''.join(rows)}{source}"


def _deleted(removals: Mapping[str, float]) -> str:
    named = (("the output's slope", ""), ("relevance", " of relevance"))
    told = [
        f"that {who} predicts in {100 * removals[f'agreement{end}']:.0f} % "
        f"(correlation {_short(removals[f'correlation{end}'])})"
        for who, end in named
    ]
    return (
        f"Deleting leading concepts, {int(removals['n'])} trials, moved the output in the direction "
        f"{', and in the one '.join(told)}"
    )


def _patches(row: ConceptRow) -> str:
    return _images(row.pictures, f"concept {row.concept}")


def _images(pictures: Sequence[bytes], words: str) -> str:
    images = "".join(
        f"<img alt='{escape(words)}' src='data:image/jpeg;base64,{b64encode(data).decode()}'>"
        for data in pictures
    )
    return f"<div class='patches'>{images}</div>" if images else ""


def _strategies(found: Findings) -> str:
    if found.strategies is None:
        return ""
    s = found.strategies
    known = np.isfinite(np.asarray(found.accuracy, dtype=np.float64)).any()
    head = ["strategy", "slides", *(["right"] if known else []), "leading concepts", "typical slide"]
    rows = [head]
    for k in range(s.count):
        right = [_percent(found.accuracy[k])] if known else []
        leaders = ", ".join(map(str, s.leaders[k]))
        typical = found.slides[int(s.representatives[k])]
        rows.append([str(k), str(int((s.labels == k).sum())), *right, leaders, typical])
    cells = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for tag, row in zip(["th"] + ["td"] * s.count, rows, strict=True)
    ]
    table = f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    lead = (
        "All slides are decided for similar reasons."
        if s.count == 1
        else f"Slides are decided in {s.count} ways (silhouette {_short(s.silhouette)})."
    )
    drawn = strategy_figure(s, found.slides)
    return f"<h2>Strategies</h2><p>{lead}</p>{table}{drawn}<p class='small'>strategies.csv</p>"


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{100 * share:.0f} %"


def _shortcuts(found: Findings) -> str:
    if not found.shortcuts:
        return ""
    rows = "".join(
        f"<tr class='{'found' if a.found else ''}'><td>{escape(a.cause)}</td><td>{escape(a.level)}</td>"
        f"<td>{escape(a.measure)}</td><td>{a.effect:.2f}</td><td>{a.corrected:.3g}</td><td>{a.n}</td>"
        f"<td>{escape(', '.join(a.slides[:3])) if a.found else ''}</td></tr>"
        for a in found.shortcuts
    )
    head = "".join(
        f"<th>{name}</th>" for name in ("cause", "per", "measure", "effect", "p", "slides", "look at")
    )
    source = (
        "<p class='small'>shortcuts.csv; p from permutations within labels, corrected by Holm's method. "
        "Brightness, saturation, hue and focus belong to tissue, too: they are listed and never called a "
        "shortcut.</p>"
    )
    shown = _accused(found.accused)
    lead = "<p>Strongest patches of the slides that show it most:</p>" if shown else ""
    return f"<h2>Shortcuts</h2><table><tr>{head}</tr>{rows}</table>{lead}{shown}{source}"


def _accused(patches: Sequence[tuple[str, bytes]]) -> str:
    """The patches of each slide under its name."""
    slides = dict.fromkeys(slide for slide, _ in patches)
    parts = [
        f"<figure><figcaption>{escape(slide)}</figcaption>"
        f"{_images([data for name, data in patches if name == slide], f'patch of {slide}')}</figure>"
        for slide in slides
    ]
    return f"<div class='accused'>{''.join(parts)}</div>" if parts else ""


def _table(title: str, rows: Mapping[str, Mapping[str, str]], source: str) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    head = "<th></th>" + "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [
        [name.replace("_", " "), *(row.get(column, "") for column in columns)] for name, row in rows.items()
    ]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return (
        f"<h2>{escape(title)}</h2><table><tr>{head}</tr>{body}</table><p class='small'>{escape(source)}</p>"
    )


def _numbers(title: str, values: Mapping[str, float], source: str) -> str:
    if not values:
        return ""
    return _table(title, {key: {"mean": _short(value)} for key, value in values.items()}, source)


def _faithfulness(found: Findings) -> str:
    if not found.faithfulness:
        return f"<h2>Faithfulness</h2><p>{escape(UNTESTED.capitalize())}.</p>"
    rows = {name: {"mean (95 % interval)": value} for name, value in found.faithfulness.items()}
    return _table("Faithfulness", rows, "summary.csv of the evaluated run")


def _sanity(found: Findings) -> str:
    rows = {name: {"result": value} for name, value in found.sanity.items()}
    return _table("Sanity", rows, "sanity.csv") or f"<h2>Sanity</h2><p>{escape(UNCHECKED.capitalize())}.</p>"


def _limits() -> str:
    return "<h2>Limits</h2><ul>" + "".join(f"<li>{escape(limit)}</li>" for limit in LIMITS) + "</ul>"


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
