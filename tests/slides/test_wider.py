"""Slides beyond OpenSlide: DICOM by wsidicom, JPEG 2000 and WebP TIFFs; stacks, fluorescence by name."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

import xmil
from xmil.core.errors import FileError

TILE = 64


def tissue(height: int = 150, width: int = 200) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x, y, (x + y) // 2], axis=2).astype(np.uint8)


def write_dicom(path: Path, pixels: np.ndarray, *, colours: str = "YBR_FULL_422") -> None:
    """A tiled whole-slide image as scanners write it: JPEG tiles, row by row."""
    import pydicom
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.encaps import encapsulate
    from pydicom.uid import JPEGBaseline8Bit, generate_uid

    rows, columns = -(-pixels.shape[0] // TILE), -(-pixels.shape[1] // TILE)
    padded = np.full((rows * TILE, columns * TILE, 3), 255, np.uint8)
    padded[: pixels.shape[0], : pixels.shape[1]] = pixels
    frames = []
    for row in range(rows):
        for column in range(columns):
            held = io.BytesIO()
            tile = padded[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            Image.fromarray(tile).save(held, "JPEG", quality=98, subsampling=0)
            frames.append(held.getvalue())
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    meta.MediaStorageSOPInstanceUID, meta.TransferSyntaxUID = generate_uid(), JPEGBaseline8Bit
    slide = Dataset()
    slide.file_meta = meta
    slide.SOPClassUID, slide.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    for name in ("StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID", "DimensionOrganizationUID"):
        setattr(slide, name, generate_uid())
    slide.Modality, slide.ImageType = "SM", ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    slide.PatientID = slide.PatientName = slide.StudyDate = slide.StudyTime = slide.AccessionNumber = ""
    slide.DimensionOrganizationType, slide.ContainerIdentifier = "TILED_FULL", "s"
    slide.Rows = slide.Columns = TILE
    slide.TotalPixelMatrixRows, slide.TotalPixelMatrixColumns = pixels.shape[:2]
    slide.TotalPixelMatrixFocalPlanes = slide.NumberOfOpticalPaths = 1
    slide.NumberOfFrames, slide.SamplesPerPixel = len(frames), 3
    slide.PhotometricInterpretation, slide.PlanarConfiguration = colours, 0
    slide.BitsAllocated = slide.BitsStored = 8
    slide.HighBit, slide.PixelRepresentation = 7, 0
    slide.ImageOrientationSlide = [0, -1, 0, -1, 0, 0]
    slide.ImagedVolumeWidth, slide.ImagedVolumeHeight = pixels.shape[1] * 5e-4, pixels.shape[0] * 5e-4
    slide.ImagedVolumeDepth, slide.FocusMethod, slide.ExtendedDepthOfField = 0.001, "AUTO", "NO"
    measures, shared, origin, optics = Dataset(), Dataset(), Dataset(), Dataset()
    measures.PixelSpacing, measures.SliceThickness = [0.0005, 0.0005], 0.001
    shared.PixelMeasuresSequence = [measures]
    slide.SharedFunctionalGroupsSequence = [shared]
    origin.XOffsetInSlideCoordinateSystem = origin.YOffsetInSlideCoordinateSystem = 0.0
    slide.TotalPixelMatrixOriginSequence = [origin]
    optics.OpticalPathIdentifier = "0"
    slide.OpticalPathSequence = [optics]
    slide.PixelData = encapsulate(frames)
    slide["PixelData"].VR, slide["PixelData"].is_undefined_length = "OB", True
    pydicom.dcmwrite(path, slide, enforce_file_format=True)


def test_dicom_through_wsidicom(tmp_path: Path) -> None:
    pytest.importorskip("wsidicom")
    from xmil.slides.backends import wsidicom

    write_dicom(tmp_path / "s.dcm", tissue())
    (tmp_path / "note.dcm").write_bytes(b"no DICOM")
    with wsidicom.open_(tmp_path / "s.dcm") as slide:
        assert (slide.dimensions, slide.mpp) == ((200, 150), pytest.approx(0.5))
        area = slide.read_area((40, 50, 100, 60), (100, 60))
        assert np.abs(area.astype(int) - tissue()[50:110, 40:140]).max() <= 12  # JPEG
    with xmil.open_slide(tmp_path / "s.dcm") as slide:
        assert slide.dimensions == (200, 150)


def test_a_deflated_file_is_refused_before_it_is_inflated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte may inflate to a gigabyte; as one of several files it is left out."""
    pytest.importorskip("wsidicom")
    pydicom = pytest.importorskip("pydicom")
    write_dicom(tmp_path / "s.dcm", tissue(), colours="YBR_FULL")
    bomb = pydicom.dcmread(tmp_path / "s.dcm")
    bomb.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    del bomb.PixelData
    bomb.add_new((0x0009, 0x0010), "LO", "xmil")
    bomb.add_new((0x0009, 0x1001), "OB", bytes(1 << 20))
    pydicom.dcmwrite(tmp_path / "bomb.dcm", bomb)
    sizes = []
    inflate = zlib.decompress
    monkeypatch.setattr(zlib, "decompress", lambda *args: sizes.append(len(args[0])) or inflate(*args))
    with pytest.raises(xmil.XmilError, match="deflated"):
        xmil.open_slide(tmp_path / "bomb.dcm")
    with xmil.open_slide(tmp_path / "s.dcm") as slide:
        assert slide.dimensions == (200, 150)
    assert sizes == []


