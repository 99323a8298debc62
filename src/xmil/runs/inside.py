"""`inside_slides`: maps inside the strongest patches of a run's slides.

run.json, slides.csv, failures.csv
<slide_id>.npz       the maps; `xmil.core.inside_patch.Inside.load` reads them
<slide_id>.png       a sheet of the patches with their maps
<slide_id>.geojson   every place as a tile for QuPath
<slide_id>.ome.tif   the maps in the slide's frame, where asked for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import Background
from xmil.core.errors import FileError, InputError
from xmil.core.identity import identity
from xmil.core.inside_patch import Inside
from xmil.core.names import counted
from xmil.core.run import Run, explained_run
from xmil.core.runfiles import SLIDES, read_rows
from xmil.data import feature_files, read_bag
from xmil.data.siblings import slide_name
from xmil.runs.cohort_run import CohortRun, TableRow, as_workers, stopping
from xmil.runs.insight_slide import chosen_explanation, run_models
from xmil.runs.listener import Listener
from xmil.runs.slide_inputs import StrPath, named_slides
from xmil.runs.workers.pool import MakeWorker, Workers

SUFFIXES = (".npz", ".png", ".geojson", ".ome.tif")


def inside_slides(
    run: StrPath | Run,
    *,
    slides: StrPath,
    encoder: str,
    weights: StrPath | None = None,
    model: StrPath | None = None,
    features: StrPath | None = None,
    out: StrPath | None = None,
    patches: int = 16,
    method: str = "turned",
    target: str | int | None = None,
    patch_px: int | None = None,
    device: str = "cpu",
    random: bool = False,
    tiff: bool = False,
    format: str = "auto",  # noqa: A002 - the word users know
    restart: bool = False,
    workers: Workers | int = 1,
    follow_links: bool = True,
    listener: Listener | None = None,
) -> Run:
    """Look inside the strongest patches of every slide of a run of `xmil explain`, into RUN/inside or `out`.

    Relevance per feature comes from stored vectors, else from the `model` on the `features`; without features
    every patch is encoded again. `method` names the maps; see `xmil.explain_inside`. `tiff` writes
    the maps as OME-TIFF as well.
    """
    hear = listener or Listener()
    held = run if isinstance(run, Run) else explained_run(run)
    pictures = dict(named_slides(slides, follow_links=follow_links, say=hear.say).slides)
    choice = InsideChoice(
        encoder, None if weights is None else str(weights), method, patches,
        None if target is None else str(target), patch_px, device, random, tiff,
    )  # fmt: skip
    known = {} if features is None else {slide_name(p): p for p in feature_files(features)[0]}
    place = held.path / "inside" if out is None else Path(out)
    looking = InsideRun(place, held, choice, pictures, known, None if model is None else Path(model), format)
    if not looking.items:
        raise InputError(f"{slides}: holds none of the run's slides; name the folder that was tiled.")
    tally = looking.go(list(looking.items), workers=as_workers(workers), restart=restart, listener=hear)
    hear.say(f"{counted(len(tally.done), 'slide')} examined, {tally}. Written to {place}.")
    return looking.saved()


@dataclass(frozen=True)
class InsideChoice:
    """What is looked at, and by which encoder."""

    encoder: str
    weights: str | None = None
    method: str = "turned"
    patches: int = 16
    target: str | None = None
    patch_px: int | None = None
    device: str = "cpu"
    random: bool = False
    tiff: bool = False


@dataclass(frozen=True)
class InsideRun(CohortRun[str, TableRow]):
    """A folder of maps inside patches."""

    run: Run
    chosen: InsideChoice
    pictures: Mapping[str, Path]
    features: Mapping[str, Path] = field(default_factory=dict)
    model: Path | None = None
    layout: str = "auto"  # of the features
    kind = "inside"
    verb = "looked into"

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The slides of the run whose pictures are at hand."""
        return tuple(slide for slide in self.run if slide in self.pictures)

    def settings(self) -> dict[str, Any]:
        """What decides the maps."""
        decides = {key: value for key, value in vars(self.chosen).items() if key != "tiff"}
        return {**decides, "of": self.run.about.get("fingerprint")}

    def slides_of(self, item: str) -> Sequence[str]:
        """An item is one slide."""
        return (item,)

    def make_worker(self, workers: Workers) -> MakeWorker[str, TableRow]:  # noqa: ARG002 - the base's signature
        """A worker loads encoder and model once."""
        return partial(_make_worker, self)

    @cached_property
    def _earlier(self) -> dict[str, dict[str, str]]:
        return read_rows(self.out / SLIDES)

    def known(self, item: str) -> TableRow | None:
        """The row of a slide whose maps are there and were made of the same explanation."""
        row = self._earlier.get(item)
        if row is None or row.get("source") != identity(self.run.file(item)):
            return None
        try:
            Inside.load(self.out / f"{item}.npz")
        except FileError:
            return None
        if self.chosen.tiff and not (self.out / f"{item}.ome.tif").is_file():
            return None
        return dict(row)

    def outputs(self, items: Sequence[str]) -> list[Path]:
        """What a restart removes."""
        return [self.out / f"{slide}{suffix}" for slide in items for suffix in SUFFIXES]

    def rows_of(self, item: str, result: TableRow) -> list[TableRow]:
        """The slide's row."""
        return [{"slide_id": item, **result}]


