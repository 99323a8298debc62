"""Peak memory of maps inside one tile by a ViT-L/16 with random weights, each map in a process of its own.

python -m benchmarks.inside.memory
"""

from __future__ import annotations

import multiprocessing
import resource
import time

import torch

from benchmarks.inside.networks import torchvision_beside_cpu
from xmil.methods import EncoderNetwork, MapSettings, Tile, map_tile
from xmil.network import frozen

CASES = {
    "tokens": ("tokens", MapSettings()),
    "turned": ("turned", MapSettings()),
    "lrp to the pixels": ("lrp", MapSettings(layer="pixels")),
    "lrp to the pixels, gamma 0.25": ("lrp", MapSettings(layer="pixels", gamma=0.25)),
    "occlusion, batches of 32": ("occlusion", MapSettings(square=0.5)),
}


def peak(case: str) -> tuple[float, float]:
    """Peak memory of the process in GB after one map, and seconds for it."""
    torchvision_beside_cpu()
    import timm

    net = timm.create_model("vit_large_patch16_224", num_classes=0).eval()
    pixels = torch.randn(1, 3, 224, 224)
    tile = Tile(pixels, torch.randn(1024), lambda *_: pixels)
    method, settings = CASES[case]
    begin = time.perf_counter()
    with frozen(net):
        map_tile(method, EncoderNetwork(net, net), tile, settings)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, time.perf_counter() - begin


def main() -> None:
    """One line per map."""
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found, spent = pool.apply(peak, (case,))
        print(f"{case:<32} {found:5.2f} GB {spent:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
