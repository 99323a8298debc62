"""Explanation methods behind one `explain`: one file for each kind."""

from xmil.methods import attention, gradients, lrp, milli, perturbation, shapley, simple
from xmil.methods.explain import explain, explain_classes, explain_targets, list_methods
from xmil.methods.interactions import interactions
from xmil.methods.network import memory_budget
from xmil.methods.registry import METHODS, Attribution, Attributions, Method, register_method

__all__ = [
    "METHODS",
    "Attribution",
    "Attributions",
    "Method",
    "attention",
    "explain",
    "explain_classes",
    "explain_targets",
    "gradients",
    "interactions",
    "list_methods",
    "lrp",
    "memory_budget",
    "milli",
    "perturbation",
    "register_method",
    "shapley",
    "simple",
]
