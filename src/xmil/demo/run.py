"""Train two models on bags of digits, explain a test bag with several methods, draw the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from xmil.core.explanation import Explanation
from xmil.demo.digits import DigitBags, draw_bags
from xmil.demo.picture import draw_panels
from xmil.evaluate.evidence import auprc2
from xmil.methods import explain
from xmil.models import MILModel, create_model

METHODS = ("attention", "single", "ig", "lrp")
MODELS: dict[str, dict[str, Any]] = {
    "attnmil": {"dim": 64, "n_out_layers": 1},
    "transmil": {"dim": 32, "heads": 4},
}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class DemoResult:
    """Test accuracy of each model, AUPRC-2 of each (model, method), and the picture."""

    accuracy: dict[str, float]
    auprc2: dict[tuple[str, str], float]
    picture: Path


def run_demo(
    out: Path, *, quick: bool = False, seed: int = 0, progress: Progress = lambda _: None
) -> DemoResult:
    """Everything from digits to picture; `quick` trains and tests on fewer bags."""
    out.mkdir(parents=True, exist_ok=True)
    train = draw_bags(400 if quick else 1200, part="train", seed=seed)
    test = draw_bags(20 if quick else 60, part="test", seed=seed + 1)
    shown = _telling_bag(test)
    accuracy, quality, panels = {}, {}, {}
    for name, params in MODELS.items():
        progress(f"training {name} on {len(train.labels)} bags")
        model = create_model(name, in_dim=64, n_classes=2, seed=seed, **params)
        _fit(model, train, epochs=4 if quick else 15, seed=seed)
        accuracy[name] = _accuracy(model, test)
        progress(f"explaining {len(test.labels)} test bags with {', '.join(METHODS)}")
        for method in METHODS:
            explained = [explain(model, bag, method=method, target=1) for bag in test.features]
            quality[name, method] = _mean_auprc2(test, explained)
            panels[name, method] = explained[shown]
    picture = out / "evidence.png"
    draw_panels(test.images[shown], test.evidence[shown], panels, picture)
    return DemoResult(accuracy, quality, picture)


def _fit(model: MILModel, bags: DigitBags, *, epochs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.from_numpy(bags.features), torch.from_numpy(bags.labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(y), generator=generator).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.eval()


@torch.no_grad()
def _accuracy(model: MILModel, bags: DigitBags) -> float:
    predicted = model(torch.from_numpy(bags.features)).argmax(dim=1).numpy()
    return float((predicted == bags.labels).mean())


def _mean_auprc2(bags: DigitBags, explained: list[Explanation]) -> float:
    values = [auprc2(evidence, e.scores) for evidence, e in zip(bags.evidence, explained, strict=True)]
    return float(np.nanmean(values))


def _telling_bag(bags: DigitBags) -> int:
    """A bag with positive, negative and irrelevant digits in like numbers."""
    counts = np.stack([(bags.evidence == sign).sum(axis=1) for sign in (-1, 0, 1)])
    return int(counts.min(axis=0).argmax())
