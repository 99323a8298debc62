"""Ways to spoil an input that keep its structure: a tree of values, a table, an archive, a container."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.data.fuzzing import damaged
from tests.fuzz.hostile import hostile

Rng = np.random.Generator
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**400,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
]
ODD += ["\0", "../../x", "é" * 300, [], {}, [[]], {"a": 1}, "9" * 5000, [1] * 3000, "1", "NaN", -0.0]


def odd_value(rng: Rng) -> Any:
    """A value nobody expects; sometimes nested beyond Python's stack, half of the time drawn at random."""
    if rng.random() < 0.03:
        value: Any = 1
        for _ in range(400):
            value = [value]
        return value
    return ODD[int(rng.integers(len(ODD)))] if rng.random() < 0.5 else _drawn(rng)


def _drawn(rng: Rng) -> Any:
    """A number of any size, a text of any letters, or a list of them."""
    how = int(rng.integers(5))
    if how == 0:
        return int(rng.integers(-(2**62), 2**62)) >> int(rng.integers(63))
    if how == 1:
        return float(rng.normal() * 10.0 ** rng.integers(-30, 30))
    if how == 2:
        return "".join(chr(int(code)) for code in rng.integers(1, 0xD7FF, size=int(rng.integers(1, 40))))
    if how == 3:
        return "".join(chr(int(code)) for code in rng.integers(32, 127, size=int(rng.integers(1, 400))))
    return [_drawn(rng) for _ in range(int(rng.integers(1, 4)))]


def spoilt_tree(value: Any, rng: Rng) -> Any:
    """The same tree with one place changed, removed, doubled or of another type."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = list(value)[int(rng.integers(len(value)))]
        how = rng.random()
        if how < 0.12:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return {**value, str(odd_value(rng))[:50]: value[key]}
        return {**value, key: spoilt_tree(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at, how = int(rng.integers(len(value))), rng.random()
        if how < 0.12:
            return value[:at] + value[at + 1 :]
        if how < 0.2:
            return value + value[at:]
        return [*value[:at], spoilt_tree(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value * int(rng.choice([-1, 0, 2, 10**6, 10**12, int(rng.integers(10**6))]))
    return odd_value(rng)


def dumped(value: Any, rng: Rng) -> bytes:
    """A tree as JSON, now and then cut off or too deep."""
    if rng.random() < 0.02:
        return b"[" * 100_000
    content = json.dumps(value, default=str).encode()
    return content[: int(rng.integers(len(content) + 1))] if rng.random() < 0.03 else content


def json_file(path: Path, rng: Rng) -> None:
    path.write_bytes(dumped(spoilt_tree(json.loads(path.read_text()), rng), rng))


def lines_file(path: Path, rng: Rng) -> None:
    """A list with a line's tree changed, removed, doubled or moved; mostly its head fits what follows."""
    head, *lines = path.read_bytes().splitlines(keepends=True)
    about = json.loads(head)
    key = "files" if "files" in about else "lines"
    listed = about[key]
    at, how = int(rng.integers(len(lines))), int(rng.integers(8))
    if how == 0:
        del lines[at]
        listed -= at < listed
    elif how == 1:
        lines.append(lines[at])
    elif how == 2:
        about = spoilt_tree(about, rng)
    else:
        lines[at] = dumped(spoilt_tree(json.loads(lines[at]), rng), rng) + b"\n"
    if how != 2 and rng.random() < 0.9:
        about |= {key: listed, "sha256": hashlib.sha256(b"".join(lines[:listed])).hexdigest()}
    path.write_bytes(json.dumps(about, default=str).encode() + b"\n" + b"".join(lines))


def table_file(path: Path, rng: Rng) -> None:
    """A CSV with a cell, a row, a header or a separator changed."""
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = int(rng.integers(len(rows)))
    cell = int(rng.integers(len(rows[row])))
    how = int(rng.integers(6))
    if how < 3:
        rows[row][cell] = str(odd_value(rng))[:9000]
    elif how == 3:
        rows[row] = rows[row][:cell]
    elif how == 4:
        rows[0][cell % len(rows[0])] = rows[0][0]
    else:
        rows[row][cell] = '"' + rows[row][cell]
    joined = str(rng.choice([",", ";", "\t", "|"], p=[0.85, 0.05, 0.05, 0.05]))
    path.write_text("\n".join(joined.join(cells) for cells in rows) + "\n", errors="replace")


