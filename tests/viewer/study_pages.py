"""Simulated readers at the page of a study, in a real browser; the whole acceptance by hand.

python -m tests.viewer.study_pages FOLDER [--cases 40]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from tests.viewer.browser import chromium, expect_text, is_fault
from tests.viewer.reading_room import (
    TISSUE,
    Simulated,
    block,
    draw_case,
    write_cases,
)
from xmil.viewer.study import Study, make_study
from xmil.viewer.study.analysis import ALL, analyse
from xmil.viewer.study.plan import make_plan
from xmil.viewer.study.readings import readings_of

AT = """([number, stage]) => {
  const open = window.study.reading?.open;
  return open?.number === number && open.stage === stage;
}"""
READY = """() => {
  const { reading, study } = window.study;
  return reading?.pane?.viewer.isOpen() || (study?.reader && !study.case);
}"""
ANSWERED = "() => Boolean(window.study.reading?.answered)"  # its label is shown, until the reader goes on

STILL = """async () => {
  const { pane } = window.study.reading, frame = () => new Promise(requestAnimationFrame);
  for (let last = "", same = 0; same < 5; await frame()) {
    const now = JSON.stringify([pane.transform(), pane.stage.getBoundingClientRect()]);
    same = now === last ? same + 1 : 0;
    last = now;
  }
}"""


@contextmanager
def serving(study: Study) -> Iterator[tuple[str, Any]]:
    """`xmil view STUDY` in a process of its own: its address, and the process to kill."""
    command = [
        sys.executable,
        "-m",
        "xmil.cli",
        "view",
        str(study.folder),
        "--no-browser",
        "--json",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "XMIL_SYNC": "0"}
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"], process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class AtThePage:
    """A simulated reader with a browser context: reads the screen, presses keys."""

    def __init__(
        self, browser: Any, study: Study, reader: Simulated, *, draws: bool = True, **options: Any
    ) -> None:
        self.study, self.reader, self.draws = study, reader, draws
        self.context = browser.new_context(viewport={"width": 1180, "height": 760}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.faults: list[str] = []
        self.page.on("console", lambda m: self.faults.append(m.text) if is_fault(m) else None)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))

    def enter(self, url: str) -> None:
        """Open the page and give the code."""
        self.page.goto(url)
        self.page.get_by_label("Your code").fill(self.study.codes[self.reader.name])
        self.page.keyboard.press("Enter")
        self.page.wait_for_function(READY)

    def is_done(self) -> bool:
        return bool(self.page.evaluate("() => !window.study.study.case"))

    def step(self) -> None:
        """Answer one stage by keys alone and commit it."""
        page, study = self.page, self.study
        page.wait_for_function(READY)
        open_case = page.evaluate(
            "() => { const { number, stage } = window.study.reading.open; return [number, stage]; }"
        )
        reading = readings_of(study.stored(self.reader.name))[open_case[0]]
        case = study.case(reading)
        if open_case[1] == "before":
            self.before = self.reader.first(case.label)
            answer = self.before
            if self.draws:
                self.draw(int(case.slide[-3:]))
        else:
            told = page.locator("[data-shown=prediction] strong").inner_text()
            answer = self.reader.second(self.before, case.label, told)
        page.keyboard.press(str(study.plan.diagnoses.index(answer) + 1))
        page.keyboard.press("4")
        if open_case[1] == "after":
            page.keyboard.press("3")
        page.keyboard.press("Enter")
        page.wait_for_function(f"(at) => !({AT})(at) || ({ANSWERED})()", arg=open_case)
        if page.evaluate(ANSWERED):
            page.keyboard.press("Enter")
        page.wait_for_function(f"(at) => !({AT})(at) && ({READY})()", arg=open_case)

    def draw(self, i: int) -> None:
        """Draw the block of the case with the rectangle."""
        page, (left, top) = self.page, block(i)
        page.evaluate(STILL)
        places = page.evaluate(
            """corners => {
              const { pane } = window.study.reading;
              const box = pane.stage.getBoundingClientRect(), t = pane.transform();
              return corners.map(([x, y]) => [box.left + t.x + x * t.scale, box.top + t.y + y * t.scale]);
            }""",
            [[left * TISSUE, top * TISSUE], [(left + 3) * TISSUE, (top + 2) * TISSUE]],
        )
        page.keyboard.press("r")
        page.mouse.move(*places[0])
        page.mouse.down()
        page.mouse.move(*places[1], steps=3)
        page.mouse.up()
        page.keyboard.press("Escape")

    def close(self) -> None:
        self.context.close()
        assert not self.faults, self.faults


def tissue_study(folder: Path, n: int, readers: list[Simulated], **plan: Any) -> Study:
    """A study of drawn tissue."""
    run, slides = write_cases(folder, n + 2, picture=draw_case, edge=TISSUE)
    settings = {"readers": [reader.name for reader in readers], "practice": 2, "washout_days": 0.0}
    settings |= {"seed": 0, **plan}
    return make_study([run], slides=slides, plan=make_plan(settings), out=folder / "study")


def read_in_turns(browser: Any, study: Study, readers: list[Simulated], *, killed_at: int) -> None:
    """Let all readers read at once, in turns; the server and one reader's page are killed on the way."""
    with serving(study) as (url, process):
        desks = [AtThePage(browser, study, reader) for reader in readers]
        for desk in desks:
            desk.enter(url)
        for _ in range(killed_at):
            for desk in desks:
                desk.step()
        desks[0].page.keyboard.press("1")  # a draft, and the machine is gone
        desks[0].page.wait_for_function("() => window.study.isSaved")
        process.kill()
        for desk in desks:
            desk.context.close()
    with serving(study) as (url, _):
        desks = [AtThePage(browser, study, reader) for reader in readers]
        for desk, old in zip(desks, readers, strict=True):
            desk.enter(url)
            desk.before = study.stored(old.name)["readings"][-1]["before"]["answers"]["diagnosis"]
        while not all(desk.is_done() for desk in desks):
            for desk in desks:
                if not desk.is_done():
                    desk.step()
        for desk in desks:
            expect_text(desk.page.locator("main"), "All cases are read")
            desk.close()


