"""Search for a better set of LRP rules on the evidence benchmark's trained models.

    python benchmarks/rules.py --models DIR --data FEATURES --device cuda --out rules.json

DIR is the folder of a run (`models/*.safetensors`). Choices are made one after another on the validation bags
of the first repetitions alone; what they come to is reported on the test bags of the other repetitions, with
paired sign-flip tests against `exact`. Two questions need no search: attention gates sit inside a softmax,
whose weights are constants, and the relevance of the class token is a constant of the bag.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.bench import PAPER_TASKS, SETUPS, TASKS, Configuration, Protocol, load_instances, load_stack
from xmil.core.task import Target
from xmil.evaluate import score_evidence
from xmil.lrp import AffineRule, Composite, trace
from xmil.methods import class_output
from xmil.network import frozen

Choice = dict[str, Any]
START: Choice = {
    "output": "logit",
    "first": (0.0, 0.0, "absorb"),
    "middle": (0.0, 0.0, "absorb"),
    "positions": (0.0, 0.0, "absorb"),
    "last": (0.0, 0.0, "absorb"),
    "attention": 0.0,
    "norm": "centred",
}
PAPER: dict[str, Choice] = {
    "attnmil": dict.fromkeys(("first", "middle", "last"), (1e-08, 0.0, "redistribute")),
    "transmil": {
        **dict.fromkeys(("first", "last"), (1e-08, 0.0, "redistribute")),
        **dict.fromkeys(("middle", "positions"), (1e-08, 0.0, "absorb")),
    },
}
_AFFINE = [
    *((0.0, gamma, "absorb") for gamma in (0.05, 0.1, 0.25, 0.5, 1.0, 4.0)),
    *((epsilon, 0.0, "absorb") for epsilon in (0.01, 0.1, 0.5)),
    *((epsilon, 0.0, "redistribute") for epsilon in (1e-8, 0.01, 0.1)),
    (0.1, 0.25, "absorb"),
    (0.1, 0.25, "redistribute"),
]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "attnmil": {
        "output": ["centred", "log_odds", "contrastive"],
        "first": _AFFINE,
        "middle": _AFFINE,
        "last": _AFFINE,
        "attention": [0.01, 0.1],
    },
    "transmil": {
        "output": ["centred", "log_odds", "contrastive"],
        "norm": ["constant_mean"],
        "first": _AFFINE,
        "middle": _AFFINE,
        "positions": _AFFINE,
        "last": _AFFINE,
        "attention": [0.01, 0.1],
    },
}
PATTERNS = {
    "attnmil": {"first": ["instance.*"], "middle": ["out.*"], "last": ["classifier.*"]},
    "transmil": {
        "first": ["instance.*"],
        "middle": ["layers.*"],
        "positions": ["ppeg.*"],
        "last": ["classifier.*"],
    },
}
LINE = "{task:16s} {model:9s} {rules:24s} {mean:.4f} ± {std:.4f}  gain {gain:+.4f}  p {p:.4f}"
MARGIN = 0.001  # what a choice must add on the validation bags to be taken


def composite(model: str, choice: Choice) -> Composite:
    overrides = {p: AffineRule(*choice[part]) for part, patterns in PATTERNS[model].items() for p in patterns}
    return Composite(overrides, attention=AffineRule(epsilon=choice["attention"]))


class ConstantMean(nn.Module):
    """Layer norm with the mean as a constant too: relevance passes it as it passes a bias."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return (x - mean) * (self.weight * torch.rsqrt(variance + self.eps)) + self.bias


def with_constant_means(model: nn.Module) -> nn.Module:
    changed = copy.deepcopy(model)
    for module in changed.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, ConstantMean(child))
    return changed


def explained(kind: str, c: int) -> Callable[[Tensor], Tensor]:
    if kind == "centred":
        return lambda logits: logits[:, c] - logits.mean(dim=-1)
    return class_output(Target(c), kind).function


