"""Copies of the runs that 0.2.0 made, with the paths of their new home, and the commands that made them.

`benchmarks/runs_of_0_2.py` made the runs, which store absolute paths. A copy is what 0.2.0 would have
written there: with the paths, the fingerprints of settings with paths, and the digests of files with either.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from xmil.storage import content_digest

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs_of_0.2"
PREFIX = "/data/xmil"  # where the runs were made
MANIFEST = "manifest.jsonl"

Replacements = list[tuple[bytes, bytes]]


def commands(root: Path) -> dict[str, list[str]]:
    """The words of today for what 0.2.0 did, by the name of the run; without --out."""
    data = root / "data"
    inputs = ["--model", f"{data}/model.safetensors", "--features", f"{data}/features"]
    labelled = [*inputs, "--cohort", f"{data}/cohort.csv"]
    slides = ["--slides", f"{data}/slides"]
    encoding = ["--encoder", "tests.encoders.builders:network", "--device", "cpu"]
    small = ["--size", "60", "--pictures", "map", "--to", "png,csv"]
    return {
        "explain": ["explain", *labelled, "--methods", "lrp,attention", "--target", "predicted"],
        "contexts": ["explain", *labelled, "--methods", "lrp", "--param", "lrp.contexts=6"],
        "interactions": [
            *("explain", *labelled, "--methods", "lrp", "--config", "interactions=4"),
            *("--background", f"{data}/background"),
        ],
        "over_slides": [
            *("explain", "--model", f"{data}/model.safetensors", *slides, *encoding),
            *("--tile-size", "32", "--tile-mpp", "0.5", "--mpp", "0.5"),
        ],
        "unfinished": ["explain", *labelled, "--methods", "lrp,attention"],
        "added": ["explain", *labelled, "--methods", "lrp,attention"],
        "evaluate": [
            *("evaluate", *labelled, "--split", "train", "--methods", "lrp,attention"),
            *("--steps", "4", "--config", "orders=2"),
        ],
        "predict": ["predict", *labelled],
        "tile": [
            *("tile", f"{data}/slides", "--size", "32", "--slide-mpp", "0.5", "--min-tissue", "0"),
            *("--drop", "none"),
        ],
        "embed": ["embed", "--tiles", f"{root}/tile", *slides, *encoding],
        "inside": [
            *("inside", f"{root}/over_slides", *slides, "--features", f"{root}/over_slides/features"),
            *("--model", f"{data}/model.safetensors", *encoding, "--patches", "1", "--map", "occlusion"),
        ],
        "insight": ["insight", f"{root}/explain", *labelled, "--config", "concepts=2"],
        "train": ["train", f"{data}/config.toml"],
        "bench": [
            *("bench", "--suite", "evidence", "--quick", "--only", "--task", "standard"),
            *("--repetitions", "1", "--methods", "gxi", "--model", "attnmil"),
        ],
        "drawn": ["explain", *labelled, "--methods", "lrp"],
        "drawn/heatmaps": ["heatmap", f"{root}/drawn", *small],
        "drawn/pale": ["heatmap", f"{root}/drawn", *small, "--config", "alpha=0.3", "--clip", "none"],
    }


def copy_runs(root: Path) -> Path:
    """Copy the runs and their inputs into a new folder, which they name from then on."""
    shutil.copytree(FIXTURES, root)
    adapt_texts(root / "data", [(PREFIX.encode(), bytes(root))])
    folders = [path.parent for path in root.rglob(MANIFEST)]
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):  # runs in runs first
        adapt_run(folder, root)
    return root


def adapt_run(folder: Path, root: Path) -> None:
    """Let a run name another folder than PREFIX."""
    replacements = [(PREFIX.encode(), bytes(root))]
    about = json.loads((folder / "run.json").read_text())
    settings = json.dumps(about.get("settings"))
    if PREFIX in settings:
        other = json.loads(settings.replace(PREFIX, str(root)))
        replacements.append((about["fingerprint"].encode(), fingerprint(about["kind"], other).encode()))
    changed = [*adapt_texts(folder, replacements), *adapt_tables(folder, replacements)]
    seal(folder, {path.relative_to(folder).as_posix() for path in changed})


def adapt_texts(folder: Path, replacements: Replacements) -> list[Path]:
    """Replace words in the texts of a folder; gives those that change."""
    changed = []
    for path in [*folder.rglob("*.json"), *folder.rglob("*.csv"), *folder.rglob("*.toml")]:
        content = path.read_bytes()
        other = replace(content, replacements)
        if other != content:
            path.write_bytes(other)
            changed.append(path)
    return changed


def adapt_tables(folder: Path, replacements: Replacements) -> list[Path]:
    """Replace words in the headers of Parquet files; gives those that change."""
    changed = []
    for path in folder.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        header = table.schema.metadata or {}
        other = {key: replace(value, replacements) for key, value in header.items()}
        if other == header:
            continue
        if b"xmil" in other and other[b"xmil"].startswith(b"{"):
            stored = json.loads(other[b"xmil"])
            del stored["digest"]
            stored["digest"] = content_digest(stored, table)
            other[b"xmil"] = json.dumps(stored).encode()
        pq.write_table(table.replace_schema_metadata(other), path)
        changed.append(path)
    return changed


def replace(content: bytes, replacements: Replacements) -> bytes:
    for old, new in replacements:
        content = content.replace(old, new)
    return content


def fingerprint(kind: str, settings: dict[str, Any]) -> str:
    """The digest of the settings of a run whose methods do not grow."""
    text = json.dumps({"kind": kind, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seal(folder: Path, changed: set[str]) -> None:
    """Write size and digest of changed files into the manifest of a run, in the list and behind it."""
    path = folder / MANIFEST
    head, *lines = path.read_bytes().splitlines(keepends=True)
    last = {json.loads(line).get("path"): i for i, line in enumerate(lines)}
    for name in changed & last.keys():
        content = (folder / name).read_bytes()
        facts = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        lines[last[name]] = json.dumps({**json.loads(lines[last[name]]), **facts}).encode() + b"\n"
    header = json.loads(head)
    header["sha256"] = hashlib.sha256(b"".join(lines[: header["files"]])).hexdigest()
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(lines))
