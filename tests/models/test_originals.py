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
LAB_TRANSFORMER = layers(patch_embed__0=(8, D), norm=(8,), classifier=(C, 8)) | {"cls_token": (1, 1, 8)}
for _i in range(2):
    _block = f"blocks.{_i}.attention"
    LAB_TRANSFORMER |= layers(**{f"blocks__{_i}__norm": (8,), f"blocks__{_i}__attention__out_proj": (8, 8)})
    LAB_TRANSFORMER |= {f"{_block}.in_proj_weight": (24, 8), f"{_block}.in_proj_bias": (24,)}
TORCHMIL = layers(pool__fc1=(A, D), classifier=(1, D)) | {"pool.fc2.weight": (1, A)}
TORCHMIL_GATED = TORCHMIL | layers(pool__fc_gated=(A, D))
TORCHMIL_CLAM = TORCHMIL_GATED | layers(inst_classifiers__0=(2, D), inst_classifiers__1=(2, D))
TORCHMIL_DSMIL = layers(inst_classifier=(1, D), bag_classifier=(1, D), q_nn__0=(A, D), q_nn__2=(A, A))
TORCHMIL_DSMIL_VALUES = layers(inst_classifier=(1, D), bag_classifier=(1, D), q_nn=(A, D), v_nn__1=(D, D))
CASES: dict[str, tuple[dict[str, tuple[int, ...]], Callable[..., originals.Array], str]] = {
    "hippo gated": (HIPPO_GATED, originals.hippo, "hippo"),
    "hippo ungated": (HIPPO_PLAIN, originals.hippo, "hippo"),
    "chief": (CLAM, originals.clam_sb, "clam"),
    "dsmil-wsi": (DSMIL, originals.dsmil_wsi, "dsmil"),
    "dsmil-wsi linear": (DSMIL_LINEAR, originals.dsmil_wsi, "dsmil"),
    "mil-lab dsmil": (LAB_DSMIL, originals.mil_lab_dsmil, "mil-lab-dsmil"),
    "mil-lab clam": (LAB_CLAM, originals.mil_lab_clam, "mil-lab-abmil"),
    "mil-lab transformer": (LAB_TRANSFORMER, originals.mil_lab_transformer, "mil-lab-transformer"),
    "torchmil abmil": (TORCHMIL, originals.torchmil_abmil, "torchmil-abmil"),
    "torchmil abmil gated": (TORCHMIL_GATED, originals.torchmil_abmil, "torchmil-abmil"),
    "torchmil clam": (TORCHMIL_CLAM, originals.torchmil_abmil, "torchmil-abmil"),
    "torchmil dsmil": (TORCHMIL_DSMIL, originals.torchmil_dsmil, "torchmil-dsmil"),
    "torchmil dsmil values": (TORCHMIL_DSMIL_VALUES, originals.torchmil_dsmil, "torchmil-dsmil"),
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


ADVICE = {
    "ILRAModel": ("model.gab_blocks.0.latent", "model.pooling.S", "model.classifier.weight"),
    "WIKGMILModel": ("model.W_head.weight", "model.W_tail.weight"),
    "DFTDModel": ("model.attCls.classifier.weight", "model.patch_embed.fc1.0.weight"),
    "RRTMILModel": ("model.patch_embed.0.weight", "model.online_encoder.layers.0.attn.attn.qkv.weight"),
    "TransformerModel": ("model.blocks.0.attention.in_proj_weight", "model.blocks.0.mlp.0.weight"),
    "TransformerABMIL": ("transformer_encoder.layers.0.norm1.weight", "pool.fc1.weight", "last_layer.weight"),
    "TransMIL": ("layers.0.att_module.qkv_nn.weight", "pos_layer.proj.weight", "classifier.weight"),
    "create_model": ("patch_embed.proj.weight", "encoder.layers.0.self_attn.q_proj.weight"),
    "MambaMIL": ("_fc1.0.weight", "layers.0.1.A_log", "attention.2.weight", "classifier.weight"),
}


@pytest.mark.parametrize("build", ADVICE)
def test_networks_that_are_not_rebuilt_are_named_with_the_way_to_explain_them(
    build: str, tmp_path: Path
) -> None:
    torch.save({key: torch.zeros(2, 2) for key in ADVICE[build]}, tmp_path / "m.pt")
    with pytest.raises(xmil.XmilError, match="does not rebuild") as caught:
        xmil.load_model(tmp_path / "m.pt")
    told = str(caught.value)
    assert f"{build}(...), fill it with net.load_state_dict(...)" in told
    assert "xmil.explain(net.eval(), bag, forward=lambda net, x" in told
    assert "\n" not in told


def test_other_models_of_stamp_are_named(tmp_path: Path) -> None:
    content = {
        "state_dict": {"model.mlp.0.weight": torch.zeros(2, 2)},
        "hyper_parameters": {"model_name": "mlp", "stamp_version": "2.5.0"},
    }
    torch.save(content, tmp_path / "m.ckpt")
    with pytest.raises(xmil.XmilError, match="of STAMP's model 'mlp'"):
        xmil.load_model(tmp_path / "m.ckpt")
