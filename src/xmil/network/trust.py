"""Try out a foreign module: trial calls decide how to call it, and find what is wrong with it.

Only passes over the bag decide, never the wording of an error or a name; if two interpretations are possible,
the user has to choose.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from xmil.core.errors import InputError, UnsupportedError, XmilError, bad_parameter, unknown_name
from xmil.core.task import TASKS
from xmil.network.calling import (
    COMPANIONS,
    FULL_MASKS,
    PLAIN,
    CallStyle,
    MissingCompanionError,
    MissingInputError,
    check_parameters,
    find_values_per_instance,
    fixed_value_error,
    list_call_styles,
    optional_companions,
    takes_mask,
    training_flag,
)
from xmil.network.reading import (
    AmbiguousError,
    ProbabilityWatch,
    UnreadableError,
    Watch,
    check_probabilities,
    find_hazards,
    find_logits,
    look_like_probabilities,
    to_probabilities,
)

if TYPE_CHECKING:
    from xmil.network.network import Network

logger = logging.getLogger(__name__)

ROUNDING = 1e-5  # of the logits: rounding on parallel devices may change this much between two passes
LOW_PRECISION = 1e-3  # of the logits: low precision, or another order of sums, may change this much
FEW_INSTANCES = 64  # to compare the two shapes of a bag
OTHER_SIZE = 61  # instances of a second bag, if there are many: not a usual width of a layer
MOST_WIDTHS, MOST_INSTANCES = 6, 256  # widths and instances to try for the reason of a failed call
IN_A_RUN = " (in a run, build a module whose forward does so)"  # follows advice to pass forward=
T = TypeVar("T")


@torch.inference_mode(False)
@torch.no_grad()
def run_trial(network: Network, x: Tensor, *, returns: str | None = None, average: int | None = None) -> None:
    """Decide how to call a foreign module and read its output, by trial calls with the full bag (1, n, d).

    Anything unusual goes into `network.params` and `network.warnings`, which explanations carry.
    """
    task = getattr(network.module, "task", None)
    if isinstance(task, str) and task not in TASKS:
        if get_close_matches(task.lower(), TASKS, n=1, cutoff=0.5):  # misspelt
            raise unknown_name(f"task of {network.name}", task, TASKS)
        network.trial_warnings += (
            f"{network.name}.task is {task!r}, not one of {', '.join(TASKS)}: taken as classification.",
        )
    x = x.clone() if x.is_inference() else x
    network.trial_bag = x
    n = x.shape[1]
    before = find_values_per_instance(network.forward, network.module, n)
    watch, logits = _find_call(network, x)
    if not bool(torch.isfinite(logits).all()):
        bag = network.companions.name
        raise UnsupportedError(f"The outputs of {network.name} are not finite for {bag}; check the model.")
    after = find_values_per_instance(network.forward, network.module, n)
    fixed = {name: value for name, value in after.items() if before.get(name) == value}
    if fixed and n > 1:  # no call replaces these rows, so they would not fit sub-bags
        used = _used_for_one_more(network, x)
        fixed = {name: value for name, value in fixed.items() if value[0] not in used}
    for name, (_, shape) in fixed.items() if n > 1 else ():
        owner = network.name if network.forward is None else "forward"
        network.sub_bag_refusal = network.sub_bag_refusal or fixed_value_error(name, shape, n, owner=owner)
    if logits.shape[1] == n > 1:  # logits, or a number per instance
        fewer = attempt(partial(network.logits, x[:, :-1], torch.arange(n - 1, device=x.device).unsqueeze(0)))
        if fewer is not None and fewer.shape[1] == n - 1:
            raise InputError(
                f"{network.name} returned a number for each patch, not logits of the bag; pass forward= "
                f"to pool them, such as forward=lambda net, x: net(x).mean(dim=1){IN_A_RUN}."
            )
    if network.changed_buffers:
        names = ", ".join(network.changed_buffers[:3])
        network.trial_warnings += (
            f"{network.name} is stateful: a pass changes its buffers ({names}). Every pass here starts from "
            "their current values, which stay as they are.",
        )
    network.changes_buffers = bool(network.changed_buffers)
    if network.forward is None and (flag := training_flag(network.module)) is not None:
        network.trial_warnings += (
            f"{network.name}.forward has {flag}=True by default, and is explained like that; to turn it off, "
            f"pass forward=lambda net, x: net(x, {flag}=False){IN_A_RUN}.",
        )
    _check_mask(network, x)
    _check_optional_companions(network, x)
    if watch.is_log_probability(logits):
        network.trial_warnings += (
            f"{network.name} returns log-probabilities (log_softmax), in which evidence for one class counts "
            "against the others; to explain the logits before it, pass forward=lambda net, x: ... that "
            f"returns them{IN_A_RUN}.",
        )
    _check_link(network, logits, watch, returns)
    _check_randomness(network, x, logits, average)


def _used_for_one_more(network: Network, x: Tensor) -> set[int]:
    """Find the identities of values that the module also uses for one more instance, so not one row each.

    Empty if the module does not run on that bag. Features of the bag itself do not count.
    """
    rows = torch.arange(x.shape[1] + 1, device=x.device) % x.shape[1]
    with seeded(0), _Uses(x) as uses:
        ran = attempt(lambda: [network.raw(x[:, rows], rows.unsqueeze(0))])
    return uses.identities if ran else set()


class _Uses(Watch):
    """Record the inputs of operations, except copies of a bag."""

    def __init__(self, bag: Tensor) -> None:
        super().__init__()
        self.bag, self.identities = bag, set[int]()

    def see(self, function: Any, args: Sequence[Any], options: dict[str, Any], out: Any) -> None:  # noqa: ARG002
        for value in (*args, *options.values()):
            is_bag = isinstance(value, Tensor) and value.shape[-2:] == self.bag.shape[-2:]
            if not (is_bag and torch.equal(value.reshape(-1, *self.bag.shape[1:])[:1], self.bag)):
                self.identities.add(id(value))


# How the module is called.


def _find_call(network: Network, x: Tensor) -> tuple[ProbabilityWatch, Tensor]:
    """Find the first style of calling that returns logits, and watch for probabilities."""
    styles = [network.call_style]
    if network.forward is None:
        check_parameters(network.module, network.companions.names)
        styles = list_call_styles(network.module, network.companions.names)
    failures: list[Failure] = []
    postponed: list[tuple[CallStyle, CallStyle | None]] = []  # styles that only run for bags of this size
    widths: set[int] = set()  # of their outputs
    tries = deque(zip(styles, [*styles[1:], None], strict=True))
    while tries or postponed:
        is_last = not tries  # no other style runs: the module may only take one size
        style, following = postponed.pop(0) if is_last else tries.popleft()
        network.call_style, watch, probe = style, ProbabilityWatch(), x.clone()
        other = None
        try:
            with watch:
                raw = _raw_with_hooks(network, probe)
            other = _raw_of_another_size(network, x)
            network.logits_path = find_logits(raw, x.shape[1], name=network.name, other=other)
            network.returns_hazards = find_hazards(raw) is not None
            with watch:
                logits = network.logits_path(raw)
            if other is None and following is not None and not is_last:
                postponed.append((style, following))
                widths.add(logits.shape[1])
                continue
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever a user's module raises
            if isinstance(error, AmbiguousError) and (other is not None or following is None or is_last):
                raise  # otherwise it only runs for this size, and another style may not be ambiguous
            failures.append((style, error))
            continue
        if widths - {logits.shape[1]} and not is_last:  # this style reads the bag differently
            continue
        if other is None and network.forward is None and x.shape[1] == x.shape[2] > 1:
            raise InputError(
                f"{network.companions.name} has as many patches as features ({x.shape[1]}), and "
                f"{network.name} only runs on bags of this size, so it may take features for patches. "
                "Choose: forward=lambda net, x: net(x.mT) if it expects (1, d, n), else forward=lambda net, "
                f"x: net(x){IN_A_RUN}."
            )
        network.writes_input = probe._version > 0
        if style.with_mask is not None:
            if not _find_mask(network, x):
                masked = UnreadableError(f"{network.name} masks the whole bag with {style.text}.")
                failures.append((style, masked))
                continue
            with watch:
                logits = network.logits_path(network.raw(x))
        elif style.batch and following is not None and not following.batch:
            _check_batch(network, x, following)
        _record_call(network, x)
        return watch, logits
    raise call_error(network, x, failures) from failures[0][1]


def _raw_of_another_size(network: Network, x: Tensor) -> Any:
    """Run the module on a few of the instances, or on one more; return None if it fails.

    A module may run on one size by chance: if n is the width of a layer, a wrong way to call it runs, and
    other values look like a number per instance.
    """
    n = x.shape[1]
    rows = torch.arange(OTHER_SIZE if n > FEW_INSTANCES else n + 1, device=x.device) % n
    with seeded(0):
        return attempt(lambda: network.raw(x[:, rows], rows.unsqueeze(0)))


def _raw_with_hooks(network: Network, x: Tensor) -> Any:
    """Run the module; if that fails, without the hooks that it registers on its tensors."""
    network.registers_hooks = False
    try:
        return network.raw(x)
    except RuntimeError:
        network.registers_hooks = True
        try:
            return network.raw(x)
        except Exception:
            network.registers_hooks = False
            raise


def _record_call(network: Network, x: Tensor) -> None:
    """Record how the module is called, unless as net(x); warn if the unit of coordinates matters."""
    style = network.call_style
    text = f"{style.text}{network.logits_path}"
    if text in (PLAIN.text, "forward(net, x)"):
        return
    network.params["call"] = text
    logger.info("%s is called as %s; pass forward= to call it differently.", network.name, text)
    if "coords" not in style.names or "coords" not in network.companions or network.forward is not None:
        return
    origin = torch.zeros(x.shape[1], 2, dtype=torch.long, device=x.device)
    twin = copy(network)
    twin.companions = network.companions.replaced({"coords": origin})  # all patches in one place
    logits, moved = _seeded_logits(network, x), _seeded_logits(twin, x)
    if logits is not None and moved is not None and relative_difference(logits, moved) > ROUNDING:
        top = int(network.companions.select("coords", network.rows(x), x).max())
        network.trial_warnings += (
            f"{network.name} gets level-0 coordinates, here up to {top}; if it was trained with "
            f"another unit, pass forward=lambda net, x, *, coords: ... that converts them{IN_A_RUN}.",
        )


def _check_batch(network: Network, x: Tensor, other: CallStyle) -> None:
    """Refuse a module that takes (1, n, d) and (n, d) and returns different outputs.

    A few instances are enough, and necessary: with (n, d), some modules compare all pairs of instances.
    """
    n = min(x.shape[1], FEW_INSTANCES)
    part, rows = x[:, :n], None if n == x.shape[1] else torch.arange(n, device=x.device).unsqueeze(0)
    twin = _with_style(network, other)
    with seeded(0):
        plain = attempt(lambda: find_logits(raw := twin.raw(part.clone(), rows), n, name=network.name)(raw))
    if n < 2 or plain is None:  # with one instance both are the same
        return
    batch = _seeded_logits(network, part, rows)
    if batch is None or not bool(torch.isfinite(batch).all()) or _differs_by_itself(network, part, rows):
        return  # later checks report this
    same = batch.shape != plain.shape or relative_difference(batch, plain) <= ROUNDING * 10
    is_width = any(n in parameter.shape for parameter in _tensors_of(network.module))
    if not same and not (is_width and _raw_of_another_size(twin, part) is None):
        raise InputError(
            f"{network.name} takes a bag as (1, n, d) and as (n, d), with different outputs; choose the one "
            "it was trained with: forward=lambda net, x: net(x), or forward=lambda net, x: net(x[0])"
            f"{IN_A_RUN}."
        )


def _check_mask(network: Network, x: Tensor) -> None:
    """Warn if a mask of the full bag changes the output; refuse if the mask also has no default.

    With a default, the module's author says that it works without a mask.
    """
    name, style = takes_mask(network.module), network.call_style
    if network.forward is not None or name is None or style.full_mask is None:
        return
    n = min(x.shape[1], FEW_INSTANCES)
    part, rows = x[:, :n], torch.arange(n, device=x.device).unsqueeze(0)
    without = _seeded_logits(network, part, rows)
    masked = [
        _seeded_logits(_with_style(network, style.full_mask(name, word)), part, rows) for word in FULL_MASKS
    ]
    outputs = [out for out in masked if out is not None and bool(torch.isfinite(out).all())]
    same = [out for out in outputs if out.shape == (without.shape if without is not None else None)]
    if without is None or not same or any(relative_difference(without, out) <= LOW_PRECISION for out in same):
        return
    size = min(float((without - out).abs().max()) for out in same)
    start = ", ".join(["lambda net, x", *(["*", *style.names] if style.names else [])])
    ways = f"forward={start}: {style.text}, or {style.full_mask(name, 'mask').text} with mask = "
    ways += "torch.zeros(x.shape[:2], dtype=torch.bool), or torch.ones if True keeps a patch" + IN_A_RUN
    text = f"The output of {network.name} differs between {name}=None and a full mask (by {size:.3g})"
    if style.passes_none:
        raise InputError(f"{text}; choose what it was trained with: {ways}.")
    network.trial_warnings += (f"{text}; it is explained without a mask. To choose: {ways}.",)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers and other tensors of a module."""
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (value for value in vars(part).values() if isinstance(value, Tensor))


