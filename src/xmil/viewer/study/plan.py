"""The plan of a reading study: a TOML file, its checks, and the number of cases that its question needs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from xmil.core.errors import InputError
from xmil.core.text import counted, is_utf8, read_toml
from xmil.evaluate.statistics import PairedDesign, UnpairedDesign

NAME = re.compile(r"[\w-]{1,40}")  # letters of any script are letters
DIAGNOSIS, CONFIDENCE = "diagnosis", "confidence"
BEFORE, AFTER = "before", "after"  # stages of a reading: tissue alone, then with what the arm shows
Share = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A table of the plan; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Arm(Section):
    """What a reader sees after committing the first answer.

    Without a method and prediction, an arm shows only the tissue and has one stage. `run` names one
    of the runs by its folder, the first by default. `target` is a class, or "predicted".
    """

    name: str
    method: str | None = None
    run: str | None = None
    target: str = "predicted"
    prediction: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of a reading: only one if the arm shows nothing after the first answer."""
        return (BEFORE, AFTER) if self.method is not None or self.prediction else (BEFORE,)


class Question(Section):
    """A question of the form; a scale runs from 1 to `steps`, and its options name the ends.

    `when` is the stage that asks it; questions of the first stage must not reveal the arm. `about`
    "evidence" asks it only if evidence was shown.
    """

    id: str
    text: str
    kind: Literal["choice", "scale", "yes-no", "text"] = "choice"
    options: tuple[str, ...] = ()
    steps: Annotated[int, Field(ge=2, le=9)] = 5
    when: Literal["before", "after", "both"] = "both"
    about: Literal["case", "evidence"] = "case"
    required: bool = True

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,30}", value):
            raise ValueError("must be lower-case letters, digits and '_', because it names a table column")
        return value

    @model_validator(mode="after")
    def _check_options(self) -> Question:
        if self.kind == "choice" and self.id != DIAGNOSIS and len(self.options) < 2:
            raise ValueError(f"the question {self.id!r} needs at least two options")
        if len(set(self.options)) < len(self.options):
            raise ValueError(f"the question {self.id!r} has the same option twice")
        return self

    def is_asked(self, stage: str, arm: Arm) -> bool:
        """Whether a stage of an arm asks this question."""
        if self.about == "evidence" and (stage == BEFORE or arm.method is None):
            return False
        return self.when in ("both", stage)

    def check(self, answer: Any) -> str | int | None:
        """Convert an answer to the stored value; None without an answer, an error for an invalid one."""
        if answer is None or answer == "":
            return None
        if self.kind == "text":
            if not isinstance(answer, str) or len(answer) > 2000 or not is_utf8(answer):
                raise InputError(f"The answer to {self.id!r} must be a text of at most 2000 characters.")
            return answer
        choices: dict[str, Sequence[Any]] = {"choice": self.options, "yes-no": ("yes", "no")}
        possible = choices.get(self.kind, range(1, self.steps + 1))
        if isinstance(answer, bool) or not isinstance(answer, str | int) or answer not in possible:
            raise InputError(
                f"The answer to {self.id!r} must be one of {', '.join(map(str, possible))}. "
                f"Got {answer!r} instead."
            )
        return answer


QUESTIONS = (
    Question(id=DIAGNOSIS, text="Diagnosis"),
    Question(id=CONFIDENCE, text="How sure are you?", kind="scale", options=("guessing", "certain")),
    Question(
        id="sense", text="Does the evidence make sense?", kind="scale", options=("not at all", "fully"),
        when="after", about="evidence",
    ),
    Question(
        id="artefact", text="Does the evidence follow an artefact?", kind="yes-no", when="after",
        about="evidence", required=False,
    ),
    Question(id="comment", text="Comment", kind="text", required=False),
)  # fmt: skip
ARMS = (Arm(name="tissue"), Arm(name="lrp", method="lrp", prediction=True))


class Assumptions(Section):
    """Assumptions of the sample size: accuracy without evidence, the gain with it, two correlations."""

    accuracy: Share = 0.8
    gain: float = 0.1
    correlation: Annotated[float, Field(ge=0, lt=1)] = 0.3
    alike: Annotated[float, Field(ge=0, le=1)] = 0.3
    power: Share = 0.8
    alpha: Share = 0.05


MOST_READERS = 1000  # more must be a typing error


