"""Readers of feature files, one file for each producer.

A reader recognises a container by its contents and turns it into a `Header`. To add one, write a module with

    @reader("mytool", kinds=("h5",), claims=lambda contents: "my_features" in contents)
    def read(contents: Contents, ask: Ask) -> Header: ...

and name it under the entry point group `xmil.readers`; `xmil.read_bag` and `xmil inspect` then use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from xmil.core.errors import FileError, InputError, check_names
from xmil.core.registry import Registry
from xmil.data.containers import CONTAINERS, Contents
from xmil.data.header import Ask, Header

Claims = Callable[[Contents], bool]
Read = Callable[[Contents, Ask], Header]


@dataclass(frozen=True)
class Reader:
    """One layout: its containers, and the functions that recognise and read it.

    `fallback` readers apply only if no other claims the container.
    """

    name: str
    kinds: tuple[str, ...]
    claims: Claims
    read: Read
    fallback: bool = False


READERS: Registry[Reader] = Registry("feature format", group="xmil.readers")
_BUILT_IN = (
    "trident",
    "clam",
    "stamp",
    "wsinfer",
    "slideflow",
    "slide2vec",
    "tiatoolbox",
    "spatialdata",
    "paper",
    "plain",
)


def reader(
    name: str, *, kinds: tuple[str, ...], claims: Claims, fallback: bool = False
) -> Callable[[Read], Read]:
    """Register a function as the reader of a layout.

    `kinds` are its containers: h5, pt, npy, npz, zarr, csv, folder. `claims` takes an opened container and
    tells whether it has the layout, by its names (`"my_features" in contents`) or by `contents.attrs`.
    """
    check_names("kind of container", kinds, CONTAINERS)

    def register(read: Read) -> Read:
        READERS.add(name, Reader(name, kinds, claims, read, fallback))
        return read

    return register


def find_reader(contents: Contents, format: str) -> Reader:  # noqa: A002 - the public parameter's name
    """Find the named reader, or the one that claims the container."""
    _load_built_in()
    if format != "auto":
        kinds = READERS[format].kinds
        if contents.kind not in kinds:
            raise InputError(
                f"{contents.path}: is a {contents.kind} container, but {format!r} files are "
                f"{' or '.join(kinds)}."
            )
        return READERS[format]
    claiming = [
        entry
        for name in READERS
        if contents.kind in (entry := READERS[name]).kinds and entry.claims(contents)
    ]
    chosen = [entry for entry in claiming if not entry.fallback] or claiming
    if not chosen:
        raise FileError(_unknown(contents))
    if len(chosen) > 1:
        names = ", ".join(entry.name for entry in chosen)
        raise FileError(f"{contents.path}: matches several layouts ({names}); choose one with `format=`.")
    return chosen[0]


def list_formats() -> list[str]:
    """Names of the readable layouts.

    >>> "trident" in list_formats()
    True
    """
    _load_built_in()
    return list(READERS)


def _unknown(contents: Contents) -> str:
    tried = ", ".join(name for name in READERS if contents.kind in READERS[name].kinds) or "none"
    if contents.kind == "folder":
        return (
            f"{contents.path}: a folder, not one bag; name a file in it. `xmil inspect` lists its contents."
        )
    advice = (
        "is it a checkpoint? xmil.load_model reads those"
        if contents.kind == "pt"
        else "call them 'features' and 'coords', name the layout with `format=`, or write a reader for it "
        "(docs/howto/own-reader.md)"
    )
    return f"{contents.path}: unknown layout; it holds {contents.describe()}; tried {tried}; {advice}."


def _load_built_in() -> None:
    for module in _BUILT_IN:
        import_module(f"xmil.data.readers.{module}")
