"""Parts of the study that run in processes of their own."""

from __future__ import annotations

import pickle
import traceback
from functools import cache
from pathlib import Path

import torch

from benchmarks.inside import networks
from benchmarks.inside.measure import Row, Seat, fold_model
from benchmarks.inside.pictures import TiledImage

Job = tuple[str, str, str, str, int, int, int, int]  # encoder, data, work, device, fold, part, parts, draws


@cache
def network_of(name: str, data: str, work: str, device: str) -> torch.nn.Module:
    """An encoder, built once per process."""
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # accounts have to close
    place = Path(work) if name == "vit" else Path(data)
    return networks.build(name, place, device)


@cache
def _images(name: str, work: str) -> list[TiledImage]:
    found: list[TiledImage] = pickle.loads((Path(work) / f"{name}.pickle").read_bytes())  # noqa: S301  # written by this run
    return found


def job_rows(job: Job) -> list[Row]:
    """The rows of a part of a fold's test images."""
    encoder, data, work, device, fold, part, parts, draws = job
    net, images = network_of(encoder, data, work, device), _images(encoder, work)
    model, test, bags = fold_model(images, fold)
    positive = [i for i in test if images[i].label]
    found = [] if part else bags
    for i in positive[part::parts]:
        found += Seat(Path(data), images[i], model, net, device).rows(draws)
    return [{"encoder": encoder, "fold": fold, **row} for row in found]


def tried(job: Job) -> list[Row]:
    """A job's rows; a failure is printed, and the others go on."""
    try:
        return job_rows(job)
    except Exception:
        traceback.print_exc()
        return []
