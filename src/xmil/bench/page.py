"""The results page: one HTML file that needs nothing else, for a browser or a frame in the documentation."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any

from xmil.core.method_cards import CARDS

FEW = 8  # columns whose plots are shown unasked
FILES = (
    ', <a href="results.json" download>results.json</a> with all settings, '
    '<a href="bags.parquet" download>bags.parquet</a> with every measure of every bag'
)


def page_of(summary: dict[str, Any], *, beside: bool = True) -> str:
    """The page of a run's summary; `beside`: whether it lies in the run's folder, and links its files."""
    template = files("xmil.bench").joinpath("page.html").read_text(encoding="utf-8")
    data = json.dumps(slim(summary), separators=(",", ":")).replace("</", "<\\/")
    colours = json.dumps({name: card.colour for name, card in CARDS.items()})
    parts = {
        "@ABOUT@": _about(summary),
        "@SUITES@": "".join(_suite(suite) for suite in summary["suites"]) + _across(summary),
        "@FILES@": FILES if beside else "",
        "@COLOURS@": colours,
        "@DATA@": data,
    }
    for mark, text in parts.items():
        template = template.replace(mark, text)
    return template


def slim(value: Any) -> Any:
    """The summary as the page needs it: five digits, without the settings that results.json has."""
    if isinstance(value, dict):
        return {key: slim(held) for key, held in value.items() if key != "settings"}
    if isinstance(value, list):
        return [slim(held) for held in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _about(summary: dict[str, Any]) -> str:
    settings = summary["settings"]
    places = summary.get("measured") or [summary]  # older runs tell where the report was written
    said = " ".join(_place(place) for place in places)
    columns = [column for suite in summary["suites"] for column in suite["columns"]]
    seeds = ", ".join(str(n) for n in sorted({n for column in columns for n in column["seeds"].values()}))
    seed = (
        f" {escape(settings.get('protocol_name', '')).capitalize()} protocol; seeds of the models: {seeds}."
    )
    rule = f" Only models with a bag AUROC of {summary['threshold']['auroc']} or more count."
    return f"<p>{said}{seed}{rule}</p>"


def _place(place: dict[str, Any]) -> str:
    """With what rows were measured, as a sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in place["versions"].items())
    commit = f", commit {place['commit'][:12]}" if place.get("commit") else ""
    device = f" on {place['device']}" if place.get("device") else ""
    return escape(f"{versions}{commit}{device}, Python {place['python']}, {place['system']}.")


def _suite(suite: dict[str, Any]) -> str:
    name = escape(suite["name"])
    means = "".join(
        f"<li><b>{escape(m['title'])}</b> ({'more' if m['better'] > 0 else 'less'} is better): "
        f"{escape(m['means'])}</li>"
        for m in suite["measures"]
    )
    return (
        f'<section id="{name}" data-suite="{name}"><h2>{escape(suite["title"])}</h2>'
        f"<details><summary>What is measured</summary><ul>{means}</ul></details>"
        '<div class="tools"></div><div class="table"></div>'
        f"<details{_open(len(suite['columns']) <= FEW)}><summary>Plots</summary>"
        '<div class="plot"></div></details>'
        f"<h3>Who leads</h3>{_verdicts(suite)}"
        f"{_list('Where lrp, the default, is behind', suite['weak_spots'], 'In no column of this suite.')}"
        f"<h3>The suite tested on itself</h3>{_controls(suite['controls'])}"
        '<h3>Do the measures agree?</h3><div class="agreement"></div>'
        '<h3>Cost</h3><div class="cost"></div></section>'
    )


def _verdicts(suite: dict[str, Any]) -> str:
    titles = {m["name"]: m["title"] for m in suite["measures"]}
    items = []
    for column in suite["columns"]:
        where = f"<b>{escape(column['problem'])}, {escape(column['model'])}</b>"
        if not column["verdicts"]:
            items.append(f"<details open><summary>{where}: {escape(column['status'])}</summary></details>")
            continue
        lead, *rest = column["verdicts"]
        more = "".join(f"<li>{titles[v['measure']]}: {escape(v['sentence'])}</li>" for v in rest)
        first = f"{where}, {titles[lead['measure']]}: {escape(lead['sentence'])}"
        items.append(f"<details><summary>{first}</summary><ul>{more}</ul></details>")
    return f'<div class="verdicts">{"".join(items)}</div>'


def _controls(checks: list[dict[str, Any]]) -> str:
    failed = [check for check in checks if not check["passed"]]
    state = f"{len(checks) - len(failed)} of {len(checks)} checks hold."
    rows = "".join(
        f'<li class="{"held" if check["passed"] else "failed"}">{"holds" if check["passed"] else "fails"}: '
        f"{escape(check['what'])} ({escape(check['detail'])})</li>"
        for check in [*failed, *(c for c in checks if c["passed"])]
    )
    return f"<details{_open(bool(failed))}><summary>{state}</summary><ul>{rows}</ul></details>"


def _open(wanted: bool) -> str:
    return " open" if wanted else ""


def _list(title: str, items: list[str], none: str) -> str:
    body = f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else f"<p>{none}</p>"
    return f"<h3>{title}</h3>{body}"


def _across(summary: dict[str, Any]) -> str:
    if not summary["across"]:
        return ""
    rows = "".join(
        f"<tr><td>{escape(a['problem'])}</td><td>{escape(a['model'])}</td>"
        f"<td>{escape(' / '.join(a['measures']))}</td>"
        f"<td>{'none' if a['tau'] is None else format(a['tau'], '.2f')}</td><td>{a['rows']}</td></tr>"
        for a in summary["across"]
    )
    head = "<tr><th>problem</th><th>model</th><th>measures</th><th>Kendall's tau</th><th>rows</th></tr>"
    return (
        "<section><h2>Do truth and faithfulness agree?</h2><p>Rankings of all rows but the oracle, "
        f"by the leading measure of each suite, on the same models.</p><table>{head}{rows}</table></section>"
    )
