"""`embed_slides`, features of many slides: patches read and decoded by threads while the encoder works.

<slide>.h5    TRIDENT's layout: `features` (n, d), `coords` (n, 2) with the attributes of the patches

Memory is bounded by the batches on their way, whatever the size of a slide. While one slide is encoded, the
first batches of the next are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError, StopError, bad_parameter, unknown_name
from xmil.core.identity import file_digest, unchanged
from xmil.core.names import counted
from xmil.core.run import Run
from xmil.core.runfiles import SLIDES, read_rows
from xmil.core.storage import write_atomically
from xmil.data import feature_files, open_bag
from xmil.data.siblings import slide_name
from xmil.runs.cohort_run import CohortRun, TableRow, Tally, as_workers, in_process, stopping
from xmil.runs.feature_file import Encoded, write_features
from xmil.runs.listener import Listener
from xmil.runs.patch_stream import PatchStream
from xmil.runs.slide_inputs import StrPath, named_slides
from xmil.runs.workers.pool import MakeWorker, Outcome, Stages, Worker, Workers, checked_device

if TYPE_CHECKING:
    from torch import Tensor

    from xmil.encoders import Encoder


DECODERS = ("cpu", "gpu")


@dataclass(frozen=True)
class EmbedSettings:
    """How features are made; the arguments of `load_encoder` are among them."""

    encoder: str
    weights: str | None = None
    device: str = "cpu"
    precision: str = "auto"
    input_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    random: bool = False
    stain_norm: bool = False
    patch_px: int | None = None
    batch: int = 64
    threads: int = 4
    ahead: int = 4  # batches read ahead
    full_digests: bool = False
    readers: int = 0  # processes that read and decode; 0 means threads of this one
    compile: bool = False
    decode: str = "cpu"  # "gpu": JPEG tiles by the device, where its pixels are near enough

    def __post_init__(self) -> None:
        for name, least in {"batch": 1, "threads": 1, "ahead": 1, "readers": 0}.items():
            if getattr(self, name) < least:
                raise bad_parameter(name, "embed", f"an int in the range [{least}, inf)", getattr(self, name))
        if self.decode not in DECODERS:
            raise unknown_name("decoder", self.decode, DECODERS)

    def reads_by_processes(self, encoder: Encoder) -> bool:
        """Whether reading processes serve the encoder: a transform of the user's own runs in threads here."""
        from xmil.encoders import Transform

        return self.readers > 0 and os.name == "posix" and isinstance(encoder.transform, Transform)

    def load(self) -> Encoder:
        """The encoder."""
        from xmil.encoders import load_encoder

        return load_encoder(
            self.encoder,
            weights=self.weights,
            device=self.device,
            precision=self.precision,
            size=self.input_size,
            mean=self.mean,
            std=self.std,
            random=self.random,
            compiled=self.compile,
        )

    def lasting(self) -> dict[str, Any]:
        """What changes features, and so must stay the same in a folder."""
        passing = ["device", "batch", "threads", "ahead", "weights", "full_digests", "readers"]
        passing += [] if self.compile else ["compile"]  # folders of earlier versions do not name them
        passing += [] if self.decode == "gpu" else ["decode"]
        kept = {key: value for key, value in asdict(self).items() if key not in passing}
        return {**kept, "files": list(self.digests)}

    @property
    def digests(self) -> tuple[str, ...]:
        """What the encoder's files hold, where it is made from files."""
        files = [Path(name) for name in (self.encoder, self.weights or "")]
        return tuple(file_digest(path) for path in files if path.is_file())


