"""Small files that ask for gigabytes: each is refused in one line, in little memory."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import xmil
from xmil.core.budget import FLOOR, RATIO, allowance, read_parquet
from xmil.slides.open import open_slide
from xmil.storage import KEY

GIB = 1 << 30


def high_water(*, reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def zip_of(path: Path, pickled: bytes, *, packed: bool = False, **members: bytes) -> Path:
    """A zip as torch.save lays it out, with a pickle written by hand."""
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
        for name, content in members.items():
            archive.writestr(f"a/data/{name.removeprefix('_')}", content)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def storage(key: str, numbers: int) -> bytes:
    return (
        b"("
        + text("storage")
        + b"ctorch\nFloatStorage\n"
        + text(key)
        + text("cpu")
        + b"J"
        + struct.pack("<i", numbers)
        + b"tQ"
    )


def tensor(key: str, shape: tuple[int, int], stride: tuple[int, int], numbers: int) -> bytes:
    ints = [b"J" + struct.pack("<i", value) for value in (*shape, *stride)]
    view = ints[0] + ints[1] + b"\x86" + ints[2] + ints[3] + b"\x86"
    made = b"(" + storage(key, numbers) + b"K\0" + view + b"\x89" + b"ccollections\nOrderedDict\n)R" + b"tR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n" + made


def doubling(path: Path) -> Path:
    """A codec that doubles its input, forty times over."""
    body = b"c_codecs\nencode\nq\x01" + b"C\x10" + b"a" * 16 + b"q\x02"
    for _ in range(28):
        body += b"0h\x01h\x02" + text("hex") + b"\x86R" + b"q\x02"
    return zip_of(path, b"\x80\x03" + body + b".")


def memo(path: Path) -> Path:
    """A place in the memo that C's unpickler would make room for."""
    stub = b"cstrange.code\nThing\n)R"
    content = b"}(" + text("pytorch-lightning_version") + text("2") + text("hyper_parameters") + stub
    content += b"r" + struct.pack("<I", 400_000_000) + text("state_dict") + b"}u"
    return zip_of(path, b"\x80\x03" + content + b".")


def expanded(path: Path) -> Path:
    """One number seen as a matrix of a billion."""
    return zip_of(
        path, b"\x80\x02}" + text("w") + tensor("0", (40_000, 40_000), (0, 0), 1) + b"s.", _0=b"\0" * 4
    )


def stubbed(path: Path) -> Path:
    """The same among a Lightning checkpoint's foreign classes."""
    view = tensor("0", (40_000, 40_000), (0, 0), 1)
    content = b"}(" + text("pytorch-lightning_version") + text("2") + text("hyper_parameters")
    content += b"cstrange.code\nThing\n)R" + text("state_dict") + b"}" + text("w") + view + b"su"
    return zip_of(path, b"\x80\x02" + content + b".", _0=b"\0" * 4)


def buffers(path: Path) -> Path:
    return zip_of(
        path, b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + struct.pack("<q", 3 * GIB)[:5] + b"\x85R."
    )


def hashed(path: Path) -> Path:
    """A key of tuples within tuples: its hash would take two to the sixtieth steps."""
    body = b"}K\x01" + b"2\x86" * 60 + b"K\x01s."
    return zip_of(path, b"\x80\x02" + body)


