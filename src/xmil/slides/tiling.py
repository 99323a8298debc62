"""Find tissue on a slide and tile it into patches of one size and resolution.

The grid starts at the corner of the scanned area. A patch is used if enough of it is tissue and its grey
values vary; each is read once.

Tissue is found by Otsu's threshold on the thumbnail and cleaned up (Otsu, "A threshold selection method from
gray-level histograms", IEEE Trans. SMC 9(1), 1979). The thresholded value is the difference between the
background and the darkest colour channel, which detects stained and grey tissue alike. Otsu always splits, so
the threshold is limited to plausible values of glass and stain: a slide without tissue has none, and one
without background is not split in two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from xmil._version import __version__
from xmil.core.durable import create_hdf5, write_atomically, write_text
from xmil.core.errors import FileError, InputError, bad_parameter, check_names
from xmil.slides.artefacts import GREY, KINDS, PatchLook, find_artefacts
from xmil.slides.slide import KEY, Pixels, Slide, frame_header, resize

if TYPE_CHECKING:
    from PIL.Image import Image


Corners = npt.NDArray[np.int64]  # (n, 2): level-0 x, y of the top-left corner

STANDARD = 10.0  # mpp times magnification, by convention: 20x is 0.5 µm/px
ENLARGED = 1.3  # most that patches are enlarged if a slide is coarser than requested
SMALLEST = 0.02  # mm² of a piece of tissue, or a patch's area if that is less
BLOCK = 8  # edge in patches of a block that is read together, so that its patches share decoded tiles
MAGNIFICATIONS = {80: 0.16, 60: 0.2, 40: 0.3, 20: 0.6, 10: 1.2, 5: 2.4}  # up to this mpp


@dataclass(frozen=True)
class TileSettings:
    """Settings of patches. `mpp` is their resolution; `slide_mpp` is used for slides that store none."""

    size: int = 256
    mpp: float = 0.5
    overlap: int = 0
    min_tissue: float = 0.25
    min_std: float = 8.0
    slide_mpp: float | None = None
    magnification: float | None = None
    drop: tuple[str, ...] = ("pen",)  # artefacts that exclude a patch
    keep_edge: bool = False  # keep patches that cross the right and lower border

    def __post_init__(self) -> None:
        for name, least in (("size", 8), ("overlap", 0)):
            if getattr(self, name) < least:
                raise bad_parameter(name, "tile", f"an int in the range [{least}, inf)", getattr(self, name))
        if self.overlap >= self.size:
            raise bad_parameter("overlap", "tile", f"less than the size, {self.size}", self.overlap)
        for name in ("mpp", "slide_mpp", "magnification"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise bad_parameter(name, "tile", "a positive number", value)
        check_names("artefact", self.drop, KINDS)
        if not 0 <= self.min_tissue <= 1:
            raise bad_parameter("min_tissue", "tile", "a number in the range [0, 1]", self.min_tissue)

    @property
    def target_mpp(self) -> float:
        """Microns per pixel of a patch."""
        return self.mpp if self.magnification is None else STANDARD / self.magnification


@dataclass(frozen=True)
class Tiling:
    """The patches of a slide: level-0 corners and edge, with tissue, settings and artefacts."""

    slide_id: str
    xy0: Corners
    edge0: int
    mpp: float
    magnification: float
    dimensions: tuple[int, int]
    tissue: TissueMask
    settings: TileSettings
    inferred: tuple[str, ...] = ()
    origin: tuple[int, int] = (0, 0)  # corner of the scanned bounds
    flat: int = 0  # patches on tissue left out because their grey values hardly vary
    artefacts: Mapping[str, Corners] = field(default_factory=dict)  # patches that show each kind, kept or not

    @property
    def dropped(self) -> dict[str, int]:
        """How many patches show each kind of artefact that excludes them."""
        return {kind: len(self.artefacts.get(kind, ())) for kind in self.settings.drop}


def tile_slide(slide: Slide, settings: TileSettings | None = None) -> Tiling:
    """Find the tissue of a slide and tile it into patches."""
    settings = settings or TileSettings()
    mpp, inferred = known_mpp(slide, settings)
    scale = settings.target_mpp / mpp
    if scale * ENLARGED < 1:
        raise InputError(
            f"{slide.path}: has {mpp:g} µm/px, too coarse for patches at {settings.target_mpp:g}; "
            "pass a larger `mpp=`."
        )
    edge0 = max(1, round(settings.size * scale))
    step0 = max(1, round((settings.size - settings.overlap) * scale))
    corners = grid(slide.bounds, edge0, step0, over=settings.keep_edge)
    if not len(corners):
        width, height = slide.bounds[2:]
        raise FileError(
            f"{slide.path}: its {width} x {height} px are smaller than a patch of {edge0} px; choose a "
            "smaller `size=`, or pass `keep_edge=True`."
        )
    tissue = find_tissue(slide, mpp=mpp, min_area=min(SMALLEST, (edge0 * mpp / 1000) ** 2))
    if not tissue.mask.any():
        raise FileError(f"{slide.path}: no tissue found; the slide is blank or only faintly stained.")
    corners = corners[tissue.shares(corners, edge0) >= max(settings.min_tissue, 1e-9)]
    looks: dict[int, PatchLook] = {}  # of patches whose grey values vary enough
    for i in in_blocks(corners, edge0).tolist():
        patch = read_patch(slide, corners[i], edge0=edge0, size=settings.size)
        if grey_std(patch) >= settings.min_std:
            looks[i] = PatchLook.at(patch)
    if not looks:
        raise FileError(f"{slide.path}: no patch lies on tissue; lower `min_tissue=` or `min_std=`.")
    varying = sorted(looks)
    flat, corners = len(corners) - len(varying), corners[varying]
    artefacts = find_artefacts([looks[i] for i in varying])
    clean = ~np.any([artefacts[kind] for kind in settings.drop] or [np.zeros(len(corners), bool)], axis=0)
    if not clean.any():
        kinds = " and ".join(settings.drop)
        raise FileError(f"{slide.path}: every patch shows {kinds}; keep them with `drop=none`.")
    return Tiling(
        slide.name,
        corners[clean],
        edge0,
        mpp,
        slide.magnification or float(magnification(mpp)),
        slide.dimensions,
        tissue,
        settings,
        inferred,
        slide.bounds[:2],
        flat,
        {kind: corners[mask] for kind, mask in artefacts.items()},
    )


def known_mpp(slide: Slide, settings: TileSettings) -> tuple[float, tuple[str, ...]]:
    """Microns per level-0 pixel, with a note unless it comes from the file; never guessed."""
    if slide.mpp is not None:
        return slide.mpp, ()
    if settings.slide_mpp is not None:
        return settings.slide_mpp, ("mpp as given, not from the file",)
    if settings.magnification is not None and slide.magnification:
        mpp = STANDARD / slide.magnification
        return mpp, (f"mpp {mpp:g} by convention from the objective power {slide.magnification:g}",)
    if slide.mpp_source is not None:
        raise FileError(
            f"{slide.path}: its pixels are {slide.mpp_source}; resample it, or pass `slide_mpp=`."
        )
    power = f" (its objective power is {slide.magnification:g})" if slide.magnification else ""
    raise FileError(f"{slide.path}: stores no microns per pixel{power}; pass `slide_mpp=`.")


def grid(bounds: tuple[int, int, int, int], edge0: int, step0: int, *, over: bool = False) -> Corners:
    """Level-0 corners of all patches inside the bounds (x, y, width, height), row by row.

    `over` adds those that start inside and cross the border, so that they cover all of it.

    >>> grid((10, 0, 600, 300), 256, 256).tolist()
    [[10, 0], [266, 0]]
    >>> grid((10, 0, 600, 200), 256, 256, over=True).tolist()
    [[10, 0], [266, 0], [522, 0]]
    """
    x, y, width, height = bounds
    more = step0 - 1 if over else 0
    columns = np.arange(x, x + width + more - edge0 + 1, step0, dtype=np.int64)
    rows = np.arange(y, y + height + more - edge0 + 1, step0, dtype=np.int64)
    return np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)


def read_patch(slide: Slide, xy0: npt.ArrayLike, *, edge0: int, size: int) -> Pixels:
    """Read one patch: a level-0 square, resized to `size`."""
    x, y = (int(value) for value in np.asarray(xy0))
    return slide.read_area((x, y, edge0, edge0), (size, size))


def magnification(mpp: float) -> int:
    """The nominal magnification of an mpp.

    >>> magnification(0.2457), magnification(0.5), magnification(3.0)
    (40, 20, 2)
    """
    return next((name for name, limit in MAGNIFICATIONS.items() if mpp < limit), 2)


def in_blocks(xy0: Corners, edge0: int) -> npt.NDArray[np.int64]:
    """The order of patches block by block, and row by row inside each."""
    cell = xy0 // max(1, edge0 * BLOCK)
    return np.lexsort((xy0[:, 0], xy0[:, 1], cell[:, 0], cell[:, 1]))


def grey_std(patch: Pixels) -> float:
    """Standard deviation of a patch's grey values, 0 to 255.

    >>> grey_std(np.full((4, 4, 3), (255, 0, 0), dtype=np.uint8))
    0.0
    """
    return float((patch @ GREY.astype(np.float32)).std())


Mask = npt.NDArray[np.bool_]

MASK_MPP, FINEST = 8.0, 2.0  # microns per pixel of the thumbnail; of a small slide's
SHORTEST, LONGEST = 1024, 4096  # pixels of the thumbnail's longer edge
SMOOTH, SPECK = 8.0, 16.0  # microns: blur before the threshold, radius of opening and closing
FAINTEST, STRONGEST = 12.0, 45.0  # grey values below the background: certainly glass, certainly tissue
GLASS = 180.0  # least brightness of background
INK = 20  # pixels darker than this in every channel are fill or ink, not tissue


@dataclass(frozen=True)
class TissueMask:
    """A tissue mask over all of level 0, its thumbnail, and the level-0 pixels per mask pixel."""

    mask: Mask  # (rows, columns)
    picture: Pixels
    scale: tuple[float, float]  # along x, along y

    @property
    def share(self) -> float:
        """The part of the slide that is tissue."""
        return float(self.mask.mean())

    def shares(self, xy0: npt.NDArray[np.int64], edge0: int) -> npt.NDArray[np.float64]:
        """The part of each level-0 square that is tissue, exact to fractions of a mask pixel."""
        total = np.pad(self.mask.astype(np.float64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
        left, top = xy0[:, 0] / self.scale[0], xy0[:, 1] / self.scale[1]
        right, bottom = (xy0[:, 0] + edge0) / self.scale[0], (xy0[:, 1] + edge0) / self.scale[1]

        def up_to(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            sums = ndimage.map_coordinates(total, np.stack([y, x]), order=1, mode="nearest")
            return np.asarray(sums, dtype=np.float64)

        inside = up_to(right, bottom) - up_to(left, bottom) - up_to(right, top) + up_to(left, top)
        return inside / ((right - left) * (bottom - top))


def find_tissue(slide: Slide, *, mpp: float, min_area: float = 0.02) -> TissueMask:
    """Find the tissue of a slide of known mpp; pieces and holes under `min_area` mm² are noise."""
    width, height = slide.dimensions
    microns = max(width, height) * mpp
    longest = min(LONGEST, max(min(SHORTEST, round(microns / FINEST)), round(microns / MASK_MPP), 16))
    picture = slide.thumbnail(longest)
    scale = (width / picture.shape[1], height / picture.shape[0])
    microns = scale[0] * mpp
    mask = tissue_mask(picture, blur=SMOOTH / microns)
    mask = clean_mask(mask, radius=max(1, round(SPECK / microns)), smallest=min_area * 1e6 / microns**2)
    return TissueMask(mask, picture, scale)


def tissue_mask(picture: Pixels, *, blur: float = 1.0) -> Mask:
    """Find the stained pixels of a thumbnail."""
    from skimage.filters import threshold_otsu

    darkest = picture.min(axis=2).astype(np.float32)
    background = max(GLASS, float(np.percentile(darkest, 99)))
    depth = np.asarray(np.clip(background - darkest, 0, None), dtype=np.float32)
    depth = ndimage.gaussian_filter(depth, blur)
    scanned = picture.max(axis=2) >= INK
    if not scanned.any() or float(depth[scanned].max()) < FAINTEST:
        return np.zeros(depth.shape, dtype=np.bool_)
    otsu = float(threshold_otsu(depth[scanned]))  # type: ignore[no-untyped-call, unused-ignore]
    return np.asarray((depth > min(max(otsu, FAINTEST), STRONGEST)) & scanned)


def clean_mask(mask: Mask, *, radius: int = 2, smallest: float) -> Mask:
    """Open away specks, close cracks, fill small holes and drop small pieces."""
    edge = 2 * radius + 1
    padded = np.pad(mask, edge, mode="edge")  # opening would erode the border
    opened = _dilate(~_dilate(~padded, radius / 2), radius / 2)
    smooth = ~_dilate(~_dilate(opened, radius), radius)[edge:-edge, edge:-edge]
    filled = ~_keep_large(~smooth, smallest, connected=2)
    return _keep_large(filled, smallest, connected=1)


def _keep_large(mask: Mask, smallest: float, *, connected: int) -> Mask:
    """Keep the connected pieces with at least `smallest` pixels."""
    labels, count = ndimage.label(mask, ndimage.generate_binary_structure(2, connected))
    if count == 0:
        return mask
    sizes = np.bincount(labels.ravel())
    large = sizes >= max(1.0, smallest)
    large[0] = False
    return np.asarray(large[labels])


def _dilate(mask: Mask, radius: float) -> Mask:
    """Dilate by a disk, through distances, so that the cost does not depend on the radius."""
    if not mask.any():
        return mask
    return np.asarray(ndimage.distance_transform_edt(~mask) <= radius)


Ring = npt.NDArray[np.float64]  # (points, 2): x, y; the last point is the first


def outlines(tissue: TissueMask) -> list[list[Ring]]:
    """The rings of each piece of tissue: its outer border first, then its holes."""
    labels, _ = ndimage.label(tissue.mask)
    return [
        _rings(labels[box] == i, box, tissue) for i, box in enumerate(ndimage.find_objects(labels), start=1)
    ]


def tissue_geojson(
    tissue: TissueMask, *, name: str = "TissueMask", slide: str = "", origin: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """A FeatureCollection of QuPath annotations, with coordinates relative to `origin`."""
    properties = {
        "objectType": "annotation",
        "classification": {"name": name, "color": [0, 160, 80]},
        "isLocked": True,
    }
    shapes = [[(ring - origin).tolist() for ring in rings] for rings in outlines(tissue)]
    polygons = [{"type": "Polygon", "coordinates": shape} for shape in shapes]
    features = [{"type": "Feature", "geometry": shape, "properties": properties} for shape in polygons]
    return {"type": "FeatureCollection", KEY: frame_header(slide, origin), "features": features}


def _rings(mask: Mask, box: tuple[slice, slice], tissue: TissueMask) -> list[Ring]:
    """The rings of one piece, the outer one first, without points on a straight line."""
    from skimage.measure import find_contours

    rings = []
    for contour in find_contours(np.pad(mask, 1).astype(np.float64), 0.5):  # type: ignore[no-untyped-call, unused-ignore]
        ring = contour[:, ::-1] - 1
        step = np.diff(ring, axis=0)
        before = np.roll(step, 1, axis=0)
        turns = np.abs(step[:, 0] * before[:, 1] - step[:, 1] * before[:, 0]) > 1e-9
        corners = ring[:-1][turns]
        rings.append(np.concatenate([corners, corners[:1]]))
    rings.sort(key=lambda ring: -abs(np.sum(ring[:-1, 0] * ring[1:, 1] - ring[1:, 0] * ring[:-1, 1])))
    # the centre of the pixel i lies at i + 1/2
    origin = np.array([box[1].start, box[0].start]) + 0.5
    return [np.round((ring + origin) * tissue.scale, 2) for ring in rings]


PATCHES, CONTOURS, PICTURES = "patches", "contours_geojson", "visualization"
FOLDERS = (PATCHES, CONTOURS, PICTURES)


def patches_file(folder: Path, slide_id: str) -> Path:
    """The file of a slide's patches."""
    return folder / PATCHES / f"{slide_id}_patches.h5"


