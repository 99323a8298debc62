"""Reading and writing the folders of runs: run.json, tables, explanations, certificates, the lock.

run.json, slides.csv, failures.csv   the settings, a row per slide, the slides without a result
manifest.jsonl                       path, size and digest of every file, written with the files
slides/<slide>.parquet               explanations
interactions/<slide>.<target>.parquet, certificates/<slide>.json, results/<bag>.parquet,
inside/<slide>.npz, insight/concepts/<slide>.npz    other results of a slide

A folder may still be growing, and may come from anyone: pipes are refused, links are not followed, and file
contents are checked before use. Layout 1 of run.json had no number, named its kind `command` in some runs and
stored settings under `inputs`; it is converted to the current layout. A file in the folder is whole or
absent. A command only writes into a new or empty folder, or into a run of its own kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from glob import escape as escape_glob
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xmil._version import __version__
from xmil.core.budget import check_csv, check_regular, csv_rows, parquet_rows
from xmil.core.durable import FULL, is_inside, remove_file, sync_folder, write_text
from xmil.core.errors import FileError, InputError, WriteError, XmilError, absent, not_made, unknown_name
from xmil.core.interactions import Interactions
from xmil.core.journal import MANIFEST, is_manifest, owning_run
from xmil.core.journal import RUN as RUN
from xmil.core.quoting import plain_cell
from xmil.core.services import service
from xmil.core.task import Target
from xmil.core.text import counted, csv_text, is_plain, parse_json, shorten
from xmil.core.verdict import RunVerdict
from xmil.storage.explanations import read_explanation, read_interactions, read_provenance
from xmil.storage.manifest import STORE, fold_manifest, read_manifest, start_manifest

if TYPE_CHECKING:
    import pandas as pd

    from xmil.core.explanation import Explanation

SLIDES, FAILURES = "slides.csv", "failures.csv"
INTERACTIONS = "interactions"  # the folder of `interactions=` of `xmil explain`
LAYOUT = 2  # of run.json; later layouts are refused, earlier ones are read
TABLES = {"predict": "predictions.csv", "train": "results.csv"}  # slides.csv for other commands
NAMED = ("slide_id", "case_id", "name", "model", "fold", "job")  # text, even if it looks like a number
EXPLAINED = ("explain", "evaluate")  # commands whose runs have explanations
PLACES = {  # of a slide's files: folder and suffix
    "explanations": ("slides", ".parquet"),
    "certificate": ("certificates", ".json"),
    "results": ("results", ".parquet"),
    "inside": ("inside", ".npz"),
    "concepts": ("insight/concepts", ".npz"),
}
MADE_OF = "made_of.json"  # the files that a summary was made from, written last
SUMMARY = ("scales.csv", "scales.json", "top.csv", "bottom.csv", "slides.csv", "outliers.csv", MADE_OF)
Row = dict[str, str]
T = TypeVar("T")


class Run:
    """A folder with results of a command, or of its Python function.

    Iterating yields the slides with a result. The folder may still be growing: `table()` and `failed` read it
    again. Links inside it are not followed.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        files: Mapping[str, Path] | None = None,
        follow_links: bool = False,
    ) -> None:
        self.path, self.follow_links = Path(path), follow_links
        self._chosen = None if files is None else dict(files)  # explanations by slide, instead of slides/

    def __repr__(self) -> str:
        return (
            f"Run({str(self.path)!r}, {self.kind}: {counted(len(self), 'slide')}, {len(self.failed)} failed)"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.slides)

    def __len__(self) -> int:
        return len(self.slides)

    def __contains__(self, slide: object) -> bool:
        return slide in self.slides

    def _read(self, parse: Callable[[Path], T], path: Path) -> T:
        """Read a file; a subclass may cache it while the file stays the same."""
        return parse(path)

    def _read_table(self, name: str) -> dict[str, Row]:
        return self._read(read_rows, self.path / name)

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
        """Whether the last command in the folder ended, by its manifest; True without a manifest."""
        manifest = read_manifest(self.path)
        return manifest is None or manifest.begun is None

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

    @property
    def rows(self) -> dict[str, Row]:
        """The rows of slides.csv by slide, as text."""
        return self._read_table(SLIDES)

    @property
    def failed(self) -> dict[str, str]:
        """The slides without a result, and why."""
        return {name: row.get("error", "") for name, row in self._read_table(FAILURES).items()}

    @property
    def files(self) -> dict[str, Path]:
        """The files of explanations by slide."""
        return list_explanations(self.path / "slides") if self._chosen is None else dict(self._chosen)

    @property
    def slides(self) -> list[str]:
        """The slides with a result: those in the table, then those that only have a file."""
        if self.kind in TABLES:
            return list(self._read_table(TABLES[self.kind]))
        return list(dict.fromkeys([*self.rows, *self.files]))

    def table(self) -> pd.DataFrame:
        """Read the run's table: a row per slide, for `predict` per prediction, for `train` per model."""
        import pandas as pd

        path = self.path / TABLES.get(self.kind, SLIDES)
        if not path.is_file():
            raise FileError(f"{path}: no such table; the run has not got that far, or is of another kind.")
        check_inside(path)
        texts = dict.fromkeys(NAMED, str)
        try:
            check_csv(path)
            table = pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""])
        except FileError:
            raise
        except (OSError, ValueError, OverflowError) as error:
            reason = " ".join(str(error).split())[:200]
            raise FileError(f"{path}: not a readable table ({reason}); make it again.") from None
        for name, kind in table.dtypes.items():
            if pd.api.types.is_string_dtype(kind):
                table[name] = table[name].map(plain_cell, na_action="ignore")
        return table.rename(columns=plain_cell)

    def explanation(self, slide: str, *, method: str | None = None, target: Any = None) -> Explanation:
        """Read the explanation of a slide by method and target; refuse if several fit."""
        return read_explanation(self.file(slide), method=method, target=target)

    def file(self, slide: str) -> Path:
        """Find the file of a slide's explanations."""
        path = (self._chosen or {}).get(slide, self.path / "slides" / f"{slide}.parquet")
        with suppress(OSError):  # too long for a file name
            if is_plain(slide) and path.is_symlink():
                raise FileError(f"{path}: a link; a run's folder is read without following links.")
            if is_plain(slide) and path.is_file():
                return path
        if slide in self.failed:
            raise InputError(f"{self.path}: {slide!r} has no explanation: {self.failed[slide]}")
        raise unknown_name("slide", slide[:80], self.files)

    def find(self, what: str, slide: str) -> Path | None:
        """Find a slide's file of a kind in `PLACES`; None if missing; refuse links out of the folder."""
        if not is_plain(slide):
            raise FileError(f"The slide name {slide!r} cannot name a file; rename the slide.")
        folder, suffix = PLACES[what]
        return self._within(self.path / folder / f"{slide}{suffix}")

    def find_interactions(self, slide: str) -> list[Path]:
        """List the files of a slide's interactions, one for each target."""
        if not is_plain(slide):
            return []
        return list_interactions(self.path, slide, links=self.follow_links).get(slide, [])

    def interactions(self, slide: str, *, target: Any = None) -> Interactions:
        """Read the interactions of a slide; name the target if there are several."""
        if not is_plain(slide):
            raise unknown_name("slide", slide, self.slides)
        every = [read_interactions(path) for path in self.find_interactions(slide)]
        fitting = [pairs for pairs in every if target is None or pairs.target == Target.of(target)]
        fitting = fitting or [pairs for pairs in every if str(pairs.target) == str(target)]
        if len(fitting) != 1:
            fault = "several fit" if fitting else "none fit"
            targets = ", ".join(str(pairs.target) for pairs in every) or "none"
            folder = self.path / INTERACTIONS
            raise InputError(f"{folder}: {fault} for {slide!r}; name the target. Found: {targets}.")
        return fitting[0]

    def certificate(self, slide: str) -> dict[str, Any] | None:
        """Read a slide's certificate of `xmil evaluate` with each method's curves, if the run has one."""
        path = self.find("certificate", slide)
        if path is None:
            return None
        stored = self._read(read_json, path)
        bag = str(stored.get("slide_id") or slide)  # the case, if its slides were one bag
        mode = str(stored.get("mode"))
        curves: dict[tuple[str, str], dict[str, list[float]]] = {}
        with suppress(FileError):
            results = self.find("results", bag)
            curves = {} if results is None else self._read(read_curves, results)
        methods = stored.get("methods")
        rows = [m for m in methods if isinstance(m, dict)] if isinstance(methods, list) else []
        return {**stored, "methods": [{**curves.get((str(m.get("method")), mode), {}), **m} for m in rows]}

    def _within(self, path: Path) -> Path | None:
        """Return the path if it is a file inside the folder; only `follow_links` allows links."""
        try:
            plain = stat.S_ISREG(path.lstat().st_mode) and not path.parent.is_symlink()
        except (OSError, ValueError):
            return None
        if plain and path.parent.parent == self.path:
            return path
        if not path.is_file():
            return None
        if not self.follow_links and not is_inside(path, self.path):
            raise FileError(
                f"{path.name}: a link out of its folder, not followed; `follow_links=True` follows it."
            )
        return path

    def _repr_html_(self) -> str:
        """Show the kind, counts, warnings and first rows in a notebook."""
        return str(service("run_html")(self))


