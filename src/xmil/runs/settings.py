"""What a run explains: methods, targets, parameters; checked against the models before the first slide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from xmil.core.errors import InputError, UnsupportedError, unknown_name
from xmil.core.target import Target
from xmil.core.task import RISK, TASKS
from xmil.data.cases import BY, Case
from xmil.methods import METHODS, list_methods
from xmil.methods.outputs import OUTPUTS, own_outputs
from xmil.methods.presets import PRESETS
from xmil.methods.registry import seeds
from xmil.models import MILModel
from xmil.models.base import ModelSpec

PREDICTED, LABEL, ALL = "predicted", "label", "all"


@dataclass(frozen=True)
class ExplainSettings:
    """Methods x targets for each bag.

    A target is "predicted" (for models without classes the value or the risk), "label", "all", a class by
    name or number, or a contrast "A:B". `params` holds a method's own parameters by its name. `reading` holds
    what `read_bag` takes: format, mpp, patch_size. `interactions` is among how many of the strongest patches
    pairs are looked for; 0 for none.
    """

    methods: tuple[str, ...] = ("lrp",)
    targets: tuple[str, ...] = (PREDICTED,)
    output: str | None = None
    params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    by: str = "slide"
    seed: int = 0
    reading: Mapping[str, Any] = field(default_factory=dict)
    interactions: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The settings in plain types; what earlier versions did not know only where it is asked for."""
        known = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}
        return known if self.interactions else {k: v for k, v in known.items() if k != "interactions"}

    @property
    def asks_bins(self) -> bool:
        """Whether a survival model is asked for more than its risk."""
        return not set(self.targets) <= {PREDICTED, RISK}

    def check(self, model: MILModel, spec: ModelSpec | None = None) -> None:
        """Refuse what the model or its methods cannot do; `spec` is that of the model's ensemble."""
        if self.by not in BY:
            raise unknown_name("grouping", self.by, BY)
        if self.interactions and (self.interactions < 2 or self.by != "slide"):
            raise InputError("--interactions takes two patches or more, of one slide (--by slide).")
        if not self.methods or not self.targets:
            raise InputError("There is nothing to explain: name at least one method and one target.")
        for method in self.methods:
            self._check_method(method, model)
        for method in self.params:
            if method not in self.methods:
                raise InputError(_stray(method, self.params[method], self.methods))
        for text in self.targets:
            _check_target(text, spec or model.spec)

    def _check_method(self, name: str, model: MILModel) -> None:
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
        able = list_methods(model)
        if name not in able:
            raise UnsupportedError(
                f"The method {name!r} cannot explain {model.spec.name}. Those that can: {', '.join(able)}."
            )
        METHODS[name].check_parameters(self.params.get(name, {}))
        preset = self.params.get(name, {}).get("preset", "default")
        if preset not in PRESETS:
            raise unknown_name("preset", preset, PRESETS)
        known = (*METHODS[name].outputs, *own_outputs())
        if self.output is not None and self.output not in known:
            raise unknown_name(f"output of {name}", self.output, known if self.output in OUTPUTS else OUTPUTS)

    def targets_of(self, case: Case, spec: ModelSpec, predicted: int | None = None) -> list[Any]:
        """The targets of one bag; `predicted` is the class of an ensemble, where the models may differ."""
        classes = list(range(spec.n_targets))
        found: list[Any] = []
        for text in self.targets:
            match text:
                case "predicted":
                    found.append(predicted)
                case "label":
                    found.append(_label(case))
                case "all":
                    found += classes
                case _:
                    found.append(resolved_target(text, spec))
        if ALL in self.targets:
            return [t for t in dict.fromkeys(map(Target.of, found)) if t.cls is not None]
        return list(dict.fromkeys(map(Target.of, found)))

    def method_params(self, method: str, name: str) -> dict[str, Any]:
        """A method's parameters for a bag; methods that draw at random get a draw of the bag's own."""
        own = self.params.get(method, {})
        return {**seeds(method, name, self.seed, contexts="contexts" in own), **own}


def with_contexts(
    params: Mapping[str, Mapping[str, Any]], methods: Sequence[str], contexts: int, keep: float
) -> Mapping[str, Mapping[str, Any]]:
    """The methods' parameters with contexts for those that take them.

    >>> with_contexts({}, ["lrp", "attention"], 24, 0.5)
    {'lrp': {'contexts': 24, 'keep': 0.5}}
    """
    if not contexts:
        return params
    able = [name for name in METHODS if METHODS[name].contexts]
    taking = [name for name in methods if name in able]
    if not taking:
        raise InputError(f"--contexts is for {', '.join(able)}; none of them is among the methods.")
    own = {"contexts": contexts, "keep": keep}
    return {**params, **{name: {**own, **params.get(name, {})} for name in taking}}


def with_vectors(
    params: Mapping[str, Mapping[str, Any]], methods: Sequence[str]
) -> Mapping[str, Mapping[str, Any]]:
    """The methods' parameters with relevance per feature for those that have it.

    >>> with_vectors({"lrp": {"preset": "paper"}}, ["lrp", "single"])
    {'lrp': {'preset': 'paper', 'feature_level': True}}
    """
    able = [name for name in METHODS if "feature_level" in METHODS[name].parameters]
    taking = [name for name in methods if name in able]
    if not taking:
        raise InputError(f"--save-vectors is for {', '.join(able)}; none of them is among the methods.")
    return {**params, **{name: {**params.get(name, {}), "feature_level": True} for name in taking}}


def parse_target(text: str, names: Sequence[str] | None) -> Target:
    """A target as users write it: a class by name or number, or a contrast of two.

    >>> str(parse_target("HPV+:HPV-", ["HPV-", "HPV+"])), parse_target("1", None).cls
    ('HPV+-vs-HPV-', '1')
    """
    if ":" in text and text not in (names or ()):
        first, second = text.split(":", 1)
        return Target(first.strip(), second.strip())
    return Target(text)


def resolved_target(text: str, spec: ModelSpec) -> Target:
    """A target by the number it has in every model of an ensemble, whatever each calls it."""
    names = spec.target_names
    return parse_target(text, names).resolve(n_classes=spec.n_targets, predicted=0, class_names=names)


def _stray(method: str, params: Mapping[str, Any], methods: Sequence[str]) -> str:
    """The sentence on parameters of a method that is not asked for."""
    given = "--preset" if list(params) == ["preset"] else f"--param {method}.{next(iter(params), '...')}"
    return f"{given} is for {method!r}, which is not among the methods ({', '.join(methods)})."


def _check_target(text: str, spec: ModelSpec) -> None:
    if text in (PREDICTED, ALL):
        return
    if text == LABEL:
        if TASKS[spec.task].truth != "class":
            raise InputError(
                f"The target 'label' is for classes; a {spec.task} model has none: use 'predicted'."
            )
        return
    target = resolved_target(text, spec)
    if target.against is not None and RISK in (target.name, target.against_name):
        raise InputError(f"The contrast {text!r} needs classes, values or time bins; a risk has none.")


def _label(case: Case) -> int:
    if case.label is None:
        raise InputError(f"{case.name}: has no label in the cohort, so --target label cannot be explained.")
    return int(case.label)
