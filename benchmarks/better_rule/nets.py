"""Small nets after the field's architectures, of our own writing: what a rule has to hold on.

Each is registered as a model, so that the evidence benchmark trains it like its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.models import MODELS, MILModel


class Attention(nn.Module):
    """Multi-head attention of queries over keys, in plain products."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (q, k, v))
        weights = F.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1)
        out: Tensor = self.out((weights @ v).transpose(-3, -2).flatten(-2))
        return out


class Block(nn.Module):
    """Attention and an MLP, each with a residual; norms before or behind."""

    def __init__(self, dim: int, *, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.attention, self.norm1, self.norm2 = Attention(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            y = self.norm1(x)
            x = x + self.attention(y, y)
            out: Tensor = x + self.mlp(self.norm2(x))
        else:
            x = self.norm1(x + self.attention(x, x))
            out = self.norm2(x + self.mlp(x))
        return out


class Pool(nn.Module):
    """Attention pooling, gated or not: (..., n, d) to (..., branches, d)."""

    def __init__(self, dim: int, branches: int = 1, *, gated: bool = False) -> None:
        super().__init__()
        self.v, self.w = nn.Linear(dim, dim), nn.Linear(dim, branches)
        self.u = nn.Linear(dim, dim) if gated else None

    def forward(self, h: Tensor) -> Tensor:
        a = torch.tanh(self.v(h))
        a = a if self.u is None else a * torch.sigmoid(self.u(h))
        pooled: Tensor = F.softmax(self.w(a), dim=-2).transpose(-1, -2) @ h
        return pooled


class SmallNet(MILModel):
    """Instances through a linear layer and an activation, then whatever the net does with them."""

    activation: type[nn.Module] = nn.ReLU

    def __init__(self, in_dim: int, n_classes: int, *, dim: int = 32) -> None:
        super().__init__(in_dim, n_classes)
        self.project = nn.Sequential(nn.Linear(in_dim, dim), self.activation())
        self.build(dim)
        self.head = nn.Linear(dim, n_classes)

    def build(self, dim: int) -> None:
        """The parts of the net."""
        raise NotImplementedError

    def pooled(self, h: Tensor) -> Tensor:
        """Embedded instances (b, n, d) to one vector (b, d)."""
        raise NotImplementedError

    def embed(self, x: Tensor) -> Tensor:
        h: Tensor = self.project(x)
        return h

    def aggregate(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise NotImplementedError("The small nets take whole bags.")
        out: Tensor = self.head(self.pooled(h))
        return out


class _ViT(SmallNet):
    activation = nn.GELU
    pre = True

    def build(self, dim: int) -> None:
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.blocks = nn.Sequential(*(Block(dim, pre=self.pre) for _ in range(2)))
        self.norm = nn.LayerNorm(dim) if self.pre else nn.Identity()

    def pooled(self, h: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1)
        out: Tensor = self.norm(self.blocks(tokens))[:, 0]
        return out


@MODELS.register("vit_pre")
class ViTPre(_ViT):
    """Class token, two blocks, norms first (as STAMP's)."""


@MODELS.register("vit_post")
class ViTPost(_ViT):
    """Class token, two blocks, norms last (as torch's encoder)."""

    pre = False


@MODELS.register("transformer_pool")
class TransformerPool(SmallNet):
    """One block, then attention pooling (as TransformerABMIL)."""

    def build(self, dim: int) -> None:
        self.block, self.pool = Block(dim, pre=True), Pool(dim)

    def pooled(self, h: Tensor) -> Tensor:
        out: Tensor = self.pool(self.block(h))[:, 0]
        return out


@MODELS.register("set_transformer")
class SetTransformer(SmallNet):
    """Instances through inducing points, then a learned query reads them."""

    def build(self, dim: int) -> None:
        self.points = nn.Parameter(0.1 * torch.randn(1, 8, dim))
        self.seed = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.into, self.back, self.read = Attention(dim), Attention(dim), Attention(dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))

    def pooled(self, h: Tensor) -> Tensor:
        points = self.points.expand(h.shape[0], -1, -1)
        points = self.norm1(points + self.into(points, h))
        h = self.norm2(h + self.back(h, points))
        seed = self.seed.expand(h.shape[0], -1, -1)
        out: Tensor = self.norm3(seed + self.read(seed, h))[:, 0]
        return out


@MODELS.register("low_rank")
class LowRank(SmallNet):
    """Latent vectors exchange with the instances behind gates, then a learned query pools (as ILRA)."""

    def build(self, dim: int) -> None:
        self.latent = nn.Parameter(0.1 * torch.randn(1, 4, dim))
        self.query = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.down, self.up, self.read = Attention(dim), Attention(dim), Attention(dim)
        self.gate1, self.gate2 = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def pooled(self, h: Tensor) -> Tensor:
        latent = self.latent.expand(h.shape[0], -1, -1)
        latent = latent + self.down(latent, h) * F.silu(self.gate1(latent))
        h = self.norm1(h + self.up(h, self.norm2(latent)) * F.silu(self.gate2(h)))
        out: Tensor = self.read(self.query.expand(h.shape[0], -1, -1), h)[:, 0]
        return out


@MODELS.register("branches")
class Branches(SmallNet):
    """Five branches of gated attention, averaged (as ACMIL)."""

    def build(self, dim: int) -> None:
        self.pool = Pool(dim, 5, gated=True)

    def pooled(self, h: Tensor) -> Tensor:
        out: Tensor = self.pool(h).mean(dim=1)
        return out


@MODELS.register("regions")
class Regions(SmallNet):
    """Attention within regions of neighbours in the file, then between their means, then pooling (as RRT)."""

    size = 6

    def build(self, dim: int) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.local, self.across, self.pool = Attention(dim), Attention(dim), Pool(dim)

    def pooled(self, h: Tensor) -> Tensor:
        n = h.shape[1]
        y = F.pad(self.norm1(h), (0, 0, 0, -n % self.size)).unflatten(1, (-1, self.size))
        h = h + self.local(y, y).flatten(1, 2)[:, :n]
        y = self.norm2(h)
        means = F.pad(y, (0, 0, 0, -n % self.size)).unflatten(1, (-1, self.size)).mean(dim=2)
        h = h + self.across(y, means)
        out: Tensor = self.pool(h)[:, 0]
        return out


@MODELS.register("graph")
class Graph(SmallNet):
    """Two rounds of messages from the most similar instances, then attention pooling (as PatchGCN)."""

    neighbours = 4

    def build(self, dim: int) -> None:
        self.own = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.others = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.pool = Pool(dim)

    def pooled(self, h: Tensor) -> Tensor:
        unit = F.normalize(h.detach(), dim=-1)
        similar = unit @ unit.transpose(-1, -2)
        k = min(self.neighbours + 1, h.shape[1])
        near = (similar >= similar.topk(k, dim=-1).values[..., -1:]).to(h.dtype)
        near = near / near.sum(dim=-1, keepdim=True)
        for own, others in zip(self.own, self.others, strict=True):
            h = h + F.relu(own(h) + others(near @ h))
        out: Tensor = self.pool(h)[:, 0]
        return out


@MODELS.register("two_tiers")
class TwoTiers(SmallNet):
    """Pseudo-bags are pooled one by one, then their means (as DTFD)."""

    groups = 5

    def build(self, dim: int) -> None:
        self.first, self.second = Pool(dim, gated=True), Pool(dim, gated=True)

    def pooled(self, h: Tensor) -> Tensor:
        parts = [self.first(h[:, g :: self.groups]) for g in range(min(self.groups, h.shape[1]))]
        out: Tensor = self.second(torch.cat(parts, dim=1))[:, 0]
        return out


NETS = (
    "vit_pre", "vit_post", "transformer_pool", "set_transformer", "low_rank", "branches", "regions", "graph",
    "two_tiers",
)  # fmt: skip
