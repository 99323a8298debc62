"""The models of a fold ensemble as one: mean outputs, mean explanations and their spread."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from xmil.core.background import USER, Background
from xmil.core.bag import Bag, FloatArray
from xmil.core.durable import file_digest
from xmil.core.errors import CheckpointError, FileError, InputError, StopError, StrPath, XmilError, absent
from xmil.core.explanation import Explanation, mean_audit
from xmil.core.registry import is_function_name, load_function
from xmil.core.task import TASKS
from xmil.data.bags import Case, open_bag
from xmil.data.files import (
    background_of_files,
    check_feature_files,
    differing,
    feature_files,
    is_features,
    same_encoder,
)
from xmil.execute import MakeWorker, Worker
from xmil.methods import METHODS
from xmil.models import MILModel, load_model
from xmil.models.base import ModelSpec
from xmil.models.checkpoints.files import IN_FOLDER, checkpoint_files, in_folder
from xmil.network import declared_names, declared_references, find_device, first_line, open_network
from xmil.network.network import frozen
from xmil.runs.inputs import (
    Missing,
    Say,
    caseless_warning,
    features_mismatch_warning,
    training_overlap_warning,
)
from xmil.runs.requests import CohortRequest, EvaluateRequest, ExplainRequest
from xmil.storage import Item, Record, Run

BACKGROUND = "background.npz"
HINT = (
    "The model has no background. Pass `background=`, a folder of features of ordinary slides: scores then "
    "measure what differs from these, which ranks patches better on most models."
)
ANSWERS = ("in_dim", "n_classes", "task")
NAMES = {"class_names": "class names", "encoder": "encoder"}


@dataclass(frozen=True)
class Builder:
    """A function that builds a model, `module:function` as the user typed it.

    Only `model_paths` makes one, from its argument, so that no file can choose code to run.
    """

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in memory, which is neither changed nor moved."""

    model: nn.Module

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def __str__(self) -> str:
        return f"{self.name} (in memory)"


Source = Path | Builder | Loaded


@dataclass(frozen=True)
class Ensemble:
    """The models of a run, one or several: where they come from, and once loaded the models themselves.

    `class_names` name the outputs if the files do not; `features`, read with the options `reading`, serve
    for a trial of a user's network; `background` replaces the models' own.
    """

    paths: tuple[Source, ...]
    digests: tuple[str, ...] = ()  # expected of the files; empty to accept any
    class_names: tuple[str, ...] | None = None
    features: Path | None = None
    reading: Mapping[str, Any] = field(default_factory=dict)
    background: Background | None = None
    models: tuple[MILModel, ...] = ()

    def load(self, device: str = "cpu") -> Ensemble:
        """Load the models; refuse models for different questions, and files that have changed."""
        expected: Sequence[str | None] = self.digests or [None] * len(self.paths)
        pairs = [_load(path, digest, self) for path, digest in zip(self.paths, expected, strict=True)]
        models = tuple(_move(model, device) for model, _ in pairs)
        check_ensemble([model.spec for model in models], self.paths)
        for model in models:
            model.background = self.background or model.background
        return replace(self, digests=tuple(digest for _, digest in pairs), models=models)

    def settings(self) -> dict[str, Any]:
        """Settings that decide results besides the files, without defaults."""
        names = {} if self.class_names is None else {"class_names": list(self.class_names)}
        return names if self.background is None else {**names, "background": self.background.digest}

    @property
    def specs(self) -> list[ModelSpec]:
        return [model.spec for model in self.models]

    @property
    def spec(self) -> ModelSpec:
        """The spec that the models share."""
        return shared_spec(self.specs)

    def save_background(self, out: Path) -> None:
        """Save the background, if one was chosen, so that a run that goes on keeps it."""
        if self.background is not None:
            self.background.save(out / BACKGROUND)

    def about(self) -> dict[str, Any]:
        """Entries of run.json on the models."""
        every = [
            {
                "path": str(path.absolute() if isinstance(path, Path) else path),
                "digest": digest,
                "spec": asdict(spec),
            }
            for path, digest, spec in zip(self.paths, self.digests, self.specs, strict=True)
        ]
        shared = self.spec
        first = {**every[0], "spec": asdict(shared)}
        return {"model": first, "models": every, "class_names": shared.class_names, "task": shared.task}


