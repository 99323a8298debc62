"""The settings of a training run: sections of a TOML file, checked; unknown keys are errors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from xmil.core.errors import FileError, InputError, check_names
from xmil.core.task import TASKS
from xmil.core.text import flatten, parse_toml_value, read_toml

MOST_MODELS = 100_000  # in one run; more are a typo
Whole = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]
MONITORS = {  # by the kind of target
    "class": ("auc", "loss", "accuracy", "balanced_accuracy"),
    "labels": ("auc", "loss", "accuracy"),
    "values": ("loss", "mae", "r2", "spearman"),
    "time": ("c_index", "loss"),
}
FALLING = ("loss", "mae")  # measures that are better when lower


class Section(BaseModel):
    """A table of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
    """Bags, targets and splits.

    `source` "embeddings": feature files hold one vector per slide, and the model is a probe on it. Set
    `folds` (a number, dealt by case), `fold_column`, or a column of splits. With folds, `scheme` says which
    bags choose the best epoch: "inner" holds out a share of the training cases, "next" uses the fold after
    the test fold, "shared" the test fold itself, like the paper for HPV. `site` is the column of acquisition
    sites; with `site_splits` "preserved" all cases of a site go to one split.
    """

    source: Literal["patches", "embeddings"] = "patches"
    features: str | list[str] = "features"
    cohort: str = "cohort.csv"
    metadata: list[str] = []
    slide_column: str | None = None  # of the cohort, if its name is not recognised
    label: str = "label"
    labels: list[str] = []
    class_names: list[str] = []
    value: str = "value"
    time: str = "time"
    event: str = "event"
    by: Literal["slide", "case"] = "slide"
    split: str = "split"
    train: list[str] = ["train"]
    validation: list[str] = ["val", "validation"]
    test: list[str] = ["test"]
    folds: Annotated[int, Field(ge=2)] | None = None
    fold_column: str | None = None
    fold_seed: int = 0
    site: str | None = None
    site_splits: Literal["mixed", "preserved"] | None = None
    scheme: Literal["inner", "next", "shared"] = "inner"
    validation_share: Share = 0.2
    instances: Annotated[int, Field(ge=0)] = 2048  # sampled from each bag in training; 0 means all
    max_instances: Whole | None = None
    exclude_above: Whole | None = None
    missing: Literal["refuse", "skip"] = "refuse"
    follow_links: bool = True  # in the folders of features
    full_digests: bool = False  # detect changed feature files by every byte


class Model(Section):
    """The model's name; all other keys are its parameters."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "attnmil"

    @property
    def params(self) -> dict[str, Any]:
        """The model's own parameters."""
        return dict(self.model_extra or {})


class Loss(Section):
    """The loss: cross entropy, squared error and the like, by task.

    All folds share the time bins of survival, from the event times of all bags that train in any fold, so
    that their models can form one ensemble. With `bins_from` "fold" each fold has its own.
    """

    name: Literal["auto", "mse", "mae", "huber"] = "auto"
    class_weights: Literal["none", "balanced"] | list[NonNegative] = "none"
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    bins: Annotated[int, Field(ge=2)] = 4
    bins_from: Literal["run", "fold"] = "run"
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.0
    reference: float | None = None


