"""The demonstration on tissue: what is drawn, what the encoder sees, and the commands from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import xmil
from xmil.cli._app import run
from xmil.demo import encoders, tissue
from xmil.demo.tissue import TUMOUR, TissueDemo, draw_section, read_sections

pytest.importorskip("openslide")
tifffile = pytest.importorskip("tifffile")
pytest.importorskip("lightning_fabric")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tissue, "SIZE", (512, 640))
    monkeypatch.setattr(tissue, "QUICK", {"train": 8, "val": 2, "test": 4})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


def test_nuclei_are_dark_and_lie_where_they_are_said_to() -> None:
    section = draw_section(3, tumour=True)
    for kind in section.nuclei:
        columns, rows = kind.xy.astype(int).T
        inside = section.image[rows, columns].astype(float).mean()
        assert inside < section.image[section.image.min(axis=2) < 220].mean() - 30, kind.kind
    assert next(kind for kind in section.nuclei if kind.kind == TUMOUR).xy.shape[0] > 20
    without = draw_section(3, tumour=False).nuclei
    assert [len(kind.xy) > 0 for kind in without] == [True, True, False]


def test_the_encoder_unmixes_stains_it_was_given() -> None:
    amounts = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.3, 0.4]])
    vectors = torch.tensor(encoders.STAINS)
    light = 10 ** -(amounts @ vectors)
    found = encoders.unmix(light[:, :, None, None].expand(-1, -1, 2, 2))
    np.testing.assert_allclose(found[..., 0, 0], amounts, atol=1e-5)


def test_from_drawn_sections_to_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["demo", "--tissue", "--quick", "--json", "--out", str(out)]) == 0, (
        out / "log.txt"
    ).read_text()
    said = json.loads(capsys.readouterr().out)
    demo = TissueDemo(out, quick=True)
    sections = read_sections(demo)
    assert [s["section"] for s in said["sections"]] == demo.names["test"]
    for section in sections:
        e = section.explanations["lrp"]
        for box, held in zip(e.boxes(), section.marked, strict=True):
            inside = [
                1
                for kind, x, y in demo.nuclei[section.name]
                if kind == TUMOUR and box[0] <= x < box[2] and box[1] <= y < box[3]
            ]
            assert held == (len(inside) >= 2)
    text = (out / "report.html").read_text("utf-8")
    assert said["verdict"] in text
    assert text.count("data:image/png;base64,") == 4
    assert "<script" not in text
    log = (out / "log.txt").read_text("utf-8")
    assert "pen on " in log  # ink was found and left out


def test_pictures_of_ones_own_need_their_nuclei(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    asked = ["demo", "--tissue", "--images", str(folder), "--out", str(tmp_path / "o")]
    assert run(asked) == 2
    told = capsys.readouterr().err
    assert "nuclei.csv: no such table; write a row for each nucleus, with the columns image (" in told
    assert "to draw tissue instead" in told
    assert run([*asked[:3], str(folder / "a.png"), *asked[4:]]) == 2
    assert "a.png: a file, where a folder is needed" in capsys.readouterr().err
    (folder / "nuclei.csv").write_text("image,cell,x,y\na,epithelial,1,1\n")
    assert run(asked) == 2
    assert "needs ten pictures with epithelial nuclei and ten without. Got 1 and 0" in capsys.readouterr().err
    assert run(["demo", "--images", str(folder), "--out", str(tmp_path / "o")]) == 2
    assert "--images needs --tissue" in capsys.readouterr().err


def test_the_encoder_is_found_by_name() -> None:
    encoder = xmil.encoders.load_encoder("tissue")
    assert encoder(torch.zeros(1, 3, 128, 128, dtype=torch.uint8)).shape == (1, encoder.dim)
