"""`xmil heatmap`: a run's scores as pictures, and as files for QuPath and other programs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _workers
from xmil.cli._cohort import listed, progress_bar
from xmil.cli._report import print_failures
from xmil.core.errors import InputError
from xmil.core.names import counted

if TYPE_CHECKING:
    from xmil.heatmaps.drawing import DrawingJob, Drawn, Order
    from xmil.heatmaps.saved_run import SavedRun


def heatmap(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or one explanation file (.parquet).")],
    slides: Annotated[Path | None, typer.Option(help="Folder of slides; without it scores alone.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the files; RUN/heatmaps by default.")] = None,
    names: Annotated[str, typer.Option(help="Only these slides, separated by commas.")] = "",
    methods: Annotated[str, typer.Option(help="Only these methods, in this order.")] = "",
    target: Annotated[str, typer.Option(help="Only these explained classes; or 'predicted'.")] = "",
    pictures: Annotated[
        str, typer.Option(help="Of panel, overlay, side, patches, map; 'none' for exports alone.")
    ] = "panel,overlay,patches",
    formats: Annotated[str, typer.Option(help="Of png, pdf, svg.")] = "png",
    exports: Annotated[
        str, typer.Option(help="Of geojson (QuPath), scores and colours (OME-TIFF), csv, parquet; or 'none'.")
    ] = "geojson",
    clip: Annotated[str, typer.Option(help="whiskers (1.5 IQR), percentile or none.")] = "whiskers",
    percentile: Annotated[float, typer.Option(help="With --clip percentile.")] = 99.0,
    scale: Annotated[
        str, typer.Option(help="slide: colours by each slide's scores; cohort: one scale for all.")
    ] = "slide",
    alpha: Annotated[float, typer.Option(help="Strength of the colours over the slide, 0 to 1.")] = 0.5,
    tissue: Annotated[str, typer.Option(help="The slide under the colours: grey or colour.")] = "grey",
    size: Annotated[int, typer.Option(help="Pixels of a picture's longer edge.")] = 1200,
    region: Annotated[str, typer.Option(help="Zoom: x,y,width,height in level-0 pixels.")] = "",
    top: Annotated[int, typer.Option(help="Highest and lowest patches on a sheet.")] = 8,
    mpp: Annotated[float | None, typer.Option(help="Microns a level-0 pixel, where no file says.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="Patch edge in level-0 pixels, if unknown.")] = None,
    frame: Annotated[
        str, typer.Option(help="Exports count from the scanned bounds, as QuPath does, or from level0.")
    ] = "bounds",
    downsample: Annotated[
        int | None, typer.Option(help="Level-0 pixels per pixel of the OME-TIFF; 1 unless it is very wide.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Draw again what is there.")] = False,
    engine: _workers.Kind = "local",
    workers: _workers.WorkerCount = 0,
    address: _workers.Address = "",
) -> int:
    """Draw each slide's scores: overlays, panels, patch sheets; GeoJSON, OME-TIFF, tables."""
    from xmil.heatmaps.drawing import Order, cohort_scales, with_targets
    from xmil.heatmaps.picture import Look
    from xmil.heatmaps.saved_run import open_run

    if scale not in ("slide", "cohort"):
        raise InputError(f"--scale must be slide or cohort. Got {scale!r} instead.")
    look = Look(clip, percentile, _share(alpha), tissue, _positive(size, "--size"), _region(region), top)
    order = Order(
        tuple(_wished(pictures)),
        tuple(listed(formats)),
        tuple(_wished(exports)),
        methods=tuple(listed(methods)),
        targets=tuple(listed(target)),
        look=look,
        mpp=mpp,
        patch_size=patch_size,
        frame=frame,
        downsample=downsample,
    )
    held = open_run(run)
    order = replace(_with_slide(order, slides), task=held.task)
    held = with_targets(held, order)
    if scale == "cohort":
        order = replace(order, scales=cohort_scales(held, order))
    jobs = _jobs(held, listed(names), slides)
    folder = out or held.folder / "heatmaps"
    _prepare(folder, order, restart)
    where = _workers.workers_of(engine, workers=workers, address=address)
    done, failed = _draw(jobs, held, order, folder, restart=restart, slides=slides, engine=where)
    return _report(done, failed, folder)


