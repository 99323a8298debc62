"""The server: a socket of our own with uvicorn on it, in the foreground or in a thread."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from xmil.core.errors import InputError
from xmil.core.text import is_utf8
from xmil.viewer.cache import to_json

PORT = 8787
TRIES = 50  # ports to try from PORT if the user names none


def open_socket(host: str, port: int | None = None) -> socket.socket:
    """Open a listening socket on this port, or on the first free one from 8787."""
    ports = range(PORT, PORT + TRIES) if port is None else [port]
    reason = ""
    for number in ports:
        try:
            return _bind(host, number)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    where = f"{host}:{port}" if port is not None else f"{host}, ports {PORT} to {PORT + TRIES - 1}"
    raise InputError(f"Cannot listen on {where} ({reason}); choose another port or host.")


def address(listening: socket.socket, rules: Rules) -> str:
    """Make the address to open, with the token if there is one."""
    host, port = listening.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  # named, not bound
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={quote(rules.token, safe='')}" if rules.token else "")


def serve(app: Any, listening: socket.socket) -> None:
    """Serve until interrupted."""
    with suppress(KeyboardInterrupt):
        _server(app).run(sockets=[listening])


class BackgroundServer:
    """A server in a thread of its own; `stop` ends it."""

    def __init__(self, app: Any, listening: socket.socket) -> None:
        self._server = _server(app)
        self._listening = listening
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="xmil viewer", daemon=True
        )
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            self._thread.join(0.01)

    @property
    def running(self) -> bool:
        """Whether the server still answers."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the server and free its port."""
        self._server.should_exit = True
        self._thread.join(10)
        self._listening.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(256)
    except BaseException:
        listening.close()
        raise
    return listening


def _server(app: Any) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=LimitedProtocol,
            ws="none",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=512,
            timeout_keep_alive=20,
            timeout_graceful_shutdown=2,
        )
    )


METHODS = ("GET", "HEAD", "POST")
MAX_URL = 2048
MAX_BODY = 32 << 20  # 100,000 annotations
MIN_TOKEN = 8
POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
NOTEBOOKS = "http://localhost:* http://127.0.0.1:* https://localhost:* https://127.0.0.1:*"


