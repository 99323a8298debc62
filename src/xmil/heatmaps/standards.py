"""Exports in other programs' own formats: gzipped GeoJSON for QuPath, XML for ASAP."""

from __future__ import annotations

import gzip
import tempfile
from os import PathLike
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.parsing import parse_xml
from xmil.core.storage import write_atomically
from xmil.heatmaps.exports import AGAINST, SUPPORTS, Tiles, write_geojson
from xmil.heatmaps.registry import Exported
from xmil.heatmaps.words import ends


def write_qupath(path: Path, given: Exported) -> None:
    """GeoJSON tiles, gzipped as QuPath reads them; the same bytes for the same scores."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "tiles.geojson"
        write_geojson(plain, given.explanations, origin=given.frame[:2], task=given.task)
        data = gzip.compress(plain.read_bytes(), mtime=0)
    write_atomically(path, lambda part: _put(part, data))


def write_asap(path: Path, given: Exported) -> None:
    """A rectangle per patch in level-0 pixels, named by its score, in groups for and against the class."""
    (e,) = given.explanations
    against, supports = ends(e, given.task)
    root = ET.Element("ASAP_Annotations")
    drawn, groups = ET.SubElement(root, "Annotations"), ET.SubElement(root, "AnnotationGroups")
    for name, colour in ((supports, SUPPORTS), (against, AGAINST)):
        ET.SubElement(groups, "Group", Name=name, PartOfGroup="None", Color=_hex(colour))
    for i, box in enumerate(e.boxes().tolist()):
        score = float(e.scores[i])
        group = supports if score >= 0 or not e.signed else against
        _rectangle(
            drawn,
            f"{i} {e.column} {np.float32(score)!s}",
            box,
            group,
            SUPPORTS if group == supports else AGAINST,
        )
    data = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    write_atomically(path, lambda part: _put(part, data))


def read_asap(path: str | PathLike[str]) -> Tiles:
    """Rectangles and polygons of ASAP's XML as boxes, with their groups; scores of ours by their column."""
    data = Path(path).read_bytes() if Path(path).is_file() else b""
    if not data:
        raise FileError(f"{path}: no such file, or an empty one.")
    try:
        notes = parse_xml(data).findall("./Annotations/Annotation")
        points = [
            [(float(c.attrib["X"]), float(c.attrib["Y"])) for c in note.iter("Coordinate")] for note in notes
        ]
        boxes = [[*np.min(each, axis=0), *np.max(each, axis=0)] for each in points]
    except (KeyError, ValueError) as error:
        raise FileError(f"{path}: not a readable file of ASAP's annotations ({error}).") from None
    groups = tuple(None if note.get("PartOfGroup") == "None" else note.get("PartOfGroup") for note in notes)
    return Tiles(
        np.array(boxes, dtype=np.float64).reshape(-1, 4), _scores([n.get("Name", "") for n in notes]), groups
    )


def _scores(names: list[str]) -> dict[str, npt.NDArray[np.float64]]:
    """Scores in the names of annotations that we wrote: number, column, score."""
    parts = [name.split(" ", 1) for name in names]
    held = [
        part[1].rpartition(" ") if len(part) == 2 and part[0].isdecimal() else ("", "", "") for part in parts
    ]
    columns = dict.fromkeys(column for column, _, _ in held if column)
    return {
        column: np.array([float(score) if own == column else np.nan for own, _, score in held])
        for column in columns
    }


def _rectangle(
    parent: ET.Element, name: str, box: list[int], group: str, colour: tuple[int, int, int]
) -> None:
    x0, y0, x1, y1 = box
    note = ET.SubElement(
        parent, "Annotation", Name=name, Type="Rectangle", PartOfGroup=group, Color=_hex(colour)
    )
    corners = ET.SubElement(note, "Coordinates")
    for order, (x, y) in enumerate(((x0, y0), (x1, y0), (x1, y1), (x0, y1))):
        ET.SubElement(corners, "Coordinate", Order=str(order), X=str(x), Y=str(y))


def _hex(colour: tuple[int, int, int]) -> str:
    return "#{:02X}{:02X}{:02X}".format(*colour)


def _put(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)
