"""Draw docs/images/study-*.png: the picture that each page of docs/studies opens with.

python docs/draw_studies.py [NAME ...]

A picture takes its numbers from its page, by the names of columns and rows, and its file keeps a digest of
what it took: a test fails once the page says something else. Without names all are drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from xmil.heatmaps.style import BLUE, RED, letter_figure, method_colour

STUDIES = Path(__file__).with_name("studies")
IMAGES = Path(__file__).with_name("images")
WIDE, DPI, COLOURS = 11.5, 120, 128  # inches, dots per inch, colours of the file
GREY, PALE, INK = "#8A8A8A", "#D5D5D5", "#222222"
LOOK = {"font.size": 14, "axes.titlesize": 15, "axes.titleweight": "bold", "axes.titlelocation": "left"}
LOOK |= {"text.color": INK, "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
Row = dict[str, str]


class Page:
    """A study's page: its tables and sentences, and what was taken from them."""

    def __init__(self, name: str) -> None:
        self.path = STUDIES / f"{name}.md"
        self.text = self.path.read_text(encoding="utf-8")
        self.taken: list[str] = []

    def table(self, *columns: str, under: str = "") -> list[Row]:
        """The rows of the first table with these columns, below a heading if one is named."""
        below = self.text[self.text.index(f"\n## {under}\n") :] if under else self.text
        for block in re.findall(r"(?:^\|.*\n)+", below, re.M):
            head, _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines())
            if all(head.count(column) == 1 for column in columns):
                self.taken.append(block)
                return [dict(zip(head, row, strict=True)) for row in rows]
        raise ValueError(f"{self.path.name} has no table with the columns {', '.join(columns)}.")

    def find(self, pattern: str) -> list[str]:
        """The groups of a pattern in the page's sentences."""
        match = re.search(pattern.replace(" ", r"\s+"), self.text)
        if match is None:
            raise ValueError(f"{self.path.name} does not say {pattern}.")
        self.taken.append(" ".join(match[0].split()))
        return list(match.groups())

    def digest(self) -> str:
        """What tells whether the page still says what was taken from it."""
        return hashlib.sha256("\n".join(self.taken).encode()).hexdigest()


def numbers(cell: str) -> list[float]:
    """The numbers of a cell.

    >>> numbers("**0.832** [0.789, 0.870]"), numbers("4.7 % of 2,000"), numbers("Table1")
    ([0.832, 0.789, 0.87], [4.7, 2000.0], [])
    """
    return [float(number.replace(",", "")) for number in NUMBER.findall(cell.replace("*", ""))]


def share(cell: str) -> float:
    """A share in per cent: of `14 of 200` or `4.7 % of 2,000`.

    >>> share("14 of 200"), share("4.7 % of 2,000")
    (7.0, 4.7)
    """
    part, whole = numbers(cell)
    return part if "%" in cell else 100 * part / whole


# Cards


