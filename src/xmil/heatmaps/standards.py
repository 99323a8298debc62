"""Exports in other programs' own formats: gzipped GeoJSON for QuPath, XML for ASAP."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np

from xmil.core.storage import write_atomically
from xmil.heatmaps.exports import AGAINST, SUPPORTS, write_geojson
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
