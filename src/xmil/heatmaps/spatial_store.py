"""Scores as a SpatialData store: patches as polygons and a table of scores, as LazySlide names them.

Written after SpatialData's on-disk layout 0.2 with Zarr and Arrow alone: the library needs an older pandas
than the newest, and some fifty packages. It reads what is written here.

shapes/tiles         polygons in level-0 pixels of the slide, in the coordinate system "global"
tables/xmil_tiles    AnnData: X holds a column for each method and class, in the order of the tiles
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.durable import write_folder
from xmil.heatmaps.omezarr import zarr_package
from xmil.heatmaps.registry import Exported

TILES, TABLE = "tiles", "xmil_tiles"
REGION, INSTANCE = "library_id", "tile_id"
CONTAINER, SHAPES, TABLES = "0.2", "0.3", "0.2"  # versions of SpatialData's layouts
_DICT = {"encoding-type": "dict", "encoding-version": "0.1.0"}
_ARRAY = {"encoding-type": "array", "encoding-version": "0.2.0"}
_STRINGS = {"encoding-type": "string-array", "encoding-version": "0.2.0"}
_STRING = {"encoding-type": "string", "encoding-version": "0.2.0"}


def write_spatialdata(path: Path, given: Exported) -> None:
    """All explanations of a slide in one store; places are level-0 pixels, whatever the frame."""
    write_folder(path, partial(_fill, given=given))


def _fill(folder: Path, *, given: Exported) -> None:
    zarr = zarr_package()
    root = zarr.create_group(str(folder), zarr_format=3)
    root.attrs.update(
        {
            "spatialdata_attrs": {
                "version": CONTAINER,
                "spatialdata_software_version": f"xmil {__version__}",
            },
            "xmil": {"version": __version__, "slide": given.explanations[0].bag, "task": given.task},
            **_tile_spec(given),
        }
    )
    boxes = given.explanations[0].boxes()
    _write_shapes(root, folder, boxes)
    _write_table(root.create_group(f"tables/{TABLE}"), given, boxes)


def _tile_spec(given: Exported) -> dict[str, Any]:
    """What LazySlide keeps of its tiles; without an mpp there is none."""
    edge = given.explanations[0].patch_size
    if given.mpp is None or edge is None:
        return {}
    sizes = dict.fromkeys(("height", "width", "stride_height", "stride_width"), edge)
    return {
        "tile_spec": {
            TILES: {**sizes, "mpp": given.mpp, "ops_level": 0, "ops_downsample": 1.0,
                    "base_level": 0, "base_downsample": 1.0, "tissue_name": "tissues"}
        }
    }  # fmt: skip


def _write_shapes(root: Any, folder: Path, boxes: IntArray) -> None:
    group = root.create_group(f"shapes/{TILES}")
    axes = [{"name": name, "type": "space", "unit": "unit"} for name in "xy"]
    place = {"input": {"name": "xy", "axes": axes}, "output": {"name": "global", "axes": axes}}
    group.attrs.update(
        {
            "encoding-type": "ngff:shapes",
            "axes": ["x", "y"],
            "coordinateTransformations": [{"type": "identity", **place}],
            "spatialdata_attrs": {"version": SHAPES},
        }
    )
    _write_polygons(folder / "shapes" / TILES / "shapes.parquet", boxes)


def _write_polygons(path: Path, boxes: IntArray) -> None:
    """GeoParquet 1.0: polygons in well-known binary, with the number of each tile as index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shapes = pa.array([shape.tobytes() for shape in polygons(boxes)], pa.binary())
    numbers = pa.array(np.arange(len(boxes), dtype=np.int64))
    bounds = [*boxes[:, :2].min(axis=0).tolist(), *boxes[:, 2:].max(axis=0).tolist()]
    column = {"encoding": "WKB", "crs": None, "geometry_types": ["Polygon"], "bbox": bounds}
    geo = {"version": "1.0.0", "primary_column": "geometry", "columns": {"geometry": column}}
    table = pa.table({INSTANCE: numbers, "geometry": shapes, "__index_level_0__": numbers})
    about = {b"geo": json.dumps(geo).encode(), b"pandas": json.dumps(_pandas_header()).encode()}
    pq.write_table(table.replace_schema_metadata(about), path)


