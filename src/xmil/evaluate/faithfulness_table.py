"""The Table-2-like summary of a faithfulness run, as text, CSV, Markdown and LaTeX, and its statistics."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError
from xmil.core.interval import Interval, bootstrap
from xmil.evaluate.faithfulness import EVIDENCE, Row
from xmil.evaluate.statistics import BestMethod, Comparison, best_method, compare, paper_pairs

Floats = npt.NDArray[np.float64]
MEASURES = {
    "aupc": "AUPC",
    "srg": "SRG",
    "sufficiency": "sufficiency",
    "necessity": "necessity",
    "flips": "flipped",
    "flipped_at_zero": "flipped at zero",
    "auprc2": "AUPRC-2",
    "auroc2": "AUROC-2",
    "ap": "AP",
    "ndcg": "NDCG",
    "pointing": "pointing game",
    "mass": "relevance mass",
}


@dataclass(frozen=True)
class FaithfulnessCell:
    """A method's measure over slides: the mean with its bootstrap interval, and the deviation."""

    method: str
    mode: str
    measure: str
    n: int
    mean: Interval
    std: float


@dataclass(frozen=True)
class Summary:
    """The cells, which slides they count, the comparisons of AUPC by mode, and the best method by mode."""

    cells: list[FaithfulnessCell]
    methods: list[str]
    modes: list[str]
    slides: int
    misclassified: int
    unlabelled: int
    auroc: float | None
    comparisons: dict[str, list[Comparison]]
    best: dict[str, BestMethod]

    @property
    def heading(self) -> str:
        """Which slides count, in a sentence."""
        auroc = "" if self.auroc is None else f" AUROC {self.auroc:.3f}."
        left = f" Left out: {self.misclassified} misclassified by arg max"
        left += f", {self.unlabelled} without a label." if self.unlabelled else "."
        if self.misclassified + self.unlabelled == 0:
            left = " None left out."
        return f"{len(self.methods)} methods on {self.slides} slides.{auroc}{left}"

    def cell(self, method: str, mode: str, measure: str) -> FaithfulnessCell | None:
        """One cell, or None where the measure was not taken."""
        fits = (c for c in self.cells if (c.method, c.mode, c.measure) == (method, mode, measure))
        return next(fits, None)

    def columns(self) -> list[tuple[str, str]]:
        """Mode and measure of each column that holds something."""
        taken = {(c.mode, c.measure) for c in self.cells}
        return [(mode, measure) for measure in MEASURES for mode in self.modes if (mode, measure) in taken]


def summarise(rows: Sequence[Row], *, seed: int = 0) -> Summary:
    """Means over the slides that count: those classified correctly, or all where none has a label."""
    if not rows:
        raise InputError("There are no results to summarise: no slide could be measured.")
    methods, modes = _order(rows, "method"), _order(rows, "mode")
    labelled = any(row["correct"] is not None for row in rows)
    slides = {row["slide_id"]: row for row in rows}
    names = [name for name, row in slides.items() if row["correct"] or not labelled]
    counted = {
        (row["slide_id"], row["method"], row["mode"]): row for row in rows if row["slide_id"] in set(names)
    }
    aupc = {mode: {m: _column(counted, names, m, mode, "aupc") for m in methods} for mode in modes}
    return Summary(
        cells=_cells(counted, names, methods, modes, seed) if names else [],
        methods=methods,
        modes=modes,
        slides=len(names),
        misclassified=sum(row["correct"] is False for row in slides.values()),
        unlabelled=sum(row["correct"] is None for row in slides.values()) if labelled else 0,
        auroc=_auroc(list(slides.values())),
        comparisons={mode: compare(aupc[mode], paper_pairs(methods)) for mode in modes} if names else {},
        best={mode: best_method(aupc[mode]) for mode in modes} if names else {},
    )


