"""What a unit of each feature of a patch is worth to the explained output, and against which baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmil.core.background import Background
from xmil.core.bag import Bag, FloatArray, IntArray
from xmil.core.errors import InputError, UnsupportedError
from xmil.core.explanation import Explanation
from xmil.methods.explain import explain

ALIKE, REFUSED = 0.995, 0.9  # cosine of a patch's given features and those the encoder gives now
SAME = 1e-3  # of the largest score: explanations that differ by more are not one
RULES = ("preset", "epsilon", "gamma", "bias", "gates")
Features = Callable[[IntArray], Tensor]  # of rows of the bag, read and encoded now


@dataclass(frozen=True, eq=False)
class Worth:
    """Per chosen patch the weights g (k, d); it scores g . (f - shift), shift (d,) being the baseline's."""

    weights: Tensor
    shift: Tensor
    now: Tensor  # the features (k, d) as the encoder gives them
    notes: list[str] = field(default_factory=list)
    ordinary: Tensor | None = None  # (d,) the mean patch of the background, where there is one

    @property
    def features(self) -> FloatArray:
        """g . f (k,) of the features as they are now."""
        return _summed(self.weights * self.now.double())

    @property
    def baseline(self) -> FloatArray:
        """g . shift (k,): what patches that equal the baseline would have."""
        return _summed(self.weights * self.shift.double())


def _summed(terms: Tensor) -> FloatArray:
    values: FloatArray = terms.double().sum(dim=1).numpy()
    return values


def find_worth(
    model: nn.Module | None,
    e: Explanation,
    rows: IntArray,
    *,
    read: Features,
    features: Any,
    background: Background | None,
) -> Worth:
    """Weights from the explanation's stored relevance, else from `lrp` with the model, made again."""
    now = read(rows)
    background = background or _stored(model)
    if features is None and e.relevance is not None:
        shift, notes = shift_of(e, None, background, width=now.shape[1])
        weights = _ratio(torch.from_numpy(np.asarray(e.relevance[rows])), now - shift)
        return Worth(weights, shift, now, notes, _ordinary(background, now.shape[1]))
    x = read(np.arange(len(e))) if features is None else _matrix(features, len(e))
    notes = _compare(x[rows], now)
    again = _again(model, e, x)
    shift, more = shift_of(again, x, background, width=now.shape[1])
    notes += [*more, *_same(again.scores[rows], e.scores[rows])]
    relevance = torch.from_numpy(np.asarray(again.relevance)[rows])
    ordinary = _ordinary(background, now.shape[1])
    return Worth(_ratio(relevance, x[rows] - shift), shift, now, notes, ordinary)


def _ordinary(background: Background | None, width: int) -> Tensor | None:
    fits = background is not None and background.dim == width
    return torch.from_numpy(background.mean) if background is not None and fits else None


def _stored(model: nn.Module | None) -> Background | None:
    found = getattr(model, "background", None)
    return found if isinstance(found, Background) else None


def shift_of(
    e: Explanation, x: Tensor | None, background: Background | None, *, width: int
) -> tuple[Tensor, list[str]]:
    """The baseline of an explanation times its strength: zero, with a note, where it is not at hand.

    `x` are the explained features (n, d), where they are known.
    """
    name, strength = e.params.get("baseline"), float(e.params.get("strength") or 0.0)
    if name is None or strength == 0:
        return torch.zeros(width), []
    if x is not None and name == "mean of the bag":
        return strength * x.mean(dim=0), []
    if background is not None and name == f"mean of {background.n} patches" and background.dim == width:
        return strength * torch.from_numpy(background.mean), []
    return torch.zeros(width), [
        f"The scores are measured against a baseline ({name}) that is not at hand: each feature is shared "
        "by its size; give the model or the background."
    ]


def _ratio(relevance: Tensor, features: Tensor) -> Tensor:
    """g = R / f; a feature of zero carries nothing."""
    if relevance.shape != features.shape:
        raise InputError(
            f"The explanation has relevance for {relevance.shape[1]} features and the encoder gives "
            f"{features.shape[1]}; use the encoder that the features came from."
        )
    tiny = features.abs() <= 1e-7 * features.abs().amax(dim=1, keepdim=True)
    return torch.where(tiny, torch.zeros_like(features), relevance / features.masked_fill(tiny, 1.0))


def _matrix(features: Any, n: int) -> Tensor:
    values = features.features if isinstance(features, Bag) else np.asarray(features, dtype=np.float32)
    if values.ndim != 2 or len(values) != n:
        raise InputError(f"The features must be those of the {n} explained patches. Got {values.shape}.")
    return torch.from_numpy(np.ascontiguousarray(values))


def _compare(given: Tensor, now: Tensor) -> list[str]:
    """A note where the encoder's features differ from the given ones; refused where they are others."""
    if given.shape != now.shape:
        raise InputError(
            f"The features have width {given.shape[1]} and the encoder gives {now.shape[1]}; use the encoder "
            "that the features came from."
        )
    alike = float(torch.nn.functional.cosine_similarity(given.double(), now.double(), dim=1).min())
    if alike < REFUSED:
        raise InputError(
            f"The encoder's features of these patches differ from the given ones (cosine {alike:.2f}): it is "
            "another encoder, another slide, or patches of another size; check encoder, slide and patch_px."
        )
    if alike < ALIKE:
        return [f"The encoder's features differ slightly from the given ones (cosine {alike:.3f})."]
    return []


def _again(model: nn.Module | None, e: Explanation, x: Tensor) -> Explanation:
    """The explanation made again, with relevance per feature, against the same baseline if it can be."""
    if model is None or e.method != "lrp":
        raise UnsupportedError(
            "Maps inside a patch need relevance per feature: explain with method='lrp' and "
            "feature_level=True, or pass the model and an explanation of 'lrp'."
        )
    params = {key: value for key, value in e.params.items() if key in RULES}
    against = {} if e.params.get("baseline") else {"baseline": None}
    return explain(model, x, method="lrp", target=e.target, feature_level=True, **against, **params)


def _same(again: FloatArray, given: FloatArray) -> list[str]:
    gap = float(np.abs(again - given).max() / max(float(np.abs(given).max()), 1e-12))
    if gap <= SAME:
        return []
    return [
        f"With this model the patches score otherwise than in the explanation (by up to {100 * gap:.0f} % of "
        "the largest): another model, another baseline, or contexts; the audit's constant holds the rest."
    ]
