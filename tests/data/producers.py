"""Small files in each producer's exact layout: names, types, attributes, quirks; one function, one layout.

All of them describe the same slide: six patches with a level-0 edge of 512 px at 0.25 µm/px, so 128 µm.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

EDGE, MPP, EDGE_UM = 512, 0.25, 128.0
XY = np.array([[1024, 512], [1536, 512], [2560, 512], [1024, 1024], [1536, 1024], [1024, 3072]])
N, D = len(XY), 8
BOXES = np.concatenate([XY, XY + EDGE], axis=1)


def features(n: int = N, d: int = D, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(n, d)).astype(dtype)


def _appended(file: h5py.File, name: str, values: np.ndarray, attrs: dict[str, Any] | None = None) -> None:
    """CLAM and TRIDENT write growing datasets, one row to a chunk."""
    shape = values.shape
    dataset = file.create_dataset(
        name, shape=shape, maxshape=(None, *shape[1:]), chunks=(1, *shape[1:]), dtype=values.dtype
    )
    dataset[:] = values
    for key, value in (attrs or {}).items():
        dataset.attrs[key] = "None" if value is None else value


def clam_patches(root: Path, slide: str = "s1", *, level: int = 1, xy: np.ndarray = XY, **more: Any) -> Path:
    """256 px at level 1, whose downsample is not whole: the edge is 256 * int(2.0003)."""
    path = root / "patches" / f"{slide}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    attrs = {
        "patch_size": 256,
        "patch_level": level,
        "downsample": np.array([2.0003, 2.0007]),
        "downsampled_level_dim": np.array([5000, 4000]),
        "level_dim": np.array([5000, 4000]),
        "name": slide,
        "save_path": "somewhere",
        **more,
    }
    with h5py.File(path, "w") as file:
        _appended(file, "coords", xy.astype(np.int64), attrs)
    return path


def clam_features(root: Path, slide: str = "s1", *, xy: np.ndarray = XY) -> Path:
    path = root / "h5_files" / f"{slide}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        _appended(file, "features", features(len(xy)))
        _appended(file, "coords", xy.astype(np.int32))
    return path


def clam_pt(root: Path, slide: str = "s1", *, n: int = N) -> Path:
    path = root / "pt_files" / f"{slide}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(features(n)), path)
    return path


def clam_images(root: Path, slide: str = "s1") -> Path:
    """Old files: 256-px images read at a downsample of 2, corners divided by it."""
    path = root / f"{slide}.h5"
    with h5py.File(path, "w") as file:
        _appended(
            file,
            "imgs",
            np.zeros((N, 256, 256, 3), np.uint8),
            {
                "patch_level": 1,
                "wsi_name": slide,
                "downsample": np.array([2.0, 2.0]),
                "level_dim": [5000, 4000],
            },
        )
        _appended(file, "coords", (XY // 2).astype(np.int32))
    return path


def trident(
    root: Path,
    slide: str = "s1",
    *,
    dtype: Any = np.float32,
    encoder: bool = True,
    empty: str | None = None,
    lead: bool = False,
    level: str = "patch",
) -> Path:
    path = root / "features_uni_v1" / f"{slide}.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    values, coords = features(dtype=dtype), XY.astype(np.int64)
    if empty:
        values, coords = (
            {"(0,)": np.zeros(0, dtype), "(0,D)": np.zeros((0, D), dtype)}[empty],
            np.zeros((0, 2), np.int64),
        )
    if lead:
        values, coords = values[None], coords[None]
    if level == "slide":
        values = values[0]
    about = {"name": slide, "savetodir": "somewhere"}
    with h5py.File(path, "w") as file:
        stored = {**about, **({"encoder": "uni_v1"} if encoder else {})}
        if values.ndim == 1:
            dataset = file.create_dataset("features", data=values)
            dataset.attrs.update(stored)
        else:
            _appended(file, "features", values, stored)
        dataset = file.create_dataset("coords", data=coords)
        for key, value in {**_trident_coords(), **about}.items():
            dataset.attrs[key] = "None" if value is None else value
    return path


def _trident_coords() -> dict[str, Any]:
    return {
        "patch_size": 256,
        "patch_size_level0": EDGE,
        "level0_magnification": 40,
        "target_magnification": 20,
        "overlap": 0,
        "level0_width": 10_000,
        "level0_height": None,  # written as the text 'None'
    }


def trident_patches(root: Path, slide: str = "s1") -> Path:
    path = root / "patches" / f"{slide}_patches.h5"
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        _appended(file, "coords", XY.astype(np.int64), {**_trident_coords(), "name": slide, "savetodir": "x"})
    return path


def trident_pt(root: Path, slide: str = "s1") -> Path:
    """`.pt` mode: a NumPy array, pickled by torch.save."""
    path = root / f"{slide}.pt"
    torch.save(features(), path)
    return path


def stamp2(root: Path, slide: str = "s1", *, version: str = "2.1.0", level: str = "tile") -> Path:
    path = root / f"{slide}.h5"
    with h5py.File(path, "w") as file:
        file["coords"] = (XY * MPP).astype(np.float32)
        file["feats"] = features(dtype=np.float16)
        file.attrs["stamp_version"] = version
        file.attrs["extractor"] = "ctranspath"
        file.attrs["unit"] = "um"
        file.attrs["tile_size_um" if version >= "2.1" else "tile_size"] = EDGE_UM
        file.attrs["tile_size_px"] = 224
        file.attrs["feat_type"] = level
    return path


def marugoto(root: Path, slide: str = "s1", *, augmented: bool = True) -> Path:
    """256-µm tiles as 224 px; every third row is an augmented copy."""
    path = root / f"{slide}.h5"
    grid = (XY // EDGE).astype(np.int64) * 224
    values = features(dtype=np.float16)
    copies = np.zeros(N, bool)
    if augmented:
        grid = np.insert(grid, [2, 4], 0, axis=0)
        values = np.insert(values, [2, 4], 9.0, axis=0)
        copies = np.insert(copies, [2, 4], True)
    with h5py.File(path, "w") as file:
        file["coords"] = grid
        file["feats"] = values
        if augmented:
            file["augmented"] = copies
        file.attrs["extractor"] = "xiyuewang-ctranspath-7c998680"
    return path


def slideflow(
    root: Path, slide: str = "s1", *, tile_um: Any = EDGE_UM, zipped: bool = True, config: bool = True
) -> Path:
    path = root / f"{slide}.pt"
    root.mkdir(parents=True, exist_ok=True)
    torch.save(torch.from_numpy(features(dtype=np.float16)), path)
    centres = (XY + EDGE // 2).astype(np.int64)
    if zipped:
        np.savez(root / f"{slide}.index.npz", centres)
    else:
        np.save(root / f"{slide}.index.npy", centres)
    if config:
        about = {"extractor": {"class": "slideflow.model.extractors.uni.UNIFeatures", "kwargs": {}}}
        text = json.dumps(
            {**about, "normalizer": None, "num_features": D, "tile_px": 256, "tile_um": tile_um}
        )
        (root / "bags_config.json").write_text(text)
    return path


def slide2vec(root: Path, slide: str = "s1", *, container: str = "pt", tiles: bool = True) -> Path:
    """Features under `tile_embeddings`, corners under `tiles`, as `slide2vec` lays them out."""
    path = root / "tile_embeddings" / f"{slide}.{container}"
    path.parent.mkdir(parents=True, exist_ok=True)
    (root / "tiles").mkdir(exist_ok=True)
    numbers = np.arange(N, dtype=np.int32)
    if container == "pt":
        torch.save(torch.from_numpy(features()), path)
    else:
        np.savez_compressed(path, features=features(), tile_index=numbers)
    about = {"sample_id": slide, "artifact_type": "tile_embeddings", "format": container, "feature_dim": D}
    about |= {"num_tiles": N, "encoder_name": "uni", "tile_size_lv0": EDGE, "annotation": None}
    (root / "tile_embeddings" / f"{slide}.meta.json").write_text(json.dumps(about))
    if tiles:
        order = numbers if container == "pt" else numbers[::-1]  # by number, not by place
        xy = XY[order]
        stored = {"tile_index": order, "x": xy[:, 0], "y": xy[:, 1]}
        np.savez(root / "tiles" / f"{slide}.coordinates.npz", **stored, tissue_fractions=np.ones(N))
        size = {"base_spacing_um": MPP, "dimensions": [9000, 8000], "level_downsamples": [1.0]}
        told = {"slide": size, "tiling": {"tile_size_lv0": EDGE, "n_tiles": N}}
        (root / "tiles" / f"{slide}.coordinates.meta.json").write_text(json.dumps(told))
    return path


def tiatoolbox(root: Path, slide: str = "s1") -> Path:
    """Boxes at a reading resolution of half level 0."""
    import zarr

    path = root / f"{slide}.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    for name, values in {"features": features(), "coordinates": (BOXES // 2).astype(np.int64)}.items():
        array = group.create_array(name, shape=values.shape, chunks=(2, values.shape[1]), dtype=values.dtype)
        array[:] = values
    return path


def polygon(x: float, y: float, edge: float) -> bytes:
    """A tile as well-known binary, its ring counter-clockwise from the lower right."""
    ring = [(x + edge, y), (x + edge, y + edge), (x, y + edge), (x, y), (x + edge, y)]
    return struct.pack("<BIII", 1, 3, 1, len(ring)) + b"".join(struct.pack("<dd", *point) for point in ring)


def spatialdata(
    root: Path, slide: str = "s1", *, tables: tuple[str, ...] = ("uni_tiles",), shuffle: bool = True
) -> Path:
    """A store as wsidata writes it; the table's rows are in another order than the tiles."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zarr

    path = root / f"{slide}.zarr"
    store = zarr.open_group(str(path), mode="w", zarr_format=2)
    spec = {
        "height": 256,
        "width": 256,
        "stride_height": 256,
        "stride_width": 256,
        "mpp": 0.5,
        "ops_level": 0,
    }
    spec |= {"ops_downsample": 2.0, "base_level": 0, "base_downsample": 2.0, "tissue_name": "tissues"}
    store.attrs.update({"spatialdata_attrs": {"version": "0.1"}, "tile_spec": {"tiles": spec}})
    order = np.random.default_rng(1).permutation(N) if shuffle else np.arange(N)
    for name in tables:
        table = store.create_group(f"tables/{name}")
        table.attrs.update({"encoding-type": "anndata", "region": "tiles", "instance_key": "tile_id"})
        for key, values in {"X": features()[order], "obs/tile_id": order.astype(np.int64)}.items():
            table.create_array(key, shape=values.shape, chunks=values.shape, dtype=values.dtype)[:] = values
    shapes = store.create_group("shapes/tiles")
    shapes.attrs.update({"encoding-type": "ngff:shapes", "axes": ["x", "y"]})
    tiles = [polygon(x, y, EDGE) for x, y in XY]
    columns = {"tile_id": np.arange(N), "tissue_id": np.zeros(N, np.int64), "geometry": tiles}
    pq.write_table(pa.table(columns), path / "shapes" / "tiles" / "shapes.parquet")
    return path


