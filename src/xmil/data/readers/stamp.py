"""STAMP 1 and 2 (El Nahhas et al. 2024, arXiv 2312.10944) and marugoto.

`<slide>.h5` with `feats` (float16) and `coords`. STAMP 2 stores microns and its tile size in root attributes;
before, coordinates had a stride of 224 for tiles of 256 µm, and `augmented` marks rows that are copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from xmil.core.bag import IntArray
from xmil.core.errors import FileError
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, placed, slide_name, smallest_gap
from xmil.data.readers import reader
from xmil.data.readers.trident import corners

_OLD_STRIDE, _OLD_TILE_UM = 224.0, 256.0


@reader("stamp", kinds=("h5",), claims=lambda contents: "stamp_version" in contents.attrs)
def read(contents: Contents, ask: Ask) -> Header:
    """STAMP 2: microns from the top left; the slide's mpp turns them into level-0 pixels."""
    level = contents.attrs.get("feat_type", "tile")
    if level != "tile":
        raise FileError(
            f"{contents.path}: holds one {level}-level embedding, not a bag; give the tile features."
        )
    header = _header(contents, "stamp", version=str(contents.attrs["stamp_version"]))
    edge = contents.attrs.get("tile_size_um", contents.attrs.get("tile_size"))
    if "coords" not in contents:
        return replace(header, **placed(header, None, "um", edge=None, ask=ask))
    unit = "um" if contents.attrs.get("unit", "um") == "um" else "unknown"
    return replace(
        header, **placed(header, _original_corners(contents, header), unit, edge=_number(edge), ask=ask)
    )


def _claims_old(contents: Contents) -> bool:
    return "feats" in contents and "stamp_version" not in contents.attrs


@reader("marugoto", kinds=("h5",), claims=_claims_old)
def read_old(contents: Contents, ask: Ask) -> Header:
    """STAMP 1 and marugoto: a stride of about 224 stands for 256 µm; augmented rows are left out."""
    header = _header(contents, "marugoto", version=None)
    if "coords" not in contents:
        return replace(header, **placed(header, None, "um", edge=None, ask=ask))
    coords = _original_corners(contents, header)
    stride = smallest_gap(coords)
    if stride is None or abs(stride - _OLD_STRIDE) > 2:
        note = f"coordinates of an unknown unit (stride {stride}, not about 224)"
        header = replace(header, inferred=(*header.inferred, note))
        return replace(header, **placed(header, coords, "unknown", edge=None, ask=ask))
    note = f"microns from the stride of {stride}: 224 stands for 256 µm"
    header = replace(header, inferred=(*header.inferred, note))
    microns = coords / _OLD_STRIDE * _OLD_TILE_UM
    return replace(header, **placed(header, microns, "um", edge=_OLD_TILE_UM, ask=ask))


def _header(contents: Contents, name: str, *, version: str | None) -> Header:
    rows = contents.rows("feats")
    keep, note = _originals(contents, rows.shape[0])
    extractor = contents.attrs.get("extractor")
    return Header(
        contents.path,
        name,
        rows,
        slide_id=slide_name(contents.path),
        encoder=None if extractor is None else str(extractor),
        version=version,
        keep=keep,
        inferred=(note,) if note else (),
        extra={key: contents.attrs[key] for key in ("tile_size_px", "code_hash") if key in contents.attrs},
    )


def _originals(contents: Contents, n: int) -> tuple[IntArray | None, str | None]:
    if "augmented" not in contents:
        return None, None
    flags = contents.read("augmented")
    if flags.shape != (n,):
        raise FileError(f"{contents.path}: 'augmented' must have {n} rows. Got shape {flags.shape} instead.")
    keep = np.flatnonzero(flags == 0).astype(np.int64)
    dropped = n - len(keep)
    return (keep, f"left out {dropped} augmented rows of {n}") if dropped else (None, None)


def _original_corners(contents: Contents, header: Header) -> Any:
    coords = corners(contents)
    rows = header.features.shape[0] if header.features is not None else 0
    if coords.shape != (rows, 2):
        raise FileError(
            f"{contents.path}: has {rows} feature rows but coordinates of shape {coords.shape}; "
            "they must match."
        )
    return coords if header.keep is None else coords[header.keep]


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < np.inf else None
