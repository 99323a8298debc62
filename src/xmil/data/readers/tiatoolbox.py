"""TIAToolbox 2 (Pocock et al. 2022): a zarr group with `features` and boxes `coordinates` (x0, y0, x1, y1).

The boxes are in pixels of the reading resolution, which the file does not store: the user gives the scale by
the patch edge in level-0 pixels.
"""

from __future__ import annotations

from xmil.core.errors import FileError
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, one_edge, place, slide_name
from xmil.data.readers import reader


@reader(
    "tiatoolbox",
    kinds=("zarr",),
    claims=lambda contents: "features" in contents and "coordinates" in contents,
)
def read(contents: Contents, ask: Ask) -> Header:
    """Read boxes in reading-resolution pixels, scaled if the user gives `patch_size`."""
    header = Header(
        contents.path, "tiatoolbox", contents.rows("features"), slide_id=slide_name(contents.path)
    )
    boxes = contents.read("coordinates")
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise FileError(
            f"{contents.path}: 'coordinates' must have shape (patches, 4). Got {boxes.shape} instead."
        )
    edge = one_edge(boxes[:, 2:] - boxes[:, :2], contents.path)
    return place(header, boxes[:, :2], "px-read", edge=edge, ask=ask)
