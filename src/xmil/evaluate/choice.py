"""Choose the method that explains a model: the one whose order of patches the model itself confirms.

Candidates are compared by their SRG on the same bags, paired over cases. `lrp` stays unless another is
significantly better. `explain` here is the public one, which accepts `method="auto"`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
from torch import nn

from xmil.core.bag import Bag
from xmil.core.errors import InputError, UnsupportedError, bad_parameter
from xmil.core.explanation import Explanation
from xmil.core.text import counted
from xmil.core.verdict import RunVerdict
from xmil.evaluate.curves import Bags, Flips
from xmil.evaluate.statistics import Floats, bootstrap_mean, holm, sign_flip_p, unit_means
from xmil.evaluate.verdict import FEWEST, FEWEST_CASES, MOST, SMALLEST, Judge, judge_cohort
from xmil.methods import METHODS, explain_targets, list_methods, seeds
from xmil.methods import explain as explain_by
from xmil.network import ForwardFunction, as_bag, as_model

if TYPE_CHECKING:
    import pandas as pd

AUTO, ALL = "auto", "all"
Parameters = Mapping[str, Mapping[str, Any]]
CONTEXTS = {"contexts": 24, "keep": None}  # sub-bags of all sizes
AFFORDABLE = 1024  # patches of the median bag, above which sub-bags are no candidate
CANDIDATES: dict[str, tuple[str, dict[str, Any]]] = {  # the first stays unless another is better
    "lrp": ("lrp", {}),
    "lrp over sub-bags": ("lrp", CONTEXTS),
    "one_added": ("one_added", {}),
}
LEVEL, FEW_BETTER = 0.05, 0.05  # of the paired test; the gain required if cases are too few for it
LITTLE = "one bag is little to choose by; pass some bags of the same kind as `like=`"


@dataclass(frozen=True, eq=False)
class Choice:
    """A method for a model, with the figures behind the choice.

    `method` and its `params` go to `explain`. `rows` has each candidate's mean SRG, its interval over cases,
    its gain over the first candidate, the p of that gain, and the number of bags that refuse it. `bags` names
    the compared bags, which belong to `n_cases` cases; `srgs` has the SRG of each candidate on each bag.
    `verdict` is on the choice: each half of the cases judges the choice of the other half; None for one case.
    """

    method: str
    candidate: str
    rows: list[dict[str, Any]]
    bags: list[str]
    params: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    srgs: Mapping[str, Floats] = field(default_factory=dict)
    n_cases: int = 0
    verdict: RunVerdict | None = None

    @property
    def table(self) -> pd.DataFrame:
        """A row for each candidate, by its name: srg, interval, gain, p, and bags that refuse it."""
        import pandas as pd

        return pd.DataFrame(self.rows).set_index("candidate")

    @property
    def sentence(self) -> str:
        """The choice with its reason."""
        if not self.bags:
            needs = f"bags with at least {FEWEST} patches and an output that is not zero"
            return f"Kept {self.candidate} without a comparison, which needs {needs}."
        figures = ", ".join(
            f"{row['candidate']} " + ("refused" if row["refused"] == len(self.bags) else f"{row['srg']:.2f}")
            for row in self.rows
        )
        of = "" if self.n_cases in (0, len(self.bags)) else f" of {counted(self.n_cases, 'case')}"
        return f"Chosen on {counted(len(self.bags), 'bag')}{of}: {self.candidate} (SRG: {figures})."

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types for run.json."""
        names = ("method", "candidate", "params", "rows", "bags", "seed", "n_cases")
        verdict = None if self.verdict is None else self.verdict.as_dict()
        return {**{name: getattr(self, name) for name in names}, "verdict": verdict}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Choice:
        """Read from run.json."""
        own = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
        verdict = own.pop("verdict", None)
        return cls(**own, verdict=RunVerdict.from_dict(verdict) if isinstance(verdict, dict) else None)


