"""The demonstration on tissue: drawn sections, or the user's pictures with marked nuclei.

The question is whether a section contains tumour. Models only see sections and labels; only the report knows
which patches contain tumour nuclei.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.durable import write_text
from xmil.core.errors import FileError, InputError, absent
from xmil.core.explanation import Explanation, card_of
from xmil.core.text import counted
from xmil.demo.digit_slides import write_levels
from xmil.demo.pipeline import DemoStage, Timing, claim_folder, command, write_config
from xmil.demo.results_page import how_it_was_made, look_yourself, view_line
from xmil.heatmaps import Html, figure, join, new_figure, page, small, table, tag, write_figure
from xmil.heatmaps.style import FAR
from xmil.storage import Run, read_explanations, write_table

METHODS = ("lrp", "attention", "gxi", "one_added", "random")
MEASURED = ("lrp", "attention", "random")
SPLITS = {"train": 28, "val": 8, "test": 12}
QUICK = {"train": 14, "val": 4, "test": 4}
MARKED = 2  # least nuclei of a kind for a patch to count as such
NUCLEI, SUFFIXES = "nuclei.csv", (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
TUMOUR, LYMPHOCYTE, STROMA = "tumour", "inflammatory", "fibroblast"
KINDS = (TUMOUR, "epithelial")  # kinds of nuclei; the first in the table is used
PICTURE_MPP, PICTURE_EDGE, EDGE = 0.55, 64, 128  # pictures at 20x; edges of patches in pixels
Counts = dict[str, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class TissueDemo:
    """A demonstration on tissue in a folder; `images` is a folder with pictures and nuclei.csv."""

    out: Path
    images: Path | None = None
    quick: bool = False
    seed: int = 0

    @property
    def slides(self) -> Path:
        """The folder of sections."""
        return self.images or self.out / "slides"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.out / "model" / "model" / "model.safetensors"

    @property
    def edge(self) -> int:
        """A patch's edge in pixels."""
        return PICTURE_EDGE if self.images else EDGE

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """Sections by split, balanced between with and without tumour as far as possible."""
        if self.images is None:
            sizes = QUICK if self.quick else SPLITS
            return {split: [f"{split}-{i + 1:02d}" for i in range(n)] for split, n in sizes.items()}
        rng = np.random.default_rng(self.seed)
        names: dict[str, list[str]] = {split: [] for split in SPLITS}
        for label in (False, True):
            own = rng.permutation(sorted(name for name, holds in self.labels.items() if holds == label))
            ends = (np.array([0.6, 0.75]) * len(own)).astype(int)
            for split, part in zip(names, np.split(own, ends), strict=True):
                names[split] += part.tolist()
        return names

    @cached_property
    def nuclei(self) -> dict[str, list[tuple[str, float, float]]]:
        """Kind and position of every nucleus of each section."""
        path = self.slides / NUCLEI
        nuclei: defaultdict[str, list[tuple[str, float, float]]] = defaultdict(list)
        try:
            with path.open(encoding="utf-8", newline="") as stream:
                for row in csv.DictReader(stream):
                    nuclei[row["image"]].append((row["cell"], float(row["x"]), float(row["y"])))
        except (OSError, KeyError, ValueError, TypeError, csv.Error):
            fault = "not a readable table of nuclei" if path.is_file() else "no such table"
            raise FileError(
                f"{path}: {fault}; write a row for each nucleus, with the columns image (the picture's name "
                "without its suffix), cell (its kind), x and y (pixels), or leave out the folder of "
                "pictures to draw tissue instead."
            ) from None
        return nuclei

    @cached_property
    def kind(self) -> str:
        """The kind of nuclei that makes a section positive."""
        if self.images is None:
            return TUMOUR
        marked = {kind for rows in self.nuclei.values() for kind, _, _ in rows}
        kinds = [kind for kind in KINDS if kind in marked]
        if not kinds:
            raise InputError(
                f"{self.slides / NUCLEI}: has no {' or '.join(KINDS)} nuclei; name the kinds in the column "
                "cell."
            )
        return kinds[0]

    @property
    def classes(self) -> tuple[str, str]:
        """The class names of sections without and with such nuclei."""
        return f"no {self.kind}", self.kind

    @cached_property
    def labels(self) -> dict[str, bool]:
        """Whether each section contains nuclei of that kind."""
        if self.images is None:
            return {name: has_tumour(name) for names in self.names.values() for name in names}
        pictures = {p.stem for p in self.images.iterdir() if p.suffix.lower() in SUFFIXES}
        return {
            name: any(kind == self.kind for kind, _, _ in rows)
            for name, rows in self.nuclei.items()
            if name in pictures
        }

    def prepare(self) -> None:
        """Make the folder; refuse one with another demonstration, or pictures without nuclei."""
        if self.images is not None:
            if not self.images.is_dir():
                raise FileError(absent(self.images, "folder"))
            counts = Counter(self.labels.values())
            if min(counts[True], counts[False]) < 10:
                raise InputError(
                    f"{self.images}: needs ten pictures with {self.kind} nuclei and ten without. "
                    f"Got {counts[True]} and {counts[False]}; only pictures in {NUCLEI} count."
                )
        images = None if self.images is None else str(self.images.resolve())
        claim_folder(self.out, tissue=True, images=images, quick=self.quick, seed=self.seed)

    def stages(self) -> Iterator[DemoStage]:
        """Yield every step before the report, in order."""
        n = sum(map(len, self.names.values()))
        tiles, features = self.out / "tiles", self.out / "features"
        mpp = PICTURE_MPP if self.images else MPP
        tile = command("tile", self.slides, out=tiles, size=self.edge, mpp=mpp, slide_mpp=mpp)
        embed = command(
            "embed", tiles=tiles, slides=self.slides, out=features, encoder="tissue", device="cpu"
        )
        explain = self._over("explain", methods=",".join(METHODS), target=self.classes[1])
        evaluate = self._over(
            "evaluate",
            methods=",".join(MEASURED),
            modes="remove",
            steps=20,
            orders=5,
            truth=self.out / "truth",
            config=f"truth_class={self.classes[1]}",
        )
        heatmap = command(
            "heatmap",
            self.out / "explain",
            slides=self.slides,
            out=self.out / "heatmap",
            pictures="patches",
            methods="lrp",
            to="png,geojson",
        )
        config = write_config(
            self.out,
            "tissue",
            out=self.out / "model",
            data={"label": "label", "class_names": self.classes},
            model={"name": "attnmil", "dim": 32, "attention_dim": 16},
            optim={"lr": 2e-3, "weight_decay": 1e-2},
            train={"epochs": 30 if self.quick else 60, "batch": 8, "seed": self.seed},
        )
        drawn = "draw" if self.images is None else "list"
        yield DemoStage(f"{drawn} {n} sections of tissue", work=self.draw_sections)
        yield DemoStage("tile, without pen marks", (tile,), may_fail=True)
        yield DemoStage("embed", (embed,))
        yield DemoStage("count nuclei in patches", work=self.write_tables)
        yield DemoStage("train", (command("train", config),))
        yield DemoStage("predict", (self._over("predict"),))
        yield DemoStage(f"explain by {len(METHODS)} methods", (explain,))
        yield DemoStage("evaluate: drop patches by score", (evaluate,))
        yield DemoStage("heatmaps", (heatmap,))

    def draw_sections(self) -> None:
        """Draw sections and write their nuclei; keep existing sections."""
        if self.images is not None:
            return
        self.slides.mkdir(exist_ok=True)
        rows = []
        for name in (name for names in self.names.values() for name in names):
            seed, path = crc32(f"{self.seed} {name}".encode()), self.slides / f"{name}.tiff"
            section = draw_section(seed, tumour=has_tumour(name), pen=has_pen(name))
            if not path.is_file():
                levels = {scale: np.ascontiguousarray(section.image[::scale, ::scale]) for scale in (1, 2, 4)}
                write_levels(path, levels, mpp=MPP, effort=1)
            for kind in section.nuclei:
                rows += [(name, kind.kind, round(float(x), 1), round(float(y), 1)) for x, y in kind.xy]
        write_table(self.slides / NUCLEI, ("image", "cell", "x", "y"), rows)

    def patch_counts(self, name: str, corners: npt.NDArray[np.int64]) -> Counts:
        """Count the nuclei of each kind in each patch."""
        rows = self.nuclei.get(name, [])
        kinds = np.array([kind for kind, _, _ in rows])
        xy = np.array([position for _, *position in rows], dtype=np.float64).reshape(-1, 2)
        offset = xy[None] - corners[:, None]  # (patches, nuclei, 2)
        inside = np.asarray(((offset >= 0) & (offset < self.edge)).all(axis=2))
        return {str(kind): inside[:, kinds == kind].sum(axis=1) for kind in sorted(set(kinds))}

    def marked(self, name: str, corners: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which patches contain tumour."""
        none = np.zeros(len(corners), dtype=np.int64)
        return np.asarray(self.patch_counts(name, corners).get(self.kind, none) >= MARKED)

    def write_tables(self) -> None:
        """Write the cohort of sections with features, and for each test section its patches with tumour."""
        from xmil.data import read_bag

        (self.out / "truth").mkdir(exist_ok=True)
        features = self.out / "features"
        cohort = [
            (name, name, split, self.classes[int(self.labels[name])])
            for split, names in self.names.items()
            for name in names
            if (features / f"{name}.h5").is_file()
        ]
        for name in (name for name, _, split, _ in cohort if split == "test"):
            corners = read_bag(features / f"{name}.h5").coords
            assert corners is not None  # noqa: S101  # our patches have coordinates
            rows = np.column_stack([corners, self.marked(name, corners).astype(int)]).tolist()
            write_table(self.out / "truth" / f"{name}.csv", ("x0", "y0", "evidence"), rows)
        write_table(self.out / "cohort.csv", ("slide_id", "case_id", "split", "label"), cohort)

    def _over(self, verb: str, **options: object) -> list[str]:
        """A command over the test sections."""
        inputs = {"model": self.model, "features": self.out / "features", "cohort": self.out / "cohort.csv"}
        return command(verb, **inputs, label="label", split="test", out=self.out / verb, **options)


def has_tumour(name: str) -> bool:
    """Whether a drawn section has tumour: every second one."""
    return int(name[-2:]) % 2 == 0


def has_pen(name: str) -> bool:
    """Whether a drawn section has a pen mark: every fourth one, always with tumour."""
    return int(name[-2:]) % 4 == 0


TOP = 10  # highest patches to count
FAINT = 0.01  # of the strongest score: almost no evidence


@dataclass(frozen=True)
class SectionResult:
    """One test section: its truth, the model's answer, and its patches with tumour."""

    name: str
    kind: str  # of nuclei
    tumour: bool
    probability: float
    marked: npt.NDArray[np.bool_]  # patches with such nuclei
    explanations: dict[str, Explanation]

    @property
    def right(self) -> bool:
        """Whether the model's answer is correct."""
        return (self.probability >= 0.5) == self.tumour

    def count_top(self, method: str) -> int:
        """Count patches with tumour among a method's ten highest scores."""
        first = np.argsort(-self.explanations[method].scores, kind="stable")[:TOP]
        return int(self.marked[first].sum())


def read_sections(demo: TissueDemo) -> list[SectionResult]:
    """Read all test sections with explanations."""
    run, sections = Run(demo.out / "explain"), []
    for name in (name for name in demo.names["test"] if name in run.rows):
        explanations = {e.method: e for e in read_explanations(run.file(name))}
        chance = float(run.rows[name][f"p:{demo.classes[1]}"])
        marked = demo.marked(name, explanations["lrp"].boxes()[:, :2])
        sections.append(SectionResult(name, demo.kind, demo.labels[name], chance, marked, explanations))
    return sections


def tissue_verdict(sections: Sequence[SectionResult]) -> str:
    """Summarise the answers and the place of the evidence in one sentence."""
    answers = f"{sum(s.right for s in sections)} of {len(sections)} test sections answered correctly"
    informative = [s for s in sections if s.tumour and s.right and s.marked.sum() >= TOP]
    if not informative:
        return f"{answers}."
    counts = {name: sum(s.count_top(name) for s in informative) for name in informative[0].explanations}
    chance = sum(TOP * s.marked.mean() for s in informative)
    best = max(counts, key=lambda name: counts[name])
    comparison = "" if best == "lrp" else f"{card_of(best).title}: {counts[best]}; "
    hits = f"{counts['lrp']} of the {TOP * len(informative)} patches"
    comparison += f"chance: {chance:.0f}"
    return f"{answers}; {hits} that LRP ranks highest hold {informative[0].kind} nuclei ({comparison})."


def write_tissue_report(demo: TissueDemo, timings: Sequence[Timing]) -> Path:
    """Draw the pictures, write the page, and give its path."""
    (demo.out / "pictures").mkdir(exist_ok=True)
    sections = read_sections(demo)
    positive = [s for s in sections if s.tumour]
    candidates = [s for s in positive if s.right] or positive or sections
    shown = max(candidates, key=lambda s: min(int(s.marked.sum()), int((~s.marked).sum())))
    parts = [
        _opening(demo, sections),
        _one_section(demo, shown),
        _patches(demo, shown),
        _table(demo, sections),
        _pen(demo),
        _trust(demo),
        how_it_was_made(timings),
        look_yourself(tissue_viewer(demo)),
    ]
    path = demo.out / "report.html"
    write_text(path, page("xmil demo on tissue", *parts))
    return path


def _opening(demo: TissueDemo, sections: Sequence[SectionResult]) -> Html:
    source = (
        "drawn: every nucleus is known, so that anyone can check the answer"
        if demo.images is None
        else f"the pictures of {demo.images.name}, whose nuclei experts marked"
    )
    no, yes = (tag("i", name) for name in demo.classes[:2])
    n = len(demo.names["train"])
    rough = " A quick run: few sections and little training, so that numbers are rough." if demo.quick else ""
    return join([
        tag("h1", f"Where does the model see {demo.kind} nuclei?"),
        tag(
            "p",
            f"A model was given {counted(n, 'section')} of tissue and, for each, one word: ", yes, " or ", no,
            f". Nobody showed it where to look. The sections are {source}. A section counts as ", yes,
            " if it holds such nuclei.",
        ),
        tag("p", tag("b", tissue_verdict(sections)), rough),
        small(
            "Sections that the model learned from are not among those below. "
            f"Seed {demo.seed}, xmil {__version__}. A demonstration, not a diagnostic device.",
        ),
    ])  # fmt: skip


def _one_section(demo: TissueDemo, shown: SectionResult) -> Html:
    """Show the section, its evidence by LRP, and attention, side by side."""
    from matplotlib.patches import Rectangle

    from xmil.heatmaps import Scale, View, picture_box
    from xmil.slides import open_slide

    sheet, axes = new_figure((13, 4.4), 1, 3, dpi=130)
    lrp, attention = shown.explanations["lrp"], shown.explanations["attention"]
    boxes = lrp.boxes()
    file = next(p for p in sorted(demo.slides.glob(f"{shown.name}.*")) if p.suffix != ".csv")
    with open_slide(file) as slide:
        view = View.of(boxes, picture_box(boxes, slide), slide=slide, longest=900, enlarge=2.0)
    assert view.background is not None  # noqa: S101  # there is a slide
    maps = [view.overlay(e, Scale.of(e.scores, signed=e.signed), alpha=0.6) for e in (lrp, attention)]
    kind = shown.kind
    titles = (f"section; frames: {kind} nuclei", f"LRP: red for {kind}, blue against it", "attention")
    for axis, picture, title in zip(axes, (view.background, *maps), titles, strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=10)
        axis.axis("off")
        for x0, y0, x1, y1 in view.canvas.pixels(boxes[shown.marked]).tolist():
            corner, width, height = (x0 + 1, y0 + 1), x1 - x0 - 2, y1 - y0 - 2
            axis.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="black", linewidth=1.2))
    path = demo.out / "pictures" / "section.png"
    write_figure(sheet, path)
    times = float(np.abs(lrp.scores).max()) / Scale.of(lrp.scores, signed=True).high
    far = f"; the strongest score is {times:.0f} times the score of full red" if times > FAR else ""
    caption = (
        f"Section {shown.name}, probability of {shown.kind} {shown.probability:.2f}. Left: the tissue; "
        f"frames mark the {int(shown.marked.sum())} patches that hold such nuclei. Middle: what speaks for "
        f"{shown.kind} (red) and against it (blue) by LRP, layer-wise relevance propagation{far}. Right: "
        "attention (yellow: high), which says where the model looked, not what it took from there."
    )
    return join([tag("h2", "One section, patch by patch"), figure(path, caption)])


