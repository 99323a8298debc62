"""How methods are named and coloured wherever scores are shown; known without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

OTHER_COLOUR = "#0072B2"


@dataclass(frozen=True)
class MethodCard:
    """A method as readers know it: a title for pictures, a short one for tables, and its colour in plots."""

    title: str
    short: str
    colour: str = OTHER_COLOUR


# In the order of tables. Okabe and Ito's colours, which stay apart for colour-blind readers.
CARDS = {
    "random": MethodCard("Random", "Random", "#999999"),
    "attention": MethodCard("Attention", "Attention", "#E69F00"),
    "single": MethodCard("Single instance", "Single", "#56B4E9"),
    "one_removed": MethodCard("One removed", "One removed", "#56B4E9"),
    "combined": MethodCard("Combined", "Combined", "#56B4E9"),
    "milli": MethodCard("MILLI", "MILLI"),
    "shapley": MethodCard("Shapley value", "Shapley", "#000000"),
    "logits": MethodCard("Instance logits", "Logits", "#F0E442"),
    "gxi": MethodCard("Gradient x input", "G x I", "#CC79A7"),
    "grad2": MethodCard("Squared gradient", "Grad^2", "#CC79A7"),
    "ig": MethodCard("Integrated gradients", "IG", "#009E73"),
    "lrp": MethodCard("xMIL-LRP", "xMIL-LRP", "#D55E00"),
}


def card_of(method: str) -> MethodCard:
    """The card of a method; one that is not ours goes by its name.

    >>> card_of("ig").title, card_of("my_method").short
    ('Integrated gradients', 'my_method')
    """
    return CARDS.get(method) or MethodCard(method, method)
