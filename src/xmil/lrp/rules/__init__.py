"""The rules, by kind of operation. Each keeps the forward value bit for bit and replaces the gradient.

The engine calls `rule(engine, function, *args, **kwargs)` in place of `function(*args, **kwargs)` if one of
the arguments is live, that is, depends on the input. Importing this package registers the rules.
"""

from xmil.lrp.rules import activations, attention, linear, structure

__all__ = ["activations", "attention", "linear", "structure"]
