"""Layer-wise relevance propagation on operations: works on any module and patches none."""

from xmil.lrp.engine import COMPARE, HOOKS, Engine, Relevance, Trace, hooked, innermost_module, record, trace
from xmil.lrp.marks import part_of_bag
from xmil.lrp.operations import (
    FUNCTION_RULES,
    RULES,
    AffineRule,
    Composite,
    backward_is_rule,
    register_function,
    register_rule,
)
from xmil.lrp.values import Flow, fetch, scaled_gradient, with_gradient_of

from xmil.lrp import replay, rules  # isort: skip  # registers the rules, which need the names above

__all__ = [
    "COMPARE",
    "FUNCTION_RULES",
    "HOOKS",
    "RULES",
    "AffineRule",
    "Composite",
    "Engine",
    "Flow",
    "Relevance",
    "Trace",
    "backward_is_rule",
    "fetch",
    "hooked",
    "innermost_module",
    "part_of_bag",
    "record",
    "register_function",
    "register_rule",
    "replay",
    "rules",
    "scaled_gradient",
    "trace",
    "with_gradient_of",
]
