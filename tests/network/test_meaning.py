"""What a foreign module means by its input is found by passes over the bag, or the user is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xmil
from xmil.core.errors import InputError, UnknownNameError

BAG = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


class Pooled(nn.Module):
    """Attention over a dimension that the caller chooses."""

    def __init__(self, over: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.e, self.a, self.h, self.over = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(5, 2), over

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.e(x))
        return self.h((torch.softmax(4 * self.a(h), dim=self.over) * h).sum(dim=-2))


class Masked(Pooled):
    """Attention under a mask, by the fill of the scores and what True means."""

    def __init__(self, *, ignores: bool, fill: float, mean: bool = False) -> None:
        super().__init__(1)
        self.ignores, self.fill, self.mean = ignores, fill, mean

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        h = F.relu(self.e(x))
        hidden = mask if self.ignores else ~mask
        a = (4 * self.a(h)).masked_fill(hidden.unsqueeze(-1), self.fill).softmax(dim=1)
        return self.h((a * h).sum(dim=1) + (h.mean(dim=1) if self.mean else 0.0))


def test_a_module_that_takes_both_shapes_with_different_outputs_is_refused() -> None:
    net = Pooled(0)
    with pytest.raises(InputError, match=r"\(1, n, d\) and as \(n, d\), with different outputs"):
        xmil.explain(net, BAG)
    e = xmil.explain(net, BAG, forward=lambda net, x: net(x[0]), target=1)
    assert e.output == pytest.approx(float(net(BAG)[1].detach()), rel=1e-5)


def test_shapes_are_compared_on_a_few_instances_of_a_large_bag() -> None:
    seen: list[int] = []

    class Counting(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            if x.ndim == 2:
                seen.append(len(x))
            return super().forward(x)

    with pytest.raises(InputError, match="with different outputs"):
        xmil.explain(Counting(0), torch.randn(500, 6, generator=torch.Generator().manual_seed(0)))
    assert seen == [64]


def test_a_module_that_takes_both_shapes_alike_runs() -> None:
    net = Pooled(-2)
    assert xmil.explain(net, BAG, target=1).output == pytest.approx(float(net(BAG)[1].detach()), rel=1e-5)


@pytest.mark.parametrize("fill", [-1e9, -1e4, float("-inf")])
@pytest.mark.parametrize("ignores", [True, False])
def test_what_true_means_is_found_out(ignores: bool, fill: float) -> None:
    net = Masked(ignores=ignores, fill=fill)
    e = xmil.explain(net, BAG, target=1)
    seen = torch.full((1, 12), not ignores)
    assert e.output == pytest.approx(float(net(BAG[None], seen)[0, 1].detach()), rel=1e-5)
    assert e.params["call"] == f"net(x, mask={'zeros' if ignores else 'ones'})"


class Encoded(Pooled):
    """Torch's encoder, which cannot run where its mask leaves nothing."""

    def __init__(self) -> None:
        super().__init__(1)
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        if bool(mask.all()):
            raise RuntimeError("nothing is left")
        return super().forward(self.encoder(x, src_key_padding_mask=mask))


def test_a_mask_of_zeros_is_tried_where_ones_fail() -> None:
    assert xmil.explain(Encoded().eval(), BAG, method="gxi").params["call"] == "net(x, mask=zeros)"


class Zeroed(Encoded):
    """A padding mask that the module makes itself, and a mean over all rows."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.h(self.e(self.encoder(x, src_key_padding_mask=x.abs().sum(dim=-1) == 0).mean(dim=1)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fast_path_of_torch_is_not_taken_for_chance() -> None:
    padded = torch.cat([BAG, torch.zeros(6, 6)])
    e = xmil.explain(Zeroed().eval(), padded, method="gxi")
    assert any("fast path" in text for text in e.warnings)
    assert not any("random" in text for text in e.warnings)


def test_a_mask_that_cannot_be_told_is_asked_for() -> None:
    with pytest.raises(InputError, match="whether True keeps a patch or leaves it out"):
        xmil.explain(Masked(ignores=True, fill=-1e9, mean=True), BAG)


@pytest.mark.parametrize("task", ["Survival", "multi-label", "surv"])
def test_a_task_that_is_nearly_one_is_refused(task: str) -> None:
    net = Pooled(-2)
    net.task = task  # type: ignore[assignment]
    with pytest.raises(UnknownNameError, match="Unknown task of Pooled"):
        xmil.explain(net, BAG)


def test_another_task_is_said_to_be_taken_as_classification() -> None:
    net = Pooled(-2)
    net.task = "TCGA-LUAD"  # type: ignore[assignment]
    assert any("taken as classification" in text for text in xmil.explain(net, BAG).warnings)


class Bypassed(Pooled):
    """Most of the output goes past the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 5 * self.h(F.relu(self.e(x.detach())).mean(dim=-2))