def zip_file(path: Path, rng: Rng) -> None:
    """An archive with a member renamed, dropped, doubled, packed, or damaged inside."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at, how = int(rng.integers(len(members))), int(rng.integers(5))
    name, content = members[at]
    if how == 0:
        members.pop(at)
    elif how == 1:
        members[at] = (str(rng.choice(["../x", "", "a/b.npy", name + "2"])), content)
    elif how == 2:
        members.append((f"{name}.again", content))
    elif how == 3 and name.endswith(".npy"):
        members[at] = (name, spoilt_array(content, rng))
    else:
        members[at] = (name, damaged(content, rng) if content else b"x")
    kind = zipfile.ZIP_DEFLATED if rng.random() < 0.2 else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        for member, held in members:  # under a time of its own each, the same input would never come again
            archive.writestr(zipfile.ZipInfo(member), held, compress_type=kind)


def spoilt_array(content: bytes, rng: Rng) -> bytes:
    """A NumPy file with another shape, order, type or version in its head, or with objects in it."""
    array = touched(np.load(io.BytesIO(content), allow_pickle=False), rng)
    made, how = io.BytesIO(), int(rng.integers(6))
    if how == 0:
        np.save(made, np.array([hostile(rng)] * 2, dtype=object), allow_pickle=True)
        return made.getvalue()
    if how == 1:
        np.save(made, array.reshape(-1) if rng.random() < 0.5 else array[None])
        return made.getvalue()
    if how == 2:
        np.save(
            made, array.astype(str(rng.choice(["f2", "f8", ">f4", "c8", "i1", "u8", "S4", "?", "M8[s]"])))
        )
        return made.getvalue()
    np.lib.format.write_array_header_1_0(made, _odd_head(array, rng))
    return made.getvalue() + array.tobytes()[: int(rng.integers(array.nbytes + 1)) if how == 5 else None]


def touched(values: Any, rng: Rng) -> Any:
    """Numbers with one of them drawn anew, so that one way of spoiling gives many inputs."""
    array = np.array(values)
    if array.size and array.dtype.kind in "fiu":
        array.flat[int(rng.integers(array.size))] = rng.integers(0, 100)
    return array


def _odd_head(array: Any, rng: Rng) -> dict[str, Any]:
    """A head that the values after it do not bear out."""
    factors = rng.choice([-1, 0, 1, 2, 1000, 10**9, 10**18], size=array.ndim)
    shape = tuple(int(length) * int(factor) for length, factor in zip(array.shape, factors, strict=True))
    head = {"shape": shape, "fortran_order": bool(rng.integers(2)), "descr": array.dtype.str}
    if rng.random() < 0.4:
        head["descr"] = [("a", "<f4"), "O", "<f16", "V8", "<m8", f"<U{10**9}", "x", 3][int(rng.integers(8))]
    return head


def array_file(path: Path, rng: Rng) -> None:
    path.write_bytes(spoilt_array(path.read_bytes(), rng))


def h5_file(path: Path, rng: Rng) -> None:
    """HDF5 with an attribute, a shape, a type or a name changed."""
    with h5py.File(path, "a") as file:
        nodes: list[Any] = [file]
        file.visititems(lambda _, node: nodes.append(node))
        node = nodes[int(rng.integers(len(nodes)))]
        how = rng.random()
        if node.attrs and how < 0.4:
            key = list(node.attrs)[int(rng.integers(len(node.attrs)))]
            _set_attribute(node, key, odd_value(rng))
        elif isinstance(node, h5py.Dataset) and how < 0.9:
            _replace(file, node, rng)
        elif node.name != "/":
            del file[node.name]
        else:
            file.create_dataset(str(odd_value(rng))[:20].replace("\0", "") or "y", data=np.zeros((2, 2)))


def _set_attribute(node: Any, key: str, value: Any) -> None:
    try:
        node.attrs[key] = value
    except (TypeError, ValueError, OSError, RuntimeError, OverflowError):
        node.attrs[key] = "odd"


def _replace(file: Any, node: Any, rng: Rng) -> None:
    name, shape, dtype = node.name, list(node.shape), node.dtype
    if node.nbytes > 1 << 20:  # an earlier change has blown it up
        return
    values = touched(node[()], rng)
    del file[name]
    how = int(rng.integers(5))
    if how == 0:
        file.create_dataset(
            name,
            shape=[length * int(rng.choice([0, 1, 3, 10**7, rng.integers(99)])) for length in shape],
            dtype=dtype,
        )
    elif how == 1:
        file[name] = np.asarray(values).reshape(-1)
    elif how == 2:
        kinds = ["f2", "f8", ">f4", "i1", "i2", ">i4", "u8", "S4", "?"]
        file[name] = np.asarray(values).astype(str(rng.choice(kinds)))
    elif how == 3:
        big = rng.choice([np.nan, np.inf, 1e300, -1e18])
        file[name] = np.where(rng.random(np.shape(values)) < 0.2, big, np.asarray(values, dtype=float))
    else:
        file.create_dataset(name, data=values, chunks=True, compression="gzip") if shape else None


def parquet_file(path: Path, rng: Rng) -> None:
    """Parquet with its JSON metadata, a column's name, type or values changed."""
    table = pq.read_table(path, partitioning=None)
    metadata = dict(table.schema.metadata or {})
    keys = [key for key, value in metadata.items() if value[:1] in (b"{", b"[") and key != b"ARROW:schema"]
    if keys and rng.random() < 0.6:
        key = keys[int(rng.integers(len(keys)))]
        metadata[key] = dumped(spoilt_tree(json.loads(metadata[key]), rng), rng)
    else:
        table = _spoilt_column(table, rng)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def _spoilt_column(table: pa.Table, rng: Rng) -> pa.Table:
    at, how = int(rng.integers(table.num_columns)), int(rng.integers(5))
    name, n = table.column_names[at], table.num_rows
    if how == 0:
        return table.drop_columns([name])
    made: list[Any] = [
        pa.array(["x"] * n),
        pa.nulls(n),
        pa.array([[1.0]] * n),
        pa.array(np.where(rng.random(n) < 0.3, np.nan, 1e300)),
    ]
    return table.set_column(at, name, made[how - 1]) if how < 4 else table.append_column("more", made[3])