def _patches(demo: TissueDemo, shown: SectionResult) -> Html:
    (path,) = sorted((demo.out / "heatmap" / "patches").glob(f"{shown.name}.lrp.*.png"))
    e = shown.explanations["lrp"]
    order = np.argsort(-e.scores, kind="stable")
    counts = demo.patch_counts(shown.name, e.boxes()[:, :2])
    sentences = []
    for label, rows in (("The eight highest", order[:8]), ("the eight lowest", order[::-1][:8])):
        nuclei = ", ".join(f"{int(n[rows].sum())} {kind}" for kind, n in counts.items())
        sentences.append(f"{label} hold {nuclei} nuclei")
    most, least = float(e.scores.max()), float(e.scores.min())
    faint = " The lowest scores are near zero: next to no evidence." if abs(least) < FAINT * most else ""
    return join([tag("h2", "The patches that count most"), figure(path, f"{'; '.join(sentences)}.{faint}")])


def _table(demo: TissueDemo, sections: Sequence[SectionResult]) -> Html:
    rows = [
        [
            s.name,
            demo.classes[int(s.tumour)],
            f"{s.probability:.2f}{'' if s.right else ' (wrong)'}",
            f"{int(s.marked.sum())} of {len(s.marked)}",
            *(s.count_top(method) if s.tumour else "-" for method in ("lrp", "attention")),
        ]
        for s in sections
    ]
    head = (
        "section", "truth", f"probability of {demo.kind}", f"patches with {demo.kind}",
        f"of the {TOP} highest by LRP", "by attention",
    )  # fmt: skip
    words = (
        f"A patch, {demo.edge} pixels wide, counts as {demo.kind} if it holds at least two {demo.kind} "
        f"nuclei. The last columns: how many of the {TOP} patches with the highest scores are {demo.kind}."
    )
    return join([tag("h2", "Every test section"), table(rows, head=head), small(words)])


