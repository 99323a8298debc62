"""Readers' regions against the saved scores of a run: AUROC, Dice and pointing, slide by slide and overall.

agreement.csv            a row for each slide, reader, class of regions, method and target
agreement_summary.csv    the means over cases with intervals and tests against chance, by class of regions
agreement_failures.csv   the files, or classes of regions, that were left out, and why
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.bag import Patches
from xmil.core.durable import write_text
from xmil.core.errors import InputError, XmilError, absent
from xmil.core.explanation import card_of
from xmil.core.request import takes
from xmil.core.text import counted, csv_text, shorten, text_table
from xmil.evaluate.marks import covered_by_polygons, read_regions, score_regions
from xmil.evaluate.statistics import bootstrap_mean, holm, sign_flip_p, unit_means
from xmil.execute import Listener
from xmil.heatmaps import opened
from xmil.runs.inputs import guessed_edges, guessed_edges_warning, stored_edge
from xmil.runs.requests import AgreementRequest
from xmil.slides import find_slides
from xmil.storage import Run, explained_run, read_explanations, read_provenance

FOLDER = "annotations"  # of a run, written by the viewer
TABLE, SUMMARY, FAILURES = "agreement.csv", "agreement_summary.csv", "agreement_failures.csv"
NO_CLASS = "(no class)"  # what tables call regions without one
MEASURES = {"auroc": "AUROC", "dice": "Dice", "pointing": "pointing"}
GROUP = ("class", "method", "target")  # columns whose values are measured separately
SHOWN = 3  # reasons on the screen; the table of failures has them all
SHARE = 0.5  # of a patch that regions must cover to mark it
Row = dict[str, Any]


@takes(AgreementRequest, "run")
def measure_agreement(request: AgreementRequest, *, listener: Listener | None = None) -> Agreement:
    """Compare the saved scores of a run with readers' regions, into tables in the folder `out`.

    Same as `xmil study agreement`, with the same options and files.
    """
    listener = listener or Listener()
    run = explained_run(request.run)
    if not request.annotations.is_dir():
        raise InputError(absent(request.annotations, "folder"))
    slides = {} if request.slides is None else find_slides(request.slides, follow_links=True)
    agreement = compare_annotations(
        run, request.annotations, names=request.classes, slides=slides, say=listener.say
    )
    if not agreement.rows:
        raise InputError(
            f"{request.annotations}: no region lies on a slide of {run.path}; it needs SLIDE.geojson files."
        )
    out = request.out or run.path
    out.mkdir(parents=True, exist_ok=True)
    agreement.write(out)
    listener.say(agreement.as_text())
    skipped = f"; {out / FAILURES} lists what was left out" if agreement.left_out else ""
    listener.say(f"Annotations and scores compared in {out / TABLE} and {out / SUMMARY}{skipped}.")
    return agreement


@dataclass(frozen=True)
class Agreement:
    """Rows by slide, the summary over slides, and files that could not be compared, with the reason."""

    rows: list[Row]
    summary: list[Row]
    left_out: list[Row] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the tables; that of failures has only a header if nothing was left out."""
        for name, rows in ((TABLE, self.rows), (SUMMARY, self.summary), (FAILURES, self.left_out)):
            head = list(rows[0]) if rows else ["slide_id", "file", "error"]
            write_text(folder / name, csv_text(head, ([_cell(row[key]) for key in head] for row in rows)))

    def as_text(self) -> str:
        """Format the summary as a table."""
        groups: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in self.summary:
            groups.setdefault(tuple(row[key] for key in GROUP), {})[row["measure"]] = row
        lines = [["regions", "method", "target", *MEASURES.values(), "chance", "n", "cases"]]
        for (kind, method, target), own in groups.items():
            cells = [_interval(own[measure]) for measure in MEASURES]
            first = own["dice"]
            counts = [f"{first['chance']:.2f}", str(first["n"]), str(first["cases"])]
            lines.append([kind or NO_CLASS, card_of(method).title, target, *cells, *counts])
        return text_table(lines)


