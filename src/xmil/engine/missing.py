"""Slides that a cohort names and that have no features, and the cases that lack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHOWN = 5


@dataclass(frozen=True)
class Missing:
    """Slides of the cohort without features; by case, the cases taken without some of their slides."""

    slides: tuple[str, ...] = ()
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What run.json says of them."""
        return {"without_features": list(self.slides), "incomplete_cases": dict(self.incomplete)}

    def warning(self) -> str | None:
        """One sentence that names the incomplete cases.

        >>> Missing(("a2",), {"a": ("a2",)}).warning()
        '1 case lacks slides without features and was taken with the rest: a (without a2). run.json has all.'
        """
        if not self.incomplete:
            return None
        named = [
            f"{case} (without {', '.join(gone)})" for case, gone in list(self.incomplete.items())[:SHOWN]
        ]
        more = f" and {len(self.incomplete) - SHOWN} more" if len(self.incomplete) > SHOWN else ""
        who = (
            "1 case lacks slides without features and was"
            if len(self.incomplete) == 1
            else (f"{len(self.incomplete)} cases lack slides without features and were")
        )
        return f"{who} taken with the rest: {', '.join(named)}{more}. run.json has all."
