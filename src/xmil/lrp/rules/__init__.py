"""The rules, by kind of operation. Each keeps the forward value bit for bit and replaces the gradient.

A rule is a function `rule(engine, function, *args, **kwargs)` called in place of `function(*args, **kwargs)`
when one of the arguments is live, that is, depends on the input. Importing this package registers them.
"""

from xmil.lrp.rules import activations, affine, attention, fused, maps, norms, products, scan, structure, ties

__all__ = [
    "activations",
    "affine",
    "attention",
    "fused",
    "maps",
    "norms",
    "products",
    "scan",
    "structure",
    "ties",
]
