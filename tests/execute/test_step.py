"""`execute`: what is done, kept, tried again and named, whatever the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xmil.core.durable import write_text
from xmil.core.errors import InputError
from xmil.execute import Stages, Step, Workers, execute
from xmil.runs.verify import verify_run
from xmil.storage import Item, Record, make_folder, open_run, read_ledger

NAMES = ("a", "b", "c")


def shout(out: Path, item: Item[Path]) -> Record:
    """Write the text of a file in capitals."""
    text = item.what.read_text()
    if text == "bad":
        raise InputError(f"{item.key}: bad")
    make_folder(out / "loud")
    write_text(out / "loud" / f"{item.key}.txt", text.upper())
    return Record([{"slide_id": item.key, "n": len(text)}], {"text": text})


def step_of(folder: Path, *names: str, **more: Any) -> Step[Path]:
    """A step over the text files of a folder."""
    items = [Item(name, folder / name, (folder / name,)) for name in names or NAMES]
    work = partial(partial, shout, folder / "run")
    return Step("shout", **{"items": items, "settings": {"way": "loud"}, "make_worker": work, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_text(f"text of {name}")
    return tmp_path


def run(folder: Path, *names: str, restart: bool = False, workers: int = 1, **more: Any) -> Any:
    step = step_of(folder, *names, **more)
    return execute(step, folder / "run", workers=Workers(workers=workers), restart=restart)


@pytest.mark.parametrize("workers", [1, 2])
def test_items_are_done_once(folder: Path, workers: int) -> None:
    tally = run(folder, workers=workers)
    assert (sorted(tally.done), tally.before, tally.failed) == (["a", "b", "c"], [], {})
    assert (folder / "run" / "loud" / "b.txt").read_text() == "TEXT OF B"
    assert open_run(folder / "run").table().to_dict("list") == {"slide_id": ["a", "b", "c"], "n": [9, 9, 9]}
    again = run(folder, workers=workers)
    assert (again.done, again.before) == ([], ["a", "b", "c"])
    assert {key: record.facts for key, record in again.records.items()} == {
        key: record.facts for key, record in tally.records.items()
    }
    assert verify_run(open_run(folder / "run")) == []


def spoil(path: Path) -> None:
    path.write_text("spoilt")


@pytest.mark.parametrize("damage", [Path.unlink, spoil])
def test_a_damaged_result_is_made_again(folder: Path, damage: Callable[[Path], None]) -> None:
    run(folder)
    damage(folder / "run" / "loud" / "b.txt")
    assert run(folder).done == ["b"]
    assert (folder / "run" / "loud" / "b.txt").read_text() == "TEXT OF B"


def test_what_changed_is_done_again(folder: Path) -> None:
    run(folder)
    (folder / "c").write_text("another text")
    assert run(folder).done == ["c"]
    items = [replace(item, decides={"label": 1}) for item in step_of(folder, "a").items]
    assert run(folder, "a", items=items).done == ["a"]
    with pytest.raises(InputError, match="way"):
        run(folder, settings={"way": "quiet"})
    assert run(folder, settings={"way": "quiet"}, restart=True).done == ["a", "b", "c"]


def test_failures_are_named_and_tried_again(folder: Path) -> None:
    (folder / "b").write_text("bad")
    tally = run(folder, refused={"d": "not a slide"})
    assert (tally.done, tally.failed) == (["a", "c"], {"d": "not a slide", "b": "b: bad"})
    assert open_run(folder / "run").failed == {"b": "b: bad", "d": "not a slide"}
    (folder / "b").write_text("good")
    assert run(folder).done == ["b"]
    assert open_run(folder / "run").failed == {}


def test_a_slide_that_fails_now_has_no_row_of_before(folder: Path) -> None:
    run(folder)
    (folder / "b").write_text("bad")
    run(folder)
    assert list(open_run(folder / "run").table()["slide_id"]) == ["a", "c"]


def test_a_part_that_fails_leaves_the_earlier_parts(folder: Path) -> None:
    """As a method that cannot be added to a slide: its other methods stay."""
    step = step_of(folder, "a")
    run(folder, items=[replace(item, parts=("loud",)) for item in step.items])
    more = [replace(item, parts=("loud", "louder")) for item in step.items]

    def fail(item: Item[Path]) -> Record:
        raise InputError("cannot be louder")

    with pytest.raises(InputError):
        run(folder, items=more, make_worker=lambda: fail)
    record = read_ledger(folder / "run").records["a"]
    assert (record.parts, record.error) == (["loud"], "cannot be louder")
    assert run(folder, items=[replace(item, parts=("loud",)) for item in step.items]).before == ["a"]


def test_nothing_that_is_done_waits_for_the_next_items(folder: Path) -> None:
    """An interruption costs the item at work, and no other."""

    def write(worked: tuple[Item[Path], str]) -> Record:
        return shout(folder / "run", worked[0])

    def work(item: Item[Path], _: object) -> tuple[Item[Path], str]:
        if item.key == "c":
            raise KeyboardInterrupt
        return item, ""

    for stages in (
        lambda item: work(item, None) and shout(folder / "run", item),
        Stages(lambda _: None, work, write),
    ):
        with pytest.raises(KeyboardInterrupt):
            run(folder, make_worker=lambda stages=stages: stages, restart=True)
        done = set(read_ledger(folder / "run").records)
        assert {"a"} <= done <= {"a", "b"}
        assert run(folder).done == [name for name in NAMES if name not in done]


def test_numbers_of_numpy_are_kept_as_they_are_read_back(folder: Path) -> None:
    def work(item: Item[Path]) -> Record:
        row = {"slide_id": item.key, "x": np.float32(0.1), "ok": np.bool_(True)}
        return Record([row], {"values": np.arange(3), "pair": (1, 2)})

    first = run(folder, make_worker=lambda: work)
    table = (folder / "run" / "slides.csv").read_bytes()
    second = run(folder, make_worker=lambda: work)
    assert first.records["a"].facts == second.records["a"].facts == {"values": [0, 1, 2], "pair": [1, 2]}
    assert first.rows == second.rows
    assert (folder / "run" / "slides.csv").read_bytes() == table


def test_records_that_are_lost_are_made_from_the_files(folder: Path) -> None:
    tally = run(folder)
    ledger = folder / "run" / "ledger.jsonl"
    with ledger.open("a") as stream:
        stream.write("no JSON\n")  # some line cannot be read: no record is trusted
    assert run(folder, adopt=lambda item: tally.records[item.key]).before == ["a", "b", "c"]
    assert verify_run(open_run(folder / "run")) == []


def test_nothing_to_do_makes_no_folder(folder: Path) -> None:
    with pytest.raises(InputError, match="nothing to do"):
        execute(replace(step_of(folder), items=[]), folder / "run")
    assert not (folder / "run").exists()


def test_a_restart_removes_what_the_run_wrote_and_nothing_else(folder: Path) -> None:
    run(folder, finish=lambda _: write_text(folder / "run" / "sum.txt", "3") or {})
    (folder / "run" / "mine.txt").write_text("mine")
    assert run(folder, "a", restart=True).done == ["a"]
    kept = sorted(path.name for path in (folder / "run").rglob("*.txt"))
    assert kept == ["a.txt", "mine.txt"]


def test_an_item_that_adds_leaves_the_others(folder: Path) -> None:
    run(folder, "a", "b", adds=True)
    run(folder, "c", adds=True, restart=True)
    assert list(open_run(folder / "run").table()["slide_id"]) == ["a", "b", "c"]
    assert os.listdir(folder / "run" / "loud")
