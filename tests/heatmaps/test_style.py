"""Names in any script: drawn where a font of the system has the letters, spelt where none has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from xmil.heatmaps import drawable, families, letter_figure, spelt_out, style

SIGN = "\U0002f9f4"  # a rare ideograph that no font of a system has


@pytest.fixture
def font(tmp_path: Path) -> Iterator[str]:
    """A font with one filled square for the sign."""
    fonts = pytest.importorskip("fontTools.fontBuilder")
    pens = pytest.importorskip("fontTools.pens.ttGlyphPen")
    pen = pens.TTGlyphPen(None)
    for i, point in enumerate(((100, 0), (100, 800), (900, 800), (900, 0))):
        (pen.lineTo if i else pen.moveTo)(point)
    pen.closePath()
    builder = fonts.FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "sign"])
    builder.setupCharacterMap({ord(SIGN): "sign"})
    builder.setupGlyf({".notdef": pens.TTGlyphPen(None).glyph(), "sign": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "sign": (1000, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Noto Sans CJK Test", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "test.ttf")
    before = list(fontManager.ttflist)
    fontManager.addfont(tmp_path / "test.ttf")
    _forget()
    yield "Noto Sans CJK Test"
    fontManager.ttflist[:] = before
    _forget()


def _forget() -> None:
    for known in (style._fonts, style._family, style._letters):
        known.cache_clear()


def picture(text: str) -> np.ndarray:
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.text(0.1, 0.3, text, fontsize=24)
    canvas = FigureCanvasAgg(letter_figure(figure))
    canvas.draw()  # a missing glyph would warn, and fail
    return np.asarray(canvas.buffer_rgba())[..., :3]


def test_a_font_of_the_system_draws_what_our_own_lacks(font: str) -> None:
    assert drawable(f"a{SIGN}") == f"a{SIGN}"
    assert families(f"a{SIGN}") == ["DejaVu Sans", font]
    assert spelt_out(f"a{SIGN}") is None
    drawn = (picture(SIGN) < 128).all(axis=2)
    rows, columns = np.nonzero(drawn)
    assert drawn[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].mean() > 0.9  # the square


def test_without_a_font_letters_are_spelt_and_it_is_said() -> None:
    _forget()
    assert drawable(f"Fall {SIGN}é") == "Fall [2F9F4]é"
    said = spelt_out(f"x{SIGN}{SIGN}")
    assert said is not None
    assert said.startswith(f"No font here has {SIGN}; pictures spell them ([2F9F4])")
    assert np.array_equal(picture(SIGN), picture("[2F9F4]"))
