"""TIFFs through tifffile: plain, pyramidal and OME-TIFF, read segment by segment.

A segment is a tile or a strip. Only the segments that a region touches are read and decoded; the last ones
stay in a cache, since neighbouring patches share them.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from io import BytesIO
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from xmil.core.budget import check_budget
from xmil.core.errors import FileError
from xmil.core.text import parse_xml
from xmil.slides.backends import UnreadableSlideError, decoding, resolution_mpp, square_mpp
from xmil.slides.slide import Pixels, Size, Slide, on_white

logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # our own errors report damaged files

CACHE = 256 << 20  # bytes of decoded segments
LARGEST_SEGMENT = 2 << 30
NEEDS_CODECS = (33003, 33004, 33005, 34712, 50001)  # JPEG 2000 by Aperio and by TIFF, WebP
JPEG, RGB = 7, 2  # TIFF's codes for the compression and the photometric interpretation
ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"  # "no colour transform"
_MICRONS = {"µm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}


class TiffSlide(Slide):
    """A TIFF whose pages are levels."""

    def __init__(self, path: Path, file: Any, series: Any, *, mpp: tuple[float | None, str | None]) -> None:
        pages = [level.keyframe for level in series.levels]
        super().__init__(
            path,
            levels=[(int(page.imagewidth), int(page.imagelength)) for page in pages],
            mpp=mpp[0],
            mpp_source=mpp[1],
            magnification=_ome_magnification(file.ome_metadata if file.is_ome else ""),
            backend=f"tifffile, {series.kind}",
        )
        self._file, self._pages = file, pages
        self._lock = Lock()
        self._cache: OrderedDict[tuple[int, int], npt.NDArray[Any]] = OrderedDict()
        self._cached_bytes, self.cache_bytes = 0, CACHE

    def _read(self, level: int, x: int, y: int, size: Size) -> Pixels:
        page = self._pages[level]
        if page.is_memmappable and page.planarconfig == 1:  # one strip may hold the full picture
            with self._lock:
                rows = page.asarray(out="memmap").reshape(page.imagelength, page.imagewidth, -1)
            return _as_rgb(np.array(rows[y : y + size[1], x : x + size[0]]), page)
        pixels = np.full((size[1], size[0], int(page.samplesperpixel)), 255, dtype=np.uint8)
        for index, top, left, plane in _touched(page, x, y, size):
            segment = self._segment(level, index)  # (length, width, samples)
            above, before = max(y - top, 0), max(x - left, 0)
            part = segment[above : above + size[1], before : before + size[0]]
            row, column = max(top - y, 0), max(left - x, 0)
            part = part[: size[1] - row, : size[0] - column]
            channels = slice(None) if page.planarconfig == 1 else slice(plane, plane + 1)
            pixels[row : row + part.shape[0], column : column + part.shape[1], channels] = part
        return _as_rgb(pixels, page)

    def _segment(self, level: int, index: int) -> npt.NDArray[Any]:
        key = (level, index)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            page = self._pages[level]
            data = _bytes(self._file, page, index)
        segment = _decoded(page, data, index)
        with self._lock:
            if key not in self._cache:  # another thread may have been faster
                self._cache[key] = segment
                self._cached_bytes += segment.nbytes
            while self._cached_bytes > self.cache_bytes and len(self._cache) > 1:
                self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return segment

    def close(self) -> None:
        self._file.close()


def open_ome(path: Path) -> Slide:
    """Open an OME-TIFF, whose levels OpenSlide does not see; leave other files to the next backend."""
    if not path.name.lower().endswith((".tif", ".tiff", ".btf")):
        raise UnreadableSlideError("")
    return open_(path, ome=True)


def stored_ome_mpp(path: Path) -> float | None:
    """Read the mpp of an OME-TIFF that another backend reads; None if it stores none."""
    import tifffile

    try:
        check_pages(path)
        with tifffile.TiffFile(path) as file:
            return square_mpp(*_ome_sizes(file.ome_metadata or ""), "")[0]
    except Exception:  # damaged TIFFs raise almost any type
        return None


def open_(path: Path, *, ome: bool = False) -> Slide:
    """Open a TIFF with tifffile; with `ome`, only OME-TIFFs."""
    import tifffile

    with decoding("tifffile"), ExitStack() as on_failure:
        check_pages(path)
        try:
            file = tifffile.TiffFile(path)
        except tifffile.TiffFileError:
            raise UnreadableSlideError("tifffile: not a TIFF, or its header is damaged") from None
        on_failure.callback(file.close)
        if ome and not file.is_ome:
            raise UnreadableSlideError("")
        if file.is_ome:
            _check_parts(path, file.ome_metadata or "")
        if not file.series or file.series[0].keyframe.dtype is None:
            raise UnreadableSlideError("tifffile: the file holds no picture")
        series = file.series[0]
        _check_pixels(path, series)
        slide = TiffSlide(path, file, series, mpp=_mpp(file, series.keyframe))
        slide._read(0, 0, 0, (1, 1))  # fails if a codec is missing, so that another backend is tried
        on_failure.pop_all()
        return slide


def check_brightfield(path: Path) -> None:
    """Refuse a plain TIFF that is not brightfield: OpenSlide would show its first page in eight bits."""
    try:
        import tifffile

        check_pages(path)
        with tifffile.TiffFile(path) as file:
            _check_pixels(path, file.series[0])
    except FileError:
        raise
    except Exception:  # OpenSlide decides
        return


def _check_pixels(path: Path, series: Any) -> None:
    """Refuse a TIFF that is not a brightfield slide, and name its kind."""
    page = series.keyframe
    brightfield = series.axes in ("YX", "YXS", "SYX") and page.samplesperpixel in (1, 3, 4)
    if page.dtype == np.uint8 and brightfield:
        return
    what = "a TIFF with unsupported pixels"
    if "Z" in series.axes:
        what = "a Z-stack; save one focal plane as a slide"
    elif "T" in series.axes:
        what = "a time series"
    elif "C" in series.axes or (page.dtype != np.uint8 and page.samplesperpixel == 1):
        what = "a fluorescence image, or separate channels"
    kind = f"{page.dtype} with the axes {series.axes}, shape {series.shape}"
    raise FileError(f"{path}: {what} ({kind}); xmil reads brightfield slides in 8-bit RGB.")


def _touched(page: Any, x: int, y: int, size: Size) -> Iterator[tuple[int, int, int, int]]:
    """Yield index, top, left and plane of the segments that a region touches, in every plane."""
    width, length = _segment_size(page)
    across, down = -(-page.imagewidth // width), -(-page.imagelength // length)
    columns = range(x // width, (x + size[0] - 1) // width + 1)
    rows = range(y // length, (y + size[1] - 1) // length + 1)
    planes = range(1 if page.planarconfig == 1 else page.samplesperpixel)
    for plane, row, column in product(planes, rows, columns):
        yield (plane * down + row) * across + column, row * length, column * width, plane


def _segment_size(page: Any) -> Size:
    if page.is_tiled:
        return int(page.tilewidth), int(page.tilelength)
    rows = min(int(page.rowsperstrip or page.imagelength), int(page.imagelength))
    return int(page.imagewidth), max(1, rows)


def _bytes(file: Any, page: Any, index: int) -> bytes | None:
    if index >= len(page.dataoffsets) or index >= len(page.databytecounts):
        raise ValueError(f"tile {index} is not in the file")
    count = page.databytecounts[index]
    if count == 0:
        return None
    file.filehandle.seek(page.dataoffsets[index])
    data: bytes = file.filehandle.read(count)
    if len(data) < count:
        raise ValueError("the file ends too early")
    return data


def _decoded(page: Any, data: bytes | None, index: int) -> npt.NDArray[Any]:
    """Decode a segment (length, width, samples); a missing one is white."""
    width, length = _segment_size(page)
    channels = page.samplesperpixel if page.planarconfig == 1 else 1
    if width * length * channels > LARGEST_SEGMENT:
        raise ValueError("its picture is a single large strip; convert it to a tiled TIFF")
    check_budget(width * length * channels, "a tile", page.parent.filehandle.path)
    if data is None:
        return np.full((length, width, channels), 255, dtype=np.uint8)
    if find_spec("imagecodecs") is None:
        if int(page.compression) == JPEG:
            return _jpeg(page, data)
        if int(page.compression) in NEEDS_CODECS:
            raise ValueError("JPEG 2000 and WebP need imagecodecs: pip install 'xmil[dicom]'")
    tables = {"jpegtables": page.jpegtables} if page.jpegtables is not None else {}
    segment = np.asarray(page.decode(data, index, **tables)[0])  # (depth, length, width, samples)
    return segment.reshape(segment.shape[1:])


def _jpeg(page: Any, data: bytes) -> npt.NDArray[Any]:
    """Decode a JPEG segment by Pillow: prepend the page's tables, and a marker if it is RGB, not YCbCr."""
    from PIL import Image

    head = (page.jpegtables or b"")[2:-2]  # without start and end markers
    marker = ADOBE_RGB if int(page.photometric) == RGB else b""
    with Image.open(BytesIO(data[:2] + marker + head + data[2:])) as picture:
        pixels = np.asarray(picture if page.samplesperpixel == 1 else picture.convert("RGB"))
    return pixels.reshape(*pixels.shape[:2], -1)


