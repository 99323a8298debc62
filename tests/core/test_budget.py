"""Small files that ask for gigabytes: each is refused in one line, in little memory."""

from __future__ import annotations

import gzip
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
from xmil.bench import read_idx, read_tissue
from xmil.core.budget import FLOOR, RATIO, allowance, read_parquet
from xmil.encoders.foreign import read_state as read_encoder
from xmil.evaluate import Truth
from xmil.slides.open import open_slide
from xmil.storage import KEY, read_interactions
from xmil.training.fit import read_state as read_training

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


def nested(path: Path) -> Path:
    """Many views of one number, each within the budget, in lists within tables."""
    view = tensor("0", (5000, 5000), (0, 0), 1)
    lists = b"(" + b"(" + view * 30 + b"l" + text("more") + b"}" + text("w") + view + b"s" + b"l"
    return zip_of(path, b"\x80\x02}" + text("state_dict") + lists + b"s.", _0=b"\0" * 4)


def views(path: Path) -> Path:
    """A state of many views of one number, each within the budget."""
    items = b"".join(text(f"w{i}.weight") + tensor("0", (5000, 5000), (0, 0), 1) for i in range(40))
    return zip_of(path, b"\x80\x02}(" + items + b"u.", _0=b"\0" * 4)


def in_folder(make: Callable[[Path], Path], name: str) -> Callable[[Path], Path]:
    def fill(folder: Path) -> Path:
        folder.mkdir()
        make(folder / name)
        return folder

    return fill


def tensors(path: Path) -> Path:
    """Safetensors of which a thousand share the same bytes, or claim those beyond the end."""
    each = {"dtype": "F32", "shape": [1 << 20, 64], "data_offsets": [0, 1 << 28]}
    header = json.dumps({f"w{i}": each for i in range(1000)}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    return path


def filled(path: Path) -> Path:
    """HDF5 of chunks that were never written, all of the fill value."""
    with h5py.File(path, "w") as file:
        file.create_dataset("features", (GIB // 256, 1024), "f4", chunks=(64, 1024), fillvalue=1.0)
        file.create_dataset("coords", (GIB // 256, 2), "i8", chunks=(64, 2), fillvalue=3)
    return path


def empty_store(path: Path) -> Path:
    """Zarr without a chunk: all of it is the fill value."""
    about = {"zarr_format": 2, "dtype": "<f4", "fill_value": 1.0, "order": "C", "filters": None}
    about |= {"shape": [GIB // 1024, 1024], "chunks": [64, 1024], "compressor": None}
    (path / "features").mkdir(parents=True)
    (path / "features" / ".zarray").write_text(json.dumps(about))
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    return path


def idx(path: Path) -> Path:
    """A gzipped IDX file of zeros: a thousandth of what it unpacks to."""
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(b"\0\0\x08\x03" + struct.pack(">III", 1 << 20, 32, 32))
        for _ in range(64):
            stream.write(bytes(1 << 24))
    return path


def tiff(path: Path) -> Path:
    """A TIFF whose one strip claims gigabytes and is a few bytes."""
    Image.new("RGB", (1, 1)).save(path, compression="tiff_deflate")
    data = bytearray(path.read_bytes())
    (first,) = struct.unpack_from("<I", data, 4)
    for i in range(struct.unpack_from("<H", data, first)[0]):
        at = first + 2 + 12 * i
        if struct.unpack_from("<H", data, at)[0] in (256, 257, 278):  # width, length, rows per strip
            struct.pack_into("<HII", data, at + 2, 4, 1, 50_000)
    path.write_bytes(data)
    return path


def marks(path: Path) -> Any:
    bag = xmil.Bag(np.zeros((1, 2), np.float32), coords=np.zeros((1, 2), int), patch_size=16, slide_id="s")
    return Truth(path.parent).evidence(bag)


def brackets(path: Path) -> Path:
    path.write_text('{"type": "FeatureCollection", "features": ' + "[" * (1 << 22))
    return path


def corners(path: Path) -> Path:
    """A scores file whose lists repeat one number, in Arrow's own shorthand."""
    lists = pa.ListArray.from_arrays([0, 1 << 26], pa.array(np.zeros(1 << 26, np.float32)))
    pq.write_table(pa.table({"pairs": lists}), path, compression="zstd")
    return path


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
    "outputs": (lambda path: settings(path, n_classes=10**10), "s.safetensors", xmil.load_model),
    "reference": (
        lambda path: settings(path, n_classes=10**10, task="regression", reference=1.0),
        "s.safetensors",
        xmil.load_model,
    ),
    "nested views": (nested, "s.pt", xmil.load_model),
    "nested views as features": (nested, "s.pt", xmil.read_bag),
    "nested views of a training": (in_folder(nested, "last.ckpt"), "fold0", read_training),
    "views": (views, "s.pt", xmil.load_model),
    "views of an encoder": (views, "s.pt", read_encoder),
    "shared tensors": (tensors, "s.safetensors", xmil.load_model),
    "shared tensors of an encoder": (tensors, "s.safetensors", read_encoder),
    "fill value": (filled, "s.h5", xmil.read_bag),
    "empty store": (empty_store, "s.zarr", xmil.read_bag),
    "gzip": (idx, "images-idx3-ubyte.gz", read_idx),
    "strip": (tiff, "s.tif", open_slide),
    "mask": (picture, "s.png", marks),
    "brackets": (brackets, "s.geojson", marks),
    "tissue": (
        in_folder(picture, "s.png"),
        "tissue",
        lambda path: read_tissue(path, patient="s"),
    ),
    "interactions": (corners, "s.parquet", read_interactions),
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
