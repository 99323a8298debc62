"""The rules, by kind of operation. Each keeps the forward value bit for bit and replaces the gradient.

A rule is a function `rule(engine, function, *args, **kwargs)` called in place of `function(*args, **kwargs)`
when one of the arguments is live, that is, depends on the input. Importing this package registers them.
"""

from xmil.lrp.rules import activations, attention, linear, structure

__all__ = ["activations", "attention", "linear", "structure"]
