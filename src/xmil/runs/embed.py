"""`embed_slides`: features of many slides; threads read and decode patches while the encoder works.

<slide>.h5    TRIDENT's layout: `features` (n, d), `coords` (n, 2) with the attributes of the patches

Memory is bounded by the batches in flight, for slides of any size. While one slide is encoded, the
first batches of the next are read.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from xmil._version import __version__
from xmil.core.durable import create_hdf5, file_digest, identity, write_atomically
from xmil.core.errors import FileError, InputError, StopError, XmilError, absent
from xmil.core.ledger import writing_for
from xmil.core.request import takes
from xmil.core.text import counted
from xmil.data import Header, feature_files, open_bag
from xmil.data.header import slide_name
from xmil.encoders import Encoder, Transform
from xmil.execute import (
    Listener,
    Outcome,
    Stages,
    Step,
    Worker,
    complete_record,
    error_line,
    execute,
    identify_inputs,
    stop_of,
    work_on,
)
from xmil.network import find_device
from xmil.runs.feed.feed import EncodedRows, Feed, GpuBatches, HostBatches, Part, encode_batch
from xmil.runs.feed.reader import PatchSource
from xmil.runs.inputs import named_slides
from xmil.runs.requests import EmbedRequest
from xmil.slides import Slide, open_slide
from xmil.slides.slide import Pixels
from xmil.slides.stain import Macenko
from xmil.slides.tiling import in_blocks, read_patch
from xmil.storage import Item, Record, Run

if TYPE_CHECKING:
    from torch import Tensor


@takes(EmbedRequest, "tiles", "slides")
def embed_slides(request: EmbedRequest, *, listener: Listener | None = None) -> Run:
    """Encode the patches of slides into a folder of features, as `xmil embed` does.

    `tiles` is the folder of `tile_slides`, or of TRIDENT's or CLAM's patches; without `out` features go into
    a folder beside the patches. `readers` processes read and decode (-1: one per core for a GPU, none for a
    CPU, where threads do); `compile` compiles the network, which changes the last digits of features.
    """
    from xmil.encoders.load import check_encoder, short_name

    listener = listener or Listener()
    check_encoder(request.encoder, weights=request.weights, random=request.random)
    pairs, refused = _pairs(request, listener)
    folder = request.out or request.tiles / f"features_{short_name(request.encoder)}"
    embedder = Embedder(folder, request, find_device(request.place))
    step = embed_step(embedder, pairs, refused)
    tally = execute(step, folder, workers=request.pool, listener=listener, restart=request.restart)
    patches = counted(sum(tally.records[name].facts["patches"] for name in tally.done), "patch")
    listener.say(f"{patches} of {counted(len(tally.done), 'slide')}, {tally}. Written to {folder}.")
    return Run(folder)


def embed_step(
    embedder: Embedder, pairs: Mapping[str, tuple[Path, Path]], refused: Mapping[str, str] | None = None
) -> Step[tuple[Path, Path]]:
    """Make the step that encodes slides with their patches."""
    request = embedder.request
    return Step(
        "embed",
        [Item(name, pair, pair, by_time=False) for name, pair in pairs.items()],
        settings=request.with_options(embedder.settings()),
        about={
            "device": embedder.device,
            "weights": None if request.weights is None else str(request.weights),
        },
        make_worker=partial(_make_worker, embedder, embedder.digests),
        adopt=partial(adopt_features, embedder.out),
        schedule=embedder.schedule,
        doing="encoding slides",
        refused=refused or {},
        adds=True,
    )


def _pairs(request: EmbedRequest, listener: Listener) -> tuple[dict[str, tuple[Path, Path]], dict[str, str]]:
    """Pair slides with their patches by slide id; patches with no slide, or two, come with the reason."""
    tiles = request.tiles
    folder = tiles / "patches" if (tiles / "patches").is_dir() else tiles
    if not folder.is_dir():
        raise InputError(absent(tiles, "folder"))
    files, links = feature_files(folder, follow_links=request.follow_links)
    patches = {slide_name(path): path for path in files if path.suffix == ".h5"}
    for path in links:
        listener.say(f"{path}: a link, which was not followed.")
    if not patches:
        raise InputError(f"{tiles}: contains no patches; run xmil tile first.")
    listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
    pairs = {name: (listing.slides[name], path) for name, path in patches.items() if name in listing.slides}
    refused = {name: why for name, why in listing.twice.items() if name in patches}
    missing = [name for name in patches if name not in pairs and name not in refused]
    where = ", ".join(map(str, request.slides))
    if not pairs and not refused:
        raise InputError(f"{where}: no slide has the name of a file in {folder}; rename them to match.")
    return pairs, refused | dict.fromkeys(missing, f"no slide of this name in {where}")


THREADS = min(16, max(2, os.cpu_count() or 2))  # that read patches without reading processes
AHEAD = 4  # batches that they read ahead
EmbedItem = Item[tuple[Path, Path]]  # the file of a slide, and that of its patches


@dataclass(frozen=True)
class Embedder:
    """What all slides of a run share: the folder of features, the request and the device."""

    out: Path
    request: EmbedRequest
    device: str = "cpu"

    @property
    def digests(self) -> list[str]:
        """Digests of the encoder's files."""
        files = [Path(name) for name in (self.request.encoder, self.request.weights or "")]
        return [file_digest(path) for path in files if path.is_file()]

    @property
    def colours(self) -> dict[str, tuple[float, ...] | None]:
        """Mean and standard deviation that replace the encoder's own."""
        both = self.request.normalise
        return {"mean": None if both is None else both[:3], "std": None if both is None else both[3:]}

    @property
    def readers(self) -> int:
        """Number of processes that read and decode; 0 for threads of this process."""
        if self.request.readers >= 0:
            return self.request.readers
        on_gpu = self.device.startswith("cuda") and os.name == "posix"
        return min(16, os.cpu_count() or 1) if on_gpu else 0  # threads decode too slowly for a GPU

    def settings(self) -> dict[str, Any]:
        request = self.request
        names = ("encoder", "precision", "input_size", "random", "stain_norm", "patch_px")
        values = {name: getattr(request, name) for name in names} | self.colours
        values |= {"compile": True} if request.compile else {}  # folders of earlier versions do not name it
        return {**values, "files": self.digests}

    def load_encoder(self) -> Encoder:
        from xmil.encoders import load_encoder

        request = self.request
        return load_encoder(
            request.encoder, weights=None if request.weights is None else str(request.weights),
            device=self.device, precision=request.precision, size=request.input_size, **self.colours,
            random=request.random, compiled=request.compile,
        )  # fmt: skip

    def reads_by_processes(self, encoder: Encoder) -> bool:
        """Whether processes read for this encoder; a user's own transform runs in threads here."""
        return self.readers > 0 and os.name == "posix" and isinstance(encoder.transform, Transform)

    def schedule(self, items: Sequence[EmbedItem]) -> Iterator[Outcome[EmbedItem, Record]]:
        """Embed slides in order; if processes read the patches, slides share batches."""
        if self.request.pool.in_process and items and self.readers:
            encoder = self.load_encoder()
            if self.reads_by_processes(encoder):
                return _embed_by_processes(self, encoder, items)
        return work_on(items, partial(_make_worker, self, self.digests), self.request.pool)

    def write(
        self, item: EmbedItem, patches: SlidePatches, encoder: Encoder, encoded: Iterator[Encoded]
    ) -> Record:
        """Write the features of a slide as they come."""
        with patches, writing_for(item.key):
            write = partial(
                write_features, slide_id=item.key, patches=patches, encoder=encoder, encoded=encoded
            )
            write_atomically(self.out / f"{item.key}.h5", write)
        return complete_record(record_of(item, len(patches)), item)


