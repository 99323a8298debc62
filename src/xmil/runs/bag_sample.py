"""Some of a bag's instances, drawn once or several times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from zlib import crc32

import numpy as np

from xmil.core.bag import Bag
from xmil.core.errors import bad_parameter


@dataclass(frozen=True)
class BagSample:
    """`repetitions` draws of `instances` without replacement, in the order of the bag; 0 takes all of them.

    The draws belong to the slide's name and the seed.
    """

    instances: int = 0
    repetitions: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 0:
            raise bad_parameter("instances", "predict", "an int in the range [0, inf)", self.instances)
        if self.repetitions < 1 or (self.repetitions > 1 and not self.instances):
            must = "1, or more with `instances` to draw"
            raise bad_parameter("repetitions", "predict", must, self.repetitions)

    def as_dict(self) -> dict[str, int]:
        """The settings, where anything is drawn."""
        return {k: v for k, v in asdict(self).items() if k != "seed"} if self.instances else {}

    def of(self, bag: Bag) -> list[Bag]:
        """The draws of a bag; small bags are taken whole, once."""
        if not 0 < self.instances < len(bag):
            return [bag]
        rng = np.random.default_rng([self.seed, crc32((bag.slide_id or "").encode())])
        drawn = (rng.choice(len(bag), self.instances, replace=False) for _ in range(self.repetitions))
        return [bag.select(np.sort(rows)) for rows in drawn]


WHOLE = BagSample()  # every instance, once
