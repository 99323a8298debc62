"""A bundle for machines without internet: `python -m release.bundle` writes dist/xmil-VERSION-offline-*.tar.

It holds the wheel in dist/, the wheels it needs under constraints.txt, their SHA-256, a README and the
Containerfile. The wheels fit the system and the Python that run this; torch is the build that pip's options
lead to (CPU or CUDA): `python -m release.bundle -- --index-url URL`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = "train,slides,encoders,viewer,ray,zarr,export,anndata,dicom,insight"
SUMS = "SHA256SUMS"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
README = """\
# xmil {version}, offline

Wheels for Python {python} on {system}. Without network:

    sha256sum --check --quiet SHA256SUMS
    python{python} -m venv xmil-env
    xmil-env/bin/pip install --no-index --find-links wheels --constraint constraints.txt "xmil[{extras}]"
    xmil-env/bin/xmil doctor

Fewer extras install less: "xmil[slides,viewer]", or xmil alone. torch here is {torch}.
To build an image from the Containerfile, only its base image must be at hand:

    podman build --network none --tag xmil .
"""


def fetch(wheel: Path, folder: Path, extras: str, options: list[str]) -> None:
    """Collect the wheel and all it needs in a folder; what comes as sources alone is built."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--wheel-dir", str(folder), "--constraint", str(ROOT / "constraints.txt"), *options]
    subprocess.run([*command, f"{wheel.resolve()}[{extras}]"], check=True)


def pack(wheels: Path, out: Path, extras: str = EXTRAS) -> Path:
    """Write the bundle of a folder of wheels into `out`; the same wheels give the same bytes."""
    (version,) = (path.name.split("-")[1] for path in wheels.glob("xmil-*.whl"))
    (torch,) = (path.name for path in wheels.glob("torch-*.whl"))
    system = sysconfig.get_platform()
    name = f"xmil-{version}-offline-{system}-py{PYTHON.replace('.', '')}"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, name)
        shutil.copytree(wheels, home / "wheels")
        shutil.copyfile(ROOT / "constraints.txt", home / "constraints.txt")
        recipe = (ROOT / "Containerfile").read_text(encoding="utf-8")
        recipe = recipe.replace("python:3.11-", f"python:{PYTHON}-").replace(EXTRAS, extras)
        (home / "Containerfile").write_text(recipe, encoding="utf-8")
        text = README.format(version=version, python=PYTHON, system=system, extras=extras, torch=torch)
        (home / "README.md").write_text(text, encoding="utf-8")
        write_sums(home)
        out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(out / f"{name}.tar", "w") as archive:  # wheels are compressed already
            for path in sorted(home.rglob("*")):
                archive.add(path, f"{name}/{path.relative_to(home)}", recursive=False, filter=_anonymous)
    return out / f"{name}.tar"


def builds(wheels: Path) -> dict[str, str]:
    """The builds that the versions of torch and torchvision name, such as cpu; empty on the default index."""
    names = [path.name.split("-") for path in wheels.glob("torch*-*.whl")]
    return {parts[0]: parts[1].partition("+")[2] for parts in names if parts[0] in ("torch", "torchvision")}


def write_sums(home: Path) -> None:
    """Write the SHA-256 of every file, as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(home)}\n")
    (home / SUMS).write_text("".join(lines), encoding="utf-8")


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def main() -> None:
    """Pack the wheel in dist/ with what it needs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--extras", default=EXTRAS)
    parser.add_argument("options", nargs="*", help="after --: options of pip, such as --index-url URL")
    args = parser.parse_args()
    (wheel,) = (ROOT / "dist").glob("xmil-*.whl")
    with tempfile.TemporaryDirectory() as folder:
        fetch(wheel, Path(folder), args.extras, args.options)
        if len(set(builds(Path(folder)).values())) > 1:
            print(
                f"Encoders may not load: builds differ, {builds(Path(folder))}; collect both from one index."
            )
        made = pack(Path(folder), args.out, args.extras)
        print(f"{made}: {len(list(Path(folder).iterdir()))} wheels, {made.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