def _find_mask(network: Network, x: Tensor) -> bool:
    """Find the mask that shows the full bag; return False if none shows any of it.

    A mask of a part of the bag must give the output of that part alone, which shows whether True keeps an
    instance or leaves it out. If that decides nothing and it matters, the user has to choose.
    """
    style = network.call_style
    assert style.with_mask is not None  # noqa: S101  # the caller checks it
    logits = {}
    for mask, make in FULL_MASKS.items():
        network.call_style = style.with_mask(make=make, word=mask)
        full, empty = _seeded_logits(network, x), _seeded_logits(network, torch.zeros_like(x))
        if full is None or empty is None or not bool(torch.isfinite(full).all()):
            continue
        if relative_difference(full, empty) > 0:
            logits[mask] = full
    if not logits:
        return False
    fitting = list(logits)
    if len(fitting) == 2 and relative_difference(logits["ones"], logits["zeros"]) > ROUNDING:
        fitting = [mask for mask in fitting if _mask_keeps(network, style.with_mask, x, mask)]
        if len(fitting) != 1:
            raise InputError(
                f"{network.name} takes a mask, and its output depends on whether True keeps a patch or "
                f"leaves it out, which trial calls cannot tell; pass forward=lambda net, x: {style.text} "
                f"with ones = torch.ones(x.shape[:2], dtype=torch.bool), or with zeros{IN_A_RUN}."
            )
    network.call_style = style.with_mask(make=FULL_MASKS[fitting[0]], word=fitting[0])
    return True


