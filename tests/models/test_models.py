"""Models: shapes, masks, and independence of batch mates and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xmil
from xmil.core.errors import InputError, UnknownNameError

VARIANTS = [
    *((name, {}) for name in xmil.list_models()),
    (
        "attnmil",
        {"gated": True, "n_layers": 3, "n_out_layers": 2, "bias": False, "dropout": 0.5, "dropout_at": "all"},
    ),
    ("attnmil", {"branches": 2, "dropout": 0.2, "dropout_at": "last"}),
    ("transmil", {"dim": 16, "heads": 4, "n_layers": 3, "landmarks": 5, "n_out_layers": 1, "bias": False}),
    ("transmil", {"dim": 16, "attention": "dot_product", "residual_kernel": None}),
    ("transmil", {"dim": 16, "pool": "sum", "ppeg": False}),
    ("transmil", {"dim": 16, "n_layers": 1, "n_feature_layers": 2}),
    ("clam_sb", {"gated": False}),
]


def build(name: str, params: dict[str, object]) -> xmil.models.MILModel:
    return xmil.create_model(name, in_dim=6, n_classes=3, seed=0, **params)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_a_bag_depends_on_itself_alone(name: str, params: dict[str, object]) -> None:
    model = build(name, params).double()
    lengths = [1, 2, 5, 5, 9]
    x = torch.randn(5, 9, 6, dtype=torch.float64)
    mask = torch.zeros(5, 9, dtype=torch.bool)
    for i, n in enumerate(lengths):
        mask[i, torch.randperm(9)[:n]] = True
    x[~mask] = float("nan")  # whatever lies in the padding
    with torch.no_grad():
        together = model(x, mask)
        alone = torch.cat([model(x[i][mask[i]][None]) for i in range(5)])
    assert together.shape == (5, 3)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "params"), VARIANTS)
def test_training_reaches_every_parameter(name: str, params: dict[str, object]) -> None:
    model = build(name, params).train()
    model(torch.randn(4, 9, 6), torch.ones(4, 9, dtype=torch.bool)).square().sum().backward()
    idle = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert idle == []


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), seed=st.integers(0, 1000))
def test_pooling_models_ignore_order(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n, 6, generator=generator, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    for name in ("attnmil", "addmil", "meanpool", "maxpool", "clam_sb", "clam_mb", "dsmil"):
        model = build(name, {}).double()
        with torch.no_grad():
            torch.testing.assert_close(model(x), model(x[:, order]), rtol=1e-9, atol=1e-12)


def test_transmil_squares_by_repeating_the_first_instances() -> None:
    model = build("transmil", {"dim": 16}).double()
    x = torch.randn(1, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        whole = model(torch.cat([x, x[:, :3]], dim=1))  # nine instances fill the square themselves
        torch.testing.assert_close(model(x), whole, rtol=1e-9, atol=1e-12)


def test_defaults_are_the_contract() -> None:
    attnmil = xmil.create_model("attnmil", in_dim=768, n_classes=2)
    assert (attnmil.classifier.in_features, attnmil.attention.V.out_features, attnmil.attention.U) == (
        256,
        128,
        None,
    )
    assert (len(attnmil.instance), len(attnmil.out)) == (1, 0)
    transmil = xmil.create_model("transmil", in_dim=768, n_classes=2)
    attn = transmil.layers[0].attn
    assert (transmil.norm.normalized_shape, attn.heads, attn.n_landmarks, len(transmil.layers)) == (
        (256,),
        8,
        128,
        2,
    )
    assert attn.res_conv.kernel_size == (33, 1)
    addmil = xmil.create_model("addmil", in_dim=768, n_classes=2)
    assert [m.out_features for m in addmil.classifier if isinstance(m, torch.nn.Linear)] == [256, 256, 2]
    assert sum(isinstance(m, torch.nn.BatchNorm1d) for m in addmil.modules()) == 2
    assert not any(model.training for model in (attnmil, transmil, addmil))


def test_seeds_and_the_global_generator() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (xmil.create_model("attnmil", in_dim=6, n_classes=2, seed=s) for s in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.classifier.weight, same.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "attmil"}, "Did you mean 'attnmil'"),
        ({"dims": 8}, "Did you mean 'dim'"),
        ({"in_dim": 0}, "'in_dim' parameter of attnmil"),
        ({"n_classes": 2.0}, "'n_classes' parameter of attnmil"),
        ({"task": "regress"}, "'task' parameter"),
        ({"class_names": ["a"]}, "2 names"),
        ({"dropout_at": "first"}, "'dropout_at' parameter of attnmil"),
        ({"name": "transmil", "attention": "linear"}, "'attention' parameter of transmil"),
        ({"name": "transmil", "pool": "max"}, "'pool' parameter of transmil"),
    ],
)
def test_wrong_settings(options: dict[str, object], message: str) -> None:
    given_ = {"name": "attnmil", "in_dim": 6, "n_classes": 2, **options}
    with pytest.raises((InputError, UnknownNameError), match=message):
        xmil.create_model(given_.pop("name"), **given_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("x", "mask"),
    [
        (torch.zeros(1, 0, 6), None),
        (torch.zeros(3, 6), None),
        (torch.zeros(1, 3, 6), torch.ones(1, 2, dtype=torch.bool)),
        (torch.zeros(1, 3, 6), torch.ones(1, 3)),
        (torch.zeros(1, 3, 6), torch.zeros(1, 3, dtype=torch.bool)),
    ],
)
def test_wrong_bags(x: torch.Tensor, mask: torch.Tensor | None) -> None:
    with pytest.raises(InputError):
        build("attnmil", {})(x, mask)


def test_third_party_models_and_methods(rng: np.random.Generator) -> None:
    from xmil.models import MODELS, PooledMIL

    class Sum(PooledMIL):
        def __init__(self, in_dim: int, n_classes: int) -> None:
            super().__init__(in_dim, n_classes)
            self.classifier = torch.nn.Linear(in_dim, n_classes)

        def attend(self, h: torch.Tensor) -> torch.Tensor:
            return h[..., :1]

        def head(self, z: torch.Tensor) -> torch.Tensor:
            return self.classifier(z.squeeze(1))

    MODELS.add("first_feature", Sum)
    try:
        model = xmil.create_model("first_feature", in_dim=6, n_classes=2)
        assert len(xmil.explain(model, rng.normal(size=(7, 6)), method="lrp").scores) == 7
        with pytest.raises(InputError, match="registered already"):
            MODELS.add("first_feature", Sum)
    finally:
        del MODELS._entries["first_feature"]
