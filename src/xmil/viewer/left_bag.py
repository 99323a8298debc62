"""A slide explained again without the patches that a what-if question took out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, XmilError, unknown_name
from xmil.viewer.case_bags import CaseBag
from xmil.viewer.score_block import targets_in
from xmil.viewer.whatif import WhatIf, as_mask

if TYPE_CHECKING:
    from xmil.core.explanation import Explanation
    from xmil.models import MILModel
    from xmil.viewer.shown_run import ShownRun

Rows = npt.NDArray[np.bool_]


class AbandonedError(XmilError):
    """Nobody waits for the answer any more."""


def explain_left(whatif: WhatIf, key: int, question: Any, alone: Event) -> dict[str, Any]:
    """Scores of the patches that are kept, by the run's own method and settings, in the order of the bag.

    The question is `{"run": r, "keep": [...], "method": m, "targets": [...]}`; `alone` ends the work.
    """
    started = time.perf_counter()
    run, method, targets = _asked(question)
    kept = as_mask(question.get("keep"), whatif.collection.evidence(key, run).n)
    if not kept.any():
        raise InputError("Nothing would be left to explain; keep at least one patch.")
    path = whatif.collection.run(run).explanation(whatif.collection.slide(key))
    known = targets_in(path, method) if path is not None else {}
    for target in targets:
        if target not in known:
            raise unknown_name(f"target of {method!r} in this run", target, list(known))
    with whatif.models_of(run) as models, _watch(alone):
        bag = whatif.bags.get(key, run)
        mask = np.ones(len(bag.features), dtype=bool)
        mask[bag.rows] = kept
        wanted = [known[target] for target in targets]
        found = _explained(models, bag, mask, whatif.collection.run(run), method=method, wanted=wanted)
    own = np.zeros(len(mask), dtype=bool)
    own[bag.rows] = kept
    return {
        "n_left": int(kept.sum()),
        "seconds": time.perf_counter() - started,
        "columns": [_column(target, e, own[mask]) for target, e in zip(targets, found, strict=True)],
    }


def _asked(question: Any) -> tuple[int, str, list[str]]:
    known = question if isinstance(question, dict) else {}
    run, method, targets = known.get("run"), known.get("method"), known.get("targets")
    plain = isinstance(method, str) and not isinstance(run, bool)
    if (
        not plain
        or not isinstance(run, int)
        or not isinstance(targets, list)
        or not all(isinstance(t, str) for t in targets)
    ):
        raise InputError('The body must be {"run": 0, "keep": [...], "method": "...", "targets": ["..."]}.')
    if not 1 <= len(targets) <= 2:
        raise InputError(f"One or two targets can be explained at once. Got {len(targets)}.")
    return run, str(method), targets


def _explained(
    models: Sequence[MILModel],
    bag: CaseBag,
    mask: Rows,
    run: ShownRun,
    *,
    method: str,
    wanted: Sequence[tuple[Any, str | None]],
) -> list[Explanation]:
    """An explanation for each target, over the models of an ensemble the mean."""
    from xmil.core.bag import Bag
    from xmil.methods import METHODS, explain_targets
    from xmil.methods.registry import seeds
    from xmil.runs.ensemble import average, shared_spec

    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    coords = None if bag.coords is None else bag.coords[mask]
    left = Bag(bag.features[mask], coords=coords, slide_id=bag.name)
    given, seed = run.method_params(method)
    params = {**seeds(method, bag.name, seed, contexts="contexts" in given), **given}
    targets, output = [target for target, _ in wanted], wanted[0][1]
    each = [explain_targets(m, left, targets, method=method, output=output, **params) for m in models]
    if len(each) == 1:
        return each[0]
    spec = shared_spec([model.spec for model in models])
    return [average(same, spec) for same in zip(*each, strict=True)]


def _column(target: str, e: Explanation, own: Rows) -> dict[str, Any]:
    """What the page needs of an explanation; of a case, the slide's own patches."""
    return {
        "target": target,
        "scores": [float(np.float32(value)) for value in e.scores[own]],
        "output": float(e.output),
        "audit": None if e.audit is None else e.audit.as_dict(),
        "warnings": list(e.warnings),
    }


def _watch(alone: Event) -> AbstractContextManager[Any]:
    """Give up at the next step of the computation after `alone` is set."""
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if alone.is_set():
                raise AbandonedError("The explanation was given up: nobody waits for it.")
            return func(*args, **(kwargs or {}))

    return Watch()
