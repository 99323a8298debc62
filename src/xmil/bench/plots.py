"""Plots of a run: bars with spread, and example bags coloured by scores, with the truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from xmil.bench.digits import DIGITS, Signs
from xmil.bench.instances import mark_images, sklearn_images
from xmil.bench.protocol import Configuration
from xmil.bench.scoring import MethodSpec, score_bags
from xmil.bench.tables import AUROC, ResultTable, column_title, title_of
from xmil.bench.trained import load_stack
from xmil.bench.verdicts import base_of
from xmil.evaluate import auprc2
from xmil.evaluate.statistics import Floats
from xmil.heatmaps import Scale, method_colour, new_figure, write_figure
from xmil.methods import METHODS
from xmil.models import MILModel

PANELS_IN_A_ROW = 3
COLUMNS = 10  # digits side by side in a bag
LEGEND = ("red: evidence for", "blue: evidence against", "violet to yellow: a score without a sign")
NARROW = 3  # columns that a one-line title needs
Array = npt.NDArray[Any]


def draw_all(
    table: ResultTable, configurations: Sequence[Configuration], methods: Sequence[str], out: Path
) -> list[Path]:
    """Draw every plot of a run, with example bags for the models in the run's folder."""
    paths = [out / "bars.png"]
    draw_bars(table, paths[0])
    first = {base_of(text): text for text in reversed(methods)}  # the first variant of each method
    specs = [MethodSpec.parse(text) for text in methods if text in first.values() and text != "random"]
    for setup in {c.setup.name: c.setup for c in configurations}.values():
        panels: dict[tuple[str, str], TilePanel] = {}
        for c in (c for c in configurations if c.setup.name == setup.name):
            fitted = load_stack(out, c)
            if fitted is not None:
                example = _example(c, fitted.models.model(0), specs)
                panels |= {(row, c.task.name): panel for row, panel in example.items()}
        if panels:
            paths.append(out / f"bags-{setup.name}.png")
            draw_grid(panels, paths[-1], title=[setup.title, *LEGEND])
    return paths


