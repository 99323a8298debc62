"""Safe opening of what feature files are made of: HDF5, torch, NumPy, zarr, CSV, folders.

A container knows names, shapes and types without reading features, refuses whatever could run code, leave the
folder or allocate more than the file can hold, and hands out rows on demand.
"""

from __future__ import annotations

from xmil.data.containers.container import ArrayInfo, Contents, Rows
from xmil.data.containers.sniff import open_contents, sniff

__all__ = ["ArrayInfo", "Contents", "Rows", "open_contents", "sniff"]
