"""Minimal sets against exhaustive search, and the distance between their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xmil
from benchmarks.beyond.digits import stored
from xmil.methods.shapley import bits_of
from xmil.network import Network
from xmil.subsets import Subsets, open_subsets

MODELS = ("attnmil", "transmil", "addmil")


def study(*, quick: bool, data: str, models: Path | None) -> dict[str, Any]:
    """Bags of 12 on the models of Table 1, every subset run; then bags of 30 and 300 on AttnMIL."""
    if models is None:
        raise SystemExit("sets needs --models, a folder of `xmil bench --suite paper`")
    repetitions, bags = (1, 3) if quick else (4, 17)
    equal, enclosed, finite = [], [], 0
    for model in MODELS:
        for one in stored("pos_neg_count", model, folder=models, data=data, repetitions=repetitions):
            for x in one.x[:bags, :12]:
                for kind, size in exhaustive(one.model, x).items():
                    found = xmil.minimal_set(one.model, x, kind=kind)
                    equal.append(found.upper == size)
                    enclosed.append(found.lower <= (size or 12) <= (found.upper or 12))
                    finite += size is not None
        print(model, len(equal), np.mean(equal), np.mean(enclosed), flush=True)
    return {
        "searches": len(equal),
        "with a set": finite,
        "equal": float(np.mean(equal)),
        "enclosed": float(np.mean(enclosed)),
        "gaps": {f"attnmil, {n}": _gaps(n, models, data, quick=quick) for n in (30, 300)},
    }


@torch.no_grad()
def exhaustive(model: Any, x: Tensor) -> dict[str, int | None]:
    """The smallest sizes that flip and that keep the decision, from all sub-bags."""
    n = len(x)
    game = Subsets(Network(model), x.unsqueeze(0))
    masks = bits_of(torch.arange(1, (1 << n) - 1, device=x.device), n)
    same = game.run(masks).argmax(dim=1) == game.full.argmax()
    held = masks.sum(dim=1)
    flips, keeps = n - held[~same], held[same]
    return {kind: int(s.min()) if len(s) else None for kind, s in (("flip", flips), ("keep", keeps))}


def _gaps(n: int, models: Path, data: str, *, quick: bool) -> dict[str, float]:
    """Bags of the test set, as many of them joined as make n instances."""
    gaps, uppers = [], []
    for one in stored("pos_neg_count", "attnmil", folder=models, data=data, repetitions=1 if quick else 5):
        joined = one.x.reshape(-1, n, one.x.shape[2])
        for x in joined[: 3 if quick else 20]:
            found = xmil.minimal_set(one.model, x)
            if found.upper is not None:
                gaps.append((found.upper - found.lower) / found.upper)
                uppers.append(found.upper)
    return {"bags": len(gaps), "median gap": float(np.median(gaps)), "median size": float(np.median(uppers))}


@torch.no_grad()
def greedy(model: Any, x: Tensor) -> int | None:
    """Patches that HIPPO's recipe takes out: each time the one that lowers the class's chance the most.

    Kaczmarzyk et al., "Explainable AI for computational pathology identifies model limitations and tissue
    biomarkers", 2024; None where the decision stays to the last patch.
    """
    game = open_subsets(Network(model), x.unsqueeze(0))
    held, target = torch.ones(len(x), dtype=torch.bool), int(game.full.argmax())
    for taken in range(1, len(x)):
        rows = held.nonzero().squeeze(1)
        logits = game.toggled(held, rows)
        best = int(logits.softmax(dim=1)[:, target].argmin())
        held[rows[best]] = False
        if int(logits[best].argmax()) != target:
            return taken
    return None
