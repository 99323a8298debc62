"""The demonstration, in little: LRP is closer to the truth than attention, and the picture is drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from xmil.cli._app import run
from xmil.demo import draw_bags, run_demo


def test_labels_and_evidence_follow_the_definition() -> None:
    bags = draw_bags(200, part="train", seed=3)
    for digits, label, evidence in zip(bags.digits, bags.labels, bags.evidence, strict=True):
        assert label == (len({4, 6, 8} & set(digits)) > len({5, 7, 9} & set(digits)))
        assert evidence.tolist() == [(d in (4, 6, 8)) - (d in (5, 7, 9)) for d in digits]
    other = draw_bags(200, part="test", seed=3)
    seen = {image.tobytes() for image in bags.images.reshape(-1, 64)}
    assert not seen & {image.tobytes() for image in other.images.reshape(-1, 64)}


def test_lrp_beats_attention(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_demo(tmp_path / "out", quick=True, progress=said.append)
    for model in ("attnmil", "transmil"):
        assert result.auprc2[model, "lrp"] > result.auprc2[model, "attention"]
    assert len(said) == 4
    with Image.open(result.picture) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    red, _, blue = np.moveaxis(pixels, -1, 0)
    assert ((red - blue) > 60).sum() > 500
    assert ((blue - red) > 60).sum() > 500


def test_command(tmp_path: Path, capfd: object) -> None:
    assert run(["demo", "--quick", "--out", str(tmp_path / "o")]) == 0
    assert (tmp_path / "o" / "evidence.png").is_file()
