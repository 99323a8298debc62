"""What if these patches were not there: the prediction without a region, or of a region alone.

A model is loaded once and embeds the patches of a slide once; torch is imported on the first question.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.task import TASKS, Floats, Task
from xmil.viewer.case_bags import CaseBag, CaseBags
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.kept import Kept
from xmil.viewer.shown_run import ShownRun

if TYPE_CHECKING:
    from xmil.evaluate.parts import Parts
    from xmil.models import MILModel
    from xmil.models.base import ModelSpec

logger = logging.getLogger(__name__)
LIMIT_BYTES = 1 << 30
TRIED = 400  # sets of patches that a search for the smallest one may try while a reader waits
BACKGROUND = "background.npz"  # in a run's folder, where its models had none of their own
CLOSE = 1e-2  # logits that differ by more than this are another model's


class WhatIf:
    """Questions to the models of the runs, found by digest; those of an ensemble answer together."""

    def __init__(self, collection: Collection, bags: CaseBags, models: Sequence[Path]) -> None:
        if not collection.features:
            raise InputError("What-if needs the features of the slides; give --features beside --model.")
        for path in models:
            if not path.exists():
                raise FileError(absent(path))
        self.collection, self.bags = collection, bags
        self._paths = assign(models, collection.runs)
        self._models: dict[Path, MILModel] = {}
        self._parts: Kept[Parts] = Kept(LIMIT_BYTES, _weight)
        self._lock = Lock()

    def ask(self, key: int, question: Any) -> dict[str, Any]:
        """The prediction before and after `{"run": r, "remove": [...]}` or `{"run": r, "keep": [...]}`."""
        started = time.perf_counter()
        run, verb, indices = _parsed(question)
        evidence = self.collection.evidence(key, run)
        chosen = as_mask(indices, evidence.n)
        kept = chosen if verb == "keep" else ~chosen
        with self._lock:  # one question at a time: each uses all cores
            outputs, left, spec = self._answer(key, run, kept)
        task, logits = TASKS[spec.task], outputs.mean(axis=1).tolist()
        shown = self.collection.run(run).class_names
        names = task.names(spec.n_classes, shown or spec.class_names, spec.time_bins)
        numbers = task.answer(outputs).tolist()
        return {
            "labels": task.number_names(names),
            "before": numbers[0],
            "after": numbers[1],
            "probabilities": task.decides,
            **_verdict(task, outputs, names),
            "logits_before": logits[0],
            "logits_after": logits[1],
            "n_left": left,
            "seconds": time.perf_counter() - started,
            "note": _note(logits[0], evidence.logits),
        }

    def deciding(self, key: int, run: int) -> dict[str, Any]:
        """The smallest set of patches found whose removal changes the prediction, as certificates have it."""
        from xmil.core.bag import Bag
        from xmil.evaluate.minimal import minimal_set

        self.collection.run(run)
        bag, paths = self.bags.get(key, run), self._paths[run]
        if len(paths) != 1 or len(range(*bag.rows.indices(len(bag.features)))) != len(bag.features):
            raise InputError("The patches that decide are found for one model and bags of one slide.")
        with self._lock:
            whole = Bag(bag.features, coords=bag.coords, slide_id=bag.name)
            return minimal_set(self._model(paths[0]), whole, evaluations=TRIED).as_dict()

    @contextmanager
    def models_of(self, run: int) -> Iterator[list[MILModel]]:
        """The models of a run, one question at a time, with the background that the run lent them."""
        from xmil.core.background import Background

        with self._lock:
            models = self._given(run)
            without = [model for model in models if model.background is None]
            kept = Background.load(self.collection.run(run).folder / BACKGROUND) if without else None
            try:
                for model in without:
                    model.background = kept if kept and kept.dim == model.in_dim else None
                yield models
            finally:
                for model in without:
                    model.background = None

    def _given(self, run: int) -> list[MILModel]:
        """The models of a run, which must agree; an error where none is given."""
        from xmil.runs.ensemble import check_ensemble

        name = self.collection.run(run).name
        models = [self._model(path) for path in self._paths[run]]
        if not models:
            raise MissingError(
                f"The model of the run {name!r} is not given; start the viewer with its --model."
            )
        if len(models) > 1:
            check_ensemble([model.spec for model in models], self._paths[run])
        return models

    def warm(self) -> None:
        """Load the models and warn of those that cannot answer; the page says so when one is asked."""
        for path, run in {path: run for run, paths in enumerate(self._paths) for path in paths}.items():
            try:
                with self._lock:
                    width = self._model(path).in_dim
            except XmilError as error:
                logger.warning("%s", error)
                continue
            expected = self.collection.run(run).spec.get("in_dim")
            if expected not in (None, width):
                logger.warning("%s: takes features of width %s; the run's have %s.", path, width, expected)

    def _answer(self, key: int, run: int, kept: npt.NDArray[np.bool_]) -> tuple[Floats, int, ModelSpec]:
        """Outputs (2, m, c) of the m models before and after, how many patches are left, and the spec."""
        import torch

        from xmil.nn.frozen import frozen

        bag, models = self.bags.get(key, run), self._given(run)
        mask = np.ones(len(bag.features), dtype=bool)
        mask[bag.rows] = kept
        left = int(mask.sum())
        if not left:
            raise InputError("Nothing would be left to predict from; keep at least one patch.")
        order, answers = torch.from_numpy(np.argsort(~mask, kind="stable")), []
        for model in models:
            with frozen(model), torch.no_grad():
                parts = self._embedded(model, bag)
                answers.append(
                    torch.stack([parts.full[0], parts.nested(order.unsqueeze(0), [left])[0, 0]]).double()
                )
        return torch.stack(answers, dim=1).cpu().numpy(), left, models[0].spec

    def _embedded(self, model: MILModel, bag: CaseBag) -> Parts:
        import torch

        from xmil.core.bag import Bag
        from xmil.evaluate.parts import parts_of
        from xmil.methods.companions import Companions
        from xmil.methods.network import Network

        key = (id(model), bag.key)
        found = self._parts.get(key)
        if found is None:
            dtype = next(model.parameters()).dtype
            if bag.features.shape[1] != model.in_dim:
                raise InputError(
                    f"The model takes features of width {model.in_dim}; those of {bag.name!r} have "
                    f"{bag.features.shape[1]}."
                )
            x = torch.from_numpy(bag.features).to(dtype).unsqueeze(0)
            held = Companions.of(Bag(bag.features, coords=bag.coords, slide_id=bag.name), x.shape[1])
            found = self._parts.put(key, parts_of(Network(model, companions=held), x, "remove"))
        return found

    def _model(self, path: Path) -> MILModel:
        from xmil.models import load_model

        if path not in self._models:
            self._models[path] = load_model(path)
        return self._models[path]


def assign(models: Sequence[Path], runs: Sequence[ShownRun]) -> list[list[Path]]:
    """The models of each run: those it was made with; else one for all runs, or one for each."""
    from xmil.core.identity import file_digest

    digests = {path: file_digest(path) for path in models}
    found = [[path for path in models if digests[path] in run.digests] for run in runs]
    if any(found):
        return found
    if len(models) not in (1, len(runs)):
        raise InputError(f"Give --model once, or once for each of the {len(runs)} runs.")
    return [[models[i if len(models) > 1 else 0]] for i in range(len(runs))]


def as_mask(indices: Any, n: int) -> npt.NDArray[np.bool_]:
    """The chosen of n patches from a list of indices or of [start, stop] ranges.

    >>> as_mask([0, [2, 4]], 5).tolist()
    [True, False, True, True, False]
    """
    mask = np.zeros(n, dtype=bool)
    if not isinstance(indices, list):
        raise InputError("The patches must be a list of indices or of [start, stop] ranges.")
    for item in indices:
        start, stop = item if isinstance(item, list) and len(item) == 2 else (item, item)
        if not _is_index(start) or not _is_index(stop) or not 0 <= start <= stop <= n or start == n:
            raise InputError(f"A patch must be an index in the range [0, {n}), or [start, stop] within it.")
        mask[start : stop if isinstance(item, list) else start + 1] = True
    return mask


def _parsed(question: Any) -> tuple[int, str, Any]:
    verbs = [verb for verb in ("remove", "keep") if isinstance(question, dict) and verb in question]
    if len(verbs) != 1:
        raise InputError('The body must be {"run": 0, "remove": [...]} or {"run": 0, "keep": [...]}.')
    run = question.get("run", 0)
    if not _is_index(run):
        raise InputError("The run must be a number.")
    return run, verbs[0], question[verbs[0]]


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _verdict(task: Task, outputs: Floats, names: Sequence[str]) -> dict[str, Any]:
    """Whether the prediction of outputs (2, m, c) changes; no sentence where there are no classes."""
    if not task.decides:
        return {"changed": False, "sentence": None}
    before, after = (said or "no label" for said in task.said(outputs, names)["predicted"])
    changes = f"The prediction changes from {before} to {after}."
    stays = f"The prediction stays {after}."
    return {"changed": before != after, "sentence": changes if before != after else stays}


def _note(before: list[float], stored: list[float]) -> str | None:
    """A word of warning where the model does not give the logits that were explained."""
    if len(before) == len(stored) and np.allclose(before, stored, rtol=CLOSE, atol=CLOSE):
        return None
    return "The model or the features are not those of the run: the logits of the whole slide differ."


def _weight(parts: Parts) -> int:
    """About the memory of a slide's embedded patches."""
    from torch import Tensor

    return sum(v.numel() * v.element_size() for v in vars(parts).values() if isinstance(v, Tensor))
