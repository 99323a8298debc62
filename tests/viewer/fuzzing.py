"""A seeded fuzzer for the routes: numbers, paths, encodings, headers and bodies nobody should send.

`python -m tests.viewer.fuzzing --requests 50000` runs it longer and says how many requests it sent.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.viewer.asking import Answer, ask

SECRET = "the-secret-of-another-folder"  # noqa: S105  # of a file that must not be reached
NUMBERS = ["0", "1", "2", "3", "95", "96", "-1", "+1", "00", "007", "1e3", "0x1", "1.0", "٣", "²", "\uff19"]
NUMBERS += [str(2**31), str(2**63), "9" * 300, "9" * 5000, "", " 1", "1 ", "NaN", "None", "null", "true"]
ESCAPES = [
    "../",
    "..%2f",
    "%2e%2e/",
    "%2e%2e%2f",
    "..%252f",
    "%252e%252e%252f",
    "..\\",
    "..%5c",
    "%c0%ae%c0%ae/",
]
ESCAPES += [
    "..%c0%af",
    "..;/",
    "....//",
    "%00",
    "%0a",
    "%0d%0aX-Evil:%201",
    "//",
    "/./",
    "%2f",
    "~/",
    "file:///",
]
PLACES = ["secret.txt", "etc/passwd", "run.json", "slides.csv", "models/attnmil.safetensors", "index.html"]
MARKUP = ["<script>alert(1)</script>", "%3Cscript%3E", "'\"><img src=x onerror=alert(1)>", "{{7*7}}", "${7}"]
METHODS = (
    ["GET"] * 14
    + ["POST"] * 8
    + ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X"]
)
NAMES = ["host", "origin", "referer", "cookie", "authorization", "content-type", "content-length", "range"]
NAMES += [
    "if-none-match",
    "sec-fetch-site",
    "sec-fetch-mode",
    "x-forwarded-host",
    "x-forwarded-for",
    "accept",
]
VALUES = [
    "127.0.0.1",
    "localhost:8787",
    "evil.example",
    "127.0.0.1.evil.example",
    "[::1]",
    "[::1",
    "a:b:c",
    "@",
]
VALUES += ["http://127.0.0.1:8787", "http://evil.example", "null", "cross-site", "same-origin", "navigate"]
VALUES += [
    "application/json",
    "text/plain",
    "-1",
    "99999999999999999999",
    "bytes=0-",
    "bytes=9-1,-",
    "xmil-8787=1",
]
VALUES += ["Bearer", "Bearer x", "Basic eA==", "", " ", "\xff\xfe", "x" * 9000, "a=b; c; =; \x01"]


@dataclass
class Tally:
    """What was sent and what came back."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)


def fuzz(app: Any, *, requests: int, seed: int) -> Tally:
    """Send so many requests and check every answer."""
    draw, tally = random.Random(seed), Tally()  # noqa: S311  # a seeded draw, not a secret
    paths = sorted(ask(app, "/api/openapi.json").json["paths"])
    for request in _requests(draw, paths, requests):
        answer = ask(app, request["target"], **{k: v for k, v in request.items() if k != "target"})
        tally.sent += 1
        tally.statuses[answer.status] += 1
        check(answer, request)
    return tally


ASKED = ["/api/slides/{key}/whatif", "/api/slides/{key}/explain"]


def check(answer: Answer, request: dict[str, Any]) -> None:
    """What must hold of every answer, whatever was asked."""
    assert answer.status < 500 or answer.status == 503, (answer.status, request)  # 503: the page is not built
    assert SECRET.encode() not in answer.body, request
    assert answer.headers["x-content-type-options"] == "nosniff", request
    assert "default-src 'self'" in answer.headers["content-security-policy"], request
    assert "access-control-allow-origin" not in answer.headers, request
    assert "x-evil" not in answer.headers, request
    kind = answer.headers.get("content-type", "")
    if answer.status >= 400 and answer.status != 503 and answer.body:
        assert kind == "application/json", request
        assert isinstance(answer.json["error"], str), request
    if answer.status == 200 and kind == "application/json" and answer.body:
        assert answer.json is not None, request


