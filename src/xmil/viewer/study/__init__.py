"""Reading studies: pathologists read cases with and without evidence, blinded; without torch."""

from xmil.viewer.study.plan import Arm, Plan, Question, read_plan, sample_size
from xmil.viewer.study.readings import Reading, Study, make_study, open_study
from xmil.viewer.study.report import write_report

__all__ = [
    "Arm", "Plan", "Question", "Reading", "Study", "make_study", "open_study", "read_plan", "sample_size",
    "write_report",
]  # fmt: skip
