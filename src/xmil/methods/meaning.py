"""What a foreign module means by its input: a batch of bags or one bag, and which instances a mask keeps.

Decided by passes over the bag, never by names; refused where two readings are possible.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from difflib import get_close_matches

import torch
from torch import Tensor

from xmil.core.errors import InputError, unknown_name
from xmil.core.task import TASKS
from xmil.methods.calling import Way, ones, zeros
from xmil.methods.chances import seeded
from xmil.methods.network import Network
from xmil.methods.reading import find_logits

SAME = 1e-5  # of the logits: what two passes of one module may differ by, for rounding on parallel devices
FEW = 64  # instances on which the two shapes are compared
CLOSE = 1e-3  # of the logits: what a masked bag may differ by from the bag of what the mask keeps


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number of the first."""
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-3))


def check_task(network: Network) -> None:
    """Refuse a `task` that is nearly one we know; say of another that it is taken as classification."""
    task = getattr(network.module, "task", None)
    if not isinstance(task, str) or task in TASKS:
        return
    if get_close_matches(task.lower(), TASKS, n=1, cutoff=0.5):
        raise unknown_name(f"task of {network.name}", task, TASKS)
    network.remarks += (
        f"{network.name}.task is {task!r}, none of {', '.join(TASKS)}: taken as classification.",
    )


def check_batch(network: Network, x: Tensor, other: Way) -> None:
    """Refuse a module that takes (1, n, d) and (n, d) and gives another output for each.

    A few instances tell: as (n, d) some modules would take each pair of the bag's instances together.
    """
    n = min(x.shape[1], FEW)
    part, rows = x[:, :n], None if n == x.shape[1] else torch.arange(n, device=x.device).unsqueeze(0)
    twin = copy(network)
    twin.way = other
    with seeded(0):
        plain = _found(lambda: find_logits(raw := twin.raw(part.clone(), rows), n, name=network.name)(raw))
    if n < 2 or plain is None:  # a bag of one instance is read alike
        return
    with seeded(0):
        batch = _found(lambda: network.logits(part, rows))
    if batch is None or batch.shape != plain.shape or distance(batch, plain) <= SAME * 10:
        return
    raise InputError(
        f"{network.name} takes a bag as (1, n, d) and as (n, d), with different outputs; say which one it "
        "was trained with: forward=lambda net, x: net(x), or forward=lambda net, x: net(x[0])."
    )


def fast_path_remark(network: Network, x: Tensor, first: Tensor, second: Tensor) -> str | None:
    """What to say where torch's fast path, and not chance, makes two passes differ; else None."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        plain = network.reading(network.raw(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    again = network.reading(network.raw(x))
    if distance(first, plain) > SAME or distance(second, again) > SAME:
        return None
    return (
        f"{network.name} gives another output on torch's fast path, as in a plain prediction (different by "
        f"{float((first - second).abs().max()):.3g}): there masked rows become zeros. Methods by gradients, "
        "lrp among them, explain the output without it; build nn.TransformerEncoder with "
        "enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)."
    )


def settle_mask(network: Network, x: Tensor) -> bool:
    """Settle what a mask must be for the whole bag to be seen; False where no mask shows any of it.

    A mask that keeps a part of the bag must give what that part gives alone: that says whether True keeps an
    instance or leaves it out. Where neither holds and it matters, the user is asked.
    """
    way = network.way
    assert way.with_mask is not None  # noqa: S101  # asked of those alone
    readings = {"ones": way.with_mask(ones, "ones"), "zeros": way.with_mask(zeros, "zeros")}
    found = {made: _seen(network, one, x) for made, one in readings.items()}
    seen = {made: logits for made, logits in found.items() if logits is not None}
    if not seen:
        return False
    if len(seen) == 2 and distance(seen["ones"], seen["zeros"]) > SAME:
        held = [made for made in seen if _holds(network, way, x, keep=made == "ones")]
        if len(held) != 1:
            raise InputError(
                f"{network.name} takes a mask, and its output depends on whether True keeps an instance or "
                f"leaves it out, which cannot be told; say it: forward=lambda net, x: {way.text} with "
                "ones = torch.ones(x.shape[:2], dtype=torch.bool), or zeros in their place."
            )
        seen = {held[0]: seen[held[0]]}
    network.way = readings[next(iter(seen))]
    return True


def _seen(network: Network, way: Way, x: Tensor) -> Tensor | None:
    """The logits in a way of calling, where they are finite and depend on the bag."""
    network.way = way
    with seeded(0):
        first = _found(lambda: network.logits(x))
    with seeded(0):
        other = _found(lambda: network.logits(torch.zeros_like(x)))
    if first is None or other is None or not bool(torch.isfinite(first).all()):
        return None
    return first if distance(first, other) > 0 else None


def _holds(network: Network, way: Way, x: Tensor, *, keep: bool) -> bool:
    """Whether the bag under a mask of its first half gives what the part it would keep gives."""
    if way.with_mask is None or x.shape[1] < 2:
        return False
    first = torch.arange(x.shape[1], device=x.device) < x.shape[1] // 2
    part = (first == keep).nonzero().squeeze(1)
    network.way = way.with_mask(lambda bag: first.expand(bag.shape[:2]), "half")
    with seeded(0):
        masked = _found(lambda: network.logits(x))
    network.way = way.with_mask(ones if keep else zeros, "all")
    with seeded(0):
        alone = _found(lambda: network.logits(x[:, part], part.unsqueeze(0)))
    return masked is not None and alone is not None and distance(alone, masked) <= CLOSE


def _found(compute: Callable[[], Tensor]) -> Tensor | None:
    """What a user's module gives, or None where it cannot."""
    try:
        return compute()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever a user's module raises: this reading is none
        return None
