"""The built page, and static copies of the viewer: page, data and tiles as files for any web server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.durable import write_bytes, write_text
from xmil.core.errors import InputError, XmilError, not_made
from xmil.core.text import parse_json
from xmil.viewer.cache import to_json
from xmil.viewer.collection import Collection
from xmil.viewer.deepzoom import TILE
from xmil.viewer.server import POLICY
from xmil.viewer.wall import CohortWall

MARK = "xmil-export.json"  # lists what was written, so that only files of an export are replaced
STATIC = Path(__file__).parent / "static"
NOT_BUILT = (
    "The viewer's page is not built; install the package (pip install .), or build it in a checkout: "
    "npm ci && npm run build, in the folder page"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpeg": "image/jpeg",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
Progress = Callable[[str, int, int], None]


def export(
    collection: Collection,
    folder: Path,
    *,
    longest: int | None = None,
    page: Path = STATIC,
    on_slide: Progress = lambda *_: None,
) -> dict[str, str]:
    """Write a static copy; return the slides that failed, with the reason.

    `longest` bounds the longer edge of the pictures in pixels. The page is written last, so that an
    interrupted export does not open. A folder with other files is refused.
    """
    if longest is not None and longest < 1:
        raise InputError(f"The longer edge of exported pictures must be at least 1 px. Got {longest}.")
    files = {name: file for name, file in page_files(page).items() if not file.name.startswith("study")}
    if not files:
        raise InputError(NOT_BUILT)
    _prepare(folder, sorted({name.split("/")[0] for name in files} | {"api", "tiles"}))
    about = collection.overview(live=False)
    failed: dict[str, str] = {}
    for line in about["slides"]:
        error = _write_slide(collection, folder, line["key"], longest)
        if error:
            failed[line["id"]] = line["error"] = error
        on_slide(line["id"], line["key"] + 1, len(about["slides"]))
    _write_cohort(collection, folder / "api")
    _put(folder / "api" / "run.json", to_json(about))
    for name in sorted(files, key=lambda name: name == "index.html"):
        content = files[name].read_bytes()
        _put(folder / name, _guarded(content) if name == "index.html" else content)
    return failed


def _guarded(page: bytes) -> bytes:
    """Add the policy to the page that the server would send as a header."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'.encode()
    head, tag, rest = page.partition(b"<head>")
    return head + tag + policy + rest if tag else policy + page


def _write_cohort(collection: Collection, place: Path) -> None:
    """Write the data of the list and the wall: scales, small maps, the strongest patches of each run."""
    wall = CohortWall(collection)
    for run in range(len(collection.runs)):
        columns = wall.columns(run)
        _put(place / f"columns-{run}.json", to_json(columns))
        _put(place / f"scales-{run}.json", to_json(wall.scales(run)))
        for column in range(len(columns["columns"])):
            strongest = wall.wall(run, column)
            _put(place / f"wall-{run}-{column}.json", to_json(strongest))
            sides = (group[side] for group in strongest["groups"] for side in ("supporting", "refuting"))
            for patch in (patch for side in sides for patch in side):
                path = place / "slides" / str(patch["key"]) / f"patch-{run}-{patch['index']}.jpeg"
                with suppress(XmilError):  # a slide without a picture
                    _put(path, collection.patch(patch["key"], run, patch["index"]))
            for key, evidence in collection.readable(run) if run == 0 else ():
                with suppress(XmilError):
                    if evidence.coords is not None:
                        small = wall.small(key, run, column)
                        _put(place / "slides" / str(key) / f"small-{run}-{column}.png", small)


def _prepare(folder: Path, names: list[str]) -> None:
    """Remove an earlier export; refuse a folder with other files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputError(not_made(folder, error, "folder")) from None
    try:
        old = [str(name) for name in parse_json((folder / MARK).read_text(encoding="utf-8"))["written"]]
    except (OSError, ValueError, KeyError, TypeError):
        old = []
    foreign = [name for name in present if name not in (*old, MARK)]
    if foreign:
        raise InputError(f"{folder}: contains files of no export ({foreign[0]}); choose another folder.")
    for path in (folder / name for name in present if name != MARK):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    write_text(folder / MARK, json.dumps({"version": __version__, "written": names}) + "\n")


def _write_slide(collection: Collection, folder: Path, key: int, longest: int | None) -> str | None:
    """Write a slide's facts, scores and pictures; return the reason if part of it failed."""
    about = collection.describe(key)
    place = folder / "api" / "slides" / str(key)
    error: str | None = about["error"]
    layers = {"pairs": collection.pairs, "concepts": collection.concepts, "inside": collection.inside}
    for entry in about["sets"]:
        run = entry["run"]
        _put(place / f"evidence-{run}.bin", collection.scores(key, run))
        for name, layer in layers.items():
            if entry[name]:
                _put(place / f"{name}-{run}.json", to_json(layer(key, run)))
        for k in range(collection.concept_maps(key, run).values.shape[1] if entry["concepts"] else 0):
            _put(place / f"concept-{run}-{k}.bin", collection.concept(key, run, k))
    if (image := about["image"]) is not None:
        edge, full = max(image["width"], image["height"]), image["levels"] - 1
        while longest is not None and image["finest"] and -(-edge >> (full - image["finest"])) > longest:
            image["finest"] -= 1
        try:
            _write_pictures(collection, folder, key, image)
        except XmilError as fault:
            about["image"], error = None, str(fault)
            shutil.rmtree(folder / "tiles" / str(key), ignore_errors=True)
    _put(place / "slide.json", to_json({**about, "error": error}))
    return error


def _write_pictures(collection: Collection, folder: Path, key: int, image: dict[str, Any]) -> None:
    slide_id, pictures = collection.slide(key), collection.pictures
    _put(folder / "api" / "slides" / str(key) / "thumbnail.jpeg", pictures.thumbnail(slide_id))

    def write(number: tuple[int, int, int]) -> None:
        level, column, row = number
        place = folder / "tiles" / str(key) / str(level) / f"{column}_{row}.jpeg"
        _put(place, pictures.tile(slide_id, level, column, row))

    with ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        list(pool.map(write, tile_numbers(image)))


def tile_numbers(image: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Level, column and row of every tile.

    >>> list(tile_numbers({"width": 300, "height": 200, "levels": 10, "finest": 9}))[-2:]
    [(9, 0, 0), (9, 1, 0)]
    """
    for level in range(image["finest"] + 1):
        scale = TILE << (image["levels"] - 1 - level)
        columns, rows = (-(-image[side] // scale) for side in ("width", "height"))
        yield from ((level, column, row) for column in range(columns) for row in range(rows))


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content)


def page_files(folder: Path = STATIC) -> dict[str, Path]:
    """The page's files by their address below the page; empty if it is not built."""
    if not (folder / "index.html").is_file():
        return {}
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path for path in files}


def content_type(name: str) -> str:
    """The media type of a file of the page."""
    return TYPES.get(Path(name).suffix.lower(), "application/octet-stream")
