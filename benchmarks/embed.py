"""Tiling reads each patch once; embedding keeps the encoder busy: `python -m benchmarks embed`.

The slide is one that the benchmark writes (a pyramidal TIFF at 0.25 µm/px), or `--slide`. The encoder's own
time is taken over the same patches, read beforehand; both runs alternate, the best of each counts.

`python -m benchmarks.embed --mosaic SLIDE --device cuda` measures reading processes at full size instead, see
`benchmarks.embed_mosaic`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.embed_mosaic import measure_mosaic, mosaic_options
from xmil.encoders import Encoder, load_encoder
from xmil.runs.embed import Embedder, PatchStream, embed_slides
from xmil.runs.requests import EmbedRequest
from xmil.slides import open_slide
from xmil.slides.slide import Slide
from xmil.slides.tiling import TileSettings, Tiling, tile_slide, write_tiling


def write_slide(path: Path, edge: int) -> None:
    """Blotches of two stains on glass, with nuclei; two levels, tiles of 256 px."""
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 255, (24, 24), dtype=np.uint8)).resize(
        (edge, edge), Image.Resampling.BICUBIC
    )
    noise = rng.integers(-25, 25, (edge, edge), dtype=np.int16)
    tissue = np.asarray(coarse) > 100
    nuclei = (rng.random((edge // 8, edge // 8)) > 0.85).repeat(8, 0).repeat(8, 1)[:edge, :edge]
    colours = np.where(nuclei[..., None], (110, 60, 140), (220, 150, 190)).astype(np.int16)
    pixels = np.where(tissue[..., None], colours + noise[..., None], 244)
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    small = picture.resize((edge // 4, edge // 4), Image.Resampling.BOX)
    _save(path, [picture, small])


def _save(path: Path, pictures: list[Image.Image]) -> None:
    import tifffile

    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for i, picture in enumerate(pictures):
            file.write(
                np.asarray(picture),
                tile=(256, 256),
                photometric="rgb",
                compression="zlib",
                subfiletype=min(i, 1),
                resolution=(40_000, 40_000),
                resolutionunit="CENTIMETER",
                metadata=None,
            )


def tiled(path: Path, mpp: float | None) -> tuple[Tiling, dict[str, Any]]:
    """A tiling with how often pixels of the patches' level were read, against the patches' own area."""
    calls: list[tuple[int, int, int, tuple[int, int]]] = []
    with open_slide(path, mpp) as slide:
        read = type(slide)._read

        def counted(self: Slide, level: int, x: int, y: int, size: tuple[int, int]) -> Any:
            calls.append((level, x, y, size))
            return read(self, level, x, y, size)

        slide._read = counted.__get__(slide)  # type: ignore[method-assign]
        start = time.perf_counter()
        tiling = tile_slide(slide, TileSettings())
        seconds = time.perf_counter() - start
    patches = [call for call in calls if max(call[3]) <= tiling.edge0 + 2]  # the rest is the thumbnail
    return tiling, {"seconds": seconds, "patch reads": len(patches), "distinct": len(set(patches))}


def encoder_only(encoder: Encoder, batches: list[torch.Tensor], device: str) -> float:
    start = time.perf_counter()
    for batch in batches:
        encoder(batch).cpu()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path)
    parser.add_argument("--mpp", type=float)
    parser.add_argument("--edge", type=int, default=4096, help="of the slide that is written")
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    mosaic_options(parser)
    options = parser.parse_args(arguments)
    if options.mosaic is not None:
        measure_mosaic(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        _measure(options, Path(folder))


def _measure(options: argparse.Namespace, folder: Path) -> None:
    path = options.slide or folder / "slide.tif"
    if options.slide is None:
        write_slide(path, options.edge)
    tiling, found = tiled(path, options.mpp)
    kept, tried = len(tiling.xy0), len(tiling.xy0) + tiling.flat
    print(
        f"tile: {kept} patches in {found['seconds']:.2f} s; {found['patch reads']} reads for {tried} "
        f"patches, {found['distinct']} of them distinct"
    )
    patches = write_tiling(tiling, folder / "tiles")
    request = EmbedRequest.build(
        tiles=folder / "tiles", slides=[path], encoder=options.encoder, random=True,
        device=options.device, batch=options.batch, readers=0,
    )  # fmt: skip
    encoder = load_encoder(options.encoder, random=True, device=options.device)
    with PatchStream(path, patches, encoder.transform, request) as loaded:
        batches = list(loaded)
    encoder_only(encoder, batches[:1], options.device)
    alone, whole, inside = [], [], []
    for i in range(options.repeats):
        alone.append(encoder_only(encoder, batches, options.device))
        seconds, encoding = _embedded(request.replace(out=folder / f"features{i}"), encoder)
        whole.append(seconds)
        inside.append(encoding / seconds)
    busy = min(alone) / min(whole)
    print(
        f"embed, {options.encoder} on {options.device}: {kept} patches, encoder alone {min(alone):.2f} s, "
        f"whole {min(whole):.2f} s; ratio {busy:.0%}; in the encoder {max(inside):.0%} of the time"
    )


def _embedded(request: EmbedRequest, encoder: Encoder) -> tuple[float, float]:
    """Seconds of the whole command for one slide, and those inside the encoder; its loading left out."""
    import xmil.runs.embed as embedding

    spent: list[float] = []

    def timed(made: Encoder, batch: torch.Tensor) -> Any:
        begin = time.perf_counter()
        found = encode(made, batch)
        spent.append(time.perf_counter() - begin)
        return found

    load, encode = Embedder.load_encoder, embedding.encode_batch
    Embedder.load_encoder = lambda _: encoder  # type: ignore[method-assign]
    embedding.encode_batch = timed
    try:
        start = time.perf_counter()
        run = embed_slides.run(request)
        seconds = time.perf_counter() - start
    finally:
        Embedder.load_encoder, embedding.encode_batch = load, encode  # type: ignore[method-assign]
    assert not run.failed, run.failed
    return seconds, sum(spent)


if __name__ == "__main__":
    main()