def compare_annotations(
    run: Run,
    folder: Path | None = None,
    *,
    names: Sequence[str] = (),
    slides: Mapping[str, Path] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Agreement:
    """Compare every annotated slide of a run with its scores, by class of regions, method and target.

    `folder` holds SLIDE.geojson, as QuPath exports it, or SLIDE/READER.geojson, as the viewer writes; by
    default it is the run's own. `names` are the classes of annotations to use. QuPath counts from the
    scanned bounds: `slides` (id to file) gives their origin for files that do not store it.
    """
    files = list_annotations(run.path / FOLDER if folder is None else folder)
    rows: list[Row] = []
    left_out: list[Row] = []
    edges: dict[str, Patches] = {}
    for slide, drawn in ((slide, drawn) for slide, own in files.items() for drawn in own.items()):
        try:
            compared, faults = _compare(run, slide, *drawn, names, (slides or {}).get(slide))
            edges[slide] = stored_edge(read_provenance(run.files[slide])[0])
        except XmilError as error:
            compared, faults = [], [str(error)]
        rows += compared
        left_out += [{"slide_id": slide, "file": str(drawn[1]), "error": fault} for fault in faults]
    guessed = guessed_edges_warning(guessed_edges(edges.items()))
    if guessed is not None:
        say(guessed)
    if left_out:
        reasons = [row["error"].removesuffix(".") for row in left_out]
        some = counted(len({row["file"] for row in left_out}), "file")
        say(f"{some} left out, as a whole or in part: {shorten(reasons, SHOWN, comma=';')}.")
    return Agreement(rows, summarise(rows), left_out)


def list_annotations(folder: Path) -> dict[str, dict[str, Path]]:
    """List the files of annotations by slide and reader; the reader of SLIDE.geojson has no name."""
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
    run: Run, slide: str, reader: str, drawn: Path, names: Sequence[str], picture: Path | None
) -> tuple[list[Row], list[str]]:
    """Score one reader's regions on one slide; return rows, and sentences on classes that were left out."""
    if slide not in run.files:
        raise InputError(f"{drawn}: the run has no slide {slide}.")
    explanations = read_explanations(run.files[slide])
    first = explanations[0]
    if first.coords is None or first.patch_size is None:
        raise InputError(f"{drawn}: the positions of the patches of {slide} are unknown.")
    with opened(picture) as image:
        origin = None if image is None else (float(image.bounds[0]), float(image.bounds[1]))
    regions = read_regions(drawn, names=tuple(names) or None, origin=origin)
    if not regions:
        raise InputError(f"{drawn}: has no polygons.")
    rows: list[Row] = []
    faults: list[str] = []
    for kind, polygons in regions.items():
        marked = covered_by_polygons(polygons, first.coords.astype(np.float64), first.patch_size) >= SHARE
        if not marked.any() or marked.all():
            share = "all" if marked.any() else "no"
            faults.append(f"{drawn}: its regions {kind or NO_CLASS} mark {share} patches of {slide}.")
            continue
        about = {
            "slide_id": slide,
            "case_id": run.rows.get(slide, {}).get("case_id") or slide,
            "reader": reader,
            "class": kind,
        }
        counts = {"patches": len(marked), "marked": int(marked.sum())}
        rows += [
            {
                **about,
                "method": e.method,
                "target": str(e.target),
                **counts,
                **score_regions(marked, e.scores),
            }
            for e in explanations
        ]
    return rows, faults


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Average each measure over cases, with its interval and the test against chance."""
    targets: dict[tuple[str, ...], int] = {}
    for row in rows:
        key = (row["slide_id"], row["reader"], row["class"], row["method"])
        targets[key] = targets.get(key, 0) + 1
    several = {method for (*_, method), n in targets.items() if n > 1}
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:  # if each slide has one target, its predicted class, they form one group
        target = row["target"] if row["method"] in several else "each slide's own"
        groups.setdefault((row["class"], row["method"], target), []).append(row)
    summary: list[Row] = []
    for group, own in groups.items():
        cases = [row["case_id"] for row in own]
        units = range(len(set(cases)))  # each case counts once, with the mean of its regions
        for measure in MEASURES:
            values = unit_means([row[measure] for row in own], cases)
            chance = unit_means([0.5 if measure == "auroc" else row["chance"] for row in own], cases)
            mean, gap = bootstrap_mean(values, units=units), values - chance
            tested = len(units) > 1 and bool(gap.any())
            p = sign_flip_p(gap, units=units, rng=np.random.default_rng(0)) if tested else float("nan")
            summary.append({
                **dict(zip(GROUP, group, strict=True)), "measure": measure, "mean": mean.estimate,
                "low": mean.low, "high": mean.high, "chance": float(chance.mean()), "p": p, "p_holm": p,
                "n": len(own), "slides": len({row["slide_id"] for row in own}), "cases": len(units),
            })  # fmt: skip
    for row, corrected in zip(summary, holm([row["p"] for row in summary]), strict=True):
        row["p_holm"] = float(corrected)
    return summary


def _interval(row: Row) -> str:
    """Format a mean, with its interval if there are enough cases for one."""
    has_interval = bool(np.isfinite(row["low"]))
    return f"{row['mean']:.2f}" + (f" [{row['low']:.2f}, {row['high']:.2f}]" if has_interval else "")


def _cell(value: object) -> object:
    return None if isinstance(value, float) and not np.isfinite(value) else value
