"""A reader: HDF5 files with `extra_features`."""

from __future__ import annotations

from typing import Any

from xmil.data import Ask, Header, reader


@reader("extra", kinds=("h5",), claims=lambda found: "extra_features" in found)
def read(found: Any, ask: Ask) -> Header:
    """Features and corners under names of their own."""
    name, edge = found.path.stem, ask.patch_size or 64
    return Header(
        found.path, "extra", found.rows("extra_features"), found.read("xy"), patch_size=edge, slide_id=name
    )
