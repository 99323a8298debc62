"""Features of many slides: patches read and decoded by threads while the encoder works.

<slide>.h5    TRIDENT's layout: `features` (n, d), `coords` (n, 2) with the attributes of the patches

Memory is bounded by the batches on their way, whatever the size of a slide. While one slide is encoded, the
first batches of the next are read.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.errors import FileError, InputError, StopError, bad_parameter
from xmil.core.runfiles import RunFolder, file_digest
from xmil.core.storage import write_atomically
from xmil.data import Header, open_bag
from xmil.runs.slidewise import Results, stopping, work_on_slides
from xmil.runs.workers.pool import Stages, Workers
from xmil.slides import Slide, open_slide
from xmil.slides.slide import Pixels
from xmil.slides.stain import Macenko
from xmil.slides.tiling import read_patch

if TYPE_CHECKING:
    from torch import Tensor

    from xmil.encoders import Encoder

SAMPLE = 32  # patches from which the stains of a slide are found
KEPT = ("level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height")


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

    def __post_init__(self) -> None:
        for name in ("batch", "threads", "ahead"):
            if getattr(self, name) < 1:
                raise bad_parameter(name, "embed", "an int in the range [1, inf)", getattr(self, name))

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
        )

    def lasting(self) -> dict[str, Any]:
        """What changes features, and so must stay the same in a folder."""
        passing = ("device", "batch", "threads", "ahead", "weights")
        kept = {key: value for key, value in asdict(self).items() if key not in passing}
        files = [Path(name) for name in (self.encoder, self.weights or "")]
        return {**kept, "files": [file_digest(path) for path in files if path.is_file()]}


def embed_slides(
    slides: Mapping[str, tuple[Path, Path]],
    out: Path,
    settings: EmbedSettings,
    *,
    engine: Workers | None = None,
    restart: bool = False,
    on_slide: Callable[[], None] = lambda: None,
    refused: Mapping[str, str] | None = None,
) -> Results:
    """Embed slides, given as id to (slide, patches); those that have the patches' features are left alone."""
    return work_on_slides(
        RunFolder(out, "embed", settings.lasting()),
        slides,
        partial(_make_worker, settings, out),
        output=lambda name: out / f"{name}.h5",
        about={"device": settings.device, "weights": settings.weights},
        engine=engine,
        restart=restart,
        on_slide=on_slide,
        refused=refused,
        current=lambda name: _same_places(out / f"{name}.h5", slides[name][1]),
    )


def _same_places(features: Path, patches: Path) -> bool:
    """Whether features are those of the patches, which may have been laid anew since."""
    try:
        ours, asked = open_bag(features), open_bag(patches)
    except FileError:
        return True  # the patches' fault is reported by the worker, the features' by who reads them
    if ours.coords is None or asked.coords is None:
        return True
    return ours.patch_size == asked.patch_size and np.array_equal(ours.coords, asked.coords)


def _make_worker(settings: EmbedSettings, out: Path) -> Stages[tuple[str, tuple[Path, Path]], dict[str, Any]]:
    encoder = settings.load()

    def read(item: tuple[str, tuple[Path, Path]]) -> PatchStream:
        return PatchStream(item[1][0], item[1][1], encoder.transform, settings)

    def work(item: tuple[str, tuple[Path, Path]], patches: PatchStream) -> dict[str, Any]:
        with patches:
            write = partial(_write, item[0], patches, encoder, settings)
            stopping(partial(write_atomically, out / f"{item[0]}.h5", write))
        return {"patches": len(patches)}

    return Stages(read, work)


