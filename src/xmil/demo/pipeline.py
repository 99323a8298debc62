"""The demonstration from end to end: every step is a public command, or says what it does itself.

A folder fills up: slides, tiles, features, models, predictions, scores, curves, heatmaps, the report. Each
command goes on where it stopped, so that a second run costs little.
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
from typing import Any, Protocol

from xmil._version import __version__
from xmil.core.bag import Bag
from xmil.core.errors import InputError, XmilError
from xmil.core.runfiles import make_folder
from xmil.core.storage import write_text
from xmil.demo.digit_slides import (
    CLASS_NAMES,
    MPP,
    TASK_NAMES,
    TILE,
    DigitSlide,
    draw_bags,
    telling,
    write_cohort,
    write_digit_slide,
    write_truth,
)

MODELS = {
    "attnmil": {"dim": 64, "attention_dim": 32, "n_out_layers": 1},
    "transmil": {"dim": 32, "heads": 4},
}
METHODS = (
    "lrp", "ig", "gxi", "one_removed", "milli", "combined", "attention", "single", "grad2", "random",
)  # fmt: skip
MEASURED = ("lrp", "ig", "single", "attention", "random")  # by flip curves, which take longer
NEEDED = ("openslide", "tifffile", "skimage", "lightning_fabric")  # beyond what is always installed
FURTHER = ("train", "val", "test")  # splits whose bags are not drawn as slides
DONE = "stages.json"
Run = Callable[[Sequence[list[str]], bool], list[int]]  # commands, side by side or not; their exit codes
Say = Callable[[str], None]  # hears pieces of lines


@dataclass(frozen=True)
class Size:
    """How much is drawn, trained and measured."""

    train: int
    validation: int
    test: int
    slides: int
    epochs: int
    steps: int
    orders: int


FULL = Size(train=1200, validation=200, test=200, slides=12, epochs=15, steps=20, orders=6)
QUICK = Size(train=500, validation=80, test=80, slides=4, epochs=8, steps=10, orders=5)


@dataclass(frozen=True)
class DemoStage:
    """A step with its title: commands of the program, or work that it does itself.

    Commands that take long run side by side, each in a process of its own.
    """

    title: str
    commands: tuple[list[str], ...] = ()
    work: Callable[[], None] | None = None
    side_by_side: bool = False
    may_fail: bool = False  # on some slides, as exit code 1 says

    @property
    def lines(self) -> tuple[str, ...]:
        """The commands as one would type them."""
        return tuple(f"xmil {shlex.join(command)}" for command in self.commands)


@dataclass(frozen=True)
class Timing:
    """A stage that is done: its title, its commands as text, and how long it took here."""

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
    def size(self) -> Size:
        """How much there is of everything."""
        return QUICK if self.quick else FULL

    @cached_property
    def bags(self) -> dict[str, Sequence[DigitSlide]]:
        """The bags of each split; those of "slide" are drawn, the others are feature files alone."""
        size = self.size
        sizes = {"train": size.train, "val": size.validation, "test": size.test, "slide": size.slides}
        return {split: draw_bags(split, n, seed=self.seed) for split, n in sizes.items()}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Tasks and models."""
        return [(task, model) for task in TASK_NAMES for model in MODELS]

    def shown(self, task: str) -> DigitSlide:
        """The slide whose pictures are drawn."""
        return telling(self.bags["slide"], task)

    def folder(self, kind: str, task: str, model: str) -> Path:
        """Where the results of one kind lie for a task and model."""
        return self.out / kind / f"{task}-{model}"

    def checkpoint(self, task: str, model: str) -> Path:
        """The trained model."""
        return self.folder("models", task, model) / "model" / "model.safetensors"

    def prepare(self) -> None:
        """Make the folder; one that holds a demonstration of another size or seed is refused."""
        check_needed()
        claim_folder(self.out, {"version": __version__, "quick": self.quick, "seed": self.seed})

    def stages(self) -> Iterator[DemoStage]:
        """Every step before the report, in order."""
        n, more = len(self.bags["slide"]), sum(len(self.bags[split]) for split in FURTHER)
        slides, tiles, features = self.out / "slides", self.out / "tiles", self.out / "features"
        yield DemoStage(f"draw {n} digit slides", work=self.draw_slides)
        yield DemoStage("tile", (["tile", str(slides), "--out", str(tiles)],))
        yield DemoStage("embed", (self._embed(slides, tiles, features),))
        yield DemoStage(f"embed {more} further bags without drawing slides", work=self.embed_further)
        yield DemoStage("train 4 models", self._each(self._train), side_by_side=True)
        yield DemoStage("predict", self._each(self._predict))
        yield DemoStage(f"explain by {len(METHODS)} methods", self._each(self._explain), side_by_side=True)
        yield DemoStage("evaluate: drop tiles by score", self._each(self._evaluate), side_by_side=True)
        yield DemoStage("heatmaps", self._each(self._heatmap))

    def _each(self, command: Callable[[str, str], list[str]]) -> tuple[list[str], ...]:
        return tuple(command(task, model) for task, model in self.pairs)

    def draw_slides(self) -> None:
        """Slides, the cohort's table and the true evidence; slides that are there are kept."""
        for kind in ("slides", "features", "configs"):
            (self.out / kind).mkdir(exist_ok=True)
        write_cohort(self.out / "cohort.csv", self.bags)
        for slide in self.bags["slide"]:
            path = self.out / "slides" / f"{slide.name}.tiff"
            if not path.is_file():
                write_digit_slide(path, slide)
            for task in TASK_NAMES:
                write_truth(self.out / "truth" / task, slide, task)

    def embed_further(self) -> None:
        """Feature files of the bags that are not drawn: digits' tiles by the same encoder."""
        from xmil.data import write_bag
        from xmil.demo.stain_fields import NAME, encode_digits

        wanted = [slide for split in FURTHER for slide in self.bags[split]]
        paths = {slide.name: self.out / "features" / f"{slide.name}.h5" for slide in wanted}
        missing = [slide for slide in wanted if not paths[slide.name].is_file()]
        features = encode_digits() if missing else None
        for slide in missing:
            assert features is not None  # noqa: S101  # for the type checker: something is missing
            bag = Bag(
                features[slide.rows],
                slide.coords,
                patch_size=TILE,
                mpp=MPP,
                slide_id=slide.name,
                encoder=NAME,
            )
            write_bag(bag, paths[slide.name])

    def _embed(self, slides: Path, tiles: Path, features: Path) -> list[str]:
        where = ["--tiles", str(tiles), "--slides", str(slides), "--out", str(features)]
        return ["embed", *where, "--encoder", "digits", "--device", "cpu"]

    def _train(self, task: str, model: str) -> list[str]:
        path = self.out / "configs" / f"{task}-{model}.toml"
        params = "".join(f"{key} = {value}\n" for key, value in MODELS[model].items())
        names = ", ".join(f'"{name}"' for name in CLASS_NAMES)
        text = CONFIG.format(
            out=self.folder("models", task, model).as_posix(),
            root=self.out.as_posix(),
            task=task,
            names=names,
            model=model,
            params=params,
            epochs=self.size.epochs,
            seed=self.seed,
        )
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)
        return ["train", str(path)]

    def _over(self, command: str, task: str, model: str) -> list[str]:
        """A command over the slides for one task and model."""
        where = {
            "--model": self.checkpoint(task, model),
            "--features": self.out / "features",
            "--cohort": self.out / "cohort.csv",
            "--label": task,
            "--split": "slide",
            "--out": self.folder(command, task, model),
        }
        return [command, *(str(part) for pair in where.items() for part in pair)]

    def _predict(self, task: str, model: str) -> list[str]:
        return self._over("predict", task, model)

    def _explain(self, task: str, model: str) -> list[str]:
        return [*self._over("explain", task, model), "--methods", ",".join(METHODS), "--target", "all"]

    def _evaluate(self, task: str, model: str) -> list[str]:
        size = self.size
        asked = {"--methods": ",".join(MEASURED), "--modes": "remove", "--steps": size.steps}
        asked |= {"--orders": size.orders, "--truth": self.out / "truth" / task}
        return [*self._over("evaluate", task, model), *(str(p) for pair in asked.items() for p in pair)]

    def _heatmap(self, task: str, model: str) -> list[str]:
        run, out = self.folder("explain", task, model), self.folder("heatmap", task, model)
        where = ["--slides", str(self.out / "slides"), "--out", str(out)]
        what = ["--names", self.shown(task).name, "--target", CLASS_NAMES[1]]
        what += ["--pictures", "panel", "--size", "600"]
        return ["heatmap", str(run), *where, *what]