def _wished(text: str) -> list[str]:
    return [] if text.strip() == "none" else listed(text)


def _share(alpha: float) -> float:
    if not 0 <= alpha <= 1:
        raise InputError(f"--alpha must be in the range [0, 1]. Got {alpha:g} instead.")
    return alpha


def _positive(value: int, option: str) -> int:
    if value < 1:
        raise InputError(f"{option} must be 1 or more. Got {value} instead.")
    return value


def _region(text: str) -> tuple[float, float, float, float] | None:
    if not text.strip():
        return None
    try:
        x, y, width, height = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"--region must be x,y,width,height in level-0 pixels. Got {text!r} instead."
        ) from None
    return x, y, width, height


def _with_slide(order: Order, slides: Path | None) -> Order:
    """The order without the pictures that are cut from slides, where there are none."""
    from xmil.heatmaps.drawing import NEED_SLIDE

    lost = [] if slides is not None else [kind for kind in order.pictures if kind in NEED_SLIDE]
    if not lost:
        return order
    told = f"{' and '.join(lost)} cannot be drawn without --slides"
    rest = tuple(kind for kind in order.pictures if kind not in lost)
    if not rest and not order.exports:
        raise InputError(f"{told}; there is nothing else to draw.")
    print(f"{told}; left out.")
    return replace(order, pictures=rest)


def _jobs(run: SavedRun, names: list[str], slides: Path | None) -> list[DrawingJob]:
    """The run's slides, or those asked for, each with its file where the folder has it."""
    from xmil.cli._slide import named_slides
    from xmil.core.errors import unknown_name
    from xmil.heatmaps.drawing import DrawingJob
    from xmil.slides.open import Found

    for name in names:
        if name not in run.files:
            raise unknown_name("slide", name, run.files)
    found = Found({}, {}, []) if slides is None else named_slides([slides])
    return [
        DrawingJob(name, run.files[name], found.slides.get(name), found.twice.get(name, ""))
        for name in names or run.files
    ]


def _prepare(folder: Path, order: Order, restart: bool) -> None:
    """Make the folder; one with pictures in another style is refused unless they are to be replaced."""
    from xmil.core.storage import write_text

    text = json.dumps(order.style(), indent=2, default=str)
    known = folder / "style.json"
    if known.is_file() and not restart and known.read_text(encoding="utf-8") != text:
        raise InputError(
            f"{folder}: holds pictures drawn in another style ({known.name} says how); "
            "choose another --out, or --restart to draw them again."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another --out.") from None
    write_text(known, text)


def _draw(
    jobs: list[DrawingJob],
    run: SavedRun,
    order: Order,
    folder: Path,
    *,
    restart: bool,
    slides: Path | None,
    engine: Any,
) -> tuple[list[Drawn], dict[str, str]]:
    from xmil.heatmaps.drawing import make_drawer
    from xmil.runs.workers.pool import process

    done: list[Drawn] = []
    failed: dict[str, str] = {}
    work = partial(make_drawer, run, order, folder, restart=restart, slides=slides)
    with progress_bar("slides", len(jobs)) as advance:
        for outcome in process(jobs, work, engine):
            if outcome.result is None:
                failed[outcome.item.slide_id] = outcome.error or "it gave no result"
            else:
                done.append(outcome.result)
            advance()
    return done, failed


def _report(done: list[Drawn], failed: dict[str, str], folder: Path) -> int:
    """Lines for the screen, failures.csv, and the exit code."""
    from xmil.core.runfiles import FAILURES, write_table

    write_table(folder / FAILURES, ("slide_id", "error"), sorted(failed.items()))
    for each in done:
        if each.note is not None:
            print(each.note)
    print_failures(failed)
    if not done:
        raise InputError(f"No slide could be drawn; {folder / FAILURES} says why.")
    written, kept = sum(each.written for each in done), sum(each.kept for each in done)
    also = f", {kept} were there" if kept else ""
    print(f"{counted(len(done), 'slide')}: {counted(written, 'file')} written{also}. See {folder}.")
    return 1 if failed else 0
