"""Everything that the viewer shows: runs, slides and features, with one number per slide."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, cast

from xmil._version import __version__
from xmil.core.errors import FileError, InputError, XmilError, absent, refuse_damage
from xmil.core.explanation import CARDS, PARTS
from xmil.core.interactions import Interactions
from xmil.core.task import TASKS, Target
from xmil.core.text import bare_name, is_plain, name_class, read_truth
from xmil.core.verdict import RunVerdict
from xmil.data.header import slide_name
from xmil.heatmaps.canvas import count_on
from xmil.storage import (
    FAILURES,
    RUN,
    ConceptMaps,
    Row,
    Run,
    check_explained,
    check_run,
    read_curves,
    read_json,
    read_provenance,
    read_rows,
    read_run,
)
from xmil.viewer.annotations import RunNames
from xmil.viewer.cache import Files
from xmil.viewer.deepzoom import Pictures
from xmil.viewer.layers import (
    Evidence,
    concepts_layer,
    fits,
    fitting_maps,
    pairs_layer,
    read_evidence,
    read_layer,
)

VERDICT = (
    "verdict",
    "verdict_method",
    "verdict_target",
    "verdict_orders",
    "verdict_cases",
    "verdict_sentence",
)
OTHERS = 1_000_000  # first number of slides that no run explains
PATIENCE = 0.5  # seconds until a file that every slide needs is checked again
FOLDERS = re.compile(r"(?<!\w)(?:[A-Za-z]:)?/(?:[^/\s:;,'\"()]+/)*")


class ShownRun(Run):
    """A folder of `xmil explain` or `xmil evaluate`, which may be unfinished or partly damaged."""

    def __init__(self, folder: Path, *, follow_links: bool = False) -> None:
        check_run(folder)
        super().__init__(folder, follow_links=follow_links)
        self.name, self.names = folder.resolve().name, RunNames(folder)
        self._files: dict[Any, Files[Any]] = {
            _read_about: Files(_read_about, limit=1, patience=PATIENCE),
            read_rows: Files(read_rows, limit=4, patience=PATIENCE),
            read_json: Files(read_json, limit=16),
            read_curves: Files(read_curves, limit=16),
            _read_verdict: Files(_read_verdict, limit=100_000),
        }
        check_explained(self)

    def _read(self, parse: Any, path: Path) -> Any:
        """Read a file, again only if it has changed."""
        return self._files[parse].get(path)

    def _read_table(self, name: str) -> dict[str, Row]:
        """Read the rows of a table; none if it is missing or damaged."""
        try:
            return super()._read_table(name)
        except FileError:
            return {}

    @property
    def about(self) -> dict[str, Any]:
        """The current run.json; empty if it is missing or damaged."""
        try:
            return cast(dict[str, Any], self._read(_read_about, self.path / RUN))
        except FileError:
            return {}

    @property
    def slides(self) -> list[str]:
        """The slides of the run: those of the table, then those with only a file, then failures."""
        return list(dict.fromkeys([*self.rows, *self.files, *self.failed]))

    @property
    def model(self) -> str:
        """A short name of the model, without its path."""
        model = self.about.get("model")
        file = Path(str(model.get("path") or "")).name if isinstance(model, dict) else ""
        more = f"{len(self.digests)} models" if len(self.digests) > 1 else ""
        return ", ".join(part for part in (str(self.spec.get("name") or ""), file, more) if part) or self.name

    def failure(self, slide_id: str) -> str | None:
        """Find the reason why a slide has no explanation, without folders of this machine."""
        row = self._read_table(FAILURES).get(slide_id, {})  # cached, since every slide needs it
        return FOLDERS.sub("", row.get("error") or "") or None

    def certificate(self, slide: str) -> dict[str, Any] | None:
        """Read a slide's certificate with each method's curves; None if the run has none."""
        try:
            return super().certificate(slide)
        except XmilError:
            return None

    def parameters(self, method: str | None) -> dict[str, Any]:
        """Read the parameters of a method; empty if the run names none."""
        params = self.settings.get("params")
        own = params.get(method) if isinstance(params, dict) else None
        return own if isinstance(own, dict) else {}

    def slide_verdict(self, slide_id: str) -> dict[str, Any]:
        """Summarise a slide's certificate: label, prediction, correctness and the headline's verdict."""
        try:
            path = self.find("certificate", slide_id)
            return {} if path is None else self._read(_read_verdict, path)
        except XmilError:
            return {}


def _cohort_verdict(verdict: RunVerdict, target: str) -> dict[str, Any]:
    """Convert a run's verdict: its sentence, and the result of each method for the target of the slide."""
    rows = [row for row in verdict.methods if isinstance(row, dict)]
    kinds = {str(row.get("method")): str(row.get("kind")) for row in rows}
    n = len(verdict.cases)
    cases = {str(row.get("method")): row["cases"] for row in rows if isinstance(row.get("cases"), int)}
    return {
        "verdicts": {**kinds, verdict.method: verdict.kind},
        "cases": {**dict.fromkeys((*kinds, verdict.method), n), **cases},
        "method": verdict.method,
        "target": target,
        "sentence": verdict.sentence,
    }


