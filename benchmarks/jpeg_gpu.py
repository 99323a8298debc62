"""JPEG tiles decoded on the GPU against the CPU's pixels, and how many a second.

python -m benchmarks.jpeg_gpu --slide SLIDE.svs [--device cuda]

Kinds: the slide's own tiles as stored (tables merged, RGB marked by Adobe's marker), and its pixels saved
anew as YCbCr without and with subsampled colour.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.tiled_tiff import raw_tiles
from xmil.slides.backends.tiffs import ADOBE_RGB

KINDS = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slide", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    tiles = raw_tiles(options.slide)
    mark, head = (ADOBE_RGB if tiles.photometric == 2 else b""), tiles.tables[2:-2]
    own = [data[:2] + mark + head + data[2:] for data in tiles.data]
    kinds = {"as stored": own}
    pictures = [Image.open(BytesIO(data)).convert("RGB") for data in own]
    for name, subsampling in KINDS.items():
        kinds[f"YCbCr {name}"] = [_saved(picture, subsampling) for picture in pictures]
    for name, streams in kinds.items():
        try:
            print(f"{name:<14} {compared(streams, options)}", flush=True)
        except Exception as error:  # a decoder may refuse a kind: say so and go on
            print(f"{name:<14} {type(error).__name__}: {str(error)[:200]}", flush=True)


def _saved(picture: Image.Image, subsampling: int) -> bytes:
    into = BytesIO()
    picture.save(into, "JPEG", quality=75, subsampling=subsampling)
    return into.getvalue()


def compared(streams: list[bytes], options: argparse.Namespace) -> str:
    """Differences in grey levels, and tiles per second."""
    from torchvision.io import ImageReadMode, decode_jpeg

    given = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in streams]
    decoded = decode_jpeg(given, mode=ImageReadMode.RGB, device=options.device)
    gaps = []
    for ours, data in zip(decoded, streams, strict=True):
        pixels = np.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(np.int16)
        gaps.append(np.abs(ours.permute(1, 2, 0).cpu().numpy().astype(np.int16) - pixels).ravel())
    gap = np.concatenate(gaps)
    many = given * max(1, 512 // len(given))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(options.rounds):
        decode_jpeg(many, mode=ImageReadMode.RGB, device=options.device)
    torch.cuda.synchronize()
    rate = options.rounds * len(many) / (time.perf_counter() - start)
    shares = ", ".join(f"> {level}: {np.mean(gap > level):.2%}" for level in (0, 1, 2, 5))
    return f"largest difference {gap.max()}, {shares}; {rate:,.0f} tiles per second"


if __name__ == "__main__":
    main()