def safetensors_file(path: Path, rng: Rng) -> None:
    """The header's tree changed, the spec inside it included."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    held = header.get("__metadata__", {})
    if "xmil" in held and rng.random() < 0.7:
        held["xmil"] = dumped(spoilt_tree(json.loads(held["xmil"]), rng), rng).decode("utf-8", "replace")
        changed = dumped(header, np.random.default_rng(1))
    else:
        changed = dumped(spoilt_tree(header, rng), rng)
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + size :])


def torch_file(path: Path, rng: Rng) -> None:
    """Tensors of other shapes, types and strides, and values that are none."""
    held = torch.load(path, weights_only=True)
    keys = list(held) if isinstance(held, dict) else []
    if not keys or rng.random() < 0.2:
        return zip_file(path, rng)
    key, how = keys[int(rng.integers(len(keys)))], int(rng.integers(7))
    value = held[key]
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value = torch.from_numpy(touched(value.float().numpy(), rng)).to(value.dtype)
    if how == 6:
        held[key] = hostile(rng)
    elif not isinstance(value, torch.Tensor) or how == 0:
        held[key] = odd_value(rng)
    elif how == 1:
        held[key] = value.reshape(-1)
    elif how == 2:
        held[key] = torch.zeros(1).expand(10**5, 10**5)
    elif how == 3:
        held[key] = value.to(
            [torch.float16, torch.float64, torch.int8, torch.complex64][int(rng.integers(4))]
        )
    elif how == 4:
        held.pop(key)
    else:
        held[key], held[f"{key}.more"] = value, value
    buffer = io.BytesIO()
    torch.save(held, buffer, _use_new_zipfile_serialization=bool(rng.random() < 0.8))
    path.write_bytes(buffer.getvalue())
    return None


def text_file(path: Path, rng: Rng) -> None:
    """Lines of a text changed: values, keys, brackets."""
    lines = path.read_text().splitlines()
    at, how = int(rng.integers(len(lines))), int(rng.integers(4))
    key = lines[at].partition("=")[0]
    if how == 0:
        lines[at] = f"{key}= {json.dumps(odd_value(rng), default=str)}"
    elif how == 1:
        lines.insert(at, lines[at])
    elif how == 2:
        lines[at] = lines[at][: int(rng.integers(len(lines[at]) + 1))]
    else:
        lines[at] = f"{str(odd_value(rng))[:300]} = 1"
    path.write_text("\n".join(lines) + "\n", errors="replace")


def byte_file(path: Path, rng: Rng) -> None:
    path.write_bytes(damaged(path.read_bytes() or b"x", rng))


BY_SUFFIX: dict[str, Callable[[Path, Rng], None]] = {
    ".json": json_file,
    ".geojson": json_file,
    ".zarray": json_file,
    ".zgroup": json_file,
    ".zattrs": json_file,
    ".jsonl": lines_file,
    ".csv": table_file,
    ".npz": zip_file,
    ".npy": array_file,
    ".h5": h5_file,
    ".parquet": parquet_file,
    ".safetensors": safetensors_file,
    ".pt": torch_file,
    ".toml": text_file,
}


def spoil(golden: Path, copy: Path, rng: Rng) -> Path:
    """A damaged copy of a file or folder: by its structure in most cases, by its bytes in the others."""
    if golden.is_dir():
        shutil.copytree(golden, copy, symlinks=True)
        members = sorted(p for p in copy.rglob("*") if p.is_file() and p.stat().st_size and p.name != ".lock")
        member = members[int(rng.integers(len(members)))]
    else:
        member = Path(shutil.copy(golden, copy))
    mend = BY_SUFFIX.get(member.suffix or member.name, byte_file)
    try:
        if rng.random() < 0.3:
            byte_file(member, rng)
        else:  # libraries may crash on what bytes have damaged, so no structure is changed after that
            for _ in range(int(rng.geometric(0.6))):
                mend(member, rng)
    except Exception:  # a second change of what the first one broke
        byte_file(member, rng)
    return copy
