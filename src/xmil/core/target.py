"""What is explained: a class, or a class against another."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xmil.core.errors import InputError, unknown_name
from xmil.core.parsing import small_number


@dataclass(frozen=True, eq=False)
class Target:
    """The explained class, optionally against another one; a bare target equals its class.

    `cls=None` stands for the class the model predicts; models with a single value (regression, risk) have
    class 0 only. `name` and `against_name` are filled in when the model knows its class names.

    >>> Target(1) == 1, str(Target(1, against=0)), str(Target(1, name="HPV+"))
    (True, '1-vs-0', 'HPV+')
    """

    cls: int | str | None = None
    against: int | str | None = None
    name: str | None = None
    against_name: str | None = None

    def __str__(self) -> str:
        first = "predicted" if self.cls is None else self.name or str(self.cls)
        second = None if self.against is None else self.against_name or str(self.against)
        return first if second is None else f"{first}-vs-{second}"

    def __index__(self) -> int:
        if not isinstance(self.cls, int):
            raise InputError(f"The target {self} has no class index yet; explain resolves it.")
        return self.cls

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Target):
            return (self.cls, self.against) == (other.cls, other.against)
        return self.against is None and self.cls == other

    def __hash__(self) -> int:
        return hash(self.cls) if self.against is None else hash((self.cls, self.against))

    @classmethod
    def of(cls, value: Any) -> Target:
        """A target from what users write: a class index, a class name, a Target, or None."""
        if isinstance(value, Target):
            return value
        if value is None or isinstance(value, str):
            return cls(value)
        return cls(_as_index(value))

    def resolve(self, *, n_classes: int, predicted: int, class_names: Sequence[str] | None = None) -> Target:
        """The target with class indices in range and names where the model knows them."""
        if class_names is not None and len(class_names) != n_classes:
            class_names = None
        first = predicted if self.cls is None else _find(self.cls, n_classes, class_names)
        second = None if self.against is None else _find(self.against, n_classes, class_names)
        if first == second:
            raise InputError(f"The target contrasts class {first} with itself; name two classes.")
        name = class_names[first] if class_names else None
        against_name = class_names[second] if class_names and second is not None else None
        return Target(first, second, name, against_name)


def _as_index(value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        message = f"A target must be a class index, a class name, a Target or None. Got {value!r} instead."
        raise InputError(message) from None


def _find(value: Any, n_classes: int, class_names: Sequence[str] | None) -> int:
    if isinstance(value, str):
        if class_names is not None and value in class_names:
            return list(class_names).index(value)
        number = small_number(value)
        if number is None:
            known = class_names or [str(i) for i in range(n_classes)]
            raise unknown_name("class", value[:80], known)
        value = number
    index = _as_index(value)
    if not 0 <= index < n_classes:
        raise InputError(f"The target class must be in the range [0, {n_classes}). Got {index} instead.")
    return index
