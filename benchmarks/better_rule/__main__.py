"""The choice on validation bags, and the report on test bags: `python -m benchmarks.better_rule --rows DIR`.

DIR holds what `python -m benchmarks.better_rule.study` left. The strength of the default is the one with the
largest gain over `exact`, the mean of AUPRC-2 and SRG over validation bags, among those that do not lower the
share of decisions gone without the positive scores. Test bags are read only for the tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rules import sign_flip_test

Row = dict[str, Any]
RIVALS = ("exact", "single", "ig", "one_removed", "gxi", "logits")
STRENGTHS = ("s:mean:0.0", "s:mean:0.25", "s:mean:0.5", "s:mean:0.75", "s:mean:1.0")
MAIN_TASKS = ("standard", "four_bags", "pos_neg_count", "adjacent_pairs")
MEASURES = ("auprc2", "signs", "srg", "gone", "shapley")
CHOICES = (*STRENGTHS, "s:balanced:0.5", "s:mean:0.5+c")


def read(folders: Iterable[Path]) -> list[Row]:
    """The rows of a study's files."""
    return [
        row
        for folder in folders
        for path in sorted(folder.glob("*.json"))
        for row in json.loads(path.read_text())
    ]


def values(rows: Sequence[Row], name: str, measure: str, split: str = "test") -> np.ndarray[Any, Any]:
    """A measure of one candidate in every row; nan where it was not measured."""
    return np.array([row[split].get(name, {}).get(measure, np.nan) for row in rows], dtype=float)


def default_of(model: str) -> str:
    """The candidate that the default is."""
    return "s:mean:0.25" if model == "addmil" else "s:mean:0.5"


