"""Bags, targets, audits, registries."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

import xmil
from xmil.core import registry
from xmil.core.errors import InputError, UnknownNameError
from xmil.core.explanation import Explanation
from xmil.core.registry import Registry
from xmil.core.task import Target


def test_bag_normalises() -> None:
    bag = xmil.Bag(
        np.ones((1, 3, 4), np.float16), coords=np.array([[0.0, 1.0], [2, 3], [4, 5]]), slide_id="s"
    )
    assert (bag.features.dtype, bag.features.shape, bag.coords.dtype) == (np.float32, (3, 4), np.int64)  # type: ignore[union-attr]
    assert (len(bag), bag.dim, repr(bag)) == (3, 4, "Bag('s', 3 patches x 4 features)")
    part = bag.select([2, 0])
    np.testing.assert_array_equal(part.coords, [[4, 5], [0, 1]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": np.ones(3)}, r"\(patches, width\). Got \(3,\)"),
        ({"features": np.array([[object()]])}, "must be numbers"),
        ({"coords": np.zeros((2, 2))}, r"shape \(3, 2\). Got \(2, 2\)"),
        ({"coords": np.full((3, 2), np.nan)}, "finite"),
        ({"coords": np.full((3, 2), "a")}, "finite"),
    ],
)
def test_bag_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        xmil.Bag(**{"features": np.ones((3, 4)), **options})  # type: ignore[arg-type]


def test_target() -> None:
    assert xmil.Target.of(np.int64(2)) == 2
    assert hash(xmil.Target(2)) == hash(2)
    assert xmil.Target(1) != xmil.Target(1, against=0)
    assert {1: "a"}[xmil.Target(1)] == "a"  # type: ignore[index]
    named = xmil.Target("b", against="a").resolve(n_classes=2, predicted=0, class_names=["a", "b"])
    assert (int(named), str(named)) == (1, "b-vs-a")
    assert str(xmil.Target()) == "predicted"
    with pytest.raises(InputError, match="no class index yet"):
        int(xmil.Target())
    assert xmil.Target("1").resolve(n_classes=2, predicted=0) == 1


@pytest.mark.parametrize("name", ["e.csv", "e.JSON", "e.npz"])
def test_an_explanation_is_saved_under_no_other_format(name: str, tmp_path: Path) -> None:
    e = Explanation(np.array([0.5, -1.0], np.float32), np.zeros(2, np.float32), 0.0, "lrp", Target(1), True)
    with pytest.raises(InputError, match=r"saved as Parquet.*\.parquet.*to_pandas\(\)\.to_csv"):
        e.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    for good in ("e.parquet", "plain", "TCGA.DX1"):
        e.save(tmp_path / good)
        assert Explanation.load(tmp_path / good).scores.tolist() == [0.5, -1.0]
    for k in ("a", 2.5, 0, True):
        with pytest.raises(InputError, match=r"'k' parameter of Explanation\.top"):
            e.top(k)  # type: ignore[arg-type]
    assert e.top(np.int64(1)).index.tolist() == [0]  # type: ignore[arg-type]


def test_audit_closes() -> None:
    audit = xmil.Audit.close(output=2.0, instances=1.0, bias=0.5)
    assert audit.other == 0.5
    assert sum(audit.as_dict().values()) - audit.output == audit.output


def test_registry_loads_plugins_once_and_survives_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads = []
    verbs: Registry[object] = Registry("verb", group="xmil.verbs")

    class Good(EntryPoint):
        def load(self) -> None:
            loads.append(verbs.add("plugged", object()))

    class Broken(EntryPoint):
        def load(self) -> None:
            raise RuntimeError("no such library")

    points = [Broken("b", "broken_plugin", "xmil.verbs"), Good("g", "good_plugin", "xmil.verbs")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "xmil.verbs" else [])
    with caplog.at_level(logging.WARNING):
        assert list(verbs) == ["plugged"]
    assert "broken_plugin" in caplog.text
    assert "plugged" in verbs
    assert len(loads) == 1
    with pytest.raises(UnknownNameError, match="Did you mean 'plugged'"):
        verbs["pluged"]


def test_import_is_light() -> None:
    code = """
import sys, xmil
xmil.Bag, xmil.Explanation, xmil.Target
sys.exit(bool({"torch", "pyarrow"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="explian"):
        _ = xmil.explian
    assert {"explain", "load_model", "Bag"} <= set(dir(xmil))
