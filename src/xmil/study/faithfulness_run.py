"""A faithfulness run over a cohort: a folder that fills slide by slide and goes on where it stopped.

run.json, failures.csv
slides/<slide_id>.parquet        explanations, as `xmil explain` writes them
results/<slide_id>.parquet       a row for each method and mode, curves included
certificates/<slide_id>.json     and .png
results.parquet, summary.*, statistics.csv, faithfulness.png
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from xmil.core.bag import Bag
from xmil.core.errors import FileError, InputError
from xmil.core.provenance import provenance
from xmil.core.storage import write_atomically, write_explanations
from xmil.data import read_bag
from xmil.data.siblings import is_plain
from xmil.study.faithfulness import Row, Settings, SlideResult, evaluate_slide
from xmil.study.faithfulness_truth import Truth

logger = logging.getLogger(__name__)

KEY = b"xmil-faithfulness"
FOLDERS = ("slides", "results", "certificates")
SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("slide_id", "method", "mode", "verdict", "explained")]
    + [(name, pa.int64()) for name in ("n", "label", "predicted", "target", "flipped")]
    + [(name, pa.bool_()) for name in ("correct", "flipped_at_zero")]
    + [
        (name, pa.float64())
        for name in ("output", "aupc", "srg", "aopc", "sufficiency", "necessity", "at_zero")
    ]
    + [(name, pa.float64()) for name in ("random_aupc", "unexplained")]
    + [(name, pa.float64()) for name in ("auprc2", "auroc2", "ap", "ndcg", "pointing", "mass")]
    + [(name, pa.list_(pa.float64())) for name in ("logits", "morf", "lerf")]
)


@dataclass(frozen=True)
class Slide:
    """A slide of the cohort: its name, feature file and true class, where it is known."""

    slide_id: str
    path: Path
    label: int | None = None


@dataclass
class Outcome:
    """What a run did: slides measured now, found done, and failed with the reason."""

    measured: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A run's folder with its settings; `inputs` (model, features, ...) must stay the same as well."""

    folder: Path
    settings: Settings
    inputs: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """A name for the settings and inputs; results under another one are not mixed in."""
        text = json.dumps(
            {"settings": self.settings.as_dict(), "inputs": self.inputs}, sort_keys=True, default=str
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def prepare(self) -> None:
        """Make the folder and write run.json; a folder with a run of other settings is refused."""
        known = _read_run(self.folder / "run.json")
        if known is not None and known.get("fingerprint") != self.fingerprint:
            raise InputError(
                f"{self.folder}: holds a run with {_differences(known, self)}; choose another --out, "
                "or repeat the command with those settings."
            )
        try:
            for name in FOLDERS:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot be made ({error.strerror}); choose another --out."
            ) from None
        about = {"command": "evaluate", "fingerprint": self.fingerprint, "settings": self.settings.as_dict()}
        _write_json(self.folder / "run.json", {**about, "inputs": self.inputs, **provenance()})

    def measure(
        self,
        model: nn.Module,
        slides: Sequence[Slide],
        *,
        truth: Truth | None = None,
        on_slide: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Measure the slides that have no result yet; one that fails is recorded and the rest goes on."""
        outcome = Outcome()
        for slide in slides:
            if self._done(slide):
                outcome.found.append(slide.slide_id)
            else:
                self._try(model, slide, truth, outcome)
            if on_slide is not None:
                on_slide(slide.slide_id)
        self._write_failures(outcome.failed)
        return outcome

    def rows(self, slides: Sequence[Slide]) -> list[Row]:
        """The rows of the slides that have a result, curves included."""
        tables = [
            pq.read_table(self._result(slide), partitioning=None) for slide in slides if self._done(slide)
        ]
        return [row for table in tables for row in table.to_pylist()]

    def write_results(self, rows: list[Row]) -> None:
        """All rows in one table."""
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        write_atomically(self.folder / "results.parquet", lambda part: pq.write_table(table, part))

    def _try(self, model: nn.Module, slide: Slide, truth: Truth | None, outcome: Outcome) -> None:
        try:
            if not is_plain(slide.slide_id):
                raise InputError(f"The slide_id {slide.slide_id!r} cannot name a file; rename the slide.")
            bag = _named(read_bag(slide.path), slide)
            evidence = None if truth is None else truth.evidence(bag)
            result = evaluate_slide(model, bag, self.settings, label=slide.label, evidence=evidence)
            self._write_slide(slide, result)
            outcome.measured.append(slide.slide_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:  # a slide must not end the run, whatever is wrong with it
            logger.warning("%s failed: %s", slide.slide_id, error)
            logger.debug("%s", slide.slide_id, exc_info=True)
            outcome.failed[slide.slide_id] = " ".join(f"{error}".split()) or type(error).__name__
            self._write_failures(outcome.failed)

    def _write_slide(self, slide: Slide, result: SlideResult) -> None:
        """The result goes last: once it is there, the slide is done."""
        from xmil.study.faithfulness_plots import draw_certificate

        write_explanations(
            result.explanations,
            self.folder / "slides" / f"{slide.slide_id}.parquet",
            provenance={"fingerprint": self.fingerprint, **self.inputs},
        )
        paper = self.folder / "certificates" / slide.slide_id
        _write_json(_with(paper, ".json"), certificate_dict(slide, result))
        draw_certificate(slide.slide_id, result, _with(paper, ".png"))
        table = pa.Table.from_pylist(result.rows, schema=SCHEMA.with_metadata({KEY: self.fingerprint}))
        write_atomically(self._result(slide), lambda part: pq.write_table(table, part, compression="zstd"))

    def _done(self, slide: Slide) -> bool:
        try:
            metadata = pq.read_schema(self._result(slide)).metadata or {}
        except (OSError, pa.ArrowException):
            return False
        return bool(metadata.get(KEY, b"").decode() == self.fingerprint)

    def _result(self, slide: Slide) -> Path:
        return self.folder / "results" / f"{slide.slide_id}.parquet"

    def _write_failures(self, failed: dict[str, str]) -> None:
        def write(part: str) -> None:
            with open(part, "w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream, lineterminator="\n")
                writer.writerow(["slide_id", "error"])
                writer.writerows(failed.items())

        write_atomically(self.folder / "failures.csv", write)


def certificate_dict(slide: Slide, result: SlideResult) -> dict[str, Any]:
    """What a slide's certificate says, in plain types."""
    first = result.rows[0]
    band = {
        name: [round(float(v), 6) for v in getattr(result.band, name)] for name in ("mean", "low", "high")
    }
    return {
        "slide_id": slide.slide_id,
        **{key: first[key] for key in ("n", "label", "predicted", "correct", "explained", "output", "mode")},
        "methods": [certificate.as_dict() for certificate in result.certificates],
        "random_band": band,
    }


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, or of a folder's files by name."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if not files:
        raise FileError(f"{path}: no such file.")
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _named(bag: Bag, slide: Slide) -> Bag:
    from dataclasses import replace

    return bag if bag.slide_id == slide.slide_id else replace(bag, slide_id=slide.slide_id)


def _with(path: Path, suffix: str) -> Path:
    return path.parent / f"{path.name}{suffix}"  # names may hold dots


def _read_run(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise InputError(f"{path}: damaged; remove it, or choose another --out.") from None
    return found if isinstance(found, dict) else {}


def _differences(known: dict[str, Any], run: Run) -> str:
    old = {**known.get("inputs", {}), **known.get("settings", {})}
    new = {**run.inputs, **run.settings.as_dict()}
    changed = [
        f"{key} {old.get(key)!r}"
        for key in new
        if json.dumps(old.get(key)) != json.dumps(new[key], default=str)
    ]
    return "other settings (" + ", ".join(changed) + ")" if changed else "other settings"


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, default=str) + "\n"
    write_atomically(path, lambda part: _put(part, text))


def _put(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