def worker_with(
    models: Ensemble, device: str, make: Callable[[Ensemble], Worker[Item[Case], Record]], *, in_process: bool
) -> MakeWorker[Item[Case], Record]:
    """Make a worker of the models; other processes load them from the files that were hashed here."""
    if in_process:
        return partial(make, models)
    return partial(_load_and_make, replace(models, models=()), device, make)


def _load_and_make(
    models: Ensemble, device: str, make: Callable[[Ensemble], Worker[Item[Case], Record]]
) -> Worker[Item[Case], Record]:
    return make(models.load(device))


def warnings_of_models(
    models: Ensemble, cases: Sequence[Case], missing: Missing, *, uses_bins: bool = True
) -> list[str]:
    """Write sentences on encoders, overlap with the training, time bins and missing slides."""
    every = (
        features_mismatch_warning(models.spec, cases),
        training_overlap_warning(models.paths, cases),
        bins_warning(models.specs) if uses_bins else None,
        ensemble_warning(models.specs, models.paths),
        missing.incomplete_warning(),
        caseless_warning(missing.without_case),
    )
    return [warning for warning in every if warning is not None]


def load_models(
    model: StrPath | Sequence[StrPath], background: Background | None = None, features: Path | None = None
) -> Ensemble:
    """Load the models of one or several paths; a background replaces their own.

    A user's own network has a trial on `features`.
    """
    return Ensemble(model_paths(model), features=features, background=background).load()


def recorded_model(run: Run, say: Say = lambda _: None) -> tuple[Path, ...] | None:
    """The checkpoints of a run, if they still exist and are unchanged.

    Only the user may name a function that builds a network: no file chooses code to run.
    """
    models = run.about.get("models")
    listed = [row for row in models if isinstance(row, dict)] if isinstance(models, list) else []
    paths = [Path(str(row.get("path"))) for row in listed]
    if not paths:
        return None
    for path, row in zip(paths, listed, strict=True):
        builds, name = is_function_name(str(path)), str(path)[:300]
        if builds or not os.path.exists(path):
            source = "built by" if builds else "at"
            say(f"The run's model, {source} {name}, is not loaded; give `model={name}` to use it.")
            return None
        if why := model_fault(path, str(row.get("digest"))):
            say(f"{name}: {why}; give `model=`.")
            return None
    return tuple(paths)


def model_fault(path: Path, digest: str) -> str:
    """Describe the fault of a recorded model; a folder without one is not read, as run.json may name any."""
    if path.is_dir() and not any((path / name).exists() for name in IN_FOLDER):
        return "the model no longer exists: the folder contains none"
    try:
        return "the model has changed since the run was made" if file_digest(path) != digest else ""
    except (XmilError, OSError) as error:  # such as a pipe, or missing permissions
        return f"the model cannot be read ({' '.join(str(error).split())[:200]})"


def recorded_features(run: Run) -> Path:
    """Find the feature files that a run was made from."""
    recorded = run.about.get("features")
    for path in (Path(str(recorded or "")), run.path / "features"):
        if recorded and os.path.exists(path):
            return path
    where = str(recorded)[:300]
    raise InputError(f"{run.path}: its feature files are no longer at {where}; give `features=`.")


def open_models(request: CohortRequest) -> tuple[Ensemble, str]:
    """Load the models of a request, and find the device for its workers.

    If other processes work, models stay on the CPU here; those processes load the same files.
    """
    workers = request.pool
    if workers.kind == "ray":  # the devices of the cluster are unknown here
        device = "cpu" if request.place == "auto" else request.place
    else:
        device = find_device(request.place)
    names = request.class_names or None
    if not workers.in_process and any(isinstance(model, nn.Module) for model in request.model):
        raise InputError(
            "Worker processes load the model from its file: write it with xmil.save_model and pass the path, "
            "or leave out `workers=` and `engine=`."
        )
    models = Ensemble(model_paths(request.model), (), names, request.features, request.reading)
    return models.load(device if workers.in_process else "cpu"), device


