"""The application: routes from numbers to bytes. No name or path from the client reaches the disk."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from xmil._version import __version__
from xmil.core.durable import write_text
from xmil.core.errors import InputError, WriteError, XmilError
from xmil.core.text import is_plain, parse_json
from xmil.storage import read_json
from xmil.viewer.cache import to_json
from xmil.viewer.cohort import CohortIndex, CohortWall
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.deepzoom import NoPictureError
from xmil.viewer.layers import concepts_layer
from xmil.viewer.server import Guard, Rules, TooLargeError
from xmil.viewer.static_copy import NOT_BUILT, content_type, page_files
from xmil.viewer.whatif import AbandonedError, CaseBags, WhatIf, similar

logger = logging.getLogger(__name__)

JSON, BYTES = "application/json", "application/octet-stream"
JPEG, PNG = "image/jpeg", "image/png"
WATCH = 0.2  # seconds between looks whether the client is still there
Endpoint = Callable[[Request], Awaitable[Response]]


class Site:
    """The routes over one collection. Work is done in threads, a bounded number of them at once."""

    def __init__(self, collection: Collection, models: Sequence[Path] = ()) -> None:
        self.collection = collection
        self.bags = CaseBags(collection)
        self.wall = CohortWall(collection)
        self.index = CohortIndex(collection, self.bags)
        self.annotations = AnnotationFiles(collection.runs[0].path)
        self.whatif = WhatIf(collection, self.bags, models) if models else None
        cores = os.cpu_count() or 2
        self._reading = anyio.CapacityLimiter(max(4, cores))
        self._drawing, self._decoding = (anyio.CapacityLimiter(max(2, cores)) for _ in range(2))
        self._thinking = anyio.CapacityLimiter(1)

    def routes(self) -> list[Route]:
        """All addresses there are."""
        shown, slide, get, draw = self.collection, "/api/slides/{key:int}", self._get, self._draw
        routes = [
            Route("/", self.page),
            Route("/api/run.json", get(lambda: shown.overview(whatif=self.whatif is not None))),
            Route("/api/columns-{run:int}.json", get(self._columns)),
            Route("/api/wall-{run:int}-{column:int}.json", get(self.wall.wall)),
            Route(f"{slide}/small-{{run:int}}-{{column:int}}.png", draw(self.wall.small, PNG)),
            Route("/api/openapi.json", get(describe_routes)),
            Route(f"{slide}/slide.json", get(shown.describe)),
            Route(
                f"{slide}/evidence-{{run:int}}.bin", get(lambda *at: shown.evidence(*at).to_bytes(), BYTES)
            ),
            Route(f"{slide}/thumbnail.jpeg", draw(self._by_number(shown.pictures.thumbnail))),
            Route(f"{slide}/patch-{{run:int}}-{{index:int}}.jpeg", draw(shown.patch)),
            Route(f"{slide}/similar-{{run:int}}-{{index:int}}.json", get(self._similar)),
            Route(f"{slide}/inside-{{run:int}}.json", get(shown.inside)),
            Route(f"{slide}/concepts-{{run:int}}.json", get(lambda *at: concepts_layer(shown.concepts(*at)))),
            Route(f"{slide}/concept-{{run:int}}-{{concept:int}}.bin", get(shown.concept, BYTES)),
            Route(f"{slide}/pairs-{{run:int}}.json", get(shown.pairs)),
            Route(f"{slide}/alike-{{run:int}}-{{index:int}}.json", get(self.index.ask)),
            Route(f"{slide}/whatif", self.ask, methods=["POST"]),
            Route(f"{slide}/explain", self.explain, methods=["POST"]),
            Route(f"{slide}/deciding-{{run:int}}.json", self.decide),
            Route(f"{slide}/annotations-{{reader}}.json", self.notes, methods=["GET", "POST"]),
            Route(
                "/tiles/{key:int}/{level:int}/{column:int}_{row:int}.jpeg",
                draw(self._by_number(shown.pictures.tile)),
            ),
        ]
        if shown.labels:  # labels may name patients: unless the user serves them they have no address
            routes.append(Route(f"{slide}/label.jpeg", draw(self._by_number(shown.pictures.label))))
        return [*routes, Route("/{name:path}", self.page)]

    async def page(self, request: Request) -> Response:
        """A file of the built page."""
        name = request.path_params.get("name") or "index.html"
        files = await anyio.to_thread.run_sync(page_files, limiter=self._reading)
        if not files and name == "index.html":
            return Response(NOT_BUILT + "\n", 503, media_type="text/plain")
        if name not in files:
            raise HTTPException(404, "Nothing is served at this address.")
        content = await anyio.to_thread.run_sync(files[name].read_bytes, limiter=self._reading)
        return _tagged(request, content, content_type(name))

    async def notes(self, request: Request) -> Response:
        """Read or store a reader's annotations of a slide."""
        key, reader = request.path_params.values()
        if request.method != "POST":
            read = self._get(lambda *_: self.annotations.read(self.collection.slide(key), reader))
            return await read(request)
        body = await _json_body(request)

        def store() -> Any:
            return self.annotations.write(self.collection.slide(key), reader, _parse(body))

        return await _respond(store, self._reading)

    async def ask(self, request: Request) -> Response:
        """Predict without a region, or from a region alone."""
        body, key = await _json_body(request), request.path_params["key"]
        return await _respond(lambda: self._whatif_for(key).ask(key, _parse(body)), self._thinking)

    async def explain(self, request: Request) -> Response:
        """Explain what is left of a slide; give up when nobody waits for it any more."""
        body, key, alone = await _json_body(request), request.path_params["key"], Event()

        async def watch() -> None:
            while not await request.is_disconnected():
                await anyio.sleep(WATCH)
            alone.set()

        outcome: Response | Exception
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                outcome = await _respond(
                    lambda: self._whatif_for(key).explain(key, _parse(body), alone), self._thinking
                )
            except Exception as error:  # raised outside: a group would wrap it
                outcome = error
            group.cancel_scope.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def decide(self, request: Request) -> Response:
        """Find the patches that decide, by the model."""
        key, run = request.path_params.values()
        return await _respond(lambda: self._whatif_for(key).find_deciding(key, run), self._thinking)

    def _get(self, make: Callable[..., Any], kind: str = JSON) -> Endpoint:
        """Answer with what `make` gives for the numbers in the address, as JSON unless it is bytes."""

        def work(request: Request) -> bytes:
            content = make(*request.path_params.values())
            return to_json(content) if kind == JSON else content

        async def endpoint(request: Request) -> Response:
            content = await anyio.to_thread.run_sync(work, request, limiter=self._reading)
            return _tagged(request, content, kind)

        return endpoint

    def _draw(self, make: Callable[..., bytes], kind: str = JPEG) -> Endpoint:
        """Answer with a picture, which is not drawn if nobody waits for it any more."""

        async def endpoint(request: Request) -> Response:
            async with self._drawing:
                if await request.is_disconnected() or await request.is_disconnected():  # body, then the end
                    return Response(status_code=499)
                numbers = request.path_params.values()
                content = await anyio.to_thread.run_sync(make, *numbers, limiter=self._decoding)
            return _tagged(request, content, kind)

        return endpoint

    def _by_number(self, draw: Callable[..., bytes]) -> Callable[..., bytes]:
        """A function that draws a slide of a name, as one of the slide's number."""
        return lambda key, *numbers: draw(self.collection.slide(key), *numbers)

    def _columns(self, run: int) -> dict[str, Any]:
        self.collection.run(run)
        return {"columns": [{"method": name, "target": target} for name, target in self.wall.columns(run)]}

    def _similar(self, key: int, run: int, index: int) -> dict[str, Any]:
        return {"neighbours": similar(self.bags.get(key, run), index)}

    def _whatif_for(self, key: int) -> WhatIf:
        self.collection.slide(key)
        if self.whatif is None:
            raise MissingError("What-if needs a model and features; start the viewer with model=, features=.")
        return self.whatif


