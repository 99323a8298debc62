"""The patches of a slide, read and decoded by threads ahead of the encoder."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError, InputError
from xmil.core.identity import identity
from xmil.data import Header, open_bag
from xmil.slides import Slide, open_slide
from xmil.slides.slide import Pixels
from xmil.slides.stain import Macenko
from xmil.slides.tiling import read_patch

if TYPE_CHECKING:
    from torch import Tensor

    from xmil.runs.embed import EmbedSettings
    from xmil.runs.feed.tiles import GpuTiles

SAMPLE = 32  # patches from which the stains of a slide are found


class SlidePatches:
    """A slide with its patches, checked against each other; close it after use."""

    def __init__(self, slide: Path, patches: Path, settings: EmbedSettings) -> None:
        self.source = identity(slide, full=settings.full_digests)
        self.header = open_bag(patches)
        self.size = _patch_px(self.header, settings)
        self.slide = open_slide(slide)
        self.tiles: GpuTiles | None = None  # where a GPU decodes them
        try:
            _check(self.slide, self.header)
            self.stain = self._find_stain() if settings.stain_norm and len(self) else None
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.header)

    @property
    def xy0(self) -> npt.NDArray[np.int64]:
        """The corners (n, 2)."""
        assert self.header.coords is not None  # noqa: S101  # `_patch_px` has seen them
        return self.header.coords

    @property
    def edge0(self) -> int:
        """The edge of a patch in level-0 pixels."""
        assert self.header.patch_size is not None  # noqa: S101  # as above
        return self.header.patch_size

    def read(self, index: int) -> Pixels:
        """The pixels of one patch, stains not changed."""
        return read_patch(self.slide, self.xy0[index], edge0=self.edge0, size=self.size)

    def close(self) -> None:
        """Close the slide."""
        self.slide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_stain(self) -> Macenko:
        """The slide's stains, from patches spread evenly over it."""
        chosen = np.unique(np.linspace(0, len(self) - 1, SAMPLE).astype(int))
        try:
            return Macenko.fit(np.stack([self.read(int(i)) for i in chosen]))
        except InputError as error:
            raise FileError(f"{self.slide.path}: {error}") from None


class PatchStream(SlidePatches):
    """The patches of a slide, batch by batch, a few of them read ahead by threads."""

    def __init__(
        self, slide: Path, patches: Path, transform: Callable[[Any], Tensor], settings: EmbedSettings
    ) -> None:
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="xmil-patches")
        self._transform, self._batch, self._ahead = transform, settings.batch, settings.ahead
        self._waiting: deque[list[Future[Tensor]]] = deque()
        self._next = 0
        super().__init__(slide, patches, settings)
        self._fill()

    def __iter__(self) -> Iterator[Tensor]:
        """Batches in the order of the patches."""
        import torch

        while self._waiting:
            batch = [future.result() for future in self._waiting.popleft()]
            self._fill()
            yield torch.stack(batch)

    def close(self) -> None:
        """Stop reading and close the slide."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _fill(self) -> None:
        while len(self._waiting) < self._ahead and self._next < len(self):
            last = min(self._next + self._batch, len(self))
            futures = [self._pool.submit(self._prepared, i) for i in range(self._next, last)]
            self._waiting.append(futures)
            self._next = last

    def _prepared(self, index: int) -> Tensor:
        pixels = self.read(index)
        return self._transform(pixels if self.stain is None else self.stain.normalise(pixels))


def _patch_px(header: Header, settings: EmbedSettings) -> int:
    if header.coords is None or header.patch_size is None:
        raise FileError(f"{header.path}: holds no level-0 corners with a patch edge; tile the slide.")
    size = settings.patch_px or header.extra.get("patch_size")
    if not size:
        raise FileError(f"{header.path}: does not say how many pixels a patch has; pass --patch-px.")
    return int(size)


def _check(slide: Slide, header: Header) -> None:
    """Patches that lie outside the slide are of another one."""
    stored = tuple(header.extra.get(key) for key in ("level0_width", "level0_height"))
    if all(isinstance(value, int | np.integer) for value in stored) and stored != slide.dimensions:
        raise FileError(
            f"{header.path}: is of a slide of {stored[0]} x {stored[1]} px; {slide.path} has "
            f"{slide.dimensions[0]} x {slide.dimensions[1]}. Tile this slide."
        )
    coords = header.coords
    if coords is not None and len(coords) and (coords.max(axis=0) >= slide.dimensions).any():
        raise FileError(f"{header.path}: has patches outside {slide.path}; they are of another slide.")
