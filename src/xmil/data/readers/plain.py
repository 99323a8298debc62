"""Plain arrays: a `.pt` tensor or NumPy array (TRIDENT's `.pt` mode), a `.npy`, a `.npz` of named arrays.

Also an HDF5 file with only features: xmil can explain it, but draw no map.
"""

from __future__ import annotations

from dataclasses import replace

from xmil.core.errors import FileError
from xmil.data.containers import Contents
from xmil.data.containers.arrays import ARRAY, TENSOR
from xmil.data.containers.container import array_rows
from xmil.data.header import Ask, Header, named_graphs, place, place_by_gap, slide_name
from xmil.data.readers import reader
from xmil.data.readers.trident import corners

# Common names of features, in order of preference.
NAMES = (TENSOR, ARRAY, "features", "feats", "embeddings", "tile_embeds", "x", "X", "arr_0")


def _features(contents: Contents) -> str | None:
    if (
        contents.kind == "h5" and "coords" in contents
    ):  # their meaning depends on the layout, which another reader knows
        return None
    return next((name for name in NAMES if name in contents), None)


@reader(
    "plain",
    kinds=("pt", "npy", "npz", "h5"),
    claims=lambda contents: _features(contents) is not None,
    fallback=True,
)
def read(contents: Contents, ask: Ask) -> Header:
    """Read features, and an array named `coords` as level-0 corners."""
    name = _features(contents) or next(iter(contents.arrays), TENSOR)
    header = Header(contents.path, "plain", contents.rows(name), slide_id=slide_name(contents.path))
    notes = [] if name in (TENSOR, ARRAY) else [f"features from the array {name!r}"]
    header = replace(header, extras=named_graphs(contents, len(header)))
    if "coords" not in contents:
        return place(header, None, ask=ask, notes=notes)
    notes += ["coordinates taken as level-0 top-left corners"]
    return place_by_gap(header, corners(contents), contents, ask=ask, notes=notes)


VECTORS = ("slide_embedding", "slide_features", "embedding", *NAMES)


@reader("embedding", kinds=("h5", "pt", "npy", "npz"), claims=lambda _: False)
def read_embedding(contents: Contents, ask: Ask) -> Header:  # noqa: ARG001  # a slide's vector has no patches to place
    """Read the vector of a slide; refuse patch features."""
    name = next((name for name in VECTORS if name in contents), None)
    if name is None:
        raise FileError(f"{contents.path}: holds no slide embedding; it holds {contents.describe()}.")
    values = contents.read(name)
    if values.ndim == 0 or values.shape[:-1] not in ((), (1,), (1, 1)):
        raise FileError(
            f"{contents.path}: {name!r} must hold one vector for the slide. Got shape {values.shape} "
            "instead; for patches leave out data.source = 'embeddings'."
        )
    return Header(
        contents.path, "embedding", array_rows(values.reshape(1, -1)), slide_id=slide_name(contents.path)
    )
