"""Marks on tensors: a constant that depends on the input, a gate, a weight.

A mark is an attribute of the tensor with the number of the pass that set it: it keeps nothing alive, and
other passes ignore it.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from traceback import walk_stack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def storage_of(tensor: Tensor) -> int:
    """The address of the storage that a tensor shares with its views."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else -1


def numbers_in(values: Any) -> Iterator[float | np.floating[Any]]:
    """The floats in nested tuples, lists and dictionaries."""
    if isinstance(values, float | np.floating):
        yield values
    elif isinstance(values, dict):
        yield from numbers_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from numbers_in(value)


def _is_literal(number: float) -> bool:
    """Whether the running code has this number as a literal, or a running module as an attribute."""
    for frame, _ in walk_stack(sys._getframe(1)):
        owner = frame.f_locals.get("self")
        attributes = vars(owner).values() if isinstance(owner, nn.Module) else ()
        if any(type(value) is float and value == number for value in (*frame.f_code.co_consts, *attributes)):
            return True
    return False


CUT = "cut"  # not live, but computed from the input: a softmax, a detached tensor, a normaliser
GATE = "gate"  # live, from a sigmoid: a constant in products if the composite says so
WEIGHT = "weight"  # live, from an exponential: a constant in products, like a softmax
OF_MODEL = "model"  # not live, computed in this pass from the model's own constants

CONSTANT, DEPENDENT, LIVE = 0, 1, 2
_ATTRIBUTE = "_xmil_mark"
_FORM = "_xmil_form"
EVERY_PASS = -1  # the number of a mark that holds in every pass
_numbers = itertools.count()


