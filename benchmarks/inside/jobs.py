"""Parts of the study that run in processes of their own."""

from __future__ import annotations

import pickle
import re
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.inside import networks
from benchmarks.inside.curves import FILLS
from benchmarks.inside.maps import Variant, variants
from benchmarks.inside.measure import Row, Scope, Seat, fold_model
from benchmarks.inside.pictures import PER_IMAGE, SEEN, TiledImage


class Job(NamedTuple):
    """A part of a fold's test images under one model; `seed` 0 alone has curves and redrawn networks."""

    encoder: str
    data: str
    work: str
    device: str
    fold: int
    seed: int
    part: int
    parts: int
    draws: int
    curved: bool
    maps: str = ""
    most: int = PER_IMAGE
    settings: str = ""
    every: int = 1
    fills: str = ""

    def scope(self) -> Scope:
        """What it measures."""
        first = self.seed == 0
        maps = frozenset(self.maps.split(",")) - {""}
        fills = tuple(self.fills.split(",")) if self.fills else FILLS
        return Scope(maps, self.most, self.curved and first, self.draws if first else 0, fills)


@cache
def network_of(name: str, data: str, work: str, device: str) -> torch.nn.Module:
    """An encoder, built once per process."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # accounts have to close
    place = Path(work) if name == "vit" else Path(data)
    return networks.build(name, place, device)


@cache
def images_of(name: str, work: str) -> list[TiledImage]:
    """The images with an encoder's features, as the study keeps them."""
    found: list[TiledImage] = pickle.loads((Path(work) / f"{name}.pickle").read_bytes())  # noqa: S301  # written by this run
    return found


@cache
def variants_of(job: Job) -> list[Variant]:
    """The maps and settings for an encoder."""
    net = network_of(job.encoder, job.data, job.work, job.device)
    found = variants(net, torch.zeros(1, 3, SEEN, SEEN, device=job.device))
    wanted = job.scope().maps
    fitting = re.compile(job.settings)
    return [v for v in found if (not wanted or v[0] in wanted) and fitting.search(v[1])]


@cache
def model_of(name: str, work: str, fold: int, seed: int) -> tuple[torch.nn.Module, np.ndarray, list[Row]]:
    """A fold's model, trained once per process."""
    return fold_model(images_of(name, work), fold, seed)


def job_rows(job: Job) -> list[Row]:
    """The rows of a part of a fold's test images."""
    net = network_of(job.encoder, job.data, job.work, job.device)
    images = images_of(job.encoder, job.work)
    model, test, bags = model_of(job.encoder, job.work, job.fold, job.seed)
    positive = [i for i in test if images[i].label]
    found = [] if job.part else list(bags)
    mean = torch.cat([image.features for i, image in enumerate(images) if i not in set(test)]).mean(dim=0)
    for k, i in enumerate(positive[job.part :: job.parts]):
        scope = job.scope() if k % job.every == 0 else replace(job.scope(), draws=0)
        seat = Seat(Path(job.data), images[i], model, net, job.device, scope, variants_of(job), mean)
        found += seat.rows()
    about = {"encoder": job.encoder, "fold": job.fold, "seed": job.seed}
    return [{**about, **row} for row in found]


def tried(job: Job) -> list[Row]:
    """A job's rows; a failure is printed, and the others go on."""
    try:
        return job_rows(job)
    except Exception:
        traceback.print_exc()
        return []
