"""The referee: what it measures, that it goes on where it stopped, and that changes are noticed."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.bench.runs import NET, OWN, referee, tiny_plan
from xmil.bench import (
    NOT_LEARNED,
    TASKS,
    DigitProblem,
    Trained,
    Unit,
    code_digest,
    column_of,
    load_instances,
    method_entry,
    model_entry,
)
from xmil.core.errors import InputError, UnknownNameError
from xmil.evaluate import auprc2
from xmil.methods import explain

EXTRA = {
    "captum",
    "h5py",
    "matplotlib",
    "pandas",
    "PIL",
    "pyarrow",
    "rich",
    "scipy",
    "sklearn",
    "typer",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("bench")
    out = place / "run"
    (place / "mine.py").write_text(OWN)
    (place / "net.py").write_text(NET)
    methods = ("oracle", "random", "constant", "lrp_flipped", "lrp", "gxi", f"{place / 'mine.py'}:score")
    assert referee(out, methods=methods, models=("attnmil", f"{place / 'net.py'}:build"))
    return out


def noted(texts):
    return lambda text, *_: texts.append(text)


def unit_of(folder, name):
    return Unit.read(folder / "units" / f"{name}.npz")


def test_an_own_method_equals_ours_on_every_bag(folder):
    for name in ("evidence--standard--attnmil", "evidence--standard--net-build"):
        unit = unit_of(folder, name)
        for r in (0, 1):
            np.testing.assert_allclose(unit.values[r, "mine:score"], unit.values[r, "gxi"], atol=1e-3)


def test_values_are_the_measures_of_explanations_one_by_one(folder):
    plan = tiny_plan()
    problem = DigitProblem.of(TASKS["standard"], load_instances("digits"), plan.protocol)
    trained = Trained(problem, model_entry("attnmil"), folder, 0, {})
    model, (block,) = trained.model(1), problem.blocks("test", 1)
    values = unit_of(folder, "evidence--standard--attnmil").values[1, "lrp"][:, 0]
    for i in range(5):
        slow = [
            auprc2(block.evidence[i, c], explain(model, block.x[i], method="lrp", target=c).scores)
            for c in range(2)
        ]
        assert values[i] == pytest.approx(np.mean(slow), abs=1e-5, nan_ok=True)


def test_the_same_seed_gives_the_same_numbers(folder, tmp_path):
    assert referee(tmp_path, methods=("lrp", "random"))
    first, second = (unit_of(f, "evidence--standard--attnmil") for f in (folder, tmp_path))
    assert {r: f["checksum"] for r, f in first.facts.items()} == {
        r: f["checksum"] for r, f in second.facts.items()
    }
    for key, values in second.values.items():
        np.testing.assert_array_equal(values, first.values[key])


def test_a_second_call_measures_only_what_is_missing(folder, tmp_path):
    plan = tiny_plan()
    short = replace(plan, protocol=replace(plan.protocol, repetitions=1))
    texts = []
    assert referee(tmp_path, methods=("lrp",), plan=short, say=noted(texts))
    before = unit_of(tmp_path, "evidence--standard--attnmil")
    texts.clear()
    assert referee(tmp_path, methods=("lrp",), plan=short, say=noted(texts))
    assert texts == []
    assert referee(tmp_path, methods=("lrp", "random"), plan=plan, say=noted(texts))
    after = unit_of(tmp_path, "evidence--standard--attnmil")
    assert set(after.rows) == {(r, m) for r in (0, 1) for m in ("lrp", "random")}
    assert after.rows[0, "lrp"] == before.rows[0, "lrp"]  # its seconds too: it was not measured again


def test_a_changed_method_is_measured_again(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    referee(tmp_path / "run", methods=(f"{path}:score",))
    before = unit_of(tmp_path / "run", "evidence--standard--attnmil").values[0, "mine:score"]
    path.write_text(OWN.replace("(x.grad * x)[0]", "-(x.grad * x)[0]"))
    referee(tmp_path / "run", methods=(f"{path}:score",))
    after = unit_of(tmp_path / "run", "evidence--standard--attnmil").values[0, "mine:score"]
    np.testing.assert_allclose(np.nanmean(after[:, 4]), -np.nanmean(before[:, 4]), atol=1e-6)


def test_other_code_is_another_entry(tmp_path):
    (tmp_path / "lrp").mkdir()
    digests = []
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "lrp" / "rules.py").write_text(text)
        code_digest.cache_clear()
        digests.append(code_digest(tmp_path))
    assert digests[0] != digests[1]
    assert method_entry("lrp").digest == f"lrp {code_digest()}"


def test_changed_bags_are_noticed(tmp_path):
    referee(tmp_path, methods=("constant",))
    path = tmp_path / "units" / "evidence--standard--attnmil.npz"
    unit = Unit.read(path)
    unit.facts[0]["checksum"] = "0" * 64  # as if the bags had been others
    unit.save()
    with pytest.raises(InputError, match="test bags of repetition 0 have changed"):
        referee(tmp_path, methods=("constant", "random"))


def test_one_changed_feature_changes_the_checksum():
    problem = DigitProblem.of(TASKS["standard"], load_instances("digits"), tiny_plan().protocol)
    (block,) = problem.blocks("test", 0)
    sums = block.checksums()
    block.x[3, 0, 0] += 1e-3
    changed = [i for i, (a, b) in enumerate(zip(sums, block.checksums(), strict=True)) if a != b]
    assert changed == [3]


def test_other_settings_are_refused(tmp_path):
    referee(tmp_path, methods=("constant",))
    plan = tiny_plan()
    other = replace(plan, protocol=replace(plan.protocol, sizes=(200, 60, 50)))
    with pytest.raises(InputError, match=r"other settings \(problem.protocol.sizes\)"):
        referee(tmp_path, methods=("constant",), plan=other)


def test_no_time_left_starts_nothing(tmp_path):
    assert not referee(tmp_path, methods=("constant",), until=time.monotonic() - 1)
    assert not list((tmp_path / "units").glob("*.npz"))


def test_a_model_that_did_not_learn_says_so(tmp_path):
    plan = tiny_plan()
    lame = replace(plan, protocol=replace(plan.protocol, training={"lr": 1e-9, "epochs": 1, "warmup": 0}))
    referee(tmp_path, methods=("constant", "random"), plan=lame)
    column = column_of(unit_of(tmp_path, "evidence--standard--attnmil"))
    assert column.draws is None
    about = column.as_dict()
    assert (about["status"], about["verdicts"], about["counted"]) == (NOT_LEARNED, [], 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [0.0] * (len(bag) - 1)", "Scores must be 30 finite numbers"),
        ("return [float('nan')] * len(bag)", "Scores must be 30 finite numbers"),
        ("return 1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_method_that_gives_nonsense_is_named(tmp_path, body, message):
    (tmp_path / "bad.py").write_text(f"def score(model, bag, target):\n    {body}\n")
    with pytest.raises(InputError, match="bad:score") as caught:
        referee(tmp_path / "run", methods=(f"{tmp_path / 'bad.py'}:score",))
    assert message in str(caught.value)


def test_what_a_method_does_to_bag_and_model_stays_with_it(folder, tmp_path):
    vandal = """
