"""The verdict on the maps of a run, as stored in run.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from xmil.core.explanation import card_of
from xmil.core.text import counted

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("better", "no better", "worse", "cannot tell")


@dataclass(frozen=True)
class RunVerdict:
    """Whether the maps of a run show what the model uses better than random orders do.

    `kind` is one of `KINDS`, `sentence` states it with its numbers; both are for `method`. `methods` has the
    figures of every method that was tried: mean SRG, its interval over cases (None below 8), p, kind, and the
    share of the best SRG. `cases` are the measured ones, with `slides` slides; `unit` is "slide" if no
    case_id shows which slides belong to one patient.
    """

    kind: str = KINDS[-1]
    sentence: str = ""
    method: str = ""
    methods: list[dict[str, Any]] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    slides: int = 0
    orders: int = 0
    unit: str = "case"

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row for each tried method."""
        import pandas as pd

        columns = ("method", "srg", "low", "high", "p", "kind", "share")
        return pd.DataFrame(self.methods, columns=columns).set_index("method")

    @property
    def brief(self) -> str:
        """The verdict for a caption.

        >>> row = {"method": "lrp", "srg": 0.47}
        >>> RunVerdict("better", method="lrp", methods=[row], cases=["a", "b"]).brief
        'LRP map better than a random order over 2 cases (SRG 0.47)'
        """
        name = f"{card_of(self.method).title} map" if self.method else "map"
        if self.kind == KINDS[-1] or not self.methods:
            return f"not known whether the {name} shows what the model uses"
        row = self.methods[0]
        n = row.get("cases", len(self.cases))  # a method that was tried last has fewer
        words = f"{name} {self.kind} than a random order over {counted(n, self.unit)}"
        return f"{words} (SRG {row['srg']:.2f})"

    def of(self, method: str) -> RunVerdict | None:
        """Get the verdict on a method; None if it was not tested.

        >>> rows = [{"method": "lrp", "kind": "better"}, {"method": "random", "kind": "worse", "srg": -0.1}]
        >>> verdict = RunVerdict("better", method="lrp", methods=rows, cases=["a"])
        >>> verdict.of("random").brief, verdict.of("gxi")
        ('Random map worse than a random order over 1 case (SRG -0.10)', None)
        """
        if method == self.method:
            return self
        rows = [row for row in self.methods if row["method"] == method]
        if not rows:
            return None
        return replace(self, kind=rows[0]["kind"], sentence="", method=method, methods=rows)

    def with_note(self, note: str) -> RunVerdict:
        """Append a note to the sentence."""
        return replace(self, sentence=f"{self.sentence.rstrip('.')}; {note}.")

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types for run.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RunVerdict:
        """Read from run.json; ignore fields of later versions."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in stored.items() if key in known})
