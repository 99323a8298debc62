"""A run's folder as Python sees it: its settings, its table, its failures, its explanations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError, unknown_name
from xmil.core.interactions import Interactions
from xmil.core.names import counted, is_plain
from xmil.core.runfiles import (
    INTERACTIONS,
    RUN,
    SLIDES,
    check_own,
    pairs_by_slide,
    read_failures,
    read_rows,
    read_run,
)
from xmil.core.storage import read_explanation
from xmil.core.target import Target

if TYPE_CHECKING:
    import pandas as pd

    from xmil.core.explanation import Explanation

TABLES = {"predict": "predictions.csv", "train": "results.csv"}  # of the others slides.csv
NAMED = ("slide_id", "case_id", "name", "model", "fold", "job")  # never numbers, whatever they look like
EXPLAINED = ("explain", "evaluate")  # the commands whose runs hold explanations
SHOWN = 10  # rows of a run in a notebook


class Run:
    """A folder that a command, or its function in Python, has filled.

    Iterating gives the slides that have a result. The folder may still be growing: `table()` and `failed`
    read it anew. Links inside it are not followed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)

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

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says; empty where there is none."""
        return read_run(self.path) or {}

    @property
    def kind(self) -> str:
        """The command that filled the folder: "explain", "tile", ..."""
        return str(self.about.get("kind") or "explain")

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the results."""
        return dict(self.about.get("settings", {}))

    @property
    def warnings(self) -> list[str]:
        """What is doubtful about the run, in sentences."""
        return [str(text) for text in self.about.get("warnings") or ()]

    @property
    def task(self) -> str:
        """The task of the run's model."""
        return str(self.about.get("task") or self.spec.get("task") or "classification")

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, where the model knows them."""
        names = self.about.get("class_names") or self.spec.get("class_names")
        return tuple(map(str, names)) if isinstance(names, list) and names else None

    @property
    def spec(self) -> dict[str, Any]:
        """The spec of the run's model, as far as it is written down."""
        model = self.about.get("model")
        spec = model.get("spec") if isinstance(model, dict) else None
        return spec if isinstance(spec, dict) else {}

    @property
    def rows(self) -> dict[str, dict[str, str]]:
        """The rows of slides.csv by slide, as text."""
        return read_rows(self.path / SLIDES)

    @property
    def failed(self) -> dict[str, str]:
        """The slides that have no result, and why."""
        return read_failures(self.path)

    @property
    def slides(self) -> list[str]:
        """The slides that have a result: those of the table, then those with a file alone."""
        table = TABLES.get(self.kind)
        rows = self.rows if table is None else read_rows(self.path / table)
        files = [] if self.kind in TABLES else [path.stem for path in self._files()]
        return list(dict.fromkeys([*rows, *files]))

    def table(self) -> pd.DataFrame:
        """The run's table: a row per slide, of `predict` per prediction, of `train` per model."""
        import pandas as pd

        path = self.path / TABLES.get(self.kind, SLIDES)
        if not path.is_file():
            raise FileError(f"{path}: no such table; the run has not got that far, or is of another kind.")
        check_own(path)
        kept = dict.fromkeys(NAMED, str)
        try:
            return pd.read_csv(path, dtype=kept, keep_default_na=False, na_values=[""])
        except (OSError, ValueError, OverflowError) as error:
            told = " ".join(str(error).split())[:200]
            raise FileError(f"{path}: not a readable table ({told}); make it again.") from None

    def interactions(self, slide: str, *, target: Any = None) -> Interactions:
        """The interactions that a run has of a slide; name the target where there are several."""
        if not is_plain(slide):
            raise unknown_name("slide", slide, self.slides)
        folder = self.path / INTERACTIONS
        found = [Interactions.load(path) for path in pairs_files(self.path, slide)]
        held = [pairs for pairs in found if target is None or pairs.target == Target.of(target)]
        held = held or [pairs for pairs in found if str(pairs.target) == str(target)]
        if len(held) != 1:
            fault = "several fit" if held else "none fit"
            targets = ", ".join(str(pairs.target) for pairs in found) or "none"
            raise InputError(f"{folder}: {fault} for {slide!r}; name the target. Found: {targets}.")
        return held[0]

    def explanation(self, slide: str, *, method: str | None = None, target: Any = None) -> Explanation:
        """The explanation of a slide by a method, of a target; an error where several fit."""
        return read_explanation(self.file(slide), method=method, target=target)

    def file(self, slide: str) -> Path:
        """The file of a slide's explanations."""
        path = self.path / "slides" / f"{slide}.parquet"
        with suppress(OSError):  # a name that is too long for a file is that of no slide
            if is_plain(slide) and path.is_symlink():
                raise FileError(f"{path}: a link; a run's folder is read without following links.")
            if is_plain(slide) and path.is_file():
                return path
        if slide in self.failed:
            raise InputError(f"{self.path}: {slide!r} has no explanation: {self.failed[slide]}")
        raise unknown_name("slide", slide[:80], [path.stem for path in self._files()])

    def _files(self) -> list[Path]:
        found = sorted((self.path / "slides").glob("*.parquet"))
        return [path for path in found if not path.name.startswith(".")]

    def _repr_html_(self) -> str:
        """What a notebook shows: the kind, counts, warnings, and the first rows."""
        said = [
            f"<b>{escape(self.kind)}</b> in <code>{escape(str(self.path))}</code>: "
            f"{counted(len(self), 'slide')}, {len(self.failed)} failed"
        ]
        said += [f"warning: {escape(text)}" for text in self.warnings]
        said += [f"{escape(name)}: {escape(why)}" for name, why in list(self.failed.items())[:SHOWN]]
        html = "".join(f"<p>{line}</p>" for line in said)
        table = self.path / TABLES.get(self.kind, SLIDES)
        return html + (self.table().head(SHOWN).to_html(index=False) if table.is_file() else "")


def open_run(path: str | PathLike[str]) -> Run:
    """Open the folder of a run, made by a command or from Python, by this version or an earlier one."""
    place = Path(path)
    if not place.is_dir():
        raise InputError(absent(place, "folder"))
    run = Run(place)
    if not run.about and not (place / "slides").is_dir():
        raise InputError(f"{place}: not a run (no {RUN} and no slides/); give the folder of `xmil explain`.")
    return run


def explained_run(path: str | PathLike[str]) -> Run:
    """Open the folder of a run that holds explanations; one of another command is refused by its name."""
    run = open_run(path)
    check_explained(run.path, run.about.get("kind"))
    return run


def check_explained(folder: Path, kind: object) -> None:
    """Refuse a run of a command that explains nothing, by what its run.json says of its kind."""
    if kind in (None, *EXPLAINED) or any((folder / "slides").glob("*.parquet")):
        return
    raise InputError(
        f"{folder}: a run of `xmil {kind}`, which holds no explanations; give the folder of `xmil explain`."
    )


def pairs_file(out: Path, slide: str, target: Target) -> Path:
    """The file of a slide's interactions for a target."""
    against = "" if target.against is None else f"-vs-{target.against}"
    return out / INTERACTIONS / f"{slide}.{target.cls}{against}.parquet"


def pairs_files(folder: Path, slide: str) -> list[Path]:
    """The files of a slide's interactions in a run's folder, one for each target; links are passed over."""
    return pairs_by_slide(folder / INTERACTIONS).get(slide, [])
