"""The bill of materials, pinned hashes, the offline bundle, the lowest versions, one version everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import time
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from release.bill import LOCK, bill, installed
from release.bundle import EXTRAS, builds, pack
from release.hashes import lines
from release.lowest import AS_TODAY, TOOLS, bounds, constraints, pins

import xmil
from xmil.core.request import REMOVED

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


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
    hashed = {re.sub(r"[-_.]+", "-", row.partition("==")[0]) for row in rows}
    assert set(canonical) - hashed == {"torch"}
    report = {"install": [{"metadata": {"name": "A", "version": "1"}, "download_info": {}}]}
    report["install"][0]["download_info"] = {"archive_info": {"hashes": {"sha256": "ab"}}}
    assert lines(report) == ["a==1 --hash=sha256:ab"]


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info[:2] != (3, 11), reason="as hashes.txt says")
def test_every_pinned_package_is_one_that_xmil_needs() -> None:
    needed = installed("xmil", frozenset(PROJECT["optional-dependencies"]))
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in constraints()}
    assert not pinned - set(needed)
    assert {Requirement(line).name for line in PROJECT["dependencies"]} <= pinned
    for lines_of_extra in PROJECT["optional-dependencies"].values():
        assert {Requirement(line).name for line in lines_of_extra} <= pinned


def test_the_bundle_has_the_digest_of_every_file_and_all_that_its_containerfile_names(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("xmil-9.9.9-py3-none-any.whl", "torch-2.0-cp311-cp311-linux_x86_64.whl"):
        (wheels / name).write_bytes(name.encode())
    made = pack(wheels, tmp_path / "dist")
    assert re.fullmatch(r"xmil-9\.9\.9-offline-[\w.-]+-py3\d+\.tar", made.name)
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path, filter="data")
    home = tmp_path / made.stem
    sums = dict(reversed(line.split("  ")) for line in (home / "SHA256SUMS").read_text().splitlines())
    files = {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
    assert set(sums) == files - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((home / name).read_bytes()).hexdigest() == digest, name
    recipe = (home / "Containerfile").read_text()
    for option in ("--check --quiet", "--find-links", "--constraint"):
        assert (home / recipe.partition(f"{option} ")[2].split()[0]).exists()
    assert f"xmil[{EXTRAS}]" in recipe
    assert f"xmil[{EXTRAS}]" in (home / "README.md").read_text()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"ARG BASE=python:{python}-" in recipe
    again = pack(wheels, tmp_path / "again")
    assert again.read_bytes() == made.read_bytes()


def test_the_bundle_has_every_extra_of_users() -> None:
    assert set(EXTRAS.split(",")) == set(PROJECT["optional-dependencies"]) - {"dev", "docs"}


def test_builds_of_torch_and_torchvision_are_compared(tmp_path: Path) -> None:
    for name in ("torch-2.13.0+cpu-cp311.whl", "torchvision-0.28.0-cp311.whl", "torchmetrics-1.0-py3.whl"):
        (tmp_path / name).touch()
    assert builds(tmp_path) == {"torch": "cpu", "torchvision": ""}


def test_a_page_is_built_again_after_a_change_of_any_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = SimpleNamespace(BuildHookInterface=object)  # hatchling is there while a package is built only
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", hooks)
    is_fresh = import_module("hatch_build").is_fresh
    page, built = Path(shutil.copytree(LOCK.parent, tmp_path / "page")), tmp_path / "static"
    built.mkdir()
    (built / "index.html").touch()
    files = [path for path in page.rglob("*") if path.is_file() and "node_modules" not in path.parts]
    now = time.time()
    for path in files:
        os.utime(path, (now - 60, now - 60))
    assert is_fresh(page, built)
    for path in files:
        os.utime(path, (now + 60, now + 60))
        assert not is_fresh(page, built), path
        os.utime(path, (now - 60, now - 60))


def test_the_sources_hold_what_a_release_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    sources = project["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {"release", "page", "constraints.txt", "hashes.txt", "Containerfile", "Makefile"} <= set(
        sources["include"]
    )


def test_pins_of_the_lowest_versions_are_below_those_of_today() -> None:
    today = {re.sub(r"[-_.]+", "-", name).lower(): value for name, value in constraints().items()}
    for name, lowest in bounds().items():
        assert Version(lowest) <= Version(today[name]), name
    requirements = {Requirement(line).name: line for line in pins("torch==2.11.0")}
    assert set(requirements) == {*bounds(), *AS_TODAY, *TOOLS}
    assert requirements["torch"] == "torch==2.11.0"
    assert requirements["numpy"] == f"numpy=={bounds()['numpy']}"


def test_the_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {xmil.__version__}\n" in citation
    newest = re.search(r"^## (\S+) - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == xmil.__version__
    assert f"\ndate-released: {newest[2]}\n" in citation
    named = re.findall(r"xmil-(\S+?)-offline", (ROOT / "docs" / "start" / "install.md").read_text())
    assert set(named) == {xmil.__version__}


def test_the_changelog_names_every_option_that_is_gone() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    for name in REMOVED:
        option = name.partition(".")[2]
        flag = option.replace("_", "-")
        assert re.search(rf"[` ](--{flag}|--no-{flag}|{option.upper()})[` ]", text), name
