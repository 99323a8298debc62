"""The requests of all commands over slides: each option with its type, default and help, once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, model_validator

from xmil.core.errors import MOST_PASSES, InputError, bad_parameter
from xmil.core.request import COMPUTE, INPUT, OUTPUT, WHAT, Request, option, owner
from xmil.core.text import parse_json
from xmil.execute import Workers

SLIDES = "Slides without features"
COMPUTING = ("out", "engine", "workers", "device", "memory", "restart")  # without effect on results
PICTURES, WRITTEN = ("panel", "overlay", "patches"), ("png", "geojson")


def parse_size(text: Any) -> Any:
    """Read a size in bytes from 500MB, 4GB, 2GiB or a plain number.

    >>> parse_size("500MB"), parse_size("2 GiB"), parse_size("1.5G")
    (500000000, 2147483648, 1500000000)
    """
    if not isinstance(text, str):
        return text
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    units |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
    number = text.strip().rstrip("BbKMGTikmgt ").strip()
    unit = text.strip()[len(number) :].strip().removesuffix("B").removesuffix("b")
    try:
        size = int(float(number) * units[unit[:1].upper() + unit[1:]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError("a size such as 500MB or 4GB")
    return size


def parse_parameters(texts: Any) -> Any:
    """Read methods' own parameters from texts such as ig.steps=100.

    >>> parse_parameters(["ig.steps=100", "shapley.output=logit"])
    {'ig': {'steps': 100}, 'shapley': {'output': 'logit'}}
    """
    if texts is None or isinstance(texts, Mapping):
        return texts
    parameters: dict[str, dict[str, Any]] = {}
    for text in texts if isinstance(texts, list | tuple) else [texts]:
        place, _, value = str(text).partition("=")
        method, _, name = place.partition(".")
        if not (method and name and value):
            raise ValueError("METHOD.NAME=VALUE, such as ig.steps=100")
        try:
            parameters.setdefault(method, {})[name] = parse_json(value)
        except ValueError:
            parameters.setdefault(method, {})[name] = value
    return parameters


Size = Annotated[int, BeforeValidator(parse_size)]
Parameters = Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(parse_parameters)]


FOLLOW_LINKS = "Follow links in input folders; links that are not followed are reported."


class RunRequest(Request):
    """What all commands over slides share: workers, restarting and links."""

    has_config: ClassVar[bool] = True

    engine: str = option(
        "local: this machine; ray: Ray, started here; ray:ADDRESS: a running cluster (ray:auto finds it).",
        "local", panel=COMPUTE,
    )  # fmt: skip
    workers: int = option(
        "Worker processes, each with its own model; 0 runs in this process (with ray: as many as fit).",
        0, panel=COMPUTE, ge=0,
    )  # fmt: skip
    restart: bool = option("Delete the earlier run in the output folder and start over.", False, panel=OUTPUT)
    follow_links: bool = option(FOLLOW_LINKS, True, panel=COMPUTE)

    def as_dict(self) -> dict[str, Any]:
        """Convert to entries of run.json, without workers, device and output folder."""
        return {name: value for name, value in super().as_dict().items() if name not in COMPUTING}

    def with_options(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Add to the settings of a run the options that decide results and are not among them.

        Defaults are left out, so that a new option does not change the folders of earlier versions.
        """
        covered = {
            *settings,
            *settings.get("reading", ()),
        }  # options of reading files are a group of their own
        fields = type(self).model_fields
        options = {
            name: value
            for name, value in self.settings().items()
            if name not in covered and getattr(self, name) != fields[name].default
        }
        return {**settings, **options}

    @property
    def pool(self) -> Workers:
        kind, _, address = self.engine.partition(":")
        count = self.workers or (0 if kind == "ray" else 1)
        return Workers(kind, workers=count, address=address or None)


