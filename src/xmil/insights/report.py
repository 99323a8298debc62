"""The report of an insight run, one HTML file with its pictures inside, and the explanation card for hubs.

Every number is also in a table of the run's folder, which the report names.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from xmil.core.explanation import PARTS
from xmil.core.text import counted
from xmil.evaluate import SurvivalCurve
from xmil.evaluate.statistics import FEWEST
from xmil.heatmaps import Html, bullets, image, join, letter_figure, new_figure, page, small, table, tag
from xmil.insights.concepts import SEEDS, STABLE, Strategies, recommend_size
from xmil.insights.shortcuts import Association

CONCEPTS = 8  # in the report
NAMED = 4  # strategies with their typical slide named in the figure; more names would overlap
GREY = "#808080"  # readable on white and on black
GROUPS = ("#3aa66b", "#b06fd0", "#c9a227", "#7a5c3e", "#9bbf3b", "#5fb3a0", "#5e5e5e", "#b5b5b5")
STYLE = """
.short, .notes { background: var(--soft); border-radius: .5rem; padding: .6rem 1.2rem; margin: 1rem 0; }
.short ul, .notes ul { padding-left: 1.1rem; margin: .3rem 0; }
.notes { border-left: .3rem solid var(--mind); }
.figures td { white-space: nowrap; } .figures td:first-child { white-space: normal; }
.concepts { display: grid; grid-template-columns: repeat(auto-fill, minmax(29rem, 1fr)); gap: 1.4rem 2rem; }
.concepts p { margin: .2rem 0; }
.bar { background: var(--soft); height: .45rem; border-radius: .3rem; margin: .3rem 0; }
.bar i { display: block; height: 100%; border-radius: .3rem; background: currentcolor; }
.patches { display: grid; grid-template-columns: repeat(6, 1fr); gap: 4px; margin: .5rem 0;
  max-width: 31rem; }
