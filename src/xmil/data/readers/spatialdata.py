"""LazySlide / wsidata (Zheng et al. 2025): SpatialData zarr stores, read without the spatialdata package.

A table under `tables/<encoder>_tiles` holds the features in `X` and the tile numbers in `obs/tile_id`; the
tiles are level-0 polygons in `shapes/<tiles>/shapes.parquet`, specified in the root attribute `tile_spec`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.budget import check_objects, read_parquet
from xmil.core.errors import FileError
from xmil.data.containers.container import Contents
from xmil.data.containers.stores import ZarrContents
from xmil.data.header import Ask, Header, one_edge, place, positive, slide_name
from xmil.data.readers import reader

Boxes = npt.NDArray[np.float64]
_POLYGON = 3


def _claims(contents: Contents) -> bool:
    return bool(_tables(contents)) and "features" not in contents


@reader("spatialdata", kinds=("zarr",), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read the feature table of a store; the path names its folder if there are several."""
    store, table = _table(contents)
    tiles = _region(store, table)
    spec = _tile_spec(store, tiles)
    header = Header(
        store.path,
        "spatialdata",
        store.rows(f"{table}/X"),
        slide_id=slide_name(store.path),
        encoder=Path(table).name.removesuffix(f"_{tiles}"),
        mpp=_mpp(spec),
        version=_version(store),
        extra={"tile_spec": spec} if spec else {},
    )
    notes = [f"encoder {header.encoder!r} from the table's name"]
    notes += [f"mpp {header.mpp:g} from tile_spec"] if header.mpp and ask.mpp is None else []
    boxes = _read_boxes(store, table, tiles=tiles, n=len(header))
    if boxes is None:
        return place(header, None, ask=ask, notes=notes)
    edge = one_edge(np.rint(boxes[:, 2:] - boxes[:, :2]), store.path)
    return place(header, boxes[:, :2], edge=edge, ask=ask, notes=notes)


def _tables(contents: Contents) -> list[str]:
    """Tables with a dense two-dimensional `X`, in a whole store or in one table's folder."""
    named = [name for name, info in contents.arrays.items() if len(info.shape) == 2]
    tables = [name.removesuffix("/X") for name in named if name.startswith("tables/") and name.endswith("/X")]
    return sorted(tables) or (["."] if "X" in contents and contents.path.parent.name == "tables" else [])


def _table(contents: Contents) -> tuple[ZarrContents, str]:
    tables = _tables(contents)
    if tables == ["."]:
        return ZarrContents(contents.path.parent.parent), f"tables/{contents.path.name}"
    if len(tables) > 1:
        names = ", ".join(tables)
        raise FileError(
            f"{contents.path}: holds several feature tables ({names}); name one, such as "
            f"{contents.path}/{tables[0]}."
        )
    return ZarrContents(contents.path), tables[0]


def _region(store: ZarrContents, table: str) -> str:
    """The shapes of a table: by its attribute, else the longest name that ends the table's name."""
    region = store.group_attrs(table).get("region")
    if isinstance(region, list) and len(region) == 1:
        region = region[0]
    if isinstance(region, str):
        return region
    shapes = [Path(name).name for name in store.groups if Path(name).parent.name == "shapes"]
    matches = [name for name in shapes if Path(table).name.endswith(name)]
    return max(matches, key=len, default="tiles")


def _tile_spec(store: ZarrContents, tiles: str) -> dict[str, Any]:
    specs = store.attrs.get("tile_spec")
    if specs is None and isinstance(store.attrs.get("attrs"), dict):
        specs = store.attrs["attrs"].get("tile_spec")
    spec = specs.get(tiles) if isinstance(specs, dict) else None
    return spec if isinstance(spec, dict) else {}


def _mpp(spec: dict[str, Any]) -> float | None:
    """The slide's mpp: that of the tiles over their downsample from level 0."""
    mpp, scale = positive(spec.get("mpp")), positive(spec.get("base_downsample"))
    return mpp / scale if mpp and scale else None


def _version(store: ZarrContents) -> str | None:
    about = store.attrs.get("spatialdata_attrs")
    version = about.get("version") if isinstance(about, dict) else None
    return None if version is None else str(version)


def _read_boxes(store: ZarrContents, table: str, *, tiles: str, n: int) -> Boxes | None:
    """Boxes in the table's row order, joined by tile number."""
    polygons = _polygons(store.path, tiles)
    if polygons is None:
        return None
    numbers, boxes = polygons
    key = f"{table}/obs/tile_id"
    tile_ids = store.read(key).astype(np.int64) if key in store else np.arange(n)
    order = np.argsort(numbers, kind="stable")
    index = np.searchsorted(numbers[order], tile_ids)
    if len(tile_ids) != n or np.any(index >= len(numbers)) or np.any(numbers[order][index] != tile_ids):
        raise FileError(f"{store.path}: shapes/{tiles} lacks tiles of {table!r}; write the store again.")
    return boxes[order][index]


def _polygons(path: Path, tiles: str) -> tuple[npt.NDArray[np.int64], Boxes] | None:
    import pyarrow as pa

    file = path / "shapes" / tiles / "shapes.parquet"
    if not file.is_file():
        return None
    try:
        table = read_parquet(file)
        check_objects(table, file)
        shapes = table["geometry"].to_pylist()
        numbers = table["tile_id"].to_numpy() if "tile_id" in table.column_names else np.arange(len(shapes))
        bounds = [_bounds(shape) for shape in shapes]
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, struct.error) as error:
        raise FileError(f"{file}: not readable tile polygons ({str(error).splitlines()[0]}).") from None
    return numbers.astype(np.int64), np.asarray(bounds, dtype=np.float64).reshape(-1, 4)


def _bounds(shape: bytes) -> tuple[float, float, float, float]:
    """Bounding box of a polygon in well-known binary."""
    order = "<" if shape[0] == 1 else ">"
    kind, rings, points = struct.unpack_from(f"{order}III", shape, 1)
    if kind != _POLYGON or rings != 1 or not 3 < points < 1000:
        raise ValueError("a tile is not a simple polygon")
    xy = np.frombuffer(shape, dtype=f"{order}f8", count=2 * points, offset=13).reshape(-1, 2)
    (x0, y0), (x1, y1) = xy.min(axis=0), xy.max(axis=0)
    return float(x0), float(y0), float(x1), float(y1)
