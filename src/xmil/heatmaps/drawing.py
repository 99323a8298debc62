"""All pictures and exports of one slide: which files, drawn once, and again when the explanations change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.durable import write_atomically
from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.identity import identity
from xmil.core.interactions import Interactions
from xmil.core.task import Target
from xmil.heatmaps.canvas import TISSUES, opened
from xmil.heatmaps.exports import (
    EXPORTS,
    Export,
    Exported,
    write_annotations,
    write_asap,
    write_geojson,
    write_pairs,
    write_parametric_map,
    write_qupath,
    write_table,
)
from xmil.heatmaps.panel import FORMATS, Picture
from xmil.heatmaps.picture import DRAWN, KINDS, NEED_SLIDE, Look, Scene, draw
from xmil.heatmaps.scale import CLIPS, Scale
from xmil.heatmaps.style import spelt_out
from xmil.heatmaps.tiff import write_colours, write_scores
from xmil.heatmaps.words import ALL, PREDICTED, caption, is_predicted, without_repeats
from xmil.heatmaps.zarr import write_omezarr, write_spatialdata
from xmil.slides.slide import FRAMES, export_frame
from xmil.storage import Run, read_explanations, read_header

EACH = ("overlay", "side", "patches", "map")  # pictures with one file for each explanation
PAIRS = "pairs"


@dataclass(frozen=True)
class Order:
    """What to draw and how; `methods` and `targets` empty mean all."""

    pictures: tuple[str, ...] = ("panel", "overlay", "patches")
    formats: tuple[str, ...] = ("png",)
    exports: tuple[str, ...] = ("geojson",)
    methods: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    look: Look = field(default_factory=Look)
    scales: Mapping[str, Scale] = field(default_factory=dict)  # by method; empty: each slide has its own
    mpp: float | None = None
    patch_size: int | None = None
    frame: str = "bounds"
    downsample: int | None = None
    task: str = "classification"
    class_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for kind, names, choices in (
            ("picture", self.pictures, KINDS),
            ("format", self.formats, FORMATS),
            ("export", self.exports, EXPORTS),
            ("clip", (self.look.clip,), CLIPS),
            ("tissue", (self.look.tissue,), TISSUES),
            ("frame", (self.frame,), FRAMES),
        ):
            for name in names:
                if name not in choices:
                    raise unknown_name(kind, name, choices)
        if not self.pictures and not self.exports:
            raise InputError("There is nothing to draw; name pictures or exports.")

    def style(self) -> dict[str, Any]:
        """Give what decides how a file looks, apart from which files there are."""
        names = ("look", "scales", "mpp", "patch_size", "frame", "downsample")
        style = {name: value for name, value in asdict(self).items() if name in names}
        if self.look.pairs == DRAWN:  # as it was before there were lines
            del style["look"]["pairs"]
        return style

    def select(self, explanations: Sequence[Explanation]) -> list[Explanation]:
        """Select the explanations of `methods`, in their order, and of `targets`."""
        for name in self.methods:
            if name not in {e.method for e in explanations}:
                raise unknown_name("method", name, {e.method for e in explanations})
        shown = [e for e in explanations if self.shows(e.target, e.logits)]
        shown = without_repeats([e for e in shown if not self.methods or e.method in self.methods])
        return sorted(shown, key=lambda e: self.methods.index(e.method)) if self.methods else shown

    def shows(self, target: Target, logits: npt.ArrayLike) -> bool:
        """Whether a target is among `targets`."""
        if not self.targets or ALL in self.targets or str(target) in self.targets:
            return True
        return PREDICTED in self.targets and is_predicted(target, logits, self.task)


@dataclass(frozen=True)
class DrawingJob:
    """One slide to draw: its explanations, and its file if there is one."""

    slide_id: str
    explanations: Path
    slide: Path | None = None
    fault: str = ""  # why the slide cannot be used
    drawn: str = ""  # what the files held when they were drawn last
    pairs: tuple[Path, ...] = ()  # its interactions, if the run has any
    row: Mapping[str, str] = field(default_factory=dict)  # of the run's table


@dataclass(frozen=True)
class Drawn:
    """Files written now and files that were current already, and what is doubtful about the slide.

    `source` is what the explanations and the slide held, `beyond` the largest share of patches beyond the
    colour scale of an explanation, 0 where no colours are drawn.
    """

    written: int = 0
    kept: int = 0
    note: str | None = None
    source: str = ""
    beyond: float = 0.0


def cohort_scales(run: Run, order: Order) -> dict[str, Scale]:
    """Make one scale for each method, over all slides and targets; pass over files that cannot be read."""
    scores: dict[str, list[npt.NDArray[Any]]] = {}
    signed: dict[str, bool] = {}
    for path in run.files.values():
        try:
            explanations = order.select(read_explanations(path))
        except XmilError:  # it is reported when its turn comes
            continue
        for e in explanations:
            scores.setdefault(e.method, []).append(e.scores.astype(np.float32))
            signed.setdefault(e.method, e.signed)
    return {
        method: order.look.scale(np.concatenate(several), signed=signed[method])
        for method, several in scores.items()
    }


def with_targets(run: Run, order: Order) -> Run:
    """Keep the slides that have one of the methods and targets; refuse names that no slide has."""
    if not order.targets and not order.methods:
        return run
    files = run.files
    listed = {name: _columns(path) for name, path in files.items()}
    methods = {method for columns in listed.values() for method, _, _ in columns}
    targets = {str(target) for columns in listed.values() for _, target, _ in columns}
    for kind, names, choices in (
        ("method", order.methods, methods),
        ("target", order.targets, targets | {PREDICTED, ALL}),
    ):
        for name in names:
            if methods and name not in choices:
                raise unknown_name(kind, name, choices)
    slides = {
        name: files[name]
        for name, columns in listed.items()
        if not columns or any(order.shows(target, logits) for _, target, logits in columns)
    }
    if not slides:
        raise InputError(f"{run.path}: no slide has an explanation of {', '.join(order.targets)}.")
    return Run(run.path, files=slides)


def _columns(path: Path) -> list[tuple[str, Target, Sequence[float]]]:
    """List methods, targets and logits of a file; none if it cannot be read: that is reported in its turn."""
    try:
        columns = read_header(path)["columns"].values()
        return [(about["method"], Target(**about["target"]), about["logits"]) for about in columns]
    except (XmilError, KeyError, TypeError):
        return []


def make_drawer(
    order: Order,
    out: Path,
    *,
    restart: bool = False,
    slides: Path | None = None,
) -> Callable[[DrawingJob], Drawn]:
    """Make the function that draws one slide; `slides` is the folder that must hold it."""
    return partial(_draw_slide, order=order, out=out, restart=restart, slides=slides)


def _draw_slide(job: DrawingJob, *, order: Order, out: Path, restart: bool, slides: Path | None) -> Drawn:
    """Draw what is not there yet, or is older than the explanations."""
    if job.fault:
        raise InputError(job.fault)
    if slides is not None and job.slide is None:
        raise InputError(
            f"{slides}: no slide named {job.slide_id!r} in this folder; put it there, or draw without "
            "slides=."
        )
    if job.explanations.is_symlink():
        raise InputError(f"{job.explanations}: a link; a run's folder is read without following links.")
    inputs = (job.explanations, *job.pairs, *(() if job.slide is None else (job.slide,)))
    source = " ".join(identity(path) for path in inputs)
    restart = restart or job.drawn != source  # not recorded: a kill came between; the clock is not asked
    explanations = order.select(read_explanations(job.explanations))
    if not explanations:
        raise InputError(f"{job.explanations}: holds no explanation of {', '.join(order.targets)}.")
    targets = {e.target for e in explanations}
    every = [Interactions.load(path) for path in job.pairs] if order.look.pairs else []
    pairs = [each for each in every if each.target in targets]
    files = list(_files(job, explanations, pairs, order, out))
    changed = max(path.stat().st_mtime_ns for path in (job.explanations, *job.pairs))
    due = [
        file for file in files if restart or not file.path.exists() or file.path.stat().st_mtime_ns < changed
    ]
    beyond = 0.0
    if {*order.pictures, *order.exports} & {*KINDS, "colours"}:
        shares = [
            (order.scales.get(e.method) or order.look.scale(e.scores, signed=e.signed)).share_beyond(e.scores)
            for e in explanations
            if len(e)
        ]
        beyond = max(shares, default=0.0)
    if not due:
        return Drawn(kept=len(files), source=source, beyond=beyond)
    with_views = any(file.kind in KINDS for file in due)
    with opened(job.slide, order.mpp) as slide:
        scene = Scene.of(
            [replace(e, bag=e.bag or job.slide_id) for e in explanations],
            slide,
            look=order.look,
            caption=caption(
                job.slide_id, job.row, explanations, task=order.task, class_names=order.class_names
            ),
            scales={e.column: order.scales[e.method] for e in explanations if e.method in order.scales},
            mpp=order.mpp,
            patch_size=order.patch_size,
            with_views=with_views,
        ).with_pairs(pairs)
        for file in due:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            _write(file, scene, order)
    names = [scene.caption.name, *(str(e.target) for e in scene.explanations)]
    note = scene.note or (spelt_out("".join(names)) if with_views else None)
    return Drawn(len(due), len(files) - len(due), note, source, beyond)


@dataclass(frozen=True)
class File:
    """One file to write: its kind, its format, and which explanation it shows, None for all."""

    kind: str
    format: str
    path: Path
    column: str | None = None
    target: Target | None = None  # of interactions


def _files(
    job: DrawingJob,
    explanations: Sequence[Explanation],
    pairs: Sequence[Interactions],
    order: Order,
    out: Path,
) -> Iterator[File]:
    """List every file of a slide: `<kind>/<slide>[.<method>.<target>].<suffix>`, and lines for QuPath."""
    kinds = [
        (kind, suffix, kind in EACH)
        for kind in order.pictures
        if job.slide is not None or kind not in NEED_SLIDE
        for suffix in (("png",) if kind == "map" else order.formats)
    ]
    kinds += [(kind, EXPORTS[kind].suffix, EXPORTS[kind].each) for kind in order.exports]
    for kind, suffix, is_each in kinds:
        for e in explanations if is_each else (None,):
            about = "" if e is None else f".{_safe(e.method)}.{_safe(str(e.target))}"
            path = out / kind / f"{job.slide_id}{about}.{suffix}"
            yield File(kind, suffix, path, None if e is None else e.column)
    for each in pairs if {"geojson", "qupath"} & set(order.exports) else ():
        name = f"{job.slide_id}.{_safe(str(each.target))}.geojson"
        yield File(PAIRS, "geojson", out / PAIRS / name, target=each.target)


def _write(file: File, scene: Scene, order: Order) -> None:
    shown = [e for e in scene.explanations if file.column in (None, e.column)]
    if file.kind in KINDS:
        picture = draw(file.kind, scene if file.column is None else scene.only(shown[0]))
        if isinstance(picture, Picture):
            picture.write(file.path, file.format)
        else:
            write_atomically(file.path, lambda part: picture.save(part, format="PNG"))
        return
    frame = export_frame(shown[0].boxes(), scene.slide, frame=order.frame)
    if file.target is not None:
        write_pairs(file.path, scene.pairs[file.target], origin=frame[:2])
    else:
        task, scales = scene.caption.task, scene.scales
        request = Exported(tuple(shown), frame, task, scales, mpp=scene.mpp, downsample=order.downsample)
        EXPORTS[file.kind].write(file.path, request)


def _write_colours(path: Path, request: Exported) -> None:
    (e,) = request.explanations
    write_colours(path, e, request.scales[e.column], request.pyramid)


EXPORTS.add(
    "geojson",
    Export(lambda path, r: write_geojson(path, r.explanations, origin=r.frame[:2], task=r.task), "geojson"),
)
EXPORTS.add("qupath", Export(write_qupath, "geojson.gz"))
EXPORTS.add("asap", Export(write_asap, "xml", each=True))
EXPORTS.add("dicom", Export(write_parametric_map, "map.dcm", each=True))
EXPORTS.add("dicom-annotations", Export(write_annotations, "annotations.dcm", each=True))
EXPORTS.add("scores", Export(lambda path, r: write_scores(path, r.explanations, r.pyramid), "scores.ome.tif"))
EXPORTS.add("colours", Export(_write_colours, "colours.ome.tif", each=True))
EXPORTS.add("ome-zarr", Export(write_omezarr, "scores.ome.zarr"))
EXPORTS.add("spatialdata", Export(write_spatialdata, "zarr"))
EXPORTS.add("csv", Export(write_table, "csv"))
EXPORTS.add("parquet", Export(write_table, "parquet"))


def _safe(name: str) -> str:
    """Replace spaces and what file systems refuse in a name.

    >>> _safe("HPV+/-: yes")
    'HPV+_-__yes'
    """
    return re.sub(r'[<>:"/\\|?*\s\x00-\x1f]', "_", name)
