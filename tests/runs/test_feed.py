"""Reading processes: the bytes that threads give, whichever slide a batch is of; deaths and damage named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.runs.test_embed import MEAN, embed_pairs, prepared
from tests.slides.pyramids import textured, write_pyramid
from xmil.core.errors import InputError
from xmil.core.fitting import Fit
from xmil.encoders import load_encoder
from xmil.runs.embed import EmbedSettings
from xmil.runs.feed.feed import Feed, Part
from xmil.runs.feed.reader import PatchSource
from xmil.runs.workers.pool import Workers
from xmil.slides import open_slide

pytest.importorskip("openslide")


def test_processes_give_the_bytes_that_threads_give(tmp_path: Path) -> None:
    slides = {name: prepared(tmp_path, name, seed=seed) for seed, name in enumerate("ab")}
    threads = EmbedSettings("resnet18", random=True, batch=13, stain_norm=True, input_size=40)
    for way, settings in {"threads": threads, "processes": replace(threads, readers=2)}.items():
        embed_pairs(slides, tmp_path / way / "out", settings)
    for name in slides:
        one, two = ((tmp_path / way / "out" / f"{name}.h5").read_bytes() for way in ("threads", "processes"))
        assert len(one) > 40 * 512 * 4
        assert one == two