def with_background(
    models: Ensemble,
    request: ExplainRequest | EvaluateRequest,
    methods: Sequence[str],
    *,
    out: Path,
    say: Say = lambda _: None,
) -> Ensemble:
    """Replace the models' background by the user's.

    A resumed or extended run keeps its background. Other files in the folder of features do not matter: a
    slide is explained exactly as by `xmil.explain`.
    """
    width, place = models.spec.in_dim, request.background
    if not any(name not in METHODS or "background" in METHODS[name].parameters for name in methods):
        return models
    chosen = None if request.restart or place is not None else Background.load(out / BACKGROUND)
    if place is not None:
        if not place.exists():
            why = absent(place, "file or folder of features")
            raise FileError(f"`background=`: {why}", parameter="background")
        files = feature_files(place)[0] if place.is_dir() else [place]
        chosen = background_of_files(files, width, request.reading)
        if chosen is None:
            raise InputError(
                f"{place}: no readable features of width {width}, which the model takes; name another "
                "`background=`."
            )
        say(f"Evidence is measured against {chosen.n:,} patches of {place} ({BACKGROUND}).")
    if chosen is None or chosen.dim != width:
        if any(model.background is None for model in models.models):
            say(HINT)
        return models
    chosen = replace(chosen, source=USER)
    for model in models.models:
        model.background = chosen
    return replace(models, background=chosen)


def _load(path: Source, expected: str | None, ensemble: Ensemble) -> tuple[MILModel, str]:
    """Load a model with the digest of its file, which must not change meanwhile."""
    if isinstance(path, Builder | Loaded):
        model = build_own(path, ensemble)
        return model, _check_digest(path, state_digest(model), expected)
    before = _stamp(path)
    try:
        if path.is_dir():
            in_folder(path)  # refuse a wrong folder before hashing all its files
        digest = _check_digest(path, file_digest(path), expected)
        model = load_model(path, class_names=ensemble.class_names)
    except CheckpointError as error:
        raise _swap_error(path, ensemble.features) or error from None
    if _stamp(path) != before:
        raise StopError(f"{path}: changed while it was read; run the command again once it is written.")
    return model, digest


def _move(model: MILModel, device: str) -> MILModel:
    """Move a model to a device; copy it first if it shares weights with a model of the user."""
    there = next((part.device for part in model.parameters()), torch.device(device))
    if there.type == torch.device(device).type and torch.device(device).index in (None, there.index):
        return model
    return copy.deepcopy(model).to(device)


def _check_digest(path: Source, digest: str, expected: str | None) -> str:
    if expected is not None and digest != expected:
        raise StopError(f"{path}: has changed since the run started; restore it, or use another `out=`.")
    return digest


def _swap_error(path: Path, features: Path | None) -> InputError | None:
    """Make the error for features passed as the model, and perhaps the model as features."""
    if not is_features(path) or features is None:
        return None
    try:
        load_model(features)
    except CheckpointError:
        return InputError(f"{path}: holds features, not a model; pass the checkpoint as `model=`.")
    return InputError(
        f"{path}: holds features, and {features} a model: swap them, as `model={features}` `features={path}`."
    )


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()  # the reader reports why
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def model_paths(model: StrPath | Sequence[StrPath]) -> tuple[Source, ...]:
    """Find the checkpoints of one or several paths; a training folder has those of its folds.

    `module:function` becomes a builder, so `model` must come from the user, never from a file.
    """
    paths: list[Any] = [model]
    if isinstance(model, Iterable) and not isinstance(model, str | PathLike | nn.Module):
        paths = list(model)
    sources: list[Source] = []
    for path in paths:
        if isinstance(path, nn.Module):
            sources.append(Loaded(path))
        elif not isinstance(path, str | PathLike):
            raise InputError(
                f"A model is a path, a torch.nn.Module, or a function that builds one, as "
                f'"mine.py:build". Got {type(path).__name__} instead.'
            )
        elif is_function_name(str(path)):
            sources.append(Builder(str(path)))
        elif Path(path).suffix == ".py" and Path(path).is_file():
            raise InputError(
                f"{path}: Python code; name the function that builds the model, as {path}:build."
            )
        else:
            sources += checkpoint_files(Path(path))
    return tuple(sources)