class DeviceRequest(RunRequest):
    """A request whose work runs on a device."""

    device: str = option(
        "cpu, cuda or cuda:N; auto takes a GPU if there is one; cuda/4 lets four workers share a GPU.",
        "auto", panel=COMPUTE,
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        _, slash, share = self.device.partition("/")
        try:
            if slash and not 0 < float(share) < float("inf"):
                raise ValueError
        except ValueError:
            raise bad_parameter(
                "device", owner(type(self)), "cpu, cuda, cuda:N or cuda/N", self.device
            ) from None
        return self

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


class SeededRequest(DeviceRequest):
    """A request whose work runs on a device, with seeded random draws."""

    seed: int = option("Seed of all random draws.", 0, decides=True, ge=0, rare=True)


MODEL = (
    "Checkpoint, folder of `xmil train`, or your own network as module:function or file.py:function; "
    "several models form an ensemble."
)


class FilesRequest(Request):
    """What completes feature files; a cohort's columns of these names do so slide by slide."""

    class_names: tuple[str, ...] = option(
        "Names of the classes in the model's order, if its file does not store them.",
        (),
        panel=INPUT,
        decides=True,
    )
    mpp: float | None = option(
        "Microns per level-0 pixel, if the files do not store it.", None, gt=0, panel=INPUT, decides=True
    )
    patch_size: int | None = option(
        "Patch edge in level-0 pixels, if the files do not store it.", None, ge=1, panel=INPUT, decides=True
    )
    format: str = option(
        "Layout of the feature files, if it cannot be recognised.", "auto", decides=True, rare=True
    )
    slide_column: str | None = option(
        "Column of the cohort that names the slides, if it is not found by its name.", None, rare=True
    )


class CohortRequest(SeededRequest, FilesRequest):
    """A request over the feature files of a folder, or of a cohort's rows, with a model."""

    model: tuple[Any, ...] = option(MODEL, panel=INPUT)
    features: Path = option("Folder of feature files, or a single file.", panel=INPUT)
    cohort: Path | None = option(
        "Table of slides and labels; without it, all files are used.", None, panel=INPUT
    )
    label: tuple[str, ...] = option(
        "Label column; several columns for several labels or values; time and event for survival models.",
        (),
        panel=INPUT,
    )
    split: tuple[str, ...] = option("Use only slides of these splits of the cohort.", (), panel=INPUT)
    by: Literal["slide", "case"] = option(
        "Unit of a bag: slide, or case (all slides of a case together).", "slide", decides=True, rare=True
    )

    @property
    def reading(self) -> dict[str, Any]:
        """Options for `read_bag` that fill in what files do not store."""
        values: dict[str, Any] = {"mpp": self.mpp, "patch_size": self.patch_size}
        values |= {"format": None if self.format == "auto" else self.format}
        return {key: value for key, value in values.items() if value is not None}

    def check_apart(self, out: Path) -> None:
        """Refuse to write a run into the folder of features."""
        if self.features.is_dir() and out.exists() and out.samefile(self.features):
            raise InputError(
                f"{out}: `out=` is the folder of `features=`; choose another, such as {out}-run."
            )

    def places(self) -> dict[str, str | None]:
        """Paths of the inputs, for run.json."""
        cohort = None if self.cohort is None else str(self.cohort.resolve())
        return {"features": str(self.features.resolve()), "cohort": cohort}


RESULTS = "Folder for results; an interrupted run continues where it stopped."
BACKGROUND = (
    "Folder or file of ordinary features that lrp and one_added measure against, each slide counting alike; "
    "by default the model's own, if it has one."
)


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
        None, panel=SLIDES, ge=0,
    )  # fmt: skip
    tile_size: int | None = option(
        "Patch size in pixels, if the model does not record the one it was trained on.", None, panel=SLIDES,
        ge=8,
    )  # fmt: skip
    methods: tuple[str, ...] = option(
        "Explanation methods; auto takes the one that the model confirms best.", ("lrp",), panel=WHAT
    )
    target: tuple[str, ...] = option(
        "predicted, label, all, a class by name or number, or a contrast A:B.", ("predicted",), panel=WHAT
    )
    params: Parameters | None = option(
        "A parameter of one method, such as ig.steps=100, lrp.preset=paper or lrp.contexts=24; may be "
        "repeated.",
        None,
        panel=WHAT,
        flag="--param",
    )
    background: Path | None = option(BACKGROUND, None, panel=WHAT)
    check: str = option(
        "Cases that check the maps: a number, all, none, or auto (16, without other methods that take long).",
        "auto",
        rare=True,
    )
    output: str | None = option(
        "The number to explain: logit, contrastive, log_odds, probability, value, risk.", None, rare=True
    )
    interactions: int = option(
        "Find pairs that act together among this many of the strongest patches.", 0, ge=0, rare=True
    )
    memory: Size = option(
        "Memory limit in bytes for a method's temporary arrays; also as 500MB or 4GB.", 10**9, ge=1, rare=True
    )

    @model_validator(mode="after")
    def _check_features_come_from_one_place(self) -> Self:
        making = ("encoder", "weights", "random", "tile_mpp", "tile_size")
        extra = next((name for name in making if getattr(self, name)), None)
        if extra is not None and self.features is not None:
            raise InputError(
                f"`{extra}=` is for slides without features; leave out `features=`, or `{extra}=`.",
                parameter=extra,
            )
        return self


