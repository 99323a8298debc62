"""Scores and colours as pyramids on the slide's own pixels or every n-th of them; and as SpatialData.

OME-TIFF: levels are SubIFDs, as the OME standard asks. The first page's levels are linked behind the last
page as well, where OpenSlide looks for them. OME-Zarr (OME-NGFF 0.4): an image with one channel for each
method and class. Each level is painted from the boxes, strip by strip, so memory stays small however large
the slide.

Zarr stores are written with Zarr and Arrow alone. `ome-zarr` keeps Dask and a file system for S3 about, and
pins both; SpatialData's library needs an older pandas than the newest, and some fifty packages. Both read
what is written here (SpatialData's on-disk layout 0.2, with LazySlide's names); so do napari, QuPath and
Bio-Formats.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import ceil, log2
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.durable import write_atomically, write_folder
from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.core.explanation import Explanation
from xmil.heatmaps.canvas import Canvas, Cells
from xmil.heatmaps.style import Scale
from xmil.slides.slide import Frame

if TYPE_CHECKING:
    from xmil.heatmaps.exports import Exported

TILE = 512  # pixels along the edge of a tile or chunk
SMALLEST = 1024  # pixels of the smallest level's longer edge, at most
WIDEST = 16_384  # pixels of the first level's longer edge unless `downsample` says otherwise
NGFF = "0.4"
CHANNEL_COLOURS = ("CA0020", "0571B0", "1A9641", "7B3294", "E66101", "404040")
TILES, TABLE = "tiles", "xmil_tiles"
REGION, INSTANCE, INDEX = "library_id", "tile_id", "__index_level_0__"
CONTAINER, SHAPES, TABLES = "0.2", "0.3", "0.2"  # versions of SpatialData's layouts
Strip = Callable[[Cells, int], npt.NDArray[Any]]  # the picture of a strip's cells, for a channel


@dataclass(frozen=True)
class Pyramid:
    """A frame on levels: the first has a pixel for `downsample` of level 0, each next for twice as many."""

    frame: Frame
    downsample: int = 1
    mpp: float | None = None

    @classmethod
    def of(cls, frame: Frame, *, downsample: int | None = None, mpp: float | None = None) -> Pyramid:
        """Make the pyramid of a frame; the first level is level 0 unless that is very wide.

        >>> Pyramid.of((0, 0, 100_000, 60_000)).downsample
        8
        """
        if downsample is not None and downsample < 1:
            raise bad_parameter("downsample", "Pyramid.of", "an int in the range [1, inf)", downsample)
        fitting = 2 ** max(0, ceil(log2(max(frame[2:]) / WIDEST)))
        return cls(frame, downsample or fitting, mpp)

    def levels(self) -> list[Canvas]:
        """Give the canvases from the finest to the coarsest."""
        x, y, width, height = self.frame
        step = self.downsample
        canvases: list[Canvas] = []
        while not canvases or max(canvases[-1].size) > SMALLEST:
            size = (ceil(width / step), ceil(height / step))
            canvases.append(Canvas((x, y, size[0] * step, size[1] * step), size))
            step *= 2
        return canvases


def write_scores(
    path: str | PathLike[str],
    explanations: Sequence[Explanation],
    pyramid: Pyramid,
    *,
    boxes: IntArray | None = None,
) -> None:
    """Write raw scores in float32, a channel for each `<method>:<target>`, NaN where there is no patch.

    `boxes` (n, 4) are the places in level-0 pixels, if they are not the patches.
    """
    values = [e.scores for e in explanations]
    name = f"{explanations[0].bag or ''} scores".strip()
    about = {"axes": "CYX", "Name": name, "Channel": {"Name": [e.column for e in explanations]}}
    layout = {"dtype": np.dtype(np.float32), "photometric": "minisblack"}

    def strip(cells: Cells, channel: int) -> npt.NDArray[Any]:
        return cells.expand(cells.average(values[channel]))

    where = explanations[0].boxes() if boxes is None else boxes
    _write(path, where, pyramid, strip, channels=len(values), empty=np.nan, about=about, **layout)


def write_colours(
    path: str | PathLike[str], explanation: Explanation, scale: Scale, pyramid: Pyramid
) -> None:
    """Write the colours of one explanation as RGBA, transparent where there is no patch."""
    name = f"{explanation.bag or ''} {explanation.column}".strip()
    about = {"axes": "YXS", "Name": name, "Channel": {"Name": [explanation.column]}}
    layout = {"dtype": np.dtype(np.uint8), "photometric": "rgb", "extrasamples": ["unassalpha"]}

    def strip(cells: Cells, channel: int) -> npt.NDArray[Any]:  # noqa: ARG001  # there is one channel
        return cells.expand(scale.paint(cells.average(explanation.scores)))

    _write(path, explanation.boxes(), pyramid, strip, channels=0, empty=0, about=about, **layout)


def _write(
    path: str | PathLike[str],
    boxes: IntArray,
    pyramid: Pyramid,
    strip: Strip,
    *,
    channels: int,
    empty: float,
    about: dict[str, Any],
    **layout: Any,
) -> None:
    """Write every level; `channels` 0 means one picture of four samples a pixel."""
    tifffile = load_optional("tifffile", "slides")
    microns = None if pyramid.mpp is None else pyramid.mpp * pyramid.downsample
    for axis in "XY" if microns is not None else "":
        about |= {f"PhysicalSize{axis}": microns, f"PhysicalSize{axis}Unit": "µm"}

    def write(temporary: str) -> None:
        levels = pyramid.levels()
        with tifffile.TiffWriter(temporary, bigtiff=True, ome=True) as file:
            for i, canvas in enumerate(levels):
                width, height = canvas.size
                resolution = {}
                if microns is not None:
                    per_centimetre = 1e4 / (microns * 2**i)
                    resolution = {"resolution": (per_centimetre,) * 2, "resolutionunit": "CENTIMETER"}
                file.write(
                    _tiles(boxes, canvas, strip, channels=channels, empty=empty),
                    shape=(channels, height, width) if channels else (height, width, 4),
                    tile=(TILE, TILE),
                    compression="zlib",
                    subfiletype=1 if i else 0,
                    subifds=None if i else len(levels) - 1,
                    metadata=None if i else about,
                    **layout,
                    **resolution,
                )
        _link_levels(temporary)

    write_atomically(path, write)


def _tiles(
    boxes: IntArray, canvas: Canvas, strip: Strip, *, channels: int, empty: float
) -> Iterator[npt.NDArray[Any]]:
    """Yield the tiles of a level in the order of the file: channel by channel, row by row."""
    for channel in range(max(channels, 1)):
        for _, part in canvas.strips(TILE):
            picture = strip(Cells.cut(boxes, part), channel)
            for left in range(0, canvas.size[0], TILE):
                pixels = picture[:, left : left + TILE]
                tile = np.full((TILE, TILE, *pixels.shape[2:]), empty, dtype=pixels.dtype)
                tile[: pixels.shape[0], : pixels.shape[1]] = pixels
                yield tile


def _link_levels(path: str) -> None:
    """Link the first page's levels, which tifffile has chained already, after the last page."""
    with load_optional("tifffile", "slides").TiffFile(path) as file:
        last = int(file.pages[-1].offset)
        levels = file.pages[0].subifds
    if not levels:
        return
    with open(path, "r+b") as handle:
        handle.seek(last)
        (tags,) = struct.unpack("<Q", handle.read(8))  # a BigTIFF directory: count, 20 bytes a tag, next
        handle.seek(last + 8 + 20 * tags)
        handle.write(struct.pack("<Q", int(levels[0])))