def write_tiling(tiling: Tiling, folder: Path, *, source: str | None = None, name: str | None = None) -> Path:
    """Write outline, overview and patches, each file atomically.

    `source` is the digest of the slide, `name` its name in the overview.
    """
    for inner in FOLDERS:
        (folder / inner).mkdir(parents=True, exist_ok=True)
    slide_id = tiling.slide_id
    outline = tissue_geojson(tiling.tissue, slide=slide_id, origin=tiling.origin)
    write_text(folder / CONTOURS / f"{slide_id}.geojson", json.dumps(outline))
    picture = overview(tiling, name or slide_id)
    write_atomically(
        folder / PICTURES / f"{slide_id}.png", lambda part: picture.save(part, format="PNG", compress_level=1)
    )
    path = patches_file(folder, slide_id)
    write_atomically(path, lambda part: _write(tiling, part, source))
    return path


def _write(tiling: Tiling, path: str, source: str | None) -> None:
    settings = tiling.settings
    ours = {
        "version": __version__,
        "slide_id": tiling.slide_id,
        "mpp": tiling.mpp,
        "inferred": list(tiling.inferred),
        "extra": {
            "source": source,
            "tissue_share": tiling.tissue.share,
            "flat_patches": tiling.flat,
            "artefacts": {kind: len(corners) for kind, corners in tiling.artefacts.items()},
            "settings": asdict(settings),
        },
    }
    attributes = {  # TRIDENT's, and mpp
        "patch_size": settings.size,
        "patch_size_level0": tiling.edge0,
        "level0_magnification": round(tiling.magnification),
        "target_magnification": round(settings.magnification or STANDARD / settings.mpp),
        "overlap": settings.overlap,
        "level0_width": tiling.dimensions[0],
        "level0_height": tiling.dimensions[1],
        "name": tiling.slide_id,
        "savetodir": PATCHES,
        "mpp": tiling.mpp,
    }
    with create_hdf5(path) as (file, _):
        file.attrs["xmil"] = json.dumps(ours)
        file.create_dataset("coords", data=tiling.xy0).attrs.update(attributes)


