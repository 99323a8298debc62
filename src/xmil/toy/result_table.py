"""Rows of results as a table: text, CSV, Markdown and LaTeX, with the paper's figures beside ours."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xmil.core.method_cards import CARDS, card_of
from xmil.toy.benchmark import Row
from xmil.toy.digit_tasks import TASKS
from xmil.toy.protocol import SETUPS, paper_figure

AUROC = "auroc"


@dataclass(frozen=True)
class ResultCell:
    """Mean and spread over the repetitions, the paper's mean, and the place in its column: 1 is the best."""

    mean: float
    std: float
    n: int
    paper: float | None
    place: int | None = None

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class ResultTable:
    """Cells by row (the test AUROC, then methods) and column (task, model)."""

    methods: list[str]
    columns: list[tuple[str, str]]
    cells: dict[tuple[str, str, str], ResultCell]
    measure: str

    def cell(self, method: str, column: tuple[str, str]) -> ResultCell | None:
        """The cell, or None where a method does not go with a model."""
        return self.cells.get((*column, method))


def summarise(rows: Sequence[Row], measure: str = "auprc2", *, paper: bool = True) -> ResultTable:
    """The table of a measure, columns in the order of the rows; `paper` puts the published figures beside."""
    columns = list(dict.fromkeys((row["task"], row["model"]) for row in rows))
    methods = _ordered(list(dict.fromkeys(row["method"] for row in rows)))
    cells: dict[tuple[str, str, str], ResultCell] = {}
    for task, model in columns:
        here = [row for row in rows if (row["task"], row["model"]) == (task, model)]
        by_repetition = {row["repetition"]: row["auroc"] for row in here}
        cells[task, model, AUROC] = _cell(
            list(by_repetition.values()), paper_figure(task, model, AUROC) if paper else None
        )
        for method in methods:
            values = [row[measure] for row in here if row["method"] == method]
            if values:
                known = paper_figure(task, model, base_of(method)) if paper and measure == "auprc2" else None
                cells[task, model, method] = _cell(values, known)
        _place(cells, methods, (task, model))
    return ResultTable(methods, columns, cells, measure)


