"""A folder of explanations: which slides it holds, and what is known of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np

from xmil.core.absence import absent
from xmil.core.errors import InputError
from xmil.core.explanation import Explanation
from xmil.core.parsing import small_number
from xmil.core.run import Run
from xmil.core.runfiles import INTERACTIONS, pairs_by_slide
from xmil.core.task import TASKS
from xmil.heatmaps.words import Caption, number


@dataclass(frozen=True)
class SavedRun:
    """The explanation files of a run by slide, with its task, class names and table of slides."""

    folder: Path
    files: Mapping[str, Path]
    task: str = "classification"
    class_names: tuple[str, ...] | None = None
    rows: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def pairs(self, slide_id: str) -> list[Path]:
        """The files of the slide's interactions, where the run has any."""
        return self._pairs.get(slide_id, [])

    @cached_property
    def _pairs(self) -> dict[str, list[Path]]:
        """Listed once for all slides: a cohort's folder holds as many files."""
        return pairs_by_slide(self.folder / INTERACTIONS)

    def caption(self, slide_id: str, explanations: Sequence[Explanation]) -> Caption:
        """Name, label and prediction of a slide as far as they are known."""
        row = self.rows.get(slide_id, {})
        predicted = self._prediction(row) or self._from_logits(explanations)
        correct = {"true": True, "1": True, "false": False, "0": False}.get(row.get("correct", "").lower())
        return Caption(slide_id, self._class(row.get("label")), predicted, self.task, correct)

    def _prediction(self, row: Mapping[str, str]) -> str | None:
        task = TASKS[self.task]
        if not task.decides:
            held = row.get(task.noun)
            return None if not held else number(float(held))
        name = self._class(row.get("predicted"))
        p = row.get(f"p:{name}") or row.get(f"p:{row.get('predicted')}")
        return name if not p or name is None else f"{name} (p = {float(p):.2f})"

    def _from_logits(self, explanations: Sequence[Explanation]) -> str | None:
        logits, task = explanations[0].logits if explanations else np.zeros(0), TASKS[self.task]
        if task.truth != "class" or len(logits) < 2:
            return None
        chances = task.numbers(logits)
        best = int(chances.argmax())
        known = {e.target.cls: e.target.name for e in explanations if e.target.name}
        name = known.get(best) or self._class(str(best)) or str(best)
        shown = f"class {name}" if name.isdigit() else name
        return f"{shown} (p = {chances[best]:.2f})"

    def _class(self, cell: str | None) -> str | None:
        """A class by its name, where the table has its number."""
        if not cell:
            return None
        names = self.class_names or ()
        at = None if cell in names else small_number(cell)
        return names[at] if at is not None and at < len(names) else cell


def open_saved(path: str | PathLike[str]) -> SavedRun:
    """Open a run's folder, a folder of explanations, or one explanation file."""
    place = Path(path)
    if place.is_file():
        folder = place.parent.parent if place.parent.name == "slides" else place.parent
        return _described(folder, {place.stem: place})
    if not place.is_dir():
        raise InputError(absent(place, "folder or file"))
    inner = place / "slides" if (place / "slides").is_dir() else place
    files = {found.stem: found for found in sorted(inner.glob("*.parquet")) if found.name[0] != "."}
    if not files:
        raise InputError(f"{place}: no explanations here; give the folder that 'xmil explain' wrote.")
    return _described(place, files)


def _described(folder: Path, files: dict[str, Path]) -> SavedRun:
    run = Run(folder)
    return SavedRun(folder, files, run.task, run.class_names, run.rows)
