"""Cases: slides that make one bag."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import xmil
from xmil.core.errors import InputError, UnknownNameError
from xmil.data import Cohort, group_cases, join_bags, read_case

TABLE = {
    "slide_id": ("a", "b", "c"),
    "case_id": ("1", "2", "1"),
    "path": ("a.npy", "b.npy", "c.npy"),
}


def test_slides_of_a_case_need_not_stand_together() -> None:
    cases = group_cases(Cohort(TABLE), by="case", labels=[None, 0, 1])
    assert [(case.name, case.slides, case.label, case.rows) for case in cases] == [
        ("1", ("a", "c"), 1, (0, 2)),
        ("2", ("b",), 0, (1,)),
    ]
    slides = group_cases(Cohort(TABLE))
    assert [(case.name, case.case_id) for case in slides] == [("a", "1"), ("b", "2"), ("c", "1")]


def test_a_case_has_one_label() -> None:
    with pytest.raises(InputError, match=r"case '1' have several labels \(\[0, 1\]\)"):
        group_cases(Cohort(TABLE), by="case", labels=[0, 0, 1])
    assert len(group_cases(Cohort(TABLE), by="slide", labels=[0, 0, 1])) == 3
    with pytest.raises(UnknownNameError, match="Unknown grouping 'cases'"):
        group_cases(Cohort(TABLE), by="cases")


def test_a_case_is_read_as_one_bag(tmp_path: Path, rng: np.random.Generator) -> None:
    parts = {name: rng.normal(size=(n, 4)).astype(np.float32) for name, n in (("a", 3), ("b", 2), ("c", 5))}
    for i, (name, features) in enumerate(parts.items()):
        coords = np.full((len(features), 2), i * 100)
        xmil.write_bag(
            xmil.Bag(features, coords=coords, patch_size=256, encoder="uni"), tmp_path / f"{name}.h5"
        )
    table = {**TABLE, "path": tuple(str(tmp_path / f"{name}.h5") for name in parts)}
    bag, rows = read_case(group_cases(Cohort(table), by="case")[0])
    assert (bag.slide_id, len(bag), bag.patch_size, bag.encoder) == ("1", 8, 256, "uni")
    for name, part in zip(("a", "c"), rows, strict=True):
        np.testing.assert_array_equal(bag.features[part], parts[name])
    assert bag.coords is not None
    assert bag.coords[rows[1]].tolist() == [[200, 200]] * 5


def test_what_the_slides_do_not_agree_on_is_left_open_or_refused() -> None:
    near = xmil.Bag(np.zeros((2, 4)), coords=[[0, 0], [1, 1]], patch_size=256, mpp=0.5, slide_id="near")
    far = xmil.Bag(np.zeros((1, 4)), coords=[[0, 0]], patch_size=512, mpp=0.5, slide_id="far")
    bare = xmil.Bag(np.zeros((1, 4)), slide_id="bare")
    joined, _ = join_bags([near, far], name="case")
    assert (joined.patch_size, joined.mpp) == (None, 0.5)
    assert join_bags([near, bare], name="case")[0].coords is None
    with pytest.raises(InputError, match=r"wide.*width 5.*near.*width 4"):
        join_bags([near, xmil.Bag(np.zeros((1, 5)), slide_id="wide")], name="case")


def test_a_cohort_completes_the_files_of_its_slides(tmp_path: Path) -> None:
    """Columns mpp, patch_size and format count slide by slide; empty cells leave the shared options."""
    corners = np.stack(np.divmod(np.arange(6), 3), axis=1) * 700
    for name in ("a", "b", "c"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["features"] = np.zeros((6, 4), np.float32)
            file["coords"] = corners
    table = {
        **TABLE,
        "path": tuple(str(tmp_path / f"{name}.h5") for name in "abc"),
        "mpp": ("0.25", None, None),
        "patch_size": ("512", None, "256"),
        "format": ("clam", None, ""),
    }
    cases = group_cases(Cohort(table))
    bags = [read_case(case, patch_size=300)[0] for case in cases]
    assert [(bag.patch_size, bag.mpp) for bag in bags] == [(512, 0.25), (300, None), (256, None)]
    assert cases[0].reading(0, {"mpp": 1.0}) == {"mpp": 0.25, "patch_size": 512, "format": "clam"}


@pytest.mark.parametrize(("name", "cell"), [("mpp", "-1"), ("patch_size", "0"), ("patch_size", "inf")])
def test_a_cohort_completes_files_by_positive_numbers(name: str, cell: str) -> None:
    with pytest.raises(InputError, match=name):
        group_cases(Cohort({**TABLE, name: (cell, None, None)}))
