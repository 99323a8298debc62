"""Check scores cheaply: does the half of the patches with the higher scores have the higher output?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from xmil.methods.method import Attribution, Attributions, Method
from xmil.network import Network, attempt

MOST, FEWEST = 1024, 8  # patches: more are sampled, with fewer the comparison means nothing
MARGIN = 0.05  # share of the larger output, or of what patches change: halves closer than this tie
ROUNDINGS = 8  # of the largest value: closer halves tie, too
LITTLE = 0.1  # share of the change without patches: scores with a smaller total explain something else


@torch.no_grad()
def check_attributions(method: Method, network: Network, x: Tensor, result: Attributions) -> Attributions:
    """Warn about scores of a bag (1, n, d) that contradict the model, without changing them.

    Only signed methods are checked, and not `random`. `params["check"]` says why scores were not checked. The
    check takes three passes over at most 1,024 patches: each half, and zero vectors.
    """
    if not method.signed or method.name == "random":
        return result
    n, reason = x.shape[1], None
    if n < FEWEST:
        reason = f"fewer than {FEWEST} patches"
    elif network.sub_bag_refusal is not None:
        reason = "the model takes no sub-bags"
    if reason is not None:
        return replace(result, of=[_skipped(a, reason) for a in result.of])
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:MOST].sort().values.to(x.device)
    none = _run(network, torch.zeros_like(x[:, drawn]), drawn)
    other = "one_added" if method.name != "one_added" else "shapley"
    return replace(result, of=[_check(a, network, x, drawn, none, other) for a in result.of])


def _check(
    a: Attribution, network: Network, x: Tensor, drawn: Tensor, none: Tensor | None, other: str
) -> Attribution:
    """Compare the halves; if there is an audit, also compare all scores with the effect of all patches."""
    scores = a.scores.detach().double()
    ranked = drawn[scores[drawn].argsort(descending=True, stable=True)]
    first, last = ranked[: len(ranked) // 2].sort().values, ranked[-(len(ranked) // 2) :].sort().values
    if bool(scores[first].min() == scores[last].max()):
        return _skipped(a, "the scores of the two halves tie")
    outputs = [_run(network, x[:, rows], rows) for rows in (first, last)]
    if outputs[0] is None or outputs[1] is None:
        return _skipped(a, "the model does not run on half of the bag")
    high, low = (float(a.output(logits.double())) for logits in outputs if logits is not None)
    empty = None if none is None else float(a.output(none.double()))
    advice = f"try `method='{other}'`, or `method='auto'`, which compares methods"
    if low - high > _tie_margin(a, high, low, empty, eps=torch.finfo(x.dtype).eps):
        return _warned(
            a,
            "The scores contradict the model: the half of the patches with the lower scores has the "
            f"higher output ({low:.3g} against {high:.3g}); {advice}.",
        )
    change = 0.0 if empty is None else abs(a.value - empty)
    if a.audit is not None and float(scores.abs().sum()) < LITTLE * change:
        return _warned(
            a,
            "The scores miss the effect of the patches: their sizes add up to "
            f"{float(scores.abs().sum()):.3g}, but the output changes by {change:.3g} when the patches are "
            f"zeroed; {advice}.",
        )
    return a


def _run(network: Network, x: Tensor, rows: Tensor) -> Tensor | None:
    """Run the network on some rows (m,); None if it cannot, or its outputs are not finite."""
    logits = attempt(partial(network, x, rows.unsqueeze(0)))
    return logits if logits is not None and bool(torch.isfinite(logits).all()) else None


def _tie_margin(a: Attribution, high: float, low: float, empty: float | None, *, eps: float) -> float:
    """The difference up to which two halves tie; the zero of a regression's value means nothing."""
    largest = max(abs(low), abs(high))
    if a.output.scale is not None:
        return MARGIN * largest
    values = [high, low, a.value, a.value if empty is None else empty]
    return max(MARGIN * (max(values) - min(values)), ROUNDINGS * eps * largest)


def with_notes(a: Attribution, x: Tensor) -> Attribution:
    """Warn if all features are equal, or all scores zero."""
    notes = []
    n, alike = x.shape[1], x[0, 0] == x[0, -1]
    if n >= FEWEST and bool(alike.all()) and bool((x[0] == x[0, :1]).all()):
        features = "only zeros as features" if not bool(x[0, 0].any()) else "the same features"
        notes.append(f"All {n} patches have {features}: the extraction probably failed.")
    if not bool(a.scores.any()) and not a.warnings:
        notes.append(
            "Every score is zero: as far as this method can tell, the output does not depend on the patches."
        )
    return replace(a, warnings=(*a.warnings, *notes)) if notes else a


def _skipped(a: Attribution, reason: str) -> Attribution:
    return replace(a, params={**a.params, "check": f"skipped: {reason}"})


def _warned(a: Attribution, sentence: str) -> Attribution:
    return replace(a, warnings=(*a.warnings, sentence))
