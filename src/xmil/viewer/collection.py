"""Everything on show: runs, slides and features, with the slides numbered once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from xmil._version import __version__
from xmil.core.absence import absent
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.parsing import small_number
from xmil.core.task import TASKS, Task
from xmil.data.siblings import bare_name, is_plain, slide_name
from xmil.findings.concept_maps import ConceptMaps
from xmil.viewer.concepts_layer import fitting_maps
from xmil.viewer.deepzoom import Pictures
from xmil.viewer.inside_layer import fits, read_layer
from xmil.viewer.kept import Files
from xmil.viewer.pairs_layer import as_layer, read_pairs
from xmil.viewer.score_block import Evidence, count_patches, read_evidence
from xmil.viewer.shown_run import Row, ShownRun

OTHERS = 1_000_000  # numbers from here on are of slides that no run explains


class MissingError(XmilError):
    """A slide, run or patch whose number is not in the collection."""


class Collection:
    """One or more runs side by side. A slide's number never changes while the server runs."""

    def __init__(
        self,
        runs: Sequence[Path],
        *,
        slides: Path | None = None,
        features: Sequence[Path] = (),
        mpp: float | None = None,
        follow_links: bool = False,
        labels: bool = False,
        layout: str = "auto",
    ) -> None:
        if not runs:
            raise InputError("There is no run to show; name the folder of one.")
        self.runs = [ShownRun(Path(folder), follow_links=follow_links) for folder in runs]
        _tell_apart(self.runs)
        self.pictures = Pictures(slides, mpp=mpp, follow_links=follow_links)
        self.follow_links, self._given_mpp, self.labels = follow_links, mpp, labels
        self.layout = layout  # of the feature files
        self.features = [_checked(Path(folder)) for folder in features]
        if len(self.features) not in (0, 1, len(self.runs)):
            raise InputError(f"Give --features once, or once for each of the {len(self.runs)} runs.")
        self._evidence = Files(read_evidence, limit=8)
        self._pairs = Files(read_pairs, limit=32)
        self._layers = Files(read_layer, limit=8)
        self._counts = Files(count_patches, limit=100_000)
        self._concepts = Files(ConceptMaps.load, limit=8)
        self._slides: list[str] = []
        self._others: list[str] = []
        self._lock = Lock()
        self.refresh()

    def refresh(self) -> list[str]:
        """The slides by number; those that were added to the runs since come last."""
        with self._lock:
            known = set(self._slides)
            for run in self.runs:
                new = [name for name in run.slides() if name not in known]
                self._slides += new
                known.update(new)
            return list(self._slides)

    def others(self) -> dict[int, str]:
        """The slides of the folder that no run explains, by number: another stain to set beside."""
        known = {bare_name(name) for name in self.refresh() if is_plain(name)}
        with self._lock:
            listed = {*known, *self._others}
            self._others += [name for name in self.pictures.names() if name not in listed]
            return {OTHERS + i: name for i, name in enumerate(self._others) if name not in known}

    def missing_pictures(self) -> tuple[int, int]:
        """How many slides have no picture, and how many slides there are."""
        slides = self.refresh()
        return sum(not self.pictures.look(slide_id)[0] for slide_id in slides), len(slides)

    def slide(self, key: int) -> str:
        """The slide of a number."""
        if OTHERS <= key < OTHERS + len(self._others):
            return self._others[key - OTHERS]
        if not 0 <= key < len(self._slides):
            raise MissingError(f"There is no slide {key}; the run has {len(self._slides)}.")
        return self._slides[key]

    def run(self, number: int) -> ShownRun:
        """The run of a number."""
        if not 0 <= number < len(self.runs):
            raise MissingError(f"There is no run {number}; {len(self.runs)} are shown.")
        return self.runs[number]

    def evidence(self, key: int, number: int) -> Evidence:
        """A slide's scores in a run, placed by the slide's mpp where the run could not."""
        slide_id, run = self.slide(key), self.run(number)
        path = run.explanation(slide_id)
        if path is None:
            raise MissingError(f"The run {run.name!r} has no explanation of {slide_id!r}.")
        found = self._evidence.get(path)
        return found if found.placed else found.at(self._mpp(slide_id))

    def patch(self, key: int, number: int, index: int) -> bytes:
        """The picture of one patch."""
        found = self.evidence(key, number)
        edge = found.patch_size
        if found.coords is None or edge is None:
            raise MissingError("The positions of this slide's patches are not known.")
        if not 0 <= index < found.n:
            raise MissingError(f"There is no patch {index}; the slide has {found.n}.")
        x, y = (int(value) for value in found.coords[index])
        return self.pictures.patch(self.slide(key), (x, y, edge, edge))

    def pairs(self, key: int, number: int) -> dict[str, Any]:
        """The pairs of a slide's patches that act together."""
        slide_id, run = self.slide(key), self.run(number)
        paths = run.pairs(slide_id)
        if not paths:
            raise MissingError(
                f"The run {run.name!r} has no interactions of {slide_id!r}; `xmil explain --interactions` "
                "computes them."
            )
        return as_layer([self._pairs.get(path) for path in paths], slide_id, self.evidence(key, number))

    def inside(self, key: int, number: int) -> dict[str, Any]:
        """The maps inside a slide's patches."""
        slide_id, run = self.slide(key), self.run(number)
        path = run.inside(slide_id)
        if path is None:
            raise MissingError(
                f"The run {run.name!r} has no maps inside patches of {slide_id!r}; `xmil inside` makes them."
            )
        layer = self._layers.get(path)
        if not fits(layer, self.evidence(key, number)):
            raise FileError(
                f"The maps inside patches of {slide_id!r} belong to another explanation; "
                "run `xmil inside` again."
            )
        return layer

    def concepts(self, key: int, number: int) -> ConceptMaps:
        """The parts of a slide's scores that go through concepts."""
        slide_id, run = self.slide(key), self.run(number)
        path = run.concepts(slide_id)
        if path is None:
            raise MissingError(
                f"The run {run.name!r} has no concepts of {slide_id!r}; `xmil insight` finds them."
            )
        return fitting_maps(self._concepts.get(path), self.evidence(key, number), slide_id)

    def mates(self, key: int, number: int) -> list[int]:
        """The slides whose patches made one bag with this slide's: itself, or its case in a run by case."""
        slide_id, run = self.slide(key), self.run(number)
        case = run.rows.get(slide_id, {}).get("case_id")
        if not run.by_case or not case:
            return [key]
        together = [name for name, row in run.rows.items() if row.get("case_id") == case]
        return [self._slides.index(name) for name in together]

    def feature_file(self, key: int, number: int) -> Path:
        """A slide's features for a run."""
        slide_id = self.slide(key)
        self.run(number)
        if not self.features:
            raise MissingError("No features are given; start the viewer with --features.")
        folder = self.features[number if len(self.features) > 1 else 0]
        found = feature_paths(folder, follow_links=self.follow_links).get(bare_name(slide_id))
        if found is None:
            raise MissingError(f"There are no features of {slide_id!r} in {folder.name}.")
        return found

    def overview(self, *, live: bool = True, whatif: bool = False) -> dict[str, Any]:
        """The list of slides and what can be done with them."""
        slides = self.refresh()
        names = [run.class_names for run in self.runs if run.class_names]
        return {
            "name": " | ".join(run.name for run in self.runs),
            "version": __version__,
            "live": live,
            "whatif": whatif,
            "similar": live and bool(self.features),
            "task": self.runs[0].task,
            "runs": [{"name": run.name, "model": run.model} for run in self.runs],
            "methods": self._methods(),
            "class_names": names[0] if names else None,
            "slides": [self._line(key, slide_id) for key, slide_id in enumerate(slides)],
            "others": [{"key": key, "id": name} for key, name in self.others().items()] if live else [],
            "labels": live and self.labels,
        }

    def describe(self, key: int) -> dict[str, Any]:
        """All there is to know of a slide but its scores and pixels."""
        slide_id = self.slide(key)
        about = self._about(slide_id)
        image, fault = self.pictures.describe(slide_id)
        sets, faults = self._sets(key, slide_id) if key < OTHERS else ([], [])
        if image:
            faults += self._misfits(key, sets, image["image"])
        facts = ("case", "label", "predicted", "correct", "probability")
        return {
            "key": key,
            "id": slide_id,
            **{name: about[name] for name in facts},
            "error": " ".join([*([fault] if fault else []), *faults]) or None,
            "image": image and image["image"],
            "mpp": next((mpp for mpp in (self._mpp(slide_id), *(s["mpp"] for s in sets)) if mpp), None),
            "magnification": image and image["magnification"],
            "sets": sets,
        }

    def _sets(self, key: int, slide_id: str) -> tuple[list[dict[str, Any]], list[str]]:
        sets, faults = [], []
        for number, run in enumerate(self.runs):
            try:
                sets.append(self._set(key, slide_id, number))
            except XmilError as error:
                failed = run.failure(slide_id) if isinstance(error, MissingError) else None
                faults.append(failed or str(error))
        return sets, faults

    def _misfits(self, key: int, sets: list[dict[str, Any]], image: dict[str, Any]) -> list[str]:
        """A sentence for each run with patches that lie off the slide: one of the two is of another slide."""
        found, size = [], (image["width"], image["height"])
        for run in (entry["run"] for entry in sets if entry["placed"]):
            evidence = self.evidence(key, run)
            inside = evidence.count_inside(*size)
            if inside < evidence.n or evidence.slide_size not in (None, size):
                off = f"{evidence.n - inside} of {evidence.n} patches of the run {self.runs[run].name!r}"
                found.append(
                    f"{off} lie off this slide of {size[0]} x {size[1]} px: it is not the slide that was "
                    "explained, or the coordinates are of another resolution."
                )
        return found

    def _set(self, key: int, slide_id: str, number: int) -> dict[str, Any]:
        run, found = self.runs[number], self.evidence(key, number)
        task = TASKS[run.task]
        numbers = self._numbers(task, found, slide_id, run)
        return {
            "run": number,
            "n": found.n,
            "edge": found.patch_size,
            "mpp": found.mpp,
            "placed": found.placed,
            "columns": [{**column, "ends": _ends(task, column)} for column in found.columns],
            "classes": task.number_names(run.names(len(found.logits))),
            "logits": found.logits,
            "probabilities": numbers if task.decides else None,
            "value": numbers[0] if not task.decides and len(numbers) == 1 else None,
            "noun": task.noun.capitalize(),
            "sides": task.sides,
            "certificate": self._certificate(slide_id, run),
            "inside": run.inside(slide_id) is not None,
            "pairs": bool(run.pairs(slide_id)),
            "concepts": run.concepts(slide_id) is not None,
        }

    def _numbers(self, task: Task, found: Evidence, slide_id: str, run: ShownRun) -> list[float]:
        """What the models say; from the table where an ensemble's own outputs were not kept."""
        kept = run.rows.get(slide_id, {}).get(task.noun)
        if task.mean_of == "numbers" and len(found.outputs) < len(run.digests):
            return [float(kept)] if kept else []
        return [float(value) for value in task.answer(found.outputs)]

    def _certificate(self, slide_id: str, run: ShownRun) -> dict[str, Any] | None:
        """The run's own certificate, or that of another run of the same model."""
        found = (other.certificate(slide_id) for other in self._alike(run))
        return next((certificate for certificate in found if certificate), None)

    def _verdict(self, slide_id: str, run: ShownRun) -> dict[str, Any]:
        found = (other.verdict(slide_id) for other in self._alike(run))
        return next((verdict for verdict in found if verdict), {})

    def _alike(self, run: ShownRun) -> list[ShownRun]:
        """The run, then the others of the same models on the same bags."""
        mine = run.bags
        return [run, *(other for other in self.runs if other is not run and mine[0] and other.bags == mine)]

    def facts(self, key: int) -> dict[str, Any]:
        """A slide's label, prediction and the like, as the list shows them."""
        return self._about(self.slide(key))

    def _line(self, key: int, slide_id: str) -> dict[str, Any]:
        image, error = self.pictures.look(slide_id)
        about = self._about(slide_id)
        return {"key": key, "id": slide_id, **about, "image": image, "error": about["error"] or error}

    def _about(self, slide_id: str) -> dict[str, Any]:
        """A slide's facts from the first run that knows it."""
        run = next((run for run in self.runs if slide_id in run.rows), self.runs[0])
        row = run.rows.get(slide_id, {})
        paper = next((found for run in self.runs if (found := self._verdict(slide_id, run))), {})
        n, error = self._count(slide_id)
        label, predicted = (_shown(row.get(k) or paper.get(k), run) for k in ("label", "predicted"))
        return {
            "case": row.get("case_id") or None,
            "label": label,
            "predicted": predicted,
            "correct": _truth(row.get("correct") or paper.get("correct")),
            "probability": _probability(row, predicted),
            "verdict": paper.get("verdict"),
            "verdict_method": paper.get("verdict_method"),
            "n": n,
            "error": error,
        }

    def _count(self, slide_id: str) -> tuple[int | None, str | None]:
        """How many patches the slide has in the first run that has it, or what is wrong with its files."""
        faults = []
        for run in self.runs:
            try:
                path = run.explanation(slide_id)
                if path is not None:
                    return self._counts.get(path), None
                faults.append(run.failure(slide_id) or "")
            except FileError as error:
                faults.append(str(error))
        told = next((fault for fault in faults if fault), "There is no explanation of this slide.")
        return None, told

    def _methods(self) -> list[str]:
        listed = [method for run in self.runs for method in _named_methods(run.about)]
        if not listed:
            for key in range(min(len(self._slides), 3)):
                with suppress(XmilError):
                    listed += [column["method"] for column in self.evidence(key, 0).columns]
        return list(dict.fromkeys(listed))

    def _mpp(self, slide_id: str) -> float | None:
        image, _ = self.pictures.describe(slide_id)
        return image["mpp"] if image else self._given_mpp


