"""Feature files of many slides: find them, join them with a cohort, average and compare them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import KEPT, Background, background_of
from xmil.core.bag import Bag
from xmil.core.durable import is_inside
from xmil.core.errors import FileError, InputError, StrPath, XmilError, absent
from xmil.core.text import bare_name, counted, is_plain, shorten
from xmil.data.bags import open_bag, read_bag
from xmil.data.cohort import PATH, Cohort
from xmil.data.containers.stores import is_bag_folder
from xmil.data.header import FEATURE_SUFFIXES, Header, slide_name


@dataclass(frozen=True)
class JoinReport:
    """Mismatches: slides without features, files without a row, duplicates, links not followed."""

    matched: int
    without_features: tuple[str, ...] = ()
    without_row: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    not_followed: tuple[str, ...] = ()

    def __str__(self) -> str:
        mismatches = {
            "slides without features": self.without_features,
            "feature files without a row": self.without_row,
            "slides with several files, of which the first was used": self.doubled,
            "links not followed (out of the folder, or to a device; see `follow_links=`)": self.not_followed,
        }
        parts = [f"{len(names)} {what}: {shorten(names, 5)}" for what, names in mismatches.items() if names]
        return "; ".join([f"{counted(self.matched, 'slide')} matched", *parts]) + "."


def feature_files(folder: StrPath, *, follow_links: bool = True) -> tuple[list[Path], list[Path]]:
    """List the feature files of a folder by name, and the links that were left out.

    Links to a device or pipe are left out, and without `follow_links` also links out of the folder. Broken
    or circular links are listed; reading them fails. For a feature file, or a store that is a folder, return
    the path itself.
    """
    root = Path(folder)
    if root.is_file() or (root.is_dir() and (root.name.lower().endswith(".zarr") or _is_bag(root))):
        return [root], []
    if not root.is_dir():
        raise FileError(absent(root, "folder or file of features"))
    files = sorted(path for path in root.iterdir() if _is_feature_file(path))
    usable = [path for path in files if not _to_device(path) and (follow_links or is_inside(path, root))]
    return usable, sorted(set(files) - set(usable))


def join_features(
    cohort: Cohort, folder: StrPath, *, among: Cohort | None = None, follow_links: bool = True
) -> tuple[Cohort, JoinReport]:
    """Find the slides that have features, with the file in the column `path`, and report mismatches.

    If the cohort is part of a larger table, pass that as `among`: the report does not list its files. If
    `folder` is one feature file, the cohort reduces to its slide.

    A `path` column in the table is used relative to the folder; otherwise names must be equal except for
    image and feature suffixes.
    """
    files, links = feature_files(folder, follow_links=follow_links)
    by_name: dict[str, list[Path]] = {}
    for file in files:
        by_name.setdefault(slide_name(file), []).append(file)
    if files == [Path(folder)]:
        cohort = cohort.take(i for i, slide in enumerate(cohort.slides) if bare_name(slide) in by_name)
    paths = [
        next(iter(by_name.get(bare_name(slide), ())), None)
        if cell is None
        else _named(cell, Path(folder), follow_links=follow_links)
        for slide, cell in zip(cohort.slides, cohort.columns.get(PATH, (None,) * len(cohort)), strict=True)
    ]
    rows = [i for i, path in enumerate(paths) if path is not None]
    used = {path for path in paths if path is not None}
    named = {slide_name(path) for path in used} | {bare_name(slide) for slide in (among or cohort).slides}
    pairs = list(zip(cohort.slides, paths, strict=True))
    report = JoinReport(
        matched=len(rows),
        without_features=tuple(slide for slide, path in pairs if path is None),
        without_row=tuple(file.name for file in files if file not in used and slide_name(file) not in named),
        doubled=tuple(slide for slide, path in pairs if path and len(by_name.get(bare_name(slide), ())) > 1),
        not_followed=tuple(path.name for path in links),
    )
    check_feature_files(files, folder, links)
    if not len(cohort):
        raise InputError(f"{cohort.path or 'The cohort'}: has no rows; add one for each slide.")
    if not rows:
        raise InputError(f"{folder}: no feature file has the name of a slide in the cohort; {report}")
    return cohort.with_column(PATH, [path and str(path) for path in paths]).take(rows), report


def _named(cell: str, folder: Path, *, follow_links: bool) -> Path | None:
    path = Path(cell)
    if "\0" in cell or ".." in path.parts:
        raise InputError(f"The path {cell!r} in the cohort must not lead out of the folder by '..'.")
    full = path if path.is_absolute() else folder / path
    if not follow_links and not path.is_absolute() and full.exists() and not is_inside(full, folder):
        raise InputError(
            f"The path {cell!r} in the cohort is a link out of {folder}; name its target, or pass "
            "`follow_links=True`."
        )
    return full if full.exists() else None


def _is_feature_file(path: Path) -> bool:
    """Whether a file or store has a feature suffix; not for hidden files and Slideflow's index files."""
    name = path.name.lower()
    if not is_plain(path.name) or name.startswith(".") or ".index.np" in name:
        return False
    return name.endswith(FEATURE_SUFFIXES) or _is_bag(path)


