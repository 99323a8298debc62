"""Requests to the application, byte for byte as a client may send them, in process or over a socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import anyio
import numpy as np
from PIL import Image

from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection

if TYPE_CHECKING:
    from tests.viewer.make_run import Made

HOST = (b"host", b"127.0.0.1:8787")
_THREAD = ThreadPoolExecutor(1)


@dataclass(frozen=True)
class Answer:
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse)


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def ask(
    app: Any,
    target: str,
    *,
    method: str = "GET",
    headers: dict[str, str] | list[tuple[bytes, bytes]] | None = None,
    body: bytes | list[bytes] = b"",
) -> Answer:
    """One request in process; `target` is the raw path and query as on the wire."""
    path, _, query = target.partition("?")
    given = (
        headers
        if isinstance(headers, list)
        else [(key.lower().encode(), value.encode("latin-1")) for key, value in (headers or {}).items()]
    )
    given = given if any(key == b"host" for key, _ in given) else [HOST, *given]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": query.encode("utf-8", "replace"),
        "root_path": "",
        "headers": given,
        "server": ("127.0.0.1", 8787),
        "client": ("127.0.0.1", 5),
    }
    return run_apart(_call, app, scope, [body] if isinstance(body, bytes) else body)


def run_apart(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Run it in a loop in a thread of its own: where a browser is open, this thread has a loop already."""
    return _THREAD.submit(anyio.run, function, *arguments).result()


async def _call(app: Any, scope: dict[str, Any], parts: list[bytes]) -> Answer:
    waiting = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop(0)
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = sent[0]
    headers = {key.decode().lower(): value.decode("latin-1") for key, value in start["headers"]}
    return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))


def ask_socket(port: int, request: bytes, *, hang_up: bool = False, timeout: float = 120.0) -> bytes:
    """Raw bytes to a server on loopback, and all it answers until it closes or waits for more."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(request)
        if hang_up:
            connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while part := connection.recv(1 << 16):
                found += part
        except (ConnectionResetError, TimeoutError):
            pass
        return found


def pixels(content: bytes) -> Any:
    """A picture's RGB values."""
    return np.asarray(Image.open(BytesIO(content)).convert("RGB")).astype(int)


def app_of(made: Made, **options: Any) -> Any:
    """The application over the runs that were made."""
    return create_app(Collection(made.runs, slides=made.slides, **options))
