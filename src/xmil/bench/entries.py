"""What enters the benchmark: methods of ours, a function of yours, scores from elsewhere, and controls.

For scores from elsewhere the bags and models of a run go out, and a Parquet file of scores comes in. Its
columns are `problem`, `model`, `repetition`, `bag`, `target`, `scores` (a list) and `checksum`, the SHA-256
that the exported bag carries; a bag with another checksum is refused.
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

from xmil.bench.folder import file_name, save_tensors
from xmil.bench.models import source_digest
from xmil.bench.problems import Block
from xmil.bench.scoring import MethodSpec, score_bags
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
)  # decide our scores
ORACLE, AUTO = "oracle", "auto"
CHOOSING = 8  # bags that choose the method of `auto`
CONTROLS = ("random", "constant", "lrp_flipped")  # wrong on purpose: they must come last
COLUMNS = ("problem", "model", "repetition", "bag", "target", "scores", "checksum")
Score = Callable[[nn.Module, Bag, int], Any]
Key = tuple[str, str, int, str, int]


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


@dataclass(frozen=True)
class MethodEntry:
    """A row of the table; `digest` tells a changed entry from the one it was."""

    asks_model: ClassVar[bool] = True  # it explains any model, also one with other weights
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

    Its digest has the code behind it: rows of another state of the package are measured again.
    """

    spec: MethodSpec

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
        scores = np.stack([self._one(exam, bag) for bag in block.x])
        return torch.from_numpy(scores).to(block.x.device)

    def _one(self, exam: Exam, bag: Tensor) -> Any:
        """Scores (c, n) of one bag; where LRP refuses a map of zeros, its row has the zeros."""
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
    """`auto`: the method that the model confirms best on some of the bags; it never sees their evidence."""

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Those of the method that was chosen for the model."""
        bags = [bag for own in exam.blocks for bag in own.x[:CHOOSING]][:CHOOSING]
        choice = choose_method(exam.model, bags, ["lrp", "one_added"], exam.seed)
        return method_entry(choice.method).scores(exam, block)


class Control(MethodEntry):
    """A row whose place is clear beforehand: the truth itself, one number, or LRP with its sign turned."""

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n)."""
        if self.name == ORACLE:
            if block.evidence is None:
                raise InputError(f"{exam.problem}: the truth is not known, so there is no oracle.")
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
        """One bag and one class at a time, on copies: what a method does to them stays with it."""
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
    """Scores (b, c, n) from those of one bag and class at a time."""
    scores = [[score(i, target) for target in range(exam.n_classes)] for i in range(len(block))]
    return torch.from_numpy(np.asarray(scores)).to(block.x.device)


def _place(problem: str, model: str, repetition: int, bag: str, target: int) -> str:
    return f"{problem}, {model}, repetition {repetition}, bag {bag}, target {target}"


def _check_scores(scores: Any, n: int, where: str) -> Any:
    """Scores (n,) in double precision, whatever they came as."""
    plain = scores.scores if isinstance(scores, Explanation) else scores
    values = np.asarray(plain.detach().cpu() if isinstance(plain, Tensor) else plain)
    if values.shape != (n,) or values.dtype.kind not in "fiub" or not np.isfinite(values).all():
        raise InputError(
            f"Scores must be {n} finite numbers, one per patch; {where} gave {values.dtype} {values.shape}."
        )
    return values.astype(np.float64)


@dataclass(frozen=True, eq=False)
class ForeignScores(MethodEntry):
    """A row of the table whose scores were read from a file with the columns above."""

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
                place = (str(row["problem"]), str(row["model"]), int(row["repetition"]))
                key = (*place, str(row["bag"]), int(row["target"]))
                if key in table:
                    raise FileError(f"{path}: has two rows for {_place(*key)}; keep one.")
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
        """Scores (b, c, n) of the block's bags; one that is missing or of another bag is an error."""
        sums, n = block.checksums(), block.x.shape[1]
        return _each(exam, block, lambda i, target: self._one(exam, block.names[i], target, sums[i], n))

    def _one(self, exam: Exam, bag: str, target: int, checksum: str, n: int) -> Any:
        key = (exam.problem, exam.model_name, exam.repetition, bag, target)
        if key not in self.table:
            raise InputError(
                f"{self.path}: has no scores for {_place(*key)}; export the run again and score every bag."
            )
        values, stored = self.table[key]
        if stored != checksum:
            raise InputError(
                f"{self.path}: the scores of bag {bag} belong to another bag (its checksum is "
                f"{checksum[:12]}, the file says {stored[:12]}); export the run again."
            )
        try:
            plain = np.asarray(values, dtype=np.float64)
        except (ValueError, TypeError):
            plain = np.asarray(values, dtype=object)
        return _check_scores(plain, n, f"{self.path.name} on bag {bag}")


def export_exam(exam: Exam, folder: Path) -> Path:
    """Write what a foreign program needs: bags with checksums as .npz, and the weights beside them."""
    path = folder / f"{file_name(exam.problem, exam.model_name, str(exam.repetition))}.npz"
    arrays = {
        "n_classes": np.array(exam.n_classes),
        **{f"bag|{name}": x.cpu().numpy() for b in exam.blocks for name, x in zip(b.names, b.x, strict=True)},
        "names": np.array([name for block in exam.blocks for name in block.names]),
        "checksums": np.array([one for block in exam.blocks for one in block.checksums()]),
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
    place, _, function = text.rpartition(":")
    if place and (place.endswith(".py") or place not in METHODS):
        score = load_function(text, kind="method")
        return OwnMethod(f"{Path(place).stem}:{function}", source_digest(text), score)
    spec = MethodSpec.parse(text)
    return OurMethod(str(spec), f"{spec} {code_digest()}", spec)


@cache
def code_digest(root: Path = PACKAGE) -> str:
    """Name the code that explains in 16 letters: methods, rules, layers and models."""
    parts = [root / part for part in EXPLAINING]
    files = [file for part in parts for file in ([part] if part.is_file() else part.rglob("*.py"))]
    names = {path: path.relative_to(root).as_posix().encode() for path in sorted(files)}
    code = b"".join(name + b"\0" + path.read_bytes() for path, name in names.items())
    return hashlib.sha256(code).hexdigest()[:16]
