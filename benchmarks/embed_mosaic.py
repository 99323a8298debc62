"""Embedding against the encoder's own speed, on a JPEG-tiled TIFF of a real slide's tiles.

python -m benchmarks.embed --mosaic SLIDE.svs --device cuda --precision bfloat16 --batch 256 \\
    --encoders resnet50 vit_large_patch16_224

For each encoder (untrained: speed does not depend on weights), in one run: the network alone on pixels that
lie on the device already; `xmil embed` as a whole, its processes' start and the synced file included; and a
DataLoader over OpenSlide with as many workers, which is how TRIDENT feeds an encoder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.tiled_tiff import as_ycbcr, raw_tiles, write_mosaic, write_patches
from xmil.core.errors import InputError
from xmil.encoders import Encoder, Transform, load_encoder
from xmil.encoders.encoder import PRECISIONS
from xmil.runs.embed import Embedder, embed_slides
from xmil.runs.requests import EmbedRequest

Row = dict[str, Any]


def mosaic_options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark takes."""
    parser.add_argument("--mosaic", type=Path, help="a JPEG-tiled slide, whose tiles make a large one")
    parser.add_argument("--grid", type=int, default=350, help="tiles across and down the large slide")
    parser.add_argument("--encoders", nargs="+", default=["resnet50", "vit_large_patch16_224"])
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--patch", type=int, default=256)
    parser.add_argument("--readers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the encoder alone")
    parser.add_argument(
        "--loader-patches", type=int, default=30_000, help="that the DataLoader reads; 0: none"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ycbcr", action="store_true", help="save the tiles anew as YCbCr, colour whole")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")


def measure_mosaic(options: argparse.Namespace) -> None:
    """Print patches per second for each way and encoder."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="xmil-mosaic-") as name:
        folder = Path(name)
        tiles = raw_tiles(options.mosaic)
        tiles = as_ycbcr(tiles) if options.ycbcr else tiles
        slide = folder / "slides" / "large.tif"
        for inner in ("slides", "tiles"):
            (folder / inner).mkdir()
        size = write_mosaic(slide, tiles, options.grid)
        n = write_patches(folder / "tiles" / "large.h5", size, options.patch)
        told = f"{n:,} patches of {options.patch} px, {slide.stat().st_size / 1e9:.2f} GB"
        print(f"{told}; {options.readers} readers, batch {options.batch}, {options.precision}", flush=True)
        for encoder in options.encoders:
            for row in _ways(options, folder, encoder, n):
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(rows, indent=1))


def _ways(options: argparse.Namespace, folder: Path, name: str, n: int) -> Iterator[Row]:
    about: dict[str, Any] = {"device": options.device, "precision": options.precision, "random": True}
    encoder = load_encoder(name, **about, compiled=options.compile)
    start = time.perf_counter()
    alone = _alone(encoder, options)
    spent = time.perf_counter() - start
    yield {"encoder": name, "way": "alone", "per second": round(alone, 1), "seconds": round(spent, 1)}
    request = EmbedRequest.build(
        tiles=folder / "tiles", slides=[folder / "slides"], out=folder / f"features-{name}", encoder=name,
        **about, batch=options.batch, readers=options.readers, compile=options.compile,
    )  # fmt: skip
    yield _rated(
        {"encoder": name, "way": "xmil embed", "patches": n},
        alone,
        partial(_embedded, encoder, request),
    )
    if options.loader_patches:
        count = min(n, options.loader_patches)
        about = {"encoder": name, "way": "DataLoader over OpenSlide", "patches": count}
        yield _rated(about, alone, partial(_loaded, encoder, options, folder, count))


def _rated(about: Row, alone: float, way: Callable[[], float]) -> Row:
    """The speed of a way; one that fails says why, and the others go on."""
    try:
        seconds = way()
    except Exception as error:
        return {**about, "failed": f"{type(error).__name__}: {error}"}
    rate = about["patches"] / seconds
    return {
        **about,
        "per second": round(rate, 1),
        "of alone": round(rate / alone, 3),
        "seconds": round(seconds, 2),
    }


def _alone(encoder: Encoder, options: argparse.Namespace) -> float:
    """Patches per second of the network on scaled pixels that lie on the device."""
    transform = encoder.transform
    assert isinstance(transform, Transform)
    edge = transform.fit.edge(options.patch)
    pixels = torch.randint(0, 256, (options.batch, 3, edge, edge), dtype=torch.uint8, device=options.device)
    batch = transform.scaled(pixels).contiguous(memory_format=encoder.layout)
    kind = PRECISIONS[encoder.precision]
    autocast = torch.autocast(torch.device(options.device).type, dtype=kind, enabled=kind is not None)
    with torch.inference_mode(), autocast:
        for _ in range(3):
            encoder.network(batch)
        _wait(options.device)
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < options.seconds:
            for _ in range(8):
                encoder.network(batch)
                count += options.batch
            _wait(options.device)
        return count / (time.perf_counter() - start)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _embedded(encoder: Encoder, request: EmbedRequest) -> float:
    """Seconds of the run over the slide; loading the encoder is left out."""
    load = Embedder.load_encoder
    Embedder.load_encoder = lambda _: encoder  # type: ignore[method-assign]
    try:
        start = time.perf_counter()
        run = embed_slides.run(request)
        seconds = time.perf_counter() - start
    except InputError as error:
        raise InputError(f"{error} {(request.out / 'failures.csv').read_text()}") from None
    finally:
        Embedder.load_encoder = load  # type: ignore[method-assign]
    assert not run.failed, run.failed
    for note in run.warnings:
        print(note, flush=True)
    (run.path / "large.h5").unlink()
    return seconds


class OpenSlidePatches(Dataset[Tensor]):
    """Patches by OpenSlide, scaled to floats by the worker."""

    def __init__(self, folder: Path, transform: Transform, *, patch: int, count: int) -> None:
        self._path, self._transform, self._patch = folder / "slides" / "large.tif", transform, patch
        with h5py.File(folder / "tiles" / "large.h5") as file:
            self._xy = file["coords"][:count]
        self._slide: Any = None

    def __len__(self) -> int:
        return len(self._xy)

    def __getitem__(self, index: int) -> Tensor:
        import openslide

        if self._slide is None:
            self._slide = openslide.OpenSlide(str(self._path))
        x, y = self._xy[index].tolist()
        region = self._slide.read_region((x, y), 0, (self._patch, self._patch)).convert("RGB")
        return self._transform.scaled(self._transform(np.asarray(region)))


def _loaded(encoder: Encoder, options: argparse.Namespace, folder: Path, count: int) -> float:
    """Seconds for some patches by a DataLoader; vectors are fetched batch by batch and written at the end."""
    transform: Any = encoder.transform
    patches = OpenSlidePatches(folder, transform, patch=options.patch, count=count)
    start = time.perf_counter()
    loader = DataLoader(patches, options.batch, num_workers=options.readers, pin_memory=False)
    found = [encoder(batch.to(options.device)).cpu().numpy() for batch in loader]
    with h5py.File(folder / "loader.h5", "w") as file:
        file.create_dataset("features", data=np.concatenate(found))
    return time.perf_counter() - start
