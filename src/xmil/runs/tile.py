"""`tile_slides`: patches on the tissue of many slides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from xmil.core.durable import identity, unchanged
from xmil.core.errors import FileError
from xmil.core.request import takes
from xmil.core.text import counted, merge_notes
from xmil.data import open_bag
from xmil.heatmaps import drawable
from xmil.execute import Listener
from xmil.runs.cohort_run import CohortRun, TableRow
from xmil.runs.inputs import named_slides
from xmil.runs.requests import TileRequest
from xmil.execute.workers import MakeWorker
from xmil.slides import open_slide
from xmil.slides.artefacts import counted_kinds
from xmil.slides.tiling import FOLDERS, TileSettings, patches_file, tile_slide, write_tiling
from xmil.storage import Run, read_run

Item = tuple[str, Path]


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
    run = TileRun(request.out, request, settings, listing.slides)
    earlier = None if request.restart else (read_run(request.out) or {}).get("slide_mpp")
    if earlier is not None and request.slide_mpp not in (None, earlier):
        listener.say(
            f"{request.out}: slides that store no mpp were tiled with `slide_mpp={earlier:g}`; their patches "
            f"are replaced by those of `slide_mpp={request.slide_mpp:g}`."
        )
    tally = run.execute(list(listing.slides.items()), listener, refused=listing.twice)
    for line in merge_notes({name: note for name in tally.done for note in tally.results[name]["inferred"]}):
        listener.say(line)
    if left_out := _left_out([tally.results[name] for name in tally.done]):
        listener.say(left_out)
    patches = counted(sum(tally.results[name]["patches"] for name in tally.done), "patch")
    listener.say(f"{patches} on {counted(len(tally.done), 'slide')}, {tally}. Written to {request.out}.")
    return Run(run.out)


@dataclass(frozen=True)
class TileRun(CohortRun[Item, dict[str, Any]]):
    """A folder of patches.

    A new `slide_mpp` tiles the slides again that do not store theirs.
    """

    chosen: TileSettings
    slides: Mapping[str, Path]
    kind = "tile"
    doing = "tiling"
    folders = FOLDERS
    verb = "used"
    adds = True

    def settings(self) -> dict[str, Any]:
        """Settings of patches, without `slide_mpp`, which a later run may set."""
        values = {key: value for key, value in asdict(self.chosen).items() if key != "slide_mpp"}
        if not self.chosen.keep_edge:  # as in runs of earlier versions
            del values["keep_edge"]
        return values

    def about(self) -> dict[str, Any]:
        """The slides, and `slide_mpp`, by default that of the earlier run."""
        mpp = self.chosen.slide_mpp
        before = None if self.request.restart or mpp is not None else read_run(self.out)
        slide_mpp = mpp if before is None else before.get("slide_mpp")
        return {"slide_mpp": slide_mpp, "slides": {name: str(path) for name, path in self.slides.items()}}

    def outputs(self, items: Sequence[Item]) -> Iterator[Path]:
        """The files of these slides; the folder may hold others."""
        return (patches_file(self.out, name) for name, _ in items)

    def make_worker(self) -> MakeWorker[Item, dict[str, Any]]:
        return partial(partial, _tile, self.chosen, self.out)

    def find_result(self, item: Item) -> dict[str, Any] | None:
        """Find the result of a slide whose patches match its file and `slide_mpp`."""
        path = patches_file(self.out, item[0])
        if not path.is_file():
            return None
        try:
            header = open_bag(path)
            stored = header.extra.get("source")
            if stored is not None and not unchanged(item[1], stored):
                return None
        except FileError:
            return None
        has_mpp = not any(note.startswith("mpp ") for note in header.inferred)
        if self.chosen.slide_mpp is not None and not has_mpp and header.mpp != self.chosen.slide_mpp:
            return None
        return {"patches": len(header), "mpp": header.mpp, "inferred": list(header.inferred)}

    def rows_of(self, item: Item, result: dict[str, Any]) -> list[TableRow]:
        row = {"slide_id": item[0], "n": result["patches"], "mpp": result["mpp"]}
        return [{**row, "slide": str(item[1].absolute())}]


def _left_out(results: Sequence[dict[str, Any]]) -> str:
    """Write a line on patches that `drop` left out."""
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.get("dropped", {}))
    slides = sum(any(result.get("dropped", {}).values()) for result in results)
    if not slides:
        return ""
    dropped = f"{counted_kinds(total)} on {counted(slides, 'slide')}"
    return f"Patches left out: {dropped}; `drop=none` keeps them."


def _tile(settings: TileSettings, out: Path, item: Item) -> dict[str, Any]:
    source = identity(item[1])
    with open_slide(item[1]) as slide:
        tiling = tile_slide(slide, settings)
    name = drawable(tiling.slide_id, own_only=True)
    write_tiling(tiling, out, source=source, name=name)
    facts = {"flat": tiling.flat, "inferred": list(tiling.inferred), "dropped": tiling.dropped}
    return {"patches": len(tiling.xy0), "mpp": tiling.mpp, **facts}
