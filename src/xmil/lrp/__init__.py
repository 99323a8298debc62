"""Layer-wise relevance propagation on operations: works on any module, patches none."""

from xmil.lrp.composite import PLAIN, AffineRule, Composite
from xmil.lrp.operations import RULES, register_rule
from xmil.lrp.tracing import Flow, Relevance, Trace, trace

from xmil.lrp import rules  # isort: skip  # registers the rules, which need the names above

__all__ = [
    "PLAIN",
    "RULES",
    "AffineRule",
    "Composite",
    "Flow",
    "Relevance",
    "Trace",
    "register_rule",
    "rules",
    "trace",
]