def _mask_keeps(network: Network, with_mask: Callable[..., CallStyle], x: Tensor, full: str) -> bool:
    """Whether masking half of the bag gives the same output as the part kept alone."""
    if x.shape[1] < 2:
        return False
    first = torch.arange(x.shape[1], device=x.device) < x.shape[1] // 2
    part = (first == (full == "ones")).nonzero().squeeze(1)
    network.call_style = with_mask(make=lambda bag: first.expand(bag.shape[:2]), word="half")
    masked = _seeded_logits(network, x)
    network.call_style = with_mask(make=FULL_MASKS[full], word=full)
    alone = _seeded_logits(network, x[:, part], part.unsqueeze(0))
    return masked is not None and alone is not None and relative_difference(alone, masked) <= LOW_PRECISION


# What the module needs and returns.


def _check_optional_companions(network: Network, x: Tensor) -> None:
    """Refuse optional companions that the bag has and the output depends on: the user has to choose."""
    names = optional_companions(network.module, network.companions.names)
    if network.forward is not None or not names or network.call_style.names:
        return
    batch = network.call_style is PLAIN
    values = {name: network.companions.select(to, network.rows(x), x) for name, to in names.items()}
    values = {name: value if batch else value[0] for name, value in values.items()}
    without = _seeded_logits(network, x)
    bag = x.clone() if batch else x[0].clone()
    with seeded(0):
        with_them = attempt(lambda: network.logits_path(network.module(bag, **values)))
    if without is None or with_them is None:  # the module does not run with the bag's companions
        return
    if with_them.shape != without.shape or relative_difference(with_them, without) > ROUNDING:
        name, to = next(iter(names.items()))
        raise InputError(
            f"The output of {network.name} depends on {name!r}, which is optional, and the bag has it; "
            f"choose: forward=lambda net, x, *, {to}: net(x, {name}={to}), or forward=lambda net, x: net(x)"
            f"{IN_A_RUN}."
        )


