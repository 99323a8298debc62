"""`draw_slides`: draw and export a run's explanations for many slides.

run.json, slides.csv, failures.csv, style.json
<kind>/<slide>[.<method>.<target>].<suffix>
pairs/<slide>.<target>.geojson    lines, if the run has interactions
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from xmil.core.durable import write_text
from xmil.core.errors import FileError, InputError, check_names
from xmil.core.request import takes
from xmil.core.text import counted, merge_notes, shorten
from xmil.heatmaps import (
    BEYOND,
    NEED_SLIDE,
    DrawingJob,
    Drawn,
    Look,
    Order,
    cohort_scales,
    make_drawer,
    with_targets,
)
from xmil.heatmaps.panel import FORMATS
from xmil.execute import Listener
from xmil.runs.cohort_run import CohortRun, TableRow
from xmil.runs.inputs import guessed_edges_warning, named_slides
from xmil.runs.requests import DrawRequest
from xmil.execute.workers import MakeWorker
from xmil.slides.open import SlideListing
from xmil.storage import Run, check_folder, list_interactions, open_explanations, read_json, read_run

STYLE = "style.json"
Region = tuple[float, float, float, float]
SHOWN = 3  # outdated files in a sentence


@takes(DrawRequest, "run")
def draw_slides(request: DrawRequest, *, listener: Listener | None = None) -> Run:
    """Draw the scores of a run's slides, as `xmil heatmap` does, into RUN/heatmaps or the folder `out`.

    `to` lists formats of pictures, and exports. Without a format there are no pictures.
    """
    listener = listener or Listener()
    formats = tuple(name for name in request.to if name in FORMATS)
    exports = tuple(name for name in request.to if name not in FORMATS)
    try:
        clip, percentile = "percentile", float(request.clip)
    except ValueError:
        clip, percentile = request.clip, 99.0
    look = Look(
        clip, percentile, request.alpha, request.tissue, request.size,
        cast(Region | None, request.region), request.top,
        pairs=request.pairs,
    )  # fmt: skip
    order = Order(
        request.pictures if formats else (), formats, exports, methods=request.methods,
        targets=request.target, look=look, mpp=request.mpp, patch_size=request.patch_size,
        frame=request.frame, downsample=request.downsample,
    )  # fmt: skip
    run = request.run
    saved = open_explanations(run.path if isinstance(run, Run) else run)
    order = replace(
        _with_slide(order, request.slides, listener), task=saved.task, class_names=saved.class_names,
        verdict=saved.verdict,
    )  # fmt: skip
    saved = with_targets(saved, order)
    if request.scale == "cohort":
        order = replace(order, scales=cohort_scales(saved, order))
    out = request.out or saved.path / "heatmaps"
    drawing = HeatmapRun(out, request, saved, order)
    drawing.check_style()
    drawing.check_slides()
    tally = drawing.execute(drawing.jobs(listener), listener)
    if not saved.is_finished:
        listener.warn(
            f"{saved.path}: the run is unfinished ({counted(len(saved.files), 'slide')} so far); repeat its "
            "command to finish it, then this one to draw the rest."
        )
    results = tally.results
    lines = merge_notes({name: each.note for name, each in results.items() if each.note is not None})
    edges = {name: each.edge for name, each in results.items() if each.edge is not None}
    lines += filter(None, [guessed_edges_warning(edges)])
    if order.pictures:
        shares = {name: each.beyond for name, each in results.items()}
        lines += describe_clipped(shares, unclipped_command(request))
    written, present = (sum(getattr(each, kind) for each in results.values()) for kind in ("written", "kept"))
    also = f", {present} already there" if present else ""
    lines.append(f"{counted(len(results), 'slide')}: {counted(written, 'file')} written{also}. See {out}.")
    for line in lines + describe_outdated(out, saved):
        listener.say(line)
    return Run(drawing.out)


def unclipped_command(request: DrawRequest) -> str:
    """Write the command that draws the same on a scale up to the strongest score.

    >>> unclipped_command(DrawRequest.build(run="my run", slides="wsi", size=400))
    "xmil heatmap 'my run' --slides wsi --size 400 --clip none --restart"
    """
    run = request.run.path if isinstance(request.run, Run) else request.run
    same = request.words("run", "clip", "restart")
    return shlex.join(["xmil", "heatmap", str(run), *same, "--clip", "none", "--restart"])


def describe_clipped(shares: Mapping[str, float], command: str) -> list[str]:
    """Write a line on slides with many patches beyond the colour scale, and the command that separates them.

    >>> describe_clipped({"a": 0.4, "b": 0.02}, "xmil heatmap run --clip none --restart")
    ['a: 40 % of the patches lie beyond the colour scale and share its full colour; ...']
    """
    beyond = {name: share for name, share in shares.items() if share > BEYOND}
    if not beyond:
        return []
    text = (
        f"{'up to ' * (len(beyond) > 1)}{100 * max(beyond.values()):.0f} % of the patches lie beyond the "
        f"colour scale and share its full colour; {command} tells them apart."
    )
    return merge_notes(dict.fromkeys(sorted(beyond, key=lambda name: (-beyond[name], name)), text))


def describe_outdated(out: Path, run: Run) -> list[str]:
    """Write a sentence on pictures and exports that are older than every explanation of the run."""
    sources = {path.parent for path in run.files.values()}
    first = min(path.stat().st_mtime_ns for folder in sources for path in folder.glob("*.parquet"))
    folders = [path for path in sorted(out.iterdir()) if path.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name[0] != "."]
    old = [str(path.relative_to(out)) for path in files if path.lstat().st_mtime_ns < first]
    if not old:
        return []
    some = counted(len(old), "file")
    return [f"{some} older than the explanations there, of an earlier run: {shorten(old, SHOWN)}."]


def _with_slide(order: Order, slides: Path | None, listener: Listener) -> Order:
    """Drop pictures that need slides from the order if there are no slides."""
    lost = [] if slides is not None else [kind for kind in order.pictures if kind in NEED_SLIDE]
    if not lost:
        return order
    sentence = f"{' and '.join(lost)} cannot be drawn without `slides=`"
    rest = tuple(kind for kind in order.pictures if kind not in lost)
    if not rest and not order.exports:
        raise InputError(f"{sentence}; there is nothing else to draw.")
    listener.say(f"{sentence}; left out.")
    return replace(order, pictures=rest)


@dataclass(frozen=True)
class HeatmapRun(CohortRun[DrawingJob, Drawn]):
    request: DrawRequest
    run: Run
    order: Order
    kind = "heatmap"
    doing = "drawing"
    verb = "drawn"
    adds = True
    marks = (STYLE,)

    def settings(self) -> dict[str, Any]:
        """Nothing, since a later run may add pictures, in the style of style.json."""
        return {}

    def about(self) -> dict[str, Any]:
        style = self.order.style()
        return {"run": str(self.run.path.resolve()), "slides": self.slides, "style": style}

    @cached_property
    def slides(self) -> str | None:
        """The slides of the request; without any, those that pictures in the folder were drawn over."""
        if self.request.slides is not None:
            return str(self.request.slides.resolve())
        before = read_run(self.out) or {}
        return str(before["slides"]) if before.get("slides") else None

    def jobs(self, listener: Listener) -> list[DrawingJob]:
        """List the run's slides, or those of `names`, each with its slide file if there is one."""
        request, files, rows = self.request, self.run.files, self.run.rows
        pairs = list_interactions(self.run.path)
        check_names("slide", request.names, files)
        listing = SlideListing({}, {}, [])
        if request.slides is not None:
            listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
        return [
            DrawingJob(
                name, files[name], listing.slides.get(name), listing.twice.get(name, ""),
                drawn=str(self.before.get(name, {}).get("source") or ""),
                pairs=tuple(pairs.get(name, ())), row=rows.get(name, {}),
                certificate=self._find_certificate(name),
            )
            for name in request.names or files
        ]  # fmt: skip

    def _find_certificate(self, slide: str) -> Path | None:
        """Find the slide's certificate of `xmil evaluate`; a link out of the folder is not followed."""
        with suppress(FileError):
            return self.run.find("certificate", slide)
        return None

    def check_style(self) -> None:
        """Refuse a folder with pictures in another style, unless they are replaced."""
        style = self.out / STYLE
        check_folder(self.out, self.kind, marks=self.marks if self._is_style(style) else ())
        if style.is_file() and not self.request.restart and style.read_text(encoding="utf-8") != self._style:
            raise InputError(
                f"{self.out}: holds pictures drawn in another style ({style.name} says how); "
                "choose another `out=`, or `restart=True` to draw them again."
            )

    def check_slides(self) -> None:
        """Refuse to replace pictures that were drawn over slides by pictures without them."""
        drawn = [kind for kind in self.order.pictures if any((self.out / kind).glob("*"))]
        if self.request.slides is None and self.slides is not None and drawn:
            raise InputError(
                f"{self.out}: holds pictures drawn over slides; pass `slides={self.slides!r}` to draw over "
                "them again, or choose another `out=` for pictures without slides."
            )

    def _is_style(self, path: Path) -> bool:
        """Whether a file is a style of xmil, not a user's file of that name."""
        try:
            return read_json(path).keys() <= self.order.style().keys()
        except FileError:
            return False

    @property
    def _style(self) -> str:
        return json.dumps(self.order.style(), indent=2, default=str)

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        self.check_style()  # again, now that the folder is locked
        write_text(self.out / STYLE, self._style)

    def slides_of(self, item: DrawingJob) -> Sequence[str]:
        return (item.slide_id,)

    def outputs(self, items: Sequence[DrawingJob]) -> Iterable[Path]:  # noqa: ARG002
        """None, since files are overwritten, and the folder may hold others."""
        return ()

    def make_worker(self) -> MakeWorker[DrawingJob, Drawn]:
        """Draw one slide after another, and skip files that are current."""
        request = self.request
        return partial(make_drawer, self.order, self.out, restart=request.restart, slides=request.slides)

    def rows_of(self, item: DrawingJob, result: Drawn) -> list[TableRow]:
        """Return a slide's number of files and what they were drawn from."""
        files, before = result.written + result.kept, self.before.get(item.slide_id, {})
        guess = None if result.edge is None else result.edge.edge_note
        note = " ".join(filter(None, [result.note, guess]))
        if result.kept and before.get("source") == result.source:  # files not redrawn keep their note
            note = note or before.get("note", "")
        facts = {"note": note, "beyond_scale": f"{result.beyond:.3g}", "source": result.source}
        return [{"slide_id": item.slide_id, "files": files, **facts}]
