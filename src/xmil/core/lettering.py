"""Names in any script on pictures: by a font of the system, else spelt in letters that every font has.

Matplotlib's own font lacks Chinese, Japanese and Korean signs and most emoji, and draws boxes in their place.
"""

from __future__ import annotations

import unicodedata
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OWN = "DejaVu Sans"  # which matplotlib brings
KNOWN = (
    "Noto Sans CJK", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans", "WenQuanYi",
    "PingFang", "Hiragino", "Apple SD Gothic", "Microsoft YaHei", "SimHei", "MS Gothic", "Yu Gothic",
    "Malgun", "NanumGothic", "Droid Sans Fallback", "Arial Unicode", "Unifont", "Noto Emoji", "Symbola",
    "Segoe UI Symbol", "Noto Sans",
)  # fmt: skip
_SPELT = ("HIRAGANA LETTER ", "KATAKANA LETTER ", "HANGUL SYLLABLE ")


def drawable(text: str, *, own_only: bool = False) -> str:
    """The text with letters spelt that no font here has; `own_only`: that matplotlib's own font lacks.

    >>> drawable("Fall 7, µm")
    'Fall 7, µm'
    >>> spelt("\\N{MICROSCOPE}"), spelt("\\u75c5"), spelt("\\uac04")
    ('(microscope)', '[75C5]', 'gan')
    """
    return "".join(
        letter if letter.isascii() or _family(letter, own_only=own_only) else spelt(letter) for letter in text
    )


def spelt(letter: str) -> str:
    """A letter in ASCII: its sound where its name tells it, an emoji's name, else its number."""
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
    """A sentence on the letters of a text that no font here has."""
    missing = "".join(dict.fromkeys(c for c in text if not c.isascii() and _family(c) is None))
    if not missing:
        return None
    return (
        f"No font here has {missing[:20]}; pictures spell them ({drawable(missing[:3])}). A font such as "
        "Noto Sans CJK or Noto Emoji draws them."
    )


def families(text: str) -> list[str]:
    """Matplotlib's own font, and behind it those that the text needs."""
    found = (_family(letter) for letter in text if not letter.isascii())
    return list(dict.fromkeys([OWN, *(family for family in found if family)]))


def letter_figure(figure: Figure) -> Figure:
    """Every text of a figure by fonts that have its letters."""
    from matplotlib.text import Text

    for each in figure.findobj(Text):
        text: Any = each
        if not text.get_text().isascii():
            text.set_text(drawable(text.get_text()))
            text.set_fontfamily(families(text.get_text()))
    return figure


@cache
def _family(letter: str, *, own_only: bool = False) -> str | None:
    """The first font with a letter: matplotlib's own, those known for their many letters, then any."""
    for family, path in _fonts():
        if own_only and family != OWN:
            return None
        if ord(letter) in _letters(path):
            return family
    return None


@cache
def _fonts() -> tuple[tuple[str, str], ...]:
    from matplotlib.font_manager import findfont, fontManager

    usable = [entry for entry in fontManager.ttflist if entry.style == "normal" and _has_shapes(entry.name)]
    entries = {entry.name: entry.fname for entry in reversed(usable)}
    ranked = sorted(entries, key=lambda name: (_rank(name), name))
    return ((OWN, findfont(OWN)), *((name, entries[name]) for name in ranked if name != OWN))


def _has_shapes(family: str) -> bool:
    """Fonts of last resort have a box for every letter."""
    return "lastresort" not in family.lower().replace(" ", "")


def _rank(family: str) -> int:
    return next((i for i, known in enumerate(KNOWN) if family.startswith(known)), len(KNOWN))


@cache
def _letters(path: str) -> frozenset[int]:
    """The letters of a font that can be drawn as outlines; none of one that cannot be read."""
    from matplotlib.ft2font import FT2Font

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            font = FT2Font(path)
            scalable = font.scalable if hasattr(font, "scalable") else True
            return frozenset(font.get_charmap()) if scalable else frozenset()
        except (OSError, RuntimeError, ValueError):
            return frozenset()