class EvaluateRequest(CohortRequest):
    """Drop patches by each method's scores and see whether the prediction follows."""

    out: Path = option(RESULTS, panel=OUTPUT)
    methods: tuple[str, ...] = option("Methods; 'all' for every method that fits the model.", (), panel=WHAT)
    background: Path | None = option(BACKGROUND, None, panel=WHAT)
    truth: Path | None = option(
        "Ground truth: a folder of GeoJSON, masks or patch labels.", None, panel=INPUT
    )
    slides: Path | None = option(
        "Folder of slides; needed for QuPath's GeoJSON of slides with a bounds offset.", None, panel=INPUT
    )
    truth_class: str = option(
        "Class that the ground truth is evidence for, by name or number.", "1", rare=True
    )
    truth_names: tuple[str, ...] = option("QuPath classes that count.", (), rare=True)
    mask_downsample: float = option("Level-0 pixels per pixel of the masks.", 1.0, rare=True)
    modes: tuple[str, ...] = option(
        "remove, mask, or both; the random band and SRG use the first.", ("remove", "mask"), panel=WHAT
    )
    steps: int = option("Steps per curve.", 100, ge=1, le=MOST_PASSES, panel=WHAT)
    orders: int = option(
        "Random orders for the band in pictures; verdicts use 200.", 20, ge=2, le=MOST_PASSES, panel=WHAT
    )
    smallest: float = option(
        "Smallest difference in mean AUPC that makes a method better than another.", 0.01, ge=0, rare=True
    )


class AgreementRequest(Request):
    """Compare a run's scores with the regions that readers drew."""

    run: Any = option("Folder of `xmil explain`.", argument=True)
    annotations: Path = option(
        "Regions: a folder of SLIDE.geojson (QuPath) or SLIDE/READER.geojson, such as RUN/annotations, which "
        "the viewer writes.",
        panel=INPUT,
    )
    slides: Path | None = option(
        "Folder of slides; needed for QuPath's GeoJSON of slides with a bounds offset.", None, panel=INPUT
    )
    classes: tuple[str, ...] = option("Classes of regions that count; all by default.", (), panel=INPUT)
    out: Path | None = option("Folder for the tables; RUN itself by default.", None, panel=OUTPUT)


class PredictRequest(CohortRequest):
    """Predict every slide: probabilities, values or risks, with measures if the truth is known."""

    out: Path = option(RESULTS, panel=OUTPUT)
    draws: int = option("Bootstrap draws, over cases.", 1000, rare=True)
    instances: int = option("Sample this many patches per slide; 0 uses all.", 0, ge=0, rare=True)
    repetitions: int = option("How often to sample; outputs are averaged.", 1, ge=1, rare=True)

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.repetitions > 1 and not self.instances:
            must = "1, or more with `instances` to draw"
            raise bad_parameter("repetitions", "predict", must, self.repetitions)
        return self


