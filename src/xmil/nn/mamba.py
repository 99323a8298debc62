"""A Mamba layer: projections around selective scans, each over the sequence in an order of its own.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, arXiv:2312.00752.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xmil.nn.scan import selective_scan

STEP_RANGE, STEP_FLOOR = (1e-3, 1e-1), 1e-4  # the first steps dt, drawn from a logarithmic range
Order = tuple[Tensor, Tensor] | None  # rows (b, n) to scan, rows that put the results back; None as they are


class Branch(nn.Module):
    """One scan: a depth-wise convolution over the last steps, SiLU, and the scan with its coefficients."""

    def __init__(self, width: int, *, rank: int, n_states: int, kernel: int) -> None:
        super().__init__()
        self.rank, self.n_states = rank, n_states
        self.conv = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.x_proj = nn.Linear(width, rank + 2 * n_states, bias=False)
        self.dt_proj = nn.Linear(rank, width)
        self.A_log = nn.Parameter(torch.arange(1.0, n_states + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        nn.init.uniform_(self.dt_proj.weight, -(rank**-0.5), rank**-0.5)
        self.dt_proj.bias.data.copy_(_first_steps(width))

    def forward(self, x: Tensor) -> Tensor:
        """(b, n, e) to (b, n, e)."""
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, B, C = self.x_proj(x).split([self.rank, self.n_states, self.n_states], dim=-1)
        A = -torch.exp(self.A_log)
        return selective_scan(x, F.softplus(self.dt_proj(dt)), A, B, C, self.D)


class Mamba(nn.Module):
    """Projected to signal and gate; the branches scan the signal, SiLU of the gate scales what they give."""

    def __init__(
        self, dim: int, *, n_branches: int = 1, n_states: int = 16, kernel: int = 4, expand: int = 2
    ) -> None:
        super().__init__()
        width, rank = expand * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.branches = nn.ModuleList(
            Branch(width, rank=rank, n_states=n_states, kernel=kernel) for _ in range(n_branches)
        )
        self.out_proj = nn.Linear(width, dim, bias=False)

    def forward(self, h: Tensor, orders: Sequence[Order]) -> Tensor:
        """(b, n, d) to (b, n, d); an order for each branch."""
        x, z = self.in_proj(h).chunk(2, dim=-1)
        gate = F.silu(z)
        parts = [self._branch(*pair, x, gate) for pair in zip(self.branches, orders, strict=True)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        out: Tensor = self.out_proj(total)
        return out

    def _branch(self, branch: nn.Module, order: Order, x: Tensor, gate: Tensor) -> Tensor:
        if order is None:
            plain: Tensor = branch(x) * gate
            return plain
        there, back = order
        return _rows(branch(_rows(x, there)) * _rows(gate, there), back)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (b, n) of each sequence (b, n, e)."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _first_steps(width: int) -> Tensor:
    """Biases whose softplus are steps drawn from the range."""
    low, high = (math.log(edge) for edge in STEP_RANGE)
    steps = (low + torch.rand(width) * (high - low)).exp().clamp(min=STEP_FLOOR)
    return steps + torch.log(-torch.expm1(-steps))
