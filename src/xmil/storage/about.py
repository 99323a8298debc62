"""run.json: what a run was asked to do and what decides its results, and what it ran on.

Layout 1 had no number, named its kind `command` in some runs and stored settings under `inputs`; it is
converted to the current layout. Layout 2 is that of xmil 0.2, whose heatmaps stored their style beside the
settings.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xmil._version import __version__
from xmil.core.errors import InputError, not_made
from xmil.core.ledger import RUN
from xmil.core.text import parse_json
from xmil.core.verdict import RunVerdict
from xmil.storage.ledger import read_ledger
from xmil.storage.tables import check_inside, write_json

LAYOUT = 3  # of run.json; later layouts are refused, earlier ones are read


class RunFacts:
    """What run.json says of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def about(self) -> dict[str, Any]:
        """The content of run.json, or empty."""
        return read_run(self.path) or {}

    @property
    def kind(self) -> str:
        """The command that filled the folder: "explain", "tile", ..."""
        return str(self.about.get("kind") or "explain")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the results."""
        return dict(self.about.get("settings", {}))

    @property
    def warnings(self) -> list[str]:
        """Sentences about doubts in the run."""
        return [str(text) for text in self.about.get("warnings") or ()]

    @property
    def verdict(self) -> RunVerdict | None:
        """Whether the run's maps show what the model uses; None if that was not measured."""
        stored = self.about.get("verdict")
        return RunVerdict.from_dict(stored) if isinstance(stored, dict) else None

    @property
    def is_finished(self) -> bool:
        """Whether the last command in the folder ended, by its ledger; True without a ledger."""
        ledger = read_ledger(self.path)
        return ledger is None or ledger.begun is None

    @property
    def task(self) -> str:
        """The task of the run's model."""
        return str(self.about.get("task") or self.spec.get("task") or "classification")

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, if the model knows them."""
        names = self.about.get("class_names") or self.spec.get("class_names")
        return tuple(map(str, names)) if isinstance(names, list) and names else None

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the run's model, as far as it is stored."""
        model = self.about.get("model")
        spec = model.get("spec") if isinstance(model, dict) else None
        return spec if isinstance(spec, dict) else {}

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the model's file, or of the files of an ensemble."""
        models = self.about.get("models") or [self.about.get("model")]
        rows = models if isinstance(models, list) else []
        return tuple(str(m["digest"]) for m in rows if isinstance(m, dict) and m.get("digest"))

    @property
    def by_case(self) -> bool:
        """Whether all slides of a case form one bag."""
        return (self.about.get("by") or self.settings.get("by")) == "case"


def read_run(folder: Path) -> dict[str, Any] | None:
    """Read a folder's run.json of any layout; None if there is none.

    `kind`, `layout` and `settings` are always present.
    """
    path = folder / RUN
    check_inside(path)
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        if not folder.is_dir():  # a file, or a circular link
            raise InputError(not_made(folder, error)) from None
        raise InputError(f"{path}: cannot be read ({error.strerror}); use another folder.") from None
    except ValueError:
        raise InputError(
            f"{path}: damaged; put back a copy of it, or make the run again in another folder."
        ) from None
    return _upgrade(stored if isinstance(stored, dict) else {}, path)


def _upgrade(stored: dict[str, Any], path: Path) -> dict[str, Any]:
    """Convert an earlier run.json to the current layout."""
    layout = stored.get("layout", 1)
    if not isinstance(layout, int) or layout > LAYOUT:
        raise InputError(f"{path}: of layout {layout}, which this version does not know; update xmil.")
    kind = stored.get("kind", stored.get("command"))
    inputs, settings = stored.get("inputs"), stored.get("settings", stored.get("config"))
    if "protocol_name" in stored:  # of `xmil bench`, which stored no kind and no separate settings
        kind, settings = "bench", stored
    if kind == "heatmap" and layout == 2:
        style = stored.get("style")
        style = dict(style) if isinstance(style, dict) else {}
        settings = {**style, **style.pop("look", {})}
        settings.pop("look", None)
    merged = {
        **(inputs if isinstance(inputs, dict) else {}),
        **(settings if isinstance(settings, dict) else {}),
    }
    about = {**stored, "kind": kind if isinstance(kind, str) else None, "layout": layout, "settings": merged}
    if "warnings" in stored:
        lines = stored["warnings"]
        about["warnings"] = [str(text) for text in lines] if isinstance(lines, list) else []
    return about


def command_of(kind: object) -> str:
    """Name the command that makes runs of a kind; pictures and exports are the same kind."""
    return "`xmil heatmap` or `xmil export`" if kind == "heatmap" else f"`xmil {kind}`"


def write_run(folder: Path, kind: str, about: Mapping[str, Any]) -> None:
    """Write run.json of a run of a kind, with the layout, versions and the machine."""
    first = {"kind": kind, "layout": LAYOUT, "version": __version__, "ledger": True}
    write_json(folder / RUN, {**first, **about, **provenance()})


def provenance() -> dict[str, Any]:
    """Collect versions, Python, system, and the commit of the code's checkout, if there is one.

    >>> sorted(provenance())
    ['commit', 'python', 'system', 'versions']
    """
    versions = {"xmil": __version__}
    for name in ("torch", "numpy"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git_commit(),
    }


def git_commit() -> str | None:
    """Find the commit of the code's checkout, if there is one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5)  # noqa: S603  # fixed words
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
