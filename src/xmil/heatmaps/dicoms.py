"""Scores as DICOM: a Parametric Map, or Microscopy Bulk Simple Annotations, through highdicom.

The slide stands in a header of its own, made from its name: patient and study are unknown here, and an
archive that knows the slide under other identifiers must relate them. The same explanation gives the same
identifiers.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.bag import IntArray
from xmil.core.errors import InputError, UnsupportedError
from xmil.core.explanation import Explanation
from xmil.core.storage import write_atomically
from xmil.heatmaps.canvas import Canvas, Cells
from xmil.heatmaps.registry import Exported
from xmil.heatmaps.words import ends

WIDEST = 8192  # pixels of a map's longer edge
TILE = 256
PADDING = float(np.finfo(np.float32).min)  # where there is no patch
CODING, MAKER = "99XMIL", "xmil"
_WSI = "1.2.840.10008.5.1.4.1.1.77.1.6"


def write_parametric_map(path: Path, given: Exported) -> None:
    """One explanation as a Parametric Map of float32: a pixel for a patch, or for what patches share."""
    hd = _highdicom()
    (e,) = given.explanations
    boxes, step = _boxes(given), _step(given)
    canvas = _canvas(boxes, step)
    values = Cells.cut(boxes, canvas)
    picture = values.expand(values.average(e.scores)).astype(np.float32)
    real = picture[np.isfinite(picture)]
    low, high = float(real.min()), float(real.max())
    slide = _slide_header(given, canvas, step)
    made = hd.pm.ParametricMap(
        [slide],
        np.where(np.isfinite(picture), picture, np.float32(PADDING))[None],
        **_identity(e, "map"),
        contains_recognizable_visual_features=False,
        real_world_value_mappings=[_mapping(e, given.task, low, high)],
        voi_lut_transformations=[_window(hd, low, high)],
        pixel_measures=slide.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence,
        plane_orientation=hd.PlaneOrientationSequence("SLIDE", slide.ImageOrientationSlide),
        tile_pixel_array=True,
        tile_size=(min(TILE, picture.shape[0]), min(TILE, picture.shape[1])),
        content_label="EVIDENCE",
        content_description=e.column[:64],
    )
    made.FloatPixelPaddingValue = PADDING
    write_atomically(path, lambda part: made.save_as(part))


def write_annotations(path: Path, given: Exported) -> None:
    """The patches of one explanation as rectangles with their scores, in level-0 pixels of the slide."""
    hd = _highdicom()
    (e,) = given.explanations
    boxes = _boxes(given).astype(np.float32)
    corners = [np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]]) for x0, y0, x1, y1 in boxes]
    group = hd.ann.AnnotationGroup(
        number=1,
        uid=_uid(e, "group"),
        label=e.column[:64],
        annotated_property_category=_code("evidence", "Evidence of a model"),
        annotated_property_type=_code(f"{e.method}", e.column[:64]),
        graphic_type=hd.ann.GraphicTypeValues.RECTANGLE,
        graphic_data=corners,
        algorithm_type=hd.ann.AnnotationGroupGenerationTypeValues.AUTOMATIC,
        algorithm_identification=_algorithm(e),
        measurements=[
            hd.ann.Measurements(_code("score", e.column[:64]), e.scores.astype(np.float32), _no_unit())
        ],
    )
    width, height = given.frame[2:]
    made = hd.ann.MicroscopyBulkSimpleAnnotations(
        [_slide_header(given, Canvas((*given.frame,), (width, height)), 1)],
        hd.ann.AnnotationCoordinateTypeValues.SCOORD,
        [group],
        content_label="EVIDENCE",
        content_description=e.column[:64],
        **_identity(e, "annotations"),
    )
    write_atomically(path, lambda part: made.save_as(part))


def _boxes(given: Exported) -> IntArray:
    """Boxes that count from the frame's corner, as pixels of a DICOM slide do."""
    boxes: IntArray = given.explanations[0].boxes() - np.tile(given.frame[:2], 2)
    return boxes


def _step(given: Exported) -> int:
    """The largest step in level-0 pixels on whose grid every patch lies."""
    boxes = _boxes(given)
    low = boxes[:, :2].min(axis=0)
    step = int(np.gcd.reduce(np.concatenate([(boxes - np.tile(low, 2)).ravel(), [0]])))
    if given.downsample is not None:
        step = gcd(step, given.downsample)
    if max(np.ptp(boxes[:, [0, 2]]), np.ptp(boxes[:, [1, 3]])) / step > WIDEST:
        raise InputError(
            "The patches lie on no coarse grid, so that a DICOM map would be too wide; use "
            "--to dicom-annotations."
        )
    return step


