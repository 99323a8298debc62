"""Why a foreign module could not be called: found out by trying, not read from the words of its errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, UnsupportedError, XmilError
from xmil.methods.calling import COMPANIONS, LackingError, Way
from xmil.methods.companions import MissingCompanionError
from xmil.methods.reading import UnreadableError

if TYPE_CHECKING:
    from xmil.methods.network import Network

MOST_WIDTHS, MOST_INSTANCES = 6, 256  # how far it is tried what a module would take


@dataclass(frozen=True)
class Failure:
    """A way of calling, and what it raised."""

    way: Way
    error: Exception

    def __str__(self) -> str:
        return f"{self.way.text} raised {first_line(self.error)}"


def first_line(error: Exception) -> str:
    """An error in one line.

    >>> first_line(KeyError("a"))
    "KeyError: 'a'"
    """
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def call_fault(network: Network, x: Tensor, failures: Sequence[Failure]) -> XmilError:
    """The error for a module that no way of calling fits: companions, output, width, instances, in turn."""
    for failure in failures:
        lacking = isinstance(failure.error, LackingError) and str(failure.error.args[0])
        if lacking in COMPANIONS and (error := network.companions.lacking([str(lacking)], network.name)):
            return error
    ways = [failure.way for failure in failures]
    return (
        _first(failures, MissingCompanionError)
        or _first(failures, UnreadableError)
        or _wrong_width(network, x, ways)
        or _too_few(network, x, ways)
        or _first(failures, XmilError)
        or _any_fault(network, x, failures)
    )


def _first(failures: Sequence[Failure], kind: type[XmilError]) -> XmilError | None:
    return next((f.error for f in failures if isinstance(f.error, kind)), None)


def _any_fault(network: Network, x: Tensor, failures: Sequence[Failure]) -> XmilError:
    said = "; ".join(str(failure) for failure in failures[:2])
    way = (
        "" if network.by_user else "; pass forward=lambda net, x: ... that calls it and returns logits (1, c)"
    )
    return InputError(f"{network.name} could not take a bag of shape {tuple(x.shape)}: {said}{way}.")


def _wrong_width(network: Network, x: Tensor, ways: Sequence[Way]) -> XmilError | None:
    """Whether the module runs on features of another width."""
    for width in _widths(network.module, x.shape[2]):
        other = torch.zeros(*x.shape[:2], width, dtype=x.dtype, device=x.device)
        if any(_runs(partial(network.tried, way, other)) for way in ways):
            return InputError(
                f"{network.name} takes features of width {width}, but {network.companions.name} has width "
                f"{x.shape[2]}; use the features of the encoder the model was trained on."
            )
    return None


def _widths(module: nn.Module, but: int) -> Iterator[int]:
    """Widths that layers of the module take, first ones first."""
    found: dict[int, None] = {}
    for part in module.modules():
        shape = getattr(part, "normalized_shape", (getattr(part, "in_features", None),))
        width = shape[-1] if isinstance(shape, tuple) and shape else None
        if isinstance(width, int) and width != but:
            found.setdefault(width)
    return iter(list(found)[:MOST_WIDTHS])


def _too_few(network: Network, x: Tensor, ways: Sequence[Way]) -> XmilError | None:
    """Whether the module runs on the same instances, repeated."""
    n = x.shape[1]
    for way in ways:
        if way.names:  # repeated companions would not be those of any bag
            continue

        def runs(k: int, way: Way = way) -> bool:
            repeated = x[:, torch.arange(k, device=x.device) % n]
            return _runs(partial(network.tried, way, repeated))

        if n < MOST_INSTANCES and runs(MOST_INSTANCES):
            least = smallest(runs, n, MOST_INSTANCES)
            return InputError(
                f"{network.name} needs at least {least} instances, but {network.companions.name} has {n}."
            )
    return None


def sub_bag_fault(network: Network, m: int, error: Exception) -> XmilError:
    """The error for a module that runs on the whole bag, but not on a bag of m of its instances."""
    whole = network.whole
    n = m + 1 if whole is None else whole.shape[1]

    def runs(k: int) -> bool:
        rows = torch.arange(k, device=None if whole is None else whole.device)
        return whole is not None and _runs(lambda: network.logits(whole[:, :k], rows.unsqueeze(0)))

    if m < n - 1 and runs(n - 1):
        least = smallest(runs, m, n - 1)
        return UnsupportedError(
            f"{network.name} needs at least {least} instances, and here it was to run on {m}; use what keeps "
            "the bag whole: the methods lrp, ig and gxi, and mode='mask' in flip."
        )
    return InputError(
        f"{network.name} runs on all {n} instances of the bag, but not on {m} of them ({first_line(error)}): "
        "what it has for each instance must travel with them: name it in forward's signature, such as "
        "forward=lambda net, x, *, coords: net(x, coords)."
    )


def smallest(runs: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest number above `low` that runs, given that `high` does.

    >>> smallest(lambda k: k >= 8, 1, 256)
    8
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def _runs(call: Callable[[], object]) -> bool:
    try:
        call()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever a user's module raises
        return False
    return True
