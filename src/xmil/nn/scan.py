"""The selective scan of Mamba: a linear recurrence whose coefficients depend on the sequence.

Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, arXiv:2312.00752.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t        y_t = C_t h_t + D x_t

with s states for each of the e channels of the sequence. Coefficients are computed a chunk at a time and the
recurrence runs in place, so that memory grows with n e and not with n e s; the backward pass stores only the
states between chunks and recomputes the others. Without gradients a layer processes a long sequence in parts,
each of which passes its last state on to the next.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

CHUNK_ELEMENTS = 1 << 20  # numbers in one temporary of a chunk (4 MB in float32)
SHORT, SMALL = 256, 1 << 22  # up to so many steps and states, use plain operations
PART_ELEMENTS = 1 << 20  # numbers of the sequence (b, n, e) in one part


@dataclass
class Carry:
    """Passed between parts of a sequence: the state (b, s, e) forwards, its adjoint backwards."""

    state: Tensor
    adjoint: Tensor | None = None


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, carry: Carry | None = None
) -> Tensor:
    """y (b, n, e) of x and dt (b, n, e), A (e, s), B and C (b, n, s), D (e,).

    With a `carry`, scan a part of a sequence, without gradients: start from its state and update it.

    >>> one = torch.ones(1, 3, 1)
    >>> selective_scan(one, one, torch.zeros(1, 1), one, one, torch.zeros(1)).flatten()
    tensor([1., 2., 3.])
    """
    arguments = (x, dt, A, B, C, D)
    if has_torch_function(arguments):  # one operation to function modes, such as LRP
        return handle_torch_function(selective_scan, arguments, *arguments, carry)
    if carry is not None:
        out, states = _states(_Steps.of(x, dt, A, B, C), carry.state)
        carry.state = states[-1]
        return out.transpose(0, 1) + D * x
    # torch.func transforms need plain operations
    is_mapped = any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in arguments)
    if is_mapped or (x.shape[1] <= SHORT and x.numel() * A.shape[1] <= SMALL):
        return _plain(*arguments)
    return _Scan.apply(*arguments)  # type: ignore[no-untyped-call]


def scan_adjoint(
    gradient: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, carry: Carry | None = None
) -> Tensor:
    """The gradient to x of a scan with constant coefficients, given that to y (b, n, e): one scan backwards.

    l_t = C_t g_t + exp(dt_{t+1} A) l_{t+1} and dt_t (B_t . l_t) + D g_t. With a `carry`, for a part of a
    sequence: start from its adjoint and update it.
    """
    g, steps, b, c = (_time_first(value) for value in (gradient, dt, B, C))
    out = torch.empty_like(g)
    A = A.mT.contiguous()
    last = None if carry is None else carry.adjoint
    last = g.new_zeros(len(g[0]), *A.shape) if last is None else last
    for chunk in reversed(list(_chunks(g, len(A)))):
        decay = (steps[chunk].unsqueeze(-2) * A).exp_()
        adjoint = _outer(g[chunk], c[chunk])
        last = _run_back(adjoint, decay, last)
        out[chunk] = steps[chunk] * _inner(adjoint, b[chunk])
    if carry is not None:
        carry.adjoint = last
    return (out + D * g).transpose(0, 1)


def _plain(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    decay = (dt.unsqueeze(-2) * A.mT).exp().unbind(1)  # n of (b, s, e)
    inputs = _outer(dt * x, B).unbind(1)
    states = [torch.zeros_like(inputs[0])]
    for a, u in zip(decay, inputs, strict=True):
        states.append(a * states[-1] + u)
    return _inner(torch.stack(states[1:], dim=1), C) + D * x


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        x, dt, A, B, C, D = inputs
        steps = _Steps.of(x, dt, A, B, C)
        out, states = _states(steps, x.new_zeros(len(x), *steps.A.shape))
        ctx.save_for_backward(*inputs, torch.stack(states[:-1]))
        return out.transpose(0, 1) + D * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, D, starts = ctx.saved_tensors
        g = _time_first(gradients[0])
        gx, gdt, gA, gB, gC = _gradients(g, _Steps.of(x, dt, A, B, C), starts)
        gx = gx + D * g
        gD = (g * _time_first(x)).sum(dim=(0, 1))
        return gx.transpose(0, 1), gdt.transpose(0, 1), gA.mT, gB.transpose(0, 1), gC.transpose(0, 1), gD


@dataclass(frozen=True)
class _Steps:
    """The inputs of a scan, time first: x and dt (n, b, e), B and C (n, b, s), A (s, e)."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    @classmethod
    def of(cls, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> _Steps:
        return cls(
            _time_first(x), _time_first(dt), A.detach().mT.contiguous(), _time_first(B), _time_first(C)
        )

    def coefficients(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """exp(dt_t A) and dt_t B_t x_t of a chunk, (t, b, s, e)."""
        dt = self.dt[chunk]
        return (dt.unsqueeze(-2) * self.A).exp_(), _outer(dt * self.x[chunk], self.B[chunk])


def _states(steps: _Steps, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """C_t h_t (n, b, e), and the states (b, s, e) before each chunk and after the last one."""
    out, states = torch.empty_like(steps.x), [state]
    for chunk in _chunks(out, len(steps.A)):
        decay, inputs = steps.coefficients(chunk)
        states.append(_run(inputs, decay, states[-1]))
        out[chunk] = _inner(inputs, steps.C[chunk])
    return out, states


def _gradients(g: Tensor, steps: _Steps, starts: Tensor) -> tuple[Tensor, ...]:
    """Gradients to x (without D), dt, A, B and C."""
    x, dt, A, B, C = steps.x, steps.dt, steps.A, steps.B, steps.C
    gx, gdt, gA, gB, gC = (torch.zeros_like(value) for value in (x, dt, A, B, C))
    carry = g.new_zeros(len(g[0]), *A.shape)
    for chunk, start in reversed(list(zip(_chunks(x, len(A)), starts, strict=True))):
        decay, states = steps.coefficients(chunk)
        _run(states, decay, start)
        gC[chunk] = (states @ g[chunk].unsqueeze(-1)).squeeze(-1)
        adjoint = _outer(g[chunk], C[chunk])
        carry = _run_back(adjoint, decay, carry)
        gu = _inner(adjoint, B[chunk])  # to dt_t x_t
        gB[chunk] = (adjoint @ (dt[chunk] * x[chunk]).unsqueeze(-1)).squeeze(-1)
        exponent = decay.mul_(adjoint)  # to dt_t A
        exponent[1:].mul_(states[:-1])
        exponent[0].mul_(start)
        gx[chunk] = dt[chunk] * gu
        gdt[chunk] = (exponent * A).sum(dim=-2).addcmul_(x[chunk], gu)
        gA += (exponent * dt[chunk].unsqueeze(-2)).sum(dim=(0, 1))
    return gx, gdt, gA, gB, gC


def _run(inputs: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """Run the recurrence in place: inputs (t, b, s, e) become states. Returns a copy of the last one."""
    for u, a in zip(inputs.unbind(0), decay.unbind(0), strict=True):
        state = u.addcmul_(a, state)
    return state.clone()


def _run_back(inputs: Tensor, decay: Tensor, carry: Tensor) -> Tensor:
    """Run the recurrence backwards in place; `carry` comes from the later chunk, already decayed."""
    for u, a in zip(reversed(inputs.unbind(0)), reversed(decay.unbind(0)), strict=True):
        carry = u.add_(carry) * a
    return carry


def _outer(u: Tensor, v: Tensor) -> Tensor:
    """(..., e) and (..., s) to (..., s, e)."""
    return u.unsqueeze(-2) * v.unsqueeze(-1)


def _inner(states: Tensor, v: Tensor) -> Tensor:
    """(..., s, e) and (..., s) to (..., e)."""
    return (v.unsqueeze(-2) @ states).squeeze(-2)


def _time_first(value: Tensor) -> Tensor:
    return value.detach().transpose(0, 1).contiguous()


def _chunks(x: Tensor, n_states: int) -> Iterator[slice]:
    """Slices of the n steps of x (n, b, e) whose states fit one temporary."""
    step = max(1, min(len(x), CHUNK_ELEMENTS // max(1, x[0].numel() * n_states)))
    return (slice(start, min(start + step, len(x))) for start in range(0, len(x), step))


STEP_RANGE, STEP_FLOOR = (1e-3, 1e-1), 1e-4  # the first steps dt, drawn from a logarithmic range
Order = tuple[Tensor, Tensor] | None  # rows (b, n) to scan, rows that undo it; None: in order


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
        low, high = (math.log(edge) for edge in STEP_RANGE)
        steps = (low + torch.rand(width) * (high - low)).exp().clamp(min=STEP_FLOOR)
        self.dt_proj.bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives the steps

    def forward(self, x: Tensor, carry: Carry | None = None) -> Tensor:
        """(b, n, e) to (b, n, e); with a carry, a part that starts with the rows the kernel looks back on."""
        conv = self.conv
        if carry is None:
            convolved = conv(x.transpose(1, 2))[..., : x.shape[1]]
        else:
            convolved = F.conv1d(x.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups)
        x = F.silu(convolved.transpose(1, 2))
        dt, B, C = self.x_proj(x).split([self.rank, self.n_states, self.n_states], dim=-1)
        A = -torch.exp(self.A_log)
        return selective_scan(x, F.softplus(self.dt_proj(dt)), A, B, C, self.D, carry)


class Mamba(nn.Module):
    """Project to signal and gate; the branches scan the signal, and SiLU of the gate scales the result."""

    def __init__(
        self, dim: int, *, n_branches: int = 1, n_states: int = 16, kernel: int = 4, expand: int = 2
    ) -> None:
        super().__init__()
        width, rank = expand * dim, math.ceil(dim / 16)
        self.n_states, self.before = n_states, kernel - 1  # rows that the convolution looks back on
        self.in_proj = nn.Linear(dim, 2 * width, bias=False)
        self.branches = nn.ModuleList(
            Branch(width, rank=rank, n_states=n_states, kernel=kernel) for _ in range(n_branches)
        )
        self.out_proj = nn.Linear(width, dim, bias=False)

    def forward(self, h: Tensor, orders: Sequence[Order]) -> Tensor:
        """(b, n, d) to (b, n, d); an order for each branch."""
        return self.out_proj(gated_scans(h, self, orders))

    def scan_whole(self, h: Tensor, orders: Sequence[Order]) -> Tensor:
        """The sum of the gated scans of all branches (b, n, e)."""
        x, z = self.in_proj(h).chunk(2, dim=-1)
        gate = F.silu(z)
        parts = []
        for branch, order in zip(self.branches, orders, strict=True):
            if order is None:
                parts.append(branch(x) * gate)
            else:
                rows, undo = order
                parts.append(_rows(branch(_rows(x, rows)) * _rows(gate, rows), undo))
        return reduce(operator.add, parts)

    def scan_part(self, rows: Tensor, branch: nn.Module, carry: Carry) -> Tensor:
        """The gated scan of one branch over a part (b, before + m, d) of its sequence: (b, m, e)."""
        x, z = self.in_proj(rows).chunk(2, dim=-1)
        gate = F.silu(z[:, self.before :])
        return branch(x, carry) * gate

    def scan_parts(self, h: Tensor, orders: Sequence[Order]) -> tuple[Tensor, list[list[Tensor]]]:
        """Like `scan_whole`, one part at a time; also returns the states before each part, per branch."""
        out = h.new_zeros(*h.shape[:2], self.out_proj.in_features)
        states = []
        for branch, order in zip(self.branches, orders, strict=True):
            carry = Carry(h.new_zeros(len(h), self.n_states, out.shape[2]))
            starts = []
            for part in self.parts(h, order):
                starts.append(carry.state)
                add_rows(out, part.places, self.scan_part(part.rows(h), branch, carry))
            states.append(starts)
        return out, states

    def parts(self, h: Tensor, order: Order) -> list[Part]:
        """The parts of a sequence (b, n, d) in the order of a branch."""
        step = self.part_length(h)
        rows, places = (None, None) if order is None else (order[0], order[1].argsort(dim=1))
        return [
            Part(start, min(start + step, h.shape[1]), self.before, rows, places)
            for start in range(0, h.shape[1], step)
        ]

    def part_length(self, h: Tensor) -> int:
        """The number of steps in one part of sequences (b, n, d)."""
        return max(SHORT, PART_ELEMENTS // (len(h) * self.out_proj.in_features))

    def takes_parts(self, h: Tensor) -> bool:
        """Whether sequences (b, n, d) are long, and no hooks watch the inner layers."""
        inner = (part for part in self.modules() if part is not self)
        return h.shape[1] > self.part_length(h) and not any(
            part._forward_hooks or part._forward_pre_hooks for part in inner
        )


def gated_scans(h: Tensor, layer: Mamba, orders: Sequence[Order]) -> Tensor:
    """The sum of the gated scans of a layer (b, n, e); a long sequence without gradients goes in parts."""
    if has_torch_function((h,)):
        return handle_torch_function(gated_scans, (h,), h, layer, orders)
    needs_grad = h.requires_grad or any(parameter.requires_grad for parameter in layer.parameters())
    is_mapped = torch._C._functorch.is_functorch_wrapped_tensor(h)
    if (torch.is_grad_enabled() and needs_grad) or is_mapped or not layer.takes_parts(h):
        return layer.scan_whole(h, orders)
    return layer.scan_parts(h, orders)[0]


@dataclass(frozen=True)
class Part:
    """Steps of a sequence in the order of a branch: the rows they read, and the rows of their results."""

    start: int
    stop: int
    before: int  # rows before the first step that it reads too
    order: Tensor | None  # the row (b, n) that each step reads; None: in order
    target: Tensor | None  # the row (b, n) of each step's result

    @property
    def places(self) -> slice | Tensor:
        """The rows of its results."""
        return slice(self.start, self.stop) if self.target is None else self.target[:, self.start : self.stop]

    @property
    def sources(self) -> slice | Tensor:
        """The rows it reads."""
        first = max(0, self.start - self.before)
        return slice(first, self.stop) if self.order is None else self.order[:, first : self.stop]

    @property
    def missing(self) -> int:
        """The number of rows before it that lie outside the sequence."""
        return max(0, self.before - self.start)

    def rows(self, h: Tensor) -> Tensor:
        """The rows (b, before + m, d) that it reads; zeros for missing ones."""
        return F.pad(take_rows(h, self.sources), (0, 0, self.missing, 0))


def take_rows(x: Tensor, rows: slice | Tensor) -> Tensor:
    """Rows (b, m), or a slice of them, of each sequence (b, n, e)."""
    return x[:, rows] if isinstance(rows, slice) else _rows(x, rows)


def add_rows(x: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    """Add values (b, m, e) to these rows of each sequence, in place."""
    if isinstance(rows, slice):
        x[:, rows] += values
    else:
        x.scatter_add_(1, rows.unsqueeze(-1).expand_as(values), values)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (b, n) of each sequence (b, n, e)."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