def _pen(demo: TissueDemo) -> Html:
    """Show the pen marks that the tiling found on a drawn section."""
    if demo.images is not None:
        return Html()
    inked = [name for name in demo.names["test"] if has_pen(name)]
    path = demo.out / "tiles" / "visualization" / f"{inked[0]}.png"
    if not path.is_file():  # all its patches have ink
        return Html()
    caption = (
        f"Section {inked[0]} as `xmil tile` saw it. Only sections with tumour carry ink here, as if a "
        "pathologist had marked them: a model that saw the ink could answer by it. Patches of which ink "
        "covers 15 % or more (crossed out) are left out before the model sees anything; the thin edge of a "
        "mark can stay. Tiling that drops no pen marks would keep them all."
    )
    return join([tag("h2", "A pen mark is not tissue"), figure(path, caption)])


def _trust(demo: TissueDemo) -> Html:
    path = demo.out / "evaluate" / "faithfulness.png"
    if not path.is_file():
        return Html()
    caption = (
        "Patches are taken out in the order of their scores, highest first, and the model is asked again. "
        "The faster its answer falls, the more it rested on those patches; grey is a random order. "
        "AUPC: the mean height of the curve; lower is better."
    )
    return join([tag("h2", "Does the model really rest on them?"), figure(path, caption)])