def _to_device(path: Path) -> bool:
    """Whether a link leads to something other than a file or folder."""
    try:
        return path.is_symlink() and path.exists() and not path.is_file() and not path.is_dir()
    except (OSError, RuntimeError):  # links in a circle
        return False


def _is_bag(path: Path) -> bool:
    try:
        return is_bag_folder(path)
    except (FileError, OSError):  # a damaged or foreign file with a number for a name
        return False


LEVELS = 3  # depth of the search for folders
SHOWN = 12  # folders named in a hint


@dataclass(frozen=True)
class FeatureFolder:
    """A folder with feature files, their number, and the header of the first readable one."""

    path: Path
    files: int
    first: Header | None

    @property
    def has_features(self) -> bool:
        """Whether its files hold features, not only patches."""
        return self.first is not None and self.first.dim > 0

    @property
    def has_places(self) -> bool:
        """Whether its files have coordinates."""
        return self.first is not None and (self.first.coords is not None or self.first.raw_coords is not None)


def folders_below(path: Path) -> list[FeatureFolder]:
    """Find the nearest subfolders with feature files; those with features and coordinates come first."""
    folders = [FeatureFolder(folder, len(files), _first(files)) for folder, files in _below(path, LEVELS)]
    return sorted(
        folders, key=lambda folder: (not folder.has_features, not folder.has_places, str(folder.path))
    )


def only_folder(path: Path) -> Path | None:
    """The only subfolder that can be meant by a folder above it; None if it is ambiguous."""
    featured = [folder for folder in folders_below(path) if folder.has_features]
    placed = [folder for folder in featured if folder.has_places]
    # CLAM stores each slide twice: pt_files take their coordinates from h5_files
    candidates = [f for f in placed or featured if f.path.name != "pt_files"] or placed or featured
    return candidates[0].path if len(candidates) == 1 else None


def check_feature_files(files: Sequence[Path], folder: StrPath, links: Sequence[Path] = ()) -> None:
    """Refuse a folder without feature files, with the one that may be meant."""
    if not files:
        unread = f" ({len(links)} links not followed; see `follow_links=`)" if links else ""
        raise InputError(f"{folder}: no feature files in this folder{unread}; {folder_advice(Path(folder))}.")


def folder_advice(path: Path) -> str:
    """Suggest what to name instead of a folder without feature files."""
    folders = folders_below(path)
    if not folders:
        return "name the folder that holds them"
    if (folder := only_folder(path)) is not None:
        return f"use `features={str(folder)!r}`"
    options = [f"{f.path} ({counted(f.files, 'file')})" for f in folders if f.has_features]
    options = options or [f"{f.path} ({counted(f.files, 'file')}, without features)" for f in folders]
    return f"use `features=` with one of {shorten(options, SHOWN)}"


def is_features(path: Path) -> bool:
    """Whether a file, or the first file of a folder, holds features."""
    try:
        first = _first(feature_files(path)[0])
    except XmilError:
        return False
    return first is not None and first.dim > 0


def _below(path: Path, levels: int) -> Iterator[tuple[Path, list[Path]]]:
    try:
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return
    for folder in folders:
        files = feature_files(folder)[0]
        if files and files != [folder]:
            yield folder, files
        elif not files and levels > 1:
            yield from _below(folder, levels - 1)


def _first(files: list[Path]) -> Header | None:
    """The header of the first readable file."""
    for file in files[:3]:
        try:
            return open_bag(file)
        except (FileError, OSError):
            continue
    return None


MOST_FILES = 200  # of a folder; evenly spaced by name


def background(
    features: StrPath | Bag | Iterable[Any], *, keep: int = KEPT, seed: int = 0, files: int = MOST_FILES
) -> Background:
    """Compute the mean of many patches, and pick a few, to explain against; each slide counts equally.

    `features` is a folder or file of features, a bag, or several bags, files or arrays (n, d). From a folder,
    read at most `files`, evenly spaced by name. Set `model.background = background(...)` to save it with the
    model.

    >>> import numpy as np
    >>> background([np.zeros((3, 2)), np.ones((1, 2))]).mean.tolist()
    [0.5, 0.5]
    """
    bags: Any = features
    if isinstance(features, str | PathLike):
        bags = _spaced(feature_files(features)[0] if Path(features).is_dir() else [features], files)
    elif isinstance(features, Bag) or getattr(features, "ndim", 0) == 2:
        bags = [features]
    opened = (read_bag(bag) if isinstance(bag, str | PathLike) else bag for bag in bags)
    return background_of(opened, keep=keep, seed=seed)