def embed_slides(
    tiles: StrPath,
    slides: StrPath | Sequence[StrPath],
    *,
    encoder: str,
    out: StrPath | None = None,
    weights: StrPath | None = None,
    device: str = "auto",
    precision: str = "auto",
    batch: int = 64,
    threads: int = 0,
    readers: int | None = None,
    compile: bool = False,  # noqa: A002 - the word users know
    decode: str = "cpu",
    stain_norm: bool = False,
    input_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    patch_px: int | None = None,
    random: bool = False,
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    full_digests: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Encode the patches of slides into a folder of features, as `xmil embed` does.

    `tiles` is the folder of `tile_slides`, or of TRIDENT's or CLAM's patches; without `out` features go into
    a folder beside the patches. `readers` processes read and decode (None: one per core for a GPU, none for a
    CPU, where `threads` do); `compile` compiles the network, which changes the last digits of features;
    `decode` "gpu" has the GPU decode JPEG tiles where its pixels are the CPU's within one grey level.
    """
    from xmil.encoders.load import short_name

    hear = listener or Listener()
    settings = EmbedSettings(
        encoder=encoder,
        weights=None if weights is None else str(weights),
        device=found_device(device),
        precision=precision,
        input_size=input_size,
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
        random=random,
        stain_norm=stain_norm,
        patch_px=patch_px,
        batch=batch,
        threads=threads or min(16, max(2, os.cpu_count() or 2)),
        full_digests=full_digests,
        readers=_readers(found_device(device)) if readers is None else readers,
        compile=compile,
        decode=decode,
    )
    if decode == "gpu" and not settings.device.startswith("cuda"):
        raise InputError("--decode gpu needs a GPU; leave it out on a CPU.")
    pairs, refused = _pairs(Path(tiles), slides, follow_links=follow_links, hear=hear)
    folder = Path(tiles) / f"features_{short_name(encoder)}" if out is None else Path(out)
    run, chosen = EmbedRun(folder, settings), as_workers(workers)
    items = [(name, *pair) for name, pair in pairs.items()]
    tally = run.go(items, workers=chosen, restart=restart, refused=refused, listener=hear)
    patches = counted(sum(tally.results[name]["patches"] for name in tally.done), "patch")
    hear.say(f"{patches} of {counted(len(tally.done), 'slide')}, {tally}. Written to {folder}.")
    return run.saved()


def _pairs(
    tiles: Path, slides: StrPath | Sequence[StrPath], *, follow_links: bool, hear: Listener
) -> tuple[dict[str, tuple[Path, Path]], dict[str, str]]:
    """Slide id to (slide, patches); the patches that have no slide, or two, with the reason."""
    folder = tiles / "patches" if (tiles / "patches").is_dir() else tiles
    if not folder.is_dir():
        raise InputError(absent(tiles, "folder"))
    files, links = feature_files(folder, follow_links=follow_links)
    named = {slide_name(path): path for path in files if path.suffix == ".h5"}
    for path in links:
        hear.say(f"{path}: this link was not followed.")
    if not named:
        raise InputError(f"{tiles}: no patches here; run xmil tile first.")
    found = named_slides(slides, follow_links=follow_links, say=hear.say)
    pairs = {name: (found.slides[name], path) for name, path in named.items() if name in found.slides}
    refused = {name: why for name, why in found.twice.items() if name in named}
    missing = [name for name in named if name not in pairs and name not in refused]
    where = slides if isinstance(slides, str | PathLike) else ", ".join(map(str, slides))
    if not pairs and not refused:
        raise InputError(f"{where}: no slide is named like a file in {folder}; name them alike.")
    return pairs, refused | dict.fromkeys(missing, f"no slide of this name in {where}")


Item = tuple[str, Path, Path]  # name, slide, patches


@dataclass(frozen=True)
class EmbedRun(CohortRun[Item, dict[str, Any]]):
    """A folder of features."""

    chosen: EmbedSettings
    notes: list[str] = field(default_factory=list)
    kind = "embed"
    verb = "used"

    def settings(self) -> dict[str, Any]:
        """What changes features."""
        return self.chosen.lasting()

    def about(self) -> dict[str, Any]:
        """Where it was done, and with which file of weights."""
        return {"device": self.chosen.device, "weights": self.chosen.weights}

    def slides_of(self, item: Item) -> Sequence[str]:
        """The slide itself."""
        return (item[0],)

    def outputs(self, items: Sequence[Item]) -> Iterator[Path]:
        """The features of these slides; the folder may hold others."""
        return (self.out / f"{item[0]}.h5" for item in items)

    def make_worker(self, workers: Workers) -> MakeWorker[Item, dict[str, Any]]:  # noqa: ARG002
        """Encodes one slide after another; the encoder's files are those that were hashed here."""
        return partial(_make_worker, self.chosen, self.out, self.chosen.digests)

    def outcomes(self, items: Sequence[Item], workers: Workers) -> Iterator[Outcome[Item, dict[str, Any]]]:
        """Slide after slide, their patches in common batches where processes read them for this one."""
        if not in_process(workers) or not items or not self.chosen.readers:
            return super().outcomes(items, workers)
        from xmil.runs.embedder import Embedder

        encoder = self.chosen.load()
        if not self.chosen.reads_by_processes(encoder):
            return super().outcomes(items, workers)
        return Embedder(encoder, self.chosen, self.out, self.notes).outcomes(items)

    def warnings(self, items: Sequence[Item], tally: Tally[dict[str, Any]]) -> list[str]:  # noqa: ARG002
        """Slides that were read in another way than asked for."""
        return self.notes

    def known(self, item: Item) -> dict[str, Any] | None:
        """What is there of a slide whose features are those of its patches, which may be tiled again."""
        name, slide, patches = item
        path = self.out / f"{name}.h5"
        if not path.is_file():
            return None
        try:
            ours, asked = open_bag(path), open_bag(patches)
        except FileError:
            return {
                "patches": 0
            }  # the patches' fault is reported by the worker, the features' by who reads them
        stored = ours.extra.get("source")
        if stored is not None and not unchanged(slide, stored, full=self.chosen.full_digests):
            return None
        if ours.coords is None or asked.coords is None:
            return {"patches": len(ours)}
        same = ours.patch_size == asked.patch_size and np.array_equal(ours.coords, asked.coords)
        return {"patches": len(ours)} if same else None

    @cached_property
    def _before(self) -> dict[str, TableRow]:
        return dict(read_rows(self.out / SLIDES))

    def earlier(self) -> Mapping[str, TableRow]:
        """Slides are added to the folder, one run after another."""
        return self._before

    def rows_of(self, item: Item, result: dict[str, Any]) -> list[TableRow]:
        """The slide and its patches."""
        return [{"slide_id": item[0], "n": result["patches"], "slide": str(item[1].absolute())}]


def _make_worker(
    settings: EmbedSettings, out: Path, digests: tuple[str, ...]
) -> Worker[Item, dict[str, Any]]:
    encoder = settings.load()
    if settings.digests != digests:
        raise StopError(
            "The encoder's files have changed since the run started; put them back, or use another --out."
        )
    if settings.reads_by_processes(encoder):
        from xmil.runs.embedder import Embedder

        return Embedder(encoder, settings, out).one

    def read(item: Item) -> PatchStream:
        return PatchStream(item[1], item[2], encoder.transform, settings)

    def work(item: Item, patches: PatchStream) -> dict[str, Any]:
        with patches:
            about: dict[str, Any] = {"encoder": encoder, "settings": settings}
            write = partial(write_features, slide_id=item[0], patches=patches, **about)
            write = partial(write, encoded=_vectors(encoder, patches))
            stopping(partial(write_atomically, out / f"{item[0]}.h5", write))
        return {"patches": len(patches)}

    return Stages(read, work)


def _vectors(encoder: Encoder, patches: PatchStream) -> Iterator[Encoded]:
    """The vectors batch by batch; a GPU has the next batch before those of the last are fetched from it."""
    from xmil.runs.feed.encoder_batches import encoded

    last: Tensor | None = None
    done = 0
    for batch in chain(patches, [None]):
        current = None if batch is None else encoded(encoder, batch)
        if last is not None:
            yield np.arange(done, done + len(last)), last.cpu().numpy()
            done += len(last)
        last = current


def _readers(device: str) -> int:
    """Reading processes for a device: a GPU takes more patches than threads of one process decode."""
    return min(16, os.cpu_count() or 1) if device.startswith("cuda") and os.name == "posix" else 0


def found_device(name: str) -> str:
    """A device that is there; "auto" takes a GPU if there is one."""
    if name != "auto":
        return checked_device(name)
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
