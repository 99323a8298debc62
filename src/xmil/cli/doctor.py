"""`xmil doctor`: is everything installed, and are results correct?"""

from __future__ import annotations

import io
import os
import platform
import shutil
import sys
import time
import warnings
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from xmil._version import __version__
from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.core.request import Request, option


class DoctorRequest(Request):
    """Check the installation."""

    check: bool = option("Explain tiny models and compare the scores with stored values.", True)


@with_examples("doctor", "doctor --no-check --json")
@command(DoctorRequest)
def doctor(request: DoctorRequest, screen: Screen) -> int:
    """Check the installation: packages, devices, and the scores of tiny models against stored ones.

    The exit code is 0 when all is well, and 1 when a required package is missing or broken or the self-check
    fails. Optional packages may be missing.
    """
    report = diagnosis(check=request.check)
    if screen.as_json:
        import json

        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 1 if report["problems"] else 0


def _print(report: dict[str, Any]) -> None:
    about, machine = report["xmil"], report["machine"]
    commit = f", commit {about['commit'][:10]}" if about["commit"] else ""
    print(f"xmil {about['version']}{commit}, Python {about['python']}")
    memory = "" if machine["memory_gib"] is None else f", {machine['memory_gib']} GiB memory"
    print(f"{machine['system']}, {machine['cores']} cores{memory}, {machine['free_disk_gib']} GiB disk free")
    print("\nDevices")
    for device in report["devices"]:
        size = f", {device['memory_gib']} GiB" if "memory_gib" in device else ""
        print(f"  {device['device']:<10} {device['name']}{size}")
    print("\nRequired packages")
    print("  " + ", ".join(f"{name} {_state(facts)}" for name, facts in report["packages"].items()))
    print("\nOptional packages")
    for name, extra in report["extras"].items():
        print(f"  {name:<9} {extra['state']:<8} {extra['for']}")
        if extra["state"] == "missing":
            absent = [package for package, facts in extra["packages"].items() if facts["version"] is None]
            print(f"  {'':<18} without {', '.join(absent)}: {extra['install']}")
        for package, facts in extra["packages"].items():
            if facts["version"] and facts["error"]:
                hint = MATCH if "torchvision::" in facts["error"] else ""
                print(f"  {'':<18} {package} {facts['version']} does not import: {facts['error']}{hint}")
    library = report["openslide"]
    print(f"  OpenSlide library: {library['version'] or library['error']}")
    check = report["self_check"]
    if check is None:
        print("\nSelf-check: not requested")
    elif check["error"]:
        print("\nSelf-check: failed")
    else:
        share = f"{check['largest_difference']:.1e} (limit {check['tolerance']:.0e})"
        print(f"\nSelf-check: passed, {check['pairs']} pairs of model and method in {check['seconds']} s,")
        print(f"  largest difference from the stored scores {share}")
    for problem in report["problems"]:
        print(f"  to fix: {problem}")


def _state(facts: dict[str, Any]) -> str:
    return "missing" if facts["version"] is None else str(facts["version"]) + " broken" * bool(facts["error"])


MATCH = "; install builds of torch and torchvision that match (both CPU, or both CUDA)"
REQUIRED = {  # distribution -> module
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "scikit-learn": "sklearn",
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "h5py": "h5py",
    "safetensors": "safetensors",
    "captum": "captum",
    "pydantic": "pydantic",
    "typer": "typer",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "pillow": "PIL",
}
EXTRAS: dict[str, tuple[str, dict[str, str]]] = {  # extra -> what it is for, and its packages
    "train": (
        "xmil train: devices, precision, logs",
        {"lightning-fabric": "lightning_fabric", "tensorboard": "tensorboard"},
    ),
    "slides": (
        "xmil tile, heatmaps over slides, the viewer's images",
        {
            "openslide-python": "openslide",
            "openslide-bin": "openslide_bin",
            "tifffile": "tifffile",
            "scikit-image": "skimage",
        },
    ),
    "encoders": (
        "xmil embed with timm and ONNX encoders",
        {"timm": "timm", "torchvision": "torchvision", "onnxruntime": "onnxruntime"},
    ),
    "viewer": ("xmil view", {"starlette": "starlette", "uvicorn": "uvicorn"}),
    "ray": ("runs on many machines (--engine ray)", {"ray": "ray"}),
    "insight": ("survival statistics in xmil insight", {"lifelines": "lifelines"}),
    "export": ("DICOM and Zarr exports (xmil export)", {"highdicom": "highdicom", "zarr": "zarr"}),
    "anndata": ("AnnData exports (xmil export --to anndata)", {"anndata": "anndata"}),
    "dicom": (
        "DICOM, JPEG 2000 and WebP slides",
        {"wsidicom": "wsidicom", "imagecodecs": "imagecodecs"},
    ),
    "zarr": ("Zarr feature files (TIAToolbox, SpatialData)", {"zarr": "zarr"}),
}


