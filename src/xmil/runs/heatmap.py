"""`draw_slides`: draw and export a run's explanations for many slides.

run.json, slides.csv, failures.csv
<kind>/<slide>[.<method>.<target>].<suffix>
pairs/<slide>.<target>.geojson    lines, if the run has interactions
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from xmil.core.bag import Patches
from xmil.core.errors import FileError, InputError, check_names
from xmil.core.request import takes
from xmil.core.text import counted, merge_notes, shorten
from xmil.execute import Listener, Step, Tally, execute
from xmil.heatmaps import (
    BEYOND,
    NEED_SLIDE,
    DrawingJob,
    Look,
    Order,
    cohort_scales,
    draw_slide,
    with_targets,
)
from xmil.heatmaps.panel import FORMATS
from xmil.runs.inputs import guessed_edges_warning, named_slides
from xmil.runs.requests import DrawRequest
from xmil.slides.open import SlideListing
from xmil.storage import (
    Item,
    Ledger,
    Record,
    Run,
    check_folder,
    list_interactions,
    open_explanations,
    read_run,
    read_what_is_done,
)

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
    slides = slides_to_draw_over(request, out)
    check_slides(request, out, slides, order)
    step = Step(
        "heatmap",
        items_to_draw(request, saved, order, out, listener),
        settings=request.with_options(order.style()),
        about={"run": str(saved.path.resolve()), "slides": slides},
        make_worker=partial(partial, draw_item, order, out, request.slides),
        doing="drawing slides",
        verb="drawn",
        adds=True,
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    if not saved.is_finished:
        listener.warn(
            f"{saved.path}: the run is unfinished ({counted(len(saved.files), 'slide')} so far); repeat its "
            "command to finish it, then this one to draw the rest."
        )
    for line in describe_drawing(tally, request, order, out) + describe_outdated(out, saved):
        listener.say(line)
    return Run(out)


def describe_drawing(tally: Tally, request: DrawRequest, order: Order, out: Path) -> list[str]:
    """Write a line on each doubt about the slides, and on how many files were written."""
    facts = {name: record.facts for name, record in tally.records.items()}
    lines = merge_notes({name: own["note"] for name, own in facts.items() if own.get("note")})
    edges = {name: Patches(**own["edge"]) for name, own in facts.items() if own.get("edge")}
    lines += filter(None, [guessed_edges_warning(edges)])
    if order.pictures:
        shares = {name: own["beyond"] for name, own in facts.items()}
        lines += describe_clipped(shares, unclipped_command(request))
    written = sum(facts[name]["written"] for name in tally.done)
    present = sum(own["files"] for own in facts.values()) - written
    also = f", {present} already there" if present else ""
    return [*lines, f"{counted(len(facts), 'slide')}: {counted(written, 'file')} written{also}. See {out}."]


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


def slides_to_draw_over(request: DrawRequest, out: Path) -> str | None:
    """The slides of the request; without any, those that pictures in the folder were drawn over."""
    if request.slides is not None:
        return str(request.slides.resolve())
    before = read_run(out) or {}
    return str(before["slides"]) if before.get("slides") else None


def check_slides(request: DrawRequest, out: Path, slides: str | None, order: Order) -> None:
    """Refuse to replace pictures that were drawn over slides by pictures without them."""
    check_folder(out, "heatmap")
    drawn = [kind for kind in order.pictures if any((out / kind).glob("*"))]
    if request.slides is None and slides is not None and drawn:
        raise InputError(
            f"{out}: holds pictures drawn over slides; pass `slides={slides!r}` to draw over them again, or "
            "choose another `out=` for pictures without slides."
        )


def items_to_draw(
    request: DrawRequest, run: Run, order: Order, out: Path, listener: Listener
) -> list[Item[DrawingJob]]:
    """List the run's slides, or those of `names`, each with its slide file if there is one."""
    files, rows, pairs = run.files, run.rows, list_interactions(run.path)
    check_names("slide", request.names, files)
    listing = SlideListing({}, {}, [])
    if request.slides is not None:
        listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
    ledger = Ledger() if request.restart else read_what_is_done(out)
    drawn = ledger.files_by_item()
    decides = {
        "verdict": None if order.verdict is None else order.verdict.as_dict(),
        "methods": list(order.methods),  # a panel shows all that are chosen
        "targets": list(order.targets),
    }
    items = []
    for name in request.names or files:
        certificate = _find_certificate(run, name)
        job = DrawingJob(
            name, files[name], listing.slides.get(name), listing.twice.get(name, ""),
            drawn=drawn.get(name, {}), pairs=tuple(pairs.get(name, ())), row=rows.get(name, {}),
            certificate=certificate,
        )  # fmt: skip
        inputs = (job.explanations, *job.pairs, job.slide, certificate)
        item = Item(name, job, inputs, decides, tuple(order.kinds), by_time=False)
        record = ledger.records.get(name)
        if record is None or not item.is_same(record):
            items.append(replace(item, what=replace(job, drawn={})))
        else:
            items.append(replace(item, what=replace(job, note=record.facts.get("note"))))
    return items


def _find_certificate(run: Run, slide: str) -> Path | None:
    """Find the slide's certificate of `xmil evaluate`; a link out of the folder is not followed."""
    with suppress(FileError):
        return run.find("certificate", slide)
    return None


def draw_item(order: Order, out: Path, slides: Path | None, item: Item[DrawingJob]) -> Record:
    """Draw one slide; files that are up to date are left."""
    result = draw_slide(item.what, order=order, out=out, slides=slides)
    guess = None if result.edge is None else result.edge.edge_note
    own_note = result.note or item.what.note
    note = " ".join(filter(None, [own_note, guess]))
    files = result.written + result.kept
    row = {"slide_id": item.key, "files": files, "note": note, "beyond_scale": f"{result.beyond:.3g}"}
    facts: dict[str, Any] = {
        "note": own_note,
        "beyond": result.beyond,
        "files": files,
        "written": result.written,
    }
    if result.edge is not None:
        facts["edge"] = {"patch_size": result.edge.patch_size, "edge_guess": result.edge.edge_guess}
    return Record([row], facts)
