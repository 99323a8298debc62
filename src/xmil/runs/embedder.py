"""Slides to files of features, with reading processes: patches of several slides share batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xmil.core.durable import write_atomically
from xmil.core.errors import FileError, StopError, XmilError
from xmil.encoders import Encoder, Transform
from xmil.runs.cohort_run import stopping
from xmil.runs.feature_file import Encoded, write_features
from xmil.runs.feed.encoder_batches import EncodedRows, GpuBatches, HostBatches
from xmil.runs.feed.feed import Feed, Filled, Part
from xmil.runs.feed.reader import PatchSource
from xmil.runs.feed.tile_feed import TileFeed
from xmil.runs.feed.tiles import GpuTiles, UnfitForGpuError
from xmil.runs.patch_stream import SlidePatches
from xmil.runs.workers.pool import Outcome, told
from xmil.slides.backends.direct import with_direct_tiles
from xmil.slides.tiling import in_blocks

if TYPE_CHECKING:
    from xmil.runs.embed import EmbedSettings

Item = tuple[str, Path, Path]  # name, slide, patches
Result = dict[str, Any]
PART_BYTES = 8 << 20  # of a part's pixels for a GPU: small enough to come soon, large enough to copy well
BLOCK = 256  # patches that one process reads, since they share tiles
TILED = 64  # patches whose tiles a GPU decodes at once
WRITERS = 32  # slides that may be open: one thread each, mostly waiting
QUEUED = 64  # batches that may wait to be written


@dataclass(eq=False)
class OpenSlide:
    """A slide under way: its patches, those not yet encoded, and the thread that writes them."""

    item: Item
    number: int
    patches: SlidePatches
    left: int
    encoded: Queue[Encoded | BaseException | None]
    written: Future[Result]


class Embedder:
    """Embeds slide after slide with one encoder."""

    def __init__(
        self, encoder: Encoder, settings: EmbedSettings, out: Path, notes: list[str] | None = None
    ) -> None:
        self._notes = [] if notes is None else notes
        assert isinstance(encoder.transform, Transform)  # noqa: S101  # `reads_by_processes` has seen to it
        self._encoder, self._settings, self._out = encoder, settings, out
        self._fit = encoder.transform.fit
        self._gpu = torch.device(encoder.device).type == "cuda"

    def one(self, item: Item) -> Result:
        """Embed one slide."""
        (outcome,) = self.outcomes([item])
        if outcome.result is None:
            raise FileError(outcome.error or "no result")
        return outcome.result

    def outcomes(self, items: Iterable[Item]) -> Iterator[Outcome[Item, Result]]:
        """Embed slides and give the outcomes as they finish."""
        with ExitStack() as stack:
            writers = stack.enter_context(ThreadPoolExecutor(WRITERS, thread_name_prefix="xmil-write"))
            opener = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="xmil-open"))
            line = _Slides(self, iter(items), opener, writers)
            stack.callback(line.abandon)
            while line.more:
                source = yield from line.first()
                if source is not None:
                    yield from self._with_feed(line, source)
            yield from line.finished(wait=True)

    def _with_feed(self, line: _Slides, source: PatchSource) -> Iterator[Outcome[Item, Result]]:
        """Embed with reading processes whose memory holds such patches, until a slide has larger ones."""
        room = self.part_rows(source) * int(np.prod(source.shape))
        with ExitStack() as stack:
            feed: Feed | TileFeed = stack.enter_context(Feed(self._settings.readers, room))
            if isinstance(feed, Feed) and self._settings.decode == "gpu":
                feed = stack.enter_context(TileFeed(feed, self._encoder.device))
            gpu = GpuBatches(self._encoder, feed, self._settings.batch) if self._gpu else None
            batches = gpu or HostBatches(self._encoder, feed)
            stack.callback(batches.close)
            while True:
                yield from line.fill(feed)
                filled = feed.next()
                if filled is None and not line.fits(feed):
                    break
                if filled is not None:
                    line.take(self._encoded(batches, filled, line, feed))
                yield from line.finished()
            line.take(batches.flush())
            yield from line.finished()

    def _encoded(
        self, batches: GpuBatches | HostBatches, filled: Filled, line: _Slides, feed: Feed | TileFeed
    ) -> Iterator[EncodedRows]:
        if filled.error is None:
            return batches.add(filled)
        feed.drop(filled.part.slide)
        line.fail(filled.part.slide, FileError(filled.error))
        return iter(())

    def opened(self, item: Item) -> SlidePatches:
        """A slide with its patches; runs ahead in a thread."""
        patches = SlidePatches(item[1], item[2], self._settings)
        if self._settings.decode == "gpu":
            patches.slide = with_direct_tiles(patches.slide)
            try:
                patches.tiles = GpuTiles(
                    patches.slide, self.source(patches), patches.xy0, self._encoder.device
                )
            except UnfitForGpuError as error:
                self._notes.append(f"{item[0]}: decoded by the CPU, as {error}.")
        return patches

    def source(self, patches: SlidePatches) -> PatchSource:
        """How the patches of a slide are read."""
        path = patches.slide.path.absolute()
        return PatchSource(path, patches.edge0, patches.size, self._fit, patches.stain)

    def part_rows(self, source: PatchSource) -> int:
        """Patches of a part: on a CPU those of a batch."""
        size = self._settings.batch
        return max(1, min(size, PART_BYTES // int(np.prod(source.shape)))) if self._gpu else size

    def blocks(self, slide: OpenSlide) -> Iterator[list[Part]]:
        """The patches of a slide in parts; neighbours are in one block, for one process.

        On a CPU a part is a batch of patches in their order, which is the batch that threads would read.
        """
        source, xy0 = self.source(slide.patches), slide.patches.xy0
        order = in_blocks(xy0, source.edge0) if self._gpu else np.arange(len(xy0))
        step = self.part_rows(source) if slide.patches.tiles is None else TILED
        size = max(step, BLOCK // step * step) if self._gpu else step
        for start in range(0, len(order), size):
            block = order[start : start + size]
            parts = [block[i : i + step] for i in range(0, len(block), step)]
            yield [Part(slide.number, source, rows, xy0[rows]) for rows in parts]

    def write(
        self, item: Item, patches: SlidePatches, encoded: Queue[Encoded | BaseException | None]
    ) -> Result:
        """Write a slide's features as they come; runs in a thread."""
        about: dict[str, Any] = {"encoder": self._encoder, "settings": self._settings}
        with patches:
            write = partial(write_features, slide_id=item[0], patches=patches, **about)
            write = partial(write, encoded=_until_end(encoded))
            stopping(partial(write_atomically, self._out / f"{item[0]}.h5", write))
        return {"patches": len(patches)}