def create_app(collection: Collection, *, models: Sequence[Path] = (), rules: Rules | None = None) -> ASGIApp:
    """The whole application behind its guard; `models` answer what-if questions."""
    site = Site(collection, models)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        if site.whatif is not None:
            Thread(target=site.whatif.warm, name="xmil models", daemon=True).start()
        yield
        collection.pictures.close()

    handlers: dict[Any, Any] = {
        MissingError: partial(_fail, 404),
        ConflictError: _conflict,
        NoPictureError: partial(_fail, 404),
        AbandonedError: partial(_fail, 499),
        InputError: partial(_fail, 400),
        XmilError: partial(_fail, 422),
        TooLargeError: partial(_fail, 413, sentence="The body is too large."),
        HTTPException: _http,
        ClientDisconnect: partial(_fail, 400, sentence="The request was interrupted."),
        Exception: partial(_fail, 500, sentence="The server failed on this request; see its log."),
    }
    app = Starlette(routes=site.routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, rules or Rules())


async def _respond(work: Callable[[], Any], limiter: anyio.CapacityLimiter) -> Response:
    """Answer with the JSON of some work in a thread."""
    content = await anyio.to_thread.run_sync(lambda: to_json(work()), limiter=limiter)
    return Response(content, media_type=JSON)


