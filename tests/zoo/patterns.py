"""Small networks around the operations that the field's models are made of: own code, random weights.

Each takes one bag (1, n, `WIDTH`) and returns logits (1, 2), or more beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DIM = 8, 6


class Pattern(nn.Module):
    """An embedding, something in between, a classifier."""

    def __init__(self, **layers: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Sequential(nn.Linear(WIDTH, DIM), nn.ReLU())
        self.score = nn.Linear(DIM, 1)
        self.value = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 2)
        for name, widths in layers.items():
            setattr(self, name, nn.Linear(*widths))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.pool(self.embed(x)))

    def pool(self, h: Tensor) -> Tensor:
        """(1, n, DIM) to (1, DIM)."""
        raise NotImplementedError


class Gated(Pattern):
    """Attention by tanh times sigmoid."""

    def __init__(self) -> None:
        super().__init__(u=(DIM, DIM))

    def pool(self, h: Tensor) -> Tensor:
        scores = self.score(torch.tanh(self.value(h)) * torch.sigmoid(self.u(h)))
        return (F.softmax(scores, dim=1) * h).sum(dim=1)


class LossInForward(Gated):
    """A loss and statistics computed on the way, as CLAM and DTFD have them."""

    def forward(self, x: Tensor) -> Any:
        h = self.embed(x)
        logits = self.head(self.pool(h))
        picked = h[0].topk(2, dim=0).values
        loss = F.cross_entropy(self.head(picked), torch.tensor([0, 1])) + torch.logdet(
            torch.cov(h[0].T) + torch.eye(DIM)
        )
        return {"logits": logits, "loss": loss + torch.special.entr(torch.softmax(logits, -1)).sum()}


class TopK(Pattern):
    """The mean of the highest scored instances."""

    def pool(self, h: Tensor) -> Tensor:
        chosen = self.score(h)[0, :, 0].topk(2).indices
        return h[:, chosen].mean(dim=1)


class Hierarchical(Pattern):
    """Attention within regions, then attention over them."""

    def pool(self, h: Tensor) -> Tensor:
        regions = [self._attend(part) for part in h.split(3, dim=1)]
        return self._attend(torch.stack(regions, dim=1))

    def _attend(self, h: Tensor) -> Tensor:
        return (F.softmax(self.score(h), dim=1).mT @ h)[:, 0]


class GraphSoftmax(Pattern):
    """Attention over the edges of a graph, normalised by groups as graph libraries do it."""

    def pool(self, h: Tensor) -> Tensor:
        h, n = h[0], h.shape[1]
        source = torch.arange(n).repeat(2)
        target = torch.cat([torch.arange(n), torch.arange(n).roll(1)])
        logits = F.leaky_relu(self.score(h[source] + h[target]), 0.2)
        largest = logits.new_full((n, 1), -torch.inf).scatter_reduce(
            0, target[:, None], logits.detach(), "amax"
        )
        weights = (logits - largest[target]).exp()
        weights = weights / (torch.zeros(n, 1, dtype=h.dtype).index_add(0, target, weights) + 1e-16)[target]
        mixed = torch.zeros_like(h).index_add_(0, target, weights * self.value(h)[source])
        return F.relu(h + mixed).mean(dim=0, keepdim=True)


class NearestNeighbours(Pattern):
    """A graph from distances between embedded instances, normalised by degrees, as a sparse product."""

    def pool(self, h: Tensor) -> Tensor:
        near = torch.cdist(h[0], h[0]).topk(3, largest=False).indices
        adjacency = (
            torch.zeros(h.shape[1], h.shape[1], dtype=h.dtype).scatter_(1, near, 1.0).fill_diagonal_(1.0)
        )
        degrees = adjacency.sum(dim=1).rsqrt()
        adjacency = (degrees[:, None] * adjacency * degrees).to_sparse()
        return F.relu(torch.sparse.mm(adjacency, self.value(h[0]))).mean(dim=0, keepdim=True)


class Clusters(Pattern):
    """Soft assignment to centres by distance, hard by a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__(centres=(DIM, 3))

    def pool(self, h: Tensor) -> Tensor:
        soft = F.softmax(-torch.cdist(h[0], self.centres.weight), dim=-1)
        hard = F.one_hot(soft.argmax(dim=-1), 3).to(h.dtype)
        assigned = hard - soft.detach() + soft
        return (assigned.T @ h[0]).mean(dim=0, keepdim=True)


class Gumbel(Pattern):
    """Hyperedges drawn by a Gumbel softmax: random, seeded here."""

    def __init__(self) -> None:
        super().__init__(edges=(DIM, 3))

    def pool(self, h: Tensor) -> Tensor:
        drawn = F.gumbel_softmax(self.edges(h), tau=0.5, dim=1)
        return F.relu(self.value(drawn.mT @ h)).mean(dim=1)


class Reparametrised(Pattern):
    """A mean and a spread, and draws from between: variational autoencoders and smooth attention."""

    def __init__(self) -> None:
        super().__init__(spread=(DIM, DIM))

    def pool(self, h: Tensor) -> Tensor:
        drawn = self.value(h) + torch.exp(0.5 * self.spread(h)) * torch.randn_like(h)
        return (F.softmax(self.score(drawn), dim=1) * drawn).sum(dim=1)


