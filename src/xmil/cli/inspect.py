"""`xmil inspect`: what files and folders are, what was inferred, what is missing, what to do."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.core.errors import FileError, XmilError

if TYPE_CHECKING:
    from xmil.data.inspection import Report

logger = logging.getLogger(__name__)

Files = Annotated[
    list[Path], typer.Argument(help="Feature files, checkpoints, slides, tables, explanations, folders.")
]


def inspect(
    files: Files,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry per path.")] = False,
    layout: Annotated[
        str, typer.Option("--format", help="Layout of the file, if it cannot be recognised.")
    ] = "auto",
    mpp: Annotated[float | None, typer.Option(help="Microns per level-0 pixel of the slide.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="Patch edge in level-0 pixels.")] = None,
) -> None:
    """Say what feature files, checkpoints, slides, cohorts, explanations and runs are, and what they lack."""
    from xmil.cli._next_step import compared, next_command
    from xmil.cli._report import as_text

    options = {"format": layout, "mpp": mpp, "patch_size": patch_size}
    results = compared([_inspected(path, options) for path in files])
    if as_json:
        print(json.dumps(results, indent=2, default=str))
    else:
        for result in results:
            print(as_text(result), file=sys.stderr if "error" in result else sys.stdout)
        following = next_command(results, options)
        if following:
            print(f"Next: {following}")
    failed = sum("error" in result for result in results)
    if failed:
        raise typer.Exit(2 if failed == len(results) else 1)


def _inspected(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return report(path, options).as_dict()
    except XmilError as error:
        logger.debug("where %s failed:", path, exc_info=True)  # seen with --debug
        return {"path": str(path), "kind": "unknown", "error": str(error)}


def report(path: Path, options: dict[str, Any]) -> Report:
    """The report on one path, whatever it is."""
    from xmil.data.containers import sniff
    from xmil.data.inspection import inspect_features

    kind = sniff(path)
    if kind == "folder":
        return _folder(path, options)
    if kind == "pt":
        return _torch_file(path, options)
    if kind == "safetensors":
        return _checkpoint(path)
    if kind in ("csv", "parquet"):
        return _table(path, kind, options)
    if kind == "image" or (kind == "unknown" and path.suffix.lower() not in (".pkl", ".pickle")):
        return _slide(path)
    return inspect_features(path, **options)


def _slide(path: Path) -> Report:
    """A slide or picture; a file that is none, and is not named like one, is of no kind at all."""
    from xmil.cli._slide import inspect_slide
    from xmil.core.names import SLIDE_SUFFIXES

    try:
        return inspect_slide(path)
    except FileError:
        if path.name.lower().endswith(SLIDE_SUFFIXES):
            raise
        known = "features, a checkpoint, a table, an explanation or a slide"
        raise FileError(f"{path}: not {known}, or damaged; copy it again, or name another file.") from None


def _folder(path: Path, options: dict[str, Any]) -> Report:
    from xmil.cli._slide import inspect_slides, slide_files
    from xmil.data.containers.folderstore import is_bag_folder
    from xmil.data.inspection import inspect_cohort, inspect_features, inspect_folder, inspect_run
    from xmil.data.join import feature_files
    from xmil.data.tables import is_metadata
    from xmil.models.checkpoints.files import IN_FOLDER

    made_by = _made_by(path)
    if made_by == "tile":
        return _with_features(inspect_folder(path / "patches", **options), path)
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


def _with_features(patches: Report, folder: Path) -> Report:
    """The report on a folder's patches, with where their features are."""
    from xmil.data.whereabouts import folders_below

    several = [str(each.path) for each in folders_below(folder) if each.has_features]
    if not several:
        return patches
    facts = {**patches.facts, "features in": several[0] if len(several) == 1 else None}
    told = (f"features are in {' and '.join(several)}; inspect the one that is meant",) * (len(several) > 1)
    return replace(patches, facts=facts, problems=(*patches.problems, *told))


def _made_by(folder: Path) -> str | None:
    """The command whose run a folder holds, where it says so."""
    from xmil.core.runfiles import read_run

    try:
        return str((read_run(folder) or {}).get("kind"))
    except XmilError:
        return None


def _torch_file(path: Path, options: dict[str, Any]) -> Report:
    from xmil.data.inspection import inspect_features

    try:
        return inspect_features(path, **options)
    except FileError as not_features:
        try:
            return _checkpoint(path)
        except XmilError:
            if "unknown layout" in str(not_features):  # tensors, but no bag: say what the checkpoint lacks
                raise
            raise not_features from None


def _checkpoint(path: Path) -> Report:
    from xmil.data.inspection import Report
    from xmil.models.checkpoints import describe_checkpoint

    found = describe_checkpoint(path)
    notes = (*found.pop("notes"), *found.pop("warnings"))
    found.pop("path", None)
    return Report(
        str(path), "checkpoint", f"a checkpoint of the family {found.get('family')}", found, inferred=notes
    )


def _table(path: Path, kind: str, options: dict[str, Any]) -> Report:
    """A Parquet file is an explanation or a cohort; a CSV a cohort or WSInfer's boxes."""
    from xmil.data.inspection import inspect_cohort, inspect_explanation, inspect_features

    first = inspect_explanation if kind == "parquet" else inspect_cohort
    try:
        return first(path)
    except XmilError as error:
        try:
            return inspect_cohort(path) if kind == "parquet" else inspect_features(path, **options)
        except XmilError:
            raise error from None
