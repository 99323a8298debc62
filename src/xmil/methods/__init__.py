"""Explanation methods behind one `explain`: one file for each kind."""

from xmil.methods import attention, gradients, lrp, milli, perturbation, simple
from xmil.methods.explain import explain, explain_classes, list_methods
from xmil.methods.registry import METHODS, Attribution, Attributions, Method, register_method

__all__ = [
    "METHODS",
    "Attribution",
    "Attributions",
    "Method",
    "attention",
    "explain",
    "explain_classes",
    "gradients",
    "list_methods",
    "lrp",
    "milli",
    "perturbation",
    "register_method",
    "simple",
]