def _makings(evidence: Evidence) -> dict[tuple[str, str], Any]:
    """Map method and target of each map to how it was made: rule, baseline, samples."""
    columns = [column for column in evidence.columns if column["kind"] == "scores"]
    return {(column["method"], column["target"]): column["made"] for column in columns}


def _read_header(path: Path) -> tuple[int, str | None]:
    """Read the number of patches of a slide, and the first target of its explanations."""
    header, n = read_provenance(path)
    with refuse_damage(f"{path.name}: the explanation is damaged", way="explain it again"):
        first = next(iter(header["columns"].values()), None)
        return n, None if first is None else str(Target(**first["target"]))


def _read_about(path: Path) -> dict[str, Any]:
    return read_run(path.parent) or {}


def _read_verdict(path: Path) -> dict[str, Any]:
    stored = read_json(path)
    methods = stored.get("methods")
    listed = methods if isinstance(methods, list) else []  # without a headline, the first method counts
    judged = [m for m in (stored.get("headline"), *listed) if isinstance(m, dict) and m.get("verdict")]
    first = judged[0] if judged else {}
    same = [m for m in judged if m.get("method") == first.get("method")]
    orders = [m["orders"] for m in same if "orders" in m]
    target = next((m["target"] for m in same if "target" in m), None)
    verdict = {
        "verdict": first.get("verdict"),
        "verdict_method": first.get("method"),
        "verdict_target": target,
    }
    return {
        **{key: stored.get(key) for key in ("label", "predicted", "correct")},
        **{key: None if value is None else str(value) for key, value in verdict.items()},
        "verdict_orders": orders[0] if orders and isinstance(orders[0], int) else None,
    }


class MissingError(XmilError):
    """A slide, run or patch whose number is not in the collection."""


