"""Plain arrays: a `.pt` tensor or NumPy array (TRIDENT's `.pt` mode), a `.npy`, a `.npz` of named arrays.

So is an HDF5 file of features alone: it can be explained; a map of it cannot be drawn.
"""

from __future__ import annotations

from dataclasses import replace

from xmil.data.containers import Contents
from xmil.data.containers.numpyfile import ARRAY
from xmil.data.containers.torchfile import TENSOR
from xmil.data.extras import named_graphs
from xmil.data.header import Ask, Header, placed, smallest_gap
from xmil.data.readers import reader
from xmil.data.readers.trident import corners
from xmil.data.siblings import slide_name

# The names people give to features, in the order they are looked for.
NAMES = (TENSOR, ARRAY, "features", "feats", "embeddings", "tile_embeds", "x", "X", "arr_0")


def _features(contents: Contents) -> str | None:
    if contents.kind == "h5" and "coords" in contents:  # its layout says what they mean, or nothing does
        return None
    return next((name for name in NAMES if name in contents), None)


@reader(
    "plain",
    kinds=("pt", "npy", "npz", "h5"),
    claims=lambda contents: _features(contents) is not None,
    fallback=True,
)
def read(contents: Contents, ask: Ask) -> Header:
    """Features, and level-0 corners where an array is named `coords`."""
    name = _features(contents) or next(iter(contents.arrays), TENSOR)
    header = Header(contents.path, "plain", contents.rows(name), slide_id=slide_name(contents.path))
    if name not in (TENSOR, ARRAY):
        header = replace(header, inferred=(f"features from the array {name!r}",))
    header = replace(header, extras=named_graphs(contents, len(header)))
    if "coords" not in contents:
        return replace(header, **placed(header, None, "px", edge=None, ask=ask))
    coords = corners(contents)
    notes = [*header.inferred, "coordinates taken as level-0 top-left corners"]
    edge = None if ask.patch_size is not None else smallest_gap(coords)
    notes += [f"patch edge {edge} from the smallest coordinate gap (no overlap assumed)"] if edge else []
    header = replace(header, inferred=tuple(notes))
    return replace(header, **placed(header, coords, "px", edge=edge, ask=ask))