.patches img { width: 100%; border-radius: 3px; }
.suspects .patches { grid-template-columns: repeat(3, 4.5rem); }
.suspects { display: flex; flex-wrap: wrap; gap: 0 1.5rem; } .suspects figure { margin: .4rem 0; }
@media (max-width: 34rem) { .concepts { grid-template-columns: 1fr; } }
@media print { .concepts > div { break-inside: avoid; } }
"""
UNTESTED = "not tested: run xmil evaluate and give its folder"
UNCHECKED = "not tested: give the model"
UNCORRECTED = "p is not corrected for the number of rows"
INDEPENDENT = "unknown: slides are taken as independent (no case_id)"
LIMITS = (
    "An explanation is about the model, not the disease.",
    "Concepts are directions of the encoder's features; their names are the reader's.",
    "An association is not a cause: a shortcut is a lead to look at, with its slides.",
    "A biomarker from a map is no better than the prediction beside it until it is tested on other data.",
    "For research use only: not a medical device.",
)
BIOMARKERS = {
    "strong_share": "share of patches that clearly support the class: above the cohort's own threshold",
    "supporting_share": "share of patches that score above zero, however little",
    "agreed_share": "share of patches that most models count as support, and none counts against",
    "masked_share": "share of patches whose masked mean over the models is above zero",
    "positive_relevance_share": "support as a share of all score, for and against",
    "hot_regions": "connected groups of supporting patches",
    "largest_region": "patches in the largest of these groups",
    "mixing": "share of neighbouring pairs of which one patch supports and the other opposes",
    "region_strong_share": "strong share within the annotations",
    "region_supporting_share": "supporting share within the annotations",
    "tapas": "share of annotated patches whose masked mean over the models is above zero",
    "plain output": "what the model says without any map: a biomarker has to beat this",
}
STABILITY = {
    "models": "models or runs that were compared",
    "sign agreement": "share of the models on the commoner side of zero; 0.5 is chance, 1 is full agreement",
    "rank correlation": "of the maps of two models, mean over pairs; 0 is chance",
    "kept share": "share of patches that the mask keeps",
    "mean spread": "standard deviation of a patch's score over the models",
    "largest model share": "largest part of all absolute score that one model gives",
}
ACCOUNT = {
    "Output": "the explained output",
    PARTS["instances"]: "given to patches: the map",
    PARTS["class_token"]: "reached the class token",
    PARTS["bias"]: "reached added constants",
    PARTS["epsilon"]: "lost to the terms that keep divisions stable",
    PARTS["other"]: "must be near zero",
    PARTS["baseline"]: "what a bag of baseline patches would get",
    PARTS["cut"]: "stopped at constants that depend on the input",
}
MEASURES = {
    "aupc": "mean output while patches are taken out, the highest first: lower is better",
    "srg": "lowest first less highest first: higher is better, 0 is chance",
    "sufficiency": "mean output while patches are added, the highest first: higher is better",
    "flips": "share of slides whose decision changes while patches are taken out",
    "flipped_at_zero": "share of slides whose decision is gone once all support is out",
}


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
    """All results of an insight run, from which the report and the card are made."""

    title: str
    about: Mapping[str, Any]
    concepts: Sequence[ConceptRow]
    slides: Sequence[str]
    target: str = "the target"  # in words
    strategies: Strategies | None = None
    accuracy: Sequence[float] = ()
    shortcuts: Sequence[Association] = ()
    cases: int | None = None  # None if patients are unknown
    untested: Mapping[str, str] = field(default_factory=dict)  # columns, and why they cannot be tested
    suspects: Sequence[tuple[str, bytes]] = ()  # patches of the slides that the first shortcut names
    agreement: Mapping[int, float] = field(default_factory=dict)  # over seeds, by the number of concepts
    removals: Mapping[str, float] = field(default_factory=dict)
    biomarkers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    stability: Mapping[str, float] = field(default_factory=dict)
    audit: Mapping[str, float] = field(default_factory=dict)
    faithfulness: Mapping[str, str] = field(default_factory=dict)
    sanity: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Sequence[SurvivalCurve]] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def ways(self) -> int | None:
        """The number of strategies; None unless there are several."""
        if self.strategies is None or self.strategies.count == 1:
            return None
        return self.strategies.count


def report_html(findings: Findings) -> str:
    """Write the report as one page: the findings in a line each, then a section for each kind."""
    facts = [[key, _short(value)] for key, value in findings.about.items() if value]
    sections = {
        "Concepts": _concepts(findings),
        "Strategies": _strategies(findings),
        "Shortcuts": _shortcuts(findings),
        "Biomarkers": _biomarkers(findings),
        "Survival": _survival(findings.curves),
        "Trust": _trust(findings),
        "Limits": join([tag("h2", "Limits"), bullets(LIMITS)]),
        "Details": join([tag("h2", "Details"), table(facts, head=("what", "which"), kind="words")]),
    }
    filled = {name: part for name, part in sections.items() if part}
    lines: list[object] = [tag("b", verdict(findings))]
    if findings.concepts:
        strength = [row.strength for row in findings.concepts]
        names = [str(row.concept) for row in findings.concepts[:5]]
        lines.append(
            f"{100 * sum(strength[:5]) / (sum(strength) or 1.0):.0f} % of the relevance lies in {len(names)} "
            f"of {len(strength)} concepts: {', '.join(names)}."
        )
    if findings.ways is not None and findings.strategies is not None:
        lines.append(_ways(findings.strategies, findings))
    sanity, cautions = findings.sanity.get("weights drawn anew", ""), list(findings.notes)
    if sanity:
        where = cautions if sanity.startswith("failed") else lines
        where.append(f"Sanity test with new weights: {sanity.split(';')[0]}.")
    lines.append(f"Faithfulness {'was measured: see Trust' if findings.faithfulness else f'was {UNTESTED}'}.")
    title = f"What the model looks at: {findings.title}"
    data = findings.about.get("data") or f"{len(findings.slides)} slides"
    notes = tag("div", tag("b", "Caution"), bullets(cautions), kind="notes")
    return page(
        title,
        tag("h1", title),
        small(data),
        tag("div", bullets(lines), kind="short"),
        notes if cautions else "",
        tag("nav", *(tag("a", name, href=f"#{name.lower()}") for name in filled), kind="small"),
        *(tag("section", part, id=name.lower()) for name, part in filled.items()),
        style=STYLE,
    )


def verdict(findings: Findings) -> str:
    """Write one sentence on shortcuts."""
    shortcuts = [a for a in findings.shortcuts if a.is_shortcut]
    tested = [a for a in findings.shortcuts if not (a.tissue or a.confounded)]
    units, unit = _count_units(findings)
    if not tested and units < FEWEST:
        return f"Shortcuts were not looked for: {FEWEST} {unit}s are needed, but there are {units}."
    if not tested and (findings.untested or findings.shortcuts):
        return "Shortcuts were not looked for: none of the columns could be tested; their section says why."
    if not tested:
        return "Shortcuts were not looked for: no columns or pictures were given that could show one."
    if not shortcuts:
        confounded = [a.cause for a in findings.shortcuts if a.confounded and not a.tissue]
        verb = "goes" if len(confounded) == 1 else "go"
        but = f"; {', '.join(confounded)} {verb} with the label and could not be tested" if confounded else ""
        return f"No shortcut was found in {counted(len(tested), 'test')}{but}."
    first = shortcuts[0]
    return (
        f"Look at this first: {first.cause} goes with what the model uses ({first.measure} "
        f"{first.effect:.2f} over {first.extent}, corrected p = {first.corrected:.3g})."
    )


def _count_units(findings: Findings) -> tuple[int, str]:
    """Count what counts once in a test, and name it."""
    return (len(findings.slides), "slide") if findings.cases is None else (findings.cases, "case")


def _short(value: Any) -> str:
    """Write a number with three digits, and anything else unchanged."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _ways(s: Strategies, findings: Findings) -> str:
    """Write whether there are several strategies, and how sure that is."""
    units, unit = _count_units(findings)
    if s.count > 1:
        return (
            f"Slides are decided in {s.count} ways (silhouette {_short(s.silhouette)}; one cloud of "
            f"{unit}s splits as well with p = {s.p:.2g})."
        )
    if s.tested > 1:
        return (
            f"Several ways of deciding were not found: a split into {s.tested} (silhouette "
            f"{_short(s.silhouette)}) is no better than that of one cloud of {unit}s (p = {s.p:.2g})."
        )
    if units < FEWEST:
        return f"Strategies were not looked for: {FEWEST} {unit}s are needed, but there are {units}."
    return f"Several ways of deciding were not found: no split of the {unit}s is convincing."


