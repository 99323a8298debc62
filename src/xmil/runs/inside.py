"""`inside_slides`: map relevance inside the strongest patches of a run's slides.

run.json, slides.csv, failures.csv
<slide_id>.npz       the maps; `xmil.core.inside.Inside.load` reads them
<slide_id>.png       a sheet of the patches with their maps
<slide_id>.geojson   every cell of a map as a tile for QuPath
<slide_id>.ome.tif   the maps in the slide's frame, with `tiff=True`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import Background
from xmil.core.durable import identity
from xmil.core.errors import FileError, InputError, UnsupportedError, name_parameters
from xmil.core.inside import Inside
from xmil.core.request import takes
from xmil.core.text import counted
from xmil.data import feature_files, read_bag
from xmil.data.header import slide_name
from xmil.network import find_device
from xmil.execute import Listener
from xmil.runs.cohort_run import CohortRun, TableRow
from xmil.runs.ensemble import BACKGROUND, load_models, recorded_features, recorded_model
from xmil.runs.inputs import named_slides
from xmil.runs.requests import InsideRequest
from xmil.execute.workers import MakeWorker
from xmil.storage import Run, explained_run, pick_explanation

SUFFIXES = (".npz", ".png", ".geojson", ".ome.tif")


@takes(InsideRequest, "run")
def inside_slides(request: InsideRequest, *, listener: Listener | None = None) -> Run:
    """Map relevance inside the strongest patches of each slide of a run, into RUN/inside or `out`.

    Relevance per feature comes from stored vectors, or else from the `model` on the `features`, by default
    those of the run; without features, patches are encoded again. `map` chooses the kind of map; see
    `xmil.explain_inside`. `tiff` writes the maps as OME-TIFF as well.
    """
    listener = listener or Listener()
    run = request.run if isinstance(request.run, Run) else explained_run(request.run)
    pictures = dict(named_slides(request.slides, follow_links=request.follow_links, say=listener.say).slides)
    if request.model is None and not run.settings.get("params", {}).get("lrp", {}).get("feature_level"):
        request = request.replace(model=recorded_model(run, listener.say))
    if request.model is not None:
        with suppress(InputError):  # without features, patches are encoded again
            request = request.replace(features=request.features or recorded_features(run))
    features = {}
    if request.features is not None:
        features = {slide_name(path): path for path in feature_files(request.features)[0]}
    out = request.out or run.path / "inside"
    inside = InsideRun(out, request, run, find_device(request.place), pictures, features)
    if not inside.items:
        raise InputError(f"{request.slides}: has none of the run's slides; name the folder that was tiled.")
    tally = inside.execute(inside.items, listener)
    listener.say(f"{counted(len(tally.done), 'slide')} examined, {tally}. Written to {out}.")
    return Run(inside.out)


@dataclass(frozen=True)
class InsideRun(CohortRun[str, TableRow]):
    request: InsideRequest
    run: Run
    device: str
    pictures: Mapping[str, Path]
    features: Mapping[str, Path]
    kind = "inside"
    doing = "explaining"
    verb = "looked into"

    @cached_property
    def items(self) -> tuple[str, ...]:
        """The slides of the run whose files exist."""
        return tuple(slide for slide in self.run if slide in self.pictures)

    def settings(self) -> dict[str, Any]:
        request, names = self.request, ("encoder", "patches", "target", "patch_px", "random")
        return {
            **{name: getattr(request, name) for name in names},
            "weights": None if request.weights is None else str(request.weights),
            "method": request.map,
            "device": self.device,
            "of": self.run.about.get("fingerprint"),
        }

    def make_worker(self) -> MakeWorker[str, TableRow]:
        return partial(_make_worker, self)

    def find_result(self, item: str) -> TableRow | None:
        """Read the row of a slide whose maps exist and come from the same explanation."""
        row = self.before.get(item)
        if row is None or row.get("source") != identity(self.run.file(item)):
            return None
        try:
            Inside.load(self.out / f"{item}.npz")
        except FileError:
            return None
        if self.request.tiff and not (self.out / f"{item}.ome.tif").is_file():
            return None
        return dict(row)

    def outputs(self, items: Sequence[str]) -> list[Path]:
        return [self.out / f"{slide}{suffix}" for slide in items for suffix in SUFFIXES]

    def rows_of(self, item: str, result: TableRow) -> list[TableRow]:
        return [{"slide_id": item, **result}]


def _make_worker(run: InsideRun) -> Callable[[str], TableRow]:
    from xmil.encoders import load_encoder

    request, model = run.request, None
    weights = None if request.weights is None else str(request.weights)
    encoder = load_encoder(request.encoder, weights=weights, device=run.device, random=request.random)
    background = Background.load(run.run.path / BACKGROUND)
    if request.model is not None:
        models = load_models(request.model, background, request.features).models
        if len(models) > 1:
            raise InputError(
                f"{run.run.path}: has {len(models)} models, but maps inside patches take one; "
                "explain with `params={'lrp': {'feature_level': True}}` and leave out `model=`."
            )
        model = models[0]
    return lambda slide: _look_into(run, encoder, model, slide, background)


def _look_into(
    run: InsideRun, encoder: Any, model: Any, slide: str, background: Background | None
) -> TableRow:
    from xmil.heatmaps import write_inside_geojson, write_inside_tiff
    from xmil.methods.inside import explain_inside
    from xmil.slides import open_slide

    request = run.request
    e = pick_explanation(run.run.file(slide), "lrp", request.target)
    if model is None and e.relevance is None:
        raise InputError(
            "The run stores no relevance per feature: pass `model=` and `features=`, or explain again with "
            "`params={'lrp': {'feature_level': True}}`."
        )
    bag = read_bag(run.features[slide], request.format) if slide in run.features else None
    with open_slide(run.pictures[slide]) as opened:
        try:
            inside = explain_inside(
                model, encoder, opened, e, patches=request.patches, method=request.map, features=bag,
                patch_px=request.patch_px, background=background,
            )  # fmt: skip
        except UnsupportedError as error:  # runs call the method map=, and have no layer=
            message = name_parameters(str(error), lambda _, value: f"`map={value}`")
            raise UnsupportedError(message, parameter="map") from None
        if e.patches.edge_note is not None:
            inside.warnings.append(e.patches.edge_note)
        inside.save(run.out / f"{slide}.npz")
        inside.plot(opened).write(run.out / f"{slide}.png")
        write_inside_geojson(run.out / f"{slide}.geojson", inside, opened)
        if request.tiff:
            write_inside_tiff(run.out / f"{slide}.ome.tif", inside, opened)
    share = np.abs(inside.audit.spatial).sum() / max(float(np.abs(inside.audit.score).sum()), 1e-12)
    row = {
        "patches": len(inside),
        "places": f"{inside.maps.shape[1]} x {inside.maps.shape[2]}",
        "target": inside.target,
    }
    source = identity(run.run.file(slide))
    return {**row, "spatial_share": float(share), "warnings": " ".join(inside.warnings), "source": source}
