"""slide2vec: `tile_embeddings/<slide>.pt` or `.npz`, recognised by `<slide>.meta.json` beside it.

Coordinates are in `tiles/<slide>.coordinates.npz` (`x`, `y`: level-0 corners), with the slide's size and
spacing in `tiles/<slide>.coordinates.meta.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import LEVEL0
from xmil.core.errors import FileError
from xmil.data.containers import Contents, open_contents
from xmil.data.containers.arrays import TENSOR
from xmil.data.header import Ask, Header, find_beside, place, positive, read_json, slide_name
from xmil.data.readers import reader

TILES, REGIONS = "tile_embeddings", "hierarchical_embeddings"


def _claims(contents: Contents) -> bool:
    named = list(contents.arrays) == [TENSOR] if contents.kind == "pt" else "features" in contents
    return named and _about(contents.path).get("artifact_type") in (TILES, REGIONS)


@reader("slide2vec", kinds=("pt", "npz"), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read features with level-0 corners; edge, mpp and slide size come from the files of the tiling."""
    about, tiling = _about(contents.path), read_json(_beside(contents.path, "coordinates.meta.json"))
    if about.get("artifact_type") == REGIONS:
        raise FileError(
            f"{contents.path}: holds features of regions (regions, tiles, width), not of patches; embed "
            "tiles with slide2vec, or save the tiles of all regions as one (n, width) array."
        )
    slide = tiling.get("slide") or {}
    size: Any = slide.get("dimensions")
    sized = isinstance(size, list) and len(size) == 2 and all(isinstance(v, int) and v > 0 for v in size)
    header = Header(
        contents.path,
        "slide2vec",
        contents.rows(TENSOR if contents.kind == "pt" else "features"),
        slide_id=slide_name(contents.path),
        encoder=str(about["encoder_name"]) if about.get("encoder_name") else None,
        mpp=positive(slide.get("base_spacing_um")),
        extra=dict(zip(LEVEL0, size, strict=True)) if sized else {},
    )
    edge = positive(about.get("tile_size_lv0") or (tiling.get("tiling") or {}).get("tile_size_lv0"))
    return place(header, _corners(contents), edge=edge, ask=ask)


def _corners(contents: Contents) -> npt.NDArray[np.int64] | None:
    """Read corners in the order of the features, matched by tile number if both files have them."""
    beside = _beside(contents.path, "coordinates.npz")
    if beside is None:
        return None
    stored = open_contents(beside)
    if "x" not in stored or "y" not in stored:
        raise FileError(f"{beside}: holds no 'x' and 'y'; slide2vec stores the corners of tiles there.")
    corners = np.stack([stored.read("x"), stored.read("y")], axis=1)
    if "tile_index" not in contents or "tile_index" not in stored:
        return corners
    row_of = {int(tile): row for row, tile in enumerate(stored.read("tile_index"))}
    tiles = [int(tile) for tile in contents.read("tile_index")]
    if missing := [tile for tile in tiles if tile not in row_of]:
        raise FileError(
            f"{beside}: lacks the tile {missing[0]}, for which {contents.path.name} has features."
        )
    return np.asarray(corners[[row_of[tile] for tile in tiles]], dtype=np.int64).reshape(-1, 2)


def _about(path: Path) -> dict[str, Any]:
    """slide2vec's description of the features."""
    return read_json(find_beside(path, [f"{slide_name(path)}.meta.json"], levels=0))


def _beside(path: Path, ending: str) -> Path | None:
    name = f"{slide_name(path)}.{ending}"
    by_class = path.absolute().parent.parent.name == TILES  # tile_embeddings/<annotation>/
    return find_beside(path, [name, f"tiles/{name}"], levels=2 if by_class else 1)