def group(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key, in the order they come."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def choice(rows: Sequence[Row]) -> list[str]:
    """Mean gain over `exact` on validation bags of each candidate, over the paper's models and the suite."""
    able = []
    lines = [
        "| candidate | AUPRC-2 | SRG | sign right | gone | Shapley ranks | mean of the first two |",
        "|---|---|---|---|---|---|---|",
    ]
    chosen = [r for r in rows if r["seed"] == 0 and r["data"] == "mnist" and r["task"] in MAIN_TASKS]
    chosen = [r for r in chosen if r["model"] != "addmil"]
    for name in CHOICES:
        auprc2, signs, srg, gone, shapley = (_gain(chosen, name, measure) for measure in MEASURES)
        able += [((auprc2 + srg) / 2, name)] if gone >= 0 and name in STRENGTHS else []
        cells = (auprc2, srg, signs, gone, shapley, (auprc2 + srg) / 2)
        lines.append(f"| `{name}` | " + " | ".join(f"{cell:+.4f}" for cell in cells) + " |")
    return [*lines, "", f"Chosen: {max(able)[1]}."] if able else []


def _gain(rows: Sequence[Row], name: str, measure: str) -> float:
    """Mean over configurations of the gain over `exact` on validation bags."""
    held = [r for r in rows if name in r["validation"] and measure in r["validation"][name]]
    each = [
        np.nanmean(values(part, name, measure, "validation") - values(part, "exact", measure, "validation"))
        for part in group(held, _configuration).values()
    ]
    return float(np.mean(each)) if each else float("nan")


def _configuration(row: Row) -> tuple[str, str, str, int, str]:
    return row["suite"], row["data"], row["task"], row["seed"], row["model"]


def table1(rows: Sequence[Row], seed: int) -> list[str]:
    """Gains of the default over `exact` under the protocol of Table 1, with paired tests."""
    lines = ["| model, task | exact | default | gain | p | signs | gone |", "|---|---|---|---|---|---|---|"]
    paper = [r for r in rows if r["suite"] == "paper" and r["seed"] == seed]
    for (model, task), part in group(paper, lambda r: (r["model"], r["task"])).items():
        name = default_of(model)
        gain = values(part, name, "auprc2") - values(part, "exact", "auprc2")
        moved = {m: np.nanmean(values(part, name, m) - values(part, "exact", m)) for m in ("signs", "gone")}
        lines.append(
            f"| {model}, {task} | {values(part, 'exact', 'auprc2').mean():.3f} | "
            f"{values(part, name, 'auprc2').mean():.3f} | {gain.mean():+.4f} | {sign_flip_test(gain):.4f} | "
            f"{moved['signs']:+.3f} | {moved['gone']:+.3f} |"
        )
    return lines


def foreign(
    rows: Sequence[Row], seed: int = 0, data: str = "mnist", tasks: Sequence[str] = MAIN_TASKS
) -> list[str]:
    """Each architecture: the default, and its mean paired difference to the best other method."""
    lines = [
        "| architecture | exact | default | bag's mean | contexts | best other | difference | "
        "SRG, exact | default | contexts | best other | difference |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    small = [
        r
        for r in rows
        if r["suite"] == "small" and r["seed"] == seed and r["data"] == data and r["task"] in tasks
    ]
    passed = {"auprc2": 0, "srg": 0}
    for model, part in group(small, lambda r: r["model"]).items():
        cells = [model]
        for measure in ("auprc2", "srg"):
            own = _mean(part, default_of(model), measure)
            others = {n: _mean(part, n, measure) for n in RIVALS if n in part[0]["test"]}
            best = max(others, key=lambda n: others[n])
            passed[measure] += own - others[best] >= -0.01
            cells += [f"{others['exact']:.3f}", f"{own:.3f}"]
            cells += [f"{_mean(part, 's:bag:0.25', measure):.3f}"] if measure == "auprc2" else []
            cells += [f"{_mean(part, 's:mean:0.5+c', measure):.3f}"]
            cells += [f"{others[best]:.3f} ({best})", f"{own - others[best]:+.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        f"At least -0.01 to the best: {passed['auprc2']} architectures by AUPRC-2, {passed['srg']} by SRG.",
    ]
    return lines


def _mean(rows: Sequence[Row], name: str, measure: str) -> float:
    """The mean over tasks of the means over repetitions; nan where it was not measured."""
    if not all(name in row["test"] for row in rows):
        return float("nan")
    return float(
        np.mean([np.nanmean(values(p, name, measure)) for p in group(rows, lambda r: r["task"]).values()])
    )


def colon(rows: Sequence[Row], data: str = "colon") -> list[str]:
    """The runs on colon, with the features of a file."""
    names = (
        "exact",
        "s:mean:0.25",
        "s:mean:0.5",
        "s:mean:1.0",
        "s:balanced:0.5",
        "s:bag:0.5",
        "single",
        "ig",
    )
    lines = ["| model, task | runs | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    rows = [r for r in rows if r["suite"] == "colon" and r["data"] == data]
    for (model, task), part in group(rows, lambda r: (r["model"], r["task"])).items():
        for measure in MEASURES[:4]:
            cells = [f"{np.nanmean(values(part, name, measure)):.3f}" for name in names]
            lines.append(f"| {model}, {task}: {measure} | {len(part)} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    rows = read(parser.parse_args().rows)
    parts = {
        "The choice, on validation bags": choice(rows),
        "Table 1's protocol, test bags": table1(rows, 0),
        "The same, a fresh seed": table1(rows, 1),
        "Architectures, four tasks, test bags": foreign(rows),
        "Architectures, a fresh seed": foreign(rows, seed=1),
        "Architectures, three more tasks": foreign(rows, tasks=("pos_neg", "context_flip", "confounder")),
        "Architectures, pixels of 8 x 8 digits": foreign(rows, seed=1, data="digits"),
        "Architectures, MobileNetV2 features": foreign(rows, data="mobilenet"),
        "Colon, test images": colon(rows),
        "Colon, MobileNetV2 features": colon(rows, "colon_mobilenet"),
    }
    for title, lines in parts.items():
        print(f"## {title}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
