"""Which rule where: settings of the affine rule, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from xmil.core.errors import InputError, bad_parameter

BIAS_POLICIES = ("absorb", "redistribute")
GATE_RULES = ("signal", "uniform")


@dataclass(frozen=True)
class AffineRule:
    """Settings of the epsilon and gamma rules for linear layers, convolutions and batch norm.

    `bias="absorb"`: the bias keeps its share. `bias="redistribute"`: the bias is left out of the
    denominator, so that the inputs receive everything; this needs an epsilon. `constant`: the result is a
    constant, and what it receives is cut. `signed`: gamma strengthens the terms that agree with the sign of
    the result (inputs below zero and results below zero included), so that no denominator is smaller than
    the result itself.
    """

    epsilon: float = 0.0
    gamma: float = 0.0
    bias: str = "absorb"
    constant: bool = False
    signed: bool = False

    def __post_init__(self) -> None:
        if self.bias not in BIAS_POLICIES:
            raise bad_parameter("bias", "AffineRule", f"one of {list(BIAS_POLICIES)}", self.bias)
        for name in ("epsilon", "gamma"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise bad_parameter(name, "AffineRule", "a float in the range [0, inf)", getattr(self, name))
        if self.bias == "redistribute" and self.epsilon == 0:
            raise bad_parameter("epsilon", "AffineRule with bias='redistribute'", "above zero", self.epsilon)

    @property
    def is_gradient(self) -> bool:
        """Whether autograd's own gradient is the rule already."""
        return self.epsilon == 0 and self.gamma == 0 and self.bias == "absorb"


PLAIN = AffineRule()


@dataclass(frozen=True)
class Composite:
    """The affine rule of every parameter: the first pattern that fits its name decides, else `default`.

    `attention` is the epsilon of sums weighted by constants (AH-rule). `gates`: a product of two live tensors
    is shared in halves ("uniform"), or, where one of them comes from a sigmoid, goes to the other alone
    ("signal").

    >>> Composite({"head.*": AffineRule(gamma=0.1)}).rule_for("head.weight").gamma
    0.1
    """

    overrides: dict[str, AffineRule] = field(default_factory=dict)
    default: AffineRule = PLAIN
    attention: AffineRule = PLAIN
    gates: str = "signal"

    def __post_init__(self) -> None:
        if self.gates not in GATE_RULES:
            raise bad_parameter("gates", "Composite", f"one of {list(GATE_RULES)}", self.gates)

    def check_names(self, parameters: Iterable[str]) -> None:
        """Refuse a pattern that fits no parameter: a typing error would go unnoticed."""
        names = list(parameters)
        for pattern in self.overrides:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InputError(
                    f"The pattern {pattern!r} of the composite fits none of: {', '.join(names)}."
                )

    def rule_for(self, parameter: str | None) -> AffineRule:
        """The rule of a parameter by its dotted name; None stands for a weight that is not a parameter."""
        for pattern, rule in self.overrides.items():
            if parameter is not None and fnmatchcase(parameter, pattern):
                return rule
        return self.default
