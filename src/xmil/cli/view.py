"""`xmil view`: a run's slides and evidence in the browser or as a static copy, or a reading study."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen, progress_bars
from xmil.core.errors import InputError, unreadable
from xmil.core.request import Request, option

if TYPE_CHECKING:
    from xmil.viewer.collection import Collection
    from xmil.viewer.server import Rules

STUDY = "study.json"  # what makes a folder a study


class ViewRequest(Request):
    """Show slides and their evidence in the browser."""

    runs: tuple[Path, ...] = option(
        "Folders of `xmil explain` or `xmil evaluate`; or one of `xmil study init`.", argument=True
    )
    slides: Path | None = option("Folder of slides; without it, a blank canvas is shown.", None)
    features: tuple[Path, ...] = option("Folder of feature files, for similar patches and what-if.", ())
    model: tuple[Path, ...] = option("Checkpoint of the run's model, for what-if.", ())
    mpp: float | None = option("Microns per pixel, if the slides do not store it.", None)
    format: str = option("Layout of the feature files, if it cannot be recognised.", "auto")
    host: str = option("Address to listen on; any other than loopback requires a token.", "127.0.0.1")
    port: int | None = option("Port; by default the first free one from 8787.", None)
    token_file: Path | None = option("File whose first line is the access token; or XMIL_TOKEN.", None)
    export: Path | None = option("Write a static folder instead of serving.", None)
    export_px: int | None = option("Longest edge of exported pictures in pixels; full size by default.", None)
    follow_links: bool = option("Follow links that lead out of the folders.", False)
    label_images: bool = option("Serve the photographed labels, which may name patients.", False)
    browser: bool = option("Open the page in the browser.", True)


@with_examples("view run --slides slides", "view run --slides slides --export page")
@command(ViewRequest)
def view(request: ViewRequest, screen: Screen) -> int:
    """Show slides and their evidence in the browser, until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise InputError("The viewer is not installed; run: pip install 'xmil[viewer]'") from None
    from xmil.viewer.app import create_app
    from xmil.viewer.collection import Collection

    if request.runs[0].is_dir() and (request.runs[0] / STUDY).is_file():
        if request.export is not None:
            raise InputError(
                f"{request.runs[0]}: a study needs its server, so it cannot be exported; leave out --export."
            )
        return _serve_study(request, screen)
    if request.label_images and request.export is not None:
        raise InputError("Label images may name patients and are never exported; leave out --label-images.")
    shown = Collection(
        request.runs,
        slides=request.slides,
        features=request.features,
        mpp=request.mpp,
        follow_links=request.follow_links,
        labels=request.label_images,
        layout=request.format,
    )
    missing, n = shown.missing_pictures()
    if not screen.as_json and not n:
        print("The run has no slides yet; reload the page to see them appear.")
    elif not screen.as_json and request.slides is not None and missing:
        print(
            f"{request.slides}: {missing} of {n} slides have no image with their name; they get a blank "
            "canvas."
        )
    if request.export is not None:
        return _export(shown, request.export, longest=request.export_px, as_json=screen.as_json)
    rules = _rules(request)
    app = create_app(shown, models=list(request.model), rules=rules)
    return _serve(app, rules, request, {"slides": n, "without_picture": missing} if screen.as_json else None)


def _serve_study(request: ViewRequest, screen: Screen) -> int:
    """Serve a reading study, which each reader enters with a code."""
    from xmil.viewer.study import open_study
    from xmil.viewer.study.site import create_study_app

    folder, *others = request.runs
    if others:
        raise InputError(f"{folder}: a study, which cannot be shown with other runs; name it alone.")
    study = open_study(folder)
    rules = _rules(request)
    where = request.slides or study.slides
    if not where.is_dir():
        raise InputError(f"{where}: does not contain the study's slides; pass `slides=`, their folder.")
    app = create_study_app(study, slides=where, rules=rules, follow_links=request.follow_links)
    return _serve(app, rules, request, {"readers": len(study.readers)} if screen.as_json else None)


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


def _rules(request: ViewRequest) -> Rules:
    """Make the server's rules; beyond loopback, make a token if there is none."""
    import secrets

    from xmil.viewer.server import Rules, is_loopback

    token = _token(request.token_file)
    if token is None and not is_loopback(request.host):
        token = secrets.token_urlsafe(24)
    return Rules(request.host, token)


def _serve(app: Any, rules: Rules, request: ViewRequest, report: dict[str, Any] | None) -> int:
    """Serve until interrupted; print the address, or the report with it as JSON."""
    import threading
    import webbrowser

    from xmil.viewer.server import address, open_socket, serve
    from xmil.viewer.static_copy import NOT_BUILT, page_files

    listening = open_socket(rules.host, request.port)
    place = address(listening, rules)
    built = bool(page_files())
    if report is not None:
        print(json.dumps({"address": place, **report}), flush=True)
    else:
        print(place if built else f"{NOT_BUILT}\n{place}", flush=True)
    if request.browser and built:
        later = threading.Timer(0.5, webbrowser.open, [place])
        later.daemon = True
        later.start()
    serve(app, listening)
    return 0


def _export(shown: Collection, folder: Path, *, longest: int | None, as_json: bool) -> int:
    from xmil.viewer.static_copy import export

    with progress_bars(counts=True) as progress:
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
