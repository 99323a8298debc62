"""A model built from a checkpoint's settings may not be larger than the weights that are to fill it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from xmil.core.errors import CheckpointError

_WIDER = 4  # weights stored in 8 or 16 bits become float32
_SLACK = 1 << 20


@contextmanager
def no_larger_than(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop the building as soon as its parameters outgrow the stored ones; they are not filled by then."""
    room = _SLACK + _WIDER * sum(value.numel() * value.element_size() for value in state.values())
    most, here = 64 + 4 * len(state), threading.get_ident()
    made = [0, 0]

    def count(_module: Any, _name: str, parameter: Tensor | None) -> None:
        if threading.get_ident() != here or parameter is None:
            return
        made[0] += parameter.numel() * parameter.element_size()
        made[1] += 1
        if made[0] > room or made[1] > most:
            raise CheckpointError("its settings ask for a model larger than the stored weights fill.")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