class Optim(Section):
    """The optimiser, its learning rate over the epochs, and the clip of the gradient's norm."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "cosine", "step"] = "constant"
    warmup_epochs: Annotated[int, Field(ge=0)] = 0
    step_epochs: Whole = 30
    gamma: Annotated[float, Field(gt=0, le=1)] = 0.1
    min_lr: NonNegative = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None


class Train(Section):
    """Epochs, batches, the choice of the best epoch, and the machine.

    The first `warmup` epochs never count as best; `patience` epochs without a better one end the training.
    With `sampling` "site_balanced", bags come in groups from one site with one bag per label; a class that
    only occurs at sites with one label is an error.
    """

    epochs: Whole = 100
    batch: Whole = 1
    patience: Whole | None = None
    warmup: Annotated[int, Field(ge=0)] = 0
    monitor: str = "auto"
    shuffle: bool = True
    sampling: Literal["shuffled", "site_balanced"] | None = None
    seed: int = 0
    repeats: Whole = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    deterministic: bool = False
    device: str = "auto"
    devices: Whole = 1
    nodes: Whole = 1
    workers: Annotated[int, Field(ge=0)] = 0
    preload_gb: NonNegative | None = None
    tensorboard: bool = True


# Settings of the machine, which may change when a run resumes.
MACHINE = ("device", "devices", "nodes", "workers", "preload_gb", "tensorboard")


class Config(Section):
    """A training run.

    `grid` maps keys such as "optim.lr" to lists of values; any other key maps to a list of tables, whose
    settings change together.
    """

    task: str = "classification"
    out: str = "train-out"
    data: Data = Data()
    model: Model = Model()
    loss: Loss = Loss()
    optim: Optim = Optim()
    train: Train = Train()
    grid: dict[str, list[Any]] = {}

    @property
    def monitor(self) -> str:
        """The measure that chooses the best epoch."""
        return self.monitors[0] if self.train.monitor == "auto" else self.train.monitor

    @property
    def monitors(self) -> tuple[str, ...]:
        """The measures of the task."""
        return MONITORS[TASKS[self.task].truth]

    @property
    def falling(self) -> bool:
        """Whether the monitored measure is better when lower."""
        return self.monitor in FALLING

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}. Got {self.task!r} instead")
        if self.monitor not in self.monitors:
            raise ValueError(
                f"train.monitor must be one of {', '.join(self.monitors)} for {self.task}. "
                f"Got {self.monitor!r} instead."
            )
        task, preserved = TASKS[self.task], self.data.site_splits == "preserved"
        by_site = self.train.sampling == "site_balanced"
        if self.data.folds is not None and self.data.fold_column is not None:
            raise ValueError("data.folds and data.fold_column cannot be combined; remove one")
        if task.truth == "labels" and len(self.data.labels) < 2:
            raise ValueError(f"a {self.task} task needs data.labels, two or more columns of 0 and 1")
        if task.compares and self.train.batch < 2:
            raise ValueError(
                f"{self.task.capitalize()} compares the bags of a batch; set train.batch to 8 or more"
            )
        if (by_site or preserved) and self.data.site is None:
            raise ValueError("data.site must name the column of sites for the splits or the sampling")
        if by_site and task.truth == "values":
            raise ValueError(f"site-balanced sampling needs labels, and {self.task} has none")
        if preserved and self.data.folds is None:
            raise ValueError(
                "data.site_splits 'preserved' needs data.folds; `xmil split` makes columns of splits by site"
            )
        if self.train.warmup >= self.train.epochs:
            raise ValueError("train.warmup must be less than train.epochs")
        if empty := [name for name, values in self.grid.items() if not values]:
            raise ValueError(f"grid.{empty[0]} has no values; add some or remove the key")
        return self


def load_config(path: str | PathLike[str], changes: Iterable[str] = ()) -> Config:
    """Read the settings of a TOML file, and apply `section.key=value` changes."""
    content = read_toml(path, way="give settings as in docs/howto/training.md")
    changes = list(changes)
    if not content and not changes:
        raise FileError(f"{path}: has no settings; name at least features and cohort under [data].")
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise InputError(f"A change must have the form train.epochs=50. Got {change!r} instead.")
        content = changed(content, key.strip(), parse_toml_value(text.strip()))
    return make_config(content, source=str(path))


def make_config(content: Mapping[str, Any], *, source: str = "The config") -> Config:
    """Check settings; report the first fault in one line."""
    data = content.get("data", {})
    if "model" not in content and isinstance(data, Mapping) and data.get("source") == "embeddings":
        content = {**content, "model": {"name": "meanpool", "n_layers": 0}}  # a linear probe
    _check_names(content, source)
    try:
        config = Config.model_validate(dict(content))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        message = f"{key}: {message}. Got {fault['input']!r} instead" if key else message.rstrip(".")
        raise InputError(f"{source}: {message}.") from None
    for point in grid_points(config):
        for key in point:
            section, _, name = key.partition(".")
            if section not in ("model", "loss", "optim", "train") or not name:
                raise InputError(f"{source}: the grid's key {key!r} must name a setting such as 'optim.lr'.")
        if point:
            at_point(config, point)
    return config


def changed(content: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Replace one setting; the key is 'section.name' or a top-level name.

    >>> changed({"train": {"seed": 0}}, "train.seed", 3)
    {'train': {'seed': 3}}
    """
    section, _, name = key.partition(".")
    if not name:
        return {**content, section: value}
    inner = content.get(section, {})
    return {**content, section: {**(inner if isinstance(inner, Mapping) else {}), name.strip('"'): value}}


