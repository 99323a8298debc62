"""Figures of the report: PNGs inside the page, transparent, in colours for light pages and dark ones."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from xmil.core.lettering import letter_figure
from xmil.findings.biomarkers import SurvivalCurve
from xmil.findings.strategies import Strategies

GREY = "#808080"  # can be read on white and on black
NAMED = 4  # strategies whose typical slides are named in the figure: more names lie on each other
COLOURS = ("#d9793a", "#3a8fd9", "#3aa66b", "#b06fd0", "#c9a227", "#d0587e", "#5fb3b3", "#8f8f8f")


def strategy_figure(s: Strategies, slides: Sequence[str]) -> str:
    """Slides in the plane of their profiles, coloured by strategy; a ring marks the typical slide of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axis = figure.subplots()
    for k in range(s.count):
        own, colour = s.labels == k, COLOURS[k % len(COLOURS)]
        x, y = s.embedding[own].T
        axis.scatter(x, y, color=colour, s=22, label=f"strategy {k} ({int(own.sum())} slides)")
        typical = int(s.representatives[k])
        place = (float(s.embedding[typical, 0]), float(s.embedding[typical, 1]))
        axis.scatter(place[0], place[1], s=90, facecolors="none", edgecolors=GREY, linewidths=1.5)
        if s.count <= NAMED:  # the table names them all
            axis.annotate(
                slides[typical], place, xytext=(6, 6), textcoords="offset points", color=GREY, fontsize=8
            )
    axis.set(xlabel="first direction of the profiles", ylabel="second direction")
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=GREY)
    return _picture(figure, "slides by their profile over concepts")


def survival_figure(curves: Mapping[str, Sequence[SurvivalCurve]]) -> str:
    """Kaplan-Meier curves with their bands, a panel for each biomarker; empty without any."""
    from matplotlib.figure import Figure

    if not curves:
        return ""
    figure = Figure(figsize=(4.6 * len(curves), 3.6), layout="constrained")
    for axis, (name, groups) in zip(
        figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True
    ):
        for colour, curve in zip(COLOURS, groups, strict=False):
            words = f"{curve.group} ({curve.n} slides)"
            axis.step(curve.times, curve.share, where="post", color=colour, label=words)
            axis.fill_between(
                curve.times, curve.low, curve.high, step="post", color=colour, alpha=0.2, linewidth=0
            )
        axis.set(ylim=(0, 1.02), xlabel="time", ylabel="share without the event")
        axis.set_title(name.replace("_", " "), color=GREY, fontsize=10)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 2}
        axis.legend(fontsize=8, frameon=False, labelcolor=GREY, **place)
    picture = _picture(figure, "Kaplan-Meier curves")
    return f"<h2>Survival</h2>{picture}<p class='small'>Kaplan-Meier with 95 % bands; survival.csv</p>"


def _picture(figure: Any, words: str) -> str:
    for axis in figure.axes:
        axis.patch.set_alpha(0)
        axis.tick_params(colors=GREY)
        axis.spines[:].set_color(GREY)
        for part in (axis.xaxis, axis.yaxis):
            part.label.set_color(GREY)
    held = io.BytesIO()
    letter_figure(figure)
    figure.savefig(held, format="png", dpi=110, transparent=True)  # on a light page and on a dark one
    data = b64encode(held.getvalue()).decode()
    return f"<figure><img alt='{escape(words)}' src='data:image/png;base64,{data}'></figure>"
