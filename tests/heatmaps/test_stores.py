"""OME-Zarr and SpatialData exports: exact by plain Zarr and Arrow, and by the libraries that define them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

import xmil
from xmil.cli import main
from xmil.core.durable import write_folder
from xmil.core.errors import FileError
from xmil.core.explanation import Explanation
from xmil.storage import write_explanations

zarr = pytest.importorskip("zarr")
ROOT = Path(__file__).parents[2]
EDGE = 64


@pytest.fixture
def explained(tmp_path: Path) -> list[Explanation]:
    """A run of one slide by two methods: off the origin, with a hole, wide enough for two levels."""
    (tmp_path / "slides").mkdir()
    rng = np.random.default_rng(0)
    corners = np.array([[x * EDGE, y * EDGE] for y in range(1, 4) for x in range(2, 20) if (x, y) != (5, 2)])
    made = [
        Explanation(
            rng.normal(size=len(corners)).astype(np.float32), np.array([0.0, 1.0], np.float32), 1.0, method,
            xmil.Target(1), method == "lrp", bag="s", coords=corners, patch_size=EDGE, mpp=0.5,
        )
        for method in ("lrp", "attention")
    ]  # fmt: skip
    write_explanations(made, tmp_path / "slides" / "s.parquet")
    return made


def exported(run: Path, to: str, name: str) -> Path:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--to", to])
    assert not left.value.code
    assert [path.name for path in (run / "export" / to).iterdir()] == [name]
    return run / "export" / to / name


def drawn(explanations: Sequence[Explanation], shape: tuple[int, int]) -> Any:
    """The picture (c, h, w) painted patch by patch."""
    picture = np.full((len(explanations), *shape), np.nan, np.float32)
    for channel, e in enumerate(explanations):
        for (x0, y0, x1, y1), score in zip(e.boxes(), e.scores, strict=True):
            picture[channel, y0:y1, x0:x1] = score
    return picture


def test_omezarr_holds_every_pixel(tmp_path: Path, explained: list[Explanation]) -> None:
    group = zarr.open_group(str(exported(tmp_path, "ome-zarr", "s.scores.ome.zarr")), mode="r")
    (scales,) = group.attrs["multiscales"]
    full = drawn(explained, (4 * EDGE, 20 * EDGE))
    assert [axis.get("unit") for axis in scales["axes"]] == [None, "micrometer", "micrometer"]
    assert len(scales["datasets"]) == 2
    for level, dataset in enumerate(scales["datasets"]):
        edge = 0.5 * 2**level
        assert dataset["coordinateTransformations"] == [{"type": "scale", "scale": [1.0, edge, edge]}]
        np.testing.assert_array_equal(group[dataset["path"]][:], full[:, :: 2**level, :: 2**level])
    assert [channel["label"] for channel in group.attrs["omero"]["channels"]] == ["lrp:1", "attention:1"]


def test_spatialdata_is_read_as_we_read_lazyslides(tmp_path: Path, explained: list[Explanation]) -> None:
    bag = xmil.read_bag(exported(tmp_path, "spatialdata", "s.zarr"))
    assert (bag.patch_size, bag.mpp, bag.encoder) == (EDGE, 0.5, "xmil")
    np.testing.assert_array_equal(bag.coords, explained[0].coords)
    np.testing.assert_array_equal(bag.features, np.stack([e.scores for e in explained], axis=1))


def test_the_defining_libraries_read_both(tmp_path: Path, explained: list[Explanation]) -> None:
    paths = [
        exported(tmp_path, "ome-zarr", "s.scores.ome.zarr"),
        exported(tmp_path, "spatialdata", "s.zarr"),
    ]
    found = read_elsewhere(*paths)
    image, table = found["ome-zarr"], found["spatialdata"]
    full = drawn(explained, (4 * EDGE, 20 * EDGE))
    middles = full[:, EDGE // 2 :: EDGE, EDGE // 2 :: EDGE]
    np.testing.assert_array_equal(np.array(image["values"], np.float32), middles)
    assert (image["levels"], image["shape"]) == (2, list(full.shape))
    assert (image["axes"], image["scale"]) == (["c", "y", "x"], [1.0, 0.5, 0.5])
    assert image["channels"] == table["columns"] == ["lrp:1", "attention:1"]
    assert table["boxes"] == explained[0].boxes().tolist()
    assert table["centres"] == ((explained[0].boxes()[:, :2] + explained[0].boxes()[:, 2:]) / 2).tolist()
    assert table["systems"] == ["global"]
    scores = np.stack([e.scores for e in explained], axis=1)
    np.testing.assert_array_equal(np.array(table["scores"], np.float32), scores)


def test_another_renderer_paints_each_patch_by_its_score(
    tmp_path: Path, explained: list[Explanation]
) -> None:
    paths = [exported(tmp_path, "ome-zarr", "s.scores.ome.zarr"), exported(tmp_path, "spatialdata", "s.zarr")]
    picture = read_elsewhere(*paths, tmp_path / "tiles.png")["picture"]
    assert picture["column"] == "lrp:1"
    scores = explained[0].scores
    expected = matplotlib.colormaps["RdBu_r"](0.5 + scores / (2 * np.abs(scores).max()))[:, :3] * 255
    assert np.abs(np.array(picture["colours"]) - expected).max() < 6  # of 255; the map has 256 steps


def read_elsewhere(*paths: Path) -> Any:
    """What the defining libraries find in the stores, and paint where a picture's path comes last."""
    script = Path(__file__).with_name("read_stores.py")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [able_python(), str(script), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def able_python() -> str:
    """A Python with spatialdata and ome-zarr: this one, or that of `make test-stores`."""
    if find_spec("spatialdata") and find_spec("ome_zarr"):
        return sys.executable
    found = Path(os.environ.get("XMIL_STORES_PYTHON", ROOT / ".venv-stores" / "bin" / "python"))
    if not found.is_file():
        pytest.skip("no spatialdata beside these pins (it needs pandas below 3); run `make test-stores`")
    return str(found)


def test_a_store_is_kept_until_the_next_one_is_whole(tmp_path: Path) -> None:
    def fill(folder: Path, text: str) -> None:
        folder.mkdir()
        (folder / text).write_text(text)
        if text == "broken":
            raise OSError(28, "No space left on device")

    target = tmp_path / "a.zarr"
    write_folder(target, lambda folder: fill(folder, "first"))
    with pytest.raises(FileError, match="cannot be written"):
        write_folder(target, lambda folder: fill(folder, "broken"))
    assert [path.name for path in target.iterdir()] == ["first"]
    write_folder(target, lambda folder: fill(folder, "second"))
    assert [path.name for path in target.iterdir()] == ["second"]
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]