def choose_method(
    model: nn.Module | str | PathLike[str],
    bags: Sequence[Bags],
    candidates: Sequence[str] | None = None,
    seed: int = 0,
    *,
    cases: Sequence[Any] | None = None,
    target: Any = None,
    params: Parameters | None = None,
    **how: Any,
) -> Choice:
    """Choose the method whose order of patches the model confirms best, by SRG on some bags.

    `candidates` are names of `CANDIDATES` or of methods; the first stays unless another is better by at least
    0.01 in a paired test over `cases` (one for each bag; by default each bag is a case). If cases are too few
    for that test, fewer than six for three candidates, the other must be better in each, by 0.05 on average.
    Larger bags are sampled down to 2,048 patches. A candidate that more bags refuse than another is not
    chosen. `params` has parameters of methods, by name; `how` is `forward`, `returns` and `average`, as for
    `explain`.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=8, n_classes=1, seed=0)
    >>> bags = [torch.randn(20, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    >>> choice = choose_method(net, bags)
    >>> choice.method, len(choice.bags), list(choice.table.columns)
    ('lrp', 6, ['srg', 'interval', 'gain', 'p', 'refused'])
    """
    if isinstance(bags, Bag | str | PathLike) or not len(bags):
        value = type(bags).__name__ if isinstance(bags, Bag | str | PathLike) else []
        raise bad_parameter("bags", "choose_method", "a list of at least one bag", value)
    net = as_model(model)
    read = [draw_part(as_bag(bag), seed) for bag in bags]
    names = [str(getattr(bag, "slide_id", None) or i) for i, bag in enumerate(read)]
    cases = names if cases is None else cases
    n = int(np.median([len(bag) for bag in read]))
    tried = find_candidates(net, candidates, n=n, params=params, **how)
    measured = [measure_bag(net, bag, tried, target=target, seed=seed, **how) for bag in read]
    rows = [i for i, own in enumerate(measured) if own]
    names, cases = [names[i] for i in rows], [cases[i] for i in rows]
    srgs = {label: np.array([measured[i][label] for i in rows]) for label in tried}
    choice = choose(srgs, tried, names=names, cases=cases, seed=seed)
    return choice if choice.n_cases < 2 else cross_fitted(choice, tried, cases)


