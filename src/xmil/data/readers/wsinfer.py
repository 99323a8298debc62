"""WSInfer (Kaczmarzyk et al. 2024): corners only, in level-0 pixels.

`patches/<slide>.h5` with `coords` and the attributes `patch_size` (level-0 pixels) and `patch_spacing_um_px`,
or `model-outputs-csv/<slide>.csv` with `minx, miny, width, height`.
"""

from __future__ import annotations

import numpy as np

from xmil.core.text import bare_name
from xmil.data.containers import Contents
from xmil.data.header import Ask, Header, one_edge, place, positive, slide_name
from xmil.data.readers import reader
from xmil.data.readers.trident import corners

_BOX = ("minx", "miny", "width", "height")


def _claims(contents: Contents) -> bool:
    if contents.kind == "csv":
        return all(name in contents for name in _BOX)
    return "coords" in contents and "patch_spacing_um_px" in contents.arrays["coords"].attrs


@reader("wsinfer", kinds=("h5", "csv"), claims=_claims)
def read(contents: Contents, ask: Ask) -> Header:
    """Read boxes without features."""
    if contents.kind == "h5":
        about = contents.arrays["coords"].attrs
        edge = positive(about.get("patch_size"))
        extra = {"patch_mpp": about.get("patch_spacing_um_px")}
        header = Header(contents.path, "wsinfer", None, slide_id=slide_name(contents.path), extra=extra)
        return place(header, corners(contents), edge=edge, ask=ask)
    x, y, width, height = (contents.read(name) for name in _BOX)
    edge = one_edge(np.concatenate([width, height]), contents.path)
    header = Header(contents.path, "wsinfer", None, slide_id=bare_name(contents.path.stem))
    return place(header, np.stack([x, y], axis=1), edge=edge, ask=ask)
