"""The viewer inside a notebook: a server in the background, shown in a frame."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from xmil.core.errors import InputError

if TYPE_CHECKING:
    from xmil.viewer.server import BackgroundServer

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


class Viewing:
    """A running viewer, which a notebook shows inline. `stop` ends it."""

    def __init__(self, url: str, server: BackgroundServer, *, height: int) -> None:
        self.url, self.height, self._server = url, height, server

    @property
    def running(self) -> bool:
        """Whether the server still answers."""
        return self._server.running

    def stop(self) -> None:
        """End the server."""
        self._server.stop()

    def __enter__(self) -> Viewing:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Viewing({self.url}{'' if self.running else ', stopped'})"

    def _repr_html_(self) -> str:
        address = escape(self.url, quote=True)
        style = "width:100%;border:1px solid #8886;border-radius:4px"
        return f'<iframe src="{address}" height="{self.height}" style="{style}" allowfullscreen></iframe>'


def view(
    run: Paths,
    slides: str | PathLike[str] | None = None,
    *,
    features: Paths = (),
    model: Paths = (),
    mpp: float | None = None,
    follow_links: bool = False,
    height: int = 760,
    port: int | None = None,
) -> Viewing:
    """Show one or more runs in the browser, only on this machine; inline in a notebook.

    `slides` is the folder of slides; `features` adds similar patches, and with `model` also what-if.
    """
    try:
        from xmil.viewer.app import create_app
        from xmil.viewer.collection import Collection
        from xmil.viewer.server import BackgroundServer, Rules, address, open_socket
    except ImportError as error:
        raise InputError(f"{error.name} is not installed; run: pip install 'xmil[viewer]'") from None

    folder = None if slides is None else Path(slides)
    shown = Collection(
        _paths(run), slides=folder, features=_paths(features), mpp=mpp, follow_links=follow_links
    )
    rules = Rules(framed=True)
    app = create_app(shown, models=_paths(model), rules=rules)
    listening = open_socket(rules.host, port)
    return Viewing(address(listening, rules), BackgroundServer(app, listening), height=height)


def _paths(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, str | PathLike) else [Path(path) for path in paths]