def check_needed() -> None:
    """Ask for what is not installed."""
    missing = [module for module in NEEDED if find_spec(module) is None]
    if missing:
        raise InputError(f"The demonstration needs {', '.join(missing)}; pip install 'xmil[slides,train]'.")


def claim_folder(out: Path, about: dict[str, Any]) -> None:
    """Make a folder for a demonstration; one that holds another is refused."""
    path = out / "demo.json"
    make_folder(out)
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else about
    except (OSError, ValueError) as error:
        raise InputError(f"{out}: cannot be used ({error}); choose another --out.") from None
    if known != about:
        raise InputError(f"{out}: holds a demonstration with other settings; choose another --out.")
    write_text(path, json.dumps(about, indent=1) + "\n")


CONFIG = """# One of the demonstration's four models; see docs/training.md for every setting.
out = "{out}"

[data]
features = "{root}/features"
cohort = "{root}/cohort.csv"
label = "{task}"
class_names = [{names}]

[model]
name = "{model}"
{params}
[optim]
name = "adamw"
lr = 1e-3
schedule = "cosine"

[train]
epochs = {epochs}
batch = 16
monitor = "loss"
seed = {seed}
device = "cpu"
tensorboard = false
"""


class Staged(Protocol):
    """What has stages: a demonstration in a folder."""

    @property
    def out(self) -> Path: ...

    def prepare(self) -> None:
        """Make the folder, or refuse it."""

    def stages(self) -> Iterator[DemoStage]:
        """Every step before the report, in order."""