def test_integrated_gradients_that_stay_open_say_so() -> None:
    assert any("stays open" in text for text in xmil.explain(Bypassed(-2), BAG, method="ig").warnings)
    assert not any("stays open" in text for text in xmil.explain(Pooled(-2), BAG, method="ig").warnings)


class Stepped(Pooled):
    """A count of instances above a threshold: no gradient anywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.e(x)[..., :2] > 0).float().mean(dim=-2) * 4 - 2 + 0 * super().forward(x)


@pytest.mark.parametrize("method", ["gxi", "grad2"])
def test_scores_without_a_gradient_say_so(method: str) -> None:
    assert any(
        "Every score is zero" in text for text in xmil.explain(Stepped(-2), BAG, method=method).warnings
    )
    assert not xmil.explain(Pooled(-2), BAG, method=method).warnings


@pytest.mark.parametrize(
    "hold", [lambda rows: {"c": rows}, lambda rows: [rows], lambda rows: {"a": {"b": rows.numpy()}}]
)
def test_rows_within_what_a_module_holds_are_seen(hold: Any) -> None:
    class Held(Pooled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = Held(-2)
    net.meta = hold(torch.rand(12, 2))
    with pytest.raises(InputError, match="one row for each of the 12 patches"):
        xmil.explain(net, BAG, method="one_removed")


CHANCES = {
    "max": lambda z: torch.sigmoid(z).max(dim=1)[0],
    "topk": lambda z: torch.sigmoid(z).topk(3, dim=1)[0].mean(dim=1),
    "weighted": lambda z: (torch.softmax(z, dim=1) * torch.sigmoid(z)).sum(dim=1),
    "matmul": lambda z: (torch.softmax(z, dim=1).transpose(1, 2) @ torch.sigmoid(z)).squeeze(-1),
    "power": lambda z: (torch.sigmoid(z) ** 4).mean(dim=1) ** 0.25,
    "hard": lambda z: F.hardsigmoid(z).mean(dim=1),
    "tanh": lambda z: ((torch.tanh(z) + 1) / 2).mean(dim=1),
    "erf": lambda z: (0.5 * (1 + torch.erf(z))).mean(dim=1),
    "clamp": lambda z: z.mean(dim=1).clamp(0, 1),
    "bounded": lambda z: torch.clamp(torch.sigmoid(z.mean(dim=1)), min=1e-5, max=1 - 1e-5),
}


class Chances(nn.Module):
    """Instance scores, joined in one of many ways."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.i, self.join = nn.Linear(6, 1), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.i(x))


def test_a_sigmoid_kept_off_its_ends_is_undone() -> None:
    net = Chances(CHANCES["bounded"])
    e = xmil.explain(net, BAG, method="lrp", target=1, returns="probability")
    assert e.output == pytest.approx(float(net.i(BAG).mean().detach()), rel=1e-4)


@pytest.mark.parametrize("join", CHANCES.values(), ids=CHANCES)
def test_probabilities_are_not_taken_for_logits(join: Any) -> None:
    with pytest.raises(InputError, match="look like probabilities"):
        xmil.explain(Chances(join), BAG, method="single")
    xmil.explain(Chances(join), BAG, method="gxi", returns="probability")


@pytest.mark.parametrize(
    "join",
    [lambda z: torch.tanh(z).mean(dim=1), lambda z: torch.sigmoid(z).sum(dim=1), lambda z: z.max(dim=1)[0]],
)
def test_logits_are_not_taken_for_probabilities(join: Any) -> None:
    xmil.explain(Chances(join), BAG, method="single")