def record_of(item: EmbedItem, patches: int) -> Record:
    """Make the record of a slide from its number of patches."""
    row = {"slide_id": item.key, "n": patches, "slide": str(item.what[0].absolute())}
    return Record([row], {"patches": patches})


def adopt_features(out: Path, item: EmbedItem) -> Record | None:
    """Make the record of a slide from its features, if they have its patches."""
    path, (slide, patches) = out / f"{item.key}.h5", item.what
    if not path.is_file():
        return None
    try:
        features, tiled = open_bag(path), open_bag(patches)
        sources = [features.extra.get("source") or identity(slide), identity(patches)]
    except FileError:
        return None
    if features.coords is not None and tiled.coords is not None:
        has_size = features.patch_size == tiled.patch_size
        if not has_size or not np.array_equal(features.coords, tiled.coords):
            return None
    return replace(record_of(item, len(features)), sources=sources)


def _make_worker(run: Embedder, digests: list[str]) -> Worker[EmbedItem, Record]:
    encoder = run.load_encoder()
    if run.digests != digests:
        raise StopError(
            "The encoder's files have changed since the run started; put them back, or use another `out=`."
        )
    if not run.reads_by_processes(encoder):
        return Stages(
            lambda item: PatchStream(*item.what, encoder.transform, run.request, item.sources[0]),
            lambda item, patches: run.write(item, patches, encoder, _vectors(encoder, patches)),
        )

    def embed_one(item: EmbedItem) -> Record:
        (outcome,) = _embed_by_processes(run, encoder, [item])
        if outcome.result is None:
            raise FileError(outcome.error or "no result")
        return outcome.result

    return embed_one


