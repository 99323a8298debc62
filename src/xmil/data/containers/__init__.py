"""Safe opening of what feature files are made of: HDF5, torch, NumPy, zarr, CSV, folders.

A container knows names, shapes and types without reading features, refuses whatever could run code, leave the
folder or allocate more than the file can hold, and hands out rows on demand.
"""

from __future__ import annotations

import zipfile
from importlib import import_module
from pathlib import Path

from xmil.core.errors import FileError, absent, unreadable
from xmil.data.containers.container import MARKS, ArrayInfo, Contents, Rows

__all__ = ["CONTAINERS", "ArrayInfo", "Contents", "Rows", "open_contents", "sniff"]

_MAGIC = {
    b"\x89HDF\r\n\x1a\n": "h5",
    b"\x93NUMPY": "npy",
    b"PAR1": "parquet",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"\x89PNG", b"\xff\xd8\xff"), "image"),
}
_SCANNERS = (".svs", ".ndpi", ".mrxs", ".scn", ".tif", ".tiff", ".bif", ".vms", ".vmu", ".svslide", ".dcm")
_SUFFIXES = {
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "pt"),
    **dict.fromkeys((".csv", ".tsv", ".txt"), "csv"),
    **dict.fromkeys((*_SCANNERS, ".qptiff", ".png", ".jpg", ".jpeg"), "image"),
    **dict.fromkeys((".h5", ".hdf5"), "h5"),
    **{f".{kind}": kind for kind in ("npy", "npz", "json", "parquet", "safetensors")},
}
CONTAINERS = {
    "h5": ("hdf5", "H5Contents"),
    "pt": ("arrays", "TorchContents"),
    "npy": ("arrays", "NpyContents"),
    "npz": ("arrays", "NpzContents"),
    "zarr": ("stores", "ZarrContents"),
    "csv": ("stores", "CsvContents"),
    "folder": ("stores", "FolderContents"),
}
_OTHERS = {
    "parquet": "a Parquet table, not a feature file; explanations are read by xmil.Explanation.load.",
    "safetensors": "a safetensors file, not a feature file; models are read by xmil.load_model.",
    "image": "an image or slide, not a feature file; cut and embed it first.",
    "json": "a JSON file, not a feature file.",
    "unknown": "neither HDF5, torch, NumPy, zarr nor CSV: its layout is unknown, or it is damaged; copy it "
    "again.",
}


def sniff(path: Path) -> str:
    """The kind of a path: h5, pt, npz, npy, zarr, csv, parquet, safetensors, json, image, folder, unknown."""
    if path.is_dir():
        return "zarr" if any((path / mark).is_file() for mark in MARKS) else "folder"
    if _is_special(path):  # opening a pipe would wait for ever
        raise FileError(absent(path))
    try:
        with open(path, "rb") as stream:
            head = stream.read(16)
    except (OSError, ValueError) as error:
        raise FileError(unreadable(path, error)) from None
    if not head:
        raise FileError(f"{path}: is empty (0 bytes); write or copy it again.")
    by_content = _zip_kind(path) if head.startswith(b"PK") else None
    by_content = by_content or next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None)
    return by_content or _SUFFIXES.get(path.suffix.lower(), "unknown")


def open_contents(path: Path) -> Contents:
    """The container of a feature file; an error that names what else the path may be."""
    kind = sniff(path)
    if kind not in CONTAINERS:
        raise FileError(f"{path}: {_OTHERS[kind]}")
    module, name = CONTAINERS[kind]
    contents: Contents = getattr(import_module(f"xmil.data.containers.{module}"), name)(path)
    return contents


def _is_special(path: Path) -> bool:
    try:
        return path.exists() and not path.is_file()
    except (OSError, ValueError):  # opening it says what is wrong
        return False


def _zip_kind(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError):
        return None
    if any(name.endswith("data.pkl") for name in names):
        return "pt"
    return "npz" if any(name.endswith(".npy") for name in names) or path.suffix == ".npz" else None
