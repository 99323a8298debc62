"""Table 1: units of the evidence suite as text, CSV, Markdown and LaTeX, with the paper's figures.

Repetitions whose model did not learn the task do not count, as on the referee's page, unless none did;
`notes` lists them. `rows_of` gives every repetition, for a Parquet file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.bench.digits import TASKS
from xmil.bench.models import all_setups
from xmil.bench.suites import LEARNED
from xmil.bench.trained import STACK_KEY
from xmil.bench.training import Fitted
from xmil.bench.units import Unit
from xmil.bench.verdicts import (
    ROUNDING,
    base_of,
    learned_repetitions,
    paper_cell,
    rank,
    repetition_means,
    row_title,
)
from xmil.core.durable import write_atomically
from xmil.core.explanation import CARDS
from xmil.core.quoting import latex_text
from xmil.core.text import csv_text, markdown_table, text_table
from xmil.storage import make_folder

AUROC = "auroc"
Row = dict[str, Any]


@dataclass(frozen=True)
class ResultCell:
    """A value per repetition that counts, the paper's mean, and the rank in its column, from 1."""

    values: tuple[float, ...]
    paper: float | None
    place: int | None = None

    @property
    def mean(self) -> float:
        """The mean over the repetitions."""
        return round(float(np.mean(self.values)), ROUNDING) + 0.0  # never -0

    @property
    def std(self) -> float:
        """The standard deviation over the repetitions."""
        return float(np.std(self.values))


@dataclass(frozen=True)
class ResultTable:
    """Cells by row (the test AUROC, then methods) and column (task, model)."""

    methods: list[str]
    columns: list[tuple[str, str]]
    cells: dict[tuple[str, str, str], ResultCell]
    measure: str

    def cell(self, method: str, column: tuple[str, str]) -> ResultCell | None:
        """The cell, or None if the method does not support the model."""
        return self.cells.get((*column, method))


def summarise(
    units: Sequence[Unit], methods: Sequence[str], measure: str = "auprc2", *, repetitions: int | None = None
) -> ResultTable:
    """Make the table of a measure: some methods, the first repetitions, columns in the order of the units."""
    kinds = list(CARDS)
    shown = [method for method in methods if any(method in unit.methods for unit in units)]
    shown.sort(key=lambda m: kinds.index(base_of(m)) if base_of(m) in kinds else len(kinds))
    cells: dict[tuple[str, str, str], ResultCell] = {}
    for unit in units:
        column = (unit.problem, unit.model)
        rows = [method for method in shown if method in unit.methods]
        every = _first(unit.repetitions, repetitions)
        counted = _first(learned_repetitions(unit), repetitions) or every
        cells[*column, AUROC] = ResultCell(
            tuple(unit.facts[r][AUROC] for r in every), paper_cell(unit, AUROC)
        )
        values = repetition_means(unit, counted, rows)[:, :, unit.measures.index(measure)]  # (r, m)
        places = rank(dict(zip(rows, values.mean(axis=0).tolist(), strict=True)))
        for i, method in enumerate(rows):
            paper = paper_cell(unit, base_of(method)) if measure == "auprc2" else None
            cells[*column, method] = ResultCell(tuple(values[:, i].tolist()), paper, places.get(method))
    return ResultTable(shown, [(unit.problem, unit.model) for unit in units], cells, measure)


def _first(repetitions: list[int], n: int | None) -> list[int]:
    return [r for r in repetitions if n is None or r < n]


def notes(units: Sequence[Unit], *, repetitions: int | None = None) -> list[str]:
    """Note the columns in which some models, or all, did not learn the task."""
    sentences = []
    for unit in units:
        n = len(_first(unit.repetitions, repetitions))
        learned = len(_first(learned_repetitions(unit), repetitions))
        if learned < n:
            task = f"the task (test AUROC below {LEARNED})"
            note = f"no model learned {task}; its figures say nothing about methods."
            if learned:
                note = f"{n - learned} of {n} models did not learn {task} and do not count."
            sentences.append(f"{column_title(unit.problem, unit.model)}: {note}")
    return sentences


def rows_of(unit: Unit, fitted: Fitted) -> list[Row]:
    """Make a row per repetition and method: the mean of each measure over bags, AUROC, training and time."""
    rows = []
    for (r, method), about in unit.rows.items():
        if r >= len(fitted.epochs):  # from an earlier call with more repetitions
            continue
        means = repetition_means(unit, [r], [method])[0, 0].tolist()
        rows.append(
            {
                "task": unit.problem,
                "model": unit.model,
                "repetition": r,
                "seed": unit.facts[r]["seed"],
                AUROC: unit.facts[r][AUROC],
                "method": method,
                **dict(zip(unit.measures, means, strict=True)),
                "seconds": about["seconds"],
                "best_epoch": fitted.best_epoch[r],
                "epochs": fitted.epochs[r],
            }
        )
    return rows


