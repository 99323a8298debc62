"""Reading bags, within one run: whole against plain h5py, and 2,048 of 50,000 rows against the whole.

python -m benchmarks.read
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np

import xmil
from benchmarks.clock import seconds

ROWS, WIDTH, DRAWN, REPEATS = 50_000, 1024, 2_048, 7


def write(path: Path, *, layout: str, dtype: type) -> Path:
    """50,000 x 1,024 features as TRIDENT writes them (one row per chunk), in large chunks, or as we do."""
    chunks = {"row chunks": (1, WIDTH), "large chunks": (1024, WIDTH), "contiguous": None}[layout]
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        features = file.create_dataset("features", (ROWS, WIDTH), dtype=dtype, chunks=chunks)
        for start in range(0, ROWS, 5000):
            features[start : start + 5000] = rng.normal(size=(5000, WIDTH)).astype(dtype)
        coords = file.create_dataset("coords", data=rng.integers(0, 400, (ROWS, 2)) * 512)
        coords.attrs["patch_size_level0"] = 512
    return path


def plain(path: Path) -> np.ndarray:
    """What one writes without us: open, read, widen."""
    with h5py.File(path, "r") as file:
        coords = file["coords"][:]
        return np.asarray(file["features"][:], dtype=np.float32)[: len(coords)]


def measure(path: Path, drawn: np.ndarray) -> str:
    """One row of the table."""
    base, ours, header, some = seconds(
        lambda: plain(path),
        lambda: xmil.read_bag(path),
        lambda: xmil.open_bag(path),
        lambda: xmil.read_bag(path, rows=drawn),
        repeats=REPEATS,
    )
    whole = f"{base:>9.3f}{ours:>9.3f}{ours / base:>11.2f}"
    return f"{whole}{header * 1e3:>11.1f}{some:>9.3f}{some / ours:>12.3f}"


def main() -> None:
    """Print seconds and ratios."""
    drawn = np.sort(np.random.default_rng(1).choice(ROWS, DRAWN, replace=False))
    print(f"{ROWS:,} x {WIDTH:,} features; {DRAWN:,} rows drawn; median of {REPEATS} runs that take turns")
    titles = f"{'h5py s':>9}{'ours s':>9}{'ours/h5py':>11}{'header ms':>11}{'rows s':>9}{'rows/whole':>12}"
    print(f"{'layout':<14}{'dtype':<9}{titles}")
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("contiguous", "row chunks", "large chunks"):
            for dtype in (np.float32, np.float16):
                path = write(Path(folder, "bag.h5"), layout=layout, dtype=dtype)
                print(f"{layout:<14}{np.dtype(dtype).name:<9}{measure(path, drawn)}")
                path.unlink()


if __name__ == "__main__":
    main()