OVERVIEW_EDGE = 1800  # pixels
OUTLINE, GRID, TEXT = (0, 140, 60), (30, 60, 200), (20, 20, 20)
ARTEFACTS = {"pen": (230, 80, 0), "fold": (140, 0, 160), "blur": (90, 90, 90), "coverslip": (0, 150, 170)}
CAPTION = 34


def overview(tiling: Tiling, name: str) -> Image:
    """Draw the thumbnail with tissue in green, patches in blue, and a caption.

    Patches with an artefact have its colour, and are crossed out if they are left out.
    """
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    height, width = tiling.tissue.picture.shape[:2]
    scale = OVERVIEW_EDGE / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    fx, fy = size[0] / tiling.dimensions[0], size[1] / tiling.dimensions[1]
    picture = Image.fromarray(resize(tiling.tissue.picture, size))
    draw = ImageDraw.Draw(picture, "RGBA")
    squares = [(xy, GRID, False) for xy in tiling.xy0.tolist()]
    for kind, corners in tiling.artefacts.items():
        squares += [(xy, ARTEFACTS[kind], kind in tiling.settings.drop) for xy in corners.tolist()]
    for (x, y), colour, crossed in squares:
        box = [x * fx, y * fy, (x + tiling.edge0) * fx - 1, (y + tiling.edge0) * fy - 1]
        box[2:] = [max(box[0], box[2]), max(box[1], box[3])]
        draw.rectangle(box, fill=(*colour, 28), outline=(*colour, 200))
        if crossed:
            draw.line(box, fill=(*colour, 220), width=2)
    draw = ImageDraw.Draw(picture)
    for ring in (ring for rings in outlines(tiling.tissue) for ring in rings):
        draw.line([(x * fx, y * fy) for x, y in ring.tolist()], fill=OUTLINE, width=2, joint="curve")
    page = Image.new("RGB", (size[0], size[1] + CAPTION), "white")
    page.paste(picture, (0, CAPTION))
    caption = (
        f"{name}   {len(tiling.xy0):,} patches of {tiling.settings.size} px at "
        f"{tiling.edge0 * tiling.mpp / tiling.settings.size:.3g} µm/px   "
        f"tissue {tiling.tissue.share:.0%} of the slide"
    )
    # DejaVu, which comes with matplotlib, has the letter µ
    font = ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 18)
    draw, left = ImageDraw.Draw(page), 8.0
    draw.text((left, 8), caption, fill=TEXT, font=font)
    left += draw.textlength(caption, font=font) + 24
    for kind, corners in tiling.artefacts.items():
        if len(corners):
            label = f"{kind} {len(corners):,}{' (left out)' if kind in tiling.settings.drop else ''}"
            draw.text((left, 8), label, fill=ARTEFACTS[kind], font=font)
            left += draw.textlength(label, font=font) + 16
    return page