def polygons(boxes: IntArray) -> npt.NDArray[Any]:
    """Closed rectangles (n,) in well-known binary.

    >>> len(polygons(np.array([[0, 0, 2, 2]]))[0].tobytes())
    93
    """
    layout = np.dtype(
        [("order", "u1"), ("kind", "<u4"), ("rings", "<u4"), ("points", "<u4"), ("xy", "<f8", (5, 2))]
    )
    found = np.zeros(len(boxes), dtype=layout)
    found["order"], found["kind"], found["rings"], found["points"] = 1, 3, 1, 5
    x0, y0, x1, y1 = boxes.T
    for i, (x, y) in enumerate(((x1, y0), (x1, y1), (x0, y1), (x0, y0), (x1, y0))):
        found["xy"][:, i, 0], found["xy"][:, i, 1] = x, y
    return found


def _pandas_header() -> dict[str, Any]:
    """What pandas asks of a Parquet file so that the index comes back."""
    index = "__index_level_0__"
    kinds = ((INSTANCE, INSTANCE, "int64"), ("geometry", "geometry", "bytes"), (None, index, "int64"))
    columns = [
        {"name": name, "field_name": held, "pandas_type": kind, "metadata": None,
         "numpy_type": "object" if kind == "bytes" else kind}
        for name, held, kind in kinds
    ]  # fmt: skip
    return {"index_columns": [index], "column_indexes": [], "columns": columns}


def _write_table(group: Any, given: Exported, boxes: IntArray) -> None:
    """AnnData's layout: scores, the tiles' numbers and centres, and which shapes they are of."""
    keys = {"region": TILES, "region_key": REGION, "instance_key": INSTANCE}
    group.attrs.update(
        {
            "encoding-type": "anndata",
            "encoding-version": "0.1.0",
            "spatialdata-encoding-type": "ngff:regions_table",
            "version": TABLES,
            **keys,
        }
    )
    n, columns = len(boxes), [e.column for e in given.explanations]
    scores = np.stack([e.scores for e in given.explanations], axis=1).astype(np.float32)
    _put(group, "X", scores, _ARRAY)
    numbers = np.arange(n, dtype=np.int64)
    obs = _frame(group, "obs", [str(i) for i in range(n)], (REGION, INSTANCE, "x0", "y0", "x1", "y1"))
    for name, values in zip((INSTANCE, "x0", "y0", "x1", "y1"), (numbers, *boxes.T), strict=True):
        _put(obs, name, values.astype(np.int64), _ARRAY)
    _categorical(obs, REGION, n)
    _frame(group, "var", columns, ())
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    inner = {name: _folder(group, name) for name in ("obsm", "varm", "obsp", "varp", "layers", "uns")}
    _put(inner["obsm"], "spatial", centres, _ARRAY)
    _texts(_folder(inner["uns"], "spatialdata_attrs"), keys)


def _frame(group: Any, name: str, index: Sequence[str], columns: Sequence[str]) -> Any:
    made = group.create_group(name)
    made.attrs.update(
        {
            "encoding-type": "dataframe",
            "encoding-version": "0.2.0",
            "_index": "_index",
            "column-order": list(columns),
        }
    )
    _put(made, "_index", _strings(index), _STRINGS)
    return made


def _categorical(group: Any, name: str, n: int) -> None:
    """One category for all rows."""
    made = group.create_group(name)
    made.attrs.update({"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False})
    _put(made, "codes", np.zeros(n, dtype=np.int8), _ARRAY)
    _put(made, "categories", _strings([TILES]), _STRINGS)


def _folder(group: Any, name: str) -> Any:
    made = group.create_group(name)
    made.attrs.update(_DICT)
    return made


def _texts(group: Any, values: Mapping[str, str]) -> None:
    for name, text in values.items():
        made = group.create_array(name, shape=(), dtype="str", attributes=_STRING)
        made[...] = np.array(text, dtype=object)


def _strings(values: Sequence[str]) -> npt.NDArray[Any]:
    return np.array(list(values), dtype=object)


def _put(group: Any, name: str, values: npt.NDArray[Any], about: Mapping[str, str]) -> None:
    text = values.dtype.kind == "O"
    made = group.create_array(
        name,
        shape=values.shape,
        chunks=tuple(max(1, edge) for edge in values.shape),
        dtype="str" if text else values.dtype,
        attributes=dict(about),
    )
    made[...] = values
