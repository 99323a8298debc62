"""`xmil inside` over a run: files per slide, resumed, failures recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.slides.pyramids import textured, write_pyramid
from xmil.cli import main
from xmil.core.errors import InputError
from xmil.core.inside import Inside
from xmil.encoders import load_encoder

VECTORS = {"lrp": {"feature_level": True}}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides, embedded by an untrained ResNet18, and explained."""
    root = tmp_path_factory.mktemp("inside")
    for name in ("slides", "features"):
        (root / name).mkdir()
    encoder = load_encoder("resnet18", random=True)
    corners = np.array([[x, y] for y in (0, 64) for x in (0, 64, 128)])
    import torch

    for i, name in enumerate(("a", "b")):
        path = write_pyramid(
            root / "slides" / f"{name}.tif", textured([(0, 0, 256, 192)], (256, 192), seed=i), levels=()
        )
        with xmil.open_slide(path) as slide:
            cut = [encoder.transform(slide.read_area((x, y, 64, 64), (64, 64))) for x, y in corners]
        features = encoder(torch.stack(cut)).numpy()
        bag = xmil.Bag(features, coords=corners, patch_size=64, mpp=0.5, slide_id=name)
        xmil.write_bag(bag, root / "features" / f"{name}.h5")
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=512, n_classes=2, dim=8, seed=0), root / "m.safetensors"
    )
    xmil.explain_slides(root / "m.safetensors", root / "features", out=root / "run", target="1")
    return root


def options(study: Path) -> list[str]:
    return [
        "inside", str(study / "run"), "--slides", str(study / "slides"), "--encoder", "resnet18", "--random",
        "--model", str(study / "m.safetensors"), "--features", str(study / "features"), "--patches", "2",
    ]  # fmt: skip


