"""The static folder holds what the server says, byte for byte, and nothing of anyone else is touched."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.viewer.asking import ask
from tests.viewer.make_run import Made
from xmil.core.errors import InputError
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import MARK, export, page_files, tile_numbers


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page as the build leaves it."""
    static = tmp_path / "static"
    (static / "assets").mkdir(parents=True)
    (static / "index.html").write_text("<!doctype html><title>page</title>")
    (static / "assets" / "index.js").write_text("export {}")
    return static


@pytest.fixture
def shown(made: Made) -> Collection:
    return Collection(made.runs, slides=made.slides, features=[made.features])


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_files_are_the_servers_answers(shown: Collection, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(shown, out, page=page) == {}
    app = create_app(shown)
    live, still = ask(app, "/api/run.json").json, json.loads((out / "api" / "run.json").read_text())
    assert still == {**live, "live": False, "whatif": False, "similar": False}
    written = files_of(out) - {"api/run.json", "index.html", "assets/index.js", MARK}
    assert written
    for name in sorted(name for name in written if not name.startswith(("tiles/1", "tiles/2"))):
        answer = ask(app, f"/{name}")
        assert answer.status == 200, name
        assert answer.body == (out / name).read_bytes(), name
    image = ask(app, "/api/slides/0/slide.json").json["image"]
    tiles = {f"tiles/0/{level}/{c}_{r}.jpeg" for level, c, r in tile_numbers(image)}
    assert tiles == {name for name in written if name.startswith("tiles/0/")}
    assert len([name for name in tiles if "/12/" in name]) == 96


def test_any_web_server_can_serve_it(shown: Collection, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(shown, out, page=page, longest=300)
    handler = partial(_Quiet, directory=str(out))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}/"
        with urllib.request.urlopen(place + "api/run.json") as answer:  # noqa: S310  # our own server
            assert json.load(answer)["live"] is False
        with urllib.request.urlopen(place + "tiles/1/8/0_0.jpeg") as answer:  # noqa: S310
            assert answer.headers["content-type"] == "image/jpeg"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_pictures_can_be_bounded(shown: Collection, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(shown, out, page=page, longest=800)
    image = json.loads((out / "api" / "slides" / "0" / "slide.json").read_text())["image"]
    assert (image["levels"], image["finest"], image["width"]) == (13, 10, 3072)
    assert not (out / "tiles" / "0" / "11").exists()
    assert (out / "tiles" / "0" / "10" / "2_1.jpeg").is_file()
    with pytest.raises(InputError, match="at least 1 px"):
        export(shown, tmp_path / "none", page=page, longest=0)


def test_foreign_folders_are_left_alone(shown: Collection, page: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.txt"):
        export(shown, theirs, page=page)
    assert files_of(theirs) == {"thesis.txt"}
    (theirs / MARK).write_text(json.dumps({"written": ["api"]}))
    with pytest.raises(InputError, match=r"thesis\.txt"):
        export(shown, theirs, page=page)
    assert (theirs / "thesis.txt").read_text() == "years of work"
    with pytest.raises(InputError, match="cannot be made"):
        export(shown, theirs / "thesis.txt", page=page)


def test_an_earlier_export_is_replaced(fresh: Made, page: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = Collection(fresh.runs, slides=fresh.slides)
    export(shown, out, page=page)
    (out / "tiles" / "7").mkdir()
    (out / "tiles" / "7" / "old.jpeg").write_bytes(b"of a slide that was taken out")
    first = files_of(out)
    export(shown, out, page=page)
    assert files_of(out) == first - {"tiles/7/old.jpeg"}
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep.txt").write_text("mine")
    import shutil

    shutil.rmtree(out / "tiles")
    (out / "tiles").symlink_to(outside)
    export(shown, out, page=page)
    assert files_of(outside) == {"keep.txt"}
    assert not (out / "tiles").is_symlink()


def test_damaged_slides_are_told_and_the_rest_is_written(fresh: Made, page: Path, tmp_path: Path) -> None:
    path = fresh.slides / "slide-0.tif"
    path.write_bytes(path.read_bytes()[:300])
    failed = export(Collection(fresh.runs, slides=fresh.slides), tmp_path / "out", page=page)
    assert list(failed) == ["slide-0"]
    still = json.loads((tmp_path / "out" / "api" / "run.json").read_text())
    assert still["slides"][0]["error"]
    assert still["slides"][1]["error"] is None
    assert (tmp_path / "out" / "tiles" / "1").is_dir()
    assert not (tmp_path / "out" / "tiles" / "0").exists()
    assert (tmp_path / "out" / "api" / "slides" / "0" / "evidence-0.bin").is_file()


def test_a_page_that_is_not_built_cannot_be_exported(shown: Collection, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not built"):
        export(shown, tmp_path / "out", page=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_no_path_of_this_machine_is_exported(
    made: Made, shown: Collection, page: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(shown, out, page=page, longest=10)
    for name in files_of(out):
        assert str(made.slides.parent).encode() not in (out / name).read_bytes(), name


def test_command(made: Made, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "xmil.cli", "view", str(made.runs[0]), "--slides", str(made.slides)]
    command += ["--export", str(tmp_path / "out"), "--export-px", "64"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if page_files():
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "index.html").is_file()
    else:
        assert done.returncode == 2
        assert "not built" in done.stderr
