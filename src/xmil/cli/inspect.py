"""`xmil inspect`: what files and folders are, what was inferred, what is missing, what to do."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, as_text
from xmil.core.errors import FileError, XmilError
from xmil.core.registry import is_function_name
from xmil.core.request import Request, option
from xmil.core.text import SLIDE_SUFFIXES, bare_name, is_plain

if TYPE_CHECKING:
    from xmil.data.inspection import Report

logger = logging.getLogger(__name__)
Result = dict[str, Any]
SLIDE_MPP = "pass --slide-mpp to xmil tile, or --mpp to xmil explain"


class InspectRequest(Request):
    """Say what files and folders are."""

    files: tuple[Path, ...] = option(
        "Feature files, checkpoints, slides, tables, explanations, folders.", argument=True
    )
    format: str = option("Layout of the file, if it cannot be recognised.", "auto")
    mpp: float | None = option("Microns per level-0 pixel of the slide.", None)
    patch_size: int | None = option("Patch edge in level-0 pixels.", None)
    slide_column: str | None = option(
        "Column of a table that names the slides, if it is not found by its name.", None
    )


@with_examples("inspect features model.pt slide.svs", "inspect cohort.csv run --json")
@command(InspectRequest)
def inspect(request: InspectRequest, screen: Screen) -> int:
    """Say what files and folders are, and what they lack: features, models, slides, tables, runs."""
    options = {"format": request.format, "mpp": request.mpp, "patch_size": request.patch_size}
    results: list[Result] = []
    for path in request.files:
        try:
            results.append(report(path, options, slide_column=request.slide_column).as_dict())
        except XmilError as error:
            logger.debug("where %s failed:", path, exc_info=True)  # seen with --debug
            results.append({"path": str(path), "kind": "unknown", "error": screen.words(str(error))})
    results = with_misfits(results)
    if screen.as_json:
        print(json.dumps(results, indent=2, default=str))
    else:
        for result in results:
            print(as_text(result, screen.words), file=sys.stderr if "error" in result else sys.stdout)
        following = next_command(results, options)
        if following:
            print(f"Next: {following}")
    failed = sum("error" in result for result in results)
    if not failed:
        return 0
    return 2 if failed == len(results) else 1


def report(path: Path, options: dict[str, Any], *, slide_column: str | None = None) -> Report:
    """Report on one path of any kind."""
    from xmil.data.containers import sniff
    from xmil.data.inspection import inspect_features

    if is_function_name(str(path)) and not path.exists():
        raise FileError(
            f"{path}: a function that builds a model, which inspect does not call; `xmil explain` tests it "
            "on the first feature file."
        )
    kind = sniff(path)
    if kind == "folder":
        return _folder(path, options)
    if kind == "pt":
        try:
            return inspect_features(path, **options)
        except FileError as not_features:
            try:
                return _checkpoint(path)
            except XmilError:
                if "unknown layout" in str(not_features):  # tensors, but not a bag: report it as a checkpoint
                    raise
                raise not_features from None
    if kind == "safetensors":
        return _checkpoint(path)
    if kind in ("csv", "parquet"):
        return _table(path, kind, options, slide_column)
    if kind == "image" or (kind == "unknown" and path.suffix.lower() not in (".pkl", ".pickle")):
        return _slide(path)
    return inspect_features(path, **options)


def _slide(path: Path) -> Report:
    """Report on a slide or picture; any other file, unless named like one, is of unknown kind."""
    try:
        return inspect_slide(path)
    except FileError:
        if path.name.lower().endswith(SLIDE_SUFFIXES):
            raise
        raise FileError(
            f"{path}: not features, a checkpoint, a table, an explanation or a slide, or damaged; copy it "
            "again, or name another file."
        ) from None


def _folder(path: Path, options: dict[str, Any]) -> Report:
    from xmil.data.cohort import is_metadata
    from xmil.data.containers.stores import is_bag_folder
    from xmil.data.files import feature_files, folders_below
    from xmil.data.inspection import inspect_cohort, inspect_features, inspect_folder, inspect_run
    from xmil.models.checkpoints.files import IN_FOLDER
    from xmil.storage import read_run

    made_by = None
    with suppress(XmilError):
        made_by = (read_run(path) or {}).get("kind")
    if made_by == "tile":
        patches = inspect_folder(path / "patches", **options)
        several = [str(each.path) for each in folders_below(path) if each.has_features]
        if not several:
            return patches
        facts = {**patches.facts, "features in": several[0] if len(several) == 1 else None}
        which = f"features are in {' and '.join(several)}; inspect one of them"
        problems = (*patches.problems, which) if len(several) > 1 else patches.problems
        return replace(patches, facts=facts, problems=problems)
    if made_by == "embed":
        return inspect_folder(path, **options)
    if (path / "run.json").is_file() or any(path.glob("slides/*.parquet")):
        return inspect_run(path)
    if any((path / name).is_file() for name in IN_FOLDER):
        return _checkpoint(path)
    if is_metadata(path):
        return inspect_cohort(path)
    if is_bag_folder(path):
        return inspect_features(path, **options)
    if slide_files(path) and not feature_files(path)[0]:
        return inspect_slides(path)
    return inspect_folder(path, **options)


def _checkpoint(path: Path) -> Report:
    from xmil.data.inspection import Report
    from xmil.models.checkpoints import describe_checkpoint

    facts = describe_checkpoint(path)
    notes = (*facts.pop("notes"), *facts.pop("warnings"))
    facts.pop("path", None)
    return Report(
        str(path), "checkpoint", f"a checkpoint of the family {facts.get('family')}", facts, inferred=notes
    )


def _table(path: Path, kind: str, options: dict[str, Any], slide_column: str | None) -> Report:
    """Report on a Parquet file (explanation or cohort) or CSV (cohort or WSInfer's boxes)."""
    from xmil.data.inspection import inspect_cohort, inspect_explanation, inspect_features

    as_cohort = partial(inspect_cohort, path, slide_column=slide_column)
    first, second = as_cohort, partial(inspect_features, path, **options)
    if kind == "parquet":
        first, second = partial(inspect_explanation, path), as_cohort
    try:
        return first()
    except XmilError:
        with suppress(XmilError):
            return second()
        raise


def inspect_slide(path: Path) -> Report:
    """Report dimensions, pyramid levels and mpp of a slide, and the option to set if mpp is not stored."""
    from xmil.data.inspection import Report
    from xmil.slides import open_slide

    with open_slide(path) as slide:
        whole_slide = (0, 0, *slide.dimensions)
        facts: dict[str, Any] = {
            "read by": slide.backend,
            "size": [list(slide.dimensions)],
            "levels": [list(size) for size in slide.level_dimensions],
            "downsamples": [round(scale, 4) for scale in slide.level_downsamples],
            "mpp": slide.mpp,
            "mpp from": slide.mpp_source,
            "objective power": slide.magnification,
            "bounds": None if slide.bounds == whole_slide else list(slide.bounds),
        }
    why = f"its pixels are {facts['mpp from']}" if facts["mpp from"] else "mpp is not stored"
    missing = () if facts["mpp"] else (f"for patches of a known size: {why}; {SLIDE_MPP}",)
    return Report(str(path), "slide", f"a slide ({facts['read by']})", facts, missing=missing)


def slide_files(folder: Path) -> list[Path]:
    """List the files of a folder with a slide's or image's suffix, by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.lower().endswith(SLIDE_SUFFIXES) and not path.name.startswith(".") and path.is_file()
    )


def inspect_slides(folder: Path) -> Report:
    """Report on a folder of slides: a row each, with size and mpp, and what is missing or unreadable."""
    from xmil.data.inspection import Report

    rows = tuple(_row(path) for path in slide_files(folder))
    good = [row for row in rows if "error" not in row]
    lacking = sum(row["mpp"] is None for row in good)
    facts = {"slides": len(rows), "read by": dict(Counter(row["read by"] for row in good))}
    missing = f"for patches of a known size: mpp is not stored in {lacking} of {len(good)}; {SLIDE_MPP}"
    unread = len(rows) - len(good)
    return Report(
        str(folder),
        "folder",
        "a folder of slides",
        facts,
        missing=(missing,) if lacking else (),
        problems=(f"{unread} files cannot be read",) if unread else (),
        rows=rows,
    )


def _row(path: Path) -> dict[str, Any]:
    try:
        facts = inspect_slide(path).facts
    except FileError as error:
        return {"file": path.name, "error": str(error)}
    return {"file": path.name, "size": facts["size"][0], "mpp": facts["mpp"], "read by": facts["read by"]}


def with_misfits(results: list[Result]) -> list[Result]:
    """Add problems to the results if features match no model, or slides match no features."""
    models = [result for result in results if result["kind"] == "checkpoint"]
    features = [result for result in results if _features_in(result) is not None]
    faults = [_misfit(result, models) or _nameless(result, features) for result in results]
    return [
        {**result, "problems": (*result["problems"], fault)} if fault else result
        for result, fault in zip(results, faults, strict=True)
    ]


def next_command(results: list[Result], options: dict[str, Any]) -> str:
    """Write the next command if the features are known; capitals stand for unknown arguments."""
    from xmil.cli._screen import command_line

    models = [result for result in results if result["kind"] == "checkpoint"]
    slides = [result for result in results if _holds_slides(result)]
    features = [result for result in results if _features_in(result) is not None]
    for result in features:
        fitting = [model for model in models if not _misfit(result, [model])]
        facts = result["facts"]
        if not facts.get("NaN") and not facts.get("infinite") and (fitting or not models):
            more = {name: value for name, value in options.items() if value not in (None, "auto")}
            words = [
                word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))
            ]
            model = fitting[0]["path"] if fitting else "MODEL"
            shown = next((each["path"] for each in slides if not _nameless(each, [result])), None)
            out = ["--out", "run"] if shown or result["kind"] != "features" else []
            out += ["--slides", shown] if shown else []
            where = str(_features_in(result))
            return command_line("xmil", "explain", "--model", model, "--features", where, *out, *words)
    if features or any("features in" in result.get("facts", {}) for result in results):
        return ""  # they do not match, or the user must choose one of several
    folders = [result for result in results if result["kind"] == "folder"]
    if patches := [result for result in folders if result.get("facts", {}).get("instances")]:
        return embedding(Path(patches[0]["path"]), slides[0]["path"] if slides else None)
    if slides and models:
        from xmil.runs.slide_features import list_unrecorded

        facts = models[0]["facts"]
        flags = {
            "encoder": ("--encoder", "ENCODER"),
            "tile_size": ("--tile-size", "PIXELS"),
            "tile_mpp": ("--tile-mpp", "MICRONS"),
        }
        unknown = [flags[name] for name in list_unrecorded({**facts, **(facts.get("features") or {})})]
        words = ["--model", models[0]["path"], "--slides", slides[0]["path"], *sum(unknown, ())]
        return command_line("xmil", "explain", *words, "--out", "run")
    return command_line("xmil", "tile", slides[0]["path"], "--out", "tiles") if slides else ""


def embedding(tiles: Path, slides: object = None) -> str:
    """Write the command that encodes patches; only the user knows the encoder."""
    from xmil.cli._screen import command_line

    folder = tiles.parent if tiles.name == "patches" else tiles
    words = command_line(
        "xmil", "embed", "--tiles", folder, "--slides", slides or "SLIDES", "--encoder", "ENCODER"
    )
    return f"{words}  # the model's encoder: resnet50, ctranspath, uni, ..."


def _misfit(result: Result, models: list[Result]) -> str | None:
    """Write a sentence if no model reads features of this width."""
    reads = {int(model["facts"]["in_dim"]): model["path"] for model in models}
    widths = _widths(result)
    if not widths or not reads or widths & set(reads):
        return None
    wide = " and ".join(map(str, sorted(widths)))
    expected = ", ".join(f"{path} reads {width}" for width, path in reads.items())
    return f"the features have width {wide}, but {expected}; name features of the model's encoder"


def _nameless(result: Result, features: list[Result]) -> str | None:
    """Write a sentence if no slide of a folder has the name of a feature file."""
    slides = {_bare(row["file"]) for row in result.get("rows", ())} if _holds_slides(result) else set()
    named = {name for each in features for name in _names(each)}
    if not slides or not named or slides & named:
        return None
    return (
        f"no slide has the name of a feature file ({min(slides)} is a slide, {min(named)} has features); "
        "rename them to match"
    )


def _names(result: Result) -> set[str]:
    from xmil.data.header import slide_name

    files = [row["file"] for row in result["rows"]] or [Path(str(_features_in(result))).name]
    below = "features in" in result["facts"]  # its own files are ignored
    return set() if below else {_bare(slide_name(Path(file))) for file in files}


def _bare(name: str) -> str:
    return bare_name(name) if is_plain(name) else name


def _widths(result: Result) -> set[int]:
    from xmil.data import feature_files, open_bag

    where, facts = _features_in(result), result.get("facts", {})
    if where is None:
        return set()
    if "features in" not in facts:
        return _wide(facts["width"])
    try:  # of the folder's first file, if it can be read
        return {open_bag(path).dim for path in feature_files(where)[0][:1]} - {0}
    except XmilError:
        return set()


def _wide(width: Any) -> set[int]:
    """Collect the widths of one or several files; patches without features have none."""
    return {int(key) for key in (width if isinstance(width, dict) else [width or 0])} - {0}


def _holds_slides(result: Result) -> bool:
    return result["kind"] == "folder" and {"slides", "read by"} <= set(result.get("facts", {}))


def _features_in(result: Result) -> str | None:
    """Find the features to explain in an inspected path."""
    facts = result.get("facts", {})
    if "features in" in facts:
        return str(facts["features in"]) if facts["features in"] else None
    holds = result["kind"] in ("features", "folder") and _wide(facts.get("width"))
    return str(result["path"]) if holds and facts.get("instances") else None