def diagnosis(*, check: bool = True) -> dict[str, Any]:
    """Collect the report of `xmil doctor`, in plain types."""
    from xmil.storage import git_commit

    report: dict[str, Any] = {
        "xmil": {"version": __version__, "commit": git_commit(), "python": platform.python_version()},
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_gib": _memory_gib(),
            "free_disk_gib": round(shutil.disk_usage(".").free / 2**30, 1),
            "executable": sys.executable,
        },
        "packages": {name: _package(name, module) for name, module in REQUIRED.items()},
        "extras": {name: _extra(name) for name in EXTRAS},
        "openslide": _openslide(),
        "devices": _devices(),
    }
    tried = report["self_check"] = _self_check() if check else None
    faults = [f"{name}: {about['error']}" for name, about in report["packages"].items() if about["error"]]
    if tried is not None and not tried["passed"]:
        faults.append(f"self-check: {tried['error']}")
    report["problems"] = faults  # without absent optional packages
    return report


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):  # not available on this system
        return None


def _package(name: str, module: str) -> dict[str, Any]:
    """Find a package's version, and the error if it cannot be imported."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return {"version": None, "error": "not installed"}
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import_module(module)
    except Exception as error:  # a broken installation raises almost any type
        return {"version": installed, "error": " ".join(f"{type(error).__name__}: {error}".split())[:200]}
    return {"version": installed, "error": None}


def _extra(name: str) -> dict[str, Any]:
    purpose, packages = EXTRAS[name]
    states = {package: _package(package, module) for package, module in packages.items()}
    absent = [package for package, about in states.items() if about["version"] is None]
    state = "missing" if absent else "broken" if any(p["error"] for p in states.values()) else "ready"
    install = None if state == "ready" else f"pip install 'xmil[{name}]'"
    return {"state": state, "for": purpose, "install": install, "packages": states}


def _openslide() -> dict[str, Any]:
    """Check the library itself, which may be missing although its Python package is installed."""
    try:
        import openslide
    except Exception as error:  # a missing library raises OSError, a missing package ImportError
        return {"version": None, "error": " ".join(str(error).split())}
    return {"version": openslide.__library_version__, "error": None}


def _devices() -> list[dict[str, Any]]:
    try:
        import torch
    except Exception:  # reported with the packages
        return []
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": f"{torch.get_num_threads()} threads"}]
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(i)
        memory = round(about.total_memory / 2**30, 1)
        devices.append({"device": f"cuda:{i}", "name": about.name, "memory_gib": memory})
    return devices


def _self_check() -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        import torch

        from xmil.demo.selfcheck import TOLERANCE, self_check

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # models are too small for several threads
        checks = self_check()
        torch.set_num_threads(threads)
    except Exception as error:  # a broken installation may raise anything
        return {"passed": False, "error": " ".join(f"{type(error).__name__}: {error}".split())}
    wrong = [f"{check.model} {check.method}" for check in checks if not check.passed]
    return {
        "passed": not wrong,
        "error": f"scores differ: {', '.join(wrong)}" if wrong else None,
        "pairs": len(checks),
        "largest_difference": max(check.difference for check in checks),
        "tolerance": TOLERANCE,
        "seconds": round(time.perf_counter() - begin, 2),
    }
