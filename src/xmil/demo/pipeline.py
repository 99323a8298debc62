"""The demonstration from end to end: every step is a public command or a function of its own.

It fills a folder: slides, tiles, features, models, predictions, scores, curves, heatmaps, the report. Each
command resumes, so that a second run is cheap.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil._version import __version__
from xmil.core.bag import Bag
from xmil.core.durable import write_text
from xmil.core.errors import InputError, XmilError
from xmil.demo.digit_slides import (
    CLASS_NAMES,
    MPP,
    TASK_NAMES,
    TILE,
    DigitSlide,
    draw_bags,
    most_instructive,
    write_cohort,
    write_digit_slide,
    write_truth,
)
from xmil.storage import check_folder, make_folder

if TYPE_CHECKING:
    from xmil.demo.tissue import TissueDemo

MODELS = {
    "attnmil": {"dim": 64, "attention_dim": 32, "n_out_layers": 1},
    "transmil": {"dim": 32, "heads": 4},
}
METHODS = (
    "lrp", "ig", "gxi", "one_added", "one_removed", "milli", "combined", "attention", "single", "grad2",
    "random",
)  # fmt: skip
MEASURED = ("lrp", "ig", "single", "attention", "random")  # methods with flip curves, which take longer
NEEDED = ("openslide", "tifffile", "skimage", "lightning_fabric")  # of optional extras
FEATURES_ONLY = ("train", "val", "test")  # splits without slides
DONE = "stages.json"
Run = Callable[[Sequence[list[str]], bool], list[int]]  # commands, whether in parallel; returns exit codes
Say = Callable[[str], None]  # prints pieces of lines


# What to draw (bags of each split), train (epochs) and measure (steps and random orders of flip curves).
FULL = {"train": 1200, "val": 200, "test": 200, "slide": 12, "epochs": 15, "steps": 20, "orders": 6}
QUICK = {"train": 500, "val": 80, "test": 80, "slide": 4, "epochs": 8, "steps": 10, "orders": 5}


def command(name: str, *words: object, **options: object) -> list[str]:
    """Words of a command line.

    >>> command("tile", "slides", slide_mpp=0.5)
    ['tile', 'slides', '--slide-mpp', '0.5']
    """
    flags = [(f"--{option.replace('_', '-')}", str(value)) for option, value in options.items()]
    return [name, *map(str, words), *(word for flag in flags for word in flag)]


@dataclass(frozen=True)
class DemoStage:
    """A step with its title: commands of the program, or a function.

    With `side_by_side`, each command runs in its own process, in parallel.
    """

    title: str
    commands: tuple[list[str], ...] = ()
    work: Callable[[], None] | None = None
    side_by_side: bool = False
    may_fail: bool = False  # some slides may fail (exit code 1)

    @property
    def lines(self) -> tuple[str, ...]:
        """The commands as text."""
        return tuple(f"xmil {shlex.join(command)}" for command in self.commands)


@dataclass(frozen=True)
class Timing:
    """A finished stage: its title, its commands as text, and its time."""

    title: str
    commands: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Demo:
    """A demonstration in a folder."""

    out: Path
    quick: bool = False
    seed: int = 0

    @property
    def size(self) -> dict[str, int]:
        """The amounts for this run."""
        return QUICK if self.quick else FULL

    @cached_property
    def bags(self) -> dict[str, Sequence[DigitSlide]]:
        """The bags of each split; only those of "slide" are drawn as slides."""
        splits = (*FEATURES_ONLY, "slide")
        return {split: draw_bags(split, self.size[split], seed=self.seed) for split in splits}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Tasks and models."""
        return [(task, model) for task in TASK_NAMES for model in MODELS]

    def shown(self, task: str) -> DigitSlide:
        """The slide in the report's pictures."""
        return most_instructive(self.bags["slide"], task)

    def folder(self, kind: str, task: str, model: str) -> Path:
        """The folder of one kind of results for a task and model."""
        return self.out / kind / f"{task}-{model}"

    def checkpoint(self, task: str, model: str) -> Path:
        """The trained model."""
        return self.folder("models", task, model) / "model" / "model.safetensors"

    def prepare(self) -> None:
        """Make the folder; refuse one with a demonstration of another size or seed."""
        claim_folder(self.out, quick=self.quick, seed=self.seed)

    def stages(self) -> Iterator[DemoStage]:
        """Yield every step before the report, in order."""
        n, more = len(self.bags["slide"]), sum(len(self.bags[split]) for split in FEATURES_ONLY)
        slides, tiles, features = self.out / "slides", self.out / "tiles", self.out / "features"
        embed = command("embed", tiles=tiles, slides=slides, out=features, encoder="digits", device="cpu")
        commands = [self._commands(task, model) for task, model in self.pairs]
        train, predict, explain, evaluate, draw = zip(*commands, strict=True)
        yield DemoStage(f"draw {n} digit slides", work=self.draw_slides)
        yield DemoStage("tile", (command("tile", slides, out=tiles),))
        yield DemoStage("embed", (embed,))
        yield DemoStage(f"embed {more} further bags without drawing slides", work=self.embed_features)
        yield DemoStage("train 4 models", train, side_by_side=True)
        yield DemoStage("predict", predict)
        yield DemoStage(f"explain by {len(METHODS)} methods", explain, side_by_side=True)
        yield DemoStage("evaluate: drop tiles by score", evaluate, side_by_side=True)
        yield DemoStage("heatmaps", draw)

    def draw_slides(self) -> None:
        """Write slides, the cohort's table and the true evidence; keep existing slides."""
        for kind in ("slides", "features"):
            (self.out / kind).mkdir(exist_ok=True)
        write_cohort(self.out / "cohort.csv", self.bags)
        for slide in self.bags["slide"]:
            path = self.out / "slides" / f"{slide.name}.tiff"
            if not path.is_file():
                write_digit_slide(path, slide)
            for task in TASK_NAMES:
                write_truth(self.out / "truth" / task, slide, task)

    def embed_features(self) -> None:
        """Write feature files of the other bags, from the same encoder."""
        from xmil.data import write_bag
        from xmil.demo.encoders import DIGITS, encode_digits

        for slide in (slide for split in FEATURES_ONLY for slide in self.bags[split]):
            path = self.out / "features" / f"{slide.name}.h5"
            if not path.is_file():
                features, name = encode_digits()[slide.rows], slide.name
                bag = Bag(features, slide.coords, patch_size=TILE, mpp=MPP, slide_id=name, encoder=DIGITS)
                write_bag(bag, path)

    def _commands(self, task: str, model: str) -> Iterator[list[str]]:
        """Commands to train, predict, explain, evaluate and draw a task and model; write the settings."""
        config = write_config(
            self.out,
            f"{task}-{model}",
            out=self.folder("models", task, model),
            data={"label": task, "class_names": CLASS_NAMES},
            model={"name": model, **MODELS[model]},
            optim={"lr": 1e-3},
            train={"epochs": self.size["epochs"], "batch": 16, "seed": self.seed},
        )
        yield command("train", config)

        def over_slides(verb: str, **options: object) -> list[str]:
            inputs = {"model": self.checkpoint(task, model), "features": self.out / "features"}
            cohort = {"cohort": self.out / "cohort.csv", "label": task, "split": "slide"}
            return command(verb, **inputs, **cohort, out=self.folder(verb, task, model), **options)

        yield over_slides("predict")
        yield over_slides("explain", methods=",".join(METHODS), target="all")
        yield over_slides(
            "evaluate",
            methods=",".join(MEASURED),
            modes="remove",
            steps=self.size["steps"],
            orders=self.size["orders"],
            truth=self.out / "truth" / task,
        )
        yield command(
            "heatmap",
            self.folder("explain", task, model),
            slides=self.out / "slides",
            out=self.folder("heatmap", task, model),
            names=self.shown(task).name,
            target=CLASS_NAMES[1],
            pictures="panel",
            size=600,
        )


