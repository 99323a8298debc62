"""Readers' regions against the saved scores of a run: AUROC, Dice and pointing, slide by slide and overall.

agreement.csv            a row for each slide, reader, method and target
agreement_summary.csv    the means over a cohort with intervals over cases, and tests against chance
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.durable import write_text
from xmil.core.errors import InputError, XmilError, absent
from xmil.core.explanation import card_of
from xmil.core.text import counted, csv_text, shorten, text_table
from xmil.evaluate.marks import covered_by_polygons, read_polygons, score_regions
from xmil.evaluate.statistics import bootstrap_mean, holm, sign_flip_p
from xmil.heatmaps import opened
from xmil.storage import Run, read_explanations

FOLDER = "annotations"  # of a run, where the viewer keeps what readers draw
TABLE, SUMMARY = "agreement.csv", "agreement_summary.csv"
MEASURES = {"auroc": "AUROC", "dice": "Dice", "pointing": "pointing"}
SHARE = 0.5  # of a patch that regions must cover to mark it
Row = dict[str, Any]


@dataclass(frozen=True)
class Agreement:
    """Rows by slide, the summary over slides, and the slides that could not be compared, with the reason."""

    rows: list[Row]
    summary: list[Row]
    left_out: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write both tables."""
        for name, rows in ((TABLE, self.rows), (SUMMARY, self.summary)):
            head = list(rows[0])
            write_text(folder / name, csv_text(head, ([_cell(row[key]) for key in head] for row in rows)))

    def as_text(self) -> str:
        """The summary as a table."""
        groups = list(dict.fromkeys((row["method"], row["target"]) for row in self.summary))
        lines = [["method", "target", *MEASURES.values(), "chance", "regions", "cases"]]
        for method, target in groups:
            own = {
                row["measure"]: row
                for row in self.summary
                if (row["method"], row["target"]) == (method, target)
            }
            cells = [_interval(own[measure]) for measure in MEASURES]
            first = own["dice"]
            counts = [f"{first['chance']:.2f}", str(first["n"]), str(first["cases"])]
            lines.append([card_of(method).title, target, *cells, *counts])
        return text_table(lines)


def compare_annotations(
    run: Run,
    folder: Path | None = None,
    *,
    names: Sequence[str] = (),
    slides: Mapping[str, Path] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Agreement:
    """Compare every annotated slide of a run with its scores, by each method and target.

    `folder` holds SLIDE.geojson, as QuPath exports it, or SLIDE/READER.geojson, as the viewer writes; by
    default it is the run's own. `names` are the classes of annotations that count. QuPath counts from the
    scanned bounds: `slides` (id to file) says where they begin, for files that do not.
    """
    place = run.path / FOLDER if folder is None else folder
    files = list_annotations(place)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for slide, path in run.files.items():
        for reader, drawn in files.get(slide, {}).items():
            try:
                rows += _compare(run, slide, path, reader, drawn, names, (slides or {}).get(slide))
            except XmilError as error:
                left_out[slide] = str(error)
    unknown = [slide for slide in files if slide not in run.files]
    if unknown:
        say(f"{counted(len(unknown), 'annotated slide')} not in the run: {shorten(unknown, 3)}.")
    if left_out:
        reasons = shorten(list(left_out.values()), 2)
        say(f"{counted(len(left_out), 'slide')} left out: {reasons}.")
    return Agreement(rows, summarise(rows), left_out)


def list_annotations(folder: Path) -> dict[str, dict[str, Path]]:
    """The files of annotations by slide and reader; the reader of SLIDE.geojson has no name."""
    if not folder.is_dir():
        raise InputError(absent(folder, "folder"))
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".geojson" and path.is_file():
            files.setdefault(path.stem, {})[""] = path
        elif path.is_dir() and not path.is_symlink():
            for own in sorted(path.glob("*.geojson")):
                files.setdefault(path.name, {})[own.stem] = own
    return files


def _compare(
    run: Run, slide: str, path: Path, reader: str, drawn: Path, names: Sequence[str], picture: Path | None
) -> list[Row]:
    """The rows of one reader's regions on one slide."""
    explanations = read_explanations(path)
    first = explanations[0]
    if first.coords is None or first.patch_size is None:
        raise InputError(f"{slide}: the places of its patches are not known")
    with opened(picture) as image:
        origin = None if image is None else (float(image.bounds[0]), float(image.bounds[1]))
    polygons = read_polygons(drawn, names=tuple(names) or None, origin=origin)
    marked = covered_by_polygons(polygons, first.coords.astype(np.float64), first.patch_size) >= SHARE
    if not marked.any() or marked.all():
        raise InputError(
            f"{drawn.name}: its regions mark {'all' if marked.any() else 'no'} patches of {slide}"
        )
    return [
        {
            "slide_id": slide,
            "case_id": run.rows.get(slide, {}).get("case_id") or slide,
            "reader": reader,
            "method": e.method,
            "target": str(e.target),
            "patches": len(marked),
            "marked": int(marked.sum()),
            **score_regions(marked, e.scores),
        }
        for e in explanations
    ]


def summarise(rows: Sequence[Row]) -> list[Row]:
    """The mean of each measure with its interval over cases, and the test against chance."""
    targets: dict[tuple[str, str, str], int] = {}
    for row in rows:
        key = (row["slide_id"], row["reader"], row["method"])
        targets[key] = targets.get(key, 0) + 1
    several = {method for (_, _, method), n in targets.items() if n > 1}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:  # where slides have one target each, that of their prediction, they belong together
        target = row["target"] if row["method"] in several else "each slide's own"
        groups.setdefault((row["method"], target), []).append(row)
    summary: list[Row] = []
    for (method, target), own in groups.items():
        cases = [row["case_id"] for row in own]
        for measure in MEASURES:
            values = np.array([row[measure] for row in own])
            chance = np.array([0.5 if measure == "auroc" else row["chance"] for row in own])
            mean, gap = bootstrap_mean(values, units=cases), values - chance
            tested = len(set(cases)) > 1 and bool(gap.any())
            p = sign_flip_p(gap, units=cases, rng=np.random.default_rng(0)) if tested else float("nan")
            summary.append({
                "method": method, "target": target, "measure": measure, "mean": mean.estimate,
                "low": mean.low, "high": mean.high, "chance": float(chance.mean()), "p": p, "p_holm": p,
                "n": len(own),
                "slides": len({row["slide_id"] for row in own}), "cases": len(set(cases)),
            })  # fmt: skip
    for row, corrected in zip(summary, holm([row["p"] for row in summary]), strict=True):
        row["p_holm"] = float(corrected)
    return summary


def _interval(row: Row) -> str:
    """A mean with its interval, where there are cases enough for one."""
    known = bool(np.isfinite(row["low"]))
    return f"{row['mean']:.2f}" + (f" [{row['low']:.2f}, {row['high']:.2f}]" if known else "")


def _cell(value: object) -> object:
    return None if isinstance(value, float) and not np.isfinite(value) else value