def check_ensemble(specs: Sequence[ModelSpec], paths: Sequence[Source]) -> None:
    """Refuse models that do not answer the same question, or do not read the same features.

    What a model does not record is no conflict; `ensemble_warning` names it.
    """
    for name in (*ANSWERS, *NAMES):
        first: tuple[Any, Source] | None = None
        for spec, path in zip(specs, paths, strict=True):
            value = getattr(spec, name)
            if value is None:
                continue
            first = first or (value, path)
            same = same_encoder(first[0], value) if name == "encoder" else first[0] == value
            if not same:
                raise InputError(
                    f"{path}: its {name} is {value!r}, that of {first[1]} {first[0]!r}; the models of an "
                    "ensemble must agree."
                )


def ensemble_warning(specs: Sequence[ModelSpec], paths: Sequence[Source]) -> str | None:
    """Write a sentence if models of an ensemble had different features, or some do not record theirs."""
    for spec, path in zip(specs[1:], paths[1:], strict=True):
        differences = differing(specs[0].features or {}, spec.features or {})
        if differences:
            return (
                f"{path.name} of the ensemble was trained on features made differently from those of "
                f"{paths[0].name} ({', '.join(differences)}): these features do not suit both."
            )
    for name, noun in NAMES.items():
        silent = [path.name for spec, path in zip(specs, paths, strict=True) if getattr(spec, name) is None]
        if silent and len(silent) < len(specs):
            return (
                f"{', '.join(silent[:3])} of the ensemble does not record its {noun}: those of the other "
                "models are taken."
            )
    return None


def shared_spec(specs: Sequence[ModelSpec]) -> ModelSpec:
    """Merge the specs of an ensemble: the first, with names from any, and time bins if all agree."""
    first = specs[0]
    return replace(
        first,
        class_names=next((spec.class_names for spec in specs if spec.class_names is not None), None),
        encoder=next((spec.encoder for spec in specs if spec.encoder is not None), None),
        time_bins=first.time_bins if _same_bins(specs) else None,
    )


def bins_warning(specs: Sequence[ModelSpec]) -> str | None:
    """Write a sentence if the models of an ensemble have different time bins."""
    if _same_bins(specs):
        return None
    cuts = "; ".join(
        ", ".join(f"{edge:g}" for edge in spec.time_bins or ()) or "unknown" for spec in specs[:3]
    )
    return (
        f"the models have different time bins ({cuts}{'; ...' if len(specs) > 3 else ''}): the mean "
        "of their bin0, bin1, ... belongs to no single interval. The risk is comparable."
    )


def _same_bins(specs: Sequence[ModelSpec]) -> bool:
    return all(spec.time_bins == specs[0].time_bins for spec in specs)


def predicted_by(models: Sequence[MILModel], bag: Bag) -> int:
    """The target that an ensemble predicts, from the mean of its models' outputs."""
    opened = [open_network(model, bag) for model in models]
    outputs = np.mean([network.outputs(x) for network, x in opened], axis=0)
    return TASKS[models[0].spec.task].predicted(outputs)


def average(explanations: Sequence[Explanation], spec: ModelSpec) -> Explanation:
    """Average the models' explanations of one target, with the standard deviation over the models.

    Outputs and audits are means as well, and the mean scores add up to the mean audit. The target
    has its name in the ensemble's spec.
    """
    first = explanations[0]
    scores = np.stack([e.scores for e in explanations]).astype(np.float64)  # (m, n)
    logits = np.stack([e.logits for e in explanations]).astype(np.float64)
    relevance = _present([e.relevance for e in explanations])
    errors = _present([e.stderr for e in explanations])  # of independent draws
    return replace(
        first,
        target=first.target.resolve(n_classes=spec.n_targets, predicted=0, class_names=spec.target_names),
        scores=scores.mean(axis=0).astype(np.float32),
        spread=scores.std(axis=0, ddof=1).astype(np.float32),
        logits=logits.mean(axis=0).astype(np.float32),
        output=float(np.mean([e.output for e in explanations])),
        audit=mean_audit([e.audit for e in explanations]),
        model=f"{first.model} x {len(explanations)}",
        relevance=np.stack(relevance).mean(axis=0).astype(np.float32) if relevance else None,
        stderr=(np.sqrt(np.sum(np.square(errors), axis=0)) / len(errors)).astype(np.float32)
        if errors
        else None,
        stable=None,
        warnings=list(dict.fromkeys(text for e in explanations for text in e.warnings)),
    )