@dataclass(frozen=True)
class Rules:
    """The server's host, its token, and whether notebooks on this machine may embed it."""

    host: str = "127.0.0.1"
    token: str | None = None
    framed: bool = False

    def __post_init__(self) -> None:
        if self.token is not None and len(self.token) < MIN_TOKEN:
            raise InputError(f"A token must have at least {MIN_TOKEN} characters.")
        if self.token is not None and not is_utf8(self.token):
            raise InputError("A token must be text in UTF-8; use letters and digits.")
        if self.token is None and not is_loopback(self.host):
            raise InputError(f"Serving on {self.host} requires a token; pass one, or use 127.0.0.1.")

    @property
    def policy(self) -> str:
        """The content security policy."""
        return f"{POLICY}; frame-ancestors 'self'{' ' + NOTEBOOKS if self.framed else ''}"

    @property
    def cookie(self) -> str:
        """The value of the cookie: a digest of the token, not the token."""
        return hashlib.sha256(f"xmil viewer {self.token}".encode()).hexdigest()

    def knows(self, token: str) -> bool:
        """Whether a token is the right one."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def is_loopback(host: str) -> bool:
    """Whether an address belongs to this machine.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Middleware that checks every request, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on with a bounded body and security headers."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # websockets are not accepted
        guarded = self._guarded(send)
        if (refusal := self._refusal(scope, Headers(scope=scope))) is not None:
            await _refuse(scope, *refusal)(scope, receive, guarded)
        elif self.rules.token is not None and (location := self._without_token(scope)) is not None:
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            cookie = f"{_cookie_name(scope)}={self.rules.cookie}; HttpOnly; SameSite=Strict; Path=/{secure}"
            redirect = Response(status_code=303, headers={"location": location, "set-cookie": cookie})
            await redirect(scope, receive, guarded)
        else:
            await self.app(scope, bounded(receive, MAX_BODY), guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Return the status and sentence for a request to refuse, else None."""
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL:
            return 414, "The address is too long."
        if not self._host_is_ours(headers):
            return 403, "The Host header is not this server's."
        if _is_foreign(scope, headers):
            return 403, "Requests from other sites are refused."
        if scope["method"] not in METHODS:
            return 405, "The server is read-only."
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 18 or int(length) > MAX_BODY:
            return 413, "The body is too large."
        if self.rules.token is not None and not self._may_enter(scope, headers):
            return 401, "A token is required: open the address that the server printed."
        return None

    def _host_is_ours(self, headers: Headers) -> bool:
        """Whether the Host header is valid; on loopback, a name of another machine is DNS rebinding."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return False
        try:
            parts = urlsplit(f"//{hosts[0]}")
            _ = parts.port  # raises for an invalid port
        except ValueError:
            return False
        if parts.hostname is None or parts.username is not None or parts.path:
            return False
        return not is_loopback(self.rules.host) or is_loopback(parts.hostname)

    def _may_enter(self, scope: Scope, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.rules.knows(token.strip()):
            return True
        connection = HTTPConnection(scope)
        if any(map(self.rules.knows, connection.query_params.getlist("token"))):
            return True
        cookie = connection.cookies.get(_cookie_name(scope), "")
        return hmac.compare_digest(cookie.encode(), self.rules.cookie.encode())

    def _without_token(self, scope: Scope) -> str | None:
        """Return the address to redirect to, if the page was opened with a token in its address."""
        query = HTTPConnection(scope).query_params.multi_items()
        others = [(key, value) for key, value in query if key != "token"]
        if scope["method"] != "GET" or others == query or scope["path"] not in ("/", "/index.html"):
            return None
        return str(scope["path"]) + (f"?{urlencode(others)}" if others else "")

    def _guarded(self, send: Send) -> Send:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.update({**HEADERS, "content-security-policy": self.rules.policy})
                headers.setdefault("cache-control", "no-cache")
                if not self.rules.framed:
                    headers["x-frame-options"] = "SAMEORIGIN"
            await send(message)

        return guarded


class TooLargeError(Exception):
    """A request body beyond the limit."""


def bounded(receive: Receive, most: int) -> Receive:
    """Receive a body of at most `most` bytes."""
    received = 0

    async def receive_within() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise TooLargeError("The body is too large.")
        return message

    return receive_within


def _refuse(scope: Scope, status: int, sentence: str) -> Response:
    """Refuse a request: with a page for a person, with JSON for a program."""
    headers = {}
    if status == 405:
        path = str(scope["path"])
        reads = "GET, HEAD, POST" if "/annotations-" in path or "/names-" in path else "GET, HEAD"
        headers["allow"] = "POST" if path.endswith(("/whatif", "/explain")) else reads
    if Headers(scope=scope).get("accept", "").startswith("text/html"):
        page = f"<!doctype html><meta charset=utf-8><title>xmil</title><h1>xmil</h1><p>{escape(sentence)}</p>"
        return HTMLResponse(page, status, headers)
    return error_response(status, sentence, headers)


def error_response(
    status: int, sentence: str, headers: Mapping[str, str] | None = None, **more: Any
) -> Response:
    """Send an error's sentence as JSON."""
    return Response(to_json({"error": sentence, **more}), status, headers, media_type="application/json")


def _is_foreign(scope: Scope, headers: Headers) -> bool:
    """Whether another site's page sent the request; links to the page itself are allowed."""
    origin = headers.get("origin")
    if origin is not None and origin.split("://")[-1].lower() != headers.get("host", "").lower():
        return True
    site = headers.get("sec-fetch-site", "none")
    opened = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site not in ("none", "same-origin") and not opened


def _cookie_name(scope: Scope) -> str:
    """Name the cookie by port, so that servers on one machine do not share it."""
    server = scope.get("server")
    return f"xmil-{server[1] if server else 0}"


WAIT = 10.0  # seconds for a complete request to arrive, headers and body
GRACE = 0.5  # seconds until the server notices that clients have left
PER_CLIENT = 64  # connections per address; a browser opens six


class LimitedProtocol(H11Protocol):
    """HTTP with a limit on the time a request takes to arrive and on a client's connections."""

    wait, per_client, grace = WAIT, PER_CLIENT, GRACE

    def connection_made(self, transport: Any) -> None:
        """Watch the new connection, and close an idle one if the client has too many."""
        super().connection_made(transport)
        self.opened = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, and limit the time until an unfinished request is complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._stop()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether the server is not answering a request."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Run a timer from the connection or the first byte of a request to the end of its body."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.wait, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_room(self) -> None:
        connections = self._of_client()
        waiting = sorted((p for p in connections if p.idle and p is not self), key=lambda p: p.opened)
        for protocol in waiting[: max(0, len(connections) - self.per_client)]:
            protocol.transport.close()
        if len(connections) - len(waiting) > self.per_client:  # too many are busy
            self.loop.call_later(self.grace, self._yield)

    def _yield(self) -> None:
        """Close this connection if too many are still busy, after clients that left are gone."""
        connections = self._of_client()
        if self in connections and sum(not p.idle for p in connections) > self.per_client:
            self.transport.close()

    def _of_client(self) -> list[LimitedProtocol]:
        """List the connections of this client."""
        host = (self.client or (None,))[0]
        protocols = (p for p in self.connections if isinstance(p, LimitedProtocol))
        return [p for p in protocols if (p.client or (None,))[0] == host]