def _patches(pictures: Sequence[bytes], words: str) -> Html:
    return tag("div", *(image(data, words) for data in pictures), kind="patches") if pictures else Html()


def _concepts(findings: Findings) -> Html:
    if not findings.concepts:
        return Html()
    total = sum(row.strength for row in findings.concepts) or 1.0
    cards = []
    for row in findings.concepts[:CONCEPTS]:
        side, does = ("for", "adds {} to") if row.relevance > 0 else ("against", "takes {} from")
        share = f"{100 * row.strength / total:.0f}"
        cards.append(
            tag(
                "div",
                tag(
                    "h3",
                    f"Concept {row.concept} ",
                    tag("span", f"speaks {side} {findings.target}", kind=side),
                ),
                tag("div", tag("i", style=f"width:{share}%"), kind=f"bar {side}"),
                small(
                    f"{share} % of the relevance; {does.format(_short(abs(row.relevance)))} a slide's output "
                    f"on average; leads in {row.leads} of {len(findings.slides)} slides"
                ),
                _patches(row.pictures, f"concept {row.concept}"),
            )
        )
    more, removals = len(findings.concepts) - len(cards), findings.removals
    ways = [
        f"that {who} predicts in {100 * removals[f'agreement{end}']:.0f} % "
        f"(correlation {_short(removals[f'correlation{end}'])})"
        for who, end in (("the output's slope", ""), ("relevance", " of relevance"))
        if removals
    ]
    deletions = (
        f"Does the model need them? Deleting leading concepts, {int(removals.get('n', 0))} trials, moved the "
        f"output in the direction {', and in the one '.join(ways)} (removals.csv)."
    )
    return join([
        tag("h2", "Concepts"),
        tag("p", stability_sentence(findings.agreement)) if findings.agreement else "",
        tag(
            "p",
            "A concept is a kind of patch, or a part of what patches show, that the encoder tells from "
            "others. The model's output is shared out among them. Each is shown by the patches in which it "
            "counts most.",
        ),
        tag("div", *cards, kind="concepts"),
        tag("p", deletions) if removals else "",
        small(
            f"{more} further concepts are in the tables: " if more else "",
            "concepts.csv, profiles.csv; larger sheets in atlas/",
        ),
    ])  # fmt: skip


