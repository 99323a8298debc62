"""Tiles for QuPath: a GeoJSON file of boxes with a measurement for each method and class, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import numpy as np
import numpy.typing as npt

from xmil.core.absence import absent
from xmil.core.bag import IntArray
from xmil.core.errors import FileError, InputError
from xmil.core.explanation import Explanation
from xmil.core.parsing import parse_json
from xmil.core.storage import write_atomically, write_text
from xmil.heatmaps.words import ends, is_predicted
from xmil.slides.frames import KEY, frame_header

SUPPORTS, AGAINST = (202, 0, 32), (5, 113, 176)  # red and blue of a tile's class


@dataclass(frozen=True, eq=False)
class Tiles:
    """Boxes read back from a file, with their measurements and the names of their classes."""

    boxes: npt.NDArray[np.float64]  # (n, 4) x0, y0, x1, y1 in level-0 pixels
    measurements: Mapping[str, npt.NDArray[np.float64]]
    classes: tuple[str | None, ...]


def write_geojson(
    path: str | PathLike[str],
    explanations: Sequence[Explanation],
    *,
    origin: tuple[int, int] = (0, 0),
    task: str = "classification",
    boxes: IntArray | None = None,
) -> None:
    """Write the explanations of one slide as QuPath tiles; `boxes` replace those of the patches.

    Each has the measurements `<method>:<target>`; its class says whether it supports what the first signed
    method explains, the predicted class where that is among them. Coordinates count from `origin`, which the
    file names.
    """
    boxes = (explanations[0].boxes() if boxes is None else boxes) - np.tile(origin, 2)
    measured = _measurements(explanations)
    classes = _classifications(explanations, task)
    name = explanations[0].bag or ""
    space = uuid5(NAMESPACE_URL, f"xmil:{name}")
    rows = zip(boxes.tolist(), measured, classes, strict=True)
    features = [_feature(i, space, *row) for i, row in enumerate(rows)]
    head = f'{{"type":"FeatureCollection","{KEY}":{json.dumps(frame_header(name, origin))},"features":['
    write_text(path, head + "\n" + ",\n".join(features) + "\n]}\n")


def read_geojson(path: str | PathLike[str]) -> Tiles:
    """Read tiles that we or QuPath wrote: a collection, a list or a single feature; level-0 boxes."""
    try:
        found = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable GeoJSON file ({error}).") from None
    try:
        features = found.get("features", [found]) if isinstance(found, dict) else list(found)
        origin = found.get(KEY, {}).get("origin", (0, 0)) if isinstance(found, dict) else (0, 0)
        boxes = np.array([_box(f["geometry"]) for f in features], dtype=np.float64).reshape(-1, 4)
        about = [f.get("properties") or {} for f in features]
        boxes += np.tile(np.asarray(origin, dtype=np.float64), 2)
        return Tiles(boxes, _columns([_numbers(p) for p in about]), tuple(_class_name(p) for p in about))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FileError(f"{path}: a tile is damaged ({error}).") from None


def _measurements(explanations: Sequence[Explanation]) -> list[str]:
    """The measurements of each tile as JSON."""
    for e in explanations:
        if not np.isfinite(e.scores).all():
            raise InputError(f"{e}: scores must be finite numbers; explain the slide again.")
    names = [json.dumps(e.column, ensure_ascii=False) for e in explanations]
    columns = [e.scores.astype(np.float32).astype(str).tolist() for e in explanations]  # shortest digits
    pairs = ([f"{name}:{value}" for value in values] for name, values in zip(names, columns, strict=True))
    return [",".join(row) for row in zip(*pairs, strict=True)]


def _classifications(explanations: Sequence[Explanation], task: str) -> list[str]:
    """The class of each tile as a JSON member, empty where the score is zero or unsigned."""
    signed = [e for e in explanations if e.signed]
    if not signed:
        return [""] * len(explanations[0])
    same = [e for e in signed if e.method == signed[0].method]
    first = next((e for e in same if is_predicted(e.target, e.logits, task)), signed[0])
    against, supports = (
        '"classification":' + json.dumps({"name": words, "color": colour}, ensure_ascii=False) + ","
        for words, colour in zip(ends(first, task), (AGAINST, SUPPORTS), strict=True)
    )
    table = np.array([against, "", supports], dtype=object)
    chosen: list[str] = table[np.sign(first.scores).astype(np.intp) + 1].tolist()
    return chosen


def _feature(i: int, space: UUID, box: list[int], measured: str, classified: str) -> str:
    x0, y0, x1, y1 = box
    ring = f"[[{x0},{y0}],[{x1},{y0}],[{x1},{y1}],[{x0},{y1}],[{x0},{y0}]]"
    return (
        f'{{"type":"Feature","id":"{uuid5(space, str(i))}",'
        f'"geometry":{{"type":"Polygon","coordinates":[{ring}]}},'
        f'"properties":{{"objectType":"tile","isLocked":true,{classified}"measurements":{{{measured}}}}}}}'
    )


def _box(geometry: dict[str, Any]) -> list[float]:
    if geometry.get("type") != "Polygon":
        raise ValueError(f"a {geometry.get('type')} is not a tile")
    ring = geometry["coordinates"][0]
    xs, ys = [float(point[0]) for point in ring], [float(point[1]) for point in ring]
    return [min(xs), min(ys), max(xs), max(ys)]


def _numbers(properties: dict[str, Any]) -> dict[str, float]:
    """QuPath writes an object since 0.4, and a list of names and values before."""
    held = properties.get("measurements") or {}
    pairs = held.items() if isinstance(held, dict) else ((m["name"], m["value"]) for m in held)
    return {str(name): float(value) for name, value in pairs}


def _columns(rows: Sequence[dict[str, float]]) -> dict[str, npt.NDArray[np.float64]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def _class_name(properties: dict[str, Any]) -> str | None:
    held = properties.get("classification")
    name = held.get("name") if isinstance(held, dict) else held
    return None if name is None else str(name)


def level0_boxes(tiles: Tiles) -> IntArray:
    """Whole level-0 boxes of tiles."""
    return np.rint(tiles.boxes).astype(np.int64)


def write_table(path: str | PathLike[str], explanations: Sequence[Explanation], *, kind: str = "csv") -> None:
    """Write level-0 boxes `x0, y0, x1, y1` and one column for each `<method>:<target>`."""
    table = as_table(explanations)
    if kind == "parquet":
        import pyarrow.parquet as pq

        write_atomically(path, lambda part: pq.write_table(table, part, compression="zstd"))
    else:
        from pyarrow import csv

        options = csv.WriteOptions(quoting_style="needed")
        write_atomically(path, lambda part: csv.write_csv(table, part, options))


def as_table(explanations: Sequence[Explanation]) -> Any:
    """The same as an Arrow table."""
    import pyarrow as pa

    boxes = explanations[0].boxes()
    columns = {name: pa.array(boxes[:, i]) for i, name in enumerate(("x0", "y0", "x1", "y1"))}
    return pa.table({**columns, **{e.column: pa.array(e.scores) for e in explanations}})
