"""Options declared with `decides=True`: a run goes on only with the same values."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.runs.cohorts import make_cohort
from xmil.core.errors import InputError
from xmil.core.request import Request, option, options
from xmil.evaluate import FaithfulnessSettings
from xmil.runs import evaluate, predict, requests, tile
from xmil.runs.ensemble import open_models
from xmil.runs.explain import Questions, explain_slides
from xmil.runs.requests import EvaluateRequest, ExplainRequest, PredictRequest, RunRequest, TileRequest
from xmil.slides.tiling import TileSettings

OTHER: dict[str, Any] = {  # than the default; of numbers one more
    "by": "case",
    "class_names": ("no", "yes"),
    "drop": ("fold",),
    "format": "trident",
    "keep_edge": True,
    "magnification": 20.0,
    "min_tissue": 0.5,
    "mpp": 0.75,
    "patch_size": 512,
}
OF_0_2 = {*OTHER, "seed", "size", "overlap", "min_std"}  # options that decided results in version 0.2
VERBS: tuple[type[RunRequest], ...] = (ExplainRequest, EvaluateRequest, PredictRequest, TileRequest)


def deciding(request: type[Request]) -> list[str]:
    """The options of a request that decide results."""
    return [name for name, about in options(request).items() if about.decides]


def settings_of(request: Any) -> dict[str, Any]:
    """The settings of a request, as the verb names them."""
    if isinstance(request, TileRequest):
        values = {f.name: getattr(request, f.name) for f in fields(TileSettings)}
        return tile.settings_of(TileSettings(**values))
    models, _ = open_models(request)
    if isinstance(request, EvaluateRequest):
        chosen = FaithfulnessSettings(("lrp",), seed=request.seed)
        return {**evaluate.describe_inputs(request, models, None), **chosen.as_dict()}
    if isinstance(request, ExplainRequest):
        return Questions(request, models.settings(), models.digests).settings
    return predict.settings_of(request, models)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in VERBS for name in deciding(kind)])
def test_every_option_that_decides_makes_another_run(
    kind: type[RunRequest], name: str, tmp_path: Path
) -> None:
    cohort = make_cohort(tmp_path, 1)
    features = {"model": cohort / "m0.safetensors", "features": cohort / "features"}
    request = kind.build(out=cohort / "run", **({"slides": cohort} if kind is TileRequest else features))
    other = request.replace(**{name: OTHER.get(name) or getattr(request, name) + 1})
    settings = other.with_options(settings_of(other))
    assert settings != request.with_options(settings_of(request))
    more = settings.keys() - settings_of(other).keys()
    assert more <= {name} - OF_0_2  # once: folders of earlier versions have no more


def test_no_verb_with_such_options_is_left_out() -> None:
    every = [kind for kind in vars(requests).values() if isinstance(kind, type) and issubclass(kind, Request)]
    final = [kind for kind in every if not any(issubclass(one, kind) for one in every if one is not kind)]
    assert {kind for kind in final if deciding(kind)} == set(VERBS)


class NewRequest(ExplainRequest):
    """A request with an option that no run knows of."""

    shrink: float = option("Shrink the scores.", 1.0, decides=True)
    colour: str = option("Changes nothing.", "red")


def test_a_new_option_is_compared(tmp_path: Path) -> None:
    cohort = make_cohort(tmp_path, 2)
    inputs = {"model": cohort / "m0.safetensors", "features": cohort / "features"}
    plain, shrunk = {**inputs, "out": cohort / "plain"}, {**inputs, "out": cohort / "shrunk"}
    explain_slides(**plain)
    explain_slides.run(NewRequest.build(**plain, colour="blue"))  # the default is what was before
    with pytest.raises(InputError, match=r"shrink null, not 0\.5"):
        explain_slides.run(NewRequest.build(**plain, shrink=0.5))
    for _ in range(2):
        explain_slides.run(NewRequest.build(**shrunk, shrink=0.5))
    with pytest.raises(InputError, match=r"shrink 0\.5, not null"):
        explain_slides(**shrunk)
