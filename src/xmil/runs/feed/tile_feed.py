"""A feed whose JPEG tiles the GPU decodes where it may; other slides go to the reading processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import Empty, Queue

import numpy as np
import torch

from xmil.runs.feed.feed import Feed, Filled, Part
from xmil.runs.feed.ring import Ring
from xmil.runs.feed.tiles import GpuTiles

THREADS = 3  # one decodes while others read tiles and cut patches
AHEAD = 6  # parts that are decoded before they are asked for


class TileFeed(AbstractContextManager["TileFeed"]):
    """Parts of slides that were announced are decoded by the device, the others by processes."""

    def __init__(self, feed: Feed, device: str) -> None:
        self._feed, self._device = feed, torch.device(device)
        self.tiles: dict[int, GpuTiles] = {}
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="xmil-tiles")
        self._waiting: deque[Part] = deque()
        self._ready: Queue[Filled] = Queue()
        self._under_way = 0
        self._dropped: set[int] = set()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ring(self) -> Ring:
        """The processes' memory."""
        return self._feed.ring

    @property
    def readers(self) -> int:
        """How many processes there are."""
        return self._feed.readers

    @property
    def queued(self) -> int:
        """Blocks that nobody works on yet."""
        return self._feed.queued + len(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether something is still to be read or taken."""
        return bool(self._feed.busy or self._waiting or self._under_way)

    def add(self, parts: Iterable[Part]) -> None:
        """Have a block of neighbouring patches read."""
        for part in (block := list(parts)):
            if part.slide in self.tiles:
                self._waiting.append(part)
        others = [part for part in block if part.slide not in self.tiles]
        if others:
            self._feed.add(others)

    def drop(self, slide: int) -> None:
        """Read no more of a slide."""
        self._dropped.add(slide)
        self._feed.drop(slide)

    def release(self, slot: int) -> None:
        """Let a slot of the processes be filled again."""
        self._feed.release(slot)

    def next(self) -> Filled | None:
        """The next part that is ready; None where nothing is under way."""
        while True:
            self._hand_out()
            if not self._under_way:
                return self._feed.next()
            try:
                found = self._ready.get(timeout=None if not self._feed.busy else 0.001)
            except Empty:
                read = self._feed.next()
                if read is not None:
                    return read
                continue
            self._under_way -= 1
            if found.part.slide in self._dropped:
                continue
            if found.error is None:
                return found
            for part in self._smaller(found.part):  # the CPU tries; it says what is wrong with a damaged tile
                self._feed.add([part])

    def close(self) -> None:
        """Stop decoding and reading."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._feed.close()

    def _hand_out(self) -> None:
        while self._waiting and self._under_way < AHEAD:
            part = self._waiting.popleft()
            if part.slide not in self._dropped:
                self._under_way += 1
                self._threads.submit(self._decode, part)

    def _decode(self, part: Part) -> None:
        try:
            self._ready.put(Filled(part, self._patches(part), -1))
        except Exception as error:  # whatever a decoder dislikes; the CPU is next
            self._ready.put(Filled(part, None, -1, f"{type(error).__name__}: {error}"))

    def _patches(self, part: Part) -> torch.Tensor:
        tiles = self.tiles[part.slide]
        if self._device.type != "cuda":
            return tiles.patches(part.xy0)
        stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            found = tiles.patches(part.xy0).contiguous()
        stream.synchronize()
        return found

    def _smaller(self, part: Part) -> list[Part]:
        """A part in pieces that fit a slot of the processes."""
        step = self.ring.slot_bytes // int(np.prod(part.source.shape))
        pieces = [slice(i, i + step) for i in range(0, len(part.rows), step)]
        return [Part(part.slide, part.source, part.rows[one], part.xy0[one]) for one in pieces]
