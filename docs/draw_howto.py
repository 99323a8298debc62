"""Draw docs/images/howto-*.png and colours.png: one picture for each how-to page.

PYTHONPATH=. python docs/draw_howto.py [NAME ...]

Everything is drawn from `xmil demo --tissue` and scikit-learn's digits, so that anyone can draw it again. The
demonstration is made once, in build/howto; remove that folder to start afresh. Without names all are drawn.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from PIL import Image, ImageChops
from scipy import ndimage
from torch import nn

import xmil
from xmil.demo.tissue import TissueDemo, read_sections
from xmil.encoders.encoder import Encoder, Transform
from xmil.evaluate import Flips
from xmil.heatmaps import Scale, View, picture_box
from xmil.heatmaps.style import BLUE, RED

ROOT = Path(__file__).parents[1]
IMAGES, WORK = ROOT / "docs" / "images", ROOT / "build" / "howto"
WIDE, DPI, MOST = 9.2, 120, 150_000  # inches, dots per inch, bytes of a picture
FOR, AGAINST, GREY, INK = "#C8343F", "#3A7CB8", "#8A8A8A", "#222222"
RC = {"font.size": 10, "axes.titlesize": 11, "axes.titleweight": "bold", "text.color": INK}
TUMOUR, COLUMNS = "tumour", 92  # columns of a terminal


# The demonstration that all pictures share


def run(*words: object, check: bool = True, stop: Callable[[], bool] | None = None) -> str:
    """What `xmil WORDS` prints on the desk; it gets Ctrl-C once `stop` holds."""
    paths = map(str, (ROOT / "src", ROOT, desk() / "site"))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(COLUMNS)}
    env |= {"PYTHONPATH": os.pathsep.join(paths), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    command = [sys.executable, "-m", "xmil.cli", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, cwd=desk(), **pipes) as process:
        while stop and process.poll() is None:
            if stop():
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.002)
        printed, bars = process.communicate()
    if check and process.returncode:
        raise RuntimeError(f"xmil {' '.join(map(str, words))}: {bars}")
    return (bars + printed).rstrip()


def enter(line: str, **options: Any) -> tuple[str, str]:
    """A command as one types it, and what it prints."""
    words = line.split("#")[0].split()
    return line, run(*words[1:], **options)


@cache
def desk() -> Path:
    """The folder in which commands run."""
    (WORK / "desk").mkdir(parents=True, exist_ok=True)
    return WORK / "desk"


def clear_desk(*names: str) -> Path:
    """The model and the features of the test sections under short names; nothing of these names yet."""
    files = [f"features/{name}.h5" for name in tissue().names["test"]]
    made = {file: tissue().out / file for file in files} | {"model.safetensors": tissue().model}
    for name, path in made.items():
        (desk() / name).parent.mkdir(exist_ok=True)
        if not (desk() / name).exists():
            (desk() / name).symlink_to(path)
    for name in names:
        shutil.rmtree(desk() / name, ignore_errors=True)
    return desk()


@cache
def tissue() -> TissueDemo:
    """The demonstration on drawn tissue, made once."""
    out = WORK / "tissue"
    if not (out / "report.html").is_file():
        run("demo", "--tissue", "--out", out)
    return TissueDemo(out)


@cache
def model() -> nn.Module:
    """Its model."""
    return xmil.load_model(tissue().model)


def bag(name: str) -> xmil.Bag:
    """The features of a section."""
    return xmil.read_bag(tissue().out / "features" / f"{name}.h5")


@cache
def section(name: str = "test-04") -> Any:
    """A test section with what is known of it."""
    return next(s for s in read_sections(tissue()) if s.name == name)


def slide_of(name: str) -> Path:
    """The picture of a section."""
    return tissue().slides / f"{name}.tiff"


@cache
def looked(name: str, longest: int = 520) -> View:
    """A section with its patches."""
    boxes = xmil.read_bag(tissue().out / "features" / f"{name}.h5")
    places = np.concatenate([boxes.coords, boxes.coords + tissue().edge], axis=1)
    with xmil.open_slide(slide_of(name)) as slide:
        view = View.of(places, picture_box(places, slide), slide=slide, longest=longest, enlarge=2.0)
    smooth = ndimage.median_filter(view.background, (3, 3, 1)) // 8 * 8 + 4  # grain makes files large
    return replace(view, background=smooth.astype(np.uint8))


# Cards


def card(height: float, width: float = WIDE) -> Figure:
    """A white card."""
    import matplotlib as mpl

    mpl.rcParams.update(RC)
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    return figure


def plain(axis: Any) -> Any:
    """No frame on the right and on top."""
    axis.spines[["top", "right"]].set_visible(False)
    return axis


def save(figure: Figure, name: str) -> None:
    """Write a card."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", facecolor="white")
    keep(Image.open(stream), name)


