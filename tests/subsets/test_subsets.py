"""Every way to ask for parts of a bag against the model run on each part, for every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import xmil
from xmil.core.errors import UnsupportedError
from xmil.models import AttnMIL, MaxPool, MILModel
from xmil.network import Network, open_network
from xmil.subsets import MODES, Subsets, memory_budget, open_subsets

N, WIDTH = 11, 6
COSTS = {"attnmil": "sum", "clam_mb": "sum", "clam_sb": "sum", "maxpool": "head", "meanpool": "sum"}
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in xmil.list_models()),
    ("attnmil", {"branches": 2}),
    ("attnmil", {"n_out_layers": 1}),
    ("attnmil", {"n_out_layers": 2, "branches": 2}),
    ("attnmil", {"gated": True, "bias": False}),
]


class Order(nn.Module):
    """A foreign module, one bag at a time, that depends on the order of its instances."""

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return (x[..., :3] * steps).sum(dim=1).tanh()


def model_of(name: str, **params: Any) -> nn.Module:
    if name == "foreign":
        return Order()
    torch.manual_seed(0)
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=3, seed=1, **params).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def bag_of(n: int = N) -> Tensor:
    return torch.randn(1, n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def masks_of(count: int, n: int = N) -> Tensor:
    masks = torch.rand(count, n, generator=torch.Generator().manual_seed(count)) < 0.4
    masks[0], masks[1] = False, True
    return masks


def by_hand(model: nn.Module, x: Tensor, masks: Tensor, *, mode: str = "remove", fill: Tensor) -> Tensor:
    """The model on each part by itself; the empty one is n vectors `fill`."""
    outputs = []
    for mask in masks:
        part = torch.where(mask.unsqueeze(1), x[0], fill)
        outputs.append(model((part[mask] if mode == "remove" and mask.any() else part).unsqueeze(0)))
    return torch.cat(outputs)


@pytest.mark.parametrize(("name", "params"), [*MODELS, ("foreign", {})])
@pytest.mark.parametrize("filled", [False, pytest.param(True, marks=pytest.mark.full)])
@torch.no_grad()
def test_parts_are_bags_of_their_own(name: str, params: dict[str, Any], filled: bool) -> None:
    model, x = model_of(name, **params), bag_of()
    fill = torch.linspace(-1, 1, WIDTH, dtype=torch.float64) if filled else torch.zeros(WIDTH).double()
    parts = open_subsets(Network(model), x, fill if filled else None)
    orders = torch.stack([torch.randperm(N, generator=torch.Generator().manual_seed(s)) for s in range(3)])
    same = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(parts.logits, model(x), rtol=0, atol=0)
    for mode in MODES:
        masks = masks_of(20)
        expected = by_hand(model, x, masks, mode=mode, fill=fill)
        torch.testing.assert_close(parts.run(masks, mode=mode), expected, **same)
        torch.testing.assert_close(parts.run(masks[2:3], mode=mode), expected[2:3], **same)
        for sizes in ([0, 1, 4, 4, N], [7], list(range(N + 1))):
            inside = orders.argsort(dim=1).unsqueeze(1) < torch.tensor(sizes).view(1, -1, 1)
            expected = by_hand(model, x, inside.flatten(0, 1), mode=mode, fill=fill).unflatten(0, (3, -1))
            torch.testing.assert_close(parts.nested(orders, sizes, mode=mode), expected, **same)
    inside = orders.argsort(dim=1).unsqueeze(1) < torch.arange(N + 1).view(1, -1, 1)
    expected = by_hand(model, x, inside.flatten(0, 1), fill=fill).unflatten(0, (3, -1))
    torch.testing.assert_close(parts.prefixes(orders), expected, **same)
    eye = torch.eye(N, dtype=torch.bool)
    torch.testing.assert_close(parts.singles(), by_hand(model, x, eye, fill=fill), **same)
    torch.testing.assert_close(parts.without_each(), by_hand(model, x, ~eye, fill=fill), **same)


@pytest.mark.parametrize(("name", "params"), [*MODELS, ("foreign", {})])
@torch.no_grad()
def test_changed_parts_are_bags_of_their_own(name: str, params: dict[str, Any]) -> None:
    model, x = model_of(name, **params), bag_of()
    parts, zero = open_subsets(Network(model), x), torch.zeros(WIDTH).double()
    rows = torch.tensor([4, 0, 10, 7])
    one, most = torch.zeros(N, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    one[4], most[0] = True, False
    for mask in (*masks_of(8), one, most):
        changed = mask.repeat(4, 1)
        changed[torch.arange(4), rows] ^= True
        torch.testing.assert_close(parts.toggled(mask, rows), by_hand(model, x, changed, fill=zero))
    masks = masks_of(5)
    choices = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]).bool().repeat(5, 1, 1)
    changed = masks.unsqueeze(1).repeat(1, 3, 1)
    changed[:, :, rows] = choices
    expected = by_hand(model, x, changed.flatten(0, 1), fill=zero).unflatten(0, (5, 3))
    torch.testing.assert_close(parts.around(masks, rows, choices), expected)


@pytest.mark.parametrize("name", xmil.list_models())
@torch.no_grad()
def test_what_a_part_costs(name: str) -> None:
    x = bag_of()
    assert open_subsets(Network(model_of(name)), x).cost == COSTS.get(name, "run")
    layered = open_subsets(Network(model_of("attnmil", n_out_layers=1)), x)
    assert layered.cost == "head"


@pytest.mark.parametrize("name", ["attnmil", "clam_mb", "maxpool", "addmil", "dsmil"])
@torch.no_grad()
def test_large_bags_without_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the size up to which bags are run by hand."""
    model, x = model_of(name), bag_of()
    parts = open_subsets(Network(model), x)
    plain = parts.without_each()
    monkeypatch.setattr("xmil.subsets.engine.SMALL", 0)
    torch.testing.assert_close(parts.without_each(), plain, rtol=1e-9, atol=1e-12)


