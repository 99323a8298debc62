"""Do the models of an ensemble agree on a patch? Sign agreement, rank correlation, and the published mask.

The mask drops patches whose mean sign speaks against the sign of their mean score, and patches whose
standard deviation over the models lies above its 99.5 % quantile (Keyl et al., TAPAS).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray
from xmil.core.errors import InputError
from xmil.evaluate.sanity import rank_correlation

QUANTILE = 0.995


@dataclass(frozen=True, eq=False)
class Consensus:
    """Mean and standard deviation per patch over the models, mean sign, and which patches are kept.

    `agreed` marks patches that most models count as support and none counts against; a model that gives a
    patch no score at all has no say. `largest` is the share of all absolute score that one model gives: near
    1 the mean is that model's map.
    """

    mean: FloatArray
    std: FloatArray
    sign: FloatArray
    kept: npt.NDArray[np.bool_]
    agreement: float
    correlation: float
    agreed: npt.NDArray[np.bool_]
    models: int
    largest: float

    @property
    def summary(self) -> dict[str, float]:
        """What a table says of a slide."""
        return {
            "models": float(self.models),
            "sign_agreement": self.agreement,
            "rank_correlation": self.correlation,
            "kept_share": float(self.kept.mean()),
            "mean_spread": float(self.std.mean()),
            "largest_model_share": self.largest,
        }

    @property
    def shares(self) -> dict[str, float]:
        """Shares of patches that all models count as support, and whose masked mean is above zero."""
        return {
            "agreed_share": float(self.agreed.mean()),
            "masked_share": float((self.scores > 0).mean()),
        }

    @property
    def scores(self) -> FloatArray:
        """The mean where the models agree, zero elsewhere."""
        return np.where(self.kept, self.mean, 0.0).astype(np.float32)


def consensus(scores: npt.ArrayLike, *, quantile: float = QUANTILE) -> Consensus:
    """What m models say of n patches, from scores (m, n).

    >>> found = consensus([[1.0, -1.0, 0.5], [2.0, -2.0, -0.4], [1.5, -1.0, -0.3]])
    >>> found.kept.tolist(), round(found.agreement, 2)
    ([True, False, True], 0.89)
    """
    s = np.asarray(scores, dtype=np.float64)
    if s.ndim != 2 or len(s) < 2 or not np.isfinite(s).all():
        raise InputError(f"A consensus needs finite scores of two models or more (m, n). Got {s.shape}.")
    mean, std, sign = s.mean(axis=0), s.std(axis=0), np.sign(s).mean(axis=0)
    kept = (np.sign(mean) * sign > 0) & (std <= np.quantile(std, quantile))
    agreement = float(np.maximum((s > 0).mean(axis=0), (s < 0).mean(axis=0)).mean())
    pairs = [rank_correlation(a, b) for a, b in combinations(s, 2)]
    correlation = float(np.nanmean(pairs)) if np.isfinite(pairs).any() else float("nan")
    mean32, std32, sign32 = (np.asarray(values, dtype=np.float32) for values in (mean, std, sign))
    agreed = (s >= 0).all(axis=0) & ((s > 0).mean(axis=0) > 0.5)
    sizes = np.abs(s).sum(axis=1)
    largest = float(sizes.max() / sizes.sum()) if sizes.any() else float("nan")
    return Consensus(mean32, std32, sign32, kept, agreement, correlation, agreed, len(s), largest)
