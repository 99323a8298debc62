"""What a model gives for coalitions of a bag's instances: each is run as a bag of its own.

A coalition is the sub-bag in the bag's order; the empty one is n zero vectors. Models that pool by a softmax,
a mean or a maximum give all prefixes of a permutation from running sums in one pass; other models are run,
coalitions of one size in batches, on instances that are embedded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from xmil.methods.network import Network
from xmil.models import PooledMIL
from xmil.models.pooling import MaxPool

Clock = Callable[[Callable[[], Tensor]], float]  # seconds that a call takes
Layers = list[tuple[Tensor, Tensor]]  # weights (out, in) and biases (out,) of linear layers
TIMED = 4  # permutations that are run to see how long others will take
GAUSS = (0.5 - 12**-0.5, 0.5 + 12**-0.5)  # of the unit interval
BLOCK = 512  # instances whose sums are read at once
WIDEST = 600.0  # attention logits that lie further apart lose their weight in double precision
LINEAR = {  # operations, and looks at shapes, that keep a function of their input affine
    *(
        "linear",
        "conv1d",
        "cat",
        "stack",
        "sum",
        "dropout",
        "__getitem__",
        "__get__",
        "__len__",
        "size",
        "dim",
    ),
    *("flatten", "squeeze", "unsqueeze", "reshape", "view", "permute", "transpose", "contiguous"),
}


def timed(run: Callable[[], Tensor]) -> float:
    """Seconds of a call, once another like it has warmed up; the number it waits for ends a device's work."""
    for _ in range(2):
        start = perf_counter()
        float(run().sum())
        took = perf_counter() - start
    return took


class Coalitions(ABC):
    """The game of one bag (1, n, d): `full` and `empty` are the logits (1, c) of all and of no instances."""

    def __init__(self, network: Network, x: Tensor) -> None:
        self.network, self.x, self.n = network, x, x.shape[1]
        self.model_logits = network(x)
        self.full = self.model_logits.double()
        self.empty = network(torch.zeros_like(x)).double()

    def logits(self, masks: Tensor) -> Tensor:
        """Logits (b, c), in double precision, of the coalitions that masks (b, n) hold."""
        sizes = masks.sum(dim=1)
        found = torch.where((sizes == 0).unsqueeze(1), self.empty, self.full)
        inner = ((sizes > 0) & (sizes < self.n)).nonzero().squeeze(1)
        if len(inner):
            found[inner] = self._logits(masks[inner])
        return found

    def prefixes(self, orders: Tensor) -> Tensor:
        """Logits (p, n + 1, c) of the first 0..n instances of permutations (p, n)."""
        p = len(orders)
        ends = [end.expand(p, 1, -1) for end in (self.empty, self.full)]
        if self.n == 1:
            return torch.cat(ends, dim=1)
        return torch.cat([ends[0], self._prefixes(orders), ends[1]], dim=1)

    def around(self, held: Tensor, rows: Tensor, here: Tensor) -> Tensor:
        """Logits (b, m, c) of coalitions (b, n), each with other choices here (b, m, k) of the rows (k,)."""
        masks = held.unsqueeze(1).repeat(1, here.shape[1], 1)
        masks[:, :, rows] = here
        return self.logits(masks.flatten(0, 1)).view(*here.shape[:2], -1)

    def toggled(self, held: Tensor, rows: Tensor) -> Tensor:
        """Logits (k, c) of a coalition (n,) with each of the rows (k,) on the other side."""
        masks = held.repeat(len(rows), 1)
        masks[torch.arange(len(rows), device=rows.device), rows] ^= True
        return self.logits(masks)

    def seconds(self, permutations: int, clock: Clock = timed) -> float:
        """What so many permutations take together on this machine, from a few of them that are run."""
        orders = torch.arange(self.n, device=self.x.device).repeat(min(permutations, TIMED), 1)
        took = clock(lambda: self._prefixes(orders)) if self.n > 1 else 0.0
        return took * permutations / len(orders)

    @abstractmethod
    def _logits(self, masks: Tensor) -> Tensor:
        """Logits of coalitions that are neither empty nor full."""

    @abstractmethod
    def _prefixes(self, orders: Tensor) -> Tensor:
        """Logits (p, n - 1, c) of the first 1..n-1 instances."""