def _canvas(boxes: IntArray, step: int) -> Canvas:
    low, high = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    width, height = (int(edge) for edge in high - low)
    return Canvas((int(low[0]), int(low[1]), width, height), (width // step, height // step))


def _slide_header(given: Exported, canvas: Canvas, step: int) -> Any:
    """A whole-slide image's header in place of the slide: its size, its pixels and where they begin."""
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    e = given.explanations[0]
    if given.mpp is None:
        raise InputError(
            f"The slide {e.bag or ''} has no known mpp, which DICOM needs; pass --mpp, or --slides that "
            "store it."
        )
    spacing = given.mpp * step / 1000  # mm
    slide = Dataset()
    slide.SOPClassUID, slide.SOPInstanceUID = _WSI, _uid(e, "slide")
    for name in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID"):
        setattr(slide, name, _uid(e, name))
    for name in ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID"):
        setattr(slide, name, "")
    slide.StudyDate = slide.StudyTime = slide.PositionReferenceIndicator = ""
    slide.Modality, slide.ContainerIdentifier = "SM", (e.bag or "slide")[:64]
    slide.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    slide.SamplesPerPixel, slide.NumberOfFrames = 3, 1
    slide.Columns, slide.Rows = (min(edge, 65_535) for edge in canvas.size)
    slide.TotalPixelMatrixColumns, slide.TotalPixelMatrixRows = canvas.size
    slide.TotalPixelMatrixFocalPlanes = 1
    slide.DimensionOrganizationType = "TILED_FULL"
    slide.ImageOrientationSlide = [1, 0, 0, 0, 1, 0]  # columns and rows run as the slide's
    slide.ImagedVolumeWidth, slide.ImagedVolumeHeight = (edge * spacing for edge in canvas.size)
    slide.ImagedVolumeDepth = 0.001
    origin = Dataset()
    origin.XOffsetInSlideCoordinateSystem = canvas.box[0] * given.mpp / 1000
    origin.YOffsetInSlideCoordinateSystem = canvas.box[1] * given.mpp / 1000
    slide.TotalPixelMatrixOriginSequence = Sequence([origin])
    measures, shared, specimen = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [spacing, spacing], 0.001
    shared.PixelMeasuresSequence = Sequence([measures])
    slide.SharedFunctionalGroupsSequence = Sequence([shared])
    specimen.SpecimenIdentifier, specimen.SpecimenUID = (e.bag or "slide")[:64], _uid(e, "specimen")
    specimen.IssuerOfTheSpecimenIdentifierSequence = Sequence()
    specimen.SpecimenPreparationSequence = Sequence()
    slide.SpecimenDescriptionSequence = Sequence([specimen])
    slide.IssuerOfTheContainerIdentifierSequence = Sequence()
    slide.ContainerTypeCodeSequence = Sequence([_code("slide", "Microscope slide")])
    return slide


def _mapping(e: Explanation, task: str, low: float, high: float) -> Any:
    hd = _highdicom()
    return hd.pm.RealWorldValueMapping(
        lut_label="SCORE",
        lut_explanation=f"{ends(e, task)[0]} to {ends(e, task)[1]}"[:64],
        unit=_no_unit(),
        value_range=(low, high) if low < high else (low, low + 1.0),
        intercept=0.0,
        slope=1.0,
        quantity_definition=_code(e.method, e.column[:64]),
    )


def _window(hd: Any, low: float, high: float) -> Any:
    return hd.VOILUTTransformation(window_center=(low + high) / 2, window_width=max(high - low, 1e-6))


def _identity(e: Explanation, kind: str) -> dict[str, Any]:
    """What tells an object from others, and who made it."""
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


def _algorithm(e: Explanation) -> Any:
    return _highdicom().AlgorithmIdentificationSequence(
        name=f"xmil {e.method}"[:64], family=_code(e.method, e.method), version=__version__
    )


def _uid(e: Explanation, what: str) -> str:
    """An identifier under the root for names made by a digest (2.25, ISO 9834-8).

    What belongs to the slide is the same for all of its explanations.
    """
    own = what in ("map", "annotations", "group") or what.startswith("series")
    held: npt.NDArray[Any] = np.ascontiguousarray(e.scores if own else np.zeros(0))
    text = f"xmil {e.bag} {e.column if own else ''} {what}".encode()
    return f"2.25.{int.from_bytes(sha256(text + held.tobytes()).digest()[:15], 'big')}"


def _code(value: str, meaning: str) -> Any:
    return _highdicom().sr.CodedConcept(value=value[:16], scheme_designator=CODING, meaning=meaning[:64])


def _no_unit() -> Any:
    return _highdicom().sr.CodedConcept(value="1", scheme_designator="UCUM", meaning="no units")


@cache
def _highdicom() -> Any:
    try:
        import highdicom
    except ImportError:
        raise UnsupportedError("DICOM exports need highdicom: pip install 'xmil[export]'.") from None
    return highdicom