def plain(config: Config) -> dict[str, Any]:
    """The settings as nested dictionaries, without None, which TOML cannot express."""
    return config.model_dump(exclude_none=True)


def grid_points(config: Config) -> list[dict[str, Any]]:
    """Every combination of the grid's values, as {key: value}; one empty point without a grid.

    >>> grid_points(make_config({"grid": {"optim.lr": [0.1, 0.2]}}))
    [{'optim.lr': 0.1}, {'optim.lr': 0.2}]
    """
    points: list[dict[str, Any]] = [{}]
    models = math.prod(map(len, config.grid.values())) * (config.data.folds or 1) * config.train.repeats
    if models > MOST_MODELS:
        raise InputError(
            f"train.repeats, data.folds and the grid must multiply to at most {MOST_MODELS:,} models. Got "
            f"{models:,} instead."
        )
    for name, values in config.grid.items():
        options = [value if isinstance(value, Mapping) else {name: value} for value in values]
        points = [{**point, **option} for point in points for option in options]
    return points


def at_point(config: Config, point: Mapping[str, Any]) -> Config:
    """The settings at one point of the grid."""
    content: dict[str, Any] = {**plain(config), "grid": {}}
    for key, value in point.items():
        content = changed(content, key, value)
    return make_config(content, source="The grid")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List differences as 'key was old, now new'; settings of the machine do not count."""
    before, now = flatten(old), flatten(new)
    ignored = {"out", "data.follow_links", "data.full_digests", *(f"train.{name}" for name in MACHINE)}
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in ignored]
    return [
        f"{key} was {before.get(key, 'not set')}, now {now.get(key, 'not set')}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def _check_names(content: Mapping[str, Any], source: str) -> None:
    """Refuse unknown sections and keys, and suggest the nearest name."""
    from xmil.models.base import MODELS, model_parameters

    try:
        check_names("section or key", content, Config.model_fields)
        for name, inner in content.items():
            section = Config.model_fields[name].annotation
            if not isinstance(inner, Mapping) or not isinstance(section, type):
                continue
            if section is Model:
                known = ["name", *model_parameters(MODELS[inner.get("name", "attnmil")])]
                check_names("key of [model]", inner, known)
            elif issubclass(section, Section):
                check_names(f"key of [{name}]", inner, section.model_fields)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(content: Mapping[str, Any]) -> str:
    """Write settings as TOML: plain values first, then a table for each mapping.

    >>> print(dumps({"task": "cox", "optim": {"lr": 0.001, "name": "sgd"}}))
    task = "cox"
    <BLANKLINE>
    [optim]
    lr = 0.001
    name = "sgd"
    <BLANKLINE>
    """
    top = [f"{_key(k)} = {_value(v)}" for k, v in content.items() if not isinstance(v, Mapping)]
    parts = ["\n".join(top)] if top else []
    for name, table in content.items():
        if isinstance(table, Mapping):
            lines = [f"[{_key(name)}]", *(f"{_key(k)} = {_value(v)}" for k, v in table.items())]
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)
