"""Parts of the report's pages: their style, tables and pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from xmil.findings.report_words import LIMITS

STYLE = """
:root { color-scheme: light dark; --soft: #f3f4f6; --line: #d5d8dd; --dim: #5b6270; --good: #2f6fb5;
  --bad: #b3541e; }
@media (prefers-color-scheme: dark) { :root { --soft: #23262c; --line: #3c414a; --dim: #a3abb8;
  --good: #7fb2ea; --bad: #f0a06a; } body { background: #16181c; color: #e8eaee; } }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { margin-top: 2.6rem; border-top: 1px solid var(--line);
  padding-top: 1.1rem; } h3 { font-size: 1.05rem; margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; } th:first-child, td:first-child, .words td, .words th { text-align: left; }
td:first-child { white-space: nowrap; } .figures td { white-space: nowrap; }
.figures td:first-child, .words td { white-space: normal; }
td small { display: block; color: var(--dim); max-width: 24rem; }
.found td { font-weight: 700; color: var(--bad); }
.short, .notes { background: var(--soft); border-radius: .5rem; padding: .6rem 1.2rem; margin: 1rem 0; }
.short ul, .notes ul { padding-left: 1.1rem; margin: .3rem 0; }
.notes { border-left: .3rem solid var(--bad); }
.concepts { display: grid; grid-template-columns: repeat(auto-fill, minmax(29rem, 1fr)); gap: 1.4rem 2rem; }
.concepts p { margin: .2rem 0; } .for { color: var(--good); } .against { color: var(--bad); }
.bar { background: var(--soft); height: .45rem; border-radius: .3rem; margin: .3rem 0; }
.bar i { display: block; height: 100%; border-radius: .3rem; background: currentcolor; }
.patches { display: grid; grid-template-columns: repeat(6, 1fr); gap: 4px; margin: .5rem 0;
  max-width: 31rem; } .patches img { width: 100%; border-radius: 3px; }
.accused .patches { grid-template-columns: repeat(3, 4.5rem); }
.accused { display: flex; flex-wrap: wrap; gap: 0 1.5rem; } .accused figure { margin: .4rem 0; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; }
.small { font-size: .88rem; color: var(--dim); } nav a { margin-right: 1rem; color: var(--good); }
@media (max-width: 34rem) { .concepts { grid-template-columns: 1fr; } }
@media print { body { max-width: none; } h2 { break-after: avoid; } .concepts > div { break-inside: avoid; } }
"""


def page(title: str, body: str, *, style: str = "") -> str:
    """A whole HTML page of a body."""
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>"
    )
    return f"<!doctype html>\n<html lang='en'><head>{head}</head><body>\n{body}\n</body></html>\n"


def images(pictures: Sequence[bytes], words: str) -> str:
    """Pictures side by side; empty without any."""
    shown = "".join(
        f"<img alt='{escape(words)}' src='data:image/jpeg;base64,{b64encode(data).decode()}'>"
        for data in pictures
    )
    return f"<div class='patches'>{shown}</div>" if shown else ""


def explained(
    rows: Mapping[str, Mapping[str, str]], words: Mapping[str, str], *, words_only: bool = False
) -> str:
    """A table whose first column says in small letters what a row is."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    head = "<th></th>" + "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = []
    for name, row in rows.items():
        told = f"<small>{escape(words[name])}</small>" if words.get(name) else ""
        cells = "".join(f"<td>{escape(row.get(column, ''))}</td>" for column in columns)
        lines.append(f"<tr><td>{escape(name.replace('_', ' '))}{told}</td>{cells}</tr>")
    kind = "words" if words_only else "figures"
    return f"<div class='wide'><table class='{kind}'><tr>{head}</tr>{''.join(lines)}</table></div>"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, marked: Sequence[bool] = ()) -> str:
    """A plain table; marked rows stand out."""
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for i, row in enumerate(rows):
        kind = " class='found'" if marked and marked[i] else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f"<div class='wide'><table>{''.join(lines)}</table></div>"


def limits() -> str:
    """The limits that go with every finding."""
    return "<h2>Limits</h2><ul>" + "".join(f"<li>{escape(limit)}</li>" for limit in LIMITS) + "</ul>"
