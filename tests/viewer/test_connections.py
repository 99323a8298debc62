"""Idle and slow connections: they are closed in time, and never keep others out."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xmil.cli.view import _token
from xmil.core.errors import InputError
from xmil.viewer.server import BackgroundServer, Guard, LimitedProtocol, Rules, open_socket

GET = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture
def place() -> Iterator[tuple[str, int]]:
    listening = open_socket("127.0.0.1", 0)
    server = BackgroundServer(Guard(hello, Rules()), listening)
    yield listening.getsockname()
    server.stop()


def talk(place: tuple[str, int], content: bytes = GET) -> bytes:
    with socket.create_connection(place, timeout=120) as client:
        client.sendall(content)
        return client.recv(1000)


def _answer(client: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"hi"):
        found += (more := client.recv(1000))
        assert more, found
    return found


def closed(client: socket.socket) -> bool:
    client.settimeout(120)
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_sockets_do_not_keep_others_out(place: tuple[str, int]) -> None:
    idle = [socket.create_connection(place, timeout=120) for _ in range(530)]
    try:
        assert b"200 OK" in talk(place)
        assert closed(idle[0])  # the oldest made room
    finally:
        for client in idle:
            client.close()


@pytest.mark.parametrize(
    "part", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nab"]
)
def test_requests_that_never_end_are_closed(
    place: tuple[str, int], part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(place, timeout=120) as client:  # nor may one follow a whole request
        client.sendall(GET)
        assert _answer(client).endswith(b"hi")
        monkeypatch.setattr(LimitedProtocol, "wait", 0.2)
        client.sendall(part or b"G")
        assert closed(client)
    with socket.create_connection(place, timeout=120) as client:
        client.sendall(part)
        assert closed(client)


def test_an_answer_under_way_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only arriving is limited: an answer may take longer than that."""
    monkeypatch.setattr(LimitedProtocol, "wait", 1.0)  # a busy machine takes part of it to read the request
    monkeypatch.setattr(LimitedProtocol, "per_client", 1)
    arrived, go = threading.Event(), threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        while scope["type"] == "http" and not go.is_set():
            arrived.set()
            await asyncio.sleep(0.01)
        await hello(scope, receive, send)

    listening = open_socket("127.0.0.1", 0)
    server = BackgroundServer(slow, listening)
    with socket.create_connection(listening.getsockname(), timeout=120) as client:
        client.sendall(GET)
        assert arrived.wait(120)
        time.sleep(1.1)
        with socket.create_connection(listening.getsockname(), timeout=120) as second:
            go.set()
            assert b"200 OK" in client.recv(1000)
            second.close()
    server.stop()


def test_tokens_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("a long secret\nmore\n")
    assert _token(tmp_path / "token") == "a long secret"
    (tmp_path / "empty").write_text("")
    for name, words in {"empty": "has no token", "none": "no such file", ".": "a folder, where"}.items():
        with pytest.raises(InputError, match=words):
            _token(tmp_path / name)
    with pytest.raises(InputError, match="token"):
        _token(Path("/dev/zero"))
    monkeypatch.setenv("XMIL_TOKEN", "from the shell")
    assert _token(None) == "from the shell"
    monkeypatch.delenv("XMIL_TOKEN")
    assert _token(None) is None