class _Slides:
    """The slides of a run: the one that is opened ahead, those under way, those that are done."""

    def __init__(
        self,
        embedder: Embedder,
        items: Iterator[Item],
        opener: ThreadPoolExecutor,
        writers: ThreadPoolExecutor,
    ) -> None:
        self._embedder, self._items, self._opener, self._writers = embedder, items, opener, writers
        self._open: dict[int, OpenSlide] = {}
        self._count = 0
        self._ahead: tuple[Item, Future[SlidePatches]] | None = None
        self._open_next()

    @property
    def more(self) -> bool:
        """Whether there are slides not yet begun."""
        return self._ahead is not None

    def _open_next(self) -> None:
        item = next(self._items, None)
        self._ahead = None if item is None else (item, self._opener.submit(self._embedder.opened, item))

    def first(self) -> Generator[Outcome[Item, Result], None, PatchSource | None]:
        """How the patches of the next slide that can be opened are read; those that cannot are outcomes."""
        while self._ahead is not None:
            item, opening = self._ahead
            try:
                return self._embedder.source(opening.result())
            except StopError:
                raise
            except Exception as error:  # a slide must not end the run, whatever is wrong with it
                self._open_next()
                yield Outcome(item, None, told(error))
        return None

    def fits(self, feed: Feed | TileFeed) -> bool:
        """Whether the slide that comes next can be read by these processes; waits until it is open."""
        if self._ahead is None:
            return False
        if self._ahead[1].exception() is not None:
            return True
        source = self._embedder.source(self._ahead[1].result())
        return self._embedder.part_rows(source) * int(np.prod(source.shape)) <= feed.ring.slot_bytes

    def fill(self, feed: Feed | TileFeed) -> Iterator[Outcome[Item, Result]]:
        """Begin slides until the processes have enough to do."""
        while self._ahead is not None and feed.queued < feed.readers:
            if feed.busy and not self._ahead[1].done():
                return
            source = yield from self.first()
            if source is None or not self.fits(feed):
                return
            self._begin(feed)

    def _begin(self, feed: Feed | TileFeed) -> None:
        assert self._ahead is not None  # noqa: S101  # `first` has seen to it
        item, patches = self._ahead[0], self._ahead[1].result()
        encoded: Queue[Encoded | BaseException | None] = Queue(QUEUED)
        written = self._writers.submit(self._embedder.write, item, patches, encoded)
        self._count += 1
        slide = OpenSlide(item, self._count, patches, len(patches), encoded, written)
        self._open[slide.number] = slide
        if isinstance(feed, TileFeed) and patches.tiles is not None:
            feed.tiles[slide.number] = patches.tiles
        for block in self._embedder.blocks(slide):
            feed.add(block)
        if not slide.left:
            encoded.put(None)
        self._open_next()

    def take(self, vectors: Iterator[EncodedRows]) -> None:
        """Hand vectors to those who write them."""
        for some in vectors:
            slide = self._open.get(some.slide)
            if slide is None or slide.written.done():
                continue
            slide.left -= len(some.rows)
            self._put(slide, (some.rows, some.values))
            if not slide.left:
                self._put(slide, None)

    def fail(self, number: int, error: BaseException) -> None:
        """Give a slide up."""
        if number in self._open:
            self._put(self._open[number], error)

    def _put(self, slide: OpenSlide, what: Encoded | BaseException | None) -> None:
        """Wait for room, unless the writer has given up."""
        while not slide.written.done():
            with suppress(Full):
                slide.encoded.put(what, timeout=0.2)
                return

    def finished(self, *, wait: bool = False) -> Iterator[Outcome[Item, Result]]:
        """The slides whose files are written, or that failed."""
        for number, slide in list(self._open.items()):
            if not (wait or slide.written.done()):
                continue
            del self._open[number]
            try:
                yield Outcome(slide.item, slide.written.result())
            except StopError:
                raise
            except Exception as error:
                yield Outcome(slide.item, None, told(error))

    def abandon(self) -> None:
        """End what is still under way; its files are not written."""
        for slide in self._open.values():
            self._put(slide, XmilError("The run was stopped."))
        if self._ahead is not None and not self._ahead[1].cancel() and self._ahead[1].exception() is None:
            self._ahead[1].result().close()
        self._ahead = None


def _until_end(encoded: Queue[Encoded | BaseException | None]) -> Iterator[Encoded]:
    while (found := encoded.get()) is not None:
        if isinstance(found, BaseException):
            raise found
        yield found
