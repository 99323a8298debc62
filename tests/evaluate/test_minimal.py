"""Minimal sets against exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnknownNameError, UnsupportedError

WIDTH = 5
MODELS = [
    ("attnmil", {"dim": 8, "attention_dim": 4}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 1}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 2}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "branches": 2}),
    ("clam_mb", {"dim": 8, "attention_dim": 4}),
    ("meanpool", {"dim": 8}),
    ("maxpool", {"dim": 8}),
    ("addmil", {"hidden": 8}),
    ("dsmil", {}),
]


def model_of(name: str, params: dict[str, int], *, classes: int = 2, seed: int = 0) -> nn.Module:
    return xmil.create_model(name, in_dim=WIDTH, n_classes=classes, seed=seed, **params)


def bag_of(n: int, seed: int) -> Tensor:
    return 2 * torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def exhaustive(model: nn.Module, bag: Tensor, kind: str, target: int) -> int | None:
    """The size of the smallest set that does it, by trying all proper subsets."""
    n = len(bag)

    def decides(rows: list[int]) -> bool:
        return int(model(bag[rows].unsqueeze(0)).argmax()) == target

    whole = decides(list(range(n)))
    for size in range(1, n):
        for chosen in combinations(range(n), size):
            rest = [i for i in range(n) if i not in chosen]
            if kind == "flip" and decides(rest) != whole:
                return size
            if kind == "keep" and decides(list(chosen)) == whole:
                return size
    return None


@pytest.mark.parametrize(("name", "params"), MODELS)
@pytest.mark.parametrize("classes", [2, 3])
def test_sets_are_those_of_exhaustive_search(name: str, params: dict[str, int], classes: int) -> None:
    for seed in range(3):
        model, bag = model_of(name, params, classes=classes, seed=seed), bag_of(7, seed)
        for target, kind in ((None, "flip"), (0, "flip"), (1, "keep")):
            found = xmil.minimal_set(model, bag, target=target, kind=kind)
            size = exhaustive(model, bag, kind, int(found.target))
            assert found.upper == size
            assert found.lower == (7 if size is None else size)
            assert (found.instances is None) == (size is None)
            if found.instances is not None:
                assert len(found.instances) == found.upper


@torch.no_grad()
def flipping_sets(model: nn.Module, bag: Tensor, size: int) -> dict[tuple[int, ...], float]:
    """Every set of a size whose removal changes the prediction, and how far past the boundary it goes."""
    decided = int(model(bag.unsqueeze(0)).argmax())
    sets = {}
    for chosen in combinations(range(len(bag)), size):
        rest = [i for i in range(len(bag)) if i not in chosen]
        logits = model(bag[rest].unsqueeze(0))[0]
        others = max(float(value) for k, value in enumerate(logits) if k != decided)
        if int(logits.argmax()) != decided:
            sets[chosen] = others - float(logits[decided])
    return sets


@pytest.mark.parametrize(("name", "params"), [MODELS[0], MODELS[4], MODELS[7]])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_equally_small_sets_are_counted_and_the_strongest_is_given(
    name: str, params: dict[str, int], shift: float
) -> None:
    for seed in range(3):
        model, bag = model_of(name, params, seed=seed), bag_of(9, seed) + shift
        found = xmil.minimal_set(model, bag)
        if found.upper is None or found.instances is None:
            continue
        sets = flipping_sets(model, bag, found.upper)
        assert (found.equal, found.all_equal) == (len(sets), True)
        assert sets[tuple(found.instances.tolist())] == pytest.approx(max(sets.values()), abs=1e-5)
        assert found.as_dict()["equal"] == len(sets)


def test_a_prediction_on_the_boundary_is_not_laid_to_one_patch() -> None:
    """27 of 30 single removals change it: any one of them would do."""

    class Votes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x[..., 0].sum(dim=1)
            return torch.stack([torch.zeros_like(total), total], dim=1)

    votes = torch.full((30, 1), 1.0)
    votes[27:] = -8.9  # 27 - 26.7 = 0.3: less than any of the 27 gives
    votes[4] = 1.2
    found = xmil.minimal_set(Votes(), votes, target=1, returns="logit")
    assert (found.upper, found.equal, found.all_equal) == (1, 27, True)
    assert found.instances is not None
    assert found.instances.tolist() == [4]
    assert "27 of 30" in str(found.caution)
    assert "27 sets" in found.sentence
    clear = xmil.minimal_set(Votes(), torch.tensor([[3.0], [-1.0], [-1.0]]), target=1, returns="logit")
    assert (clear.equal, clear.caution) == (1, None)


def test_a_count_that_is_not_complete_says_so() -> None:
    bag = torch.cat([torch.full((300, 1), 1.0), torch.full((300, 1), -0.98)])

    class Votes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x[..., 0].sum(dim=1)
            return torch.stack([torch.zeros_like(total), total], dim=1)

    found = xmil.minimal_set(Votes(), bag, target=1, evaluations=20_000, returns="logit")
    assert found.upper is not None
    assert found.upper > 1
    assert found.equal > 1
    assert not found.all_equal
    assert "at least" in found.sentence


def test_a_transformer_as_well() -> None:
    model, bag = model_of("transmil", {"dim": 16}, seed=2), bag_of(6, 2)
    found = xmil.minimal_set(model, bag, target=1)
    assert found.upper == exhaustive(model, bag, "flip", 1)


@pytest.mark.parametrize(("name", "params"), MODELS)
def test_the_set_does_what_it_says_and_the_bounds_enclose_it(name: str, params: dict[str, int]) -> None:
    model, bag = model_of(name, params, seed=1), bag_of(40, 1)
    with torch.no_grad():
        whole = int(model(bag.unsqueeze(0)).argmax())
        for kind in ("flip", "keep"):
            found = xmil.minimal_set(model, bag, kind=kind, evaluations=4000)
            if found.instances is None:
                continue
            inside = np.isin(np.arange(40), found.instances)
            rows = np.flatnonzero(~inside if kind == "flip" else inside)
            assert (int(model(bag[rows].unsqueeze(0)).argmax()) == whole) == (kind == "keep")
            assert found.upper is not None
            assert 1 <= found.lower <= found.upper < 40


def test_sums_are_solved_exactly() -> None:
    model, bag = model_of(*MODELS[0], seed=3), bag_of(500, 3)
    found = xmil.minimal_set(model, bag)
    assert found.exact
    assert found.upper is not None


def test_memory_grows_with_the_bag_not_with_its_square() -> None:
    n = 3000
    model, bag = model_of("attnmil", {"dim": 8, "attention_dim": 4}, seed=3), bag_of(n, 3)
    with torch.profiler.profile(profile_memory=True) as profile:
        found = xmil.minimal_set(model, bag, evaluations=30_000)
    assert found.upper is not None
    assert 200 < found.upper < n - 200  # so that rivals would be large if they were stored whole
    assert max(event.cpu_memory_usage for event in profile.events()) < 500 * n


PEAKED = [
    ("attnmil", {"dim": 8, "attention_dim": 4}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 1}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 2}),
    ("attnmil", {"dim": 8, "attention_dim": 4, "branches": 2}),
    ("clam_sb", {"dim": 8, "attention_dim": 4}),
    ("clam_mb", {"dim": 8, "attention_dim": 4}),
]


@pytest.mark.parametrize(("name", "params"), PEAKED)
def test_bounds_of_peaked_attention_are_bounds(name: str, params: dict[str, int]) -> None:
    """One evaluation leaves the proof alone: it must never exceed what exhaustive search finds."""
    for seed in range(12):
        model, bag = model_of(name, params, classes=2 + seed % 2, seed=seed), bag_of(6, seed)
        sharpen(model, bag, (1, 10, 30, 100)[seed % 4])
        for kind in ("flip", "keep"):
            found = xmil.minimal_set(model, bag, kind=kind, evaluations=1)
            size = exhaustive(model, bag, kind, int(found.target))
            assert found.lower <= (6 if size is None else size)
            assert found.upper is None or found.lower <= found.upper
            full = xmil.minimal_set(model, bag, kind=kind)
            assert (full.lower, full.upper) == (6 if size is None else size, size)


@torch.no_grad()
def sharpen(model: nn.Module, bag: Tensor, spread: float) -> None:
    """Scale the attention so that its logits lie this far apart, times five."""
    last = [layer for layer in model.attention.modules() if isinstance(layer, nn.Linear)][-1]
    logits = model.attend(model.embed(bag.unsqueeze(0)))
    last.weight *= 5 * spread / float(logits.amax() - logits.amin())


class Threshold(nn.Module):
    """Positive where at least three instances have a positive first feature."""

    def forward(self, x: Tensor) -> Tensor:
        count = (x[..., 0] > 0).sum(dim=1).float() - 2.5
        return torch.stack([-count, count], dim=1)


@torch.no_grad()
def test_outputs_of_nothing_but_rounding_prove_nothing() -> None:
    """Terms of size 1 that cancel to 1e-9: which class a part has is the model's rounding, not the sums'."""
    model = model_of("attnmil", {"dim": 8, "attention_dim": 4, "n_out_layers": 1}, classes=1)
    for seed in range(20):
        bag = bag_of(1, seed).repeat(3, 1)
        model.classifier.bias -= model(bag.unsqueeze(0))[0]
        found = xmil.minimal_set(model, bag, kind="keep", target=1)
        parts = [model(bag[None, :m])[0, 0] > 0 for m in (1, 2, 3)]
        assert parts[0] != parts[2] or found.lower == 1


def test_a_foreign_module_and_its_known_answer() -> None:
    x = -torch.ones(12, 3)
    x[[1, 4, 6, 9, 10], 0] = 1.0
    flip = xmil.minimal_set(Threshold(), x, target=1, kind="flip")
    keep = xmil.minimal_set(Threshold(), x, target=1, kind="keep")
    assert (flip.lower, flip.upper, keep.lower, keep.upper) == (3, 3, 3, 3)
    assert flip.instances is not None
    assert set(flip.instances) <= {1, 4, 6, 9, 10}
    assert (flip.equal, flip.all_equal, flip.caution) == (10, True, None)  # any 3 of the 5
    loose = replace(flip, lower=2)
    assert (flip.exact, loose.exact) == (True, False)
    assert flip.as_dict()["instances"] == flip.instances.tolist()


def test_where_nothing_flips_there_is_no_set() -> None:
    x = torch.ones(6, 3)
    model = xmil.create_model("meanpool", in_dim=3, n_classes=2, seed=0)
    found = xmil.minimal_set(model, x)
    assert (found.instances, found.upper, found.lower) == (None, None, 6)
    assert "There is no set of fewer than 6 patches" in found.sentence  # all six, or none, are no answer
    alone = xmil.minimal_set(model, x[:1], kind="keep")
    assert alone.instances is None  # a lone instance has no proper subset
    assert "fewer than 1 patch that alone keep" in alone.sentence


@pytest.mark.parametrize("kind", ["flip", "keep"])
def test_parts_on_which_the_network_fails_decide_nothing(kind: str) -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mean = x.mean(dim=1)[:, :2]
            return mean if x.shape[1] >= 3 else mean * float("nan")

    with pytest.raises(UnsupportedError, match="at least 3 patches"):
        xmil.minimal_set(Fragile(), bag_of(20, 0), kind=kind, returns="logit")


def test_one_logit_and_several_labels() -> None:
    for seed in range(4):
        one = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=1, dim=8, seed=seed)
        bag = bag_of(6, seed)
        decided = bool(one(bag[None])[0, 0] > 0)
        sizes = [
            size
            for size in range(1, 6)
            for out in combinations(range(6), size)
            if bool(one(bag[[i for i in range(6) if i not in out]][None])[0, 0] > 0) != decided
        ]
        assert xmil.minimal_set(one, bag).upper == min(sizes, default=None)
        assert xmil.minimal_set(one, bag, target=0).upper == min(sizes, default=None)
        many = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=3, dim=8, seed=seed, task="multilabel")
        found = xmil.minimal_set(many, bag, target=2)
        with torch.no_grad():
            kept = [i for i in range(6) if found.instances is None or i not in found.instances]
            assert (found.upper is None) or (
                bool(many(bag[kept][None])[0, 2] > 0) != bool(many(bag[None])[0, 2] > 0)
            )


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"kind": "flop"}, UnknownNameError, "Did you mean 'flip'"),
        ({"evaluations": 0}, InputError, "'evaluations' parameter of minimal_set"),
    ],
)
def test_bad_parameters(params: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        xmil.minimal_set(model_of(*MODELS[0]), bag_of(5, 0), **params)


def test_models_without_classes_are_refused() -> None:
    model = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=1, dim=8, task="regression")
    with pytest.raises(UnsupportedError, match="no classes"):
        xmil.minimal_set(model, bag_of(5, 0))
