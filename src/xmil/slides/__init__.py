"""Whole-slide images: open, tile, find tissue; never imports torch."""

from __future__ import annotations

from xmil.slides.open import find_slides, open_slide
from xmil.slides.slide import Slide

__all__ = ["Slide", "find_slides", "open_slide"]