def _as_rgb(pixels: Pixels, page: Any) -> Pixels:
    if pixels.shape[2] == 4:
        return on_white(pixels)
    if pixels.shape[2] == 1:
        grey = 255 - pixels if int(page.photometric) == 0 else pixels
        return np.repeat(grey, 3, axis=2)
    return pixels


def _mpp(file: Any, page: Any) -> tuple[float | None, str | None]:
    """Microns per pixel from OME metadata, else from plausible resolution tags."""
    if file.is_ome:
        stored = square_mpp(*_ome_sizes(file.ome_metadata), "OME PhysicalSize")
        if stored[1] is not None:
            return stored
    names = ("ResolutionUnit", "XResolution", "YResolution")
    unit, *rationals = (None if (tag := page.tags.get(name)) is None else tag.value for name in names)
    unit_name = {2: "inch", 3: "centimeter"}.get(unit or 2, "")
    x, y = (
        resolution_mpp(float(value[0]) / float(value[1]), unit_name)
        if isinstance(value, tuple) and len(value) == 2 and value[1]
        else None
        for value in rationals
    )
    return square_mpp(x, y, "TIFF resolution tags")


def _ome_sizes(text: str) -> tuple[float | None, float | None]:
    """Microns per pixel across and down."""
    pixels = next(_ome_nodes(text, "Pixels"), None)
    if pixels is None:
        return None, None
    values = [pixels.get(f"PhysicalSize{axis}") for axis in "XY"]
    scales = [_MICRONS.get(pixels.get(f"PhysicalSize{axis}Unit", "µm")) for axis in "XY"]
    x, y = (None if v is None or s is None else float(v) * s for v, s in zip(values, scales, strict=True))
    return x, y