class TileRequest(RunRequest):
    """Lay patches on the tissue of slides: corners in TRIDENT's layout, outlines, overview pictures."""

    slides: tuple[Path, ...] = option("Slides, or folders of slides.", argument=True)
    out: Path = option("Folder for the patches; an interrupted run continues where it stopped.", panel=OUTPUT)
    size: int = option("Patch size in pixels.", 256, decides=True)
    mpp: float = option("Microns per pixel of a patch.", 0.5, decides=True)
    overlap: int = option("Pixels that neighbouring patches share.", 0, decides=True)
    slide_mpp: float | None = option("Microns per level-0 pixel, for slides that do not store it.", None)
    min_tissue: float = option("Minimum share of tissue in a patch.", 0.25, decides=True)
    drop: tuple[Literal["pen", "fold", "blur", "coverslip"], ...] = option(
        "Leave out patches with any of pen, fold, blur, coverslip (its edge); or 'none'.",
        ("pen",),
        decides=True,
    )
    magnification: float | None = option(
        "Magnification instead of mpp: 20 is 0.5 µm/px, 40 is 0.25.", None, decides=True, rare=True
    )
    min_std: float = option(
        "Minimum standard deviation of a patch's grey values.", 8.0, decides=True, rare=True
    )
    keep_edge: bool = option(
        "Also take patches over the slide's right and lower border.", False, decides=True, rare=True
    )


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
    random: bool = option("Use an untrained encoder, for testing.", False, panel=INPUT)
    batch: int = option("Patches encoded at once.", 64, panel=COMPUTE, ge=1)
    precision: str = option("float32, float16, bfloat16; auto is float16 on a GPU.", "auto", rare=True)
    readers: int = option(
        "Processes that read and decode; 0: threads instead; -1: one per core for a GPU, threads for a CPU.",
        -1,
        rare=True,
    )
    compile: bool = option(
        "Compile the network: quicker on a GPU; the last digits of features differ.", False, rare=True
    )
    stain_norm: bool = option("Normalise each slide's stains to a reference (Macenko).", False, rare=True)
    input_size: int | None = option(
        "Input size of the encoder in pixels, instead of its own.", None, rare=True
    )
    normalise: tuple[float, ...] | None = option(
        "Six numbers that replace the encoder's own: mean, then standard deviation, of red, green and blue.",
        None,
        rare=True,
    )
    patch_px: int | None = option("Patch size in pixels, if the file does not store it.", None, rare=True)

    @model_validator(mode="after")
    def _check_normalise(self) -> Self:
        if self.normalise is not None and len(self.normalise) != 6:
            raise bad_parameter(
                "normalise", "embed", "six numbers: mean and std of each colour", self.normalise
            )
        return self


class DrawRequest(RunRequest):
    """Draw each slide's scores: overlays, panels, patch sheets; GeoJSON, OME-TIFF, tables."""

    run: Any = option("Folder of a run, or one explanation file (.parquet).", argument=True)
    slides: Path | None = option("Folder of slides; without it, scores are drawn alone.", None, panel=INPUT)
    out: Path | None = option("Folder for the files; RUN/heatmaps by default.", None, panel=OUTPUT)
    names: tuple[str, ...] = option("Draw only these slides.", (), panel=INPUT)
    methods: tuple[str, ...] = option("Draw only these methods, in this order.", (), panel=INPUT)
    target: tuple[str, ...] = option("Use only these explained classes, or 'predicted'.", (), panel=INPUT)
    mpp: float | None = option("Microns per level-0 pixel, if no file stores it.", None, panel=INPUT)
    patch_size: int | None = option("Patch edge in level-0 pixels, if unknown.", None, panel=INPUT)
    pictures: tuple[str, ...] = option(
        "Any of panel, overlay, side, patches, map; 'none' for exports alone.", PICTURES, panel=OUTPUT
    )
    to: tuple[str, ...] = option(
        "Any of png, pdf, svg (pictures), geojson (QuPath), scores and colours (OME-TIFF), csv, parquet.",
        WRITTEN,
        panel=OUTPUT,
    )
    clip: str = option(
        "End of the colour scale: whiskers (1.5 IQR), none, or a percentile such as 99.",
        "whiskers",
        panel=OUTPUT,
    )
    scale: Literal["slide", "cohort"] = option(
        "slide: a colour scale per slide; cohort: one scale for all slides.", "slide", panel=OUTPUT
    )
    alpha: float = option("Opacity of the colours over the slide, 0 to 1.", 0.5, ge=0, le=1, rare=True)
    tissue: str = option("Show the slide under the colours in grey or colour.", "grey", rare=True)
    size: int = option("Pixels of a picture's longer edge.", 1200, ge=1, panel=OUTPUT)
    region: tuple[float, ...] | None = option("Zoom: x,y,width,height in level-0 pixels.", None, rare=True)
    top: int = option("Number of highest and lowest patches on a sheet.", 8, ge=0, rare=True)
    pairs: int = option(
        "Largest number of lines between patches that act together, if the run has interactions.",
        30,
        ge=0,
        rare=True,
    )
    frame: str = option(
        "Origin of exported coordinates: the scanned bounds, as in QuPath, or level0.", "bounds", rare=True
    )
    downsample: int | None = option(
        "Level-0 pixels per OME-TIFF pixel; by default 1 unless the slide is very wide.",
        None,
        ge=1,
        rare=True,
    )

    @model_validator(mode="after")
    def _check_look(self) -> Self:
        try:
            is_scale = self.clip in ("whiskers", "none") or 50 < float(self.clip) <= 100
        except ValueError:
            is_scale = False
        if not is_scale:
            must = "whiskers, none, or a percentile above 50, up to 100"
            raise bad_parameter("clip", "heatmap", must, self.clip)
        if self.region is not None and (len(self.region) != 4 or min(self.region[2:]) <= 0):
            must = "x,y,width,height in level-0 pixels, with a width and height above 0"
            raise bad_parameter("region", "heatmap", must, self.region)
        return self


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
    follow_links: bool = option(FOLLOW_LINKS, True)


