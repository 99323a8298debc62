"""What stands where a file or a folder was expected, in words: a missing name, a broken link, a folder."""

from __future__ import annotations

import errno
import os
import stat
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

LISTED = 10_000  # names of a folder among which a near one is looked for
SPECIAL = "cannot be read (a pipe, socket or device, not a file)."


def absent(path: str | PathLike[str], what: str = "file") -> str:
    """Why a path is not the file, the folder or the "file or folder" that was asked for, and the way out.

    >>> print(absent("nowhere.pt"))
    nowhere.pt: no such file.
    >>> print(absent("/"))
    /: a folder, where a file is needed; name a file in it.
    """
    place = Path(path)
    try:
        kind = os.stat(place).st_mode
    except (OSError, ValueError) as error:
        return f"{place}: {_leads_nowhere(place, error, what)}"
    if stat.S_ISDIR(kind) and "folder" not in what:
        way = "name a file in it" if _names(place) else "it is empty, so name another"
        return f"{place}: a folder, where a {what} is needed; {way}."
    if stat.S_ISREG(kind) and "file" not in what:
        return f"{place}: a file, where a {what} is needed; name the folder that holds it."
    ours = stat.S_ISDIR(kind) or stat.S_ISREG(kind)
    return f"{place}: {'cannot be read; check its rights.' if ours else SPECIAL}"


def unreadable(path: str | PathLike[str], error: OSError | ValueError) -> str:
    """Why a file could not be opened or read, and the way out.

    >>> print(unreadable(__file__, PermissionError(13, "Permission denied")).partition(": ")[2])
    cannot be read (Permission denied); check its rights, or copy it again.
    """
    if not os.path.isfile(path):
        return absent(path)
    why = getattr(error, "strerror", None) or error
    return f"{path}: cannot be read ({why}); check its rights, or copy it again."


def refused(error: OSError) -> str | None:
    """What the system refused, by the file it names; None where it names none.

    >>> refused(PermissionError(13, "Permission denied", "models/m.pt"))
    'models/m.pt: cannot be used (Permission denied); check its name, its rights and those of its folders.'
    """
    if not isinstance(error.filename, str | bytes) or not error.strerror:
        return None
    way = "check its name, its rights and those of its folders"
    return f"{os.fsdecode(error.filename)}: cannot be used ({error.strerror}); {way}."


def not_made(folder: str | PathLike[str], error: OSError, option: str = "--out") -> str:
    """Why a folder for results could not be made, and the way out.

    >>> print(not_made("/dev/null/run", NotADirectoryError(20, "Not a directory")))
    /dev/null/run: cannot be made (/dev/null is no folder); choose another --out.
    """
    place = Path(folder)
    taken = next((p for p in (place, *place.parents) if os.path.lexists(p) and not p.is_dir()), None)
    why = error.strerror if taken is None else f"{taken} is no folder"
    return f"{place}: cannot be made ({why}); choose another {option}."


def _leads_nowhere(place: Path, error: OSError | ValueError, what: str) -> str:
    code = getattr(error, "errno", None)
    if code == errno.ELOOP:
        return f"a link that leads back to itself; name the {what} itself, or make the link again."
    if code not in (errno.ENOENT, errno.ENOTDIR):
        why = getattr(error, "strerror", None) or error
        return f"cannot be read ({why}); check its name, its rights and those of its folders."
    if place.is_symlink():
        return f"a link to {os.readlink(place)}, which is not there; make the link again."
    near = get_close_matches(place.name, _names(place.parent), n=1, cutoff=0.8)
    return f"no such {what}." + (f" Did you mean {str(place.parent / near[0])!r}?" if near else "")


def _names(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry, _ in zip(entries, range(LISTED), strict=False)]
    except OSError:
        return []
