"""Slides that the tests write: tissue at known places, levels, mpp, several kinds of file."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

GLASS = 244


def textured(boxes: list[tuple[int, int, int, int]], size: tuple[int, int], *, seed: int = 0) -> np.ndarray:
    """White glass with textured pink boxes (x, y, width, height)."""
    rng = np.random.default_rng(seed)
    pixels = np.full((size[1], size[0], 3), GLASS, dtype=np.uint8)
    for x, y, width, height in boxes:
        noise = rng.integers(-40, 40, (height, width, 1))
        pixels[y : y + height, x : x + width] = np.clip(np.array([190, 110, 160]) + noise, 0, 255)
    return pixels


def write_pyramid(
    path: Path,
    pixels: np.ndarray,
    *,
    mpp: float | None = 0.5,
    levels: tuple[int, ...] = (2, 4),
    tile: tuple[int, int] | None = (256, 256),
    compression: str | None = None,
    ome: bool = False,
    planar: bool = False,
) -> Path:
    """A pyramidal TIFF; `ome` puts the levels into SubIFDs as OME-TIFF has them."""
    resolution = {} if mpp is None else {"resolution": (1e4 / mpp,) * 2, "resolutionunit": "CENTIMETER"}
    about = {"PhysicalSizeX": mpp, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": mpp, "PhysicalSizeYUnit": "µm"}
    options = {"tile": tile, "compression": compression, "photometric": "rgb"}
    options |= {"planarconfig": "separate"} if planar else {}

    def stored(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values.transpose(2, 0, 1)) if planar else values

    with tifffile.TiffWriter(path, ome=ome) as file:
        file.write(
            stored(pixels),
            subifds=len(levels) if ome else None,
            metadata={"axes": "SYX" if planar else "YXS", **(about if mpp else {})} if ome else None,
            **resolution,
            **options,
        )
        for scale in levels:
            height, width = pixels.shape[0] // scale, pixels.shape[1] // scale
            small = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX))
            file.write(stored(small), subfiletype=1, metadata=None, **options)
    return path


def claim_size(path: Path, width: int, height: int) -> None:
    """Let a TIFF's header claim another size."""
    raw = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        tags = file.pages[0].tags
        for name, value in (("ImageWidth", width), ("ImageLength", height)):
            offset = tags[name].valueoffset
            raw[offset : offset + 4] = struct.pack("<I", value)
    path.write_bytes(raw)


def write_bomb(path: Path) -> None:
    """A small PNG whose header claims forty thousand million pixels."""
    Image.new("RGB", (40, 30), "red").save(path)
    raw = bytearray(path.read_bytes())
    raw[16:24] = struct.pack(">II", 200_000, 200_000)
    raw[29:33] = struct.pack(">I", zlib.crc32(bytes(raw[12:29])))
    path.write_bytes(raw)


def write_jpeg_ome(path: Path, pixels: np.ndarray, *, photometric: str = "ycbcr", mpp: float = 0.37) -> None:
    """An OME-TIFF of JPEG tiles and a level below; tifffile writes the frame, Pillow the tiles."""
    small = np.ascontiguousarray(pixels[::2, ::2])
    with tifffile.TiffWriter(path, ome=True) as file:
        for i, level in enumerate((pixels, small)):
            about = {"axes": "YXS", "PhysicalSizeX": mpp, "PhysicalSizeY": mpp} if i == 0 else None
            below = {"subifds": 1} if i == 0 else {"subfiletype": 1}
            options = {"shape": level.shape, "dtype": np.uint8, "tile": (128, 128), "photometric": "rgb"}
            file.write(
                _jpeg_tiles(level, photometric), compression="zlib", metadata=about, **options, **below
            )
    raw = bytearray(path.read_bytes())
    with tifffile.TiffFile(path) as file:
        for level in file.series[0].levels:
            tags = level.keyframe.tags
            raw[tags["Compression"].valueoffset] = 7
            raw[tags["PhotometricInterpretation"].valueoffset] = 6 if photometric == "ycbcr" else 2
    path.write_bytes(raw)


def _jpeg_tiles(level: np.ndarray, photometric: str) -> Iterator[bytes]:
    for y in range(0, level.shape[0], 128):
        for x in range(0, level.shape[1], 128):
            tile = np.full((128, 128, 3), 255, dtype=np.uint8)
            part = level[y : y + 128, x : x + 128]
            tile[: part.shape[0], : part.shape[1]] = part
            stream = BytesIO()
            options = {"keep_rgb": True} if photometric == "rgb" else {}
            Image.fromarray(tile).save(stream, "JPEG", quality=97, subsampling=0, **options)
            yield _without_marker(stream.getvalue())


def _without_marker(data: bytes) -> bytes:
    """A JPEG without its application segments, as TIFF holds it: nothing in it tells the colours."""
    kept, at = data[:2], 2
    while data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if not 0xE0 <= data[at + 1] <= 0xEF:
            kept += data[at : at + 2 + length]
        at += 2 + length
    return kept + data[at:]
