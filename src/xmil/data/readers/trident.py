"""TRIDENT (Zhang, Vaidya et al. 2025, arXiv 2502.06750), and what this package writes.

`features_<encoder>/<slide>.h5` with `features` (n, d) and `coords` (n, 2), or `patches/<slide>_patches.h5`
with `coords` alone: level-0 top-left corners, the edge in the attribute `patch_size_level0`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.text import parse_json
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, placed, slide_name, stored_extras
from xmil.data.readers import reader

OURS = "xmil"  # the root attribute that carries what TRIDENT's layout has no place for


def _claims(contents: Contents) -> bool:
    return (
        "coords" in contents and "patch_size_level0" in contents.arrays["coords"].attrs
    ) or OURS in contents.attrs


@reader("trident", kinds=("h5",), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Features and corners as stored; magnifications are buckets, so no mpp is made of them."""
    ours = _ours(contents)
    about = contents.arrays["coords"].attrs if "coords" in contents else {}
    features = contents.rows("features") if "features" in contents else None
    stored = contents.arrays["features"].attrs if features is not None else {}
    names = [name for name in contents.arrays if name.startswith("columns/")]
    stated = ("level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height")
    extra = {key: about[key] for key in (*stated, "patch_size") if about.get(key) is not None}
    encoder = stored.get("encoder")
    header = Header(
        path=contents.path,
        format="trident",
        features=features,
        slide_id=ours.get("slide_id") or slide_name(contents.path),
        encoder=str(encoder) if encoder not in (None, "") else None,
        mpp=_positive(about.get("mpp") or ours.get("mpp")),
        version=ours.get("version"),
        inferred=tuple(map(str, ours.get("inferred", ()))),
        columns={name.removeprefix("columns/"): contents.read(name) for name in names},
        extra={**extra, **(ours.get("extra") or {})},
    )
    header = replace(header, extras=stored_extras(contents, len(header)))
    return replace(header, **_place(contents, header, ours=ours, ask=ask))


def _place(contents: Contents, header: Header, *, ours: dict[str, Any], ask: Ask) -> dict[str, Any]:
    if "coords" not in contents:
        if "raw_coords" in contents:
            edge = _positive(ours.get("raw_edge"))
            return placed(header, contents.read("raw_coords"), str(ours.get("unit")), edge=edge, ask=ask)
        return placed(header, None, "px", edge=None, ask=ask)
    edge = _positive(contents.arrays["coords"].attrs.get("patch_size_level0"))
    fields = placed(header, corners(contents), "px", edge=edge, ask=ask)
    if "raw_coords" in contents:
        raw, unit = contents.read("raw_coords"), ours.get("unit")
        where = replace(fields["patches"], raw_coords=raw, unit=unit, raw_edge=ours.get("raw_edge"))
        fields["patches"] = where
    return fields


def corners(contents: Contents) -> npt.NDArray[Any]:
    """`coords` as (n, 2): a leading axis of 1 is dropped, (0,) is the empty bag."""
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


def _positive(value: Any) -> float | None:
    """A stored number above zero, or None for anything else."""
    try:
        number = float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError):
        return None
    return number if 0 < number < np.inf else None
