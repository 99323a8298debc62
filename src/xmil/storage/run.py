"""Reading the folder of a run: what it was asked to do, its table, explanations, certificates.

run.json, slides.csv, failures.csv   the settings, a row per slide, the slides without a result
ledger.jsonl                         every file and every item, see `xmil.storage.ledger`
slides/<slide>.parquet               explanations
interactions/<slide>.<target>.parquet, certificates/<slide>.json, results/<bag>.parquet,
inside/<slide>.npz, insight/concepts/<slide>.npz    other results of a slide

A folder may still be growing, and may come from anyone: pipes are refused, links are not followed, and file
contents are checked before use.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from glob import escape as escape_glob
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from xmil.core.budget import check_csv
from xmil.core.durable import is_inside
from xmil.core.errors import FileError, InputError, absent, unknown_name
from xmil.core.interactions import Interactions
from xmil.core.ledger import RUN
from xmil.core.quoting import plain_cell
from xmil.core.services import service
from xmil.core.task import Target
from xmil.core.text import counted, is_plain, shorten
from xmil.storage.about import RunFacts, command_of
from xmil.storage.explanations import read_explanation, read_interactions
from xmil.storage.folder import FAILURES, SLIDES
from xmil.storage.tables import Row, check_inside, read_curves, read_json, read_rows

if TYPE_CHECKING:
    import pandas as pd

    from xmil.core.explanation import Explanation

INTERACTIONS = "interactions"  # the folder of `interactions=` of `xmil explain`
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
T = TypeVar("T")


class Run(RunFacts):
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
        super().__init__(Path(path))
        self.follow_links = follow_links
        self._chosen = None if files is None else dict(files)  # explanations by slide, instead of slides/

    def __repr__(self) -> str:
        return (
            f"Run({str(self.path)!r}, {self.kind}: {counted(len(self), 'slide')}, {len(self.failed)} failed)"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.slides)

    def __len__(self) -> int:
        return len(self.slides)

    def _read(self, parse: Callable[[Path], T], path: Path) -> T:
        """Read a file; a subclass may cache it while the file stays the same."""
        return parse(path)

    def _read_table(self, name: str) -> dict[str, Row]:
        return self._read(read_rows, self.path / name)

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
        path = self.path / folder / f"{slide}{suffix}"
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
