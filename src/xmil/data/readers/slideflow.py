"""Slideflow (Dolezal et al. 2024, arXiv 2304.04142).

`<slide>.pt` with the features, `<slide>.index.npz` (or `.npy`) with the tile **centres** in level-0 pixels,
and `bags_config.json` with the tile size in microns, or as a magnification such as `'40x'`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from xmil.core.errors import FileError
from xmil.core.text import parse_json
from xmil.data.containers import Contents, open_contents
from xmil.data.containers.arrays import TENSOR
from xmil.data.header import Ask, Header, find_beside, index_beside, placed, slide_name
from xmil.data.readers import reader


def _claims(contents: Contents) -> bool:
    return list(contents.arrays) == [TENSOR] and index_beside(contents.path) is not None


@reader("slideflow", kinds=("pt",), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Corners are the centres less half an edge, and the edge is the tile's microns by the slide's mpp."""
    config = _config(contents.path)
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
    edge, note = _edge_um(config)
    header = replace(header, inferred=(note,) if note else ())
    return replace(header, **placed(header, _centres(contents.path), "px-centre", edge=edge, ask=ask))


def _centres(path: Path) -> Any:
    beside = index_beside(path)
    if beside is None:
        return None
    index = open_contents(beside)
    name = next(iter(index.arrays), None)
    if name is None:
        raise FileError(f"{beside}: holds no array; Slideflow stores the tile locations as 'arr_0'.")
    return index.read("arr_0" if "arr_0" in index else name)


def _config(path: Path) -> dict[str, Any]:
    beside = find_beside(path, ["bags_config.json"], levels=0)
    if beside is None:
        return {}
    try:
        loaded = parse_json(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{beside}: not readable JSON ({error}); write the bags again.") from None
    return loaded if isinstance(loaded, dict) else {}


def _edge_um(config: dict[str, Any]) -> tuple[float | None, str | None]:
    size = config.get("tile_um")
    if isinstance(size, int | float) and size > 0:
        return float(size), None
    if size is None:
        return None, "no bags_config.json with the tile size beside the bag" if not config else None
    return None, f"tile size given as {size!r}: a magnification, from which no level-0 edge follows"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
