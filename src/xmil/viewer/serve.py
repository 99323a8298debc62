"""The server: a socket that is surely ours, and uvicorn on it, in the foreground or in a thread."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import uvicorn

from xmil.core.errors import InputError
from xmil.viewer.connections import PatientProtocol
from xmil.viewer.security import Rules

PORT = 8787
TRIES = 50  # ports tried from PORT on where the user names none


def open_socket(host: str, port: int | None = None) -> socket.socket:
    """A listening socket: on the port asked for, or on the first free one from 8787 on."""
    ports = range(PORT, PORT + TRIES) if port is None else [port]
    reason = ""
    for number in ports:
        try:
            return _bound(host, number)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    where = f"{host}:{port}" if port is not None else f"{host}, ports {PORT} to {PORT + TRIES - 1}"
    raise InputError(f"Cannot listen on {where} ({reason}); choose another --port or --host.")


def address(listening: socket.socket, rules: Rules) -> str:
    """The address to open, with the token where one is asked for."""
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
        self._thread = threading.Thread(target=self._serve, name="xmil viewer", daemon=True)
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

    def _serve(self) -> None:
        self._server.run(sockets=[self._listening])


def _bound(host: str, port: int) -> socket.socket:
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
            http=PatientProtocol,
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
