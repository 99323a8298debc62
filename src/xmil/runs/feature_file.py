"""The features of a slide as a file in TRIDENT's layout, written as they come, in whatever order.

features (n, d), coords (n, 2) with the attributes of the patches
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.durable import syncs
from xmil.core.errors import FileError
from xmil.runs.patch_stream import SlidePatches

if TYPE_CHECKING:
    from xmil.encoders import Encoder
    from xmil.runs.embed import EmbedSettings

KEPT = ("level0_magnification", "target_magnification", "overlap", "level0_width", "level0_height")
GATHERED = 2048  # rows that are written at once
UNSYNCED = 64 << 20  # bytes after which the disk is asked to keep up
Vectors = npt.NDArray[np.float32]
Encoded = tuple[npt.NDArray[np.int64], Vectors]  # rows among the slide's patches, their vectors


def write_features(
    path: str,
    slide_id: str,
    patches: SlidePatches,
    *,
    encoder: Encoder,
    settings: EmbedSettings,
    encoded: Iterable[Encoded],
) -> None:
    """Write the vectors of a slide's patches straight into the file."""
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["xmil"] = json.dumps(_ours(slide_id, patches, encoder, settings), default=str)
        features = file.create_dataset("features", (len(patches), encoder.dim), dtype=np.float32)
        named = {"name": slide_id, "savetodir": Path(path).parent.name, "encoder": encoder.name}
        features.attrs.update(named)
        coords = file.create_dataset("coords", data=patches.header.coords)
        coords.attrs.update(_coords_attributes(slide_id, patches))
        gathered = Gathered(features)
        for rows, values in encoded:
            if not np.isfinite(values).all():
                raise FileError(f"{patches.slide.path}: the encoder gave values that are not finite.")
            gathered.put(rows, values)
            if gathered.unsynced > UNSYNCED:
                _keep_up(file, path)
                gathered.unsynced = 0


class Gathered:
    """Rows that come in any order, written in runs; what is held is bounded by how far apart they come."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._held: dict[int, tuple[Vectors, int]] = {}  # a run's vectors, and how many are missing
        self.unsynced = 0

    def put(self, rows: npt.NDArray[np.int64], values: Vectors) -> None:
        """Take some rows; runs that are complete are written."""
        runs = rows // GATHERED
        for run in np.unique(runs).tolist():
            chosen = runs == run
            start = run * GATHERED
            stop = min(start + GATHERED, self._dataset.shape[0])
            if run not in self._held:
                self._held[run] = np.empty((stop - start, values.shape[1]), np.float32), stop - start
            vectors, missing = self._held.pop(run)
            vectors[rows[chosen] - start] = values[chosen]
            missing -= int(chosen.sum())
            if missing:
                self._held[run] = vectors, missing
            else:
                self._dataset[start:stop] = vectors
                self.unsynced += vectors.nbytes


def _keep_up(file: Any, path: str) -> None:
    """Let the disk write what there is, so that the end of the file does not wait for all of it."""
    if syncs() and os.name == "posix":
        file.flush()
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _coords_attributes(slide_id: str, patches: SlidePatches) -> dict[str, Any]:
    header = patches.header
    kept = {key: header.extra.get(key) for key in KEPT}
    kept["level0_width"], kept["level0_height"] = patches.slide.dimensions
    known = {**kept, "patch_size": patches.size, "patch_size_level0": header.patch_size, "mpp": header.mpp}
    named = {"name": slide_id, "savetodir": header.path.parent.name}
    return {key: "None" if value is None else value for key, value in {**known, **named}.items()}


def _ours(slide_id: str, patches: SlidePatches, encoder: Encoder, settings: EmbedSettings) -> dict[str, Any]:
    made = {"encoder": {"name": encoder.name, "asked": settings.encoder, **encoder.about}}
    made["encoder"] |= {"precision": encoder.precision, "stain_norm": settings.stain_norm}
    return {
        "version": __version__,
        "slide_id": slide_id,
        "mpp": patches.header.mpp,
        "inferred": list(patches.header.inferred),
        "extra": {**made, "source": patches.source},
    }
