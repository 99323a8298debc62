"""The application: routes from numbers to bytes. No name or path from the client reaches the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Event, Thread
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from xmil.core.errors import InputError, XmilError
from xmil.core.parsing import parse_json
from xmil.viewer.annotation_files import AnnotationFiles, ConflictError
from xmil.viewer.case_bags import CaseBags, similar
from xmil.viewer.cohort_index import CohortIndex
from xmil.viewer.cohort_wall import CohortWall
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.concepts_layer import as_layer
from xmil.viewer.deepzoom import NoPictureError
from xmil.viewer.kept import to_json
from xmil.viewer.left_bag import AbandonedError, explain_left
from xmil.viewer.openapi import describe_routes
from xmil.viewer.security import Guard, Rules, TooLargeError
from xmil.viewer.static_copy import NOT_BUILT, content_type, page_files
from xmil.viewer.whatif import WhatIf

logger = logging.getLogger(__name__)

JSON, JPEG, BYTES = "application/json", "image/jpeg", "application/octet-stream"
PNG = "image/png"
WATCH = 0.2  # seconds between looks whether the client is still there
Make = Callable[..., bytes]
Endpoint = Callable[[Request], Awaitable[Response]]


class Site:
    """The routes over one collection. Work is done in threads, a bounded number of them at once."""

    def __init__(self, collection: Collection, models: Sequence[Path] = ()) -> None:
        self.collection = collection
        self.bags = CaseBags(collection)
        self.wall = CohortWall(collection)
        self.index = CohortIndex(collection, self.bags)
        self.annotations = AnnotationFiles(collection.runs[0].folder)
        self.whatif = WhatIf(collection, self.bags, models) if models else None
        cores = os.cpu_count() or 2
        self._reading = anyio.CapacityLimiter(max(4, cores))
        self._drawing, self._decoding = (anyio.CapacityLimiter(max(2, cores)) for _ in range(2))
        self._thinking = anyio.CapacityLimiter(1)

    def warm(self) -> None:
        """Load the models before the first question."""
        if self.whatif is not None:
            Thread(target=self.whatif.warm, name="xmil models", daemon=True).start()

    def routes(self) -> list[Route]:
        """All addresses there are."""
        slide = "/api/slides/{key:int}"
        return [
            Route("/", self.page),
            Route("/api/run.json", self._get(self._run, JSON)),
            Route("/api/columns-{run:int}.json", self._get(self._columns, JSON)),
            Route("/api/wall-{run:int}-{column:int}.json", self._get(self._wall, JSON)),
            Route(f"{slide}/small-{{run:int}}-{{column:int}}.png", self._draw(self._small, PNG)),
            Route("/api/openapi.json", self._get(lambda: to_json(describe_routes()), JSON)),
            Route(f"{slide}/slide.json", self._get(self._slide, JSON)),
            Route(f"{slide}/evidence-{{run:int}}.bin", self._get(self._evidence, BYTES)),
            Route(f"{slide}/thumbnail.jpeg", self._draw(self._thumbnail)),
            Route(f"{slide}/patch-{{run:int}}-{{index:int}}.jpeg", self._draw(self._patch)),
            Route(f"{slide}/similar-{{run:int}}-{{index:int}}.json", self._get(self._similar, JSON)),
            Route(f"{slide}/inside-{{run:int}}.json", self._get(self._inside, JSON)),
            Route(f"{slide}/concepts-{{run:int}}.json", self._get(self._concepts, JSON)),
            Route(f"{slide}/concept-{{run:int}}-{{concept:int}}.bin", self._get(self._concept, BYTES)),
            Route(f"{slide}/pairs-{{run:int}}.json", self._get(self._pairs, JSON)),
            Route(f"{slide}/alike-{{run:int}}-{{index:int}}.json", self._get(self._alike, JSON)),
            Route(f"{slide}/whatif", self.ask, methods=["POST"]),
            Route(f"{slide}/explain", self.explain, methods=["POST"]),
            *self._labels(slide),
            Route(f"{slide}/deciding-{{run:int}}.json", self.decide),
            Route(f"{slide}/annotations-{{reader}}.json", self.notes, methods=["GET", "POST"]),
            Route("/tiles/{key:int}/{level:int}/{column:int}_{row:int}.jpeg", self._draw(self._tile)),
            Route("/{name:path}", self.page),
        ]

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
        """A reader's annotations of a slide, read or kept."""
        if request.method != "POST":
            return await self._get(self._read_notes, JSON)(request)
        work = partial(self._keep_notes, body=await _json_body(request), **request.path_params)
        return Response(await anyio.to_thread.run_sync(work, limiter=self._reading), media_type=JSON)

    async def ask(self, request: Request) -> Response:
        """The prediction without a region, or of a region alone."""
        body = await _json_body(request)
        work = partial(self._ask, request.path_params["key"], body)
        return Response(await anyio.to_thread.run_sync(work, limiter=self._thinking), media_type=JSON)

    async def explain(self, request: Request) -> Response:
        """What is left of a slide, explained again; given up when nobody waits for it any more."""
        body, alone = await _json_body(request), Event()
        work = partial(self._explain, request.path_params["key"], body, alone)
        content = await _while_waited_for(request, alone, partial(_in_thread, work, self._thinking))
        return Response(content, media_type=JSON)

    def _labels(self, slide: str) -> list[Route]:
        """Labels may name patients: without the reader's word for it they have no address."""
        return [Route(f"{slide}/label.jpeg", self._draw(self._label))] if self.collection.labels else []

    async def decide(self, request: Request) -> Response:
        """The patches that decide, by the model."""
        work = partial(self._decide, **request.path_params)
        return Response(await anyio.to_thread.run_sync(work, limiter=self._thinking), media_type=JSON)

    def _get(self, make: Make, kind: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            work = partial(make, **request.path_params)
            return _tagged(request, await anyio.to_thread.run_sync(work, limiter=self._reading), kind)

        return endpoint

    def _draw(self, make: Make, kind: str = JPEG) -> Endpoint:
        """A picture; one that nobody waits for any more is not drawn."""

        async def endpoint(request: Request) -> Response:
            async with self._drawing:
                if await request.is_disconnected() or await request.is_disconnected():  # body, then the end
                    return Response(status_code=499)
                work = partial(make, **request.path_params)
                content = await anyio.to_thread.run_sync(work, limiter=self._decoding)
            return _tagged(request, content, kind)

        return endpoint

    def _run(self) -> bytes:
        return to_json(self.collection.overview(whatif=self.whatif is not None))

    def _columns(self, run: int) -> bytes:
        self.collection.run(run)
        named = [{"method": method, "target": target} for method, target in self.wall.columns(run)]
        return to_json({"columns": named})

    def _wall(self, run: int, column: int) -> bytes:
        return to_json(self.wall.wall(run, column))

    def _small(self, key: int, run: int, column: int) -> bytes:
        self.collection.slide(key)
        return self.wall.small(key, run, column)

    def _slide(self, key: int) -> bytes:
        return to_json(self.collection.describe(key))

    def _evidence(self, key: int, run: int) -> bytes:
        return self.collection.evidence(key, run).to_bytes()

    def _similar(self, key: int, run: int, index: int) -> bytes:
        return to_json({"neighbours": similar(self.bags.get(key, run), index)})

    def _pairs(self, key: int, run: int) -> bytes:
        return to_json(self.collection.pairs(key, run))

    def _inside(self, key: int, run: int) -> bytes:
        return to_json(self.collection.inside(key, run))

    def _concepts(self, key: int, run: int) -> bytes:
        return to_json(as_layer(self.collection.concepts(key, run)))

    def _concept(self, key: int, run: int, concept: int) -> bytes:
        values = self.collection.concepts(key, run).values
        if not concept < values.shape[1]:
            raise MissingError(f"There is no concept {concept}; the dictionary has {values.shape[1]}.")
        return values[:, concept].astype("<f4").tobytes()

    def _label(self, key: int) -> bytes:
        return self.collection.pictures.label(self.collection.slide(key))

    def _explain(self, key: int, body: bytes, alone: Event) -> bytes:
        self.collection.slide(key)
        return to_json(explain_left(self._model(), key, _parsed(body), alone))

    def _ask(self, key: int, body: bytes) -> bytes:
        self.collection.slide(key)
        return to_json(self._model().ask(key, _parsed(body)))

    def _alike(self, key: int, run: int, index: int) -> bytes:
        return to_json(self.index.ask(key, run, index))

    def _decide(self, key: int, run: int) -> bytes:
        self.collection.slide(key)
        return to_json(self._model().deciding(key, run))

    def _model(self) -> WhatIf:
        if self.whatif is None:
            raise MissingError(
                "What-if needs the model and features; start the viewer with --model and --features."
            )
        return self.whatif

    def _read_notes(self, key: int, reader: str) -> bytes:
        return to_json(self.annotations.read(self.collection.slide(key), reader))

    def _keep_notes(self, key: int, reader: str, body: bytes) -> bytes:
        return to_json(self.annotations.write(self.collection.slide(key), reader, _parsed(body)))

    def _thumbnail(self, key: int) -> bytes:
        return self.collection.pictures.thumbnail(self.collection.slide(key))

    def _tile(self, key: int, level: int, column: int, row: int) -> bytes:
        return self.collection.pictures.tile(self.collection.slide(key), level, column, row)

    def _patch(self, key: int, run: int, index: int) -> bytes:
        return self.collection.patch(key, run, index)


def create_app(collection: Collection, *, models: Sequence[Path] = (), rules: Rules | None = None) -> ASGIApp:
    """The whole application behind its guard; `models` answer what-if questions."""
    site = Site(collection, models)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        site.warm()
        yield
        collection.pictures.close()

    handlers: dict[Any, Any] = {
        MissingError: partial(_fail, 404),
        ConflictError: _conflict,
        NoPictureError: partial(_fail, 404),
        AbandonedError: partial(_fail, 499),
        InputError: partial(_fail, 400),
        XmilError: partial(_fail, 422),
        TooLargeError: partial(_fail, 413, said="The body is too large."),
        HTTPException: _http,
        ClientDisconnect: partial(_fail, 400, said="The request was interrupted."),
        Exception: partial(_fail, 500, said="The server failed on this request; see its log."),
    }
    app = Starlette(routes=site.routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, rules or Rules())


async def _in_thread(work: Callable[[], bytes], limiter: anyio.CapacityLimiter) -> bytes:
    return await anyio.to_thread.run_sync(work, limiter=limiter)


async def _while_waited_for(request: Request, alone: Event, answer: Callable[[], Awaitable[bytes]]) -> bytes:
    """The answer; `alone` is set when the client has gone."""

    async def watch() -> None:
        while not await request.is_disconnected():
            await anyio.sleep(WATCH)
        alone.set()

    made: list[bytes | Exception] = []
    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        try:
            made.append(await answer())
        except Exception as error:  # told outside: a group would wrap it
            made.append(error)
        group.cancel_scope.cancel()
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


async def _json_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise HTTPException(415, "The request body must be application/json.")
    return await request.body()


def _parsed(body: bytes) -> Any:
    try:
        return parse_json(body)
    except (ValueError, RecursionError):
        raise InputError("The body is not JSON.") from None


async def _conflict(_: Request, error: ConflictError) -> Response:
    return Response(to_json({"error": str(error), **error.held}), 409, media_type=JSON)


async def _fail(status: int, _: Request, error: Exception, said: str | None = None) -> Response:
    if status == 500:
        logger.error("unexpected %s: %s", type(error).__name__, error)
    return Response(to_json({"error": said or str(error)}), status, media_type=JSON)


async def _http(_: Request, error: HTTPException) -> Response:
    said = {404: "Nothing is served at this address.", 405: "This address does not support that method."}
    body = to_json({"error": said.get(error.status_code, error.detail)})
    return Response(body, error.status_code, headers=error.headers, media_type=JSON)


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    """The content, or the word that the browser has it already."""
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})
