"""Maps inside patches of a made run, pairs of its patches, and their concepts."""

from __future__ import annotations

import numpy as np

from tests.viewer.make_run import Made
from xmil.core.inside import Inside, InsideAudit
from xmil.core.interactions import Interactions
from xmil.core.task import Target
from xmil.storage import ConceptMaps, interactions_file, read_explanation, read_explanations

EDGE = 64


def inside_of(made: Made, maps: np.ndarray, rows: list[int]) -> Inside:
    """Maps of the first slide's patches with the run's own scores."""
    e = read_explanations(made.runs[0] / "slides" / f"{made.names[0]}.parquet")[0]
    corners = e.coords[rows]
    score = e.scores[rows].astype(np.float32)
    spatial = maps.sum(axis=(1, 2))
    audit = InsideAudit(score, spatial, score - spatial, np.zeros_like(score))
    return Inside(
        maps,
        np.hstack([corners, corners + EDGE]),
        np.array(rows),
        audit,
        "tokens",
        "1",
        "tiny",
        made.names[0],
    )


def kept(made: Made, inside: Inside) -> Made:
    """The maps in the run's folder, as `xmil inside` leaves them."""
    folder = made.runs[0] / "inside"
    folder.mkdir(exist_ok=True)
    inside.save(folder / f"{made.names[0]}.npz")
    return made


def write_pairs(made: Made) -> None:
    """Two pairs of the first slide's patches, one sure and one not, as a run with interactions has them."""
    pairs = Interactions(
        pairs=np.array([[0, 21], [7, 9]]),
        values=np.array([0.5, -0.25]),
        stderr=np.array([0.01, 0.2]),
        alone=np.zeros(2),
        target=Target(1, name="tumour"),
        output=1.0,
        bag=made.names[0],
    )
    path = interactions_file(made.runs[0], made.names[0], pairs.target)
    path.parent.mkdir(exist_ok=True)
    pairs.save(path)


def write_concepts(made: Made, more: float = 0.0) -> ConceptMaps:
    """Concepts of the first slide: half of each score, less of it with the sign in turn, and nothing."""
    e = read_explanation(made.runs[0] / "slides" / f"{made.names[0]}.parquet", method="lrp", target="tumour")
    values = e.scores[:, None] * np.array([0.5, 0.3, 0.0], dtype=np.float32)
    values[::2, 1] *= -1
    maps = ConceptMaps(values, e.scores + np.float32(more), "lrp", "tumour")
    folder = made.runs[0] / "insight" / "concepts"
    folder.mkdir(parents=True, exist_ok=True)
    maps.save(folder / f"{made.names[0]}.npz")
    return maps
