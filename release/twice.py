"""Build the wheel twice, from two copies of the sources, and compare: `python -m release.twice`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_BEHIND = (".venv", ".git", "build", "dist", "node_modules", "site", "__pycache__", ".*_cache", ".carry")


def build(source: Path, out: Path, *, isolated: bool) -> Path:
    """The wheel of a source tree; without isolation the environment's own hatchling builds it."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    subprocess.run(
        command + ([] if isolated else ["--no-isolation"]), env=env, check=True, stdout=subprocess.DEVNULL
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def copied(folder: Path) -> Path:
    """The sources elsewhere; the built page comes along, newer than its sources."""
    copy = Path(shutil.copytree(ROOT, folder / "src", ignore=shutil.ignore_patterns(*LEFT_BEHIND)))
    for path in (copy / "src" / "xmil" / "viewer" / "static").rglob("*"):
        os.utime(path)
    return copy


def differences(one: Path, two: Path) -> list[str]:
    """Members that differ, or that one of the wheels lacks."""
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(two) as b:
        names = sorted({*a.namelist(), *b.namelist()})
        held = [{n: z.read(n) for n in z.namelist()} for z in (a, b)]
    return [name for name in names if held[0].get(name) != held[1].get(name)]


def main() -> None:
    """Say whether both wheels are the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        wheels = []
        for place in ("one", "two"):
            home = Path(folder, place)
            home.mkdir()
            wheels.append(build(copied(home), home / "dist", isolated="--no-isolation" not in sys.argv))
        digests = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
        if digests[0] != digests[1]:
            sys.exit(f"the wheels differ: {differences(*wheels)[:20] or 'in their order or times'}")
        print(f"the same wheel twice: {wheels[0].name} sha256:{digests[0]}")


if __name__ == "__main__":
    main()
