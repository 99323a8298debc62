"""Damaged files by the thousand: run as a program, so that a crash or hang of a library is seen as such.

    python -m tests.data.fuzzing SEED COUNT

Each input is a golden file truncated, flipped, overwritten or blown up. Reading it must give a bag, or an
error of ours that names the path: within ten seconds and four gigabytes beyond those that torch maps.
"""

from __future__ import annotations

import faulthandler
import resource
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import xmil
from tests.data import producers as p

SECONDS, ROOM = 10, 4 << 30
WRITERS: dict[str, Callable[[Path], Path]] = {
    **p.WRITERS,
    "ours": lambda root: _ours(root),
    "explanation": lambda root: _explanation(root),
    "cohort": lambda root: _cohort(root),
}


def _ours(root: Path) -> Path:
    bag = xmil.Bag(
        p.features(), p.XY, patch_size=p.EDGE, mpp=p.MPP, slide_id="s1", columns={"a": np.arange(p.N)}
    )
    xmil.write_bag(bag, root / "s1.h5")
    return root / "s1.h5"


def _explanation(root: Path) -> Path:
    source = Path(__file__).parent.parent / "fixtures" / "explanation_layout1.parquet"
    return Path(shutil.copy(source, root / "s1.parquet"))


def _cohort(root: Path) -> Path:
    rows = [f"s{i},c{i // 2},{i % 2},train" for i in range(20)]
    path = root / "cohort.csv"
    path.write_text("slide_id,case_id,label,split\n" + "\n".join(rows) + "\n")
    return path


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One way of many to spoil a file."""
    out = bytearray(data)
    how = int(rng.integers(6))
    at = int(rng.integers(len(out)))
    if how == 0:
        return bytes(out[:at])
    if how == 1:
        for _ in range(int(rng.integers(1, 9))):
            out[int(rng.integers(len(out)))] ^= 1 << int(rng.integers(8))
    elif how == 2:
        out[at : at + 8] = rng.bytes(8)
    elif how == 3:  # sizes and offsets become huge
        out[at : at + 8] = b"\xff" * int(rng.choice([1, 2, 4, 7]))
    elif how == 4:  # two stretches trade places
        other = int(rng.integers(len(out)))
        a, b = sorted((at, other))
        out[a : a + 32], out[b : b + 32] = out[b : b + 32], out[a : a + 32]
    else:
        out[at : at + 16] = bytes(16)
    return bytes(out)


def read(name: str, path: Path) -> None:
    if name == "explanation":
        xmil.Explanation.load(path)
    elif name == "cohort":
        cohort = xmil.read_cohort(path)
        if "label" in cohort.columns:
            cohort.labels("label")
    else:
        header = xmil.open_bag(path)
        header.read()
        if len(header):
            header.read([len(header) - 1, 0])


def spoil(golden: Path, rng: np.random.Generator) -> Path:
    """The file damaged in place, among its siblings; of a store, a copy with one damaged member."""
    if golden.is_dir():
        copy = golden.parent / f"spoilt_{golden.name}"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(golden, copy)
        members = sorted(member for member in copy.rglob("*") if member.is_file() and member.stat().st_size)
        member = members[int(rng.integers(len(members)))]
        member.write_bytes(damaged(member.read_bytes(), rng))
        return copy
    golden.write_bytes(damaged(golden.read_bytes(), rng))
    return golden


def main(seed: int, count: int) -> Counter[str]:
    torch.set_num_threads(1)
    faulthandler.enable()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    rng, tally = np.random.default_rng(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        goldens = {}
        for name, write in WRITERS.items():
            root = Path(folder, name)
            root.mkdir()
            goldens[name] = write(root)
        for i in range(count):
            name = list(goldens)[i % len(goldens)]
            golden = goldens[name]
            keep = None if golden.is_dir() else golden.read_bytes()
            path = spoil(golden, rng)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            try:
                read(name, path)
                tally["read"] += 1
            except xmil.XmilError as error:
                tally["refused"] += 1
                if str(path.parent) not in str(error) or "\n" in str(error):
                    raise RuntimeError(f"not one line with the path: {error}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
                if keep is not None:
                    golden.write_bytes(keep)
    return tally


if __name__ == "__main__":
    found = main(int(sys.argv[1]), int(sys.argv[2]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    counts = f"{found['read']} read, {found['refused']} refused"
    print(f"{sum(found.values())} inputs tried: {counts}, peak {peak:.2f} GiB")
