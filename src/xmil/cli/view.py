"""`xmil view`: a run's slides and their evidence in the browser, or as a folder for any web server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xmil.cli import _command
from xmil.core.errors import InputError, unreadable

if TYPE_CHECKING:
    from xmil.viewer.collection import Collection


def view(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `xmil explain` or `xmil evaluate`.")],
    slides: Annotated[
        Path | None, typer.Option(help="Folder of slides; without it, a blank canvas is shown.")
    ] = None,
    features: Annotated[
        list[Path] | None, typer.Option(help="Folder of feature files, for similar patches and what-if.")
    ] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="Checkpoint of the run's model, for what-if.")
    ] = None,
    mpp: Annotated[
        float | None, typer.Option(help="Microns per pixel, if the slides do not store it.")
    ] = None,
    format: _command.Layout = "auto",  # noqa: A002 - the word users know
    host: Annotated[
        str, typer.Option(help="Address to listen on; any other than loopback requires a token.")
    ] = ("127.0.0.1"),
    port: Annotated[int | None, typer.Option(help="Port; by default the first free one from 8787.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the access token; or XMIL_TOKEN.")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Write a static folder instead of serving.")] = None,
    export_px: Annotated[
        int | None, typer.Option(help="Longest edge of exported pictures in pixels; full size by default.")
    ] = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Follow links that lead out of the folders.")
    ] = False,
    label_images: Annotated[
        bool,
        typer.Option("--label-images", help="Serve the photographed labels, which may name patients."),
    ] = False,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One line of JSON: the address and the slides, or what was written."),
    ] = False,
) -> int:
    """Look at slides and evidence in the browser; Ctrl-C ends."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError("The viewer is not installed; run: pip install 'xmil[viewer]'") from None
    from xmil.viewer.collection import Collection

    if label_images and export is not None:
        raise InputError("Label images may name patients and are never exported; leave out --label-images.")
    shown = Collection(
        runs,
        slides=slides,
        features=features or (),
        mpp=mpp,
        follow_links=follow_links,
        labels=label_images,
        layout=format,
    )
    missing, n = shown.missing_pictures()
    if not as_json and not n:
        print("The run has no slides yet; reload the page to see them appear.")
    elif not as_json and slides is not None and missing:
        print(
            f"{slides}: {missing} of {n} slides have no image with their name here; a blank canvas is shown."
        )
    if export is not None:
        return _export(shown, export, longest=export_px, as_json=as_json)
    secret = _token(token_file)
    return _serve(
        shown, models=model or [], host=host, port=port, token=secret, browser=browser, as_json=as_json
    )


def _token(file: Path | None) -> str | None:
    """The token from the file or the environment; other users can read command lines."""
    if file is None:
        return os.environ.get("XMIL_TOKEN")
    try:
        return file.read_text(encoding="utf-8").splitlines()[0].strip()
    except OSError as error:
        raise InputError(unreadable(file, error)) from None
    except (ValueError, IndexError):
        raise InputError(f"{file}: holds no token; its first line must be one.") from None


def _serve(
    shown: Collection,
    *,
    models: list[Path],
    host: str,
    port: int | None,
    token: str | None,
    browser: bool,
    as_json: bool,
) -> int:
    import secrets
    import threading
    import webbrowser

    from xmil.viewer.app import create_app
    from xmil.viewer.server import Rules, address, is_loopback, open_socket, serve
    from xmil.viewer.static_copy import NOT_BUILT, page_files

    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    rules = Rules(host, token)
    app = create_app(shown, models=models, rules=rules)
    listening = open_socket(host, port)
    place = address(listening, rules)
    built = bool(page_files())
    if as_json:
        missing, n = shown.missing_pictures()
        print(json.dumps({"address": place, "slides": n, "without_picture": missing}), flush=True)
    else:
        print(place if built else f"{NOT_BUILT}\n{place}", flush=True)
    if browser and built:
        later = threading.Timer(0.5, webbrowser.open, [place])
        later.daemon = True
        later.start()
    serve(app, listening)
    return 0


def _export(shown: Collection, folder: Path, *, longest: int | None, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from xmil.viewer.static_copy import export

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("slides", total=None)
        failed = export(
            shown,
            folder,
            longest=longest,
            on_slide=lambda _, done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        print(json.dumps({"out": str(folder), "failed": failed}))
        return 1 if failed else 0
    for slide, reason in failed.items():
        print(f"{slide}: {reason}")
    print(f"Written to {folder}; put it on any web server, or: python -m http.server -d {folder}")
    return 1 if failed else 0