def load_optional(package: str, extra: str) -> Any:
    """Import a package that an export needs, or say how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise UnsupportedError(f"This export needs {package}: pip install 'xmil[{extra}]'.") from None


def write_omezarr(path: Path, request: Exported) -> None:
    """Write a pyramid over the slide's own pixels, or every n-th; NaN where there is no patch.

    It is written strip by strip, so that memory stays small; chunks without a patch are not written.
    """

    def fill(folder: Path) -> None:
        levels, boxes = request.pyramid.levels(), request.explanations[0].boxes()
        group = load_optional("zarr", "zarr").create_group(str(folder), zarr_format=2)
        for number, canvas in enumerate(levels):
            array = group.create_array(
                str(number),
                shape=(len(request.explanations), *canvas.size[::-1]),
                chunks=(1, TILE, TILE),
                dtype="float32",
                fill_value=float("nan"),
                chunk_key_encoding={"name": "v2", "separator": "/"},
            )
            for top, strip in canvas.strips(TILE):
                cells = Cells.cut(boxes, strip)
                for channel, e in enumerate(request.explanations):
                    array[channel, top : top + strip.size[1]] = cells.expand(cells.average(e.scores))
        bag, scales = request.explanations[0].bag, [request.scales[e.column] for e in request.explanations]
        channels = [
            {
                "label": e.column,
                "active": i == 0,
                "color": CHANNEL_COLOURS[i % len(CHANNEL_COLOURS)],
                "window": {"min": s.low, "start": s.low, "end": s.high, "max": s.high},  # as in our pictures
            }
            for i, (e, s) in enumerate(zip(request.explanations, scales, strict=True))
        ]
        unit = {} if request.mpp is None else {"unit": "micrometer"}
        axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space", **unit} for n in "yx")]
        edges = [(request.mpp or 1.0) * request.pyramid.downsample * 2**i for i in range(len(levels))]
        sizes = [{"type": "scale", "scale": [1.0, edge, edge]} for edge in edges]
        datasets = [{"path": str(i), "coordinateTransformations": [size]} for i, size in enumerate(sizes)]
        name = f"{bag or ''} scores".strip()
        image = {"version": NGFF, "name": name, "axes": axes, "datasets": datasets}
        about = {"version": __version__, "slide": bag, "origin": request.frame[:2]}
        group.attrs.update({"multiscales": [image], "omero": {"channels": channels}, "xmil": about})

    write_folder(path, fill)


def write_spatialdata(path: Path, request: Exported) -> None:
    """Write all explanations of a slide into one store; places are level-0 pixels, whatever the frame.

    shapes/tiles         polygons in level-0 pixels of the slide, in the coordinate system "global"
    tables/xmil_tiles    AnnData: X holds a column for each method and class, in the order of the tiles
    """

    def fill(folder: Path) -> None:
        zarr, first = load_optional("zarr", "zarr"), request.explanations[0]
        software = {"version": CONTAINER, "spatialdata_software_version": f"xmil {__version__}"}
        about = {"version": __version__, "slide": first.bag, "task": request.task}
        attributes = {"spatialdata_attrs": software, "xmil": about}
        root = zarr.create_group(str(folder), zarr_format=3, attributes=attributes)
        if request.mpp is not None and first.patch_size is not None:  # as LazySlide describes tiles
            spec = {"mpp": request.mpp, "ops_level": 0, "ops_downsample": 1.0, "base_level": 0,
                    "base_downsample": 1.0, "tissue_name": "tissues"}  # fmt: skip
            edges = ("height", "width", "stride_height", "stride_width")
            root.attrs["tile_spec"] = {TILES: {**dict.fromkeys(edges, first.patch_size), **spec}}
        boxes = first.boxes()
        _write_shapes(root, folder, boxes)
        _write_table(root.create_group(f"tables/{TABLE}"), request, boxes)

    write_folder(path, fill)


def _write_shapes(root: Any, folder: Path, boxes: IntArray) -> None:
    """Write GeoParquet 1.0: polygons in well-known binary, with the number of each tile as index."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    axes = [{"name": name, "type": "space", "unit": "unit"} for name in "xy"]
    place = {"input": {"name": "xy", "axes": axes}, "output": {"name": "global", "axes": axes}}
    root.create_group(f"shapes/{TILES}").attrs.update(
        {
            "encoding-type": "ngff:shapes",
            "axes": ["x", "y"],
            "coordinateTransformations": [{"type": "identity", **place}],
            "spatialdata_attrs": {"version": SHAPES},
        }
    )
    shapes = pa.array([shape.tobytes() for shape in polygons(boxes)], pa.binary())
    numbers = pa.array(np.arange(len(boxes), dtype=np.int64))
    bounds = [*boxes[:, :2].min(axis=0).tolist(), *boxes[:, 2:].max(axis=0).tolist()]
    column = {"encoding": "WKB", "crs": None, "geometry_types": ["Polygon"], "bbox": bounds}
    geo = {"version": "1.0.0", "primary_column": "geometry", "columns": {"geometry": column}}
    kinds = ((INSTANCE, INSTANCE, "int64"), ("geometry", "geometry", "bytes"), (None, INDEX, "int64"))
    columns = [
        {"name": name, "field_name": stored, "pandas_type": kind, "metadata": None,
         "numpy_type": "object" if kind == "bytes" else kind}
        for name, stored, kind in kinds
    ]  # fmt: skip
    pandas = {"index_columns": [INDEX], "column_indexes": [], "columns": columns}  # brings the index back
    table = pa.table({INSTANCE: numbers, "geometry": shapes, INDEX: numbers})
    about = {b"geo": json.dumps(geo).encode(), b"pandas": json.dumps(pandas).encode()}
    pq.write_table(table.replace_schema_metadata(about), folder / "shapes" / TILES / "shapes.parquet")


