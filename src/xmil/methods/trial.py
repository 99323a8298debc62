"""A trial call on the bag: how a foreign module is called, what it returns, and whether it is random."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from xmil.core.errors import InputError, UnsupportedError, bad_parameter, unknown_name
from xmil.core.task import TASKS
from xmil.methods.calling import PLAIN, optional_companions, unknown_parameters, ways_to_call
from xmil.methods.chances import RETURNS, ChanceWatch, chances_of, check_chances, looks_like_chances, seeded
from xmil.methods.closures import Rows, fixed_rows
from xmil.methods.faults import Failure, call_fault
from xmil.methods.meaning import SAME, check_batch, check_task, distance, fast_path_remark, settle_mask
from xmil.methods.network import Network
from xmil.methods.reading import AmbiguousError, UnreadableError, find_logits

logger = logging.getLogger(__name__)


@torch.inference_mode(False)
@torch.no_grad()
def try_out(network: Network, x: Tensor, *, returns: str | None = None, average: int | None = None) -> None:
    """Settle how the network is called and read, from trial calls with the whole bag (1, n, d).

    Whatever is not plain is said: in `network.params` and `network.warnings`, which explanations carry.
    """
    if returns is not None and returns not in RETURNS:
        raise unknown_name("kind of output for returns", returns, RETURNS)
    if average is not None and (isinstance(average, bool) or not isinstance(average, int) or average < 1):
        raise bad_parameter("average", "explain", "an int in the range [1, inf)", average)
    if network.model is not None:
        if returns == "probability":
            raise bad_parameter(
                "returns", f"explain for {network.name}", "'logit': it returns logits", returns
            )
        return
    check_task(network)
    x = x.clone() if x.is_inference() else x
    network.whole = x
    before = network.by_row(x.shape[1])
    watch, first = _called(network, x)
    if not bool(torch.isfinite(first).all()):
        where = network.companions.name
        raise UnsupportedError(f"The outputs of {network.name} are not finite for {where}; check the model.")
    _settle_fixed(network, before, x.shape[1])
    _check_instances(network, x, first)
    _check_optional(network, x)
    _settle_chances(network, first, watch, returns)
    _settle_draws(network, x, first, average)


def _called(network: Network, x: Tensor) -> tuple[ChanceWatch, Tensor]:
    """The first way of calling that gives logits, under a watch for probabilities."""
    failures: list[Failure] = []
    held = network.companions.names
    if network.by_user:
        ways = [network.way]
    elif (error := unknown_parameters(network.module, held)) is not None:
        raise error
    else:
        ways = list(ways_to_call(network.module, held))
    for way, following in zip(ways, [*ways[1:], None], strict=True):
        network.way, watch, probe = way, ChanceWatch(), x.clone()
        try:
            with watch:
                raw = network.raw(probe)
                network.reading = find_logits(raw, x.shape[1], name=network.name)
                logits = network.reading(raw)
        except (AmbiguousError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # whatever a user's module raises
            failures.append(Failure(way, error))
            continue
        network.copies = probe._version > 0
        if way.with_mask is not None:
            if not settle_mask(network, x):
                why = UnreadableError(f"{network.name} masks the bag with {way.text}.")
                failures.append(Failure(way, why))
                continue
            with watch:
                logits = network.reading(network.raw(x))
        elif way.batch and following is not None and not following.batch:
            check_batch(network, x, following)
        _tell(network, x)
        return watch, logits
    raise call_fault(network, x, failures) from failures[0].error


def _tell(network: Network, x: Tensor) -> None:
    """Say how the module is called, where that is not the plain way."""
    told = f"{network.way.text}{network.reading}"
    if told in (PLAIN.text, "forward(net, x)"):
        return
    network.params["call"] = told
    logger.info("%s is called as %s; pass forward= to call it in another way.", network.name, told)
    if "coords" in network.way.names and _places_matter(network, x):
        top = int(network.companions.given("coords", network.rows(x), x).max())
        network.remarks += (
            f"{network.name} is given level-0 coordinates, here up to {top}; where it was trained with "
            "another unit, pass forward=lambda net, x, *, coords: ... that converts them.",
        )


def _places_matter(network: Network, x: Tensor) -> bool:
    """Whether the output is another with all patches in one place; a guess of their unit is then said."""
    if network.by_user or "coords" not in network.companions:
        return False
    zeros = torch.zeros(x.shape[1], 2, dtype=torch.long, device=x.device)
    twin = network.with_companions(coords=zeros)
    with seeded(0):
        first = network.logits(x)
    with seeded(0):
        return distance(first, twin.logits(x)) > SAME


def _settle_fixed(network: Network, before: Rows, n: int) -> None:
    """Note what is held for each instance: what a call replaces or lengthens is its result, not its input."""
    stayed = [(name, seen[1]) for name, seen in network.by_row(n).items() if before.get(name) == seen]
    if stayed and n > 1:
        network.fixed = fixed_rows(*stayed[0], n, who="forward" if network.by_user else network.name)


def _check_instances(network: Network, x: Tensor, logits: Tensor) -> None:
    """Refuse a number per instance that passes for logits."""
    n = x.shape[1]
    if logits.shape[1] != n or n < 2:
        return
    rows = torch.arange(n - 1, device=x.device).unsqueeze(0)
    try:
        fewer = network.logits(x[:, :-1], rows)
    except Exception:  # what stays unknown is taken as it is
        return
    if fewer.shape[1] == n - 1:
        raise InputError(
            f"{network.name} returned a number for each instance, not logits of the bag; pass forward= to "
            "join them, such as forward=lambda net, x: net(x).mean(dim=1)."
        )


def _check_optional(network: Network, x: Tensor) -> None:
    """Refuse to choose where a module may be given companions or not, and its output depends on it."""
    if network.by_user:
        return
    names = optional_companions(network.module, network.companions.names)
    if not names or network.way.names:
        return
    batch = network.way is PLAIN
    given = {k: network.companions.given(to, network.rows(x), x) for k, to in names.items()}
    given = {k: v if batch else v[0] for k, v in given.items()}
    try:
        with seeded(0):
            logits = network.logits(x)
        with seeded(0):
            other = network.reading(network.module(x.clone() if batch else x[0].clone(), **given))
    except Exception:  # it does not take them as the bag has them
        return
    if other.shape != logits.shape or distance(other, logits) > SAME:
        name, to = next(iter(names.items()))
        raise InputError(
            f"The output of {network.name} depends on {name!r}, which is optional, and the bag has it; say "
            f"which: forward=lambda net, x, *, {to}: net(x, {name}={to}), or forward=lambda net, x: net(x)."
        )


def _settle_chances(network: Network, logits: Tensor, watch: ChanceWatch, returns: str | None) -> None:
    """Refuse probabilities that are not announced; settle how announced ones become logits."""
    task, name = network.task, network.name
    linked = TASKS[task].link is not None
    if returns == "probability":
        if not linked:
            raise bad_parameter("returns", f"explain for a {task} model", "'logit'", returns)
        check_chances(logits, task, name)
        source = watch.source(logits)
        same = source is not None and _is_source(source, logits, task)
        network.link = "source" if same else "log"
        network.params["returns"] = returns
    elif returns is None and linked and looks_like_chances(logits, made=watch.made(logits)):
        how = "made by a sigmoid or softmax" if watch.made(logits) else "adding up to 1"
        raise InputError(
            f"{name} returned what look like probabilities (within [0, 1], {how}); say "
            "returns='probability', or returns='logit' if they are logits."
        )


def _is_source(source: Tensor, p: Tensor, task: str) -> bool:
    found = source.reshape(1, -1) if source.numel() == p.numel() else source
    return found.shape == p.shape and torch.allclose(chances_of(found, task), p, atol=1e-6)


def _settle_draws(network: Network, x: Tensor, first: Tensor, average: int | None) -> None:
    """A second pass beside the first: where they differ, seeded draws from now on, and a warning."""
    second = network.reading(network.raw(x))
    if not distance(first, second) > SAME:
        return
    if (remark := fast_path_remark(network, x, first, second)) is not None:
        network.remarks += (remark,)
        return
    network.draws = average or 1
    network.params["average"] = network.draws
    size = float((first - second).abs().max())
    shown = (
        "these scores are of one draw with a fixed seed; average=K takes the mean output of K draws"
        if network.draws == 1
        else f"these scores are of the mean output of {network.draws} draws with fixed seeds"
    )
    network.remarks += (
        f"{network.name} is random in eval mode: two passes over this bag differ by {size:.3g} in an output "
        f"of {float(first.abs().max()):.3g}; {shown}.",
    )
