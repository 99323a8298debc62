"""A task: grades in order. Output k is the log odds of going beyond grade k once it is reached."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.task import TASKS, Floats, Task, sigmoid


@dataclass(frozen=True)
class Grades(Task):
    """c outputs for c + 1 grades."""

    def count_targets(self, n_outputs: int) -> int:
        """One grade more than there are steps."""
        return n_outputs + 1

    def numbers(self, outputs: npt.ArrayLike) -> Floats:
        """The probability of each grade."""
        beyond = sigmoid(outputs)
        ones = np.ones_like(beyond[..., :1])
        reached = np.concatenate([ones, np.cumprod(beyond, axis=-1)], axis=-1)
        return np.asarray(reached * np.concatenate([1 - beyond, ones], axis=-1))

    def log_odds(self, outputs: npt.ArrayLike) -> Floats:
        """log p / (1 - p)."""
        p = np.clip(self.numbers(outputs), 1e-300, 1 - 1e-16)
        return np.asarray(np.log(p) - np.log1p(-p))


TASKS.add("grades", Grades("grades", "class"))