def _vectors(encoder: Encoder, patches: PatchStream) -> Iterator[Encoded]:
    """Encode batch by batch; a GPU gets the next batch before the vectors of the last are fetched."""
    last: Tensor | None = None
    ready = 0
    for batch in chain(patches, [None]):
        current = None if batch is None else encode_batch(encoder, batch)
        if last is not None:
            yield np.arange(ready, ready + len(last)), last.cpu().numpy()
            ready += len(last)
        last = current


PART_BYTES = 8 << 20  # of a part's pixels for a GPU: small for low latency, large for fast copies
BLOCK = 256  # patches that one process reads, since they share tiles
WRITERS = 32  # slides that may be open: one thread each, mostly waiting
QUEUED = 64  # batches that may wait to be written


@dataclass(eq=False)
class OpenSlide:
    """A slide in progress: how many patches are not yet encoded, and the thread that writes them."""

    item: EmbedItem
    left: int
    encoded: Queue[Encoded | BaseException | None]
    written: Future[Record]


def _embed_by_processes(
    run: Embedder, encoder: Encoder, items: Iterable[EmbedItem]
) -> Iterator[Outcome[EmbedItem, Record]]:
    """Embed slides with reading processes and yield the outcomes as they finish.

    Their memory holds patches of one size; a slide with larger patches restarts them.
    """
    with ExitStack() as stack:
        slides = _Slides(run, encoder, iter(items), stack)
        stack.callback(slides.abandon)
        while slides.more:
            source = yield from slides.first()
            if source is None:
                break
            with Feed(run.readers, slides.part_bytes(source)) as feed, ExitStack() as closing:
                gpu = GpuBatches(encoder, feed, run.request.batch) if slides.on_gpu else None
                batches = gpu or HostBatches(encoder, feed)
                closing.callback(batches.close)
                while True:
                    yield from slides.fill(feed)
                    filled = feed.next()
                    if filled is None and not slides.fits(feed):
                        break
                    if filled is not None and filled.error is None:
                        slides.take(batches.add(filled))
                    elif filled is not None:
                        feed.drop(filled.part.slide)
                        slides.fail(filled.part.slide, FileError(str(filled.error)))
                    yield from slides.finished()
                slides.take(batches.flush())
                yield from slides.finished()
        yield from slides.finished(wait=True)


