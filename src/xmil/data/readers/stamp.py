"""STAMP 1 and 2 (El Nahhas et al. 2024, arXiv 2312.10944) and marugoto.

`<slide>.h5` with `feats` (float16) and `coords`. STAMP 2 stores microns and its tile size in root attributes;
STAMP 1 has coordinates with a stride of 224 for tiles of 256 µm, and `augmented` marks copied rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xmil.core.errors import FileError
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, place, positive, slide_name, smallest_gap
from xmil.data.readers import reader
from xmil.data.readers.trident import corners

_OLD_STRIDE, _OLD_TILE_UM = 224.0, 256.0


@reader("stamp", kinds=("h5",), claims=lambda contents: "stamp_version" in contents.attrs)
def read(contents: Contents, ask: Ask) -> Header:
    """Read STAMP 2: microns from the top left, which the slide's mpp converts to level-0 pixels."""
    level = contents.attrs.get("feat_type", "tile")
    if level != "tile":
        raise FileError(
            f"{contents.path}: holds one {level}-level embedding, not a bag; use the tile features."
        )
    header = _header(contents, "stamp", version=str(contents.attrs["stamp_version"]))
    if "coords" not in contents:
        return place(header, None, ask=ask)
    edge = positive(contents.attrs.get("tile_size_um", contents.attrs.get("tile_size")))
    unit = "um" if contents.attrs.get("unit", "um") == "um" else "unknown"
    return place(header, _original_corners(contents, header), unit, edge=edge, ask=ask)


@reader(
    "marugoto",
    kinds=("h5",),
    claims=lambda contents: "feats" in contents and "stamp_version" not in contents.attrs,
)
def read_old(contents: Contents, ask: Ask) -> Header:
    """Read STAMP 1 and marugoto: a stride of about 224 means 256 µm; leave out augmented rows."""
    header = _header(contents, "marugoto", version=None)
    if "coords" not in contents:
        return place(header, None, ask=ask)
    coords = _original_corners(contents, header)
    stride = smallest_gap(coords)
    if stride is None or abs(stride - _OLD_STRIDE) > 2:
        note = f"coordinates of an unknown unit (stride {stride}, not about 224)"
        return place(header, coords, "unknown", ask=ask, notes=[note])
    note = f"microns from the stride of {stride}: 224 means 256 µm"
    microns = coords / _OLD_STRIDE * _OLD_TILE_UM
    guess = f"the stride of {stride}, which in STAMP 1 means 256 µm"
    return place(header, microns, "um", edge=_OLD_TILE_UM, guess=guess, ask=ask, notes=[note])


def _header(contents: Contents, name: str, *, version: str | None) -> Header:
    rows, keep, notes = contents.rows("feats"), None, []
    n = rows.shape[0]
    if "augmented" in contents:
        flags = contents.read("augmented")
        if flags.shape != (n,):
            raise FileError(
                f"{contents.path}: 'augmented' must have {n} rows. Got shape {flags.shape} instead."
            )
        if flags.any():
            keep = np.flatnonzero(flags == 0).astype(np.int64)
            notes = [f"left out {n - len(keep)} augmented rows of {n}"]
    extractor = contents.attrs.get("extractor")
    return Header(
        contents.path,
        name,
        rows,
        slide_id=slide_name(contents.path),
        encoder=None if extractor is None else str(extractor),
        version=version,
        keep=keep,
        inferred=tuple(notes),
        extra={key: contents.attrs[key] for key in ("tile_size_px", "code_hash") if key in contents.attrs},
    )


def _original_corners(contents: Contents, header: Header) -> Any:
    coords = corners(contents)
    rows = header.features.shape[0] if header.features is not None else 0
    if coords.shape != (rows, 2):
        raise FileError(
            f"{contents.path}: has {rows} feature rows but coordinates of shape {coords.shape}; "
            "they must match."
        )
    return coords if header.keep is None else coords[header.keep]
