"""Exports: their registry, and tiles, lines and tables of scores for QuPath, ASAP and spreadsheets.

Packages add their own exports through the entry-point group `xmil.exports`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import gcd
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5
from xml.etree import ElementTree as ET

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.durable import create_hdf5, write_atomically, write_bytes, write_text
from xmil.core.errors import FileError, InputError, absent, refuse_damage
from xmil.core.explanation import Explanation
from xmil.core.interactions import Interactions
from xmil.core.quoting import csv_cell, groovy_comment, groovy_text
from xmil.core.registry import Registry
from xmil.core.services import register_service
from xmil.core.text import parse_json, parse_xml
from xmil.heatmaps.canvas import Canvas, Cells
from xmil.heatmaps.pyramids import (
    Pyramid,
    load_optional,
    write_colours,
    write_omezarr,
    write_scores,
    write_spatialdata,
)
from xmil.heatmaps.style import Scale
from xmil.heatmaps.words import ends, is_predicted
from xmil.slides.slide import KEY, frame_header

SUPPORTS, AGAINST = (202, 0, 32), (5, 113, 176)  # red and blue of a tile's class
TOGETHER, INSTEAD = "say more together", "say less together"


@dataclass(frozen=True)
class Exported:
    """The input of an export: placed explanations of one slide, and the colours of their pictures.

    `frame` is the region as x, y, width, height in level-0 pixels; `scales` are by the explanations' columns.
    """

    explanations: tuple[Explanation, ...]
    frame: tuple[int, int, int, int]
    task: str
    scales: Mapping[str, Scale]
    mpp: float | None = None
    downsample: int | None = None

    @property
    def pyramid(self) -> Pyramid:
        """The levels of an image of the frame."""
        return Pyramid.of(self.frame, downsample=self.downsample, mpp=self.mpp)


@dataclass(frozen=True)
class Export:
    """A kind of file: `write` fills a path; with `each` there is one per explanation, not one per slide."""

    write: Callable[[Path, Exported], None]
    suffix: str
    each: bool = False


EXPORTS: Registry[Export] = Registry("export", group="xmil.exports")


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
    """Write the explanations of one slide as QuPath tiles, gzipped if the path ends in .gz.

    Each has the measurements `<method>:<target>`; its class says whether it supports the target of the first
    signed method, the predicted class if that is among them. Coordinates are relative to `origin`, which the
    file names. `boxes` replaces those of the patches.
    """
    for e in explanations:
        if not np.isfinite(e.scores).all():
            raise InputError(f"{e}: scores must be finite numbers; explain the slide again.")
    boxes = (explanations[0].boxes() if boxes is None else boxes) - np.tile(origin, 2)
    bag = explanations[0].bag or ""
    space = uuid5(NAMESPACE_URL, f"xmil:{bag}")
    names = [json.dumps(e.column, ensure_ascii=False) for e in explanations]
    columns = [e.scores.astype(np.float32).astype(str).tolist() for e in explanations]  # shortest digits
    rows = zip(boxes.tolist(), zip(*columns, strict=True), _classifications(explanations, task), strict=True)
    features = []
    for i, ((x0, y0, x1, y1), scores, classification) in enumerate(rows):
        ring = f"[[{x0},{y0}],[{x1},{y0}],[{x1},{y1}],[{x0},{y1}],[{x0},{y0}]]"
        measurements = ",".join(f"{name}:{score}" for name, score in zip(names, scores, strict=True))
        features.append(
            f'{{"type":"Feature","id":"{uuid5(space, str(i))}",'
            f'"geometry":{{"type":"Polygon","coordinates":[{ring}]}},'
            f'"properties":{{"objectType":"tile","isLocked":true,{classification}'
            f'"measurements":{{{measurements}}}}}}}'
        )
    data = _collection(features, bag, origin, explanations[0].patches.edge_note).encode()
    if Path(path).suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # the same bytes for the same scores
    write_bytes(path, data)


def _classifications(explanations: Sequence[Explanation], task: str) -> list[str]:
    """Write the class of each tile as a JSON member, empty if the score is zero or unsigned."""
    signed = [e for e in explanations if e.signed]
    if not signed:
        return [""] * len(explanations[0])
    same = [e for e in signed if e.method == signed[0].method]
    first = next((e for e in same if is_predicted(e.target, e.logits, task)), signed[0])
    against, supports = (
        '"classification":' + json.dumps({"name": words, "color": colour}, ensure_ascii=False) + ","
        for words, colour in zip(ends(first, task), (AGAINST, SUPPORTS), strict=True)
    )
    members = ("", supports, against)  # by sign: 0, 1, -1
    return [members[sign] for sign in np.sign(first.scores).astype(int).tolist()]


def write_pairs(path: str | PathLike[str], pairs: Interactions, *, origin: tuple[int, int] = (0, 0)) -> None:
    """Write the pairs as lines that QuPath reads: annotations with value, standard error and the pair alone.

    Coordinates are relative to `origin`, which the file names.
    """
    name = pairs.bag or ""
    space = uuid5(NAMESPACE_URL, f"xmil:{name}:pairs:{pairs.target}")
    segments = (pairs.lines() - np.tile(origin, 2)).tolist()
    features = []
    for i, (x0, y0, x1, y1) in enumerate(segments):
        value = float(pairs.values[i])
        words, colour = (TOGETHER, SUPPORTS) if value > 0 else (INSTEAD, AGAINST)
        numbers = {"value": value, "stderr": float(pairs.stderr[i]), "alone": float(pairs.alone[i])}
        feature = {
            "type": "Feature",
            "id": str(uuid5(space, str(i))),
            "geometry": {"type": "LineString", "coordinates": [[x0, y0], [x1, y1]]},
            "properties": {
                "objectType": "annotation",
                "name": f"{pairs.pairs[i, 0]} and {pairs.pairs[i, 1]}",
                "classification": {"name": words, "color": list(colour)},
                "measurements": numbers,
            },
        }
        features.append(json.dumps(feature, ensure_ascii=False))
    write_text(path, _collection(features, name, origin))


def _collection(features: Sequence[str], name: str, origin: tuple[int, int], note: str | None = None) -> str:
    about = {**frame_header(name, origin), **({} if note is None else {"note": note})}
    head = f'{{"type":"FeatureCollection","{KEY}":{json.dumps(about)},"features":['
    return head + "\n" + ",\n".join(features) + "\n]}\n"


def open_geojson(path: str | PathLike[str]) -> tuple[list[Any], Any]:
    """Read the features of a GeoJSON file, unchecked, and the origin that it names, else None.

    QuPath writes a collection, a plain list, or a single feature.
    """
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: not a readable GeoJSON file ({error}).") from None
    features = content.get("features", content) if isinstance(content, dict) else content
    about = content.get(KEY) if isinstance(content, dict) else None
    origin = about.get("origin") if isinstance(about, dict) else None
    return features if isinstance(features, list) else [features], origin


def class_name(feature: dict[str, Any]) -> str | None:
    """Name the class of a feature, which QuPath writes as an object or as a plain name."""
    properties = feature.get("properties")
    label = properties.get("classification") if isinstance(properties, dict) else None
    name = label.get("name") if isinstance(label, dict) else label
    return None if name is None else str(name)


def write_asap(path: Path, request: Exported) -> None:
    """Write a rectangle per patch in level-0 pixels, named by its score, in groups for and against."""
    (e,) = request.explanations
    against, supports = ends(e, request.task)
    colours = {
        name: "#{:02X}{:02X}{:02X}".format(*c) for name, c in ((supports, SUPPORTS), (against, AGAINST))
    }
    root = ET.Element("ASAP_Annotations")
    annotations, groups = ET.SubElement(root, "Annotations"), ET.SubElement(root, "AnnotationGroups")
    for name, colour in colours.items():
        ET.SubElement(groups, "Group", Name=name, PartOfGroup="None", Color=colour)
    for i, (x0, y0, x1, y1) in enumerate(e.boxes().tolist()):
        score = float(e.scores[i])
        group = supports if score >= 0 or not e.signed else against
        name = f"{i} {e.column} {np.float32(score)!s}"
        about = {"Name": name, "Type": "Rectangle", "PartOfGroup": group, "Color": colours[group]}
        corners = ET.SubElement(ET.SubElement(annotations, "Annotation", about), "Coordinates")
        for order, (x, y) in enumerate(((x0, y0), (x1, y0), (x1, y1), (x0, y1))):
            ET.SubElement(corners, "Coordinate", Order=str(order), X=str(x), Y=str(y))
    write_text(path, ET.tostring(root, encoding="utf-8", xml_declaration=True).decode())


def read_asap(path: str | PathLike[str]) -> Tiles:
    """Read rectangles and polygons of ASAP's XML as boxes with their groups; xmil's scores by column."""
    data = Path(path).read_bytes() if Path(path).is_file() else b""
    if not data:
        raise FileError(f"{path}: no such file, or an empty one.")
    with refuse_damage(f"{path}: not a readable file of ASAP's annotations"):
        notes = parse_xml(data).findall("./Annotations/Annotation")
        points = [
            [(float(c.attrib["X"]), float(c.attrib["Y"])) for c in note.iter("Coordinate")] for note in notes
        ]
        boxes = [[*np.min(each, axis=0), *np.max(each, axis=0)] for each in points]
    groups = tuple(None if note.get("PartOfGroup") == "None" else note.get("PartOfGroup") for note in notes)
    parts = []
    for note in notes:  # names written by `write_asap`: number, column, score
        number, _, rest = note.get("Name", "").partition(" ")
        column, _, score = rest.rpartition(" ") if number.isdecimal() else ("", "", "")
        parts.append((column, score))
    scores = {
        column: np.array([float(score) if own == column else np.nan for own, score in parts])
        for column in dict.fromkeys(column for column, _ in parts if column)
    }
    return Tiles(np.array(boxes, dtype=np.float64).reshape(-1, 4), scores, groups)


def write_table(path: Path, request: Exported) -> None:
    """Write level-0 boxes `x0, y0, x1, y1` and a column for each `<method>:<target>`, as CSV or Parquet."""
    import pyarrow as pa

    boxes = request.explanations[0].boxes()
    columns = {name: pa.array(boxes[:, i]) for i, name in enumerate(("x0", "y0", "x1", "y1"))}
    table = pa.table({**columns, **{e.column: pa.array(e.scores) for e in request.explanations}})
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        write_atomically(path, lambda part: pq.write_table(table, part, compression="zstd"))
    else:
        from pyarrow import csv

        table = table.rename_columns([str(csv_cell(name)) for name in table.column_names])
        options = csv.WriteOptions(quoting_style="needed")
        write_atomically(path, lambda part: csv.write_csv(table, part, options))


WIDEST = 8192  # pixels of a map's longer edge
TILE = 256
PADDING = float(np.finfo(np.float32).min)  # where there is no patch
CODING, MAKER = "99XMIL", "xmil"
NO_UNIT = ("1", "no units", "UCUM")
_WSI = "1.2.840.10008.5.1.4.1.1.77.1.6"
UNKNOWN = (  # attributes of patient and study that DICOM requires
    "PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID", "StudyDate",
    "StudyTime", "PositionReferenceIndicator",
)  # fmt: skip


def write_parametric_map(path: Path, request: Exported) -> None:
    """Write one explanation as a Parametric Map of float32, with the largest pixels that fit all patches."""
    hd = load_optional("highdicom", "export")
    (e,) = request.explanations
    boxes, step = _boxes(request), _step(request)
    corner, far = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    width, height = (int(edge) for edge in far - corner)
    canvas = Canvas((int(corner[0]), int(corner[1]), width, height), (width // step, height // step))
    cells = Cells.cut(boxes, canvas)
    picture = cells.expand(cells.average(e.scores)).astype(np.float32)
    values = picture[np.isfinite(picture)]
    low, high = float(values.min()), float(values.max())
    slide = _slide_header(request, canvas, step)
    mapping = hd.pm.RealWorldValueMapping(
        lut_label="SCORE",
        lut_explanation=" to ".join(ends(e, request.task))[:64],
        unit=_code(*NO_UNIT),
        value_range=(low, high) if low < high else (low, low + 1.0),
        intercept=0.0,
        slope=1.0,
        quantity_definition=_code(e.method, e.column[:64]),
    )
    window = hd.VOILUTTransformation(window_center=(low + high) / 2, window_width=max(high - low, 1e-6))
    parametric_map = hd.pm.ParametricMap(
        [slide],
        np.where(np.isfinite(picture), picture, np.float32(PADDING))[None],
        **_identity(e, "map"),
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[mapping],
        voi_lut_transformations=[window],
        pixel_measures=slide.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence,
        plane_orientation=hd.PlaneOrientationSequence("SLIDE", slide.ImageOrientationSlide),
        tile_pixel_array=True,
        tile_size=(min(TILE, picture.shape[0]), min(TILE, picture.shape[1])),
        content_label="EVIDENCE",
        content_description=e.column[:64],
    )
    parametric_map.FloatPixelPaddingValue = PADDING
    write_atomically(path, lambda part: parametric_map.save_as(part))


def write_annotations(path: Path, request: Exported) -> None:
    """Write the patches of one explanation as rectangles with their scores, in level-0 pixels."""
    hd = load_optional("highdicom", "export")
    (e,) = request.explanations
    boxes = _boxes(request).astype(np.float32)
    corners = [np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]) for x0, y0, x1, y1 in boxes]
    scores = hd.ann.Measurements(_code("score", e.column[:64]), e.scores.astype(np.float32), _code(*NO_UNIT))
    algorithm = hd.AlgorithmIdentificationSequence(
        name=f"xmil {e.method}"[:64], family=_code(e.method, e.method), version=__version__
    )
    group = hd.ann.AnnotationGroup(
        number=1,
        uid=_uid(e, "group"),
        label=e.column[:64],
        annotated_property_category=_code("evidence", "Evidence of a model"),
        annotated_property_type=_code(f"{e.method}", e.column[:64]),
        graphic_type=hd.ann.GraphicTypeValues.RECTANGLE,
        graphic_data=corners,
        algorithm_type=hd.ann.AnnotationGroupGenerationTypeValues.AUTOMATIC,
        algorithm_identification=algorithm,
        measurements=[scores],
    )
    width, height = request.frame[2:]
    annotations = hd.ann.MicroscopyBulkSimpleAnnotations(
        [_slide_header(request, Canvas((*request.frame,), (width, height)), 1)],
        hd.ann.AnnotationCoordinateTypeValues.SCOORD,
        [group],
        content_label="EVIDENCE",
        content_description=e.column[:64],
        **_identity(e, "annotations"),
    )
    write_atomically(path, lambda part: annotations.save_as(part))


def _boxes(request: Exported) -> IntArray:
    """Compute boxes relative to the frame's corner, as in a DICOM slide."""
    boxes: IntArray = request.explanations[0].boxes() - np.tile(request.frame[:2], 2)
    return boxes


