"""Self-contained HTML pages: one skeleton and style, light or dark like the reader's screen, and their parts.

Text is escaped unless it is `Html`, which these functions return, so nested parts are not escaped twice. For
tables as plain text see `xmil.core.text.text_table`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from xmil.heatmaps.style import BLUE, LIGHT_BLUE, LIGHT_RED, RED

# Red supports the class and blue speaks against it, as in every heatmap.
COLOURS = f"""
:root {{ color-scheme: light dark; --soft: #f3f4f6; --line: #d5d8dd; --dim: #5b6270; --mind: #8a5a00;
  --for: {RED}; --against: {BLUE}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --soft: #23262c; --line: #3c414a; --dim: #a3abb8;
  --mind: #e3b341; --for: {LIGHT_RED}; --against: {LIGHT_BLUE}; }}
  body {{ background: #16181c; color: #e8eaee; }} }}
"""
STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h3 { font-size: 1.05rem; margin: 0; }
h2 { margin-top: 2.6rem; border-top: 1px solid var(--line); padding-top: 1.1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { font-weight: 600; } th:first-child, td:first-child, .words td, .words th { text-align: left; }
.words td:first-child { white-space: nowrap; }
td small { display: block; color: var(--dim); max-width: 24rem; }
.marked td { font-weight: 700; color: var(--mind); }
.for { color: var(--for); } .against { color: var(--against); }
.small, figcaption { font-size: .88rem; color: var(--dim); }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; }
pre { overflow-x: auto; padding: .7rem; background: var(--soft); font-size: .82rem; }
nav a { margin-right: 1rem; color: inherit; }
@media print { body { max-width: none; } h2 { break-after: avoid; } }
"""

# Follows a page's own style, so that phones show it without scrolling sideways.
PHONE = """
@media (max-width: 40rem) { table { display: block; overflow-x: auto; } th, td { padding: .25rem .4rem; }
  th, td, td:not(:first-child), .figures td { white-space: normal; overflow-wrap: break-word; }
  .words th, .words td, .words td:first-child { white-space: normal; overflow-wrap: anywhere; }
  .words th, .words td { min-width: 2.4em; } }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Html:
    """Convert a value to HTML: escape it, unless it is HTML already.

    >>> html("a < b"), html(Html("<b>a</b>"))
    ('a &lt; b', '<b>a</b>')
    """
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object], between: str = "") -> Html:
    """Join parts; `between` is HTML."""
    return Html(between.join(map(html, parts)))


def tag(name: str, *parts: object, **attributes: str) -> Html:
    """Make an element around parts; `kind` is its class.

    >>> tag("p", "a & ", tag("b", "c"), kind="small")
    '<p class="small">a &amp; <b>c</b></p>'
    """
    pairs = [("class" if key == "kind" else key, value) for key, value in attributes.items() if value]
    text = "".join(f' {key}="{escape(value)}"' for key, value in pairs)
    return Html(f"<{name}{text}>{join(parts)}</{name}>")


def small(*parts: object) -> Html:
    """Make a paragraph in small print: notes on a table or figure, and the file of its numbers."""
    return tag("p", *parts, kind="small")


def bullets(items: Iterable[object]) -> Html:
    """Make a list; empty without items."""
    rows = join(tag("li", item) for item in items)
    return tag("ul", rows) if rows else rows


def table(
    rows: Sequence[Sequence[object]],
    *,
    head: Sequence[object] = (),
    kind: str = "",
    marked: Sequence[bool] = (),
) -> Html:
    """Make a table that scrolls if it is too wide; `kind="words"` aligns it left, marked rows are bold.

    >>> table([["a", 1]], head=["name", "n"]).count("<td>")
    2
    """
    lines = [tag("tr", *(tag("th", cell) for cell in head))] if head else []
    for i, row in enumerate(rows):
        style = "marked" if marked and marked[i] else ""
        lines.append(tag("tr", *(tag("td", cell) for cell in row), kind=style))
    return tag("div", tag("table", *lines, kind=kind), kind="wide")


def image(picture: bytes, words: str) -> Html:
    """Embed a PNG or JPEG in the page; `words` is its alternative text."""
    form = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    data = b64encode(picture).decode()
    return Html(f'<img alt="{escape(words)}" src="data:image/{form};base64,{data}">')


def figure(picture: Path, caption: str) -> Html:
    """Make a picture with its caption."""
    return tag("figure", image(picture.read_bytes(), caption), tag("figcaption", caption))


def page(title: str, *parts: object, style: str = "") -> str:
    """Write a self-contained page of parts, one below another; `style` adds to the common style."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{COLOURS}{STYLE}{style}{PHONE}</style>"
    )
    body = join(parts, "\n")
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'
