"""Bags of digits for training, validation and test; one bag carries the labels of both tasks.

Each number enters a bag with probability one half, then 30 digits are drawn from the numbers that did, as in
the paper. No digit of a test bag or a slide was seen in training.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.storage import write_text
from xmil.demo.digit_slides import TILE, DigitSlide, Rows, known_digits, place_digits
from xmil.toy.digit_tasks import BAG_SIZE, TASKS, draw_digits

TASK_NAMES = ("pos_neg", "adjacent_pairs")
CLASS_NAMES = ("no", "yes")
QUESTIONS = {
    "pos_neg": "More kinds of 4, 6, 8 than of 5, 7, 9?",
    "adjacent_pairs": "Are 0 and 1, 1 and 2, 2 and 3, or 3 and 4 both there?",
}
POOLS = {"train": (0, 1, 2, 4, 5, 6), "val": (3,), "test": (7,), "slide": (7,)}  # digits by row modulo 8
SEEDS = {"train": 0, "val": 1, "test": 2, "slide": 3}


def draw_bags(split: str, n_bags: int, *, seed: int) -> list[DigitSlide]:
    """Bags of one split (train, val, test, or slide for those that are drawn), each laid out as a slide.

    >>> [bag] = draw_bags("slide", 1, seed=0)
    >>> bag.name, len(bag.digits)
    ('slide-000', 30)
    """
    rng = np.random.default_rng((seed, SEEDS[split]))
    pool = np.flatnonzero(np.isin(np.arange(len(known_digits()[1])) % 8, POOLS[split]))
    return [
        place_digits(f"{split}-{i:03d}", _rows_of(numbers, pool, rng), seed=int(rng.integers(2**31)))
        for i, numbers in enumerate(draw_digits(rng, n_bags, BAG_SIZE))
    ]


def labels(slide: DigitSlide) -> dict[str, str]:
    """The class of a slide in each task, by name."""
    return {name: CLASS_NAMES[int(TASKS[name].label(slide.digits))] for name in TASK_NAMES}


def evidence(slide: DigitSlide, task: str) -> Rows:
    """The true evidence (n,) for "yes": +1, -1 or 0 for each digit."""
    signs: Rows = TASKS[task].evidence(slide.digits)[1].astype(np.int64)
    return signs


def telling(slides: Sequence[DigitSlide], task: str) -> DigitSlide:
    """The slide with the most tiles of its rarest kind: for, against (where there are any), neither."""
    kinds = (-1, 0, 1) if task == "pos_neg" else (0, 1)
    return max(slides, key=lambda slide: min(int((evidence(slide, task) == kind).sum()) for kind in kinds))


def write_cohort(path: Path, splits: dict[str, Sequence[DigitSlide]]) -> None:
    """A table of all bags: slide, split, and a column of labels for each task."""
    rows = [
        {"slide_id": slide.name, "case_id": slide.name, "split": split, **labels(slide)}
        for split, slides in splits.items()
        for slide in slides
    ]
    write_text(path, _as_csv(rows))


def write_truth(folder: Path, slide: DigitSlide, task: str) -> None:
    """The evidence of every tile as a table (`xmil evaluate --truth`) and as polygons for QuPath."""
    values = evidence(slide, task)
    rows = [
        {"x0": int(x), "y0": int(y), "digit": int(digit), "evidence": int(value)}
        for (x, y), digit, value in zip(slide.coords, slide.digits, values, strict=True)
    ]
    (folder / "qupath").mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{slide.name}.csv", _as_csv(rows))
    shapes = {"type": "FeatureCollection", "features": [_polygon(row) for row in rows if row["evidence"]]}
    write_text(folder / "qupath" / f"{slide.name}.geojson", json.dumps(shapes))


def _rows_of(numbers: Rows, pool: Rows, rng: np.random.Generator) -> Rows:
    """For each number a random digit of the pool that shows it."""
    shown = known_digits()[1][pool]
    return np.array([rng.choice(pool[shown == number]) for number in numbers])


def _as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _polygon(row: dict[str, int]) -> dict[str, Any]:
    x, y, far_x, far_y = row["x0"], row["y0"], row["x0"] + TILE, row["y0"] + TILE
    ring = [[x, y], [far_x, y], [far_x, far_y], [x, far_y], [x, y]]
    name = "supports" if row["evidence"] > 0 else "refutes"
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {
            "objectType": "annotation",
            "name": str(row["digit"]),
            "classification": {
                "name": name,
                "color": [178, 24, 43] if name == "supports" else [33, 102, 172],
            },
        },
    }
