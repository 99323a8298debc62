"""Runs of given scores, to know what a page must show; and how long it takes to switch between them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.explanation import Audit, Explanation
from xmil.core.task import Target
from xmil.storage import write_explanations

Scores = npt.NDArray[np.float32]

SWITCHES = """async () => {
  const times = [];
  const frame = () => new Promise(requestAnimationFrame);
  for (let k = 0; k < 10; k++) {
    await frame();
    const select = document.querySelector(k % 2 ? "select[name=method]" : "select[name=target]");
    const began = performance.now();
    select.selectedIndex = 1 - select.selectedIndex;
    select.dispatchEvent(new Event("change"));
    const painted = performance.now() - began;
    await frame();
    times.push([painted, performance.now() - began]);
  }
  return times;
}"""


def grid(columns: int, rows: int, edge: int) -> npt.NDArray[np.int64]:
    y, x = np.divmod(np.arange(columns * rows), columns)
    return np.stack([x, y], axis=1) * edge


def write_run(
    folder: Path,
    name: str,
    scores: dict[tuple[str, str], Scores],
    *,
    coords: npt.NDArray[np.int64] | None = None,
    edge: int = 64,
    logits: tuple[float, ...] = (0.0, 1.0),
    task: str = "classification",
    **facts: Any,
) -> None:
    """One slide's scores of given methods and targets as a run; `facts` are more of each explanation's."""
    (folder / "slides").mkdir(parents=True, exist_ok=True)
    targets = list(dict.fromkeys(target for _, target in scores))
    explanations = [
        Explanation(
            scores=values,
            logits=np.asarray(logits, dtype=np.float32),
            output=float(values.sum()),
            method=method,
            target=Target(targets.index(target), name=target),
            signed=method != "attention",
            bag=name,
            coords=coords,
            patch_size=None if coords is None else edge,
            **{"audit": Audit.close(output=float(values.sum()), instances=float(values.sum())), **facts},
        )
        for (method, target), values in scores.items()
    ]
    write_explanations(explanations, folder / "slides" / f"{name}.parquet")
    about = {"task": task, "methods": list(dict.fromkeys(method for method, _ in scores))}
    if task == "classification":
        about["class_names"] = targets
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")


def signed(n: int, seed: int = 0) -> Scores:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)