def card(title: str, height: float) -> Figure:
    """A white card under a title."""
    figure = Figure(figsize=(WIDE, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04)
    figure.suptitle(title, x=0.01, ha="left", fontsize=18, fontweight="bold")
    return figure


def rows_of(axis: Any, labels: Sequence[str]) -> Any:
    """An axis with a row for each label, the first on top."""
    axis.set(yticks=range(len(labels)), yticklabels=labels, ylim=(len(labels) - 0.45, -0.6))
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    return axis


def pair_of(figure: Figure) -> Any:
    """Two axes side by side with the same rows."""
    return figure.subplots(1, 2, sharey=True)


def note(axis: Any, words: str, x: float, y: float, colour: str, **how: Any) -> None:
    """Words beside a point: `dx` and `dy` in font points from it."""
    shift = (how.pop("dx", 0), how.pop("dy", 0))
    how = {"ha": "left" if shift[0] else "center", "va": "center_baseline", "color": colour, **how}
    axis.annotate(words, (x, y), shift, textcoords="offset points", fontweight="bold", **how)


def dot(
    axis: Any, x: float, y: float, colour: str, *, ends: Sequence[float] = (), hollow: bool = False
) -> None:
    """A value, with its interval."""
    if ends:
        axis.hlines(y, *ends, color=colour, linewidth=2.5, zorder=2)
    face = "white" if hollow else colour
    axis.scatter(x, y, s=110, color=face, edgecolor=colour, linewidth=2, zorder=3)


def mark(axis: Any, x: float, words: str) -> None:
    """A goal or the level of chance, named on top."""
    axis.axvline(x, color=INK, linestyle=(0, (4, 3)), linewidth=1.5, zorder=0.5)
    note(axis, words, x, axis.get_ylim()[1], INK, dy=9)


def dots(axis: Any, groups: Sequence[str], ways: dict[str, str], values: Any, *, named: bool = False) -> None:
    """In each group a row for each way, in its colour; `values(group, way)` is a number and its deviation."""
    rows_of(axis, groups)
    for i, group in enumerate(groups):
        for j, (way, colour) in enumerate(ways.items()):
            value, *spread = values(group, way)
            y = i + 0.23 * (j - (len(ways) - 1) / 2)
            ends = [value - spread[0], value + spread[0]] if spread else []
            dot(axis, value, y, colour, ends=ends, hollow="half-bags" in way)
            words = f"{value:.3f}" + (f"  {way}" if named and group == groups[-1] else "")
            note(axis, words, max([value, *ends]), y, INK, dx=12)


# Pictures


def draw_choice(page: Page) -> Figure:
    """What `auto` gains on `lrp`, and what the best choice would."""
    gain, best = "gain", "gain of the best candidate in hindsight"
    (goal,) = page.find(r"a gain of ([\d.]+) was the goal")
    figure = card("Letting the model choose (auto) comes closer to the evidence than LRP alone", 4.6)
    rows, labels = page.table("nets", "background", gain, best), []
    for row in rows:
        nets = row["nets"].replace("standard", "standard models").replace("nonlinear", "nonlinear heads")
        labels.append(f"{nets},\n{'with' if row['background'] == 'yes' else 'without'} background")
    axis = rows_of(figure.subplots(), labels)
    for i, row in enumerate(rows):
        reached, possible = float(row[gain]), float(row[best])
        axis.barh(i, possible, height=0.62, color="#EEEEEE")
        axis.barh(i, reached, height=0.62, color=RED)
        inside = {"dx": -8, "ha": "right"} if reached > possible / 2 else {"dx": 8}
        note(axis, f"auto +{reached:.3f}", reached, i, "white" if inside["dx"] < 0 else RED, **inside)
        words = f"+{possible:.3f}" + ("" if i else " best choice in hindsight")
        note(axis, words, possible, i, GREY, dx=8)
    axis.vlines(float(goal), 1.55, 3.45, color=INK, linestyle=(0, (4, 3)), linewidth=1.5)
    note(axis, f"goal +{float(goal):.2f}\nfor nonlinear heads", float(goal), 1.5, INK, dy=20)
    axis.set(xlim=(0, 0.115), xlabel="gain over LRP in agreement with the known evidence (AUPRC-2)")
    return figure


def draw_beyond(page: Page) -> Figure:
    """AUPRC-2 of one pass, contexts and Shapley values."""
    tasks = ("4-Bags", "Pos-Neg (counts)", "Adjacent Pairs")
    shapley, lrp = "Shapley values", method_colour("lrp")
    keys = {"LRP, one pass": "LRP", "LRP, 24 half-bags": "LRP, 24 contexts"} | {shapley: shapley}
    ways = dict(zip(keys, (lrp, lrp, method_colour("shapley")), strict=True))
    rows = {row[""]: row for row in page.table(*tasks)}
    figure = card("One pass of LRP does as well as 24, and better than Shapley values", 5.2)
    for i, (axis, model) in enumerate(zip(pair_of(figure), ("AttnMIL", "TransMIL"), strict=True)):
        cells = {way: rows[f"{model}: {key}"] for way, key in keys.items()}
        dots(axis, tasks, ways, lambda task, way, c=cells: numbers(c[way][task])[:1], named=not i)
        axis.set_title(model)
        axis.set(xlim=(0.78, 1.02), xticks=[0.8, 0.85, 0.9, 0.95, 1.0])
    figure.supxlabel("agreement with the known evidence (AUPRC-2; 1 is perfect)", fontsize=14)
    return figure


def draw_foreign_models(page: Page) -> Figure:
    """A box for each model tried, red if it is refused."""
    counts: dict[str, list[bool]] = {}
    notes = {}
    for row in page.table("repository", "models that run", "not"):
        cell, name = row["models that run"], row["repository"]
        tally = re.search(r"(\d+) of (?:the )?(\d+)", cell)
        n = int(tally[1]) if tally else len(re.sub(r"\([^)]*\)", "", cell).split(","))
        counts[name] = [True] * n + [False] * (int(tally[2]) - n if tally else 0)
        notes[name] = row["not"].split(",")[0]
    for row in page.table("model", "source", "runs"):
        counts.setdefault(row["source"].split()[0], []).append(row["runs"].startswith("yes"))
    ours = {"xmil's own": counts.pop("xmil"), "small test networks": counts.pop("pattern")}
    counts = dict(sorted(counts.items(), key=lambda item: -len(item[1]))) | ours
    tried, run = sum(map(len, counts.values())), sum(map(sum, counts.values()))
    figure = card(f"LRP explains {run} of {tried} models, their code unchanged", 5.0)
    axis = rows_of(figure.subplots(), list(counts))
    for y, (name, runs) in enumerate(counts.items()):
        for x, fine in enumerate(runs):
            axis.add_patch(Rectangle((x, y - 0.33), 0.8, 0.66, color=BLUE if fine else RED))
        words = f"{sum(runs)} of {len(runs)}" + (f" ({notes[name]})" if notes.get(name) else "")
        note(axis, words, len(runs), y, BLUE if all(runs) else RED, dx=6)
    axis.set(xlim=(0, 53), xticks=[])
    axis.spines["bottom"].set_visible(False)
    axis.set_xlabel("a box for each model that could be built; blue: it runs and its audit closes")
    return figure


def draw_inside(page: Page) -> Figure:
    """AUROC of the maps at the nuclei."""
    names = {
        "turned": "turned",
        "LRP, eight views": "lrp on 12 x 12 places, over eight views moved by a sixth",
        "tokens": "tokens",
        "shifted": "shifted",
        "occlusion": "occlusion",
        "random": "random",
    }
    rows = {row["map"].strip("*"): row for row in page.table("map", "ResNet18", "MobileNetV2")}
    cells = {name: rows[key] for name, key in names.items()}
    (goal,) = page.find(r"The goal of ([\d.]+) is reached on ResNet18")
    interval = r"([\d.]+ \[[\d., ]+\])"
    dark = page.find(rf"Darkness alone.*? has {interval} on ResNet18's tiles and {interval}")
    cells["darkness, no model"] = dict(zip(("ResNet18", "MobileNetV2"), dark, strict=True))
    order = [*list(names)[:-1], "darkness, no model", "random"]
    figure = card("Of the maps inside a patch, turned lies best on the nuclei of the class", 5.4)
    for axis, encoder in zip(pair_of(figure), ("ResNet18", "MobileNetV2"), strict=True):
        rows_of(axis, order).set_title(f"encoder {encoder}", pad=28)
        for i, name in enumerate(order):
            value, *ends = numbers(cells[name][encoder])
            colour = RED if name == "turned" else GREY
            dot(axis, value, i, colour, ends=ends, hollow=i >= len(names) - 1)
            note(axis, f"{value:.3f}", 0.96, i, colour, ha="right")
        mark(axis, 0.5, "chance")
        mark(axis, float(goal), "goal")
        axis.set(xlim=(0.4, 0.97), xticks=[0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    figure.supxlabel("AUROC of the map, nuclei of the class against other nuclei", fontsize=14)
    return figure


def draw_insight(page: Page) -> Figure:
    """In how many cohorts the answer was right."""
    names = {
        "digits with a pen mark": "digits, task `confounder`: a pen mark gives the label away",
        "tissue with a tint": "colon halves, a tint on 75 to 95 % of one class",
        "tissue with a pen stroke": "colon halves, a pen stroke on 75 to 95 % of one class",
        "digits, nothing planted": "digits without marks",
        "tissue, nothing planted": "colon halves, clean",
    }
    rows = {row["study"]: row for row in page.table("study", "result", "goal")}
    figure = card("Planted shortcuts are found first, and clean cohorts raise no alarm", 4.4)
    axis = rows_of(figure.subplots(), list(names))
    for i, (name, key) in enumerate(names.items()):
        right, tried = numbers(rows[key]["result"])
        is_clean = "nothing" in name
        words = f"{'nothing reported' if is_clean else 'shortcut found first'} in {right:.0f} of {tried:.0f}"
        axis.barh(i, right, height=0.62, color=BLUE if is_clean else RED)
        note(axis, words, 0, i, "white", dx=12)
    (goal,) = {numbers(rows[key]["goal"])[0] for key in names.values()}
    mark(axis, goal, f"goal: {goal:.0f}")
    axis.set(xlim=(0, tried), xticks=range(0, int(tried) + 1, 5), xlabel="cohorts with the right answer")
    return figure


def draw_null_cohorts(page: Page) -> Figure:
    """False alarms by patient and by slide."""
    names = {
        "two equal methods, t-test": "two methods of `xmil evaluate`, t-test",
        "two equal methods, Wilcoxon": "two methods of `xmil evaluate`, Wilcoxon",
        "shortcut by age": "shortcuts of `xmil insight`: age",
        "shortcut by tint": "shortcuts of `xmil insight`: tint",
    }
    patients, slides = "patients as the unit", "slides taken as independent"
    rows = {row["test"]: row for row in page.table(patients, slides)}
    figure = card("Slides taken as independent invent effects; patients as the unit do not", 4.4)
    axis = rows_of(figure.subplots(), list(names))
    for i, key in enumerate(names.values()):
        right, wrong = share(rows[key][patients]), share(rows[key][slides])
        axis.hlines(i, right, wrong, color=PALE, linewidth=3, zorder=1)
        dot(axis, right, i, BLUE)
        dot(axis, wrong, i, RED)
        note(axis, f"{right:.1f} %" + ("" if i else "  patients as the unit"), 5, i, BLUE, dx=14, dy=16)
        note(axis, f"{wrong:.1f} %" + ("" if i else "  slides taken as independent"), wrong, i, RED, dx=12)
    (expected,) = page.find(r"\((\d+) % are expected\)")
    mark(axis, float(expected), f"expected: {expected} %")
    axis.set(xlim=(0, 60), xlabel="per cent of cohorts without an effect in which the test sees one")
    return figure


def draw_performance(page: Page) -> Figure:
    """The cost of LRP in forward passes."""
    what, cost = "what", "against a forward pass"
    alone, checked = "in forward passes", "in forward passes, check included"
    bars: list[tuple[str, float, float, str]] = []  # label, passes of LRP alone, of its check, words
    for row in page.table(what, cost):
        if "`lrp`" in row[what]:
            model, sizes = row[what].split()[0], re.findall(r"\d+,\d{3}", row[what])
            costs = numbers(row[cost].split("(")[0])
            bars += [(f"CPU: {model}, {n} patches", c, 0, f"{c}") for n, c in zip(sizes, costs, strict=True)]
    first = page.table("played", "not played")[0]
    label, time, forward = *list(first.values())[:2], numbers(next(iter(first.values())))[-1]
    passes = float(time) / forward
    bars.append((f"H200: {label.split(' (')[0]}", passes, 0, f"{passes:.1f}, which is {time} ms"))
    for row in page.table("patches", alone, checked)[1:]:
        passes, both = float(row[alone]), float(row[checked])
        words = f"{passes}, with its check {both}"
        bars.append((f"H200: TransMIL, {row['patches']} patches", passes, both - passes, words))
    figure = card("LRP costs about two forward passes; on a GPU its check adds up to three", 6.2)
    axis = rows_of(figure.subplots(), [label for label, *_ in bars])
    for i, (label, passes, check, words) in enumerate(bars):
        colour = BLUE if label.startswith("CPU") else RED
        axis.barh(i, passes, height=0.62, color=colour)
        axis.barh(i, check, left=passes, height=0.62, color=colour, alpha=0.3)
        note(axis, words, passes + check, i, colour, dx=8)
    mark(axis, 1, "one forward pass")
    axis.set(xlim=(0, 8.4), xticks=range(9), xlabel="time of LRP, in forward passes of the same bag")
    return figure


def draw_scale(page: Page) -> Figure:
    """Hours for a million slides."""
    what, hours = "10,000 patches per slide, `lrp`", "hours on one node of 32 cores"
    rows = {row[what]: row for row in page.table(what, hours) if row["slides"] == "1,000,000"}
    (read,) = page.find(r"TB take ([\d.]+) hours through it")
    (gpu,) = page.find(r"TransMIL slide, ([\d.]+) hours for a million")
    bars = {f"explain ({model}),\n32 cores": (float(row[hours]), RED) for model, row in rows.items()}
    bars["explain (TransMIL),\none H200"] = float(gpu), RED
    bars[f"read {rows['TransMIL']['read']} of features\nover 10 GbE"] = float(read), BLUE
    figure = card("Reading a million slides takes longer than explaining them", 4.6)
    axis = rows_of(figure.subplots(), list(bars))
    for i, (length, colour) in enumerate(bars.values()):
        axis.barh(i, length, height=0.62, color=colour)
        note(axis, f"{length:g} h", length, i, "white", dx=-8, ha="right")
    axis.set(xlim=(0, 10), xlabel="hours for a million slides of 10,000 patches")
    return figure


def draw_table2(page: Page) -> Figure:
    """The steps, and what was measured of them."""
    steps = re.findall(r"^## \d\. (.+)\n(?:.*\n)*?(xmil \w+)", page.text, re.M)
    page.taken += map(" ".join, steps)
    ink, ours, theirs = "inked patches left out", "AUROC of the test bags", "of the paper"
    out, inked = map(sum, zip(*(numbers(row[ink]) for row in page.table("held out", ink)), strict=True))
    known = [row for row in page.table("what", ours, theirs) if numbers(row[theirs])]
    aurocs = "\n".join(f"{row[ours]} (paper {row[theirs]})" for row in known)
    measured = {
        "xmil tile": f"pen marks:\n{out:,.0f} of {inked:,.0f} inked\npatches left out",
        "xmil train": f"on digits, test AUROC\n{aurocs}",
    }
    figure = card("Every step to the paper's Table 2 runs; the table itself is still to be made", 4.0)
    axis = figure.subplots()
    axis.set(xlim=(-0.5, len(steps) + 0.5), ylim=(-1.05, 0.95))
    axis.axis("off")
    axis.hlines(0.66, -0.4, len(steps) - 0.6, color=BLUE, linewidth=2)
    note(axis, "tried on drawn slides and on a stand-in cohort", (len(steps) - 1) / 2, 0.66, BLUE, dy=12)
    for i, (words, command) in enumerate([*steps, ("Table 2", "")]):
        colour, face, line = (BLUE, "#E8EFF6", "solid") if command else (RED, "white", (0, (4, 3)))
        style = {"facecolor": face, "edgecolor": colour, "linestyle": line, "linewidth": 2}
        axis.add_patch(FancyBboxPatch((i - 0.36, -0.32), 0.72, 0.8, boxstyle="round,pad=0.04", **style))
        note(axis, words, i, 0.22, INK)
        note(axis, command or "to be made,\nfrom the\nslides", i, -0.08, colour, fontsize=12)
        note(axis, measured.get(command, ""), i, -0.75, BLUE, fontsize=12)
    for i in range(len(steps)):
        arrow = {"arrowstyle": "->", "linewidth": 2}
        axis.annotate("", (i + 0.58, 0.08), (i + 0.42, 0.08), arrowprops=arrow)
    return figure


def draw_tissue(page: Page) -> Figure:
    """AUPRC-2 of LRP, attention and random order."""
    models = {"AttnMIL": "attnmil", "TransMIL": "transmil", "AddMIL": "addmil"}
    ways = {"LRP": "lrp", "attention": "attention", "random": "random"}
    colours = {way: method_colour(method) for way, method in ways.items()}
    tasks = ("Contains epithelial nuclei", "More epithelial than inflammatory nuclei")
    figure = card("In AttnMIL and TransMIL, LRP finds the deciding nuclei better than attention", 5.2)
    for axis, task in zip(pair_of(figure), tasks, strict=True):
        rows = page.table("method", "AUPRC-2", under=task)
        cells = {(row["model"], row["method"]): row["AUPRC-2"] for row in rows}
        value = lambda model, way, c=cells: numbers(c[models[model], ways[way]])  # noqa: E731
        dots(axis, list(models), colours, value, named=task == tasks[0])
        axis.set_title(task)
        axis.set(xlim=(0.35, 1.05), xticks=[0.4, 0.6, 0.8, 1.0])
    figure.supxlabel("agreement with the labelled nuclei (AUPRC-2, ± deviation over ten runs)", fontsize=14)
    return figure


PICTURES: dict[str, Callable[[Page], Figure]] = {
    name.removeprefix("draw_").replace("_", "-"): each
    for name, each in list(globals().items())
    if name.startswith("draw_")
}


def picture_of(name: str) -> Path:
    """The file of a study's picture."""
    return IMAGES / f"study-{name}.png"


def write_picture(name: str) -> None:
    """Draw a study's picture, with its title and the digest of what it took from the page."""
    page, stream, about = Page(name), io.BytesIO(), PngInfo()
    with mpl.rc_context(LOOK):
        figure = letter_figure(PICTURES[name](page))
        figure.savefig(stream, format="png", facecolor="white")
    about.add_text("Title", figure.get_suptitle())
    about.add_text("Source", page.digest())
    rgb = Image.open(stream).convert("RGB")
    few = rgb.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(picture_of(name), optimize=True, pnginfo=about)
    print(f"{picture_of(name).name}: {few.size}, {picture_of(name).stat().st_size // 1000} kB")


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    for name in parser.parse_args().names or PICTURES:
        write_picture(name)


if __name__ == "__main__":
    main()