def open_run(path: str | PathLike[str]) -> Run:
    """Open the folder of a run, made by a command or in Python, by this version or an earlier one."""
    place = Path(path)
    check_run(place)
    run = Run(place)
    _ = run.about  # refuses an unreadable run.json
    return run


def explained_run(path: str | PathLike[str]) -> Run:
    """Open the folder of a run with explanations; refuse runs of other commands, and name the command."""
    run = open_run(path)
    check_explained(run)
    return run


def open_explanations(path: str | PathLike[str]) -> Run:
    """Open a run's folder, a folder of explanations, or one explanation file."""
    place = Path(path)
    if place.is_file():
        folder = place.parent.parent if place.parent.name == "slides" else place.parent
        return Run(folder, files={place.stem: place})
    if not place.is_dir():
        raise InputError(absent(place, "folder or file"))
    if not (place / "slides").is_dir():
        check_explained(Run(place, files={}))  # tables of another kind of run are not explanations
    files = list_explanations(place / "slides" if (place / "slides").is_dir() else place)
    if not files:
        raise InputError(f"{place}: no explanations here; give the folder that 'xmil explain' wrote.")
    return Run(place, files=files)


def check_run(folder: Path) -> None:
    """Refuse anything but the folder of a run."""
    if not folder.is_dir():
        raise InputError(absent(folder, "folder"))
    if not (folder / RUN).exists() and not list_explanations(folder / "slides"):
        inner = [path.name for path in sorted(folder.iterdir()) if (path / RUN).is_file()]
        if inner:
            raise InputError(f"{folder}: not a run, but a folder of {shorten(inner, 6)}; name one of them.")
    if not (folder / RUN).exists() and not (folder / "slides").is_dir():
        raise InputError(f"{folder}: not a run (no {RUN} and no slides/); give the folder of `xmil explain`.")


