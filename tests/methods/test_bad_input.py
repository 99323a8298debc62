"""Bad input gets one clear sentence, and nothing is left changed."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import xmil
from xmil.core.errors import InputError, UnknownNameError, UnsupportedError
from xmil.data import open_bag

MODEL = xmil.create_model("attnmil", in_dim=8, n_classes=3, dim=6, seed=0, class_names=["a", "b", "c"])
GOOD = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)


def spoiled(value: float) -> np.ndarray:
    bag = GOOD.copy()
    bag[3, 2] = value
    return bag


@pytest.mark.parametrize(
    ("bag", "message"),
    [
        (np.zeros((0, 8), np.float32), "has no patches"),
        (xmil.Bag(np.zeros((0, 8)), slide_id="s1"), "Bag 's1' has no patches"),
        (spoiled(np.nan), r"1 of 5 rows, the first is row 3"),
        (spoiled(np.inf), r"not finite .* row 3"),
        (xmil.Bag(spoiled(np.nan), slide_id="s1"), r"bag 's1'.* row 3"),
        (np.zeros((5, 9)), r"width 8, but the bag has width 9"),
        (np.zeros(8), r"\(patches, width\)"),
        (torch.zeros(2, 5, 8), r"\(patches, width\)"),
        (torch.zeros(5, 8, dtype=torch.complex64), "must be real"),
        (np.array([["x"] * 8] * 5), "must be numbers"),
        ((GOOD, np.zeros((5, 2))), r"Bag\(features, coords=\.\.\.\)\. Got a tuple"),
        (None, "Got a NoneType"),
        (torch.eye(8).to_sparse(), r"sparse tensor; pass it as tensor\.to_dense"),
        (torch.zeros(5, 8, device="meta"), "is on meta but the model on cpu"),
    ],
)
def test_bags(bag: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        xmil.explain(MODEL, bag)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (spoiled(np.nan), "Features of {path} are not finite"),
        (np.zeros((5, 9)), "but {path} has width 9"),
        (np.zeros((0, 8), np.float32), "{path} has no patches"),
    ],
)
def test_a_bag_of_a_file_is_named_by_the_file(values: np.ndarray, words: str, tmp_path: Path) -> None:
    """Its name in the cohort may be another, and whoever leaves it out needs the file."""
    path = tmp_path / "s1.h5"
    xmil.write_bag(xmil.Bag(values, slide_id="other"), path)
    for bag in (path, xmil.read_bag(path), open_bag(path).read_stored()):
        with pytest.raises(InputError, match=re.escape(words.format(path=path))) as caught:
            xmil.explain(MODEL, bag)
        assert str(caught.value).endswith(", or move the file away to leave the slide out.")


@pytest.mark.parametrize(
    "convert", [lambda b: (b * 3).astype(np.int16), lambda b: b.astype(np.float16), lambda b: b > 0]
)
def test_other_dtypes_are_widened(convert: object) -> None:
    bag = convert(GOOD)  # type: ignore[operator]
    expected = xmil.explain(MODEL, bag.astype(np.float32), target=1).scores
    for form in (bag, torch.from_numpy(bag), xmil.Bag(bag)):
        np.testing.assert_array_equal(xmil.explain(MODEL, form, target=1).scores, expected)


def test_forms_of_a_bag_agree() -> None:
    expected = xmil.explain(MODEL, GOOD, target=1).scores
    strided = torch.from_numpy(np.asfortranarray(GOOD))
    for form in (strided, strided.double(), GOOD[None], torch.from_numpy(GOOD)[None], GOOD[::-1][::-1]):
        np.testing.assert_allclose(xmil.explain(MODEL, form, target=1).scores, expected, rtol=1e-5)
    with torch.inference_mode():
        np.testing.assert_array_equal(
            xmil.explain(MODEL, torch.from_numpy(GOOD).clone(), target=1).scores, expected
        )
    with torch.no_grad():
        for method in ("lrp", "gxi", "ig"):
            assert xmil.explain(MODEL, GOOD, method=method).scores.any()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": 3}, InputError, r"0 \(a\), 1 \(b\), 2 \(c\). Got 3"),
        ({"target": -1}, InputError, "Got -1"),
        ({"target": 1.5}, InputError, "class index, a class name"),
        ({"target": True}, InputError, "class index, a class name"),
        ({"target": "d"}, UnknownNameError, "Known: a, b, c"),
        ({"target": xmil.Target(1, against=1)}, InputError, "itself"),
        ({"method": "lpr"}, UnknownNameError, "Did you mean 'lrp'"),
        ({"method": "logits"}, UnsupportedError, "'logits' cannot explain .*: attention, combined"),
        ({"preset": "papers"}, UnknownNameError, "Did you mean 'paper'"),
        ({"presets": "paper"}, UnknownNameError, "parameter of lrp 'presets'. Did you mean 'preset'"),
        ({"output": "logits"}, UnknownNameError, "Did you mean 'logit'"),
        ({"method": "ig", "steps": 0}, InputError, "'steps' parameter of ig"),
        ({"method": "milli", "alpha": 2}, InputError, "'alpha' parameter of milli"),
        ({"method": "milli", "samples": 0}, InputError, "'samples' parameter of milli"),
        ({"method": "attention", "heads": "sum"}, InputError, "'heads' parameter of attention"),
    ],
)
def test_options(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        xmil.explain(MODEL, GOOD, **options)  # type: ignore[arg-type]


def test_released_is_for_two_models() -> None:
    with pytest.raises(UnsupportedError, match="not clam_sb"):
        xmil.explain(xmil.create_model("clam_sb", in_dim=8, n_classes=2), GOOD, preset="released")
    one = xmil.explain(MODEL, GOOD, target=0, preset="released").scores
    np.testing.assert_array_equal(one, xmil.explain(MODEL, GOOD, target=0, preset="paper").scores)


def test_attention_layers_are_checked() -> None:
    model = xmil.create_model("transmil", in_dim=8, n_classes=2, dim=16)
    with pytest.raises(InputError, match=r"range \[0, 2\)"):
        xmil.explain(model, GOOD, method="attention", layer=2)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (nn.Linear(8, 2), r"must return logits .* Got \(1, 5, 2\)"),
        (nn.Sequential(nn.Linear(9, 2)), "takes features of width 9, but the bag has width 8"),
        (7, "must be a torch.nn.Module"),
    ],
)
def test_modules_that_do_not_fit(net: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        xmil.explain(net, GOOD, target=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["ig", "gxi"])
def test_the_way_out_is_not_the_method_that_failed(method: str) -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                raise RuntimeError("no gradients here")
            return super().forward(x.mean(dim=1))

    with pytest.raises(UnsupportedError, match="no gradients here; try another") as caught:
        xmil.explain(Picky(8, 2), GOOD, target=0, method=method)
    others = str(caught.value).split("try another: ")[1].strip(".").split(", ")
    assert method not in others
    assert "one_removed" in others


def test_scores_that_are_not_finite_are_an_error() -> None:
    class Root(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs().sqrt().mean(dim=1)[:, :2]

    with pytest.raises(UnsupportedError, match=r"'gxi' .*not finite for bag 's1'.*patch 0"):
        xmil.explain(Root(), xmil.Bag(np.zeros((3, 8)), slide_id="s1"), method="gxi", target=0)


def test_outputs_that_are_not_finite_are_an_error() -> None:
    class Overflows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1e30 * 1e30).mean(dim=1)[:, :2]

    with pytest.raises(UnsupportedError, match="outputs of Overflows are not finite for bag 's1'"):
        xmil.explain(Overflows(), xmil.Bag(GOOD, slide_id="s1"), target=0)


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logcumsumexp(self.layer(x), dim=1)[:, -1]


@pytest.mark.parametrize(
    "net", [Fails(), MODEL, xmil.create_model("transmil", in_dim=8, n_classes=2, dim=16)]
)
@pytest.mark.parametrize("method", ["lrp", "gxi", "ig", "attention", "single", "one_removed"])
def test_nothing_is_left_changed(net: nn.Module, method: str) -> None:
    net.train()
    if isinstance(net, Fails):
        net.norm.eval()
    frozen = next(iter(net.parameters()))
    frozen.requires_grad_(False)
    x = torch.from_numpy(GOOD).requires_grad_(True)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    flags = [m.training for m in net.modules()]
    grads = [p.requires_grad for p in net.parameters()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    try:
        xmil.explain(net, x, method=method, target=0)
    except UnsupportedError:
        assert isinstance(net, Fails)
    assert flags == [m.training for m in net.modules()]
    assert grads == [p.requires_grad for p in net.parameters()]
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()]
    assert all(p.grad is None for p in net.parameters())
    assert x.grad is None
    assert x.requires_grad
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    frozen.requires_grad_(True)
    net.eval()


@pytest.mark.parametrize("shared", [False, True])
def test_threads_do_not_disturb_each_other(shared: bool) -> None:
    models = [
        xmil.create_model("transmil", in_dim=8, n_classes=2, dim=16, seed=s).train()
        for s in (0, 0 if shared else 1)
    ]
    if shared:
        models[1] = models[0]
    bags = [np.random.default_rng(s).normal(size=(40, 8)).astype(np.float32) for s in (0, 1)]
    presets = ["exact", "paper"]
    expected = [
        xmil.explain(m, b, target=1, preset=p).scores for m, b, p in zip(models, bags, presets, strict=True)
    ]
    found: list[list[np.ndarray]] = [[], []]

    def work(i: int) -> None:
        for _ in range(15):
            found[i].append(xmil.explain(models[i], bags[i], target=1, preset=presets[i]).scores)

    threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in (0, 1):
        assert len(found[i]) == 15
        for scores in found[i]:
            np.testing.assert_array_equal(scores, expected[i])
        assert models[i].training
        assert all(p.requires_grad for p in models[i].parameters())