def _check_link(network: Network, output: Tensor, watch: ProbabilityWatch, returns: str | None) -> None:
    """Refuse undeclared probabilities; decide how to convert declared ones to logits."""
    task, name = network.task, network.name
    has_link = TASKS[task].link is not None
    if returns == "probability":
        if not has_link:
            raise bad_parameter("returns", f"explain for a {task} model", "'logit'", returns)
        if network.returns_hazards and task != "survival":
            raise InputError(
                f"{name} returned hazards and their survival function, not probabilities of classes; set the "
                f"module's attribute task = 'survival'."
            )
        check_probabilities(output, task, name)
        source = watch.source(output)
        network.link, network.params["returns"] = "log", returns
        if source is not None and source.numel() == output.numel():
            same = torch.allclose(to_probabilities(source.reshape(1, -1), task), output, atol=1e-6)
            network.link = "source" if same else "log"
    elif (
        returns is None
        and has_link
        and look_like_probabilities(output, is_computed=watch.is_probability(output))
    ):
        if network.returns_hazards and task != "survival":
            raise InputError(
                f"{name} returned hazards and their survival function; set the module's attributes task = "
                "'survival' and returns = 'probability'."
            )
        reason = "from a sigmoid or softmax" if watch.is_probability(output) else "adding up to 1"
        raise InputError(
            f"The outputs of {name} look like probabilities (within [0, 1], {reason}); pass "
            "returns='probability', or returns='logit' if they are logits, or set the module's attribute "
            "returns."
        )


