"""Errors a user can act on: each message names the thing at fault and the way out.

An error carries the parameter at fault. A sentence that names further parameters writes them as Python, in
backticks: "choose another `out=`, or `restart=True` to start over"; `name_parameters` puts them into the
words of another door, such as the command line. Also descriptions of what is wrong with a path: nothing is
there, a broken link, a pipe.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike
from pathlib import Path

StrPath = str | PathLike[str]
LISTED = 10_000  # names of a folder to search for a similar one
DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
OPEN_FILES = (errno.EMFILE, errno.ENFILE)  # too many open files
SPECIAL = "cannot be read (a pipe, socket or device, not a file)."
_CHECK = "check its name, its rights and those of its folders."


class XmilError(Exception):
    """Base class of the errors that this package raises.

    `parameter` is the Python parameter at fault, if there is one, by default the first that the message
    names; `requirement` says what is wrong with its value, `owner` which function has it.
    """

    def __init__(
        self,
        message: object = "",
        *,
        parameter: str | None = None,
        requirement: str | None = None,
        owner: str | None = None,
    ) -> None:
        super().__init__(message)
        named = _NAMED.search(str(message))
        self.parameter = named[1] if parameter is None and named is not None else parameter
        self.requirement = requirement
        self.owner = owner

    def _render_traceback_(self) -> list[str]:
        """Show only the message in notebooks, without a traceback through this package."""
        return [f"{type(self).__name__}: {self}"]


class InputError(XmilError, ValueError):
    """An unusable bag, target or parameter."""


class UnknownNameError(XmilError, ValueError):
    """An unknown name of a registry entry, class or parameter."""


class UnsupportedError(XmilError, ValueError):
    """A model, method or operation that do not go together."""


class FileError(XmilError, ValueError):
    """A file that is missing, damaged, unsafe or of an unknown layout."""


class StopError(XmilError):
    """A reason to stop a run: a full disk, a folder without write access."""


class WriteError(FileError):
    """A file that cannot be written because of the disk, the folder or its permissions."""


class CheckpointError(FileError):
    """A checkpoint of an unknown family, or with keys that do not fit its family."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Make the error for an unknown name, with the most similar known one.

    >>> print(unknown_name("method", "lpr", ["lrp", "ig"]))
    Unknown method 'lpr'. Did you mean 'lrp'? Known: ig, lrp.
    """
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse unknown names."""
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


LONGEST = 200  # characters of a value that an error quotes
MOST_PASSES = 100_000  # over a bag: sub-bags, orders, steps of a path or curve; more is a typing error


def bad_parameter(parameter: str, owner: str, must_be: str, got: object) -> InputError:
    """Make the error for a parameter out of its range.

    >>> print(bad_parameter("steps", "flip", "an int in the range [1, inf)", 0))
    The 'steps' parameter of flip must be an int in the range [1, inf). Got 0 instead.
    """
    shown = repr(got)
    shown = shown if len(shown) <= LONGEST and "\n" not in shown else f"a {type(got).__name__}"
    requirement = f"must be {must_be}. Got {shown} instead."
    message = f"The {parameter!r} parameter of {owner} {requirement}"
    return InputError(message, parameter=parameter, requirement=requirement, owner=owner)


_BAD = re.compile(r"The '(\w+)' parameter of \w+(?= must )")  # as `bad_parameter` writes it
_NAMED = re.compile(r"`([a-z_][a-z0-9_.]*)=([^`]*)`")


def name_parameters(sentence: str, say: Callable[[str, str | None], str]) -> str:
    """Put the parameters of a sentence into a door's own words.

    `say` takes the name and the value, which is None for the parameter at fault of `bad_parameter`.

    >>> name_parameters("choose another `out=`, or `restart=True`", lambda name, value: f"--{name}")
    'choose another --out, or --restart'
    >>> name_parameters("The 'size' parameter of read_bag must be an int.", lambda name, value: f"--{name}")
    '--size must be an int.'
    """
    sentence = _BAD.sub(lambda match: say(match[1], None), sentence)
    return _NAMED.sub(lambda match: say(match[1], match[2]), sentence)


def check_count(name: str, value: object, least: int = 1, most: int | None = None, *, owner: str) -> None:
    """Refuse a parameter that is not a whole number in a range."""
    upper = math.inf if most is None else most
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= upper:
        end = "inf)" if most is None else f"{most}]"
        raise bad_parameter(name, owner, f"an int in the range [{least}, {end}", value)


