"""What the engine knows of a tensor beyond its values: that a constant depends on the input, or is a gate.

A mark is an attribute of the tensor, with the number of the engine that set it: it keeps nothing alive, and
means nothing to another pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from xmil.lrp.origins import Origins, numbers_in

CUT = "cut"  # not live, but computed from the input: a softmax, a detached tensor, a normaliser
GATE = "gate"  # live, from a sigmoid: a constant in products, if the composite says so
WEIGHT = "weight"  # live, from an exponential: a constant in products, as a softmax is
SEEN = "seen"  # not live, and made in this pass from the model's own constants

CONSTANT, DEPENDENT, LIVE = 0, 1, 2
_ATTRIBUTE = "_xmil_mark"
_FORM = "_xmil_form"
EVERY = -1  # the number of a mark that holds in every pass
_numbers = itertools.count()


class Marks:
    """The marks of one forward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._pass = next(_numbers)
        self.origins = Origins(module)
        self._numbers: set[float] = set()  # taken out of dependent tensors, as `item` does

    def put(self, tensor: Tensor, mark: str) -> None:
        """Mark a tensor."""
        setattr(tensor, _ATTRIBUTE, (self._pass, mark))

    def of(self, value: Any) -> str | None:
        """The mark of a tensor, if it has one."""
        number, mark = getattr(value, _ATTRIBUTE, (None, None))
        return mark if number in (self._pass, EVERY) else None

    def carry(self, sources: Iterable[Tensor], out: Any) -> None:
        """Mark a result as the gate that all of its live sources are."""
        found = {self.of(source) for source in sources}
        if found and found <= {GATE, WEIGHT}:
            for tensor in tensors_in(out):
                if tensor.requires_grad:
                    self.put(tensor, GATE if GATE in found else WEIGHT)

    def follow(self, source: Any, out: Tensor) -> None:
        """Give a tensor the mark that another has, or none."""
        mark, form = self.of(source), self.form_of(source)
        if mark is not None or self.of(out) is not None:
            setattr(out, _ATTRIBUTE, (self._pass, mark))
        if form is not None or self.form_of(out) is not None:
            self.put_form(out, form)

    def put_form(self, tensor: Tensor, form: Any) -> None:
        """Remember what a live tensor is made of (see `xmil.lrp.forms`)."""
        setattr(tensor, _FORM, (self._pass, form))

    def form_of(self, value: Any) -> Any:
        """What a tensor is known to be made of."""
        number, form = getattr(value, _FORM, (None, None))
        return form if number == self._pass else None

    def saw(self, out: Any, args: Any) -> None:
        """Note constants that an operation made of constants, unless numbers from outside are in them."""
        if self.origins.left and any(map(self.origins.is_foreign, numbers_in(args))):
            return
        given = {id(tensor) for tensor in tensors_in(args)}
        for tensor in tensors_in(out):
            if id(tensor) not in given and not tensor.requires_grad and self.of(tensor) is None:
                self.put(tensor, SEEN)

    def write(self, value: Any, target: Tensor, *, was_live: bool) -> None:
        """Mark a tensor that was written into: it is a gate if all of it comes from gates."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return
        found = {self.of(value), self.of(target) if was_live else self.of(value)}
        gate = GATE if GATE in found else WEIGHT
        setattr(target, _ATTRIBUTE, (self._pass, gate if found <= {GATE, WEIGHT} else None))

    def put_number(self, value: Any) -> None:
        """Remember numbers that were read from a tensor; whole ones are sizes and counts."""
        if isinstance(value, list):
            for one in value:
                self.put_number(one)
        elif isinstance(value, float) and not value.is_integer():
            self._numbers.add(value)
            self.origins.left = True

    def depends(self, value: Any) -> bool:
        """Whether a constant, a tensor or a number, was computed from the input."""
        if isinstance(value, Tensor):
            return self._is_cut(value)
        return (isinstance(value, float) and value in self._numbers) or self.origins.is_foreign(value)

    def _is_cut(self, tensor: Tensor) -> bool:
        """Whether a constant was computed from the input, or comes from where nobody can tell."""
        mark = self.of(tensor)
        if mark is not None or not self.origins.left:
            return mark == CUT
        return not self.origins.holds(tensor)

    def survey(self, values: Any) -> int:
        """The most that any tensor in nested values is: LIVE, DEPENDENT or CONSTANT."""
        if isinstance(values, Tensor):
            if values.requires_grad:
                return LIVE
            return DEPENDENT if self._is_cut(values) else CONSTANT
        if isinstance(values, np.ndarray):
            return DEPENDENT if self.origins.left and values.dtype.kind in "fc" else CONSTANT
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
    """The tensor, marked as a part of the bag beside its features: no constant of the model."""
    setattr(tensor, _ATTRIBUTE, (EVERY, CUT))
    return tensor


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in a result: one, or tuples and lists of them."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
