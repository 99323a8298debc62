"""A run's folder as the viewer reads it: its settings, its table of slides, explanations, certificates."""

from __future__ import annotations

import re
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from xmil.core.absence import absent
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, XmilError
from xmil.core.run import check_explained
from xmil.core.runfiles import FAILURES, RUN, SLIDES, read_rows, read_run
from xmil.core.task import TASKS
from xmil.data.siblings import is_plain
from xmil.viewer.kept import Files, read_json, under

SUFFIX = ".parquet"
PATIENCE = 0.5  # seconds
FOLDERS = re.compile(r"(?<!\w)(?:[A-Za-z]:)?/(?:[^/\s:;,'\"()]+/)*")
Row = dict[str, str]


class ShownRun:
    """One folder of `xmil explain` or `xmil evaluate`; it may still be growing."""

    def __init__(self, folder: Path, *, follow_links: bool = False) -> None:
        if not folder.is_dir():
            raise FileError(absent(folder, "folder"))
        if not (folder / "slides").is_dir() and not (folder / RUN).is_file():
            raise FileError(f"{folder}: not a run (no slides/ and no run.json); run `xmil explain` first.")
        with suppress(FileError):  # a damaged run.json hides no slides
            check_explained(folder, _read_about(folder / RUN).get("kind"))
        self.folder, self.follow_links = folder, follow_links
        self.name = folder.resolve().name
        self._about = Files(_read_about, limit=1, patience=PATIENCE)
        self._papers = Files(read_json, limit=16)
        self._verdicts = Files(_read_verdict, limit=100_000)
        self._tables = Files(_read_rows, limit=4, patience=PATIENCE)
        self._curves = Files(_read_curves, limit=16)

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says; empty where it is missing or damaged."""
        try:
            return self._about.get(self.folder / RUN)
        except FileError:
            return {}

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the run's model, as far as it is written down."""
        model = self.about.get("model")
        spec = model.get("spec") if isinstance(model, dict) else None
        return spec if isinstance(spec, dict) else {}

    @property
    def task(self) -> str:
        """The model's task."""
        return str(self.about.get("task") or self.spec.get("task") or "classification")

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, where the model knows them."""
        names = self.about.get("class_names") or self.spec.get("class_names")
        return [str(name) for name in names] if isinstance(names, list) else None

    def names(self, n_outputs: int) -> list[str]:
        """Names of classes, values or time bins; numbers where the run does not know them."""
        return TASKS[self.task].names(n_outputs, self.class_names, self.spec.get("time_bins"))

    @property
    def model(self) -> str:
        """The model in a word or two, never with its path."""
        model = self.about.get("model")
        file = Path(str(model.get("path") or "")).name if isinstance(model, dict) else ""
        more = f"{len(self.digests)} models" if len(self.digests) > 1 else ""
        return ", ".join(part for part in (str(self.spec.get("name") or ""), file, more) if part) or self.name

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of the model's file, or of the files of an ensemble."""
        models = self.about.get("models") or [self.about.get("model")]
        listed = models if isinstance(models, list) else []
        return tuple(str(m["digest"]) for m in listed if isinstance(m, dict) and m.get("digest"))

    @property
    def bags(self) -> tuple[tuple[str, ...], bool]:
        """What must be the same for two runs to have predicted the same: models, and what made a bag."""
        return self.digests, self.by_case

    @property
    def by_case(self) -> bool:
        """Whether all slides of a case made one bag."""
        settings = self.about.get("settings")
        said = settings.get("by") if isinstance(settings, dict) else None
        return (self.about.get("by") or said) == "case"

    def method_params(self, method: str) -> tuple[dict[str, Any], int]:
        """The parameters that a method was given, as far as they are written down, and the run's seed."""
        settings = self.about.get("settings")
        known = settings if isinstance(settings, dict) else {}
        params, seed = known.get("params"), known.get("seed")
        own = params.get(method) if isinstance(params, dict) else None
        return own if isinstance(own, dict) else {}, seed if isinstance(seed, int) else 0

    @property
    def rows(self) -> dict[str, Row]:
        """The rows of slides.csv by slide."""
        return self._table(SLIDES)

    @property
    def failures(self) -> dict[str, Row]:
        """The rows of failures.csv by slide."""
        return self._table(FAILURES)

    def failure(self, slide_id: str) -> str | None:
        """Why a slide has no explanation, without the folders of this machine."""
        told = self.failures.get(slide_id, {}).get("error")
        return FOLDERS.sub("", told) if told else None

    def slides(self) -> list[str]:
        """The slides of the run: the table's, then those with a file only, then those that failed."""
        try:
            files = sorted(path.name for path in (self.folder / "slides").iterdir())
        except OSError:
            files = []
        stems = [name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX) and name[0] != "."]
        return list(dict.fromkeys([*self.rows, *stems, *self.failures]))

    def explanation(self, slide_id: str) -> Path | None:
        """The file with a slide's scores."""
        return self._file("slides", slide_id, SUFFIX)

    def inside(self, slide_id: str) -> Path | None:
        """The file with the maps inside a slide's patches, where `xmil inside` wrote one."""
        return self._file("inside", slide_id, ".npz")

    def concepts(self, slide_id: str) -> Path | None:
        """The file with a slide's relevance by concept, where `xmil insight` wrote one."""
        return self._file("insight/concepts", slide_id, ".npz")

    def pairs(self, slide_id: str) -> list[Path]:
        """The files with a slide's interactions, one per target; a longer name may start like this one's."""
        if not is_plain(slide_id):
            return []
        listed = sorted((self.folder / "interactions").glob(f"{escape(slide_id)}.*{SUFFIX}"))
        found = (under(self.folder, path, follow_links=self.follow_links) for path in listed)
        return [path for path in found if path is not None]

    def certificate(self, slide_id: str) -> dict[str, Any] | None:
        """A slide's certificate with each method's curves, where the run has one."""
        try:
            path = self._file("certificates", slide_id, ".json")
            if path is None:
                return None
            found = self._papers.get(path)
            return {**found, "methods": self._with_curves(found, slide_id)}
        except XmilError:
            return None

    def verdict(self, slide_id: str) -> dict[str, Any]:
        """What a slide's certificate says in short: label, predicted, correct, its headline's verdict."""
        try:
            path = self._file("certificates", slide_id, ".json")
            return {} if path is None else self._verdicts.get(path)
        except XmilError:
            return {}

    def _with_curves(self, certificate: dict[str, Any], slide_id: str) -> list[dict[str, Any]]:
        methods = certificate.get("methods")
        listed = [m for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
        try:
            bag = str(certificate.get("slide_id") or slide_id)  # the case, where its slides were one bag
            path = self._file("results", bag, SUFFIX)
            curves = {} if path is None else self._curves.get(path)
        except XmilError:
            curves = {}
        mode = str(certificate.get("mode"))
        return [{**curves.get((str(m.get("method")), mode), {}), **m} for m in listed]

    def _file(self, folder: str, slide_id: str, suffix: str) -> Path | None:
        if not is_plain(slide_id):
            raise FileError(f"The slide name {slide_id!r} cannot name a file; rename the slide.")
        path = self.folder / folder / f"{slide_id}{suffix}"
        return under(self.folder, path, follow_links=self.follow_links)

    def _table(self, name: str) -> dict[str, Row]:
        try:
            return self._tables.get(self.folder / name)
        except FileError:
            return {}


def _read_verdict(path: Path) -> dict[str, Any]:
    found = read_json(path)
    methods = found.get("methods")
    listed = methods if isinstance(methods, list) else []  # files without a headline begin with its method
    said = [m for m in (found.get("headline"), *listed) if isinstance(m, dict) and m.get("verdict")]
    short = {key: found.get(key) for key in ("label", "predicted", "correct")}
    first = said[0] if said else {}
    named = {"verdict": first.get("verdict"), "verdict_method": first.get("method")}
    return {**short, **{key: None if value is None else str(value) for key, value in named.items()}}


def _read_about(path: Path) -> dict[str, Any]:
    try:
        return read_run(path.parent) or {}
    except XmilError as error:
        raise FileError(str(error)) from None


def _read_rows(path: Path) -> dict[str, Row]:
    return read_rows(path)


def _read_curves(path: Path) -> dict[tuple[str, str], dict[str, list[float]]]:
    """The curves of a slide by method and mode."""
    import pyarrow as pa

    try:
        rows = read_parquet(path, ["method", "mode", "morf", "lerf"]).to_pylist()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise FileError(f"{path.name}: not a readable result ({str(error).splitlines()[0]}).") from None
    kept = {(str(row["method"]), str(row["mode"])): row for row in rows}
    return {key: {name: row[name] for name in ("morf", "lerf") if row[name]} for key, row in kept.items()}
