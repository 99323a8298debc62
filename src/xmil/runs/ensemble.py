"""The models of a fold ensemble as one: mean outputs, mean explanations and their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from xmil.core.absence import absent
from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray
from xmil.core.errors import CheckpointError, FileError, InputError, StopError
from xmil.core.explanation import Audit, Explanation
from xmil.core.identity import file_digest
from xmil.core.named_function import is_function_name
from xmil.core.runfiles import read_run
from xmil.core.task import TASKS
from xmil.data.averages import background_of_files
from xmil.data.feature_facts import differing, same_encoder
from xmil.data.join import feature_files
from xmil.data.whereabouts import is_features
from xmil.methods.opening import open_network
from xmil.models import MILModel, load_model
from xmil.models.base import ModelSpec
from xmil.models.checkpoints.files import checkpoint_files, in_folder
from xmil.nn.frozen import frozen
from xmil.runs.inputs import NOTHING, Say, Unsaid

BACKGROUND, AUTO, NO_BACKGROUND = "background.npz", "auto", "none"
ENOUGH = 50  # files; the mean of fewer holds too much of their own evidence
MOST = 100  # files read for it, evenly spaced
ANSWERS = ("in_dim", "n_classes", "task")
NAMES = {"class_names": "class names", "encoder": "encoder"}
StrPath = str | PathLike[str]


@dataclass(frozen=True)
class Ensemble:
    """The models of a run, one or several: loaded once, their files hashed once."""

    paths: tuple[Path, ...]
    digests: tuple[str, ...]
    models: tuple[MILModel, ...]
    unsaid: Unsaid = NOTHING

    @classmethod
    def load(
        cls,
        paths: Sequence[Path],
        device: str = "cpu",
        *,
        digests: Sequence[str] | None = None,
        unsaid: Unsaid = NOTHING,
    ) -> Ensemble:
        """The models of the files, or of your own builders; refused where they answer different questions.

        `digests` are what the files must have: those of a run that began with them. `unsaid` holds what the
        files do not say.
        """
        wanted: Sequence[str | None] = digests or [None] * len(paths)
        pairs = [_loaded(path, digest, unsaid) for path, digest in zip(paths, wanted, strict=True)]
        models = tuple(model.to(device) for model, _ in pairs)
        check_ensemble([model.spec for model in models], paths)
        _lend(models, unsaid.background)
        return cls(tuple(paths), tuple(digest for _, digest in pairs), models, unsaid)

    def lent(self, background: Background) -> Ensemble:
        """The ensemble, models without a background having this one."""
        _lend(self.models, background)
        return replace(self, unsaid=replace(self.unsaid, background=background))

    def again(self, device: str) -> Ensemble:
        """The same models from the same files, for another process."""
        return Ensemble.load(self.paths, device, digests=self.digests, unsaid=self.unsaid)

    @property
    def specs(self) -> list[ModelSpec]:
        """The spec of each model."""
        return [model.spec for model in self.models]

    @property
    def spec(self) -> ModelSpec:
        """What the models have in common."""
        return shared_spec(self.specs)

    def to(self, device: str) -> Ensemble:
        """The ensemble with its models on a device."""
        return replace(self, models=tuple(model.to(device) for model in self.models))

    def keep_background(self, out: Path) -> None:
        """Write what the models were lent into a run's folder."""
        if self.unsaid.background is not None:
            self.unsaid.background.save(out / BACKGROUND)

    def about(self) -> dict[str, Any]:
        """What run.json says of the models."""
        every = [
            {"path": str(path), "digest": digest, "spec": asdict(spec)}
            for path, digest, spec in zip(self.paths, self.digests, self.specs, strict=True)
        ]
        shared = self.spec
        first = {**every[0], "spec": asdict(shared)}
        return {"model": first, "models": every, "class_names": shared.class_names, "task": shared.task}