def gigapath(root: Path, slide: str = "s1") -> Path:
    path = root / f"{slide}.h5"
    with h5py.File(path, "w") as file:
        file["features"] = features()
        file["coords"] = XY.astype(np.int64)
    return path


def wsinfer_h5(root: Path, slide: str = "s1") -> Path:
    path = root / f"{slide}.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("/coords", data=XY.astype(np.int64), compression="gzip")
        dataset.attrs["patch_size"] = EDGE
        dataset.attrs["patch_spacing_um_px"] = 0.5
    return path


def wsinfer_csv(root: Path, slide: str = "s1") -> Path:
    path = root / f"{slide}.csv"
    lines = ["minx,miny,width,height,prob_tumour"]
    lines += [f"{x},{y},{EDGE},{EDGE},0.25" for x, y in XY]
    path.write_text("\n".join(lines) + "\n")
    return path


def paper(root: Path, slide: str = "s1", *, container: str = "pt", table: bool = True) -> Path:
    """Patch numbers with gaps, the table in another order than the features, tuples as text."""
    numbers = [3, 10, 11, 20, 101, 102]
    values = features()
    folder = root / "features"
    folder.mkdir(parents=True, exist_ok=True)
    if container == "pt":
        path = folder / f"{slide}.pt"
        torch.save(torch.from_numpy(values), path)
    elif container == "npz":
        path = folder / f"{slide}.npz"
        np.savez(path, **{str(number): values[i : i + 1] for i, number in reversed(list(enumerate(numbers)))})
    else:
        path = folder / slide
        path.mkdir()
        for number, vector in zip(numbers, values, strict=True):
            torch.save(torch.from_numpy(vector), path / f"{number}.pt")
    if table:
        _paper_table(root / "patches" / slide / "metadata" / "df.csv", numbers)
    return path


