"""Fuzzing led by coverage (atheris, where it is installed): inputs that reach new code are bred further.

    python -m tests.fuzz.guided --seconds 20 [--entries config cohort] [--out counts.json]

Every entry whose input is one file is read in a process of its own, which libFuzzer ends at a fault, at an
input of more than ten seconds, or beyond 1.5 GB; the fault's last words are in the counts.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz.entries import ENTRIES


def run(name: str, seconds: int) -> dict[str, Any]:
    """The counts of one entry, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.fuzz.guided_entry", name, folder, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    told = "" if done.returncode == 0 else done.stderr[-600:]
    inputs, places = int(found[1]) if found else 0, [int(number) for number in covered]
    return {"inputs": inputs, "covered": [min(places, default=0), max(places, default=0)], "fault": told}


def main() -> None:
    """Every entry in turn."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--seconds", type=int, default=20, help="for each entry")
    parser.add_argument("--entries", nargs="+", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    args = parser.parse_args()
    if find_spec("atheris") is None:
        raise SystemExit("atheris is not installed; get it with pip install atheris.")
    with tempfile.TemporaryDirectory() as folder:
        files = [n for n in args.entries if not ENTRIES[n].lacks and _is_file(n, Path(folder))]
    found = {}
    for name in files:
        found[name] = run(name, args.seconds)
        sys.stdout.write(f"{name}: {json.dumps(found[name])}\n")
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(entry["fault"] for entry in found.values()))


def _is_file(name: str, folder: Path) -> bool:
    place = folder / name
    place.mkdir()
    return ENTRIES[name].make(place).is_file()


if __name__ == "__main__":
    main()
