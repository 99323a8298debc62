"""What the demonstration measured, read back from the files that the commands wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError
from xmil.core.explanation import Explanation
from xmil.core.storage import read_explanations
from xmil.demo.bags import evidence
from xmil.demo.pipeline import MEASURED, METHODS, Demo
from xmil.demo.slides import DigitSlide
from xmil.evaluate.evidence import auprc2

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PairResult:
    """One task and model: test AUROC, AUPRC-2 by method, mean flip curves, and one slide's explanations.

    The AUROC is that of the test bags; AUPRC-2 is the mean over the slides and both classes, as in the paper.
    """

    task: str
    model: str
    auroc: float
    accuracy: float
    auprc2: dict[str, float]
    curves: dict[str, Floats]
    shown: dict[str, Explanation]
    shown_auprc2: dict[str, float]

    @property
    def aupc(self) -> dict[str, float]:
        """Mean of each curve; lower is more faithful."""
        return {method: float(curve.mean()) for method, curve in self.curves.items()}


def read_results(demo: Demo) -> list[PairResult]:
    """Every task and model."""
    return [_read_pair(demo, task, model, demo.shown(task)) for task, model in demo.pairs]


def certificate(demo: Demo, task: str, model: str) -> tuple[Path, str]:
    """The picture of the shown slide's certificate and the sentence on LRP."""
    stem = demo.folder("evaluate", task, model) / "certificates" / demo.shown(task).name
    found = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    [sentence] = [about["sentence"] for about in found["methods"] if about["method"] == "lrp"]
    return stem.with_suffix(".png"), sentence


def _read_pair(demo: Demo, task: str, model: str, shown: DigitSlide) -> PairResult:
    folder = demo.folder("explain", task, model) / "slides"
    found = {slide.name: read_explanations(folder / f"{slide.name}.parquet") for slide in demo.bags["slide"]}
    quality, here = (
        {method: float(np.nanmean(_qualities(slides, found, task, method))) for method in METHODS}
        for slides in (demo.bags["slide"], [shown])
    )
    metrics = json.loads((demo.checkpoint(task, model).parent / "metrics.json").read_text(encoding="utf-8"))
    for_yes = {e.method: e for e in found[shown.name] if e.target.cls == 1}
    test: dict[str, Any] = metrics["test"]
    curves = _curves(demo.folder("evaluate", task, model) / "results.parquet")
    return PairResult(task, model, test["auc"], test["accuracy"], quality, curves, for_yes, here)


def _qualities(
    slides: Sequence[DigitSlide], found: dict[str, list[Explanation]], task: str, method: str
) -> list[float]:
    values = []
    for slide in slides:
        truth = evidence(slide, task)
        for e in found[slide.name]:
            if e.method == method:
                _check_places(e, slide)
                values.append(auprc2(truth if e.target.cls == 1 else -truth, e.scores))
    return values


def _check_places(e: Explanation, slide: DigitSlide) -> None:
    if e.coords is None or not np.array_equal(e.coords, slide.coords):
        raise FileError(f"{slide.name}: its tiles are not where the digits were drawn; remove the folder.")


def _curves(path: Path) -> dict[str, Floats]:
    """The mean curve of each method, most relevant first, over the slides that are classified correctly."""
    import pyarrow.parquet as pq

    rows = [row for row in pq.read_table(path, partitioning=None).to_pylist() if row["correct"]]
    return {
        method: np.mean([row["morf"] for row in rows if row["method"] == method], axis=0)
        for method in MEASURED
        if any(row["method"] == method for row in rows)
    }