async def _json_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise HTTPException(415, "The request body must be application/json.")
    return await request.body()


def _parse(body: bytes) -> Any:
    try:
        return parse_json(body)
    except (ValueError, RecursionError):
        raise InputError("The body is not JSON.") from None


async def _conflict(_: Request, error: ConflictError) -> Response:
    return Response(to_json({"error": str(error), **error.stored}), 409, media_type=JSON)


async def _fail(status: int, _: Request, error: Exception, sentence: str | None = None) -> Response:
    if status == 500:
        logger.error("unexpected %s: %s", type(error).__name__, error)
    return Response(to_json({"error": sentence or str(error)}), status, media_type=JSON)


async def _http(_: Request, error: HTTPException) -> Response:
    sentences = {404: "Nothing is served at this address.", 405: "This address does not support that method."}
    body = to_json({"error": sentences.get(error.status_code, error.detail)})
    return Response(body, error.status_code, headers=error.headers, media_type=JSON)


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    """The content, or the word that the browser has it already."""
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})


_LIST = {"type": "array", "items": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "array"}]}}
_QUESTION = {
    "type": "object",
    "properties": {"run": {"type": "integer", "minimum": 0}, "remove": _LIST, "keep": _LIST},
    "oneOf": [{"required": ["remove"]}, {"required": ["keep"]}],
}
_LEFT = {
    "type": "object",
    "properties": {
        "run": {"type": "integer", "minimum": 0},
        "keep": _LIST,
        "method": {"type": "string"},
        "targets": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["run", "keep", "method", "targets"],
}
_POSTED: dict[str, tuple[dict[str, Any], str]] = {
    "/api/slides/{key}/whatif": (_QUESTION, "The prediction without patches, or of patches alone."),
    "/api/slides/{key}/explain": (_LEFT, "Patches that are kept, explained without the others."),
}
_READ = {
    "/api/run.json": (JSON, "The runs and their slides."),
    "/api/openapi.json": (JSON, "This description."),
    "/api/columns-{run}.json": (JSON, "The signed methods and targets of a run, by number."),
    "/api/wall-{run}-{column}.json": (
        JSON,
        "The patches of all slides that say most for and against, by class and by right and wrong.",
    ),
    "/api/slides/{key}/small-{run}-{column}.png": (PNG, "A slide's scores, at most 64 px."),
    "/api/slides/{key}/slide.json": (JSON, "A slide: size, scores' columns, certificate."),
    "/api/slides/{key}/evidence-{run}.bin": (
        BYTES,
        "Little endian: int32 x0[n], int32 y0[n] where placed, then float32[n] for each column.",
    ),
    "/api/slides/{key}/thumbnail.jpeg": (JPEG, "The whole slide, at most 256 px."),
    "/api/slides/{key}/patch-{run}-{index}.jpeg": (JPEG, "A patch, at most 512 px."),
    "/api/slides/{key}/similar-{run}-{index}.json": (JSON, "The patches most like one."),
    "/api/slides/{key}/pairs-{run}.json": (
        JSON,
        "Pairs of patches that act together, by target: rows of both, value, and whether it is sure.",
    ),
    "/api/slides/{key}/concepts-{run}.json": (
        JSON,
        "The concepts of `xmil insight` with their relevance in a slide.",
    ),
    "/api/slides/{key}/concept-{run}-{concept}.bin": (
        BYTES,
        "Little endian: float32[n], the part of each patch's score that goes through a concept.",
    ),
    "/api/slides/{key}/alike-{run}-{index}.json": (
        JSON,
        "The patches of other slides most like one; while the index is made, how far it is.",
    ),
    "/api/slides/{key}/deciding-{run}.json": (
        JSON,
        "The smallest set of patches found whose removal changes the prediction.",
    ),
    "/api/slides/{key}/inside-{run}.json": (
        JSON,
        "Maps inside patches: level-0 boxes, values row by row, and score = sum + constant + other.",
    ),
    "/api/slides/{key}/annotations-{reader}.json": (
        JSON,
        "A reader's annotations with their revision. POST keeps new ones, or answers 409 with those there.",
    ),
    "/tiles/{key}/{level}/{column}_{row}.jpeg": (JPEG, "A Deep Zoom tile."),
}


def describe_routes() -> dict[str, Any]:
    """The description of every route."""
    paths = {path: {"get": _operation(path, *about)} for path, about in _READ.items()}
    posted = {}
    for path, (schema, text) in _POSTED.items():
        body = {"required": True, "content": {JSON: {"schema": schema}}}
        posted[path] = {"post": {**_operation(path, JSON, text), "requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "xmil viewer", "version": __version__},
        "paths": {**paths, **posted},
    }


def _operation(path: str, kind: str, summary: str) -> dict[str, Any]:
    names = [part.split("}")[0] for part in path.split("{")[1:]]
    number: dict[str, Any] = {"type": "integer", "minimum": 0}
    text: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"}
    error = {"content": {JSON: {"schema": {"type": "object", "required": ["error"]}}}}
    return {
        "summary": summary,
        "parameters": [
            {"name": n, "in": "path", "required": True, "schema": text if n == "reader" else number}
            for n in names
        ],
        "responses": {
            "200": {"description": "Found.", "content": {kind: {}}},
            "4XX": {"description": "One sentence that says why not.", **error},
        },
    }


FOLDER = "annotations"
READER = re.compile(r"[A-Za-z0-9_-]{1,40}")
MOST = 100_000  # annotations of one reader on one slide


class ConflictError(XmilError):
    """Another window or reader has written since; `stored` is what is there now."""

    def __init__(self, stored: dict[str, Any]) -> None:
        super().__init__("The annotations were changed elsewhere since they were read.")
        self.stored = stored


class AnnotationFiles:
    """The annotations of a run's folder; read-only if the folder is."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER
        self._lock = Lock()

    def read(self, slide: str, reader: str) -> dict[str, Any]:
        """What a reader has drawn on a slide, with its revision, and who else has."""
        path = self._path(slide, reader)
        stored = read_json(path) if path.is_file() and not path.is_symlink() else {}
        head = stored.get("xmil")
        revision = head.get("revision") if isinstance(head, dict) else None
        readers = sorted(file.stem for file in path.parent.glob("*.geojson") if READER.fullmatch(file.stem))
        place = self._folder if self._folder.is_dir() else self._folder.parent
        return {
            "revision": revision if isinstance(revision, int) else 0,
            "features": stored.get("features") if isinstance(stored.get("features"), list) else [],
            "origin": head.get("origin") if isinstance(head, dict) else None,
            "readers": readers,
            "writable": os.access(place, os.W_OK),
        }

    def write(self, slide: str, reader: str, body: Any) -> dict[str, Any]:
        """Store a reader's annotations if they were drawn over what is there; give the new revision."""
        path = self._path(slide, reader)
        body = body if isinstance(body, dict) else {}
        document, base = body.get("document"), body.get("revision")
        if not isinstance(document, dict) or not isinstance(document.get("features"), list):
            raise InputError('The body must be {"revision": 0, "document": {"features": [...]}}.')
        if isinstance(base, bool) or not isinstance(base, int) or base < 0:
            raise InputError("The revision must be a number from 0 up.")
        if len(document["features"]) > MOST:
            raise InputError(f"A reader can keep {MOST:,} annotations on a slide; export them in parts.")
        with self._lock:
            stored = self.read(slide, reader)
            if base != stored["revision"]:
                raise ConflictError(stored)
            about = {"slide": slide, "reader": reader, "revision": base + 1}
            head = document.get("xmil")
            document = {**document, "xmil": {**(head if isinstance(head, dict) else {}), **about}}
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = error.strerror
                raise WriteError(f"Annotations cannot be kept in the run's folder ({reason}).") from None
            write_text(path, json.dumps(document) + "\n")
        return {"revision": base + 1}

    def _path(self, slide: str, reader: str) -> Path:
        if not READER.fullmatch(reader):
            raise InputError("A reader's name has 1 to 40 letters, digits, '-' or '_'.")
        folder = self._folder / slide
        if not is_plain(slide) or self._folder.is_symlink() or folder.is_symlink():
            raise InputError("Annotations of this slide cannot be kept: its name or folder leads elsewhere.")
        return folder / f"{reader}.geojson"