def claim_folder(out: Path, **about: object) -> None:
    """Make a folder for a demonstration; refuse one with another, or if a package is missing."""
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise InputError(f"The demonstration needs {', '.join(missing)}; pip install 'xmil[slides,train]'.")
    path, about = out / "demo.json", {"version": __version__, **about}
    if not path.is_file():
        check_folder(out, "demo")
    make_folder(out)
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else about
    except (OSError, ValueError) as error:
        raise InputError(f"{out}: cannot be read ({error}); choose another `out=`.") from None
    if stored != about:
        raise InputError(f"{out}: has a demonstration with other settings; choose another `out=`.")
    write_text(path, json.dumps(about, indent=1) + "\n")


def write_config(root: Path, name: str, *, out: Path, **sections: dict[str, Any]) -> Path:
    """Write the settings of a model, with those that all models of the demonstration share."""
    from xmil.training.config import dumps

    shared: dict[str, dict[str, Any]] = {
        "data": {"features": (root / "features").as_posix(), "cohort": (root / "cohort.csv").as_posix()},
        "optim": {"name": "adamw", "schedule": "cosine"},
        "train": {"monitor": "loss", "device": "cpu", "tensorboard": False},
    }
    settings = {section: {**shared.get(section, {}), **own} for section, own in sections.items()}
    path = root / "configs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    comment = "# A model of the demonstration; see docs/howto/training.md for the settings.\n"
    write_text(path, comment + dumps({"out": out.as_posix(), **settings}))
    return path


def run_stages(demo: Demo | TissueDemo, run: Run, say: Say) -> list[Timing]:
    """Run every stage in turn; skip finished ones, stop at a failure."""
    demo.prepare()
    finished = {timing.title: timing for timing in _read_done(demo.out / DONE)}
    done: list[Timing] = []
    stages = list(demo.stages())
    for number, stage in enumerate(stages, start=1):
        say(f"[{number}/{len(stages)}] {stage.title} ...")
        timing = finished.get(stage.title)
        if timing is not None and timing.commands == stage.lines:
            say(f" done before ({timing.seconds:.1f} s)\n")
        else:
            begin = time.perf_counter()
            if stage.work is not None:
                stage.work()
            for line, code in zip(stage.lines, run(stage.commands, stage.side_by_side), strict=True):
                if code > int(stage.may_fail):
                    raise XmilError(f"'{line}' failed; see {demo.out / 'log.txt'}.")
            timing = Timing(stage.title, stage.lines, time.perf_counter() - begin)
            say(f" {timing.seconds:.1f} s\n")
        done.append(timing)
        write_text(demo.out / DONE, json.dumps([asdict(timing) for timing in done], indent=1) + "\n")
    return done


def _read_done(path: Path) -> list[Timing]:
    """Read the stages of an earlier run; none if the file is damaged."""
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))
        return [Timing(s["title"], tuple(s["commands"]), float(s["seconds"])) for s in stages]
    except (OSError, ValueError, TypeError, KeyError):
        return []
