"""Parameters and options of the version before work and warn where they are used, or say what to use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xmil.cli import main
from xmil.core.errors import InputError
from xmil.heatmaps import Look
from xmil.runs.requests import DrawRequest, EmbedRequest, EvaluateRequest, ExplainRequest, TileRequest
from xmil.runs.workers.pool import Workers

COHORT = {"model": "m", "features": "f", "out": "o"}
OLD: list[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (ExplainRequest, COHORT, {"methods": "lrp,gxi"}, {"methods": ("lrp", "gxi")}),
    (ExplainRequest, COHORT, {"time": "t", "event": "e"}, {"label": ("t", "e")}),
    (ExplainRequest, COHORT, {"gpus": 0.25}, {"device": "cuda/4"}),
    (ExplainRequest, COHORT, {"workers": Workers("ray", address="a:1")}, {"engine": "ray:a:1"}),
    (EvaluateRequest, COHORT, {"top": 0.1}, {}),
    (TileRequest, {"slides": "s", "out": "o"}, {"fold": False}, {"drop": ("pen", "fold")}),
    (DrawRequest, {"run": "r"}, {"look": Look(alpha=0.3)}, {"alpha": 0.3}),
    (DrawRequest, {"run": "r"}, {"formats": "png"}, {"to": ("png", "geojson")}),
    (EmbedRequest, {"tiles": "t", "slides": "s", "encoder": "e"}, {"decode": "cpu"}, {"readers": -1}),
]


@pytest.mark.parametrize(("request_type", "needed", "old", "new"), OLD)
def test_an_old_parameter_works_and_warns_at_the_callers_line(
    request_type: Any, needed: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> None:
    with pytest.warns(DeprecationWarning, match="next version|pass a list") as caught:
        built = request_type.build(**needed, **old)
    assert {warning.filename for warning in caught} == {__file__}
    assert {name: getattr(built, name) for name in new} == new


def test_a_mean_without_its_deviation_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="mean"), pytest.raises(InputError, match="normalise="):
        EmbedRequest.build(tiles="t", slides="s", encoder="e", mean=(0.5, 0.5, 0.5))


def test_numbers_of_numpy_are_numbers() -> None:
    built = ExplainRequest.build(**COHORT, mpp=np.float32(0.5), target=[np.int64(1)])
    assert (built.mpp, built.target) == (0.5, ("1",))
    with pytest.raises(InputError, match="mpp"):
        ExplainRequest.build(**COHORT, mpp=True)


@pytest.mark.parametrize("flag", ["--fold", "--no-blur", "--coverslip"])
def test_a_removed_option_says_what_to_use(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tile", "slides", "--out", "tiles", flag])
    assert ended.value.code == 2
    assert "--drop" in capsys.readouterr().err
