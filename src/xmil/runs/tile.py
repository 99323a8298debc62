"""`tile_slides`: patches on the tissue of many slides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from xmil.core.durable import identity
from xmil.core.errors import FileError
from xmil.core.request import takes
from xmil.core.text import counted, merge_notes
from xmil.data import open_bag
from xmil.execute import Listener, Step, execute
from xmil.heatmaps import drawable
from xmil.runs.inputs import named_slides
from xmil.runs.requests import TileRequest
from xmil.slides import open_slide
from xmil.slides.artefacts import counted_kinds
from xmil.slides.tiling import TileSettings, patches_file, tile_slide, write_tiling
from xmil.storage import Item, Record, Run, read_run, read_what_is_done


@takes(TileRequest, "slides")
def tile_slides(request: TileRequest, *, listener: Listener | None = None) -> Run:
    """Lay patches on the tissue of slides, files or folders, into the folder `out`, as `xmil tile` does.

    `drop` leaves out patches with pen, fold, blur or coverslip (its edge); they are still
    counted and drawn. `keep_edge` adds patches that extend beyond the slide's right and lower border, white
    outside.
    """
    listener = listener or Listener()
    settings = TileSettings(
        request.size, request.mpp, request.overlap, request.min_tissue, request.min_std, request.slide_mpp,
        request.magnification, request.drop, request.keep_edge,
    )  # fmt: skip
    listing = named_slides(request.slides, follow_links=request.follow_links, say=listener.say)
    earlier = None if request.restart else (read_run(request.out) or {}).get("slide_mpp")
    if earlier is not None and request.slide_mpp not in (None, earlier):
        listener.say(
            f"{request.out}: slides that store no mpp were tiled with `slide_mpp={earlier:g}`; their patches "
            f"are replaced by those of `slide_mpp={request.slide_mpp:g}`."
        )
    slides = {name: str(path) for name, path in listing.slides.items()}
    step = Step(
        "tile",
        items_to_tile(listing.slides, request),
        settings=request.with_options(settings_of(settings)),
        about={"slide_mpp": earlier if request.slide_mpp is None else request.slide_mpp, "slides": slides},
        make_worker=partial(partial, tile_one, settings, request.out),
        adopt=partial(adopt_patches, request),
        doing="tiling slides",
        refused=listing.twice,
        adds=True,
    )
    tally = execute(step, request.out, workers=request.pool, listener=listener, restart=request.restart)
    records = {name: tally.records[name] for name in tally.done}
    notes = {name: note for name, record in records.items() for note in record.facts["inferred"]}
    for line in merge_notes(notes):
        listener.say(line)
    left_out = describe_dropped([record.extra for record in records.values()])
    if left_out:
        listener.say(left_out)
    patches = counted(sum(record.facts["patches"] for record in records.values()), "patch")
    listener.say(f"{patches} on {counted(len(tally.done), 'slide')}, {tally}. Written to {request.out}.")
    return Run(request.out)


def settings_of(chosen: TileSettings) -> dict[str, Any]:
    """The settings of patches, without `slide_mpp`, which a later run may set."""
    values = {key: value for key, value in asdict(chosen).items() if key != "slide_mpp"}
    if not chosen.keep_edge:  # as in runs of earlier versions
        del values["keep_edge"]
    return values


def tile_one(settings: TileSettings, out: Path, item: Item[Path]) -> Record:
    """Tile one slide."""
    with open_slide(item.what) as slide:
        tiling = tile_slide(slide, settings)
    name = drawable(tiling.slide_id, own_only=True)
    write_tiling(tiling, out, source=item.sources[0], name=name)
    record = record_of(item, len(tiling.xy0), tiling.mpp, tiling.inferred)
    return replace(record, extra=tiling.dropped)


def record_of(item: Item[Path], patches: int, mpp: float | None, inferred: Sequence[str]) -> Record:
    """Make the record of a slide from its number of patches, its mpp, and what was inferred."""
    row = {"slide_id": item.key, "n": patches, "mpp": mpp, "slide": str(item.what.absolute())}
    return Record([row], {"inferred": list(inferred), "patches": patches, "mpp": mpp})


def items_to_tile(slides: Mapping[str, Path], request: TileRequest) -> list[Item[Path]]:
    """List the slides; those without an mpp are tiled again if another one is given."""
    ledger = read_what_is_done(request.out)
    again = {name for name, record in ledger.records.items() if needs_mpp(record, request.slide_mpp)}
    return [
        Item(name, path, (path,), parts=("mpp",) if name in again else (), by_time=False)
        for name, path in slides.items()
    ]


def adopt_patches(request: TileRequest, item: Item[Path]) -> Record | None:
    """Make the record of a slide from its file of patches, if it has one."""
    path = patches_file(request.out, item.key)
    if not path.is_file():
        return None
    try:
        header = open_bag(path)
        source = header.extra.get("source") or identity(item.what)
    except FileError:
        return None
    record = record_of(item, len(header), header.mpp, header.inferred)
    return None if needs_mpp(record, request.slide_mpp) else replace(record, sources=[source])


def needs_mpp(record: Record | None, slide_mpp: float | None) -> bool:
    """Whether a slide that stores no mpp was tiled with another one than is given."""
    if record is None or slide_mpp is None:
        return False
    facts = record.facts
    return facts.get("mpp") != slide_mpp and any(
        note.startswith("mpp ") for note in facts.get("inferred", ())
    )


def describe_dropped(dropped: Sequence[Mapping[str, int]]) -> str:
    """Write a line on the patches of each slide that `drop` left out; empty if there are none."""
    total: Counter[str] = Counter()
    for counts in dropped:
        total.update(counts)
    slides = sum(any(counts.values()) for counts in dropped)
    if not slides:
        return ""
    patches = f"{counted_kinds(total)} on {counted(slides, 'slide')}"
    return f"Patches left out: {patches}; `drop=none` keeps them."
