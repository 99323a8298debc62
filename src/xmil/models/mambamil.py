"""MambaMIL: selective scans over the instances, then attention pooling.

Yang et al., "MambaMIL: Enhancing Long Sequence Modeling with Sequence Reordering in Computational
Pathology", MICCAI 2024, arXiv:2403.06800; with the scans and position codes of the xMIL authors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.core.errors import InputError, bad_parameter, check_choice, check_count
from xmil.models.base import MODELS, MILModel, linear_relu_stack, run_by_length
from xmil.nn.attention import AttentionScores
from xmil.nn.scan import Mamba, Order

SCANS = {"simple": 1, "bidirectional": 2, "cross": 4}  # number of branches
TABLE = 1024  # learned positions along each axis
COLUMN = 1_000_000  # above any coordinate, to sort by columns, then rows


@MODELS.register("mambamil")
class MambaMIL(MILModel):
    """Linear + ReLU, position code, Mamba layers with a residual, norm, attention pooling, classifier.

    `scan`: in the order of the bag ("simple"), also backwards ("bidirectional"), also by columns of the
    slide and back ("cross"). `positions`: "none", "sinusoidal" or "learned" codes of positions on a grid of
    `grid` level-0 pixels, added to the instances. Cross scans and position codes need coordinates.
    `residual`: around each "layer", or one around the "block" of all. `undo="published"` reorders the fourth
    branch of a cross scan like the authors' code, which is correct only on a full grid.
    """

    no_attention = None

    def __init__(
        self,
        in_dim: int,
        n_classes: int,
        *,
        dim: int = 512,
        attention_dim: int = 128,
        n_layers: int = 1,
        scan: str = "simple",
        positions: str = "none",
        grid: int = 256,
        residual: str = "block",
        undo: str = "exact",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(in_dim, n_classes)
        check_choice("scan", scan, SCANS, owner="mambamil")
        check_choice("positions", positions, ("none", "sinusoidal", "learned"), owner="mambamil")
        check_choice("residual", residual, ("block", "layer"), owner="mambamil")
        check_choice("undo", undo, ("exact", "published"), owner="mambamil")
        if positions == "sinusoidal" and (dim % 4 or dim < 8):
            raise bad_parameter("dim", "mambamil with sinusoidal positions", "a multiple of 4 from 8", dim)
        check_count("grid", grid, owner="mambamil")
        self.dim, self.scan, self.positions, self.grid = dim, scan, positions, grid
        self.residual, self.undo = residual, undo
        self.needs_coords = scan == "cross" or positions != "none"
        self.instance = linear_relu_stack([in_dim, dim])
        self.feature_dropout = nn.Dropout(dropout)
        learned = positions == "learned"
        self.columns = nn.Parameter(torch.randn(TABLE, dim)) if learned else None
        self.rows = nn.Parameter(torch.randn(TABLE, dim)) if learned else None
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(dim), "mamba": Mamba(dim, n_branches=SCANS[scan])})
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.attention = AttentionScores(dim, attention_dim, gated=False)
        self.classifier = nn.Linear(dim, n_classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.feature_dropout(self.instance(x))

    def aggregate(self, h: Tensor, mask: Tensor | None = None, *, coords: Tensor | None = None) -> Tensor:
        """Outputs (b, c) from embedded instances (b, n, e) and coordinates (b, n, 2) in level-0 pixels."""
        if mask is not None:
            return run_by_length(self.aggregate, h, mask, coords=coords)
        mixed = self._mix(h, coords)
        weights = F.softmax(self.attention(mixed), dim=1)  # (b, n, 1)
        return self.classifier((weights.transpose(1, 2) @ mixed).squeeze(1))

    def attention_weights(self, h: Tensor, *, coords: Tensor | None = None) -> Tensor:
        """The weights (b, n, 1) of the instances after the scans."""
        return F.softmax(self.attention(self._mix(h, coords)), dim=1)

    def _mix(self, h: Tensor, coords: Tensor | None) -> Tensor:
        """Mix each instance with those before it, by the scans."""
        if self.needs_coords and coords is None:
            what = f"{self.scan} scan" if self.scan == "cross" else f"{self.positions} positions"
            raise InputError(
                f"mambamil with {what} needs coordinates: explain a Bag with coords, or call "
                "model(x, coords=...) with level-0 pixels (b, n, 2)."
            )
        if coords is not None and self.positions != "none":
            h = h + self._code(coords, h)
        orders = self._orders(h, coords)
        start = h
        for layer in self.layers:
            out = layer["mamba"](layer["norm"](h), orders)  # type: ignore[index]
            h = h + out if self.residual == "layer" else out
        return self.norm(h + start if self.residual == "block" else h)

    def _code(self, coords: Tensor, like: Tensor) -> Tensor:
        """The position code (b, n, d) of each instance on the grid."""
        places = coords.div(self.grid, rounding_mode="floor")
        if self.columns is None or self.rows is None:
            quarter = self.dim // 4
            powers = torch.arange(quarter, device=like.device, dtype=like.dtype) / (quarter - 1)
            angles = places.to(like.dtype).unsqueeze(-1) * 10_000.0**-powers  # (b, n, 2, d / 4)
            return torch.stack([angles.sin(), angles.cos()], dim=-2).flatten(-3)
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= TABLE:
            raise InputError(
                f"Positions {low} to {high} on a grid of {self.grid} pixels exceed the {TABLE} learned ones; "
                "create the model with a larger grid."
            )
        places = places.long()
        return self.columns[places[..., 0]] + self.rows[places[..., 1]]

    def _orders(self, h: Tensor, coords: Tensor | None) -> list[Order]:
        """The order in which each branch scans the instances, and the order that undoes it."""
        if self.scan == "simple":
            return [None]
        n = h.shape[1]
        backwards = torch.arange(n - 1, -1, -1, device=h.device).expand(len(h), -1)
        if self.scan == "bidirectional":
            return [None, (backwards, backwards)]
        assert coords is not None  # noqa: S101  # `_mix` checked it
        columns = (coords[..., 0] * COLUMN + coords[..., 1]).argsort(dim=1, stable=True)
        places = columns.argsort(dim=1)
        flipped = n - 1 - columns  # column by column of the flipped sequence
        back = flipped.argsort(dim=1) if self.undo == "exact" else n - 1 - places
        return [None, (backwards, backwards), (columns, places), (flipped, back)]
