"""An explanation: one score per instance for one explained output, with its audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import PurePath
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray, IntArray, Patches, Placed, Places, merged
from xmil.core.errors import InputError, bad_parameter
from xmil.core.services import service
from xmil.core.task import Target
from xmil.core.text import counted

if TYPE_CHECKING:
    import pandas as pd

JOINED = 0.01  # weight, in samples, of the mean variance of all scores in that of each
FEWEST_PAIRS = 32  # of orders and their reverse before sampled Shapley values may stop
OTHER_FORMATS = (  # suffixes of other formats than Parquet
    *(".csv", ".tsv", ".txt", ".json", ".jsonl", ".geojson", ".xls", ".xlsx"),
    *(".npz", ".npy", ".h5", ".hdf5", ".zarr", ".pkl", ".pickle", ".pt", ".safetensors"),
)


PARTS = {  # of the explained output, with their names on pages and in pictures
    "instances": "Patches",
    "class_token": "Class token",
    "bias": "Bias",
    "epsilon": "Numerical term",
    "baseline": "Baseline",
    "cut": "Cut",
    "other": "Unexplained",
}


@dataclass(frozen=True)
class Audit:
    """The shares that the explained `output` is the sum of.

    `class_token` reached parameters that are concatenated as tokens, `bias` reached added constants,
    `epsilon` was absorbed by stabilisers, `baseline` is the share of a bag of baseline instances, `cut`
    stopped at constants that depend on the input, and `other` is unexplained: if it is not close to zero, the
    explanation does not account for the output.

    >>> Audit(output=2.0, instances=1.5, bias=0.5)
    Audit(output=2, instances=1.5, class_token=0, bias=0.5, epsilon=0, other=0, baseline=0, cut=0)
    """

    output: float
    instances: float
    class_token: float = 0.0
    bias: float = 0.0
    epsilon: float = 0.0
    other: float = 0.0
    baseline: float = 0.0
    cut: float = 0.0

    @classmethod
    def close(cls, **shares: float) -> Audit:
        """Make the audit of some shares; `other` is the rest of the output."""
        explained = sum(value for key, value in shares.items() if key != "output")
        return cls(**shares, other=shares["output"] - explained)

    def as_dict(self) -> dict[str, float]:
        """The shares by name."""
        return asdict(self)

    def __repr__(self) -> str:
        return f"Audit({', '.join(f'{key}={value:.6g}' for key, value in self.as_dict().items())})"


def mean_audit(audits: Sequence[Audit | None]) -> Audit | None:
    """Average several audits, share by share; None if one of them is missing."""
    each = [audit.as_dict() for audit in audits if audit is not None]
    if len(each) < len(audits):
        return None
    return Audit(**{name: float(np.mean([shares[name] for shares in each])) for name in each[0]})


@dataclass(frozen=True, eq=False, init=False)
class Explanation(Placed):
    """Scores (n,) of one method for one target of one bag.

    `output` is the explained number, `logits` are the model's. `signed` says whether the sign of a score
    means anything. `audit` is None for methods that do not conserve. `bag` is the slide's name.
    `patches` are the bag's; their `coords`, `patch_size` and so on are also attributes here. For an ensemble
    `scores` are the mean over its models and `spread` (n,) their standard deviation. `stderr` (n,) is the
    standard error of sampled scores, `stable` (n,) says where the sign is sure, and `warnings` are sentences
    to show wherever the scores are shown.
    """

    scores: FloatArray
    logits: FloatArray
    output: float
    method: str
    target: Target
    signed: bool
    audit: Audit | None
    bag: str | None
    patches: Patches
    model: str | None
    params: Mapping[str, Any]
    relevance: FloatArray | None
    spread: FloatArray | None
    stderr: FloatArray | None
    stable: npt.NDArray[np.bool_] | None
    warnings: Sequence[str]

    def __init__(
        self,
        scores: FloatArray,
        logits: FloatArray,
        output: float,
        method: str,
        target: Target,
        signed: bool,
        audit: Audit | None = None,
        bag: str | None = None,
        coords: IntArray | EllipsisType | None = ...,
        *,
        patches: Patches | None = None,
        model: str | None = None,
        params: Mapping[str, Any] | None = None,
        relevance: FloatArray | None = None,
        spread: FloatArray | None = None,
        stderr: FloatArray | None = None,
        stable: npt.NDArray[np.bool_] | None = None,
        warnings: Sequence[str] = (),
        **places: Unpack[Places],
    ) -> None:
        self.__dict__.update(  # the class is frozen
            scores=scores,
            logits=logits,
            output=output,
            method=method,
            target=target,
            signed=signed,
            audit=audit,
            bag=bag,
            patches=merged(patches, coords, places),
            model=model,
            params={} if params is None else params,
            relevance=relevance,
            spread=spread,
            stderr=stderr,
            stable=stable,
            warnings=list(warnings),
        )

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        where = f" of {self.bag!r}" if self.bag else ""
        doubts = f", {counted(len(self.warnings), 'warning')}" if self.warnings else ""
        return f"Explanation({self.column}{where}, {len(self)} scores, output={self.output:.6g}{doubts})"

    def boxes(self) -> IntArray:
        """Compute level-0 boxes (n, 4) as x0, y0, x1, y1; if they are unknown, say why in the error."""
        return self.patches.boxes(f"The explanation of {self.bag!r}" if self.bag else "The explanation")

    def placed(self, *, mpp: float | None = None, patch_size: int | None = None) -> Explanation:
        """Compute level-0 coordinates from `raw_coords` and the slide's mpp or patch edge."""
        return replace(self, patches=self.patches.placed(mpp, patch_size=patch_size))

    def take(self, rows: Any, patches: Patches | None = None) -> Explanation:
        """Select some rows, with the audit of all; `patches` replaces theirs if it is known better."""
        names = ("scores", "spread", "relevance", "stderr", "stable")
        own: dict[str, Any] = {k: v[rows] for k in names if (v := getattr(self, k)) is not None}
        return replace(self, patches=self.patches.take(rows) if patches is None else patches, **own)

    def interval(self, level: float = 0.95) -> tuple[FloatArray, FloatArray]:
        """Compute the lower and upper bound (n,) of each score's mean over all sub-bags or orders.

        The interval is a little wider than by `stderr` alone: the variance of each patch includes a share of
        the mean variance of all, for patches whose scores depend on rare sub-bags.

        >>> e = Explanation(np.array([0.5, 0.0]), np.zeros(2), 0.0, "lrp", Target(1), True,
        ...                 stderr=np.array([0.1, 0.0]), params={"contexts": 24, "keep": 0.5})
        >>> [bound.round(3).tolist() for bound in e.interval()]
        [[0.28, -0.005], [0.72, 0.005]]
        """
        if not isinstance(level, float) or not 0 < level < 1:
            raise bad_parameter("level", "Explanation.interval", "a float in the range (0, 1)", level)
        if self.stderr is None:
            raise InputError(
                "Standard errors are unknown here: every sub-bag that holds a patch holds the same others."
                if self.params.get("contexts") is not None
                else f"The scores of {self.method!r} have no standard errors; pass `contexts=24`."
            )
        if self.params.get("contexts") is not None:  # the least number of sub-bags per score
            keep = self.params.get("keep", 0.5)
            samples = int(self.params["contexts"] * (0.5 if keep is None else keep) + 1e-9)
        elif self.method == "one_added":
            samples = int(self.params["draws"])
        else:
            samples = min(FEWEST_PAIRS, int(self.params.get("permutations", 2 * FEWEST_PAIRS)) // 2)
        half = half_interval(self.stderr, max(2, samples), level=level).astype(np.float32)
        return self.scores - half, self.scores + half

    @property
    def column(self) -> str:
        """The name of this explanation's column in a table: `<method>:<target>`."""
        return f"{self.method}:{self.target}"

    def save(self, path: str | PathLike[str]) -> None:
        """Write this explanation as a Parquet table; see `xmil.storage` for several in one file."""
        if PurePath(path).suffix.lower() in OTHER_FORMATS:
            raise InputError(
                f"{path}: an explanation is saved as Parquet, with its audit; end the name in .parquet, or "
                "write only its table with e.to_pandas().to_csv(...)."
            )
        service("write_explanations")([self], path)

    @classmethod
    def load(cls, path: str | PathLike[str], *, method: str | None = None, target: Any = None) -> Explanation:
        """Read one explanation; name the method and target if the file has several."""
        stored: Explanation = service("read_explanation")(path, method=method, target=target)
        return stored

    def to_pandas(self) -> pd.DataFrame:
        """Make a table with one row per patch: level-0 corner if known, score, standard error and so on.

        >>> e = Explanation(np.array([0.5, -1.0]), np.zeros(2), 0.0, "lrp", Target(1), True)
        >>> e.to_pandas()["score"].tolist()
        [0.5, -1.0]
        """
        import pandas as pd

        corners = {} if self.coords is None else {"x0": self.coords[:, 0], "y0": self.coords[:, 1]}
        names = ("stderr", "stable", "spread")
        extra = {key: values for key in names if (values := getattr(self, key)) is not None}
        index = pd.RangeIndex(len(self), name="patch")
        return pd.DataFrame({**corners, "score": self.scores, **extra}, index=index)

    def top(self, k: int = 20) -> pd.DataFrame:
        """List the k patches with the highest scores, highest first; fewer if the bag is smaller.

        >>> e = Explanation(np.array([0.5, -1.0, 2.0]), np.zeros(2), 0.0, "lrp", Target(1), True)
        >>> e.top(2).index.tolist()
        [2, 0]
        """
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise bad_parameter("k", "Explanation.top", "an int in the range [1, inf)", k)
        return self.to_pandas().sort_values("score", ascending=False, kind="stable").head(int(k))

    def to_anndata(self) -> Any:
        """Convert to AnnData, for scanpy and LazySlide: scores in X, places in obsm["spatial"]."""
        return service("to_anndata")([self])

    def plot(self, slide: Any = None, **look: Any) -> Any:
        """Draw the scores: a heatmap if the patches have places, else by rank; see `xmil.heatmap`."""
        return service("plot")(self, slide, **look)

    def _repr_html_(self) -> str:
        return str(service("explanation_html")(self))


def half_interval(stderr: npt.ArrayLike, samples: int, *, level: float = 0.95) -> npt.NDArray[np.float64]:
    """Compute half the width of the interval of each of many means, from their standard errors (n,).

    Few samples of a skewed quantity often miss its rare values and underestimate its variance. So the
    variance of each includes a small share of the mean variance of all; the quantile is Student's.

    >>> half_interval([0.1, 0.0], 12).round(3).tolist()
    [0.22, 0.005]
    """
    from scipy.stats import t as student  # not at the top: reading explanations needs no scipy

    squares = np.square(np.asarray(stderr, dtype=np.float64))
    joined = ((samples - 1) * squares + JOINED * squares.mean()) / (samples - 1 + JOINED)
    half: npt.NDArray[np.float64] = student.ppf(0.5 + level / 2, samples - 1) * np.sqrt(joined)
    return half


@dataclass(frozen=True)
class MethodCard:
    """The titles of a method: one for pictures, and a short one for tables."""

    title: str
    short: str


# In the order of tables; known without importing torch.
CARDS = {
    "random": MethodCard("Random", "Random"),
    "attention": MethodCard("Attention", "Attention"),
    "single": MethodCard("Single instance", "Single"),
    "one_removed": MethodCard("One removed", "One removed"),
    "one_added": MethodCard("One added", "One added"),
    "combined": MethodCard("Combined", "Combined"),
    "milli": MethodCard("MILLI", "MILLI"),
    "shapley": MethodCard("Shapley value", "Shapley"),
    "logits": MethodCard("Instance logits", "Logits"),
    "gxi": MethodCard("Gradient x input", "G x I"),
    "grad2": MethodCard("Squared gradient", "Grad^2"),
    "ig": MethodCard("Integrated gradients", "IG"),
    "lrp": MethodCard("LRP", "LRP"),
}


def measured_against(method: str, params: Mapping[str, Any]) -> str:
    """Describe what scores are measured against; empty if nothing is recorded.

    >>> measured_against("lrp", {"baseline": "mean of 90 patches", "background": "checkpoint 3fa2"})
    'compared with the mean of 90 patches of the checkpoint'
    >>> measured_against("lrp", {"baseline": None}), measured_against("one_added", {"company_from": "bag"})
    ('without a background', 'beside patches of the bag')
    """
    sources = {"checkpoint": "the checkpoint", "user": "the background that was named", "bag": "the bag"}
    if method == "one_added":
        source = sources.get(str(params.get("company_from")))
        return f"beside patches of {source}" if source else ""
    if "baseline" not in params:
        return ""
    if params["baseline"] is None:
        return "without a background" if method == "lrp" else ""
    name, source = str(params["baseline"]), sources.get(str(params.get("background", "")).partition(" ")[0])
    return f"compared with the {name}" + (f" of {source}" if source else "")


def measured_columns(columns: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe it for the columns of a file, one line for each method that records it."""
    words = {c["method"]: measured_against(c["method"], c.get("params") or {}) for c in columns}
    return [f"{method} {text}" for method, text in words.items() if text]


def card_of(method: str) -> MethodCard:
    """Find the card of a method; the titles of an unknown one are its name.

    >>> card_of("ig").title, card_of("my_method").short
    ('Integrated gradients', 'my_method')
    """
    return CARDS.get(method) or MethodCard(method, method)