def find_candidates(
    model: nn.Module,
    candidates: Sequence[str] | None,
    *,
    n: int,
    params: Parameters | None = None,
    forward: Any = None,
    **_: Any,
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Find the candidates that can explain a model, with methods and parameters, for bags of n patches."""
    if isinstance(candidates, str) or (candidates is not None and not len(candidates)):
        raise bad_parameter("candidates", "choose_method", "a list of names", candidates)
    able = list_methods(model) if forward is None else list_methods()
    tried = {name: CANDIDATES.get(name, (name, {})) for name in candidates or CANDIDATES}
    unknown = [method for method, _ in tried.values() if method not in list_methods()]
    if unknown:
        known = ", ".join(dict.fromkeys((*CANDIDATES, *list_methods())))
        raise InputError(f"Unknown candidate {unknown[0]!r}. Known: {known}.")
    affordable = n <= AFFORDABLE or candidates is not None
    return {
        label: (method, {**own, **(params or {}).get(method, {})})
        for label, (method, own) in tried.items()
        if method in able and (affordable or not own)
    }


def measure_bag(
    model: nn.Module,
    bag: Any,
    tried: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    target: Any = None,
    seed: int = 0,
    **how: Any,
) -> dict[str, float]:
    """Measure the SRG of each candidate on one bag, in units of the output's scale; nan if it is refused.

    Return nothing for a bag that cannot rank candidates: too few patches, or an output that is always zero.
    """
    flips = Flips(model, bag, target=target, **how)
    srgs: dict[str, float] = {}
    name, judging = str(getattr(bag, "slide_id", None)), Judge(flips, seed=seed)
    if flips.n < FEWEST or not flips.scale:
        return srgs
    for label, (method, params) in tried.items():
        own = {**seeds(method, name, seed, contexts="contexts" in params), **params}
        try:
            e = explain_by(model, bag, method=method, target=flips.output.target, check=False, **how, **own)
        except (InputError, UnsupportedError):
            srgs[label] = float("nan")
            continue
        srgs[label] = float(judging.srgs([e.scores])[0]) / flips.scale
    return srgs


def choose(
    srgs: Mapping[str, Floats],
    tried: Mapping[str, tuple[str, dict[str, Any]]],
    *,
    names: Sequence[str],
    cases: Sequence[Any],
    seed: int = 0,
) -> Choice:
    """Choose by the SRGs (bags,) of the candidates; the first stays unless another is significantly better.

    A candidate that a bag refuses (nan) counts as a random order there, and is not chosen if another is
    refused less often. Without bags the first stays.
    """
    refused = {label: int(np.isnan(srgs[label]).sum()) for label in tried}
    if not tried or (names and len(names) <= min(refused.values())):
        raise UnsupportedError("None of the candidates can explain this model; name others.")
    measured, srgs = srgs, {label: np.nan_to_num(srgs[label]) for label in tried}
    first, *others = (label for label in tried if refused[label] == min(refused.values()))
    n_cases = len(set(map(str, cases)))
    gains = {label: srgs[label] - srgs[first] for label in others}
    p: dict[str, float] = {}
    if others and len(others) * 0.5**n_cases <= LEVEL:  # the smallest possible p, after Holm
        rng = np.random.default_rng(seed)
        each = [sign_flip_p(gain, units=cases, rng=rng, two_sided=False) for gain in gains.values()]
        p = dict(zip(others, holm(each).tolist(), strict=True))
    best, highest = first, float("-inf")
    rows: list[dict[str, Any]] = []
    for label in tried:
        mean = float(unit_means(srgs[label], cases).mean()) if n_cases else float("nan")
        interval = None
        if n_cases >= FEWEST_CASES:
            bounds = bootstrap_mean(srgs[label], units=cases, seed=seed)
            interval = (bounds.low, bounds.high)
        gain = float(unit_means(gains[label], cases).mean()) if label in gains and n_cases else None
        row = {"candidate": label, "srg": mean, "interval": interval, "gain": gain, "p": p.get(label)}
        rows.append({**row, "refused": refused[label]})
        if label == first or (gain is not None and _is_better(gains[label], gain, p.get(label))):
            best, highest = (label, mean) if mean > highest else (best, highest)
    method, params = tried[best]
    return Choice(method, best, rows, list(names), dict(params), seed, measured, n_cases)


def cross_fitted(
    choice: Choice,
    tried: Mapping[str, tuple[str, dict[str, Any]]],
    cases: Sequence[Any],
    *,
    unit: str = "case",
) -> Choice:
    """Add a verdict to a choice: judge each half of the cases by the method that the other half chose."""
    units, srgs = list(map(str, cases)), choice.srgs
    first = set(list(dict.fromkeys(units))[::2])
    half, values = np.array([unit in first for unit in units]), np.zeros(len(units))
    for rows in (np.flatnonzero(half), np.flatnonzero(~half)):
        own = {label: column[rows] for label, column in srgs.items()}
        pick = choose(own, tried, names=(), cases=[units[i] for i in rows], seed=choice.seed)
        judging = np.setdiff1d(np.arange(len(units)), rows)
        values[judging] = np.nan_to_num(srgs[pick.candidate][judging])
    others = {  # lrp over sub-bags is lrp, too
        f"plain {label}" if label == choice.method else label: np.nan_to_num(column)
        for label, column in srgs.items()
        if label != choice.candidate
    }
    every = {choice.method: values, **others}
    verdict = judge_cohort(every, units=units, unit=unit, seed=choice.seed)
    note = "each half of the cases is judged by the method that the other half chose"
    return replace(choice, verdict=verdict.with_note(note))


def _is_better(gains: Floats, gain: float, p: float | None) -> bool:
    """Whether gains over bags are significant; p is None if cases are too few for a test."""
    if p is None:
        return bool((gains > 0).all()) and gain >= FEW_BETTER
    return p <= LEVEL and gain >= SMALLEST


@overload
def explain(
    model: nn.Module | str | PathLike[str], bag: Bags, *, target: Literal["all"], **options: Any
) -> list[Explanation]: ...


@overload
def explain(model: nn.Module | str | PathLike[str], bag: Bags, **options: Any) -> Explanation: ...


def explain(
    model: nn.Module | str | PathLike[str],
    bag: Bags,
    *,
    method: str = "lrp",
    target: Any = None,
    output: str | None = None,
    forward: ForwardFunction | None = None,
    returns: str | None = None,
    average: int | None = None,
    device: str | None = None,
    check: bool = True,
    like: Sequence[Bags] | None = None,
    **params: Any,
) -> Explanation | list[Explanation]:
    """Score each instance for one target.

    `target` is a class index or name, a Target, or None for the predicted class; for models without classes
    None is the value or the risk. "all" gives a list of explanations, as `explain_classes` does. `output` is
    the explained number: "logit", "contrastive", "log_odds" or "probability" of a class, "value" (minus its
    reference) of a regression, "risk" of a survival model; each method has its own default. `params` are the
    method's own. `method="auto"` uses the method that `choose_method` chooses on the bags `like`, or on the
    bag itself; each candidate gets those `params` that it has.

    Model and bag may be paths. For your own module a trial call decides how to call it and records that in
    `e.params["call"]`; if that fails or is wrong, pass `forward`: `forward(net, x)` gets x (1, n, d) and
    returns logits (1, c), and whatever its signature names after a star (`*, coords, adjacency, index`)
    travels with the instances. `returns="probability"` is for modules that return probabilities; `average=K`
    takes the mean of K seeded draws of a module that is random in eval mode. `device` is where to compute,
    such as "cuda"; the model is moved back afterwards. Signed scores are checked (`check`): `e.warnings` says
    so if the half of the patches with the lower scores has the higher output.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> e = explain(net, torch.ones(3, 4), method="lrp", target=1)
    >>> len(e.scores), e.method, e.target == 1
    (3, 'lrp', True)
    """
    how: dict[str, Any] = {"forward": forward, "returns": returns, "average": average}
    options: dict[str, Any] = {"output": output, "device": device, "check": check, **how}
    targets = None if isinstance(target, str) and target == ALL else [target]
    if method != AUTO:
        if like is not None:
            raise InputError("`like=` is only for `method='auto'`, which chooses the method by these bags.")
        explanations = explain_targets(model, bag, targets, method=method, **options, **params)
        return explanations if targets is None else explanations[0]
    model, bag = as_model(model), as_bag(bag)
    chosen_for = target if like is None and targets is not None else None
    candidate_params = {
        method: {name: value for name, value in params.items() if name in METHODS[method].parameters}
        for method, _ in CANDIDATES.values()
    }
    bags = [bag] if like is None else like
    choice = choose_method(model, bags, target=chosen_for, params=candidate_params, **how)
    known = {name for each in candidate_params.values() for name in each}
    unknown = {name: params[name] for name in params.keys() - known}  # explain_targets refuses them
    options |= {**choice.params, **unknown}
    notes = (f"{choice.sentence[:-1]}; {LITTLE}.",) if like is None else ()
    verdict = None if choice.verdict is None else choice.verdict.kind
    record = {"chosen_by": AUTO, "chosen_on": len(choice.bags), "verdict": verdict}
    explanations = [
        replace(e, params={**e.params, **record}, warnings=(*e.warnings, *notes))
        for e in explain_targets(model, bag, targets, method=choice.method, **options)
    ]
    return explanations if targets is None else explanations[0]


def explain_classes(model: nn.Module | str | PathLike[str], bag: Bags, **options: Any) -> list[Explanation]:
    """Explain each class, in one forward pass if the method allows it; options of `explain`.

    The classes of a survival model are its time bins, followed by its risk.

    >>> import torch, xmil
    >>> net = xmil.create_model("meanpool", in_dim=4, n_classes=2, seed=0)
    >>> [int(e.target) for e in explain_classes(net, torch.ones(3, 4), method="lrp")]
    [0, 1]
    """
    explanations: list[Explanation] = explain(model, bag, target="all", **options)
    return explanations


def draw_part(bag: Any, seed: int) -> Any:
    """Draw at most 2,048 patches of a bag."""
    if len(bag) <= MOST:
        return bag
    rows = np.sort(np.random.default_rng([seed, 0x5E7]).choice(len(bag), MOST, replace=False))
    return bag.select(rows) if isinstance(bag, Bag) else bag[rows]
