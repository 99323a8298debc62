"""All pictures and exports of one slide: which files, drawn once, kept while they are current."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.core.explanation import Explanation
from xmil.core.identity import identity
from xmil.core.interactions import Interactions
from xmil.core.lettering import spelt_out
from xmil.core.patches import Patches
from xmil.core.storage import read_explanations, read_header, write_atomically
from xmil.core.target import Target
from xmil.heatmaps.canvas import TISSUES
from xmil.heatmaps.dicoms import write_annotations, write_parametric_map
from xmil.heatmaps.exports import write_geojson, write_table
from xmil.heatmaps.ometiff import Pyramid, write_colours, write_scores
from xmil.heatmaps.omezarr import write_omezarr
from xmil.heatmaps.pairs import DRAWN, write_pairs
from xmil.heatmaps.panel import FORMATS, Picture
from xmil.heatmaps.picture import KINDS, Look, Scene, draw, only
from xmil.heatmaps.registry import EXPORTS, Export, Exported
from xmil.heatmaps.saved_run import SavedRun
from xmil.heatmaps.scale import CLIPS, Scale, pooled
from xmil.heatmaps.spatial_store import write_spatialdata
from xmil.heatmaps.standards import write_asap, write_qupath
from xmil.heatmaps.words import ALL, PREDICTED, is_predicted, without_repeats
from xmil.slides.frames import FRAMES, export_frame

EACH = ("overlay", "side", "patches", "map")  # pictures with one file for each explanation
NEED_SLIDE = ("side", "patches")
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

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("picture", self.pictures, KINDS),
            ("format", self.formats, FORMATS),
            ("export", self.exports, EXPORTS),
            ("clip", (self.look.clip,), CLIPS),
            ("tissue", (self.look.tissue,), TISSUES),
            ("frame", (self.frame,), FRAMES),
        ):
            for name in given:
                if name not in known:
                    raise unknown_name(kind, name, known)
        if not self.pictures and not self.exports:
            raise InputError("There is nothing to draw; name pictures or exports.")

    def style(self) -> dict[str, Any]:
        """What decides how a file looks, apart from which files there are."""
        names = ("look", "scales", "mpp", "patch_size", "frame", "downsample")
        found = {name: value for name, value in asdict(self).items() if name in names}
        if self.look.pairs == DRAWN:  # as it was before there were lines
            del found["look"]["pairs"]
        return found

    def select(self, explanations: Sequence[Explanation]) -> list[Explanation]:
        """The explanations of the wished methods, in their order, and targets."""
        for name in self.methods:
            if name not in {e.method for e in explanations}:
                raise unknown_name("method", name, {e.method for e in explanations})
        chosen = [e for e in explanations if self.shows(e.target, e.logits)]
        chosen = without_repeats([e for e in chosen if not self.methods or e.method in self.methods])
        return sorted(chosen, key=lambda e: self.methods.index(e.method)) if self.methods else chosen

    def shows(self, target: Target, logits: npt.ArrayLike) -> bool:
        """Whether a target is among the wished ones."""
        if not self.targets or ALL in self.targets or str(target) in self.targets:
            return True
        return PREDICTED in self.targets and is_predicted(target, logits, self.task)


@dataclass(frozen=True)
class DrawingJob:
    """One slide to draw: its explanations, and its file where there is one."""

    slide_id: str
    explanations: Path
    slide: Path | None = None
    fault: str = ""  # why the slide cannot be used
    drawn: str = ""  # what the files held when they were drawn last


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


def cohort_scales(run: SavedRun, order: Order) -> dict[str, Scale]:
    """One scale for each method, over all slides and targets; files that cannot be read are passed over."""
    held: dict[str, list[Explanation]] = {}
    for path in run.files.values():
        try:
            chosen = order.select(read_explanations(path))
        except XmilError:  # it is reported when its turn comes
            continue
        for e in chosen:
            held.setdefault(e.method, []).append(replace(e, patches=Patches(), relevance=None))
    look = order.look
    return {
        method: pooled(
            (e.scores for e in several),
            signed=several[0].signed,
            clip=look.clip,
            percentile=look.percentile,
            colours=look.colours.get(several[0].signed),
        )
        for method, several in held.items()
    }


def with_targets(run: SavedRun, order: Order) -> SavedRun:
    """The slides that have a wished method and target; an error where none has."""
    if not order.targets and not order.methods:
        return run
    held = {name: _columns(path) for name, path in run.files.items()}
    methods = {method for columns in held.values() for method, _, _ in columns}
    targets = {str(target) for columns in held.values() for _, target, _ in columns}
    for kind, given, known in (
        ("method", order.methods, methods),
        ("target", order.targets, targets | {PREDICTED, ALL}),
    ):
        for name in given:
            if methods and name not in known:
                raise unknown_name(kind, name, known)
    chosen = {
        name: run.files[name]
        for name, columns in held.items()
        if not columns or any(order.shows(target, logits) for _, target, logits in columns)
    }
    if not chosen:
        raise InputError(f"{run.folder}: no slide has an explanation of {', '.join(order.targets)}.")
    return replace(run, files=chosen)


def _columns(path: Path) -> list[tuple[str, Target, Sequence[float]]]:
    """Methods, targets and logits of a file; none where it cannot be read: that is reported in its turn."""
    try:
        held = read_header(path)["columns"].values()
        return [(about["method"], Target(**about["target"]), about["logits"]) for about in held]
    except (XmilError, KeyError, TypeError):
        return []


def make_drawer(
    run: SavedRun,
    order: Order,
    out: Path,
    *,
    restart: bool = False,
    slides: Path | None = None,
    full_digests: bool = False,
) -> Callable[[DrawingJob], Drawn]:
    """The function that draws one slide; `slides` is the folder that must hold it."""

    def drawer(job: DrawingJob) -> Drawn:
        if job.fault:
            raise InputError(job.fault)
        if slides is not None and job.slide is None:
            why = f"no slide named {job.slide_id!r} in this folder"
            raise InputError(f"{slides}: {why}; put it there, or draw without --slides.")
        if job.explanations.is_symlink():
            raise InputError(f"{job.explanations}: a link; a run's folder is read without following links.")
        files = [job.explanations, *run.pairs(job.slide_id)]
        files += [] if job.slide is None else [job.slide]
        source = " ".join(identity(path, full=full_digests) for path in files)
        changed = job.drawn != source  # not recorded: a kill came between; the clock is not asked
        return replace(draw_slide(job, run, order, out, restart=restart or changed), source=source)

    return drawer


def draw_slide(job: DrawingJob, run: SavedRun, order: Order, out: Path, *, restart: bool = False) -> Drawn:
    """Draw what is not there yet, or is older than the explanations."""
    from xmil.slides.open import open_slide

    explanations = order.select(read_explanations(job.explanations))
    if not explanations:
        raise InputError(f"{job.explanations}: holds no explanation of {', '.join(order.targets)}.")
    pairs = _pairs(run, job.slide_id, explanations) if order.look.pairs else []
    sources = [job.explanations, *run.pairs(job.slide_id)]
    changed = max(path.stat().st_mtime_ns for path in sources)
    files = [*_files(job, explanations, order, out), *_pair_files(job, pairs, order, out)]
    due = [file for file in files if restart or not _current(file.path, changed)]
    beyond = _beyond(explanations, order)
    if not due:
        return Drawn(kept=len(files), beyond=beyond)
    caption = run.caption(job.slide_id, explanations)
    held: Any = nullcontext(None) if job.slide is None else open_slide(job.slide, order.mpp)
    with held as slide:
        scales = {e.column: order.scales[e.method] for e in explanations if e.method in order.scales}
        scene = Scene.of(
            [replace(e, bag=e.bag or job.slide_id) for e in explanations],
            slide,
            look=order.look,
            caption=caption,
            scales=scales,
            mpp=order.mpp,
            patch_size=order.patch_size,
            seen=any(file.kind in KINDS for file in due),
        ).joined(pairs)
        for file in due:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            _write(file, scene, order)
    note = scene.note or _spelt_out(due, scene)
    return Drawn(len(due), len(files) - len(due), note, beyond=beyond)


def _beyond(explanations: Sequence[Explanation], order: Order) -> float:
    """The largest share of patches beyond the scale, where scores are drawn as colours."""
    if not {*order.pictures, *order.exports} & {*KINDS, "colours"}:
        return 0.0
    scales = [order.scales.get(e.method) or order.look.scale(e) for e in explanations if len(e)]
    shown = [e for e in explanations if len(e)]
    return max((scale.share_beyond(e.scores) for scale, e in zip(scales, shown, strict=True)), default=0.0)


def _spelt_out(due: Sequence[File], scene: Scene) -> str | None:
    """A word on names that no font here draws, where pictures show them."""
    names = [scene.caption.name, *(str(e.target) for e in scene.explanations)]
    return spelt_out("".join(names)) if any(file.kind in KINDS for file in due) else None


@dataclass(frozen=True)
class File:
    """One file to write: its kind, its format, and which explanation it shows, None for all."""

    kind: str
    format: str
    path: Path
    column: str | None = None
    target: Target | None = None  # of interactions


def _files(job: DrawingJob, explanations: Sequence[Explanation], order: Order, out: Path) -> Iterator[File]:
    """Every file of a slide: `<kind>/<slide>[.<method>.<target>].<suffix>`."""
    pictures = [kind for kind in order.pictures if job.slide is not None or kind not in NEED_SLIDE]
    for kind in (*pictures, *order.exports):
        drawn = ("png",) if kind == "map" else order.formats
        suffixes = drawn if kind in pictures else (EXPORTS[kind].suffix,)
        for suffix in suffixes:
            if kind in EACH if kind in pictures else EXPORTS[kind].each:
                for e in explanations:
                    name = f"{job.slide_id}.{_safe(e.method)}.{_safe(str(e.target))}.{suffix}"
                    yield File(kind, suffix, out / kind / name, e.column)
            else:
                yield File(kind, suffix, out / kind / f"{job.slide_id}.{suffix}")


def _pairs(run: SavedRun, slide_id: str, explanations: Sequence[Explanation]) -> list[Interactions]:
    """The interactions that the run has of a slide, for the targets that are drawn."""
    targets = {e.target for e in explanations}
    found = [Interactions.load(path) for path in run.pairs(slide_id)]
    return [pairs for pairs in found if pairs.target in targets]


def _pair_files(job: DrawingJob, pairs: Sequence[Interactions], order: Order, out: Path) -> Iterator[File]:
    """Lines for QuPath, `pairs/<slide>.<target>.geojson`, beside the patches' own."""
    for each in pairs if {"geojson", "qupath"} & set(order.exports) else ():
        name = f"{job.slide_id}.{_safe(str(each.target))}.geojson"
        yield File(PAIRS, "geojson", out / PAIRS / name, target=each.target)


