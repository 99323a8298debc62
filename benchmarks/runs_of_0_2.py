"""Makes the fixtures of tests/runs/test_runs_of_0_2.py: small runs of most kinds, with 0.2.0's code.

    git archive d0c3c6a4 src | tar x -C /tmp/xmil-0.2.0
    PYTHONPATH=/tmp/xmil-0.2.0/src python -m benchmarks.runs_of_0_2

d0c3c6a4 is the commit of 0.2.0. The runs store absolute paths, so they are made in /data/xmil and then copied
to tests/fixtures/runs_of_0.2. `COMMANDS` has their names.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

import xmil
from xmil.cli._app import run
from xmil.slides import tiling

PREFIX = Path("/data/xmil")  # tests replace it by their own folder
ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "runs_of_0.2"
DATA = PREFIX / "data"
BAGS, PATCHES, WIDTH = 3, 12, 24
SLIDES, EDGE, COLUMNS = 2, 32, 4  # slides, pixels of a patch, patches side by side
COARSE = 20  # dots per inch of figures

CONFIG = f"""
[data]
features = "{DATA}/features"
cohort = "{DATA}/cohort.csv"
[model]
name = "attnmil"
dim = 8
[train]
epochs = 2
batch = 2
monitor = "loss"
device = "cpu"
"""

INPUTS = ["--model", f"{DATA}/model.safetensors", "--features", f"{DATA}/features"]
LABELLED = [*INPUTS, "--cohort", f"{DATA}/cohort.csv"]
ENCODING = ["--encoder", "tests.encoders.builders:network", "--device", "cpu"]
SLIDE_FILES = ["--slides", f"{DATA}/slides"]
SMALL = ["--size", "60", "--pictures", "map", "--to", "png,csv"]
EVIDENCE = ["--quick", "--only", "--task", "standard", "--repetitions", "1"]
COMMANDS = {
    "explain": ["explain", *LABELLED, "--methods", "lrp,attention", "--target", "predicted"],
    "contexts": ["explain", *LABELLED, "--methods", "lrp", "--contexts", "6"],
    "interactions": [
        *("explain", *LABELLED, "--methods", "lrp", "--interactions", "4"),
        *("--background", f"{DATA}/background"),
    ],
    "over_slides": [
        *("explain", "--model", f"{DATA}/model.safetensors", *SLIDE_FILES, *ENCODING),
        *("--tile-size", str(EDGE), "--tile-mpp", "0.5", "--mpp", "0.5"),
    ],
    "unfinished": ["explain", *LABELLED, "--methods", "lrp,attention"],
    "added": ["explain", *LABELLED, "--methods", "lrp"],
    "evaluate": [
        *("evaluate", *LABELLED, "--split", "train", "--methods", "lrp,attention"),
        *("--steps", "4", "--orders", "2"),
    ],
    "predict": ["predict", *LABELLED],
    "tile": [
        *("tile", f"{DATA}/slides", "--size", str(EDGE), "--slide-mpp", "0.5", "--min-tissue", "0"),
        *("--drop", "none"),
    ],
    "embed": ["embed", "--tiles", f"{PREFIX}/tile", *SLIDE_FILES, *ENCODING],
    "inside": [
        *("inside", f"{PREFIX}/over_slides", *SLIDE_FILES, "--features", f"{PREFIX}/over_slides/features"),
        *("--model", f"{DATA}/model.safetensors", *ENCODING, "--patches", "1", "--map", "occlusion"),
    ],
    "insight": ["insight", f"{PREFIX}/explain", *LABELLED, "--concepts", "2"],
    "train": ["train", f"{DATA}/config.toml"],
    "bench": ["bench", "--suite", "evidence", *EVIDENCE, "--methods", "gxi", "--model", "attnmil"],
    "drawn": ["explain", *LABELLED, "--methods", "lrp"],
    "drawn/heatmaps": ["heatmap", f"{PREFIX}/drawn", *SMALL],
    "drawn/pale": ["heatmap", f"{PREFIX}/drawn", *SMALL, "--alpha", "0.3", "--clip", "none"],
}


def make_inputs() -> None:
    """Write features, slides, labels, a model, a background and an encoder."""
    rng = np.random.default_rng(0)
    for name in ("features", "slides", "background"):
        (DATA / name).mkdir(parents=True)
    lines = ["slide_id,case_id,label,split,site"]
    for i in range(BAGS):
        write_features(DATA / "features" / f"s{i}.h5", rng)
        lines.append(f"s{i},c{i},{('neg', 'pos')[i % 2]},{('train', 'train', 'val')[i]},{'ab'[i % 2]}")
    for i in range(SLIDES):
        write_slide(DATA / "slides" / f"s{i}.tif", rng)
    (DATA / "cohort.csv").write_text("\n".join(lines) + "\n")
    np.savez(DATA / "background" / "ordinary.npz", features=rng.normal(size=(8, WIDTH)).astype(np.float32))
    (DATA / "config.toml").write_text(CONFIG)
    model = xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, class_names=("neg", "pos"), dim=8, seed=0)
    xmil.save_model(model, DATA / "model.safetensors")


def write_slide(path: Path, rng: np.random.Generator) -> None:
    """Write a tiled TIFF whose patches have four colours each, so that none counts as glass."""
    import tifffile

    rows = PATCHES // COLUMNS
    colours = rng.integers([150, 80, 150], [200, 130, 190], size=(2 * rows, 2 * COLUMNS, 3), dtype=np.uint8)
    pixels = colours.repeat(EDGE // 2, axis=0).repeat(EDGE // 2, axis=1)
    tifffile.imwrite(path, pixels, tile=(EDGE, EDGE), compression="deflate", photometric="rgb")


def write_features(path: Path, rng: np.random.Generator) -> None:
    """Write the features of a slide's patches, which lie on a grid."""
    rows, columns = np.divmod(np.arange(PATCHES), COLUMNS)
    features = np.abs(rng.normal(size=(PATCHES, WIDTH))).astype(np.float32)
    corners = np.stack([columns, rows], axis=1) * EDGE
    xmil.write_bag(xmil.Bag(features, coords=corners, patch_size=EDGE, mpp=0.5), path)


