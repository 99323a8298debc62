"""Published checkpoints against their formulas: fixtures with the keys and shapes of the original code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import xmil
from tests.models import originals
from tests.models.originals import layers, tensors

D, L, A, C = 7, 6, 4, 3
HIPPO_GATED = layers(
    encoder__0=(L, D),
    attention_weights__attention_V__0=(A, L),
    attention_weights__attention_U__0=(A, L),
    attention_weights__attention_weights=(1, A),
    head=(C, L),
)
HIPPO_PLAIN = layers(encoder__0=(L, D), attention_weights__0=(A, L), attention_weights__2=(1, A), head=(C, L))
CLAM = layers(
    attention_net__0=(L, D),
    attention_net__3__attention_a__0=(A, L),
    attention_net__3__attention_b__0=(A, L),
    attention_net__3__attention_c=(1, A),
    classifiers=(2, L),
)
DSMIL = layers(
    i_classifier__fc__0=(C, D),
    b_classifier__q__0=(A, D),
    b_classifier__q__2=(A, A),
    b_classifier__fcc=(C, C, D),
)
DSMIL_LINEAR = layers(
    i_classifier__fc__0=(1, D), b_classifier__q=(A, D), b_classifier__v__1=(D, D), b_classifier__fcc=(1, 1, D)
)
LAB_DSMIL = layers(
    patch_embed__0=(L, D),
    i_classifier__inst_classifier=(C, L),
    b_classifier__q=(A, L),
    b_classifier__v__1=(L, L),
    b_classifier__norm=(L,),
    b_classifier__fcc=(3, 3, L),
    classifier=(C, C, L),
)
LAB_CLAM = layers(
    patch_embed__0=(L, D),
    global_attn__attention_a__0=(A, L),
    global_attn__attention_b__0=(A, L),
    global_attn__attention_c=(1, A),
    classifier=(C, L),
    instance_classifiers__0=(2, L),
    instance_classifiers__1=(2, L),
)
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., originals.Array], str]] = {
    "hippo gated": (HIPPO_GATED, originals.hippo, "hippo"),
    "hippo ungated": (HIPPO_PLAIN, originals.hippo, "hippo"),
    "chief": (CLAM, originals.clam_sb, "clam"),
    "dsmil-wsi": (DSMIL, originals.dsmil_wsi, "dsmil"),
    "dsmil-wsi linear": (DSMIL_LINEAR, originals.dsmil_wsi, "dsmil"),
    "mil-lab dsmil": (LAB_DSMIL, originals.mil_lab_dsmil, "mil-lab-dsmil"),
    "mil-lab clam": (LAB_CLAM, originals.mil_lab_clam, "mil-lab-abmil"),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_the_formula(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    shapes, formula, family = CASES[case]
    state = tensors(shapes)
    torch.save(state, tmp_path / "checkpoint.pth")
    model = xmil.load_model(tmp_path / "checkpoint.pth")
    for n in (1, 9):
        x = rng.normal(size=(n, D))
        found = model(torch.from_numpy(x).float()[None])[0].numpy()
        np.testing.assert_allclose(found, formula(state, x), rtol=1e-4, atol=1e-5)
    assert xmil.models.describe_checkpoint(tmp_path / "checkpoint.pth")["family"] == family


def test_what_serves_the_loss_alone_is_named(tmp_path: Path) -> None:
    torch.save(tensors(LAB_CLAM), tmp_path / "clam.bin")
    torch.save(tensors(LAB_DSMIL), tmp_path / "dsmil.bin")
    assert "ignored 4 keys of the instance loss" in xmil.load_model(tmp_path / "clam.bin").notes
    assert any("b_classifier.fcc.weight" in note for note in xmil.load_model(tmp_path / "dsmil.bin").notes)


def test_dsmil_has_a_sigmoid_for_each_class(tmp_path: Path) -> None:
    torch.save(tensors(DSMIL), tmp_path / "several.pth")
    torch.save(tensors(DSMIL_LINEAR), tmp_path / "one.pth")
    several, one = xmil.load_model(tmp_path / "several.pth"), xmil.load_model(tmp_path / "one.pth")
    assert (several.task, one.task) == ("multilabel", "classification")
    assert several.warnings == one.warnings == ()