class PatchStream:
    """The patches of a slide, batch by batch, a few of them read ahead by threads."""

    def __init__(
        self, slide: Path, patches: Path, transform: Callable[[Any], Tensor], settings: EmbedSettings
    ) -> None:
        self.header = open_bag(patches)
        self.size = _patch_px(self.header, settings)
        self.slide = open_slide(slide)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="xmil-patches")
        self._transform, self._batch, self._ahead = transform, settings.batch, settings.ahead
        self._waiting: deque[list[Future[Tensor]]] = deque()
        self._next = 0
        try:
            _check(self.slide, self.header)
            self.stain = self._find_stain() if settings.stain_norm and len(self) else None
            self._fill()
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.header)

    def __iter__(self) -> Iterator[Tensor]:
        """Batches in the order of the patches."""
        import torch

        while self._waiting:
            batch = [future.result() for future in self._waiting.popleft()]
            self._fill()
            yield torch.stack(batch)

    def read(self, index: int) -> Pixels:
        """The pixels of one patch, stains not changed."""
        assert self.header.coords is not None and self.header.patch_size is not None  # noqa: S101, PT018
        return read_patch(self.slide, self.header.coords[index], edge0=self.header.patch_size, size=self.size)

    def close(self) -> None:
        """Stop reading and close the slide."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.slide.close()

    def __enter__(self) -> PatchStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        while len(self._waiting) < self._ahead and self._next < len(self):
            last = min(self._next + self._batch, len(self))
            futures = [self._pool.submit(self._prepared, i) for i in range(self._next, last)]
            self._waiting.append(futures)
            self._next = last

    def _prepared(self, index: int) -> Tensor:
        pixels = self.read(index)
        return self._transform(pixels if self.stain is None else self.stain.normalise(pixels))

    def _find_stain(self) -> Macenko:
        """The slide's stains, from patches spread evenly over it."""
        chosen = np.unique(np.linspace(0, len(self) - 1, SAMPLE).astype(int))
        try:
            return Macenko.fit(np.stack([self.read(int(i)) for i in chosen]))
        except InputError as error:
            raise FileError(f"{self.slide.path}: {error}") from None


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


def _write(slide_id: str, patches: PatchStream, encoder: Encoder, settings: EmbedSettings, path: str) -> None:
    """Encode batch by batch straight into the file."""
    import h5py

    header = patches.header
    with h5py.File(path, "w") as file:
        file.attrs["xmil"] = json.dumps(_ours(slide_id, patches, encoder, settings), default=str)
        features = file.create_dataset("features", (len(patches), encoder.dim), dtype=np.float32)
        named = {"name": slide_id, "savetodir": Path(path).parent.name, "encoder": encoder.name}
        features.attrs.update(named)
        coords = file.create_dataset("coords", data=header.coords)
        coords.attrs.update(_coords_attributes(slide_id, patches))
        done = 0
        for values in _vectors(encoder, patches):
            if not np.isfinite(values).all():
                raise FileError(f"{patches.slide.path}: the encoder gave values that are not finite.")
            features[done : done + len(values)] = values
            done += len(values)


def _vectors(encoder: Encoder, patches: PatchStream) -> Iterator[npt.NDArray[np.float32]]:
    """The vectors batch by batch; a GPU has the next batch before those of the last are fetched from it."""
    last: Tensor | None = None
    for batch in patches:
        current = _encoded(encoder, batch)
        if last is not None:
            yield last.cpu().numpy()
        last = current
    if last is not None:
        yield last.cpu().numpy()


def _encoded(encoder: Encoder, batch: Tensor) -> Tensor:
    """The vectors of a batch; a batch that the GPU cannot hold ends the run, as the next one would."""
    import torch

    try:
        return encoder(batch)
    except torch.cuda.OutOfMemoryError:
        raise StopError(f"The GPU's memory is too small for {len(batch)} patches; lower --batch.") from None


def _coords_attributes(slide_id: str, patches: PatchStream) -> dict[str, Any]:
    header = patches.header
    kept = {key: header.extra.get(key) for key in KEPT}
    kept["level0_width"], kept["level0_height"] = patches.slide.dimensions
    known = {**kept, "patch_size": patches.size, "patch_size_level0": header.patch_size, "mpp": header.mpp}
    named = {"name": slide_id, "savetodir": header.path.parent.name}
    return {key: "None" if value is None else value for key, value in {**known, **named}.items()}


def _ours(slide_id: str, patches: PatchStream, encoder: Encoder, settings: EmbedSettings) -> dict[str, Any]:
    made = {"encoder": {"name": encoder.name, "asked": settings.encoder, **encoder.about}}
    made["encoder"] |= {"precision": encoder.precision, "stain_norm": settings.stain_norm}
    return {
        "version": __version__,
        "slide_id": slide_id,
        "mpp": patches.header.mpp,
        "inferred": list(patches.header.inferred),
        "extra": made,
    }
