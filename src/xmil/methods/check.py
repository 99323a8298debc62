"""A cheap check of scores: does the half of the patches with the higher scores give the higher output?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from xmil.methods.method import Attribution, Attributions, Method
from xmil.network import Network, attempt

MOST, FEWEST = 1024, 8  # patches that are tried: more are drawn, of fewer the halves say nothing
MARGIN = 0.05  # of the larger output: halves this close are level
LITTLE = 0.1  # of what the output loses when all patches leave: scores below it in all explain something else


@torch.no_grad()
def check_attributions(method: Method, network: Network, x: Tensor, result: Attributions) -> Attributions:
    """Warn beside scores of a bag (1, n, d) that contradict the model; the scores stay as they are.

    Of signed methods alone, and not of `random`, which is there to be beaten. `params["check"]` says why
    scores were not checked. It takes three passes over at most 1,024 patches: each half, and zero vectors.
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
    none = attempt(partial(network, torch.zeros_like(x[:, drawn]), drawn.unsqueeze(0)))
    other = "one_added" if method.name != "one_added" else "shapley"
    return replace(result, of=[_check(a, network, x, drawn, none, other) for a in result.of])


def _check(
    a: Attribution, network: Network, x: Tensor, drawn: Tensor, none: Tensor | None, other: str
) -> Attribution:
    """Compare the halves, and the scores of methods that account for the output with what all patches do."""
    scores = a.scores.detach().double()
    ranked = drawn[scores[drawn].argsort(descending=True, stable=True)]
    first, last = ranked[: len(ranked) // 2].sort().values, ranked[-(len(ranked) // 2) :].sort().values
    if bool(scores[first].min() == scores[last].max()):
        return _skipped(a, "the scores of the two halves tie")
    outputs = [attempt(partial(network, x[:, rows], rows.unsqueeze(0))) for rows in (first, last)]
    if outputs[0] is None or outputs[1] is None:
        return _skipped(a, "the model does not run on half of the bag")
    high, low = (float(a.output(logits.double())) for logits in outputs if logits is not None)
    advice = f"try method='{other}', or method='auto', which compares methods"
    if low - high > MARGIN * max(abs(low), abs(high)):
        return _warned(
            a,
            "The scores contradict the model: the half of the patches with the lower scores gives the "
            f"higher output ({low:.3g} against {high:.3g}); {advice}.",
        )
    change = 0.0 if none is None else abs(a.value - float(a.output(none.double())))
    if a.audit is not None and float(scores.abs().sum()) < LITTLE * change:
        return _warned(
            a,
            f"The scores miss what the patches do: they amount to {float(scores.abs().sum()):.3g} in total, "
            f"but the output changes by {change:.3g} when the patches are zeroed; {advice}.",
        )
    return a


def with_notes(a: Attribution, x: Tensor) -> Attribution:
    """Warn of features that cannot tell patches apart, and of scores that say nothing."""
    notes = []
    n, alike = x.shape[1], x[0, 0] == x[0, -1]
    if n >= FEWEST and bool(alike.all()) and bool((x[0] == x[0, :1]).all()):
        what = "only zeros for features" if not bool(x[0, 0].any()) else "the same features"
        notes.append(f"All {n} patches have {what}: the extraction probably failed.")
    if not bool(a.scores.any()) and not a.warnings:
        notes.append(
            "Every score is zero: as far as this method sees, the output does not depend on the patches."
        )
    return replace(a, warnings=(*a.warnings, *notes)) if notes else a


def _skipped(a: Attribution, reason: str) -> Attribution:
    return replace(a, params={**a.params, "check": f"skipped: {reason}"})


def _warned(a: Attribution, sentence: str) -> Attribution:
    return replace(a, warnings=(*a.warnings, sentence))
