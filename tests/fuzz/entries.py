"""Every place where input comes in: a golden input, and the call that reads it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import xmil
from tests.data import fuzzing
from tests.data import producers as p
from xmil.bench import Unit, method_entry, read_asap, read_idx
from xmil.core.durable import write_folder, write_text
from xmil.core.interactions import Interactions
from xmil.core.ledger import LEDGER, MANIFEST, append, writing_for
from xmil.core.task import Target
from xmil.data.inspection import inspect_run
from xmil.encoders.foreign import read_state as read_encoder
from xmil.evaluate import Truth
from xmil.runs.verify import verify_run
from xmil.slides import open_slide
from xmil.storage import (
    Item,
    Record,
    compare_files,
    open_folder,
    read_interactions,
    read_ledger,
    write_json,
)
from xmil.viewer.app import AnnotationFiles
from xmil.viewer.study import Study, open_study, read_plan
from xmil.viewer.study.plan import make_plan

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


def _unit(root: Path) -> Path:
    settings = {"suite": "evidence", "problem": {"name": "p"}, "model": {"name": "m"}}
    unit = Unit(root / "u.npz", settings, ("auroc", "auprc"))
    unit.facts = {0: {"auroc": 0.9, "forward": 0.1, "checksum": "c", "bags": ["a", "b"], "cases": None}}
    unit.add(0, "lrp", {name: np.ones(2) for name in unit.measures}, {"digest": "d", "seconds": 1.0})
    unit.save()
    return unit.path


def _scores(root: Path) -> Path:
    row = {"problem": "p", "model": "m", "repetition": 0, "target": 1, "checksum": "c", "scores": [0.1, 0.2]}
    pq.write_table(pa.Table.from_pylist([{**row, "bag": bag} for bag in "abc"]), root / "s.parquet")
    return root / "s.parquet"


def _idx(root: Path) -> Path:
    (root / "i.idx").write_bytes(b"\0\0\x08\x03\0\0\0\x02\0\0\0\x04\0\0\0\x04" + bytes(range(32)))
    return root / "i.idx"


def _asap(root: Path) -> Path:
    places = [(0, 0), (9, 0), (9, 9)]
    points = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in enumerate(places))
    text = f'<Annotation Name="a" PartOfGroup="Tumor"><Coordinates>{points}</Coordinates></Annotation>'
    (root / "s.xml").write_text(f"<ASAP_Annotations><Annotations>{text}</Annotations></ASAP_Annotations>")
    return root / "s.xml"


PLAN = {"readers": ["anna"], "practice": 0, "seed": 1, "washout_days": 0.0, "regions": "optional"}


def _plan(root: Path) -> Path:
    lines = 'title = "t"\nreaders = ["anna", "ben"]\npractice = 2\nrepeats = 1\nseed = 3\nreveal = "always"\n'
    (root / "p.toml").write_text(f'{lines}[[arms]]\nname = "plain"\n[[arms]]\nname = "lrp"\nmethod = "lrp"\n')
    return root / "p.toml"


def _study(root: Path) -> Path:
    case = {"patient": "p", "label": "a", "answers": {"run": {"predicted": "a", "probability": 0.9}}}
    about = {"layout": 1, "plan": make_plan(PLAN).with_classes(("a", "b")).model_dump(mode="json")}
    about |= {"classes": ["a", "b"], "slides": str(root), "runs": ["run"], "made": "2026", "practice": []}
    about |= {"cases": [{**case, "slide": f"s{i}", "mpp": 0.5} for i in range(3)]}
    folder = root / "study"
    (folder / "readers").mkdir(parents=True)
    (folder / "study.json").write_text(json.dumps(about))
    (folder / "readers.csv").write_text("reader,code\nanna,abcdefgh\n")
    (folder / "readers" / "anna.json").write_text(json.dumps(Study(folder).stored("anna")))
    return folder


def _read_study(path: Path) -> None:
    study = open_study(path)
    for reader in study.readers:
        study.place(study.stored(reader))


def _annotated(root: Path) -> Path:
    features = [{"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "id": "a"}]
    AnnotationFiles(root / "run").write("s", "ann", {"revision": 0, "document": {"features": features}})
    return root / "run"


SETTINGS = {"methods": ["lrp"]}
ROW = {"slide_id": "s0", "n": 4, "seconds": 0.5, "warnings": None}


def _recorded(root: Path) -> Path:
    """A run with results and a failure, which was killed while it went on: nothing but its ledger varies."""
    out = root / "run"
    with open_folder(out, "explain", SETTINGS) as folder:
        with writing_for("s0"):
            write_text(out / "s0.txt", "scores")
            write_folder(out / "s0.zarr", _fill_store)
        folder.record("s0", Record([ROW], {"edges": {}}, ["lrp"], ["sampled:0"], {"targets": ["a"]}))
        folder.record("s1", Record(error="damaged"))
        with open_folder(out / "tiles", "tile"):
            pass
    with suppress(KeyboardInterrupt), open_folder(out, "explain", SETTINGS) as folder:
        with writing_for("s1"):
            write_text(out / "s1.txt", "scores")
        folder.record("s1", Record([{**ROW, "slide_id": "s1"}], parts=["lrp"]))
        append(out, {"path": "s2.txt", "size": 6, "sha256": "0", "of": "s2"})
        raise KeyboardInterrupt
    return out / LEDGER


def _fill_store(folder: Path) -> None:
    folder.mkdir()
    (folder / "0").write_text("values")


def _read_ledger(path: Path) -> None:
    """Read it as `verify` does, and as a command that goes on, or starts over, in its folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copy(path, folder)
        write_json(folder / "run.json", {"kind": "explain", "layout": 3, "settings": SETTINGS})
        for name in ("s0.txt", "s1.txt"):
            (folder / name).write_text("scores")
        ledger = read_ledger(folder)
        assert ledger is not None
        list(compare_files(folder, ledger))
        for restart in (False, True):
            with (
                patch("xmil.storage.about.git_commit", lambda: None),  # it starts git, whatever the input
                open_folder(folder, "explain", SETTINGS, restart=restart) as writer,
            ):
                for name in ("s0", "s1"):
                    writer.find_record(Item(name, None, parts=("lrp",)), lambda _: None)


def _manifest(root: Path) -> Path:
    """The list of the files of a run of xmil 0.2."""
    return Path(shutil.copy(FIXTURES / "runs_of_0.2" / "evaluate" / MANIFEST, root))


def _pairs(root: Path) -> Path:
    pairs = np.array([[0, 1], [1, 2]])
    values = np.array([0.5, -0.25])
    Interactions(pairs, values, np.abs(values), values, Target(1), 0.7, bag="s").save(root / "p.parquet")
    return root / "p.parquet"


ENTRIES: dict[str, Entry] = {
    "bench unit": Entry(_unit, Unit.read),
    "bench scores": Entry(_scores, lambda path: method_entry(str(path))),
    "bench idx": Entry(_idx, read_idx),
    "truth asap": Entry(_asap, read_asap),
    "study plan": Entry(_plan, read_plan, ("pydantic",)),
    "study": Entry(_study, _read_study, ("pydantic", "starlette")),
    "annotations": Entry(_annotated, lambda path: AnnotationFiles(path).read("s", "ann"), ("starlette",)),
    "ledger": Entry(_recorded, _read_ledger),
    "manifest": Entry(_manifest, _read_ledger),
    "interactions": Entry(_pairs, read_interactions),
    "encoder weights": Entry(_state, read_encoder),
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