def feature_paths(folder: Path, *, follow_links: bool) -> dict[str, Path]:
    """The feature files of a folder by slide."""
    from xmil.data.join import feature_files

    files, _ = feature_files(folder, follow_links=follow_links)
    return {slide_name(path): path for path in reversed(files)}


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileError(absent(folder, "folder"))
    return folder


def _tell_apart(runs: Sequence[ShownRun]) -> None:
    """Runs in folders of one name are called by the folder above too."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"


def _named_methods(about: dict[str, Any]) -> list[str]:
    settings = about.get("settings")
    listed = about.get("methods") or (settings.get("methods") if isinstance(settings, dict) else None)
    return [str(name) for name in listed] if isinstance(listed, list) else []


def _shown(value: Any, run: ShownRun) -> str | None:
    """A label in words: a class by its name where only its number is written down."""
    if value is None or value == "":
        return None
    text, names = str(value), run.class_names or []
    at = None if text in names else small_number(text)
    return names[at] if at is not None and at < len(names) else text


def _ends(task: Task, column: dict[str, Any]) -> tuple[str, str]:
    return task.short_ends(column["target"]) if column["signed"] else ("low", "high")


def _truth(value: Any) -> bool | None:
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _probability(row: Row, predicted: str | None) -> float | None:
    try:
        return float(row[f"p:{predicted}"])
    except (KeyError, ValueError):
        return None
