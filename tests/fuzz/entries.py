"""Every place where input comes in: a golden input, and the call that reads it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import xmil
from tests.data import fuzzing
from tests.data import producers as p
from xmil.data.inspection import inspect_run
from xmil.evaluate import Truth
from xmil.runs.verify import verify_run
from xmil.slides import open_slide

FIXTURES = Path(__file__).parents[1] / "fixtures"
Read = Callable[[Path], Any]


@dataclass(frozen=True)
class Entry:
    """An entry point; `needs` are packages without which it is left out."""

    make: Callable[[Path], Path]
    read: Read
    needs: tuple[str, ...] = ()

    @property
    def lacks(self) -> list[str]:
        return [name for name in self.needs if not _installed(name)]


def _installed(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def _bag(path: Path) -> None:
    header = xmil.open_bag(path)
    header.read()
    if len(header):
        header.read([len(header) - 1, 0])


def _cohort(path: Path) -> None:
    cohort = xmil.read_cohort(path)
    if "label" in cohort.columns:
        cohort.labels("label")


def _small(name: str, **params: Any) -> Any:
    return xmil.create_model(name, in_dim=5, n_classes=2, seed=0, **params)


def _ours(name: str, **params: Any) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        xmil.save_model(_small(name, **params), root / "m.safetensors")
        return root / "m.safetensors"

    return make


def _published() -> dict[str, Any]:
    """Weights under the names that the paper's authors use."""
    names = {r"^instance": "linear_layers", r"^attention\.V": "attention.0", r"^attention\.w": "attention.2"}
    state = {}
    for key, value in _small("attnmil", dim=4).state_dict().items():
        for pattern, name in {**names, r"^out": "out_layers"}.items():
            key = re.sub(pattern, name, key)
        state[key] = value
    return state


def _state(root: Path) -> Path:
    torch.save(_published(), root / "m.pt")
    return root / "m.pt"


def _lightning(root: Path) -> Path:
    state = {f"model.{key}": value for key, value in _published().items()}
    about = {"pytorch-lightning_version": "2.0", "hyper_parameters": {"lr": 0.1, "path": Path("x")}}
    torch.save({"state_dict": state, **about}, root / "m.pt")
    return root / "m.pt"


def _geojson(root: Path) -> Path:
    square = [[0, 0], [64, 0], [64, 64], [0, 64], [0, 0]]
    hole = [[8, 8], [16, 8], [16, 16], [8, 8]]
    kinds = [{"type": "Polygon", "coordinates": [square, hole]}]
    kinds += [{"type": "MultiPolygon", "coordinates": [[square], [hole]]}]
    kinds += [{"type": "GeometryCollection", "geometries": kinds[:1]}]
    properties = {"classification": {"name": "Tumor"}}
    shapes = [{"type": "Feature", "geometry": kind, "properties": properties} for kind in kinds]
    about = {"type": "FeatureCollection", "xmil": {"origin": [1, 2]}, "features": shapes}
    (root / "s.geojson").write_text(json.dumps(about))
    return root / "s.geojson"


def _truth(path: Path) -> None:
    bag = xmil.Bag(np.zeros((9, 2), np.float32), coords=p_grid(), patch_size=16, slide_id=path.stem)
    for names in ((), ("Tumor",)):
        Truth(path.parent, names=names).evidence(bag)


def p_grid() -> Any:
    return np.stack(np.divmod(np.arange(9), 3), axis=1) * 16


def _labels(root: Path) -> Path:
    (root / "s.csv").write_text("instance,evidence\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    return root / "s.csv"


def _mask(root: Path) -> Path:
    Image.fromarray(np.eye(48, dtype=np.uint8) * 255).save(root / "s.png")
    return root / "s.png"


def _fixture(name: str) -> Callable[[Path], Path]:
    """A run of one slide: the files of the others would be read again and again, and find nothing more."""
    others = shutil.ignore_patterns("s1.*", "s2.*", "fold1")
    return lambda root: Path(shutil.copytree(FIXTURES / "runs" / name, root / name, ignore=others))


def _run(path: Path) -> None:
    run = xmil.open_run(path)
    repr(run)
    run.table()
    verify_run(run)
    inspect_run(path)
    for slide in list(run.files)[:2] if run.kind == "explain" else ():
        run.explanation(slide, method="lrp", target="pos")


def _picture(root: Path, suffix: str = "png") -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, size=(40, 60, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(root / f"s.{suffix}")
    return root / f"s.{suffix}"


def _tiled(root: Path, **kind: Any) -> Path:
    from tests.slides.pyramids import textured, write_pyramid

    pixels = textured([(8, 8, 40, 40)], (96, 64))
    return write_pyramid(root / "s.tif", pixels, levels=(2,), tile=(32, 32), **kind)


def _slide(path: Path) -> None:
    with open_slide(path) as slide:
        slide.read_region((0, 0), 0, (16, 16))
        slide.thumbnail(32)


def _config(root: Path) -> Path:
    text = '[data]\nfeatures = "f"\ncohort = "c.csv"\ninstances = 64\n[model]\nname = "attnmil"\ndim = 8\n'
    text += '[optim]\nlr = 1e-3\nschedule = "cosine"\n[train]\nepochs = 3\nbatch = 2\ndevice = "cpu"\n'
    (root / "c.toml").write_text(text)
    return root / "c.toml"


def _read_config(path: Path) -> None:
    from xmil.training.config import load_config

    load_config(path)


ENTRIES: dict[str, Entry] = {
    **{f"features {name}": Entry(make, _bag) for name, make in fuzzing.WRITERS.items()},
    "features tiatoolbox": Entry(p.tiatoolbox, _bag, ("zarr",)),
    "features spatialdata": Entry(p.spatialdata, _bag, ("zarr",)),
    "explanation": Entry(fuzzing.WRITERS["explanation"], xmil.Explanation.load),
    "cohort": Entry(fuzzing.WRITERS["cohort"], _cohort),
    "checkpoint attnmil": Entry(_ours("attnmil", dim=4), xmil.load_model),
    "checkpoint transmil": Entry(_ours("transmil", dim=8, heads=2), xmil.load_model),
    "checkpoint stamp_vit": Entry(_ours("stamp_vit", dim=8, heads=2, feedforward=4), xmil.load_model),
    "checkpoint state": Entry(_state, xmil.load_model),
    "checkpoint lightning": Entry(_lightning, xmil.load_model),
    "truth geojson": Entry(_geojson, _truth),
    "truth labels": Entry(_labels, _truth),
    "truth mask": Entry(_mask, _truth),
    "run explain": Entry(_fixture("explain"), _run),
    "run evaluate": Entry(_fixture("evaluate"), _run),
    "run predict": Entry(_fixture("predict"), _run),
    "slide png": Entry(_picture, _slide),
    "slide jpg": Entry(lambda root: _picture(root, "jpg"), _slide),
    "slide tif": Entry(lambda root: _picture(root, "tif"), _slide),
    "slide pyramid": Entry(_tiled, _slide, ("tifffile", "openslide")),
    "slide ome": Entry(lambda root: _tiled(root, ome=True, compression="zlib"), _slide, ("tifffile",)),
    "run train": Entry(_fixture("train"), _run),
    "config": Entry(_config, _read_config, ("pydantic",)),
}
ENTRIES = {
    name: entry for name, entry in ENTRIES.items() if name not in ("features explanation", "features cohort")
}