def test_maps_sheets_and_tiles_per_slide_and_resumed(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(options(study))
    assert not left.value.code
    for name in ("a", "b"):
        found = Inside.load(study / "run" / "inside" / f"{name}.npz")
        e = xmil.open_run(study / "run").explanation(name)
        total = found.maps.sum(axis=(1, 2)) + found.audit.constant
        np.testing.assert_allclose(total, e.scores[found.patches], rtol=1e-3, atol=1e-6)
        for suffix in ("png", "geojson"):
            assert (study / "run" / "inside" / f"{name}.{suffix}").stat().st_size > 500
    with pytest.raises(SystemExit):
        main(options(study))
    assert "0 slides examined, 2 already done" in capsys.readouterr().out


HIDDEN = """
from torch import nn
from xmil.nn.images import ResNet

class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = [ResNet("resnet18").eval()]  # a list hides its layers

    def forward(self, x):
        return self.inner[0](x)

def build():
    return Hidden()
"""
SCRIPT = """
import warnings, torch

def script():
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(ResNet("resnet18").eval(), torch.rand(1, 3, 64, 64))
"""


def test_an_encoder_without_known_layers_is_pointed_to_an_option(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hidden.py").write_text(HIDDEN)
    words = [word for word in options(study) if word != "--random"]
    words[words.index("resnet18")] = f"{tmp_path}/hidden.py:build"
    with pytest.raises(SystemExit):
        main([*words, "--out", str(tmp_path / "maps")])
    out, err = capsys.readouterr()
    assert "use --map occlusion" in out + err
    (tmp_path / "hidden.py").write_text(HIDDEN + SCRIPT)
    traced = [word.replace(":build", ":script") for word in words]
    with pytest.raises(SystemExit):
        main([*traced, "--out", str(tmp_path / "traced")])
    assert "use --map occlusion or --map shifted" in "".join(capsys.readouterr())
    with pytest.raises(SystemExit) as left:
        main([*words, "--out", str(tmp_path / "maps"), "--map", "occlusion", "--patches", "1"])
    assert not left.value.code


def test_stored_vectors_serve_without_model_and_features(study: Path, tmp_path: Path) -> None:
    """`xmil explain` with vectors, then `xmil inside` with slides and encoder alone, and OME-TIFF."""
    xmil.explain_slides(
        study / "m.safetensors",
        study / "features",
        out=tmp_path / "run",
        target="1",
        params=VECTORS,
    )
    asked = ["inside", str(tmp_path / "run"), "--slides", str(study / "slides"), "--encoder", "resnet18"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--random", "--patches", "2", "--config", "tiff=true"])
    assert not left.value.code
    for name in ("a", "b"):
        found = Inside.load(tmp_path / "run" / "inside" / f"{name}.npz")
        e = xmil.open_run(tmp_path / "run").explanation(name)
        total = found.maps.sum(axis=(1, 2)) + found.audit.constant
        np.testing.assert_allclose(total, e.scores[found.patches], rtol=1e-3, atol=1e-6)
        assert (tmp_path / "run" / "inside" / f"{name}.ome.tif").is_file()


def test_maps_are_measured_against_the_background_that_the_run_kept(study: Path, tmp_path: Path) -> None:
    """With the model and the features, and with stored vectors alone: the same maps, all of the score."""
    found = {}
    for stored in (False, True):
        run = tmp_path / f"run{stored}"
        xmil.explain_slides(
            study / "m.safetensors", study / "features", out=run, target="1",
            params=VECTORS if stored else None,
            background=study / "features",
        )  # fmt: skip
        more = {} if stored else {"model": study / "m.safetensors", "features": study / "features"}
        xmil.inside_slides(run, slides=study / "slides", encoder="resnet18", random=True, patches=2, **more)
        found[stored] = Inside.load(run / "inside" / "a.npz")
        e = xmil.open_run(run).explanation("a")
        assert e.params["baseline"] == "mean of 12 patches"
        scores = e.scores[found[stored].patches]
        np.testing.assert_allclose(found[stored].maps.sum(axis=(1, 2)), scores, rtol=1e-2, atol=1e-5)
        assert found[stored].warnings == []
    np.testing.assert_allclose(found[True].maps, found[False].maps, rtol=1e-2, atol=1e-6)


def test_slides_of_another_name_are_refused(study: Path, tmp_path: Path) -> None:
    write_pyramid(tmp_path / "other.tif", textured([(0, 0, 64, 64)], (128, 128)), levels=())
    with pytest.raises(InputError, match="none of the run's slides"):
        xmil.inside_slides(study / "run", slides=tmp_path, encoder="resnet18", random=True)


def test_without_vectors_and_model_the_options_are_named(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copy(study / "m.safetensors", tmp_path / "gone.safetensors")
    run = xmil.explain_slides(model, study / "features", out=tmp_path / "run", target="1")
    Path(model).unlink()
    asked = options(study)
    with pytest.raises(SystemExit) as left:
        main(["inside", str(run.path), *asked[2:7], "--features", str(study / "features")])
    said = capsys.readouterr().out
    assert left.value.code == 2
    assert "--model and --features" in said


NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(512, 2)

    def forward(self, x):
        return {"logits": self.head(x.relu().mean(dim=1))}


def build():
    return Net()
"""


def test_the_run_names_model_and_features(study: Path, tmp_path: Path) -> None:
    """Without both, what run.json has is used; a network of your own has to be named again."""
    asked = {"slides": study / "slides", "encoder": "resnet18", "random": True, "patches": 2}
    plain = xmil.inside_slides(study / "run", **asked, out=tmp_path / "inside")
    given = {"model": study / "m.safetensors", "features": study / "features"}
    xmil.inside_slides(study / "run", **asked, **given, out=tmp_path / "given")
    maps = [Inside.load(tmp_path / folder / "a.npz").maps for folder in ("inside", "given")]
    assert (len(plain), maps[0].tolist()) == (2, maps[1].tolist())
    (tmp_path / "nets.py").write_text(NETS)
    own = f"{tmp_path / 'nets.py'}:build"
    run = xmil.explain_slides(own, study / "features", out=tmp_path / "own", target="1")
    with pytest.raises(InputError):
        xmil.inside_slides(run, **asked, out=tmp_path / "none")
    assert len(xmil.inside_slides(run, **asked, model=own)) == 2
