"""TRIDENT (Zhang, Vaidya et al. 2025, arXiv 2502.06750), and what this package writes.

`features_<encoder>/<slide>.h5` with `features` (n, d) and `coords` (n, 2), or `patches/<slide>_patches.h5`
with `coords` alone: level-0 top-left corners, the edge in the attribute `patch_size_level0`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.text import parse_json
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, place, positive, slide_name, stored_extras
from xmil.data.readers import reader

OURS = "xmil"  # the root attribute with what TRIDENT's layout cannot store
STATED = ("level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height")


def _claims(contents: Contents) -> bool:
    return (
        "coords" in contents and "patch_size_level0" in contents.arrays["coords"].attrs
    ) or OURS in contents.attrs


@reader("trident", kinds=("h5",), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read features and corners; magnifications are too coarse to infer an mpp."""
    ours = _ours(contents)
    about = contents.arrays["coords"].attrs if "coords" in contents else {}
    features = contents.rows("features") if "features" in contents else None
    stored = contents.arrays["features"].attrs if features is not None else {}
    names = [name for name in contents.arrays if name.startswith("columns/")]
    extra = {key: about[key] for key in (*STATED, "patch_size") if about.get(key) is not None}
    encoder = stored.get("encoder")
    header = Header(
        path=contents.path,
        format="trident",
        features=features,
        slide_id=ours.get("slide_id") or slide_name(contents.path),
        encoder=str(encoder) if encoder not in (None, "") else None,
        mpp=positive(about.get("mpp") or ours.get("mpp")),
        version=ours.get("version"),
        inferred=tuple(map(str, ours.get("inferred", ()))),
        columns={name.removeprefix("columns/"): contents.read(name) for name in names},
        extra={**extra, **(ours.get("extra") or {})},
    )
    header = replace(header, extras=stored_extras(contents, len(header)))
    raw = contents.read("raw_coords") if "raw_coords" in contents else None
    if "coords" not in contents:
        return place(header, raw, str(ours.get("unit")), edge=positive(ours.get("raw_edge")), ask=ask)
    guess = ours.get("edge_guess")
    header = place(
        header,
        corners(contents),
        edge=positive(about.get("patch_size_level0")),
        guess=None if guess is None else str(guess),
        ask=ask,
    )
    if raw is None:
        return header
    unit, edge = ours.get("unit"), ours.get("raw_edge")
    return replace(header, patches=replace(header.patches, raw_coords=raw, unit=unit, raw_edge=edge))


def corners(contents: Contents) -> npt.NDArray[Any]:
    """`coords` as (n, 2), without a leading axis of 1; (0,) is the empty bag."""
    coords = contents.read("coords")
    if coords.ndim == 3 and coords.shape[0] == 1:
        coords = coords[0]
    return coords.reshape(0, 2) if coords.size == 0 else coords


def _ours(contents: Contents) -> dict[str, Any]:
    text = contents.attrs.get(OURS)
    if text is None:
        return {}
    try:
        loaded = parse_json(text)
    except (TypeError, ValueError):
        raise FileError(f"{contents.path}: the attribute {OURS!r} is damaged; write the bag again.") from None
    return loaded if isinstance(loaded, dict) else {}