def stability_sentence(agreement: Mapping[int, float]) -> str:
    """Write whether other seeds find the same concepts, and how many would be stable."""
    size, best = max(agreement), recommend_size(agreement)
    measured = f"adjusted Rand index {agreement[size]:.2f} over {SEEDS} seeds; 1 is the same groups, 0 chance"
    if best == size and agreement[size] >= STABLE:
        return f"Other seeds group the patches into much the same {size} concepts ({measured})."
    advice = f"{best} concepts stay the same ({agreement[best]:.2f}): try `concepts={best}`"
    if agreement[best] < STABLE:
        advice = f"no smaller number reaches {STABLE:g} either; {best} comes nearest ({agreement[best]:.2f})"
    return f"Other seeds group the patches differently into {size} concepts ({measured}); {advice}."


def _strategies(findings: Findings) -> Html:
    s = findings.strategies
    if s is None:
        return Html()
    shares = ["" if np.isnan(right) else f"{100 * right:.0f} %" for right in findings.accuracy]
    accuracy = ["decided correctly"] if any(shares) else []
    rows = [
        [
            k,
            int((s.labels == k).sum()),
            *(shares[k : k + 1] if accuracy else ()),
            ", ".join(map(str, s.leaders[k])),
            findings.slides[int(s.representatives[k])],
        ]
        for k in range(s.count)
    ]
    return join([
        tag("h2", "Strategies"),
        tag(
            "p",
            "A strategy is a group of cases whose output is made of the same mix of concepts. ",
            f"{_ways(s, findings)} {_unit(findings)}",
        ),
        table(rows, head=["strategy", "slides", *accuracy, "leading concepts", "typical slide"]),
        _strategy_figure(s, findings.slides),
        small("strategies.csv"),
    ])  # fmt: skip


def _shortcuts(findings: Findings) -> Html:
    reasons = "; ".join(f"{name} ({why})" for name, why in findings.untested.items())
    left = small(f"Not tested: {reasons}.") if reasons else Html()
    if not findings.shortcuts:
        return join([tag("h2", "Shortcuts"), tag("p", verdict(findings)), left]) if left else Html()
    causes = [a for a in findings.shortcuts if not a.tissue]
    tissue = [a for a in findings.shortcuts if a.tissue]
    head = ("cause", "asked per", "measure", "effect", "corrected p", "slides", "cases", "slides to look at")
    rows = [
        [a.cause, a.level, a.measure, *_figures(a), ", ".join(a.slides[:3]) if a.is_shortcut else ""]
        for a in causes
    ]
    unit = "slides" if findings.cases is None else "cases"
    confounded = [a.cause for a in causes if a.confounded]
    parts: list[object] = [
        tag("h2", "Shortcuts"),
        tag(
            "p",
            "Does what the model uses go with how a slide was made? Slides of one label are compared, so "
            f"that a site with more cases is no shortcut by itself. A finding is bold. {_unit(findings)}",
        ),
    ]
    if causes:
        parts.append(table(rows, head=head, kind="words", marked=[a.is_shortcut for a in causes]))
    if findings.suspects:
        figures = []
        for slide in dict.fromkeys(slide for slide, _ in findings.suspects):
            pictures = [data for name, data in findings.suspects if name == slide]
            figures.append(tag("figure", tag("figcaption", slide), _patches(pictures, f"patch of {slide}")))
        parts.append(tag("p", "Strongest patches of the slides that show it most:"))
        parts.append(tag("div", *figures, kind="suspects"))
    parts.append(left)
    if confounded:
        parts.append(
            small(
                "Goes with the label, so this cohort cannot show whether the model uses it: "
                f"{', '.join(confounded)}. Slides of one label that differ in it would tell."
            )
        )
    if tissue:
        parts += [
            small(
                "Tissue itself differs in these, so they are listed but never called a shortcut (mean rank "
                "correlation with the score within slides):"
            ),
            table(
                [[a.cause, *_figures(a)] for a in tissue],
                head=("property", "effect", "corrected p", "slides", "cases"),
            ),
        ]
    source = (
        f"shortcuts.csv; p from permutations of {unit} within labels, corrected by Holm's method; a shortcut "
        "is called where p < 0.01 and a tenth of the rank variance is explained."
    )
    return join([*parts, small(source)])


def _unit(findings: Findings) -> str:
    """Write what counts once in tests and intervals."""
    if findings.cases is None:
        return "Slides are taken as independent: no case_id says which are of one patient."
    slides = len(findings.slides)
    of = counted(findings.cases, "case")
    return f"{counted(slides, 'slide')} of {of}: a patient counts once, however many slides."