def command_of(kind: object) -> str:
    """Name the command that makes runs of a kind; pictures and exports are the same kind."""
    return "`xmil heatmap` or `xmil export`" if kind == "heatmap" else f"`xmil {kind}`"


def check_explained(run: Run) -> None:
    """Refuse a run of a command that explains nothing, by the kind in its run.json."""
    kind = run.about.get("kind")
    if kind not in (None, *EXPLAINED) and not run.files:
        raise InputError(
            f"{run.path}: a run of {command_of(kind)}, which holds no explanations; give the folder of "
            "`xmil explain`."
        )


def list_explanations(folder: Path) -> dict[str, Path]:
    """List the files of explanations in a folder by slide."""
    paths = sorted(folder.glob("*.parquet"), key=lambda path: path.name)
    return {path.stem: path for path in paths if not path.name.startswith(".")}


def interactions_file(folder: Path, slide: str, target: Target) -> Path:
    """Name the file of a slide's interactions for a target, in a run's folder."""
    against = "" if target.against is None else f"-vs-{target.against}"
    return folder / INTERACTIONS / f"{slide}.{target.cls}{against}.parquet"


def list_interactions(
    folder: Path, slide: str | None = None, *, links: bool = False
) -> dict[str, list[Path]]:
    """List the files of interactions in a run's folder by slide, one for each target; skip links."""
    stem, files = re.compile(r"(.+)\.\d+(-vs-\d+)?\.parquet"), dict[str, list[Path]]()
    pattern = "*.parquet" if slide is None else f"{escape_glob(slide)}.*.parquet"
    for path in sorted((folder / INTERACTIONS).glob(pattern)):
        if (parts := stem.fullmatch(path.name)) and (links or not path.is_symlink()):
            files.setdefault(parts[1], []).append(path)
    return files


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
    merged = {
        **(inputs if isinstance(inputs, dict) else {}),
        **(settings if isinstance(settings, dict) else {}),
    }
    about = {**stored, "kind": kind if isinstance(kind, str) else None, "layout": layout, "settings": merged}
    if "warnings" in stored:
        lines = stored["warnings"]
        about["warnings"] = [str(text) for text in lines] if isinstance(lines, list) else []
    return about