def _write(file: File, scene: Scene, order: Order) -> None:
    shown = [e for e in scene.explanations if file.column in (None, e.column)]
    if file.kind in KINDS:
        picture = draw(file.kind, scene if file.column is None else only(scene, shown[0]))
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
        given = Exported(tuple(shown), frame, task, scales, mpp=scene.mpp, downsample=order.downsample)
        EXPORTS[file.kind].write(file.path, given)


def _geojson(path: Path, given: Exported) -> None:
    write_geojson(path, given.explanations, origin=given.frame[:2], task=given.task)


def _table(path: Path, given: Exported) -> None:
    write_table(path, given.explanations, kind=path.suffix.removeprefix("."))


def _scores(path: Path, given: Exported) -> None:
    write_scores(path, given.explanations, _pyramid(given))


def _colours(path: Path, given: Exported) -> None:
    (e,) = given.explanations
    write_colours(path, e, given.scales[e.column], _pyramid(given))


def _pyramid(given: Exported) -> Pyramid:
    return Pyramid.of(given.frame, downsample=given.downsample, mpp=given.mpp)


EXPORTS.add("geojson", Export(_geojson, "geojson"))
EXPORTS.add("qupath", Export(write_qupath, "geojson.gz"))
EXPORTS.add("asap", Export(write_asap, "xml", each=True))
EXPORTS.add("dicom", Export(write_parametric_map, "map.dcm", each=True))
EXPORTS.add("dicom-annotations", Export(write_annotations, "annotations.dcm", each=True))
EXPORTS.add("scores", Export(_scores, "scores.ome.tif"))
EXPORTS.add("colours", Export(_colours, "colours.ome.tif", each=True))
EXPORTS.add("ome-zarr", Export(write_omezarr, "scores.ome.zarr"))
EXPORTS.add("spatialdata", Export(write_spatialdata, "zarr"))
EXPORTS.add("csv", Export(_table, "csv"))
EXPORTS.add("parquet", Export(_table, "parquet"))


def _current(path: Path, changed: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns >= changed


def _safe(name: str) -> str:
    """A name without spaces and what file systems refuse.

    >>> _safe("HPV+/-: yes")
    'HPV+_-__yes'
    """
    return re.sub(r'[<>:"/\\|?*\s\x00-\x1f]', "_", name)
