"""Entries of the benchmark: our methods, a user's function, scores of other programs, and controls.

For scores of other programs, export the bags and models of a run, and enter a Parquet file of scores. Its
columns are `problem`, `model`, `repetition`, `bag`, `target`, `scores` (a list) and `checksum`, the SHA-256
of the exported bag; a bag with another checksum is an error.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from xmil.bench.models import source_digest
from xmil.bench.problems import Block
from xmil.bench.scoring import MethodSpec, score_bags
from xmil.bench.trained import save_tensors
from xmil.bench.units import file_name
from xmil.core.bag import Bag
from xmil.core.budget import parquet_rows
from xmil.core.durable import file_digest
from xmil.core.errors import FileError, InputError, XmilError, absent
from xmil.core.explanation import Explanation
from xmil.core.registry import load_function
from xmil.evaluate import choose_method
from xmil.methods import METHODS, ZeroMapError, explain, explain_targets
from xmil.models import MILModel
from xmil.network import Network, frozen
from xmil.storage import write_arrays

PACKAGE = Path(__file__).parents[1]
EXPLAINING = (
    "lrp",
    "methods",
    "models",
    "network",
    "nn",
    "subsets",
    "bench/scoring.py",
    "evaluate/choice.py",
)  # code that decides our scores
ORACLE, AUTO = "oracle", "auto"
CHOOSING = 8  # bags that choose the method of `auto`
CONTROLS = ("random", "constant", "lrp_flipped")  # wrong on purpose: they must rank last
COLUMNS = ("problem", "model", "repetition", "bag", "target", "scores", "checksum")
Score = Callable[[nn.Module, Bag, int], Any]
Key = tuple[str, str, int, str, int]


@dataclass(frozen=True, eq=False)
class Exam:
    """A trained model and its test bags, for a method to explain."""

    problem: str
    model_name: str
    repetition: int
    seed: int
    n_classes: int
    model: nn.Module
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class MethodEntry:
    """A row of the table; `digest` changes with the entry."""

    asks_model: ClassVar[bool] = True  # whether it can explain other weights too
    name: str
    digest: str

    def supports(self, model: nn.Module) -> bool:
        """Whether it can explain the model."""
        del model
        return True

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n) of every class."""
        raise NotImplementedError


@dataclass(frozen=True)
class OurMethod(MethodEntry):
    """A method of the package, written `name[:preset][@output]`.

    Its digest covers our code: rows of another version are measured again.
    """

    spec: MethodSpec

    def supports(self, model: nn.Module) -> bool:
        """Whether the method and the preset support the model."""
        if isinstance(model, MILModel):
            return self.spec.supports(model)
        return self.spec.preset is None and METHODS[self.spec.name].supports(Network(model)) is None

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Score many bags at once for our models, one by one for others."""
        seed = exam.seed if block.first == 0 else [exam.seed, block.first]
        if isinstance(exam.model, MILModel) or self.spec.name == "random":
            return score_bags(exam.model, block.x, self.spec, seed=seed, n_classes=exam.n_classes)
        scores = np.stack([self._one(exam, bag) for bag in block.x])
        return torch.from_numpy(scores).to(block.x.device)

    def _one(self, exam: Exam, bag: Tensor) -> Any:
        """Scores (c, n) of one bag; zeros for a class whose map LRP refuses because it is zero."""
        name, output, scores = self.spec.name, self.spec.output, np.zeros((exam.n_classes, len(bag)))
        try:
            return np.stack(
                [
                    e.scores
                    for e in explain_targets(exam.model, bag, None, method=name, output=output, check=False)
                ]
            )
        except ZeroMapError:
            for target in range(exam.n_classes):
                with suppress(ZeroMapError):
                    scores[target] = explain(
                        exam.model, bag, method=name, target=target, output=output, check=False
                    ).scores
        return scores.astype(np.float32)


@dataclass(frozen=True)
class ChosenMethod(MethodEntry):
    """`auto`: the method that the model confirms best on some of the bags, without their evidence."""

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores of the method chosen for the model."""
        bags = [bag for own in exam.blocks for bag in own.x[:CHOOSING]][:CHOOSING]
        choice = choose_method(exam.model, bags, ["lrp", "one_added"], exam.seed)
        return method_entry(choice.method).scores(exam, block)


