"""Rows of Table 1 as the released code computes them, on models trained by `table1.py`.

    python benchmarks/published.py --models DIR --data FEATURES [--repetitions 30] [--bags 300]

Two rows of the paper differ from ours for reasons that can be measured. Gradient x input: on a CPU the
released code never clears the gradient of a bag between two classes, so that the score for class c holds the
gradients of the classes 0 to c. TransMIL's attention: what falls on the instances that are repeated to fill
the square is left out, not given back.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from xmil.bench import (
    PAPER_TASKS,
    SETUPS,
    TASKS,
    Configuration,
    MethodSpec,
    Protocol,
    load_instances,
    load_stack,
    paper_figure,
    score_bags,
)
from xmil.evaluate import score_evidence
from xmil.models import MILModel

ROWS = {
    "attnmil": ("gxi", "gxi, probability", "gxi, accumulated"),
    "transmil": ("gxi", "gxi, probability", "gxi, accumulated", "attention", "attention:unfolded"),
}


def scores_of(model: MILModel, x: Tensor, row: str) -> Tensor:
    """Scores (b, c, n) of a row."""
    name, _, variant = row.partition(", ")
    if variant == "probability":
        return probability_gradients(model, x)
    scores = score_bags(model, x, MethodSpec.parse(name))
    return scores.cumsum(dim=1) if variant == "accumulated" else scores


def probability_gradients(model: MILModel, x: Tensor) -> Tensor:
    """Gradient x input of the probabilities."""
    x = x.clone().requires_grad_(True)
    p = model(x).softmax(dim=-1)
    found = [torch.autograd.grad(v.sum(), x, retain_graph=True)[0] for v in p.unbind(dim=1)]
    return torch.stack([(g * x.detach()).sum(dim=-1) for g in found], dim=1)


def measure(c: Configuration, models: Path, *, repetitions: int, bags: int) -> None:
    fitted = load_stack(models, c)
    if fitted is None:
        raise SystemExit(f"{c.name}: no trained models with these settings")
    table, found = c.table(), {row: [] for row in ROWS[c.setup.name]}  # type: ignore[var-annotated]
    for r in range(repetitions):
        model, test = fitted.models.model(r), c.splits(r).test
        assert isinstance(model, MILModel)
        x = table.bags(table.to_rows(test.rows[:bags]))
        evidence = torch.from_numpy(c.task.evidence(test.codes[:bags])).to(x.device)
        for row, values in found.items():
            values.append(float(score_evidence(evidence, scores_of(model, x, row))["auprc2"].nanmean()))
    for row, values in found.items():
        paper = paper_figure(c.task.name, c.setup.name, "attention" if "attention" in row else "gxi")
        print(
            f"{c.name:24s} {row:20s} {np.mean(values):.3f} ± {np.std(values):.3f}  paper {paper:.2f}",
            flush=True,
        )


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--bags", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args(given)
    instances = load_instances(arguments.data)
    for model in ROWS:
        for task in PAPER_TASKS:
            c = Configuration(TASKS[task], SETUPS[model], instances, Protocol(), arguments.device)
            measure(c, arguments.models, repetitions=arguments.repetitions, bags=arguments.bags)


if __name__ == "__main__":
    main()
