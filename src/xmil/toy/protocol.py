"""The settings of the evidence benchmark: models and training as in the paper, and a quick variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xmil.core.errors import bad_parameter
from xmil.core.registry import Registry
from xmil.toy.digit_tasks import BAG_SIZE
from xmil.toy.race import Training


@dataclass(frozen=True)
class Setup:
    """A model of the benchmark: its parameters and how it is trained."""

    name: str
    title: str
    params: Mapping[str, Any]
    training: Training


SETUPS: Registry[Setup] = Registry("model of the benchmark", group="xmil.toy_models")
for _setup in (
    Setup(
        "attnmil",
        "AttnMIL",
        {"dim": 20, "attention_dim": 20, "n_out_layers": 1},
        Training(optimizer="sgd", epochs=1000, patience=100),
    ),
    Setup("transmil", "TransMIL", {"dim": 20}, Training(optimizer="sgd", epochs=200, patience=40)),
    Setup("addmil", "AddMIL", {"hidden": 20}, Training(optimizer="adam", epochs=1000, patience=100)),
    Setup(
        "mambamil",
        "MambaMIL",
        {"dim": 20, "attention_dim": 20},
        Training(optimizer="adam", lr=3e-3, epochs=200, patience=40),
    ),
):
    SETUPS.add(_setup.name, _setup)

PAPER_TASKS = ("four_bags", "pos_neg_count", "adjacent_pairs")
PAPER_MODELS = ("attnmil", "transmil", "addmil")
PAPER_METHODS = ("random", "attention", "single", "logits", "gxi", "ig", "lrp")
TABLE1_METHODS = (*PAPER_METHODS, "attention:unfolded", "lrp:paper")  # with what the paper's rows hold


@dataclass(frozen=True)
class Protocol:
    """How bags are drawn and how often: what two runs must share to be compared.

    `sizes` are the numbers of training, validation and test bags. `training` holds what replaces the
    settings of every model. Repetitions draw their own bags unless `shared_bags`; pools of images are
    disjoint unless `pooled`.
    """

    repetitions: int = 30
    seed: int = 0
    sizes: tuple[int, int, int] = (2000, 500, 1000)
    bag_size: int = BAG_SIZE
    pooled: bool = False
    shared_bags: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise bad_parameter("repetitions", "toy", "an int in the range [1, inf)", self.repetitions)
        if min(self.sizes) < 2 or self.bag_size < 1:
            raise bad_parameter("sizes", "toy", "at least two bags each, of one instance or more", self.sizes)

    def training_of(self, setup: Setup) -> Training:
        """The training of a model under this protocol."""
        return replace(setup.training, **self.training)

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON holds them."""
        return {**asdict(self), "sizes": list(self.sizes), "training": dict(self.training)}


QUICK = Protocol(
    repetitions=2,
    sizes=(600, 150, 150),
    training={"optimizer": "adam", "lr": 3e-3, "epochs": 60, "patience": 20},
)


_COLUMNS = [
    (task, model)
    for task in ("four_bags", "pos_neg", "adjacent_pairs")
    for model in ("attnmil", "transmil", "addmil")
]
_ROWS: dict[str, list[float | None]] = {
    "auroc": [1.00, 1.00, 0.98, 0.97, 0.98, 0.89, 0.88, 0.92, 0.77],
    "random": [0.31, 0.31, None, 0.42, 0.42, None, 0.54, 0.54, None],
    "attention": [0.53, 0.52, 0.54, 0.45, 0.46, 0.48, 0.61, 0.60, 0.63],
    "single": [0.87, 0.85, None, 0.89, 0.91, None, 0.73, 0.77, None],
    "logits": [None, None, 0.79, None, None, 0.68, None, None, 0.71],
    "gxi": [0.72, 0.40, None, 0.72, 0.44, None, 0.63, 0.57, None],
    "ig": [0.88, 0.80, None, 0.93, 0.82, None, 0.75, 0.72, None],
    "lrp": [0.91, 0.90, None, 0.91, 0.92, None, 0.77, 0.81, None],
}


def paper_figure(task: str, model: str, method: str) -> float | None:
    """The published mean, or None; both versions of Pos-Neg go with the paper's one.

    >>> paper_figure("pos_neg_count", "transmil", "lrp")
    0.92
    """
    column = ("pos_neg" if task == "pos_neg_count" else task, model)
    if column not in _COLUMNS or method not in _ROWS:
        return None
    return _ROWS[method][_COLUMNS.index(column)]
