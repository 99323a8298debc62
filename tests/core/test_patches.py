"""Where instances lie: stored units, boxes, rows, and the things that hold patches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xmil
from xmil.core.bag import Patches
from xmil.core.errors import InputError
from xmil.core.task import Target
from xmil.data import Header

XY = np.array([[0, 0], [512, 0], [0, 512], [512, 512]])
FULL = Patches(XY, 512, 0.5, XY / 2.0, "um", 256.0, (4096, 2048))
NAMES = ("coords", "patch_size", "mpp", "raw_coords", "unit", "raw_edge", "slide_size")


def explanation(**given: object) -> xmil.Explanation:
    scores = np.arange(4, dtype=np.float32)
    return xmil.Explanation(scores, np.zeros(2, np.float32), 6.0, "lrp", Target(1), True, **given)


def holders() -> dict[str, object]:
    """Each thing that holds patches, made from them."""
    return {
        "bag": xmil.Bag(np.zeros((4, 2)), patches=FULL),
        "explanation": explanation(patches=FULL),
        "header": Header(None, "plain", None, patches=FULL),  # type: ignore[arg-type]
    }


@given(st.floats(0.1, 2.0), st.integers(1, 4000), st.integers(0, 4000))
def test_microns_become_pixels(mpp: float, x: int, y: int) -> None:
    waiting = Patches.stored([[x, y]], "um", edge=256)
    assert waiting.coords is None
    assert "mpp" in str(waiting.missing)
    found = waiting.placed(mpp)
    assert found.coords is not None
    assert found.coords.tolist() == [[round(x / mpp), round(y / mpp)]]
    assert found.patch_size == round(256 / mpp)
    assert found.raw_coords is waiting.raw_coords


def test_what_can_be_worked_out_is_noted() -> None:
    by_edge = Patches.stored([[100.0, 0.0]], "um", edge=128, patch_size=256)
    assert (by_edge.mpp, by_edge.coords.tolist()) == (0.5, [[200, 0]])  # type: ignore[union-attr]
    assert "mpp 0.5 from the tile of 128 µm" in by_edge.notes[0]
    bag = xmil.Bag(np.zeros((1, 2)), patches=Patches.stored([[10.0, 0.0]], "px-read", edge=64))
    assert "reading resolution 256/64" in bag.placed(patch_size=256).inferred[-1]


@pytest.mark.parametrize("unit", ["um", "px-centre", "px-read", "unknown"])
def test_units_that_wait_say_what_for(unit: str) -> None:
    with pytest.raises(InputError, match=r"The bag cannot be drawn: .*(mpp=|patch_size=|unknown)"):
        Patches.stored([[0, 0]], unit).boxes()


def test_rows() -> None:
    for rows in ([2, 0], slice(1, 3), np.array([True, False, False, True])):
        part = FULL.take(rows)
        np.testing.assert_array_equal(part.coords, XY[rows])
        np.testing.assert_array_equal(part.raw_coords, XY[rows] / 2)
        assert (part.patch_size, part.slide_size) == (512, (4096, 2048))


def test_slides_of_a_case_share_what_they_agree_on() -> None:
    other = replace(FULL, mpp=0.25)
    both = Patches.joined([FULL, other])
    assert (both.patch_size, both.mpp, both.unit) == (512, None, "um")
    np.testing.assert_array_equal(both.coords, np.concatenate([XY, XY]))
    assert Patches.joined([FULL, Patches()]).coords is None


@pytest.mark.parametrize("name", ["bag", "explanation", "header"])
def test_holders_have_the_attributes(name: str) -> None:
    held = holders()[name]
    for key in NAMES:
        np.testing.assert_array_equal(getattr(held, key), getattr(FULL, key), err_msg=key)


@pytest.mark.parametrize("name", ["bag", "explanation", "header"])
def test_attributes_can_be_replaced_by_name(name: str) -> None:
    """As if each were a field, though they are those of the patches."""
    held = holders()[name]
    moved = replace(held, coords=XY + 1, mpp=1.0)  # type: ignore[type-var]
    np.testing.assert_array_equal(moved.coords, XY + 1)
    assert (moved.mpp, moved.patch_size, moved.unit) == (1.0, 512, "um")
    assert replace(held, coords=None).coords is None  # type: ignore[type-var]
    assert replace(held, slide_size=(5, 6)).slide_size == (5, 6)  # type: ignore[type-var]
    assert replace(held, patches=Patches()).raw_coords is None  # type: ignore[type-var]


def test_the_same_by_name_and_by_patches() -> None:
    fields = {key: getattr(FULL, key) for key in NAMES}
    by_name, whole = explanation(**fields), explanation(patches=FULL)
    np.testing.assert_array_equal(by_name.boxes(), whole.boxes())
    assert (by_name.slide_size, by_name.raw_edge) == (whole.slide_size, whole.raw_edge)


def test_an_explanation_of_some_rows_keeps_everything_beside_its_scores() -> None:
    e = replace(explanation(patches=FULL), stderr=np.ones(4, np.float32), stable=np.ones(4, bool))
    part = e.take(slice(1, 3))
    assert (len(part), len(part.stderr), len(part.stable)) == (2, 2, 2)  # type: ignore[arg-type]
    np.testing.assert_array_equal(part.coords, XY[1:3])
    assert part.output == e.output
