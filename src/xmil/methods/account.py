"""What the account of an LRP explanation says of it: refused, or shown with a warning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from xmil.core.errors import UnsupportedError
from xmil.core.explanation import Audit
from xmil.methods.network import Network
from xmil.methods.outputs import Output

REFUSED_OTHER, WARNED_OTHER = 0.2, 1e-3  # of the largest number that goes into the account
WARNED_CUT = 0.1  # of the sum of all shares, each without its sign
WARNED_GAP = 0.05  # of the change that integrated gradients have to account for
NOTHING = 1e-6  # of the output: scores below this in all are none


def account_warnings(audit: Audit, *, size: float, cuts: Sequence[str] = ()) -> tuple[str, ...]:
    """Sentences for the user; an account that is far from closing is refused.

    `size` is the largest term of the output, `cuts` are the places where dependent constants were met.
    """
    shares = {name: abs(value) for name, value in audit.as_dict().items() if name != "output"}
    scale = max(size, abs(audit.output), *(value for name, value in shares.items() if name != "other"))
    if shares["other"] > REFUSED_OTHER * scale:
        raise UnsupportedError(
            f"The account does not close: {audit}. Either the rules are unstable here (another preset, a "
            "larger epsilon or model.double() may help), or the model runs operations that the engine "
            "cannot see."
        )
    found = []
    if shares["cut"] > WARNED_CUT * sum(shares.values()):
        found.append(_cut_sentence(shares["cut"] / sum(shares.values()), cuts))
    if shares["other"] > WARNED_OTHER * scale:
        found.append(
            f"The account closes only to {shares['other'] / scale:.1%}: low precision, or rules that are "
            "unstable for this bag. model.double(), another preset or a larger epsilon may help."
        )
    return tuple(found)


def gap_warnings(audit: Audit) -> tuple[str, ...]:
    """A sentence for integrated gradients that do not add up to what they should."""
    change = max(abs(audit.output - audit.bias), abs(audit.instances), 1e-12)
    gap = abs(audit.other) / change
    if gap <= WARNED_GAP or abs(audit.other) <= WARNED_OTHER * max(abs(audit.output), abs(audit.bias)):
        return ()
    return (
        f"The account stays open by more than {WARNED_GAP:.0%}: more steps= are needed, or part of the "
        "output has no gradient (detached values, argmax). Compare with method='single' or 'one_removed'.",
    )


def flat_warnings(scores: Tensor) -> tuple[str, ...]:
    """A sentence for scores from gradients that are all zero."""
    if bool(scores.any()):
        return ()
    return (
        "Every score is zero: the output has no gradient at these instances, as behind a threshold or with "
        "rounded weights. Compare with method='single' or 'one_removed'.",
    )


def _cut_sentence(share: float, cuts: Sequence[str]) -> str:
    where = f" ({'; '.join(cuts)})" if cuts else " (the explained output is not linear in the logits)"
    return (
        f"{share:.0%} of the account stops at values that depend on the bag but carry no relevance{where}: "
        "the scores do not show that part. Compare with method='single' or 'one_removed'."
    )


def check_reached(
    network: Network, x: Tensor, output: Output, *, scores: Tensor, value: float, audit: Audit | None
) -> None:
    """Refuse scores that are all zero for an output that does depend on the instances."""
    least = NOTHING * abs(value)
    if float(scores.abs().sum()) > least:
        return
    if (audit is not None and abs(audit.cut) > WARNED_CUT * abs(value)) or _slope(network, x, output) > least:
        raise UnsupportedError(
            "No relevance reaches the instances, though the output depends on them: it stops at values that "
            "the rules take as constants, such as a softmax or a detached tensor. Use a method that needs no "
            "rules: ig, gxi, single, one_removed."
        )


def _slope(network: Network, x: Tensor, output: Output) -> float:
    """Gradient times input of the output as it is, summed over the features; instances without their sign."""
    x = x.detach().requires_grad_(True)
    with torch.enable_grad():
        explained = output(network(x)).sum()
    if not explained.requires_grad:
        return 0.0
    (gradient,) = torch.autograd.grad(explained, x, allow_unused=True)
    return 0.0 if gradient is None else float((x.detach() * gradient).sum(dim=-1).abs().sum())