# Whether two passes agree.


def _check_randomness(network: Network, x: Tensor, first: Tensor, average: int | None) -> None:
    """Compare a second pass with the first; if they differ, warn and use seeded draws from now on.

    If torch's fast path is the reason, and not randomness, only warn of that.
    """
    second = network.logits_path(network.raw(x))
    if not relative_difference(first, second) > ROUNDING:
        return
    size = float((first - second).abs().max())
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        plain = network.logits_path(network.raw(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    again = network.logits_path(network.raw(x))
    if relative_difference(first, plain) <= ROUNDING and relative_difference(second, again) <= ROUNDING:
        network.trial_warnings += (
            f"The output of {network.name} differs by {size:.3g} on torch's fast path, which plain "
            "predictions use: there masked rows become zeros. Methods that use gradients, such as lrp, "
            "explain the output without it; build nn.TransformerEncoder with enable_nested_tensor=False, or "
            "call torch.backends.mha.set_fastpath_enabled(False).",
        )
        return
    if (drift := _differs_by_itself(network, x)) is not None:
        raise UnsupportedError(
            f"{network.name} is stateful: two passes over this bag differ by {drift:.3g} in an output of "
            f"{float(first.abs().max()):.3g}, even from the same seed, for example because of a counter or "
            "its own generator. Make its output depend on the bag alone."
        )
    network.draws = network.params["average"] = average or 1
    meaning = (
        "these scores are for one draw with a fixed seed; average=K takes the mean output of K draws"
        if network.draws == 1
        else f"these scores are for the mean output of {network.draws} draws with fixed seeds"
    )
    network.trial_warnings += (
        f"{network.name} is random in eval mode: two passes over this bag differ by {size:.3g} in an output "
        f"of {float(first.abs().max()):.3g}; {meaning}.",
    )


def _differs_by_itself(network: Network, x: Tensor, rows: Tensor | None = None) -> float | None:
    """Measure how much two passes from one seed differ; None if only by rounding in low precision."""
    first, second = _seeded_logits(network, x, rows), _seeded_logits(network, x, rows)
    if first is None or second is None or not relative_difference(first, second) > LOW_PRECISION:
        return None
    return float((first - second).abs().max())


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest number in the first."""
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-3))


def _seeded_logits(network: Network, x: Tensor, rows: Tensor | None = None) -> Tensor | None:
    """Compute the logits of a bag from a fixed seed; None if the module cannot run on it."""
    with seeded(0):
        return attempt(lambda: network.logits(x, rows))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python, and restore them afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002  # users' modules draw from it
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)  # noqa: NPY002


# Why a call failed.


Failure = tuple[CallStyle, Exception]  # a style of calling, and what it raised


def attempt(compute: Callable[[], T]) -> T | None:
    """Call into a user's module; return None if it raises."""
    try:
        return compute()
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception:  # whatever a user's module raises
        return None


def first_line(error: Exception) -> str:
    """Write an error in one line.

    >>> first_line(KeyError("a"))
    "KeyError: 'a'"
    """
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")


def call_error(network: Network, x: Tensor, failures: Sequence[Failure]) -> XmilError:
    """Find the error for a module that no call style fits: companions, output, width, instances, in turn."""

    def first(kind: type[XmilError]) -> XmilError | None:
        return next((error for _, error in failures if isinstance(error, kind)), None)

    for _, failure in failures:
        name = failure.args[0] if isinstance(failure, MissingInputError) else None
        if name in COMPANIONS and (error := network.companions.missing_error([str(name)], network.name)):
            return error
    styles = [style for style, _ in failures]
    reasons = "; ".join(f"{style.text} raised {first_line(failure)}" for style, failure in failures[:2])
    advice = f"; pass forward=lambda net, x: ... that calls it and returns logits (1, c){IN_A_RUN}"
    optional = dict.fromkeys(optional_companions(network.module, list(COMPANIONS)).values())
    if lacking := network.companions.missing_error(optional, f"{network.name}.forward"):
        advice = f". {lacking}".removesuffix(".")
    advice = advice if network.forward is None else ""
    return (
        first(MissingCompanionError)
        or first(UnreadableError)
        or _width_error(network, x, styles)
        or _too_few_error(network, x, styles)
        or first(XmilError)
        or InputError(f"{network.name} could not take a bag of shape {tuple(x.shape)}: {reasons}{advice}.")
    )


def _width_error(network: Network, x: Tensor, styles: Sequence[CallStyle]) -> XmilError | None:
    """Make the error if the module runs on features of another width, found in its layers."""
    parts = network.module.modules()
    shapes = [getattr(part, "normalized_shape", (getattr(part, "in_features", None),)) for part in parts]
    widths = dict.fromkeys(shape[-1] for shape in shapes if isinstance(shape, tuple) and shape)
    others = [width for width in widths if isinstance(width, int) and width != x.shape[2]]
    for width in others[:MOST_WIDTHS]:
        other = torch.zeros(*x.shape[:2], width, dtype=x.dtype, device=x.device)
        if any(_runs(partial(_with_style(network, style).raw, other)) for style in styles):
            return InputError(
                f"{network.name} takes features of width {width}, but {network.companions.name} has width "
                f"{x.shape[2]}; use the features of the encoder the model was trained on."
            )
    return None


def _too_few_error(network: Network, x: Tensor, styles: Sequence[CallStyle]) -> XmilError | None:
    """Make the error if the module runs on the same instances, repeated."""
    n = x.shape[1]
    for style in (style for style in styles if not style.names):  # no bag has repeated companions

        def runs(k: int, style: CallStyle = style) -> bool:
            repeated = x[:, torch.arange(k, device=x.device) % n]
            return _runs(partial(_with_style(network, style).raw, repeated))

        if n < MOST_INSTANCES and runs(MOST_INSTANCES):
            least = _fewest(runs, n, MOST_INSTANCES)
            return InputError(
                f"{network.name} needs at least {least} patches, but {network.companions.name} has {n}."
            )
    return None


def fewest_instances(network: Network, x: Tensor, least: int) -> int:
    """Find the smallest number of instances of a bag (1, n, d), at least `least`, that a module runs on.

    A module whose outputs are not finite does not run. Return `least` if it runs on no part of the bag.
    """
    n = x.shape[1]

    def runs(k: int) -> bool:
        rows = torch.arange(k, device=x.device)
        logits = attempt(lambda: network.logits(x[:, :k], rows.unsqueeze(0)))
        return logits is not None and bool(torch.isfinite(logits).all())

    if least >= n - 1 or runs(least) or not runs(n - 1):
        return least
    return _fewest(runs, least, n - 1)


def sub_bag_error(network: Network, m: int, error: Exception) -> XmilError:
    """Make the error for a module that runs on the full bag, but not on m of its instances."""
    bag = network.trial_bag
    n = m + 1 if bag is None else bag.shape[1]
    least = m if bag is None else fewest_instances(network, bag, m)
    if least > m:
        return UnsupportedError(
            f"{network.name} needs at least {least} patches, but this call removes patches and leaves {m}; "
            "use the methods lrp, ig or gxi, or mode='mask' in flip, which keep the full bag."
        )
    return InputError(
        f"{network.name} runs on all {n} patches of the bag, but not on {m} of them ({first_line(error)}): "
        "its inputs for each patch must travel with the patches: name them in forward's signature, such as "
        "forward=lambda net, x, *, coords: net(x, coords)."
    )


def _fewest(runs: Callable[[int], bool], low: int, high: int) -> int:
    """Find the smallest number of instances above `low` that runs, given that `high` does."""
    return low + 1 + bisect_left(range(low + 1, high), True, key=runs)


def _with_style(network: Network, style: CallStyle) -> Network:
    twin = copy(network)
    twin.call_style = style
    return twin


def _runs(call: Callable[[], object]) -> bool:
    return attempt(lambda: [call()]) is not None