def draw_bars(table: ResultTable, path: Path) -> None:
    """Draw AUPRC-2 of every method (mean, deviation, repetitions), one panel per task and model."""
    wide = min(PANELS_IN_A_ROW, len(table.columns))
    high = -(-len(table.columns) // wide)
    size = (4.2 * wide + 0.6, (0.26 * len(table.methods) + 0.9) * high + 0.6)
    figure, axes = new_figure(size, high, wide, dpi=150, squeeze=False, sharex=True)
    for axis, column in zip(axes.flat, table.columns, strict=False):
        methods = [method for method in table.methods if table.cell(method, column) is not None]
        for y, method in enumerate(methods):
            cell, base = table.cells[(*column, method)], base_of(method)
            style = {"color": method_colour(base), "alpha": 1.0 if base == method else 0.55}
            axis.barh(y, cell.mean, xerr=cell.std, **style, error_kw={"elinewidth": 1.0})
            axis.scatter(cell.values, np.full(len(cell.values), y), s=3, color="black", alpha=0.35, zorder=3)
            if cell.paper is not None:
                axis.scatter(cell.paper, y, s=26, marker="D", color="white", edgecolor="black", zorder=4)
        axis.set_yticks(range(len(methods)), [title_of(method) for method in methods], fontsize=8)
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.tick_params(axis="x", labelbottom=True, labelsize=8)
        axis.set_title(column_title(*column), fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(table.columns) :]:
        axis.set_visible(False)
    cells = [cell for (*_, method), cell in table.cells.items() if method != AUROC]
    has_paper = any(cell.paper is not None for cell in cells)
    marks = "dots: repetitions" + (", diamonds: the paper" if has_paper else "")
    figure.suptitle(f"AUPRC-2, mean and standard deviation ({marks})", fontsize=11)
    write_figure(figure, path)


def _example(c: Configuration, model: nn.Module, specs: Sequence[MethodSpec]) -> dict[str, TilePanel]:
    """Panels of a test bag: the truth, then each method; without images, with scikit-learn's digits."""
    assert isinstance(model, MILModel)  # noqa: S101  # narrows the type for mypy
    test, images = c.splits(0).test, c.prepared.images
    evidence = c.task.evidence(test.codes)
    bag, target = clearest_bag(evidence)
    truth = evidence[bag, target]
    pictures = _symbols()[test.codes[bag]] if images is None else images[test.rows[bag]]
    panels = {"truth": TilePanel(pictures, truth, signed=True, title=f"{c.task.title}, class {target}")}
    table = c.table()
    x = table.bags(table.to_rows(test.rows[bag : bag + 1]))
    for spec in [spec for spec in specs if spec.supports(model)]:
        scores = score_bags(model, x, spec)[0, target].double().cpu().numpy()
        title = f"AUPRC-2 {auprc2(truth, scores):.2f}"
        panels[title_of(str(spec))] = TilePanel(pictures, scores, METHODS[spec.name].signed, title)
    return panels


def clearest_bag(evidence: Signs) -> tuple[int, int]:
    """Find the bag and class whose evidence (b, c, n) has the most signs, in balanced numbers."""
    counts = np.stack([(evidence == sign).sum(axis=-1) for sign in (-1, 0, 1)])  # (3, b, c)
    kinds, least = (counts > 0).sum(axis=0), np.where(counts > 0, counts, counts.max() + 1).min(axis=0)
    order = np.lexsort((least.ravel(), (counts[2] > 0).ravel(), kinds.ravel()))
    bag, target = np.unravel_index(order[-1], kinds.shape)
    return int(bag), int(target)


def _symbols() -> Array:
    """An image of each digit, the nearest to their mean, plain and marked."""
    images, digits = sklearn_images()
    symbols = []
    for digit in range(DIGITS):
        own = images[digits == digit]
        symbols.append(own[np.square(own - own.mean(axis=0)).sum(axis=(1, 2)).argmin()])
    return np.concatenate([symbols, mark_images(np.stack(symbols))])


@dataclass(frozen=True)
class TilePanel:
    """Images (n, h, w) of a bag's digits, their scores (n,), and a title."""

    images: Array
    scores: Array
    signed: bool
    title: str


def draw_grid(panels: Mapping[tuple[str, str], TilePanel], path: Path, *, title: Sequence[str]) -> None:
    """Draw panels by row and column, with row names and the phrases of the title on top."""
    rows, columns = (list(dict.fromkeys(key[side] for key in panels)) for side in (0, 1))
    lines = len(title) if len(columns) < NARROW else 1
    deep = max(-(-len(panel.scores) // COLUMNS) for panel in panels.values())
    size = (3.1 * len(columns) + 0.3, (0.3 * deep + 0.3) * len(rows) + 0.2 * lines + 0.25)
    figure, axes = new_figure(size, len(rows), len(columns), dpi=150, squeeze=False)
    figure.set_layout_engine("constrained", w_pad=0.08)
    for i, row in enumerate(rows):
        for axis, column in zip(axes[i], columns, strict=True):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            panel = panels.get((row, column))
            if panel is None:
                axis.text(0.5, 0.5, "not for this model", ha="center", va="center", color="0.5", fontsize=8)
            else:
                tiles = colour_tiles(panel.images, panel.scores, signed=panel.signed)
                axis.imshow(tiles, interpolation="nearest")
                axis.set_title(panel.title, fontsize=9)
        axes[i, 0].set_ylabel(row, fontsize=10, fontweight="bold")
    figure.suptitle(("\n" if lines > 1 else "   ").join(title), fontsize=10 if lines > 1 else 11)
    write_figure(figure, path)


def colour_tiles(images: Array, scores: Array, *, signed: bool) -> Floats:
    """Draw the digits in black on tiles coloured by score, as RGB."""
    tiles = colours(scores, signed=signed)
    ink = np.pad(images / (images.max() or 1), ((0, 0), (1, 1), (1, 1)))[..., None]
    cells = tiles[:, None, None, :] * (1 - 0.92 * ink)
    cells = np.pad(cells, ((0, -len(cells) % COLUMNS), (0, 1), (0, 1), (0, 0)), constant_values=1.0)
    rows = [np.concatenate(cells[i : i + COLUMNS], axis=1) for i in range(0, len(cells), COLUMNS)]
    return np.concatenate(rows, axis=0)


def colours(scores: Array, *, signed: bool, depth: float = 0.7) -> Floats:
    """RGB (n, 3) in the heatmaps' colours, scaled to the largest score; a `depth` below 1 lightens them."""
    ends = np.array([scores.min(), scores.max()], dtype=np.float64)
    scale = Scale.of(ends if np.ptp(ends) else [0.0, 1.0], signed=signed, clip="none")
    return np.asarray(1 - depth * (1 - scale.paint(scores)[:, :3] / 255))
