"""The style of pictures: scores as colours, a colour for each method, and fonts for names in any script.

Signed scores are red and blue around zero, unsigned ones a sequence of colours. Matplotlib's own font lacks
Chinese, Japanese and Korean signs and most emoji, and draws boxes in their place: a font of the system draws
them, else they are spelt in letters that every font has.
"""

from __future__ import annotations

import unicodedata
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.durable import write_atomically
from xmil.core.errors import InputError, bad_parameter, check_names, unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Pixels = npt.NDArray[np.uint8]

SIGNED, UNSIGNED = "red-blue", "viridis"  # red supports the explained class, blue speaks against it
RED, BLUE = "#8E0F23", "#1B4F87"  # the same two for letters and lines, on white
LIGHT_RED, LIGHT_BLUE = "#F2858F", "#7FB2EA"  # and on dark pages
TRIMMED = (0.1, 0.9)  # of RdBu: its darkest ends turn brown and black over tissue
BEYOND = 0.1  # pictures and commands report a larger share of patches beyond the scale
FAR = 5.0  # times the scale's end: pictures report stronger scores, because weak ones look the same
STEPS = 257  # odd, so that zero has the middle colour to itself
CLIPS = ("whiskers", "percentile", "none")
OWN = "DejaVu Sans"  # part of matplotlib
PREFERRED = (  # fonts with many letters
    "Noto Sans CJK", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR", "Source Han Sans", "WenQuanYi",
    "PingFang", "Hiragino", "Apple SD Gothic", "Microsoft YaHei", "SimHei", "MS Gothic", "Yu Gothic",
    "Malgun", "NanumGothic", "Droid Sans Fallback", "Arial Unicode", "Unifont", "Noto Emoji", "Symbola",
    "Segoe UI Symbol", "Noto Sans",
)  # fmt: skip
# Okabe and Ito's colours, which colour-blind readers can distinguish.
COLOURS = {
    "random": "#999999",
    "attention": "#E69F00",
    "single": "#56B4E9",
    "one_removed": "#56B4E9",
    "one_added": "#56B4E9",
    "combined": "#56B4E9",
    "shapley": "#000000",
    "logits": "#F0E442",
    "gxi": "#CC79A7",
    "grad2": "#CC79A7",
    "ig": "#009E73",
    "lrp": "#D55E00",
}
_SPELT = ("HIRAGANA LETTER ", "KATAKANA LETTER ", "HANGUL SYLLABLE ")


FLAT = 0.1  # unsigned scores whose range is less than this share of the largest are drawn from zero on


@dataclass(frozen=True)
class Scale:
    """Scores from `low` to `high` and their colour map; `cut` says on which sides scores were cut off.

    >>> Scale.of([-1.0, 0.0, 3.0], signed=True, clip="none")
    Scale(low=-3.0, high=3.0, signed=True, colours='red-blue', cut=(False, False))
    """

    low: float
    high: float
    signed: bool
    colours: str
    cut: tuple[bool, bool] = (False, False)

    @classmethod
    def of(
        cls,
        scores: npt.ArrayLike,
        *,
        signed: bool,
        clip: str = "whiskers",
        percentile: float = 99.0,
        colours: str | None = None,
    ) -> Scale:
        """Make the scale of these scores; that of signed scores reaches equally far to both sides of zero.

        >>> Scale.of([0.02217, 0.0222, 0.02226], signed=False).low
        0.0
        """
        values = np.asarray(scores, dtype=np.float64)
        low, high = clip_limits(values, clip=clip, percentile=percentile)
        if signed:
            high = max(abs(low), abs(high))
            low = -high
        elif values.min() >= 0 and values.max() - low < FLAT * values.max():
            low = 0.0  # scores that hardly differ must look alike
        cut = (bool(values.min() < low), bool(values.max() > high))
        return cls(low, high, signed, colours or (SIGNED if signed else UNSIGNED), cut)

    def share_beyond(self, scores: npt.ArrayLike) -> float:
        """Count the share of scores beyond the scale's ends: they have the ends' full colour, and look alike.

        >>> Scale(-1.0, 1.0, True, SIGNED).share_beyond([-2.0, -1.0, 0.5, 3.0])
        0.5
        """
        values = np.asarray(scores, dtype=np.float64)
        return float(np.mean((values < self.low) | (values > self.high))) if values.size else 0.0

    def times_beyond(self, scores: npt.ArrayLike) -> float:
        """Measure how many times as far as the scale's end the strongest score lies.

        >>> Scale(-1.0, 1.0, True, SIGNED).times_beyond([-2.0, 0.5, 88.0])
        88.0
        """
        values, base = np.asarray(scores, dtype=np.float64), 0.0 if self.signed else self.low
        reach = self.high - base
        return float(np.abs(values - base).max(initial=0.0) / reach) if reach > 0 else 1.0

    def paint(self, values: npt.ArrayLike) -> Pixels:
        """Colour the values as RGBA (..., 4); NaN is transparent."""
        numbers = np.asarray(values)
        middle, half = (self.low + self.high) / 2, (STEPS - 1) / 2
        reach = max(middle - self.low, float(np.finfo(np.float32).tiny))
        step = (numbers - middle) * (half / reach) + half
        step = np.nan_to_num(np.clip(step, 0, STEPS - 1), copy=False, nan=STEPS)
        return np.asarray(_table(self.colours)[np.rint(step, out=step).astype(np.int16)])