def _ome_magnification(text: str) -> float | None:
    with suppress(StopIteration, TypeError, ValueError):
        return float(next(_ome_nodes(text, "Objective")).get("NominalMagnification", ""))
    return None


def _check_parts(path: Path, text: str) -> None:
    """Refuse an OME-TIFF that refers to files outside its folder, which tifffile would read."""
    for node in _ome_nodes(text, "UUID"):
        name = node.get("FileName") or ""
        if set(name) & {"/", "\\", "\0"} or name == "..":
            raise FileError(
                f"{path}: refused, its metadata refer to pixels in {name!r}, outside its folder; write the "
                "slide as one file."
            )


def _ome_nodes(text: str, element: str) -> Iterator[Any]:
    """The elements of a name in any version of the schema."""
    try:
        root = parse_xml(text)
    except ValueError:
        return
    yield from (node for node in root.iter() if node.tag.rpartition("}")[2] == element)


LARGEST_TILE = 1 << 26  # pixels
_TAGS = 4096  # most tags of a page
_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH, _OFFSETS = 256, 257, 322, 323, 324


class _Kind(NamedTuple):
    """How a TIFF writes numbers: struct formats in its byte order, and sizes in bytes."""

    counted: str
    offset: str
    tag: int
    value: int  # offset in a tag
    first: int  # offset in the file's header


def check_pages(path: Path) -> None:
    """Refuse a TIFF whose pages claim impossible sizes; other files pass."""
    with path.open("rb") as stream:
        head = stream.read(16).ljust(16, b"\0")
        end = "<" if head[:1] == b"I" else ">"
        if head[:4] in (b"II*\0", b"MM\0*"):
            kind = _Kind(f"{end}H", f"{end}I", 12, 8, 4)
        elif head[:4] in (b"II+\0", b"MM\0+"):
            kind = _Kind(f"{end}Q", f"{end}Q", 20, 12, 8)
        else:
            return
        for tags in _pages(stream, kind, struct.unpack_from(kind.offset, head, kind.first)[0]):
            if fault := _tile_fault(tags, kind):
                raise FileError(f"{path}: {fault}; the file is damaged, copy it again.")


def _pages(stream: BinaryIO, kind: _Kind, offset: int) -> Iterator[bytes]:
    """Yield the tags of each page, until the list ends or leaves the file."""
    visited = set[int]()
    while offset and offset not in visited:
        visited.add(offset)
        try:
            stream.seek(offset)
            (count,) = struct.unpack(kind.counted, stream.read(struct.calcsize(kind.counted)))
            yield stream.read(min(count, _TAGS) * kind.tag)
            (offset,) = struct.unpack(kind.offset, stream.read(struct.calcsize(kind.offset)))
        except (struct.error, OverflowError, OSError):
            return
    if offset:
        raise UnreadableSlideError("its list of pages is circular")


def _tile_fault(tags: bytes, kind: _Kind) -> str:
    """The fault of a page's tiles; empty if they are sound."""
    end, sizes, tiles = kind.counted[0], dict.fromkeys((_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH), 0), 0
    for start in range(0, len(tags) - kind.tag + 1, kind.tag):
        code, number = struct.unpack_from(f"{end}HH", tags, start)
        if code in sizes:
            wide = "H" if number == 3 else "I"
            sizes[code] = struct.unpack_from(f"{end}{wide}", tags, start + kind.value)[0]
        if code == _OFFSETS:
            tiles = struct.unpack_from(f"{end}{'Q' if kind.tag == 20 else 'I'}", tags, start + 4)[0]
    width, length = sizes[_TILE_WIDTH], sizes[_TILE_LENGTH]
    if width * length > LARGEST_TILE:
        return f"claims a tile of {width:,} by {length:,} pixels"
    if tiles and width and length and -(-sizes[_WIDTH] // width) * -(-sizes[_LENGTH] // length) > tiles:
        return f"claims a page with more pixels than its {tiles:,} tiles hold"
    return ""