INSIDE_MAPS = ("turned", "tokens", "lrp", "occlusion", "shifted")


class InsideRequest(DeviceRequest):
    """Map where inside the strongest patches their scores come from; sheets and tiles for QuPath."""

    run: Any = option("Folder of a run of `xmil explain` with lrp.", argument=True)
    slides: Path = option("Folder of slides.", panel=INPUT)
    encoder: str = option("The encoder that made the features; see `xmil embed`.", panel=INPUT)
    weights: Path | None = option("State dict of the encoder.", None, panel=INPUT)
    model: Any = option(
        "The run's checkpoint, or your own network as module:function, if no relevance vectors are "
        "stored; by default the checkpoint that the run names.",
        None,
        panel=INPUT,
    )
    features: Path | None = option(
        "Feature files; without them and without vectors, patches are encoded again.", None, panel=INPUT
    )
    random: bool = option("Use an untrained encoder, for testing.", False, panel=INPUT)
    out: Path | None = option("Folder for the maps; RUN/inside by default.", None, panel=OUTPUT)
    patches: int = option("Number of strongest patches per slide.", 16, panel=WHAT)
    map: Literal["turned", "tokens", "lrp", "occlusion", "shifted"] = option(
        "turned, tokens, lrp, occlusion or shifted.", "turned", panel=WHAT
    )
    target: str | None = option("Explained class, if the run has several.", None, panel=WHAT)
    patch_px: int | None = option("Patch size in pixels, as given to the encoder.", None, rare=True)
    format: str = option("Layout of the feature files, if it cannot be recognised.", "auto", rare=True)
    tiff: bool = option("Write the maps as OME-TIFF as well.", False, rare=True)


class StudyRequest(Request):
    """Make a reading study from runs and a plan: cases, arms, an order for each reader."""

    runs: tuple[Path, ...] = option("Folders of `xmil explain` or `xmil evaluate`.", argument=True)
    slides: Path = option("Folder of slides.", panel=INPUT)
    plan: Path = option(
        "TOML file: readers, cases, arms, questions, blinding; docs/howto/study.md.", panel=INPUT
    )
    out: Path = option("Folder for the study; it must not exist yet.", panel=OUTPUT)