def keep(picture: Image.Image, name: str) -> None:
    """Write a picture with as many colours as its size allows."""
    path = IMAGES / (f"{name}.png" if name == "colours" else f"howto-{name}.png")
    rgb = picture.convert("RGB")
    rgb.save(path, optimize=True)
    for colours in (256, 200, 150, 110, 80):  # of a palette that covers rare ones too
        if path.stat().st_size < MOST:
            break
        few = rgb.quantize(colours, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
        few.save(path, optimize=True)
    print(f"{path.name}: {picture.size}, {path.stat().st_size // 1000} kB, {colours} colours")


def show(axis: Any, pixels: Any, title: str = "") -> Any:
    """A picture without axes."""
    axis.imshow(pixels, interpolation="antialiased")
    axis.set_title(title, loc="left")
    axis.axis("off")
    return axis


def overlay(e: xmil.Explanation, view: View, alpha: float = 0.62) -> tuple[Any, Scale]:
    """The scores over grey tissue, with a scale that ends at the strongest: weak ones look weak."""
    scale = Scale.of(e.scores, signed=e.signed, clip="none")
    return view.overlay(e, scale, alpha=alpha), scale


def bar(figure: Figure, axis: Any, scale: Scale, ends: tuple[str, str], **options: Any) -> Any:
    """The colour bar of a scale, its ends in words."""
    steps = np.linspace(scale.low, scale.high, 257)
    colours = ListedColormap(scale.paint(steps) / 255)
    shown = ScalarMappable(Normalize(scale.low, scale.high), colours)
    options = {"location": "bottom", "fraction": 0.05, "aspect": 32, "pad": 0.02, **options}
    drawn = figure.colorbar(shown, ax=axis, **options)
    ticks = [scale.low, 0, scale.high] if scale.signed else [scale.low, scale.high]
    words = [ends[0], "0", ends[1]] if scale.signed else list(ends)
    drawn.set_ticks(ticks, labels=words)
    labels = drawn.ax.get_xticklabels() if options["location"] == "bottom" else []
    for label, side in zip(labels, ("left", *(["center"] if scale.signed else []), "right"), strict=False):
        label.set_ha(side)
    drawn.outline.set_visible(False)
    return drawn


def frame(axis: Any, view: View, boxes: Any, **style: Any) -> None:
    """Frames around patches."""
    for x0, y0, x1, y1 in view.canvas.pixels(np.asarray(boxes)).tolist():
        box = Rectangle((x0 + 0.5, y0 + 0.5), x1 - x0 - 1, y1 - y0 - 1, fill=False, **style)
        axis.add_patch(box)


def centres(view: View, boxes: Any) -> Any:
    """The middle of patches on a view."""
    pixels = view.canvas.pixels(np.asarray(boxes)).astype(float)
    return (pixels[:, :2] + pixels[:, 2:]) / 2


def terminal(name: str, *parts: tuple[str, str]) -> None:
    """Commands and what they printed, as a terminal shows them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, legacy_windows=False
    )
    for i, (command, output) in enumerate(parts):
        if i:
            console.print()
        line, *remark = command.split("  #")
        console.print(Text("$ ", "bold green") + Text(line, "bold") + Text("  #".join(["", *remark]), "cyan"))
        if output:
            console.print(Text.from_ansi(output))
    console.print()  # so that the last line keeps its descenders
    svg = console.export_svg(title="")
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1060, "height": 900}, device_scale_factor=1)
        page.set_content(f"<body style='margin:12px;background:#fff'>{svg}</body>")
        drawn = page.locator("svg").first
        drawn.evaluate("s => { s.style.width = '1036px'; s.style.height = 'auto'; }")
        stream = drawn.screenshot()
    keep(Image.open(io.BytesIO(stream)), name)


def open_browser() -> Any:
    """Chromium, as docs/draw_viewer.py opens it."""
    from tests.viewer.browser import chromium

    return chromium()


KEY_OF = "name => window.xmil.run.slides.find((slide) => slide.id === name).key"
SHOWN = """() => {
  const [head, table, last] = ["h2", "table", "th:nth-child(6)"].map(
    (name) => document.querySelector(name).getBoundingClientRect());
  return { x: 0, y: head.top - 8, width: last.right, height: table.bottom - head.top + 20 };
}"""
LEADING = """.notes, nav, section > p, #shortcuts .wide ~ .wide { display: none }
section:not(#concepts, #shortcuts), .concepts > :nth-child(n + 4), img:nth-child(n + 9) { display: none }
section { margin-top: 20px; padding-top: 4px }
.concepts { display: grid; grid-template-columns: repeat(3, 1fr); gap: 28px }
.patches { grid-template-columns: repeat(4, 1fr) }"""
SURVIVAL = """task = "survival"
out = "survival"

[data]
features = "{features}"
cohort = "survival.csv"
time = "time"
event = "event"
folds = 4

[model]
name = "attnmil"
dim = 32
attention_dim = 16

[optim]
lr = 2e-3
weight_decay = 1e-2

[train]
epochs = 40
device = "cpu"
tensorboard = false
"""
PACKAGE = """[project]
name = "mypackage"
version = "1.0"

[project.entry-points."xmil.readers"]
theirs = "mypackage.theirs"

[tool.setuptools]
packages = ["mypackage"]
package-dir = { mypackage = "." }
"""


# Pictures


def draw_slides() -> None:
    """Tissue, patches, and what was left out."""
    demo = tissue()
    inked = next(n for n in demo.names["test"] if int(n[-2:]) % 4 == 0)
    view, figure = looked(inked, 640), card(4.4)
    axes = figure.subplots(1, 2)
    boxes = np.concatenate([bag(inked).coords, bag(inked).coords + demo.edge], axis=1)
    show(axes[0], view.background, "the slide")
    show(axes[1], view.background, f"{len(boxes)} patches on tissue, none on glass or ink")
    frame(axes[1], view, boxes, edgecolor="#0B6E4F", linewidth=1.6)
    save(figure, "slides")


def draw_training() -> None:
    """Loss and validation AUROC over epochs."""
    rows = list(csv.DictReader((tissue().model.parent / "log.csv").open()))
    epochs = [int(r["epoch"]) for r in rows]
    figure = card(3.5)
    left, right = map(plain, figure.subplots(1, 2))
    for key, words, colour in (("train_loss", "training", INK), ("val_loss", "validation", FOR)):
        left.plot(epochs, [float(r[key]) for r in rows], color=colour, label=words, linewidth=2)
    left.set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    left.set_title("loss", loc="left")
    left.legend(frameon=False)
    right.plot(epochs, [float(r["val_auc"]) for r in rows], color=FOR, linewidth=2)
    right.set(xlabel="epoch", ylabel="AUROC", ylim=(0, 1.03))
    right.set_title("validation AUROC", loc="left")
    save(figure, "training")


def draw_explain() -> None:
    """One section and its evidence."""
    shown = section()
    e, view, figure = shown.explanations["lrp"], looked(shown.name, 640), card(4.6)
    axes = figure.subplots(1, 2)
    picture, scale = overlay(e, view)
    show(axes[0], view.background, f"section {shown.name}")
    show(axes[1], picture, f"LRP for {TUMOUR}, probability {shown.probability:.2f}")
    bar(figure, axes, scale, (f"against {TUMOUR}", f"for {TUMOUR}"))
    save(figure, "explain")


def draw_predict() -> None:
    """Probabilities of the test sections, and the AUROC with its interval."""
    rows = sorted(
        csv.DictReader((tissue().out / "predict" / "predictions.csv").open()),
        key=lambda r: float(r["p:tumour"]),
    )
    figure = card(4.0)
    axis = plain(figure.subplots())
    for i, row in enumerate(rows):
        p, is_tumour = float(row["p:tumour"]), row["label"] == TUMOUR
        axis.hlines(i, 0, p, color="#DDDDDD", linewidth=2, zorder=1)
        axis.scatter(
            p, i, s=70, color=FOR if is_tumour else AGAINST, marker="o" if is_tumour else "s", zorder=2
        )
        axis.annotate(f"{p:.2f}", (p, i), (9, 0), textcoords="offset points", va="center")
    axis.axvline(0.5, color=GREY, linestyle="--", linewidth=1)
    axis.set(
        yticks=range(len(rows)),
        yticklabels=[r["slide_id"] for r in rows],
        xlim=(0, 1.08),
        xlabel=f"probability of {TUMOUR}",
    )
    for colour, marker, words in ((FOR, "o", f"labelled {TUMOUR}"), (AGAINST, "s", f"labelled no {TUMOUR}")):
        axis.scatter([], [], s=70, color=colour, marker=marker, label=words)
    axis.legend(loc="center right", bbox_to_anchor=(0.86, 0.45), frameon=False)
    axis.set_title("what the model says of each test section", loc="left")
    save(figure, "predict")


def draw_choosing() -> None:
    """The SRG of each candidate on the test sections."""
    names = tissue().names["test"]
    choice = xmil.choose_method(model(), [bag(n) for n in names], target=TUMOUR)
    table = choice.table.iloc[::-1]
    figure = card(3.0)
    axis = plain(figure.subplots())
    colours = [FOR if name == choice.candidate else "#B9B9B9" for name in table.index]
    axis.barh(range(len(table)), table["srg"], color=colours, height=0.6)
    low, high = np.array(table["interval"].tolist()).T
    axis.hlines(range(len(table)), low, high, color=INK, linewidth=2)
    for i, (srg, end) in enumerate(zip(table["srg"], high, strict=True)):
        axis.annotate(f"{srg:.2f}", (end, i), (8, 0), textcoords="offset points", va="center")
    axis.set(
        yticks=range(len(table)),
        xlim=(0, float(high.max()) * 1.15),
        xlabel="SRG over 12 cases, with its 95 % interval (0: no better than a random order)",
    )
    axis.set_yticklabels([f"{n}  (chosen)" if n == choice.candidate else n for n in table.index])
    axis.set_title(
        "which map does the model confirm best? lrp stays unless another is clearly ahead", loc="left"
    )
    save(figure, "choosing")


def draw_verdict() -> None:
    """Flip curves of one section against random orders."""
    shown = section()
    e, flips = shown.explanations["lrp"], Flips(model(), bag(shown.name), target=TUMOUR)
    band = xmil.random_band(flips, orders=100)
    figure = card(3.9)
    axis = plain(figure.subplots())
    share = np.linspace(0, 100, len(band.mean))
    axis.fill_between(share, band.low, band.high, color="#DDDDDD", label="random orders")
    axis.plot(share, band.mean, color=GREY, linewidth=1)
    for order, colour, words in (
        ("lerf", AGAINST, "lowest scores dropped first"),
        ("morf", FOR, "highest scores dropped first"),
    ):
        curve = flips.curve(e.scores, order=order)
        axis.plot(share, curve.values, color=colour, linewidth=2.4, label=words)
    axis.axhline(0.5, color=GREY, linestyle="--", linewidth=1)
    axis.set(xlabel="patches dropped (%)", ylabel=f"probability of {TUMOUR}", xlim=(0, 100), ylim=(0, 1.03))
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    axis.set_title("dropping what the map calls evidence changes the answer", loc="left")
    save(figure, "verdict")


def draw_error_bars() -> None:
    """Shapley values with standard errors, and the map whose unsure signs are hatched."""
    shown = section()
    own = bag(shown.name)
    e = xmil.explain(model(), own, method="shapley", target=TUMOUR, precision=None, permutations=64)
    order = np.argsort(-e.scores)
    scores, error = e.scores[order], 1.96 * e.stderr[order]
    sure = np.asarray(e.stable)[order]
    figure = card(4.2)
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    plain(left)
    colours = np.where(scores > 0, FOR, AGAINST)
    ranks = np.arange(len(scores))
    left.errorbar(ranks, scores, yerr=error, fmt="none", ecolor=colours, elinewidth=1.3, zorder=1)
    left.scatter(ranks[sure], scores[sure], s=22, color=colours[sure], label="sign is sure")
    left.scatter(
        ranks[~sure],
        scores[~sure],
        s=22,
        facecolor="white",
        edgecolor=colours[~sure],
        label="sign is not sure",
        zorder=2,
    )
    left.axhline(0, color=INK, linewidth=0.8)
    left.legend(frameon=False)
    for handle in left.get_legend().legend_handles:
        handle.set_edgecolor(INK)
    left.get_legend().legend_handles[0].set_facecolor(INK)
    left.set(xlabel="patches, highest score first", ylabel=f"score for {TUMOUR}")
    left.set_title("scores with 95 % intervals", loc="left")
    picture, scale = overlay(e, looked(shown.name, 560))
    show(right, picture, "hatched: the sign is not sure")
    bar(figure, right, scale, ("against", "for"))
    save(figure, "error-bars")


def draw_interactions() -> None:
    """Pairs of patches that act together."""
    from matplotlib.lines import Line2D

    shown = section()
    own, view = bag(shown.name), looked(shown.name, 760)
    e = shown.explanations["lrp"]
    pairs = xmil.interactions(model(), own, target=TUMOUR, top=14, by=e, precision=None, draws=256)
    figure = card(5.0, 7.6)
    axis = figure.subplots()
    picture, _scale = overlay(e, view, 0.4)
    show(axis, picture, "pairs of patches that act together")
    values = np.asarray(pairs.values)
    strongest = [i for i in np.argsort(-np.abs(values)) if pairs.sure[i]][:12]
    middles = centres(view, e.boxes())
    top = np.abs(values[strongest]).max()
    for i in reversed(strongest):
        (x0, y0), (x1, y1) = middles[pairs.pairs[i][0]], middles[pairs.pairs[i][1]]
        width = 1 + 4 * abs(values[i]) / top
        axis.plot([x0, x1], [y0, y1], color="white", linewidth=width + 1.6, solid_capstyle="round")
        axis.plot(
            [x0, x1], [y0, y1], color=RED if values[i] > 0 else BLUE, linewidth=width, solid_capstyle="round"
        )
    lines = [
        Line2D([], [], color=c, linewidth=4, label=w)
        for c, w in ((RED, "more together than apart"), (BLUE, "less together than apart"))
    ]
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False)
    save(figure, "interactions")


class Stains(nn.Module):
    """How much violet and how much pink there is, by places of 8 px, then the mean over places."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, 3, h, w) with colours in 0 to 1, to (b, 2)."""
        red, green = x[:, :1], x[:, 1:2]
        stains = torch.cat([torch.relu(0.5 - red), torch.relu(red - green - 0.15)], dim=1)
        return self.pool(stains).mean(dim=(2, 3))


class Balance(nn.Module):
    """The mean over patches of violet minus a quarter of pink, as the second of two logits."""

    class_names = ("pink", "violet")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(1, n, 2) to (1, 2)."""
        z = 4 * x[..., 0].mean(dim=1) - x[..., 1].mean(dim=1)
        return torch.stack([-z, z], dim=1)


def draw_inside() -> None:
    """Where inside patches their scores come from, by an encoder and a model written by hand."""
    encoder = Encoder("stains", 2, Stains(), Transform(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))
    shown, edge, bags = section("test-10"), tissue().edge, {}
    for name in (*tissue().names["test"][:4], shown.name):  # those of the background, and the one shown
        corners = bag(name).coords
        with xmil.open_slide(slide_of(name)) as slide:
            cut = [slide.read_area((int(x), int(y), edge, edge), (edge, edge)) for x, y in corners]
            features = encoder(torch.stack([encoder.transform(patch) for patch in cut])).numpy()
            bags[name] = xmil.Bag(features, coords=corners, patch_size=edge, mpp=slide.mpp, slide_id=name)
    ordinary = xmil.background([each for name, each in bags.items() if name != shown.name])
    params = {"feature_level": True, "background": ordinary}
    e = xmil.explain(Balance(), bags[shown.name], method="lrp", target="violet", **params)
    order = np.argsort(-e.scores)
    with xmil.open_slide(slide_of(shown.name)) as slide:
        inside = xmil.explain_inside(
            None, encoder, slide, e, patches=[*order[:2], *order[-2:]], patch_px=edge, background=ordinary
        )
        path = WORK / "inside.png"
        inside.plot(slide).write(path)
    picture = Image.open(path).convert("RGB")
    right = ImageChops.invert(picture).getbbox()[2] + 20  # a sheet has room for more patches
    picture = picture.crop((0, 0, min(right, picture.width), picture.height))
    size = (1100, round(1100 * picture.height / picture.width))
    keep(picture.resize(size, Image.Resampling.LANCZOS), "inside")


def draw_heatmaps() -> None:
    """A panel as `xmil heatmap` writes it."""
    shown = section()
    methods = [shown.explanations[m] for m in ("lrp", "attention")]
    figure = xmil.heatmap(
        methods, slide_of(shown.name), label=TUMOUR, prediction=TUMOUR, size=520, clip="none"
    )
    figure.write(WORK / "panel.png")
    picture = Image.open(WORK / "panel.png").convert("RGB")
    size = (1150, round(1150 * picture.height / picture.width))
    keep(picture.resize(size, Image.Resampling.LANCZOS), "heatmaps")


def draw_qupath() -> None:
    """What the exported GeoJSON holds, drawn over the slide."""
    shown = section("test-10")
    view = looked(shown.name, 640)
    text = (tissue().out / "heatmap" / "geojson" / f"{shown.name}.geojson").read_text()
    features = json.loads(text)["features"]
    figure = card(4.6, 5.2)
    axis = show(figure.subplots(), view.background, "the exported tiles over the slide")
    names = {}
    for each in features:
        ring = np.array(each["geometry"]["coordinates"][0])
        kind = each["properties"]["classification"]
        colour = np.array(kind["color"]) / 255
        names[kind["name"]] = colour
        box = [[*ring.min(axis=0), *ring.max(axis=0)]]
        frame(axis, view, box, edgecolor=colour, linewidth=2)
    axis.legend(
        handles=[Patch(facecolor="white", edgecolor=c, linewidth=2, label=n) for n, c in names.items()],
        loc="upper center",
        bbox_to_anchor=(0.5, 0.0),
        ncols=2,
        frameon=False,
    )
    save(figure, "qupath")


EXPLAIN = "xmil explain --model model.safetensors --features features"


def draw_keep() -> None:
    """A run that gets Ctrl-C, is continued, verified, damaged and verified again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores Ctrl-C
    out, enough = desk() / "run", lambda: len([*out.glob("slides/*.parquet")]) > 7
    shown = [("", "")]
    while "interrupted" not in shown[0][1]:  # a quick machine may be done before Ctrl-C arrives
        clear_desk("run")
        shown = [enter(f"{EXPLAIN} --out run  # Ctrl-C", check=False, stop=enough)]
    shown += [enter(f"{EXPLAIN} --out run  # again: continues"), enter("xmil verify run")]
    with (out / "slides.csv").open("a") as stream:
        stream.write("\n")
    shown += [("echo >> run/slides.csv  # a file changes", ""), enter("xmil verify run", check=False)]
    terminal("keep", *shown)


def draw_cluster() -> None:
    """The same run by one process and by Ray, and that its files are the same."""
    clear_desk("one", "ray")
    shown = [enter(f"{EXPLAIN} --out one"), enter(f"{EXPLAIN} --out ray --engine ray")]
    command = "diff -r one/slides ray/slides && echo identical, byte by byte"
    done = subprocess.run(["/bin/sh", "-c", command], cwd=desk(), capture_output=True, text=True, check=True)
    terminal("cluster", *shown, (command, done.stdout.rstrip()))


def draw_benchmark() -> None:
    """The first columns of the page of `xmil bench --suite evidence --quick`."""
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1000}, device_scale_factor=1.25)
        page.goto((ROOT / "docs" / "bench-quick.html").as_uri())
        stream = page.screenshot(clip=page.evaluate(SHOWN), full_page=True)
    keep(Image.open(io.BytesIO(stream)), "benchmark")