def score(model, bag, target):
    bag.features[:] = 0
    for p in model.parameters():
        p.data.zero_()
    return [0.0] * len(bag)
"""
    (tmp_path / "vandal.py").write_text(vandal)
    out = tmp_path / "run"
    referee(out, methods=(f"{tmp_path / 'vandal.py'}:score", "lrp"))
    first, second = (unit_of(f, "evidence--standard--attnmil").values[1, "lrp"] for f in (folder, out))
    np.testing.assert_array_equal(first, second)


def test_a_builder_that_gives_no_module_is_named(tmp_path):
    (tmp_path / "bad.py").write_text("def build(in_dim, n_classes):\n    return 3\n")
    with pytest.raises(InputError, match=r"bad:build must return a torch.nn.Module. Got int"):
        referee(tmp_path / "run", models=(f"{tmp_path / 'bad.py'}:build",))
    (tmp_path / "worse.py").write_text("TRAINING = {'lrr': 1}\n\ndef build(in_dim, n_classes):\n    pass\n")
    with pytest.raises(UnknownNameError, match="Did you mean 'lr'"):
        referee(tmp_path / "run", models=(f"{tmp_path / 'worse.py'}:build",))


def test_measuring_needs_torch_and_numpy_alone():
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {sorted(EXTRA)}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import xmil.bench, xmil.bench.referee"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_own_models_are_kept_and_used_again(folder):
    texts, net = [], folder.parent / "net.py"
    assert referee(folder, methods=("constant", "grad2"), models=(f"{net}:build",), say=noted(texts))
    assert not [text for text in texts if text.startswith("training")]
