"""The paper's configs: each resolves, trains and is evaluated on a stand-in of the published layout."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import xmil
from xmil.cli._app import run
from xmil.training.config import load_config
from xmil.training.train import make_plan

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted(path.name for path in (CONFIGS / "paper").glob("*.toml"))
SMALL = [
    "--set",
    "train.epochs=2",
    "--set",
    "model.dim=16",
    "--set",
    "train.repeats=1",
    "--set",
    "train.device=cpu",
]
SOURCES = {"camelyon16": "camelyon16", "luad": "luad", "lusc": "lusc", "hnsc": "hnsc"}
SPLITS = {
    "camelyon16/splits/camelyon16.csv": (["camelyon16"], ("train", "val", "test")),
    "splits/tcga_nsclc_study_60_15_25_0.csv": (["luad", "lusc"], ("train", "val", "test")),
    "splits/tcga_luad_tp53_60_15_25_0.csv": (["luad"], ("train", "val", "test")),
    "splits/tcga_hnsc_hpv_cv3_0.csv": (["hnsc"], ("0", "1", "2")),
}
D = 12


def write_source(folder: Path, name: str, rng: np.random.Generator) -> None:
    """Metadata and features of one source: 18 cases, the first with two slides."""
    (folder / "metadata").mkdir(parents=True)
    (folder / "features_ctranspath").mkdir()
    slides = [(f"{name}{i}", f"{name}{i}-{k}") for i in range(18) for k in range(2 if i == 0 else 1)]
    cases = "\n".join(f"{name}{i},1" for i in range(18))
    (folder / "metadata" / "case_metadata.csv").write_text(f"case_id,stage\n{cases}\n")
    rows = "\n".join(f"{slide},{case}" for case, slide in slides)
    (folder / "metadata" / "slide_metadata.csv").write_text(f"slide_id,case_id\n{rows}\n")
    for case, slide in slides:
        x = rng.normal(size=(int(rng.integers(9, 30)), D)).astype(np.float32)
        x[:4, 0] += 4 * (int(case.removeprefix(name)) % 2)
        bag = xmil.Bag(
            x, coords=np.arange(2 * len(x)).reshape(-1, 2) * 256, patch_size=256, encoder="ctranspath"
        )
        xmil.write_bag(bag, folder / "features_ctranspath" / f"{slide}.h5")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """All four datasets, split files by case with label and subset."""
    root = tmp_path_factory.mktemp("tcga")
    rng = np.random.default_rng(0)
    for folder, name in SOURCES.items():
        write_source(root / folder, name, rng)
    for path, (names, subsets) in SPLITS.items():
        (root / path).parent.mkdir(exist_ok=True)
        lines = [f"{name}{i},x,{i % 2},{subsets[i // 2 % 3]}" for name in names for i in range(18)]
        (root / path).write_text("case_id,target,label,subset\n" + "\n".join(lines) + "\n")
    return root


def test_there_is_a_config_for_each_dataset_and_model():
    pairs = {
        f"{data}_{model}.toml"
        for data in ("camelyon16", "nsclc", "hnsc_hpv", "luad_tp53")
        for model in ("attnmil", "transmil")
    }
    assert pairs | {"search_attnmil.toml", "search_transmil.toml"} == set(PAPER)


@pytest.mark.parametrize("name", PAPER)
def test_settings_are_the_papers(name, capsys):
    path = CONFIGS / "paper" / name
    assert run(["train", str(path), "--dry-run"]) == 0
    config = load_config(path)
    transmil = "transmil" in name
    assert (config.train.epochs, config.train.batch) == ((200, 5) if transmil else (1000, 32))
    assert (config.data.instances, config.data.exclude_above) == (2048, 24000)
    assert (config.optim.name, config.train.monitor, config.train.repeats) == ("sgd", "auc", 5)
    high = name in ("camelyon16_transmil.toml", "nsclc_transmil.toml")
    if "search" not in name:
        assert config.optim.lr == (0.0002 if high else 0.002)
        rates = [config.model.params.get(key, 0.0) for key in ("dropout", "attention_dropout", "bag_dropout")]
        assert rates == ([0.2, 0.5, 0.5] if high else [0.0, 0.0, 0.0])


@pytest.mark.parametrize("name", [name for name in PAPER if "search" not in name])
def test_the_stand_in_is_trained_in_its_layout(stand_in, monkeypatch, name):
    monkeypatch.chdir(stand_in)
    assert run(["train", str(CONFIGS / "paper" / name), *SMALL]) == 0
    best = json.loads((stand_in / "runs" / name.removesuffix(".toml") / "best.json").read_text())
    assert len(best["models"]) == (3 if "hpv" in name else 1)


def test_hpv_validates_and_tests_on_the_same_fold(stand_in, monkeypatch):
    monkeypatch.chdir(stand_in)
    jobs = make_plan(load_config(CONFIGS / "paper" / "hnsc_hpv_attnmil.toml")).jobs
    assert len(jobs) == 3 * 5
    for job in jobs:
        assert job.fold.test.tolist() == job.fold.validation.tolist()
        assert len(job.fold.train) + len(job.fold.test) == 19
        assert not set(job.fold.train) & set(job.fold.test)


@pytest.mark.parametrize(
    ("name", "model", "split"),
    [
        ("nsclc_attnmil", "model", "test"),
        pytest.param("hnsc_hpv_transmil", "fold1", "fold1", marks=pytest.mark.full),
    ],
)
def test_the_chain_ends_in_table_2(stand_in, monkeypatch, name, model, split):
    """`xmil train`, then `xmil evaluate` on the test slides by the run's own table."""
    monkeypatch.chdir(stand_in)
    out = stand_in / "runs" / f"{name}-long"
    config = str(CONFIGS / "paper" / f"{name}.toml")
    change = ["--set", "optim.lr=0.05", "--set", "train.epochs=10", "--set", "train.batch=4"]
    assert run(["train", config, *SMALL, *change, "--out", str(out)]) == 0
    folder = "hnsc" if "hpv" in name else "luad"
    command = ["evaluate", "--model", f"{out}/{model}/model.safetensors", "--cohort", f"{out}/cohort.csv"]
    command += ["--features", f"{folder}/features_ctranspath", "--split", split, "--modes", "remove"]
    command += ["--methods", "random,attention,lrp", "--steps", "10", "--orders", "2"]
    assert run([*command, "--out", str(out / "table2")]) == 0
    with (out / "table2" / "summary.csv").open(newline="") as stream:
        methods = {row["method"] for row in csv.DictReader(stream)}
    assert {"random", "attention", "lrp"} <= methods


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "toy").glob("*.toml")) + sorted((CONFIGS / "colon").glob("*.toml"))
)
def test_the_other_configs_resolve(path, capsys):
    assert run(["train", str(path), "--dry-run"]) == 0
