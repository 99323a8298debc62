"""What installing the package would leave behind: its metadata with the entry points."""

from __future__ import annotations

import os
from pathlib import Path

import xmil

GROUPS = {  # kind of addition: its entry-point groups, and the module or function of each
    "model": {"xmil.models": "xmil_extra.model"},
    "method": {"xmil.methods": "xmil_extra.method"},
    "rule": {"xmil.rules": "xmil_extra.rule"},
    "reader": {"xmil.readers": "xmil_extra.reader"},
    "encoder": {"xmil.encoders": "xmil_extra.encoder"},
    "command": {"xmil.commands": "xmil_extra.command:extra_count"},
    "task": {
        "xmil.output_tasks": "xmil_extra.grades",
        "xmil.task_outputs": "xmil_extra.grades_outputs",
        "xmil.task_losses": "xmil_extra.grades_loss",
    },
    "export": {"xmil.exports": "xmil_extra.export"},
}


def install(folder: Path) -> dict[str, str]:
    """Write the package's metadata; the environment of a process that has the package."""
    about = folder / "xmil_extra-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: xmil-extra\nVersion: 1.0\n")
    points = [f"[{group}]\n{_name(group)} = {value}\n" for g in GROUPS.values() for group, value in g.items()]
    (about / "entry_points.txt").write_text("\n".join(points))
    ours, here = Path(xmil.__file__).parents[1], Path(__file__).parent / "package"
    path = os.pathsep.join(map(str, (ours, here, here.parents[2], folder)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _name(group: str) -> str:
    return "extra-count" if group == "xmil.commands" else "extra"