def check(study: Study, readers: list[Simulated]) -> str:
    """What was planted beside what the report says, a line each; those outside their interval are marked."""
    findings, lines = analyse(study), []
    wrong = np.mean([not case.answers["run"].is_right(case.label) for case in study.cases])
    planted: dict[tuple[str, ...], float] = {}
    for r in readers:
        after = (1 - wrong) * (r.skill + (1 - r.skill) * r.corrected) + wrong * r.skill * (1 - r.pulled)
        for arm in ("tissue", "lrp"):
            planted["accuracy", arm, "before", r.name] = r.skill
        planted["accuracy", "lrp", "after", r.name] = float(after)
    planted["over-reliance", "lrp", "after", ALL] = readers[0].pulled
    planted["correction", "lrp", "after", ALL] = readers[0].corrected
    kappas = {(a.name, b.name): (2 * a.skill - 1) * (2 * b.skill - 1) for a, b in combinations(readers, 2)}
    for (a, b), kappa in kappas.items():
        planted["kappa", "tissue", "before", f"{a} and {b}"] = kappa
    planted["kappa", "tissue", "before", ALL] = float(np.mean(list(kappas.values())))
    own = float(np.mean([(2 * reader.skill - 1) ** 2 for reader in readers]))
    planted["kappa with oneself", "all arms", "last", ALL] = own
    for place, truth in planted.items():
        estimate = findings.find(*place)
        assert estimate is not None, place
        inside = estimate.value.low <= truth <= estimate.value.high
        mark = "" if inside else "  OUTSIDE"
        lines.append(f"{', '.join(place)}: planted {truth:.3f}, found {estimate.value}{mark}\n")
    return "".join(lines)


def main() -> None:
    """Run the acceptance: the study, its readers, its report."""
    from xmil.viewer.study import write_report

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cases", type=int, default=40)
    given = parser.parse_args()
    readers = [
        Simulated("anna", 0.9, pulled=0.5, corrected=0.9),
        Simulated("ben", 0.8, pulled=0.5, corrected=0.9),
        Simulated("chloe", 0.75, pulled=0.5, corrected=0.9),
    ]
    study = tissue_study(given.folder, given.cases, readers, repeats=given.cases // 4)
    with chromium() as browser:
        read_in_turns(browser, study, readers, killed_at=given.cases // 3)
    write_report(study)
    sys.stdout.write(check(study, readers))


if __name__ == "__main__":
    main()
