"""CLAM (Lu et al. 2021, arXiv 2004.09666) and files of the same shape.

`h5_files/<slide>.h5` holds `features` and `coords` without attributes, `pt_files/<slide>.pt` the features
alone, `patches/<slide>.h5` the corners with the patch edge at a pyramid level. Old files store images under
`imgs` and corners divided by the downsample. prov-gigapath (Xu et al. 2024) writes the first layout too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.data.containers import Contents, open_contents
from xmil.data.containers.arrays import TENSOR
from xmil.data.header import (
    Ask,
    Header,
    find_beside,
    index_beside,
    patch_table,
    place,
    place_by_gap,
    positive,
    slide_name,
    smallest_gap,
)
from xmil.data.readers import reader
from xmil.data.readers.trident import corners

_FOREIGN = {"patch_size_level0", "patch_spacing_um_px"}  # attributes of TRIDENT and WSInfer
LEVEL0_PIXELS = "the attribute patch_size, taken as level-0 pixels"
_GIGAPATH_EDGE_UM = 128.0  # 256 px at 20x, which is 0.5 µm per pixel


def _coords_attrs(contents: Contents) -> Any:
    return contents.arrays["coords"].attrs if "coords" in contents else {}


def _claims(contents: Contents) -> bool:
    """Features with corners but no other tool's attributes, or a tensor with such a file beside it."""
    if contents.kind == "h5":
        foreign = {*_FOREIGN, "patch_level"} & set(_coords_attrs(contents))
        return "features" in contents and "coords" in contents and not foreign and "imgs" not in contents
    if list(contents.arrays) != [TENSOR] or index_beside(contents.path) or patch_table(contents.path):
        return False
    return _h5_beside(contents.path) is not None


@reader(
    "clam-patches",
    kinds=("h5",),
    claims=lambda contents: "patch_level" in (about := set(_coords_attrs(contents))) and not about & _FOREIGN,
)
def read_patches(contents: Contents, ask: Ask) -> Header:
    """Read corners in level-0 pixels; the edge is that at `patch_level` times the truncated downsample."""
    features = contents.rows("features") if "features" in contents else None
    header = Header(contents.path, "clam-patches", features, slide_id=slide_name(contents.path))
    edge, notes = _patch_edge(_coords_attrs(contents), contents.path)
    return place(header, corners(contents), edge=edge, ask=ask, notes=notes)


@reader("clam", kinds=("h5", "pt"), claims=_claims)
def read_features(contents: Contents, ask: Ask) -> Header:
    """Read features and level-0 corners; the edge comes from `patches/`, or from the coordinate gap."""
    rows = contents.rows(TENSOR if contents.kind == "pt" else "features")
    header = Header(contents.path, "clam", rows, slide_id=slide_name(contents.path))
    if contents.kind == "pt":
        return _join_h5(header, ask)
    edge = int(positive(_coords_attrs(contents).get("patch_size")) or 0)  # the file names no pyramid level
    coords = corners(contents)
    if not edge or ask.patch_size is not None:
        return _with_edge(header, coords, contents, ask=ask)
    note = f"patch edge {edge} from the attribute patch_size, taken as level-0 pixels"
    guess = None if smallest_gap(coords) in (None, edge) else LEVEL0_PIXELS
    return place(header, coords, edge=edge, guess=guess, ask=ask, notes=[note])


@reader("gigapath", kinds=("h5",), claims=lambda _: False)
def read_gigapath(contents: Contents, ask: Ask) -> Header:
    """Read the same layout, by format= only: patches have 256 px at 20x, so the mpp gives the edge."""
    header = Header(contents.path, "gigapath", contents.rows("features"), slide_id=slide_name(contents.path))
    if ask.mpp is None or ask.patch_size is not None:
        return _with_edge(header, corners(contents), contents, ask=ask)
    edge = round(_GIGAPATH_EDGE_UM / ask.mpp)
    note = f"patch edge {edge} from 256 px at 20x and mpp {ask.mpp:g}"
    return place(header, corners(contents), edge=edge, ask=ask, notes=[note])


