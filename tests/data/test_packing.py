"""Chunks that hold more than the file's index says are refused before a library unpacks them."""

from __future__ import annotations

import bz2
import gzip
import lzma
import resource
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import xmil
from tests.data.producers import WRITERS
from xmil.data.containers.packing import check_unpacked

N, D = 64, 16
LARGE = 320 << 20


def write_h5(path: Path, values: Any, **options: Any) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("features", data=values, **options)
        file["coords"] = np.stack([np.arange(len(values))] * 2, axis=1) * 64
        file["coords"].attrs["patch_size"] = 64
    return path


def replaced(path: Path, chunks: list[bytes], rows: int) -> Path:
    with h5py.File(path, "a") as file:
        for i, content in enumerate(chunks):
            file["features"].id.write_direct_chunk((i * rows, 0), content)
    return path


@cache
def packed_zeros(size: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)), packer.flush()])


@pytest.mark.parametrize("chunks", [1, 16])
@pytest.mark.parametrize("kind", ["tiatoolbox", "spatialdata"])
def test_a_chunk_that_is_cut_off_is_refused(kind: str, tmp_path: Path) -> None:
    """Blosc would give what memory holds in place of what is missing, another time something else."""
    store = WRITERS[kind](tmp_path)
    whole = xmil.read_bag(store).features
    beside = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
    chunks = [path for path in store.rglob("*") if path.is_file() and path.name not in beside]
    for chunk in [path for path in chunks if path.suffix != ".parquet"]:
        content = chunk.read_bytes()
        for length in range(0, len(content), max(1, len(content) // 16)):
            chunk.write_bytes(content[:length])
            try:
                read = xmil.read_bag(store).features
            except xmil.XmilError:
                continue
            assert np.array_equal(read, whole), (chunk, length)
        chunk.write_bytes(content)


def test_an_hdf5_chunk_that_unpacks_to_more_is_refused(chunks: int, tmp_path: Path) -> None:
    rows = N // chunks
    path = write_h5(tmp_path / "s.h5", np.ones((N, D), "f4"), chunks=(rows, D), compression="gzip")
    replaced(path, [packed_zeros(LARGE // chunks)] * chunks, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(xmil.XmilError, match="unpacks to more than it declares"):
        xmil.read_bag(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


def test_a_large_hdf5_chunk_is_unpacked_up_to_its_size_only(tmp_path: Path) -> None:
    """Its stored size is plausible; only unpacking tells."""
    wide = 1 << 18
    path = write_h5(tmp_path / "s.h5", np.ones((1, wide), "f4"), chunks=(1, wide), compression="gzip")
    replaced(path, [packed_zeros(LARGE)], 1)
    assert path.stat().st_size < 4 * wide
    with pytest.raises(xmil.XmilError, match="unpacks to more than it declares"):
        xmil.read_bag(path)


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"compression": "lzf"}, {"fletcher32": True}])
@pytest.mark.parametrize("shuffle", [False, True])
def test_sound_hdf5_is_read(options: dict[str, Any], shuffle: bool, tmp_path: Path) -> None:
    """Noise does not pack: chunks are then a little larger than what they hold."""
    values = np.random.default_rng(0).normal(size=(N, D)).astype("f4")
    for rows in (1, 5, N):
        path = write_h5(tmp_path / f"{rows}.h5", values, chunks=(rows, D), shuffle=shuffle, **options)
        np.testing.assert_array_equal(xmil.read_bag(path).features, values)


def test_hdf5_packed_twice_is_refused(tmp_path: Path) -> None:
    """Each packing multiplies what one byte can give."""
    plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plan.set_chunk((N, D))
    for _ in range(2):
        plan.set_filter(h5py.h5z.FILTER_DEFLATE, 0, (9,))
    with h5py.File(tmp_path / "s.h5", "w") as file:
        space = h5py.h5s.create_simple((N, D))
        held = h5py.h5d.create(file.id, b"features", h5py.h5t.IEEE_F32LE, space, plan)
        h5py.Dataset(held)[:] = 1
    with pytest.raises(xmil.XmilError, match="packed several times over"):
        xmil.read_bag(tmp_path / "s.h5")


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "blosc": lambda content: bytes(4) + struct.pack("<I", len(content)) + bytes(8),
    "lz4": lambda content: struct.pack("<I", len(content)),
}


@pytest.mark.parametrize("codec", PACKERS)
def test_what_packed_bytes_give(codec: str) -> None:
    packed = PACKERS[codec](bytes(5000))
    check_unpacked(codec, packed, 5000, name="x", path=Path("s"))
    with pytest.raises(xmil.XmilError, match="unpacks to more"):
        check_unpacked(codec, packed, 4000, name="x", path=Path("s"))


@pytest.mark.parametrize("size", [10, 200, 300, 70_000, 1 << 20])
def test_the_size_that_zstd_states(size: int) -> None:
    numcodecs = pytest.importorskip("numcodecs")
    packed = bytes(numcodecs.Zstd().encode(bytes(size)))
    check_unpacked("zstd", packed, size, name="x", path=Path("s"))
    larger = bytes(numcodecs.Zstd().encode(bytes(size + 100)))
    with pytest.raises(xmil.XmilError, match="unpacks to more"):
        check_unpacked("zstd", larger, size, name="x", path=Path("s"))


@pytest.mark.parametrize("codec", ["gzip", "zstd", "blosc"])
def test_a_zarr_chunk_that_unpacks_to_more_is_refused(codec: str, tmp_path: Path) -> None:
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    from tests.data import producers

    path = producers.tiatoolbox(tmp_path)
    assert len(xmil.read_bag(path)) == producers.N
    made = {"gzip": numcodecs.GZip, "zstd": numcodecs.Zstd, "blosc": numcodecs.Blosc}[codec]()
    group = zarr.open_group(path, mode="a")
    values = group["features"][:]
    del group["features"]
    group.create_array("features", data=values, chunks=values.shape, compressors=made)
    np.testing.assert_array_equal(xmil.read_bag(path).features, values)
    (chunk,) = [file for file in (path / "features").rglob("*") if file.name[0].isdigit()]
    chunk.write_bytes(bytes(made.encode(bytes(64 << 20))))
    with pytest.raises(xmil.XmilError, match="unpacks to more"):
        xmil.read_bag(path)
