"""Names of slides: what a slide file is called, and which names stay in their folder."""

from __future__ import annotations

from collections.abc import Iterable

from xmil.core.errors import InputError

SLIDE_SUFFIXES: tuple[str, ...] = (
    *(".svs", ".ndpi", ".mrxs", ".scn", ".tif", ".tiff", ".bif", ".vms", ".vmu", ".svslide", ".dcm"),
    *(".qptiff", ".png", ".jpg", ".jpeg", ".ome.tif", ".ome.tiff", ".czi", ".isyntax"),
)


def bare_name(slide_id: str) -> str:
    """A slide's name without its image suffix; names that could leave a folder are refused.

    >>> bare_name("a.b.svs"), bare_name("a.b")
    ('a.b', 'a.b')
    """
    if not is_plain(slide_id):
        raise InputError(f"The slide name {slide_id!r} must not hold a path or '..'; give the bare name.")
    lower = slide_id.lower()
    for suffix in sorted(SLIDE_SUFFIXES, key=len, reverse=True):
        if lower.endswith(suffix):
            return slide_id[: -len(suffix)]
    return slide_id


def is_plain(name: str) -> bool:
    """Whether a name stays in its folder: no separators, no `..`, no zero byte."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}


def counted(n: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "slide"), counted(0, "slide"), counted(1200, "patch")
    ('1 slide', '0 slides', '1,200 patches')
    """
    ending = "" if n == 1 else "es" if noun.endswith(("s", "x", "ch")) else "s"
    return f"{n:,} {noun}{ending}"


def listed(given: str | Iterable[str] | None) -> list[str]:
    """The parts of a text between commas, or of a list, each once; "none" is no part.

    >>> listed("lrp, ig,lrp"), listed(("lrp", "ig")), listed("none"), listed(None)
    (['lrp', 'ig'], ['lrp', 'ig'], [], [])
    """
    if given == "none":
        return []
    parts = given.split(",") if isinstance(given, str) else list(given or ())
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