def _step(request: Exported) -> int:
    """Find the largest step in level-0 pixels with all patches on its grid."""
    boxes = _boxes(request)
    low = boxes[:, :2].min(axis=0)
    step = int(np.gcd.reduce(np.concatenate([(boxes - np.tile(low, 2)).ravel(), [0]])))
    if request.downsample is not None:
        step = gcd(step, request.downsample)
    if max(np.ptp(boxes[:, [0, 2]]), np.ptp(boxes[:, [1, 3]])) / step > WIDEST:
        raise InputError(
            "The patches do not lie on a coarse grid, so a DICOM map would be too wide; export "
            "'dicom-annotations' instead."
        )
    return step


def _slide_header(request: Exported, canvas: Canvas, step: int) -> Any:
    """Make the header of a whole-slide image for the slide: its size, pixels and origin."""
    from pydicom.dataset import Dataset

    def dataset(**values: Any) -> Dataset:
        filled = Dataset()
        for name, value in values.items():
            setattr(filled, name, value)
        return filled

    e, mpp = request.explanations[0], request.mpp
    if mpp is None:
        raise InputError(
            f"The slide {e.bag or ''} has no known mpp, which DICOM needs; pass `mpp=`, or `slides=` "
            "that store it."
        )
    name, spacing = (e.bag or "slide")[:64], mpp * step / 1000  # mm
    width, height = canvas.size
    x, y, _, _ = canvas.box
    origin = dataset(
        XOffsetInSlideCoordinateSystem=x * mpp / 1000, YOffsetInSlideCoordinateSystem=y * mpp / 1000
    )
    measures = dataset(PixelSpacing=[spacing, spacing], SliceThickness=0.001)
    specimen = dataset(
        SpecimenIdentifier=name,
        SpecimenUID=_uid(e, "specimen"),
        IssuerOfTheSpecimenIdentifierSequence=[],
        SpecimenPreparationSequence=[],
    )
    return dataset(
        **dict.fromkeys(UNKNOWN, ""),
        **{uid: _uid(e, uid) for uid in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")},
        SOPClassUID=_WSI,
        SOPInstanceUID=_uid(e, "slide"),
        Modality="SM",
        ImageType=["ORIGINAL", "PRIMARY", "VOLUME", "NONE"],
        SamplesPerPixel=3,
        NumberOfFrames=1,
        Columns=min(width, 65_535),
        Rows=min(height, 65_535),
        TotalPixelMatrixColumns=width,
        TotalPixelMatrixRows=height,
        TotalPixelMatrixFocalPlanes=1,
        DimensionOrganizationType="TILED_FULL",
        ImageOrientationSlide=[1, 0, 0, 0, 1, 0],  # columns and rows run as the slide's
        ImagedVolumeWidth=width * spacing,
        ImagedVolumeHeight=height * spacing,
        ImagedVolumeDepth=0.001,
        TotalPixelMatrixOriginSequence=[origin],
        SharedFunctionalGroupsSequence=[dataset(PixelMeasuresSequence=[measures])],
        SpecimenDescriptionSequence=[specimen],
        ContainerIdentifier=name,
        IssuerOfTheContainerIdentifierSequence=[],
        ContainerTypeCodeSequence=[_code("slide", "Microscope slide")],
    )


def _identity(e: Explanation, kind: str) -> dict[str, Any]:
    """Make the attributes that identify an object and its maker."""
    return {
        "series_instance_uid": _uid(e, f"series {kind}"),
        "series_number": 1,
        "sop_instance_uid": _uid(e, kind),
        "instance_number": 1,
        "manufacturer": MAKER,
        "manufacturer_model_name": MAKER,
        "software_versions": __version__,
        "device_serial_number": "0",
    }


def _uid(e: Explanation, what: str) -> str:
    """Make an identifier from a digest, under the root for UUIDs (2.25, ISO 9834-8).

    Identifiers of the slide are the same for all of its explanations.
    """
    own = what in ("map", "annotations", "group") or what.startswith("series")
    scores: npt.NDArray[Any] = np.ascontiguousarray(e.scores if own else np.zeros(0))
    text = f"xmil {e.bag} {e.column if own else ''} {what}".encode()
    return f"2.25.{int.from_bytes(sha256(text + scores.tobytes()).digest()[:15], 'big')}"


def _code(value: str, meaning: str, scheme: str = CODING) -> Any:
    concept = load_optional("highdicom", "export").sr.CodedConcept
    return concept(value=value[:16], scheme_designator=scheme, meaning=meaning[:64])


def _write_tiles(path: Path, request: Exported) -> None:
    write_geojson(path, request.explanations, origin=request.frame[:2], task=request.task)
    name = path.name.removesuffix(".gz").removesuffix(".geojson")
    folder = path.parent.parent / "groovy"
    folder.mkdir(exist_ok=True)
    write_style(folder / f"{name}.groovy", request.explanations, request.scales)


STOPS = 33  # colours of a scale in the script, which interpolates between them
STYLE = """// Colours the tiles of {slide} as the legend does: import the GeoJSON, then run this script.
// Another explanation: change the name; scores beyond the ends have the ends' colours.
def measurement = {first}
def scales = [
{scales}
]
def scale = scales[measurement]
getDetectionObjects().each {{ tile ->
    def value = tile.measurements[measurement]
    if (value == null || Double.isNaN(value as double)) return
    def colours = scale.colours.split(' ')  // as web pages write them
    double place = (value - scale.low) / ((scale.high - scale.low) ?: 1) * (colours.size() - 1)
    place = Math.max(0d, Math.min(colours.size() - 1d, place))
    int below = (int) Math.floor(place)
    int low = Integer.parseInt(colours[below], 16)
    int high = Integer.parseInt(colours[Math.min(below + 1, colours.size() - 1)], 16)
    def mix = [16, 8, 0].collect {{ bits ->
        int from = (low >> bits) & 255
        int to = (high >> bits) & 255
        (int) Math.round(from + (place - below) * (to - from))
    }}
    tile.setColor(mix[0], mix[1], mix[2])
}}
fireHierarchyUpdate()
"""


def write_style(path: Path, explanations: Sequence[Explanation], scales: Mapping[str, Scale]) -> None:
    """Write a script for QuPath that gives imported tiles the colours of the pictures."""
    entries = []
    for e in explanations:
        scale = scales[e.column]
        table = scale.paint(np.linspace(scale.low, scale.high, STOPS))[:, :3].astype(np.uint8)
        colours = table.tobytes().hex(" ", 3)  # one text: lists of numbers would fill a method of the JVM
        about = f"[low: {scale.low!r}d, high: {scale.high!r}d, colours: '{colours}']"
        entries.append(f"    {groovy_text(e.column)}: {about},")
    first = explanations[0]
    words = {"slide": groovy_comment(first.bag or "the slide"), "first": groovy_text(first.column)}
    write_text(path, STYLE.format(**words, scales="\n".join(entries)))


@register_service
def to_anndata(explanations: Sequence[Explanation]) -> Any:
    """Convert the explanations of one slide to AnnData: a row per patch, a variable `<method>:<target>` each.

    `obsm["spatial"]` has the centre of each patch in level-0 pixels, as scanpy and LazySlide expect, and
    `uns["xmil"]` outputs, audits, patch edge, mpp and warnings.
    """
    anndata, first = load_optional("anndata", "anndata"), explanations[0]
    if len({len(e) for e in explanations}) > 1:
        raise InputError("The explanations are of bags of different sizes; give those of one slide.")
    import pandas as pd

    obs = first.to_pandas()[[name for name in ("x0", "y0") if first.coords is not None]]
    # strings as objects: h5ad has no entry for the Arrow strings that pandas makes of them
    obs.index = pd.Index([str(i) for i in range(len(first))], name="patch", dtype=object)
    columns = pd.DataFrame(
        {"method": [e.method for e in explanations], "target": [str(e.target) for e in explanations]},
        index=pd.Index([e.column for e in explanations], dtype=object),
        dtype=object,
    )
    about = {
        "slide": first.bag or "",
        "version": __version__,
        "patch_size": first.patch_size or 0,
        "mpp": first.mpp or float("nan"),
        "explanations": {
            e.column.replace("/", "_"): {
                "output": e.output,
                "logits": np.asarray(e.logits),
                "audit": {} if e.audit is None else e.audit.as_dict(),
                "warnings": np.array([*e.warnings, *filter(None, [e.patches.edge_note])], dtype=object),
            }
            for e in explanations
        },
    }
    table = anndata.AnnData(
        np.stack([e.scores for e in explanations], axis=1), obs=obs, var=columns, uns={"xmil": about}
    )
    if first.coords is not None:
        table.obsm["spatial"] = first.coords + (first.patch_size or 0) / 2
    for name in ("stderr", "spread"):
        layers = [getattr(e, name) for e in explanations]
        if all(layer is not None for layer in layers):
            table.layers[name] = np.stack(layers, axis=1)
    return table


def _write_anndata(path: Path, request: Exported) -> None:
    table = to_anndata(request.explanations)
    io = load_optional("anndata.io", "anndata")

    def write(part: str) -> None:
        with create_hdf5(part) as (file, _):
            io.write_elem(file, "/", table)

    write_atomically(path, write)


_BUILT_IN = {
    "geojson": Export(_write_tiles, "geojson"),
    "qupath": Export(_write_tiles, "geojson.gz"),
    "asap": Export(write_asap, "xml", each=True),
    "dicom": Export(write_parametric_map, "map.dcm", each=True),
    "dicom-annotations": Export(write_annotations, "annotations.dcm", each=True),
    "scores": Export(lambda path, r: write_scores(path, r.explanations, r.pyramid), "scores.ome.tif"),
    "colours": Export(
        lambda path, r: write_colours(path, r.explanations[0], r.scales[r.explanations[0].column], r.pyramid),
        "colours.ome.tif",
        each=True,
    ),
    "ome-zarr": Export(write_omezarr, "scores.ome.zarr"),
    "spatialdata": Export(write_spatialdata, "zarr"),
    "anndata": Export(_write_anndata, "h5ad"),
    "csv": Export(write_table, "csv"),
    "parquet": Export(write_table, "parquet"),
}
for _name, _export in _BUILT_IN.items():
    EXPORTS.add(_name, _export)
