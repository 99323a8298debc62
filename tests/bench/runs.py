"""A tiny run of the benchmark, shared by the tests."""

from __future__ import annotations

from dataclasses import replace

from xmil.bench import (
    QUICK,
    QUICK_PLAN,
    SUITES,
    make_contests,
    measure_contests,
    method_entry,
    model_entry,
)

OWN = """
import torch

def score(model, bag, target):
    x = torch.from_numpy(bag.features).unsqueeze(0).requires_grad_(True)
    model(x)[0, target].backward()
    return (x.grad * x)[0].sum(1)
"""
NET = """
import torch
from torch import nn

TRAINING = {"lr": 0.01, "epochs": 25}

class Net(nn.Module):
    def __init__(self, d, c):
        super().__init__()
        self.inside, self.head = nn.Linear(d, 16), nn.Linear(16, c)

    def forward(self, x):
        return self.head(torch.relu(self.inside(x)).amax(dim=1))

def build(in_dim, n_classes):
    return Net(in_dim, n_classes)
"""
METHODS = ("oracle", "random", "constant", "lrp_flipped", "lrp", "gxi", "single")


def tiny_plan(tasks=("standard",), **changes):
    protocol = replace(
        QUICK,
        repetitions=2,
        sizes=(200, 60, 40),
        training={"optimizer": "adam", "lr": 1e-2, "epochs": 20, "patience": 20, "warmup": 2},
    )
    return replace(QUICK_PLAN, protocol=protocol, tasks=tasks, curve_bags=8, **changes)


def ignore(*_):
    """Hear nothing."""


def referee(out, suite="evidence", *, methods=METHODS, models=("attnmil",), plan=None, say=ignore, **changes):
    """Measure a suite; whether it is complete."""
    plan, suite = plan or tiny_plan(), SUITES[suite]
    names = [m for m in methods if suite.name != "faithfulness" or m != "oracle"]
    entries = [method_entry(name) for name in names], [model_entry(m) for m in models]
    contests = make_contests(suite, suite.problems(plan), plan, *entries, out=out, say=say)
    return measure_contests(contests, out, {}, **changes)
