"""A run to read, with a model that is wrong on known cases, and simulated readers of known skill."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.viewer.given_scores import grid, write_run
from tests.viewer.make_run import patch_colours, write_slide
from xmil.viewer.study import Study, make_study
from xmil.viewer.study.plan import make_plan
from xmil.viewer.study.readings import Reading

CLASSES = ("benign", "tumour")
COLUMNS, ROWS, EDGE = 8, 6, 32
TISSUE = 128  # edge of the patches on drawn tissue
Writer = Callable[[Path, int], None]


def block(i: int) -> tuple[int, int]:
    """Column and row of the corner of a case's block of 3 x 2 patches, on which its evidence lies."""
    return i % (COLUMNS - 3), (i // 2) % (ROWS - 2)


def in_block(i: int) -> npt.NDArray[np.bool_]:
    """The patches of a case's block."""
    x, y = (grid(COLUMNS, ROWS, 1)).T
    left, top = block(i)
    return np.asarray((x >= left) & (x < left + 3) & (y >= top) & (y < top + 2))


def write_cases(
    folder: Path,
    n: int,
    *,
    wrong: float = 0.25,
    picture: Writer | None = None,
    patients: int | None = None,
    edge: int = EDGE,
) -> tuple[Path, Path]:
    """Slides and a run: labels in turn, a model that is wrong on a share of each label, lrp on the block."""
    run, slides = folder / "run", folder / "slides"
    slides.mkdir(parents=True, exist_ok=True)
    rng, rows = np.random.default_rng(7), []
    for i in range(n):
        name, label = f"case-{i:03d}", CLASSES[i % 2]
        is_wrong = (i // 2) % round(1 / wrong) == 0
        predicted = CLASSES[(i + is_wrong) % 2]
        own = in_block(i)
        lrp = (rng.normal(scale=0.5, size=len(own)) + 2.0 * own).astype(np.float32)
        attention = (rng.random(len(own)) + 0.3 * own).astype(np.float32)
        scores = {(m, c): s for m, s in (("lrp", lrp), ("attention", attention)) for c in CLASSES}
        write_run(run, name, scores, coords=grid(COLUMNS, ROWS, edge), edge=edge)
        if picture is None:
            colours = patch_colours(COLUMNS * ROWS, seed=i).reshape(ROWS, COLUMNS, 3)
            write_slide(slides / f"{name}.tif", colours, edge=edge)
        else:
            picture(slides / f"{name}.tif", i)
        row = {"slide_id": name, "case_id": f"patient-{i % (patients or n):03d}", "label": label}
        row |= {"predicted": predicted, "correct": str(not is_wrong), f"p:{predicted}": "0.9"}
        rows.append({**row, f"p:{CLASSES[1 - CLASSES.index(predicted)]}": "0.1"})
    with (run / "slides.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(
            stream, ["slide_id", "case_id", "label", "predicted", "correct", "p:benign", "p:tumour"]
        )
        writer.writeheader()
        writer.writerows(rows)
    return run, slides


def draw_case(path: Path, i: int) -> None:
    """Drawn tissue with or without nests, one of a few pictures turned about: drawing one takes seconds."""
    from tests.viewer.tissue import draw_tissue, write_tiff

    size = (ROWS * TISSUE, COLUMNS * TISSUE)
    if (i % 4) not in _PICTURES:
        _PICTURES[i % 4] = draw_tissue(i % 4, tumour=bool(i % 2), size=size)[0]
    picture = _PICTURES[i % 4][:: -1 if i & 4 else 1, :: -1 if i & 8 else 1]
    write_tiff(path, np.ascontiguousarray(picture))


_PICTURES: dict[int, npt.NDArray[np.uint8]] = {}


def study_of(folder: Path, *, n: int = 12, readers: tuple[str, ...] = ("anna", "ben"), **plan: Any) -> Study:
    """A study of n cases; the plan's other settings are given."""
    plan = {"readers": list(readers), "practice": 2, "washout_days": 0.0, "seed": 0, **plan}
    run, slides = write_cases(folder, n + (plan["practice"] if isinstance(plan["practice"], int) else 0))
    return make_study([run], slides=slides, plan=make_plan(plan), out=folder / "study")


@dataclass
class Simulated:
    """A reader who is right by chance `skill`, and changes to the model's answer by known chances."""

    name: str
    skill: float
    pulled: float = 0.0  # by a wrong model, when right
    corrected: float = 0.0  # by a right model, when wrong
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, *self.name.encode()])

    def first(self, label: str) -> str:
        """The answer on tissue alone."""
        return label if self.rng.random() < self.skill else CLASSES[1 - CLASSES.index(label)]

    def second(self, before: str, label: str, predicted: str) -> str:
        """The answer once the model's is known."""
        if before == predicted:
            return before
        chance = self.pulled if before == label else self.corrected
        return predicted if self.rng.random() < chance else before


def region(i: int, edge: int = EDGE) -> dict[str, Any]:
    """The block of a case, as a reader would draw it."""
    (left, top), (w, h) = block(i), (3, 2)
    corners = [(left, top), (left + w, top), (left + w, top + h), (left, top + h), (left, top)]
    ring = [[x * edge, y * edge] for x, y in corners]
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {}}


def commit(study: Study, reader: str, answers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Commit answers to whatever stage is open."""
    stored, reading, stage = study.current(reader)
    body = {"revision": stored["revision"], "number": reading.number, "stage": stage, "answers": answers}
    return study.answer(reader, {**body, "seconds": 10.0, "commit": True, **more})


def answers_to(study: Study, reading: Reading, stage: str, diagnosis: str) -> dict[str, Any]:
    """An answer to every question that must be answered."""
    asked = study.plan.asked(stage, study.arm(reading))
    given = {"diagnosis": diagnosis, "confidence": 4, "sense": 3}
    return {question.id: given[question.id] for question in asked if question.id in given}


def read_all(study: Study, simulated: Simulated) -> None:
    """Read everything that is open to a reader, without a browser."""
    while (here := study.place(study.stored(simulated.name))) is not None:
        reading, stage = here
        case = study.case(reading)
        answer = case.answers[study.run_of(study.arm(reading))]
        if stage == "before":
            diagnosis = simulated.first(case.label)
            regions = [region(int(case.slide[-3:]))]
        else:
            before = study.stored(simulated.name)["readings"][-1]["before"]["answers"]["diagnosis"]
            diagnosis, regions = simulated.second(before, case.label, answer.predicted), []
        commit(study, simulated.name, answers_to(study, reading, stage, diagnosis), regions=regions)
