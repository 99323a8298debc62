"""The demonstration on tissue: drawn sections, or pictures with marked nuclei that the user has.

The question is whether a section holds tumour. Models see sections and labels alone; which patches hold
tumour nuclei is known, and told only to the report.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError
from xmil.core.storage import write_atomically, write_text
from xmil.demo.drawn_tissue import MPP, TUMOUR, DrawnSection, draw_section
from xmil.demo.pipeline import DemoStage, check_needed, claim_folder

METHODS = ("lrp", "attention", "gxi", "single", "random")
MEASURED = ("lrp", "attention", "random")
SPLITS = {"train": 28, "val": 8, "test": 12}
QUICK = {"train": 14, "val": 4, "test": 4}
MARKED = 2  # nuclei of the kind asked for, from which on a patch holds it
NUCLEI, SUFFIXES = "nuclei.csv", (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
KINDS_ASKED = (TUMOUR, "epithelial")  # of marked nuclei, the first that the table has
PICTURE_MPP, PICTURE_EDGE, EDGE = 0.55, 64, 128  # pictures of 20x; patches in pixels
Counts = dict[str, npt.NDArray[np.int64]]


@dataclass(frozen=True)
class TissueDemo:
    """A demonstration on tissue in a folder; `images` holds pictures and their nuclei.csv."""

    out: Path
    images: Path | None = None
    quick: bool = False
    seed: int = 0

    @property
    def slides(self) -> Path:
        """Where the sections lie."""
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
        """Sections by split, as many with tumour as without in each, as far as they go."""
        if self.images is None:
            sizes = QUICK if self.quick else SPLITS
            return {split: [f"{split}-{i + 1:02d}" for i in range(n)] for split, n in sizes.items()}
        rng = np.random.default_rng(self.seed)
        found: dict[str, list[str]] = {split: [] for split in SPLITS}
        for label in (False, True):
            own = rng.permutation(sorted(name for name, held in self.labels.items() if held == label))
            ends = (np.array([0.6, 0.75]) * len(own)).astype(int)
            for split, part in zip(found, np.split(own, ends), strict=True):
                found[split] += part.tolist()
        return found

    @cached_property
    def nuclei(self) -> dict[str, list[tuple[str, float, float]]]:
        """Kind and place of every nucleus of each section."""
        path = self.slides / NUCLEI
        try:
            with path.open(encoding="utf-8", newline="") as stream:
                rows = [(r["image"], r["cell"], float(r["x"]), float(r["y"])) for r in csv.DictReader(stream)]
        except (OSError, KeyError, ValueError, TypeError, csv.Error):
            raise FileError(_no_nuclei(path)) from None
        found: dict[str, list[tuple[str, float, float]]] = {}
        for name, kind, x, y in rows:
            found.setdefault(name, []).append((kind, x, y))
        return found

    @cached_property
    def asked(self) -> str:
        """The kind of nuclei that makes a section positive."""
        if self.images is None:
            return TUMOUR
        kinds = {kind for rows in self.nuclei.values() for kind, _, _ in rows}
        known = [kind for kind in KINDS_ASKED if kind in kinds]
        if not known:
            path, asked = self.slides / NUCLEI, " or ".join(KINDS_ASKED)
            raise InputError(f"{path}: has no nuclei of {asked}; name them in the column cell.")
        return known[0]

    @property
    def classes(self) -> tuple[str, str]:
        """What a section is called without such nuclei, and with them."""
        return f"no {self.asked}", self.asked

    @cached_property
    def labels(self) -> dict[str, bool]:
        """Whether each section holds nuclei of the kind asked for."""
        if self.images is None:
            return {name: has_tumour(name) for names in self.names.values() for name in names}
        there = {p.stem for p in self.images.iterdir() if p.suffix.lower() in SUFFIXES}
        return {
            name: any(kind == self.asked for kind, _, _ in rows)
            for name, rows in self.nuclei.items()
            if name in there
        }

    def prepare(self) -> None:
        """Make the folder; one that holds another demonstration is refused, or pictures without nuclei."""
        check_needed()
        if self.images is not None:
            if not self.images.is_dir():
                raise FileError(absent(self.images, "folder"))
            counts = Counter(self.labels.values())
            if min(counts[True], counts[False]) < 10:
                raise InputError(
                    f"{self.images}: needs ten pictures with {self.asked} nuclei and ten without. "
                    f"Got {counts[True]} and {counts[False]}; a picture counts where {NUCLEI} names it."
                )
        images = None if self.images is None else str(self.images.resolve())
        about = {"version": __version__, "tissue": True, "images": images}
        claim_folder(self.out, {**about, "quick": self.quick, "seed": self.seed})

    def stages(self) -> Iterator[DemoStage]:
        """Every step before the report, in order."""
        n = sum(map(len, self.names.values()))
        tiles, features, run = (str(self.out / name) for name in ("tiles", "features", "explain"))
        drawn = "draw" if self.images is None else "list"
        yield DemoStage(f"{drawn} {n} sections of tissue", work=self.draw_sections)
        yield DemoStage("tile, without pen marks", (self._tile(tiles),), may_fail=True)
        where = ["--tiles", tiles, "--slides", str(self.slides), "--out", features]
        yield DemoStage("embed", (["embed", *where, "--encoder", "tissue", "--device", "cpu"],))
        yield DemoStage("count nuclei in patches", work=self.write_tables)
        yield DemoStage("train", (self._train(),))
        yield DemoStage("predict", (self._over("predict"),))
        explained = [*self._over("explain"), "--methods", ",".join(METHODS), "--target", self.classes[1]]
        yield DemoStage(f"explain by {len(METHODS)} methods", (explained,))
        measured = {"--methods": ",".join(MEASURED), "--modes": "remove", "--steps": "20", "--orders": "5"}
        measured |= {"--truth": str(self.out / "truth"), "--truth-class": self.classes[1]}
        options = [word for pair in measured.items() for word in pair]
        yield DemoStage("evaluate: drop patches by score", ([*self._over("evaluate"), *options],))
        look = [
            "--slides",
            str(self.slides),
            "--out",
            str(self.out / "heatmap"),
            "--pictures",
            "patches",
        ]
        look += ["--methods", "lrp", "--exports", "geojson"]
        yield DemoStage("heatmaps", (["heatmap", run, *look],))

    def draw_sections(self) -> None:
        """Sections and their nuclei; sections that are there are kept."""
        for folder in ("slides", "configs"):
            (self.out / folder).mkdir(exist_ok=True)
        if self.images is None:
            rows = [row for names in self.names.values() for name in names for row in self._draw(name)]
            write_text(self.slides / NUCLEI, _as_csv(("image", "cell", "x", "y"), rows))

    def _draw(self, name: str) -> list[tuple[str, str, float, float]]:
        section = draw_section(
            crc32(f"{self.seed} {name}".encode()), tumour=has_tumour(name), pen=has_pen(name)
        )
        path = self.slides / f"{name}.tiff"
        if not path.is_file():
            write_atomically(path, lambda part: _write_tiff(part, section))
        return [
            (name, kind.kind, round(float(x), 1), round(float(y), 1))
            for kind in section.nuclei
            for x, y in kind.xy
        ]

    def patch_counts(self, name: str, corners: npt.NDArray[np.int64]) -> Counts:
        """How many nuclei of each kind lie in each patch."""
        rows = self.nuclei.get(name, [])
        kinds = np.array([kind for kind, _, _ in rows])
        xy = np.array([place for _, *place in rows], dtype=np.float64).reshape(-1, 2)
        offset = xy[None] - corners[:, None]  # (patches, nuclei, 2)
        inside = np.asarray(((offset >= 0) & (offset < self.edge)).all(axis=2))
        return {str(kind): inside[:, kinds == kind].sum(axis=1) for kind in sorted(set(kinds))}

    def marked(self, name: str, corners: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which patches hold tumour."""
        none = np.zeros(len(corners), dtype=np.int64)
        return np.asarray(self.patch_counts(name, corners).get(self.asked, none) >= MARKED)

    def write_tables(self) -> None:
        """The cohort: sections with features; for each test section, which of its patches hold tumour."""
        from xmil.data import read_bag

        (self.out / "truth").mkdir(exist_ok=True)
        cohort = []
        for split, names in self.names.items():
            kept = [name for name in names if self._features(name).is_file()]
            cohort += [(name, name, split, self.classes[int(self.labels[name])]) for name in kept]
            for name in kept if split == "test" else ():
                corners = read_bag(self._features(name)).coords
                assert corners is not None  # noqa: S101  # our own patches have places
                held = self.marked(name, corners).astype(int)
                rows = np.column_stack([corners, held]).tolist()
                write_text(self.out / "truth" / f"{name}.csv", _as_csv(("x0", "y0", "evidence"), rows))
        write_text(self.out / "cohort.csv", _as_csv(("slide_id", "case_id", "split", "label"), cohort))

    def _features(self, name: str) -> Path:
        return self.out / "features" / f"{name}.h5"

    def _tile(self, tiles: str) -> list[str]:
        mpp = PICTURE_MPP if self.images else MPP
        size = ["--size", str(self.edge), "--mpp", str(mpp)]
        return ["tile", str(self.slides), "--out", tiles, *size, "--slide-mpp", str(mpp)]

    def _train(self) -> list[str]:
        path = self.out / "configs" / "tissue.toml"
        text = CONFIG.format(
            out=(self.out / "model").as_posix(), root=self.out.as_posix(), names=json.dumps(self.classes),
            epochs=30 if self.quick else 60, seed=self.seed,
        )  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return ["train", str(path)]

    def _over(self, command: str) -> list[str]:
        where = {
            "--model": self.model, "--features": self.out / "features", "--cohort": self.out / "cohort.csv",
            "--label": "label", "--split": "test", "--out": self.out / command,
        }  # fmt: skip
        return [command, *(str(part) for pair in where.items() for part in pair)]