def deflated(path: Path) -> Path:
    rows = 3 * GIB // 4 // 10
    held = b"\x80\x02}" + text("w") + tensor("0", (rows, 1), (1, 1), rows) + b"s."
    return zip_of(path, held, packed=True, _0=bytes(GIB // 3))


def settings(path: Path, **spec: Any) -> Path:
    about = {"name": "attnmil", "in_dim": 4, "n_classes": 2, "params": {}, **spec}
    save_file({"w": torch.zeros(1)}, path, metadata={"xmil": json.dumps(about)})
    return path


def npz(path: Path) -> Path:
    header = io.BytesIO()
    shape = (GIB // 8192, 1024)
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("features.npy", "w") as member,
    ):
        member.write(header.getvalue())
        for _ in range(8):
            member.write(bytes(GIB // 16))
    return path


def picture(path: Path) -> Path:
    Image.new("L", (12_000, 12_000)).save(path)
    return path


def h5(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        made = file.create_dataset(
            "features", (GIB // 4096, 1024), "f4", chunks=(1 << 14, 1024), compression="gzip"
        )
        packed = zlib.compress(bytes(1 << 26), 1)
        for start in range(0, made.shape[0], 1 << 14):
            made.id.write_direct_chunk((start, 0), packed)
    return path


def explanation(path: Path) -> Path:
    one = pa.array(np.zeros(1 << 22, np.float32))
    table = pa.chunked_array([one] * 4)
    nothing = pa.chunked_array([pa.nulls(1 << 22, pa.int64())] * 4)
    header = {"layout": 1, "columns": {"lrp|0": {}}}
    held = pa.table({"x0": nothing, "y0": nothing, "lrp|0": table})
    pq.write_table(held.replace_schema_metadata({KEY: json.dumps(header)}), path)
    return path


def words(path: Path) -> Path:
    index = pa.array(np.zeros(1 << 12, np.int32))
    long = pa.DictionaryArray.from_arrays(index, pa.array(["x" * (1 << 20)]))
    pq.write_table(pa.table({"slide_id": long}), path)
    return path


def zarr_store(path: Path) -> Path:
    zarr = pytest.importorskip("zarr")
    made = zarr.create_array(
        str(path / "features"), shape=(GIB // 4096, 1024), chunks=(1 << 14, 1024), dtype="f4", zarr_format=2
    )
    first = np.ones((1 << 14, 1024), np.float32)
    made[: 1 << 14] = first
    chunk = (path / "features" / "0.0").read_bytes()
    for i in range(GIB // 4096 >> 14):
        (path / "features" / f"{i}.0").write_bytes(chunk)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    return path


BOMBS: dict[str, tuple[Callable[[Path], Path], str, Callable[[Path], Any]]] = {
    "codec": (doubling, "s.pt", xmil.load_model),
    "codec as features": (doubling, "s.pt", xmil.read_bag),
    "memo": (memo, "s.ckpt", xmil.load_model),
    "expanded": (expanded, "s.pt", xmil.load_model),
    "expanded features": (expanded, "s.pt", xmil.read_bag),
    "among stubs": (stubbed, "s.ckpt", xmil.load_model),
    "buffer": (buffers, "s.pt", xmil.read_bag),
    "hash": (hashed, "s.pt", xmil.load_model),
    "hash as features": (hashed, "s.pt", xmil.read_bag),
    "deflated": (deflated, "s.pt", xmil.load_model),
    "width": (lambda path: settings(path, in_dim=1 << 28), "s.safetensors", xmil.load_model),
    "layers": (
        lambda path: settings(path, name="stamp_vit", params={"n_layers": 1 << 40}),
        "s.safetensors",
        xmil.load_model,
    ),
    "npz": (npz, "s.npz", xmil.read_bag),
    "picture": (picture, "s.png", open_slide),
    "h5": (h5, "s.h5", xmil.read_bag),
    "explanation": (explanation, "s.parquet", xmil.Explanation.load),
    "table": (words, "s.parquet", xmil.read_cohort),
    "zarr": (zarr_store, "s.zarr", xmil.read_bag),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_little_memory(name: str, tmp_path: Path) -> None:
    make, file, load = BOMBS[name]
    path = make(tmp_path / file)
    before = high_water(reset=True)
    with pytest.raises(xmil.XmilError) as caught:
        load(path)
    assert high_water() - before < FLOOR
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_packs_as_real_data_does_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of repeats within the budget reads as pyarrow reads it; the variable moves the floor."""
    table = pa.table({"s": ["a", None, "bb"] * 50, "n": list(range(150)), "l": [["x", "y"], [], None] * 50})
    pq.write_table(table, tmp_path / "t.parquet")
    assert read_parquet(tmp_path / "t.parquet").equals(table)
    assert read_parquet(tmp_path / "t.parquet", ["n"]).equals(table.select(["n"]))
    assert allowance(10) == FLOOR
    assert allowance(FLOOR) == RATIO * FLOOR
    monkeypatch.setenv("XMIL_MEMORY", "100")
    assert allowance(1) == 100
    with pytest.raises(xmil.XmilError, match="XMIL_MEMORY=4G"):
        read_parquet(words(tmp_path / "w.parquet"))
    monkeypatch.setenv("XMIL_MEMORY", "much")
    with pytest.raises(xmil.XmilError, match="such as 4G"):
        allowance(1)


def test_numpy_arrays_in_a_torch_file_still_load(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    torch.save(values, tmp_path / "s.pt")
    assert np.array_equal(xmil.read_bag(tmp_path / "s.pt").features, values)