class RunCoalitions(Coalitions):
    """Any model: coalitions of one size are run together."""

    def __init__(self, network: Network, x: Tensor) -> None:
        super().__init__(network, x)
        self.h = network.embed(x)  # (1, n, e)

    def seconds(self, permutations: int, clock: Clock = timed) -> float:
        """As for any model, from sub-bags of two sizes: Gauss's points, which stand for all sizes between."""
        rows = torch.arange(self.n, device=self.x.device).repeat(permutations, 1)
        sizes = [min(max(1, round(share * self.n)), self.n - 1) for share in GAUSS]
        return (self.n - 1) * sum(clock(partial(self._run, rows[:, :size])) for size in sizes) / len(sizes)

    def _logits(self, masks: Tensor) -> Tensor:
        sizes = masks.sum(dim=1)
        found = self.full.new_empty(len(masks), self.full.shape[1])
        for size in sizes.unique().tolist():
            index = (sizes == size).nonzero().squeeze(1)
            rows = masks[index].nonzero()[:, 1].view(len(index), size)
            found[index] = self._run(rows)
        return found

    def _prefixes(self, orders: Tensor) -> Tensor:
        sizes = range(1, self.n)
        return torch.stack([self._run(orders[:, :size].sort(dim=1).values) for size in sizes], dim=1)

    def _run(self, rows: Tensor) -> Tensor:
        """Logits of the sub-bags of the given rows (b, m)."""
        return self.network.sub(self.h, rows).double()


class PooledCoalitions(Coalitions):
    """Softmax-weighted means: sums of weights and of weighted instances, in double precision.

    The first linear layer of the head is taken before the sums: where the head is affine, only c numbers are
    summed.
    """

    model: PooledMIL

    def __init__(self, network: Network, x: Tensor, model: PooledMIL) -> None:
        super().__init__(network, x)
        self.model = model
        h = model.embed(x)
        a = model.attend(h)[0].double()  # (n, k)
        self.safe = bool(a.amax() - a.amin() < WIDEST)
        weights = (a - a.amax(dim=0)).exp()
        zero = h.new_zeros(1, a.shape[1], h.shape[-1])
        self.head, self.layers = affine_head(model, zero), relu_layers(model, zero)
        values = h[0].double().unsqueeze(1).expand(-1, a.shape[1], -1)  # (n, k, e)
        if self.head is not None:
            values = torch.einsum("nke,kec->nkc", values, self.head[0])
        elif self.layers is not None:
            first = self.layers[0][0].unflatten(1, (a.shape[1], -1))  # (e1, k, e)
            values = torch.einsum("nke,hke->nkh", values, first)
        self.width = values.shape[-1]
        self.terms = torch.cat([weights, (weights.unsqueeze(-1) * values).flatten(1)], dim=1).T.contiguous()

    def _logits(self, masks: Tensor) -> Tensor:
        return self._read(masks.double() @ self.terms.T)

    def around(self, held: Tensor, rows: Tensor, here: Tensor) -> Tensor:
        """As for any model; the sum over what stays is shared."""
        staying = held.index_fill(1, rows, False)
        sizes = (staying.sum(dim=1, keepdim=True) + here.sum(dim=2)).unsqueeze(-1)  # (b, m, 1)
        sums = (staying.double() @ self.terms.T).unsqueeze(1) + here.double() @ self.terms[:, rows].T
        found = self._read(sums.flatten(0, 1)).unflatten(0, here.shape[:2])
        return torch.where(sizes == 0, self.empty, torch.where(sizes == self.n, self.full, found))

    def toggled(self, held: Tensor, rows: Tensor) -> Tensor:
        """As for any model: one term of the sums comes or goes."""
        signs = 1.0 - 2.0 * held[rows].double()
        sums = self.terms @ held.double() + signs.unsqueeze(1) * self.terms[:, rows].T
        sizes = (held.sum() + signs).unsqueeze(1)
        found = torch.where(sizes == 0, self.empty, self._read(sums))
        return torch.where(sizes == self.n, self.full, found)

    def _prefixes(self, orders: Tensor) -> Tensor:
        if self.head is not None:
            return self._read(self.terms[:, orders[:, :-1]].cumsum(dim=-1).movedim(0, -1))
        rows = self.terms.T.clone()  # (n, k + k * width)
        read = self._read
        if self.layers is not None and rows.shape[1] == self.width + 1:
            rows[:, 1:] += rows[:, :1] * self.layers[0][1]
            read = self._read_shifted
        rows = rows.to(self.x.dtype)
        return torch.stack([_running(rows, order[:-1], read) for order in orders])

    def _read_shifted(self, sums: Tensor) -> Tensor:
        """Logits (m, c) from sums (m, 1 + width) that hold the bias: relu(a / w) = relu(a) / w."""
        assert self.layers is not None  # noqa: S101  # narrows the type for mypy
        (first, shift), *others = [(m.to(sums.dtype), b.to(sums.dtype)) for m, b in self.layers[1:]]
        inner = F.linear(sums[:, 1:].relu(), first) / sums[:, :1] + shift
        for matrix, bias in others:
            inner = F.linear(inner.relu_(), matrix, bias)
        return inner.double()

    def _read(self, sums: Tensor) -> Tensor:
        """Logits (..., c) from sums (..., k + k * width) over the instances of each coalition."""
        k = self.terms.shape[0] // (self.width + 1)
        means = sums[..., k:].unflatten(-1, (k, self.width)) / sums[..., :k].unsqueeze(-1)
        if self.head is not None:
            logits: Tensor = means.sum(dim=-2) + self.head[1]
            return logits
        if self.layers is None:
            out: Tensor = self.model.head(means.to(self.x.dtype)).double()
            return out
        inner: Tensor = means.sum(dim=-2) + self.layers[0][1].to(means.dtype)
        for matrix, bias in self.layers[1:]:
            inner = F.linear(inner.relu_(), matrix.to(means.dtype), bias.to(means.dtype))
        return inner.double()


