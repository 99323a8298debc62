"""Sigmoids written by hand, told by their parts: 1 + tanh(u), 1 + erf(u), e^u / (1 + e^u).

GELU as 0.5 z (1 + tanh(...)) is z times a gate, as SiLU is: 1 + tanh(u) = 2 sigmoid(2u).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from xmil.lrp.marks import GATE, Marks

AMPLITUDES = {
    **dict.fromkeys(("tanh", "erf", "softsign"), 1.0),
    **dict.fromkeys(("atan", "arctan"), math.pi / 2),
}
ROUNDING = 1e-6  # of an amplitude
_SAME = frozenset({"neg", "negative", "view", "reshape", "squeeze", "unsqueeze", "to", "clone", "contiguous"})


@dataclass(frozen=True, eq=False)
class Form:
    """A live tensor that lies within +-amplitude, or the exponential of `source`, or one more than that."""

    amplitude: float = 0.0
    source: Tensor | None = None
    version: int = 0
    plus_one: bool = False


def recognise(marks: Marks, name: str, args: Sequence[Any], out: Tensor) -> None:
    """After an operation: what is known of its result, given what is known of its arguments."""
    if name in AMPLITUDES:
        marks.put_form(out, Form(amplitude=AMPLITUDES[name]))
    elif name == "exp":
        marks.put_form(out, Form(source=args[0], version=args[0]._version))
    elif isinstance(form := marks.form_of(args[0] if args else None), Form):
        if name in _SAME and form.amplitude:
            marks.put_form(out, form)
        elif len(args) == 2 and isinstance(args[1], int | float):
            _with_number(marks, name, form, float(args[1]), out)


def _with_number(marks: Marks, name: str, form: Form, number: float, out: Tensor) -> None:
    """A gate, where the number keeps a bounded tensor from changing its sign."""
    if name in ("mul", "div") and form.amplitude and number:
        size = form.amplitude * abs(number if name == "mul" else 1 / number)
        marks.put_form(out, replace(form, amplitude=size))
    elif name in ("add", "sub", "rsub") and form.amplitude:
        if abs(number) >= form.amplitude * (1 - ROUNDING):
            marks.put(out, GATE)
    elif name == "add" and number == 1 and not form.plus_one:
        marks.put_form(out, replace(form, plus_one=True))


def exponent_of(marks: Marks, numerator: Any, denominator: Any) -> Tensor | None:
    """The u of c / (1 + e^u) and of e^u / (1 + e^u); None for other fractions."""
    below, above = marks.form_of(denominator), marks.form_of(numerator)
    if below is None or not below.plus_one or below.source._version != below.version:
        return None
    same = above is not None and not above.plus_one and above.source is below.source
    source: Tensor = below.source
    return source if isinstance(numerator, int | float) or same else None