def _figures(a: Association) -> tuple[str, str, str, str]:
    return f"{a.effect:.2f}", f"{a.corrected:.2g}", str(a.n), "" if a.cases is None else str(a.cases)


def _biomarkers(findings: Findings) -> Html:
    if not findings.biomarkers:
        return Html()
    has_p = any("permutation p" in row for row in findings.biomarkers.values())
    return join([
        tag("h2", "Biomarkers from the maps"),
        tag(
            "p",
            "One number per slide, made from its map; the last row is the prediction without a map. "
            f"{_unit(findings)}",
        ),
        _glossary(findings.biomarkers, BIOMARKERS),
        small(f"biomarkers.csv, slides.csv{f'; {UNCORRECTED}' if has_p else ''}"),
    ])  # fmt: skip


def _trust(findings: Findings) -> Html:
    """Write how far one can trust the maps: faithfulness, sanity, stability, the audit of the output."""
    faithful = {name: {"mean (95 % interval)": value} for name, value in findings.faithfulness.items()}
    meanings = {name: MEASURES.get(name.split(",")[0], "") for name in faithful}
    sane = {name: {"": value} for name, value in findings.sanity.items()}
    stable = {name: {"mean": _short(value)} for name, value in findings.stability.items()}
    sizes = {
        PARTS.get(name.removeprefix("size of "), "Output"): {"mean size": _short(v)}
        for name, v in findings.audit.items()
    }
    parts = (
        (
            "Faithfulness", _glossary(faithful, meanings), f"{UNTESTED.capitalize()}.",
            "summary.csv of the evaluation",
        ),
        ("Sanity", _glossary(sane, {}, kind="words"), f"{UNCHECKED.capitalize()}.", "sanity.csv"),
        (
            "Stability across the models", _glossary(stable, STABILITY), "",
            "stability.csv; maps in consensus/",
        ),
        ("Where the output went", _glossary(sizes, ACCOUNT), "", "slides/<slide_id>.json"),
    )  # fmt: skip
    lines: list[object] = [tag("h2", "How far the maps can be trusted")]
    for title, rows, otherwise, source in parts:
        if rows:
            lines += [tag("h3", title), rows, small(source)]
        elif otherwise:
            lines += [tag("h3", title), tag("p", otherwise)]
    return join(lines)


def _glossary(
    rows: Mapping[str, Mapping[str, str]], meanings: Mapping[str, str], *, kind: str = "figures"
) -> Html:
    """Write a table that explains each row in small print; empty without rows."""
    if not rows:
        return Html()
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = []
    for name, row in rows.items():
        meaning = tag("small", meanings[name]) if meanings.get(name) else ""
        lines.append([join([name.replace("_", " "), meaning]), *(row.get(column, "") for column in columns)])
    return table(lines, head=["", *columns], kind=kind)


# Figures: PNGs inside the page, transparent, in colours for light pages and dark ones.


def _strategy_figure(s: Strategies, slides: Sequence[str]) -> Html:
    """Draw the cases of slides in the plane of their profiles, coloured by strategy.

    A ring marks the case of each typical slide.
    """
    figure, axis = new_figure((6.4, 3.8))
    for k in range(s.count):
        own, colour = s.labels == k, GROUPS[k % len(GROUPS)]
        x, y = s.embedding[own].T
        name = f"strategy {k}" if s.count > 1 else "all"
        axis.scatter(x, y, color=colour, s=22, label=f"{name} ({int(own.sum())} slides)")
        typical = int(s.representatives[k])
        place = (float(s.embedding[typical, 0]), float(s.embedding[typical, 1]))
        axis.scatter(place[0], place[1], s=90, facecolors="none", edgecolors=GREY, linewidths=1.5)
        if s.count <= NAMED:  # the table names them all
            axis.annotate(
                slides[typical], place, xytext=(6, 6), textcoords="offset points", color=GREY, fontsize=8
            )
    axis.set(xlabel="first direction of the profiles", ylabel="second direction")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=GREY)
    return _transparent(figure, "slides by their profile over concepts")


