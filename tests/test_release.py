"""The bill of materials lists what is installed, and pinned hashes what the tests install."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

from release.bill import LOCK, bill
from release.hashes import lines

ROOT = Path(__file__).parents[1]


def test_the_bill_lists_packages_and_the_page() -> None:
    made = bill(frozenset({"viewer"}))
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    found = {part["purl"]: part for part in made["components"]}
    for name in ("torch", "numpy", "pyarrow", "starlette", "anyio"):  # the last is required by another
        assert f"pkg:pypi/{name}@{version(name)}" in found
    assert made["metadata"]["component"]["name"] == "xmil"
    references = [part["bom-ref"] for part in made["components"]]
    assert len(set(references)) == len(references)
    if LOCK.is_file():
        bundled = next(part for purl, part in found.items() if purl.startswith("pkg:npm/"))
        assert re.fullmatch("[0-9a-f]{128}", bundled["hashes"][0]["content"])
    assert json.dumps(made, sort_keys=True) == json.dumps(bill(frozenset({"viewer"})), sort_keys=True)


def test_hashes_are_of_the_pinned_versions() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    canonical = {re.sub(r"[-_.]+", "-", name).lower(): value for name, value in pinned.items()}
    rows = [line for line in (ROOT / "hashes.txt").read_text().splitlines() if line[0] != "#"]
    assert len(rows) > 150
    for row in rows:
        found = re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", row)
        assert found, row
        assert canonical[re.sub(r"[-_.]+", "-", found[1])] == found[2]
    assert "torch" not in [row.partition("==")[0] for row in rows]
    report = {"install": [{"metadata": {"name": "A", "version": "1"}, "download_info": {}}]}
    report["install"][0]["download_info"] = {"archive_info": {"hashes": {"sha256": "ab"}}}
    assert lines(report) == ["a==1 --hash=sha256:ab"]
