"""Errors a user can act on: each message names the thing at fault and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class XmilError(Exception):
    """Base of every error this package raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """What notebooks show: the sentence, which names the fault, without the way through our files."""
        return [f"{type(self).__name__}: {self}"]


class InputError(XmilError, ValueError):
    """A bag, target or parameter that cannot be used."""


class UnknownNameError(XmilError, ValueError):
    """A name that no registry entry, class or parameter has."""


class UnsupportedError(XmilError, ValueError):
    """A model, method or operation that do not go together."""


class FileError(XmilError, ValueError):
    """A file that is missing, damaged, unsafe or of an unknown layout."""


class StopError(XmilError):
    """What makes going on with a run pointless: a full disk, a folder that cannot be written."""


class WriteError(FileError):
    """A file that the disk, the folder or the rights do not let be written, whatever is in it."""


class CheckpointError(FileError):
    """A checkpoint of an unknown family, or one whose keys do not fit its family."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not among the known ones, with the nearest of them.

    >>> print(unknown_name("method", "lpr", ["lrp", "ig"]))
    Unknown method 'lpr'. Did you mean 'lrp'? Known: ig, lrp.
    """
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


def bad_parameter(parameter: str, owner: str, must_be: str, got: object) -> InputError:
    """The one sentence for a parameter out of its range.

    >>> print(bad_parameter("steps", "flip", "an int in the range [1, inf)", 0))
    The 'steps' parameter of flip must be an int in the range [1, inf). Got 0 instead.
    """
    return InputError(f"The {parameter!r} parameter of {owner} must be {must_be}. Got {got!r} instead.")
