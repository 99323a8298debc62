"""Names quoted for the languages that files are written in: Groovy, CSV, LaTeX, JSON within a page.

Names of slides, classes and methods come from others, and may hold any character. For HTML see
`xmil.heatmaps.pages`, where text is escaped unless it is HTML already.
"""

from __future__ import annotations

import json
import re
from typing import Any

_GROOVY = {"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_FORMULA = re.compile(r"'*[=+\-@\t\r].", re.DOTALL)  # what spreadsheets compute, quoted already or not
_INTERVAL = re.compile(r" \[[-+.,\deinfa ]*\]$")  # after an estimate
_LATEX = {
    **{letter: f"\\{letter}" for letter in "_%&#${}"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "\n": " ",
    "\r": " ",
}


def groovy_text(text: str) -> str:
    r"""Write a text as a literal of Groovy, without interpolation of dollar signs.

    >>> print(groovy_text("tumour's\rprintln(49)"))
    'tumour\'s\rprintln(49)'
    """
    return "'" + "".join(_GROOVY.get(letter) or _groovy_letter(letter) for letter in text) + "'"


def _groovy_letter(letter: str) -> str:
    if letter.isprintable():
        return letter
    units = letter.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def groovy_comment(text: str) -> str:
    r"""Write a text for a comment of one line; old versions of Groovy read escapes in comments, too.

    >>> print(groovy_comment("a\rprintln(49)"), groovy_comment(r"a\u000dprintln(49)"))
    a println(49) a\\u000dprintln(49)
    """
    return "".join(letter if letter.isprintable() else " " for letter in text).replace("\\", "\\\\")


def csv_cell(value: object) -> object:
    """Prepare a cell: spreadsheets compute a text that begins with = + - @, unless an apostrophe comes first.

    >>> csv_cell("=1+1"), csv_cell("-1.5"), csv_cell("-a"), csv_cell(-1.5), csv_cell("a=b")
    ("'=1+1", '-1.5', "'-a", -1.5, 'a=b')
    """
    if value is None or isinstance(value, int | float):
        return value
    text = str(value)
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else value


def plain_cell(text: str) -> str:
    """Read a cell as it was before `csv_cell`.

    >>> plain_cell("'=1+1"), plain_cell("-1.5"), plain_cell("'a'")
    ('=1+1', '-1.5', "'a'")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def _is_number(text: str) -> bool:
    """Whether a text is a number, which may have an interval."""
    try:
        float(_INTERVAL.sub("", text))
    except ValueError:
        return False
    return True


def latex_text(text: str) -> str:
    r"""Write a text for LaTeX.

    >>> print(latex_text(r"lrp_50% \input{x}"))
    lrp\_50\% \textbackslash{}input\{x\}
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)


def script_json(value: Any) -> str:
    """Write a value as JSON for the element `script` of a page, which tags and comments would end.

    >>> print(script_json({"name": "</script>"}))
    {"name":"\\u003c/script>"}
    """
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