def _requests(draw: random.Random, paths: list[str], n: int) -> Iterator[dict[str, Any]]:
    for _ in range(n):
        method = draw.choice(METHODS)
        headers = [(b"host", b"127.0.0.1:8787")] if draw.random() < 0.85 else []
        if method == "POST" and draw.random() < 0.8:
            headers.append((b"content-type", b"application/json"))
        for _ in range(draw.choice([0, 0, 0, 1, 2, 5])):
            name, value = draw.choice(NAMES), draw.choice(VALUES)
            headers.append((name.encode(), value.encode("latin-1", "replace")))
        template = draw.choice(ASKED) if method == "POST" and draw.random() < 0.7 else draw.choice(paths)
        yield {
            "target": _target(draw, template),
            "method": method,
            "headers": headers or [(b"x", b"y")],
            "body": _body(draw) if method != "GET" or draw.random() < 0.05 else b"",
        }


def _target(draw: random.Random, template: str) -> str:
    target = template
    while "{" in target:
        start, _, rest = target.partition("{")
        target = start + _value(draw) + rest.partition("}")[2]
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        target = _mutated(draw, target)
    if draw.random() < 0.1:
        target += "?" + draw.choice(
            ["token=x", "token=", "a=b&" * 50, "token=%00", "%", "=" * 3000, "token=a&token=b"]
        )
    return target if target.startswith("/") else f"/{target}"


def _value(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.7:
        return str(draw.randrange(3))
    if kind < 0.85:
        return draw.choice(NUMBERS)
    return draw.choice(ESCAPES) * draw.randrange(1, 8) + draw.choice([*PLACES, *MARKUP])


def _mutated(draw: random.Random, target: str) -> str:
    place = draw.randrange(len(target) + 1)
    what = draw.choice(
        [
            draw.choice(ESCAPES),
            draw.choice(MARKUP),
            draw.choice(string.printable),
            f"%{draw.randrange(256):02x}",
            "é",
            "\U0001f600",
        ]
    )
    cut = draw.choice([0, 0, 1, 3])
    return target[:place] + what + target[place + cut :]


def _body(draw: random.Random) -> bytes | list[bytes]:
    good = {
        "run": draw.randrange(3),
        "method": draw.choice(["lrp", "attention", "none"]),
        "targets": draw.choice([["tumour"], ["benign", "tumour"], [], "tumour"]),
        draw.choice(["remove", "keep"]): [draw.randrange(-2, 99) for _ in range(5)],
    }
    odd: list[Any] = [
        0,
        -1,
        1e99,
        None,
        True,
        "0",
        [],
        {},
        [[]],
        [[0, 1, 2]],
        [["a", "b"]],
        [[5, 1]],
        [None],
        [1.5],
    ]
    odd += [[2**70], [[0, 2**70]], {"0": 1}, [[0, 96]], [[0, 97]], [[96, 96]], list(range(96))]
    bad: dict[str, Any] = {
        "run": draw.choice([0, 0, *odd]),
        draw.choice(["remove", "keep", "x"]): draw.choice(odd),
    }
    raw = [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 5000,
        b"null",
        b"NaN",
        b'{"run": 0, "keep": [' + b"1," * 9000,
        b"\x00" * 99,
    ]
    raw += [b'{"run": ' + b"9" * 6000 + b', "keep": [1]}', b'{"a":' * 3000, b'"' + b"a" * 70000 + b'"']
    kind = draw.random()
    if kind < 0.4:
        return json.dumps(good).encode()
    if kind < 0.8:
        return json.dumps(bad).encode()
    return draw.choice(raw) if kind < 0.97 else [b"x" * (1 << 20)] * 6


def main() -> None:
    """Fuzz a run made for the purpose."""
    from tests.viewer.make_run import make_run
    from xmil.viewer.app import create_app
    from xmil.viewer.collection import Collection

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = make_run(Path(folder), slides=2, columns=6, rows=4, edge=64, certificates=False)
        (Path(folder) / "secret.txt").write_text(SECRET)
        shown = Collection(made.runs, slides=made.slides, features=[made.features])
        tally = fuzz(create_app(shown, models=made.models), requests=given.requests, seed=given.seed)
    print(f"{tally.sent} requests, answers {dict(sorted(tally.statuses.items()))}")  # noqa: T201


if __name__ == "__main__":
    main()
