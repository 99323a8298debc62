"""Macenko's normalisation: known stains are found again and brought to the reference."""

from __future__ import annotations

import numpy as np
import pytest

from xmil.core.errors import InputError
from xmil.slides.stain import LIGHT, REFERENCE, STRONG, Macenko

pytest.importorskip("scipy")


def painted(stains: np.ndarray, strong: np.ndarray, *, n: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of two stains in known amounts, many of them of one stain alone."""
    rng = np.random.default_rng(0)
    amounts = rng.uniform(0.25, 1.0, (2, n)) * strong[:, None]
    amounts[0, : n // 4] = 0
    amounts[1, n // 4 : n // 2] = 0
    light = LIGHT * np.exp(-(stains @ amounts)) - 1
    return np.clip(np.round(light), 0, 255).astype(np.uint8).T.reshape(-1, 200, 3), amounts


def unit(stains: np.ndarray) -> np.ndarray:
    return stains / np.linalg.norm(stains, axis=0)


def test_known_stains_are_found() -> None:
    stains = unit(np.array([[0.65, 0.07], [0.70, 0.99], [0.29, 0.11]]))
    pixels, _ = painted(stains, np.array([1.2, 0.8]))
    found = Macenko.fit(pixels)
    angles = np.degrees(np.arccos(np.clip((unit(found.stains) * stains).sum(axis=0), -1, 1)))
    assert angles.max() < 4


def test_slides_of_different_stains_come_out_alike() -> None:
    """The same tissue, stained by two laboratories, has the same colours afterwards."""
    pairs = [
        (unit(np.array([[0.65, 0.10], [0.70, 0.95], [0.29, 0.20]])), np.array([1.3, 0.7])),
        (unit(np.array([[0.55, 0.22], [0.75, 0.80], [0.40, 0.55]])), np.array([0.8, 1.1])),
    ]
    before, after = [], []
    for stains, strong in pairs:
        pixels, _ = painted(stains, strong)
        before.append(pixels.astype(float))
        after.append(Macenko.fit(pixels).normalise(pixels).astype(float))
    apart = np.abs(before[0] - before[1]).mean()
    assert np.abs(after[0] - after[1]).mean() < apart / 4


def test_the_formula_slowly() -> None:
    """Concentrations by least squares, scaled to the reference's, back to light: pixel by pixel."""
    pixels, _ = painted(unit(REFERENCE + 0.05), np.array([1.5, 0.9]), n=4000)
    fitted = Macenko.fit(pixels)
    got = fitted.normalise(pixels).reshape(-1, 3)
    for i in range(0, 4000, 371):
        density = -np.log((pixels.reshape(-1, 3)[i].astype(float) + 1) / LIGHT)
        amount, *_ = np.linalg.lstsq(fitted.stains, density, rcond=None)
        expected = LIGHT * np.exp(-(REFERENCE @ (amount * STRONG / fitted.strong)))
        assert np.abs(got[i] - np.clip(expected, 0, 255)).max() <= 1.01


def test_white_stays_white_and_glass_is_refused() -> None:
    pixels, _ = painted(unit(REFERENCE), STRONG)
    white = np.full((4, 4, 3), 240, dtype=np.uint8)
    assert Macenko.fit(pixels).normalise(white).min() > 225
    with pytest.raises(InputError, match="Too few stained pixels"):
        Macenko.fit(white)
