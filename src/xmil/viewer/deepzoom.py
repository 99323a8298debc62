"""Pictures of slides: Deep Zoom tiles, thumbnails and patches as JPEG; labels only on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.durable import is_inside
from xmil.core.errors import FileError, XmilError
from xmil.core.text import bare_name, is_plain
from xmil.viewer.cache import Cache, Stamp, attempt, stamp

if TYPE_CHECKING:
    from xmil.slides import Slide

TILE = 256
THUMBNAIL_LEVEL = 8  # at most 256 px
REACH = 16.0  # tiles that reduce the slide's levels by more are composed from finer tiles
PATCH = 512
QUALITY = 85
OPEN = 4  # open slides; each caches decoded blocks
CACHE_BYTES = 64 << 20  # encoded tiles held in memory
LOOK_SECONDS = 5.0  # until the slides' folder is listed again
Box = tuple[float, float, float, float]


class NoPictureError(XmilError):
    """A slide without a picture, or a tile beyond its edge."""


def full_level(width: int, height: int) -> int:
    """The Deep Zoom level of full resolution: level 0 is one pixel.

    >>> full_level(256, 100), full_level(257, 1)
    (8, 9)
    """
    return max(width - 1, height - 1, 0).bit_length()


def tile_box(size: tuple[int, int], level: int, column: int, row: int) -> tuple[Box, tuple[int, int]]:
    """The level-0 box (x, y, width, height) of a tile, and its size in pixels.

    >>> tile_box((1000, 600), 9, 1, 0)  # half of full resolution: 500 x 300, tiles of 256
    ((512, 0, 488, 512), (244, 256))
    """
    if not 0 <= level <= full_level(*size):
        raise NoPictureError(f"There is no level {level} of this slide.")
    scale = 1 << (full_level(*size) - level)
    x, y = column * TILE * scale, row * TILE * scale
    width, height = min(TILE * scale, size[0] - x), min(TILE * scale, size[1] - y)
    if width <= 0 or height <= 0:
        raise NoPictureError("This tile lies beyond the slide's edge.")
    return (x, y, width, height), (-(-width // scale), -(-height // scale))


def encode(pixels: Any, kind: str = "JPEG") -> bytes:
    """Encode pixels (h, w, 3), or (h, w, 4) for PNG, without metadata."""
    from PIL import Image

    stream = BytesIO()
    Image.fromarray(pixels).save(stream, kind, quality=QUALITY, subsampling=0)  # colours at full sharpness
    return stream.getvalue()


class OpenSlides:
    """A few open slides for all threads; a slide in use is never closed."""

    def __init__(self, limit: int = OPEN, mpp: float | None = None) -> None:
        self._limit, self._mpp = limit, mpp
        self._open: dict[tuple[Path, Stamp], Slide | XmilError | None] = {}  # None while it opens
        self._users: dict[tuple[Path, Stamp], int] = {}
        self._changed = Condition()

    @contextmanager
    def use(self, path: Path) -> Iterator[Slide]:
        """Yield the open slide; open a changed file again, and raise if it cannot be opened."""
        now = stamp(path)
        if now is None:
            raise FileError(f"{path.name}: no such file.")
        key = (path, now)
        slide = self._enter(key)
        try:
            if isinstance(slide, XmilError):
                raise FileError(str(slide))
            yield slide
        finally:
            with self._changed:
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                self._drop()

    def close(self) -> None:
        """Close all slides."""
        with self._changed:
            self._limit = 0
            self._drop()

    def __len__(self) -> int:
        return len(self._open)

    def _enter(self, key: tuple[Path, Stamp]) -> Slide | XmilError:
        with self._changed:
            self._users[key] = self._users.get(key, 0) + 1
            while key in self._open and self._open[key] is None:
                self._changed.wait()
            slide = self._open[key] = self._open.pop(key, None)  # mark as used last
            if slide is not None:
                return slide
        from xmil.slides import open_slide

        opened = attempt(lambda path: open_slide(path, mpp=self._mpp), key[0], "opened")
        with self._changed:
            self._open[key] = opened
            self._changed.notify_all()
            self._drop()
        return opened

    def _drop(self) -> None:
        idle = [key for key in self._open if key not in self._users]
        for key in idle[: max(0, len(self._open) - self._limit)]:
            slide = self._open.pop(key)
            if slide is not None and not isinstance(slide, XmilError):
                slide.close()


class Pictures:
    """The slides of a folder by name, and JPEG pictures of them."""

    def __init__(self, folder: Path | None, *, mpp: float | None = None, follow_links: bool = False) -> None:
        self.folder, self.follow_links = folder, follow_links
        self._slides = OpenSlides(mpp=mpp)
        self._tiles: Cache[bytes] = Cache(CACHE_BYTES, len)
        self._paths = {} if folder is None else _find(folder, follow_links=follow_links)
        self._looked = time.monotonic()

    def look(self, slide_id: str) -> tuple[bool, str | None]:
        """Check whether a slide has a picture, and find its fault if it cannot be used."""
        try:
            return self._path(slide_id) is not None, None
        except XmilError as error:
            return False, str(error)

    def describe(self, slide_id: str) -> tuple[dict[str, Any] | None, str | None]:
        """Return size, mpp and magnification of a slide, or its fault."""
        try:
            path = self._path(slide_id)
            if path is None:
                return None, None
            with self._slides.use(path) as slide:
                width, height = slide.dimensions
                finest = full_level(width, height)
                image: dict[str, Any] = {"width": width, "height": height, "tile_size": TILE, "overlap": 0}
                image |= {"levels": finest + 1, "finest": finest, "bounds": list(slide.bounds)}
                return {"image": image, "mpp": slide.mpp, "magnification": slide.magnification}, None
        except XmilError as error:
            return None, str(error)

    def tile(self, slide_id: str, level: int, column: int, row: int) -> bytes:
        """Draw a Deep Zoom tile."""

        def draw(slide: Slide) -> Any:
            box, size = tile_box(slide.dimensions, level, column, row)
            scale = float(1 << (full_level(*slide.dimensions) - level))
            if scale / slide.level_downsamples[slide.best_level(scale)] > REACH:  # reads too many pixels
                return self._compose(slide_id, size, level, column, row)
            return slide.read_area(box, size)

        return self._picture(slide_id, ("tile", level, column, row), draw)

    def thumbnail(self, slide_id: str) -> bytes:
        """Draw the whole slide in one tile."""
        with self._slides.use(self._existing(slide_id)) as slide:
            level = min(THUMBNAIL_LEVEL, full_level(*slide.dimensions))
            return self.tile(slide_id, level, 0, 0)

    def patch(self, slide_id: str, box: Box) -> bytes:
        """Draw a patch at full resolution, or reduced if it is large."""
        scale = min(1.0, PATCH / max(box[2:]))
        size = (max(1, round(box[2] * scale)), max(1, round(box[3] * scale)))
        return self._picture(slide_id, ("patch", *box), lambda s: s.read_area(box, size))

    def label(self, slide_id: str) -> bytes:
        """Read the photographed label of the slide; it is never cached."""
        with self._slides.use(self._existing(slide_id)) as slide:
            label = slide.read_label()
        if label is None:
            raise NoPictureError(f"The slide {slide_id!r} has no label image.")
        return encode(label)

    def close(self) -> None:
        """Close the slides."""
        self._slides.close()

    def _picture(self, slide_id: str, what: tuple[Any, ...], draw: Any) -> bytes:
        path = self._existing(slide_id)
        key = (path, stamp(path), *what)

        def compute() -> bytes:
            with self._slides.use(path) as slide:
                try:
                    return encode(draw(slide))
                except FileError as error:
                    raise FileError(str(error).replace(str(path), path.name)) from None

        return self._tiles.fetch(key, compute)

    def _existing(self, slide_id: str) -> Path:
        path = self._path(slide_id)
        if path is None:
            raise NoPictureError(
                f"The slide {slide_id!r} has no picture; name the slides' folder as `slides=`."
            )
        return path

    def _compose(self, slide_id: str, size: tuple[int, int], level: int, column: int, row: int) -> Any:
        """Compose a tile from the four cached tiles of the next finer level."""
        from PIL import Image

        sheet, right, bottom = Image.new("RGB", (2 * TILE, 2 * TILE), "white"), 0, 0
        for i, j in ((0, 0), (1, 0), (0, 1), (1, 1)):
            with suppress(NoPictureError):  # beyond the edge
                part = Image.open(BytesIO(self.tile(slide_id, level + 1, 2 * column + i, 2 * row + j)))
                sheet.paste(part, (i * TILE, j * TILE))
                right, bottom = max(right, i * TILE + part.width), max(bottom, j * TILE + part.height)
        return np.asarray(sheet.crop((0, 0, right, bottom)).resize(size, Image.Resampling.BOX))

    def _path(self, slide_id: str) -> Path | None:
        if self.folder is None or not is_plain(slide_id):
            return None
        path = self.listed().get(bare_name(slide_id))
        if path is not None and not self.follow_links and not is_inside(path, self.folder):
            raise FileError(
                f"{path.name}: a link out of the slides' folder; pass `follow_links=True` to follow it."
            )
        return path

    def listed(self) -> dict[str, Path]:
        """The slides of the folder by name."""
        now = time.monotonic()
        if self.folder is not None and now - self._looked > LOOK_SECONDS:
            self._looked = now
            with suppress(XmilError, OSError):  # keep the last listing on errors
                self._paths = _find(self.folder, follow_links=self.follow_links)
        return self._paths


def _find(folder: Path, *, follow_links: bool) -> dict[str, Path]:
    """List slides by name, also links that are not followed, which the page reports."""
    from xmil.slides.open import slide_files, sort_slides

    files, links = slide_files(folder, follow_links=follow_links)
    listing = sort_slides([*files, *(path for path in links if not path.is_dir())])
    for reason in listing.twice.values():
        raise FileError(reason)
    return listing.slides
