"""`draw_slides`: pictures and exports of a run's explanations, for many slides.

run.json, slides.csv, failures.csv, style.json
<kind>/<slide>[.<method>.<target>].<suffix>
pairs/<slide>.<target>.geojson    lines, where the run has interactions
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError, bad_parameter, unknown_name
from xmil.core.names import counted, listed
from xmil.core.run import Run
from xmil.core.runfiles import SLIDES, read_rows
from xmil.core.storage import write_text
from xmil.heatmaps.drawing import (
    NEED_SLIDE,
    DrawingJob,
    Drawn,
    Order,
    cohort_scales,
    make_drawer,
    with_targets,
)
from xmil.heatmaps.picture import Look
from xmil.heatmaps.saved_run import SavedRun, open_saved
from xmil.heatmaps.scale import TOLD
from xmil.runs.cohort_run import CohortRun, TableRow, as_workers
from xmil.runs.listener import Listener, grouped
from xmil.runs.slide_inputs import StrPath, named_slides
from xmil.runs.workers.pool import MakeWorker, Workers
from xmil.slides.open import Found

PICTURES, FORMATS, EXPORTS = ("panel", "overlay", "patches"), ("png",), ("geojson",)
SCALES, STYLE = ("slide", "cohort"), "style.json"
SHOWN = 3  # outdated files in a sentence


def draw_slides(
    run: StrPath | Run,
    *,
    slides: StrPath | None = None,
    out: StrPath | None = None,
    names: str | Iterable[str] = (),
    methods: str | Iterable[str] = (),
    target: str | Iterable[str] = (),
    pictures: str | Iterable[str] = PICTURES,
    formats: str | Iterable[str] = FORMATS,
    exports: str | Iterable[str] = EXPORTS,
    look: Look | None = None,
    scale: str = "slide",
    mpp: float | None = None,
    patch_size: int | None = None,
    frame: str = "bounds",
    downsample: int | None = None,
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    full_digests: bool = False,
    listener: Listener | None = None,
) -> Run:
    """Draw the scores of a run's slides, as `xmil heatmap` does, into RUN/heatmaps or the folder `out`.

    `look` holds clipping, size, tissue and the like; `pictures` and `exports` may be empty, not both.
    """
    hear = listener or Listener()
    if scale not in SCALES:
        raise unknown_name("scale", scale, SCALES)
    order = Order(
        tuple(listed(pictures)), tuple(listed(formats)), tuple(listed(exports)),
        methods=tuple(listed(methods)), targets=tuple(listed(target)),
        look=_checked(look or Look()), mpp=mpp, patch_size=patch_size, frame=frame, downsample=downsample,
    )  # fmt: skip
    held = open_saved(run.path if isinstance(run, Run) else run)
    order = replace(_with_slide(order, slides, hear), task=held.task)
    held = with_targets(held, order)
    if scale == "cohort":
        order = replace(order, scales=cohort_scales(held, order))
    place = held.folder / "heatmaps" if out is None else Path(out)
    folder = None if slides is None else Path(slides)
    drawing = HeatmapRun(place, held, order, folder, restart, full_digests)
    jobs = drawing.jobs(listed(names), follow_links=follow_links, hear=hear)
    tally = drawing.go(jobs, workers=as_workers(workers), restart=restart, listener=hear)
    done = list(tally.results.values())
    notes = {name: each.note for name, each in tally.results.items() if each.note is not None}
    for line in grouped(notes):
        hear.say(line)
    for line in clipped({name: each.beyond for name, each in tally.results.items()}):
        hear.say(line)
    written, kept = sum(each.written for each in done), sum(each.kept for each in done)
    also = f", {kept} were there" if kept else ""
    hear.say(f"{counted(len(done), 'slide')}: {counted(written, 'file')} written{also}. See {place}.")
    for line in _outdated(place, held):
        hear.say(line)
    return drawing.saved()


def clipped(shares: Mapping[str, float]) -> list[str]:
    """A line on the slides many of whose patches lie beyond the colour scale, and on what shows them apart.

    >>> clipped({"a": 0.4, "b": 0.02})
    ['a: 40 % of the patches lie beyond the colour scale and share its full colour; ...']
    """
    told = sorted((-share, name) for name, share in shares.items() if share > TOLD)
    largest = f"{'up to ' * (len(told) > 1)}{-100 * told[0][0]:.0f} %" if told else ""
    text = (
        f"{largest} of the patches lie beyond the colour scale and share its full colour; "
        "`xmil heatmap --clip none --restart` tells them apart."
    )
    return grouped({name: text for _, name in told})


def _outdated(place: Path, held: SavedRun) -> list[str]:
    """A sentence on pictures and exports that are older than every explanation of the run."""
    beside = {path.parent for path in held.files.values()}
    first = min(path.stat().st_mtime_ns for folder in beside for path in folder.glob("*.parquet"))
    folders = [path for path in sorted(place.iterdir()) if path.is_dir()]
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name[0] != "."]
    old = [str(path.relative_to(place)) for path in files if path.lstat().st_mtime_ns < first]
    if not old:
        return []
    named = ", ".join(old[:SHOWN]) + f" and {len(old) - SHOWN} more" * (len(old) > SHOWN)
    return [f"{counted(len(old), 'file')} older than the explanations there, of an earlier run: {named}."]


def _checked(look: Look) -> Look:
    if not 0 <= look.alpha <= 1:
        raise bad_parameter("alpha", "heatmap", "a number in the range [0, 1]", look.alpha)
    if look.size < 1:
        raise bad_parameter("size", "heatmap", "1 or more", look.size)
    return look


def _with_slide(order: Order, slides: StrPath | None, hear: Listener) -> Order:
    """The order without the pictures that are cut from slides, where there are none."""
    lost = [] if slides is not None else [kind for kind in order.pictures if kind in NEED_SLIDE]
    if not lost:
        return order
    told = f"{' and '.join(lost)} cannot be drawn without --slides"
    rest = tuple(kind for kind in order.pictures if kind not in lost)
    if not rest and not order.exports:
        raise InputError(f"{told}; there is nothing else to draw.")
    hear.say(f"{told}; left out.")
    return replace(order, pictures=rest)


@dataclass(frozen=True)
class HeatmapRun(CohortRun[DrawingJob, Drawn]):
    """A folder of pictures in one style."""

    held: SavedRun
    order: Order
    slides: Path | None = None
    restarts: bool = False
    full_digests: bool = False
    kind = "heatmap"
    verb = "drawn"

    def settings(self) -> dict[str, Any]:
        """Nothing: more pictures may be added, in the style that style.json holds."""
        return {}

    def about(self) -> dict[str, Any]:
        """The run that is drawn, and where its slides are."""
        slides = None if self.slides is None else str(self.slides.resolve())
        return {"run": str(self.held.folder.resolve()), "slides": slides, "style": self.order.style()}

    def jobs(self, names: Sequence[str], *, follow_links: bool, hear: Listener) -> list[DrawingJob]:
        """The run's slides, or those asked for, each with its file where the folder has it."""
        for name in names:
            if name not in self.held.files:
                raise unknown_name("slide", name, self.held.files)
        found = Found({}, {}, [])
        if self.slides is not None:
            found = named_slides(self.slides, follow_links=follow_links, say=hear.say)
        return [
            DrawingJob(
                name, self.held.files[name], found.slides.get(name), found.twice.get(name, ""),
                str(self.earlier().get(name, {}).get("source") or ""),
            )
            for name in names or self.held.files
        ]  # fmt: skip

    def begin(self, *, again: bool) -> None:  # noqa: ARG002 - the base's signature
        """Note the style; a folder with pictures in another one is refused unless they are replaced."""
        text = json.dumps(self.order.style(), indent=2, default=str)
        known = self.out / STYLE
        if known.is_file() and not self.restarts and known.read_text(encoding="utf-8") != text:
            raise InputError(
                f"{self.out}: holds pictures drawn in another style ({known.name} says how); "
                "choose another --out, or --restart to draw them again."
            )
        write_text(known, text)

    def slides_of(self, item: DrawingJob) -> Sequence[str]:
        """The slide itself."""
        return (item.slide_id,)

    def outputs(self, items: Sequence[DrawingJob]) -> Iterable[Path]:  # noqa: ARG002
        """None: files are drawn over, and the folder may hold others."""
        return ()

    def make_worker(self, workers: Workers) -> MakeWorker[DrawingJob, Drawn]:  # noqa: ARG002
        """Draws one slide after another; files that are current are left alone."""
        return partial(
            make_drawer, self.held, self.order, self.out,
            restart=self.restarts, slides=self.slides, full_digests=self.full_digests,
        )  # fmt: skip

    @cached_property
    def _before(self) -> dict[str, TableRow]:
        return dict(read_rows(self.out / SLIDES))

    def earlier(self) -> Mapping[str, TableRow]:
        """Slides are added to the folder, one run after another."""
        return self._before

    def rows_of(self, item: DrawingJob, result: Drawn) -> list[TableRow]:
        """How many files there are of a slide, and what they were drawn from."""
        files = result.written + result.kept
        told = {"note": result.note or "", "beyond_scale": f"{result.beyond:.3g}", "source": result.source}
        return [{"slide_id": item.slide_id, "files": files, **told}]
