"""Biomarkers within annotated regions: one GeoJSON file per slide."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.evaluate.localisation import marked_by_geojson
from xmil.findings.biomarkers import map_biomarkers
from xmil.findings.stability import Consensus

WITHIN = ("patches", "supporting_share", "mean_score", "hot_regions", "largest_region", "density_per_mm2")
Bools = npt.NDArray[np.bool_]


def region_files(folder: str | PathLike[str]) -> dict[str, Path]:
    """The annotations of a folder, one GeoJSON file per slide."""
    place = Path(folder)
    if not place.is_dir():
        raise InputError(f"{place}: is no folder; give one with an annotation <slide_id>.geojson per slide.")
    found = {path.stem: path for path in sorted(place.glob("*.geojson"))}
    if not found:
        raise InputError(f"{place}: holds no *.geojson; name annotations after their slides.")
    return found


def region_mask(path: Path, e: Explanation, classes: Sequence[str] = ()) -> Bools:
    """The patches of which at least half lies in the annotation, or in its parts of these classes."""
    if e.coords is None or e.patch_size is None:
        raise InputError(f"{path}: the explanation has no places of patches to hold against a region.")
    return marked_by_geojson(path, e.coords, patch_size=e.patch_size, names=list(classes) or None)


def region_biomarkers(e: Explanation, inside: Bools, agreed: Consensus | None) -> dict[str, float]:
    """Biomarkers within a region; TAPAS is the share of its patches whose masked mean is above zero."""
    told = map_biomarkers(e.scores, coords=e.coords, patch_size=e.patch_size, mpp=e.mpp, region=inside)
    found = {f"region_{name}": told[name] for name in WITHIN}
    if agreed is not None and inside.any():
        found["tapas"] = float((agreed.scores[inside] > 0).mean())
    return found
