"""What must be refused is refused: other sites, other folders, wrong tokens, too much, scripts in names."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from tests.viewer.asking import Answer, app_of, ask, ask_socket, pixels
from tests.viewer.fuzzing import ESCAPES, SECRET, check, fuzz
from tests.viewer.given_scores import write_run
from tests.viewer.make_inside import inside_of, kept, write_concepts, write_pairs
from tests.viewer.make_run import Made, make_run
from xmil.core.errors import InputError
from xmil.viewer import static_copy
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.server import MAX_BODY, BackgroundServer, Rules, is_loopback, open_socket

TOKEN = "a-long-enough-token"  # noqa: S105
JSON = {"content-type": "application/json"}
ROUTES = [
    "/api/run.json",
    "/api/openapi.json",
    "/api/columns-0.json",
    "/api/scales-0.json",
    "/api/wall-0-0.json",
    "/api/agreement-0.json",
    "/api/names-0.json",
    "/api/slides/0/slide.json",
    "/api/slides/0/evidence-0.bin",
    "/api/slides/0/thumbnail.jpeg",
    "/api/slides/0/patch-0-0.jpeg",
    "/api/slides/0/similar-0-0.json",
    "/api/slides/0/inside-0.json",
    "/api/slides/0/alike-0-0.json",
    "/api/slides/0/pairs-0.json",
    "/api/slides/0/concepts-0.json",
    "/api/slides/0/concept-0-0.bin",
    "/api/slides/0/deciding-0.json",
    "/api/slides/0/small-0-0.png",
    "/api/slides/0/annotations-ann.json",
    "/tiles/0/9/0_0.jpeg",
]
WRITABLE = re.compile("annotations-|names-")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret.txt").write_text(SECRET)
    made = make_run(folder, slides=2, columns=6, rows=4, edge=64, certificates=False)
    write_pairs(made)
    write_concepts(made)
    return kept(made, inside_of(made, np.ones((1, 4, 4), dtype=np.float32), [2]))


@pytest.fixture(scope="module")
def shown(small: Made) -> Collection:
    return Collection(small.runs, slides=small.slides, features=[small.features])


@pytest.fixture(scope="module")
def open_app(shown: Collection, small: Made) -> Any:
    return create_app(shown, models=small.models)


@pytest.fixture(scope="module")
def locked(shown: Collection) -> Any:
    return create_app(shown, rules=Rules("0.0.0.0", TOKEN))  # noqa: S104


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page as the build leaves it, with something outside that must stay there."""
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html><title>page</title>")
    (static / "assets" / "index.js").write_text("export {}")
    (tmp_path / "secret.txt").write_text(SECRET)
    (static / "assets" / "link.js").symlink_to(tmp_path / "secret.txt")
    monkeypatch.setattr(static_copy, "STATIC", static)
    monkeypatch.setattr(static_copy.page_files, "__defaults__", (static,))
    return static


def test_routes_of_this_test_are_all_there_are(open_app: Any) -> None:
    described = ask(open_app, "/api/openapi.json").json["paths"]
    assert len(ROUTES) == sum("get" in operations for operations in described.values())
    assert all(operation["summary"] for path in described.values() for operation in path.values())
    assert {ask(open_app, route).status for route in ROUTES} == {200}


@pytest.mark.parametrize("escape", ESCAPES)
def test_paths_cannot_leave_their_folders(open_app: Any, built: Path, escape: str) -> None:
    """Every place in every route where a client could put a path."""
    for depth in (1, 3, 9):
        for what in ("secret.txt", "assets/index.js", "etc/passwd", "run.json"):
            way = escape * depth + what
            for target in (
                f"/{way}",
                f"/assets/{way}",
                f"/tiles/{way}",
                f"/tiles/0/{way}",
                f"/tiles/0/9/{way}",
                f"/tiles/0/9/0_{way}.jpeg",
                f"/api/{way}",
                f"/api/slides/{way}",
                f"/api/slides/{way}/slide.json",
                f"/api/slides/0/{way}",
                f"/api/slides/0/evidence-{way}.bin",
                f"/api/slides/0/patch-0-{way}.jpeg",
                f"/api/slides/0/similar-{way}-0.json",
            ):
                answer = ask(open_app, target)
                assert answer.status == 404, target
                check(answer, {"target": target})