def heavy(weight: float, **params: Any) -> tuple[AttnMIL, Tensor, Tensor]:
    """A model in whose bag one instance has all the weight, and who has not."""
    model, x = model_of("attnmil", **params), bag_of()
    assert isinstance(model, AttnMIL)
    with torch.no_grad():
        a = model.attend(model.embed(x))[0, :, 0]
        model.attention.w.weight.mul_(weight / float(a.max() - a.min()))
        a = model.attend(model.embed(x))[0, :, 0]
    return model, x, torch.arange(N) != a.argmax()


@pytest.mark.parametrize("weight", [50.0, 300.0, 3000.0])
@pytest.mark.parametrize("params", [{}, {"n_out_layers": 1}, {"n_out_layers": 1, "dtype": torch.float32}])
@torch.no_grad()
def test_the_instance_with_all_the_weight(
    weight: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = dict(params)
    dtype = params.pop("dtype", torch.float64)
    model, x, rest = heavy(weight, **params)
    model, x = model.to(dtype), x.to(dtype)
    parts, zero = open_subsets(Network(model), x), torch.zeros(WIDTH, dtype=dtype)
    assert (type(parts) is Subsets) == (weight > 600)
    expected = by_hand(model, x, rest.unsqueeze(0), fill=zero)[0].double()
    everything, last = torch.ones(N, dtype=torch.bool), (~rest).nonzero()[0]
    order = torch.cat([rest.nonzero()[:, 0], last])
    monkeypatch.setattr("xmil.subsets.engine.SMALL", 0)
    for output in (
        parts.run(rest.unsqueeze(0))[0],
        parts.toggled(everything, last)[0],
        parts.without_each()[int(last)],
        parts.nested(order.unsqueeze(0), [N - 1])[0, 0],
        parts.prefixes(order.unsqueeze(0))[0, N - 1],
    ):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_small_bags_without_each_have_the_bits_of_doing_it_by_hand() -> None:
    model, x = model_of("attnmil").float(), bag_of(40).float()
    found = open_subsets(Network(model), x).without_each()
    for k in range(40):
        rest = torch.cat([x[:, :k], x[:, k + 1 :]], dim=1)
        assert torch.equal(found[k].float(), model(rest)[0])


@torch.no_grad()
def test_a_bag_of_one() -> None:
    for name in (*xmil.list_models(), "foreign"):
        model, x = model_of(name), bag_of(1)
        parts = open_subsets(Network(model), x)
        empty = model(torch.zeros_like(x))
        torch.testing.assert_close(parts.without_each(), empty)
        torch.testing.assert_close(
            parts.prefixes(torch.zeros(2, 1, dtype=torch.long))[1], torch.cat([empty, model(x)])
        )


@pytest.mark.parametrize("base", [AttnMIL, MaxPool])
@torch.no_grad()
def test_a_subclass_with_its_own_aggregation_is_run(base: type[MILModel]) -> None:
    class Doubled(base):  # type: ignore[misc, valid-type]
        def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
            return 2 * super().aggregate(h, mask)

    model, x = Doubled(WIDTH, 2).eval().double(), bag_of(3)
    parts = open_subsets(Network(model), x)
    assert model.pooling is None
    assert type(parts) is Subsets
    masks = torch.tensor([[True, False, True]])
    torch.testing.assert_close(parts.run(masks), model(x[:, [0, 2]]))


@torch.no_grad()
def test_an_additive_model_of_ones_own_is_run() -> None:
    class Sums(MILModel):
        pooling = "additive"

        def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.instance_logits(h).sum(dim=1)

        def instance_logits(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
            return h[..., :2].tanh()

    model, x, zero = Sums(WIDTH, 2).eval(), bag_of(), torch.zeros(WIDTH).double()
    parts = open_subsets(Network(model), x)
    assert type(parts) is Subsets
    torch.testing.assert_close(parts.run(masks_of(9)), by_hand(model, x, masks_of(9), fill=zero))
    assert xmil.flip(model, x[0], x[0, :, 0].numpy(), target=1).steps == 100


@torch.no_grad()
def test_batches_respect_the_budget() -> None:
    parts = open_subsets(Network(model_of("transmil", dim=16)), bag_of())
    with memory_budget(1 << 16):
        sizes = [batch.stop - batch.start for batch in parts.batches(1000, 30)]
    assert len(list(parts.batches(1000, 30))) == 1
    assert sum(sizes) == 1000
    assert max(sizes) * 30 * 48 * 4 <= 1 << 16


@pytest.mark.parametrize("name", ["attnmil", "maxpool", "addmil", "dsmil"])
@torch.no_grad()
def test_small_budgets_and_slabs_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, masks = bag_of(), masks_of(20)
    rows, orders = torch.arange(N), torch.stack([torch.arange(N), torch.arange(N).flip(0)])
    choices = torch.eye(N, dtype=torch.bool).expand(20, -1, -1)

    def outputs() -> list[Tensor]:
        parts = open_subsets(Network(model_of(name)), x)
        return [
            parts.run(masks), parts.run(masks, mode="mask"), parts.nested(orders, [3, 5], mode="mask"),
            parts.prefixes(orders), parts.around(masks, rows, choices), parts.toggled(masks[3], rows),
            parts.singles(),
        ]  # fmt: skip

    expected = outputs()
    for module in ("engine", "closed_forms"):
        monkeypatch.setattr(f"xmil.subsets.{module}.SLAB", 7)
    monkeypatch.setattr("xmil.subsets.closed_forms.BLOCK", 3)
    with memory_budget(1):
        torch.testing.assert_close(outputs(), expected, rtol=1e-9, atol=1e-12)


class Skewed(nn.Module):
    """A network whose outputs are not finite for one or two instances."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        squares = (x - x.mean(dim=1, keepdim=True)).square().sum(dim=1)
        return self.head(((1 + squares) / (x.shape[1] - 2)).sqrt())


@pytest.mark.parametrize(
    "ask",
    [
        lambda parts: parts.run(torch.eye(N, dtype=torch.bool)[:2]),
        lambda parts: parts.nested(torch.arange(N).unsqueeze(0), [5, 2, 1]),
        lambda parts: parts.prefixes(torch.arange(N).unsqueeze(0)),
        lambda parts: parts.toggled(torch.eye(N, dtype=torch.bool)[0], torch.tensor([3])),
        lambda parts: parts.joined(torch.tensor([0]), torch.tensor([3])),
        lambda parts: parts.singles(),
    ],
)
@torch.no_grad()
def test_parts_too_small_for_the_network_are_refused(ask: Callable[[Subsets], Tensor]) -> None:
    parts = open_subsets(open_network(Skewed(), bag_of()[0])[0], bag_of())
    with pytest.raises(UnsupportedError, match="at least 3 patches"):
        ask(parts)


@torch.no_grad()
def test_parts_large_enough_for_the_network_are_run() -> None:
    parts = open_subsets(open_network(Skewed(), bag_of()[0])[0], bag_of())
    assert parts.nested(torch.arange(N).unsqueeze(0), [3, 8]).isfinite().all()
    assert parts.without_each().isfinite().all()


@pytest.mark.parametrize("name", ["attnmil", "maxpool", "transmil"])
@torch.no_grad()
def test_outputs_of_a_closed_form_that_are_not_finite_are_refused(name: str) -> None:
    """A patch so large that its own output overflows; the others are ordinary."""
    model, x = model_of(name), bag_of()
    x[0, 2] = 1e308
    parts, alone = open_subsets(Network(model), x), torch.arange(N) == 2
    assert parts.run(~alone.unsqueeze(0)).isfinite().all()
    with pytest.raises(UnsupportedError, match="not finite"):
        parts.run(alone.unsqueeze(0))
    with pytest.raises(UnsupportedError, match="not finite"):
        parts.toggled(~alone, torch.tensor([2]))
    with pytest.raises(UnsupportedError, match="not finite"):
        parts.full  # noqa: B018  # a property that runs the model