def write_rows(path: Path, rows: list[Row], settings: dict[str, Any]) -> None:
    """Write rows atomically as Parquet, with the settings of the training."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows).replace_schema_metadata({STACK_KEY: json.dumps(settings)})
    make_folder(path.parent)
    write_atomically(path, lambda temporary: pq.write_table(table, temporary))


def as_text(table: ResultTable) -> str:
    """Format for a terminal; best *, second +; the paper's figure and the difference in brackets."""
    lines = [["", *(column_title(t, m) for t, m in table.columns)]]
    for method in [AUROC, *table.methods]:
        cells = [table.cell(method, column) for column in table.columns]
        lines.append([title_of(method), *(_text_cell(cell) for cell in cells)])
        if any(cell is not None and cell.paper is not None for cell in cells):
            lines.append(["", *(_paper_note(cell) for cell in cells)])
    return text_table(lines)


def as_records(table: ResultTable) -> list[Row]:
    """One record per cell."""
    return [
        {
            "task": task,
            "model": model,
            "method": method,
            "measure": AUROC if method == AUROC else table.measure,
            "mean": cell.mean,
            "std": cell.std,
            "repetitions": len(cell.values),
            "paper": cell.paper,
            "difference": None if cell.paper is None else cell.mean - cell.paper,
            "place": cell.place,
        }
        for task, model in table.columns
        for method in [AUROC, *table.methods]
        if (cell := table.cell(method, (task, model))) is not None
    ]


def as_csv(table: ResultTable) -> str:
    """One line per cell."""
    records, numbers = as_records(table), ("mean", "std", "paper", "difference")
    rows = [
        [f"{v:.6f}" if name in numbers and v is not None else v for name, v in record.items()]
        for record in records
    ]
    return csv_text(list(records[0]), rows)


def as_markdown(table: ResultTable) -> str:
    """A Markdown table; best bold, second underlined."""
    rows = [
        [title_of(method), *(_markdown_cell(table.cell(method, c)) for c in table.columns)]
        for method in [AUROC, *table.methods]
    ]
    return markdown_table(["", *(column_title(t, m) for t, m in table.columns)], rows) + "\n"


def as_latex(table: ResultTable) -> str:
    """A LaTeX tabular with booktabs rules; best bold, second underlined."""
    heads = [TASKS[t].title for t, _ in table.columns], [all_setups()[m].title for _, m in table.columns]
    lines = [f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}", "\\toprule"]
    lines += [" & ".join(["", *head]) + " \\\\" for head in heads]
    for method in [AUROC, *table.methods]:
        lines += ["\\midrule"] if method in (AUROC, table.methods[0]) else []
        cells = [_latex_cell(table.cell(method, c)) for c in table.columns]
        title = latex_text(title_of(method)).replace("G x I", "G$\\times$I")
        title = title.replace(latex_text("Grad^2"), "Grad$^2$")
        lines.append(" & ".join([title, *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


FORMATS = {"txt": as_text, "csv": as_csv, "md": as_markdown, "tex": as_latex}


def title_of(method: str) -> str:
    """A method's name in tables."""
    return "Test AUROC" if method == AUROC else row_title(method)


def column_title(task: str, model: str) -> str:
    """A task's and a model's name in tables."""
    return f"{TASKS[task].title} {all_setups()[model].title}"


def _cell(cell: ResultCell | None, *, none: str, plus: str, marks: Sequence[str], paper: bool = True) -> str:
    """Format mean and deviation, marks for the best and second, and the paper's figure."""
    if cell is None:
        return none
    value = f"{cell.mean:.3f} {plus} {cell.std:.3f}"
    if cell.place in (1, 2):
        value = marks[cell.place - 1].format(value)
    return f"{value} {_paper_note(cell)}".strip() if paper else value


def _paper_note(cell: ResultCell | None) -> str:
    if cell is None or cell.paper is None:
        return ""
    return f"[{cell.paper:.2f}, {cell.mean - cell.paper:+.3f}]"


_text_cell = partial(_cell, none="-", plus="±", marks=("{} *", "{} +"), paper=False)
_markdown_cell = partial(_cell, none="–", plus="±", marks=("**{}**", "<u>{}</u>"))  # noqa: RUF001  # the dash of an empty cell
_latex_cell = partial(_cell, none="--", plus="$\\pm$", marks=("\\textbf{{{}}}", "\\underline{{{}}}"))
