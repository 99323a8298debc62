"""What is planted on instances: a mark, a tint, a blur, and what a site leaves on all its instances.

A variant acts on images where there are any and they were encoded here, else on the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.errors import unknown_name
from xmil.toy.instances import Images, Instances, tagged

Floats = npt.NDArray[np.float64]
STRENGTH = 1.0  # length of a direction, in mean lengths of a feature vector's deviation
TINT, SITE, WEAK, SOFT = 0.35, 0.5, 0.25, 0.5
OnImages = Callable[[Floats], Floats]  # values between 0 and 1, (m, h, w)
OnFeatures = Callable[[FloatArray, np.random.Generator], FloatArray]


@dataclass(frozen=True)
class Variant:
    """One way to change instances; without `on_images` it changes features alone, and `shown` is drawn."""

    on_features: OnFeatures
    on_images: OnImages | None = None
    shown: Callable[[Images], Images] | None = None


def with_variants(instances: Instances, names: Sequence[str], seed: int) -> Instances:
    """The instances, and after them a copy of all for each variant, changed."""
    if not names:
        return instances
    copies = [_changed(instances, name, seed) for name in names]
    images = None
    if instances.images is not None:
        images = np.concatenate([instances.images, *(c.images for c in copies if c.images is not None)])
    features = np.concatenate([instances.features, *(c.features for c in copies)])
    digits = np.concatenate([instances.digits] * (1 + len(names)))
    return replace(instances, features=features, digits=digits, images=images)


def _changed(instances: Instances, name: str, seed: int) -> Instances:
    if name not in VARIANTS:
        raise unknown_name("variant", name, VARIANTS)
    variant, images = VARIANTS[name], instances.images
    if variant.on_images is not None and images is not None and instances.encode is not None:
        top = max(1, int(images.max(initial=1)))
        drawn = np.rint(np.clip(variant.on_images(images / top), 0, 1) * top).astype(images.dtype)
        return replace(instances, images=drawn, features=instances.encode(drawn))
    features = variant.on_features(instances.features, np.random.default_rng(seed))
    shown = images if images is None or variant.shown is None else variant.shown(images)
    return replace(instances, features=features, images=shown)


def _along(index: int, share: float = 1.0) -> OnFeatures:
    """One fixed direction, the index-th drawn from the seed, added to the features."""

    def add(features: FloatArray, rng: np.random.Generator) -> FloatArray:
        direction = rng.standard_normal((index + 1, features.shape[1]))[index]
        deviation = features - features.mean(axis=0)
        length = share * STRENGTH * np.linalg.norm(deviation, axis=1).mean()
        step = (direction / np.linalg.norm(direction) * length).astype(np.float32)
        return np.asarray(features + step, dtype=np.float32)

    return add


def _towards_mean(features: FloatArray, rng: np.random.Generator) -> FloatArray:
    del rng
    mean = features.mean(axis=0)
    return np.asarray(mean + SOFT * (features - mean), dtype=np.float32)


def _blurred(images: Floats) -> Floats:
    """The mean of each pixel and its eight neighbours, the border repeated."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    h, w = images.shape[1:]
    parts = [padded[:, i : i + h, j : j + w] for i in range(3) for j in range(3)]
    return np.asarray(np.mean(parts, axis=0))


def _ramp(share: float, *, across: bool) -> OnImages:
    """Light that rises from one edge to the other, across or down."""

    def add(images: Floats) -> Floats:
        rise = np.linspace(0, SITE * share, images.shape[2 if across else 1])
        return np.asarray(images + (rise if across else rise[:, None]))

    return add


VARIANTS = {
    "mark": Variant(_along(0), shown=tagged),
    "tint": Variant(_along(1), lambda images: images + TINT * (1 - images)),
    "blur": Variant(_towards_mean, _blurred),
    "site_a_weak": Variant(_along(2, WEAK), _ramp(WEAK, across=True)),
    "site_a_strong": Variant(_along(2), _ramp(1.0, across=True)),
    "site_b_weak": Variant(_along(3, WEAK), _ramp(WEAK, across=False)),
    "site_b_strong": Variant(_along(3), _ramp(1.0, across=False)),
}