def draw_viewer() -> None:
    """The viewer's page with a section, as docs/draw_viewer.py takes it."""
    from tests.viewer.browser import open_slide, place_of, served, wait_until_still

    from xmil.viewer.collection import Collection

    made, best = tissue(), section("test-06").explanations["one_added"]
    x0, y0, x1, y1 = best.boxes()[np.argmax(best.scores)]
    shown = Collection([made.out / "explain"], slides=made.slides, features=[made.out / "features"])
    with served(shown, [made.model]) as url, open_browser() as browser:
        page = browser.new_page(viewport={"width": 1060, "height": 760}, color_scheme="light")
        page.goto(url)
        page.wait_for_function("() => window.xmil?.run")
        open_slide(page, url, page.evaluate(KEY_OF, "test-06"))
        page.get_by_label("Method").select_option(label="One added")
        page.mouse.click(*place_of(page, (x0 + x1) / 2, (y0 + y1) / 2))
        page.evaluate("() => document.activeElement.blur()")
        page.wait_for_timeout(1200)
        wait_until_still(page)
        stream = page.screenshot()
    keep(Image.open(io.BytesIO(stream)), "viewer")


class MyMIL(nn.Module):
    """A network of one's own, as the page has it."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.LayerNorm(32))
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """(b, n, d) to logits (b, c)."""
        h = self.embed(x)
        h = h + self.mix(h, h, h)[0]
        return {"logits": self.head(h.mean(dim=1))}


def draw_own_model() -> None:
    """A network of one's own, its map and the audit of its sum."""
    torch.manual_seed(0)
    bags = {name: bag(name) for name in tissue().names["train"]}
    net = MyMIL(bag(section().name).features.shape[1], 2)
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    for _ in range(30):
        for name, own in bags.items():
            logits = net(torch.from_numpy(own.features)[None])["logits"]
            loss = nn.functional.cross_entropy(logits, torch.tensor([int(tissue().labels[name])]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    shown = section()
    e = xmil.explain(net.eval(), bag(shown.name), method="lrp", target=1)
    figure = card(4.3)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    left.axis("off")
    source = re.sub(r": torch\.Tensor| -> [^:]+|\n +\"{3}.*", "", inspect.getsource(MyMIL.forward))
    rows = (
        ("called as", f"   {e.params['call']}"),
        (f"logit of {TUMOUR}", f"{e.output:7.2f}"),
        ("from the patches", f"{e.audit.instances:7.2f}"),
        ("from the biases", f"{e.audit.bias:7.2f}"),
        ("not accounted for", f"{e.audit.other:7.2f}"),
    )
    code = f"class MyMIL(nn.Module):\n{source}\ne = xmil.explain(net, bag, target=1)\n\n"
    text = code + "\n".join(f"{words:18}{value}" for words, value in rows)
    left.text(0, 0.97, text, family="monospace", fontsize=10, va="top", linespacing=1.55)
    left.set_title("a network of your own", loc="left")
    picture, scale = overlay(e, looked(shown.name, 560))
    show(right, picture, "its explanation").set_anchor("N")
    bar(figure, right, scale, (f"against {TUMOUR}", f"for {TUMOUR}"))
    save(figure, "own-model")


def draw_own_reader() -> None:
    """A file that xmil does not know, the page's reader, and the same file with it."""
    import h5py

    clear_desk("site", "mypackage")
    package, own = desk() / "mypackage", bag(section().name)
    package.mkdir()
    with h5py.File(desk() / "theirs.h5", "w") as file:
        file["my_features"], file["my_corners"], file.attrs["edge"] = own.features, own.coords, tissue().edge
    shown = [enter("xmil inspect theirs.h5", check=False)]
    block = (ROOT / "docs/howto/own-reader.md").read_text().split("```python\n")[2].split("\n\n\nbag")[0]
    code = "\n".join(line for line in block.splitlines() if '"""' not in line)
    (package / "theirs.py").write_text(code)
    (package / "__init__.py").touch()
    (package / "pyproject.toml").write_text(PACKAGE)
    pip = "-m pip install --quiet --no-build-isolation --no-deps --no-index --target site ./mypackage"
    subprocess.run([sys.executable, *pip.split()], cwd=desk(), check=True)  # not into this environment
    shown += [("cat mypackage/theirs.py", code), ("pip install --quiet ./mypackage", "")]
    terminal("own-reader", *shown, enter("xmil inspect theirs.h5"))


def draw_study() -> None:
    """A reader's page after the first answer, with the evidence."""
    from tests.viewer.reading_room import Simulated
    from tests.viewer.study_pages import READY, STILL, AtThePage, serving

    from xmil.viewer.study import make_study
    from xmil.viewer.study.plan import make_plan

    clear_desk("study")
    arms = [{"name": "lrp", "method": "lrp", "prediction": True}]
    plan = {"readers": ["anna"], "practice": 0, "cases": [section().name], "arms": arms, "seed": 0}
    study = make_study(
        [tissue().out / "explain"], slides=tissue().slides, plan=make_plan(plan), out=desk() / "study"
    )
    with serving(study) as (url, _), open_browser() as browser:
        reader = AtThePage(browser, study, Simulated("anna", 1.0), draws=False)
        reader.page.set_viewport_size({"width": 1060, "height": 700})
        reader.enter(url)
        reader.step()
        reader.page.wait_for_function(READY)
        for key in "244":
            reader.page.keyboard.press(key)
        reader.page.wait_for_timeout(1200)
        reader.page.evaluate(STILL)
        stream = reader.page.screenshot()
        reader.close()
    keep(Image.open(io.BytesIO(stream)), "study")


def draw_insight() -> None:
    """The report's findings, its leading concepts (side by side, to save height) and its shortcuts."""
    out = clear_desk("insight") / "insight"
    rows = list(csv.DictReader((tissue().out / "cohort.csv").open()))
    with (desk() / "sites.csv").open("w") as stream:  # two sites, unrelated to anything
        table = csv.DictWriter(stream, [*rows[0], "site"])
        table.writeheader()
        table.writerows({**row, "site": "AB"[int(row["slide_id"][-2:]) // 3 % 2]} for row in rows)
    inputs = {"features": tissue().out / "features", "model": tissue().model, "cohort": "sites.csv"}
    inputs |= {"slides": tissue().slides, "evaluated": tissue().out / "evaluate", "out": out}
    run("insight", tissue().out / "explain", *(w for k, v in inputs.items() for w in (f"--{k}", v)))
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": 960, "height": 500}, device_scale_factor=1.1)
        page.goto((out / "report.html").as_uri())
        page.add_style_tag(content=LEADING)
        keep(Image.open(io.BytesIO(page.screenshot(full_page=True))), "insight")


def draw_survival() -> None:
    """Survival by held-out risk, and what raises it in a section; the times are made up from the tumour."""
    from xmil.evaluate import median_halves

    rng, table = np.random.default_rng(0), clear_desk("survival") / "survival.csv"
    lines = ["slide_id,case_id,time,event"]
    for name in (name for names in tissue().names.values() for name in names):
        share = tissue().marked(name, bag(name).coords).mean()  # of patches with tumour
        months = rng.exponential(60 / np.exp(8 * share))
        lines.append(f"{name},{name},{min(months, 60):.2f},{int(months < 60)}")
    table.write_text("\n".join([*lines, ""]))
    (desk() / "survival.toml").write_text(SURVIVAL.format(features=tissue().out / "features"))
    run("train", "survival.toml")
    rows = list(csv.DictReader((desk() / "survival" / "predictions.csv").open()))
    risks, times = ([float(row[key]) for row in rows] for key in ("risk", "time"))
    events, cases = [row["event"] == "True" for row in rows], [row["case_id"] for row in rows]
    curves, p = median_halves(risks, times, events, units=cases)
    figure = card(4.4)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    plain(left).set_title("survival by predicted risk", loc="left")
    for curve, words, colour in zip(curves, ("higher", "lower"), (FOR, AGAINST), strict=True):
        label = f"{words} risk ({curve.n} cases)"
        left.step(curve.times, curve.share, where="post", color=colour, linewidth=2.2, label=label)
        left.fill_between(curve.times, curve.low, curve.high, step="post", color=colour, alpha=0.15)
    left.set(xlabel="months", ylabel="share alive", xlim=(0, 60), ylim=(0, 1.03))
    left.legend(frameon=False, loc="lower right", title=f"held-out cases, p {p:.4f}")
    shown = section()
    fold = next(row["model"] for row in rows if row["slide_id"] == shown.name)
    e = xmil.explain(desk() / "survival" / fold / "model.safetensors", bag(shown.name), method="lrp")
    picture, scale = overlay(e, looked(shown.name, 560))
    show(right, picture, f"what makes the risk of {shown.name}")
    bar(figure, right, scale, ("lowers the risk", "raises the risk"))
    save(figure, "survival")


PICTURES: dict[str, Callable[[], None]] = {
    name.removeprefix("draw_").replace("_", "-"): each
    for name, each in list(globals().items())
    if name.startswith("draw_")
}


def main() -> None:
    """Draw the named pictures, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    torch.set_num_threads(1)
    for name in parser.parse_args().names or PICTURES:
        PICTURES[name]()


if __name__ == "__main__":
    main()
