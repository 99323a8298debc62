"""The requests of all commands over slides: each option with its type, default and help, once.

A `Listener` gets the messages of a command while it works on a request.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xmil.core.errors import InputError, bad_parameter
from xmil.core.request import MOST_PASSES, Request, field_types, option, options, owner, pop_old
from xmil.core.text import parse_json
from xmil.runs.workers.pool import Workers

INPUT, WHAT, OUTPUT, COMPUTE, ADVANCED = "Input", "What to explain", "Output", "Compute", "Advanced"
SLIDES = "Slides without features"
COMPUTING = ("out", "engine", "workers", "device", "memory", "restart")  # without effect on results
PICTURES, WRITTEN = ("panel", "overlay", "patches"), ("png", "geojson")


class Listener:
    """Gets the messages of a run; this base class ignores them."""

    def say(self, sentence: str) -> None:
        """Report what was found, left out or inferred."""

    def warn(self, sentence: str) -> None:
        """Report what makes the results doubtful."""

    def failures(self, failed: Mapping[str, str]) -> None:
        """Report the slides that have no result, with the reason."""

    def counting(self, what: str, total: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG002
        """Count `total` items; call the function that this yields for each item done."""
        return nullcontext(lambda: None)


def parse_size(text: str) -> int:
    """Read a size in bytes from 500MB, 4GB, 2GiB or a plain number.

    >>> parse_size("500MB"), parse_size("2 GiB"), parse_size("1.5G")
    (500000000, 2147483648, 1500000000)
    """
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    number = text.strip().rstrip("BbKMGTikmgt ").strip()
    unit = text.strip()[len(number) :].strip().removesuffix("B").removesuffix("b")
    try:
        size = int(float(number) * units[unit[:1].upper() + unit[1:]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"memory= must be a size such as 500MB or 4GB. Got {text!r} instead.")
    return size


def parse_parameters(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Read methods' own parameters from texts such as ig.steps=100.

    >>> parse_parameters(["ig.steps=100", "shapley.output=logit"])
    {'ig': {'steps': 100}, 'shapley': {'output': 'logit'}}
    """
    parameters: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, _, value = text.partition("=")
        method, _, name = place.partition(".")
        if not (method and name and value):
            raise InputError(
                f"params= must read METHOD.NAME=VALUE, such as ig.steps=100. Got {text!r} instead."
            )
        try:
            parameters.setdefault(method, {})[name] = parse_json(value)
        except ValueError:
            parameters.setdefault(method, {})[name] = value
    return parameters


def parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"Expected numbers separated by commas. Got {text!r} instead.") from None


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request):
    """What all commands over slides share: workers, restarting and links."""

    engine: str = option(
        "local: this machine; ray: Ray, started here; ray:ADDRESS: a running cluster (ray:auto finds it).",
        "local", panel=COMPUTE,
    )  # fmt: skip
    workers: int = option(
        "Worker processes, each with its own model; 0 runs in this process (with ray: as many as fit).",
        0, panel=COMPUTE, least=0,
    )  # fmt: skip
    restart: bool = option("Delete the earlier run in the output folder and start over.", False, panel=OUTPUT)
    follow_links: bool = option(
        "Follow links in input folders; links that are not followed are reported.", True, panel=ADVANCED
    )

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: full digests are now an environment variable."""
        advice = "set the environment variable XMIL_FULL_DIGESTS=1."
        if pop_old(values, "full_digests", advice):
            os.environ["XMIL_FULL_DIGESTS"] = "1"
        if isinstance(values.get("workers"), Workers):
            old = pop_old(values, "workers", "pass workers= as a number, and engine='ray:ADDRESS'.")
            address = f":{old.address}" if old.address else ""
            values |= {"workers": old.workers, "engine": f"{old.kind}{address}"}
        return values

    def as_dict(self) -> dict[str, Any]:
        """Convert to entries of run.json, without workers, device and output folder."""
        return {name: value for name, value in super().as_dict().items() if name not in COMPUTING}

    @property
    def pool(self) -> Workers:
        kind, _, address = self.engine.partition(":")
        count = self.workers or (0 if kind == "ray" else 1)
        return Workers(kind, workers=count, address=address or None)


@dataclass(frozen=True, kw_only=True)
class DeviceRequest(RunRequest):
    """A request whose work runs on a device."""

    device: str = option(
        "cpu, cuda or cuda:N; auto takes a GPU if there is one; cuda/4 lets four workers share a GPU.",
        "auto", panel=COMPUTE,
    )  # fmt: skip

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: the share of a GPU is now part of the device."""
        values = super().upgrade(values)
        if gpus := pop_old(values, "gpus", "name the workers that share a GPU, as device='cuda/4'."):
            values["device"] = f"cuda/{1 / gpus:g}"
        return values

    def __post_init__(self) -> None:
        super().__post_init__()
        _, slash, share = self.device.partition("/")
        try:
            if slash and not 0 < float(share) < float("inf"):
                raise ValueError
        except ValueError:
            raise bad_parameter(
                "device", owner(type(self)), "cpu, cuda, cuda:N or cuda/N", self.device
            ) from None

    @property
    def place(self) -> str:
        """The device without a worker's share of it."""
        return self.device.partition("/")[0]

    @property
    def pool(self) -> Workers:
        """The workers, each with its share of the GPUs; on a cluster, one GPU each unless they share."""
        base, (place, slash, share) = super().pool, self.device.partition("/")
        gpus = 1 / float(share) if slash else float(base.kind == "ray" and place.startswith("cuda"))
        return replace(base, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class SeededRequest(DeviceRequest):
    """A request whose work runs on a device, with seeded random draws."""

    seed: int = option("Seed of all random draws.", 0, panel=COMPUTE, decides=True, least=0)


MODEL = (
    "Checkpoint, folder of `xmil train`, or your own network as module:function or file.py:function; "
    "several models form an ensemble."
)


@dataclass(frozen=True, kw_only=True)
class CohortRequest(SeededRequest):
    """A request over the feature files of a folder, or of a cohort's rows, with a model."""

    model: tuple[Any, ...] = option(MODEL, panel=INPUT)
    features: Path = option("Folder of feature files, or a single file.", panel=INPUT)
    cohort: Path | None = option(
        "Table of slides and labels; without it, all files are used.", None, panel=INPUT
    )
    label: tuple[str, ...] = option(
        "Label column; several columns for several labels or values; time and event for survival models.",
        (), panel=INPUT,
    )  # fmt: skip
    split: tuple[str, ...] = option("Use only slides of these splits.", (), panel=INPUT)
    slide_column: str | None = option(
        "Column of the cohort that names the slides, if it is not found by its name.", None, panel=INPUT
    )
    by: str = option(
        "Unit of a bag: slide, or case (all slides of a case together).", "slide", panel=INPUT,
        choices=("slide", "case"), decides=True,
    )  # fmt: skip
    class_names: tuple[str, ...] = option(
        "Names of the classes in the model's order, if its file does not store them.",
        (),
        panel=INPUT,
        decides=True,
    )
    mpp: float | None = option(
        "Microns per level-0 pixel, if the files do not store it.", None, panel=INPUT, decides=True
    )
    patch_size: int | None = option(
        "Patch edge in level-0 pixels, if the files do not store it.", None, panel=INPUT, decides=True
    )
    format: str = option(
        "Layout of the feature files, if it cannot be recognised.", "auto", panel=INPUT, decides=True
    )

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: the columns of survival are now labels."""
        time = pop_old(values, "time", "name both columns of survival as label=[time, event].")
        event = pop_old(values, "event", "name both columns of survival as label=[time, event].")
        if time or event:
            values["label"] = [time or "time", event or "event"]
        return super().upgrade(values)

    @property
    def reading(self) -> dict[str, Any]:
        """Options for `read_bag` that fill in what files do not store."""
        values: dict[str, Any] = {"mpp": self.mpp, "patch_size": self.patch_size}
        values |= {"format": None if self.format == "auto" else self.format}
        return {key: value for key, value in values.items() if value is not None}

    def check_apart(self, out: Path) -> None:
        """Refuse to write a run into the folder of features."""
        if self.features.is_dir() and out.exists() and out.samefile(self.features):
            raise InputError(f"{out}: out= is the folder of features=; choose another, such as {out}-run.")

    def places(self) -> dict[str, str | None]:
        """Paths of the inputs, for run.json."""
        cohort = None if self.cohort is None else str(self.cohort.resolve())
        return {"features": str(self.features.resolve()), "cohort": cohort}


RESULTS = "Folder for results; an interrupted run continues where it stopped."
BACKGROUND = (
    "Folder or file of ordinary features that lrp and one_added measure against, each slide counting alike; "
    "by default the model's own, if it has one."
)


def upgrade_background(values: dict[str, Any]) -> None:
    """Convert an old option: runs no longer make a background from their slides, so nothing turns it off."""
    if values.get("background") in ("auto", "none"):
        pop_old(values, "background", "without it the model's own is taken; name a folder of features.")


@dataclass(frozen=True, kw_only=True)
class ExplainRequest(CohortRequest):
    """Explain every slide: which patches speak for a class, and which against it.

    Without --out one feature file or slide is explained: verdict, audit and strongest patches are printed,
    and a picture is left in the current folder.
    """

    features: Path | None = option(  # type: ignore[assignment]  # filled in before it is read
        "Folder of feature files, or a single file; without it, slides are tiled and encoded first, into "
        "OUT/tiles and OUT/features.",
        None, panel=INPUT,
    )  # fmt: skip
    out: Path | None = option(f"{RESULTS} Optional for one slide.", None, panel=OUTPUT)
    slides: Path | None = option(
        "Folder of slides, or one: heatmaps are drawn as well, into OUT/heatmaps; without OUT, one picture.",
        None, panel=INPUT,
    )  # fmt: skip
    encoder: str | None = option(
        "Without features: the encoder, if the model does not name the one it was trained on; see xmil "
        "embed.",
        None, panel=SLIDES,
    )  # fmt: skip
    weights: Path | None = option("Weights of the encoder instead of the published ones.", None, panel=SLIDES)
    random: bool = option("Use an untrained encoder, for testing.", False, panel=SLIDES)
    tile_mpp: float | None = option(
        "Microns per pixel of a patch, if the model does not record those it was trained on.",
        None, panel=SLIDES, least=0,
    )  # fmt: skip
    tile_size: int | None = option(
        "Patch size in pixels, if the model does not record the one it was trained on.", None, panel=SLIDES,
        least=8,
    )  # fmt: skip
    methods: tuple[str, ...] = option(
        "Explanation methods; auto takes the one that the model confirms best.", ("lrp",), panel=WHAT
    )
    target: tuple[str, ...] = option(
        "predicted, label, all, a class by name or number, or a contrast A:B.", ("predicted",), panel=WHAT
    )
    output: str | None = option(
        "The number to explain: logit, contrastive, log_odds, probability, value, risk.", None, panel=WHAT
    )
    preset: str = option("Rules of lrp: default, exact, paper, released.", "", panel=WHAT)
    params: Mapping[str, Mapping[str, Any]] | None = option(
        "A parameter of one method, such as ig.steps=100; may be repeated.", None, panel=WHAT, flag="--param"
    )
    contexts: int = option(
        "Average lrp, ig and gxi over this many random sub-bags, with errors.",
        0,
        panel=WHAT,
        least=0,
        most=MOST_PASSES,
    )
    interactions: int = option(
        "Find pairs that act together among this many of the strongest patches.", 0, panel=WHAT, least=0
    )
    background: Path | None = option(BACKGROUND, None, panel=WHAT)
    check: str = option(
        "Cases that check the maps: a number, all, none, or auto (16, without other methods that take long).",
        "auto", panel=WHAT,
    )  # fmt: skip
    memory: int = option(
        "Memory limit for a method's temporary arrays, such as 500MB or 4GB.",
        10**9,
        panel=COMPUTE,
        parse=parse_size,
        text="1GB",
    )

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options of methods to `params`; refuse options of tiling with features."""
        upgrade_background(values)
        made = ("encoder", "weights", "random", "tile_mpp", "tile_size")
        extra = next((name for name in made if values.get(name)), None)
        if extra is not None and values.get("features") is not None:
            raise InputError(f"{extra}= is for slides without features; leave out features=, or {extra}=.")
        params = {name: dict(own) for name, own in (values.get("params") or {}).items()}
        old = {"keep": pop_old(values, "keep", 'pass params={"lrp": {"keep": ...}}.')}
        if pop_old(values, "save_vectors", 'pass params={"lrp": {"feature_level": True}}.'):
            old["feature_level"] = True
        old = {name: value for name, value in old.items() if value is not None}
        if old:
            values["params"] = {**params, "lrp": {**params.get("lrp", {}), **old}}
        return super().upgrade(values)


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(CohortRequest):
    """Drop patches by each method's scores and see whether the prediction follows.

    With --annotations, scores are compared with what readers drew: RUN --annotations needs no model.
    """

    run: Path | None = option(
        "Folder of `xmil explain` whose saved scores are compared with the annotations.", None, argument=True
    )
    model: tuple[Any, ...] = option(MODEL, (), panel=INPUT)
    features: Path = option("Folder of feature files, or a single file.", None, panel=INPUT)
    out: Path = option(f"{RESULTS} With RUN, RUN itself by default.", None, panel=OUTPUT)
    annotations: Path | None = option(
        "Regions to compare scores with: a folder of SLIDE.geojson (QuPath) or SLIDE/READER.geojson, such as "
        "RUN/annotations, which the viewer writes.",
        None, panel=INPUT,
    )  # fmt: skip
    methods: tuple[str, ...] = option("Methods; 'all' for every method that fits the model.", (), panel=WHAT)
    modes: tuple[str, ...] = option(
        "remove, mask, or both; the random band and SRG use the first.", ("remove", "mask"), panel=WHAT
    )
    steps: int = option("Steps per curve.", 100, panel=WHAT, least=1, most=MOST_PASSES)
    orders: int = option(
        "Random orders for the band in pictures; verdicts use 200.", 20, panel=WHAT, least=2, most=MOST_PASSES
    )
    smallest: float = option(
        "Smallest difference in mean AUPC that makes a method better than another.", 0.01, panel=WHAT, least=0
    )
    background: Path | None = option(BACKGROUND, None, panel=WHAT)
    truth: Path | None = option(
        "Ground truth: a folder of GeoJSON, masks or patch labels.", None, panel=INPUT
    )
    truth_class: str = option(
        "Class that the ground truth is evidence for, by name or number.", "1", panel=INPUT
    )
    truth_names: tuple[str, ...] = option("QuPath classes that count.", (), panel=INPUT)
    slides: Path | None = option(
        "Folder of slides; needed for QuPath's GeoJSON of slides with a bounds offset.", None, panel=INPUT
    )
    mask_downsample: float = option("Level-0 pixels per pixel of the masks.", 1.0, panel=INPUT)

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: the top is always a tenth, and the best method is always named."""
        pop_old(values, "top", "sufficiency and necessity use a tenth of the patches.")
        pop_old(values, "best", "the best method is always named.")
        upgrade_background(values)
        return super().upgrade(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run is not None:
            if self.annotations is None:
                raise InputError(
                    "annotations= is missing: the regions to compare the run's scores with. To measure how "
                    "faithful maps are, leave out the run and give model= and features=."
                )
            return
        for name in ("model", "features", "out"):
            if not getattr(self, name):
                raise InputError(f"{name}= is missing: {options(type(self))[name].help}")


@dataclass(frozen=True, kw_only=True)
class PredictRequest(CohortRequest):
    """Predict every slide: probabilities, values or risks, with measures if the truth is known."""

    out: Path = option(RESULTS, panel=OUTPUT)
    draws: int = option("Bootstrap draws, over cases.", 1000, panel=ADVANCED)
    instances: int = option("Sample this many patches per slide; 0 uses all.", 0, panel=ADVANCED, least=0)
    repetitions: int = option("How often to sample; outputs are averaged.", 1, panel=ADVANCED, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repetitions > 1 and not self.instances:
            must = "1, or more with `instances` to draw"
            raise bad_parameter("repetitions", "predict", must, self.repetitions)


@dataclass(frozen=True, kw_only=True)
class TileRequest(RunRequest):
    """Lay patches on the tissue of slides: corners in TRIDENT's layout, outlines, overview pictures."""

    slides: tuple[Path, ...] = option("Slides, or folders of slides.", argument=True)
    out: Path = option("Folder for the patches; an interrupted run continues where it stopped.", panel=OUTPUT)
    size: int = option("Patch size in pixels.", 256, decides=True)
    mpp: float = option("Microns per pixel of a patch.", 0.5, decides=True)
    overlap: int = option("Pixels that neighbouring patches share.", 0, decides=True)
    magnification: float | None = option(
        "Magnification instead of mpp: 20 is 0.5 µm/px, 40 is 0.25.", None, decides=True
    )
    slide_mpp: float | None = option("Microns per level-0 pixel, for slides that do not store it.", None)
    min_tissue: float = option("Minimum share of tissue in a patch.", 0.25, panel=ADVANCED, decides=True)
    min_std: float = option(
        "Minimum standard deviation of a patch's grey values.", 8.0, panel=ADVANCED, decides=True
    )
    drop: tuple[str, ...] = option(
        "Leave out patches with any of pen, fold, blur, coverslip (its edge); or 'none'.",
        ("pen",), panel=ADVANCED, choices=("pen", "fold", "blur", "coverslip"), decides=True,
    )  # fmt: skip
    keep_edge: bool = option(
        "Also take patches over the slide's right and lower border.", False, panel=ADVANCED, decides=True
    )

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: one list says what patches may not show."""
        kinds = {"pen": False, "fold": True, "blur": True, "coverslip": True}  # old defaults of keeping them
        old = {kind: pop_old(values, kind, 'pass drop=["pen", ...].') for kind in kinds}
        if any(keep is not None for keep in old.values()):
            values["drop"] = [k for k, keep in kinds.items() if not (keep if old[k] is None else old[k])]
        return super().upgrade(values)


@dataclass(frozen=True, kw_only=True)
class EmbedRequest(DeviceRequest):
    """Encode the patches of slides; features in TRIDENT's layout, one file per slide."""

    tiles: Path = option("Folder of patches written by xmil tile, TRIDENT or CLAM.", panel=INPUT)
    slides: tuple[Path, ...] = option("Folder of slides.", panel=INPUT)
    encoder: str = option(
        "resnet18, resnet50, resnet50_trunc (CLAM's), ctranspath, uni, ..., a timm name, hf-hub:OWNER/NAME, "
        "FILE.onnx, a TorchScript file, or module:function. The last two run code: use those you trust.",
        panel=INPUT,
    )  # fmt: skip
    out: Path | None = option("Folder for features; TILES/features_ENCODER by default.", None, panel=OUTPUT)
    weights: Path | None = option(
        "Weights (a state dict) to use instead of the published ones.", None, panel=INPUT
    )
    precision: str = option("float32, float16, bfloat16; auto is float16 on a GPU.", "auto", panel=COMPUTE)
    batch: int = option("Patches encoded at once.", 64, panel=COMPUTE, least=1)
    readers: int = option(
        "Processes that read and decode; 0: threads instead; -1: one per core for a GPU, threads for a CPU.",
        -1, panel=COMPUTE,
    )  # fmt: skip
    compile: bool = option(
        "Compile the network: quicker on a GPU; the last digits of features differ.", False, panel=COMPUTE
    )
    stain_norm: bool = option(
        "Normalise each slide's stains to a reference (Macenko).", False, panel=ADVANCED
    )
    input_size: int | None = option(
        "Input size of the encoder in pixels, instead of its own.", None, panel=ADVANCED
    )
    normalise: tuple[float, ...] | None = option(
        "Six numbers that replace the encoder's own: mean, then standard deviation, of red, green and blue.",
        None, panel=ADVANCED, parse=parse_numbers,
    )  # fmt: skip
    patch_px: int | None = option(
        "Patch size in pixels, if the file does not store it.", None, panel=ADVANCED
    )
    random: bool = option("Use an untrained encoder, for testing.", False, panel=ADVANCED)

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: mean and std are one option, and threads follow the cores."""
        pop_old(values, "threads", "there are as many as cores, at most 16.")
        pop_old(values, "decode", "JPEG tiles are decoded by the CPU.")
        values["readers"] = -1 if values.get("readers") is None else values["readers"]
        mean = pop_old(values, "mean", "pass normalise=[*mean, *std].")
        std = pop_old(values, "std", "pass normalise=[*mean, *std].")
        if (mean is None) != (std is None):
            raise InputError("mean= and std= go together: pass normalise=[*mean, *std].")
        if mean is not None:
            values["normalise"] = [*mean, *std]
        return super().upgrade(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise is not None and len(self.normalise) != 6:
            raise bad_parameter(
                "normalise", "embed", "six numbers: mean and std of each colour", self.normalise
            )


@dataclass(frozen=True, kw_only=True)
class DrawRequest(RunRequest):
    """Draw each slide's scores: overlays, panels, patch sheets; GeoJSON, OME-TIFF, tables."""

    run: Any = option("Folder of a run, or one explanation file (.parquet).", argument=True)
    slides: Path | None = option("Folder of slides; without it, scores are drawn alone.", None, panel=INPUT)
    out: Path | None = option("Folder for the files; RUN/heatmaps by default.", None, panel=OUTPUT)
    names: tuple[str, ...] = option("Draw only these slides.", (), panel=INPUT)
    methods: tuple[str, ...] = option("Draw only these methods, in this order.", (), panel=INPUT)
    target: tuple[str, ...] = option("Use only these explained classes, or 'predicted'.", (), panel=INPUT)
    pictures: tuple[str, ...] = option(
        "Any of panel, overlay, side, patches, map; 'none' for exports alone.", PICTURES, panel=OUTPUT
    )
    to: tuple[str, ...] = option(
        "Any of png, pdf, svg (pictures), geojson (QuPath), scores and colours (OME-TIFF), csv, parquet.",
        WRITTEN, panel=OUTPUT,
    )  # fmt: skip
    clip: str = option(
        "End of the colour scale: whiskers (1.5 IQR), none, or a percentile such as 99.", "whiskers",
        panel=OUTPUT,
    )  # fmt: skip
    scale: str = option(
        "slide: a colour scale per slide; cohort: one scale for all slides.", "slide", panel=OUTPUT,
        choices=("slide", "cohort"),
    )  # fmt: skip
    alpha: float = option("Opacity of the colours over the slide, 0 to 1.", 0.5, panel=ADVANCED)
    tissue: str = option("Show the slide under the colours in grey or colour.", "grey", panel=ADVANCED)
    size: int = option("Pixels of a picture's longer edge.", 1200, panel=ADVANCED, least=1)
    region: tuple[float, ...] | None = option(
        "Zoom: x,y,width,height in level-0 pixels.", None, panel=ADVANCED, parse=parse_numbers
    )
    top: int = option("Number of highest and lowest patches on a sheet.", 8, panel=ADVANCED)
    pairs: int = option(
        "Largest number of lines between patches that act together, if the run has interactions.",
        30,
        panel=ADVANCED,
        least=0,
    )
    mpp: float | None = option("Microns per level-0 pixel, if no file stores it.", None, panel=INPUT)
    patch_size: int | None = option("Patch edge in level-0 pixels, if unknown.", None, panel=INPUT)
    frame: str = option(
        "Origin of exported coordinates: the scanned bounds, as in QuPath, or level0.",
        "bounds",
        panel=ADVANCED,
    )
    downsample: int | None = option(
        "Level-0 pixels per OME-TIFF pixel; by default 1 unless the slide is very wide.", None, panel=ADVANCED
    )

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert old options: looks are options of their own, and `to` names all files."""
        look = pop_old(values, "look", "pass clip=, alpha=, size= and the like by themselves.")
        if look is not None:
            own = field_types(cls)
            values = {**{name: value for name, value in vars(look).items() if name in own}, **values}
        formats = pop_old(values, "formats", 'pass to=["png", "geojson"].')
        exports = pop_old(values, "exports", 'pass to=["png", "geojson"].')
        if formats is not None or exports is not None:
            several = [("png",) if formats is None else formats, ("geojson",) if exports is None else exports]
            values["to"] = [one for few in several for one in ([few] if isinstance(few, str) else few)]
        percentile = (
            values.pop("percentile", 99.0)
            if look is not None
            else pop_old(values, "percentile", "pass it as clip='99'.")
        )
        if values.get("clip") == "percentile":
            values["clip"] = f"{99 if percentile is None else percentile:g}"
        return super().upgrade(values)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            clips = self.clip in ("whiskers", "none") or 50 < float(self.clip) <= 100
        except ValueError:
            clips = False
        if not clips:
            must = "whiskers, none, or a percentile above 50, up to 100"
            raise bad_parameter("clip", "heatmap", must, self.clip)
        if not 0 <= self.alpha <= 1:
            raise bad_parameter("alpha", "heatmap", "a number in the range [0, 1]", self.alpha)
        if self.region is not None and len(self.region) != 4:
            raise bad_parameter("region", "heatmap", "x,y,width,height in level-0 pixels", self.region)


@dataclass(frozen=True, kw_only=True)
class ExportRequest(Request):
    """Write each slide's scores for QuPath, ASAP, DICOM, OME-Zarr, SpatialData and tables."""

    run: Any = option("Folder of a run, or one explanation file (.parquet).", argument=True)
    to: tuple[str, ...] = option(
        "Any of qupath (gzipped GeoJSON), asap (XML), dicom (Parametric Map), dicom-annotations, ome-zarr, "
        "spatialdata, anndata (.h5ad), geojson, scores, colours (OME-TIFF), csv, parquet."
    )  # fmt: skip
    slides: Path | None = option(
        "Folder of slides; needed for coordinates in microns or with an offset.", None
    )
    out: Path | None = option("Folder for the files; RUN/export by default.", None)
    methods: tuple[str, ...] = option("Export only these methods.", ())
    target: tuple[str, ...] = option("Use only these explained classes, or 'predicted'.", ())
    mpp: float | None = option("Microns per level-0 pixel, if no file stores it.", None)
    patch_size: int | None = option("Patch edge in level-0 pixels, if unknown.", None)
    restart: bool = option("Write existing files again.", False)
    follow_links: bool = option(
        "Follow links in input folders; links that are not followed are reported.", True
    )


INSIDE_MAPS = ("turned", "tokens", "lrp", "occlusion", "shifted")


@dataclass(frozen=True, kw_only=True)
class InsideRequest(DeviceRequest):
    """Map where inside the strongest patches their scores come from; sheets and tiles for QuPath."""

    run: Any = option("Folder of a run of `xmil explain` with lrp.", argument=True)
    slides: Path = option("Folder of slides.", panel=INPUT)
    encoder: str = option("The encoder that made the features; see `xmil embed`.", panel=INPUT)
    weights: Path | None = option("State dict of the encoder.", None, panel=INPUT)
    model: Any = option(
        "The run's checkpoint, or your own network as module:function, if no relevance vectors are "
        "stored; by default the checkpoint that the run names.",
        None, panel=INPUT,
    )  # fmt: skip
    features: Path | None = option(
        "Feature files; without them and without vectors, patches are encoded again.", None, panel=INPUT
    )
    out: Path | None = option("Folder for the maps; RUN/inside by default.", None, panel=OUTPUT)
    patches: int = option("Number of strongest patches per slide.", 16, panel=WHAT)
    map: str = option(
        f"{', '.join(INSIDE_MAPS[:-1])} or {INSIDE_MAPS[-1]}.", "turned", panel=WHAT, choices=INSIDE_MAPS
    )
    target: str | None = option("Explained class, if the run has several.", None, panel=WHAT)
    patch_px: int | None = option("Patch size in pixels, as given to the encoder.", None, panel=INPUT)
    format: str = option("Layout of the feature files, if it cannot be recognised.", "auto", panel=INPUT)
    random: bool = option("Use an untrained encoder, for testing.", False, panel=ADVANCED)
    tiff: bool = option("Write the maps as OME-TIFF as well.", False, panel=OUTPUT)

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Convert an old option: `method` is now `map`."""
        if (kind := pop_old(values, "method", "pass map=.")) is not None:
            values["map"] = kind
        return super().upgrade(values)


@dataclass(frozen=True, kw_only=True)
class StudyRequest(Request):
    """Make a reading study from runs and a plan: cases, arms, an order for each reader."""

    runs: tuple[Path, ...] = option("Folders of `xmil explain` or `xmil evaluate`.", argument=True)
    slides: Path = option("Folder of slides.", panel=INPUT)
    plan: Path = option(
        "TOML file: readers, cases, arms, questions, blinding; docs/howto/study.md.", panel=INPUT
    )
    out: Path = option("Folder for the study; it must not exist yet.", panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class StudyReportRequest(Request):
    """Write what the readers of a study found: one HTML page, and tables for R."""

    study: Path = option("Folder of `xmil study init`.", argument=True)
    out: Path | None = option("Folder for the report; STUDY/report by default.", None, panel=OUTPUT)


@dataclass(frozen=True, kw_only=True)
class InsightRequest(RunRequest):
    """Find concepts, strategies, shortcuts and biomarkers over a run; write a report and a card."""

    run: Any = option("Folder of a run of `xmil explain`.", argument=True)
    features: Path | None = option(
        "Folder of the feature files that were explained; by default where the run found them.",
        None,
        panel=INPUT,
    )
    cohort: Path | None = option(
        "Table with labels and columns of acquisition (site, scanner, ...).", None, panel=INPUT
    )
    slide_column: str | None = option(
        "Column of the cohort that names the slides, if it is not found by its name.", None, panel=INPUT
    )
    slides: Path | None = option(
        "Folder of slides, for image properties of patches and examples in the report.", None, panel=INPUT
    )
    model: Any = option(
        "The run's checkpoint, its training folder for stability over folds, or your own network as "
        "module:function; by default the checkpoint that the run names.",
        None,
        panel=INPUT,
    )
    out: Path | None = option("Folder for the findings; RUN/insight by default.", None, panel=OUTPUT)
    method: str = option("The method whose explanations are analysed.", "lrp", panel=WHAT, flag="--methods")
    target: str | None = option("Explained class, if the run has several.", None, panel=WHAT)
    label: str = option("Label column; it is an outcome and never tested as a cause.", "label", panel=WHAT)
    concepts: int = option("Size of the dictionary.", 20, panel=WHAT)
    dictionary: str = option("kmeans, nmf (features >= 0) or topk.", "kmeans", panel=WHAT)
    causes: tuple[str, ...] = option("Columns to test, or all.", (), panel=WHAT)
    beside: tuple[Path, ...] = option("Further runs of the same slides (folds, seeds).", (), panel=INPUT)
    evaluated: Path | None = option(
        "Run of `xmil evaluate`, for certificates in the card and the album.", None, panel=INPUT
    )
    album: bool = option("Write album.pdf, one page per slide.", False, panel=OUTPUT)
    regions: Path | None = option(
        "Folder of annotations, SLIDE.geojson; biomarkers within them are added.", None, panel=INPUT
    )
    within: tuple[str, ...] = option("Classes of annotations that make a region, or all.", (), panel=WHAT)
    sanity: int = option(
        "Slides for the card's sanity tests, with a model; 0 for none.", 10, panel=WHAT, least=0
    )
    seed: int = option("Seed for the sample, the dictionary and the tests.", 0, panel=COMPUTE, least=0)
    format: str = option("Layout of the feature files, if it cannot be recognised.", "auto", panel=INPUT)
