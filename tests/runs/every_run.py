"""A small run of every kind that leaves a folder; damage to its files, and what leaves it healthy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from benchmarks.killed.commands import COMMANDS, WIDTH, prepare

import xmil
from tests.bench.runs import NET, OWN
from tests.runs.runs_of_0_2 import copy_runs
from xmil.cli._app import run
from xmil.viewer.annotations import AnnotationFiles

EXPORTS = (
    "qupath,asap,dicom,dicom-annotations,ome-zarr,spatialdata,anndata,geojson,scores,colours,csv,parquet"
)
ONE = ["--quick", "--task", "standard", "--repetitions", "1", "--only"]


def commands(data: Path) -> dict[str, list[str]]:
    """The words of each command over the files of `prepare`."""
    model = ["--model", f"{data}/m.safetensors", "--features", f"{data}/features"]
    explained, slides = f"{data}/done_explain", ["--slides", f"{data}/slides"]
    encoder = ["--encoder", "benchmarks.killed.commands:network"]
    labelled = [*model, "--cohort", f"{data}/cohort.csv"]
    more = {
        "explain": [
            "explain", *model, "--methods", "lrp,attention", "--target", "all", "--config", "interactions=4",
            "--background", f"{data}/features", "--cohort", f"{data}/cohort.csv",
        ],
        "contexts": ["explain", *labelled, "--methods", "lrp", "--param", "lrp.contexts=5"],
        "ensemble": ["explain", *labelled, "--model", f"{data}/other.safetensors", "--methods", "lrp"],
        "over_slides": [
            "explain", "--model", f"{data}/m.safetensors", *slides, *encoder, "--device", "cpu",
            "--tile-size", "64", "--tile-mpp", "0.5", "--mpp", "0.5",
        ],
        "heatmap": ["heatmap", explained, "--size", "60", "--pictures", "map,overlay", "--to", "png,svg,csv"],
        "export": ["export", explained, *slides, "--to", EXPORTS, "--mpp", "0.5"],
        "inside": ["inside", explained, *slides, *encoder, *model, "--patches", "1", "--map", "occlusion"],
        "bench": [
            "bench", "--suite", "evidence", *ONE, "--methods", f"{data}/mine.py:score", "--methods", "lrp",
            "--model", f"{data}/net.py:build",
        ],
        "paper": [
            "bench", "--suite", "paper", "--model", "attnmil", "--task", "standard", "--methods", "lrp",
            "--repetitions", "1", "--config", "epochs=1", "--config", "bags=8,4,4",
        ],
    }  # fmt: skip
    shared = ("tile", "embed", "train", "predict", "evaluate", "insight")
    return {**{name: COMMANDS[name](data) for name in shared}, **more}


def make_runs(folder: Path) -> dict[str, Path]:
    """A run of every kind, and one with annotations and with runs inside it, by name."""
    data = folder / "data"
    prepare(data)
    other = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, seed=1, dim=8)
    xmil.save_model(other, data / "other.safetensors")
    (data / "mine.py").write_text(OWN)
    (data / "net.py").write_text(NET)
    runs = {}
    for name, words in commands(data).items():
        runs[name] = folder / name
        assert run([*words, "--out", str(runs[name])]) in (0, 1), name  # 1: some slides failed
    runs["exam"] = folder / "exam"
    bench = [*commands(data)["bench"], "--out", str(runs["bench"])]
    assert run([*bench, "--export", str(runs["exam"])]) == 0
    runs["study"] = data / "done_study"
    runs["viewed"] = data / "done_explain"
    document = {"type": "FeatureCollection", "features": []}
    AnnotationFiles(runs["viewed"]).write("s0", "ann", {"revision": 0, "document": document})
    assert run(["heatmap", str(runs["viewed"]), "--to", "csv"]) == 0
    assert run(["export", str(runs["viewed"]), "--to", "qupath"]) == 0
    return runs


@dataclass(frozen=True)
class Damage:
    """One way of damaging one file of a run, and of putting it back."""

    run: Path
    path: Path
    way: str
    seed: int

    def __str__(self) -> str:
        return f"{self.way} {self.run.name}/{self.path.relative_to(self.run)}"

    def apply(self) -> Callable[[], None]:
        """Damage the file; gives what puts it back."""
        content = self.path.read_bytes()
        other = self.path.with_name(f"stranger{self.path.suffix}")
        place = int(np.random.default_rng(self.seed).integers(len(content) or 1))

        def restore() -> None:
            self.path.unlink(missing_ok=True)
            self.path.write_bytes(content)
            other.unlink(missing_ok=True)

        if self.way == "extra":
            other.write_bytes(content)
        elif self.way == "remove":
            self.path.unlink()
        elif self.way == "link":
            self.path.unlink()
            os.symlink("elsewhere", self.path)
        elif self.way == "empty" and content:
            self.path.write_bytes(b"")
        elif self.way == "cut" and content:
            self.path.write_bytes(content[:place])
        elif self.way == "flip" and content:
            self.path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        else:
            self.path.write_bytes(content + b"\n")
        return restore


UNFINISHED = ("unfinished", "added")  # of the runs of 0.2.0
WAYS = ("remove", "flip", "cut", "extra", "grow", "link", "empty")


def damages(runs: dict[str, Path], *, full: bool, seed: int = 0) -> list[Damage]:
    """Damage to every kind of file of every run, in one way by turns or, if `full`, in every way."""
    draw = np.random.default_rng(seed)
    kinds: dict[tuple[str, str, str], list[Path]] = {}
    for name, folder in runs.items():
        for path in listed(folder):
            kinds.setdefault((name, path.parent.name, "".join(path.suffixes[-2:])), []).append(path)
    chosen: list[Damage] = []
    for number, ((name, _, _), paths) in enumerate(kinds.items()):
        for way in WAYS if full else [WAYS[number % len(WAYS)]]:
            path = paths[draw.integers(len(paths))]
            chosen.append(Damage(runs[name], path, way, int(draw.integers(1 << 30))))
    return chosen


def listed(folder: Path) -> Iterator[Path]:
    """The files of a run, those of stores too; only the lock and what is hidden beside it do not count."""
    for path in sorted(folder.rglob("*")):
        inside_store = any(part.endswith(".zarr") for part in path.relative_to(folder).parts[:-1])
        if path.is_file() and (inside_store or not path.name.startswith(".")):
            yield path


def healthy_runs(runs: dict[str, Path], place: Path, *, full: bool) -> Iterator[tuple[str, Path]]:
    """Runs that nothing has damaged, and what was done to each; `place` is a new folder for copies."""
    yield from runs.items()
    yield from carried(runs, place, ("zipped", *(("copied", "moved") if full else ())))
    yield from continued(runs, place, full=full)
    folders = sorted(copy_runs(place / "of_0.2").iterdir())
    earlier = {f"{path.name} of 0.2.0": path for path in folders if path.name not in ("data", *UNFINISHED)}
    yield from earlier.items()
    if full:
        yield from carried(earlier, place / "carried", ("zipped", "copied", "moved"))


def carried(runs: dict[str, Path], place: Path, ways: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Copies of runs: as they are, under another name, or through an archive, which changes times."""
    for name, folder in runs.items():
        for way in ways:
            out = place / way / name
            if way == "zipped":
                archive = shutil.make_archive(str(out), "zip", folder)
                shutil.unpack_archive(archive, out)
            else:
                shutil.copytree(folder, out)
            if way == "moved":
                out = out.rename(out.with_name(f"{name} elsewhere"))
            yield f"{name}, {way}", out


def continued(runs: dict[str, Path], place: Path, *, full: bool) -> Iterator[tuple[str, Path]]:
    """Copies of runs after their command was given again, and with a method more."""
    words = commands(runs["viewed"].parent)
    for name in words if full else ("tile", "train", "explain"):
        out = place / "repeated" / name
        shutil.copytree(runs[name], out)
        assert run([*words[name], "--out", str(out)]) in (0, 1), name
        yield f"{name}, repeated", out
    for name in ("explain", "contexts", "ensemble", "over_slides") if full else ("contexts",):
        out = place / "added" / name
        shutil.copytree(runs[name], out)
        assert run([*words[name], "--methods", "lrp,gxi", "--out", str(out)]) == 0, name
        yield f"{name}, with a method more", out
