"""Parts of the study that run in processes of their own."""

from __future__ import annotations

import pickle
import traceback
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.inside import networks
from benchmarks.inside.measure import Row, Seat, fold_model
from benchmarks.inside.pictures import PER_IMAGE, TiledImage


class Job(NamedTuple):
    """A part of a fold."""

    encoder: str
    data: str
    work: str
    device: str
    fold: int
    part: int
    parts: int
    draws: int
    maps: str = ""
    most: int = PER_IMAGE


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


def job_rows(job: Job) -> list[Row]:
    """The rows of a part of a fold's test images."""
    net = network_of(job.encoder, job.data, job.work, job.device)
    images = images_of(job.encoder, job.work)
    model, test, bags = fold_model(images, job.fold)
    positive = [i for i in test if images[i].label]
    found = [] if job.part else bags
    maps = frozenset(job.maps.split(",")) - {""}
    for i in positive[job.part :: job.parts]:
        seat = Seat(Path(job.data), images[i], model, net, job.device, maps, job.most)
        found += seat.rows(job.draws)
    return [{"encoder": job.encoder, "fold": job.fold, **row} for row in found]


def tried(job: Job) -> list[Row]:
    """A job's rows; a failure is printed, and the others go on."""
    try:
        return job_rows(job)
    except Exception:
        traceback.print_exc()
        return []