@dataclass
class Problem:
    """Trained models of a configuration with their bags on the device."""

    configuration: Configuration
    folder: Path
    scored: dict[str, float] = field(default_factory=dict)
    drawn: dict[tuple[int, str], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = load_stack(self.folder, self.configuration)
        if found is None:
            raise SystemExit(f"{self.configuration.name}: no trained models with these settings")
        self.models = [found.models.model(i) for i in range(len(found.models))]
        self.table = self.configuration.table()

    def score(self, repetition: int, choice: Choice, *, split: str) -> float:
        """AUPRC-2 of one repetition's model under a choice of rules; computed once."""
        key = f"{repetition}|{split}|{json.dumps(choice, sort_keys=True)}"
        if key not in self.scored:
            self.scored[key] = self._score(repetition, choice, split)
        return self.scored[key]

    def _score(self, repetition: int, choice: Choice, split: str) -> float:
        x, evidence = self._bags(repetition, split)
        model = self.models[repetition]
        rules = composite(self.configuration.setup.name, choice)
        model = with_constant_means(model) if choice["norm"] == "constant_mean" else model
        classes = range(self.configuration.task.n_classes)
        with frozen(model):
            traced = trace(model, x, module=model, composite=rules)
            flows = [traced.relevance(explained(choice["output"], c), keep=True).input for c in classes]
        scores = torch.stack([flow.instances for flow in flows], dim=1).nan_to_num()
        return float(score_evidence(evidence, scores)["auprc2"].nanmean())

    def _bags(self, repetition: int, split: str) -> tuple[Tensor, Tensor]:
        """Features and evidence of one repetition's bags, made once."""
        if (repetition, split) not in self.drawn:
            bags = getattr(self.configuration.splits(repetition), split)
            x = self.table.bags(self.table.to_rows(bags.rows))
            evidence = torch.from_numpy(self.configuration.task.evidence(bags.codes)).to(x.device)
            self.drawn[repetition, split] = x, evidence
        return self.drawn[repetition, split]


def mean_score(problems: list[Problem], choice: Choice, repetitions: range) -> list[float]:
    """Mean validation score of each task."""
    return [float(np.mean([p.score(r, choice, split="validation") for r in repetitions])) for p in problems]


def search(model: str, problems: list[Problem], repetitions: range) -> tuple[Choice, list[dict[str, Any]]]:
    """Each part in turn takes its best option, where that adds enough to the mean over the tasks."""
    best = dict(START)
    scores = mean_score(problems, best, repetitions)
    log = [{"part": "start", "option": None, "scores": scores, "mean": float(np.mean(scores))}]
    print(f"{model} exact {_row(scores)}", flush=True)
    for part, options in OPTIONS[model].items():
        for option in options:
            tried = mean_score(problems, {**best, part: option}, repetitions)
            log.append({"part": part, "option": option, "scores": tried, "mean": float(np.mean(tried))})
            print(f"{model} {part}={option} {_row(tried)}", flush=True)
        here = max((entry for entry in log if entry["part"] == part), key=lambda entry: entry["mean"])
        if here["mean"] > np.mean(scores) + MARGIN:
            best, scores = {**best, part: here["option"]}, here["scores"]
    return best, log


def report(problems: list[Problem], choices: dict[str, Choice], repetitions: range) -> list[dict[str, Any]]:
    """Test scores of the other repetitions, with a paired test against `exact`."""
    found = []
    for problem in problems:
        base = np.array([problem.score(r, choices["exact"], split="test") for r in repetitions])
        for name, choice in choices.items():
            values = np.array([problem.score(r, choice, split="test") for r in repetitions])
            gain = values - base
            entry = {
                "task": problem.configuration.task.name,
                "model": problem.configuration.setup.name,
                "rules": name,
            }
            entry |= {
                "mean": values.mean(),
                "std": values.std(),
                "gain": gain.mean(),
                "p": sign_flip_test(gain),
            }
            found.append({key: float(v) if isinstance(v, np.floating) else v for key, v in entry.items()})
            print(LINE.format(**found[-1]))
    return found


def sign_flip_test(differences: np.ndarray[Any, Any], flips: int = 20_000) -> float:
    """Two-sided p-value of a mean difference under random signs."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(flips, len(differences)))
    extreme = np.abs((signs * differences).mean(axis=1)) >= abs(differences.mean()) - 1e-15
    return float((extreme.sum() + 1) / (flips + 1))


def _row(scores: list[float]) -> str:
    return " ".join(f"{s:.4f}" for s in scores) + f"  mean {np.mean(scores):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--validation-repetitions", type=int, default=10)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--bags", default="2000,500,1000")
    parser.add_argument("--tasks", default=",".join(PAPER_TASKS))
    parser.add_argument("--architectures", default="attnmil,transmil")
    arguments = parser.parse_args()
    training = {} if arguments.epochs is None else {"epochs": arguments.epochs}
    protocol = Protocol(
        repetitions=arguments.repetitions, sizes=tuple(map(int, arguments.bags.split(","))), training=training
    )
    instances = load_instances(arguments.data)
    chosen, other = (
        range(arguments.validation_repetitions),
        range(arguments.validation_repetitions, arguments.repetitions),
    )
    results: dict[str, Any] = {}
    for model in arguments.architectures.split(","):
        started = time.perf_counter()
        problems = [
            Problem(
                Configuration(TASKS[t], SETUPS[model], instances, protocol, arguments.device),
                Path(arguments.models),
            )
            for t in arguments.tasks.split(",")
        ]
        best, log = search(model, problems, chosen)
        choices = {"exact": START, "paper": {**START, **PAPER[model]}, "found": best}
        choices |= {
            f"output {kind}": {**START, "output": kind} for kind in ("centred", "log_odds", "contrastive")
        }
        choices["found, logit"] = {**best, "output": "logit"}
        found = report(problems, choices, other)
        results[model] = {"best": best, "log": log, "report": found, "seconds": time.perf_counter() - started}
        print(f"{model}: {json.dumps(best)} in {results[model]['seconds']:.0f} s", flush=True)
    Path(arguments.out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
