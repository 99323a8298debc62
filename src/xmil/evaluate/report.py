"""The report of a faithfulness run: summary as text, CSV, Markdown and LaTeX, tests, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.errors import InputError
from xmil.core.explanation import PARTS, card_of
from xmil.core.quoting import latex_text
from xmil.core.text import counted, csv_text, markdown_table, text_table
from xmil.evaluate.faithfulness import EVIDENCE, Row, SlideResult
from xmil.evaluate.predictions import GREY, STYLES
from xmil.evaluate.statistics import (
    SMALLEST,
    BestMethod,
    Comparison,
    Floats,
    Interval,
    auroc,
    best_method,
    bootstrap_mean,
    compare,
    paper_pairs,
    unit_means,
    why_no_interval,
)
from xmil.heatmaps import method_colour, new_figure, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURES = {
    "aupc": "AUPC",
    "srg": "SRG",
    "sufficiency": "sufficiency",
    "necessity": "necessity",
    "flips": "flipped",
    "flipped_at_zero": "flipped at zero",
    "auprc2": "AUPRC-2",
    "auroc2": "AUROC-2",
    "ap": "AP",
    "ndcg": "NDCG",
    "pointing": "pointing game",
    "mass": "relevance mass",
}
PART_STYLES = (  # greys, because red and blue are evidence for and against
    ("0.25", ""), ("0.95", "////"), ("0.6", ""), ("0.95", "...."),
    ("0.8", ""), ("0.95", "xxxx"), ("0.45", "----"),
)  # fmt: skip
DASHES = ((5, 1), (3, 1, 1, 1), (1, 1), (8, 2), (4, 2, 1, 2, 1, 2))
LINES = (*STYLES, *((0, dashes) for dashes in DASHES))
INK = "#111111"
LETTERS = 105  # per line of a certificate's title
MANY_ORDERS = 40  # random orders needed to speak of 95 % of them
EXPLAINED = {
    "probability": "probability of the predicted class",
    "value": "value minus reference",
    "risk": "risk",
}


@dataclass(frozen=True)
class FaithfulnessCell:
    """A measure over slides: the mean with its interval over cases, and the deviation."""

    n: int
    cases: int
    mean: Interval
    std: float


@dataclass(frozen=True)
class Summary:
    """Cells by method, mode and measure, the slides that count, and for each mode tests of AUPC and the best.

    `cases` is the number of cases of the slides; None if it is unknown, and slides count as independent.
    `units` has the case of each slide that counts, or the slide itself.
    """

    cells: Mapping[tuple[str, str, str], FaithfulnessCell]
    methods: list[str]
    modes: list[str]
    slides: int
    cases: int | None
    units: Mapping[str, str]
    misclassified: int
    unlabelled: int
    auroc: float | None
    comparisons: dict[str, list[Comparison]]
    best: dict[str, BestMethod]

    @property
    def heading(self) -> str:
        """A sentence on which slides count."""
        labelled = len(self.units) + self.misclassified
        auroc = "" if self.auroc is None else f" AUROC {self.auroc:.3f} over {labelled} with a label."
        excluded = f" Left out: {self.misclassified} misclassified by arg max"
        excluded += f", {self.unlabelled} without a label." if self.unlabelled else "."
        if self.misclassified + self.unlabelled == 0:
            excluded = " None left out."
        return f"{len(self.methods)} methods on {self.counts}.{auroc}{excluded}"

    @property
    def counts(self) -> str:
        """The number of slides that count, and of their cases if that is known."""
        of = "" if self.cases is None else f" of {counted(self.cases, 'case')}"
        return f"{counted(self.slides, 'slide')}{of}"

    def columns(self) -> list[tuple[str, str]]:
        """List mode and measure of each column that is not empty."""
        filled = {(mode, measure) for _, mode, measure in self.cells}
        return [(mode, measure) for measure in MEASURES for mode in self.modes if (mode, measure) in filled]


def summarise(
    rows: Sequence[Row], *, cases: Mapping[str, str] | None, smallest: float = SMALLEST, seed: int = 0
) -> Summary:
    """Average over the slides that count: those classified correctly, or all if none has a label.

    `cases` names the case of each slide_id: intervals draw cases with all their slides, tests compare cases.
    None treats slides as independent. A row may describe a case; `parts` then has the sizes of its slides. A
    method is only called better if it is lower by at least `smallest`.
    """
    if not rows:
        raise InputError("There are no results to summarise: no slide could be measured.")
    methods, modes = (list(dict.fromkeys(str(row[key]) for row in rows)) for key in ("method", "mode"))
    labelled = any(row["correct"] is not None for row in rows)
    slides = {row["slide_id"]: row for row in rows}
    names = [name for name, row in slides.items() if row["correct"] or not labelled]
    measured = {
        (row["slide_id"], row["method"], row["mode"]): row for row in rows if row["slide_id"] in set(names)
    }
    aupc = {mode: {m: _column(measured, names, m, mode, "aupc") for m in methods} for mode in modes}
    units = [name if cases is None else cases[name] for name in names]
    sizes = [len(slides[name].get("parts") or [0]) for name in names]
    bag = "slide" if sum(sizes) == len(names) else "case"
    unit = "slide" if cases is None else "case"
    options: dict[str, Any] = {"units": units, "bag": bag, "unit": unit, "smallest": smallest}
    best = {mode: best_method(aupc[mode], **options) for mode in modes} if names else {}
    tests = {mode: compare(aupc[mode], paper_pairs(methods), units=units) for mode in modes} if names else {}
    return Summary(
        cells=_cells(measured, names, units, methods, modes, seed),
        methods=methods,
        modes=modes,
        slides=sum(sizes),
        cases=None if cases is None else len(set(units)),
        units=dict(zip(names, units, strict=True)),
        misclassified=sum(row["correct"] is False for row in slides.values()),
        unlabelled=sum(row["correct"] is None for row in slides.values()) if labelled else 0,
        auroc=_auroc(list(slides.values())),
        comparisons=tests,
        best=best,
    )


def as_text(summary: Summary) -> str:
    """Write a table for the terminal, with notes on its meaning."""
    return "\n".join([summary.heading, "", text_table(_rows(summary)), "", *_notes(summary)]) + "\n"


def as_markdown(summary: Summary) -> str:
    """Write a Markdown table; the lowest AUPC is bold if it is better than all others."""
    head, *rows = _rows(summary, "**", "**")
    return "\n".join([summary.heading, "", markdown_table(head, rows), "", *_notes(summary)]) + "\n"


def as_latex(summary: Summary) -> str:
    """Write a booktabs table."""
    titles, *cells = _rows(summary, r"\textbf{", "}")
    head = " & ".join(map(latex_text, titles)) + r" \\"
    rows = [" & ".join([latex_text(name), *numbers]) + r" \\" for name, *numbers in cells]
    rows = [row.replace(" %", r" \%").replace(" ± ", r" $\pm$ ") for row in rows]
    begin = rf"\begin{{tabular}}{{l{'c' * len(summary.columns())}}}"
    lines = [begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]
    return "\n".join([*lines, f"% {summary.heading}"]) + "\n"


def as_csv(summary: Summary) -> str:
    """Write one line for each method, mode and measure."""
    fields = ["method", "mode", "measure", "n", "cases", "mean", "low", "high", "std"]
    rows = [
        [*key, c.n, c.cases, c.mean.estimate, c.mean.low, c.mean.high, c.std]
        for key, c in summary.cells.items()
    ]
    return csv_text(fields, rows)


def statistics_csv(summary: Summary) -> str:
    """Write every paired comparison of AUPC, corrected within its mode."""
    rows = [[mode, *astuple(c)] for mode, tests in summary.comparisons.items() for c in tests]
    return csv_text(["mode", *Comparison.__dataclass_fields__], rows)


FORMATS = {"txt": as_text, "csv": as_csv, "md": as_markdown, "tex": as_latex}


def draw_summary(rows: Sequence[Row], summary: Summary, path: Path) -> None:
    """Draw mean curves with standard errors over cases, and AUPC box plots below, a column for each mode."""
    columns = len(summary.modes)
    figure, axes = new_figure((1.4 + 4.6 * columns, 7.4), 2, columns, squeeze=False)
    measured = [row for row in rows if row["slide_id"] in summary.units]
    for i, mode in enumerate(summary.modes):
        groups = {m: [r for r in measured if (r["method"], r["mode"]) == (m, mode)] for m in summary.methods}
        _draw_curves(axes[0, i], groups, summary.units)
        _draw_boxes(axes[1, i], groups)
        axes[0, i].set_title(f"patches {'removed' if mode == 'remove' else 'masked with zeros'}", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)
    figure.suptitle(f"{summary.counts}; lower is more faithful", fontsize=11)
    write_figure(figure, path)


def draw_certificate(slide_id: str, result: SlideResult, path: Path) -> None:
    """Draw a slide's curves with the random band, the audit of each output, and the verdicts."""
    figure, (left, right) = new_figure((10.5, 6.0), 1, 2, width_ratios=(3, 2))
    percent = np.linspace(0, 100, len(result.band.mean))
    band, grey = result.band, {"color": GREY, "alpha": 0.3, "lw": 0}
    orders = f"{len(band.aupcs)} random orders"  # few orders have no 95 %
    shown = f"95 % of {orders}" if len(band.aupcs) >= MANY_ORDERS else orders
    left.fill_between(percent, band.low, band.high, label=shown, **grey)
    left.plot(percent, band.mean, color=GREY, lw=1)
    styles = method_styles([c.explanation.method for c in result.certificates])
    for certificate in result.certificates:
        name = certificate.explanation.method
        label = f"{card_of(name).title} ({certificate.morf.aupc:.2f}, {certificate.verdict.kind})"
        left.plot(percent, certificate.morf.values, label=label, **styles[name])
    kind, target = result.rows[0]["explained"], result.headline.morf.target
    _label_curves(left, f"probability of class {target}" if kind == "probability" else EXPLAINED[kind])
    _legend_below(left, "method (AUPC, verdict)")
    _draw_audits(right, result)
    lines = [f"{slide_id}: {counted(len(result.explanations[0]), 'patch')}"]
    figure.suptitle("\n".join(lines + wrap(result.headline.sentence, LETTERS)), fontsize=10)
    write_figure(figure, path)