def test_dicom_with_huge_tiles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wsidicom")
    write_dicom(tmp_path / "s.dcm", tissue(), colours="YBR_FULL")
    monkeypatch.setenv("XMIL_MEMORY", "1K")
    monkeypatch.setattr("xmil.core.budget.RATIO", 0)
    with pytest.raises(xmil.XmilError, match=r"s\.dcm: 'a tile'"):
        xmil.open_slide(tmp_path / "s.dcm")


def test_dicom_that_openslide_refuses(tmp_path: Path) -> None:
    """Colours as YBR_FULL, as some scanners and converters write them."""
    openslide = pytest.importorskip("openslide")
    pytest.importorskip("wsidicom")
    path = tmp_path / "s.dcm"
    write_dicom(path, tissue(), colours="YBR_FULL")
    with pytest.raises(openslide.OpenSlideError, match="YBR_FULL"):
        openslide.OpenSlide(path)
    with xmil.open_slide(path) as slide:
        assert (slide.backend, slide.dimensions) == ("wsidicom, dicom", (200, 150))
        area = slide.read_area((40, 50, 100, 60), (100, 60))
        assert np.abs(area.astype(int) - tissue()[50:110, 40:140]).max() <= 12  # JPEG


@pytest.mark.parametrize("compression", ["jpeg2000", "webp"])
def test_tiffs_of_newer_codecs(tmp_path: Path, compression: str) -> None:
    pytest.importorskip("imagecodecs")
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, tissue(), tile=(64, 64), compression=compression, photometric="rgb")
    with xmil.open_slide(path) as slide:
        assert np.abs(slide.read_area((0, 0, 200, 150), (200, 150)).astype(int) - tissue()).max() <= 12


def test_stacks_and_fluorescence_are_refused_by_name(tmp_path: Path) -> None:
    for name, shape, axes, said in (
        ("z.ome.tif", (3, 64, 64), "ZYX", "a Z-stack; save one focal plane"),
        ("c.ome.tif", (4, 64, 64), "CYX", "a fluorescence image"),
        ("t.ome.tif", (4, 64, 64), "TYX", "a time series"),
    ):
        tifffile.imwrite(tmp_path / name, np.zeros(shape, np.uint16), metadata={"axes": axes})
        with pytest.raises(FileError, match=said):
            xmil.open_slide(tmp_path / name)


@pytest.mark.parametrize(
    ("shape", "kind", "said"),
    [
        ((300, 300), np.uint16, "a fluorescence image"),
        ((4, 300, 300), np.uint8, "unsupported pixels"),
    ],
)
def test_tiled_tiffs_that_openslide_would_show_in_part(
    tmp_path: Path, shape: tuple[int, ...], kind: type, said: str
) -> None:
    """OpenSlide opens both without a word: sixteen bits cut to eight, the first of four channels."""
    openslide = pytest.importorskip("openslide")
    path = tmp_path / "s.tif"
    pixels = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, dtype=kind)
    tifffile.imwrite(path, pixels, tile=(128, 128), photometric="minisblack", metadata=None)
    assert openslide.OpenSlide(path).dimensions == (300, 300)
    with pytest.raises(FileError, match=said):
        xmil.open_slide(path)