class StudyReportRequest(Request):
    """Write what the readers of a study found: one HTML page, and tables for R."""

    study: Path = option("Folder of `xmil study init`.", argument=True)
    out: Path | None = option("Folder for the report; STUDY/report by default.", None, panel=OUTPUT)


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
    slides: Path | None = option(
        "Folder of slides, for image properties of patches and examples in the report.", None, panel=INPUT
    )
    model: Any = option(
        "The run's checkpoint, its training folder for stability over folds, or your own network as "
        "module:function; by default the checkpoint that the run names.",
        None,
        panel=INPUT,
    )
    beside: tuple[Path, ...] = option("Further runs of the same slides (folds, seeds).", (), panel=INPUT)
    evaluated: Path | None = option(
        "Run of `xmil evaluate`, for certificates in the card and the album.", None, panel=INPUT
    )
    regions: Path | None = option(
        "Folder of annotations, SLIDE.geojson; biomarkers within them are added.", None, panel=INPUT
    )
    method: str = option("The method whose explanations are analysed.", "lrp", panel=WHAT, flag="--methods")
    target: str | None = option("Explained class, if the run has several.", None, panel=WHAT)
    label: str = option("Label column; it is an outcome and never tested as a cause.", "label", panel=WHAT)
    out: Path | None = option("Folder for the findings; RUN/insight by default.", None, panel=OUTPUT)
    album: bool = option("Write album.pdf, one page per slide.", False, panel=OUTPUT)
    slide_column: str | None = option(
        "Column of the cohort that names the slides, if it is not found by its name.", None, rare=True
    )
    concepts: int = option("Size of the dictionary.", 20, rare=True)
    dictionary: str = option("kmeans, nmf (features >= 0) or topk.", "kmeans", rare=True)
    causes: tuple[str, ...] = option("Columns to test, or all.", (), rare=True)
    within: tuple[str, ...] = option("Classes of annotations that make a region, or all.", (), rare=True)
    sanity: int = option("Slides for the card's sanity tests, with a model; 0 for none.", 10, ge=0, rare=True)
    seed: int = option("Seed for the sample, the dictionary and the tests.", 0, ge=0, rare=True)
    format: str = option("Layout of the feature files, if it cannot be recognised.", "auto", rare=True)


class BenchRequest(Request):
    """Score explanation methods and models on tasks whose answers are known."""

    has_config: ClassVar[bool] = True
    suite: tuple[str, ...] = option(
        "evidence, tissue, confounder, faithfulness or all; or paper, for the paper's Table 1.", ()
    )
    methods: tuple[str, ...] = option(
        "Rows: file.py:function, a Parquet file of scores, or a name such as lrp:paper.", ()
    )
    model: tuple[str, ...] = option("Models: file.py:builder, or a name; without any, the protocol's.", ())
    quick: bool = option("Fewer bags and AttnMIL alone: minutes on a CPU.", False)
    only: bool = option("Measure only the given methods and the controls, none of the package's own.", False)
    task: tuple[str, ...] = option("Run only these tasks of the suites.", ())
    repetitions: int | None = option("Models (or folds) per task.", None)
    seed: int = option("Base seed of bags and models.", 0)
    data: str = option(
        "Digits: 'digits', 'onehot', an .npz file, or a folder of .npz or IDX files.", "digits"
    )
    tissue: str = option("Class-labelled tissue images or a CAMELYON16 folder, instead of colon nuclei.", "")
    encoder: str = option(
        "Encoder of the tissue images, 'statistics' (of colours), or features (.npz).", "statistics"
    )
    device: str = option("cpu, cuda or cuda:N; auto takes a GPU if there is one.", "cpu", panel=COMPUTE)
    minutes: float | None = option(
        "Start nothing new after this many minutes; the next call continues.", None, panel=COMPUTE
    )
    out: Path = option(
        "Folder for results; an interrupted run continues where it stopped.", Path("bench-out"), panel=OUTPUT
    )
    export: Path | None = option(
        "Write bags and trained models to this folder, to be scored elsewhere.", None, panel=OUTPUT
    )
    compare: tuple[Path, Path] | None = option(
        "Compare two folders of results, row by row, on the same bags.", None, panel=OUTPUT
    )
    patient: str = option(
        "How to tell the patient of an image: a regular expression for its file name, or 'folder'.",
        "",
        rare=True,
    )
    classes: tuple[str, ...] = option(
        "The tissue class to detect, and the one that is evidence against it.", (), rare=True
    )
    digit_encoder: str = option("Encoder that turns images of digits into features.", "pixels", rare=True)
    bags: tuple[int, ...] = option("Numbers of training, validation and test bags of digits.", (), rare=True)
    epochs: int | None = option("Most epochs, instead of the paper's.", None, ge=1, rare=True)
    released: bool = option(
        "Draw digits and bags as the paper's released code does, shared by all.", False, rare=True
    )
    plots: bool = option("Draw bar plots and example bags of the paper's suite.", True, rare=True)
