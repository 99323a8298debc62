"""Boxes and scores as a plain table: CSV or Parquet that any program reads."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from xmil.core.explanation import Explanation
from xmil.core.storage import write_atomically


def write_table(path: str | PathLike[str], explanations: Sequence[Explanation], *, kind: str = "csv") -> None:
    """Write level-0 boxes `x0, y0, x1, y1` and one column for each `<method>:<target>`."""
    table = as_table(explanations)
    if kind == "parquet":
        import pyarrow.parquet as pq

        write_atomically(path, lambda part: pq.write_table(table, part, compression="zstd"))
    else:
        from pyarrow import csv

        options = csv.WriteOptions(quoting_style="needed")
        write_atomically(path, lambda part: csv.write_csv(table, part, options))


def as_table(explanations: Sequence[Explanation]) -> Any:
    """The same as an Arrow table."""
    import pyarrow as pa

    boxes = explanations[0].boxes()
    columns = {name: pa.array(boxes[:, i]) for i, name in enumerate(("x0", "y0", "x1", "y1"))}
    return pa.table({**columns, **{e.column: pa.array(e.scores) for e in explanations}})
