"""What-if questions: the prediction or explanation of a slide without some of its patches.

A model is loaded once and embeds the patches of a slide once.
Torch is imported on the first question.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from xmil.core.bag import Bag
from xmil.core.errors import FileError, InputError, XmilError, absent, unknown_name
from xmil.core.task import TASKS, Floats, Target
from xmil.viewer.cache import Cache
from xmil.viewer.collection import Collection, MissingError, ShownRun
from xmil.viewer.features import CaseBag, CaseBags, Mask
from xmil.viewer.layers import targets_in

if TYPE_CHECKING:
    from xmil.core.explanation import Explanation
    from xmil.models import MILModel
    from xmil.models.base import ModelSpec
    from xmil.subsets import Subsets

logger = logging.getLogger(__name__)
SUBSETS_BYTES = 1 << 30  # of embedded patches in memory
TRIED = 400  # sets of patches that a search may try while a reader waits
BACKGROUND = "background.npz"  # in a run's folder, if its user named one
CLOSE = 1e-2  # largest difference between logits of the same model


class AbandonedError(XmilError):
    """The client no longer waits for the answer."""


class WhatIf:
    """The models of the runs, matched by digest; those of an ensemble answer together."""

    def __init__(self, collection: Collection, bags: CaseBags, models: Sequence[Path]) -> None:
        if not collection.features:
            raise InputError("What-if needs the features of the slides; pass `features=` with `model=`.")
        for path in models:
            if not path.exists():
                raise FileError(absent(path))
        self.collection, self.bags = collection, bags
        self._paths = assign(models, collection.runs)
        self._model = cache(_load_model)
        self._subsets: Cache[Subsets] = Cache(SUBSETS_BYTES, lambda subsets: subsets.n_bytes)
        self._lock = Lock()

    def warm(self) -> None:
        """Load the models, and log a warning for those that cannot answer."""
        for path, run in {path: run for run, paths in enumerate(self._paths) for path in paths}.items():
            try:
                with self._lock:
                    width = self._model(path).in_dim
            except XmilError as error:
                logger.warning("%s", error)
                continue
            expected = self.collection.run(run).spec.get("in_dim")
            if expected not in (None, width):
                logger.warning("%s: reads features of width %s; the run's have %s.", path, width, expected)

    def ask(self, key: int, question: Any) -> dict[str, Any]:
        """Predict before and after `{"run": r, "remove": [...]}` or `{"run": r, "keep": [...]}`."""
        started = time.perf_counter()
        verbs = [verb for verb in ("remove", "keep") if isinstance(question, dict) and verb in question]
        if len(verbs) != 1:
            raise InputError('The body must be {"run": 0, "remove": [...]} or {"run": 0, "keep": [...]}.')
        run = question.get("run", 0)
        if not _is_index(run):
            raise InputError("The run must be a number.")
        evidence = self.collection.evidence(key, run)
        selection = as_mask(question[verbs[0]], evidence.n)
        with self._lock:  # one question at a time: each uses all cores
            outputs, n_left, spec = self._predict(key, run, selection if verbs[0] == "keep" else ~selection)
        task, logits = TASKS[spec.task], outputs.mean(axis=1).tolist()
        shown = self.collection.run(run).class_names
        names = task.names(spec.n_classes, shown or spec.class_names, spec.time_bins)
        numbers = task.answer(outputs).tolist()
        changed, sentence, note = False, None, None
        if task.decides:
            before, after = (name or "no label" for name in task.describe(outputs, names)["predicted"])
            changed = before != after
            sentence = f"The prediction {f'changes from {before} to' if changed else 'stays'} {after}."
        stored = evidence.logits
        if len(logits[0]) != len(stored) or not np.allclose(logits[0], stored, rtol=CLOSE, atol=CLOSE):
            note = "The model or the features are not those of the run: logits of the whole slide differ."
        return {
            "labels": task.number_names(names),
            "before": numbers[0],
            "after": numbers[1],
            "probabilities": task.decides,
            "changed": changed,
            "sentence": sentence,
            "logits_before": logits[0],
            "logits_after": logits[1],
            "n_left": n_left,
            "seconds": time.perf_counter() - started,
            "note": note,
        }

    def find_deciding(self, key: int, run: int) -> dict[str, Any]:
        """Find a smallest set of patches whose removal changes the prediction, as in certificates."""
        from xmil.evaluate import minimal_set

        self.collection.run(run)
        case, paths = self.bags.get(key, run), self._paths[run]
        if len(paths) != 1 or len(case.own) != len(case.bag):
            raise InputError("Deciding patches need a single model and bags of single slides.")
        with self._lock:
            return minimal_set(self._model(paths[0]), case.bag, evaluations=TRIED).as_dict()

    def explain(self, key: int, question: Any, abandoned: Event) -> dict[str, Any]:
        """Explain the remaining patches with the run's method and settings, in the order of the bag.

        The question is `{"run": r, "keep": [...], "method": m, "targets": [...]}`; `abandoned` stops it.
        """
        started = time.perf_counter()
        question = question if isinstance(question, dict) else {}
        number, method, names = question.get("run"), question.get("method"), question.get("targets")
        has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not _is_index(number) or not isinstance(method, str) or not has_names:
            raise InputError(
                'The body must be {"run": 0, "keep": [...], "method": "...", "targets": ["..."]}.'
            )
        if not 1 <= len(names) <= 2:
            raise InputError(f"targets must be one or two names. Got {len(names)} instead.")
        stays = as_mask(question.get("keep"), self.collection.evidence(key, number).n)
        if not stays.any():
            raise InputError("There is nothing to explain; keep at least one patch.")
        run = self.collection.run(number)
        path = run.find("explanations", self.collection.slide(key))
        targets = targets_in(path, method) if path is not None else {}
        for name in names:
            if name not in targets:
                raise unknown_name(f"target of {method!r} in this run", name, list(targets))
        with self._models_with_background(number) as models, _watch(abandoned):
            case = self.bags.get(key, number)
            mask = case.widen(stays, rest=True)
            bag, chosen = case.bag.select(mask), [targets[name] for name in names]
            explanations = _explain(models, bag, run, method=method, targets=chosen)
        rows = case.widen(stays, rest=False)[mask]  # the slide's patches within its case
        columns = [
            {
                "target": name,
                "scores": [float(np.float32(value)) for value in e.scores[rows]],
                "output": float(e.output),
                "audit": None if e.audit is None else e.audit.as_dict(),
                "warnings": list(e.warnings),
            }
            for name, e in zip(names, explanations, strict=True)
        ]
        return {"n_left": int(stays.sum()), "seconds": time.perf_counter() - started, "columns": columns}

    @contextmanager
    def _models_with_background(self, run: int) -> Iterator[list[MILModel]]:
        """Lock the models of a run, with the run's background."""
        from xmil.core.background import Background

        with self._lock:
            models = self._run_models(run)
            stored = Background.load(self.collection.run(run).path / BACKGROUND)
            before = [model.background for model in models]
            try:
                for model in models:
                    fits = stored is not None and stored.dim == model.in_dim
                    model.background = stored if fits else model.background
                yield models
            finally:
                for model, background in zip(models, before, strict=True):
                    model.background = background

    def _run_models(self, run: int) -> list[MILModel]:
        """Find the models of a run, which must agree; raise if there is none."""
        from xmil.runs.ensemble import check_ensemble

        name = self.collection.run(run).name
        models = [self._model(path) for path in self._paths[run]]
        if not models:
            raise MissingError(f"The model of the run {name!r} is missing; start the viewer with `model=`.")
        if len(models) > 1:
            check_ensemble([model.spec for model in models], self._paths[run])
        return models

    def _predict(self, key: int, run: int, stays: Mask) -> tuple[Floats, int, ModelSpec]:
        """Outputs (2, m, c) of the m models before and after, how many patches are left, and the spec."""
        import torch

        from xmil.network import frozen

        case, models = self.bags.get(key, run), self._run_models(run)
        mask = case.widen(stays, rest=True)
        if not mask.any():
            raise InputError("Nothing would be left to predict from; keep at least one patch.")
        masks, answers = torch.from_numpy(np.stack([np.ones_like(mask), mask])), []
        for model in models:
            with frozen(model), torch.no_grad():
                answers.append(self._embed(model, case).run(masks))
        return torch.stack(answers, dim=1).cpu().numpy(), int(mask.sum()), models[0].spec

    def _embed(self, model: MILModel, case: CaseBag) -> Subsets:
        import torch

        from xmil.network import Companions, Network
        from xmil.subsets import open_subsets

        def compute() -> Subsets:
            bag = case.bag
            if bag.dim != model.in_dim:
                raise InputError(
                    f"The model takes features of width {model.in_dim}; those of {bag.slide_id!r} have "
                    f"{bag.dim}."
                )
            x = torch.from_numpy(bag.features).to(next(model.parameters()).dtype).unsqueeze(0)
            return open_subsets(Network(model, companions=Companions.of(bag, len(bag))), x)

        return self._subsets.fetch((id(model), case.key), compute)