def run_stages(demo: Staged, run: Run, say: Say) -> list[Timing]:
    """Every stage in turn; one that was done before is left, one that fails ends the demonstration."""
    demo.prepare()
    before = {timing.title: timing for timing in _read_done(demo.out / DONE)}
    done: list[Timing] = []
    stages = list(demo.stages())
    for number, stage in enumerate(stages, start=1):
        say(f"[{number}/{len(stages)}] {stage.title} ...")
        found = before.get(stage.title)
        if found is not None and found.commands == stage.lines:
            say(f" done before ({found.seconds:.1f} s)\n")
        else:
            found = _run_stage(stage, run, demo.out)
            say(f" {found.seconds:.1f} s\n")
        done.append(found)
        write_text(demo.out / DONE, json.dumps([asdict(timing) for timing in done], indent=1) + "\n")
    return done


def _run_stage(stage: DemoStage, run: Run, out: Path) -> Timing:
    begin = time.perf_counter()
    if stage.work is not None:
        stage.work()
    for line, code in zip(stage.lines, run(stage.commands, stage.side_by_side), strict=True):
        if code > int(stage.may_fail):
            raise DemoError(f"'{line}' failed; {out / 'log.txt'} says why.")
    return Timing(stage.title, stage.lines, time.perf_counter() - begin)


def _read_done(path: Path) -> list[Timing]:
    """The stages of an earlier run; a damaged file counts as none, and everything is looked at again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Timing(one["title"], tuple(one["commands"]), float(one["seconds"])) for one in found]
    except (OSError, ValueError, TypeError, KeyError):
        return []


class DemoError(XmilError):
    """A stage of the demonstration that did not end well."""
