"""Outputs of parts of a bag by running the model; `closed_forms` has models that need no run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError, bad_parameter
from xmil.network import Network, fewest_instances, frozen

MODES = ("remove", "mask")
SMALL = 200  # largest bag that `without_each` runs as sub-bags, bit for bit like a user would
LARGE = 1 << 18  # numbers in a bag above which batches of masked bags do not pay off
SLAB = 1 << 26  # entries of masks in memory at once
BUDGET_BYTES = 1 << 30  # approximate limit on the temporaries of one batch of bags
_budget: ContextVar[int] = ContextVar("budget", default=BUDGET_BYTES)


@contextmanager
def memory_budget(n_bytes: int) -> Iterator[None]:
    """Limit the temporaries of a batch, roughly, within the block: smaller batches, same scores."""
    if n_bytes < 1:
        raise bad_parameter("n_bytes", "memory_budget", "an int in the range [1, inf)", n_bytes)
    token = _budget.set(n_bytes)
    try:
        yield
    finally:
        _budget.reset(token)


class Subsets:
    """v(S) for the parts S of one bag (1, n, d), from instances that are embedded once.

    A part is the sub-bag in the bag's order. Mode "remove" removes the other instances, mode "mask" replaces
    them by the vector `fill` (d,). The empty part is n such vectors; without a fill, zeros. Outputs are in
    double precision; `full` and `empty` (1, c) are those of all and of no instances, `logits` those of the
    full bag in the model's precision. `cost` is the cost of one part: "run", a run of the model, "head", a
    sum or maximum and the model's head, or "sum", the sum alone. Outputs that are not finite are refused, see
    `check_finite`.

    This class runs any model, with parts of equal size in batches. `xmil.subsets.open_subsets` builds one.
    """

    cost = "run"

    def __init__(self, network: Network, x: Tensor, fill: Tensor | None = None) -> None:
        self.network, self.x, self.n = network, x, x.shape[1]
        self.model: Any = network.model
        self._width = max((p.shape[0] for p in network.module.parameters() if p.ndim > 1), default=1)
        outside = torch.zeros_like(x[:, :1]) if fill is None else fill.view(1, 1, -1)
        self.h, self.h0 = network.embed(x), network.embed(outside)  # (1, n, e), (1, 1, e)

    @cached_property
    def logits(self) -> Tensor:
        """The outputs (1, c) of all instances in the model's precision, computed on first use."""
        with frozen(self.network.module), torch.no_grad():
            return self._aggregate_all()

    @cached_property
    def full(self) -> Tensor:
        """The outputs (1, c) of all instances in double precision."""
        return check_finite(self, self.logits.double(), [self.n])

    @cached_property
    def empty(self) -> Tensor:
        """The outputs (1, c) of no instances, computed on first use."""
        with frozen(self.network.module), torch.no_grad():
            return check_finite(self, self._aggregate_none().double(), [0])

    @property
    def n_bytes(self) -> int:
        """Approximate memory of the bag and its embedded instances."""
        return sum(v.numel() * v.element_size() for v in vars(self).values() if isinstance(v, Tensor))

    def run(self, masks: Tensor, *, mode: str = "remove") -> Tensor:
        """Outputs (b, c) of the parts given by masks (b, n)."""
        sizes = masks.sum(dim=1)
        inner = ((sizes > 0) & (sizes < self.n)).nonzero().squeeze(1)
        if len(inner) == len(masks) > 0:
            return check_finite(self, self._run(masks, mode), sizes, mode=mode)
        out = self.full.repeat(len(masks), 1)
        if bool((sizes == 0).any()):
            out[sizes == 0] = self.empty
        if len(inner):
            out[inner] = check_finite(self, self._run(masks[inner], mode), sizes[inner], mode=mode)
        return out

    def nested(self, orders: Tensor, sizes: Sequence[int], *, mode: str = "remove") -> Tensor:
        """Outputs (q, len(sizes), c) of the first m instances of orders (q, n), for each size m."""
        inner = sorted({m for m in sizes if 0 < m < self.n})
        columns = []
        if inner:
            columns.append(check_finite(self, self._nested(orders, inner, mode), inner, mode=mode))
        for size, ends in ((self.n, "full"), (0, "empty")):
            if size in sizes:
                columns.append(getattr(self, ends).expand(len(orders), 1, -1))
                inner.append(size)
        column = {m: i for i, m in enumerate(inner)}
        return torch.cat(columns, dim=1)[:, [column[m] for m in sizes]]

    def prefixes(self, orders: Tensor) -> Tensor:
        """Outputs (p, n + 1, c) of the first 0..n instances of orders (p, n)."""
        none, everything = (end.expand(len(orders), 1, -1) for end in (self.empty, self.full))
        inner = []
        if self.n > 1:
            inner.append(check_finite(self, self._prefixes(orders), range(1, self.n)))
        return torch.cat([none, *inner, everything], dim=1)

    def around(self, masks: Tensor, rows: Tensor, choices: Tensor) -> Tensor:
        """Outputs (b, m, c) of masks (b, n), each with m other choices (b, m, k) of the rows (k,)."""
        out = []
        step = max(1, SLAB // (choices.shape[1] * self.n))
        for mask, choice in zip(masks.split(step), choices.split(step), strict=True):
            changed = mask.unsqueeze(1).repeat(1, choice.shape[1], 1)
            changed[:, :, rows] = choice
            out.append(self.run(changed.flatten(0, 1)).unflatten(0, choice.shape[:2]))
        return torch.cat(out)

    def toggled(self, mask: Tensor, rows: Tensor) -> Tensor:
        """Outputs (k, c) of a part (n,) with each of the rows (k,) added or removed."""
        out = []
        for part in rows.split(max(1, SLAB // self.n)):
            masks = mask.repeat(len(part), 1)
            masks[torch.arange(len(part), device=part.device), part] ^= True
            out.append(self.run(masks))
        return torch.cat(out)

    def joined(self, company: Tensor, rows: Tensor) -> Tensor:
        """Outputs (k, c) of a company (m,) joined by each of the rows (k,), which it must not contain."""
        parts = torch.cat([company.expand(len(rows), -1), rows.unsqueeze(1)], dim=1).sort(dim=1).values
        batches = self.batches(len(rows), parts.shape[1])
        outputs = torch.cat([self._rows(parts[batch], "remove") for batch in batches]).double()
        return check_finite(self, outputs, [parts.shape[1]])

    def beside(self, company: Tensor, spare: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (k, c) of a company (m,) with each of the rows (k,), and without it.

        If the company contains the row, `spare` replaces it.
        """
        mask, inside = torch.zeros(self.n, dtype=torch.bool, device=rows.device), torch.isin(rows, company)
        mask[company] = True
        alone = self.run(mask.unsqueeze(0))
        together, without = (alone.repeat(len(rows), 1) for _ in range(2))
        together[~inside] = self.joined(company, rows[~inside])
        if bool(inside.any()):
            mask[spare] = True
            together[inside] = self.run(mask.unsqueeze(0))
            without[inside] = self.toggled(mask, rows[inside])
        return together, without

    def singles(self) -> Tensor:
        """Outputs (n, c) of each instance alone."""
        rows = torch.arange(self.n, device=self.x.device).unsqueeze(1)
        batches = self.batches(self.n, 1)
        outputs = torch.cat([self._rows(rows[batch], "remove") for batch in batches]).double()
        return check_finite(self, outputs, [1])

    def without_each(self) -> Tensor:
        """Outputs (n, c) of the bag without each of its instances; without its only one it is the empty bag.

        For small bags, bit for bit what the model returns for the sub-bags.
        """
        rows = torch.arange(self.n, device=self.x.device)
        if 1 < self.n <= SMALL:
            parts = [rows[rows != k] for k in rows]
            outputs = torch.cat([self.network(self.x[:, part], part.unsqueeze(0)) for part in parts]).double()
            return check_finite(self, outputs, [self.n - 1])
        return self.toggled(torch.ones_like(rows, dtype=torch.bool), rows)

    def batches(self, n_bags: int, n: int) -> Iterator[slice]:
        """Slices of range(n_bags) that fit the memory budget, for bags of n instances."""
        step = max(1, _budget.get() // (4 * 16 * max(1, n) * max(self._width, 1)))
        return (slice(start, min(start + step, n_bags)) for start in range(0, n_bags, step))

    def _aggregate_all(self) -> Tensor:
        """The outputs (1, c) of the full bag, bit for bit the model's."""
        return self.network.aggregate(self.h)

    def _aggregate_none(self) -> Tensor:
        """The outputs (1, c) of n vectors `fill`."""
        return self.network.aggregate(self.h0.repeat(1, self.n, 1))

    def _run(self, masks: Tensor, mode: str) -> Tensor:
        """Outputs of parts that are neither empty nor full."""
        if mode == "remove":
            return self._by_size(masks, mode)
        one_by_one = self.h.numel() > LARGE and not self.h.is_cuda
        parts = masks.split(1) if one_by_one else [masks[b] for b in self.batches(len(masks), self.n)]
        rows, table = torch.arange(self.n, device=masks.device), torch.cat([self.h[0], self.h0[0]])
        bags = (table[torch.where(part, rows, self.n)] for part in parts)
        return torch.cat([self.network.aggregate(bag) for bag in bags]).double()

    def _by_size(self, masks: Tensor, mode: str) -> Tensor:
        """Outputs of parts by their rows, in batches of equal size."""
        sizes, indices, out = masks.sum(dim=1), [], []
        for size in sizes.unique().tolist():
            index = (sizes == size).nonzero().squeeze(1)
            indices.append(index)
            for batch in self.batches(len(index), size):
                rows = masks[index[batch]].nonzero()[:, 1].view(-1, size)
                out.append(self._rows(rows, mode).double())
        return torch.cat(out)[torch.cat(indices).argsort()]

    def _rows(self, rows: Tensor, mode: str) -> Tensor:  # noqa: ARG002 - for subclasses
        """Outputs of one batch of parts by their rows (b, m)."""
        return self.network.aggregate(self.h[0][rows], rows)

    def _nested(self, orders: Tensor, sizes: list[int], mode: str) -> Tensor:
        """Outputs (q, len(sizes), c) for ascending sizes between 0 and n."""
        ranks, limits, out = orders.argsort(dim=1), torch.tensor(sizes, device=orders.device), []
        for part in limits.split(max(1, SLAB // ranks.numel())):
            masks = ranks.unsqueeze(1) < part.view(1, -1, 1)  # (q, s, n)
            out.append(self._run(masks.flatten(0, 1), mode).unflatten(0, masks.shape[:2]))
        return torch.cat(out, dim=1)

    def _prefixes(self, orders: Tensor) -> Tensor:
        return self._nested(orders, list(range(1, self.n)), "remove")


def check_finite(
    game: Subsets, outputs: Tensor, sizes: Tensor | Sequence[int], *, mode: str = "remove"
) -> Tensor:
    """Return the outputs (..., c) of parts of a bag, or refuse them if any is NaN or infinite.

    `sizes` (...) has the instances of each part, or the one size of all. The error names the size below which
    the network stops working.
    """
    finite = torch.isfinite(outputs).all(dim=-1)
    if bool(finite.all()):
        return outputs
    each = torch.as_tensor(sizes, device=outputs.device).expand_as(finite)
    raise _non_finite_error(game, int(each[~finite].max()), mode)


def _non_finite_error(game: Subsets, size: int, mode: str) -> UnsupportedError:
    """Make the error for outputs that are not finite on `size` instances of a bag."""
    name, n = game.network.name, game.n
    if size == n:
        bag = game.network.companions.name
        return UnsupportedError(f"The outputs of {name} are not finite for {bag}; check the model.")
    if size == 0:
        return UnsupportedError(
            f"The outputs of {name} are not finite for the empty bag, a bag of {n} zero vectors; pass "
            "forward= that returns a finite output for it."
        )
    if mode == "mask":
        return UnsupportedError(
            f"The outputs of {name} are not finite if {n - size} of the {n} patches are zero vectors; check "
            "the model, or use mode='remove'."
        )
    keep = "use the methods lrp, ig or gxi, which keep the full bag"
    least = fewest_instances(game.network, game.x, size)
    if least > size:
        return UnsupportedError(
            f"{name} needs at least {least} patches, but this call removes patches and its outputs are not "
            f"finite for {size} of {n}; {keep}."
        )
    return UnsupportedError(
        f"The outputs of {name} are not finite for some bags of {size} of the {n} patches; check the model, "
        f"or {keep}."
    )