def _paper_table(path: Path, numbers: list[int]) -> None:
    path.parent.mkdir(parents=True)
    lines = [",patch_id,position_abs,position_rel,patch_size_abs,annotation_classes"]
    for i in (4, 0, 5, 2, 1, 3):
        x, y = XY[i]
        cells = f'{i},{numbers[i]},"({x}, {y})","({x // EDGE}, {y // EDGE})",{EDGE}'
        lines.append(cells + f',"{{""0"": {1 - i % 2}, ""1"": {i % 2 * 0.5}}}"')
    path.write_text("\n".join(lines) + "\n")


def plain(root: Path, slide: str = "s1", *, container: str = "npy", coords: bool = False) -> Path:
    path = root / f"{slide}.{container}"
    if container == "npy":
        np.save(path, features())
    elif container == "npz":
        np.savez_compressed(path, features=features(), **({"coords": XY} if coords else {}))
    elif coords:
        torch.save({"features": torch.from_numpy(features()), "coords": torch.from_numpy(XY)}, path)
    else:
        torch.save(torch.from_numpy(features()), path)
    return path


# One file of each layout, by the name of its producer: `fuzzing` damages them all.
WRITERS: dict[str, Callable[[Path], Path]] = {
    "clam": clam_features,
    "clam-patches": clam_patches,
    "gigapath": gigapath,
    "trident": trident,
    "trident-float16": lambda root: trident(root, dtype=np.float16),
    "trident-patches": trident_patches,
    "trident-pt": trident_pt,
    "stamp": stamp2,
    "marugoto": marugoto,
    "wsinfer": wsinfer_h5,
    "wsinfer-csv": wsinfer_csv,
    "slideflow": slideflow,
    "slide2vec": slide2vec,
    "paper-npz": lambda root: paper(root, container="npz"),
    "pt": lambda root: plain(root, container="pt", coords=True),
    "npy": plain,
    "npz": lambda root: plain(root, container="npz", coords=True),
    "tiatoolbox": tiatoolbox,
    "spatialdata": spatialdata,
}
