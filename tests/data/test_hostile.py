"""Files that would run code, leave their folder or take all memory: refused in one sentence with the path."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xmil
from tests.data import producers as p

ROOT = Path(__file__).parents[2]


def refused(path: Path, *words: str, **options: Any) -> str:
    """Reading fails with an error of ours, in one line that names the path, in little memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(xmil.XmilError) as caught:
        xmil.read_bag(path, **options)
    message = str(caught.value)
    assert str(path) in message or str(path.parent) in message
    assert "\n" not in message
    for word in words:
        assert word in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB
    return message


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_damaged_bytes(seed: int, full: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Damaged inputs in a process of their own, over all layouts, tables and explanations."""
    count = 5000 if full else 150
    command = [sys.executable, "-m", "tests.data.fuzzing", str(seed), str(count)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with capsys.disabled():
        print(f"\n[fuzzing, seed {seed}] {done.stdout.strip()}")
    assert done.stdout.startswith(f"{count} inputs tried")


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(min_size=0, max_size=400),
    head=st.sampled_from(
        [b"", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY\x01\0", b"PK\x03\x04", b"\x80\x02", b"slide_id,x\n"]
    ),
    suffix=st.sampled_from([".h5", ".pt", ".npy", ".npz", ".csv", ".zarr", ".bin", ""]),
)
def test_any_bytes_under_any_name(
    data: bytes, head: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / f"s{suffix}"
    path.write_bytes(head + data)
    for read in (xmil.read_bag, xmil.read_cohort):
        try:
            read(path)
        except xmil.XmilError as error:
            assert str(path) in str(error)  # noqa: PT017 - many inputs are read, and that is well


class Payload:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("container", ["zip", "legacy", "pickle", "npy", "npz"])
def test_pickles_with_a_payload_do_not_run(tmp_path: Path, container: str) -> None:
    mark, path = tmp_path / "mark", tmp_path / f"s.{container if container.startswith('np') else 'pt'}"
    payload = Payload(mark)
    if container == "zip":
        torch.save({"features": torch.zeros(2, 3), "extra": payload}, path)
    elif container == "legacy":
        torch.save([payload], path, _use_new_zipfile_serialization=False)
    elif container == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif container == "npy":
        np.save(path, np.array([payload], dtype=object), allow_pickle=True)
    else:
        np.savez(path, features=np.array([payload], dtype=object))
    assert "could run code" in refused(path)
    assert not mark.exists()


def test_zarr_pickle_codec_is_not_used(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = p.tiatoolbox(tmp_path)
    meta = json.loads((path / "features" / ".zarray").read_text())
    for change in ({"filters": [{"id": "pickle"}]}, {"compressor": {"id": "pickle"}}, {"dtype": "|O"}):
        (path / "features" / ".zarray").write_text(json.dumps({**meta, **change}))
        refused(path)


def h5(path: Path, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file[name] = values
    return path


@pytest.mark.parametrize("layout", ["chunked", "filtered", "contiguous"])
def test_huge_declared_h5(tmp_path: Path, layout: str) -> None:
    path = h5(tmp_path / "s.h5", coords=p.XY)
    more = {"chunked": {"chunks": (1, 1024)}, "filtered": {"chunks": (64, 1024), "compression": "gzip"}}.get(
        layout, {}
    )
    with h5py.File(path, "a") as file:
        file.create_dataset("features", shape=(10**9, 1024), dtype="f4", **more)
    assert "'features'" in refused(path)


def test_unfinished_extraction_is_not_read_as_zeros(tmp_path: Path) -> None:
    path = h5(tmp_path / "s.h5", coords=np.zeros((100, 2), int))
    with h5py.File(path, "a") as file:
        features = file.create_dataset(
            "features", shape=(100, 8), maxshape=(None, 8), chunks=(1, 8), dtype="f4"
        )
        features[:40] = 1.0
    refused(path, "declares 3,200 bytes but the file stores 1,280")


def test_a_text_table_of_very_many_columns(tmp_path: Path) -> None:
    """Each column takes more than a kilobyte in a data frame."""
    path = tmp_path / "slides.csv"
    names = "slide_id," + ",".join(map(str, range(10**5)))
    for text in (f"{names}\n{names}\n", f"\n{names}\n{names}\n"):
        path.write_text(text)
        (tmp_path / "run.json").write_text('{"kind": "explain"}')
        for read in (xmil.read_cohort, xmil.read_bag, lambda path: xmil.open_run(path.parent).table()):
            with pytest.raises(xmil.XmilError, match=r"slides\.csv.*100,001 columns"):
                read(path)


def test_huge_declared_npy_and_npz(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**9, 10**6)}
    )
    (tmp_path / "s.npy").write_bytes(header.getvalue())
    refused(tmp_path / "s.npy", "truncated")
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive:
        archive.writestr("features.npy", header.getvalue())
    refused(tmp_path / "s.npz", "truncated")


def test_huge_declared_tensor(tmp_path: Path) -> None:
    torch.save(torch.zeros(1, 1).expand(10**9, 10**3), tmp_path / "s.pt")
    refused(tmp_path / "s.pt", "truncated")
    at = torch.zeros(2, 1, dtype=torch.long)
    torch.save(torch.sparse_coo_tensor(at, [1.0], (10**9, 10**6), check_invariants=True), tmp_path / "t.pt")
    refused(tmp_path / "t.pt")


def test_huge_declared_zarr(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = p.tiatoolbox(tmp_path)
    meta = json.loads((path / "features" / ".zarray").read_text())
    for shape in ([10**12, 1024], [-5, 8], ["x", 8]):
        (path / "features" / ".zarray").write_text(json.dumps({**meta, "shape": shape}))
        refused(path)


def test_zip_bomb(tmp_path: Path) -> None:
    torch.save(torch.zeros(3000, 1000), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as source:
        members = {name: source.read(name) for name in source.namelist()}
    with zipfile.ZipFile(tmp_path / "s.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    refused(tmp_path / "s.pt", "compressed zip")


@pytest.mark.parametrize(
    "coords",
    [
        np.full((p.N, 2), np.nan),
        np.full((p.N, 2), np.inf),
        np.full((p.N, 2), 1e300),
        np.zeros((p.N, 3)),
        np.zeros((2, 2)),
    ],
)
def test_impossible_coordinates(tmp_path: Path, coords: np.ndarray) -> None:
    refused(h5(tmp_path / "s.h5", features=p.features(), coords=coords))


@pytest.mark.parametrize("name", ["features", "coords"])
def test_object_dtypes(tmp_path: Path, name: str) -> None:
    values = {"features": p.features(), "coords": p.XY}
    values[name] = np.array(["text"] * p.N, dtype=object)
    refused(h5(tmp_path / "s.h5", **values), "must hold numbers")
    np.savez(tmp_path / "s.npz", features=np.array(["a", "b"]))
    refused(tmp_path / "s.npz", "must hold numbers")


def test_swapped_datasets(tmp_path: Path) -> None:
    refused(h5(tmp_path / "s.h5", features=p.XY, coords=p.features()))
    refused(h5(tmp_path / "t.h5", feats=p.XY, coords=p.features()))


@pytest.mark.parametrize("kind", ["external link", "soft link", "virtual", "raw"])
def test_h5_does_not_lead_to_other_files(tmp_path: Path, kind: str) -> None:
    secret = h5(tmp_path / "secret.h5", data=p.features())
    path = h5(tmp_path / "s.h5", coords=p.XY)
    with h5py.File(path, "a") as file:
        if kind == "external link":
            file["features"] = h5py.ExternalLink(str(secret), "/data")
        elif kind == "soft link":
            file["features"] = h5py.SoftLink("/nowhere")
        elif kind == "virtual":
            layout = h5py.VirtualLayout((p.N, p.D), "f4")
            layout[:] = h5py.VirtualSource(str(secret), "data", shape=(p.N, p.D))
            file.create_virtual_dataset("features", layout)
        else:
            external = [(str(secret), 0, p.N * p.D * 4)]
            file.create_dataset("features", shape=(p.N, p.D), dtype="f4", external=external)
    refused(path)


def test_symlinks_out_of_a_store_or_folder(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    path = p.tiatoolbox(tmp_path)
    (path / "features" / "9.9").symlink_to(outside)
    refused(path, "a link out of the store")
    folder = p.paper(tmp_path, "s2", container="folder", table=False)
    torch.save(torch.zeros(p.D), tmp_path / "outside.pt")
    (folder / "7.pt").symlink_to(tmp_path / "outside.pt")
    refused(folder, "a link out of the folder")


def test_sibling_links_out_of_the_tree_are_not_followed(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "a" / "b" / "c", tmp_path / "elsewhere"
    path = p.clam_pt(root)
    target = p.clam_features(elsewhere)
    (root / "h5_files").mkdir()
    (root / "h5_files" / "s1.h5").symlink_to(target)
    assert xmil.read_bag(path).coords is None


@pytest.mark.parametrize("name", ["..", "../s1", "a/b", "a\\b", "/etc/passwd"])
def test_slide_names_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    from xmil.data import join_features

    (tmp_path / "features").mkdir()
    p.plain(tmp_path / "features")
    cohort = xmil.Cohort({"slide_id": (name, "s1")})
    with pytest.raises(xmil.XmilError, match="must not hold a path or"):
        join_features(cohort, tmp_path / "features")
    if not Path(name).is_absolute() and "/" in name and ".." in name:
        named = xmil.Cohort({"slide_id": ("s1",), "path": (name,)})
        with pytest.raises(xmil.XmilError, match="must not lead out of the folder"):
            join_features(named, tmp_path / "features")


def test_loops_of_links_and_unreadable_paths(tmp_path: Path) -> None:
    loop = tmp_path / "s.h5"
    loop.symlink_to(loop)
    refused(loop, "a link that leads back to itself; name the file itself")
    refused(tmp_path / "missing.h5", "no such file")
    (tmp_path / "empty.h5").touch()
    refused(tmp_path / "empty.h5", "is empty (0 bytes)")
    refused(Path(f"{tmp_path}/a\0b.h5"))


def test_attribute_heaps_that_hang_hdf5(tmp_path: Path) -> None:
    """A free block of size zero: HDF5 2.0 walks the heap for ever; we do not ask it to."""
    path = p.stamp2(tmp_path)
    data = bytearray(path.read_bytes())
    at = data.index(b"GCOL")
    heap_size = struct.unpack_from("<Q", data, at + 8)[0]
    data[at + 16 : at + heap_size] = bytes(heap_size - 16)
    path.write_bytes(data)
    code = f"import xmil\ntry:\n print(xmil.read_bag({str(path)!r}))\nexcept xmil.XmilError as e:\n print(e)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_text_attributes_are_read_in_both_header_versions(tmp_path: Path) -> None:
    from xmil.data.containers import open_contents

    for version in ("earliest", "latest"):
        path = tmp_path / f"{version}.h5"
        with h5py.File(path, "w", libver=version) as file:
            dataset = file.create_dataset("coords", data=p.XY)
            for i in range(6):
                dataset.attrs[f"text {i}"] = f"wörd {i}" * (i * 50)
                dataset.attrs[f"number {i}"] = i
            file.attrs["none"] = "None"
            file.attrs["fixed"] = np.bytes_(b"abc")
        found = open_contents(path)
        assert (found.attrs["none"], found.attrs["fixed"]) == (None, "abc")
        about = found.arrays["coords"].attrs
        assert [about[f"number {i}"] for i in range(6)] == list(range(6))
        if version == "earliest":  # newer files move many attributes into a dense store, which is left alone
            assert [about[f"text {i}"] for i in range(6)] == [f"wörd {i}" * (i * 50) for i in range(6)]
