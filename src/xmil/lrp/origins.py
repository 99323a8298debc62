"""Values of the bag that left torch: what comes back from outside may be made of them.

No mode sees NumPy or Python arithmetic. Once numbers computed from the input have left, a constant is the
model's own only if the module holds it, an operation of this pass made it, or the code spells it out.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Origins:
    """Tells the constants of a module from those that may have been computed outside torch."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.left = False  # whether values that depend on the input were taken out of torch

    @cached_property
    def _held(self) -> set[int]:
        module = self._module()
        if module is None:
            return set()
        tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
        for part in module.modules():
            tensors += [value for value in vars(part).values() if isinstance(value, Tensor)]
        return {storage_of(tensor) for tensor in tensors}

    def holds(self, tensor: Tensor) -> bool:
        """Whether the module has this tensor, or one that it is a view of."""
        return storage_of(tensor) in self._held

    def is_foreign(self, number: Any) -> bool:
        """Whether a number may have been computed from the bag; whole ones are sizes and counts."""
        if not self.left or not isinstance(number, float | np.floating):
            return False
        value = float(number)
        return math.isfinite(value) and not value.is_integer() and not _spelled_out(value)


def storage_of(tensor: Tensor) -> int:
    """What a tensor and its views have in common."""
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


def _spelled_out(number: float) -> bool:
    """Whether the running code has this number as a literal, or a running module as an attribute."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        held = vars(owner).values() if isinstance(owner, nn.Module) else ()
        if any(type(one) is float and one == number for one in (*frame.f_code.co_consts, *held)):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