def test_the_page_is_served_from_its_folder_only(open_app: Any, built: Path) -> None:
    index = ask(open_app, "/")
    assert (index.status, index.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert ask(open_app, "/assets/index.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert ask(open_app, "/assets/link.js").status == 404
    assert ask(open_app, "/assets").status == 404
    assert ask(open_app, "/assets/").status == 404


def test_page_that_is_not_built(open_app: Any, built: Path) -> None:
    (built / "index.html").unlink()
    answer = ask(open_app, "/")
    assert answer.status == 503
    assert b"npm" in answer.body


def test_links_out_of_the_folders_are_not_followed(tmp_path: Path) -> None:
    made = make_run(
        tmp_path / "a", slides=3, columns=6, rows=4, edge=64, models=("attnmil",), certificates=False
    )
    away = tmp_path / "away"
    away.mkdir()
    moved = (
        made.slides / "slide-0.tif",
        made.runs[0] / "slides" / "slide-1.parquet",
        made.features / "slide-2.h5",
    )
    for path in moved:
        shutil.move(path, away / path.name)
        path.symlink_to(away / path.name)
    app = create_app(Collection(made.runs, slides=made.slides, features=[made.features]))
    lines = ask(app, "/api/run.json").json["slides"]
    assert "link" in lines[0]["error"]
    assert "link" in lines[1]["error"]
    assert ask(app, "/tiles/0/8/0_0.jpeg").status == 422
    assert ask(app, "/api/slides/1/evidence-0.bin").status == 422
    assert ask(app, "/api/slides/2/similar-0-0.json").status == 404
    wide = create_app(Collection(made.runs, slides=made.slides, features=[made.features], follow_links=True))
    for target in ("/tiles/0/8/0_0.jpeg", "/api/slides/1/evidence-0.bin", "/api/slides/2/similar-0-0.json"):
        assert ask(wide, target).status == 200


def test_a_linked_folder_inside_a_run_is_not_followed(tmp_path: Path) -> None:
    made = make_run(
        tmp_path / "a", slides=1, columns=6, rows=4, edge=64, models=("attnmil",), certificates=False
    )
    shutil.move(made.runs[0] / "slides", tmp_path / "away")
    (made.runs[0] / "slides").symlink_to(tmp_path / "away")
    assert ask(create_app(Collection(made.runs)), "/api/slides/0/evidence-0.bin").status == 422


@pytest.mark.parametrize("name", ["../../secret", "..", "/etc/passwd", "a\\b", "x\x00y", "slides/../../s"])
def test_names_in_the_table_cannot_leave_the_run(small: Made, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(small.runs[0], run)
    with (run / "slides.csv").open("a", encoding="utf-8", newline="") as stream:
        stream.write(f'"{name}",c,benign,benign,True,0.5,0.5,1,x,0\n')
    app = create_app(Collection([run], slides=small.slides, features=[small.features]))
    slides = ask(app, "/api/run.json").json["slides"]
    assert ask(app, "/api/slides/0/slide.json").json["error"] is None
    for line in slides[2:]:
        assert line["error"]
        assert line["image"] is False
        assert ask(app, "/api/wall-0-0.json").json["slides"] == 2  # the others are shown all the same
        for route in ROUTES[ROUTES.index("/api/slides/0/slide.json") + 1 :]:
            assert ask(app, route.replace("slides/0", "slides/2").replace("tiles/0", "tiles/2")).status >= 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example", "10.0.0.1", "", "[::1"]
)
def test_foreign_hosts_are_refused_on_loopback(open_app: Any, host: str) -> None:
    for route in ROUTES:
        assert ask(open_app, route, headers={"host": host}).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "LOCALHOST", "[::1]:8787", "127.0.0.5"])
def test_own_names_are_welcome(open_app: Any, host: str) -> None:
    assert ask(open_app, "/api/run.json", headers={"host": host}).status == 200


def test_two_host_headers_are_refused(open_app: Any) -> None:
    hosts = [(b"host", b"127.0.0.1"), (b"host", b"evil.example")]
    assert ask(open_app, "/api/run.json", headers=hosts).status == 403


CROSS = [
    {"origin": "http://evil.example"},
    {"origin": "http://127.0.0.1:9999"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:8787.evil.example"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    {"sec-fetch-site": "cross-site"},
]


@pytest.mark.parametrize("headers", CROSS)
def test_other_sites_get_nothing(open_app: Any, headers: dict[str, str]) -> None:
    for route in ROUTES:
        assert ask(open_app, route, headers=headers).status == 403
    body = b'{"run": 0, "remove": [0]}'
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        sent = {**headers, "content-type": kind}
        answer = ask(open_app, "/api/slides/0/whatif", method="POST", headers=sent, body=body)
        assert answer.status == 403
        assert "access-control-allow-origin" not in answer.headers


def test_own_page_and_links_to_it_pass(open_app: Any) -> None:
    own = {"origin": "http://127.0.0.1:8787", "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
    body = b'{"run": 0, "remove": [0]}'
    answer = ask(open_app, "/api/slides/0/whatif", method="POST", headers={**JSON, **own}, body=body)
    assert answer.status == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(open_app, "/api/run.json", headers=link).status == 200
    assert (
        ask(open_app, "/api/slides/0/whatif", method="POST", headers={**JSON, **link}, body=body).status
        == 403
    )


def test_preflights_are_refused(open_app: Any) -> None:
    asked = {"access-control-request-method": "POST"}
    assert ask(open_app, "/api/slides/0/whatif", method="OPTIONS", headers=asked).status == 405


@pytest.mark.parametrize(
    "method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "PROPFIND"]
)
def test_other_methods_are_refused(open_app: Any, method: str) -> None:
    for route in (*ROUTES, "/", "/api/slides/0/whatif"):
        refused = ask(open_app, route, method=method)
        allowed = {"POST"} if route.endswith("whatif") else {"GET", "HEAD"}
        allowed |= {"POST"} if WRITABLE.search(route) else set()
        assert refused.status == 405
        assert set(refused.headers["allow"].split(", ")) == allowed
    for route in (route for route in ROUTES if not WRITABLE.search(route)):
        assert ask(open_app, route, method="POST", headers=JSON, body=b"{}").status == 405


def test_headers_bind_the_browser(open_app: Any) -> None:
    for route in (*ROUTES, "/nothing", "/tiles/9/9/9_9.jpeg"):
        headers = ask(open_app, route).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == "'self'"
        assert "script-src" not in policy  # falls back to 'self': no inline script
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers


def test_a_person_without_the_token_reads_a_sentence(made: Made) -> None:
    locked = create_app(Collection(made.runs), rules=Rules("0.0.0.0", "a-long-token"))  # noqa: S104
    page = ask(locked, "/", headers={"accept": "text/html,*/*"})
    assert page.status == 401
    assert page.headers["content-type"].startswith("text/html")
    assert b"open the address that the server printed" in page.body
    assert ask(locked, "/", headers={"accept": "*/*"}).json["error"]


@pytest.mark.parametrize("given", ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é", "\x00", "%00"])
def test_wrong_tokens_are_refused(locked: Any, given: str) -> None:
    for route in (*ROUTES, "/", "/index.html", "/assets/index.js"):
        assert ask(locked, route).status == 401
        assert ask(locked, f"{route}?token={quote(given)}").status == 401
        bearer = [(b"authorization", b"Bearer " + given.encode())]
        assert ask(locked, route, headers=bearer).status == 401
        cookie = [(b"cookie", b"xmil-8787=" + given.encode())]
        assert ask(locked, route, headers=cookie).status == 401
    assert ask(locked, "/api/slides/0/whatif", method="POST", headers=JSON, body=b"{}").status == 401
    assert TOKEN.encode() not in ask(locked, "/").body


def test_the_token_opens_once_and_the_cookie_from_then_on(locked: Any, built: Path) -> None:
    first = ask(locked, f"/?token={TOKEN}&slide=2")
    assert (first.status, first.headers["location"]) == (303, "/?slide=2")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    pair = cookie.split(";")[0]
    assert ask(locked, "/?slide=2", headers={"cookie": pair}).status == 200
    assert ask(locked, "/api/run.json", headers={"cookie": f"a=b; {pair}"}).status == 200
    assert ask(locked, "/api/run.json", headers={"cookie": pair.replace("8787", "8788")}).status == 401
    assert ask(locked, "/api/run.json", headers={"authorization": f"Bearer {TOKEN}"}).status == 200
    assert ask(locked, f"/api/run.json?token={TOKEN}").status == 200
    assert ask(locked, f"/?token=wrong&token={TOKEN}").headers["location"] == "/"
    redirect = ask(locked, f"//evil.example/?token={TOKEN}")
    assert redirect.status == 404


def test_other_addresses_need_a_token() -> None:
    for host in ("0.0.0.0", "192.168.1.7", "::", "example.org"):  # noqa: S104
        with pytest.raises(InputError, match="token"):
            Rules(host)
        assert Rules(host, TOKEN).token == TOKEN
    with pytest.raises(InputError, match="8 characters"):
        Rules("127.0.0.1", "short")
    with pytest.raises(InputError, match="UTF-8"):
        Rules("127.0.0.1", "from-the-environment-\udcff")
    assert [is_loopback(host) for host in ("::1", "127.9.9.9", "localhost", "10.0.0.1")] == [True] * 3 + [
        False
    ]


def test_oversized_requests_are_refused(open_app: Any) -> None:
    for target in ("/" + "a" * 5000, "/api/run.json?" + "a" * 5000, f"/tiles/{'9' * 4000}/0/0_0.jpeg"):
        assert ask(open_app, target).status == 414
    for number in ("9" * 18, "9" * 400, str(2**63)):
        for target in (
            f"/tiles/{number}/0/0_0.jpeg",
            f"/tiles/0/{number}/0_0.jpeg",
            f"/tiles/0/9/{number}_{number}.jpeg",
            f"/api/slides/{number}/slide.json",
            f"/api/slides/0/evidence-{number}.bin",
            f"/api/slides/0/patch-0-{number}.jpeg",
        ):
            assert ask(open_app, target).status == 404, target
    declared = {**JSON, "content-length": str(MAX_BODY + 1)}
    assert ask(open_app, "/api/slides/0/whatif", method="POST", headers=declared, body=b"{}").status == 413
    streamed = [b"[" + b"1," * (1 << 19)] * ((MAX_BODY >> 20) + 1)
    answer = ask(open_app, "/api/slides/0/whatif", method="POST", headers=JSON, body=streamed)
    assert answer.status == 413
    deep = b'{"run":0,"keep":' + b"[" * 100_000
    assert ask(open_app, "/api/slides/0/whatif", method="POST", headers=JSON, body=deep).status == 400
    huge = b'{"run": 0, "keep": [' + b"9" * 100_000 + b"]}"
    assert ask(open_app, "/api/slides/0/whatif", method="POST", headers=JSON, body=huge).status == 400


def test_scripts_in_names_stay_text(tmp_path: Path) -> None:
    """Names arrive as JSON with its own media type: no browser takes them for a page."""
    names = ["<img src=x onerror=alert(1)>", "'\"><svg onload=alert(1)>", "{{constructor}}", "日本 é"]
    made = make_run(
        tmp_path, columns=6, rows=4, edge=64, names=names, models=("attnmil",), certificates=False
    )
    about = json.loads((made.runs[0] / "run.json").read_text())
    about["class_names"] = ["</script><script>alert(1)</script>", "b"]
    (made.runs[0] / "run.json").write_text(json.dumps(about))
    app = create_app(Collection(made.runs, slides=made.slides, features=[made.features]))
    answer = ask(app, "/api/run.json")
    assert answer.headers["content-type"] == "application/json"
    assert [slide["id"] for slide in answer.json["slides"]] == names
    for key, name in enumerate(names):
        slide = ask(app, f"/api/slides/{key}/slide.json")
        assert (slide.json["id"], slide.json["error"]) == (name, None)
        assert slide.headers["content-type"] == "application/json"
        assert ask(app, f"/tiles/{key}/8/0_0.jpeg").headers["content-type"] == "image/jpeg"
    lost = ask(app, "/%3Cscript%3Ealert(1)%3C/script%3E")
    assert (lost.status, lost.headers["content-type"]) == (404, "application/json")
    assert b"<script>" not in lost.body


def test_labels_have_no_address_unless_asked_for(data_dir: Path, tmp_path: Path) -> None:
    """By default the only pictures are of the scanned area; by --label-images the label, never the macro."""
    openslide = pytest.importorskip("openslide")
    path = data_dir / "slides" / "CMU-1-Small-Region.svs"
    write_run(tmp_path / "run", path.stem, {("lrp", "tumour"): np.ones(4, dtype=np.float32)})
    with openslide.OpenSlide(str(path)) as slide:
        label = np.asarray(slide.associated_images["label"].convert("RGB")).astype(int)
        macro = slide.associated_images["macro"].size
    shut, shown = (
        create_app(Collection([tmp_path / "run"], slides=path.parent, labels=labels))
        for labels in (False, True)
    )
    described = list(ask(shut, "/api/openapi.json").json["paths"])
    assert not any(word in address.lower() for address in described for word in ("label", "macro"))
    assert ask(shut, "/api/run.json").json["labels"] is False
    assert ask(shut, "/api/slides/0/label.jpeg").status == 404
    assert ask(shown, "/api/run.json").json["labels"] is True
    seen = pixels(ask(shown, "/api/slides/0/label.jpeg").body)
    assert seen.shape == label.shape != macro[::-1]
    assert np.abs(seen - label).mean() < 6
    for name in ("macro.jpeg", "thumbnail-label.jpeg", "label-0.jpeg"):
        assert ask(shown, f"/api/slides/0/{name}").status == 404


def test_a_slide_without_a_label_says_so(made: Made) -> None:
    answer = ask(app_of(made, labels=True), "/api/slides/0/label.jpeg")
    assert (answer.status, answer.json["error"]) == (404, "The slide 'slide-0' has no label image.")


def test_fuzzed_requests_in_process(open_app: Any, full: bool) -> None:
    requests = 4000 if full else 600
    tally = fuzz(open_app, requests=requests, seed=0)
    assert tally.sent == requests
    assert tally.statuses[200] > requests / 20  # it reaches the routes, not the guard alone
    assert len([status for status in tally.statuses if status >= 400]) >= 6


def test_fuzzed_bytes_over_a_socket(open_app: Any) -> None:
    """Requests that no client library would send; the server still answers afterwards."""
    import random

    draw = random.Random(0)  # noqa: S311
    listening = open_socket("127.0.0.1", 0)
    port, server = listening.getsockname()[1], BackgroundServer(open_app, listening)
    head = f"Host: 127.0.0.1:{port}\r\nConnection: close\r\n"
    try:
        lines = [f"GET /{e * 4}secret.txt HTTP/1.1\r\n{head}\r\n" for e in ESCAPES]
        lines += [f"GET {e}{e}etc/passwd HTTP/1.1\r\n{head}\r\n" for e in ESCAPES]
        lines += [
            f"GET http://evil.example/api/run.json HTTP/1.1\r\n{head}\r\n",
            "GET /api/run.json HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
            "GET /api/run.json HTTP/1.0\r\n\r\n",
            f"GET /api/run.json HTTP/9.9\r\n{head}\r\n",
            f"POST /api/slides/0/whatif HTTP/1.1\r\n{head}Content-Length: 5\r\nContent-Length: 9\r\n\r\n{{}}",
            f"POST /api/slides/0/whatif HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
            f"POST /api/slides/0/whatif HTTP/1.1\r\n{head}Content-Length: 99999999\r\n\r\n{{}}",
            f"POST /api/slides/0/whatif HTTP/1.1\r\n{head}Content-Length: 2\r\n\r\n{{}}",
            f"GET /{'a' * 70000} HTTP/1.1\r\n{head}\r\n",
            f"GET /api/run.json HTTP/1.1\r\n{head}X: {'a' * 100000}\r\n\r\n",
            "\x00\x01\x02\r\n\r\n",
            f"GET /api/run.json HTTP/1.1\r\n{head}Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        ]
        whole = f"GET /api/slides/0/slide.json HTTP/1.1\r\n{head}\r\n".encode()
        requests = [line.encode("latin-1", "replace") for line in lines]
        for _ in range(200):
            broken = bytearray(whole)
            for _ in range(draw.randrange(1, 6)):
                broken[draw.randrange(len(broken))] = draw.randrange(256)
            requests.append(bytes(broken[: draw.choice([len(broken), draw.randrange(1, len(broken))])]))
        for request in requests:
            answer = ask_socket(port, request, hang_up=b"\r\n\r\n" not in request, timeout=0.3)
            assert SECRET.encode() not in answer, request
            assert b"root:" not in answer, request
            status = answer.split(b" ", 2)[1:2]
            assert not status or status[0][:1] in (b"2", b"3", b"4"), (request, answer[:200])
        evil = ask_socket(port, requests[len(ESCAPES) * 2 + 1])
        assert b" 403 " in evil.split(b"\r\n")[0]
        assert b" 200 " in ask_socket(port, whole).split(b"\r\n")[0]
    finally:
        server.stop()


def test_answers_are_checked() -> None:
    """The fuzzer's check can fail."""
    with pytest.raises(AssertionError):
        check(Answer(500, {}, b""), {})
    with pytest.raises(AssertionError):
        check(Answer(200, {"x-content-type-options": "nosniff", "content-security-policy": ""}, b""), {})