@cache
def _table(name: str) -> Pixels:
    """Look up the map's colours (STEPS + 1, 4); the last is transparent."""
    from matplotlib import colormaps

    source, ends = ("RdBu_r", TRIMMED) if name == SIGNED else (name, (0.0, 1.0))
    if source not in colormaps:
        raise unknown_name("colour map", name, [SIGNED, *colormaps])
    table = np.zeros((STEPS + 1, 4), dtype=np.uint8)
    table[:STEPS] = colormaps[source].resampled(1025)(np.linspace(*ends, STEPS), bytes=True)
    return table


def clip_limits(
    scores: npt.ArrayLike, *, clip: str = "whiskers", percentile: float = 99.0
) -> tuple[float, float]:
    """Find the lowest and highest score with their own colour.

    Whiskers end at the last score within 1.5 interquartile ranges of the quartiles, as a box plot draws them.
    If more than half of the scores are equal, whiskers would cut off everything else: then nothing is cut.

    >>> clip_limits([0, 1, 2, 3, 4, 100])
    (0.0, 4.0)
    >>> clip_limits([0, 0, 0, 0, 0, 7])
    (0.0, 7.0)
    """
    values = np.asarray(scores, dtype=np.float64).ravel()
    if not len(values):
        raise InputError("There are no scores to draw.")
    if not np.isfinite(values).all():
        raise InputError("Scores must be finite numbers; explain the slide again.")
    check_names("clip", [clip], CLIPS)
    ends = float(values.min()), float(values.max())
    if clip == "percentile":
        if not 50 < percentile <= 100:
            raise bad_parameter("percentile", "clip_limits", "in the range (50, 100]", percentile)
        low, high = np.percentile(values, [100 - percentile, percentile])
        return float(low), float(high)
    if clip == "none":
        return ends
    from matplotlib.cbook import boxplot_stats

    stats = boxplot_stats(values)[0]
    return (float(stats["whislo"]), float(stats["whishi"])) if stats["whislo"] < stats["whishi"] else ends


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
    """List matplotlib's own font, then those that the text needs."""
    needed = (_family(letter) for letter in text if not letter.isascii())
    return list(dict.fromkeys([OWN, *(family for family in needed if family)]))


def new_figure(
    size: tuple[float, float], rows: int = 1, columns: int = 1, *, dpi: float | None = None, **options: Any
) -> tuple[Figure, Any]:
    """Make a figure with a size in inches, and its axes; `options` are those of matplotlib's `subplots`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def letter_figure(figure: Figure) -> Figure:
    """Draw every text of a figure in fonts that have its letters."""
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
