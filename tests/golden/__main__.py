"""`python -m tests.golden`: compare the golden runs with their expectations; --write makes those again."""

from __future__ import annotations

import argparse
import difflib
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.conftest import DATA
from tests.golden.records import RELATIVE, differences, read_record, write_record
from tests.golden.runs import RUNS, Workspace, mnist_bags
from tests.golden.signatures import signatures

EXPECTED = Path(__file__).parent / "expected"
MNIST = "mnist"  # where the data is at hand
SIGNATURES = "signatures"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    every = [*RUNS, SIGNATURES, MNIST]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of {', '.join(every)}; all without any"
    )
    parser.add_argument("--write", action="store_true", help="write the expectations that changed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changed = []
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder))
        for name in options.names or every:
            started = time.process_time()
            lines = (
                compare_signatures(options.write)
                if name == SIGNATURES
                else compare(name, workspace, options.write)
            )
            print(f"{name}: {len(lines)} differ ({time.process_time() - started:.1f} s)", flush=True)
            for line in lines:
                print(f"  {line}")
            changed += lines
    return int(bool(changed) and not options.write)


def compare(name: str, workspace: Workspace, write: bool) -> list[str]:
    """What a run gives now that its expectations do not hold."""
    path = EXPECTED / f"{name}.json"
    if name == MNIST:
        if not (DATA / "mnist").is_dir():
            return []
        record, relative = mnist_bags(workspace, DATA / "mnist"), RELATIVE
    else:
        record, relative = RUNS[name].record(workspace), RUNS[name].relative
    if not path.is_file():
        lines = [f"{len(record)} values, for the first time"]
    else:
        lines = differences(read_record(path), record, relative=relative)
    if write and lines:
        write_record(record, path)
    return lines


def compare_signatures(write: bool) -> list[str]:
    """Lines of the signatures that are not the committed ones."""
    path, text = EXPECTED / f"{SIGNATURES}.txt", signatures()
    old = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    lines = list(difflib.unified_diff(old, text.splitlines(), "committed", "now", n=0, lineterm=""))
    if write and lines:
        path.write_text(text, encoding="utf-8")
    return lines


if __name__ == "__main__":
    sys.exit(main())