def as_text(table: ResultTable) -> str:
    """Columns for a terminal; best *, second +; paper's figure and the difference below in brackets."""
    lines = [["", *(column_title(t, m) for t, m in table.columns)]]
    for method in [AUROC, *table.methods]:
        cells = [table.cell(method, column) for column in table.columns]
        lines.append([title_of(method), *(_plain(cell) for cell in cells)])
        if any(cell is not None and cell.paper is not None for cell in cells):
            lines.append(["", *(_against(cell) for cell in cells)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def as_records(table: ResultTable) -> list[dict[str, Any]]:
    """One record for each cell."""
    held = [
        (task, model, method, table.cell(method, (task, model)))
        for task, model in table.columns
        for method in [AUROC, *table.methods]
    ]
    return [
        {
            "task": task,
            "model": model,
            "method": method,
            "measure": AUROC if method == AUROC else table.measure,
            "mean": cell.mean,
            "std": cell.std,
            "repetitions": cell.n,
            "paper": cell.paper,
            "difference": cell.difference,
            "place": cell.place,
        }
        for task, model, method, cell in held
        if cell is not None
    ]


def as_csv(table: ResultTable) -> str:
    """One line for each cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = (
        "task",
        "model",
        "method",
        "measure",
        "mean",
        "std",
        "repetitions",
        "paper",
        "difference",
        "place",
    )
    writer.writerow(names)
    for record in as_records(table):
        rounded = {**record, **{name: f"{record[name]:.6f}" for name in ("mean", "std")}}
        rounded |= {name: _or_empty(record[name]) for name in ("paper", "difference")}
        writer.writerow([rounded[name] if rounded[name] is not None else "" for name in names])
    return out.getvalue()


def as_markdown(table: ResultTable) -> str:
    """A Markdown table; best bold, second underlined."""
    head = ["", *(column_title(t, m) for t, m in table.columns)]
    lines = [_pipe(head), _pipe(["---"] * len(head))]
    lines += [
        _pipe([title_of(method), *(_marked(table.cell(method, c)) for c in table.columns)])
        for method in [AUROC, *table.methods]
    ]
    return "\n".join(lines) + "\n"


def as_latex(table: ResultTable) -> str:
    """A LaTeX tabular with booktabs rules; best bold, second underlined."""
    heads = [f"{_task(t)}" for t, _ in table.columns], [_model(m) for _, m in table.columns]
    lines = [f"\\begin{{tabular}}{{l{'c' * len(table.columns)}}}", "\\toprule"]
    lines += [" & ".join(["", *head]) + " \\\\" for head in heads]
    for method in [AUROC, *table.methods]:
        lines += ["\\midrule"] if method in (AUROC, table.methods[0]) else []
        cells = [_latex(table.cell(method, c)) for c in table.columns]
        lines.append(" & ".join([_latex_title(method), *cells]) + " \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


FORMATS = {"txt": as_text, "csv": as_csv, "md": as_markdown, "tex": as_latex}


def _cell(values: list[float], paper: float | None) -> ResultCell:
    return ResultCell(float(np.mean(values)), float(np.std(values)), len(values), paper)


def _place(
    cells: dict[tuple[str, str, str], ResultCell], methods: list[str], column: tuple[str, str]
) -> None:
    found = sorted(((*column, m) for m in methods if (*column, m) in cells), key=lambda key: -cells[key].mean)
    for place, key in enumerate(found, start=1):
        cell = cells[key]
        cells[key] = ResultCell(cell.mean, cell.std, cell.n, cell.paper, place)


def _ordered(methods: list[str]) -> list[str]:
    known = list(CARDS)
    return sorted(
        methods, key=lambda method: known.index(base_of(method)) if base_of(method) in known else len(known)
    )


def base_of(method: str) -> str:
    """A method's name without preset and output."""
    return method.partition("@")[0].partition(":")[0]


def title_of(method: str) -> str:
    """A method as tables name it."""
    if method == AUROC:
        return "Test AUROC"
    base = base_of(method)
    return card_of(base).short + method[len(base) :].replace(":", " ")


def column_title(task: str, model: str) -> str:
    """A task and a model as tables name them."""
    return f"{_task(task)} {_model(model)}"


def _task(name: str) -> str:
    return TASKS[name].title


def _model(name: str) -> str:
    return SETUPS[name].title


def _plain(cell: ResultCell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.mean:.3f} ± {cell.std:.3f}" + {1: " *", 2: " +"}.get(cell.place or 0, "")


def _against(cell: ResultCell | None) -> str:
    if cell is None or cell.paper is None:
        return ""
    return f"[{cell.paper:.2f}, {cell.mean - cell.paper:+.3f}]"


def _marked(cell: ResultCell | None) -> str:
    if cell is None:
        return "–"  # noqa: RUF001  # the dash of an empty cell
    value = f"{cell.mean:.3f} ± {cell.std:.3f}"
    value = {1: f"**{value}**", 2: f"<u>{value}</u>"}.get(cell.place or 0, value)
    return f"{value} {_against(cell)}".strip()


def _latex(cell: ResultCell | None) -> str:
    if cell is None:
        return "--"
    value = f"{cell.mean:.3f} $\\pm$ {cell.std:.3f}"
    value = {1: f"\\textbf{{{value}}}", 2: f"\\underline{{{value}}}"}.get(cell.place or 0, value)
    return f"{value} {_against(cell)}".strip()


def _latex_title(method: str) -> str:
    return title_of(method).replace("G x I", "G$\\times$I").replace("Grad^2", "Grad$^2$").replace("_", "\\_")


def _pipe(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _or_empty(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
