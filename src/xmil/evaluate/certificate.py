"""A certificate: how far a slide's scores can be trusted, in numbers and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xmil.core.explanation import Explanation
from xmil.evaluate.flip import Curve
from xmil.evaluate.measures import Band

FLAT = 0.05  # a curve and band that move less than this, of the output's scale, cannot tell orders apart
UNEXPLAINED = 0.01  # the largest share of the output an audit may leave unexplained


@dataclass(frozen=True, eq=False)
class Certificate:
    """One method on one slide: its curves, the random band, its audit, and the verdict.

    `verdict`: "faithful" (AUPC below 95 % of random orders), "like random", "worse than random", or
    "undecided" where no order moves the output.
    """

    explanation: Explanation
    morf: Curve
    lerf: Curve
    band: Band

    @property
    def srg(self) -> float:
        """Symmetric relevance gain."""
        return self.lerf.aupc - self.morf.aupc

    @property
    def verdict(self) -> str:
        """The verdict in two words."""
        low, high = self.band.aupc_interval
        if max(np.ptp(self.morf.values), np.ptp(self.band.mean)) < FLAT * self.morf.scale:
            return "undecided"
        if self.morf.aupc < low:
            return "faithful"
        return "worse than random" if self.morf.aupc > high else "like random"

    @property
    def unexplained(self) -> float | None:
        """The share of the output that the audit leaves unexplained; None without an audit.

        A value near its reference, or a risk near 0, is measured against the output's scale instead.
        """
        audit = self.explanation.audit
        if audit is None:
            return None
        least = 1e-12 if self.morf.decides else self.morf.scale
        return abs(audit.other) / max(abs(audit.output), least)

    @property
    def sentence(self) -> str:
        """The verdict for a reader."""
        return " ".join([*self._on_order(), self._on_flip(), *self._on_audit()])

    def as_dict(self) -> dict[str, Any]:
        """What a certificate's file holds, in plain types."""
        low, high = self.band.aupc_interval
        audit = self.explanation.audit
        return {
            "method": self.explanation.method,
            "target": str(self.explanation.target),
            "verdict": self.verdict,
            "sentence": self.sentence,
            "aupc": self.morf.aupc,
            "srg": self.srg,
            "flipped": self.morf.flipped,
            "at_zero": self.morf.at_zero,
            "flipped_at_zero": self.morf.flipped_at_zero if self.morf.decides else None,
            "random_aupc": self.band.aupc,
            "random_interval": [low, high],
            "audit": None if audit is None else audit.as_dict(),
        }

    def _on_order(self) -> list[str]:
        low, high = self.band.aupc_interval
        name, numbers = self.explanation.method, f"AUPC {self.morf.aupc:.2f}, random {low:.2f} to {high:.2f}"
        said = {
            "faithful": f"Faithful: dropping by {name} lowers the output faster than chance ({numbers}).",
            "like random": f"No better than random: {name} orders the instances as chance would ({numbers}).",
            "worse than random": f"Worse than random: what {name} ranks first matters least ({numbers}).",
            "undecided": f"Undecided: the output hardly depends on which instances are dropped ({numbers}).",
        }
        return [said[self.verdict]]

    def _on_flip(self) -> str:
        if not self.morf.decides:
            return f"The output is a {self._noun}: there is no decision to flip."
        if self.morf.flipped is None:
            return "The decision never flips."
        return f"The decision flips once {100 * self.morf.flipped / self.morf.steps:.0f} % are out."

    @property
    def _noun(self) -> str:
        kind = str(self.explanation.params.get("output", "value"))
        return kind if kind in ("value", "risk") else "hazard"

    def _on_audit(self) -> list[str]:
        share = self.unexplained
        if share is None:
            return ["This method does not account for the output."]
        state = "The account closes" if share <= UNEXPLAINED else "The account does not close"
        return [f"{state}: {share:.1%} of the output is unexplained."]