def has_tumour(name: str) -> bool:
    """Every second drawn section."""
    return int(name[-2:]) % 2 == 0


def has_pen(name: str) -> bool:
    """Every fourth drawn section: always one with tumour, as a pathologist would mark it."""
    return int(name[-2:]) % 4 == 0


CONFIG = """# The model of `xmil demo --tissue`; see docs/training.md for every setting.
out = "{out}"

[data]
features = "{root}/features"
cohort = "{root}/cohort.csv"
label = "label"
class_names = {names}

[model]
name = "attnmil"
dim = 32
attention_dim = 16

[optim]
name = "adamw"
lr = 2e-3
weight_decay = 1e-2
schedule = "cosine"

[train]
epochs = {epochs}
batch = 8
monitor = "loss"
seed = {seed}
device = "cpu"
tensorboard = false
"""


def _write_tiff(path: str, section: DrawnSection) -> None:
    import tifffile

    with tifffile.TiffWriter(path) as file:
        for scale in (1, 2, 4):
            file.write(
                np.ascontiguousarray(section.image[::scale, ::scale]),
                photometric="rgb",
                tile=(256, 256),
                compression="zlib",
                compressionargs={"level": 1},
                subfiletype=int(scale > 1),
                resolution=(1e4 / (MPP * scale),) * 2,
                resolutionunit="CENTIMETER",
                metadata=None,
            )


def _no_nuclei(path: Path) -> str:
    fault = "not a readable table of nuclei" if path.is_file() else "no such table"
    return (
        f"{path}: {fault}; write a row for each nucleus, with the columns image (the picture's name without "
        "its suffix), cell (its kind), x and y (pixels), or leave out --images: tissue is then drawn."
    )


def _as_csv(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