class Solved(Pattern):
    """Scores smoothed over neighbours by solving (I + a L) s = f."""

    def pool(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        eye = torch.eye(n, dtype=h.dtype)
        laplacian = 2 * eye - eye.roll(1, 0) - eye.roll(-1, 0)
        smooth = torch.linalg.solve(eye + 0.5 * laplacian, h)
        return (F.softmax(self.score(smooth), dim=1) * smooth).sum(dim=1)


class LongConvolution(Pattern):
    """A state space layer as a convolution by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__(decay=(DIM, 1))

    def pool(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        kernel = torch.exp(-self.decay.weight.abs().T * torch.arange(n))
        spectrum = torch.fft.rfft(h.mT, n=2 * n) * torch.fft.rfft(kernel, n=2 * n)
        y = torch.fft.irfft(spectrum, n=2 * n)[..., :n].mT
        return F.gelu(y + h).amax(dim=1)


class Scan(Pattern):
    """A selective state space model, written as a loop."""

    def __init__(self) -> None:
        super().__init__(step=(DIM, DIM), inout=(DIM, 4), gate=(DIM, DIM))

    def pool(self, h: Tensor) -> Tensor:
        dt, (b, c) = F.softplus(self.step(h)), self.inout(h).split(2, dim=-1)
        a = -torch.exp(torch.linspace(0, 1, 2, dtype=h.dtype))
        state, out = h.new_zeros(1, DIM, 2), []
        for t in range(h.shape[1]):
            state = (
                torch.exp(dt[:, t, :, None] * a) * state
                + dt[:, t, :, None] * b[:, t, None] * h[:, t, :, None]
            )
            out.append((state * c[:, t, None]).sum(dim=-1))
        y = torch.stack(out, dim=1) * F.silu(self.gate(h))
        return y.mean(dim=1)


class Dilated(Pattern):
    """Attention over segments of two lengths, mixed by their normalisers."""

    def pool(self, h: Tensor) -> Tensor:
        outs, norms = [], []
        for length in (3, 6):
            parts = [self._attend(part) for part in h.split(length, dim=1)]
            outs.append(torch.cat([part[0] for part in parts], dim=1))
            norms.append(torch.cat([part[1] for part in parts], dim=1))
        total = torch.logsumexp(torch.stack(norms), dim=0)
        mixed = sum((norm - total).exp().unsqueeze(-1) * out for out, norm in zip(outs, norms, strict=True))
        return mixed.mean(dim=1)

    def _attend(self, h: Tensor) -> tuple[Tensor, Tensor]:
        similarity = h @ h.mT / DIM**0.5
        return F.softmax(similarity, dim=-1) @ self.value(h), torch.logsumexp(similarity, dim=-1)


class Alibi(Pattern):
    """Distances taken off the attention weights after the softmax, so that some are negative."""

    def pool(self, h: Tensor) -> Tensor:
        at = torch.arange(h.shape[1], dtype=h.dtype)
        weights = F.softmax(h @ h.mT / DIM**0.5, dim=-1) - 0.01 * torch.cdist(at[:, None], at[:, None])
        return F.gelu(weights @ self.value(h)).mean(dim=1)


class Doubled(torch.autograd.Function):
    """A linear function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class CustomFunction(Pattern):
    """A custom autograd function between embedding and head."""

    def pool(self, h: Tensor) -> Tensor:
        return F.relu(self.value(Doubled.apply(h))).mean(dim=1)


class Probabilities(Gated):
    """Returns what a softmax makes of its logits."""

    def forward(self, x: Tensor) -> Any:
        return F.softmax(super().forward(x), dim=-1)


class SoftmaxValues(Pattern):
    """A softmax over features taken as a value: nothing else reaches the head."""

    def pool(self, h: Tensor) -> Tensor:
        return F.softmax(self.value(h).mean(dim=1), dim=-1)


def logits_of(net: nn.Module, x: Tensor) -> Tensor:
    """The logits, whatever else the module returns."""
    out = net(x)
    return out["logits"] if isinstance(out, dict) else out


PATTERNS: Mapping[str, Callable[[], nn.Module]] = {
    "gated attention": Gated,
    "loss in forward": LossInForward,
    "top-k": TopK,
    "hierarchical": Hierarchical,
    "graph softmax": GraphSoftmax,
    "nearest neighbours": NearestNeighbours,
    "clusters": Clusters,
    "Gumbel softmax": Gumbel,
    "reparametrised": Reparametrised,
    "linear solve": Solved,
    "Fourier convolution": LongConvolution,
    "selective scan": Scan,
    "dilated attention": Dilated,
    "ALiBi": Alibi,
}
RANDOM = ("Gumbel softmax", "reparametrised")
ORDERED = ("hierarchical", "graph softmax", "linear solve", "Fourier convolution", "selective scan",
           "dilated attention", "ALiBi", *RANDOM)  # fmt: skip