class _Slides:
    """The slides of a run: the next one, opened ahead, and those in progress."""

    def __init__(self, run: Embedder, encoder: Encoder, items: Iterator[EmbedItem], stack: ExitStack) -> None:
        assert isinstance(encoder.transform, Transform)  # noqa: S101  # `reads_by_processes` has seen to it
        self._run, self._encoder, self._items, self._fit = run, encoder, items, encoder.transform.fit
        self._writers = stack.enter_context(ThreadPoolExecutor(WRITERS, thread_name_prefix="xmil-write"))
        self._opener = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="xmil-open"))
        self.on_gpu = torch.device(encoder.device).type == "cuda"
        self._open: dict[int, OpenSlide] = {}
        self._count = 0
        self._ahead: tuple[EmbedItem, Future[SlidePatches]] | None = None
        self._open_next()

    @property
    def more(self) -> bool:
        """Whether there are slides that have not started."""
        return self._ahead is not None

    def source(self, patches: SlidePatches) -> PatchSource:
        """Describe how to read the patches of a slide."""
        path = patches.slide.path.absolute()
        return PatchSource(path, patches.edge0, patches.size, self._fit, patches.stain)

    def part_rows(self, source: PatchSource) -> int:
        """Number of patches in a part; on a CPU, a part is a batch."""
        size = self._run.request.batch
        return max(1, min(size, PART_BYTES // int(np.prod(source.shape)))) if self.on_gpu else size

    def part_bytes(self, source: PatchSource) -> int:
        return self.part_rows(source) * int(np.prod(source.shape))

    def _blocks(self, number: int, patches: SlidePatches) -> Iterator[list[Part]]:
        """Split the patches of a slide into parts; a block of neighbours goes to one process.

        On a CPU a part is a batch of patches in file order, the same batch that threads would read.
        """
        source, xy0 = self.source(patches), patches.xy0
        order = in_blocks(xy0, source.edge0) if self.on_gpu else np.arange(len(xy0))
        step = self.part_rows(source)
        size = max(step, BLOCK // step * step) if self.on_gpu else step
        for start in range(0, len(order), size):
            block = order[start : start + size]
            parts = [block[i : i + step] for i in range(0, len(block), step)]
            yield [Part(number, source, rows, xy0[rows]) for rows in parts]

    def _open_next(self) -> None:
        self._ahead = None
        if (item := next(self._items, None)) is not None:
            item = identify_inputs(item)
            self._ahead = (
                item,
                self._opener.submit(SlidePatches, *item.what, self._run.request, item.sources[0]),
            )

    def first(self) -> Generator[Outcome[EmbedItem, Record], None, PatchSource | None]:
        """Describe how to read the next slide that can be opened; yield outcomes for those that cannot."""
        while self._ahead is not None:
            item, opening = self._ahead
            try:
                return self.source(opening.result())
            except Exception as error:  # a slide must not end the run, whatever is wrong with it
                if (stop := stop_of(error)) is not None:
                    raise stop from None
                self._open_next()
                yield Outcome(item, None, error_line(error))
        return None

    def fits(self, feed: Feed) -> bool:
        """Whether these processes have room for the patches of the next slide; waits until it is open."""
        if self._ahead is None:
            return False
        if self._ahead[1].exception() is not None:
            return True
        return self.part_bytes(self.source(self._ahead[1].result())) <= feed.ring.slot_bytes

    def fill(self, feed: Feed) -> Iterator[Outcome[EmbedItem, Record]]:
        """Start slides until the processes have enough work."""
        while self._ahead is not None and len(feed.blocks) < feed.readers:
            if feed.busy and not self._ahead[1].done():
                return
            source = yield from self.first()
            if source is None or not self.fits(feed):
                return
            self._begin(feed)

    def _begin(self, feed: Feed) -> None:
        assert self._ahead is not None  # noqa: S101  # `first` has seen to it
        item, patches = self._ahead[0], self._ahead[1].result()
        encoded: Queue[Encoded | BaseException | None] = Queue(QUEUED)
        written = self._writers.submit(self._run.write, item, patches, self._encoder, _until_end(encoded))
        self._count += 1
        slide = self._open[self._count] = OpenSlide(item, len(patches), encoded, written)
        for block in self._blocks(self._count, patches):
            feed.add(block)
        if not slide.left:
            encoded.put(None)
        self._open_next()

    def take(self, vectors: Iterator[EncodedRows]) -> None:
        """Pass vectors to the threads that write them."""
        for batch in vectors:
            slide = self._open.get(batch.slide)
            if slide is None or slide.written.done():
                continue
            slide.left -= len(batch.rows)
            self._put(slide, (batch.rows, batch.values))
            if not slide.left:
                self._put(slide, None)

    def fail(self, number: int, error: BaseException) -> None:
        if number in self._open:
            self._put(self._open[number], error)

    def _put(self, slide: OpenSlide, what: Encoded | BaseException | None) -> None:
        """Wait for room in the queue, unless the writer has failed."""
        while not slide.written.done():
            with suppress(Full):
                slide.encoded.put(what, timeout=0.2)
                return

    def finished(self, *, wait: bool = False) -> Iterator[Outcome[EmbedItem, Record]]:
        """Yield the slides that are written or failed."""
        for number, slide in list(self._open.items()):
            if not (wait or slide.written.done()):
                continue
            del self._open[number]
            try:
                yield Outcome(slide.item, slide.written.result())
            except Exception as error:
                if (stop := stop_of(error)) is not None:
                    raise stop from None
                yield Outcome(slide.item, None, error_line(error))

    def abandon(self) -> None:
        """Stop slides in progress, without writing their files."""
        for slide in self._open.values():
            self._put(slide, XmilError("The run was stopped."))
        if self._ahead is not None and not self._ahead[1].cancel() and self._ahead[1].exception() is None:
            self._ahead[1].result().close()
        self._ahead = None


def _until_end(encoded: Queue[Encoded | BaseException | None]) -> Iterator[Encoded]:
    while (vectors := encoded.get()) is not None:
        if isinstance(vectors, BaseException):
            raise vectors
        yield vectors


KEPT = ("level0_magnification", "target_magnification", "overlap")
WRITTEN_ROWS = 2048  # rows that are written at once
Vectors = npt.NDArray[np.float32]
Encoded = tuple[npt.NDArray[np.int64], Vectors]  # rows among the slide's patches, their vectors


def write_features(
    path: str,
    slide_id: str,
    patches: SlidePatches,
    *,
    encoder: Encoder,
    encoded: Iterable[Encoded],
) -> None:
    """Write the vectors of a slide's patches to a file as they come."""
    header, request = patches.header, patches.request
    made_by = {"name": encoder.name, "asked": request.encoder, **encoder.about}
    made_by |= {"precision": encoder.precision, "stain_norm": request.stain_norm}
    with create_hdf5(path) as (file, check):
        about = {
            "version": __version__,
            "slide_id": slide_id,
            "mpp": header.mpp,
            "inferred": list(header.inferred),
            "extra": {"encoder": made_by, "source": patches.source},
        }
        file.attrs["xmil"] = json.dumps(about, default=str)
        features = file.create_dataset("features", (len(patches), encoder.dim), dtype=np.float32)
        named = {"name": slide_id, "savetodir": Path(path).parent.name, "encoder": encoder.name}
        features.attrs.update(named)
        coords = file.create_dataset("coords", data=header.coords)
        attributes = {
            **{key: header.extra.get(key) for key in KEPT},
            **dict(zip(("level0_width", "level0_height"), patches.slide.dimensions, strict=True)),
            "patch_size": patches.size,
            "patch_size_level0": header.patch_size,
            "mpp": header.mpp,
            "name": slide_id,
            "savetodir": header.path.parent.name,
        }
        coords.attrs.update({key: "None" if value is None else value for key, value in attributes.items()})
        buffer = RowBuffer(features)
        for rows, values in encoded:
            if not np.isfinite(values).all():
                raise FileError(f"{patches.slide.path}: the encoder returned values that are not finite.")
            buffer.put(rows, values)
            check()


class RowBuffer:
    """A buffer for rows in any order, which writes complete blocks; the more ordered, the less memory."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._blocks: dict[int, tuple[Vectors, int]] = {}  # vectors by block, and how many are missing

    def put(self, rows: npt.NDArray[np.int64], values: Vectors) -> None:
        """Add rows, and write blocks that are complete."""
        blocks = rows // WRITTEN_ROWS
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            start = block * WRITTEN_ROWS
            stop = min(start + WRITTEN_ROWS, self._dataset.shape[0])
            if block not in self._blocks:
                self._blocks[block] = np.empty((stop - start, values.shape[1]), np.float32), stop - start
            vectors, missing = self._blocks.pop(block)
            vectors[rows[chosen] - start] = values[chosen]
            missing -= int(chosen.sum())
            if missing:
                self._blocks[block] = vectors, missing
            else:
                self._dataset[start:stop] = vectors


SAMPLE = 32  # patches from which the stains of a slide are found


class SlidePatches:
    """A slide with its patches, checked against each other; close it after use."""

    def __init__(self, slide: Path, patches: Path, request: EmbedRequest, source: str | None = None) -> None:
        self.request = request
        self.source = source or identity(slide)
        self.header = open_bag(patches)
        corners, edge0 = self.header.coords, self.header.patch_size
        if corners is None or edge0 is None:
            raise FileError(f"{patches}: holds no level-0 corners with a patch edge; tile the slide.")
        guess = self.header.patches.edge_guess
        if guess is not None:
            raise FileError(
                f"{patches}: stores no patch edge, and {edge0} px would be a guess from {guess}; name CLAM's "
                "folder patches/, or tile the slide."
            )
        self.xy0, self.edge0 = corners, edge0  # (n, 2), and the edge in level-0 pixels
        size = request.patch_px or self.header.extra.get("patch_size")
        if not size:
            raise FileError(f"{patches}: does not store the patch size in pixels; pass `patch_px=`.")
        self.size = int(size)
        self.slide = open_slide(slide)
        try:
            _check(self.slide, self.header)
            self.stain = self._find_stain() if request.stain_norm and len(self) else None
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.header)

    def read(self, index: int) -> Pixels:
        """Read the pixels of one patch, without stain normalisation."""
        return read_patch(self.slide, self.xy0[index], edge0=self.edge0, size=self.size)

    def close(self) -> None:
        self.slide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_stain(self) -> Macenko:
        """Estimate the slide's stains from patches spread evenly over it."""
        chosen = np.unique(np.linspace(0, len(self) - 1, SAMPLE).astype(int))
        try:
            return Macenko.fit(np.stack([self.read(int(i)) for i in chosen]))
        except InputError as error:
            raise FileError(f"{self.slide.path}: {error}") from None


class PatchStream(SlidePatches):
    """The patches of a slide in batches, a few of which threads read ahead."""

    def __init__(
        self,
        slide: Path,
        patches: Path,
        transform: Callable[[Any], Tensor],
        request: EmbedRequest,
        source: str | None = None,
    ) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="xmil-patches")
        self._transform = transform
        self._waiting: deque[list[Future[Tensor]]] = deque()
        self._next = 0
        super().__init__(slide, patches, request, source)
        self._fill()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield batches in the order of the patches."""
        while self._waiting:
            batch = [future.result() for future in self._waiting.popleft()]
            self._fill()
            yield torch.stack(batch)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()

    def _fill(self) -> None:
        while len(self._waiting) < AHEAD and self._next < len(self):
            last = min(self._next + self.request.batch, len(self))
            futures = [self._pool.submit(self._prepared, i) for i in range(self._next, last)]
            self._waiting.append(futures)
            self._next = last

    def _prepared(self, index: int) -> Tensor:
        pixels = self.read(index)
        return self._transform(pixels if self.stain is None else self.stain.normalise(pixels))


def _check(slide: Slide, header: Header) -> None:
    """Refuse patches of another slide."""
    stored = tuple(header.extra.get(key) for key in ("level0_width", "level0_height"))
    if all(isinstance(value, int | np.integer) for value in stored) and stored != slide.dimensions:
        raise FileError(
            f"{header.path}: belongs to a slide of {stored[0]} x {stored[1]} px; {slide.path} has "
            f"{slide.dimensions[0]} x {slide.dimensions[1]}. Tile this slide."
        )
    coords = header.coords
    if coords is not None and len(coords) and (coords.max(axis=0) >= slide.dimensions).any():
        raise FileError(f"{header.path}: has patches outside {slide.path}; they belong to another slide.")
