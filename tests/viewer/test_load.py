"""Fifty clients at once on a real server, and the server as a command: start, port, end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import xmil
from tests.viewer.make_run import Made
from xmil.viewer.server import BackgroundServer, open_socket
from xmil.viewer.static_copy import tile_numbers

COMMAND = [sys.executable, "-m", "xmil.cli", "view"]


@contextmanager
def running(*arguments: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command as a process of its own, and the port it listens on."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments), "--no-browser"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, _port(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _port(process: subprocess.Popen[str]) -> int:
    """The port in the address that the command prints."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"http://[^/]+:(\d+)/", line)
        if found:
            return int(found[1])
    raise AssertionError(process.communicate()[1])  # it ended


def memory(pid: int) -> int:
    """Resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def fetch(port: int, targets: list[str]) -> list[int]:
    """The statuses of so many requests over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    statuses = []
    for target in targets:
        connection.request("GET", target)
        answer = connection.getresponse()
        body = answer.read()
        statuses.append(answer.status if body[:2] == b"\xff\xd8" or not target.endswith(".jpeg") else 0)
    connection.close()
    return statuses


def test_fifty_clients_and_an_interrupt(made: Made) -> None:
    """No error, bounded memory; the interrupt ends the server without a word and with code 0."""
    with running(made.runs[0], "--slides", made.slides, "--port", 0) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/api/slides/0/slide.json")
        image = json.load(connection.getresponse())["image"]
        connection.close()
        tiles = [f"/tiles/{key}/{z}/{x}_{y}.jpeg" for key in range(3) for z, x, y in tile_numbers(image)]
        before = memory(process.pid) if sys.platform == "linux" else 0
        with ThreadPoolExecutor(50) as pool:
            jobs = [pool.submit(fetch, port, tiles[i::50] + tiles[i::97]) for i in range(50)]
            statuses = [status for job in jobs for status in job.result()]
        assert len(statuses) > 500
        assert set(statuses) == {200}
        if sys.platform == "linux":
            assert memory(process.pid) - before < 300 << 20
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "Traceback" not in error


def test_clients_that_leave_do_no_harm(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Panning breaks off many requests: they are dropped without an error, and others are served."""
    listening = open_socket("127.0.0.1", 0)
    port, server = listening.getsockname()[1], BackgroundServer(app, listening)
    try:
        for i in range(150):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as client:
                target = f"/tiles/{i % 3}/12/{i % 12}_{i % 8}.jpeg"
                client.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert fetch(port, ["/tiles/0/12/0_0.jpeg", "/api/run.json"]) == [200, 200]
    finally:
        server.stop()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_the_next_free_port_or_a_clear_word(made: Made) -> None:
    with running(made.runs[0]) as (_, first), running(made.runs[0]) as (_, second):
        assert second != first
        done = subprocess.run(
            [*COMMAND, str(made.runs[0]), "--port", str(first), "--no-browser"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1
        assert "another port" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["{none}"], "none: no such folder"),
        (["{slides}"], "not a run"),
        (["{run}", "--slides", "{none}"], "no such folder"),
        (["{run}", "--features", "{none}"], "no such folder"),
        (["{run}", "--model", "{model}"], "--features"),
        (["{run}", "--features", "{features}", "--model", "{none}"], "no such file"),
        (["{run}", "--port", "70000"], "another port"),
        (["{run}", "--host", "192.0.2.1"], "192.0.2.1"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(made: Made, arguments: list[str], word: str) -> None:
    places = {
        "run": made.runs[0],
        "none": made.slides / "none",
        "slides": made.slides,
        "model": made.models[0],
        "features": made.features,
    }
    given = [argument.format(**places) for argument in arguments]
    from xmil.cli._app import run

    assert _said(run, ["view", *given, "--no-browser"], word)


def _said(run: Any, arguments: list[str], word: str) -> bool:
    import contextlib
    import io

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        code = run(arguments)
    line = told.getvalue().strip()
    assert (code, len(line.splitlines())) == (2, 1), line
    assert word in line
    return True


def test_an_open_address_gets_a_token(made: Made) -> None:
    process = subprocess.Popen(
        [*COMMAND, str(made.runs[0]), "--host", "0.0.0.0", "--port", "0", "--no-browser"],  # noqa: S104
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "XMIL_TOKEN"},
    )
    try:
        assert process.stdout is not None
        lines = ""
        while "http://" not in lines:
            lines += (line := process.stdout.readline())
            assert line, process.communicate()[1]
        found = re.search(r":(\d+)/\?token=(\S{20,})", lines)
        assert found, lines
        port, token = int(found[1]), found[2]
        assert fetch(port, ["/api/run.json", f"/api/run.json?token={token}"]) == [401, 200]
    finally:
        process.kill()
        process.communicate()


def test_view_in_a_notebook(made: Made) -> None:
    shown = xmil.view(made.runs, slides=made.slides, features=made.features, model=made.models, port=0)
    try:
        html = shown._repr_html_()
        assert shown.url in html
        assert html.startswith("<iframe")
        port = int(shown.url.rsplit(":", 1)[1].strip("/"))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/api/run.json", headers={"Sec-Fetch-Site": "same-origin"})
        answer = connection.getresponse()
        assert json.load(answer)["whatif"] is True
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'self' http://localhost:*" in policy
        assert answer.headers["x-frame-options"] is None
        connection.close()
        assert shown.running
    finally:
        shown.stop()
    assert not shown.running
    with socket.socket() as free:
        free.bind(("127.0.0.1", port))  # the port is free again
    with xmil.view(made.runs[0], port=0) as again:
        assert again.running
    assert not again.running


def test_slides_without_a_picture_are_counted(made: Made, tmp_path: Path) -> None:
    from xmil.viewer.collection import Collection

    assert Collection(made.runs, slides=made.slides).missing_pictures() == (0, 3)
    assert Collection(made.runs, slides=tmp_path).missing_pictures() == (3, 3)
    (tmp_path / "run" / "slides").mkdir(parents=True)
    assert Collection([tmp_path / "run"]).missing_pictures() == (0, 0)
