"""What is said of a path that is not what was asked for: one sentence, and the way out."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import xmil
from xmil.cli._app import run
from xmil.core.durable import file_digest
from xmil.core.errors import absent, unreadable
from xmil.storage import read_rows, read_run


def test_every_kind_of_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.pt").write_bytes(b"x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "broken").symlink_to("gone.pt")
    os.mkfifo(tmp_path / "pipe")
    said = {
        "empty": "a folder, where a file is needed; it is empty, so name another.",
        ".": "a folder, where a file is needed; name a file in it.",
        "loop": "a link that leads back to itself; name the file itself, or make the link again.",
        "broken": "a link to gone.pt, which is not there; make the link again.",
        "pipe": "cannot be read (a pipe, socket or device, not a file).",
        "far/away.pt": "no such file.",
        "modl.pt": f"no such file. Did you mean '{tmp_path / 'model.pt'}'?",
        "model.pt/x": "no such file.",
        "n"
        * 300: "cannot be read (File name too long); check its name, its rights and those of its folders.",
    }
    for name, words in said.items():
        assert absent(tmp_path / name) == f"{tmp_path / name}: {words}"
    folder = "a file, where a folder is needed; name the folder that holds it."
    assert absent(tmp_path / "model.pt", "folder") == f"{tmp_path / 'model.pt'}: {folder}"
    denied = PermissionError(13, "Permission denied")
    assert unreadable(tmp_path / "model.pt", denied).endswith(
        "(Permission denied); check its rights, or copy it again."
    )
    assert unreadable(tmp_path / "loop", OSError(40, "?")) == absent(tmp_path / "loop")


@pytest.mark.parametrize("what", ["empty", "full", "loop"])
def test_what_is_no_model_is_named_by_every_command(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder is refused before the digest of all it holds is taken: it may be a disk."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    os.mkfifo(tmp_path / "full" / "never read")
    (tmp_path / "loop").symlink_to("loop")
    xmil.write_bag(xmil.Bag([[1.0, 2.0]]), tmp_path / "s.h5")
    words = {"loop": "a link that leads back to itself"}.get(
        what, "this folder has none of model.safetensors"
    )
    for name in ("explain", "predict", "evaluate"):
        paths = ["--model", str(tmp_path / what), "--features", str(tmp_path / "s.h5")]
        assert run([name, *paths, "--out", str(tmp_path / "out")]) == 2
        assert f"xmil: error: {tmp_path / what}: {words}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_digest_says_why_it_cannot_be_taken(tmp_path: Path) -> None:
    with pytest.raises(xmil.core.errors.FileError, match="it is empty, so name another"):
        file_digest(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--model", "{long}", "--features", ".", "--out", "o"],
        ["split", "{long}"],
        ["tile", "{long}", "--out", "o"],
        ["heatmap", "{long}"],
        ["view", "{long}"],
        ["inspect", "{long}"],
        ["train", "{long}"],
    ],
)
def test_what_the_system_refuses_is_told_in_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own questions after a path raise where the system refuses an answer."""
    long = tmp_path / ("n" * 300)
    assert run([word.format(long=long) for word in words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"xmil: error: {long}: cannot be ")
    assert "File name too long" in said[0]
    assert "; check its " in said[0]


@pytest.mark.parametrize(("number", "way"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "make room")])
def test_an_error_of_the_system_without_a_file_names_the_way_out(
    number: int, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("xmil.cli._app.build", refuse)
    assert run(["doctor"]) == 2
    told = capsys.readouterr().err
    assert way in told
    assert "unexpected" not in told


def test_a_place_for_results_that_is_no_folder_is_named(tmp_path: Path) -> None:
    """The first look for an earlier run says so, whatever the command."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "loop"):
        for look in (read_run, lambda folder: read_rows(folder / "slides.csv")):
            with pytest.raises(
                xmil.XmilError, match=r"cannot be made \(\S+ is not a folder\); choose another `out="
            ):
                look(out)
