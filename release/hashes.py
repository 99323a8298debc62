"""Pinned hashes of what the tests install: `python -m release.hashes REPORT > hashes.txt`, of pip's report.

    pip install --dry-run --ignore-installed --no-deps --report REPORT -r constraints.txt

Torch is left out: its builds for CPU and CUDA share a version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LEFT_OUT = ("torch",)


def lines(report: dict[str, Any]) -> list[str]:
    """A requirement with its hash for each package of the report."""
    made = []
    for found in report["install"]:
        name, version = found["metadata"]["name"].lower(), found["metadata"]["version"]
        if name not in LEFT_OUT:
            digest = found["download_info"]["archive_info"]["hashes"]["sha256"]
            made.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(made)


if __name__ == "__main__":
    print("# Linux on x86-64, Python 3.11; made by `python -m release.hashes`.")
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