def _make_worker(run: InsideRun) -> Callable[[str], TableRow]:
    from xmil.encoders import load_encoder
    from xmil.runs.ensemble import BACKGROUND

    choice = run.chosen
    encoder = load_encoder(choice.encoder, weights=choice.weights, device=choice.device, random=choice.random)
    model = None if run.model is None else _only_model(run.model, run.run.path)
    kept = Background.load(run.run.path / BACKGROUND)
    return lambda slide: _look_into(run, encoder, model, slide, kept)


def _only_model(path: Path, run: Path) -> Any:
    """The model, with the background that the run lent it."""
    models = run_models(path, run)
    if len(models) > 1:
        raise InputError(
            f"{path}: holds {len(models)} models and maps inside patches take one; "
            "explain with --save-vectors and leave out --model."
        )
    return models[0]


def _look_into(
    run: InsideRun, encoder: Any, model: Any, slide: str, background: Background | None
) -> TableRow:
    from xmil.heatmaps.inside_sheet import write_inside_geojson, write_inside_tiff
    from xmil.methods.inside import explain_inside
    from xmil.slides import open_slide

    choice = run.chosen
    e = chosen_explanation(run.run.file(slide), "lrp", choice.target)
    if model is None and e.relevance is None:
        raise InputError(
            "The run holds no relevance per feature: give --model and --features, or explain again with "
            "--save-vectors."
        )
    bag = read_bag(run.features[slide], run.layout) if slide in run.features else None
    with open_slide(run.pictures[slide]) as opened:
        found = explain_inside(
            model, encoder, opened, e, patches=choice.patches, method=choice.method, features=bag,
            patch_px=choice.patch_px, background=background,
        )  # fmt: skip
        stopping(lambda: found.save(run.out / f"{slide}.npz"))
        stopping(lambda: found.plot(opened).write(run.out / f"{slide}.png"))
        stopping(lambda: write_inside_geojson(run.out / f"{slide}.geojson", found, opened))
        if choice.tiff:
            stopping(lambda: write_inside_tiff(run.out / f"{slide}.ome.tif", found, opened))
    told = np.abs(found.audit.spatial).sum() / max(float(np.abs(found.audit.score).sum()), 1e-12)
    row = {
        "patches": len(found),
        "places": f"{found.maps.shape[1]} x {found.maps.shape[2]}",
        "target": found.target,
    }
    source = identity(run.run.file(slide))
    return {**row, "spatial_share": float(told), "warnings": " ".join(found.warnings), "source": source}
