"""Relevance by concept as the server gives it: it adds up, and that of another explanation is refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.viewer.asking import app_of, ask
from tests.viewer.make_inside import write_concepts
from tests.viewer.make_run import Made
from xmil.core.errors import FileError
from xmil.storage import ConceptMaps


def test_concepts_come_by_strength_and_add_up(fresh: Made) -> None:
    app = app_of(fresh)
    assert ask(app, "/api/slides/0/slide.json").json["sets"][0]["concepts"] is False
    assert "xmil insight" in ask(app, "/api/slides/0/concepts-0.json").json["error"]
    maps = write_concepts(fresh)
    assert ask(app, "/api/slides/0/slide.json").json["sets"][0]["concepts"] is True
    found = ask(app, "/api/slides/0/concepts-0.json").json
    assert [entry["concept"] for entry in found["concepts"]] == [0, 1]  # the third says nothing
    assert (found["method"], found["target"]) == ("lrp", "tumour")
    through = sum(entry["sum"] for entry in found["concepts"])
    assert through + found["rest"] == pytest.approx(float(maps.scores.sum()), rel=1e-5)
    for k in range(2):
        got = np.frombuffer(ask(app, f"/api/slides/0/concept-0-{k}.bin").body, "<f4")
        np.testing.assert_array_equal(got, maps.values[:, k])
    assert ask(app, "/api/slides/0/concept-0-3.bin").status == 404
    write_concepts(fresh, more=1.0)
    assert "another explanation" in ask(app, "/api/slides/0/concepts-0.json").json["error"]


def test_a_damaged_file_is_one_sentence(fresh: Made) -> None:
    write_concepts(fresh)
    path = fresh.runs[0] / "insight" / "concepts" / f"{fresh.names[0]}.npz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(FileError, match="xmil insight"):
        ConceptMaps.load(path)
    answer = ask(app_of(fresh), "/api/slides/0/concepts-0.json")
    assert answer.status == 422
    assert str(fresh.runs[0]) not in answer.json["error"]
