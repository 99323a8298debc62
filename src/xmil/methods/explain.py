"""`explain`: any model, any bag, any method."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.bag import Bag, IntArray
from xmil.core.errors import MOST_PASSES, InputError, UnsupportedError, XmilError, bad_parameter
from xmil.core.explanation import Explanation, mean_audit
from xmil.methods.check import check_attributions, with_notes
from xmil.methods.lrp import check_zero_map
from xmil.methods.method import (
    CONTEXTS,
    METHODS,
    Attribution,
    Attributions,
    Method,
    Question,
    seed_words,
)
from xmil.methods.shapley import sure_signs
from xmil.network import (
    Network,
    as_bag,
    as_model,
    first_line,
    frozen,
    on_device,
    open_network,
)

PREDICTED = "predicted"  # as a target, the same as None
PLAIN_METHODS = ("ig", "gxi", "grad2", "one_added", "single", "one_removed")  # need outputs or gradients
# in `e.params` for the record; ignored when passed
RECORDED = ("call", "company_from", "baseline_digest", "chosen_by", "chosen_on", "verdict", "softmax")
Bags = Bag | Tensor | np.ndarray[Any, Any] | str | PathLike[str]


def explain(
    model: nn.Module | str | PathLike[str], bag: Bags, *, target: Any = None, **options: Any
) -> Explanation:
    """Score each instance for one target, by a named method; options as for `xmil.explain`."""
    return explain_targets(model, bag, [target], **options)[0]


def one_method(method: Any, params: dict[str, Any]) -> str:
    """Return the one method in `method` or `methods`, and remove the latter from the parameters."""
    methods = params.pop("methods", method)
    names = [methods] if isinstance(methods, str) else list(methods)
    if len(names) != 1:
        raise InputError(
            f"explain takes one method at a time. Got {names} instead; call it once for each, or explain a "
            "folder of slides with explain_slides(methods=[...])."
        )
    return str(names[0])


def list_methods(model: nn.Module | str | PathLike[str] | None = None) -> list[str]:
    """List the methods, or those that can explain the model, which may be a path.

    >>> list_methods()
    ['attention', 'combined', 'grad2', 'gxi', 'ig', 'logits', 'lrp', 'milli', 'one_added', 'one_removed',
     'random', 'shapley', 'single']
    """
    if model is None:
        return list(METHODS)
    network = Network(as_model(model))
    return [name for name in METHODS if METHODS[name].supports(network) is None]


def explain_targets(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    targets: Sequence[Any] | None,
    *,
    method: str = "lrp",
    output: str | None = None,
    device: str | None = None,
    check: bool = True,
    **params: Any,
) -> list[Explanation]:
    """Explain each target, or each class, in one forward pass if the method allows it."""
    if device is not None:
        model, bag = as_model(model), as_bag(bag)
        with on_device(model, device) as place:
            bag = bag.to(place) if isinstance(bag, Tensor) else bag
            return explain_targets(model, bag, targets, method=method, output=output, check=check, **params)
    call = {name: params.pop(name, None) for name in ("forward", "returns", "average")}
    method = one_method(method, params)
    entry = METHODS[method]
    if "baseline_digest" in params and isinstance(params.get("baseline"), str):
        raise InputError(
            f"The baseline {params['baseline']!r} cannot be found by its name; pass the baseline itself."
        )
    params = {name: value for name, value in params.items() if name not in RECORDED}
    entry.check_parameters(params)
    entry.check_output(output)
    bag = as_bag(bag)
    network, x = open_network(model, bag, **call)
    entry.check_model(network)
    if targets is not None:
        targets = [None if isinstance(target, str) and target == PREDICTED else target for target in targets]
    question = Question(targets, output, network, default=entry.outputs[0])
    size = x.numel() * x.element_size() if x.device.type == "cpu" else 0
    with reused_memory(size), frozen(network.module), torch.inference_mode(False), torch.enable_grad():
        x = x.clone() if x.is_inference() else x
        result = _run(entry, network, x, question, params)
        for attribution in result.of if entry.name == "lrp" else ():  # other methods warn of zeros themselves
            check_zero_map(network, x, attribution)
        if check:
            result = check_attributions(entry, network, x, result)
    result = replace(result, of=[with_notes(a, x) for a in result.of])
    logits = result.logits.detach()[0].float().cpu().numpy()
    return [_explanation(a, entry, bag, logits, network, params) for a in result.of]


def _run(
    method: Method, network: Network, x: Tensor, question: Question, params: dict[str, Any]
) -> Attributions:
    """Run the method on the bag, or average it over sub-bags if the user wants contexts."""
    try:
        chosen = {key: params[key] for key in CONTEXTS if key in params and method.contexts}
        own = {key: value for key, value in params.items() if key not in chosen}
        if chosen.get("contexts") is not None:
            return explain_contexts(method, network, x, question, own, {**CONTEXTS, **chosen})
        return method.run(network, x, question, **own)
    except (XmilError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a foreign module may raise anything
        if network.model is not None:
            raise
        alternatives = ", ".join(name for name in PLAIN_METHODS if name != method.name)
        raise UnsupportedError(
            f"{network.name} runs on this bag, but the method {method.name!r} failed on it with "
            f"{first_line(error)}; try another: {alternatives}."
        ) from error


def _explanation(
    a: Attribution, method: Method, bag: Any, logits: Any, network: Network, params: dict[str, Any]
) -> Explanation:
    described = bag if isinstance(bag, Bag) else Bag(np.zeros((0, 1), dtype=np.float32))
    scores = a.scores.detach().float().cpu().numpy()
    if not np.isfinite(logits).all():
        raise UnsupportedError(
            f"The outputs of {network.name} are not finite for {described.called}; check the model."
        )
    if not np.isfinite(scores).all():
        first = int(np.flatnonzero(~np.isfinite(scores))[0])
        rules = {"preset", "epsilon"} <= set(method.parameters)
        raise UnsupportedError(
            f"The method {method.name!r} returned scores that are not finite for {described.called}, "
            f"first at patch {first}; {'another preset, a larger epsilon or ' if rules else ''}"
            "model.double() may help if numbers are too small or too large for single precision."
        )
    return Explanation(
        scores=scores,
        logits=logits,
        output=float(a.value),
        method=method.name,
        target=a.output.target,
        signed=method.signed,
        audit=a.audit,
        bag=described.slide_id,
        patches=described.patches,
        model=network.name,
        params={
            "output": a.output.kind,
            **network.params,
            **{k: v for k, v in params.items() if not callable(v)},
            **a.params,
        },
        relevance=_array(a.relevance),
        stderr=_array(a.stderr),
        stable=None if a.stable is None else a.stable.cpu().numpy(),
        warnings=(*network.warnings, *a.warnings),
    )


def _array(values: Tensor | None) -> npt.NDArray[np.float32] | None:
    return None if values is None else values.detach().float().cpu().numpy()


# Large temporaries on the CPU: glibc maps every block above 32 MB anew and unmaps it when freed, and the
# kernel clears the pages each time. For bags of more than 30,000 instances that costs as much as the
# arithmetic. During an explanation such blocks come from the heap, which reuses freed ones; afterwards the
# memory is released.

LARGE_BYTES = 1 << 26  # smaller bags stay below the limit
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_USUAL_LIMITS = {_M_MMAP_MAX: 65_536, _M_TRIM_THRESHOLD: 1 << 26}  # glibc's own limits
_NO_LIMITS = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1}

_lock = threading.Lock()
_users = 0


@contextmanager
def reused_memory(n_bytes: int) -> Iterator[None]:
    """Reuse freed memory within the block, if the data is large and the C library is glibc."""
    libc = _glibc() if n_bytes >= LARGE_BYTES else None
    if libc is None:
        yield
        return
    _count(libc, 1)
    try:
        yield
    finally:
        _count(libc, -1)


def _count(libc: ctypes.CDLL, change: int) -> None:
    global _users
    with _lock:
        _users += change
        for option, value in (_NO_LIMITS if _users else _USUAL_LIMITS).items():
            libc.mallopt(option, value)
        if not _users:
            libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt, libc.malloc_trim, libc.gnu_get_libc_version  # noqa: B018  # absent elsewhere
    except (OSError, AttributeError):
        return None
    return libc


FEWEST = 2  # sub-bags that must hold an instance: a single one has no standard error
SKEWED, OFTEN = 1.5, 0.1  # a skewness rare in normal samples, and the share of patches that may exceed it


def explain_contexts(
    method: Method,
    network: Network,
    x: Tensor,
    question: Question,
    own: Mapping[str, Any],
    contexts: Mapping[str, Any],
) -> Attributions:
    """Average a method with its `own` parameters over sub-bags; `contexts` are the parameters of `deal`."""
    if own.get("feature_level"):
        raise InputError("Contexts average scores of patches; leave out `feature_level=True`.")
    with torch.no_grad():
        logits = network(x)
    outputs = question.outputs(logits)
    fixed = replace(question, targets=[output.target for output in outputs])
    hands = deal(x.shape[1], **contexts)
    runs = [
        method.run(network.part(rows), x[:, rows], fixed, **own).of
        for rows in (torch.from_numpy(hand).to(x.device) for hand in hands)
    ]
    attributions, n, size = [], x.shape[1], sum(map(len, hands)) / len(hands)
    for k, output in enumerate(outputs):
        mean = _average([run[k] for run in runs], hands, x)
        means = "scores" if mean.audit is None else "scores and the audit"
        sizes = f"1 to {n}" if contexts["keep"] is None else f"{size:.0f}"
        note = f"The {means} are means over {len(hands)} sub-bags of {sizes} patches"
        if size < n:
            total = f", so their sum is about {n / size:.3g} times audit.instances"
            note += (
                f"; a score is the mean over those that hold its patch{'' if mean.audit is None else total}: "
                "compare the ranking of these scores with plain scores, not their size"
            )
        attributions.append(
            replace(mean, value=float(output(logits)), output=output, warnings=(f"{note}.", *mean.warnings))
        )
    return Attributions(logits, attributions)


def deal(n: int, *, contexts: int, keep: float | None, seed: int | Sequence[int] = 0) -> list[IntArray]:
    """Deal the instances of each sub-bag from shuffled decks: ceil(keep n) of n, ascending.

    Without `keep` the sizes are spread evenly over 1..n, in random order.

    >>> [rows.tolist() for rows in deal(4, contexts=4, keep=0.5)]
    [[0, 2], [1, 3], [2, 3], [0, 1]]
    >>> sorted(len(rows) for rows in deal(4, contexts=8, keep=None))
    [1, 1, 2, 2, 3, 3, 4, 4]
    """
    if keep is not None and (
        isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1
    ):
        raise bad_parameter("keep", "contexts", "a float in the range (0, 1], or None", keep)
    size = max(1, ceil((0.5 if keep is None else keep) * n - 1e-9))  # 0.1 * 30 is a little above 3
    fewest = ceil(FEWEST * n / size)
    most = max(fewest, MOST_PASSES)
    if isinstance(contexts, bool) or not isinstance(contexts, int) or not fewest <= contexts <= most:
        must = f"an int in the range [{fewest}, {most}], so that each of {n} patches is in {FEWEST} sub-bags"
        raise bad_parameter("contexts", "explain", must, contexts)
    rng = np.random.default_rng(seed_words(seed, "contexts"))
    sizes = [size] * contexts
    if keep is None:
        sizes = rng.permutation([ceil(n * (k + 0.5) / contexts) for k in range(contexts)]).tolist()
    deck: list[int] = []
    hands = []
    for size in sizes:
        hand = deck[:size]
        deck = deck[size:]
        if len(hand) < size:  # take the first instances of a new deck that the hand lacks
            fresh = rng.permutation(n).tolist()
            in_hand = set(hand)
            rest = [i for i in fresh if i not in in_hand][: size - len(hand)]
            hand += rest
            dealt = set(rest)
            deck = [i for i in fresh if i not in dealt]
        hands.append(np.sort(np.array(hand, dtype=np.int64)))
    return hands


def _average(parts: Sequence[Attribution], hands: Sequence[IntArray], x: Tensor) -> Attribution:
    """Mean and standard error over the sub-bags that hold each instance."""
    counts, total, squares = (torch.zeros(x.shape[1], dtype=torch.float64, device=x.device) for _ in range(3))
    rows = torch.from_numpy(np.concatenate(hands)).to(x.device)
    scores = torch.cat([part.scores.double() for part in parts])
    counts.index_add_(0, rows, torch.ones_like(scores))
    mean = total.index_add_(0, rows, scores) / counts
    squares.index_add_(0, rows, (scores - mean[rows]).square())
    stderr = (squares / (counts - 1) / counts).sqrt()
    cubes = torch.zeros_like(squares).index_add_(0, rows, (scores - mean[rows]) ** 3)
    skewness = (cubes / counts).abs() / (squares / counts).clamp(min=1e-30) ** 1.5
    warnings = list(dict.fromkeys(line for part in parts for line in part.warnings))
    if (share := float((skewness > SKEWED).double().mean())) > OFTEN:  # a few sub-bags decide these scores
        warnings.append(
            f"The scores of {share:.0%} of the patches are skewed over the sub-bags, so their standard "
            "errors are often too small; interval() corrects for it, and more contexts help."
        )
    sizes = {
        len(hand) for hand in hands
    }  # a patch always alone, or always with all others, has only one context
    varied = not sizes <= {1} and not sizes <= {x.shape[1]}
    return replace(
        parts[0],
        scores=mean.to(x.dtype),
        audit=mean_audit([part.audit for part in parts]),
        stderr=stderr if varied else None,
        stable=sure_signs(mean, stderr, counts.long()) if varied else None,
        warnings=tuple(warnings),
    )