def as_text(summary: Summary) -> str:
    """A table for the terminal, with what it means below."""
    lines = [[_title(summary, *column) for column in summary.columns()]]
    lines += [
        [_shown(summary, method, *column) for column in summary.columns()] for method in summary.methods
    ]
    names = ["method", *summary.methods]
    rows = [[name, *line] for name, line in zip(names, lines, strict=True)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    body = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([summary.heading, "", *body, "", *_notes(summary)]) + "\n"


def as_markdown(summary: Summary) -> str:
    """A Markdown table; the best AUPC in bold where it is significantly the lowest."""
    head = "| method | " + " | ".join(_title(summary, *c) for c in summary.columns()) + " |"
    rule = "|---|" + "---|" * len(summary.columns())
    body = [
        f"| {m} | "
        + " | ".join(_bold(summary, m, c, _shown(summary, m, *c), "**") for c in summary.columns())
        + " |"
        for m in summary.methods
    ]
    return "\n".join([summary.heading, "", head, rule, *body, "", *_notes(summary)]) + "\n"


def as_latex(summary: Summary) -> str:
    """A booktabs table."""
    columns = summary.columns()
    lines = [rf"\begin{{tabular}}{{l{'c' * len(columns)}}}", r"\toprule"]
    lines.append(" & ".join(["method", *(_tex(_title(summary, *c)) for c in columns)]) + r" \\")
    lines.append(r"\midrule")
    for m in summary.methods:
        cells = [_bold(summary, m, c, _tex(_shown(summary, m, *c)), r"\textbf{") for c in columns]
        lines.append(" & ".join([_tex(m), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", f"% {summary.heading}"]) + "\n"


def as_csv(summary: Summary) -> str:
    """One line for each method, mode and measure."""
    fields = ["method", "mode", "measure", "n", "mean", "low", "high", "std"]
    rows = [
        [c.method, c.mode, c.measure, c.n, c.mean.estimate, c.mean.low, c.mean.high, c.std]
        for c in summary.cells
    ]
    return _csv(fields, rows)


def statistics_csv(summary: Summary) -> str:
    """Every paired comparison of AUPC, corrected within its mode."""
    rows = [{"mode": mode, **asdict(c)} for mode, found in summary.comparisons.items() for c in found]
    fields = ["mode", *Comparison.__dataclass_fields__]
    return _csv(fields, [[row[name] for name in fields] for row in rows])


FORMATS = {"txt": as_text, "csv": as_csv, "md": as_markdown, "tex": as_latex}


def _cells(
    counted: dict[tuple[str, str, str], Row],
    names: list[str],
    methods: list[str],
    modes: list[str],
    seed: int,
) -> list[FaithfulnessCell]:
    cells = []
    for mode in modes:
        # evidence does not depend on the mode: once is enough
        measures = [m for m in MEASURES if mode == modes[0] or m not in EVIDENCE]
        for method in methods:
            for measure in measures:
                values = _column(counted, names, method, mode, measure)
                known = values[np.isfinite(values)]
                if len(known):
                    spread = float(known.std(ddof=1)) if len(known) > 1 else 0.0
                    cells.append(
                        FaithfulnessCell(
                            method, mode, measure, len(known), bootstrap(known, seed=seed), spread
                        )
                    )
    return cells


def _column(
    counted: dict[tuple[str, str, str], Row], names: list[str], method: str, mode: str, measure: str
) -> Floats:
    """A measure over slides, nan where it was not taken."""
    rows = [counted.get((name, method, mode)) for name in names]
    return np.array([float("nan") if row is None else _value(row, measure) for row in rows])


def _value(row: Row, measure: str) -> float:
    if measure == "flips" and row["flipped_at_zero"] is not None:  # None: no decision that could flip
        return float(row["flipped"] is not None)
    value = row.get(measure)
    return float("nan") if value is None else float(value)


def _auroc(slides: list[Row]) -> float | None:
    """Of a two-class model over all labelled slides."""
    from sklearn.metrics import roc_auc_score

    known = [row for row in slides if row["label"] is not None]
    labels = [row["label"] for row in known]
    if set(labels) != {0, 1} or any(len(row["logits"]) > 2 for row in known):
        return None
    ranks = [row["logits"][-1] - (row["logits"][0] if len(row["logits"]) == 2 else 0.0) for row in known]
    return float(roc_auc_score(labels, ranks))


def _order(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(str(row[key]) for row in rows))


def _title(summary: Summary, mode: str, measure: str) -> str:
    several = sum(m == measure for _, m in summary.columns()) > 1
    return f"{MEASURES[measure]} ({mode})" if several else MEASURES[measure]


def _shown(summary: Summary, method: str, mode: str, measure: str) -> str:
    cell = summary.cell(method, mode, measure)
    if cell is None:
        return "-"
    if measure in ("flips", "flipped_at_zero", "pointing"):
        return f"{100 * cell.mean.estimate:.0f} %"
    return f"{cell.mean.estimate:.3f} ± {cell.std:.3f}"


def _bold(summary: Summary, method: str, column: tuple[str, str], text: str, mark: str) -> str:
    best = summary.best.get(column[0])
    if column[1] != "aupc" or best is None or not best.significant or best.method != method:
        return text
    return f"{mark}{text}" + ("}" if mark.endswith("{") else mark)


def _notes(summary: Summary) -> list[str]:
    lines = [f"{mode}: {best}" for mode, best in summary.best.items()]
    return [
        *lines,
        "Mean ± standard deviation over slides; a lower AUPC is more faithful, a higher SRG as well.",
    ]


def _tex(text: str) -> str:
    for plain, written in (("_", r"\_"), ("%", r"\%"), (" ± ", r" $\pm$ ")):
        text = text.replace(plain, written)
    return text


def _csv(fields: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows(rows)
    return stream.getvalue()