def tissue_viewer(demo: TissueDemo) -> str:
    """The command that opens the viewer on the test sections."""
    runs, features = [demo.out / kind for kind in ("explain", "evaluate")], demo.out / "features"
    return view_line(*runs, slides=demo.slides, model=demo.model, features=features)


Floats = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]

MPP = 0.5  # microns per pixel
SIZE = (1024, 1280)  # rows, columns
GLASS, EOSIN, NEST = (244.0, 243.0, 245.0), (231.0, 176.0, 204.0), (214.0, 165.0, 205.0)
INKS = ((24, 60, 150), (20, 110, 70), (35, 35, 38))  # blue, green, black
SPACING = {TUMOUR: 25, LYMPHOCYTE: 15, STROMA: 36}  # least pixels between nuclei


@dataclass(frozen=True)
class Nuclei:
    """Nuclei of one kind: centres (n, 2) in pixels, and the direction of each."""

    kind: str
    xy: Floats
    angles: Floats


@dataclass(frozen=True)
class DrawnSection:
    """A drawn slide: its pixels (h, w, 3) and its nuclei."""

    image: Image
    nuclei: tuple[Nuclei, ...]


def draw_section(seed: int, *, tumour: bool, pen: bool = False) -> DrawnSection:
    """Draw a section with or without tumour.

    >>> [kind.kind for kind in draw_section(0, tumour=False).nuclei]
    ['fibroblast', 'inflammatory', 'tumour']
    """
    rng = np.random.default_rng((7, seed))
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] / np.array(SIZE)[:, None, None] - 0.5
    tissue = _soft(0.40 - np.hypot(x, y) + 0.04 * _noise(rng, 360), 0.006)
    nests = _soft(_noise(rng, 260) + 0.3 * _noise(rng, 90) - 1.0, 0.15) * tissue if tumour else 0 * tissue
    inflamed = _soft(_noise(rng, 230) - 1.15, 0.2) * tissue * (1 - nests)
    fibres = _noise(rng, 70) + 0.7 * _noise(rng, 16)
    nuclei = tuple(
        _scatter(rng, kind, share, _noise(rng, 200))
        for kind, share in (
            (STROMA, 0.45 * tissue * (1 - nests)),
            (LYMPHOCYTE, np.maximum(0.8 * inflamed, 0.02 * tissue * (1 - nests))),
            (TUMOUR, 0.9 * nests),
        )
    )
    image = _paint(rng, tissue, nests, fibres, nuclei)
    return DrawnSection(_ink(rng, image, nests if tumour else tissue) if pen else image, nuclei)


