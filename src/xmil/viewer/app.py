"""The application: routes from numbers to bytes. No name or path from the client reaches the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from xmil.core.errors import InputError, XmilError
from xmil.viewer.collection import Collection, Missing
from xmil.viewer.files import to_json
from xmil.viewer.page import NOT_BUILT, content_type, page_files
from xmil.viewer.security import Guard, Rules, TooLarge
from xmil.viewer.tiles import NoPicture

logger = logging.getLogger(__name__)

JSON, JPEG, BYTES = "application/json", "image/jpeg", "application/octet-stream"
Make = Callable[..., bytes]
Endpoint = Callable[[Request], Awaitable[Response]]


class Site:
    """The routes over one collection. Work is done in threads, a bounded number of them at once."""

    def __init__(self, collection: Collection) -> None:
        self.collection = collection
        cores = os.cpu_count() or 2
        self._reading = anyio.CapacityLimiter(max(4, cores))
        self._drawing = anyio.CapacityLimiter(max(2, cores))
        self._thinking = anyio.CapacityLimiter(1)

    def routes(self) -> list[Route]:
        """All addresses there are."""
        slide = "/api/slides/{key:int}"
        return [
            Route("/", self.page),
            Route("/api/run.json", self._get(self._run, JSON)),
            Route(f"{slide}/slide.json", self._get(self._slide, JSON)),
            Route(f"{slide}/evidence-{{run:int}}.bin", self._get(self._evidence, BYTES)),
            Route(f"{slide}/thumbnail.jpeg", self._draw(self._thumbnail)),
            Route(f"{slide}/patch-{{run:int}}-{{index:int}}.jpeg", self._draw(self._patch)),
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
            raise HTTPException(404, "There is nothing at this address.")
        content = await anyio.to_thread.run_sync(files[name].read_bytes, limiter=self._reading)
        return _tagged(request, content, content_type(name))

    def _get(self, make: Make, kind: str) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            work = partial(make, **request.path_params)
            return _tagged(request, await anyio.to_thread.run_sync(work, limiter=self._reading), kind)

        return endpoint

    def _draw(self, make: Make) -> Endpoint:
        """A picture; one that nobody waits for any more is not drawn."""

        async def endpoint(request: Request) -> Response:
            async with self._drawing:
                if await request.is_disconnected():
                    return Response(status_code=499)
                work = partial(make, **request.path_params)
                content = await anyio.to_thread.run_sync(work, limiter=anyio.CapacityLimiter(1))
            return _tagged(request, content, JPEG)

        return endpoint

    def _run(self) -> bytes:
        return to_json(self.collection.overview())

    def _slide(self, key: int) -> bytes:
        return to_json(self.collection.describe(key))

    def _evidence(self, key: int, run: int) -> bytes:
        return self.collection.evidence(key, run).to_bytes()

    def _thumbnail(self, key: int) -> bytes:
        return self.collection.pictures.thumbnail(self.collection.slide(key))

    def _tile(self, key: int, level: int, column: int, row: int) -> bytes:
        return self.collection.pictures.tile(self.collection.slide(key), level, column, row)

    def _patch(self, key: int, run: int, index: int) -> bytes:
        return self.collection.patch(key, run, index)


def create_app(collection: Collection, rules: Rules | None = None) -> ASGIApp:
    """The whole application behind its guard."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        collection.pictures.close()

    handlers: dict[Any, Any] = {
        Missing: partial(_fail, 404),
        NoPicture: partial(_fail, 404),
        InputError: partial(_fail, 400),
        XmilError: partial(_fail, 422),
        TooLarge: partial(_fail, 413, said="The body is too large."),
        HTTPException: _http,
        ClientDisconnect: partial(_fail, 400, said="The request was broken off."),
        Exception: partial(_fail, 500, said="The server failed on this request; its log says how."),
    }
    app = Starlette(routes=Site(collection).routes(), exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, rules or Rules())


async def _fail(status: int, _: Request, error: Exception, said: str | None = None) -> Response:
    if status == 500:
        logger.error("unexpected %s: %s", type(error).__name__, error)
    return Response(to_json({"error": said or str(error)}), status, media_type=JSON)


async def _http(_: Request, error: HTTPException) -> Response:
    said = {404: "There is nothing at this address.", 405: "The server is read-only."}
    body = to_json({"error": said.get(error.status_code, error.detail)})
    return Response(body, error.status_code, headers=error.headers, media_type=JSON)


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    """The content, or the word that the browser has it already."""
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})
