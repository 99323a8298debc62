"""Figures of a faithfulness run: curves and box plots as in the paper, and one picture per certificate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from xmil.core.lettering import letter_figure
from xmil.core.method_cards import card_of
from xmil.core.storage import write_atomically
from xmil.evaluate.faithfulness import Row, SlideResult
from xmil.evaluate.faithfulness_table import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# of the shares of an audit: Okabe and Ito's colours, told apart by colour-blind readers
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A", "#5E3C99")
STYLES = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1)),
    (0, (3, 1, 1, 1)),
    (0, (1, 1)),
    (0, (8, 2)),
    (0, (4, 2, 1, 2, 1, 2)),
)
RANDOM = "#7F7F7F"
RED = "#C1121F"
EXPLAINED = {
    "probability": "probability of the predicted class",
    "value": "value minus reference",
    "risk": "risk",
}
SHARES = ("instances", "class_token", "bias", "epsilon", "baseline", "cut", "other")


def draw_summary(rows: Sequence[Row], summary: Summary, path: Path) -> None:
    """Mean curves with their standard error above, AUPC box plots below, a column for each mode."""
    columns = len(summary.modes)
    figure = Figure(figsize=(1.4 + 4.6 * columns, 7.4), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False)
    counted = [
        row for row in rows if row["correct"] is not False and (row["correct"] or summary.unlabelled == 0)
    ]
    for i, mode in enumerate(summary.modes):
        chosen = {m: [r for r in counted if (r["method"], r["mode"]) == (m, mode)] for m in summary.methods}
        _curves(axes[0, i], chosen)
        _boxes(axes[1, i], chosen)
        axes[0, i].set_title(
            f"instances {'removed' if mode == 'remove' else 'masked with zeros'}", fontsize=11
        )
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(7, len(labels)), frameon=False)
    figure.suptitle(f"{summary.slides} slides; lower is more faithful", fontsize=11)
    _save(figure, path)


def draw_certificate(slide_id: str, result: SlideResult, path: Path) -> None:
    """A slide's curves against the random band, where each audited output went, and the verdicts."""
    figure = Figure(figsize=(10.5, 6.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    percent = _percent(len(result.band.mean))
    left.fill_between(
        percent,
        result.band.low,
        result.band.high,
        color=RANDOM,
        alpha=0.3,
        lw=0,
        label="95 % of random orders",
    )
    left.plot(percent, result.band.mean, color=RANDOM, lw=1)
    styles = method_styles([c.explanation.method for c in result.certificates])
    for certificate in result.certificates:
        name = certificate.explanation.method
        label = f"{name} ({certificate.morf.aupc:.2f}, {certificate.verdict})"
        left.plot(percent, certificate.morf.values, label=label, **styles[name])
    _label_curves(left, _explained(result))
    _legend_below(left, "method (AUPC, verdict)")
    _audits(right, result)
    figure.suptitle(
        f"{slide_id}: {len(result.explanations[0])} instances\n{result.headline.sentence}",
        fontsize=10,
        wrap=True,
    )
    _save(figure, path)


def method_styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and line style for each method; random is grey."""
    others = [m for m in methods if m != "random"]
    styles: dict[str, dict[str, Any]] = {
        m: {"color": card_of(m).colour, "linestyle": STYLES[i % len(STYLES)], "lw": 1.8}
        for i, m in enumerate(others)
    }
    return {**styles, "random": {"color": RANDOM, "linestyle": "-", "lw": 1.8}}


def _curves(axis: Axes, chosen: dict[str, list[Row]]) -> None:
    styles = method_styles(list(chosen))
    for method, rows in chosen.items():
        if rows:
            curves = np.array([row["morf"] for row in rows])
            mean, percent = curves.mean(axis=0), _percent(curves.shape[1])
            error = curves.std(axis=0, ddof=1) / np.sqrt(len(rows)) if len(rows) > 1 else 0 * mean
            axis.fill_between(
                percent, mean - error, mean + error, color=styles[method]["color"], alpha=0.18, lw=0
            )
            axis.plot(percent, mean, label=method, **styles[method])
    kinds = {row["explained"] for rows in chosen.values() for row in rows}
    name = EXPLAINED.get(kinds.pop() if len(kinds) == 1 else "", "explained output")
    _label_curves(axis, f"{name}\n(mean ± standard error)")


def _boxes(axis: Axes, chosen: dict[str, list[Row]]) -> None:
    """Red line: median; red dot: mean, as in the paper."""
    methods = [method for method, rows in chosen.items() if rows]
    values = [[row["aupc"] for row in chosen[method]] for method in methods]
    styles = method_styles(methods)
    if methods:
        drawn = axis.boxplot(
            values,
            tick_labels=methods,
            showmeans=True,
            patch_artist=True,
            widths=0.6,
            medianprops={"color": RED, "lw": 1.8},
            meanprops={"marker": "o", "markerfacecolor": RED, "markeredgecolor": "white", "markersize": 6},
            flierprops={"marker": ".", "markersize": 4, "markeredgecolor": "#555555"},
        )
        for box, method in zip(drawn["boxes"], methods, strict=True):
            box.set(facecolor=styles[method]["color"], alpha=0.35)
    axis.set_ylabel("AUPC (red line: median, red dot: mean)")
    _limit(axis, [value for column in values for value in column])
    for text in axis.get_xticklabels():
        text.set(rotation=30, ha="right", rotation_mode="anchor")
    axis.grid(axis="y", alpha=0.3)


def _audits(axis: Axes, result: SlideResult) -> None:
    """Stacked shares of each audited output."""
    audited = [e for e in result.explanations if e.audit is not None]
    axis.set_title("where the explained output went", fontsize=10)
    if not audited:
        axis.text(
            0.5,
            0.5,
            "no method here accounts for the output",
            ha="center",
            va="center",
            transform=axis.transAxes,
        )
        axis.set_axis_off()
        return
    positions = np.arange(len(audited))
    width = 0.8 / len(SHARES)
    for i, share in enumerate(SHARES):
        heights = [getattr(e.audit, share) for e in audited]
        axis.bar(
            positions + (i - len(SHARES) // 2) * width,
            heights,
            width,
            label=share.replace("_", " "),
            color=COLOURS[i],
        )
    for x, e in zip(positions, audited, strict=True):
        axis.plot([x - 0.45, x + 0.45], [e.audit.output] * 2, color="black", lw=1.2)  # type: ignore[union-attr]
    axis.plot([], [], color="black", lw=1.2, label="explained output")
    axis.axhline(0, color="black", lw=0.6)
    axis.set_xticks(positions, [e.method for e in audited])
    axis.set_ylabel("share of the explained output (its own unit)")
    _legend_below(axis)


def _explained(result: SlideResult) -> str:
    """What the curves of a certificate show."""
    kind, target = result.rows[0]["explained"], result.headline.morf.target
    return f"probability of class {target}" if kind == "probability" else EXPLAINED[kind]


def _legend_below(axis: Axes, title: str | None = None) -> None:
    small: dict[str, Any] = {"ncols": 3, "fontsize": 8, "title": title, "title_fontsize": 8, "frameon": False}
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), **small)


def _label_curves(axis: Axes, ylabel: str) -> None:
    axis.set(xlabel="instances dropped, most relevant first (%)", ylabel=ylabel, xlim=(0, 100))
    _limit(axis, [value for line in axis.get_lines() for value in np.asarray(line.get_ydata())])
    axis.grid(alpha=0.3)


def _limit(axis: Axes, values: list[float]) -> None:
    """Probabilities are drawn on the whole of their range."""
    if values and min(values) >= 0 and max(values) <= 1:
        axis.set_ylim(-0.03, 1.03)


def _percent(points: int) -> Any:
    return np.linspace(0, 100, points)


def _save(figure: Figure, path: Path) -> None:
    about = {"Title": figure.get_suptitle()}  # for readers who cannot see the picture
    write_atomically(
        path, lambda part: letter_figure(figure).savefig(part, format="png", dpi=120, metadata=about)
    )
