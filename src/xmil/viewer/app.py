"""The application: routes from numbers to bytes. Names and paths from the client never reach the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial, wraps
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

from xmil._version import __version__
from xmil.core.errors import InputError, XmilError, refused
from xmil.core.text import parse_json
from xmil.viewer.annotations import READER, AnnotationFiles, ConflictError
from xmil.viewer.cache import to_json
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.deepzoom import NoPictureError
from xmil.viewer.features import CaseBags, CohortIndex
from xmil.viewer.server import MAX_BODY, Guard, Rules, TooLargeError, bounded, error_response
from xmil.viewer.static_copy import NOT_BUILT, content_type, page_files
from xmil.viewer.wall import CohortWall
from xmil.viewer.whatif import AbandonedError, WhatIf

logger = logging.getLogger(__name__)

JSON = "application/json"
MAX_NAMES = 1 << 20  # bytes of a request that names concepts and classes
WATCH = 0.2  # seconds between checks whether the client is still connected
NUMBER = {"type": "integer", "minimum": 0}
PATCHES = {"type": "array", "items": {"oneOf": [NUMBER, {"type": "array"}]}}
QUESTION = {
    "type": "object",
    "properties": {"run": NUMBER, "remove": PATCHES, "keep": PATCHES},
    "oneOf": [{"required": ["remove"]}, {"required": ["keep"]}],
}
LEFT = {
    "type": "object",
    "properties": {
        "run": NUMBER,
        "keep": PATCHES,
        "method": {"type": "string"},
        "targets": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["run", "keep", "method", "targets"],
}
NOTES = {"type": "object", "properties": {"revision": NUMBER}, "required": ["revision", "document"]}
NAMES = {"type": "object", "properties": {"classes": {"type": "object"}, "concepts": {"type": "object"}}}
BODIES = {  # by end of address
    "whatif": QUESTION,
    "explain": LEFT,
    "annotations-{reader}.json": NOTES,
    "names-{run}.json": NAMES,
}


class PageSite:
    """A page and its routes, served by a bounded number of threads."""

    front = "index.html"

    def __init__(self) -> None:
        cores = os.cpu_count() or 2
        self._reading = anyio.CapacityLimiter(max(4, cores))
        self._drawing, self._decoding = (anyio.CapacityLimiter(max(2, cores)) for _ in range(2))

    def arguments(self, request: Request) -> list[Any]:
        """The arguments of the functions behind the routes: the numbers in the address."""
        return list(request.path_params.values())

    async def page(self, request: Request) -> Response:
        """Send a file of the built page."""
        name = request.path_params.get("name") or self.front
        files = await anyio.to_thread.run_sync(page_files, limiter=self._reading)
        if not files and name == self.front:
            return Response(NOT_BUILT + "\n", 503, media_type="text/plain")
        if name not in files:
            raise HTTPException(404)
        content = await anyio.to_thread.run_sync(files[name].read_bytes, limiter=self._reading)
        return _tagged(request, content, content_type(name))

    async def answer(
        self, request: Request, body: bytes, make: Callable[..., Any], limiter: anyio.CapacityLimiter
    ) -> Response:
        """Answer a POST with the result of `make` for the arguments and the body, which is JSON."""

        def work() -> bytes:
            try:
                content = parse_json(body)
            except (ValueError, RecursionError):
                raise InputError("The body is not JSON.") from None
            return to_json(make(*self.arguments(request), content))

        return Response(await anyio.to_thread.run_sync(work, limiter=limiter), media_type=JSON)

    def _get(
        self, path: str, make: Callable[..., Any], limiter: anyio.CapacityLimiter | None = None
    ) -> Route:
        """Answer with the result of `make` for the arguments, as JSON unless it is bytes."""

        def work(request: Request) -> bytes:
            content = make(*self.arguments(request))
            return content if isinstance(content, bytes) else to_json(content)

        async def endpoint(request: Request) -> Response:
            content = await anyio.to_thread.run_sync(work, request, limiter=limiter or self._reading)
            return _tagged(request, content, content_type(path))

        endpoint.__doc__ = make.__doc__
        return Route(path, endpoint)

    def _draw(self, path: str, make: Callable[..., bytes]) -> Route:
        """Answer with a picture, unless the client has left."""

        async def endpoint(request: Request) -> Response:
            async with self._drawing:
                if await request.is_disconnected() or await request.is_disconnected():  # body, then the end
                    return Response(status_code=499)
                arguments = self.arguments(request)
                content = await anyio.to_thread.run_sync(make, *arguments, limiter=self._decoding)
            return _tagged(request, content, content_type(path))

        endpoint.__doc__ = make.__doc__
        return Route(path, endpoint)


class Site(PageSite):
    """The routes over one collection."""

    def __init__(self, collection: Collection, models: Sequence[Path] = ()) -> None:
        super().__init__()
        self.collection = collection
        self.bags = CaseBags(collection)
        self.wall = CohortWall(collection)
        self.index = CohortIndex(collection, self.bags)
        self.annotations = AnnotationFiles(collection.runs[0].path)
        self.whatif = WhatIf(collection, self.bags, models) if models else None
        self._thinking = anyio.CapacityLimiter(1)
        shown, slide, get, draw = collection, "/api/slides/{key:int}", self._get, self._draw
        notes, names = f"{slide}/annotations-{{reader}}.json", "/api/names-{run:int}.json"
        by_number = self._by_number
        self.routes = [
            Route("/", self.page, include_in_schema=False),
            get("/api/run.json", self.overview),
            get("/api/openapi.json", self.describe),
            get("/api/columns-{run:int}.json", self.wall.columns),
            get("/api/scales-{run:int}.json", self.wall.scales),
            get("/api/wall-{run:int}-{column:int}.json", self.wall.wall),
            get("/api/agreement-{run:int}.json", self.agreement),
            get(names, self.names),
            Route(names, self.name, methods=["POST"]),
            draw(f"{slide}/small-{{run:int}}-{{column:int}}.png", self.wall.small),
            get(f"{slide}/slide.json", shown.describe),
            get(f"{slide}/evidence-{{run:int}}.bin", shown.scores),
            draw(f"{slide}/thumbnail.jpeg", by_number(shown.pictures.thumbnail)),
            draw(f"{slide}/patch-{{run:int}}-{{index:int}}.jpeg", shown.patch),
            get(f"{slide}/similar-{{run:int}}-{{index:int}}.json", self.bags.similar),
            get(f"{slide}/inside-{{run:int}}.json", shown.inside),
            get(f"{slide}/concepts-{{run:int}}.json", shown.concepts),
            get(f"{slide}/concept-{{run:int}}-{{concept:int}}.bin", shown.concept),
            get(f"{slide}/pairs-{{run:int}}.json", shown.pairs),
            get(f"{slide}/alike-{{run:int}}-{{index:int}}.json", self.index.ask),
            get(f"{slide}/deciding-{{run:int}}.json", self.decide, self._thinking),
            get(notes, by_number(self.annotations.read)),
            Route(notes, self.store, methods=["POST"]),
            Route(f"{slide}/whatif", self.ask, methods=["POST"]),
            Route(f"{slide}/explain", self.explain, methods=["POST"]),
            draw("/tiles/{key:int}/{level:int}/{column:int}_{row:int}.jpeg", by_number(shown.pictures.tile)),
        ]
        if shown.labels:  # labels may name patients, so they have an address only if the user serves them
            self.routes.append(draw(f"{slide}/label.jpeg", by_number(shown.pictures.label)))
        self.routes.append(Route("/{name:path}", self.page, include_in_schema=False))

    async def store(self, request: Request) -> Response:
        """Store a reader's annotations, or answer 409 with the current ones."""
        return await self.answer(
            request, await json_body(request), self._by_number(self.annotations.write), self._reading
        )

    async def name(self, request: Request) -> Response:
        """Name concepts, or add classes of annotations, for all readers of a run."""
        return await self.answer(
            request,
            await json_body(request, MAX_NAMES),
            lambda run, names: self.collection.run(run).names.write(names),
            self._reading,
        )

    async def ask(self, request: Request) -> Response:
        """Predict without some patches, or only from some."""
        return await self.answer(
            request,
            await json_body(request),
            lambda key, question: self._models(key).ask(key, question),
            self._thinking,
        )

    async def explain(self, request: Request) -> Response:
        """Explain the remaining patches of a slide; stop if the client leaves."""
        body = await json_body(request)  # before the watch, which would consume it
        abandoned = Event()

        async def watch() -> None:
            while not await request.is_disconnected():
                await anyio.sleep(WATCH)
            abandoned.set()

        def explain(key: int, body: Any) -> dict[str, Any]:
            return self._models(key).explain(key, body, abandoned)

        outcome: Response | Exception
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            try:
                outcome = await self.answer(request, body, explain, self._thinking)
            except Exception as error:  # raised later, since the task group would wrap it
                outcome = error
            group.cancel_scope.cancel()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def overview(self) -> dict[str, Any]:
        """List the runs and their slides."""
        return {**self.collection.overview(), "whatif": self.whatif is not None}

    def agreement(self, run: int) -> dict[str, Any]:
        """Compare readers' regions with a run's evidence, by slide and overall."""
        from xmil.runs.agreement import FOLDER, compare_annotations

        shown, place = self.collection.run(run), self.collection.runs[0].path / FOLDER
        if not place.is_dir():
            return {"rows": [], "summary": [], "left_out": []}
        agreement = compare_annotations(shown, place)
        reasons = [
            row["error"].replace(f"{place}/", "").replace(f"{shown.path}/", "") for row in agreement.left_out
        ]
        return {"rows": agreement.rows, "summary": agreement.summary, "left_out": reasons}

    def names(self, run: int) -> dict[str, Any]:
        """Read readers' names of a run's concepts, and the classes of annotations they added."""
        return self.collection.run(run).names.read()

    def decide(self, key: int, run: int) -> dict[str, Any]:
        """Find a smallest set of patches whose removal changes the prediction."""
        return self._models(key).find_deciding(key, run)

    def describe(self) -> dict[str, Any]:
        """Describe every route, as OpenAPI."""
        paths: dict[str, Any] = {}
        text = {"type": "string", "pattern": f"^{READER}$"}
        error = {"content": {JSON: {"schema": {"type": "object", "required": ["error"]}}}}
        for route in (route for route in self.routes if route.include_in_schema):
            path, posted = route.path_format, "POST" in (route.methods or ())
            operation: dict[str, Any] = {
                "summary": (route.endpoint.__doc__ or "").partition("\n")[0],
                "parameters": [
                    {"name": n, "in": "path", "required": True, "schema": text if n == "reader" else NUMBER}
                    for n in route.param_convertors
                ],
                "responses": {
                    "200": {"description": "Found.", "content": {JSON if posted else content_type(path): {}}},
                    "4XX": {"description": "One sentence with the reason.", **error},
                },
            }
            if posted:
                schema = BODIES[path.rpartition("/")[2]]
                operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
            paths.setdefault(path, {})["post" if posted else "get"] = operation
        return {"openapi": "3.1.0", "info": {"title": "xmil viewer", "version": __version__}, "paths": paths}

    def _by_number(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of a slide's name as one of the slide's number."""
        return wraps(work)(lambda key, *rest: work(self.collection.slide(key), *rest))

    def _models(self, key: int) -> WhatIf:
        """The models, after a check that the slide exists."""
        self.collection.slide(key)
        if self.whatif is None:
            raise MissingError(
                "What-if needs a model and features; start the viewer with `model=`, `features=`."
            )
        return self.whatif


def create_app(collection: Collection, *, models: Sequence[Path] = (), rules: Rules | None = None) -> ASGIApp:
    """Make the application behind its guard; `models` answer what-if questions."""
    site = Site(collection, models)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        if site.whatif is not None:
            Thread(target=site.whatif.warm, name="xmil models", daemon=True).start()
        yield
        collection.pictures.close()

    return guard(site.routes, lifespan, rules)


def guard(
    routes: Sequence[Route], lifespan: Any, rules: Rules | None, statuses: Mapping[Any, int] | None = None
) -> ASGIApp:
    """Put routes behind the guard; map types of errors to status codes."""
    known: dict[Any, int] = {
        MissingError: 404,
        NoPictureError: 404,
        ConflictError: 409,
        AbandonedError: 499,
        InputError: 400,
        XmilError: 422,
        TooLargeError: 413,
        ClientDisconnect: 400,
        Exception: 500,
        **(statuses or {}),
    }
    handlers: dict[Any, Any] = {kind: partial(_fail, status) for kind, status in known.items()}
    handlers[HTTPException] = _fail_http
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, rules or Rules())


async def json_body(request: Request, most: int = MAX_BODY) -> bytes:
    """Read the body of a request; stop beyond `most` bytes, because parsing a long text delays all others."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise HTTPException(415, "The request body must be application/json.")
    return await Request(request.scope, bounded(request.receive, most)).body()


async def _fail(status: int, _: Request, error: Exception) -> Response:
    sentence = str(error) or "The request was interrupted."
    if status == 500:
        cause = refused(error) if isinstance(error, OSError) else None
        logger.error("%s", cause or f"unexpected {type(error).__name__}: {error}")
        sentence = "The server failed on this request; see its log."
    return error_response(status, sentence, **getattr(error, "stored", {}))


async def _fail_http(_: Request, error: HTTPException) -> Response:
    sentences = {404: "This address does not exist.", 405: "This address does not support that method."}
    sentence = sentences.get(error.status_code, error.detail)
    return error_response(error.status_code, sentence, error.headers)


def _tagged(request: Request, content: bytes, kind: str) -> Response:
    """Send the content, or 304 if the browser already has it."""
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=kind, headers={"etag": tag})
