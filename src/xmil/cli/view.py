"""`xmil view`: a run's slides and evidence in the browser or as a static copy, or a reading study."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from xmil.cli import _command
from xmil.core.errors import InputError, unreadable

if TYPE_CHECKING:
    from xmil.viewer.collection import Collection
    from xmil.viewer.server import Rules

STUDY = "study.json"  # what makes a folder a study


@_command.with_examples("view run --slides slides", "view run --slides slides --export page")
def view(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `xmil explain` or `xmil evaluate`; or one of `xmil study init`."),
    ],
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
    """Show slides and their evidence in the browser, until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError("The viewer is not installed; run: pip install 'xmil[viewer]'") from None
    from xmil.viewer.app import create_app
    from xmil.viewer.collection import Collection

    if runs[0].is_dir() and (runs[0] / STUDY).is_file():
        if export is not None:
            raise InputError(
                f"{runs[0]}: a study needs its server, so it cannot be exported; leave out --export."
            )
        return _serve_study(runs, slides, follow_links, host, port, token_file, browser, as_json)
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
        print(f"{slides}: {missing} of {n} slides have no image with their name; they get a blank canvas.")
    if export is not None:
        return _export(shown, export, longest=export_px, as_json=as_json)
    rules = _rules(host, token_file)
    app = create_app(shown, models=model or [], rules=rules)
    return _serve(app, rules, port, browser, {"slides": n, "without_picture": missing} if as_json else None)


def _serve_study(
    studies: list[Path],
    slides: Path | None,
    follow_links: bool,
    host: str,
    port: int | None,
    token_file: Path | None,
    browser: bool,
    as_json: bool,
) -> int:
    """Serve a reading study, which each reader enters with a code."""
    from xmil.viewer.study import open_study
    from xmil.viewer.study.site import create_study_app

    if len(studies) > 1:
        raise InputError(f"{studies[0]}: a study, which cannot be shown with other runs; name it alone.")
    study, rules = open_study(studies[0]), _rules(host, token_file)
    where = slides or study.slides
    if not where.is_dir():
        raise InputError(f"{where}: does not contain the study's slides; pass slides=, their folder.")
    app = create_study_app(study, slides=where, rules=rules, follow_links=follow_links)
    return _serve(app, rules, port, browser, {"readers": len(study.readers)} if as_json else None)


LONGEST_TOKEN = 4096  # bytes


def _token(file: Path | None) -> str | None:
    """Read the token from the file or the environment, since other users can read command lines."""
    if file is None:
        return os.environ.get("XMIL_TOKEN")
    try:
        with file.open("rb") as stream:  # may be a pipe of the shell; never all of a device
            line = stream.readline(LONGEST_TOKEN + 1)
        if len(line) > LONGEST_TOKEN:
            raise ValueError("too long")
        return line.decode().splitlines()[0].strip()
    except OSError as error:
        raise InputError(unreadable(file, error)) from None
    except (ValueError, IndexError):
        raise InputError(
            f"{file}: has no token; its first line must be one, of at most {LONGEST_TOKEN} bytes."
        ) from None


def _rules(host: str, token_file: Path | None) -> Rules:
    """Make the server's rules; beyond loopback, make a token if there is none."""
    import secrets

    from xmil.viewer.server import Rules, is_loopback

    token = _token(token_file)
    return Rules(host, secrets.token_urlsafe(24) if token is None and not is_loopback(host) else token)


def _serve(app: Any, rules: Rules, port: int | None, browser: bool, report: dict[str, Any] | None) -> int:
    """Serve until interrupted; print the address, or the report with it as JSON."""
    import threading
    import webbrowser

    from xmil.viewer.server import address, open_socket, serve
    from xmil.viewer.static_copy import NOT_BUILT, page_files

    listening = open_socket(rules.host, port)
    place = address(listening, rules)
    built = bool(page_files())
    if report is not None:
        print(json.dumps({"address": place, **report}), flush=True)
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
