"""How pictures look: a colour for each method, and fonts for names in any script.

Matplotlib's own font lacks Chinese, Japanese and Korean signs and most emoji, and draws boxes in their place:
a font of the system draws them, else they are spelt in letters that every font has.
"""

from __future__ import annotations

import unicodedata
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.durable import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN = "DejaVu Sans"  # which matplotlib brings
PREFERRED = (  # for their many letters
    "Noto Sans CJK", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans", "WenQuanYi",
    "PingFang", "Hiragino", "Apple SD Gothic", "Microsoft YaHei", "SimHei", "MS Gothic", "Yu Gothic",
    "Malgun", "NanumGothic", "Droid Sans Fallback", "Arial Unicode", "Unifont", "Noto Emoji", "Symbola",
    "Segoe UI Symbol", "Noto Sans",
)  # fmt: skip
# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = {
    "random": "#999999",
    "attention": "#E69F00",
    "single": "#56B4E9",
    "one_removed": "#56B4E9",
    "combined": "#56B4E9",
    "shapley": "#000000",
    "logits": "#F0E442",
    "gxi": "#CC79A7",
    "grad2": "#CC79A7",
    "ig": "#009E73",
    "lrp": "#D55E00",
}
_SPELT = ("HIRAGANA LETTER ", "KATAKANA LETTER ", "HANGUL SYLLABLE ")


def method_colour(method: str) -> str:
    """Look up the colour of a method in plots."""
    return COLOURS.get(method, "#0072B2")


def drawable(text: str, *, own_only: bool = False) -> str:
    """Spell the letters of a text that no font here has; `own_only`: that matplotlib's own font lacks.

    >>> drawable("Fall 7, µm")
    'Fall 7, µm'
    >>> spelt("\\N{MICROSCOPE}"), spelt("\\u75c5"), spelt("\\uac04")
    ('(microscope)', '[75C5]', 'gan')
    """
    return "".join(
        letter if letter.isascii() or _family(letter, own_only=own_only) else spelt(letter) for letter in text
    )


def spelt(letter: str) -> str:
    """Spell a letter in ASCII: its sound where its name tells it, an emoji's name, else its number."""
    name = unicodedata.name(letter, "")
    for script in _SPELT:
        if name.startswith(script):
            return name.removeprefix(script).removeprefix("SMALL ").lower()
    if unicodedata.category(letter) in ("Mn", "Cf", "Cc"):  # accents without a letter, joiners
        return ""
    plain = unicodedata.normalize("NFKD", letter)
    if plain != letter and plain.isascii():
        return plain
    if unicodedata.category(letter) == "So" and name:
        return f"({name.lower()})"
    return f"[{ord(letter):04X}]"


def spelt_out(text: str) -> str | None:
    """Write a sentence on the letters of a text that no font here has."""
    missing = "".join(dict.fromkeys(c for c in text if not c.isascii() and _family(c) is None))
    if not missing:
        return None
    return (
        f"No font here has {missing[:20]}; pictures spell them ({drawable(missing[:3])}). A font such as "
        "Noto Sans CJK or Noto Emoji draws them."
    )


def families(text: str) -> list[str]:
    """List matplotlib's own font, and behind it those that the text needs."""
    needed = (_family(letter) for letter in text if not letter.isascii())
    return list(dict.fromkeys([OWN, *(family for family in needed if family)]))


def letter_figure(figure: Figure) -> Figure:
    """Draw every text of a figure by fonts that have its letters."""
    from matplotlib.text import Text

    for each in figure.findobj(Text):
        text: Any = each
        if not text.get_text().isascii():
            text.set_text(drawable(text.get_text()))
            text.set_fontfamily(families(text.get_text()))
    return figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all, with its title for readers who cannot see it."""
    about = {"Title": figure.get_suptitle()} if figure.get_suptitle() else None
    letter_figure(figure)
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120, metadata=about))


@cache
def _family(letter: str, *, own_only: bool = False) -> str | None:
    """Find the first font with a letter: matplotlib's own, the preferred ones, then any."""
    for family, path in _fonts():
        if own_only and family != OWN:
            return None
        if ord(letter) in _letters(path):
            return family
    return None


@cache
def _fonts() -> tuple[tuple[str, str], ...]:
    from matplotlib.font_manager import findfont, fontManager

    def rank(family: str) -> tuple[int, str]:
        first = (i for i, name in enumerate(PREFERRED) if family.startswith(name))
        return next(first, len(PREFERRED)), family

    entries = {
        entry.name: entry.fname
        for entry in reversed(fontManager.ttflist)
        if entry.style == "normal" and "lastresort" not in entry.name.lower().replace(" ", "")
    }  # fonts of last resort have a box for every letter
    ranked = sorted(entries, key=rank)
    return ((OWN, findfont(OWN)), *((name, entries[name]) for name in ranked if name != OWN))


@cache
def _letters(path: str) -> frozenset[int]:
    """List the letters of a font that can be drawn as outlines; none of an unreadable one."""
    from matplotlib.ft2font import FT2Font

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            font = FT2Font(path)
            scalable = font.scalable if hasattr(font, "scalable") else True
            return frozenset(font.get_charmap()) if scalable else frozenset()
        except (OSError, RuntimeError, ValueError):
            return frozenset()
