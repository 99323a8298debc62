"""Bags and explanations go to disk and come back equal; peers' readers take our files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import xmil
from tests.data import producers as p

FIXTURES = Path(__file__).parent.parent / "fixtures"


def same(a: xmil.Bag, b: xmil.Bag) -> None:
    """Equal in all that a bag is; where it lies on disk aside."""
    np.testing.assert_array_equal(a.features, b.features)
    for name in ("coords", "raw_coords"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in ("patch_size", "mpp", "slide_id", "encoder", "inferred", "unit", "raw_edge"):
        assert getattr(a, name) == getattr(b, name), name
    assert set(a.columns) == set(b.columns)
    for name, values in a.columns.items():
        np.testing.assert_array_equal(values, b.columns[name])


numbers = st.floats(-1e6, 1e6, width=32)


@st.composite
def bags(draw: Any) -> xmil.Bag:
    n, d = draw(st.integers(0, 5)), draw(st.integers(1, 4))
    located = draw(st.booleans())
    raw = not located and draw(st.booleans())
    return xmil.Bag(
        draw(hnp.arrays(np.float32, (n, d), elements=numbers)),
        coords=draw(hnp.arrays(np.int64, (n, 2), elements=st.integers(-(2**30), 2**30))) if located else None,
        patch_size=draw(st.none() | st.integers(1, 4096)) if located else None,
        mpp=draw(st.none() | st.floats(0.05, 10)),
        slide_id=draw(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
        ),
        encoder=draw(st.none() | st.sampled_from(["uni_v1", "ä-encoder"])),
        inferred=draw(
            st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), max_size=2)
        ),
        raw_coords=draw(hnp.arrays(np.float64, (n, 2), elements=st.floats(-1e6, 1e6))) if raw else None,
        unit="unknown" if raw else None,
        columns={"annotation:1": draw(hnp.arrays(np.float32, (n,), elements=numbers))}
        if draw(st.booleans())
        else {},
    )


@settings(max_examples=150, deadline=None)
@given(bag=bags())
def test_bag_round_trip(bag: xmil.Bag, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bag") / "s.h5"
    xmil.write_bag(bag, path)
    same(bag, xmil.read_bag(path))


@pytest.mark.parametrize("write", [p.trident, p.stamp2, p.slideflow, p.marugoto, p.paper, p.clam_features])
@pytest.mark.parametrize("options", [{}, {"mpp": p.MPP}])
def test_converting_a_producers_file_keeps_everything(
    tmp_path: Path, write: Any, options: dict[str, Any]
) -> None:
    bag = xmil.read_bag(write(tmp_path), **options)
    xmil.write_bag(bag, tmp_path / "out.h5")
    same(bag, xmil.read_bag(tmp_path / "out.h5"))


def test_peers_read_our_files(tmp_path: Path) -> None:
    """What TRIDENT, CLAM-style and MIL_BASELINE readers look up in a file."""
    bag = xmil.Bag(p.features(), p.XY, patch_size=p.EDGE, mpp=p.MPP, slide_id="s1", encoder="uni_v1")
    xmil.write_bag(bag, tmp_path / "s1.h5")
    with h5py.File(tmp_path / "s1.h5") as file:
        assert set(file) == {"features", "coords"}
        assert file["features"].dtype == np.float32
        assert file["coords"].dtype == np.int64
        np.testing.assert_array_equal(file["features"][:], p.features())
        attrs = dict(file["coords"].attrs)
        assert {"patch_size", "patch_size_level0", "level0_magnification", "target_magnification"} <= set(
            attrs
        )
        assert {"overlap", "name", "savetodir", "level0_width", "level0_height"} <= set(attrs)
        assert (attrs["patch_size_level0"], attrs["level0_width"], attrs["mpp"]) == (p.EDGE, "None", p.MPP)
        assert file["features"].attrs["encoder"] == "uni_v1"


def test_writing_replaces_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "s.h5"
    xmil.write_bag(xmil.Bag(p.features()), path)
    before = path.read_bytes()
    broken = xmil.Bag(p.features(), columns={"c": np.array([object()] * p.N)})
    with pytest.raises(TypeError):
        xmil.write_bag(broken, path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.h5"]


@pytest.mark.parametrize("chunks", [(1, 4), (256, 4), (7, 3), None])
@pytest.mark.parametrize("compression", ["gzip", None])
@pytest.mark.parametrize("dtype", ["f4", "f2", ">f4"])
def test_rows_touch_only_what_they_need(
    tmp_path: Path, chunks: Any, compression: str | None, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from xmil.data.containers import hdf5

    n = 2_000
    values = (np.arange(n * 4).reshape(n, 4) % 1999).astype(dtype)
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file.create_dataset(
            "features", data=values, chunks=chunks, compression=compression if chunks else None
        )
        file["coords"] = np.arange(n * 2).reshape(n, 2)
    read: list[int] = []
    spans = hdf5._spans

    def counted(*args: Any, **options: Any) -> Any:
        for start, stop, members in spans(*args, **options):
            read.append(stop - start)
            yield start, stop, members

    monkeypatch.setattr(h5py.Dataset, "read_direct", lambda *_: pytest.fail("all rows were read"))
    monkeypatch.setattr(hdf5, "_spans", counted)
    rows = np.random.default_rng(0).choice(n, 20, replace=False)
    bag = xmil.read_bag(tmp_path / "s.h5", rows=rows, patch_size=1)
    np.testing.assert_array_equal(bag.features, values[rows].astype(np.float32))
    if chunks != (256, 4):  # there, every chunk holds a wanted row
        assert sum(read) <= 200


def test_headers_leave_features_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xmil.data.containers import hdf5

    path = p.trident(tmp_path)
    monkeypatch.setattr(hdf5.H5Contents, "_read_rows", lambda *_, **__: pytest.fail("features were read"))
    header = xmil.open_bag(path)
    assert (len(header), header.dim, header.nbytes) == (p.N, p.D, p.N * p.D * 4)


def test_rows_with_a_leading_axis(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.trident(tmp_path, lead=True), rows=[4, 1])
    np.testing.assert_array_equal(bag.features, p.features()[[4, 1]])


@pytest.mark.parametrize("rows", [[0, 5, 2, 2], [-1], [], [True, False, True, False, False, False]])
@pytest.mark.parametrize("write", [p.trident, p.marugoto, p.plain, p.clam_features, p.slideflow])
def test_row_subsets_equal_the_whole(tmp_path: Path, write: Any, rows: list[Any]) -> None:
    path = write(tmp_path)
    whole, part = xmil.read_bag(path), xmil.read_bag(path, rows=np.array(rows, dtype=None if rows else int))
    index = np.array(rows, dtype=None if rows else int)
    np.testing.assert_array_equal(part.features, whole.features[index])
    if whole.coords is not None:
        np.testing.assert_array_equal(part.coords, whole.coords[index])


@pytest.mark.parametrize("rows", [[6], [-7], [0.5], [[0]]])
def test_bad_rows_are_refused(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(xmil.XmilError):
        xmil.read_bag(p.trident(tmp_path), rows=rows)


def explanation(**more: Any) -> xmil.Explanation:
    given = {
        "scores": np.array([1.5, -2, 0, 4, 5, 6], np.float32),
        "logits": np.array([0.5, 1.5], np.float32),
        "output": 1.5,
        "method": "lrp",
        "target": xmil.Target(1, name="HPV+"),
        "signed": True,
        "audit": xmil.Audit(output=1.5, instances=1.0, bias=0.5),
        "bag": "s1",
        "coords": p.XY,
        "patch_size": p.EDGE,
        "mpp": p.MPP,
        "params": {"preset": "default"},
    }
    return xmil.Explanation(**{**given, **more})


def same_explanation(a: xmil.Explanation, b: xmil.Explanation) -> None:
    for name in ("scores", "logits", "coords", "relevance"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    for name in ("output", "method", "target", "signed", "audit", "bag", "patch_size", "mpp", "model"):
        assert getattr(a, name) == getattr(b, name), name
    assert dict(a.params) == dict(b.params)


@pytest.mark.parametrize(
    "more", [{}, {"coords": None, "patch_size": None}, {"relevance": np.ones((6, 3), np.float32)}]
)
def test_explanation_round_trip(tmp_path: Path, more: dict[str, Any]) -> None:
    e = explanation(**more)
    e.save(tmp_path / "e.parquet")
    same_explanation(e, xmil.Explanation.load(tmp_path / "e.parquet"))


def test_explanations_wait_for_the_mpp(tmp_path: Path) -> None:
    """STAMP's microns go through explain and storage, and become boxes once the slide's mpp is known."""
    model = xmil.create_model("attnmil", in_dim=p.D, n_classes=2, seed=0)
    xmil.explain(model, xmil.read_bag(p.stamp2(tmp_path)), method="lrp", target=1).save(
        tmp_path / "e.parquet"
    )
    e = xmil.Explanation.load(tmp_path / "e.parquet")
    with pytest.raises(xmil.XmilError, match="coordinates are in microns; pass the slide's `mpp=`"):
        e.boxes()
    np.testing.assert_array_equal(e.placed(mpp=p.MPP).boxes(), p.BOXES)


def test_layout_1_keeps_loading() -> None:
    """A file written by the first version; it must load for good."""
    loaded = xmil.Explanation.load(FIXTURES / "explanation_layout1.parquet")
    same_explanation(explanation(), loaded)
    assert loaded.slide_size is None


def test_the_size_of_the_slide_goes_along(tmp_path: Path) -> None:
    """From the attributes of a feature file to the explanation's file and back."""
    features = np.random.default_rng(0).normal(size=(3, 8))
    size = {"level0_width": np.int64(2200), "level0_height": 1500}
    bag = xmil.Bag(features, coords=[[0, 0], [64, 0], [0, 64]], patch_size=64, slide_id="s", extra=size)
    xmil.write_bag(bag, tmp_path / "s.h5")
    model = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    for known in (bag, xmil.read_bag(tmp_path / "s.h5")):
        e = xmil.explain(model, known, method="gxi")
        e.save(tmp_path / "e.parquet")
        assert xmil.Explanation.load(tmp_path / "e.parquet").slide_size == (2200, 1500)
    for stored in ({}, {**size, "level0_width": "None"}, {**size, "level0_height": -1}):
        assert replace(bag, extra=stored).slide_size is None


def test_later_layouts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xmil.storage.explanations.LAYOUT", 99)
    explanation().save(tmp_path / "e.parquet")
    monkeypatch.undo()
    with pytest.raises(xmil.XmilError, match="written by a later xmil"):
        xmil.Explanation.load(tmp_path / "e.parquet")


def test_without_coordinates_explaining_works_and_drawing_refuses(tmp_path: Path) -> None:
    model = xmil.create_model("attnmil", in_dim=p.D, n_classes=2, seed=0)
    bag = xmil.read_bag(p.plain(tmp_path))
    e = xmil.explain(model, bag, method="lrp", target=1)
    assert len(e.scores) == p.N
    assert 0 <= xmil.auprc2(np.array([1, 1, -1, -1, 0, 0]), e.scores) <= 1
    with pytest.raises(
        xmil.XmilError, match=r"The explanation of 's1' cannot be drawn: it has no coordinates"
    ):
        e.boxes()
    e.save(tmp_path / "e.parquet")
    assert xmil.Explanation.load(tmp_path / "e.parquet").coords is None