def polygons(boxes: IntArray) -> npt.NDArray[Any]:
    """Give closed rectangles (n,) in well-known binary.

    >>> len(polygons(np.array([[0, 0, 2, 2]]))[0].tobytes())
    93
    """
    layout = np.dtype(
        [("order", "u1"), ("kind", "<u4"), ("rings", "<u4"), ("points", "<u4"), ("xy", "<f8", (5, 2))]
    )
    shapes = np.zeros(len(boxes), dtype=layout)
    shapes["order"], shapes["kind"], shapes["rings"], shapes["points"] = 1, 3, 1, 5
    x0, y0, x1, y1 = boxes.T
    for i, (x, y) in enumerate(((x1, y0), (x1, y1), (x0, y1), (x0, y0), (x1, y0))):
        shapes["xy"][:, i, 0], shapes["xy"][:, i, 1] = x, y
    return shapes


def _write_table(group: Any, request: Exported, boxes: IntArray) -> None:
    """Write AnnData's layout: scores, the tiles' numbers and centres, and which shapes they are of."""
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
    n = len(boxes)
    _put(group, "X", np.stack([e.scores for e in request.explanations], axis=1).astype(np.float32))
    obs = _frame(group, "obs", [str(i) for i in range(n)], (REGION, INSTANCE, "x0", "y0", "x1", "y1"))
    columns = (np.arange(n), *boxes.T)
    for name, values in zip((INSTANCE, "x0", "y0", "x1", "y1"), columns, strict=True):
        _put(obs, name, values.astype(np.int64))
    category = {"encoding-type": "categorical", "encoding-version": "0.2.0", "ordered": False}
    region = obs.create_group(REGION, attributes=category)  # one for all rows
    _put(region, "codes", np.zeros(n, dtype=np.int8))
    _put(region, "categories", np.array([TILES], dtype=object))
    _frame(group, "var", [e.column for e in request.explanations], ())
    folder = {"encoding-type": "dict", "encoding-version": "0.1.0"}
    names = ("obsm", "varm", "obsp", "varp", "layers", "uns", "uns/spatialdata_attrs")
    folders = {name: group.create_group(name, attributes=folder) for name in names}
    _put(folders["obsm"], "spatial", (boxes[:, :2] + boxes[:, 2:]) / 2)
    string = {"encoding-type": "string", "encoding-version": "0.2.0"}
    for name, text in keys.items():
        array = folders["uns/spatialdata_attrs"].create_array(name, shape=(), dtype="str", attributes=string)
        array[...] = np.array(text, dtype=object)


def _frame(group: Any, name: str, index: Sequence[str], columns: Sequence[str]) -> Any:
    about = {"encoding-type": "dataframe", "encoding-version": "0.2.0", "_index": "_index"}
    frame = group.create_group(name, attributes={**about, "column-order": list(columns)})
    _put(frame, "_index", np.array(list(index), dtype=object))
    return frame


def _put(group: Any, name: str, values: npt.NDArray[Any]) -> None:
    is_text = values.dtype.kind == "O"
    encoding = "string-array" if is_text else "array"
    array = group.create_array(
        name,
        shape=values.shape,
        chunks=tuple(max(1, edge) for edge in values.shape),
        dtype="str" if is_text else values.dtype,
        attributes={"encoding-type": encoding, "encoding-version": "0.2.0"},
    )
    array[...] = values
