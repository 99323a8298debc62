"""The verdict on the maps of a run, as run.json holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("better", "no better", "worse", "cannot tell")


@dataclass(frozen=True)
class RunVerdict:
    """Whether the maps of a run show what the model uses, better than random orders do.

    `kind` is one of `KINDS`, `sentence` says it with its numbers; both are of `method`. `methods` has the
    figures of every method that was tried: mean SRG, its interval over cases (None below 8), p, kind, and the
    share of the best SRG. `cases` are those that were measured, `slides` how many slides they have.
    """

    kind: str = KINDS[-1]
    sentence: str = ""
    method: str = ""
    methods: list[dict[str, Any]] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    slides: int = 0
    orders: int = 0

    @property
    def table(self) -> pd.DataFrame:
        """A row for each method that was tried, by its name."""
        import pandas as pd

        columns = ("method", "srg", "low", "high", "p", "kind", "share")
        return pd.DataFrame(self.methods, columns=columns).set_index("method")

    def as_dict(self) -> dict[str, Any]:
        """What run.json holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RunVerdict:
        """Read what run.json holds; what a later version added is left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})
