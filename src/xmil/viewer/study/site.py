"""The study in the browser, which sends a reader only what blinding allows now.

A code in a cookie identifies the reader. All routes concern the one case that is open to that reader:
committed cases are closed, later ones not open yet. Before the first answer is committed, nothing about the
arm, prediction, label, evidence or the slide's name leaves the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from xmil._version import __version__
from xmil.core.errors import InputError, WriteError, XmilError
from xmil.core.task import TASKS
from xmil.core.text import is_utf8
from xmil.viewer.app import PageSite, guard, json_body
from xmil.viewer.deepzoom import Pictures
from xmil.viewer.server import Rules
from xmil.viewer.study.plan import AFTER, BEFORE
from xmil.viewer.study.readings import (
    PRACTICE,
    BlindedError,
    Reading,
    StaleError,
    Stored,
    Study,
    lock_answers,
    name_target,
    readings_of,
)

COOKIE = "xmil-study"
METHOD = "evidence"  # the name of every method on the page
HIDDEN = "the model's answer"  # target name of evidence for a prediction that the arm does not show
FIELDS = {"id", "text", "kind", "options", "steps", "required"}  # of a question, for the page
MAX_CODE = 1 << 10  # bytes of a request with a reader's code
MAX_ANSWER = 4 << 20  # bytes of a reader's answers: regions with 100,000 corners
logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class SealedError(XmilError):
    """A fault of a case, without the names of files, arms and slides."""


def _sealed(work: Callable[P, T]) -> Callable[P, T]:
    """Hide an error's details from readers, and log them for the organiser."""

    @wraps(work)
    def sealed(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        except (BlindedError, StaleError, WriteError, SealedError):
            raise
        except XmilError as error:
            logger.error("%s", error)
            raise SealedError("This case cannot be shown now; tell the study's organiser.") from None

    return sealed


class StudySite(PageSite):
    """The routes of a study."""

    front = "study.html"

    def __init__(self, study: Study, slides: Path | None = None, *, follow_links: bool = False) -> None:
        super().__init__()
        self.study = study
        self.pictures = Pictures(slides or study.slides, follow_links=follow_links)
        self.routes = [
            Route("/", self.page),
            self._get("/api/state.json", self.state),
            Route("/api/enter", self.enter, methods=["POST"]),
            Route("/api/answer", self.store, methods=["POST"]),
            self._get("/api/slides/{number:int}/evidence-0.bin", self.evidence),
            self._draw("/tiles/{number:int}/{level:int}/{column:int}_{row:int}.jpeg", self.tile),
            Route("/{name:path}", self.page),
        ]

    def arguments(self, request: Request) -> list[Any]:
        """The reader of the cookie's code, if any, then the numbers in the address."""
        try:
            reader = self.study.reader(request.cookies.get(COOKIE, ""))
        except BlindedError:
            reader = None
        return [reader, *super().arguments(request)]

    async def enter(self, request: Request) -> Response:
        """Store a reader's code in a cookie that scripts cannot read; an empty code logs out."""
        codes: list[str] = []

        def check(_: str | None, body: Any) -> dict[str, Any]:
            code = body.get("code") if isinstance(body, dict) else None
            if not isinstance(code, str) or not is_utf8(code):
                raise InputError('The body must be {"code": "..."}.')
            codes.append(code.strip().lower())
            return self.state(self.study.reader(codes[0]) if codes[0] else None)

        response = await self.answer(request, await json_body(request, MAX_CODE), check, self._reading)
        if codes[0]:
            secure = request.url.scheme == "https"
            about: dict[str, Any] = {"httponly": True, "samesite": "strict", "secure": secure}
            response.set_cookie(COOKIE, codes[0], max_age=180 * 86400, **about)
        else:
            response.delete_cookie(COOKIE)
        return response

    async def store(self, request: Request) -> Response:
        """Store a reader's answers, as a draft or final; return the reader's new state."""
        _known(self.arguments(request)[0])  # what strangers send is not read
        return await self.answer(request, await json_body(request, MAX_ANSWER), self._store, self._reading)

    def _store(self, reader: str | None, body: Any) -> dict[str, Any]:
        name = _known(reader)
        here = self._place(name)
        stored = self.study.answer(name, body)
        state = self.state(name)
        if here is not None and here != self.study.place(stored):
            state["label"] = self._label(*here)
        return state

    @_sealed
    def _place(self, reader: str) -> tuple[Reading, str] | None:
        return self.study.place(self.study.stored(reader))

    def _label(self, reading: Reading, stage: str) -> str | None:
        """The label after the last stage of a case, if the plan reveals it."""
        is_last, reveal = stage == self.study.arm(reading).stages[-1], self.study.plan.reveal
        shown = reveal == "always" or (reveal == "practice" and reading.kind == PRACTICE)
        return self.study.case(reading).label if is_last and shown else None

    @_sealed
    def state(self, reader: str | None) -> dict[str, Any]:
        """Describe a reader's state: the worklist with its progress, and the open case."""
        about: dict[str, Any] = {"title": self.study.plan.title, "version": __version__, "reader": reader}
        if reader is None:
            return about
        study, stored = self.study, self.study.stored(reader)
        worklist, here, opens = readings_of(stored), study.place(stored), study.opens(stored)
        done = len(worklist) if here is None else here[0].number
        lines = [
            {
                "number": reading.number,
                "practice": reading.kind == PRACTICE,
                "part": reading.period + 1,
                "done": reading.number < done,
                "seconds": sum(entry["seconds"] for entry in stored["readings"][reading.number].values())
                if reading.number < done
                else None,
            }
            for reading in worklist
        ]
        return {
            **about,
            "made": study.made,
            "revision": stored["revision"],
            "entry": stored.get("entry"),
            "worklist": lines,
            "parts": study.plan.periods,
            "opens": None if opens is None else opens.isoformat(),
            "case": None if here is None or opens is not None else self._case(stored, *here),
        }

    def _case(self, stored: Stored, reading: Reading, stage: str) -> dict[str, Any]:
        """Describe the open case, as far as blinding allows."""
        study, case, arm = self.study, self.study.case(reading), self.study.arm(reading)
        picture, fault = self.pictures.describe(case.slide)
        draft = stored["draft"] or {}
        if (draft.get("number"), draft.get("stage")) != (reading.number, stage):
            draft = {}
        before = stored["readings"][reading.number][BEFORE] if stage == AFTER else None
        about = picture or {"image": None, "mpp": None, "magnification": None}
        hidden = dict.fromkeys(("case", "label", "predicted", "correct", "probability"))
        name = "Practice case" if reading.kind == PRACTICE else "Case"
        answer = case.answers[study.run_of(arm)]
        shows = stage == AFTER and arm.prediction
        return {
            "number": reading.number,
            "stage": stage,
            "practice": reading.kind == PRACTICE,
            "questions": [question.model_dump(include=FIELDS) for question in study.plan.asked(stage, arm)],
            "regions": study.plan.regions,
            "answers": draft.get("answers", {}),
            "drawn": draft.get("regions", before["regions"] if before else []),
            "seconds": draft.get("seconds", 0.0),
            "before": before and before["answers"],
            "prediction": {"name": answer.predicted, "probability": answer.probability} if shows else None,
            "info": {
                **hidden,
                **about,
                "key": reading.number,
                "id": f"{name} {reading.number + 1}",
                "error": None if fault is None else "The slide of this case cannot be read.",
                "sets": [self._set(reading)] if stage == AFTER and arm.method is not None else [],
            },
        }

    def _set(self, reading: Reading) -> dict[str, Any]:
        """Describe the scores that the arm shows, without their method's name."""
        arm, task = self.study.arm(reading), TASKS["classification"]
        evidence, number = self.study.shown(self.study.case(reading), arm)
        column = evidence.columns[number]
        is_named = arm.prediction or arm.target != "predicted"
        target = name_target(column["target"], self.study.classes) if is_named else HIDDEN
        shown = {
            "name": METHOD,
            "beside": None,
            "kind": "scores",
            "method": METHOD,
            "output": None,
            "target": target,
            "signed": column["signed"],
            "ends": task.short_ends(target) if column["signed"] else ("low", "high"),
            "audit": None,
            "made": [],
            "warnings": [],
        }
        return {
            "run": 0,
            "n": evidence.n,
            "edge": evidence.patch_size,
            "mpp": evidence.mpp,
            "placed": evidence.placed,
            "columns": [shown],
            "classes": list(self.study.classes),
            "logits": [],
            "probabilities": None,
            "value": None,
            "noun": task.noun.capitalize(),
            "sides": task.sides,
            "certificate": None,
            "inside": False,
            "pairs": False,
            "concepts": False,
        }

    @_sealed
    def evidence(self, reader: str | None, number: int) -> bytes:
        """Send the scores of the open case, after its first answer is committed."""
        _, reading, stage = self.study.current(_known(reader), number)
        case, arm = self.study.case(reading), self.study.arm(reading)
        if stage != AFTER or arm.method is None:
            raise BlindedError("This case shows no evidence now.")
        evidence, column = self.study.shown(case, arm)
        return evidence.as_bytes(column)

    @_sealed
    def tile(self, reader: str | None, number: int, level: int, column: int, row: int) -> bytes:
        """Draw a Deep Zoom tile of the open case, or of the last one."""
        reading = self.study.reading_in_sight(_known(reader), number)
        return self.pictures.tile(self.study.case(reading).slide, level, column, row)


def _known(reader: str | None) -> str:
    if reader is None:
        raise BlindedError("Enter your code first.")
    return reader


def create_study_app(
    study: Study, *, slides: Path | None = None, rules: Rules | None = None, follow_links: bool = False
) -> ASGIApp:
    """Make the study's application behind the viewer's guard; `slides` is their folder, if it has moved."""
    site = StudySite(study, slides, follow_links=follow_links)
    with (
        suppress(XmilError),
        lock_answers(study.folder),
    ):  # cleans up after a killed server, unless it is read-only
        pass

    @asynccontextmanager
    async def lifespan(_: Starlette) -> Any:
        yield
        site.pictures.close()

    return guard(site.routes, lifespan, rules, {BlindedError: 403, StaleError: 409})
