"""`inside_slides`: map relevance inside the strongest patches of a run's slides.

run.json, slides.csv, failures.csv
<slide_id>.npz       the maps; `xmil.core.inside.Inside.load` reads them
<slide_id>.png       a sheet of the patches with their maps
<slide_id>.geojson   every cell of a map as a tile for QuPath
<slide_id>.ome.tif   the maps in the slide's frame, with `tiff=True`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.background import Background
from xmil.core.errors import FileError, InputError, UnsupportedError, name_parameters
from xmil.core.inside import Inside
from xmil.core.request import takes
from xmil.core.text import counted
from xmil.data import feature_files, read_bag
from xmil.data.header import slide_name
from xmil.execute import Listener, Step, TableRow, execute
from xmil.network import find_device
from xmil.runs.ensemble import BACKGROUND, load_models, recorded_features, recorded_model
from xmil.runs.inputs import named_slides
from xmil.runs.requests import InsideRequest
from xmil.storage import SLIDES, Item, Record, Run, explained_run, pick_explanation, read_rows


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
    slides = [slide for slide in run if slide in pictures]
    if not slides:
        raise InputError(f"{request.slides}: has none of the run's slides; name the folder that was tiled.")
    inside = Inputs(out, request, run, find_device(request.place), pictures, features)
    files = run.files
    parts = ("maps", "tiff") if request.tiff else ("maps",)
    step = Step(
        "inside",
        [Item(slide, slide, (files.get(slide),), parts=parts, by_time=False) for slide in slides],
        settings=request.with_options(settings_of(inside)),
        make_worker=partial(_make_worker, inside),
        adopt=partial(adopt_maps, out),
        doing="explaining slides",
        verb="examined",
    )
    tally = execute(step, out, workers=request.pool, listener=listener, restart=request.restart)
    listener.say(f"{counted(len(tally.done), 'slide')} examined, {tally}. Written to {out}.")
    return Run(out)


@dataclass(frozen=True)
class Inputs:
    """What all slides share: the explained run, the device, and their pictures and features."""

    out: Path
    request: InsideRequest
    run: Run
    device: str
    pictures: Mapping[str, Path]
    features: Mapping[str, Path]


def settings_of(inputs: Inputs) -> dict[str, Any]:
    """The settings that decide the maps."""
    request, names = inputs.request, ("encoder", "patches", "target", "patch_px", "random")
    return {
        **{name: getattr(request, name) for name in names},
        "weights": None if request.weights is None else str(request.weights),
        "method": request.map,
        "device": inputs.device,
        "of": inputs.run.about.get("fingerprint"),
    }


def adopt_maps(out: Path, item: Item[str]) -> Record | None:
    """Make the record of a slide from its maps and its row in the table, if a run of xmil 0.2 made them."""
    try:
        Inside.load(out / f"{item.key}.npz")
        row = read_rows(out / SLIDES)[item.key]
    except (FileError, KeyError):
        return None
    has_tiff = (out / f"{item.key}.ome.tif").is_file()
    return Record([dict(row)], parts=["maps", "tiff"] if has_tiff else ["maps"], sources=[row.get("source")])


def _make_worker(run: Inputs) -> Callable[[Item[str]], Record]:
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
    return lambda item: Record([_look_into(run, encoder, model, item, background)])


def _look_into(
    run: Inputs, encoder: Any, model: Any, item: Item[str], background: Background | None
) -> TableRow:
    from xmil.heatmaps import write_inside_geojson, write_inside_tiff
    from xmil.methods.inside import explain_inside
    from xmil.slides import open_slide

    request, slide = run.request, item.key
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
    row |= {"spatial_share": float(share), "warnings": " ".join(inside.warnings), "source": item.sources[0]}
    return {"slide_id": slide, **row}
