"""A large JPEG-tiled TIFF made of a real slide's tiles, and its patches; for benchmarks of embedding."""

from __future__ import annotations

import struct
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from PIL import Image

from xmil.slides.backends.tiff import ADOBE_RGB

SHORT, LONG, RATIONAL, UNDEFINED, LONG8 = 3, 4, 5, 7, 16


class RawTiles(NamedTuple):
    """The compressed tiles of a slide's first level, as they are stored."""

    data: list[bytes]
    tables: bytes
    size: tuple[int, int]
    photometric: int


def raw_tiles(slide: Path) -> RawTiles:
    """Read the tiles of a JPEG-tiled SVS or TIFF, those whole inside it."""
    import tifffile

    with tifffile.TiffFile(slide) as file:
        page: Any = file.pages[0]
        assert int(page.compression) == 7, "the slide's tiles are no JPEG"
        across, down = page.imagewidth // page.tilewidth, page.imagelength // page.tilelength
        columns = -(-page.imagewidth // page.tilewidth)
        data = []
        for index in (row * columns + column for row in range(down) for column in range(across)):
            file.filehandle.seek(page.dataoffsets[index])
            data.append(file.filehandle.read(page.databytecounts[index]))
        return RawTiles(
            data, page.jpegtables or b"", (page.tilewidth, page.tilelength), int(page.photometric)
        )


def as_ycbcr(tiles: RawTiles, quality: int = 85) -> RawTiles:
    """The same pixels as JPEG in YCbCr, colour not subsampled, each with tables of its own."""
    mark, head, made = (ADOBE_RGB if tiles.photometric == 2 else b""), tiles.tables[2:-2], []
    for data in tiles.data:
        into = BytesIO()
        with Image.open(BytesIO(data[:2] + mark + head + data[2:])) as picture:
            picture.convert("RGB").save(into, "JPEG", quality=quality, subsampling=0)
        made.append(into.getvalue())
    return RawTiles(made, b"", tiles.size, 6)


def write_mosaic(path: Path, tiles: RawTiles, grid: int, *, seed: int = 0) -> tuple[int, int]:
    """A BigTIFF of grid x grid tiles in random order, at 0.5 µm/px; gives its width and height."""
    chosen = np.random.default_rng(seed).integers(0, len(tiles.data), grid * grid)
    counts = [len(tiles.data[i]) for i in chosen]
    offsets = 16 + np.concatenate([[0], np.cumsum(counts)[:-1]])
    width, height = grid * tiles.size[0], grid * tiles.size[1]
    with path.open("wb") as file:
        end = 16 + sum(counts)
        file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, end))
        for i in chosen:
            file.write(tiles.data[i])
        file.write(_directory(_tags(tiles, (width, height), offsets, counts), end))
    return width, height


Tag = tuple[int, int, int, bytes]  # code, type, count, value


def _tags(tiles: RawTiles, size: tuple[int, int], offsets: Any, counts: list[int]) -> list[Tag]:
    per_cm = struct.pack("<II", 20_000, 1)
    return [
        (254, LONG, 1, struct.pack("<I", 0)),
        (256, LONG, 1, struct.pack("<I", size[0])),
        (257, LONG, 1, struct.pack("<I", size[1])),
        (258, SHORT, 3, struct.pack("<3H", 8, 8, 8)),
        (259, SHORT, 1, struct.pack("<H", 7)),
        (262, SHORT, 1, struct.pack("<H", tiles.photometric)),
        (277, SHORT, 1, struct.pack("<H", 3)),
        (282, RATIONAL, 1, per_cm),
        (283, RATIONAL, 1, per_cm),
        (284, SHORT, 1, struct.pack("<H", 1)),
        (296, SHORT, 1, struct.pack("<H", 3)),
        (322, LONG, 1, struct.pack("<I", tiles.size[0])),
        (323, LONG, 1, struct.pack("<I", tiles.size[1])),
        (324, LONG8, len(counts), np.asarray(offsets, dtype="<u8").tobytes()),
        (325, LONG8, len(counts), np.asarray(counts, dtype="<u8").tobytes()),
        *([(347, UNDEFINED, len(tiles.tables), tiles.tables)] if tiles.tables else []),
        (530, SHORT, 2, struct.pack("<2H", 1, 1)),
    ]


def _directory(tags: list[Tag], start: int) -> bytes:
    """An image file directory; values of more than eight bytes follow it."""
    head, tail = struct.pack("<Q", len(tags)), b""
    behind = start + 8 + 20 * len(tags) + 8
    for code, kind, count, value in tags:
        held = value.ljust(8, b"\0") if len(value) <= 8 else struct.pack("<Q", behind + len(tail))
        head += struct.pack("<HHQ", code, kind, count) + held
        tail += b"" if len(value) <= 8 else value
    return head + struct.pack("<Q", 0) + tail


def write_patches(path: Path, size: tuple[int, int], edge: int) -> int:
    """Every patch of `edge` px, in TRIDENT's layout; gives their number."""
    across, down = size[0] // edge, size[1] // edge
    rows, columns = np.divmod(np.arange(across * down), across)
    with h5py.File(path, "w") as file:
        coords = file.create_dataset("coords", data=np.stack([columns * edge, rows * edge], axis=1))
        about = {"patch_size": edge, "patch_size_level0": edge, "overlap": 0, "name": path.stem}
        coords.attrs.update({**about, "level0_magnification": 20, "target_magnification": 20})
        coords.attrs.update({"level0_width": size[0], "level0_height": size[1], "savetodir": "patches"})
    return across * down
