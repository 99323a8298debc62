"""torchmil's models from their own package: all of them, with a closed account."""

from __future__ import annotations

import numpy as np
import pytest

import xmil
from tests.zoo.torchmil_models import TORCHMIL, bag, build

pytest.importorskip("torchmil", reason="torchmil is not installed; pip install 'xmil[dev]'")


@pytest.mark.filterwarnings("ignore")  # their own
@pytest.mark.parametrize("row", TORCHMIL)
def test_every_model_runs_and_closes(row: str) -> None:
    net, forward = build(row)
    e = xmil.explain(net, bag(), target=1, preset="exact", forward=forward)
    assert e.audit is not None
    assert abs(e.audit.other) <= 1e-4 * abs(e.output)
    assert np.abs(e.scores).max() > 0
