"""A slide explained again without some patches: the map is the method's own map of the bag that is left."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import numpy as np
import pytest

import xmil
from tests.viewer.asking import Answer, ask, run_apart
from tests.viewer.make_run import DIM, Made, make_bag
from tests.viewer.test_whatif import one_slide
from xmil.core.background import background_of
from xmil.core.errors import XmilError
from xmil.methods import seeds
from xmil.models import load_model
from xmil.storage import read_explanations, write_explanations
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.features import CaseBags
from xmil.viewer.whatif import AbandonedError, WhatIf

LEFT = [*range(5, 40), *range(50, 96)]
KEEP = [[5, 40], [50, 96]]
FEW = {"permutations": 7, "precision": None, "exact": False}
HEADERS = {"content-type": "application/json"}


def explained(app: Any, key: int, **body: Any) -> Answer:
    content = json.dumps({"run": 0, "keep": KEEP, "method": "lrp", "targets": ["tumour"], **body}).encode()
    return ask(app, f"/api/slides/{key}/explain", method="POST", headers=HEADERS, body=content)


def with_settings(folder: Path, net: Any, bag: xmil.Bag, settings: dict[str, Any]) -> Any:
    """A run of one slide by Shapley values, whose run.json holds these settings."""
    one_slide(folder, net, bag, "shapley")
    (folder / "run" / "run.json").write_text(json.dumps({"task": net.spec.task, "settings": settings}))
    shown = Collection([folder / "run"], features=[folder / "features"])
    return create_app(shown, models=[folder / "m.safetensors"])


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("method", ["lrp", "attention"])
def test_the_scores_are_those_of_the_bag_that_is_left(app: Any, made: Made, run: int, method: str) -> None:
    answer = explained(app, 1, run=run, method=method, targets=["tumour", "benign"]).json
    bag = xmil.read_bag(made.features / "slide-1.h5")
    left = xmil.Bag(bag.features[LEFT], coords=bag.coords[LEFT], slide_id="slide-1")
    for column, target in zip(answer["columns"], ("tumour", "benign"), strict=True):
        e = xmil.explain(load_model(made.models[run]), left, method=method, target=target)
        np.testing.assert_allclose(column["scores"], e.scores, rtol=1e-4, atol=1e-6)
        assert column["output"] == pytest.approx(e.output, rel=1e-4)
        assert (column["audit"] is None) == (e.audit is None)
    assert answer["n_left"] == len(LEFT)


def test_the_runs_own_settings_seed_and_background_are_used(tmp_path: Path) -> None:
    net = xmil.create_model("attnmil", in_dim=DIM, n_classes=2, dim=8, seed=0)
    bag = make_bag("s", columns=5, rows=4, edge=8, seed=1)
    settings = {"params": {"shapley": FEW, "lrp": {"preset": "paper"}}, "seed": 3}
    app = with_settings(tmp_path, net, bag, settings)
    stored = read_explanations(tmp_path / "run" / "slides" / "s.parquet")[0]
    ask_left = {"method": "shapley", "keep": [[0, 12]], "targets": [str(stored.target)]}
    answer = explained(app, 0, **ask_left).json["columns"][0]["scores"]
    left = xmil.Bag(bag.features[:12], coords=bag.coords[:12], slide_id="s")
    own = xmil.explain(net, left, method="shapley", target=stored.target, **FEW, **seeds("shapley", "s", 3))
    np.testing.assert_allclose(answer, own.scores, rtol=1e-4, atol=1e-6)
    other = make_bag("t", columns=9, rows=9, edge=8, seed=2).features + 1
    background_of([other]).save(tmp_path / "run" / "background.npz")
    write_explanations(
        [xmil.explain(net, bag, method="lrp", target=1)], tmp_path / "run" / "slides" / "s.parquet"
    )
    moved = explained(app, 0, method="lrp", keep=[[0, 12]], targets=["1"]).json["columns"][0]
    net.background = background_of([other])
    e = xmil.explain(net, left, method="lrp", target=1, preset="paper")
    np.testing.assert_allclose(moved["scores"], e.scores, rtol=1e-4, atol=1e-6)
    assert moved["audit"]["baseline"] == pytest.approx(e.audit.baseline)


def test_an_ensemble_explains_by_the_mean_of_its_models(made: Made, tmp_path: Path) -> None:
    from xmil.cli._app import run

    command = ["explain", "--features", str(made.features), "--out", str(tmp_path / "run"), "--target", "all"]
    assert run([*command, *(word for path in made.models for word in ("--model", str(path)))]) == 0
    app = create_app(Collection([tmp_path / "run"], features=[made.features]), models=made.models)
    found = explained(app, 1).json["columns"][0]["scores"]
    left = xmil.read_bag(made.features / "slide-1.h5").features[LEFT]
    each = [xmil.explain(load_model(path), left, target="tumour").scores for path in made.models]
    np.testing.assert_allclose(found, np.mean(each, axis=0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"targets": ["nothing"]}, 422, "tumour"),
        ({"method": "nothing"}, 422, "nothing"),
        ({"keep": []}, 400, "at least one"),
        ({"keep": [[0, 97]]}, 400, "range"),
        ({"keep": None}, 400, "list"),
        ({"targets": []}, 400, "one or two"),
        ({"targets": "tumour"}, 400, "body"),
        ({"run": 9}, 404, "run 9"),
    ],
)
def test_refusals_are_one_sentence(app: Any, body: dict[str, Any], status: int, said: str) -> None:
    answer = explained(app, 0, **body)
    assert answer.status == status
    assert said in answer.json["error"]


def test_an_answer_that_nobody_waits_for_is_given_up(tmp_path: Path) -> None:
    """A million coalitions would take minutes: the client leaves, and the next question is answered."""
    net = xmil.create_model("attnmil", in_dim=DIM, n_classes=2, dim=8, seed=0)
    settings = {"params": {"shapley": {**FEW, "permutations": 10**7}}}
    app = with_settings(tmp_path, net, make_bag("s", columns=5, rows=4, edge=8, seed=1), settings)
    target = read_explanations(tmp_path / "run" / "slides" / "s.parquet")[0].target
    question = {"run": 0, "keep": [[0, 15]], "method": "shapley", "targets": [str(target)]}
    body = json.dumps(question).encode()
    given = [(b"host", b"127.0.0.1:8787"), (b"content-type", b"application/json")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "root_path": ""}
    scope |= {"path": "/api/slides/0/explain", "raw_path": b"/api/slides/0/explain", "query_string": b""}
    scope |= {"headers": given, "server": ("127.0.0.1", 8787), "client": ("127.0.0.1", 5)}
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[dict[str, Any]] = []
    began: list[float] = []

    async def receive() -> dict[str, Any]:
        if messages:
            began.append(anyio.current_time())
            return messages.pop()
        if anyio.current_time() > began[0] + 0.3:
            return {"type": "http.disconnect"}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    run_apart(app, scope, receive, send)
    assert sent[0]["status"] == 499
    whatif = {"run": 0, "remove": [0]}
    again = ask(app, "/api/slides/0/whatif", method="POST", headers=HEADERS, body=json.dumps(whatif).encode())
    assert again.status == 200


def test_one_who_left_before_the_turn_costs_nothing(made: Made) -> None:
    shown = Collection(made.runs, features=[made.features])
    gone = Event()
    gone.set()
    question = {"run": 0, "keep": KEEP, "method": "lrp", "targets": ["tumour"]}
    with pytest.raises(AbandonedError):
        WhatIf(shown, CaseBags(shown), made.models).explain(0, question, gone)


def test_the_layout_of_features_is_taken_as_given(made: Made) -> None:
    assert CaseBags(Collection(made.runs, features=[made.features])).get(0, 0).own.size
    with pytest.raises(XmilError, match="in another layout"):
        CaseBags(Collection(made.runs, features=[made.features], layout="stamp")).get(0, 0)
