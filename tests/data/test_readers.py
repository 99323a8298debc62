"""Every layout of the field, written as its producer writes it, read to known level-0 boxes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import xmil
from tests.data import producers as p
from xmil.core.errors import FileError, InputError


def check(bag: xmil.Bag, *, exact: bool = True) -> None:
    """The slide every producer describes."""
    assert bag.features.dtype == np.float32
    np.testing.assert_allclose(bag.features, p.features(), rtol=0, atol=0 if exact else 2e-3)
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert bag.slide_id == "s1"


def test_clam_features_take_the_edge_from_the_patches_beside(tmp_path: Path) -> None:
    p.clam_patches(tmp_path)
    bag = xmil.read_bag(p.clam_features(tmp_path))
    check(bag)
    assert bag.format == "clam"
    assert bag.inferred == ("patch edge 512 from patches/s1.h5",)


def test_clam_features_alone_take_the_smallest_gap(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.clam_features(tmp_path))
    check(bag)
    assert bag.inferred[0].startswith("patch edge 512 from the smallest coordinate gap")
    assert bag.mpp is None


def test_clam_ignores_patches_of_another_run(tmp_path: Path) -> None:
    p.clam_patches(tmp_path, xy=p.XY * 2, level=2)
    bag = xmil.read_bag(p.clam_features(tmp_path))
    assert bag.patch_size == 512
    assert "smallest coordinate gap" in bag.inferred[0]


def test_clam_contours_with_their_own_offsets(tmp_path: Path) -> None:
    second = p.XY + np.array([137, 512 * 9 + 41])
    bag = xmil.read_bag(p.clam_features(tmp_path, xy=np.concatenate([p.XY, second])))
    assert bag.patch_size == 512


def test_clam_single_instance_has_no_edge_and_says_so(tmp_path: Path) -> None:
    path = p.clam_features(tmp_path, xy=p.XY[:1])
    with pytest.raises(InputError, match=r"cannot be drawn: the patch edge is unknown; pass `patch_size=`"):
        xmil.read_bag(path).boxes()
    assert xmil.read_bag(path, patch_size=512).boxes().tolist() == p.BOXES[:1].tolist()


def test_clam_pt_joins_the_h5_by_row_order(tmp_path: Path) -> None:
    p.clam_patches(tmp_path)
    p.clam_features(tmp_path)
    bag = xmil.read_bag(p.clam_pt(tmp_path))
    check(bag)
    assert bag.inferred[0] == "coordinates of h5_files/s1.h5, joined by row order"


def test_clam_pt_of_another_run_is_refused(tmp_path: Path) -> None:
    p.clam_features(tmp_path)
    with pytest.raises(FileError, match=r"has 5 rows but .* has 6 coordinates"):
        xmil.read_bag(p.clam_pt(tmp_path, n=5))


def test_clam_patches_hold_boxes_only(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.clam_patches(tmp_path))
    assert bag.features.shape == (p.N, 0)
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert "256 px at level 1 times the downsample 2" in bag.inferred[0]


def test_clam_custom_downsample(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.clam_patches(tmp_path, custom_downsample=2))
    assert bag.patch_size == 1024


def test_clam_images_store_divided_corners(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.clam_images(tmp_path))
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert bag.format == "clam-images"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_trident(tmp_path: Path, dtype: type) -> None:
    bag = xmil.read_bag(p.trident(tmp_path, dtype=dtype))
    check(bag, exact=dtype is np.float32)
    assert (bag.format, bag.encoder, bag.mpp, bag.inferred) == ("trident", "uni_v1", None, ())
    assert "level0_height" not in bag.extra  # the text 'None'


def test_trident_without_encoder(tmp_path: Path) -> None:
    assert xmil.read_bag(p.trident(tmp_path, encoder=False)).encoder is None


@pytest.mark.parametrize("shape", [(0,), (0, 4)])
def test_empty_bag_of_a_numpy_archive(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "s.npz", features=np.zeros(shape))
    assert len(xmil.read_bag(tmp_path / "s.npz").features) == 0


@pytest.mark.parametrize(("empty", "shape"), [("(0,)", (0, 0)), ("(0,D)", (0, p.D))])
def test_trident_empty_slide(tmp_path: Path, empty: str, shape: tuple[int, int]) -> None:
    bag = xmil.read_bag(p.trident(tmp_path, empty=empty))
    assert bag.features.shape == shape
    assert bag.boxes().shape == (0, 4)


def test_trident_leading_axis(tmp_path: Path) -> None:
    check(xmil.read_bag(p.trident(tmp_path, lead=True)))


def test_trident_slide_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="a slide-level embedding and not a bag"):
        xmil.read_bag(p.trident(tmp_path, level="slide"))


def test_trident_patches(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.trident_patches(tmp_path))
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert bag.slide_id == "s1"


def test_trident_pt_is_a_numpy_array(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.trident_pt(tmp_path))
    np.testing.assert_array_equal(bag.features, p.features())
    assert bag.coords is None


@pytest.mark.parametrize("version", ["2.1.0", "2.0.1"])
def test_stamp2_needs_the_mpp(tmp_path: Path, version: str) -> None:
    path = p.stamp2(tmp_path, version=version)
    check(xmil.read_bag(path, mpp=p.MPP), exact=False)
    bag = xmil.read_bag(path)
    assert (bag.coords, bag.unit, bag.encoder, bag.version) == (None, "um", "ctranspath", version)
    np.testing.assert_allclose(bag.raw_coords, p.XY * p.MPP)
    with pytest.raises(InputError, match="coordinates are in microns; pass the slide's `mpp=`"):
        bag.boxes()
    np.testing.assert_array_equal(bag.placed(mpp=p.MPP).boxes(), p.BOXES)


def test_stamp2_mpp_follows_from_the_edge(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.stamp2(tmp_path), patch_size=p.EDGE)
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert bag.mpp == p.MPP
    assert bag.inferred == ("mpp 0.25 from the tile of 128 µm and the given patch edge of 512 px",)


@pytest.mark.parametrize("level", ["slide", "patient"])
def test_stamp2_embeddings_are_refused(tmp_path: Path, level: str) -> None:
    with pytest.raises(FileError, match=f"one {level}-level embedding"):
        xmil.read_bag(p.stamp2(tmp_path, level=level))


@pytest.mark.parametrize("augmented", [True, False])
def test_marugoto_stride_224_is_256_microns(tmp_path: Path, augmented: bool) -> None:
    bag = xmil.read_bag(p.marugoto(tmp_path, augmented=augmented), mpp=0.5)  # 256 µm at 0.5: 512 px
    check(bag, exact=False)
    assert bag.format == "marugoto"
    assert any("left out 2 augmented rows of 8" in note for note in bag.inferred) is augmented


def test_marugoto_rows_are_counted_without_the_augmented(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.marugoto(tmp_path), rows=[5, 2], mpp=0.5)
    np.testing.assert_allclose(bag.features, p.features()[[5, 2]], atol=2e-3)
    np.testing.assert_array_equal(bag.boxes(), p.BOXES[[5, 2]])


@pytest.mark.parametrize("container", ["pt", "npz"])
def test_slide2vec_keeps_corners_apart(tmp_path: Path, container: str) -> None:
    bag = xmil.read_bag(p.slide2vec(tmp_path, container=container))
    check(bag)
    assert (bag.format, bag.encoder, bag.mpp, bag.slide_size) == ("slide2vec", "uni", p.MPP, (9000, 8000))
    bare = xmil.read_bag(p.slide2vec(tmp_path / "bare", container=container, tiles=False))
    assert (bare.coords, bare.format) == (None, "slide2vec")


def test_slide2vec_files_that_do_not_fit(tmp_path: Path) -> None:
    path = p.slide2vec(tmp_path, container="npz")
    corners = tmp_path / "tiles" / "s1.coordinates.npz"
    np.savez(corners, tile_index=np.arange(2), x=np.zeros(2, int), y=np.zeros(2, int))
    with pytest.raises(FileError, match=r"lacks the tile 2.*s1\.npz"):
        xmil.read_bag(path)
    np.savez(corners, corners=np.zeros((2, 2)))
    with pytest.raises(FileError, match="holds no 'x' and 'y'"):
        xmil.read_bag(path)
    about = tmp_path / "tile_embeddings" / "s1.meta.json"
    about.write_text(about.read_text().replace('"tile_embeddings"', '"hierarchical_embeddings"'))
    with pytest.raises(FileError, match="features of regions"):
        xmil.read_bag(path)
    about.write_text("{")
    with pytest.raises(FileError, match="not readable JSON"):
        xmil.read_bag(path)


@pytest.mark.parametrize("zipped", [True, False])
def test_slideflow_stores_centres(tmp_path: Path, zipped: bool) -> None:
    path = p.slideflow(tmp_path, zipped=zipped)
    check(xmil.read_bag(path, mpp=p.MPP), exact=False)
    check(xmil.read_bag(path, patch_size=p.EDGE), exact=False)
    bag = xmil.read_bag(path)
    assert (bag.coords, bag.unit, bag.format) == (None, "px-centre", "slideflow")
    with pytest.raises(InputError, match="coordinates are tile centres"):
        bag.boxes()


@pytest.mark.parametrize("config", [True, False])
def test_slideflow_magnification_gives_no_edge(tmp_path: Path, config: bool) -> None:
    path = p.slideflow(tmp_path, tile_um="40x", config=config)
    bag = xmil.read_bag(path, mpp=p.MPP)
    assert bag.coords is None
    assert len(bag.inferred) == 1
    check(xmil.read_bag(path, patch_size=p.EDGE), exact=False)


def test_tiatoolbox_scale_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = p.tiatoolbox(tmp_path)
    check(xmil.read_bag(path, patch_size=p.EDGE))
    bag = xmil.read_bag(path, mpp=p.MPP)
    assert (bag.coords, bag.unit) == (None, "px-read")
    with pytest.raises(InputError, match="the reading resolution is not stored; pass `patch_size=`"):
        bag.boxes()
    np.testing.assert_array_equal(xmil.read_bag(path, rows=[3, 1]).features, p.features()[[3, 1]])


def test_zarr_without_the_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    path = p.tiatoolbox(tmp_path)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(FileError, match=r"pip install 'xmil\[zarr\]'"):
        xmil.read_bag(path)


def test_spatialdata(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    bag = xmil.read_bag(p.spatialdata(tmp_path))
    order = np.random.default_rng(1).permutation(p.N)
    np.testing.assert_array_equal(bag.features, p.features()[order])
    np.testing.assert_array_equal(bag.boxes(), p.BOXES[order])
    assert (bag.encoder, bag.mpp) == ("uni", p.MPP)


def test_spatialdata_with_two_tables_asks_for_one(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = p.spatialdata(tmp_path, tables=("uni_tiles", "conch_tiles"), shuffle=False)
    with pytest.raises(FileError, match="several feature tables"):
        xmil.read_bag(path)
    bag = xmil.read_bag(path / "tables" / "conch_tiles")
    check(bag)
    assert bag.encoder == "conch"


def test_gigapath_by_name_uses_256_px_at_20x(tmp_path: Path) -> None:
    path = p.gigapath(tmp_path)
    check(xmil.read_bag(path))
    bag = xmil.read_bag(path, "gigapath", mpp=0.25)
    check(bag)
    assert bag.inferred == ("patch edge 512 from 256 px at 20x and mpp 0.25",)


@pytest.mark.parametrize("write", [p.wsinfer_h5, p.wsinfer_csv])
def test_wsinfer_boxes(tmp_path: Path, write) -> None:
    bag = xmil.read_bag(write(tmp_path))
    np.testing.assert_array_equal(bag.boxes(), p.BOXES)
    assert bag.format == "wsinfer"


@pytest.mark.parametrize("container", ["pt", "npz", "folder"])
@pytest.mark.parametrize("table", [True, False])
def test_paper_rows_ascend_in_patch_number(tmp_path: Path, container: str, table: bool) -> None:
    bag = xmil.read_bag(p.paper(tmp_path, container=container, table=table))
    np.testing.assert_array_equal(bag.features, p.features())
    if not table:
        assert bag.coords is None
        return
    check(bag)
    assert bag.columns["patch_id"].tolist() == [3, 10, 11, 20, 101, 102]
    assert bag.columns["annotation:1"].tolist() == [0, 0.5, 0, 0.5, 0, 0.5]
    assert bag.columns["annotation:0"].tolist() == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("container", ["pt", "npy", "npz"])
def test_plain_arrays_have_no_boxes(tmp_path: Path, container: str) -> None:
    bag = xmil.read_bag(p.plain(tmp_path, container=container))
    np.testing.assert_array_equal(bag.features, p.features())
    assert (bag.format, bag.coords) == ("plain", None)
    with pytest.raises(InputError, match="it has no coordinates; explaining and evaluating work without"):
        bag.boxes()


@pytest.mark.parametrize("container", ["pt", "npz"])
def test_plain_arrays_with_coordinates(tmp_path: Path, container: str) -> None:
    check(xmil.read_bag(p.plain(tmp_path, container=container, coords=True)))


def test_given_values_win_and_are_said(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.trident(tmp_path), patch_size=300, mpp=0.4)
    assert (bag.patch_size, bag.mpp) == (300, 0.4)
    [note] = bag.inferred
    assert "300" in note
    assert "512" in note


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    assert xmil.read_bag(p.trident(tmp_path), patch_size=np.int64(512), mpp=np.float32(0.5)).mpp == 0.5


@pytest.mark.parametrize(
    ("name", "value"), [("mpp", 0), ("mpp", -1.0), ("mpp", float("nan")), ("patch_size", 0), ("mpp", "1")]
)
def test_bad_parameters(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"The '{name}' parameter of read_bag must be"):
        xmil.read_bag(p.trident(tmp_path), **{name: value})


def test_unknown_format_suggests(tmp_path: Path) -> None:
    with pytest.raises(xmil.XmilError, match="Did you mean 'trident'"):
        xmil.read_bag(p.trident(tmp_path), "tridnet")


def test_a_third_party_adds_a_reader_in_one_file(tmp_path: Path) -> None:
    from xmil.data import Ask, Header, reader
    from xmil.data.readers import READERS

    @reader("mytool", kinds=("npz",), claims=lambda found: "my_features" in found)
    def read(found, ask: Ask) -> Header:
        return Header(found.path, "mytool", found.rows("my_features"), slide_id="mine")

    with pytest.raises(xmil.XmilError, match="Known: csv, folder, h5, npy, npz, pt, zarr"):
        reader("mytable", kinds=("parquet",), claims=lambda found: True)
    try:
        np.savez(tmp_path / "a.npz", my_features=p.features())
        assert xmil.read_bag(tmp_path / "a.npz").format == "mytool"
    finally:
        READERS._entries.pop("mytool")


def test_reading_h5_needs_no_torch(tmp_path: Path) -> None:
    path = p.trident(tmp_path)
    code = f"import sys, xmil; xmil.read_bag({str(path)!r}); sys.exit('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "-c", code], env=env).returncode == 0


def spaced(path: Path, step: int, attrs: dict[str, object], *, on: str = "/") -> Path:
    """Features and corners `step` apart, with attributes of the file or of a dataset."""
    with h5py.File(path, "w") as file:
        file["features"] = np.zeros((9, 4), np.float32)
        file["coords"] = step * np.stack(np.divmod(np.arange(9), 3), axis=1)
        file[on].attrs.update(attrs)
    return path


def test_an_edge_from_spacing_is_a_guess_until_the_user_sets_it(tmp_path: Path) -> None:
    path = spaced(tmp_path / "s.h5", 768, {})
    bag = xmil.read_bag(path)
    assert (bag.patch_size, bag.patches.edge_guess is None) == (768, False)
    assert "--patch-size" in (bag.patches.edge_note or "")
    xmil.write_bag(bag, tmp_path / "again.h5")  # stays a guess in our own files
    assert xmil.read_bag(tmp_path / "again.h5").patches.edge_note == bag.patches.edge_note
    assert bag.select([0, 2]).patches.edge_note == bag.patches.edge_note
    for known in (
        bag.placed(patch_size=256),
        xmil.read_bag(path, patch_size=256),
        xmil.read_bag(tmp_path / "again.h5", patch_size=256),
        xmil.Bag(bag.features, patches=bag.patches, patch_size=256),
    ):
        assert (known.patch_size, known.patches.edge_note) == (256, None)
    np.savez(tmp_path / "s.npz", features=bag.features, coords=bag.coords)
    assert xmil.read_bag(tmp_path / "s.npz").patches.edge_note == bag.patches.edge_note


def test_edges_that_files_state_are_no_guess(tmp_path: Path) -> None:
    p.clam_patches(tmp_path)
    for path in (p.clam_features(tmp_path), p.trident(tmp_path)):
        assert xmil.read_bag(path).patches.edge_note is None


@pytest.mark.parametrize(
    ("attrs", "on"),
    [
        ({"patch_size": 256, "mpp": 0.5}, "/"),
        ({"tile_px": 256, "patch_mpp": 0.5, "slide_mpp": 0.25}, "features"),
    ],
)
def test_spacing_that_pixels_and_mpp_contradict_is_refused(
    tmp_path: Path, attrs: dict[str, object], on: str
) -> None:
    path = spaced(tmp_path / "s.h5", 768, attrs, on=on)
    with pytest.raises(FileError, match=r"256 px.*768 px apart; pass `patch_size=`"):
        xmil.read_bag(path)
    assert xmil.read_bag(path, patch_size=512).patch_size == 512


def test_spacing_that_pixels_and_mpp_confirm_is_no_guess(tmp_path: Path) -> None:
    path = spaced(tmp_path / "s.h5", 512, {"patch_size": 256, "mpp": 0.5})
    bag = xmil.read_bag(path, mpp=0.25)
    assert (bag.patch_size, bag.patches.edge_note) == (512, None)


def test_a_size_in_pixels_of_an_unknown_level_is_a_guess_if_patches_lie_apart(tmp_path: Path) -> None:
    for step, is_guess in ((256, False), (512, True)):
        bag = xmil.read_bag(spaced(tmp_path / f"s{step}.h5", step, {"patch_size": 256}, on="coords"))
        assert (bag.patch_size, bag.patches.edge_note is not None) == (256, is_guess)


def test_the_edge_of_old_stamp_files_is_a_guess_from_their_stride(tmp_path: Path) -> None:
    bag = xmil.read_bag(p.marugoto(tmp_path), mpp=0.5)
    assert (bag.patch_size, bag.patches.edge_note is not None) == (512, True)