@reader("clam-images", kinds=("h5",), claims=lambda contents: "imgs" in contents and "coords" in contents)
def read_images(contents: Contents, ask: Ask) -> Header:
    """Read old CLAM files with patch images, whose corners are divided by the downsample."""
    images = contents.arrays["imgs"]
    scale = _pair(images.attrs.get("downsample"), contents.path)
    edge = images.shape[1] * scale[0] if len(images.shape) == 4 else None
    header = Header(contents.path, "clam-images", None, slide_id=slide_name(contents.path))
    note = f"level-0 corners: stored ones times the downsample {scale[0]:g}"
    return place(header, corners(contents) * scale, edge=edge, ask=ask, notes=[note])


def _join_h5(header: Header, ask: Ask) -> Header:
    """Add the corners of the `.h5` of the same name to a `.pt`, by row order."""
    beside = _h5_beside(header.path)
    if beside is None:
        raise FileError(
            f"{header.path}: has no h5_files/{header.slide_id}.h5 beside it; read it with `format='plain'`."
        )
    contents = open_contents(beside)
    coords = corners(contents)
    if len(coords) != len(header):
        raise FileError(
            f"{header.path}: has {len(header)} rows but {beside} has {len(coords)} coordinates; they come "
            "from different runs. Read the .h5, or this file alone with `format='plain'`."
        )
    note = f"coordinates of {beside.parent.name}/{beside.name}, joined by row order"
    return _with_edge(replace(header, inferred=(*header.inferred, note)), coords, contents, ask=ask)


def _h5_beside(path: Path) -> Path | None:
    name = f"{slide_name(path)}.h5"
    return find_beside(path, [f"h5_files/{name}", name], levels=1)


def _with_edge(header: Header, coords: npt.NDArray[Any], contents: Contents, *, ask: Ask) -> Header:
    edge, notes = _sibling_edge(header.path, coords) if ask.patch_size is None else (None, [])
    if edge is None:
        return place_by_gap(header, coords, contents, ask=ask)
    return place(header, coords, edge=edge, ask=ask, notes=notes)


def _sibling_edge(path: Path, coords: npt.NDArray[Any]) -> tuple[float | None, list[str]]:
    """Take the edge from `patches/<slide>.h5` if its corners are the same."""
    name = slide_name(path)
    beside = find_beside(path, [f"patches/{name}.h5", f"patches/{name}_patches.h5"], levels=2)
    if beside is None or beside.resolve() == path.resolve():
        return None, []
    try:
        contents = open_contents(beside)
        same = np.array_equal(corners(contents), coords)
        about = _coords_attrs(contents)
        edge = (
            float(about["patch_size_level0"])
            if "patch_size_level0" in about
            else _patch_edge(about, beside)[0]
        )
    except (FileError, KeyError, TypeError, ValueError):
        return None, []
    return (edge, [f"patch edge {edge:g} from patches/{beside.name}"]) if same and edge else (None, [])


def _patch_edge(about: Any, path: Path) -> tuple[float | None, list[str]]:
    try:
        size = int(about["patch_size"])
        scale = int(_pair(about.get("downsample", 1), path)[0])
        custom = int(about.get("custom_downsample") or 1)
    except (KeyError, TypeError, ValueError):
        return None, []
    edge = size * scale * custom
    source = f"{size} px at level {about.get('patch_level')} times the downsample {scale}"
    source += f" and the custom downsample {custom}" if custom > 1 else ""
    return edge, [f"patch edge {edge} from {source}"]


def _pair(value: Any, path: Path) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(value if value is not None else 1, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.size not in (1, 2) or not np.all((numbers >= 1) & (numbers < 1e6)):
        raise FileError(f"{path}: the attribute 'downsample' is damaged; cut the patches again.")
    return numbers if numbers.size == 2 else np.repeat(numbers, 2)