def background_of_files(
    files: Sequence[Path], width: int, reading: Mapping[str, Any], *, most: int = MOST_FILES
) -> Background | None:
    """Compute the background of evenly spaced feature files; None if no file is readable.

    Skips unreadable files and those of another width; the run reports them.
    """

    def bags() -> Iterator[Bag]:
        for file in _spaced(files, most):
            with suppress(XmilError):
                bag = read_bag(file, **reading)
                if bag.features.shape[1] == width and len(bag) and np.isfinite(bag.features).all():
                    yield bag

    with suppress(InputError):
        return background_of(bags())
    return None


def _spaced(files: Sequence[Any], most: int) -> Sequence[Any]:
    """At most `most` of the files, evenly spaced."""
    return files[:: max(1, -(-len(files) // most))]


Facts = Mapping[str, Any]
CLOSE = 0.05  # smaller relative differences of mpp come from scanners and from rounding to whole pixels
_DIGEST = re.compile(r"sha256 ([0-9a-f]{8,64})")
_PHRASES = {
    "encoder": "{!r}",
    "weights": "an encoder with the weights {}",
    "patch_px": "patches of {} px",
    "mpp": "patches at {} µm/px",
    "stain_norm": "stain normalisation {}",
    "precision": "the precision {}",
}


def same_encoder(model: str | None, features: str | None) -> bool:
    """Whether two names mean the same encoder; None matches any.

    >>> same_encoder("UNI_v2", "uni-v2"), same_encoder("uni_v2", "conch_v15"), same_encoder(None, "uni")
    (True, False, True)
    """
    if model is None or features is None:
        return True
    a, b = ("".join(letter for letter in name.lower() if letter.isalnum()) for name in (model, features))
    return a == b


def feature_facts(source: Bag | Header) -> dict[str, Any]:
    """Collect what a file records about its features: encoder, weights, patch, mpp, stains, precision."""
    record = source.extra.get("encoder")
    record = record if isinstance(record, dict) else {}
    px, edge, mpp = source.extra.get("patch_size"), source.patch_size, source.mpp
    px = int(px) if isinstance(px, int | float) and px >= 1 else None
    weights = record.get("weights")
    if weights != "random":  # the digest in the encoder's description, if it has one
        match = _DIGEST.search(weights) if isinstance(weights, str) else None
        weights = match[1][:16] if match else None
    facts = {
        "encoder": source.encoder,
        "weights": weights,
        "patch_px": px,
        "mpp": round(edge * mpp / px, 4) if edge and mpp and px else None,
        "stain_norm": record.get("stain_norm"),
        "precision": record.get("precision"),
    }
    if (asked := record.get("asked")) != source.encoder and isinstance(asked, str):
        facts["asked"] = asked  # the name that the user gave, if the encoder's is shorter
    return {name: value for name, value in facts.items() if value is not None}


def differing(trained: Facts, features: Facts) -> list[str]:
    """The facts that differ between both; equal weights mean the same encoder under any name.

    >>> differing({"encoder": "uni", "weights": "a1"}, {"encoder": "mine", "weights": "a1"})
    []
    >>> differing({"encoder": "uni", "weights": "a1"}, {"encoder": "uni", "weights": "b2"})
    ['weights']
    """
    both = [name for name in _PHRASES if trained.get(name) is not None and features.get(name) is not None]
    differences = [name for name in both if not _same(name, trained[name], features[name])]
    if "weights" in both:
        differences = [name for name in differences if name != "encoder"]
    return differences


UNTRAINED = "The features come from an untrained encoder, for testing only: results on them mean nothing."


def is_untrained(trained: Facts, features: Facts) -> bool:
    """Whether the features come from an untrained encoder, unless the model was trained on such features."""
    return features.get("weights") == "random" and trained.get("weights") != "random"


def features_warning(trained: Facts, features: Iterable[Facts]) -> str | None:
    """Warn in one sentence if slides have other features than the model was trained on, else None.

    >>> print(features_warning({"encoder": "uni_v2"}, [{"encoder": "conch_v15"}, {"encoder": "UNI-v2"}]))
    The model was trained on features of 'uni_v2', but 1 slide has those of 'conch_v15': its outputs and
    explanations do not hold for them. Use features made as in training.
    """
    differences = Counter((name, facts[name]) for facts in features for name in differing(trained, facts))
    if not differences:
        return None
    parts = [
        f"of {_words(name, trained[name])}, but {n} slide{'s have' if n > 1 else ' has'} those of "
        f"{_words(name, value)}"
        for (name, value), n in differences.items()
    ]
    only_precision = all(name == "precision" for name, _ in differences)
    effect = "may differ slightly" if only_precision else "do not hold"
    return (
        f"The model was trained on features {'; and '.join(parts)}: its outputs and explanations {effect} "
        "for them. Use features made as in training."
    )


def _same(name: str, a: Any, b: Any) -> bool:
    if name == "encoder":
        return same_encoder(str(a), str(b))
    if name == "mpp":
        return bool(abs(float(a) - float(b)) <= CLOSE * max(float(a), float(b)))
    return bool(a == b)


def _words(name: str, value: Any) -> str:
    shown = {True: "on", False: "off"}.get(value, value) if name == "stain_norm" else value
    return _PHRASES[name].format(shown)