def check_choice(name: str, value: object, choices: Iterable[object], *, owner: str) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise bad_parameter(name, owner, f"one of {list(choices)}", value)


def absent(path: StrPath, what: str = "file") -> str:
    """Say why a path is not a file, a folder or a "file or folder" (`what`), and the way out.

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
    if stat.S_ISDIR(kind) or stat.S_ISREG(kind):
        return f"{place}: cannot be read; check its rights."
    return f"{place}: {SPECIAL}"


def unreadable(path: StrPath, error: OSError | ValueError) -> str:
    """Say why a file could not be opened or read, and the way out.

    >>> print(unreadable(__file__, PermissionError(13, "Permission denied")).partition(": ")[2])
    cannot be read (Permission denied); check its rights, or copy it again.
    """
    if not os.path.isfile(path):
        return absent(path)
    why = getattr(error, "strerror", None) or error
    return f"{path}: cannot be read ({why}); check its rights, or copy it again."


def one_line(error: BaseException) -> str:
    """Write an error's message in one line, or its type if it has none."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@contextmanager
def refuse_damage(fault: str, *, way: str = "", kinds: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert any error from a damaged file to a FileError: the fault, the reason in brackets, the way out.

    `kinds` are errors of the library that reads it, in addition to Python's. Errors of this package pass.

    >>> with refuse_damage("a.csv: not numbers", way="write it again"):
    ...     float("b")
    Traceback (most recent call last):
    xmil.core.errors.FileError: a.csv: not numbers (could not convert string to float: 'b'); write it again.
    """
    try:
        yield
    except XmilError:
        raise
    except DAMAGE + kinds as error:
        raise FileError(f"{fault} ({one_line(error)}){f'; {way}' if way else ''}.") from None


def unwritable(path: StrPath, error: OSError) -> str:
    """Say why a file could not be written, and the way out.

    >>> print(unwritable("run/slides.csv", OSError(28, "No space left on device")))
    run/slides.csv: cannot be written (No space left on device); make room, or choose another place.
    """
    reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
    way = "raise `ulimit -n`" if error.errno in OPEN_FILES else "make room, or choose another place"
    return f"{path}: cannot be written ({reason}); {way}."


def refused(error: OSError) -> str | None:
    """Describe an error of the system with its cause and the way out; None if it names no cause.

    >>> refused(PermissionError(13, "Permission denied", "models/m.pt"))
    'models/m.pt: cannot be used (Permission denied); check its name, its rights and those of its folders.'
    >>> refused(OSError(24, "Too many open files"))
    'Too many open files; raise the limit (`ulimit -n`), or use fewer `workers=`.'
    >>> refused(OSError(28, "No space left on device"))
    'The output cannot be written (No space left on device); make room, or choose another place.'
    """
    if error.errno in OPEN_FILES:
        return f"{os.strerror(error.errno)}; raise the limit (`ulimit -n`), or use fewer `workers=`."
    if isinstance(error.filename, str | bytes) and error.strerror:
        return f"{os.fsdecode(error.filename)}: cannot be used ({error.strerror}); {_CHECK}"
    if error.errno == errno.ENOSPC:
        return f"The output cannot be written ({error.strerror}); make room, or choose another place."
    return None


def not_made(folder: StrPath, error: OSError, option: str = "`out=`") -> str:
    """Say why a folder for results could not be made, and the way out.

    >>> print(not_made("/dev/null/run", NotADirectoryError(20, "Not a directory")))
    /dev/null/run: cannot be made (/dev/null is not a folder); choose another `out=`.
    """
    place = Path(folder)
    blocker = next((p for p in (place, *place.parents) if os.path.lexists(p) and not p.is_dir()), None)
    why = error.strerror if blocker is None else f"{blocker} is not a folder"
    return f"{place}: cannot be made ({why}); choose another {option}."


def _leads_nowhere(place: Path, error: OSError | ValueError, what: str) -> str:
    code = getattr(error, "errno", None)
    if code == errno.ELOOP:
        return f"a link that leads back to itself; name the {what} itself, or make the link again."
    if code not in (errno.ENOENT, errno.ENOTDIR):
        why = getattr(error, "strerror", None) or error
        return f"cannot be read ({why}); {_CHECK}"
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
