"""A small cohort on disk that can be learnt: the class, the value and the risk are in the first feature."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import xmil
from xmil.training.config import Config, make_config

PARTS = ("train", "train", "train", "val", "test")
D = 6


def write_cohort(
    folder: Path,
    *,
    n: int = 30,
    slides_per_case: int = 1,
    encoder: str | None = "enc-a",
    coords: bool = False,
) -> Path:
    """Feature files and cohort.csv with columns for every task."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir(parents=True, exist_ok=True)
    lines = ["slide_id,case_id,label,grade,er,pr,value,time,event,split"]
    for case in range(n):
        y = case % 2
        part = PARTS[case // 2 % 5]
        time = (12 - 10 * y) * rng.uniform(0.7, 1.3)  # class 1 is at risk
        cells = f"{('neg', 'pos')[y]},{case % 3},{y},{case // 2 % 2},{50 + 8 * y + rng.normal():.3f},"
        cells += f"{time:.3f},{int(rng.random() < 0.8)},{part}"
        for k in range(slides_per_case):
            x = rng.normal(size=(int(rng.integers(8, 20)), D)).astype(np.float32)
            x[:4, 0] += 4 * y
            x[4:7, 1] += 3 * (case % 3)
            x[:4, 2] += 4 * (case // 2 % 2)
            name = f"s{case}" if slides_per_case == 1 else f"s{case}_{k}"
            places = 256 * np.stack(np.divmod(np.arange(len(x)), 4), axis=1) if coords else None
            bag = xmil.Bag(
                x, slide_id=name, encoder=encoder, coords=places, patch_size=256 if coords else None
            )
            xmil.write_bag(bag, folder / "features" / f"{name}.h5")
            lines.append(f"{name},c{case},{cells}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    return folder


def settings(folder: Path, **sections: Any) -> dict[str, Any]:
    """Settings for the cohort; sections are added to the small defaults."""
    base: dict[str, Any] = {
        "out": str(folder / "out"),
        "data": {
            "features": str(folder / "features"),
            "cohort": str(folder / "cohort.csv"),
            "instances": 10,
        },
        "model": {"name": "attnmil", "dim": 8, "attention_dim": 4},
        "optim": {"name": "adam", "lr": 0.02},
        "train": {"epochs": 6, "batch": 4, "tensorboard": False, "device": "cpu"},
    }
    for name, value in sections.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return base


def config_of(folder: Path, **sections: Any) -> Config:
    """The same, checked."""
    return make_config(settings(folder, **sections))
