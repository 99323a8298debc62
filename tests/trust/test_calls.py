"""Item 7: calls by keyword, checkpoints, sparse products, transforms: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import xmil
from xmil.core.errors import UnsupportedError

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
Step = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """Logits read from a step on embedded instances (1, 6, 6)."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lin, self.fc, self.step = nn.Linear(8, 6), nn.Linear(6, 2), step

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.step(self.lin(x))).mean(dim=1)


ONES = torch.ones(6)
W = torch.arange(36.0).reshape(6, 6) / 36
PAIRS: dict[str, tuple[Step, Step]] = {
    "mean": (
        lambda h: torch.mean(input=h.sigmoid(), dim=1, keepdim=True),
        lambda h: h.sigmoid().mean(1, True),
    ),
    "mul": (lambda h: torch.mul(input=h, other=h), lambda h: h * h),
    "mul, other by name": (lambda h: torch.mul(h, other=h.tanh()), lambda h: h * h.tanh()),
    "add": (lambda h: torch.add(input=h, other=ONES, alpha=2), lambda h: h + 2 * ONES),
    "sub": (lambda h: torch.sub(input=ONES, other=h), lambda h: ONES - h),
    "div": (lambda h: torch.div(input=h, other=1 + h.abs()), lambda h: h / (1 + h.abs())),
    "where": (
        lambda h: torch.where(condition=h > 0, input=h, other=ONES),
        lambda h: torch.cat([torch.where(h > 0, h, ONES)]),
    ),
    "method where": (
        lambda h: h.where(condition=h > 0, other=ONES),
        lambda h: torch.where(h > 0, h, ONES),
    ),
    "pow": (lambda h: torch.pow(input=h, exponent=2), lambda h: h**2),
    "cat": (lambda h: torch.cat(tensors=[h, h], dim=1), lambda h: torch.cat([h, h], 1)),
    "clamp": (lambda h: torch.clamp(input=h, min=-0.1, max=0.1), lambda h: h.clamp(-0.1, 0.1)),
    "softmax": (
        lambda h: torch.softmax(input=h, dim=1) * h,
        lambda h: h.softmax(1) * h,
    ),
    "matmul": (lambda h: torch.matmul(input=h, other=h.mT), lambda h: h @ h.mT),
    "bmm": (lambda h: torch.bmm(input=h, mat2=h.mT), lambda h: h @ h.mT),
    "addmm": (
        lambda h: torch.addmm(input=ONES, mat1=h[0], mat2=W)[None],
        lambda h: ONES + h @ W,
    ),
    "masked_fill": (
        lambda h: torch.masked_fill(input=h, mask=h > 0, value=2.0),
        lambda h: torch.where(h > 0, torch.tensor(2.0), h),
    ),
    "linear": (lambda h: F.linear(input=h, weight=W, bias=ONES), lambda h: F.linear(h, W, ONES)),
    "layer_norm": (
        lambda h: F.layer_norm(input=h, normalized_shape=(6,)),
        lambda h: F.layer_norm(h, (6,)),
    ),
    "torch.ops": (lambda h: torch.ops.aten.mul(h, h.tanh()), lambda h: h * h.tanh()),
    "sparse.mm": (lambda h: torch.sparse.mm(W.to_sparse(), h[0])[None], lambda h: W @ h),
    "sparse @": (lambda h: (W.to_sparse() @ h[0])[None], lambda h: W @ h),
    "checkpoint": (
        lambda h: checkpoint(lambda v: F.gelu(v) * v.sigmoid() + 1, h, use_reentrant=False),
        lambda h: F.gelu(h) * h.sigmoid() + 1,
    ),
    "fill_diagonal_": (
        lambda h: h[0].clone().fill_diagonal_(0.5)[None],
        lambda h: torch.where(torch.eye(6, dtype=torch.bool), torch.tensor(0.5), h),
    ),
    "fill_": (lambda h: _filled(h), lambda h: torch.cat([torch.full((1, 6, 2), 0.3), h[..., 2:]], -1)),
    "zero_": (lambda h: _zeroed(h), lambda h: torch.cat([torch.zeros(1, 6, 2), h[..., 2:]], -1)),
}  # fmt: skip


def _filled(h: Tensor) -> Tensor:
    out = h.clone()
    out[..., :2].fill_(0.3)
    return out


def _zeroed(h: Tensor) -> Tensor:
    out = h.clone()
    out[..., :2].zero_()
    return out


@pytest.mark.parametrize("name", PAIRS)
def test_item_07_other_ways_to_call_give_the_same_account(name: str) -> None:
    one, other = (xmil.explain(Net(step), X, target=1, preset="exact") for step in PAIRS[name])
    assert one.audit is not None
    assert other.audit is not None
    np.testing.assert_allclose(one.logits, other.logits, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one.scores, other.scores, rtol=1e-4, atol=1e-6)
    assert abs(one.audit.other) < 1e-5
    kept = [a.bias + a.class_token + a.cut for a in (one.audit, other.audit)]
    assert kept[0] == pytest.approx(kept[1], abs=1e-5)


def test_item_07_a_checkpoint_is_explained_for_every_class() -> None:
    """Kept, not computed again: a second backward pass finds everything in place."""
    one, other = (xmil.explain_classes(Net(step), X, preset="exact") for step in PAIRS["checkpoint"])
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a.scores, b.scores, rtol=1e-5, atol=1e-7)


RECURRENT = nn.GRU(6, 6, batch_first=True).requires_grad_(False)


def scripted(h: Tensor) -> Tensor:
    return torch.tanh(h) * h


@pytest.mark.filterwarnings("ignore:.*jit.*:DeprecationWarning", "ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda h: torch.func.vmap(lambda v: v.exp() * v)(h), "transforms such as vmap"),
        (lambda h: torch.func.vmap(torch.layer_norm, in_dims=(0, None))(h, (6,)), "transforms such as vmap"),
        (lambda h: checkpoint(F.gelu, h, use_reentrant=True), "use_reentrant=False"),
        (lambda h: torch.jit.script(scripted)(h), "did not see the operation behind 'MulBackward0'"),
        (lambda h: RECURRENT(h)[0], "operation 'gru'"),
        (lambda h: _hidden(h), "did not see the operation behind 'ExpBackward0'"),
    ],
)
def test_item_07_what_passes_by_is_refused_by_name(step: Step, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        xmil.explain(Net(step), X, target=1)


def _hidden(h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return h.exp()


def test_item_07_what_passes_by_on_the_side_is_let_be() -> None:
    """A transform of constants, and a hidden loss that no logit needs."""

    def step(h: Tensor) -> Tensor:
        _hidden(h).sum()
        return h * torch.func.vmap(torch.exp)(torch.zeros(6))

    e = xmil.explain(Net(step), X, target=1, preset="exact")
    plain = xmil.explain(Net(lambda h: h), X, target=1, preset="exact")
    np.testing.assert_allclose(e.scores, plain.scores, rtol=1e-5, atol=1e-7)