def check_patch(index: int, n: int) -> None:
    """Refuse the number of a patch that does not exist."""
    if not 0 <= index < n:
        raise MissingError(f"There is no patch {index}; the slide has {n}.")


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
            raise InputError("There is no run to show; name a run folder.")
        self.runs = [ShownRun(Path(folder), follow_links=follow_links) for folder in runs]
        names = [run.name for run in self.runs]
        for run in self.runs:
            if names.count(run.name) > 1:  # add the parent folder's name
                run.name = f"{run.path.resolve().parent.name}/{run.name}"
        self.pictures = Pictures(slides, mpp=mpp, follow_links=follow_links)
        self.follow_links, self._default_mpp, self.labels = follow_links, mpp, labels
        self.layout = layout  # of the feature files
        self.features = [Path(folder) for folder in features]
        for folder in self.features:
            if not folder.is_dir():
                raise FileError(absent(folder, "folder"))
        if len(self.features) not in (0, 1, len(self.runs)):
            raise InputError(f"Pass `features=` once, or once for each of the {len(self.runs)} runs.")
        self._evidence = Files(read_evidence, limit=8)
        self._pairs = Files(Interactions.load, limit=32)
        self._layers = Files(read_layer, limit=8)
        self._headers = Files(_read_header, limit=100_000)
        self._concepts = Files(ConceptMaps.load, limit=8)
        self._slides: list[str] = []
        self._others: list[str] = []
        self._lock = Lock()
        self.refresh()

    def refresh(self) -> list[str]:
        """List the slides by number; slides added to the runs later come last."""
        with self._lock:
            names = [name for run in self.runs for name in run.slides]
            self._slides = list(dict.fromkeys([*self._slides, *names]))
            return list(self._slides)

    def others(self) -> dict[int, str]:
        """Slides of the folder that no run explains, by number, such as other stains."""
        explained = {bare_name(name) for name in self.refresh() if is_plain(name)}
        with self._lock:
            listed = {*explained, *self._others}
            self._others += [name for name in self.pictures.listed() if name not in listed]
            return {OTHERS + i: name for i, name in enumerate(self._others) if name not in explained}

    def missing_pictures(self) -> tuple[int, int]:
        """Count the slides without a picture, and all slides."""
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
        """Read a slide's scores in a run; place patches by the slide's mpp if the run lacks it."""
        evidence = self._evidence.get(self._find(key, number, "explanations", "explanation"))
        return evidence if evidence.placed else evidence.at(self._mpp(self.slide(key)))

    def scores(self, key: int, number: int) -> bytes:
        """Little endian: int32 x0[n] and y0[n] if known, then float32[n] for each column."""
        return self.evidence(key, number).as_bytes()

    def patch(self, key: int, number: int, index: int) -> bytes:
        """Draw a patch, at most 512 px."""
        evidence = self.evidence(key, number)
        edge = evidence.patch_size
        if evidence.coords is None or edge is None:
            raise MissingError("The positions of this slide's patches are unknown.")
        check_patch(index, evidence.n)
        x, y = (int(value) for value in evidence.coords[index])
        return self.pictures.patch(self.slide(key), (x, y, edge, edge))

    def pairs(self, key: int, number: int) -> dict[str, Any]:
        """Read the pairs of a slide's patches that interact."""
        slide_id, run = self.slide(key), self.run(number)
        paths = run.find_interactions(slide_id)
        if not paths:
            raise MissingError(
                f"The run {run.name!r} has no interactions of {slide_id!r}; explain with `interactions=True`."
            )
        return pairs_layer([self._pairs.get(path) for path in paths], slide_id, self.evidence(key, number))

    def inside(self, key: int, number: int) -> dict[str, Any]:
        """Read the maps inside a slide's patches."""
        path = self._find(key, number, "inside", "maps inside patches", "; `xmil inside` makes them")
        layer = self._layers.get(path)
        if not fits(layer, self.evidence(key, number)):
            raise FileError(
                f"The maps inside patches of {self.slide(key)!r} belong to another explanation; "
                "run `xmil inside` again."
            )
        return layer

    def concepts(self, key: int, number: int) -> dict[str, Any]:
        """List the concepts of `xmil insight` with their relevance in a slide."""
        return concepts_layer(self.concept_maps(key, number), self.run(number).names.read()["concepts"])

    def concept_maps(self, key: int, number: int) -> ConceptMaps:
        """Read the parts of a slide's scores that pass through concepts."""
        path = self._find(key, number, "concepts", "concepts", "; `xmil insight` finds them")
        return fitting_maps(self._concepts.get(path), self.evidence(key, number), self.slide(key))

    def concept(self, key: int, number: int, concept: int) -> bytes:
        """Little endian float32[n]: the part of each patch's score that passes through a concept."""
        values = self.concept_maps(key, number).values
        if not concept < values.shape[1]:
            raise MissingError(f"There is no concept {concept}; the dictionary has {values.shape[1]}.")
        return values[:, concept].astype("<f4").tobytes()

    def readable(self, number: int) -> Iterator[tuple[int, Evidence]]:
        """Yield the slides of a run whose scores can be read, by number; skip the others."""
        for key in range(len(self.refresh())):
            with suppress(XmilError):
                yield key, self.evidence(key, number)

    def _find(self, key: int, number: int, kind: str, noun: str, hint: str = "") -> Path:
        """Find a slide's file of some kind in a run."""
        slide_id, run = self.slide(key), self.run(number)
        path = run.find(kind, slide_id)
        if path is None:
            raise MissingError(f"The run {run.name!r} has no {noun} of {slide_id!r}{hint}.")
        return path

    def mates(self, key: int, number: int) -> list[int]:
        """The slides in one bag with this slide: itself, or all of its case in a run by case."""
        slide_id, run = self.slide(key), self.run(number)
        case = run.rows.get(slide_id, {}).get("case_id")
        if not run.by_case or not case:
            return [key]
        together = [name for name, row in run.rows.items() if row.get("case_id") == case]
        return [self._slides.index(name) for name in together]

    def feature_file(self, key: int, number: int) -> Path:
        """Find a slide's feature file for a run."""
        from xmil.data.files import feature_files

        slide_id = self.slide(key)
        self.run(number)
        if not self.features:
            raise MissingError("The viewer has no features; start it with `features=`.")
        folder = self.features[number if len(self.features) > 1 else 0]
        files, _ = feature_files(folder, follow_links=self.follow_links)
        path = next((path for path in files if slide_name(path) == bare_name(slide_id)), None)
        if path is None:
            raise MissingError(f"There are no features of {slide_id!r} in {folder.name}.")
        return path

    def overview(self, *, live: bool = True) -> dict[str, Any]:
        """List the runs, the slides and the available functions."""
        slides = self.refresh()
        return {
            "name": " | ".join(run.name for run in self.runs),
            "version": __version__,
            "live": live,
            "whatif": False,  # unless there are models
            "similar": live and bool(self.features),
            "runs": [{"name": run.name, "model": run.model} for run in self.runs],
            "slides": [self.facts(key) for key in range(len(slides))],
            "others": [{"key": key, "id": name} for key, name in self.others().items()] if live else [],
            "labels": live and self.labels,
            "methods": {name: card.title for name, card in CARDS.items()},
            "parts": PARTS,
        }

    def describe(self, key: int) -> dict[str, Any]:
        """Describe a slide, without its scores and pixels."""
        slide_id = self.slide(key)
        about = self.facts(key)
        image, fault = self.pictures.describe(slide_id)
        sets, faults = [], [fault] if fault else []
        for number, run in enumerate(self.runs if key < OTHERS else ()):
            try:
                sets.append(self._set(key, slide_id, number))
            except XmilError as error:
                failed = run.failure(slide_id) if isinstance(error, MissingError) else None
                faults.append(failed or str(error))
        if image:
            faults += self._misfits(key, sets, image["image"])
        facts = ("key", "id", "case", "label", "predicted", "correct", "probability")
        return {
            **{name: about[name] for name in facts},
            "error": " ".join(faults) or None,
            "image": image and image["image"],
            "mpp": next((mpp for mpp in (self._mpp(slide_id), *(s["mpp"] for s in sets)) if mpp), None),
            "magnification": image and image["magnification"],
            "kinds": self.runs[0].names.read()["classes"],
            "sets": sets,
        }

    def _misfits(self, key: int, sets: list[dict[str, Any]], image: dict[str, Any]) -> Iterator[str]:
        """Write a sentence for each run whose patches lie outside the slide, so that one of them is wrong."""
        size = (image["width"], image["height"])
        for run in (entry["run"] for entry in sets if entry["placed"]):
            evidence = self.evidence(key, run)
            inside = count_on(evidence.patches.boxes(), size)
            if inside < evidence.n or evidence.slide_size not in (None, size):
                yield (
                    f"{evidence.n - inside} of {evidence.n} patches of the run {self.runs[run].name!r} lie "
                    f"outside this slide of {size[0]} x {size[1]} px: it is not the slide that was "
                    "explained, or the coordinates have another resolution."
                )

    def _set(self, key: int, slide_id: str, number: int) -> dict[str, Any]:
        run, evidence = self.runs[number], self.evidence(key, number)
        task = TASKS[run.task]
        stored = run.rows.get(slide_id, {}).get(task.noun)
        if task.mean_of == "numbers" and len(evidence.outputs) < len(run.digests):
            numbers = [float(stored)] if stored else []  # older ensembles did not store outputs
        else:
            numbers = [float(value) for value in task.answer(evidence.outputs)]
        names = task.names(len(evidence.logits), run.class_names, run.spec.get("time_bins"))
        verdict = run.verdict
        columns = [
            {**column, "ends": task.short_ends(column["target"]) if column["signed"] else ("low", "high")}
            for column in evidence.columns
        ]
        return {
            "run": number,
            **self._answer(slide_id, run),
            "n": evidence.n,
            "edge": evidence.patch_size,
            "mpp": evidence.mpp,
            "placed": evidence.placed,
            "columns": columns,
            "classes": task.number_names(names),
            "logits": evidence.logits,
            "probabilities": numbers if task.decides else None,
            "value": numbers[0] if not task.decides and len(numbers) == 1 else None,
            "noun": task.noun.capitalize(),
            "sides": task.sides,
            "certificate": self._certificate(key, number),
            "cohort": None if verdict is None else _cohort_verdict(verdict, evidence.columns[0]["target"]),
            "inside": run.find("inside", slide_id) is not None,
            "pairs": bool(run.find_interactions(slide_id)),
            "concepts": run.find("concepts", slide_id) is not None,
        }

    def _of_same_models(self, run: ShownRun) -> list[ShownRun]:
        """List the run, then other runs of the same models on the same bags."""
        mine = run.digests, run.by_case
        same = [other for other in self.runs if other is not run and (other.digests, other.by_case) == mine]
        return [run, *(same if run.digests else ())]

    def _certificate(self, key: int, number: int) -> dict[str, Any] | None:
        """Read a slide's certificate of a run; else that of another run of its models, on maps made alike."""
        slide_id, run = self.slide(key), self.runs[number]
        own = run.certificate(slide_id)
        if own:
            return own
        maps = _makings(self.evidence(key, number))
        for other in self._of_same_models(run)[1:]:
            certificate = other.certificate(slide_id)
            if not certificate:
                continue
            with suppress(XmilError):
                others = _makings(self.evidence(key, self.runs.index(other)))
                alike = {column for column, made in others.items() if maps.get(column) == made}
                methods = [m for m in certificate["methods"] if (m.get("method"), m.get("target")) in alike]
                return {**certificate, "methods": methods}
        return None

    def _answer(self, slide_id: str, run: ShownRun) -> dict[str, Any]:
        """Read label, prediction, probability and correctness of a slide in a run."""
        row = run.rows.get(slide_id, {})
        certificate = self._verdict(slide_id, run)
        stored = {name: row.get(name) or certificate.get(name) for name in ("label", "predicted", "correct")}
        label, predicted = (
            None if stored[name] is None else name_class(str(stored[name]), run.class_names or ())
            for name in ("label", "predicted")
        )
        return {
            "label": label,
            "predicted": predicted,
            "correct": read_truth(stored["correct"]),
            "probability": probability_in(row, predicted),
        }

    def _verdict(self, slide_id: str, run: ShownRun) -> dict[str, Any]:
        """Summarise the slide's certificate of a run or of one of the same models; empty without one.

        A verdict on maps that were made with other parameters is left out.
        """
        for same in self._of_same_models(run):
            verdict = same.slide_verdict(slide_id)
            if verdict:
                method = verdict.get("verdict_method")
                is_own = same.parameters(method) == run.parameters(method)
                return verdict if is_own else {**verdict, **dict.fromkeys(VERDICT)}
        return {}

    def facts(self, key: int) -> dict[str, Any]:
        """Make a slide's row of the list from the first run that has it."""
        slide_id = self.slide(key)
        image, image_error = self.pictures.look(slide_id)
        run = next((run for run in self.runs if slide_id in run.rows), None)
        run = run or next((run for run in self.runs if slide_id in run.slides), self.runs[0])
        verdict = self._verdict(slide_id, run)
        if not verdict.get("verdict"):
            verdict = self._run_verdict(slide_id, run)
        n, error = self._count(slide_id)
        return {
            "key": key,
            "id": slide_id,
            "case": run.rows.get(slide_id, {}).get("case_id") or None,
            **self._answer(slide_id, run),
            **{name: verdict.get(name) for name in VERDICT},
            "n": n,
            "image": image,
            "error": error or image_error,
        }

    def _run_verdict(self, slide_id: str, run: ShownRun) -> dict[str, Any]:
        """Summarise the verdict on a run's maps for one of its slides; empty without one."""
        verdict = run.verdict
        if verdict is None:
            return {}
        target = None
        with suppress(XmilError):
            path = run.find("explanations", slide_id)
            target = None if path is None else self._headers.get(path)[1]
        return {
            "verdict": verdict.kind,
            "verdict_method": verdict.method,
            "verdict_target": target,
            "verdict_cases": len(verdict.cases),
            "verdict_sentence": verdict.sentence,
        }

    def _count(self, slide_id: str) -> tuple[int | None, str | None]:
        """Count a slide's patches in the first run that has it, or return the fault of its files."""
        faults = []
        for run in self.runs:
            try:
                path = run.find("explanations", slide_id)
                if path is not None:
                    return self._headers.get(path)[0], None
                faults.append(run.failure(slide_id) or "")
            except FileError as error:
                faults.append(str(error))
        return None, next((fault for fault in faults if fault), "There is no explanation of this slide.")

    def _mpp(self, slide_id: str) -> float | None:
        image, _ = self.pictures.describe(slide_id)
        return image["mpp"] if image else self._default_mpp


def probability_in(row: Row, predicted: str | None) -> float | None:
    """Read the probability of the predicted class from a slide's row; None if it has none."""
    try:
        return float(row[f"p:{predicted}"])
    except (KeyError, ValueError):
        return None