def _present(arrays: Sequence[FloatArray | None]) -> list[npt.NDArray[np.float64]]:
    """Convert arrays to double precision; an empty list if some model has none."""
    doubles = [array.astype(np.float64) for array in arrays if array is not None]
    return doubles if len(doubles) == len(arrays) else []


TRIAL = 64  # instances in the trial of a network


def build_own(source: Builder | Loaded, ensemble: Ensemble) -> MILModel:
    """Make a model for a run from a user's network, or from a function that builds one.

    The function takes no arguments and returns a torch module. A trial call finds its sizes; `task`,
    `class_names` and the like are read from the module's attributes, if any. The weights of a network in
    memory are shared, and the network is not changed.
    """
    name = source.name
    if isinstance(source, Loaded):
        model = copy.copy(source.model)  # so that attributes set here do not change the user's object
    else:
        function = load_function(name, kind="model")
        try:
            built = function()
        except Exception as error:  # a user's function may raise anything
            raise InputError(
                f"The model {name!r} could not be built: {first_line(error)}. It is called without arguments."
            ) from error
        if not isinstance(built, nn.Module):
            raise InputError(
                f"The model {name!r} must return a torch.nn.Module. Got {type(built).__name__} instead."
            )
        model = built.eval()
    if isinstance(model, MILModel) and hasattr(model, "spec"):
        if ensemble.class_names is not None:
            model.spec = replace(model.spec, class_names=ensemble.class_names)
            TASKS[model.spec.task].check(model.spec)
        return model
    n_classes, in_dim = _sizes(model, name, ensemble)
    task, owner = getattr(model, "task", None), f"the model {name!r}"
    task = task if isinstance(task, str) else "classification"
    names = ensemble.class_names or getattr(model, "class_names", None)
    names = declared_names(names, n_classes, task=task, owner=owner)
    spec = ModelSpec(type(model).__name__, in_dim, n_classes, class_names=names, task=task)
    if (reference := getattr(model, "reference", None)) is not None and TASKS[task].takes_reference:
        references = declared_references(reference, n_classes, task=task, owner=owner)
        relative = bool(getattr(model, "relative", False))
        spec = replace(spec, reference=tuple(references), relative=relative)
    attributes: dict[str, Any] = {"spec": spec, "class_names": names, "task": task, "background": None}
    for key, value in attributes.items():
        setattr(model, key, value)
    return cast(MILModel, model)  # methods only need a module with these attributes


def state_digest(model: nn.Module) -> str:
    """Hash a network's weights; a run resumes only with the same."""
    digest = sha256()
    for key, value in model.state_dict().items():
        _digest_value(digest, key, value)
    return digest.hexdigest()


def _digest_value(digest: Any, key: str, value: Any) -> None:
    """Hash a value of a state: a tensor, a tuple of a quantised layer, or a plain value."""
    if isinstance(value, Tensor):
        array = (value.dequantize() if value.is_quantized else value).detach().cpu().contiguous()
        digest.update(f"{key} {value.dtype} {tuple(array.shape)}".encode())
        digest.update(array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            _digest_value(digest, f"{key}.{i}", item)
    else:
        digest.update(f"{key} {value}".encode())


def _sizes(model: nn.Module, name: str, ensemble: Ensemble) -> tuple[int, int]:
    """Find the numbers of outputs and inputs by a call on instances of the first usable feature file.

    A file that cannot be read fails later, as its slide; if the network refuses a file, one of another width
    is tried.
    """
    if ensemble.features is None:
        raise InputError(f"The model {name!r} needs features for a trial; give `features=`.")
    bags = feature_files(ensemble.features)[0]
    check_feature_files(bags, ensemble.features)
    faults: dict[int, XmilError] = {}  # by width; 0 for files that no network could use
    for path in bags:
        width = 0
        try:
            header = open_bag(path, **ensemble.reading)
            bag = header.read(np.arange(min(TRIAL, len(header))))
            width = bag.features.shape[1] if len(bag) and np.isfinite(bag.features).all() else 0
            if width and width in faults:
                break
            with frozen(model), torch.no_grad():
                network, x = open_network(model, bag)
                return int(network(x).shape[-1]), int(x.shape[-1])
        except XmilError as error:
            faults.setdefault(width, error)
    raise faults[max(faults, key=bool)]
