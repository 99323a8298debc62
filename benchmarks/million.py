"""Many slides, tiny bags: do listing, running, resuming and tables stay linear, and in how much memory?

    python -m benchmarks.million --slides 2000 20000 200000 [--workers 16] [--explain 2000] [--out FILE]
    python -m benchmarks.million --split 40000 1000000    `xmil split` of so many cases, and nothing else

Every slide is a file of its own (4 patches of 8 numbers) and gets an explanation of its own. With --explain N
the first N are explained, and the files of the others, whose features are the same, are written from the
first one's under their own names: what is then timed is all that goes on with the whole folder. Figures are
microseconds per slide, by the clock and of this process's and its workers' CPU time, which others on the
machine do not change much, and the peak memory of the process; linear means that the times do not grow. Each
stage is printed when it ends, and kept under --out: whoever ends this early has the stages before.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

import xmil
from xmil.cli._app import run
from xmil.core.durable import identity
from xmil.data import feature_files
from xmil.storage import KEY, content_digest

PATCHES, WIDTH = 4, 8


def make(folder: Path, n: int) -> None:
    """Feature files, a table of them and a model."""
    (folder / "features").mkdir(parents=True)
    x = np.random.default_rng(0).normal(size=(PATCHES, WIDTH)).astype(np.float32)
    np.save(folder / "one.npy", x)
    content = (folder / "one.npy").read_bytes()
    for i in range(n):
        (folder / "features" / f"s{i:07}.npy").write_bytes(content)
    lines = (f"s{i:07},c{i // 2:07},{i % 2}" for i in range(n))
    (folder / "cohort.csv").write_text("slide_id,case_id,label\n" + "\n".join(lines) + "\n")
    model = xmil.create_model("meanpool", in_dim=WIDTH, n_classes=2, dim=4, seed=0)
    xmil.save_model(model, folder / "m.safetensors")


def stages(folder: Path, workers: int, explained: int | None = None) -> dict[str, Callable[[], Any]]:
    """What is timed, in order."""
    out, asked = folder / "run", {"out": folder / "run", "cohort": folder / "cohort.csv"}

    def explain(cohort: Path) -> Any:
        paths = {**asked, "cohort": cohort}
        return xmil.explain_slides(folder / "m.safetensors", folder / "features", workers=workers, **paths)

    known = {
        "list": lambda: feature_files(folder / "features"),
        "cohort": lambda: xmil.read_cohort(folder / "cohort.csv"),
    }
    if explained is None:
        known["explain"] = lambda: explain(folder / "cohort.csv")
    else:
        known["explain the first"] = lambda: explain(first_rows(folder / "cohort.csv", explained))
        known["write the others"] = lambda: fill(folder)
    return {
        **known,
        "resume": lambda: explain(folder / "cohort.csv"),
        "open": lambda: len(xmil.open_run(out)),
        "table": lambda: xmil.open_run(out).table(),
    }


def first_rows(cohort: Path, n: int) -> Path:
    """A table of the first slides."""
    some = cohort.with_name("first.csv")
    with cohort.open() as lines:
        some.write_text("".join(islice(lines, n + 1)))
    return some


def fill(folder: Path) -> None:
    """The files of the slides that have none, as explaining them would write them: features are the same.

    A file differs from the first one in the slide's name, the word for its features, and the digest over
    both, all of the same length: they are put in their places, in the head and in Arrow's copy of it.
    """
    slides = folder / "run" / "slides"
    path = min(slides.iterdir())
    table, content = pq.read_table(path, partitioning=None), path.read_bytes()
    header = json.loads(table.schema.metadata[KEY])
    packed = pq.read_metadata(path).metadata[b"ARROW:schema"]
    before = [header["bag"], header["provenance"]["source"], header.pop("digest")]
    for features in sorted((folder / "features").iterdir()):
        target = slides / f"{features.stem}.parquet"
        if not target.exists():
            header["bag"], header["provenance"]["source"] = features.stem, identity(features, times=True)
            now = [header["bag"], header["provenance"]["source"], content_digest(header, table)]
            schema = b64encode(_put(b64decode(packed), before, now))
            target.write_bytes(_put(content, before, now).replace(packed, schema))


def _put(content: bytes, before: list[str], now: list[str]) -> bytes:
    for old, new in zip(before, now, strict=True):
        content = content.replace(old.encode(), new.encode())
    return content


def measure(folder: str, workers: int, explained: int | None, pipe: Any) -> None:
    """One size in a process of its own, so that the peak is its own; tells each stage when it ends."""
    torch.set_num_threads(1)
    for name, stage in stages(Path(folder), workers, explained).items():
        begun, used = time.monotonic(), _cpu()
        stage()
        pipe.send((name, {"seconds": time.monotonic() - begun, "cpu": _cpu() - used, **_peaks()}))
    pipe.send(None)


def _cpu() -> float:
    """Seconds of CPU time, of this process and of its workers that have ended."""
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in each)


def _peaks() -> dict[str, float]:
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "worker's peak": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def measured(
    n: int, workers: int, place: Path | None, explained: int | None
) -> Iterator[tuple[str, dict[str, float]]]:
    """The stages of one size with their figures, as they end."""
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        make(folder / "data", n)
        ours, theirs = get_context("spawn").Pipe(duplex=False)
        target = (str(folder / "data"), workers, explained, theirs)
        child = get_context("spawn").Process(target=measure, args=target)
        child.start()
        theirs.close()
        while (told := ours.recv()) is not None:
            yield told
        child.join()
    finally:
        shutil.rmtree(folder)


def split(n: int, place: Path | None) -> str:
    """Time `xmil split` of a table of so many cases: five folds, stratified."""
    with tempfile.TemporaryDirectory(dir=place) as folder:
        path = Path(folder) / "cohort.csv"
        rows = (f"s{i},c{i},{i % 2},t{i % 97}\n" for i in range(n))
        path.write_text("slide_id,case_id,label,site\n" + "".join(rows))
        begun, used = time.monotonic(), _cpu()
        code = run(["split", str(path), "--folds", "5", "--stratify", "label"])
        spent = f"{time.monotonic() - begun:.1f} s, {_cpu() - used:.1f} s of CPU"
        return f"{n:,} cases split with exit code {code} in {spent}, peak {_peaks()['peak'] / 1e9:.2f} GB"


def main() -> None:
    """Print a line for each stage of each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slides", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--split", type=int, nargs="+", help="split so many cases, and do nothing else")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--explain", type=int, help="explain so many, and write the others' files from them")
    parser.add_argument("--place", type=Path, help="folder on the disk to be used")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    args = parser.parse_args()
    results: dict[int, Any] = {}
    for n in args.split or ():
        print(split(n, args.place), flush=True)
    for n in () if args.split else args.slides:
        for name, found in measured(n, args.workers, args.place, args.explain):
            results.setdefault(n, {})[name] = found
            each = f"{1e6 * found['seconds'] / n:.0f} us ({1e6 * found['cpu'] / n:.0f} us of CPU)"
            print(f"{n} {name}: {each} per slide, peak {found['peak'] / 1e9:.2f} GB", flush=True)
            if args.out:
                args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
