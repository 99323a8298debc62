"""The slides of a run: files and folders of slides, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path

from xmil.core.absence import absent
from xmil.core.errors import InputError
from xmil.slides.open import Found, slide_files, sort_slides

StrPath = str | PathLike[str]


def named_slides(
    given: StrPath | Sequence[StrPath],
    *,
    follow_links: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Slides by id, of files and of folders; says which pictures and links are left out."""
    paths = [Path(given)] if isinstance(given, str | PathLike) else [Path(path) for path in given]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise InputError(absent(missing[0], "file or folder"))
    files, links = [path for path in paths if not path.is_dir()], []
    for folder in (path for path in paths if path.is_dir()):
        inside, left = slide_files(folder, follow_links=follow_links)
        files += inside
        links += left
    found = sort_slides(dict.fromkeys(files))
    for path in links:
        say(f"{path}: a link that was not followed (broken, in a circle, or without --follow-links).")
    if not found.slides and not found.twice:
        named = ", ".join(map(str, paths))
        raise InputError(f"{named}: no slides here; name slide files, or the folder that holds them.")
    for path in found.beside:
        say(f"{path}: left out, as a slide of this name is there too.")
    return found