def read_rows(path: Path, key: str = "slide_id") -> dict[str, Row]:
    """Read the rows of a table by slide; empty without a table."""
    check_inside(path)
    try:
        rows = csv_rows(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not path.parent.is_dir():
            raise InputError(not_made(path.parent, error)) from None
        raise FileError(f"{path.name}: not a readable table ({error}).") from None
    return {row[key]: row for row in rows if row.get(key)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        stored = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise FileError(f"{path.name}: damaged; it is not JSON.") from None
    if not isinstance(stored, dict):
        raise FileError(f"{path.name}: damaged; it is not a JSON object.")
    return stored


def read_curves(path: Path) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Read the flip curves of a bag by method and mode from a file of `xmil evaluate`."""
    import pyarrow as pa

    try:
        rows = parquet_rows(path, ["method", "mode", "morf", "lerf"])
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise FileError(f"{path.name}: not a readable result ({str(error).splitlines()[0]}).") from None
    last = {(str(row["method"]), str(row["mode"])): row for row in rows}
    return {key: {name: row[name] for name in ("morf", "lerf") if row[name]} for key, row in last.items()}


def check_inside(path: Path) -> None:
    """Refuse a pipe, or a link out of the run's folder."""
    check_regular(path)
    if path.is_symlink() and not is_inside(path, path.parent):
        raise FileError(f"{path}: a link out of the run's folder, which is not followed; copy the file in.")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run of one kind ("explain", "bench"), for writing.

    `settings` decide its results: a folder with other settings is refused, unless each result stores its own
    (`mixed`). Settings in `grows` may be extended, such as methods. `marks` are files that identify runs from
    before run.json.
    """

    path: Path
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    mixed: bool = False
    grows: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A digest of the settings; results with another one are not mixed in."""
        decisive = {key: value for key, value in self.settings.items() if key not in self.grows}
        text = json.dumps({"kind": self.kind, **decisive}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Make the folder and lock it against other writers; refuse a folder of another kind.

        Nothing is changed before the kind of the folder is known. If the work succeeds, the run's manifest
        records it.
        """
        check_folder(self.path, self.kind, marks=self.marks)
        make_folder(self.path)
        with lock_folder(self.path):
            check_folder(self.path, self.kind, marks=self.marks)
            yield
            if is_manifest(self.path / MANIFEST):
                fold_manifest(self.path, ended=True)

    @contextmanager
    def open(
        self,
        about: Mapping[str, Any],
        *,
        folders: Sequence[str] = (),
        restart: bool = False,
        outputs: Iterable[Path] | None = None,
    ) -> Iterator[None]:
        """Claim the folder, write run.json and make the `folders` in it.

        A folder with results of other settings is refused; `restart` first removes the files of the earlier
        run, or only the `outputs`. Unfinished files of killed runs are removed.
        """
        is_new = not self.path.exists()
        with self.claim():
            before = read_run(self.path)
            is_same = before is None or self.mixed or before.get("fingerprint") == self.fingerprint
            if restart:
                self._clear(outputs)
            elif before is not None and not is_same and not self._is_empty():
                raise other_settings(self.path, before["settings"], self.settings, leave_out=self.grows)
            for name in folders:
                make_folder(self.path / name)
            sweep_folder(self.path)
            start_manifest(self.path, self.kind)
            self.write(about)
            try:
                yield
            except XmilError:  # without results, such as an encoder that does not load, remove the folder
                if is_new and self._is_empty() and not read_rows(self.path / FAILURES):
                    shutil.rmtree(self.path, ignore_errors=True)
                raise
            sweep_folder(self.path)  # unfinished files of workers that died

    def write(self, about: Mapping[str, Any]) -> None:
        """Write run.json: the settings, and other facts about the run."""
        mark = {} if self.mixed else {"fingerprint": self.fingerprint}
        write_run(self.path, self.kind, {**mark, **about, "settings": dict(self.settings)})

    def write_failures(self, failed: Mapping[str, str]) -> None:
        write_table(self.path / FAILURES, ("slide_id", "error"), failed.items())

    def write_slides(self, header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
        write_table(self.path / SLIDES, header, ([row.get(name) for name in header] for row in rows))

    def _is_empty(self) -> bool:
        """Whether the earlier run has no results, because it ended before the first one."""
        own = (RUN, SLIDES, FAILURES, MANIFEST, ".lock")
        files = [path for path in self.path.rglob("*") if path.is_file()]
        has_rows = any(path.name == SLIDES and read_rows(path) for path in files)
        return not has_rows and all(path.name in own or path.name.endswith(".part") for path in files)

    def _clear(self, outputs: Iterable[Path] | None) -> None:
        try:
            files = list(self._list_written()) if outputs is None else list(outputs)
            for path in (*files, self.path / SLIDES, self.path / FAILURES):
                remove_file(path)
        except OSError as error:
            raise FileError(
                f"{self.path}: cannot be cleared ({error.strerror}); choose another `out=`."
            ) from None

    def _list_written(self) -> Iterator[Path]:
        """Yield the files of the earlier run, by its fingerprint or table; all others are the user's."""
        about = read_run(self.path) or {}
        rows, mark = read_rows(self.path / SLIDES), about.get("fingerprint")
        pairs = list_interactions(self.path)
        for folder in ("slides", "results"):
            for path in (self.path / folder).glob("*.parquet"):
                if path.stem in rows or _has_mark(path, mark):
                    yield path
                    yield from pairs.get(path.stem, ())
                    for suffix in (".json", ".png"):
                        yield self.path / "certificates" / f"{path.stem}{suffix}"
        if about:
            yield from (self.path / "summary" / name for name in SUMMARY)


def _has_mark(path: Path, mark: Any) -> bool:
    """Whether a Parquet file has the fingerprint of a run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not mark:
        return False
    with suppress(XmilError):
        return bool(read_provenance(path)[0].get("provenance", {}).get("fingerprint") == mark)
    with suppress(OSError, ValueError, pa.ArrowException):
        return str(mark).encode() in (pq.read_schema(path).metadata or {}).values()
    return False


def other_settings(
    path: Path, old: Mapping[str, Any], new: Mapping[str, Any], leave_out: Sequence[str] = ()
) -> InputError:
    """Make the error for a folder with a run of other settings; name those that differ, with both values."""
    changed = [
        f"{key} {_short(old.get(key))}, not {_short(new.get(key))}"
        for key in dict.fromkeys([*new, *old])
        if key not in leave_out and _plain(old.get(key)) != _plain(new.get(key))
    ]
    which = f" ({'; '.join(changed)})" if changed else ""
    return InputError(
        f"{path}: holds a run with other settings{which}; choose another `out=`, repeat the command with "
        "those settings, or redo it all with `restart=True`."
    )


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any) -> str:
    text = value[:12] if isinstance(value, str) and len(value) == 64 else _plain(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_folder(folder: Path, kind: str, *, marks: Sequence[str] = ()) -> None:
    """Refuse a folder with anything but a run of this kind, so that no file of the user is replaced.

    Hidden files, empty folders and a manifest do not count: a run killed before its run.json leaves only
    these.
    """
    about = read_run(folder)
    if about is not None and about["kind"] != kind:
        holds = (
            f"a run of {command_of(about['kind'])}"
            if about["kind"]
            else f"a {RUN} that does not describe a run"
        )
        raise InputError(f"{folder}: holds {holds}; choose another `out=`.")
    if about is not None or any((folder / mark).is_file() for mark in marks):
        return
    if (other := _first_file(folder)) is not None:
        raise InputError(
            f"{folder}: holds {other}, which is not of a run of {command_of(kind)}; choose a new or empty "
            "`out=`."
        )


def _first_file(folder: Path) -> Path | None:
    """Find a file, store or link in or below a folder; skip hidden names and the manifest."""
    for inner, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        ends = [name for name in folders if name.endswith(STORE) or (Path(inner) / name).is_symlink()]
        for name in sorted([*names, *ends]):
            path = Path(inner) / name
            if not name.startswith(".") and not (name == MANIFEST and is_manifest(path)):
                return path.relative_to(folder)
    return None


def make_folder(folder: Path) -> None:
    """Make a folder for results; refuse a link inside a run."""
    owning_run(folder / RUN)
    try:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            sync_folder(place.parent)
    except OSError as error:
        kind = WriteError if error.errno in FULL else InputError
        raise kind(not_made(folder, error)) from None


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run; the system releases the lock when the process ends."""
    try:
        import fcntl

        handle = _lock_file(folder / ".lock")
    except (ImportError, OSError):
        yield  # no locks on this system, or the folder is read-only, which the first file reports
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder}: another run is writing there; wait for it or choose another `out=`."
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)


def _lock_file(path: Path) -> int:
    """Open the lock file; another user's can only be read, which is enough to lock it.

    This never truncates it, follows links or waits for a pipe's other end.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InputError(f"{path}: a link, pipe or folder where runs keep a file; remove it.")
    careful = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | careful, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | careful)


def sweep_folder(folder: Path, *, below: bool = False) -> None:
    """Remove the unfinished files of a killed run from its folder and the folders in it.

    Stores that are folders are removed, too; files that cannot be removed are skipped.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith(".") and entry.name.endswith(".part"):
                if is_folder:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    continue
                with suppress(OSError):
                    os.unlink(entry.path)
            elif is_folder and not below:
                sweep_folder(Path(entry.path), below=True)


def write_run(folder: Path, kind: str, about: Mapping[str, Any]) -> None:
    """Write run.json of a run of a kind, with the layout, versions and the machine."""
    first = {"kind": kind, "layout": LAYOUT, "version": __version__, "manifest": True}
    write_json(folder / RUN, {**first, **about, **provenance()})


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(content, indent=2, default=str) + "\n")


def write_table(path: Path, header: Sequence[str], rows: Any) -> None:
    """Write a CSV file, whole or not at all; None is an empty cell."""
    write_text(path, csv_text(header, rows))


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