def _running(rows: Tensor, order: Tensor, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Logits (m, c) of the growing sums over an order, in blocks that a processor's cache holds."""
    before, found = torch.zeros_like(rows[:1]), []
    for block in order.split(BLOCK):
        part = rows[block]
        part[:1] += before
        sums = part.cumsum(dim=0)
        found.append(read(sums))
        before = sums[-1:]
    return torch.cat(found)


class MaxCoalitions(Coalitions):
    """The running maximum of each feature."""

    def __init__(self, network: Network, x: Tensor, model: MaxPool) -> None:
        super().__init__(network, x)
        self.model = model
        self.h = model.embed(x)[0]  # (n, e)

    def _logits(self, masks: Tensor) -> Tensor:
        parts = []
        for batch in self.network.batches(len(masks), self.n):
            held = self.h.masked_fill(~masks[batch].unsqueeze(-1), float("-inf"))
            parts.append(self.model.head(held.amax(dim=1)))
        return torch.cat(parts).double()

    def toggled(self, held: Tensor, rows: Tensor) -> Tensor:
        """As for any model: only who holds a feature's maximum changes it by leaving."""
        if int(held.sum()) < 2:
            return super().toggled(held, rows)
        top, owner = self.h.masked_fill(~held.unsqueeze(1), float("-inf")).topk(2, dim=0)  # (2, e)
        left = torch.where(owner[0] == rows.unsqueeze(1), top[1], top[0])
        tops = torch.where(held[rows].unsqueeze(1), left, torch.maximum(top[0], self.h[rows]))
        return self.model.head(tops).double()

    def _prefixes(self, orders: Tensor) -> Tensor:
        tops = (self.h[order[:-1]].cummax(dim=0).values for order in orders)
        return torch.stack([self.model.head(top) for top in tops]).double()


def coalitions_of(network: Network, x: Tensor) -> Coalitions:
    """The quickest exact way for the model, by how it says it pools."""
    model = network.model
    if model is not None and model.pooling == "softmax":
        pooled = PooledCoalitions(network, x, cast(PooledMIL, model))
        return pooled if pooled.safe else RunCoalitions(network, x)
    if model is not None and model.pooling == "max":
        return MaxCoalitions(network, x, cast(MaxPool, model))
    return RunCoalitions(network, x)


def affine_head(model: PooledMIL, zero: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weights (k, e, c) and constants (c,) of a head without activations; None for any other head.

    `zero` (1, k, e) is what the head takes.
    """
    z = zero.requires_grad_(True)
    with torch.enable_grad(), _Chain() as seen:
        logits = model.head(z)[0]
    if not set(seen.names) <= LINEAR:
        return None
    with torch.enable_grad():
        rows = [torch.autograd.grad(out, z, retain_graph=True)[0][0] for out in logits.unbind()]
    return torch.stack(rows, dim=-1).double(), logits.detach().double()


def relu_layers(model: PooledMIL, zero: Tensor) -> Layers | None:
    """The weights of a head that is a chain of linear and ReLU layers; None for any other.

    `zero` (1, k, e) is what the head takes.
    """
    with _Chain() as seen:
        model.head(zero)
    steps = [name for name in seen.names if name in ("linear", "relu")]
    chained = steps == ["linear", *["relu", "linear"] * (len(steps) // 2)]
    if not chained or not set(seen.names) <= LINEAR | {"relu"}:
        return None
    probe = torch.randn(8, *zero.shape[1:], generator=torch.Generator().manual_seed(0)).to(zero)
    out = probe.flatten(1).double()
    for i, (matrix, bias) in enumerate(seen.layers):
        out = F.linear(F.relu(out) if i else out, matrix, bias)
    same = torch.allclose(out, model.head(probe).double(), rtol=1e-3, atol=1e-4)
    return seen.layers if same else None


class _Chain(TorchFunctionMode):
    """Notes operations in their order, and the weights of linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.layers: Layers = []

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(func.__name__)
        if func.__name__ == "linear":
            _, matrix, *bias = args
            constant = bias[0] if bias and bias[0] is not None else matrix.new_zeros(len(matrix))
            self.layers.append((matrix.detach().double(), constant.detach().double()))
        return func(*args, **(kwargs or {}))
