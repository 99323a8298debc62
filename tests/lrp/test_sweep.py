"""Every operation that torch has sample inputs for: the account closes, or the operation is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from xmil.core.errors import XmilError
from xmil.lrp import trace

pytest.importorskip("expecttest", reason="torch's own sample inputs need expecttest")

SAMPLES = 2  # of each operation
ROUNDED = ("half", "bfloat16", "chalf")  # a lower precision is its own error


def operations() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op for op in op_db if op.supports_autograd and torch.float64 in op.dtypes and op.name not in ROUNDED
    ]


def calls(op: Any) -> Iterator[tuple[Any, Tensor]]:
    """Functions of one live tensor, with that tensor."""
    for sample in islice(op.sample_inputs("cpu", torch.float64), SAMPLES):
        x = sample.input
        dense = isinstance(x, Tensor) and x.layout == torch.strided and x.is_floating_point()
        if dense and x.numel() and bool(x.isfinite().all()):
            yield lambda v, s=sample: flat(op.op(v, *s.args, **s.kwargs)), x


def flat(out: Any) -> Tensor:
    """All numbers of a result in one row."""
    parts = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in parts]
    return torch.cat([t.reshape(-1) for t in parts if t.is_floating_point()]).reshape(1, -1)


def leak(function: Any, x: Tensor) -> float | None:
    """What the account of a call leaves open, as a part of its terms; None where it cannot be judged."""
    try:
        torch.manual_seed(0)
        expected = function(x.clone())
    except Exception:  # a sample that needs more than one tensor of numbers
        return None
    if not expected.numel() or not bool(expected.isfinite().all()):
        return None
    seed = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    traced = trace(function, x.clone(), module=nn.Identity())
    torch.testing.assert_close(traced.logits, expected)
    found = traced.relevance(lambda z: (z * seed).sum(dim=-1))
    total = found.input.features.sum() + sum(found.shares.values())
    return abs((total - found.output.sum()).item()) / (expected * seed).abs().sum().clamp_min(1e-6).item()


def sweep() -> tuple[set[str], set[str], dict[str, float]]:
    """Operations whose account closes, those that are refused, and those that leak, with how much."""
    ruled, refused, leaking = set(), set(), {}
    for op in operations():
        for function, x in calls(op):
            try:
                open_part = leak(function, x)
            except XmilError:
                refused.add(op.name)
                continue
            if open_part is not None and open_part > 1e-7:
                leaking[op.name] = open_part
            elif open_part is not None:
                ruled.add(op.name)
    return ruled, refused, leaking


@pytest.fixture
def flags_stay_free() -> Iterator[None]:
    """Torch's own samples forbid setting its flags, for every later test as well."""
    yield
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


@pytest.mark.filterwarnings("ignore")  # torch's own, about what is to come
@pytest.mark.usefixtures("flags_stay_free")
def test_every_operation_closes_its_account_or_is_refused() -> None:
    with ThreadPoolExecutor(1) as shallow:  # torch looks through the stack for each sample
        ruled, refused, leaking = shallow.submit(sweep).result()
    assert leaking == {}
    assert len(ruled) > 265
    assert {"linear", "logcumsumexp"} & refused == {"logcumsumexp"}
