"""What a run leaves for readers: `results.json`, `bags.parquet` and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from xmil.bench.figures import summary_of
from xmil.bench.folder import Folder
from xmil.core.errors import FileError, InputError
from xmil.core.provenance import provenance
from xmil.core.storage import write_atomically, write_text

RESULTS, BAGS, PAGE = "results.json", "bags.parquet", "index.html"


def write_report(folder: Folder, settings: dict[str, Any]) -> dict[str, Any]:
    """Sum up what is in the folder and write the files; gives what `results.json` holds."""
    from xmil.bench.page import page_of

    about = {"command": "bench", "settings": settings, "measured": measured_on(folder), **provenance()}
    summary = json.loads(json.dumps(summary_of(folder, about), default=str))
    if not summary["suites"]:
        raise InputError(f"{folder.path}: nothing was measured yet.")
    write_text(folder.path / RESULTS, json.dumps(summary, indent=1) + "\n")
    write_bags(folder)
    write_text(folder.path / PAGE, page_of(summary))
    return dict(summary)


def measured_on(folder: Folder) -> list[dict[str, Any]]:
    """Where rows were measured: every distinct set of versions, machine and commit, in order."""
    rows = [row.get("measured") for unit in folder.units() for row in unit.rows.values()]
    return [
        json.loads(text) for text in dict.fromkeys(json.dumps(row, sort_keys=True) for row in rows if row)
    ]


def read_results(path: Path) -> dict[str, Any]:
    """The summary in a run's folder."""
    file = path / RESULTS if path.is_dir() else path
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["command"] != "bench":
            raise KeyError("command")
    except FileNotFoundError:
        raise FileError(f"{file}: no such file; --compare takes folders of 'xmil bench'.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(f"{file}: not the results of a benchmark ({error}).") from None
    return found


def write_bags(folder: Folder) -> None:
    """One row for each bag and method: every measure, in one Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [_table(unit) for unit in folder.units() if unit.rows]
    table = pa.concat_tables(tables, promote_options="default")
    write_atomically(
        folder.path / BAGS, lambda temporary: pq.write_table(table, temporary, compression="zstd")
    )


def _table(unit: Any) -> Any:
    import pyarrow as pa

    columns: dict[str, list[Any]] = {name: [] for name in ("repetition", "method", "bag")}
    for (r, method), values in unit.values.items():
        columns["repetition"] += [r] * len(values)
        columns["method"] += [method] * len(values)
        columns["bag"] += unit.facts[r]["bags"]
    n = len(columns["bag"])
    names = {"suite": unit.suite, "problem": unit.problem, "model": unit.model}
    grid = np.concatenate(list(unit.values.values()))
    fields = {key: pa.array([value] * n).dictionary_encode() for key, value in names.items()}
    fields |= {"repetition": pa.array(columns["repetition"], pa.int32())}
    fields |= {key: pa.array(columns[key]).dictionary_encode() for key in ("method", "bag")}
    fields |= {m: pa.array(grid[:, k].astype(np.float32)) for k, m in enumerate(unit.measures)}
    return pa.table(fields)
