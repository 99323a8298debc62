"""Scores computed elsewhere: the bags and models of a run go out, a Parquet file of scores comes in.

Columns of the file: `problem`, `model`, `repetition`, `bag`, `target`, `scores` (a list) and `checksum`, the
SHA-256 that the exported bag carries. A bag whose checksum is another one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.bench.entries import Exam, checked, file_digest
from xmil.bench.problems import Block
from xmil.core.absence import absent
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, InputError
from xmil.core.storage import write_atomically

COLUMNS = ("problem", "model", "repetition", "bag", "target", "scores", "checksum")
Key = tuple[str, str, int, str, int]


@dataclass(frozen=True, eq=False)
class ForeignScores:
    """A row of the table whose scores were read from a file."""

    path: Path
    digest: str
    table: dict[Key, tuple[Any, str]]
    asks_model = False  # it cannot explain a model with other weights

    @classmethod
    def read(cls, path: Path) -> ForeignScores:
        """The scores of a file, with the columns it must have."""
        import pyarrow as pa

        try:
            rows = read_parquet(path, list(COLUMNS)).to_pylist()
        except FileNotFoundError:
            raise FileError(absent(path)) from None
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise FileError(f"{path}: needs the columns {', '.join(COLUMNS)} ({reason}).") from None
        table = {_key(row): (row["scores"], str(row["checksum"])) for row in rows}
        return cls(path, file_digest(path), table)

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.stem

    def supports(self, model: nn.Module) -> bool:
        """Whether a model can be asked: any, where the file has its scores."""
        del model
        return True

    def scores(self, exam: Exam, block: Block) -> Tensor:
        """Scores (b, c, n) of the block's bags; one that is missing or of another bag is an error."""
        sums = block.checksums()
        found = [
            [self._one(exam, block.names[i], c, sums[i], block.x.shape[1]) for c in range(exam.n_classes)]
            for i in range(len(block))
        ]
        return torch.from_numpy(np.asarray(found)).to(block.x.device)

    def _one(self, exam: Exam, bag: str, target: int, checksum: str, n: int) -> Any:
        key = (exam.problem, exam.model_name, exam.repetition, bag, target)
        if key not in self.table:
            raise InputError(
                f"{self.path}: has no scores for {exam.problem}, {exam.model_name}, repetition "
                f"{exam.repetition}, bag {bag}, target {target}; export the run again and score every bag."
            )
        values, given = self.table[key]
        if given != checksum:
            raise InputError(
                f"{self.path}: the scores of bag {bag} belong to another bag (its checksum is "
                f"{checksum[:12]}, the file says {given[:12]}); export the run again."
            )
        return checked(np.asarray(values, dtype=np.float64), n, f"{self.path.name} on bag {bag}")


def _key(row: dict[str, Any]) -> Key:
    return (
        str(row["problem"]),
        str(row["model"]),
        int(row["repetition"]),
        str(row["bag"]),
        int(row["target"]),
    )


def export_exam(exam: Exam, folder: Path) -> Path:
    """Write what a foreign program needs: bags with checksums as .npz, and the weights beside them."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{exam.problem}--{exam.model_name.replace(':', '-')}--{exam.repetition}"
    path = folder / f"{stem}.npz"
    arrays: dict[str, Any] = {"n_classes": np.array(exam.n_classes)}
    names, sums = [], []
    for block in exam.blocks:
        for name, x, checksum in zip(block.names, block.x.cpu().numpy(), block.checksums(), strict=True):
            arrays[f"bag|{name}"] = x
            names.append(name)
            sums.append(checksum)
    arrays |= {"names": np.array(names), "checksums": np.array(sums)}

    def write(temporary: str) -> None:
        with open(temporary, "wb") as stream:
            np.savez_compressed(stream, **arrays)

    write_atomically(path, write)
    state = {k: v.detach().cpu().contiguous().clone() for k, v in exam.model.state_dict().items()}
    write_atomically(path.with_suffix(".safetensors"), lambda t: save_file(state, t))
    return path


def write_scores(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with the columns above; what a foreign program in Python would do."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([{name: row[name] for name in COLUMNS} for row in rows])
    write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))
