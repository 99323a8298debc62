"""What enters the benchmark: methods (ours, a function of yours, scores from elsewhere) and controls."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from xmil.bench.problems import Block
from xmil.core.bag import Bag
from xmil.core.errors import InputError, XmilError
from xmil.core.explanation import Explanation
from xmil.core.named_function import load_function, source_file
from xmil.methods import METHODS, explain_classes
from xmil.methods.network import Network
from xmil.models import MILModel
from xmil.nn.frozen import frozen
from xmil.toy.scoring import MethodSpec, score_bags

PACKAGE = Path(__file__).parents[1]
EXPLAINING = ("lrp", "methods", "models", "nn", "toy")
ORACLE = "oracle"
CONTROLS = ("random", "constant", "lrp_flipped")  # wrong on purpose: they must come last
Score = Callable[[nn.Module, Bag, int], Any]


@dataclass(frozen=True, eq=False)
class Exam:
    """A trained model in front of its test bags: what a method is asked to explain."""

    problem: str
    model_name: str
    repetition: int
    seed: int
    n_classes: int
    model: nn.Module
    blocks: tuple[Block, ...]


class MethodEntry(Protocol):
    """A row of the table."""

    @property
    def name(self) -> str:
        """What the row is called."""

    @property
    def digest(self) -> str:
        """What tells a changed entry from the one it was."""

    def supports(self, model: nn.Module) -> bool:
        """Whether it can explain the model."""

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n) of every class."""


@dataclass(frozen=True)
class OurMethod:
    """A method of the package, written `name[:preset][@output]`."""

    spec: MethodSpec

    @property
    def name(self) -> str:
        """The spec as it is written."""
        return str(self.spec)

    @property
    def digest(self) -> str:
        """The name and the code behind it: rows of another state of the package are measured again."""
        return f"{self.name} {code_digest()}"

    def supports(self, model: nn.Module) -> bool:
        """Whether the method and the preset go with the model."""
        if isinstance(model, MILModel):
            return self.spec.supports(model)
        return self.spec.preset is None and METHODS[self.spec.name].supports(Network(model)) is None

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Many bags at once for our models, one by one for others."""
        seed = exam.seed if block.first == 0 else [exam.seed, block.first]
        if isinstance(exam.model, MILModel) or self.spec.name == "random":
            return score_bags(exam.model, block.x, self.spec, seed=seed, n_classes=exam.n_classes)
        found = [self._one(exam.model, bag) for bag in block.x]
        return torch.from_numpy(np.stack(found)).to(block.x.device)

    def _one(self, model: nn.Module, bag: Tensor) -> Any:
        explained = explain_classes(model, bag, method=self.spec.name, output=self.spec.output)
        return np.stack([e.scores for e in explained])


@dataclass(frozen=True)
class Control:
    """A row whose place is known beforehand: the truth itself, one number, or LRP with its sign turned."""

    name: str

    @property
    def digest(self) -> str:
        """The name, and for LRP with its sign turned the code behind it."""
        return f"{self.name} {code_digest()}" if self.name == "lrp_flipped" else self.name

    def supports(self, model: nn.Module) -> bool:
        """The truth and a constant need no model."""
        del model
        return True

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n)."""
        if self.name == ORACLE:
            if block.evidence is None:
                raise InputError(f"{exam.problem}: the truth is not known, so there is no oracle.")
            return torch.from_numpy(block.evidence.astype(np.float64)).to(block.x.device)
        if self.name == "constant":
            b, n, _ = block.x.shape
            return torch.ones(b, exam.n_classes, n, device=block.x.device)
        return -OurMethod(MethodSpec("lrp")).scores(exam, block)


@dataclass(frozen=True)
class OwnMethod:
    """A function `(model, bag, target) -> scores` of the user's, from a file or a module."""

    source: str
    function: Score
    digest: str

    @classmethod
    def load(cls, source: str) -> OwnMethod:
        """The function that `file.py:function` names."""
        function = load_function(source, kind="method")
        return cls(source, function, file_digest(source_file(source)))

    @property
    def name(self) -> str:
        """The function's name, with its file's where that says more.

        >>> OwnMethod("folder/mine.py:score", print, "").name
        'mine:score'
        """
        place, _, function = self.source.rpartition(":")
        return f"{Path(place).stem}:{function}"

    def supports(self, model: nn.Module) -> bool:
        """A method of the user's is asked to explain every model."""
        del model
        return True

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """One bag and one class at a time, on copies: what a method does to them stays with it."""
        model = copy.deepcopy(exam.model)
        classes = range(exam.n_classes)
        with frozen(model):
            found = [[self._one(model, block, i, c) for c in classes] for i in range(len(block))]
        return torch.from_numpy(np.asarray(found)).to(block.x.device)

    def _one(self, model: nn.Module, block: Block, i: int, target: int) -> Any:
        bag = Bag(block.x[i].detach().cpu().numpy().copy(), slide_id=block.names[i])
        try:
            given = self.function(model, bag, target)
        except XmilError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise InputError(f"The method {self.name} failed on bag {bag.slide_id}: {reason}.") from error
        return checked(given, len(bag), f"the method {self.name} on bag {bag.slide_id}")


def checked(given: Any, n: int, where: str) -> Any:
    """Scores (n,) in double precision, whatever they came as."""
    held = given.scores if isinstance(given, Explanation) else given
    values = np.asarray(held.detach().cpu() if isinstance(held, Tensor) else held)
    if values.shape != (n,) or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise InputError(
            f"Scores must be {n} finite numbers, one per instance; {where} gave "
            f"{values.dtype} {values.shape}."
        )
    return values.astype(np.float64)


def method_entry(text: str) -> MethodEntry:
    """The entry that a text names: one of ours, a control, a Parquet file, or `file.py:function`."""
    if text in (ORACLE, "constant", "lrp_flipped"):
        return Control(text)
    if text.endswith(".parquet"):
        from xmil.bench.foreign_scores import ForeignScores

        return ForeignScores.read(Path(text))
    place = text.rpartition(":")[0]
    if place and (place.endswith(".py") or place not in METHODS):
        return OwnMethod.load(text)
    return OurMethod(MethodSpec.parse(text))


@cache
def code_digest(root: Path = PACKAGE) -> str:
    """What the code that explains is, in 16 letters: methods, rules, layers and models."""
    found = hashlib.sha256()
    for path in sorted(file for part in EXPLAINING for file in (root / part).rglob("*.py")):
        found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def file_digest(path: Path | None) -> str:
    """SHA-256 of a file, empty where there is none."""
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