def make_run(name: str, words: Sequence[str], *, kill: str = "") -> None:
    """Run a command into the folder of its name; `kill` is the file before which it is killed."""
    child = os.fork()
    if child == 0:
        if kill:
            kill_at(kill)
        os._exit(run([*words, "--out", str(PREFIX / name)]))
    status = os.waitpid(child, 0)[1]
    if os.waitstatus_to_exitcode(status) != (-signal.SIGKILL if kill else 0):
        raise SystemExit(f"{name}: ended with {os.waitstatus_to_exitcode(status)}")


def kill_at(name: str) -> None:
    """Kill this process when a file is about to get a name."""
    replace = os.replace

    def replace_or_die(source: str, target: str) -> None:
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die  # type: ignore[assignment]


def hide_machine() -> None:
    """Keep the names of this machine and its system out of the files."""
    platform.platform = lambda *_, **__: "Linux"  # type: ignore[assignment]
    socket.gethostname = lambda: "machine"


def make_pictures_small() -> None:
    """Write coarse figures and small, well compressed pictures, so that the fixtures stay small."""
    tiling.OVERVIEW_EDGE = 10 * COARSE
    savefig, save = Figure.savefig, Image.Image.save
    Figure.savefig = lambda *a, **more: savefig(*a, **{**more, "dpi": COARSE})  # type: ignore[method-assign]
    Image.Image.save = lambda *a, **more: save(*a, **{**more, "compress_level": 9})  # type: ignore[method-assign]


def main() -> None:
    code = Path(xmil.__file__)
    if xmil.__version__ != "0.2.0" or code.is_relative_to(ROOT):
        raise SystemExit(f"{code} is not the code of 0.2.0; put that on PYTHONPATH.")
    os.environ["XMIL_SYNC"] = "0"
    torch.set_num_threads(1)
    hide_machine()
    make_pictures_small()
    shutil.rmtree(PREFIX, ignore_errors=True)
    make_inputs()
    for name, words in COMMANDS.items():
        make_run(name, words, kill=f"s{BAGS - 1}.parquet" if name == "unfinished" else "")
    make_run("added", COMMANDS["unfinished"], kill="s1.parquet")  # another method, which is not on all slides
    shutil.rmtree(FIXTURES, ignore_errors=True)
    shutil.copytree(PREFIX, FIXTURES)


if __name__ == "__main__":
    main()
