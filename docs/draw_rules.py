"""Draw images/rules.png: four LRP rules on numbers one can check; the relevances come from the engine itself.

python docs/draw_rules.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import xmil
from xmil.lrp import AffineRule, Composite

OUT = Path(__file__).parent / "images" / "rules.png"
RED, BLUE, GREY = "#b2182b", "#2166ac", "0.45"


class Small(nn.Module):
    """One layer of three numbers: a bag of three instances of width one."""

    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """(1, 3, 1) to one output and a zero beside it, so that there are two classes."""
        out = self.layer(x.reshape(1, 3))
        return torch.cat([out, torch.zeros_like(out)], dim=1)


@dataclass(frozen=True)
class Picture:
    """A layer, its inputs and what stands beside each, and what it shows."""

    title: str
    inputs: tuple[float, float, float]
    edges: tuple[str, str, str]
    layer: Callable[[Tensor], Tensor]
    note: str
    bias: str = "absorb"


def linear(bias: float) -> Callable[[Tensor], Tensor]:
    """Weights 1, -1, 1."""
    layer = nn.Linear(3, 1)
    layer.weight.data, layer.bias.data = torch.tensor([[1.0, -1.0, 1.0]]), torch.tensor([bias])
    return layer


def attention(x: Tensor) -> Tensor:
    """Values weighted by a softmax that gives 0.2, 0.5, 0.3."""
    scores = torch.log(torch.tensor([[0.2, 0.5, 0.3]])) + 0 * x
    return (torch.softmax(scores, dim=1) * x).sum(dim=1, keepdim=True)


def first_of_norm(x: Tensor) -> Tensor:
    """The first output of a layer norm without weights."""
    return torch.nn.functional.layer_norm(x, (3,))[:, :1]


LINEAR_EDGES = ("w = 1", "w = -1", "w = 1")
PICTURES = (
    Picture(
        "Linear layer (epsilon rule)",
        (3, 1, 2),
        LINEAR_EDGES,
        linear(0.0),
        "Each input gets what it added:\nx times w. The sum is the output.",
    ),
    Picture(
        "Bias +2, absorb (default)",
        (3, 1, 2),
        LINEAR_EDGES,
        linear(2.0),
        "The bias keeps its share of 2;\nthe audit books it.",
    ),
    Picture(
        "Bias +2, redistribute",
        (3, 1, 2),
        LINEAR_EDGES,
        linear(2.0),
        "The inputs get the bias too,\nin proportion: times 6 / 4.",
        "redistribute",
    ),
    Picture(
        "Attention (AH-rule)",
        (2, -1, 3),
        ("a = 0.2", "a = 0.5", "a = 0.3"),
        attention,
        "Weights are constants: a times value.\nMost attention, yet evidence against.",
    ),
    Picture(
        "Layer norm (LN-rule), output 1",
        (4, 1, 1),
        ("+2/3 : std", "-1/3 : std", "-1/3 : std"),
        first_of_norm,
        "The deviation (1.41) is a constant,\nthe mean is not.",
    ),
)


def relevances(picture: Picture) -> tuple[list[float], float, float]:
    """The inputs' relevances, the bias share and the output."""
    bag = torch.tensor(picture.inputs).reshape(3, 1)
    rules = Composite({}, default=AffineRule(epsilon=1e-9, bias=picture.bias))
    e = xmil.explain(Small(picture.layer).eval(), bag, method="lrp", target=0, composite=rules)
    assert e.audit is not None  # noqa: S101
    return e.scores.tolist(), e.audit.bias, float(e.output)


def draw(axes: Axes, picture: Picture) -> None:
    """Inputs on the left with their relevance, edges as wide as it, the output on the right."""
    scores, bias, output = relevances(picture)
    for i, (value, label, score) in enumerate(zip(picture.inputs, picture.edges, scores, strict=True)):
        y, colour = 2.0 - i, RED if score > 0 else BLUE
        axes.plot([0, 2], [y, 1], color=colour, linewidth=1 + 2.2 * abs(score), alpha=0.75, zorder=1)
        axes.scatter([0], [y], s=700, color="white", edgecolors="black", zorder=2)
        axes.text(0, y, f"{value:g}", ha="center", va="center", fontsize=12)
        axes.text(
            -0.36, y, f"{score:+.2f}", ha="right", va="center", fontsize=12, color=colour, weight="bold"
        )
        x, off, side = ((0.8, 0.2, "bottom"), (0.32, 0.06, "bottom"), (0.8, -0.2, "top"))[
            i
        ]  # clear of the lines
        axes.text(x, y + (1 - y) * x / 2 + off, label, ha="left", va=side, fontsize=9, color=GREY)
    axes.scatter([2], [1], s=1500, color="white", edgecolors="black", zorder=2)
    axes.text(2, 1, f"{output:.2f}", ha="center", va="center", fontsize=12)
    if abs(bias) > 1e-3:
        axes.text(2, 0.3, f"bias keeps\n{bias:+.2f}", ha="center", va="top", fontsize=10, color=RED)
    axes.set_title(picture.title, fontsize=12, weight="bold")
    axes.text(0.7, -0.75, picture.note, ha="center", va="top", fontsize=10)
    axes.set_xlim(-1.2, 2.6)
    axes.set_ylim(-1.9, 2.6)
    axes.axis("off")


def main() -> None:
    """Draw all in one row of panels."""
    figure = Figure(figsize=(17, 4.6), dpi=110)
    figure.set_layout_engine("constrained")
    for axes, picture in zip(figure.subplots(1, len(PICTURES)), PICTURES, strict=True):
        draw(axes, picture)
    figure.suptitle(
        "In the circles: values. Left of the inputs: relevance (red for the output, blue against it). "
        "Lines are as wide as the relevance they carry.",
        fontsize=11,
        y=0.06,
    )
    figure.savefig(OUT)


if __name__ == "__main__":
    main()