class Marks:
    """The marks of one forward pass; they also separate the module's constants from those made outside torch.

    No mode sees NumPy or Python arithmetic. Once numbers computed from the input have left torch, a constant
    is the model's own only if the module has it, an operation of this pass computed it, or it is a literal.
    """

    def __init__(self, module: nn.Module) -> None:
        self._pass = next(_numbers)
        self._module = weakref.ref(module)
        self.has_left_torch = False  # whether the pass took values that depend on the input out of torch
        self._numbers: set[float] = set()  # read from dependent tensors, for example by `item`

    @cached_property
    def _storages(self) -> set[int]:
        """The storages of all tensors of the module."""
        module = self._module()
        if module is None:
            return set()
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        for part in module.modules():
            tensors += [value for value in vars(part).values() if isinstance(value, Tensor)]
        return {storage_of(tensor) for tensor in tensors}

    def _is_foreign(self, number: Any) -> bool:
        """Whether a number may come from the bag; whole numbers are sizes and counts."""
        if not self.has_left_torch or not isinstance(number, float | np.floating):
            return False
        value = float(number)
        return math.isfinite(value) and not value.is_integer() and not _is_literal(value)

    def put(self, tensor: Tensor, mark: str) -> None:
        """Mark a tensor."""
        setattr(tensor, _ATTRIBUTE, (self._pass, mark))

    def of(self, value: Any) -> str | None:
        """The mark of a tensor, if it has one."""
        number, mark = getattr(value, _ATTRIBUTE, (None, None))
        return mark if number in (self._pass, EVERY_PASS) else None

    def carry(self, sources: Iterable[Tensor], out: Any) -> None:
        """Mark a result as a gate or weight if all its live sources are."""
        marks = {self.of(source) for source in sources}
        if marks and marks <= {GATE, WEIGHT}:
            for tensor in tensors_in(out):
                if tensor.requires_grad:
                    self.put(tensor, GATE if GATE in marks else WEIGHT)

    def follow(self, source: Any, out: Tensor) -> None:
        """Copy the mark of a tensor, or its absence, to another."""
        mark, form = self.of(source), self.form_of(source)
        if mark is not None or self.of(out) is not None:
            setattr(out, _ATTRIBUTE, (self._pass, mark))
        if form is not None or self.form_of(out) is not None:
            self.put_form(out, form)

    def put_form(self, tensor: Tensor, form: Any) -> None:
        """Store the form of a live tensor (see `Form`)."""
        setattr(tensor, _FORM, (self._pass, form))

    def form_of(self, value: Any) -> Any:
        """The form of a tensor, if it has one."""
        number, form = getattr(value, _FORM, (None, None))
        return form if number == self._pass else None

    def note_constants(self, out: Any, args: Any) -> None:
        """Mark constants computed from constants, unless numbers from outside torch went in."""
        if self.has_left_torch and any(map(self._is_foreign, numbers_in(args))):
            return
        sources = {id(tensor) for tensor in tensors_in(args)}
        for tensor in tensors_in(out):
            if id(tensor) not in sources and not tensor.requires_grad and self.of(tensor) is None:
                self.put(tensor, OF_MODEL)

    def write(self, value: Any, target: Tensor, *, was_live: bool) -> None:
        """Mark a tensor after a write: it is a gate if all of it comes from gates."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return
        marks = {self.of(value), self.of(target) if was_live else self.of(value)}
        gate = GATE if GATE in marks else WEIGHT
        setattr(target, _ATTRIBUTE, (self._pass, gate if marks <= {GATE, WEIGHT} else None))

    def put_number(self, value: Any) -> None:
        """Store numbers read from a tensor; whole numbers are sizes and counts."""
        if isinstance(value, list):
            for number in value:
                self.put_number(number)
        elif isinstance(value, float) and not value.is_integer():
            self._numbers.add(value)
            self.has_left_torch = True

    def depends(self, value: Any) -> bool:
        """Whether a constant, a tensor or a number, was computed from the input."""
        if isinstance(value, Tensor):
            return self._is_cut(value)
        return (isinstance(value, float) and value in self._numbers) or self._is_foreign(value)

    def _is_cut(self, tensor: Tensor) -> bool:
        """Whether a constant was computed from the input or has an unknown origin."""
        mark = self.of(tensor)
        if mark is not None or not self.has_left_torch:
            return mark == CUT
        return storage_of(tensor) not in self._storages

    def survey(self, values: Any) -> int:
        """The highest of LIVE, DEPENDENT and CONSTANT among nested values."""
        if isinstance(values, Tensor):
            if values.requires_grad:
                return LIVE
            return DEPENDENT if self._is_cut(values) else CONSTANT
        if isinstance(values, np.ndarray):
            return DEPENDENT if self.has_left_torch and values.dtype.kind in "fc" else CONSTANT
        if isinstance(values, float):
            return DEPENDENT if values in self._numbers else CONSTANT
        if isinstance(values, str | bytes | int) or values is None:
            return CONSTANT
        if isinstance(values, dict):
            values = list(values.values())
        most = CONSTANT
        if isinstance(values, list | tuple) or hasattr(values, "__iter__"):
            for value in values:
                most = max(most, self.survey(value))
                if most == LIVE:
                    break
        return most


def part_of_bag(tensor: Tensor) -> Tensor:
    """Mark a tensor as part of the bag, not a constant of the model, and return it."""
    setattr(tensor, _ATTRIBUTE, (EVERY_PASS, CUT))
    return tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in a result: one, or tuples and lists of them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


# Sigmoids written by hand, recognised by their parts: 1 + tanh(u), 1 + erf(u), e^u / (1 + e^u). GELU as
# 0.5 z (1 + tanh(...)) is z times a gate, like SiLU: 1 + tanh(u) = 2 sigmoid(2u).

AMPLITUDES = {
    **dict.fromkeys(("tanh", "erf", "softsign"), 1.0),
    **dict.fromkeys(("atan", "arctan"), math.pi / 2),
}
ROUNDING = 1e-6  # of an amplitude
_SAME = frozenset({"neg", "negative", "view", "reshape", "squeeze", "unsqueeze", "to", "clone", "contiguous"})


@dataclass(frozen=True, eq=False)
class Form:
    """A live tensor within +-amplitude, or the exponential of `source`, plus one if `plus_one`."""

    amplitude: float = 0.0
    source: Tensor | None = None
    version: int = 0
    plus_one: bool = False


def recognise(marks: Marks, name: str, args: Sequence[Any], out: Tensor) -> None:
    """Store the form of a result, from the operation and the forms of its arguments."""
    if name in AMPLITUDES:
        marks.put_form(out, Form(amplitude=AMPLITUDES[name]))
    elif name == "exp":
        marks.put_form(out, Form(source=args[0], version=args[0]._version))
    elif isinstance(form := marks.form_of(args[0] if args else None), Form):
        if name in _SAME and form.amplitude:
            marks.put_form(out, form)
        elif len(args) != 2 or not isinstance(args[1], int | float):
            return
        elif name in ("mul", "div") and form.amplitude and args[1]:
            size = form.amplitude * abs(args[1] if name == "mul" else 1 / args[1])
            marks.put_form(out, replace(form, amplitude=size))
        elif name in ("add", "sub", "rsub") and form.amplitude:
            if abs(args[1]) >= form.amplitude * (1 - ROUNDING):  # the sum never changes sign
                marks.put(out, GATE)
        elif name == "add" and args[1] == 1 and not form.plus_one:
            marks.put_form(out, replace(form, plus_one=True))


def exponent_of(marks: Marks, numerator: Any, denominator: Any) -> Tensor | None:
    """The u of c / (1 + e^u) and of e^u / (1 + e^u); None for other fractions."""
    below, above = marks.form_of(denominator), marks.form_of(numerator)
    if below is None or not below.plus_one or below.source._version != below.version:
        return None
    same = above is not None and not above.plus_one and above.source is below.source
    source: Tensor = below.source
    return source if isinstance(numerator, int | float) or same else None
