"""Slide embeddings: one vector for a whole slide, read only where it is asked for, as a bag of one."""

from __future__ import annotations

from xmil.core.errors import FileError
from xmil.data.containers import Contents
from xmil.data.containers.container import ArrayRows
from xmil.data.header import Ask, Header
from xmil.data.readers import reader
from xmil.data.readers.plain import NAMES
from xmil.data.siblings import slide_name

VECTORS = ("slide_embedding", "slide_features", "embedding", *NAMES)


@reader("embedding", kinds=("h5", "pt", "npy", "npz"), claims=lambda _: False)
def read(contents: Contents, ask: Ask) -> Header:  # noqa: ARG001  # a slide's vector has no patches to place
    """The vector of the slide; patch features are refused."""
    name = next((name for name in VECTORS if name in contents), None)
    if name is None:
        raise FileError(f"{contents.path}: holds no slide embedding; it holds {contents.describe()}.")
    values = contents.read(name)
    if values.ndim == 0 or values.shape[:-1] not in ((), (1,), (1, 1)):
        raise FileError(
            f"{contents.path}: {name!r} has the shape {values.shape}, not that of one vector for the slide; "
            "train from patches instead."
        )
    return Header(
        contents.path, "embedding", ArrayRows(values.reshape(1, -1)), slide_id=slide_name(contents.path)
    )