def _load_model(path: Path) -> MILModel:
    from xmil.models import load_model

    return load_model(path)


def assign(models: Sequence[Path], runs: Sequence[ShownRun]) -> list[list[Path]]:
    """The models of each run by digest; if none matches, one model for all runs, or one for each."""
    from xmil.core.durable import file_digest

    digests = {path: file_digest(path) for path in models}
    matches = [[path for path in models if digests[path] in run.digests] for run in runs]
    if any(matches):
        return matches
    if len(models) not in (1, len(runs)):
        raise InputError(f"Give `model=` once, or once for each of the {len(runs)} runs.")
    return [[models[i if len(models) > 1 else 0]] for i in range(len(runs))]


def as_mask(indices: Any, n: int) -> Mask:
    """The selected ones of n patches from a list of indices or of [start, stop] ranges.

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


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _explain(
    models: Sequence[MILModel],
    bag: Bag,
    run: ShownRun,
    *,
    method: str,
    targets: Sequence[tuple[Target, str | None]],
) -> list[Explanation]:
    """Explain each target, averaged over the models of an ensemble."""
    from xmil.methods import explain_targets, seeds
    from xmil.runs.ensemble import average, shared_spec

    own, seed = run.parameters(method), run.settings.get("seed")
    drawn = seeds(method, str(bag.slide_id), seed if isinstance(seed, int) else 0, contexts="contexts" in own)
    classes, output = [target for target, _ in targets], targets[0][1]
    options = {**drawn, **own}
    each = [explain_targets(m, bag, classes, method=method, output=output, **options) for m in models]
    if len(each) == 1:
        return each[0]
    spec = shared_spec([model.spec for model in models])
    return [average(same, spec) for same in zip(*each, strict=True)]


def _watch(abandoned: Event) -> AbstractContextManager[Any]:
    """Stop at the next operation after `abandoned` is set."""
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if abandoned.is_set():
                raise AbandonedError("The explanation was stopped, because the client left.")
            return func(*args, **(kwargs or {}))

    return Watch()