class Plan(Section):
    """The plan of a reading study, from its TOML file.

    `cases` and `practice` are numbers, drawn evenly from the labels, or names of slides; 0 cases are all
    remaining ones. `crossover`: every case in every arm, in as many periods as there are arms, `washout_days`
    apart; `split`: every case once, with arms dealt evenly. `repeats` are cases of the first period that
    return in it, in the same arm. `reveal` says when to show the label after the last answer. The `seed`
    reveals orders, labels and arms to those who know it: by default, it is random and secret.
    """

    title: str = "Reading study"
    seed: Count | None = None
    readers: tuple[str, ...]
    cases: Count | tuple[str, ...] = 0
    practice: Count | tuple[str, ...] = 2
    repeats: Count = 0
    design: Literal["crossover", "split"] = "crossover"
    washout_days: Annotated[float, Field(ge=0)] = 14.0
    positive: tuple[str, ...] = ()
    regions: Literal["off", "optional", "required"] = "optional"
    reveal: Literal["never", "practice", "always"] = "practice"
    arms: tuple[Arm, ...] = ARMS
    questions: tuple[Question, ...] = QUESTIONS
    assumptions: Assumptions = Assumptions()

    @field_validator("readers", mode="before")
    @classmethod
    def _name_readers(cls, value: Any) -> Any:
        if isinstance(value, int) and value > MOST_READERS:
            raise ValueError(f"at most {MOST_READERS:,} readers; it asks for {value:,}")
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return tuple(f"reader-{i + 1}" for i in range(value))
        return value

    @field_validator("positive", mode="before")
    @classmethod
    def _list_positive(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Plan:
        if not self.readers:
            raise ValueError("readers: name at least one, or set their number")
        for name in self.readers:
            if not NAME.fullmatch(name):
                raise ValueError(f"readers: {name!r} must be 1 to 40 letters, digits, '-' or '_'")
        if not self.arms:
            raise ValueError("arms: describe at least one")
        for what, names in {
            "readers": [name.casefold() for name in self.readers],
            "arms": [arm.name for arm in self.arms],
            "questions": [question.id for question in self.questions],
        }.items():
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{what}: {twice[0]!r} appears twice")
        own = [q for q in self.questions if q.id == DIAGNOSIS]
        if not own or own[0].kind != "choice" or own[0].when != "both" or not own[0].required:
            raise ValueError(
                f"questions: one must have the id {DIAGNOSIS!r}, the kind 'choice', and be required in both"
            )
        return self

    @property
    def periods(self) -> int:
        """How often each case is read, without repeats."""
        return len(self.arms) if self.design == "crossover" else 1

    @property
    def diagnoses(self) -> tuple[str, ...]:
        """The diagnoses to choose from."""
        return next(question.options for question in self.questions if question.id == DIAGNOSIS)

    def asked(self, stage: str, arm: Arm) -> list[Question]:
        """List the questions of a stage."""
        return [question for question in self.questions if question.is_asked(stage, arm)]

    def with_classes(self, names: Sequence[str]) -> Plan:
        """Set the classes as diagnoses unless the plan names its own, which must be among the classes."""
        options = self.diagnoses or tuple(names)
        if unknown := [option for option in options if option not in names]:
            raise InputError(
                f"The diagnosis {unknown[0]!r} is not a class of the run; they are {', '.join(names)}."
            )
        positive = self.positive or (options[-1:] if len(options) == 2 else options)
        if unknown := [name for name in positive if name not in options]:
            raise InputError(f"positive = {unknown[0]!r} is not one of the diagnoses: {', '.join(options)}.")
        questions = tuple(
            q.model_copy(update={"options": options}) if q.id == DIAGNOSIS else q for q in self.questions
        )
        return self.model_copy(update={"questions": questions, "positive": positive})


def read_plan(path: str | PathLike[str]) -> Plan:
    """Read the plan in a TOML file; the error names the first fault."""
    return make_plan(read_toml(path, way="docs/howto/study.md has a plan"), source=str(path))


def make_plan(content: Any, *, source: str = "The plan") -> Plan:
    """Make a plan from the content of its file, and check it.

    >>> make_plan({"readers": ["anna", "ben"]}).periods
    2
    """
    try:
        return Plan.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        parts = [str(part) for part in fault["loc"] if not str(part).startswith(("constrained-", "tuple["))]
        where, message = ".".join(parts), fault["msg"].removeprefix("Value error, ").rstrip(".")
        sections: dict[str, type[Section]] = {"arms": Arm, "questions": Question, "assumptions": Assumptions}
        section = sections.get(parts[0], Plan) if len(parts) > 1 else Plan
        keys = ", ".join(section.model_fields)
        kinds = {"missing": "is missing", "extra_forbidden": f"is not a key of a plan; valid keys: {keys}"}
        if fault["type"] in kinds:
            raise InputError(f"{source}: {where} {kinds[fault['type']]}.") from None
        got = f". Got {fault['input']!r} instead" if fault["type"] != "value_error" else ""
        raise InputError(f"{source}: {where + ': ' if where else ''}{message}{got}.") from None


def sample_size(plan: Plan, cases: int) -> str:
    """Write how many cases the plan's question needs, and the power of its own number of cases."""
    about, readers = plan.assumptions, len(plan.readers)
    shares = (about.accuracy, about.accuracy + about.gain)
    arms, between = 1, f"correlation {about.correlation:g} between a reader's two answers, "
    design = PairedDesign(shares, about.correlation, readers, about.alike, about.alpha)
    if plan.design == "split":
        arms, between = len(plan.arms), "arms with separate cases; correlation "
        design = UnpairedDesign(shares, 0.0, readers, about.alike, about.alpha)
    needed, power = arms * design.cases(power=about.power), design.power(cases / arms)
    without, with_it = (f"{100 * share:.0f} %" for share in shares)
    return (
        f"To tell an accuracy of {without} from {with_it} with {counted(readers, 'reader')} at a power of "
        f"{100 * about.power:.0f} % (two-sided, alpha {about.alpha:g}; {between}{about.alike:g} "
        "between readers), a study needs "
        f"{counted(needed, 'case')}. This one has {cases}: a power of {100 * power:.0f} %."
    )
