"""The prediction without a region is the model's prediction of the patches that are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xmil
from tests.viewer.asking import Answer, ask
from tests.viewer.make_run import DIM, Made, make_bag, make_run
from xmil.core.bag import Bag
from xmil.core.errors import InputError
from xmil.models import load_model, save_model
from xmil.storage import write_explanations
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.whatif import as_mask


def question(app: Any, key: int, **body: Any) -> Answer:
    headers = {"content-type": "application/json"}
    content = json.dumps(body).encode()
    return ask(app, f"/api/slides/{key}/whatif", method="POST", headers=headers, body=content)


def one_slide(folder: Path, net: Any, bag: Bag, method: str = "gxi") -> Any:
    """A run of one slide, and the application over it."""
    (folder / "run" / "slides").mkdir(parents=True)
    (folder / "features").mkdir()
    xmil.write_bag(bag, folder / "features" / "s.h5")
    save_model(net, folder / "m.safetensors")
    write_explanations([xmil.explain(net, bag, method=method)], folder / "run" / "slides" / "s.parquet")
    (folder / "run" / "run.json").write_text(json.dumps({"task": net.spec.task}))
    shown = Collection([folder / "run"], features=[folder / "features"])
    return create_app(shown, models=[folder / "m.safetensors"])


@pytest.mark.parametrize("name", xmil.list_models())
def test_every_model_answers_as_if_run_on_the_rest(tmp_path: Path, name: str) -> None:
    net = xmil.create_model(name, in_dim=DIM, n_classes=3, seed=0)
    bag = make_bag("s", columns=7, rows=5, edge=10, seed=1)
    app = one_slide(tmp_path, net, bag)
    out = [0, 3, *range(10, 20), 34]
    left = np.setdiff1d(np.arange(35), out)
    x = torch.from_numpy(bag.features)
    with torch.no_grad():
        whole, rest, part = (net(x[rows].unsqueeze(0))[0] for rows in (np.arange(35), left, np.array(out)))
    removed = question(app, 0, run=0, remove=[0, 3, [10, 20], 34]).json
    assert removed["logits_before"] == pytest.approx(whole.tolist(), abs=1e-4)
    assert removed["logits_after"] == pytest.approx(rest.tolist(), abs=1e-4)
    assert removed["before"] == pytest.approx(torch.softmax(whole, 0).tolist(), abs=1e-4)
    assert removed["after"] == pytest.approx(torch.softmax(rest, 0).tolist(), abs=1e-4)
    assert (removed["n_left"], removed["labels"], removed["note"]) == (len(left), ["0", "1", "2"], None)
    kept = question(app, 0, run=0, keep=out).json
    assert kept["logits_after"] == pytest.approx(part.tolist(), abs=1e-4)
    assert kept["n_left"] == len(out)
    nothing = question(app, 0, run=0, remove=[]).json
    assert nothing["after"] == nothing["before"]


def test_coordinates_stay_with_the_patches_that_are_left(tmp_path: Path) -> None:
    net = xmil.create_model(
        "mambamil", in_dim=DIM, n_classes=3, seed=0, dim=8, scan="cross", positions="sinusoidal"
    )
    bag = make_bag("s", columns=7, rows=5, edge=10, seed=1)
    app = one_slide(tmp_path, net, bag)
    left = np.setdiff1d(np.arange(35), [0, 3, *range(10, 20)])
    with torch.no_grad():
        part = bag.select(left)
        rest = net(torch.from_numpy(part.features)[None], coords=torch.from_numpy(part.coords)[None])[0]
    removed = question(app, 0, run=0, remove=[0, 3, [10, 20]]).json
    assert removed["logits_after"] == pytest.approx(rest.tolist(), abs=1e-4)


def test_removing_the_evidence_turns_the_prediction(app: Any) -> None:
    """Slide 1 is called tumour for a block in its upper left corner."""
    block = [row * 12 + column for row in range(4) for column in range(4)]
    found = question(app, 1, run=0, remove=block).json
    assert found["labels"] == ["benign", "tumour"]
    assert found["before"][1] > 0.9
    assert found["after"][1] < 0.5
    assert question(app, 1, run=0, keep=block).json["after"][1] > 0.9


def test_each_run_asks_its_own_model(app: Any, made: Made) -> None:
    answers = [question(app, 0, run=run, remove=[0]).json for run in (0, 1)]
    for answer, path in zip(answers, made.models, strict=True):
        x = torch.from_numpy(xmil.read_bag(made.features / "slide-0.h5").features).unsqueeze(0)
        with torch.no_grad():
            assert answer["logits_after"] == pytest.approx(load_model(path)(x[:, 1:])[0].tolist(), abs=1e-4)
        assert answer["note"] is None


def test_another_model_is_noted(made: Made) -> None:
    shown = Collection(made.runs[:1], features=[made.features])
    app = create_app(shown, models=[made.models[1]])
    assert "not those of the run" in question(app, 0, run=0, remove=[0]).json["note"]


@pytest.mark.parametrize(
    ("task", "n", "says"),
    [
        ("multilabel", 3, lambda z: torch.sigmoid(z)),
        ("classification", 1, lambda z: torch.cat([1 - torch.sigmoid(z), torch.sigmoid(z)])),
        ("regression", 1, lambda z: z),
        ("cox", 1, lambda z: z),
        ("survival", 4, lambda z: -torch.cumprod(1 - torch.sigmoid(z), 0).sum().reshape(1)),
    ],
)
def test_other_outputs(tmp_path: Path, task: str, n: int, says: Any) -> None:
    net = xmil.create_model("attnmil", in_dim=DIM, n_classes=n, task=task, seed=0)
    bag = make_bag("s", columns=4, rows=3, edge=10, seed=1)
    found = question(one_slide(tmp_path, net, bag), 0, remove=[1]).json
    with torch.no_grad():
        z = net(torch.from_numpy(np.delete(bag.features, 1, axis=0)).unsqueeze(0))[0]
    assert found["after"] == pytest.approx(says(z).tolist(), abs=1e-5)
    assert len(found["labels"]) == len(found["after"])


BAD: list[Any] = [
    {},
    [],
    None,
    "remove",
    {"run": 0},
    {"run": 0, "remove": [0], "keep": [1]},
    {"run": "0", "remove": [0]},
    {"run": True, "remove": [0]},
    {"run": 0, "remove": "0"},
    {"run": 0, "remove": {"0": 1}},
    {"run": 0, "remove": [-1]},
    {"run": 0, "remove": [96]},
    {"run": 0, "remove": [1.5]},
    {"run": 0, "remove": [True]},
    {"run": 0, "remove": [None]},
    {"run": 0, "remove": [[0]]},
    {"run": 0, "remove": [[0, 97]]},
    {"run": 0, "remove": [[5, 2]]},
    {"run": 0, "remove": [[0, 96]]},
    {"run": 0, "keep": []},
]


@pytest.mark.parametrize("body", BAD)
def test_bad_questions_get_one_sentence(app: Any, body: Any) -> None:
    headers = {"content-type": "application/json"}
    content = json.dumps(body).encode()
    answer = ask(app, "/api/slides/0/whatif", method="POST", headers=headers, body=content)
    assert answer.status == 400
    assert answer.json["error"].endswith(".")


def test_refusals(app: Any, made: Made) -> None:
    assert question(app, 9, run=0, remove=[0]).status == 404
    assert question(app, 0, run=9, remove=[0]).status == 404
    assert ask(app, "/api/slides/0/whatif", method="POST", body=b"{}").status == 415
    assert ask(app, "/api/slides/0/whatif").status == 404
    looking = create_app(Collection(made.runs, features=[made.features]))
    assert "model=" in question(looking, 0, run=0, remove=[0]).json["error"]
    with pytest.raises(InputError, match="features"):
        create_app(Collection(made.runs), models=made.models)
    both = Collection(made.runs, features=[made.features])
    strangers = [made.models[0].with_name(f"{i}.safetensors") for i in range(3)]
    for seed, path in enumerate(strangers):
        save_model(xmil.create_model("meanpool", in_dim=DIM, n_classes=2, seed=seed), path)
    with pytest.raises(InputError, match="once for each"):
        create_app(both, models=strangers)
    half = create_app(both, models=made.models[1:])
    assert question(half, 0, run=1, remove=[0]).json["note"] is None
    assert "run-attnmil" in question(half, 0, run=0, remove=[0]).json["error"]


def test_an_ensemble_answers_by_the_mean_of_its_models(made: Made, tmp_path: Path) -> None:
    from xmil.cli._app import run

    command = ["explain", "--features", str(made.features), "--out", str(tmp_path / "run"), "--target", "all"]
    assert run([*command, *(word for path in made.models for word in ("--model", str(path)))]) == 0
    app = create_app(Collection([tmp_path / "run"], features=[made.features]), models=made.models)
    found = question(app, 1, run=0, remove=[[0, 9]]).json
    x = torch.from_numpy(xmil.read_bag(made.features / "slide-1.h5").features[9:]).unsqueeze(0)
    with torch.no_grad():
        expected = torch.stack([load_model(path)(x)[0] for path in made.models]).mean(dim=0)
    assert found["logits_after"] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found["note"] is None
    columns = ask(app, "/api/slides/1/slide.json").json["sets"][0]["columns"]
    assert [(c["name"], c["signed"]) for c in columns[:2]] == [
        ("lrp:benign", True),
        ("lrp:benign~spread", False),
    ]
    body = ask(app, "/api/slides/1/evidence-0.bin").body
    stored = xmil.Explanation.load(tmp_path / "run" / "slides" / "slide-1.parquet", method="lrp", target=0)
    scores = np.frombuffer(body[8 * 96 :], "<f4").reshape(len(columns), 96)
    np.testing.assert_array_equal(scores[:2], np.stack([stored.scores, stored.spread]))


def test_features_of_another_slide_are_refused(tmp_path: Path) -> None:
    made = make_run(tmp_path, slides=1, columns=5, rows=4, edge=8, models=("attnmil",), certificates=False)
    app = create_app(Collection(made.runs, features=[made.features]), models=made.models)
    xmil.write_bag(make_bag("slide-0", columns=5, rows=3, edge=8, seed=0), made.features / "slide-0.h5")
    assert "15 patches, but its explanation has 20" in question(app, 0, run=0, remove=[0]).json["error"]
    wide = Bag(np.zeros((20, DIM + 1)), slide_id="slide-0")
    xmil.write_bag(wide, made.features / "slide-0.h5")
    assert f"width {DIM}" in question(app, 0, run=0, remove=[0]).json["error"]
    (made.features / "slide-0.h5").write_bytes(b"no")
    answer = question(app, 0, run=0, remove=[0])
    assert answer.status == 422
    assert str(tmp_path) not in answer.json["error"]
    (made.features / "slide-0.h5").unlink()
    assert question(app, 0, run=0, remove=[0]).status == 404


def test_masks() -> None:
    assert as_mask([], 3).sum() == 0
    assert as_mask([[0, 3]], 3).all()
    assert as_mask([[1, 1], 2, 2], 3).tolist() == [False, False, True]
    with pytest.raises(InputError):
        as_mask([[3, 3]], 3)


def test_instances_are_embedded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second question about a slide starts from the embedded instances."""
    from xmil.models import AttnMIL

    sizes: list[int] = []
    embed = AttnMIL.embed
    monkeypatch.setattr(AttnMIL, "embed", lambda self, x: sizes.append(x.shape[1]) or embed(self, x))
    net = xmil.create_model("attnmil", in_dim=64, n_classes=2, seed=0)
    rng = np.random.default_rng(0)
    bag = Bag(rng.normal(size=(2_500, 64)), slide_id="s")
    app = one_slide(tmp_path, net, bag)
    question(app, 0, run=0, remove=[0])
    assert 2_500 in sizes
    sizes.clear()
    answer = question(app, 0, run=0, remove=[[100, 1_200]]).json
    assert 2_500 not in sizes
    assert answer["n_left"] == 2_500 - 1_100


def test_the_patches_that_decide_turn_the_prediction(app: Any, made: Made) -> None:
    found = ask(app, "/api/slides/1/deciding-0.json").json
    assert found["n"] == 96
    assert 0 < len(found["instances"]) < 96
    assert question(app, 1, run=0, remove=found["instances"]).json["changed"]
