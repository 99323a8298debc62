"""Servers to be killed: `xmil view` of a run that is annotated, and of a reading study.

A client outside the server draws or answers one thing after another and notes what was acknowledged. After a
kill the same server is started again, and what it acknowledged must be there.
"""

from __future__ import annotations

import csv
import json
import shutil
import socket
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SERVERS = {"view": "done_explain", "study": "done_study"}  # the folder of `prepare` that each serves
DRAWN = 12  # annotations; a study has as many answers as its reader gives
Acknowledged = list[str]


def serve(command: str, data: Path, out: Path) -> list[str]:
    """The words of the server, over a copy of its folder where there is none yet."""
    if not out.exists():
        shutil.copytree(data / SERVERS[command], out)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["view", str(out), "--port", str(port), "--no-browser", "--json"]


def talk(command: str, said: str, out: Path, acknowledged: Acknowledged) -> list[str]:
    """Draw or answer until all is done or the server is gone; what it had acknowledged and lost."""
    about = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    client = HTTPConnection(urlsplit(about["address"]).netloc, timeout=60)
    try:
        return TALKS[command](client, out, acknowledged)
    except (OSError, HTTPException):  # killed
        return []
    finally:
        client.close()


def _ask(client: HTTPConnection, method: str, path: str, body: Any = None, cookie: str = "") -> Any:
    headers = {"content-type": "application/json", "cookie": cookie}
    client.request(method, path, None if body is None else json.dumps(body).encode(), headers)
    answer = client.getresponse()
    content = json.loads(answer.read())
    if answer.status != 200:
        raise ValueError(f"{path}: {answer.status}, {content}")
    return content


def _draw(client: HTTPConnection, out: Path, acknowledged: Acknowledged) -> list[str]:  # noqa: ARG001
    """Annotations on one slide, one after another."""
    place = "/api/slides/0/annotations-anna.json"
    stored = _ask(client, "GET", place)
    drawn = [feature["id"] for feature in stored["features"]]
    lost = [f"acknowledged and lost: {name}" for name in acknowledged if name not in drawn]
    for number in range(len(drawn), DRAWN):
        drawn.append(f"a{number}")
        square = {"type": "Polygon", "coordinates": [[[0, 0], [9, 0], [9, 9], [0, 0]]]}
        features = [{"type": "Feature", "id": name, "geometry": square, "properties": {}} for name in drawn]
        document = {"type": "FeatureCollection", "features": features}
        stored = _ask(client, "POST", place, {"revision": stored["revision"], "document": document})
        acknowledged.append(drawn[-1])
    return lost


def _read(client: HTTPConnection, out: Path, acknowledged: Acknowledged) -> list[str]:
    """All readings of one reader, each with a draft before it is committed."""
    with (out / "readers.csv").open(newline="", encoding="utf-8") as stream:
        code = next(csv.DictReader(stream))["code"]
    state = _ask(client, "POST", "/api/enter", {"code": code})
    lost = [f"acknowledged and lost: {last}" for last in acknowledged[-1:] if state["revision"] < int(last)]
    cookie = f"xmil-study={code}"
    while (case := state["case"]) is not None:
        options = {q["id"]: _answer(q) for q in case["questions"]}
        about = {"revision": state["revision"], "number": case["number"], "stage": case["stage"]}
        body = {**about, "answers": options, "seconds": 5, "commit": bool(state["revision"] % 2)}
        state = _ask(client, "POST", "/api/answer", body, cookie)
        acknowledged.append(str(state["revision"]))
    return lost


def _answer(question: dict[str, Any]) -> Any:
    """An answer that fits the kind of a question."""
    return {"choice": (question["options"] or [""])[0], "scale": 2, "yes-no": "yes", "text": "seen"}[
        question["kind"]
    ]


TALKS: dict[str, Callable[[HTTPConnection, Path, Acknowledged], list[str]]] = {"view": _draw, "study": _read}
