"""An explanation inside a notebook: a picture of its scores, and HTML with the map and the account."""

from __future__ import annotations

import io
from base64 import b64encode
from html import escape
from typing import Any

import numpy as np

from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.heatmaps.panel import BLUE, RED, Picture
from xmil.heatmaps.picture import heatmap
from xmil.heatmaps.words import number, subtitle, title

RANKED_SIZE = (5.0, 3.0)  # inches
SMALL = 640  # pixels of the longer edge in a notebook's cell


def plot(explanation: Explanation, slide: Any = None, **look: Any) -> Any:
    """The heatmap where the patches have places; else the scores by rank, as a matplotlib figure."""
    if slide is not None or _has_places(explanation):
        return heatmap(explanation, slide, **look)
    if look:
        raise InputError(
            f"Explanation {explanation.column} has no coordinates, so {', '.join(look)} cannot be used; "
            "call plot() without them to see the scores by rank."
        )
    return _ranked(explanation)


def html(explanation: Explanation) -> str:
    """The explanation as HTML: its words, its picture, its account, its warnings."""
    picture = plot(explanation, **({"size": SMALL} if _has_places(explanation) else {}))
    head = f"<b>{escape(title(explanation))}</b> {escape(subtitle(explanation))}"
    where = f" of {escape(explanation.bag)}" if explanation.bag else ""
    told = "".join(f"<p>&#9888; {escape(line)}</p>" for line in explanation.warnings)
    return (
        f"<div><p>{head}{where}: {len(explanation)} patches, output {number(explanation.output)}</p>{told}"
        f"{_embedded(picture, explanation)}{_account(explanation)}</div>"
    )


def _has_places(e: Explanation) -> bool:
    return e.coords is not None and e.patch_size is not None


def _ranked(e: Explanation) -> Picture:
    figure = Picture(figsize=RANKED_SIZE, layout="constrained")
    axis = figure.subplots()
    order = np.sort(e.scores)[::-1]
    rank = np.arange(1, len(order) + 1)
    axis.fill_between(rank, order, where=(order > 0).tolist(), color=RED, step="mid", linewidth=0)
    axis.fill_between(rank, order, where=(order < 0).tolist(), color=BLUE, step="mid", linewidth=0)
    axis.plot(rank, order, color="black", linewidth=0.6, drawstyle="steps-mid")
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set(xlabel="patches, highest score first", ylabel="score")
    axis.set_title(f"{title(e)} {subtitle(e)}", fontsize=9)
    return figure


def _embedded(picture: Any, e: Explanation) -> str:
    held = io.BytesIO()
    picture.savefig(held, format="png", dpi=100)
    data = b64encode(held.getvalue()).decode()
    return f'<img alt="{escape(title(e), quote=True)}" src="data:image/png;base64,{data}">'


def _account(e: Explanation) -> str:
    if e.audit is None:
        return "<p>This method does not account for the output.</p>"
    shares = {key: value for key, value in e.audit.as_dict().items() if value or key in ("output", "other")}
    heads = "".join(f"<th>{escape(key.replace('_', ' '))}</th>" for key in shares)
    cells = "".join(f"<td>{number(value)}</td>" for value in shares.values())
    return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>"
