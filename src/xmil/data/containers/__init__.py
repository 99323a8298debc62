"""Safe opening of what feature files are made of: HDF5, torch, NumPy, zarr, CSV, folders.

A container knows names, shapes and types without reading features, refuses whatever could run code, leave the
folder or allocate more than the file can hold, and hands out rows on demand.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from xmil.core.errors import FileError, absent, unreadable
from xmil.data.containers.container import ArrayInfo, Contents, Rows

__all__ = ["ArrayInfo", "Contents", "Rows", "open_contents", "sniff"]


_TORCH = {".pt", ".pth", ".bin", ".ckpt"}
_TABLES = {".csv", ".tsv", ".txt"}
_IMAGES = {
    ".svs",
    ".ndpi",
    ".mrxs",
    ".scn",
    ".tif",
    ".tiff",
    ".bif",
    ".vms",
    ".vmu",
    ".svslide",
    ".dcm",
    ".qptiff",
}
_IMAGES |= {".png", ".jpg", ".jpeg"}


def sniff(path: Path) -> str:
    """The kind of a path: h5, pt, npz, npy, zarr, csv, parquet, safetensors, json, image, folder, unknown."""
    if path.is_dir():
        marks = (".zgroup", ".zarray", ".zmetadata", "zarr.json")
        return "zarr" if any((path / mark).is_file() for mark in marks) else "folder"
    if _is_special(path):  # opening a pipe would wait for ever
        raise FileError(absent(path))
    try:
        with open(path, "rb") as stream:
            head = stream.read(16)
    except (OSError, ValueError) as error:
        raise FileError(unreadable(path, error)) from None
    if not head:
        raise FileError(f"{path}: is empty (0 bytes); write or copy it again.")
    return _by_magic(path, head) or _by_suffix(path)


def _is_special(path: Path) -> bool:
    try:
        return path.exists() and not path.is_file()
    except (OSError, ValueError):  # opening it says what is wrong
        return False


def open_contents(path: Path) -> Contents:
    """The container of a feature file; an error that names what else the path may be."""
    kind = sniff(path)
    if kind == "h5":
        from xmil.data.containers.hdf5 import H5Contents

        return H5Contents(path)
    if kind == "pt":
        from xmil.data.containers.arrays import TorchContents

        return TorchContents(path)
    if kind in ("npy", "npz"):
        from xmil.data.containers.arrays import NpyContents, NpzContents

        return NpyContents(path) if kind == "npy" else NpzContents(path)
    from xmil.data.containers.stores import CsvContents, FolderContents, ZarrContents

    if kind == "zarr":
        return ZarrContents(path)
    if kind == "csv":
        return CsvContents(path)
    if kind == "folder":
        return FolderContents(path)
    raise FileError(f"{path}: {_WHAT_ELSE.get(kind, _WHAT_ELSE['unknown'])}")


_WHAT_ELSE = {
    "parquet": "a Parquet table, not a feature file; explanations are read by xmil.Explanation.load.",
    "safetensors": "a safetensors file, not a feature file; models are read by xmil.load_model.",
    "image": "an image or slide, not a feature file; cut and embed it first.",
    "json": "a JSON file, not a feature file.",
    "unknown": "neither HDF5, torch, NumPy, zarr nor CSV; it is of an unknown layout, or damaged and to be "
    "copied again.",
}


def _by_magic(path: Path, head: bytes) -> str | None:
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "h5"
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"\x89PNG", b"\xff\xd8\xff")):
        return "image"
    return _zip_kind(path) if head.startswith(b"PK") else None


def _zip_kind(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
        return None
    if any(name.endswith("data.pkl") for name in names):
        return "pt"
    return "npz" if any(name.endswith(".npy") for name in names) or path.suffix == ".npz" else None


def _by_suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in _TORCH:
        return "pt"
    if suffix in _TABLES:
        return "csv"
    if suffix in _IMAGES:
        return "image"
    kinds = {".h5": "h5", ".hdf5": "h5", ".npy": "npy", ".npz": "npz", ".json": "json", ".parquet": "parquet"}
    return {**kinds, ".safetensors": "safetensors"}.get(suffix, "unknown")