def with_background(
    models: Ensemble,
    given: StrPath,
    *,
    files: Sequence[Path],
    out: Path,
    restart: bool = False,
    say: Say = lambda _: None,
) -> Ensemble:
    """The models of a run, each with a background where one is to be had.

    A published checkpoint has none. `given` is a folder or file of features, "none", or "auto": the mean of
    the run's own files, from 50 on. A run that goes on, or grows, keeps the one it began with.
    """
    if str(given) == NO_BACKGROUND or all(model.background is not None for model in models.models):
        return models
    width, reading = models.spec.in_dim, models.unsaid.reading
    if str(given) != AUTO:
        chosen, whose = _given_background(Path(given), width, reading), str(given)
    elif not restart and (kept := Background.load(out / BACKGROUND)) is not None and kept.dim == width:
        chosen, whose = kept, "what this run began with"
    elif not restart and _began_without(out):
        if len(files) >= ENOUGH:
            say(f"{out}: began without a background, and goes on without; --restart measures against one.")
        return models
    else:
        few = len(files) < ENOUGH
        own = None if few else background_of_files(files, width, reading, most=MOST)
        if own is None:
            return models
        chosen, whose = own, "the slides of this run"
    say(
        f"The model has no background: evidence is measured against the mean of {chosen.n:,} patches of "
        f"{whose} ({BACKGROUND}). --background none leaves it out."
    )
    return models.lent(chosen)


def _began_without(out: Path) -> bool:
    """Whether a run is there whose slides have no background: it had too few of them when it began."""
    known = read_run(out)
    return known is not None and "background" not in known["settings"]


def _given_background(path: Path, width: int, reading: Mapping[str, Any]) -> Background:
    """The background of features that were asked for."""
    if not path.exists():
        raise FileError(f"--background {absent(path, 'file or folder of features')}")
    files = feature_files(path)[0] if path.is_dir() else [path]
    found = background_of_files(files, width, reading, most=MOST)
    if found is None:
        raise InputError(
            f"--background {path}: no readable features of width {width}, which the model takes."
        )
    return found


def _lend(models: Sequence[MILModel], background: Background | None) -> None:
    for model in models:
        model.background = model.background or background


def _loaded(path: Path, wanted: str | None, unsaid: Unsaid) -> tuple[MILModel, str]:
    """A model with the digest of its file, which must not change while it is read."""
    if is_function_name(str(path)):
        from xmil.runs.own_network import build_own, state_digest

        own = build_own(str(path), unsaid)
        return own, _checked_digest(path, state_digest(own), wanted)
    before = _stamp(path)
    try:
        if path.is_dir():
            in_folder(path)  # refused before every file in it is read for the digest
        digest = _checked_digest(path, file_digest(path), wanted)
        model = load_model(path, class_names=unsaid.class_names)
    except CheckpointError as error:
        raise _swapped(path, unsaid) or error from None
    if _stamp(path) != before:
        raise StopError(f"{path}: changed while it was read; run the command again once it is written.")
    return model, digest


def _checked_digest(path: Path, digest: str, wanted: str | None) -> str:
    if wanted is not None and digest != wanted:
        raise StopError(
            f"{path}: is not the model that the run started with; put it back, or use another --out."
        )
    return digest


def _swapped(path: Path, unsaid: Unsaid) -> InputError | None:
    """The error for features where the model belongs, and the model where the features belong."""
    if not is_features(path) or unsaid.features is None:
        return None
    other = f"--model {unsaid.features} --features {path}"
    if _is_checkpoint(unsaid.features):
        return InputError(f"{path}: holds features, and {unsaid.features} a model: swap them, as {other}.")
    return InputError(f"{path}: holds features, not a model; give the checkpoint as --model.")


def _is_checkpoint(path: Path) -> bool:
    try:
        load_model(path)
    except CheckpointError:
        return False
    return True


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()  # what reads it says why
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def model_paths(given: StrPath | Sequence[StrPath]) -> tuple[Path, ...]:
    """The checkpoints that one path or several stand for; a folder of a training has those of its folds."""
    listed: list[Any] = [given]
    if isinstance(given, Iterable) and not isinstance(given, str | PathLike | nn.Module):
        listed = list(given)
    for path in listed:
        if not isinstance(path, str | PathLike):
            raise InputError(
                f"Runs over slides take the path of a model, not a {type(path).__name__}: write a model of "
                "xmil with save_model, name the function that builds a module of yours as "
                '"mine.py:build", or explain one bag with xmil.explain.'
            )
    return tuple(
        file
        for path in listed
        for file in ([Path(path)] if is_function_name(str(path)) else checkpoint_files(Path(path)))
    )


def check_ensemble(specs: Sequence[ModelSpec], paths: Sequence[Path]) -> None:
    """Refuse models that do not answer the same question, or that would be given the same features wrongly.

    What a model does not say contradicts no other; `ensemble_warning` tells.
    """
    for name in (*ANSWERS, *NAMES):
        first: tuple[Any, Path] | None = None
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