def method_styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Choose a colour and line style for each method; random is grey."""
    styles: dict[str, dict[str, Any]] = {
        m: {"color": method_colour(m), "linestyle": LINES[i % len(LINES)], "lw": 1.8}
        for i, m in enumerate(m for m in methods if m != "random")
    }
    return {**styles, "random": {"color": GREY, "linestyle": "-", "lw": 1.8}}


def _draw_curves(axis: Axes, groups: dict[str, list[Row]], units: Mapping[str, str]) -> None:
    styles = method_styles(list(groups))
    for method, rows in groups.items():
        if rows:
            curves = np.array([row["morf"] for row in rows])
            mean, percent = curves.mean(axis=0), np.linspace(0, 100, curves.shape[1])
            own = [units[row["slide_id"]] for row in rows]
            each = np.stack([unit_means(column, own) for column in curves.T], axis=1)
            error = each.std(axis=0, ddof=1) / np.sqrt(len(each)) if len(each) > 1 else 0 * mean
            axis.fill_between(
                percent, mean - error, mean + error, color=styles[method]["color"], alpha=0.18, lw=0
            )
            axis.plot(percent, mean, label=card_of(method).title, **styles[method])
    kinds = {row["explained"] for rows in groups.values() for row in rows}
    name = EXPLAINED.get(kinds.pop() if len(kinds) == 1 else "", "explained output")
    _label_curves(axis, f"{name}\n(mean ± standard error)")


def _draw_boxes(axis: Axes, groups: dict[str, list[Row]]) -> None:
    """Draw box plots; line: median, dot: mean."""
    methods = [method for method, rows in groups.items() if rows]
    values = [[row["aupc"] for row in groups[method]] for method in methods]
    styles = method_styles(methods)
    if methods:
        drawn = axis.boxplot(
            values,
            tick_labels=[card_of(method).title for method in methods],
            showmeans=True,
            patch_artist=True,
            widths=0.6,
            medianprops={"color": INK, "lw": 1.8},
            meanprops={"marker": "o", "markerfacecolor": INK, "markeredgecolor": "white", "markersize": 6},
            flierprops={"marker": ".", "markersize": 4, "markeredgecolor": "#555555"},
        )
        for box, method in zip(drawn["boxes"], methods, strict=True):
            box.set(facecolor=styles[method]["color"], alpha=0.35)
    axis.set_ylabel("AUPC (line: median, dot: mean)")
    _limit(axis, [value for column in values for value in column])
    for text in axis.get_xticklabels():
        text.set(rotation=30, ha="right", rotation_mode="anchor")
    axis.grid(axis="y", alpha=0.3)


def _draw_audits(axis: Axes, result: SlideResult) -> None:
    """Draw the shares of each audited output side by side."""
    audited = [e for e in result.explanations if e.audit is not None]
    axis.set_title("where the output comes from", fontsize=10)
    if not audited:
        axis.text(0.5, 0.5, "no method here has an audit", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    positions = np.arange(len(audited))
    width = 0.8 / len(PARTS)
    for i, ((part, name), (grey, hatch)) in enumerate(zip(PARTS.items(), PART_STYLES, strict=True)):
        heights = [getattr(e.audit, part) for e in audited]
        places = positions + (i - len(PARTS) // 2) * width
        style: dict[str, Any] = {"color": grey, "hatch": hatch, "ec": "0.3", "lw": 0.5}
        axis.bar(places, heights, width, label=name, **style)
    for x, e in zip(positions, audited, strict=True):
        axis.plot([x - 0.45, x + 0.45], [e.audit.output] * 2, color="black", lw=1.2)  # type: ignore[union-attr]
    axis.plot([], [], color="black", lw=1.2, label="explained output")
    axis.axhline(0, color="black", lw=0.6)
    axis.set_xticks(positions, [card_of(e.method).title for e in audited])
    axis.set_ylabel("part of the explained output (its own unit)")
    _legend_below(axis)


def _legend_below(axis: Axes, title: str | None = None) -> None:
    options: dict[str, Any] = {
        "ncols": 3,
        "fontsize": 8,
        "title": title,
        "title_fontsize": 8,
        "frameon": False,
    }
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), columnspacing=1, **options)


def _label_curves(axis: Axes, ylabel: str) -> None:
    axis.set(xlabel="patches removed, strongest evidence first (%)", ylabel=ylabel, xlim=(0, 100))
    _limit(axis, [value for line in axis.get_lines() for value in np.asarray(line.get_ydata())])
    axis.grid(alpha=0.3)


def _limit(axis: Axes, values: list[float]) -> None:
    """Draw probabilities on their full range."""
    if values and min(values) >= 0 and max(values) <= 1:
        axis.set_ylim(-0.03, 1.03)


def _cells(
    measured: dict[tuple[str, str, str], Row],
    names: list[str],
    units: list[str],
    methods: list[str],
    modes: list[str],
    seed: int,
) -> dict[tuple[str, str, str], FaithfulnessCell]:
    cells = {}
    for mode in modes:
        # evidence does not depend on the mode
        measures = [m for m in MEASURES if mode == modes[0] or m not in EVIDENCE]
        for method in methods:
            for measure in measures:
                column = _column(measured, names, method, mode, measure)
                rows = np.flatnonzero(np.isfinite(column))
                if len(rows):
                    values, own = column[rows], [units[i] for i in rows]
                    mean = bootstrap_mean(values, units=own, seed=seed)
                    spread = float(values.std(ddof=1)) if len(values) > 1 else float("nan")
                    cell = FaithfulnessCell(len(rows), len(set(own)), mean, spread)
                    cells[method, mode, measure] = cell
    return cells


def _column(
    measured: dict[tuple[str, str, str], Row], names: list[str], method: str, mode: str, measure: str
) -> Floats:
    """Collect a measure over slides, nan if it is missing."""
    values = []
    for row in (measured.get((name, method, mode), {}) for name in names):
        value = row.get(measure)
        if measure == "flips" and row.get("flipped_at_zero") is not None:  # None: no decision to flip
            value = row["flipped"] is not None
        values.append(float("nan") if value is None else float(value))
    return np.array(values)


def _auroc(slides: list[Row]) -> float | None:
    """Compute the AUROC of a two-class model over all labelled slides."""
    labelled = [row for row in slides if row["label"] is not None]
    labels = [row["label"] for row in labelled]
    if set(labels) != {0, 1} or any(len(row["logits"]) > 2 for row in labelled):
        return None
    ranks = [row["logits"][-1] - (row["logits"][0] if len(row["logits"]) == 2 else 0.0) for row in labelled]
    return float(
        auroc(np.ones((1, len(labels))), np.array(labels) == 1, np.array(ranks, dtype=np.float64))[0]
    )


def _rows(summary: Summary, start: str = "", end: str = "") -> list[list[str]]:
    """Write the cells, titles first; `start` and `end` mark an AUPC that is better than all others."""
    columns = summary.columns()
    measures = [measure for _, measure in columns]
    titles = (MEASURES[m] + (f" ({mode})" if measures.count(m) > 1 else "") for mode, m in columns)
    rows = [["method", *titles]]
    for method in summary.methods:
        rows.append([method])
        for mode, measure in columns:
            cell, best = summary.cells.get((method, mode, measure)), summary.best.get(mode)
            text = "-" if cell is None else f"{cell.mean.estimate:.3f}"
            text += "" if cell is None or np.isnan(cell.std) else f" ± {cell.std:.3f}"
            if cell is not None and measure in ("flips", "flipped_at_zero", "pointing"):
                text = f"{100 * cell.mean.estimate:.0f} %"
            if measure == "aupc" and best is not None and best.better and best.method == method:
                text = f"{start}{text}{end}"
            rows[-1].append(text)
    return rows


def _notes(summary: Summary) -> list[str]:
    unit = "Tests and intervals are over cases, with all their slides."
    if summary.cases is None:
        unit = "Tests and intervals take slides as independent, because no cohort names their case_id."
    cases = len(set(summary.units.values()))
    if few := why_no_interval(cases, "slide" if summary.cases is None else "case"):
        unit += f" {few.capitalize()}."
    notes = [
        *(f"{mode}: {best}" for mode, best in summary.best.items()),
        "Mean ± standard deviation over slides; a lower AUPC or a higher SRG is more faithful.",
        "Flipped: the decision changes as patches leave; at zero: once all with a positive score are out.",
        unit,
    ]
    if summary.misclassified:
        notes.append("Misclassified slides do not count here; the verdict of xmil explain counts all slides.")
    return notes