def _survival(curves: Mapping[str, Sequence[SurvivalCurve]]) -> Html:
    """Draw Kaplan-Meier curves with their bands, a panel for each biomarker; empty without any."""
    if not curves:
        return Html()
    figure, panels = new_figure((4.6 * len(curves), 3.8), 1, len(curves), squeeze=False)
    for axis, (name, groups) in zip(panels[0], curves.items(), strict=True):
        for colour, curve in zip(GROUPS, groups, strict=False):
            patients = "" if curve.n == curve.slides else f"{curve.n} cases, "
            words = f"{curve.group} ({patients}{curve.slides} slides)"
            axis.step(curve.times, curve.share, where="post", color=colour, label=words)
            axis.fill_between(
                curve.times, curve.low, curve.high, step="post", color=colour, alpha=0.2, linewidth=0
            )
        axis.set(ylim=(0, 1.02), xlabel="time", ylabel="share without the event")
        axis.set_title(name.replace("_", " "), color=GREY, fontsize=10)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
        axis.legend(fontsize=8, frameon=False, labelcolor=GREY, **place)
    picture = _transparent(figure, "Kaplan-Meier curves")
    few = any(curve.n < FEWEST for groups in curves.values() for curve in groups)
    source = "Kaplan-Meier with 95 % bands; survival.csv"
    source += f"; a half of fewer than {FEWEST} has no band" if few else ""
    return join([tag("h2", "Survival"), picture, small(source)])


def _transparent(figure: Any, words: str) -> Html:
    for axis in figure.axes:
        axis.patch.set_alpha(0)
        axis.tick_params(colors=GREY)
        axis.spines[:].set_color(GREY)
        for part in (axis.xaxis, axis.yaxis):
            part.label.set_color(GREY)
    stream = io.BytesIO()
    letter_figure(figure).savefig(stream, format="png", dpi=110, transparent=True)
    return tag("figure", image(stream.getvalue(), words))


# The explanation card for model hubs: what was explained, how, and how far to trust it.


def card(findings: Findings) -> dict[str, Any]:
    """Make the card's entries by name."""
    return {
        "title": findings.title,
        **findings.about,
        "slides": len(findings.slides),
        "cases": INDEPENDENT if findings.cases is None else findings.cases,
        "account": dict(findings.audit),
        "faithfulness": dict(findings.faithfulness) or UNTESTED,
        "sanity": dict(findings.sanity) or UNCHECKED,
        "concepts": len(findings.concepts),
        "concept_stability": stability_sentence(findings.agreement) if findings.agreement else None,
        "strategies": findings.ways,
        "shortcuts": [str(a) for a in findings.shortcuts if a.is_shortcut],
        "shortcuts_asked": list(dict.fromkeys(a.cause for a in findings.shortcuts if not a.tissue)),
        "shortcuts_not_asked": [f"{name}: {why}" for name, why in findings.untested.items()],
        "concept_removal": dict(findings.removals),
        "stability": dict(findings.stability),
        "notes": list(findings.notes),
        "limits": list(LIMITS),
    }


def card_markdown(findings: Findings) -> str:
    """Write the card for a model hub's README."""
    lines = [f"# Explanation card: {findings.title}", ""]
    for name, value in _card_entries(findings):
        if isinstance(value, list):
            lines += [f"**{name}**", "", *(f"- {item}" for item in value), ""]
        else:
            lines += [f"**{name}**: {value}", ""]
    return "\n".join([*lines, "**limits**", "", *(f"- {limit}" for limit in LIMITS), ""])


def card_html(findings: Findings) -> str:
    """Write the card as a page."""
    title = f"Explanation card: {findings.title}"
    rows = [
        [tag("b", name), join(value if isinstance(value, list) else [value], "<br>")]
        for name, value in _card_entries(findings)
    ]
    return page(title, tag("h1", title), table(rows, kind="words"), tag("h2", "Limits"), bullets(LIMITS))


def _card_entries(findings: Findings) -> list[tuple[str, str | list[str]]]:
    """Write the entries for readers, without empty ones, and without title and limits."""
    entries: list[tuple[str, str | list[str]]] = []
    for key, value in card(findings).items():
        if key in ("title", "limits") or value in (None, [], {}):
            continue
        words: str | list[str] = _short(value)
        if isinstance(value, Mapping):
            words = [f"{k}: {_short(v)}" for k, v in value.items()]
        elif isinstance(value, list):
            words = [str(item) for item in value]
        entries.append((key.replace("_", " "), words))
    return entries


PAGES: Mapping[str, Callable[[Findings], str]] = {
    "report.html": report_html,
    "card.html": card_html,
    "card.json": lambda findings: json.dumps(card(findings), indent=2, default=str) + "\n",
    "card.md": card_markdown,
}
