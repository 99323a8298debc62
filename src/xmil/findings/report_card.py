"""The explanation card: what was explained, how, and how far it can be trusted; for model hubs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from xmil.findings.report import Findings
from xmil.findings.report_page import limits, page
from xmil.findings.report_words import LIMITS, UNCHECKED, UNTESTED, short

CARD_STYLE = "td, th { text-align: left; vertical-align: top; } th { white-space: nowrap; }"


def card(found: Findings) -> dict[str, Any]:
    """The card's entries by name."""
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
        "shortcuts_not_asked": [f"{name}: {why}" for name, why in found.unasked.items()],
        "concept_removal": dict(found.removals),
        "stability": dict(found.stability),
        "notes": list(found.notes),
        "limits": list(LIMITS),
    }


def card_markdown(found: Findings) -> str:
    """The card for a model hub's README."""
    lines = [f"# Explanation card: {found.title}", ""]
    for key, value in _entries(found):
        name = key.replace("_", " ")
        if isinstance(value, list):
            lines += [f"**{name}**", "", *(f"- {item}" for item in value), ""]
        elif isinstance(value, Mapping):
            lines += [f"**{name}**", "", *(f"- {k}: {short(v)}" for k, v in value.items()), ""]
        else:
            lines += [f"**{name}**: {short(value)}", ""]
    return "\n".join([*lines, "**limits**", "", *(f"- {limit}" for limit in LIMITS), ""])


def card_html(found: Findings) -> str:
    """The card as a page."""
    rows = [
        f"<tr><th>{escape(key.replace('_', ' '))}</th><td>{_cell(value)}</td></tr>"
        for key, value in _entries(found)
    ]
    title = f"Explanation card: {found.title}"
    body = f"<h1>{escape(title)}</h1><div class='wide'><table>{''.join(rows)}</table></div>{limits()}"
    return page(title, body, style=CARD_STYLE)


def card_json(found: Findings) -> str:
    """The card as JSON."""
    return json.dumps(card(found), indent=2, default=str) + "\n"


def _entries(found: Findings) -> list[tuple[str, Any]]:
    """What a reader is shown: no empty entries; title and limits have places of their own."""
    every = card(found).items()
    return [
        (key, value) for key, value in every if key not in ("title", "limits") and value not in (None, [], {})
    ]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "<br>".join(f"{escape(str(k))}: {escape(short(v))}" for k, v in value.items())
    if isinstance(value, list):
        return "<br>".join(escape(str(item)) for item in value)
    return escape(short(value))