def _paint(
    rng: np.random.Generator, tissue: Floats, nests: Floats, fibres: Floats, nuclei: tuple[Nuclei, ...]
) -> Image:
    """Paint glass, stroma and nests with their nuclei, and camera noise."""
    from PIL import Image as Pictures
    from PIL import ImageDraw

    shade = np.array((7.0, 13.0, 8.0)) * fibres[..., None]
    colour = np.array(EOSIN) + (np.array(NEST) - EOSIN) * nests[..., None] + shade
    colour = np.array(GLASS) + (colour - GLASS) * tissue[..., None]
    picture = Pictures.fromarray(np.clip(colour, 0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for kind, (x, y), angle in ((n.kind, *pair) for n in nuclei for pair in zip(n.xy, n.angles, strict=True)):
        if kind == TUMOUR:
            radius, tone = rng.uniform(9.5, 13.0), int(rng.integers(-14, 14))
            outline = _blob(rng, (x, y), (radius * rng.uniform(1.05, 1.4), radius), angle)
            pen.polygon(outline, fill=(133 + tone, 96 + tone, 168 + tone), outline=(84, 54, 132))
            cx, cy = x + rng.uniform(-3, 3), y + rng.uniform(-3, 3)
            pen.ellipse((cx - 2.4, cy - 2.4, cx + 2.4, cy + 2.4), fill=(74, 40, 116))
        elif kind == LYMPHOCYTE:
            radius = rng.uniform(5.0, 6.2)
            pen.polygon(_blob(rng, (x, y), (radius, radius), angle, ragged=0.04), fill=(58, 36, 104))
        else:
            pen.polygon(_blob(rng, (x, y), (rng.uniform(9, 14), 2.6), angle), fill=(104, 70, 140))
    soft = _blur(np.asarray(picture, dtype=np.float64), 0.7)
    return np.clip(soft + rng.normal(scale=2.5, size=soft.shape), 0, 255).astype(np.uint8)


def _blob(
    rng: np.random.Generator,
    centre: tuple[float, float],
    radii: tuple[float, float],
    angle: float,
    *,
    ragged: float = 0.08,
) -> list[tuple[float, float]]:
    """The outline of a rotated oval with an uneven rim."""
    turn = np.linspace(0, 2 * np.pi, 14, endpoint=False)
    reach = 1 + ragged * rng.normal(size=len(turn))
    across, down = radii[0] * reach * np.cos(turn), radii[1] * reach * np.sin(turn)
    xs = centre[0] + across * np.cos(angle) - down * np.sin(angle)
    ys = centre[1] + across * np.sin(angle) + down * np.cos(angle)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _scatter(rng: np.random.Generator, kind: str, share: Floats, flow: Floats) -> Nuclei:
    """Place nuclei on a jittered grid with a density (h, w), oriented along the flow."""
    step = SPACING[kind]
    rows, columns = (np.arange(step / 2, edge, step) for edge in SIZE)
    xy = np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)
    xy += rng.uniform(-0.36, 0.36, size=xy.shape) * step
    xy = np.clip(xy, 0, np.array(SIZE[::-1]) - 1)
    column, row = xy.astype(int).T
    drawn = rng.random(len(xy)) < share[row, column]
    angles = np.pi * flow[row, column][drawn] + rng.normal(scale=0.25, size=int(drawn.sum()))
    return Nuclei(kind, xy[drawn], angles)


def _ink(rng: np.random.Generator, image: Image, near: Floats) -> Image:
    """Draw a stroke of a felt pen around an area; ink transmits some light."""
    from PIL import Image as Pictures
    from PIL import ImageDraw

    rows, columns = np.nonzero(near > 0.5)
    middle = np.array([columns.mean(), rows.mean()]) + rng.normal(scale=40, size=2)
    reach = rng.uniform(180, 300)
    begin, span = rng.uniform(0, 2 * np.pi), rng.uniform(2.2, 3.4)
    turn = begin + np.linspace(0, span, 60)
    path = middle + reach * np.stack([np.cos(turn), 0.8 * np.sin(turn)], axis=1)
    mask = Pictures.new("L", SIZE[::-1])
    ImageDraw.Draw(mask).line([tuple(p) for p in path.tolist()], fill=255, width=60, joint="curve")
    cover = _blur(np.asarray(mask, dtype=np.float64)[..., None] / 255, 3.0)
    ink = np.array(INKS[int(rng.integers(len(INKS)))], dtype=np.float64) / 255
    through = 1 - cover * (1 - ink * rng.uniform(0.95, 1.05))
    return np.clip(image * through + 6 * cover, 0, 255).astype(np.uint8)


def _noise(rng: np.random.Generator, scale: float) -> Floats:
    """Smooth noise (h, w) of unit variance with blobs of about `scale` pixels."""
    from scipy import ndimage

    step = max(1, int(scale / 6))
    small = rng.normal(size=(SIZE[0] // step + 8, SIZE[1] // step + 8))
    smooth = ndimage.gaussian_filter(small, scale / step / 3)
    wide = ndimage.zoom(smooth, step, order=1)[: SIZE[0], : SIZE[1]]
    return np.asarray((wide - wide.mean()) / wide.std())


def _soft(field: Floats, width: float) -> Floats:
    """A ramp from 0 to 1 around zero, of the given width."""
    return np.asarray(np.clip(field / width + 0.5, 0, 1))


def _blur(image: Floats, sigma: float) -> Floats:
    from scipy import ndimage

    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0)))
