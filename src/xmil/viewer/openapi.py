"""What the server answers, as an OpenAPI description."""

from __future__ import annotations

from typing import Any

from xmil._version import __version__

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
_ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "/api/slides/{key}/whatif": (_QUESTION, "The prediction without patches, or of patches alone."),
    "/api/slides/{key}/explain": (_LEFT, "Patches that are kept, explained without the others."),
}
_READ = {
    "/api/run.json": ("application/json", "The runs and their slides."),
    "/api/openapi.json": ("application/json", "This description."),
    "/api/columns-{run}.json": ("application/json", "The signed methods and targets of a run, by number."),
    "/api/wall-{run}-{column}.json": (
        "application/json",
        "The patches of all slides that say most for and against, by class and by right and wrong.",
    ),
    "/api/slides/{key}/small-{run}-{column}.png": ("image/png", "A slide's scores, at most 64 px."),
    "/api/slides/{key}/slide.json": ("application/json", "A slide: size, scores' columns, certificate."),
    "/api/slides/{key}/evidence-{run}.bin": (
        "application/octet-stream",
        "Little endian: int32 x0[n], int32 y0[n] where placed, then float32[n] for each column.",
    ),
    "/api/slides/{key}/thumbnail.jpeg": ("image/jpeg", "The whole slide, at most 256 px."),
    "/api/slides/{key}/patch-{run}-{index}.jpeg": ("image/jpeg", "A patch, at most 512 px."),
    "/api/slides/{key}/similar-{run}-{index}.json": ("application/json", "The patches most like one."),
    "/api/slides/{key}/pairs-{run}.json": (
        "application/json",
        "Pairs of patches that act together, by target: rows of both, value, and whether it is sure.",
    ),
    "/api/slides/{key}/concepts-{run}.json": (
        "application/json",
        "The concepts of `xmil insight` with their relevance in a slide.",
    ),
    "/api/slides/{key}/concept-{run}-{concept}.bin": (
        "application/octet-stream",
        "Little endian: float32[n], the part of each patch's score that goes through a concept.",
    ),
    "/api/slides/{key}/alike-{run}-{index}.json": (
        "application/json",
        "The patches of other slides most like one; while the index is made, how far it is.",
    ),
    "/api/slides/{key}/deciding-{run}.json": (
        "application/json",
        "The smallest set of patches found whose removal changes the prediction.",
    ),
    "/api/slides/{key}/inside-{run}.json": (
        "application/json",
        "Maps inside patches: level-0 boxes, values row by row, and score = sum + constant + other.",
    ),
    "/api/slides/{key}/annotations-{reader}.json": (
        "application/json",
        "A reader's annotations with their revision. POST keeps new ones, or answers 409 with those there.",
    ),
    "/tiles/{key}/{level}/{column}_{row}.jpeg": ("image/jpeg", "A Deep Zoom tile."),
}


def describe_routes() -> dict[str, Any]:
    """The description of every route."""
    paths = {path: {"get": _operation(path, *about)} for path, about in _READ.items()}
    posted = {path: {"post": _question(path, schema, text)} for path, (schema, text) in _ASKED.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "xmil viewer", "version": __version__},
        "paths": {**paths, **posted},
    }


def _question(path: str, schema: dict[str, Any], summary: str) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {**_operation(path, "application/json", summary), "requestBody": body}


def _operation(path: str, kind: str, summary: str) -> dict[str, Any]:
    names = [part.split("}")[0] for part in path.split("{")[1:]]
    number: dict[str, Any] = {"type": "integer", "minimum": 0}
    text: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"}
    error = {"content": {"application/json": {"schema": {"type": "object", "required": ["error"]}}}}
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
