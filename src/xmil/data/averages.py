"""`background`: what patches look like on average, from a folder of features or from bags."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import KEPT, Background, background_of
from xmil.core.bag import Bag
from xmil.core.errors import InputError, XmilError
from xmil.data.bags import read_bag
from xmil.data.join import feature_files

StrPath = str | PathLike[str]
MOST_FILES = 200  # of a folder; evenly spaced by name


def background(
    features: StrPath | Bag | Iterable[Any], *, keep: int = KEPT, seed: int = 0, files: int = MOST_FILES
) -> Background:
    """The mean of many patches and a few of them, as a baseline to explain against.

    `features` is a folder or file of features, a bag, or several bags, files or arrays (n, d). Of a folder at
    most `files` are read, evenly spaced by name. `model.background = background(...)` goes with the model
    when it is saved.

    >>> import numpy as np
    >>> background([np.zeros((3, 2)), np.ones((1, 2))]).mean.tolist()
    [0.25, 0.25]
    """
    return background_of(_bags(features, files), keep=keep, seed=seed)


def background_of_files(
    files: Sequence[Path], width: int, reading: Mapping[str, Any], *, most: int = MOST_FILES
) -> Background | None:
    """The background of feature files, evenly spaced; None where no file can be read.

    Those that cannot be read, or have another width, are left out: who works on them says why.
    """

    def bags() -> Iterator[Bag]:
        for file in files[:: max(1, -(-len(files) // most))]:
            with suppress(XmilError):
                bag = read_bag(file, **reading)
                if bag.features.shape[1] == width and len(bag) and np.isfinite(bag.features).all():
                    yield bag

    with suppress(InputError):
        return background_of(bags())
    return None


def _bags(features: Any, files: int) -> Iterator[Any]:
    if isinstance(features, str | PathLike):
        path = Path(features)
        found = feature_files(path)[0] if path.is_dir() else [path]
        for file in found[:: max(1, -(-len(found) // files))]:
            yield read_bag(file)
        return
    if isinstance(features, Bag) or getattr(features, "ndim", 0) == 2:
        yield features
        return
    for bag in features:
        yield read_bag(bag) if isinstance(bag, str | PathLike) else bag