class Control(MethodEntry):
    """A row with a known rank: the truth, a constant, or LRP with its sign flipped."""

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n)."""
        if self.name == ORACLE:
            if block.evidence is None:
                raise InputError(f"{exam.problem}: has no known truth for the oracle.")
            return torch.from_numpy(block.evidence.astype(np.float64)).to(block.x.device)
        if self.name == "constant":
            b, n, _ = block.x.shape
            return torch.ones(b, exam.n_classes, n, device=block.x.device)
        return -OurMethod("lrp", self.digest, MethodSpec("lrp")).scores(exam, block)


@dataclass(frozen=True)
class OwnMethod(MethodEntry):
    """A function `(model, bag, target) -> scores` of the user's, from a file or a module."""

    function: Score

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Score one bag and class at a time, on copies that the function may change."""
        model = copy.deepcopy(exam.model)
        with frozen(model):
            return _each(exam, block, lambda i, target: self._one(model, block, i, target))

    def _one(self, model: nn.Module, block: Block, i: int, target: int) -> Any:
        bag = Bag(block.x[i].detach().cpu().numpy().copy(), slide_id=block.names[i])
        try:
            scores = self.function(model, bag, target)
        except XmilError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise InputError(f"The method {self.name} failed on bag {bag.slide_id}: {reason}.") from error
        return _check_scores(scores, len(bag), f"the method {self.name} on bag {bag.slide_id}")


def _each(exam: Exam, block: Block, score: Callable[[int, int], Any]) -> Tensor:
    """Collect scores (b, c, n) one bag and class at a time."""
    scores = [[score(i, target) for target in range(exam.n_classes)] for i in range(len(block))]
    return torch.from_numpy(np.asarray(scores)).to(block.x.device)


def _describe(problem: str, model: str, repetition: int, bag: str, target: int) -> str:
    return f"{problem}, {model}, repetition {repetition}, bag {bag}, target {target}"


def _check_scores(scores: Any, n: int, source: str) -> Any:
    """Convert scores (n,) of any type to double precision."""
    plain = scores.scores if isinstance(scores, Explanation) else scores
    values = np.asarray(plain.detach().cpu() if isinstance(plain, Tensor) else plain)
    if values.shape != (n,) or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise InputError(
            f"Scores must be {n} finite numbers, one per patch. Got {values.dtype} {values.shape} "
            f"from {source}."
        )
    return values.astype(np.float64)


@dataclass(frozen=True, eq=False)
class ForeignScores(MethodEntry):
    """A row whose scores come from a file with the columns above."""

    asks_model = False
    path: Path
    table: dict[Key, tuple[Any, str]]

    @classmethod
    def read(cls, path: Path) -> ForeignScores:
        """Read the scores of a file."""
        import pyarrow as pa

        try:
            rows = parquet_rows(path, list(COLUMNS))
            table = {}
            for row in rows:
                column = (str(row["problem"]), str(row["model"]), int(row["repetition"]))
                key = (*column, str(row["bag"]), int(row["target"]))
                if key in table:
                    raise FileError(f"{path}: has two rows for {_describe(*key)}; keep one.")
                table[key] = (row["scores"], str(row["checksum"]))
        except XmilError:
            raise
        except FileNotFoundError:
            raise FileError(absent(path)) from None
        except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise FileError(f"{path}: needs the columns {', '.join(COLUMNS)} ({reason}).") from None
        return cls(path.stem, file_digest(path), path, table)

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Look up scores (b, c, n) of the block's bags; a missing row or another bag is an error."""
        sums, n = block.checksums(), block.x.shape[1]
        return _each(exam, block, lambda i, target: self._one(exam, block.names[i], target, sums[i], n))

    def _one(self, exam: Exam, bag: str, target: int, checksum: str, n: int) -> Any:
        key = (exam.problem, exam.model_name, exam.repetition, bag, target)
        if key not in self.table:
            raise InputError(
                f"{self.path}: has no scores for {_describe(*key)}; export the run again and score every bag."
            )
        values, stored = self.table[key]
        if stored != checksum:
            raise InputError(
                f"{self.path}: the scores of bag {bag} belong to another bag (checksum {stored[:12]} instead "
                f"of {checksum[:12]}); export the run again."
            )
        try:
            plain = np.asarray(values, dtype=np.float64)
        except (ValueError, TypeError):
            plain = np.asarray(values, dtype=object)
        return _check_scores(plain, n, f"{self.path.name} on bag {bag}")


def export_exam(exam: Exam, folder: Path) -> Path:
    """Write bags with checksums as .npz, and the weights beside them, for other programs."""
    path = folder / f"{file_name(exam.problem, exam.model_name, str(exam.repetition))}.npz"
    arrays = {
        "n_classes": np.array(exam.n_classes),
        **{f"bag|{name}": x.cpu().numpy() for b in exam.blocks for name, x in zip(b.names, b.x, strict=True)},
        "names": np.array([name for block in exam.blocks for name in block.names]),
        "checksums": np.array([checksum for block in exam.blocks for checksum in block.checksums()]),
    }
    write_arrays(path, arrays)
    save_tensors(path.with_suffix(".safetensors"), exam.model.state_dict())
    return path


def method_entry(text: str) -> MethodEntry:
    """Find the entry that a text names: one of ours, a control, a Parquet file, or `file.py:function`."""
    if text in (ORACLE, "constant"):
        return Control(text, text)
    if text == "lrp_flipped":
        return Control(text, f"{text} {code_digest()}")
    if text == AUTO:
        return ChosenMethod(text, f"{text} {code_digest()}")
    if text.endswith(".parquet"):
        return ForeignScores.read(Path(text))
    module, _, function = text.rpartition(":")
    if module and (module.endswith(".py") or module not in METHODS):
        score = load_function(text, kind="method")
        return OwnMethod(f"{Path(module).stem}:{function}", source_digest(text), score)
    spec = MethodSpec.parse(text)
    return OurMethod(str(spec), f"{spec} {code_digest()}", spec)


@cache
def code_digest(root: Path = PACKAGE) -> str:
    """Digest the code that explains (methods, rules, layers, models) in 16 letters."""
    parts = [root / part for part in EXPLAINING]
    files = [file for part in parts for file in ([part] if part.is_file() else part.rglob("*.py"))]
    names = {path: path.relative_to(root).as_posix().encode() for path in sorted(files)}
    code = b"".join(name + b"\0" + path.read_bytes() for path, name in names.items())
    return hashlib.sha256(code).hexdigest()[:16]
