"""Layer-wise relevance propagation on operations: works on any module, patches none."""

from xmil.lrp.composite import PLAIN, AffineRule, Composite
from xmil.lrp.engine import Engine
from xmil.lrp.flow import Flow
from xmil.lrp.functions import FUNCTION_RULES, backward_is_rule, register_function
from xmil.lrp.operations import RULES, register_rule
from xmil.lrp.tracing import Relevance, Trace, record, trace
from xmil.lrp.values import scaled_gradient, with_gradient_of

from xmil.lrp import rules  # isort: skip  # registers the rules, which need the names above

__all__ = [
    "FUNCTION_RULES",
    "PLAIN",
    "RULES",
    "AffineRule",
    "Composite",
    "Engine",
    "Flow",
    "Relevance",
    "Trace",
    "backward_is_rule",
    "record",
    "register_function",
    "register_rule",
    "rules",
    "scaled_gradient",
    "trace",
    "with_gradient_of",
]
