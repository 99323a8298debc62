"""Sites: balanced sampling makes site and label independent; preserved splits keep sites whole."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.training.cohorts import settings, write_cohort
from xmil.core.errors import InputError
from xmil.data import read_cohort, split_folds, split_fractions
from xmil.training.batches import SiteGroups
from xmil.training.config import make_config
from xmil.training.train import make_plan, train


def with_sites(folder: Path) -> Path:
    """The cohort with a column of six sites."""
    write_cohort(folder, n=36)
    lines = (folder / "cohort.csv").read_text().splitlines()
    sites = ["abcdef"[(i // 2 + (i % 5 == 0)) % 6] for i in range(36)]
    told = [f"{lines[0]},site", *(f"{line},{site}" for line, site in zip(lines[1:], sites, strict=True))]
    (folder / "cohort.csv").write_text("\n".join(told) + "\n")
    return folder


def test_sites_are_drawn_by_their_rarer_label_and_each_label_once() -> None:
    sites = ["a"] * 12 + ["b"] * 8 + ["c"] * 5
    labels = ["0"] * 9 + ["1"] * 3 + ["0"] + ["1"] * 7 + ["1"] * 5
    groups = SiteGroups.of(np.arange(25), sites, labels)
    assert groups.chances.tolist() == [0.75, 0.25]  # three and one of the rarer label; c has one label
    drawn = [groups.draw((0, epoch)) for epoch in range(400)]
    assert all(len(order) == 25 for order in drawn)
    pairs = [order[i : i + 2] for order in drawn for i in range(0, 24, 2)]
    assert all(sites[a] == sites[b] and labels[a] != labels[b] for a, b in pairs)
    share = Counter(sites[a] for a, _ in pairs)["a"] / len(pairs)
    assert share == pytest.approx(0.75, abs=4 * np.sqrt(0.75 * 0.25 / len(pairs)))
    assert groups.draw((0, 3)) == groups.draw((0, 3)) != groups.draw((0, 4))


def test_a_class_that_would_never_be_drawn_is_refused_with_its_counts(tmp_path: Path) -> None:
    """Three classes, one of them at one site only: shuffled bags hold it, groups would not."""
    sites = ["a"] * 6 + ["b"] * 6 + ["z"] * 4
    labels = ["x", "y"] * 6 + ["w"] * 4
    with pytest.raises(InputError, match=r"never draw 'w'.*a: x 3, y 3; b: x 3, y 3; z: w 4"):
        SiteGroups.of(np.arange(16), sites, labels)
    kept = SiteGroups.of(np.arange(16), sites, [*labels[:-1], "x"])
    assert kept.notes == ()
    some = SiteGroups.of(np.arange(15), sites, [*labels[:12], "x", "x", "x"])
    assert {labels[row] for epoch in range(20) for row in some.draw((0, epoch))} == {"x", "y"}
    (note,) = some.notes
    assert "3 bags of 1 site" in note
    assert "z: x 3" in note


def test_what_is_never_drawn_is_said_by_the_run(tmp_path: Path) -> None:
    folder = with_sites(tmp_path)
    lines = (folder / "cohort.csv").read_text().splitlines()
    names = lines[0].split(",")
    cells = [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]
    for row in cells:
        if row["label"] == cells[0]["label"] and row["site"] == "a":
            row["site"] = "b"
    (folder / "cohort.csv").write_text(
        "\n".join([lines[0], *(",".join(row.values()) for row in cells)]) + "\n"
    )
    base = settings(folder)
    content = {
        **base,
        "data": {**base["data"], "site": "site"},
        "train": {**base["train"], "sampling": "site_balanced"},
    }
    assert any("with one label (a: " in note for note in make_plan(make_config(content)).training_set.notes)


def test_a_shortcut_of_the_site_is_worth_nothing_in_a_group() -> None:
    """Nine in ten positives come from one site: shuffled bags tell, balanced ones do not."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    sites = np.where(rng.random(400) < 0.9, labels, 1 - labels)
    order = np.concatenate([
        SiteGroups.of(np.arange(400), list(map(str, sites)), list(map(str, labels))).draw((0, e))
        for e in range(20)
    ])  # fmt: skip
    assert abs(np.corrcoef(labels, sites)[0, 1]) > 0.7
    assert abs(np.corrcoef(labels[order], sites[order])[0, 1]) < 0.01


def test_sites_stay_whole_and_labels_spread(tmp_path: Path) -> None:
    cohort = read_cohort(with_sites(tmp_path) / "cohort.csv")
    for done, column in (
        (split_folds(cohort, 3, stratify="label", sites="site"), "fold"),
        (split_fractions(cohort, {"train": 0.6, "test": 0.4}, stratify="label", sites="site"), "split"),
    ):
        sides: dict[str, set[str]] = {}
        for site, side in zip(done.column("site"), done.column(column), strict=True):
            sides.setdefault(str(site), set()).add(str(side))
        assert all(len(found) == 1 for found in sides.values())
        mix = Counter(zip(done.column(column), done.column("label"), strict=True))
        assert len(mix) == 2 * len(set(done.column(column)))  # each side has both labels


def test_training_by_sites_runs_and_keeps_them_apart(tmp_path: Path) -> None:
    folder = with_sites(tmp_path)
    own = {"folds": 3, "site": "site", "site_splits": "preserved"}
    base = settings(folder)
    content = {
        **base,
        "data": {**base["data"], **own},
        "train": {**base["train"], "sampling": "site_balanced"},
    }
    plan = make_plan(make_config(content))
    sites = np.array(plan.training_set.cohort.column("site"))
    for job in plan.jobs:
        parts = [set(sites[rows]) for rows in (job.fold.train, job.fold.validation, job.fold.test)]
        assert len(parts[0] | parts[1] | parts[2]) == sum(map(len, parts))
    done = train(make_config(content))
    assert len(done.trained) == 3


def test_bad_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.site must name"):
        make_config({"train": {"sampling": "site_balanced"}})
    with pytest.raises(InputError, match=r"needs data\.folds"):
        make_config({"data": {"site": "site", "site_splits": "preserved"}})
    with pytest.raises(InputError, match="a site with two labels"):
        SiteGroups.of(np.arange(4), list("aabb"), list("0011"))
    with pytest.raises(InputError, match="has no site"):
        SiteGroups.of(np.arange(2), ["a", None], ["0", "1"])
    cohort = read_cohort(with_sites(tmp_path) / "cohort.csv")
    with pytest.raises(InputError, match="6 sites, too few for 7"):
        split_folds(cohort, 7, sites="site")