def ensemble_warning(specs: Sequence[ModelSpec], paths: Sequence[Path]) -> str | None:
    """One sentence where some models of an ensemble do not say what others do, or had other features."""
    for spec, path in zip(specs[1:], paths[1:], strict=True):
        found = differing(specs[0].features or {}, spec.features or {})
        if found:
            return (
                f"{path.name} of the ensemble was trained on features made differently from those of "
                f"{paths[0].name} ({', '.join(found)}): these features do not suit both."
            )
    for name, words in NAMES.items():
        silent = [path.name for spec, path in zip(specs, paths, strict=True) if getattr(spec, name) is None]
        if silent and len(silent) < len(specs):
            return (
                f"{', '.join(silent[:3])} of the ensemble does not record its {words}: those of the other "
                "models are taken."
            )
    return None


def shared_spec(specs: Sequence[ModelSpec]) -> ModelSpec:
    """The spec of an ensemble: its first model's, with names that any knows, and bins where they agree."""
    first = specs[0]
    return replace(
        first,
        class_names=next((spec.class_names for spec in specs if spec.class_names is not None), None),
        encoder=next((spec.encoder for spec in specs if spec.encoder is not None), None),
        time_bins=first.time_bins if _same_bins(specs) else None,
    )


def bins_warning(specs: Sequence[ModelSpec]) -> str | None:
    """One sentence where the models of an ensemble cut time into bins of their own."""
    if _same_bins(specs):
        return None
    cuts = "; ".join(
        ", ".join(f"{edge:g}" for edge in spec.time_bins or ()) or "unknown" for spec in specs[:3]
    )
    return (
        f"the models cut time into bins of their own ({cuts}{'; ...' if len(specs) > 3 else ''}): the mean "
        "of their bin0, bin1, ... belongs to no single interval. The risk is comparable."
    )


def _same_bins(specs: Sequence[ModelSpec]) -> bool:
    return all(spec.time_bins == specs[0].time_bins for spec in specs)


def predicted_by(models: Sequence[MILModel], bag: Bag) -> int:
    """The target an ensemble predicts: by the mean of its models' outputs."""
    outputs = []
    for model in models:
        with frozen(model), torch.no_grad():
            network, x = open_network(model, bag)
            outputs.append(network(x).double())
    return TASKS[models[0].spec.task].predicted(torch.cat(outputs).mean(dim=0).cpu())


def average(explanations: Sequence[Explanation], spec: ModelSpec) -> Explanation:
    """The mean of the models' explanations of one target, with the standard deviation over the models.

    Outputs and audits are means as well: what holds for each model's account holds for the mean. The target
    has the name that the ensemble's spec gives it.
    """
    first = explanations[0]
    scores = np.stack([e.scores for e in explanations]).astype(np.float64)  # (m, n)
    logits = np.stack([e.logits for e in explanations]).astype(np.float64)
    return replace(
        first,
        target=first.target.resolve(n_classes=spec.n_targets, predicted=0, class_names=spec.target_names),
        scores=scores.mean(axis=0).astype(np.float32),
        spread=scores.std(axis=0, ddof=1).astype(np.float32),
        logits=logits.mean(axis=0).astype(np.float32),
        output=float(np.mean([e.output for e in explanations])),
        audit=_mean_audit([e.audit for e in explanations]),
        model=f"{first.model} x {len(explanations)}",
        relevance=_mean_relevance([e.relevance for e in explanations]),
        stderr=_mean_error([e.stderr for e in explanations]),
        stable=None,
        warnings=list(dict.fromkeys(text for e in explanations for text in e.warnings)),
    )


def _mean_error(errors: Sequence[FloatArray | None]) -> FloatArray | None:
    """The standard error of the mean of scores that are drawn apart."""
    known = [np.asarray(error, dtype=np.float64) for error in errors if error is not None]
    if not known or len(known) < len(errors):
        return None
    return np.asarray(np.sqrt(np.sum(np.square(known), axis=0)) / len(known), dtype=np.float32)


def _mean_relevance(each: Sequence[FloatArray | None]) -> FloatArray | None:
    """The mean relevance per feature, where every model has it."""
    known = [relevance for relevance in each if relevance is not None]
    if not known or len(known) < len(each):
        return None
    return np.asarray(np.mean(known, axis=0, dtype=np.float64), dtype=np.float32)


def _mean_audit(audits: Sequence[Audit | None]) -> Audit | None:
    known = [audit.as_dict() for audit in audits if audit is not None]
    if len(known) < len(audits):
        return None
    return Audit(**{name: float(np.mean([audit[name] for audit in known])) for name in known[0]})
