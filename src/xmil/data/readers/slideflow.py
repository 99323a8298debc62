"""Slideflow (Dolezal et al. 2024, arXiv 2304.04142).

`<slide>.pt` with the features, `<slide>.index.npz` (or `.npy`) with the tile **centres** in level-0 pixels,
and `bags_config.json` with the tile size in microns, or as a magnification such as `'40x'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xmil.core.errors import FileError
from xmil.data.containers import Contents, open_contents
from xmil.data.containers.arrays import TENSOR
from xmil.data.header import Ask, Header, find_beside, index_beside, place, read_json, slide_name
from xmil.data.readers import reader


def _claims(contents: Contents) -> bool:
    return list(contents.arrays) == [TENSOR] and index_beside(contents.path) is not None


@reader("slideflow", kinds=("pt",), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read features; corners are centres minus half an edge, the edge is the tile's microns over the mpp."""
    config = read_json(find_beside(contents.path, ["bags_config.json"], levels=0))
    extractor = config.get("extractor")
    if isinstance(extractor, dict):
        extractor = extractor.get("tag") or extractor.get("class")
    header = Header(
        contents.path,
        "slideflow",
        contents.rows(TENSOR),
        slide_id=slide_name(contents.path),
        encoder=_text(extractor),
        version=_text(config.get("slideflow_version")),
        extra={key: config[key] for key in ("tile_px", "tile_um") if key in config},
    )
    size, edge, notes = config.get("tile_um"), None, []
    if isinstance(size, int | float) and size > 0:
        edge = float(size)
    elif size is not None:
        notes = [f"tile size {size!r} is a magnification, which does not give a level-0 edge"]
    elif not config:
        notes = ["no bags_config.json with the tile size beside the bag"]
    return place(header, _centres(contents.path), "px-centre", edge=edge, ask=ask, notes=notes)


def _centres(path: Path) -> Any:
    beside = index_beside(path)
    if beside is None:
        return None
    index = open_contents(beside)
    name = next(iter(index.arrays), None)
    if name is None:
        raise FileError(f"{beside}: holds no array; Slideflow stores the tile locations as 'arr_0'.")
    return index.read("arr_0" if "arr_0" in index else name)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
